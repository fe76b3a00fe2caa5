"""The rotation of a tile of heads and tokens in Triton: one reading and one writing a pairing.

A program takes ``heads`` heads of ``tokens`` tokens of the query or of the key. Heads are the
outermost dimension of its tile: threads then lie along pairs and tokens, and each keeps its part
of a row in registers while it walks the heads. Offsets are 64-bit from the first product on.
"""

# pyright: basic, reportMissingImports=false, reportInvalidTypeForm=false
# pyright: reportAssignmentType=false

from __future__ import annotations

import triton
import triton.language as tl

from phasor.pairings import by_pairing
from phasor.torch.backends.triton.angles import asked, rows
from phasor.torch.backends.triton.tiles import TIMES_BITS

_TIMES_BITS = tl.constexpr(TIMES_BITS)
_TIMES = tl.constexpr((1 << TIMES_BITS) - 1)


@triton.jit
def read_half(x, step, exists, pairs: tl.constexpr, wide: tl.constexpr):
    """Both coordinates of every pair ``(i, i + pairs)``, from the first one on; else zeros."""
    pair = tl.arange(0, wide)[None, None, :]
    mask = exists & (pair < pairs)
    x0 = tl.load(x + pair * step, mask=mask, other=0.0)
    return x0, tl.load(x + (pairs + pair) * step, mask=mask, other=0.0)


@triton.jit
def write_half(y, step, exists, y0, y1, pairs: tl.constexpr, wide: tl.constexpr):
    """The places that `read_half` reads."""
    pair = tl.arange(0, wide)[None, None, :]
    mask = exists & (pair < pairs)
    tl.store(y + pair * step, y0, mask=mask)
    tl.store(y + (pairs + pair) * step, y1, mask=mask)


@triton.jit
def read_interleaved(x, step, exists, pairs: tl.constexpr, wide: tl.constexpr):
    """Both coordinates of every pair ``(2i, 2i + 1)``, parted in registers; else zeros."""
    column = tl.arange(0, 2 * wide)[None, None, :]
    both = tl.load(x + column * step, mask=exists & (column < 2 * pairs), other=0.0)
    return tl.split(tl.reshape(both, (both.shape[0], both.shape[1], wide, 2)))


@triton.jit
def write_interleaved(y, step, exists, y0, y1, pairs: tl.constexpr, wide: tl.constexpr):
    """The places that `read_interleaved` reads."""
    column = tl.arange(0, 2 * wide)[None, None, :]
    both = tl.reshape(tl.join(y0, y1), (y0.shape[0], y0.shape[1], 2 * wide))
    tl.store(y + column * step, both, mask=exists & (column < 2 * pairs))


@triton.jit
def _copy(x, x_step, y, y_step, exists, start, end, wide: tl.constexpr):
    """Columns ``start`` to ``end``, which do not turn."""
    for first in range(start, end, wide):
        column = first + tl.arange(0, wide)[None, None, :]
        mask = exists & (column < end)
        tl.store(y + column * y_step, tl.load(x + column * x_step, mask=mask), mask=mask)


@triton.jit
def _divided(count, over):
    """``count // n``, where ``over`` is the `backends.triton.tiles.reciprocal` of ``n``."""
    return (count * (over & _TIMES)) >> (over >> _TIMES_BITS)


@triton.jit
def placed(item, blocks, over_blocks, inner, over_tiles, tokens: tl.constexpr):
    """Which heads and tokens a program has: it divides by two numbers, without a division.

    Args:
        item: Counts blocks of heads, then tiles of tokens, then the outer dimension.
        blocks: How many blocks there are.
        over_blocks: `backends.triton.tiles.reciprocal` of that.
        inner: Tokens of the inner dimension.
        over_tiles: `backends.triton.tiles.reciprocal` of how many tiles those are.
        tokens: Tokens of a tile.

    Returns:
        The block, the outer index, and ``[tokens]`` inner ones, of which some may be too large.
    """
    tile = _divided(item, over_blocks)
    outer = _divided(tile, over_tiles)
    first = (tile - outer * tl.cdiv(inner, tokens)) * tokens
    return item - tile * blocks, outer, first + tl.arange(0, tokens)


