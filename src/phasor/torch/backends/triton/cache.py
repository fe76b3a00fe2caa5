"""Rotation and cache write in Triton: query, key and value in one launch.

The first programs turn heads of the query where they lie, the next turn heads of the key on their
way into its cache, and the last carry heads of the value into theirs.
"""

# pyright: basic, reportMissingImports=false, reportInvalidTypeForm=false
# pyright: reportAssignmentType=false

from __future__ import annotations

import struct

import triton
import triton.language as tl

from phasor.torch._fused import LARGEST
from phasor.torch.backends.triton.angles import asked, number, rows
from phasor.torch.backends.triton.kernels import placed

_LARGEST_BITS = tl.constexpr(struct.unpack("i", struct.pack("f", LARGEST))[0])
_PLACED = [
    *(f"{x}_{step}" for x in ("q", "k", "v") for step in ("outer", "inner", "head", "step")),
    *(f"{x}_{step}" for x in ("kc", "vc") for step in ("page", "row", "head", "step")),
    *("slot_outer", "slot_inner"),
    *("outer_step", "inner_step", "step", "more_outer_step", "more_inner_step", "more_step"),
]
_FREE = [
    *("inner", "q_heads", "k_heads", "over_blocks", "over_tiles", "gain"),
    *("key_times", "value_times", "pages", "page_rows"),
]


@triton.jit
def _eight_bits(x):
    """The code of the e4m3 number nearest to a float32; of two the even one, and 127 for NaN."""
    bits = x.to(tl.int32, bitcast=True)
    # numbers beyond the largest are the largest
    size = tl.minimum(bits & 0x7FFFFFFF, _LARGEST_BITS)
    # of 23 bits of fraction 3 are kept, and exponents count from -7 instead of -127
    code = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # below 2**-6 codes count steps of 2**-9, which are the units of float32 at 2**14
    steps = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0x3C800000, steps, code)
    code = code | ((bits >> 24) & 128)
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 127, code).to(tl.uint8)


@triton.jit
def _stored(x, times, kind: tl.constexpr):
    """``x`` as a cache of that dtype holds it: uint8 are codes of 8 bits, in their unit."""
    if kind == tl.uint8:
        x = x.to(tl.float32) * number(times, tl.float32)
        if tl.target_info.cuda_capability_geq(8, 9):
            # these have an instruction for it, which stops at the largest number too
            return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        return _eight_bits(x)
    return x.to(kind)


@triton.jit
def _carry(
    x,
    y,
    head,
    kept,
    n_heads,
    x_head,
    x_step,
    y_head,
    y_step,
    times,
    width: tl.constexpr,
    packed: tl.constexpr,
    wide: tl.constexpr,
):
    """Heads of values into their cache. A function, for its variables have types of their own."""
    x += head * x_head
    y += head * y_head
    if packed:
        x, x_step = tl.multiple_of(x, (16, 16, 16)), 1
        y, y_step = tl.multiple_of(y, (16, 16, 16)), 1
    mask = kept & (head < n_heads)
    for first in range(0, width, wide):
        column = first + tl.arange(0, wide)[None, None, :]
        here = mask & (column < width)
        value = tl.load(x + column * x_step, mask=here, other=0.0)
        tl.store(y + column * y_step, _stored(value, times, y.dtype.element_ty), mask=here)


