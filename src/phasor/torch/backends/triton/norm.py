"""RMS norm and rotation in Triton: one launch forwards, one for each tensor backwards.

A program takes the tile that the rotation's kernel takes, and holds whole heads: the sum of their
squares is then one reduction over registers, and memory is read and written once. Backwards a
program walks many tiles and adds up its part of the weights' gradient; the parts are summed in the
order of the programs, so that a gradient is the same every time.
"""

# pyright: basic, reportMissingImports=false, reportInvalidTypeForm=false
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from phasor.torch.backends.triton.angles import asked, number, rows
from phasor.torch.backends.triton.kernels import placed

_STEPS = ("outer", "inner", "head", "step")
_ROWS = ["outer_step", "inner_step", "step", "more_outer_step", "more_inner_step", "more_step"]
_FREE = ["inner", "over_blocks", "over_tiles", "gain", "epsilon"]
_THREE = [f"{x}_{step}" for x in ("q", "k", "q_out") for step in _STEPS]
_FOUR = [*_THREE, *(f"k_out_{step}" for step in _STEPS)]


@triton.jit
def _rest_of_head(start: tl.constexpr, pairs: tl.constexpr, rest: tl.constexpr):
    """Columns that do not turn, ``[1, 1, rest]``, which may run past the head."""
    column = tl.arange(0, rest)[None, None, :]
    return tl.where(column < start, column, column + 2 * pairs)


@triton.jit
def _root(x):
    """The square root, rounded: in float32 `tl.sqrt` takes what is subnormal for 0."""
    return tl.sqrt_rn(x) if x.dtype == tl.float32 else tl.sqrt(x)


