"""Cosines and sines inside a Triton kernel: from digit tables, or as given.

`one_axis`, `several_axes` and `given` share a signature, so that a kernel takes its source of
rows as an argument. They give ``[T, N]`` rows for ``T`` tokens and ``N`` pairs:

    angles, more   pointers: positions and digit tables, or rows of cos and of sin
    axes           pointer to the axis of every pair, read by `several_axes`
    at, more_at    [T, 1] where each token stands in ``angles``, and in ``more`` if those are rows
    step, more_step  from one axis, or one pair, to the next
    exists         [T, 1] which tokens there are
    pair           [1, N] counts of pairs, which may run past ``pairs``

Nothing branches: what must not be read is masked, and what is masked is the identity.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from phasor.angles import DIGIT_BITS, DIGITS, POSITION_LIMIT, ROWS

_BITS = tl.constexpr(DIGIT_BITS)
_DIGITS = tl.constexpr(DIGITS)
_ROWS = tl.constexpr(ROWS)
_LIMIT = tl.constexpr(POSITION_LIMIT)


@triton.jit
def digit_row(position, pair, tables, pairs: tl.constexpr):
    """Cos and sin of integer positions: the product of their digits' rows.

    ``R(p) = R(d3) R(d2) R(d1) R(d0)``, conjugate below zero, NaN from 2**40 on. A fused complex
    product is within 2 units of 2**-24 (Jeannerod et al. 2017), which is less than the sqrt(5)
    that `phasor.angles.ROW_ERROR_40` allows it.

    Args:
        position: int32 or int64 of any shape that broadcasts against ``pair``.
        pair: int32 counts of pairs; from ``pairs`` on they get the identity.
        tables: Pointer to ``[4, 1024, 2, pairs]``, float32 or float64: `_tables.digit_tables`.
        pairs: How many pairs the Rope has.

    Returns:
        Two blocks of the common shape, in the dtype of the tables.
    """
    size = tl.abs(position.to(tl.int64))
    row = tables + (size & (_ROWS - 1)).to(tl.int32) * (2 * pairs) + pair
    cos = tl.load(row, mask=pair < pairs, other=1.0)
    sin = tl.load(row + pairs, mask=pair < pairs, other=0.0)
    for digit in tl.static_range(1, _DIGITS):
        value = ((size >> (_BITS * digit)) & (_ROWS - 1)).to(tl.int32)
        # row 0 is the identity, and not reading it saves memory: most positions have two digits
        turns = (pair < pairs) & (value > 0)
        row = tables + (digit * _ROWS + value) * (2 * pairs) + pair
        c = tl.load(row, mask=turns, other=1.0)
        s = tl.load(row + pairs, mask=turns, other=0.0)
        cos, sin = tl.fma(cos, c, -(sin * s)), tl.fma(cos, s, sin * c)
    sin = tl.where(position < 0, -sin, sin)
    # no digit row: poison it, for it must never look like a rotation. |-2**63| is negative
    outside = (size >= _LIMIT) | (size < 0)
    return tl.where(outside, float("nan"), cos), tl.where(outside, float("nan"), sin)


@triton.jit
def one_axis(angles, more, axes, at, more_at, step, more_step, exists, pair, pairs: tl.constexpr):
    """Rows of positions that are one number a token."""
    position = tl.load(angles + at, mask=exists, other=0)
    return digit_row(position, pair, more, pairs)


@triton.jit
def several_axes(
    angles, more, axes, at, more_at, step, more_step, exists, pair, pairs: tl.constexpr
):
    """Rows of positions of several coordinates, of which each pair follows its own."""
    axis = tl.load(axes + pair, mask=pair < pairs, other=0)
    position = tl.load(angles + at + axis * step, mask=exists & (pair < pairs), other=0)
    return digit_row(position, pair, more, pairs)


@triton.jit
def given(angles, more, axes, at, more_at, step, more_step, exists, pair, pairs: tl.constexpr):
    """Rows of cos and sin as they are."""
    there = exists & (pair < pairs)
    cos = tl.load(angles + at + pair * step, mask=there, other=1.0)
    sin = tl.load(more + more_at + pair * more_step, mask=there, other=0.0)
    return cos, sin
