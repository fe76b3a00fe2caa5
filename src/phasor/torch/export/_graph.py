"""The operator as nodes of an ONNX graph: what the standard cannot say stands around its operator.

Functions take ``op``, which makes a node of the opset for every attribute called on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from phasor.angles import DIGITS, ROWS, cos_sin, digit_tables
from phasor.errors import SpecError, TensorError
from phasor.pairings import by_pairing
from phasor.rope import Rope
from phasor.torch._layout import Layout, read_layout, read_rope

_FLOATS = ("FLOAT", "FLOAT16", "BFLOAT16")
_Table = NDArray[np.float32]
# ONNX's numbers of its types
_FLOAT, _INT64, _DOUBLE = 1, 7, 11


class _Rows(NamedTuple):
    """Inputs of the operator: caches and the rows to take, or a row for every token."""

    cos: Any
    sin: Any
    position_ids: Any | None
    num_pairs: int


def rotated(
    op: Any,
    xs: Sequence[Any],
    angles: Sequence[Any],
    rope: str,
    inverse: bool,
    gain: float,
    longest: int | None,
) -> list[Any]:
    """``phasor::rotate`` as nodes.

    Args:
        op: Makes nodes.
        xs: Tensors ``[..., seq, heads, head_dim]``.
        angles: ``[positions]``, or ``[cos, sin]``.
        rope: The operator's text.
        inverse: As for `phasor.torch.rotate`.
        gain: As for `phasor.torch.rotate`.
        longest: Rows of a table of cos and sin; None for products of digit tables.

    Raises:
        TensorError: If a tensor is float64, or its heads are not a fixed number.
        SpecError: If ``longest`` is given for positions that are no rows of a table.
    """
    for x in xs:
        if x.dtype.name not in _FLOATS or not all(type(n) is int for n in x.shape[-2:]):
            raise TensorError(
                "x must be float32, float16 or bfloat16 with a fixed number of heads for ONNX's "
                f"RotaryEmbedding, got {x.dtype.name.lower()} of shape {list(x.shape)}; export the "
                "model in float32"
            )
    layout = read_layout(rope)
    rows = _rows(op, angles, rope, inverse, gain, longest)
    return [_turned(op, x, rows, layout.turned_round() if inverse else layout) for x in xs]


def _turned(op: Any, x: Any, rows: _Rows, layout: Layout) -> Any:
    heads, head_dim = cast(tuple[int, int], tuple(x.shape[-2:]))
    into, back = _orders(head_dim, rows.num_pairs, layout)
    shape, seq = op.Shape(x), op.Shape(x, start=-3, end=-2)
    lead, one = op.Shape(x, end=-2), _constant(op, [-1])
    moved = x if into is None else op.Gather(x, _constant(op, into), axis=-1)
    # rows and arithmetic stay float32, as in every other backend; the result is rounded once
    wide = moved if x.dtype.name == "FLOAT" else op.Cast(moved, to=_FLOAT)
    flat = op.Reshape(wide, op.Concat(one, seq, _constant(op, [heads * head_dim]), axis=0))
    if rows.position_ids is None:
        pairs = _constant(op, [rows.num_pairs])
        every, each = op.Concat(lead, pairs, axis=0), op.Concat(one, seq, pairs, axis=0)
        inputs = [op.Reshape(op.Expand(row, every), each) for row in (rows.cos, rows.sin)]
    else:
        places = op.Reshape(op.Expand(rows.position_ids, lead), op.Concat(one, seq, axis=0))
        inputs = [rows.cos, rows.sin, places]
    turned = op.RotaryEmbedding(
        flat,
        *inputs,
        interleaved=by_pairing(layout.pairing, half=0, interleaved=1),
        num_heads=heads,
        rotary_embedding_dim=2 * rows.num_pairs if 2 * rows.num_pairs < head_dim else 0,
    )
    turned = op.Reshape(turned, shape)
    narrow = turned if x.dtype.name == "FLOAT" else op.CastLike(turned, x)
    return narrow if back is None else op.Gather(narrow, _constant(op, back), axis=-1)


def _orders(
    head_dim: int, num_pairs: int, layout: Layout
) -> tuple[list[int] | None, list[int] | None]:
    """Coordinates with the slice that turns in front, and those of that in the order of the result.

    None where nothing moves.
    """
    start, width = layout.rotary_start, 2 * num_pairs
    plain = list(range(head_dim))
    into = [*plain[start : start + width], *plain[:start], *plain[start + width :]]
    back = [into.index(coordinate) for coordinate in plain]
    front = Layout(layout.pairing, layout.pairing_out, 0)
    read, written = (layout.slices(layout.pairing_out, num_pairs),
                     front.slices(layout.pairing, num_pairs))  # fmt: skip
    for to, origin in zip(read, written, strict=True):
        back[to] = plain[origin]
    return (None if into == plain else into), (None if back == plain else back)


def _rows(
    op: Any,
    angles: Sequence[Any],
    rope: str,
    inverse: bool,
    gain: float,
    longest: int | None,
) -> _Rows:
    if len(angles) == 2:
        cos, sin = (op.Cast(row, to=_FLOAT) for row in angles)
        return _Rows(*_signed(op, cos, sin, inverse, gain), None, angles[0].shape[-1])
    read, positions = read_rope(rope), angles[0]
    fractional = positions.dtype.name in ("FLOAT", "DOUBLE")
    if longest is None:
        made = _from_digits(op, positions, read, fractional)
        return _Rows(*_signed(op, *made, inverse, gain), None, read.num_pairs)
    if fractional or read.axes.n_axes > 1:
        what = "fractions" if fractional else f"on {read.axes.n_axes} axes"
        raise SpecError(
            f"longest makes tables that whole positions on one axis are rows of, got positions "
            f"{what}; leave longest out"
        )
    tables = _long_tables(read, longest, gain, -gain if inverse else gain)
    cos, sin = (_constant(op, table, np.float32) for table in tables)
    return _Rows(cos, sin, op.Cast(positions, to=_INT64), read.num_pairs)


def _signed(op: Any, cos: Any, sin: Any, inverse: bool, gain: float) -> tuple[Any, Any]:
    if gain != 1.0:
        factor = _constant(op, gain, np.float32)
        cos, sin = op.Mul(cos, factor), op.Mul(sin, factor)
    return cos, op.Neg(sin) if inverse else sin


def _from_digits(op: Any, positions: Any, rope: Rope, fractional: bool) -> tuple[Any, Any]:
    """Cos and sin ``[..., num_pairs]`` float32, as `phasor.torch._rows` makes them."""
    if rope.axes.n_axes == 1:
        places = op.Unsqueeze(positions, _constant(op, [-1]))
    else:
        follows = list(rope.axes.axis_of_pair(rope.num_pairs))
        places = op.Gather(positions, _constant(op, follows), axis=-1)
    if not fractional:
        return _whole_rows(op, op.Cast(places, to=_INT64), rope)
    exact = op.Cast(places, to=_DOUBLE)
    nearest = op.Round(exact)
    steps = _constant(op, rope.direction * rope.inv_freq, np.float64)
    rest = op.Mul(op.Sub(exact, nearest), steps)
    more = op.Cast(op.Cos(rest), to=_FLOAT), op.Cast(op.Sin(rest), to=_FLOAT)
    return _product(op, _whole_rows(op, op.Cast(nearest, to=_INT64), rope), more)


def _whole_rows(op: Any, places: Any, rope: Rope) -> tuple[Any, Any]:
    """Products of the rows of each digit of ``places``, ``[..., 1]`` or ``[..., num_pairs]``."""
    pairs = _constant(op, range(rope.num_pairs))
    row, width = _constant(op, ROWS), _constant(op, rope.num_pairs)
    left = op.Abs(places)
    made: tuple[Any, Any] | None = None
    for digit in range(DIGITS):
        # a table lies flat, and each pair takes its entry: pairs on several axes differ in rows
        entry = op.Add(op.Mul(op.Mod(left, row), width), pairs)
        cos, sin = (_constant(op, table, np.float32) for table in _digit_tables(rope)[digit])
        factor = op.Gather(cos, entry), op.Gather(sin, entry)
        made = factor if made is None else _product(op, made, factor)
        if digit < DIGITS - 1:
            left = op.Div(left, row)
    assert made is not None, "there are digits"
    zero, nothing = _constant(op, 0), _constant(op, np.nan, np.float32)
    cos, sin = made[0], op.Where(op.Less(places, zero), op.Neg(made[1]), made[1])
    # what no digit reaches must never look like a rotation; |-2**63| is negative
    outside = op.Or(op.GreaterOrEqual(left, row), op.Less(left, zero))
    return op.Where(outside, nothing, cos), op.Where(outside, nothing, sin)


def _product(op: Any, one: tuple[Any, Any], other: tuple[Any, Any]) -> tuple[Any, Any]:
    (a, b), (c, d) = one, other
    return op.Sub(op.Mul(a, c), op.Mul(b, d)), op.Add(op.Mul(a, d), op.Mul(b, c))


@lru_cache(maxsize=16)
def _digit_tables(rope: Rope) -> tuple[tuple[_Table, _Table], ...]:
    """Cosines and sines of every digit; the same arrays each time, by which they are shared."""
    flat = digit_tables(rope, np.float32).reshape(DIGITS, -1, 2)
    return tuple(
        (np.ascontiguousarray(table[:, 0]), np.ascontiguousarray(table[:, 1])) for table in flat
    )


@lru_cache(maxsize=4)
def _long_tables(rope: Rope, longest: int, on_cos: float, on_sin: float) -> tuple[_Table, _Table]:
    cos, sin = cos_sin(rope, range(longest))
    return (on_cos * cos).astype(np.float32), (on_sin * sin).astype(np.float32)


def _constant(op: Any, values: ArrayLike, dtype: type[np.generic] = np.int64) -> Any:
    array = np.asarray(values, dtype)
    return op.Constant(value=import_module("onnxscript").ir.tensor(array))
