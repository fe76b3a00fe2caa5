"""What a `Rotation` is in every framework: cos and sin of tokens, and what they turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, Self, TypeVar, cast

from phasor._checks import short_repr, whole
from phasor.errors import SpecError, TensorError
from phasor.pairings import Pairing, checked_pairing
from phasor.rope import Rope

_Array = TypeVar("_Array")


class RotationOf(Generic[_Array]):
    """Cos and sin ``[..., seq, num_pairs]``, or by head, and the layout; of any arrays.

    Its attributes are not assigned to, so what was found out about them once holds.
    """

    __slots__ = ("cos", "head_dim", "pairing", "pairing_out", "rotary_start", "sin")
    __iter__ = None  # Python would index by 0, 1, 2, ...
    cos: _Array
    sin: _Array
    pairing: Pairing
    pairing_out: Pairing
    rotary_start: int
    head_dim: int | None

    def __init__(
        self,
        cos: _Array,
        sin: _Array,
        *,
        pairing: str,
        pairing_out: str | None = None,
        rotary_start: int = 0,
    ) -> None:
        read = checked_pairing("pairing", pairing)
        written = read if pairing_out is None else checked_pairing("pairing_out", pairing_out)
        self._fill(cos, sin, (read, written, whole("rotary_start", rotary_start, least=0), None))

    @classmethod
    def make(cls, cos: Any, sin: Any, layout: Sequence[Any]) -> Self:
        """One without checks, whose cos and sin may be whatever stands for arrays in a tree."""
        made = cls.__new__(cls)
        made._fill(cos, sin, layout)
        return made

    @classmethod
    def of_rope(cls, cos: Any, sin: Any, rope: Rope) -> Self:
        """That of cos and sin which ``rope`` made."""
        return cls.make(
            cos, sin, (rope.pairing, rope.output_pairing, rope.rotary_start, rope.head_dim)
        )

    def layout(self) -> tuple[Any, ...]:
        """All but cos and sin, as `make` takes it."""
        return self.pairing, self.pairing_out, self.rotary_start, self.head_dim

    def inverse(self) -> Self:
        """The rotation that undoes this one, its factor included."""
        cos, sin = self._values()
        square = cos * cos + sin * sin
        layout = self.pairing_out, self.pairing, self.rotary_start, self.head_dim
        return self.make(cos / square, -sin / square, layout)

    def __getitem__(self, tokens: Any) -> Self:
        """The rotation of some of its tokens: a slice, or indices; of a number, that token alone.

        Raises:
            TensorError: If cos and sin are one's own and could be by head.
        """
        cos, sin = self._values()
        if self.head_dim is None and len(cos.shape) > 2:
            raise TensorError(
                "cos and sin of your own must be indexed before they become a Rotation where they "
                f"could be by head, got shape {list(cos.shape)}"
            )
        if isinstance(tokens, tuple) or tokens is None or tokens is Ellipsis:
            got = short_repr(cast(object, tokens))
            raise TensorError(f"a Rotation is indexed by token alone, got {got}")
        if len(cos.shape) < 2:
            raise TensorError("a Rotation of a single position has no tokens to index")
        if isinstance(tokens, int):
            length = cos.shape[-2]
            if not -length <= tokens < length:
                raise TensorError(f"a Rotation of {length} tokens has no token {tokens}")
            tokens = slice(tokens, tokens + 1 or None)
        # [..., seq, num_pairs] -> [..., some, num_pairs]
        return self.make(cos[..., tokens, :], sin[..., tokens, :], self.layout())

    def __repr__(self) -> str:
        cos, _ = self._values()
        out = "" if self.pairing_out == self.pairing else f", pairing_out={self.pairing_out!r}"
        start = f", rotary_start={self.rotary_start}" if self.rotary_start else ""
        width = "" if self.head_dim is None else f", head_dim={self.head_dim}"
        dtype = str(cos.dtype).rpartition(".")[2]
        return (
            f"Rotation(cos and sin {list(cos.shape)} {dtype}, "
            f"pairing={self.pairing!r}{out}{start}{width})"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).make, (self.cos, self.sin, self.layout())

    def __setattr__(self, name: str, value: object) -> None:
        raise SpecError(f"a Rotation does not change; make another one with that {name}")

    def _fill(self, cos: Any, sin: Any, layout: Sequence[Any]) -> None:
        read, written, rotary_start, head_dim = layout
        fill = object.__setattr__  # one by one: a loop takes longer than a layer's turn saves
        fill(self, "cos", cos)
        fill(self, "sin", sin)
        fill(self, "pairing", read)
        fill(self, "pairing_out", written)
        fill(self, "rotary_start", rotary_start)
        fill(self, "head_dim", head_dim)

    def _values(self) -> tuple[Any, Any]:
        """Cos and sin, of whose type no more is known than that they are arrays."""
        return self.cos, self.sin
