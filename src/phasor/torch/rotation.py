"""`Rotation`: the rotation of some tokens, made once in a forward pass and used in every layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor

from phasor import _tensors
from phasor._checks import number, short_repr
from phasor._rotation import RotationOf
from phasor.errors import SpecError, TensorError
from phasor.rope import Rope
from phasor.torch._operator import ops
from phasor.torch._operator.arguments import ARRAYS, Layout, Rows, tokens_first, turn_of
from phasor.torch._operator.in_place import check_different
from phasor.torch._operator.internals import (
    is_direct,
    refuse_tracing,
    register_pytree,
)
from phasor.torch._operator.text import attention_factor

#: The dtypes of cos and sin that are computed here.
DTYPES = torch.float32, torch.float64


class Rotation(RotationOf[Tensor]):
    """The rotation ``R(p)`` of each token of a sequence: cos and sin, and how they are applied.

    Make one from positions with `at`, once in a forward pass, and call it in every layer. It holds
    the pairing, the slice and the attention factor of its Rope, so they cannot be mixed up. It is a
    pytree: checkpointing, ``torch.compile``, ``torch.export``, ``vmap``, pickle and functions that
    move tensors to a device accept it like two tensors.

    Args:
        cos: By token, ``[..., seq, num_pairs]``, with fewer dimensions than the rotated tensor, and
            broadcast against its leading ones; or by token and head, ``[..., seq, heads or 1,
            num_pairs]``, with as many dimensions as the rotated tensor. There is one number per
            pair: take ``cos[..., :num_pairs]`` of a full-width table in the half pairing. Any
            floating dtype; float64 is rounded to float32 first, unless the rotated tensor is
            float64. Gradients reach it.
        sin: The same shape.
        pairing: ``"half"`` or ``"interleaved"``.
        pairing_out: Pairing of the result if it differs.
        rotary_start: Where the rotated slice begins inside the head.

    Attributes:
        cos: As passed, or from `at` with the attention factor included.
        sin: The same shape.
        pairing: The pairing of the input.
        pairing_out: The pairing of the result.
        rotary_start: The first coordinate of the rotated slice.
        head_dim: Width of the heads that it rotates; None if you passed cos and sin yourself.

    Raises:
        TensorError: If cos and sin are not two tensors of the same shape.
        SpecError: If a pairing is unknown, or ``rotary_start`` is not a whole number from 0 on.

    >>> import torch
    >>> from phasor import Rope
    >>> rope = Rope(head_dim=64, pairing="half", base=500_000.0)
    >>> rotation = Rotation.at(torch.arange(16), rope)
    >>> q, k = torch.randn(2, 16, 8, 64), torch.randn(2, 16, 2, 64)
    >>> rotated_q, rotated_k = rotation(q, k)
    >>> back = rotation.inverse()(rotated_q)
    >>> bool(torch.allclose(back, q, atol=1e-5))
    True
    >>> last = rotation[-1:](q[:, -1:])
    >>> torch.equal(last, rotated_q[:, -1:])
    True
    >>> x = torch.tensor([1.0, 0.0]).reshape(1, 1, 2)
    >>> Rotation(torch.tensor([[0.6]]), torch.tensor([[0.8]]), pairing="half")(x).flatten()
    tensor([0.6000, 0.8000])
    """

    __slots__ = ("_rows",)
    _rows: Rows | None

    def __init__(
        self,
        cos: Tensor,
        sin: Tensor,
        *,
        pairing: str,
        pairing_out: str | None = None,
        rotary_start: int = 0,
    ) -> None:
        ARRAYS.check_rows(cos, sin)
        layout: dict[str, Any] = {"pairing": pairing, "pairing_out": pairing_out}
        super().__init__(cos, sin, rotary_start=rotary_start, **layout)

    @classmethod
    def at(
        cls,
        positions: Any,
        rope: Rope,
        *,
        gain: float | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Rotation:
        """The rotation of tokens at ``positions`` by ``rope``, its attention factor included.

        Cos and sin are within `phasor.angles.COS_SIN_ERROR_FLOAT32` (or `COS_SIN_ERROR`) of the
        real numbers at every int64 position, on every device. Nothing is kept between calls.

        Args:
            positions: As for `rotate`. Cos and sin are on their device, or on torch's default
                device for numbers and arrays.
            rope: As for `rotate`.
            gain: Multiplied into cos and sin; ``rope.attention_factor`` if None.
            dtype: float32, or float64 to rotate tensors that are float64.

        Raises:
            PositionError: As for `rotate`.
            SpecError: If ``rope.scaling`` is a rule (use ``rope.at(seq_len)``), or for any other
                ``dtype``.

        >>> import torch
        >>> from phasor import Rope
        >>> Rotation.at(torch.arange(16), Rope(head_dim=64, pairing="half"))
        Rotation(cos and sin [16, 32] float32, pairing='half', head_dim=64)
        """
        check_dtype(dtype)
        if type(rope) is Rope and type(positions) is Tensor:
            text = rope.to_json()
            applied = attention_factor(text) if gain is None else gain
            if (rows := ops.try_rows(positions, text, applied, dtype)) is not None:
                rotation = cls.make(rows.cos, rows.sin, (*rows.layout, rows.head_dim))
                object.__setattr__(rotation, "_rows", rows)
                return rotation
        _tensors.check_rope(rope, positions=positions)
        refuse_tracing()
        text = rope.to_json()
        gain = attention_factor(text) if gain is None else number("gain", gain)
        device = positions.device if isinstance(positions, Tensor) else torch.empty(0).device
        positions = ARRAYS.read_positions(positions, rope, device)
        cos, sin = ops.cos_sin(positions, text, gain, dtype)
        return cls.of_rope(cos, sin, rope)

    @classmethod
    def from_angles(
        cls,
        angles: Tensor,
        *,
        pairing: str,
        pairing_out: str | None = None,
        rotary_start: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> Rotation:
        """The rotation by angles that you computed, such as learned ones or sums over the input.

        Cos and sin are computed in float64, so they are within 6e-8 of those of the given angles,
        however large. A float32 angle is itself only known to within 6e-8 of its size: compute long
        sums and products with positions in float64 (see `phasor.torch.papers.wrapped_cumsum`).

        Args:
            angles: Radians, float32 or float64, with one number per pair: by token, ``[..., seq,
                num_pairs]``, or by token and head, ``[..., seq, heads or 1, num_pairs]``, as for
                cos and sin. Gradients reach them.
            pairing: ``"half"`` or ``"interleaved"``.
            pairing_out: Pairing of the result if it differs.
            rotary_start: Where the rotated slice begins inside the head.
            dtype: Of cos and sin: float32, or float64 to rotate tensors that are float64.

        Raises:
            TensorError: If ``angles`` is not a float32 or float64 tensor.
            SpecError: If a pairing is unknown, or for any other ``dtype``.

        >>> import torch
        >>> inv_freq = torch.tensor([1.0, 0.01], requires_grad=True)
        >>> angles = torch.arange(5)[:, None] * inv_freq
        >>> rotation = Rotation.from_angles(angles, pairing="half")
        >>> rotation(torch.ones(5, 1, 4)).sum().backward()
        >>> inv_freq.grad
        tensor([-0.1124, -0.5999])
        """
        check_dtype(dtype)
        ARRAYS.check_array("angles", angles, "[..., seq, num_pairs]", 1)
        if angles.dtype not in DTYPES:
            raise TensorError(
                f"angles must be float32 or float64, got {angles.dtype}, which is too coarse "
                "beyond a few turns; convert the numbers that the angles are computed from"
            )
        angles = angles.double()
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        return cls(cos, sin, pairing=pairing, pairing_out=pairing_out, rotary_start=rotary_start)

    @overload
    def __call__(
        self, x: Tensor, /, *, heads_first: bool = False, backend: str = "auto"
    ) -> Tensor: ...

    @overload
    def __call__(
        self, q: Tensor, k: Tensor, /, *, heads_first: bool = False, backend: str = "auto"
    ) -> tuple[Tensor, Tensor]: ...

    def __call__(
        self, *xs: Tensor, heads_first: bool = False, backend: str = "auto"
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Rotate one tensor, or a query and a key of the same tokens, into new tensors.

        Args:
            xs: ``[..., seq, heads, head_dim]`` each: float64, float32, bfloat16 or float16, any
                strides.
            heads_first: Whether they are ``[..., heads, seq, head_dim]``; the shape of cos and sin
                does not change.
            backend: As for `rotate`.

        Returns:
            Rotated tensors with the shapes, dtypes and strides of ``xs``. The backward pass needs
            only cos and sin.

        Raises:
            TensorError: If a tensor does not fit the rotation, or has a dtype that cannot be
                rotated.
            BackendError: If the named backend does not exist, or cannot rotate them.
        """
        ys = self._turn(xs, heads_first, backend, in_place=False)
        return ys[0] if len(xs) == 1 else (ys[0], ys[1])

    @overload
    def rotate_(
        self, x: Tensor, /, *, heads_first: bool = False, backend: str = "auto"
    ) -> Tensor: ...

    @overload
    def rotate_(
        self, q: Tensor, k: Tensor, /, *, heads_first: bool = False, backend: str = "auto"
    ) -> tuple[Tensor, Tensor]: ...

    def rotate_(
        self, *xs: Tensor, heads_first: bool = False, backend: str = "auto"
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Rotate in place: returns its arguments, and changes nothing else in their storage.

        Raises:
            TensorError: As for a call, or if elements share memory with each other, cos or sin.
        """
        check_different(xs)
        self._turn(xs, heads_first, backend, in_place=True)
        return xs[0] if len(xs) == 1 else (xs[0], xs[1])

    def inverse(self) -> Rotation:
        """The rotation that undoes this one, its factor included.

        >>> import torch
        >>> wide = Rotation(torch.tensor([0.0]), torch.tensor([2.0]), pairing="half")
        >>> wide.inverse().sin
        tensor([-0.5000])
        """
        return super().inverse()

    def _turn(
        self, xs: Sequence[Tensor], heads_first: bool, backend: str, *, in_place: bool
    ) -> Sequence[Tensor]:
        """The rotated tensors in the caller's layout; in place, the arguments themselves."""
        if not 0 < len(xs) < 3:
            _tensors.check_one_or_two("a Rotation", len(xs))
        views, outs = tokens_first(xs, heads_first) if heads_first is not False else xs, None
        if is_direct(views):
            rows = self._rows or self._make_rows()
            outs = ops.try_turn(views, rows, backend, in_place)
        if outs is None:
            fields = self.cos, self.sin, self._layout(), self.head_dim
            call = turn_of(xs, *fields, heads_first, backend)
            outs = ops.turn(call, in_place=in_place)
            if call.xs[0].dim() > xs[0].dim():
                # [..., seq, heads, 1, head_dim] where cos and sin are by head
                outs = [y.squeeze(-2) for y in outs]
        # [..., seq, heads, head_dim] -> [..., heads, seq, head_dim]
        return [y.transpose(-3, -2) for y in outs] if heads_first else outs

    def _layout(self) -> Layout:
        return Layout(self.pairing, self.pairing_out, self.rotary_start)

    def _make_rows(self) -> Rows:
        """Wrap cos and sin, at the first call, for all calls that bypass the dispatcher."""
        cos, sin = self.cos, self.sin
        are_plain = type(cos) is type(sin) is Tensor and not (cos.is_neg() or sin.is_neg())
        layout = self._layout(), self.head_dim
        rows = Rows(cos, sin, *layout, cos.device.type, are_plain=are_plain)
        object.__setattr__(self, "_rows", rows)
        return rows

    def _fill(self, cos: Any, sin: Any, layout: Sequence[Any]) -> None:
        super()._fill(cos, sin, layout)
        object.__setattr__(self, "_rows", None)


def check_dtype(dtype: torch.dtype) -> None:
    """Refuse any dtype of cos and sin but float32 and float64."""
    if dtype not in DTYPES:
        raise SpecError(
            f"dtype must be torch.float32 or torch.float64, got {short_repr(dtype)}; tensors "
            "of 16 bits are rotated by float32"
        )


register_pytree(Rotation, names=("cos", "sin"), context=Rotation.layout, make=Rotation.make)
