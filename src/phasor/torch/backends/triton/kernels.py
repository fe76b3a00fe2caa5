"""The rotation in Triton: cos and sin inside a kernel, and a tile of heads and tokens rotated.

A program rotates ``head_block`` heads of ``token_block`` tokens of the query or of the key. Heads
are the outermost dimension of its tile, ``[heads, tokens, pairs]``: threads are spread over pairs
and tokens, and each keeps its cos and sin in registers for all heads. Offsets are 64-bit from the
first product on.

Cos and sin come from one of three sources: integer positions on ``"one axis"`` or on ``"several
axes"``, through the digit tables, or ``"cos_sin"``, which are read as given. Nothing branches on
data: what must not be read is masked, and masked pairs are rotated by the identity.
"""

# pyright: basic, reportMissingImports=false, reportInvalidTypeForm=false
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from phasor.angles import DIGIT_BITS, DIGITS, POSITION_LIMIT, ROWS
from phasor.pairings import by_pairing
from phasor.torch.backends.triton.launching import SHIFT_OFFSET

_BITS = tl.constexpr(DIGIT_BITS)
_DIGITS = tl.constexpr(DIGITS)
_ROWS = tl.constexpr(ROWS)
_LIMIT = tl.constexpr(POSITION_LIMIT)
_SHIFT_OFFSET = tl.constexpr(SHIFT_OFFSET)
_MULTIPLIER_MASK = tl.constexpr((1 << SHIFT_OFFSET) - 1)

#: Strides of positions (or cos) and of sin over the outer and inner tokens and the last dimension.
ANGLE_STRIDES = ["angle_outer", "angle_inner", "angle_step", "sin_outer", "sin_inner", "sin_step"]


def stride_names(*tensors: str) -> list[str]:
    """The arguments that are strides of these tensors: outer and inner tokens, heads, columns."""
    return [f"{x}_{step}" for x in tensors for step in ("outer", "inner", "head", "step")]


# Cos and sin


@triton.jit
def digit_cos_sin(position, pair, tables, num_pairs: tl.constexpr):
    """Cos and sin of integer positions: ``R(p) = R(d3) R(d2) R(d1) R(d0)``, over their digits.

    The conjugate below zero, NaN from 2**40 on. A fused complex product is within 2 units of
    2**-24 (Jeannerod et al. 2017), less than the sqrt(5) that `phasor.angles.ROW_ERROR_40` allows.

    Args:
        position: int32 or int64 of any shape that broadcasts against ``pair``.
        pair: int32 indices of pairs; from ``num_pairs`` on they get the identity.
        tables: Pointer to ``[4, 1024, 2, num_pairs]``, float32 or float64: `_tables.digit_tables`.
        num_pairs: How many pairs the Rope has.

    Returns:
        Two blocks of the common shape, in the dtype of the tables.
    """
    size = tl.abs(position.to(tl.int64))
    row = tables + (size & (_ROWS - 1)).to(tl.int32) * (2 * num_pairs) + pair
    cos = tl.load(row, mask=pair < num_pairs, other=1.0)
    sin = tl.load(row + num_pairs, mask=pair < num_pairs, other=0.0)
    for digit in tl.static_range(1, _DIGITS):
        value = ((size >> (_BITS * digit)) & (_ROWS - 1)).to(tl.int32)
        # row 0 is the identity. Not reading it saves memory traffic: most positions have two digits
        needed = (pair < num_pairs) & (value > 0)
        row = tables + (digit * _ROWS + value) * (2 * num_pairs) + pair
        c = tl.load(row, mask=needed, other=1.0)
        s = tl.load(row + num_pairs, mask=needed, other=0.0)
        cos, sin = tl.fma(cos, c, -(sin * s)), tl.fma(cos, s, sin * c)
    sin = tl.where(position < 0, -sin, sin)
    # beyond the tables: NaN, so that it is never taken for a rotation. |-2**63| is negative
    outside = (size >= _LIMIT) | (size < 0)
    return tl.where(outside, float("nan"), cos), tl.where(outside, float("nan"), sin)