@triton.jit(
    do_not_specialize_on_alignment=["q", "k", "v", "key_cache", "value_cache", "slots", "angles"],
    do_not_specialize=[*_FREE, *_PLACED],
)
def rotate_and_cache(
    q,
    k,
    v,
    key_cache,
    value_cache,
    slots,
    angles,
    more,
    axes,
    inner: tl.int64,
    q_heads: tl.int64,
    k_heads: tl.int64,
    over_blocks: tl.int64,
    over_tiles: tl.int64,
    gain: tl.int64,
    key_times: tl.int64,
    value_times: tl.int64,
    pages: tl.int64,
    page_rows: tl.int64,
    q_outer: tl.int64,
    q_inner: tl.int64,
    q_head: tl.int64,
    q_step: tl.int64,
    k_outer: tl.int64,
    k_inner: tl.int64,
    k_head: tl.int64,
    k_step: tl.int64,
    v_outer: tl.int64,
    v_inner: tl.int64,
    v_head: tl.int64,
    v_step: tl.int64,
    kc_page: tl.int64,
    kc_row: tl.int64,
    kc_head: tl.int64,
    kc_step: tl.int64,
    vc_page: tl.int64,
    vc_row: tl.int64,
    vc_head: tl.int64,
    vc_step: tl.int64,
    slot_outer: tl.int64,
    slot_inner: tl.int64,
    outer_step: tl.int64,
    inner_step: tl.int64,
    step: tl.int64,
    more_outer_step: tl.int64,
    more_inner_step: tl.int64,
    more_step: tl.int64,
    source: tl.constexpr,
    read: tl.constexpr,
    write: tl.constexpr,
    barrier: tl.constexpr,
    pairs: tl.constexpr,
    start: tl.constexpr,
    width: tl.constexpr,
    value_width: tl.constexpr,
    packed: tl.constexpr,
    wide: tl.constexpr,
    tokens: tl.constexpr,
    heads: tl.constexpr,
):
    """See `backends.triton.kernels.rotation`, whose arguments most of these are.

    ``slots`` points to the row of each token in the caches, which have ``pages`` of ``page_rows``
    rows, and strides ``kc_`` and ``vc_`` in elements. ``key_times`` and ``value_times``, the bits
    of a float64, are multiplied in on the way into a cache of uint8, which holds codes of 8-bit
    floats. ``width`` and ``value_width`` are the columns of a head, and ``packed`` says whether
    heads lie in one piece each, in caches too, on 16-byte boundaries.
    """
    kind: tl.constexpr = tl.float64 if q.dtype.element_ty == tl.float64 else tl.float32
    q_blocks, k_blocks = tl.cdiv(q_heads, heads), tl.cdiv(k_heads, heads)
    part, outer, token = placed(
        tl.program_id(0), q_blocks + 2 * k_blocks, over_blocks, inner, over_tiles, tokens
    )
    there = token < inner
    lane = tl.arange(0, heads)
    slot = tl.load(slots + outer * slot_outer + token * slot_inner, mask=there, other=-1)
    slot = slot.to(tl.int64)
    kept = (there & (slot >= 0) & (slot < pages * page_rows))[None, :, None]
    # a slot that is not there is not divided either: remainders of negative numbers differ
    slot = tl.where(slot < 0, 0, slot)
    page, row = (slot // page_rows)[None, :, None], (slot % page_rows)[None, :, None]

    if part >= q_blocks + k_blocks:
        _carry(
            v + outer * v_outer + token[None, :, None] * v_inner,
            value_cache + page * vc_page + row * vc_row,
            ((part - q_blocks - k_blocks) * heads + lane)[:, None, None],
            kept,
            k_heads,
            v_head,
            v_step,
            vc_head,
            vc_step,
            value_times,
            value_width,
            packed,
            wide,
        )
    else:
        x, n_heads, first = q, q_heads, part
        x_outer, x_inner, x_head, x_step = q_outer, q_inner, q_head, q_step
        if part >= q_blocks:
            x, n_heads, first = k, k_heads, part - q_blocks
            x_outer, x_inner, x_head, x_step = k_outer, k_inner, k_head, k_step
        head = (first * heads + lane)[:, None, None]
        exists = (head < n_heads) & there[None, :, None]
        x += outer * x_outer + head * x_head + token[None, :, None] * x_inner
        if packed:
            x, x_step = tl.multiple_of(x, (16, 16, 16)), 1
        pair = tl.arange(0, wide)[None, :]
        asked0, asked1 = asked(
            angles, more, axes, outer, token, there,
            outer_step, inner_step, step, more_outer_step, more_inner_step, more_step,
            pair, pairs, source,
        )  # fmt: skip
        x0, x1 = read(x + start * x_step, x_step, exists, pairs, wide)
        if barrier:
            tl.debug_barrier()
        cos, sin = rows(asked0, asked1, more, pair, gain, pairs, source, kind)
        x0, x1 = x0.to(kind), x1.to(kind)
        y0, y1 = tl.fma(x0, cos, -(x1 * sin)), tl.fma(x1, cos, x0 * sin)
        written: tl.constexpr = q.dtype.element_ty
        stored: tl.constexpr = key_cache.dtype.element_ty
        if part < q_blocks:
            write(
                x + start * x_step, x_step, exists, y0.to(written), y1.to(written), pairs, wide
            )  # fmt: skip
        else:
            mask = kept & exists
            y, y_step = key_cache + page * kc_page + row * kc_row + head * kc_head, kc_step
            if packed:
                y, y_step = tl.multiple_of(y, (16, 16, 16)), 1
            c0, c1 = _stored(y0, key_times, stored), _stored(y1, key_times, stored)
            write(y + start * y_step, y_step, mask, c0, c1, pairs, wide)
            for begin in range(0, width - 2 * pairs, wide):
                column = begin + tl.arange(0, wide)[None, None, :]
                here = mask & (column < width - 2 * pairs)
                column = tl.where(column < start, column, column + 2 * pairs)
                value = tl.load(x + column * x_step, mask=here, other=0.0)
                value = _stored(value.to(kind), key_times, stored)
                tl.store(y + column * y_step, value, mask=here)
