"""The rotation in MLX: pure functions, and a module to put where a model has its ``nn.RoPE``.

Angles are exact at every int64 position, by the formula of `phasor.angles` in 64-bit integers. The
arithmetic is float32, with one rounding at the end. ``mx.compile``, ``mx.grad`` and ``mx.vmap``
work; what is fused is compiled in eager calls too.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn

from phasor import _tensors
from phasor._checks import boolean, number, whole
from phasor.angles import FLOAT32, as_positions, evaluate, turn_words
from phasor.errors import PositionError, TensorError
from phasor.pairings import by_pairing
from phasor.rope import Rope

_DTYPES = (mx.float32, mx.bfloat16, mx.float16)
_POSITION_DTYPES = tuple(getattr(mx, name) for name in _tensors.POSITION_DTYPES)


def rotate(
    x: mx.array,
    positions: Any,
    rope: Rope,
    *,
    inverse: bool = False,
    gain: float = 1.0,
    heads_first: bool = False,
) -> mx.array:
    """``R(p) x`` for every token (RoFormer 2104.09864, eq. 34), as `phasor.torch.rotate` has it.

    ``x`` is float32, bfloat16 or float16, ``[..., seq, heads, head_dim]``; ``positions`` are
    integers, float32 or float64. NumPy's arrays and Python's numbers keep all their digits. In an
    array of MLX a float that is NaN or beyond int64 makes its token NaN; elsewhere it is refused.

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
    gain: float = 1.0,
    heads_first: bool = False,
) -> tuple[mx.array, mx.array]:
    """Query and key of the same tokens, as `rotate` rotates them, by the same cos and sin.

    >>> q, k = mx.ones((5, 4, 8)), mx.ones((5, 2, 8))
    >>> [y.shape for y in rotate_qk(q, k, mx.arange(5), Rope(head_dim=8, pairing="half"))]
    [(5, 4, 8), (5, 2, 8)]
    """
    q, k = _rotate([q, k], positions, rope, inverse, gain, heads_first)
    return q, k


def cos_sin(positions: Any, rope: Rope) -> tuple[mx.array, mx.array]:
    """Cos and sin of every token and pair: two float32 ``[..., seq, num_pairs]``, without a gain.

    Within `phasor.angles.COS_SIN_ERROR_FLOAT32` of the real numbers at every int64 position.
    ``positions`` are as for `rotate`.

    >>> cos_sin(1, Rope(head_dim=2, pairing="half"))
    (array([0.540302], dtype=float32), array([0.841471], dtype=float32))
    """
    _tensors.check_rope(rope)
    cos, sin = _cos_sin(_read(positions, rope), rope, 1.0, -2, heads_first=False, inverse=False)
    return cos[..., 0, 0, :], sin[..., 0, 1, :]