@triton.jit
def load_angles(
    angles, sin, axis_of_pair, outer, token, token_exists,
    angle_outer, angle_inner, angle_step, sin_outer, sin_inner, sin_step,
    pair, num_pairs: tl.constexpr, source: tl.constexpr,
):  # fmt: skip
    """The first of two steps to cos and sin: read positions, or the given values.

    The addresses in the tables depend on the positions. Between this step and `cos_sin` a kernel
    reads its heads, so that both are on their way from memory at the same time.

    Args:
        angles: Pointer to positions, or to cos.
        sin: Pointer to sin, read for given values.
        axis_of_pair: Pointer to the axis of every pair, read for several axes.
        outer: Index of the tokens in the outer dimension.
        token: ``[tokens]`` indices in the inner one.
        token_exists: ``[tokens]``, false past the end.
        angle_outer: Stride of ``angles`` over the outer dimension.
        angle_inner: Stride over the inner dimension.
        angle_step: Stride over axes or pairs.
        sin_outer: Stride of ``sin`` over the outer dimension.
        sin_inner: Stride over the inner dimension.
        sin_step: Stride over pairs.
        pair: ``[1, pairs]`` indices, which may run past ``num_pairs``.
        num_pairs: How many pairs the Rope has.
        source: One of the three.

    Returns:
        Positions ``[tokens, 1]`` or ``[tokens, pairs]``, twice; or cos and sin ``[tokens, pairs]``.
    """
    # [tokens, 1]
    angles += outer * angle_outer + (token * angle_inner)[:, None]
    exists = token_exists[:, None] & (pair < num_pairs)
    if source == "cos_sin":
        sin += outer * sin_outer + (token * sin_inner)[:, None]
        first = tl.load(angles + pair * angle_step, mask=exists, other=1.0)
        second = tl.load(sin + pair * sin_step, mask=exists, other=0.0)
    elif source == "several axes":
        axis = tl.load(axis_of_pair + pair, mask=pair < num_pairs, other=0)
        first = tl.load(angles + axis * angle_step, mask=exists, other=0)
        second = first
    else:
        first = tl.load(angles, mask=token_exists[:, None], other=0)
        second = first
    return first, second


@triton.jit
def from_float64_bits(bits, dtype: tl.constexpr):
    """A float64 that was passed as its bits (no argument can be one), converted to ``dtype``."""
    return bits.to(tl.float64, bitcast=True).to(dtype)


