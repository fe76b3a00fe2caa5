"""Rotation and cache write in Triton: query, key and value in one launch.

The first programs rotate heads of the query in place, the next rotate heads of the key on their way
into its cache, and the last copy heads of the value into theirs.
"""

# pyright: basic, reportMissingImports=false, reportInvalidTypeForm=false
# pyright: reportAssignmentType=false

from __future__ import annotations

import struct

import triton
import triton.language as tl

from phasor.torch.backends.triton.kernels import (
    ANGLE_STRIDES,
    cos_sin,
    from_float64_bits,
    load_angles,
    stride_names,
    tile_index,
)
from phasor.torch.backends.triton.launching import LARGEST_FLOAT8

_LARGEST_BITS = tl.constexpr(struct.unpack("i", struct.pack("f", LARGEST_FLOAT8))[0])
_CACHE_STRIDES = [f"{x}_{step}" for x in ("kc", "vc") for step in ("page", "row", "head", "step")]


@triton.jit
def _float8_code(x):
    """The code of the e4m3 number nearest to a float32, to even in a tie; 127 for NaN."""
    bits = x.to(tl.int32, bitcast=True)
    # numbers beyond the largest become the largest
    size = tl.minimum(bits & 0x7FFFFFFF, _LARGEST_BITS)
    # of 23 bits of fraction 3 are kept, and exponents count from -7 instead of -127
    code = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # subnormals, below 2**-6, count steps of 2**-9, which are the units of float32 at 2**14
    steps = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0x3C800000, steps, code)
    code = code | ((bits >> 24) & 128)
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 127, code).to(tl.uint8)


@triton.jit
def _convert(x, multiplier, dtype: tl.constexpr):
    """``x`` as a cache of ``dtype`` holds it: uint8 holds codes of 8-bit floats, in their unit."""
    if dtype == tl.uint8:
        x = x.to(tl.float32) * from_float64_bits(multiplier, tl.float32)
        if tl.target_info.cuda_capability_geq(8, 9):
            # one instruction, which stops at the largest number too
            return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        return _float8_code(x)
    return x.to(dtype)


