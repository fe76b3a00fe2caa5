"""The rotation in MLX: pure functions, and a module that replaces a model's ``nn.RoPE``.

Angles are exact at every int64 position, by the formula of `phasor.angles` in 64-bit integers.
Arithmetic is float32, with one rounding at the end. ``mx.compile``, ``mx.grad`` and ``mx.vmap``
work; eager calls also run fused, compiled functions.
"""

from __future__ import annotations

from functools import partial
from typing import Any, overload

from phasor import _tensors
from phasor._angle_words import partner_arguments, partner_rows
from phasor._checks import number
from phasor._rotation import RotationOf
from phasor.angles import as_positions
from phasor.errors import missing
from phasor.pairings import by_pairing
from phasor.rope import Rope

try:
    import mlx.core as mx
    from mlx import nn
except ModuleNotFoundError as error:
    raise missing("mlx", error) from None

_stop_gradient = mx.custom_function(mx.stop_gradient)
_stop_gradient.vjp(_tensors.refuse_position_gradient)
_ARRAYS = _tensors.Arrays(
    kind=mx.array,
    name="an mlx.core.array",
    dtypes=(mx.float32, mx.bfloat16, mx.float16),
    position_dtypes=[getattr(mx, name) for name in _tensors.POSITION_DTYPES],
    stop_gradient=_stop_gradient,
    read_host=lambda positions, _device: as_positions(positions),
)
_rows = mx.compile(partial(partner_rows, xp=mx))


def rotate(
    x: mx.array,
    positions: Any,
    rope: Rope,
    *,
    inverse: bool = False,
    gain: float | None = None,
    heads_first: bool = False,
) -> mx.array:
    """``R(p) x`` for every token (RoFormer 2104.09864, eq. 34), like `phasor.torch.rotate`.

    ``x`` is float32, bfloat16 or float16, ``[..., seq, heads, head_dim]``; ``positions`` are
    integers, float32 or float64. NumPy arrays and Python numbers keep all their digits. In an MLX
    array a float that is NaN or beyond int64 makes its token NaN; elsewhere it is refused.

    >>> rope = Rope(head_dim=4, pairing="half", base=100.0)
    >>> rotate(mx.array([[[1.0, 1.0, 0.0, 0.0]]]), 2**40, rope)
    array([[[-0.914004, 0.0417629, -0.405705, -0.999128]]], dtype=float32)
    """
    return _rotate([x], positions, rope, inverse, gain, heads_first)[0]


def rotate_qk(
    q: mx.array,
    k: mx.array,
    positions: Any,
    rope: Rope,
    *,
    inverse: bool = False,
    gain: float | None = None,
    heads_first: bool = False,
) -> tuple[mx.array, mx.array]:
    """Query and key of the same tokens, rotated as in `rotate` with shared cos and sin.

    >>> q, k = mx.ones((5, 4, 8)), mx.ones((5, 2, 8))
    >>> [y.shape for y in rotate_qk(q, k, mx.arange(5), Rope(head_dim=8, pairing="half"))]
    [(5, 4, 8), (5, 2, 8)]
    """
    q, k = _rotate([q, k], positions, rope, inverse, gain, heads_first)
    return q, k


class Rotation(RotationOf[mx.array]):
    """The rotation ``R(p)`` of each token of a sequence, like `phasor.torch.Rotation`.

    `at` makes one from positions, once in a forward pass; every layer calls it.

    Args:
        cos: By token, ``[..., seq, num_pairs]``, or by head, ``[..., seq, heads or 1, num_pairs]``,
            also with heads first; gradients reach it.
        sin: The same shape.
        pairing: ``"half"`` or ``"interleaved"``.
        pairing_out: Pairing of the result if it differs.
        rotary_start: Where the rotated slice begins inside the head.

    >>> rotation = Rotation.at(mx.arange(5), Rope(head_dim=8, pairing="half"))
    >>> q, k = rotation(mx.ones((5, 4, 8)), mx.ones((5, 2, 8)))
    >>> mx.allclose(rotation.inverse()(q), mx.ones((5, 4, 8)), atol=1e-5).item()
    True
    """

    __slots__ = ()

    def __init__(
        self,
        cos: mx.array,
        sin: mx.array,
        *,
        pairing: str,
        pairing_out: str | None = None,
        rotary_start: int = 0,
    ) -> None:
        _ARRAYS.check_rows(cos, sin)
        layout: dict[str, Any] = {"pairing": pairing, "pairing_out": pairing_out}
        super().__init__(cos, sin, rotary_start=rotary_start, **layout)

    @classmethod
    def at(cls, positions: Any, rope: Rope, *, gain: float | None = None) -> Rotation:
        """The rotation of tokens at ``positions`` by ``rope``, its attention factor included.

        Cos and sin are float32, within `phasor.angles.COS_SIN_ERROR_FLOAT32` of the real numbers at
        every int64 position. ``positions`` are as for `rotate`. Cos and sin are multiplied by
        ``gain``, or by ``rope.attention_factor`` if it is None.

        >>> Rotation.at(1, Rope(head_dim=2, pairing="half")).sin
        array([0.841471], dtype=float32)
        """
        _tensors.check_rope(rope, positions=positions)
        gain = rope.attention_factor if gain is None else number("gain", gain)
        arguments = partner_arguments(_ARRAYS.read_positions(positions, rope), rope, gain, mx)
        cos, sin = _rows(*arguments, axis=-2, heads_first=False, inverse=False)
        return cls.of_rope(cos[..., 0, 0, :], sin[..., 0, 1, :], rope)

    @overload
    def __call__(self, x: mx.array, /, *, heads_first: bool = False) -> mx.array: ...

    @overload
    def __call__(
        self, q: mx.array, k: mx.array, /, *, heads_first: bool = False
    ) -> tuple[mx.array, mx.array]: ...

    def __call__(
        self, *xs: mx.array, heads_first: bool = False
    ) -> mx.array | tuple[mx.array, mx.array]:
        """Rotate one array, or a query and a key of the same tokens.

        Raises:
            TensorError: If an array does not fit the rotation.
        """
        has_heads = _ARRAYS.check_turn(xs, self.cos, self.rotary_start, self.head_dim, heads_first)
        rows = [row.astype(mx.float32) for row in (self.cos, self.sin)]
        if not has_heads:
            # [..., seq, num_pairs] -> [..., seq, 1, num_pairs]
            rows = [mx.expand_dims(row, -2) for row in rows]
        if heads_first and rows[0].ndim > 2:
            rows = [row.swapaxes(-2, -3) for row in rows]
        axis = by_pairing(self.pairing, half=-2, interleaved=-1)
        # [..., num_pairs] -> [..., 2, num_pairs] or [..., num_pairs, 2]
        cos, sin = mx.expand_dims(rows[0], axis), mx.stack([-rows[1], rows[1]], axis)
        start = self.rotary_start
        end = start + 2 * self.cos.shape[-1]
        keeps_pairing = self.pairing == self.pairing_out
        ys = [_turn(x, cos, sin, start, end, axis, keeps_pairing) for x in xs]
        return ys[0] if len(xs) == 1 else (ys[0], ys[1])


