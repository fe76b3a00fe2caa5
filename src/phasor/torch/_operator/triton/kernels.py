"""The two kernels in Triton: `cos_sin_rows` computes cos and sin, `rotation` rotates by them.

A program of `rotation` rotates ``token_block`` tokens of the query or the key, in ``head_steps``
steps of ``head_block`` heads. Each step loads, rotates and stores a tile ``[heads, tokens,
pairs]``; cos and sin ``[1, tokens, pairs]`` are loaded once for all steps. For many tokens a step
has one head, so that the compiler can spread threads only over tokens and pairs, and registers hold
one head. For few tokens there is a single step. All products of offsets are 64-bit.

A program of `cos_sin_rows` computes the rows of ``token_block`` tokens by the formula of
`phasor.angles`, at integer or float positions. Nothing branches on data: elements that must not be
read are masked, and masked pairs are rotated by the identity.
"""

# pyright: basic, reportMissingImports=false, reportInvalidTypeForm=false
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportArgumentType=false

from __future__ import annotations

import triton
import triton.language as tl

from phasor.angles import FLOAT32, FLOAT64
from phasor.torch._operator.triton import SHIFT_OFFSET

_COS_FLOAT32, _SIN_FLOAT32 = tl.constexpr(FLOAT32.cos), tl.constexpr(FLOAT32.sin)
_COS_FLOAT64, _SIN_FLOAT64 = tl.constexpr(FLOAT64.cos), tl.constexpr(FLOAT64.sin)
_SHIFT_OFFSET = tl.constexpr(SHIFT_OFFSET)
_MULTIPLIER_MASK = tl.constexpr((1 << SHIFT_OFFSET) - 1)


# Cos and sin


@triton.jit
def _multiply(number, first, second, third, dtype: tl.constexpr):
    """The upper 64 bits of the product without whole turns, as exact as ``dtype`` needs.

    All are int64: ``first`` holds the upper 64 bits of a frequency, ``second`` the 32 that follow,
    ``third`` the 32 after those. Two products are enough for float32; float64 takes four.
    """
    upper, lower = number >> 32, number & 0xFFFFFFFF
    product = number * first + upper * second
    if dtype == tl.float64:
        carry = (lower.to(tl.uint64) * second.to(tl.uint64)) >> 32
        product += carry.to(tl.int64) + ((upper * third) >> 32)
    return product


@triton.jit
def _nearest_integer(x):
    """The nearest integers, in the dtype of ``x``; halves are rounded up."""
    below = tl.floor(x)
    return tl.where(x - below >= 0.5, below + 1, below)


@triton.jit
def _turns(position, limbs, dtype: tl.constexpr):
    """Angles in units of 2**-64 turns, of integers or of floats below 2**63.

    ``limbs`` are the six of every pair in `phasor.angles.turn_limbs`, each in an int64. The rest of
    a float position is a number of units of 2**-32 for float32, and of 2**-64 for float64.
    """
    first = (limbs[2] << 32) | limbs[3]
    if position.dtype.is_int():
        turns = _multiply(position.to(tl.int64), first, limbs[4], limbs[5], dtype)
    else:
        nearest = _nearest_integer(position.to(tl.float64))
        rest = position.to(tl.float64) - nearest
        turns = _multiply(nearest.to(tl.int64), first, limbs[4], limbs[5], dtype)
        # the same frequency in other units: moved by two limbs, or by one
        if dtype == tl.float64:
            rest = _nearest_integer(rest * 2.0**64).to(tl.int64)
            turns += _multiply(rest, (limbs[0] << 32) | limbs[1], limbs[2], limbs[3], dtype)
        else:
            rest = _nearest_integer(rest * 2.0**32).to(tl.int64)
            turns += _multiply(rest, (limbs[1] << 32) | limbs[2], limbs[3], limbs[4], dtype)
    return turns


@triton.constexpr_function
def _count(coefficients):
    return len(coefficients)


@triton.jit
def _polynomial(y, coefficients: tl.constexpr):
    """The value of a polynomial of `phasor.angles.Polynomials`, in the dtype of ``y``."""
    value = tl.full(y.shape, coefficients[-1], y.dtype)
    for i in tl.static_range(2, _count(coefficients) + 1):
        value = tl.fma(value, y, tl.full(y.shape, coefficients[-i], y.dtype))
    return value