class RotaryEmbedding(nn.Module):
    """`rotate` with the call of MLX's own modules, for ``[..., heads, seq, head_dim]``.

    Args:
        rope: What rotates; its scaling must be a law, not a rule.
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

    def __call__(self, x: mx.array, offset: int | mx.array = 0, positions: Any = None) -> mx.array:
        """``x`` rotated from position ``offset`` on, a number or ``[batch]``; or at positions."""
        if positions is None:
            _tensors.check_counts_tokens(self.rope)
            _check_heads("x", x, self.rope, heads_first=True)
            last = max(x.shape[-2] - 1, 0)
            if not isinstance(offset, mx.array):
                bounds: Any = {"least": -(2**63), "most": 2**63 - 1 - last}
                offset = mx.array(whole("offset", offset, **bounds, error=PositionError), mx.int64)
            elif not mx.issubdtype(offset.dtype, mx.integer):
                raise PositionError(
                    f"offset must be a whole number, or an array of them, got {offset.dtype}; "
                    "give positions where tokens stand between two"
                )
            positions = offset.astype(mx.int64)[..., None] + mx.arange(last + 1)
        elif not (type(offset) is int and offset == 0):
            raise PositionError(
                "positions and offset exclude each other; give one of them: positions already say "
                "where each token stands"
            )
        return rotate(x, positions, self.rope, gain=self.gain, heads_first=True)


def _rotate(
    xs: list[mx.array], positions: Any, rope: Rope, inverse: bool, gain: float, heads_first: bool
) -> list[mx.array]:
    _tensors.check_rope(rope)
    names = ("x",) if len(xs) == 1 else ("q", "k")
    shapes = [_check_heads(*one, rope, heads_first) for one in zip(names, xs, strict=True)]
    _tensors.check_shared_tokens(shapes[0], shapes[-1], heads_first)
    positions = _read(positions, rope)
    _tensors.check_placed(positions.shape, shapes[0], rope, heads_first)
    pairings = rope.pairing, rope.output_pairing
    source, target = pairings[::-1] if boolean("inverse", inverse) else pairings
    # of [..., 2, num_pairs] or [..., num_pairs, 2], where the two of a pair are
    axis = by_pairing(source, half=-2, interleaved=-1)
    cos, sin = _cos_sin(positions, rope, number("gain", gain), axis, heads_first, inverse)
    start, end = rope.rotary_start, rope.rotary_start + rope.rotary_dim
    return [_turn(x, cos, sin, start, end, axis, source == target) for x in xs]


def _check_heads(name: str, x: Any, rope: Rope, heads_first: bool) -> tuple[int, ...]:
    """The shape of ``x`` with tokens before heads."""
    layout = _tensors.LAYOUTS[boolean("heads_first", heads_first)]
    if not isinstance(x, mx.array):
        raise TensorError(f"{name} must be an mlx.core.array, got {type(x).__name__}")
    _tensors.check_floating(name, x.dtype, _DTYPES, x.shape, layout, 3)
    _tensors.check_width(name, x.shape, rope)
    return _tensors.swap_heads(x.shape) if heads_first else x.shape


def _read(positions: Any, rope: Rope) -> Any:
    """An ``mx.array``; or int64 or float64 of NumPy, of which ``mx.array`` would make float32."""
    if isinstance(positions, mx.array):
        _tensors.check_position_dtype(positions.dtype, _POSITION_DTYPES)
        positions = _without_gradient(positions)
    else:
        positions = as_positions(positions)
    _tensors.check_coordinates(positions.shape, rope)
    return positions


@mx.custom_function
def _without_gradient(positions: mx.array) -> mx.array:
    return positions


def _refuse_gradient(*_: Any) -> Any:
    raise PositionError("positions must not require a gradient, for none is computed")


_without_gradient.vjp(_refuse_gradient)


def _cos_sin(
    positions: Any, rope: Rope, gain: float, axis: int, heads_first: bool, inverse: bool
) -> list[mx.array]:
    """Cos, and sin signed for either of a pair, to be broadcast over heads.

    ``[..., seq, 1, 2, num_pairs]``, or ``[..., 1, seq, 2, num_pairs]`` with ``heads_first``; the 2
    is at ``axis``.
    """
    array: Any = mx if isinstance(positions, mx.array) else np
    indices = array.array(rope.axes.indices(rope.num_pairs))
    # [..., seq, 1], [..., seq, num_pairs] where pairs differ in their axis, or with all of its axes
    positions = positions[..., indices if rope.axes.n_axes > 1 else None]
    gains, parts = mx.array(gain), [positions]
    if "float" in str(positions.dtype):
        has_angle = mx.array(abs(positions) < 2.0**63)
        gains = mx.where(has_angle.all(-2) if indices.ndim > 1 else has_angle, gains, mx.nan)
        nearest = array.round(positions)
        parts = [nearest, array.round((positions - nearest) * 2.0**32)]
    numbers = [mx.array(part.astype(array.int64)) for part in parts]
    return _cos_sin_of(numbers, _words(rope), gains, axis, heads_first, inverse)


@mx.compile
def _cos_sin_of(
    numbers: Any, words: Any, gains: mx.array, axis: int, heads_first: bool, inverse: bool
) -> list[mx.array]:
    # in units of 2**-64 turns; uint64 wraps around, int64 need not
    turns: Any = sum(
        part.astype(mx.uint64) * first + (part >> 32).astype(mx.uint64) * second
        for part, first, second in zip(numbers, words[::2], words[1::2], strict=False)
    )
    turns = turns.sum(-2) if words[0].ndim > 1 else turns
    # in eighths of a turn, from -1 to 1
    x = (turns << 2).astype(mx.int64).astype(mx.float32) * 2.0**-63
    y: Any = x * x
    cos = (1 + y * evaluate(FLOAT32.cos, y)) * gains
    sin = x * evaluate(FLOAT32.sin, y) * gains
    heads = -4 if heads_first and turns.ndim > 1 else -3
    cos, sin, turns = (mx.expand_dims(row, (heads, axis)) for row in (cos, sin, turns))
    # cos, cos, -sin, sin as sines: so many eighths of a turn are added, and one for the rounding
    eighths = np.array([3, 3, 1, 5] if inverse else [3, 3, 5, 1], np.uint64) << np.uint64(61)
    shape = [2 if dim in (heads, axis) else 1 for dim in range(heads, 0)]
    shifted = turns + mx.array(eighths.reshape(shape))
    # a quarter turn takes a sine to the cosine, and half a turn negates both
    rows: Any = mx.where((shifted << 1).astype(mx.int64) < 0, cos, sin)
    rows = mx.where(shifted.astype(mx.int64) < 0, -rows, rows)
    return list(mx.split(rows, 2, heads))


@mx.compile
def _turn(
    x: mx.array, cos: mx.array, sin: mx.array, start: int, end: int, axis: int, keeps_pairing: bool
) -> mx.array:
    # [..., head_dim] -> [..., 2, num_pairs] or [..., num_pairs, 2]
    wide = x[..., start:end].astype(mx.float32)
    pairs = mx.unflatten(wide, -1, (2, -1) if axis == -2 else (-1, 2))
    partners = mx.flip(pairs, axis)
    if axis == -1:  # loops over two are slow; copied, pairs are one dimension
        partners = mx.contiguous(partners)
    turned = pairs * cos + partners * sin
    turned = turned if keeps_pairing else turned.swapaxes(-2, -1)
    y = mx.flatten(turned.astype(x.dtype), -2, -1)
    return y if y.shape == x.shape else mx.concatenate([x[..., :start], y, x[..., end:]], -1)


@lru_cache(maxsize=256)
def _words(rope: Rope) -> list[mx.array]:
    """What positions are multiplied by, and what rests in units of 2**-32 are."""
    both = turn_words(rope)[:2], turn_words(rope, 32)[:2]
    return [mx.array(word) for word in np.concatenate(both).astype(np.uint64)]