@triton.jit(
    do_not_specialize_on_alignment=["q", "k", "q_out", "k_out", "angles"],
    do_not_specialize=[
        *("inner", "q_heads", "k_heads", "over_blocks", "over_tiles", "gain", "step", "more_step"),
        *("q_outer", "q_inner", "q_head", "q_step", "k_outer", "k_inner", "k_head", "k_step"),
        *("q_out_outer", "q_out_inner", "q_out_head", "q_out_step"),
        *("k_out_outer", "k_out_inner", "k_out_head", "k_out_step"),
        *("outer_step", "inner_step", "more_outer_step", "more_inner_step"),
    ],
)
def rotation(
    q,
    k,
    q_out,
    k_out,
    angles,
    more,
    axes,
    inner: tl.int64,
    q_heads: tl.int64,
    k_heads: tl.int64,
    over_blocks: tl.int64,
    over_tiles: tl.int64,
    gain: tl.int64,
    q_outer: tl.int64,
    q_inner: tl.int64,
    q_head: tl.int64,
    q_step: tl.int64,
    k_outer: tl.int64,
    k_inner: tl.int64,
    k_head: tl.int64,
    k_step: tl.int64,
    q_out_outer: tl.int64,
    q_out_inner: tl.int64,
    q_out_head: tl.int64,
    q_out_step: tl.int64,
    k_out_outer: tl.int64,
    k_out_inner: tl.int64,
    k_out_head: tl.int64,
    k_out_step: tl.int64,
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
    inverse: tl.constexpr,
    pairs: tl.constexpr,
    start: tl.constexpr,
    width: tl.constexpr,
    packed: tl.constexpr,
    wide: tl.constexpr,
    tokens: tl.constexpr,
    heads: tl.constexpr,
):
    """Tokens ``[outer, inner]`` of a query and a key, a tile a program.

    Everything that is not a ``constexpr`` may change without another compilation:

        q, k, q_out, k_out    pointers of one dtype; in place, the outputs are the inputs
        angles, more, axes    where rows come from: see `backends.triton.angles`
        inner                 tokens of the inner dimension
        q_heads, k_heads      how many there are; no key, no heads
        over_blocks           `backends.triton.tiles.reciprocal` of the blocks of heads of both
        over_tiles            the same of the tiles of ``inner``
        gain                  the bits of a float64, which no argument could carry
        q_outer ... more_step strides, in elements

    and these may not:

        source                where rows come from, as `backends.triton.angles` has it
        read, write           functions of this module, for the pairings
        barrier               whether everything is read before anything is computed: a compiler
                              would save registers, and for few tokens nothing else hides the
                              waiting; and where the pairings differ, in place, one thread writes
                              where another reads
        inverse               whether to turn the other way
        pairs, start          of a head: how many, and the column of the first
        width                 columns of a head where those that do not turn are copied, else 0
        packed                whether heads lie in one piece each, on 16-byte boundaries
        wide, tokens, heads   the tile: pairs or the next power of two, tokens, heads
    """
    kind: tl.constexpr = tl.float64 if q.dtype.element_ty == tl.float64 else tl.float32
    q_blocks = tl.cdiv(q_heads, heads)
    blocks = q_blocks + tl.cdiv(k_heads, heads)
    block, outer, token = placed(tl.program_id(0), blocks, over_blocks, inner, over_tiles, tokens)

    x, y, n_heads, first = q, q_out, q_heads, block
    x_outer, x_inner, x_head, x_step = q_outer, q_inner, q_head, q_step
    y_outer, y_inner, y_head, y_step = q_out_outer, q_out_inner, q_out_head, q_out_step
    if block >= q_blocks:
        x, y, n_heads, first = k, k_out, k_heads, block - q_blocks
        x_outer, x_inner, x_head, x_step = k_outer, k_inner, k_head, k_step
        y_outer, y_inner, y_head, y_step = k_out_outer, k_out_inner, k_out_head, k_out_step
    head = (first * heads + tl.arange(0, heads))[:, None, None]
    exists = (head < n_heads) & (token < inner)[None, :, None]
    x += outer * x_outer + head * x_head + token[None, :, None] * x_inner
    if packed:
        x, x_step = tl.multiple_of(x, (16, 16, 16)), 1

    # what rows are made of is asked for, then heads, and only then rows, which wait for the first
    pair = tl.arange(0, wide)[None, :]
    asked0, asked1 = asked(
        angles, more, axes, outer, token, token < inner,
        outer_step, inner_step, step, more_outer_step, more_inner_step, more_step,
        pair, pairs, source,
    )  # fmt: skip
    x0, x1 = read(x + start * x_step, x_step, exists, pairs, wide)
    if barrier:
        tl.debug_barrier()
    cos, sin = rows(asked0, asked1, more, pair, gain, pairs, source, kind)
    if inverse:
        sin = -sin
    x0, x1 = x0.to(kind), x1.to(kind)
    # one product is rounded and one is fused, as on the CPU: no compiler can choose otherwise
    y0, y1 = tl.fma(x0, cos, -(x1 * sin)), tl.fma(x1, cos, x0 * sin)
    y += outer * y_outer + head * y_head + token[None, :, None] * y_inner
    if packed:
        y, y_step = tl.multiple_of(y, (16, 16, 16)), 1
    written = y.dtype.element_ty
    write(y + start * y_step, y_step, exists, y0.to(written), y1.to(written), pairs, wide)
    if width > 0:
        _copy(x, x_step, y, y_step, exists, 0, start, wide)
        _copy(x, x_step, y, y_step, exists, start + 2 * pairs, width, wide)


def reader(pairing):
    """The function that reads pairs."""
    return by_pairing(pairing, half=read_half, interleaved=read_interleaved)


def writer(pairing):
    """The function that writes pairs."""
    return by_pairing(pairing, half=write_half, interleaved=write_interleaved)