class RotaryEmbedding(nn.Module):
    """`rotate` with the signature of MLX's own ``nn.RoPE``, for ``[..., heads, seq, head_dim]``.

    Args:
        rope: The rope; its scaling must be a law, not a rule.
        gain: Multiplied into cos and sin; ``rope.attention_factor`` if None.

    >>> layer = RotaryEmbedding(Rope(head_dim=64, pairing="half", base=500_000.0))
    >>> x = mx.random.normal((2, 8, 1, 64))  # the next token of two texts
    >>> y = layer(x, offset=mx.array([5, 2**40]))
    >>> mx.array_equal(y[1], layer(x[1], offset=2**40)).item()
    True
    """

    def __init__(self, rope: Rope, *, gain: float | None = None) -> None:
        super().__init__()
        _tensors.check_rope(rope)
        self.rope = rope
        self.gain = rope.attention_factor if gain is None else number("gain", gain)

    def at(self, positions: Any) -> Rotation:
        """`Rotation.at` with this module's Rope and gain."""
        return Rotation.at(positions, self.rope, gain=self.gain)

    def __call__(self, x: mx.array, offset: int | mx.array = 0, positions: Any = None) -> mx.array:
        """Rotate ``x`` from position ``offset`` (a number or ``[batch]``) on, or at ``positions``.

        ``positions`` may also be a `Rotation`.
        """
        if positions is None:
            positions = _ARRAYS.count_positions(x, self.rope, offset, mx)
        else:
            _tensors.check_no_other(offset)
        if isinstance(positions, Rotation):
            return positions(x, heads_first=True)
        return rotate(x, positions, self.rope, gain=self.gain, heads_first=True)


def _rotate(
    xs: list[mx.array],
    positions: Any,
    rope: Rope,
    inverse: bool,
    gain: float | None,
    heads_first: bool,
) -> list[mx.array]:
    places, gain, source, target = _ARRAYS.check_call(
        xs, positions, rope, inverse, gain, heads_first
    )
    # the axis of a pair's two coordinates in [..., 2, num_pairs] or [..., num_pairs, 2]
    axis = by_pairing(source, half=-2, interleaved=-1)
    arguments = partner_arguments(places, rope, gain, mx)
    cos, sin = _rows(*arguments, axis=axis, heads_first=heads_first, inverse=inverse)
    start, end = rope.rotary_start, rope.rotary_start + rope.rotary_dim
    return [_turn(x, cos, sin, start, end, axis, source == target) for x in xs]


@mx.compile
def _turn(
    x: mx.array, cos: mx.array, sin: mx.array, start: int, end: int, axis: int, keeps_pairing: bool
) -> mx.array:
    # [..., head_dim] -> [..., 2, num_pairs] or [..., num_pairs, 2]
    wide = x[..., start:end].astype(mx.float32)
    pairs = mx.unflatten(wide, -1, (2, -1) if axis == -2 else (-1, 2))
    partners = mx.flip(pairs, axis)
    if axis == -1:  # loops over two elements are slow; a copy has pairs in one dimension
        partners = mx.contiguous(partners)
    turned = pairs * cos + partners * sin
    turned = turned if keeps_pairing else turned.swapaxes(-2, -1)
    y = mx.flatten(turned.astype(x.dtype), -2, -1)
    return y if y.shape == x.shape else mx.concatenate([x[..., :start], y, x[..., end:]], -1)
