"""The base class of `Rotation` in every framework: cos and sin of tokens, and the layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, Self, TypeVar, cast

from phasor._checks import short_repr, whole
from phasor.errors import SpecError, TensorError
from phasor.pairings import Pairing, checked_pairing
from phasor.rope import Rope

_Array = TypeVar("_Array")


class RotationOf(Generic[_Array]):
    """Cos and sin ``[..., seq, num_pairs]``, or by head, and the layout of the pairs they rotate.

    Attributes cannot be assigned, so a check that passed once stays valid.
    """

    __slots__ = ("cos", "head_dim", "pairing", "pairing_out", "rotary_start", "sin")
    __iter__ = None  # otherwise Python would iterate by indexing with 0, 1, 2, ...
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
        """A rotation without checks: in a pytree, cos and sin may be placeholders."""
        rotation = cls.__new__(cls)
        rotation._fill(cos, sin, layout)
        return rotation

    @classmethod
    def of_rope(cls, cos: Any, sin: Any, rope: Rope) -> Self:
        """The rotation of cos and sin that were computed from ``rope``."""
        return cls.make(
            cos, sin, (rope.pairing, rope.output_pairing, rope.rotary_start, rope.head_dim)
        )

    def layout(self) -> tuple[Any, ...]:
        """The layout that `make` takes."""
        return self.pairing, self.pairing_out, self.rotary_start, self.head_dim

    def inverse(self) -> Self:
        """The rotation that undoes this one, its factor included."""
        cos, sin = self._values()
        square = cos * cos + sin * sin
        layout = self.pairing_out, self.pairing, self.rotary_start, self.head_dim
        return self.make(cos / square, -sin / square, layout)

    def __getitem__(self, tokens: Any) -> Self:
        """The rotation of some of the tokens: a slice, indices, or one number.

        Raises:
            TensorError: If you passed cos and sin yourself and they could be by head.
        """
        cos, sin = self._values()
        if self.head_dim is None and len(cos.shape) > 2:
            raise TensorError(
                "index cos and sin before you make a Rotation of them: with more than two "
                f"dimensions they could be by head, got shape {list(cos.shape)}"
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
        output = "" if self.pairing_out == self.pairing else f", pairing_out={self.pairing_out!r}"
        start = f", rotary_start={self.rotary_start}" if self.rotary_start else ""
        width = "" if self.head_dim is None else f", head_dim={self.head_dim}"
        dtype = str(cos.dtype).rpartition(".")[2]
        return (
            f"Rotation(cos and sin {list(cos.shape)} {dtype}, "
            f"pairing={self.pairing!r}{output}{start}{width})"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).make, (self.cos, self.sin, self.layout())

    def __setattr__(self, name: str, value: object) -> None:
        raise SpecError(f"a Rotation is immutable; make a new one with that {name}")

    def _fill(self, cos: Any, sin: Any, layout: Sequence[Any]) -> None:
        read, written, rotary_start, head_dim = layout
        fill = object.__setattr__
        # unrolled: a loop costs more than sharing the rotation saves in a layer
        fill(self, "cos", cos)
        fill(self, "sin", sin)
        fill(self, "pairing", read)
        fill(self, "pairing_out", written)
        fill(self, "rotary_start", rotary_start)
        fill(self, "head_dim", head_dim)

    def _values(self) -> tuple[Any, Any]:
        """Cos and sin, typed as Any."""
        return self.cos, self.sin