@triton.jit
def cos_sin(
    first, second, tables, pair, gain,
    num_pairs: tl.constexpr, source: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """The second step: cos and sin ``[1, tokens, pairs]`` times the gain, from `load_angles`.

    ``tables`` are those of `digit_cos_sin`, and ``gain`` is the bits of a float64.
    """
    if source == "cos_sin":
        cos, sin = first, second
    else:
        cos, sin = digit_cos_sin(first, pair, tables, num_pairs)
    factor = from_float64_bits(gain, dtype)
    # [tokens, pairs] -> [1, tokens, pairs], to broadcast over heads
    return (cos.to(dtype) * factor)[None, :, :], (sin.to(dtype) * factor)[None, :, :]


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
    both = tl.load(x + column * step, mask=exists & (column < 2 * num_pairs), other=0.0)
    # [heads, tokens, 2 * pairs] -> [heads, tokens, pairs, 2]
    return tl.split(tl.reshape(both, (both.shape[0], both.shape[1], pair_block, 2)))


@triton.jit
def store_interleaved(y, step, exists, y0, y1, num_pairs: tl.constexpr, pair_block: tl.constexpr):
    """Write what `load_interleaved` reads."""
    column = tl.arange(0, 2 * pair_block)[None, None, :]
    # [heads, tokens, pairs, 2] -> [heads, tokens, 2 * pairs]
    both = tl.reshape(tl.join(y0, y1), (y0.shape[0], y0.shape[1], 2 * pair_block))
    tl.store(y + column * step, both, mask=exists & (column < 2 * num_pairs))


def load_function(pairing):
    """The kernel function that reads pairs."""
    return by_pairing(pairing, half=load_half, interleaved=load_interleaved)


def store_function(pairing):
    """The kernel function that writes pairs."""
    return by_pairing(pairing, half=store_half, interleaved=store_interleaved)


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
    """``count // n`` without a division, by `launching.reciprocal` of ``n``."""
    return (count * (reciprocal & _MULTIPLIER_MASK)) >> (reciprocal >> _SHIFT_OFFSET)


@triton.jit
def tile_index(item, blocks, blocks_reciprocal, inner, tiles_reciprocal, token_block: tl.constexpr):
    """Which heads and tokens a program rotates.

    Args:
        item: Counts blocks of heads fastest, then tiles of tokens, then the outer dimension.
        blocks: How many blocks of heads there are.
        blocks_reciprocal: `launching.reciprocal` of that.
        inner: Tokens of the inner dimension.
        tiles_reciprocal: `launching.reciprocal` of how many tiles those are.
        token_block: Tokens of a tile.

    Returns:
        The block of heads, the outer index, and ``[tokens]`` inner ones, which may run past
        ``inner``.
    """
    tile = _divide(item, blocks_reciprocal)
    outer = _divide(tile, tiles_reciprocal)
    first = (tile - outer * tl.cdiv(inner, token_block)) * token_block
    return item - tile * blocks, outer, first + tl.arange(0, token_block)


@triton.jit(
    do_not_specialize_on_alignment=["q", "k", "q_out", "k_out", "angles"],
    do_not_specialize=[
        *("inner", "q_heads", "k_heads", "blocks_reciprocal", "tiles_reciprocal", "gain"),
        *stride_names("q", "k", "q_out", "k_out"),
        *ANGLE_STRIDES,
    ],
)
def rotation(
    q, k, q_out, k_out, angles, tables, axis_of_pair,
    inner: tl.int64, q_heads: tl.int64, k_heads: tl.int64,
    blocks_reciprocal: tl.int64, tiles_reciprocal: tl.int64, gain: tl.int64,
    q_outer: tl.int64, q_inner: tl.int64, q_head: tl.int64, q_step: tl.int64,
    k_outer: tl.int64, k_inner: tl.int64, k_head: tl.int64, k_step: tl.int64,
    q_out_outer: tl.int64, q_out_inner: tl.int64, q_out_head: tl.int64, q_out_step: tl.int64,
    k_out_outer: tl.int64, k_out_inner: tl.int64, k_out_head: tl.int64, k_out_step: tl.int64,
    angle_outer: tl.int64, angle_inner: tl.int64, angle_step: tl.int64,
    sin_outer: tl.int64, sin_inner: tl.int64, sin_step: tl.int64,
    source: tl.constexpr, load_pairs: tl.constexpr, store_pairs: tl.constexpr,
    barrier: tl.constexpr, inverse: tl.constexpr,
    num_pairs: tl.constexpr, start: tl.constexpr, width: tl.constexpr, packed: tl.constexpr,
    pair_block: tl.constexpr, token_block: tl.constexpr, head_block: tl.constexpr,
):  # fmt: skip
    """Rotate tokens ``[outer, inner]`` of a query and a key, a tile a program.

    Everything that is not a ``constexpr`` may change without another compilation:

        q, k, q_out, k_out    pointers of one dtype; in place, the outputs are the inputs
        angles                pointer to positions, or to cos
        tables                pointer to the digit tables, or to sin
        axis_of_pair          pointer to the axis of every pair, for several axes
        inner                 tokens of the inner dimension
        q_heads, k_heads      how many there are; 0 where there is no key
        blocks_reciprocal     `launching.reciprocal` of the blocks of heads of both
        tiles_reciprocal      the same of the tiles of ``inner``
        gain                  the bits of a float64, which no argument can be
        q_outer ... sin_step  strides, in elements

    and these may not:

        source                where cos and sin come from
        load_pairs            function of this module for the pairing that is read
        store_pairs           the same for the pairing that is written
        barrier               whether everything is read before anything is computed. With few
                              tokens nothing else hides the latency of memory, and the compiler
                              would order the loads to save registers. Where the pairings differ,
                              in place, one thread writes where another reads
        inverse               whether to rotate the other way
        num_pairs, start      pairs of a head, and the first column of the rotated slice
        width                 columns of a head where the rest is copied, else 0
        packed                whether every head is one piece on 16-byte boundaries
        pair_block            pairs of a tile: ``num_pairs``, or the next power of two
        token_block           tokens of a tile
        head_block            heads of a tile
    """
    dtype: tl.constexpr = tl.float64 if q.dtype.element_ty == tl.float64 else tl.float32
    q_blocks = tl.cdiv(q_heads, head_block)
    blocks = q_blocks + tl.cdiv(k_heads, head_block)
    block, outer, token = tile_index(
        tl.program_id(0), blocks, blocks_reciprocal, inner, tiles_reciprocal, token_block
    )

    x, y, n_heads, first = q, q_out, q_heads, block
    x_outer, x_inner, x_head, x_step = q_outer, q_inner, q_head, q_step
    y_outer, y_inner, y_head, y_step = q_out_outer, q_out_inner, q_out_head, q_out_step
    if block >= q_blocks:
        x, y, n_heads, first = k, k_out, k_heads, block - q_blocks
        x_outer, x_inner, x_head, x_step = k_outer, k_inner, k_head, k_step
        y_outer, y_inner, y_head, y_step = k_out_outer, k_out_inner, k_out_head, k_out_step
    # [heads, 1, 1], then [heads, tokens, 1]
    head = (first * head_block + tl.arange(0, head_block))[:, None, None]
    exists = (head < n_heads) & (token < inner)[None, :, None]
    x += outer * x_outer + head * x_head + token[None, :, None] * x_inner
    if packed:
        # the promise that lets the compiler move 16 bytes at a time
        x, x_step = tl.multiple_of(x, (16, 16, 16)), 1

    # positions, then heads, then the table rows that wait for the positions: in this order the
    # heads arrive while the positions do
    pair = tl.arange(0, pair_block)[None, :]
    angle0, angle1 = load_angles(
        angles, tables, axis_of_pair, outer, token, token < inner,
        angle_outer, angle_inner, angle_step, sin_outer, sin_inner, sin_step,
        pair, num_pairs, source,
    )  # fmt: skip
    x0, x1 = load_pairs(x + start * x_step, x_step, exists, num_pairs, pair_block)
    if barrier:
        tl.debug_barrier()
    cos, sin = cos_sin(angle0, angle1, tables, pair, gain, num_pairs, source, dtype)
    if inverse:
        sin = -sin
    x0, x1 = x0.to(dtype), x1.to(dtype)
    # one product is rounded and one fused, as on the CPU: no compiler can choose otherwise
    y0, y1 = tl.fma(x0, cos, -(x1 * sin)), tl.fma(x1, cos, x0 * sin)
    y += outer * y_outer + head * y_head + token[None, :, None] * y_inner
    if packed:
        y, y_step = tl.multiple_of(y, (16, 16, 16)), 1
    out_dtype = y.dtype.element_ty
    y0, y1 = y0.to(out_dtype), y1.to(out_dtype)
    store_pairs(y + start * y_step, y_step, exists, y0, y1, num_pairs, pair_block)
    if width > 0:
        _copy_columns(x, x_step, y, y_step, exists, 0, start, pair_block)
        _copy_columns(x, x_step, y, y_step, exists, start + 2 * num_pairs, width, pair_block)