@triton.jit
def _cos_sin_of_turns(turns, factor, dtype: tl.constexpr):
    """Cos and sin of int64 angles in units of 2**-64 turns, times ``factor``."""
    # an eighth of a turn is added, so that the nearest quarter turn is the one below
    if dtype == tl.float64:
        shifted = turns + (1 << 61)
        is_odd, is_negated = (shifted & (1 << 62)) != 0, shifted < 0
        x = ((shifted & ((1 << 62) - 1)) - (1 << 61)).to(dtype) * 2.0**-61
        y = x * x
        cos_terms, sin_terms = _polynomial(y, _COS_FLOAT64), _polynomial(y, _SIN_FLOAT64)
    else:
        # the upper half, rounded to another 2**-33 turns: in the units of `COS_SIN_ERROR_FLOAT32`
        # 0.07, where 12.5 are allowed and 12.0 derived
        shifted = ((turns + ((1 << 61) + (1 << 31))) >> 32).to(tl.int32)
        is_odd, is_negated = (shifted & (1 << 30)) != 0, shifted < 0
        x = ((shifted & ((1 << 30) - 1)) - (1 << 29)).to(dtype) * 2.0**-29
        y = x * x
        cos_terms, sin_terms = _polynomial(y, _COS_FLOAT32), _polynomial(y, _SIN_FLOAT32)
    even_cos, even_sin = tl.fma(y, cos_terms, tl.full(y.shape, 1, dtype)), x * sin_terms
    # a quarter turn takes (cos, sin) to (-sin, cos), and half a turn negates both
    factor = tl.where(is_negated, -factor, factor)
    cos, sin = tl.where(is_odd, -even_sin, even_cos), tl.where(is_odd, even_cos, even_sin)
    return cos * factor, sin * factor


@triton.jit
def _load_constant(constants, row: tl.constexpr, pair, num_pairs: tl.constexpr):
    """A row of `triton.rope_constants`, int64 ``[1, pairs]``; 0 from ``num_pairs`` on."""
    bits = tl.load(constants + row * num_pairs + pair, mask=pair < num_pairs, other=0)
    return bits.to(tl.uint32, bitcast=True).to(tl.int64)


@triton.jit(do_not_specialize=["tokens", "gain"])
def cos_sin_rows(
    positions, constants, cos, sin, tokens: tl.int64, gain: tl.int64,
    n_axes: tl.constexpr, num_pairs: tl.constexpr,
    pair_block: tl.constexpr, token_block: tl.constexpr,
):  # fmt: skip
    """Cos and sin ``[tokens, num_pairs]`` of positions ``[tokens, n_axes]``, times the gain.

    NaN where a position is NaN, or a float beyond int64. All tensors are contiguous; ``constants``
    points to `triton.rope_constants`, and ``gain`` holds the bits of a float64.
    """
    dtype: tl.constexpr = cos.dtype.element_ty
    # [tokens, 1], which may run past `tokens`, and [1, pairs], which may run past `num_pairs`
    token = (tl.program_id(0).to(tl.int64) * token_block + tl.arange(0, token_block))[:, None]
    pair = tl.arange(0, pair_block)[None, :]
    exists = (token < tokens) & (pair < num_pairs)
    factor = gain.to(tl.float64, bitcast=True).to(dtype)
    if n_axes > 1:
        axis = _load_constant(constants, 6, pair, num_pairs)
        position = tl.load(positions + token * n_axes + axis, mask=exists, other=0)
    else:
        position = tl.load(positions + token, mask=token < tokens, other=0)
    limbs = (
        _load_constant(constants, 0, pair, num_pairs),
        _load_constant(constants, 1, pair, num_pairs),
        _load_constant(constants, 2, pair, num_pairs),
        _load_constant(constants, 3, pair, num_pairs),
        _load_constant(constants, 4, pair, num_pairs),
        _load_constant(constants, 5, pair, num_pairs),
    )
    if not position.dtype.is_int():
        has_angle = tl.abs(position) < 2.0**63  # false for NaN
        factor = tl.where(has_angle, factor, float("nan"))
        position = tl.where(has_angle, position, 0.0)
    cos_row, sin_row = _cos_sin_of_turns(_turns(position, limbs, dtype), factor, dtype)
    # [tokens, pairs]
    row = token * num_pairs + pair
    tl.store(cos + row, cos_row, mask=exists)
    tl.store(sin + row, sin_row, mask=exists)


# Pairs of a tile


@triton.jit
def load_half(x, step, exists, num_pairs: tl.constexpr, pair_block: tl.constexpr):
    """Both coordinates of every pair ``(i, i + num_pairs)``, ``[heads, tokens, pairs]``, or 0."""
    pair = tl.arange(0, pair_block)[None, None, :]
    mask = exists & (pair < num_pairs)
    x0 = tl.load(x + pair * step, mask=mask, other=0.0)
    return x0, tl.load(x + (num_pairs + pair) * step, mask=mask, other=0.0)


@triton.jit
def store_half(y, step, exists, y0, y1, num_pairs: tl.constexpr, pair_block: tl.constexpr):
    """Write what `load_half` reads."""
    pair = tl.arange(0, pair_block)[None, None, :]
    mask = exists & (pair < num_pairs)
    tl.store(y + pair * step, y0, mask=mask)
    tl.store(y + (num_pairs + pair) * step, y1, mask=mask)