@triton.jit
def _copy_value(
    x, y, head, stored, n_heads, x_head, x_step, y_head, y_step, multiplier,
    width: tl.constexpr, packed: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Heads of values into their cache. A function, so that its variables have their own dtypes."""
    x += head * x_head
    y += head * y_head
    if packed:
        x, x_step = tl.multiple_of(x, (16, 16, 16)), 1
        y, y_step = tl.multiple_of(y, (16, 16, 16)), 1
    mask = stored & (head < n_heads)
    for first in range(0, width, block):
        column = first + tl.arange(0, block)[None, None, :]
        in_head = mask & (column < width)
        value = tl.load(x + column * x_step, mask=in_head, other=0.0)
        tl.store(y + column * y_step, _convert(value, multiplier, y.dtype.element_ty), mask=in_head)


@triton.jit(
    do_not_specialize_on_alignment=["q", "k", "v", "key_cache", "value_cache", "slots", "angles"],
    do_not_specialize=[
        *("inner", "q_heads", "k_heads", "blocks_reciprocal", "tiles_reciprocal", "gain"),
        *("key_multiplier", "value_multiplier", "pages", "page_rows", "slot_outer", "slot_inner"),
        *stride_names("q", "k", "v"),
        *_CACHE_STRIDES,
        *ANGLE_STRIDES,
    ],
)
def rotate_and_cache(
    q, k, v, key_cache, value_cache, slots, angles, tables, axis_of_pair,
    inner: tl.int64, q_heads: tl.int64, k_heads: tl.int64,
    blocks_reciprocal: tl.int64, tiles_reciprocal: tl.int64, gain: tl.int64,
    key_multiplier: tl.int64, value_multiplier: tl.int64, pages: tl.int64, page_rows: tl.int64,
    q_outer: tl.int64, q_inner: tl.int64, q_head: tl.int64, q_step: tl.int64,
    k_outer: tl.int64, k_inner: tl.int64, k_head: tl.int64, k_step: tl.int64,
    v_outer: tl.int64, v_inner: tl.int64, v_head: tl.int64, v_step: tl.int64,
    kc_page: tl.int64, kc_row: tl.int64, kc_head: tl.int64, kc_step: tl.int64,
    vc_page: tl.int64, vc_row: tl.int64, vc_head: tl.int64, vc_step: tl.int64,
    slot_outer: tl.int64, slot_inner: tl.int64,
    angle_outer: tl.int64, angle_inner: tl.int64, angle_step: tl.int64,
    sin_outer: tl.int64, sin_inner: tl.int64, sin_step: tl.int64,
    source: tl.constexpr, load_pairs: tl.constexpr, store_pairs: tl.constexpr,
    barrier: tl.constexpr, num_pairs: tl.constexpr, start: tl.constexpr,
    width: tl.constexpr, value_width: tl.constexpr, packed: tl.constexpr,
    pair_block: tl.constexpr, token_block: tl.constexpr, head_block: tl.constexpr,
):  # fmt: skip
    """See `backends.triton.kernels.rotation`, whose arguments most of these are.

    ``slots`` points to the row of each token in the caches, which have ``pages`` of ``page_rows``
    rows, and strides ``kc_`` and ``vc_`` in elements. ``key_multiplier`` and ``value_multiplier``,
    the bits of a float64, are multiplied in on the way into a cache of uint8, which holds codes of
    8-bit floats. ``width`` and ``value_width`` are the columns of a head, and ``packed`` says
    whether every head, in caches too, is one piece on 16-byte boundaries.
    """
    dtype: tl.constexpr = tl.float64 if q.dtype.element_ty == tl.float64 else tl.float32
    q_blocks, k_blocks = tl.cdiv(q_heads, head_block), tl.cdiv(k_heads, head_block)
    blocks = q_blocks + 2 * k_blocks
    block, outer, token = tile_index(
        tl.program_id(0), blocks, blocks_reciprocal, inner, tiles_reciprocal, token_block
    )
    token_exists = token < inner
    lane = tl.arange(0, head_block)
    slot = tl.load(slots + outer * slot_outer + token * slot_inner, mask=token_exists, other=-1)
    slot = slot.to(tl.int64)
    # [1, tokens, 1]
    stored = (token_exists & (slot >= 0) & (slot < pages * page_rows))[None, :, None]
    # negative slots are not divided: compilers differ in the remainder of negative numbers
    slot = tl.where(slot < 0, 0, slot)
    page, row = (slot // page_rows)[None, :, None], (slot % page_rows)[None, :, None]

    if block >= q_blocks + k_blocks:
        _copy_value(
            v + outer * v_outer + token[None, :, None] * v_inner,
            value_cache + page * vc_page + row * vc_row,
            ((block - q_blocks - k_blocks) * head_block + lane)[:, None, None],
            stored, k_heads, v_head, v_step, vc_head, vc_step, value_multiplier,
            value_width, packed, pair_block,
        )  # fmt: skip
    else:
        x, n_heads, first = q, q_heads, block
        x_outer, x_inner, x_head, x_step = q_outer, q_inner, q_head, q_step
        if block >= q_blocks:
            x, n_heads, first = k, k_heads, block - q_blocks
            x_outer, x_inner, x_head, x_step = k_outer, k_inner, k_head, k_step
        # [heads, 1, 1], then [heads, tokens, 1]
        head = (first * head_block + lane)[:, None, None]
        exists = (head < n_heads) & token_exists[None, :, None]
        x += outer * x_outer + head * x_head + token[None, :, None] * x_inner
        if packed:
            x, x_step = tl.multiple_of(x, (16, 16, 16)), 1
        # loads in the order of `kernels.rotation`: positions, heads, table rows
        pair = tl.arange(0, pair_block)[None, :]
        angle0, angle1 = load_angles(
            angles, tables, axis_of_pair, outer, token, token_exists,
            angle_outer, angle_inner, angle_step, sin_outer, sin_inner, sin_step,
            pair, num_pairs, source,
        )  # fmt: skip
        x0, x1 = load_pairs(x + start * x_step, x_step, exists, num_pairs, pair_block)
        if barrier:
            tl.debug_barrier()
        cos, sin = cos_sin(angle0, angle1, tables, pair, gain, num_pairs, source, dtype)
        x0, x1 = x0.to(dtype), x1.to(dtype)
        y0, y1 = tl.fma(x0, cos, -(x1 * sin)), tl.fma(x1, cos, x0 * sin)
        q_dtype: tl.constexpr = q.dtype.element_ty
        cache_dtype: tl.constexpr = key_cache.dtype.element_ty
        if block < q_blocks:
            store_pairs(
                x + start * x_step, x_step, exists, y0.to(q_dtype), y1.to(q_dtype),
                num_pairs, pair_block,
            )  # fmt: skip
        else:
            mask = stored & exists
            y, y_step = key_cache + page * kc_page + row * kc_row + head * kc_head, kc_step
            if packed:
                y, y_step = tl.multiple_of(y, (16, 16, 16)), 1
            c0 = _convert(y0, key_multiplier, cache_dtype)
            c1 = _convert(y1, key_multiplier, cache_dtype)
            store_pairs(y + start * y_step, y_step, mask, c0, c1, num_pairs, pair_block)
            # columns that are not rotated, before and after the rotated slice
            for begin in range(0, width - 2 * num_pairs, pair_block):
                column = begin + tl.arange(0, pair_block)[None, None, :]
                in_head = mask & (column < width - 2 * num_pairs)
                column = tl.where(column < start, column, column + 2 * num_pairs)
                value = tl.load(x + column * x_step, mask=in_head, other=0.0)
                value = _convert(value.to(dtype), key_multiplier, cache_dtype)
                tl.store(y + column * y_step, value, mask=in_head)
