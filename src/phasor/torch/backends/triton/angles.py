"""Cosines and sines inside a Triton kernel: from digit tables, or as given.

A kernel asks in two steps, and for its own numbers in between: what rows are made of (`asked`), and
then rows (`rows`). Their addresses wait for positions, and meanwhile the rest is on its way. There
are three sources: positions on ``"one axis"`` or on ``"several axes"``, and ``"given"`` rows.

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
def asked(
    angles, more, axes, outer, token, exists,
    outer_step, inner_step, step, more_outer_step, more_inner_step, more_step,
    pair, pairs: tl.constexpr, source: tl.constexpr,
):  # fmt: skip
    """What the rows of ``T`` tokens and ``N`` pairs are made of.

    Args:
        angles: Pointer to positions, or to rows of cos.
        more: Pointer to rows of sin.
        axes: Pointer to the axis of every pair, read for several axes.
        outer: Index of the tokens in the outer dimension.
        token: ``[T]`` indices in the inner one.
        exists: ``[T]`` which of them there are.
        outer_step: From one outer index to the next, in ``angles``.
        inner_step: From one token to the next.
        step: From one axis, or one pair, to the next.
        more_outer_step: The first in ``more``.
        more_inner_step: The second in ``more``.
        more_step: The third in ``more``.
        pair: ``[1, N]`` counts of pairs, which may run past ``pairs``.
        pairs: How many pairs the Rope has.
        source: One of the three.

    Returns:
        Two blocks: positions of tokens or of pairs, twice; or cos and sin.
    """
    angles += outer * outer_step + (token * inner_step)[:, None]
    there = exists[:, None] & (pair < pairs)
    if source == "given":
        more += outer * more_outer_step + (token * more_inner_step)[:, None]
        first = tl.load(angles + pair * step, mask=there, other=1.0)
        second = tl.load(more + pair * more_step, mask=there, other=0.0)
    elif source == "several axes":
        axis = tl.load(axes + pair, mask=pair < pairs, other=0)
        first = tl.load(angles + axis * step, mask=there, other=0)
        second = first
    else:
        first = tl.load(angles, mask=exists[:, None], other=0)
        second = first
    return first, second


@triton.jit
def number(bits, kind: tl.constexpr):
    """A float64 that came as its bits, for no argument can carry one, as a number of ``kind``."""
    return bits.to(tl.float64, bitcast=True).to(kind)


@triton.jit
def rows(
    first, second, tables, pair, gain, pairs: tl.constexpr, source: tl.constexpr, kind: tl.constexpr
):
    """``[1, T, N]`` of cos and of sin in ``kind``, times the gain, from what was `asked`.

    ``tables`` are those of `digit_row`, and ``gain`` is the bits of a float64.
    """
    if source == "given":
        cos, sin = first, second
    else:
        cos, sin = digit_row(first, pair, tables, pairs)
    factor = number(gain, kind)
    return (cos.to(kind) * factor)[None, :, :], (sin.to(kind) * factor)[None, :, :]