@triton.jit
def _by_warps(x, groups: tl.constexpr):
    """``[heads, tokens, columns]`` summed over every fourth head: a thread of 4 warps has those."""
    return tl.sum(x.reshape(x.shape[0] // groups, groups, x.shape[1], x.shape[2]), axis=0)


@triton.jit
def _total(x):
    """``[1, 1, columns]``: the sum over everything else."""
    return tl.sum(tl.sum(x, axis=0, keep_dims=True), axis=1, keep_dims=True)


@triton.jit(
    do_not_specialize_on_alignment=["q", "k", "q_out", "k_out", "angles"],
    do_not_specialize=["q_heads", "k_heads", *_FREE, *_FOUR, *_ROWS],
)
def forward(
    q,
    k,
    q_out,
    k_out,
    q_weight,
    k_weight,
    angles,
    more,
    axes,
    inner: tl.int64,
    q_heads: tl.int64,
    k_heads: tl.int64,
    over_blocks: tl.int64,
    over_tiles: tl.int64,
    gain: tl.int64,
    epsilon: tl.int64,
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
    pairs: tl.constexpr,
    start: tl.constexpr,
    width: tl.constexpr,
    packed: tl.constexpr,
    wide: tl.constexpr,
    rest: tl.constexpr,
    tokens: tl.constexpr,
    heads: tl.constexpr,
):
    """See `backends.triton.kernels.rotation`, whose arguments these are.

    And: ``q_weight`` and ``k_weight`` point to contiguous weights; ``epsilon`` is the bits of a
    float64, as ``gain``; ``width`` are the columns of a head, and
    ``rest`` those that do not turn, or the next power of two; 0 if there are none.
    """
    kind: tl.constexpr = tl.float64 if q.dtype.element_ty == tl.float64 else tl.float32
    q_blocks = tl.cdiv(q_heads, heads)
    blocks = q_blocks + tl.cdiv(k_heads, heads)
    block, outer, token = placed(tl.program_id(0), blocks, over_blocks, inner, over_tiles, tokens)

    x, y, weight, n_heads, first = q, q_out, q_weight, q_heads, block
    x_outer, x_inner, x_head, x_step = q_outer, q_inner, q_head, q_step
    y_outer, y_inner, y_head, y_step = q_out_outer, q_out_inner, q_out_head, q_out_step
    if block >= q_blocks:
        x, y, weight, n_heads, first = k, k_out, k_weight, k_heads, block - q_blocks
        x_outer, x_inner, x_head, x_step = k_outer, k_inner, k_head, k_step
        y_outer, y_inner, y_head, y_step = k_out_outer, k_out_inner, k_out_head, k_out_step
    head = (first * heads + tl.arange(0, heads))[:, None, None]
    exists = (head < n_heads) & (token < inner)[None, :, None]
    x += outer * x_outer + head * x_head + token[None, :, None] * x_inner
    y += outer * y_outer + head * y_head + token[None, :, None] * y_inner
    if packed:
        x, x_step = tl.multiple_of(x, (16, 16, 16)), 1
        y, y_step = tl.multiple_of(y, (16, 16, 16)), 1

    pair = tl.arange(0, wide)[None, :]
    asked0, asked1 = asked(
        angles, more, axes, outer, token, token < inner,
        outer_step, inner_step, step, more_outer_step, more_inner_step, more_step,
        pair, pairs, source,
    )  # fmt: skip
    x0, x1 = read(x + start * x_step, x_step, exists, pairs, wide)
    if rest > 0:
        column = _rest_of_head(start, pairs, rest)
        still = tl.load(x + column * x_step, mask=exists & (column < width), other=0.0).to(kind)
    tl.debug_barrier()
    cos, sin = rows(asked0, asked1, more, pair, gain, pairs, source, kind)
    x0, x1 = x0.to(kind), x1.to(kind)
    total = tl.sum(x0 * x0 + x1 * x1, axis=2)
    if rest > 0:
        total += tl.sum(still * still, axis=2)
    size = (1.0 / _root(total / width + number(epsilon, kind)))[:, :, None]
    every = tl.full((1, 1, 1), 1, tl.int1)
    w0, w1 = read(weight + start, 1, every, pairs, wide)
    n0, n1 = x0 * size * w0.to(kind), x1 * size * w1.to(kind)
    y0, y1 = tl.fma(n0, cos, -(n1 * sin)), tl.fma(n1, cos, n0 * sin)
    written = y.dtype.element_ty
    write(y + start * y_step, y_step, exists, y0.to(written), y1.to(written), pairs, wide)
    if rest > 0:
        of_rest = tl.load(weight + column, mask=column < width, other=0.0).to(kind)
        value = (still * size * of_rest).to(written)
        tl.store(y + column * y_step, value, mask=exists & (column < width))


@triton.jit(
    do_not_specialize_on_alignment=["q", "k", "q_out", "angles"],
    do_not_specialize=["items", "n_heads", *_FREE, *_THREE, *_ROWS],
)
def backward(
    q,
    k,
    q_out,
    weight,
    parts,
    angles,
    more,
    axes,
    items: tl.int64,
    inner: tl.int64,
    n_heads: tl.int64,
    over_blocks: tl.int64,
    over_tiles: tl.int64,
    gain: tl.int64,
    epsilon: tl.int64,
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
    outer_step: tl.int64,
    inner_step: tl.int64,
    step: tl.int64,
    more_outer_step: tl.int64,
    more_inner_step: tl.int64,
    more_step: tl.int64,
    source: tl.constexpr,
    read: tl.constexpr,
    read_grad: tl.constexpr,
    write: tl.constexpr,
    pairs: tl.constexpr,
    start: tl.constexpr,
    width: tl.constexpr,
    packed: tl.constexpr,
    wide: tl.constexpr,
    rest: tl.constexpr,
    tokens: tl.constexpr,
    heads: tl.constexpr,
):
    """The gradient of one tensor: ``q`` is what came in, ``k`` the gradient of what went out.

    ``q_out`` is the gradient of ``q``; ``parts`` points to ``[programs, width]``, where each
    program adds up its part of the ``items`` tiles for the gradient of the weight. ``read_grad``
    reads the pairs of the gradient, ``read`` and ``write`` those of ``q``; the rest is as in
    `forward`.
    """
    kind: tl.constexpr = tl.float64 if q.dtype.element_ty == tl.float64 else tl.float32
    blocks = tl.cdiv(n_heads, heads)
    pair = tl.arange(0, wide)[None, :]
    every = tl.full((1, 1, 1), 1, tl.int1)
    w0, w1 = read(weight + start, 1, every, pairs, wide)
    w0, w1 = w0.to(kind), w1.to(kind)
    # reduced among threads when all is added up, for that takes barriers
    groups: tl.constexpr = 4 if heads > 4 else heads
    of_w0 = tl.zeros((groups, tokens, wide), kind)
    of_w1 = tl.zeros((groups, tokens, wide), kind)
    if packed:
        q_step, k_step, q_out_step = 1, 1, 1
    if rest > 0:
        column = _rest_of_head(start, pairs, rest)
        of_rest = tl.load(weight + column, mask=column < width, other=0.0).to(kind)
        of_w = tl.zeros((groups, tokens, rest), kind)
    for item in range(tl.program_id(0), items.to(tl.int32), tl.num_programs(0)):
        block, outer, token = placed(item, blocks, over_blocks, inner, over_tiles, tokens)
        head = (block * heads + tl.arange(0, heads))[:, None, None]
        exists = (head < n_heads) & (token < inner)[None, :, None]
        x = q + outer * q_outer + head * q_head + token[None, :, None] * q_inner
        g = k + outer * k_outer + head * k_head + token[None, :, None] * k_inner
        y = q_out + outer * q_out_outer + head * q_out_head + token[None, :, None] * q_out_inner
        if packed:
            x = tl.multiple_of(x, (16, 16, 16))
            g = tl.multiple_of(g, (16, 16, 16))
            y = tl.multiple_of(y, (16, 16, 16))
        asked0, asked1 = asked(
            angles, more, axes, outer, token, token < inner,
            outer_step, inner_step, step, more_outer_step, more_inner_step, more_step,
            pair, pairs, source,
        )  # fmt: skip
        x0, x1 = read(x + start * q_step, q_step, exists, pairs, wide)
        g0, g1 = read_grad(g + start * k_step, k_step, exists, pairs, wide)
        if rest > 0:
            here = exists & (column < width)
            still = tl.load(x + column * q_step, mask=here, other=0.0).to(kind)
            back = tl.load(g + column * k_step, mask=here, other=0.0).to(kind)
        tl.debug_barrier()
        cos, sin = rows(asked0, asked1, more, pair, gain, pairs, source, kind)
        x0, x1, g0, g1 = x0.to(kind), x1.to(kind), g0.to(kind), g1.to(kind)
        v0, v1 = tl.fma(g0, cos, g1 * sin), tl.fma(g1, cos, -(g0 * sin))
        total = tl.sum(x0 * x0 + x1 * x1, axis=2)
        if rest > 0:
            total += tl.sum(still * still, axis=2)
        size = (1.0 / _root(total / width + number(epsilon, kind)))[:, :, None]
        # what is no token has no size where epsilon is 0, and adds nothing
        size = tl.where(exists, size, 0.0)
        n0, n1 = x0 * size, x1 * size
        of_w0 += _by_warps(v0 * n0, groups)
        of_w1 += _by_warps(v1 * n1, groups)
        v0, v1 = v0 * w0, v1 * w1
        mean = tl.sum(v0 * n0 + v1 * n1, axis=2)
        if rest > 0:
            n = still * size
            of_w += _by_warps(back * n, groups)
            back = back * of_rest
            mean += tl.sum(back * n, axis=2)
        mean = (mean / width)[:, :, None]
        y0, y1 = (v0 - n0 * mean) * size, (v1 - n1 * mean) * size
        written = y.dtype.element_ty
        write(
            y + start * q_out_step, q_out_step, exists, y0.to(written), y1.to(written), pairs, wide
        )
        if rest > 0:
            value = ((back - n * mean) * size).to(written)
            tl.store(y + column * q_out_step, value, mask=exists & (column < width))
    parts += tl.program_id(0).to(tl.int64) * width
    write(parts + start, 1, every, _total(of_w0), _total(of_w1), pairs, wide)
    if rest > 0:
        tl.store(parts + column, _total(of_w), mask=column < width)