@triton.jit
def load_interleaved(x, step, exists, num_pairs: tl.constexpr, pair_block: tl.constexpr):
    """Both coordinates of every pair ``(2i, 2i + 1)``, ``[heads, tokens, pairs]``, or 0."""
    # one wide load, split in registers: two loads with stride 2 would each read half of the bytes
    column = tl.arange(0, 2 * pair_block)[None, None, :]
    members = tl.load(x + column * step, mask=exists & (column < 2 * num_pairs), other=0.0)
    # [heads, tokens, 2 * pairs] -> [heads, tokens, pairs, 2]
    return tl.split(tl.reshape(members, (members.shape[0], members.shape[1], pair_block, 2)))


@triton.jit
def store_interleaved(y, step, exists, y0, y1, num_pairs: tl.constexpr, pair_block: tl.constexpr):
    """Write what `load_interleaved` reads."""
    column = tl.arange(0, 2 * pair_block)[None, None, :]
    # [heads, tokens, pairs, 2] -> [heads, tokens, 2 * pairs]
    members = tl.reshape(tl.join(y0, y1), (y0.shape[0], y0.shape[1], 2 * pair_block))
    tl.store(y + column * step, members, mask=exists & (column < 2 * num_pairs))


@triton.jit
def _copy_columns(x, x_step, y, y_step, exists, start, end, block: tl.constexpr):
    """Copy columns ``start`` to ``end``, which are not rotated."""
    for first in range(start, end, block):
        column = first + tl.arange(0, block)[None, None, :]
        mask = exists & (column < end)
        tl.store(y + column * y_step, tl.load(x + column * x_step, mask=mask), mask=mask)


# The tile of a program


@triton.jit
def _divide(count, reciprocal):
    """``count // n`` without a division, from `triton.reciprocal` of ``n``."""
    return (count * (reciprocal & _MULTIPLIER_MASK)) >> (reciprocal >> _SHIFT_OFFSET)


@triton.jit
def _load_row(
    row, token, pair, exists, inner_step, step,
    packed: tl.constexpr, dtype: tl.constexpr, other: tl.constexpr,
):  # fmt: skip
    """Cosines or sines ``[1, tokens, pairs]`` in ``dtype``, to broadcast over heads."""
    row += token * inner_step
    if packed:
        # before the second dimension is added: with it, a single token would become a plain pointer
        row, step = tl.multiple_of(row, 16), 1
    values = tl.load(row[:, None] + pair * step, mask=exists, other=other)
    return values.to(dtype)[None, :, :]


@triton.jit(
    do_not_specialize_on_alignment=["q", "k", "q_out", "k_out", "cos", "sin"],
    do_not_specialize=[
        *("inner", "q_heads", "k_heads", "blocks_reciprocal", "tiles_reciprocal"),
        # strides over outer tokens, inner tokens, heads, and the coordinates of a head
        *(
            f"{x}_{s}"
            for x in ("q", "k", "q_out", "k_out")
            for s in ("outer", "inner", "head", "step")
        ),
        *(f"{x}_{s}" for x in ("cos", "sin") for s in ("outer", "inner", "step")),
    ],
)
def rotation(
    q, k, q_out, k_out, cos, sin,
    inner: tl.int64, q_heads: tl.int64, k_heads: tl.int64,
    blocks_reciprocal: tl.int64, tiles_reciprocal: tl.int64,
    q_outer: tl.int64, q_inner: tl.int64, q_head: tl.int64, q_step: tl.int64,
    k_outer: tl.int64, k_inner: tl.int64, k_head: tl.int64, k_step: tl.int64,
    q_out_outer: tl.int64, q_out_inner: tl.int64, q_out_head: tl.int64, q_out_step: tl.int64,
    k_out_outer: tl.int64, k_out_inner: tl.int64, k_out_head: tl.int64, k_out_step: tl.int64,
    cos_outer: tl.int64, cos_inner: tl.int64, cos_step: tl.int64,
    sin_outer: tl.int64, sin_inner: tl.int64, sin_step: tl.int64,
    load_pairs: tl.constexpr, store_pairs: tl.constexpr,
    barrier: tl.constexpr, transposed: tl.constexpr,
    num_pairs: tl.constexpr, start: tl.constexpr, width: tl.constexpr,
    packed: tl.constexpr, rows_packed: tl.constexpr,
    pair_block: tl.constexpr, token_block: tl.constexpr,
    head_block: tl.constexpr, head_steps: tl.constexpr,
):  # fmt: skip
    """Rotate tokens ``[outer, inner]`` of a query and a key.

    These arguments may change without another compilation:

        q, k, q_out, k_out    pointers to one dtype; in place, the outputs are the inputs
        cos, sin              pointers to rows, of any floating dtype
        inner                 number of tokens in the inner dimension
        q_heads, k_heads      numbers of heads; 0 if there is no key
        blocks_reciprocal     `triton.reciprocal` of the number of blocks of heads
        tiles_reciprocal      `triton.reciprocal` of the number of tiles in ``inner``
        q_outer ... sin_step  strides, in elements

    These may not:

        load_pairs            function of this module for the pairing of the input
        store_pairs           function of this module for the pairing of the output
        barrier               whether all threads finish loading the heads of a step before they
                              continue. With few tokens this hides the latency of memory: otherwise
                              the compiler waits for cos and sin before it loads heads. In place,
                              if the pairings differ, one thread writes where another reads
        transposed            whether to rotate in the opposite direction
        num_pairs, start      pairs of a head, and the first column of the rotated slice
        width                 columns of a head if the others must be copied, else 0
        packed                whether every head is contiguous and aligned to 16 bytes
        rows_packed           whether every row of cos and sin is
        pair_block            pairs in a tile: ``num_pairs``, or the next power of two
        token_block           tokens in a tile
        head_block            heads in a tile
        head_steps            tiles of a program, which differ in their heads
    """
    dtype: tl.constexpr = tl.float64 if q.dtype.element_ty == tl.float64 else tl.float32
    program_heads: tl.constexpr = head_block * head_steps
    q_blocks = tl.cdiv(q_heads, program_heads)
    blocks = q_blocks + tl.cdiv(k_heads, program_heads)
    # the program index varies fastest over blocks of heads, then over tiles, then over ``outer``
    tile = _divide(tl.program_id(0), blocks_reciprocal)
    outer, block = _divide(tile, tiles_reciprocal), tl.program_id(0) - tile * blocks
    # [tokens], which may run past `inner`
    token = (tile - outer * tl.cdiv(inner, token_block)) * token_block + tl.arange(0, token_block)

    x, y, n_heads, first = q, q_out, q_heads, block
    x_outer, x_inner, x_head, x_step = q_outer, q_inner, q_head, q_step
    y_outer, y_inner, y_head, y_step = q_out_outer, q_out_inner, q_out_head, q_out_step
    if block >= q_blocks:
        x, y, n_heads, first = k, k_out, k_heads, block - q_blocks
        x_outer, x_inner, x_head, x_step = k_outer, k_inner, k_head, k_step
        y_outer, y_inner, y_head, y_step = k_out_outer, k_out_inner, k_out_head, k_out_step
    # [1, tokens, 1]
    x += outer * x_outer + token[None, :, None] * x_inner
    y += outer * y_outer + token[None, :, None] * y_inner
    if packed:
        x_step, y_step = 1, 1
    pair = tl.arange(0, pair_block)[None, :]
    row_exists = (token < inner)[:, None] & (pair < num_pairs)

    for step in tl.static_range(head_steps):
        # [heads, 1, 1], then [heads, tokens, 1]
        head = first * program_heads + step * head_block + tl.arange(0, head_block)[:, None, None]
        exists = (head < n_heads) & (token < inner)[None, :, None]
        x_heads, y_heads = x + head * x_head, y + head * y_head
        if packed:
            # lets the compiler load and store 16 bytes at a time
            x_heads = tl.multiple_of(x_heads, (16, 16, 16))
            y_heads = tl.multiple_of(y_heads, (16, 16, 16))
        x0, x1 = load_pairs(x_heads + start * x_step, x_step, exists, num_pairs, pair_block)
        if barrier:
            tl.debug_barrier()
        if step == 0:  # after the loads of the first heads were issued
            c = _load_row(
                cos + outer * cos_outer, token, pair, row_exists, cos_inner, cos_step,
                rows_packed, dtype, 1.0,
            )  # fmt: skip
            s = _load_row(
                sin + outer * sin_outer, token, pair, row_exists, sin_inner, sin_step,
                rows_packed, dtype, 0.0,
            )  # fmt: skip
            if transposed:
                s = -s
        x0, x1 = x0.to(dtype), x1.to(dtype)
        # one product is rounded and one fused, as on the CPU; explicit, so no compiler changes it
        y0, y1 = tl.fma(x0, c, -(x1 * s)), tl.fma(x1, c, x0 * s)
        out_dtype = y.dtype.element_ty
        y0, y1 = y0.to(out_dtype), y1.to(out_dtype)
        store_pairs(y_heads + start * y_step, y_step, exists, y0, y1, num_pairs, pair_block)
        if width > 0:
            _copy_columns(x_heads, x_step, y_heads, y_step, exists, 0, start, pair_block)
            _copy_columns(
                x_heads, x_step, y_heads, y_step, exists, start + 2 * num_pairs, width, pair_block
            )
