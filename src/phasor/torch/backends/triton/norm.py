"""RMS norm and rotation in Triton: one launch forwards, one for each tensor backwards.

A program takes the tile that the rotation's kernel takes, and holds whole heads: the sum of their
squares is one reduction over registers, and memory is read and written once. Backwards a program
handles many tiles and adds up its part of the weights' gradient; the parts are summed in the order
of the programs, so that a gradient is the same every time.
"""

# pyright: basic, reportMissingImports=false, reportInvalidTypeForm=false
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

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

_COUNTS = ["inner", "blocks_reciprocal", "tiles_reciprocal", "gain", "norm_eps"]


@triton.jit
def _rest_of_head(start: tl.constexpr, num_pairs: tl.constexpr, rest: tl.constexpr):
    """Columns that are not rotated, ``[1, 1, rest]``, which may run past the head."""
    column = tl.arange(0, rest)[None, None, :]
    return tl.where(column < start, column, column + 2 * num_pairs)


@triton.jit
def _sqrt(x):
    """The square root, correctly rounded: in float32 `tl.sqrt` takes subnormal numbers for 0."""
    return tl.sqrt_rn(x) if x.dtype == tl.float32 else tl.sqrt(x)


@triton.jit
def _sum_in_threads(x, groups: tl.constexpr):
    """``[heads, tokens, columns]`` -> ``[groups, tokens, columns]``: every fourth head summed.

    With 4 warps these heads are in one thread, so that no thread waits for another.
    """
    return tl.sum(x.reshape(x.shape[0] // groups, groups, x.shape[1], x.shape[2]), axis=0)


@triton.jit
def _sum_columns(x):
    """``[groups, tokens, columns]`` -> ``[1, 1, columns]``."""
    return tl.sum(tl.sum(x, axis=0, keep_dims=True), axis=1, keep_dims=True)


@triton.jit(
    do_not_specialize_on_alignment=["q", "k", "q_out", "k_out", "angles"],
    do_not_specialize=[
        *("q_heads", "k_heads", *_COUNTS),
        *stride_names("q", "k", "q_out", "k_out"),
        *ANGLE_STRIDES,
    ],
)
def forward(
    q, k, q_out, k_out, q_weight, k_weight, angles, tables, axis_of_pair,
    inner: tl.int64, q_heads: tl.int64, k_heads: tl.int64,
    blocks_reciprocal: tl.int64, tiles_reciprocal: tl.int64, gain: tl.int64, norm_eps: tl.int64,
    q_outer: tl.int64, q_inner: tl.int64, q_head: tl.int64, q_step: tl.int64,
    k_outer: tl.int64, k_inner: tl.int64, k_head: tl.int64, k_step: tl.int64,
    q_out_outer: tl.int64, q_out_inner: tl.int64, q_out_head: tl.int64, q_out_step: tl.int64,
    k_out_outer: tl.int64, k_out_inner: tl.int64, k_out_head: tl.int64, k_out_step: tl.int64,
    angle_outer: tl.int64, angle_inner: tl.int64, angle_step: tl.int64,
    sin_outer: tl.int64, sin_inner: tl.int64, sin_step: tl.int64,
    source: tl.constexpr, load_pairs: tl.constexpr, store_pairs: tl.constexpr,
    num_pairs: tl.constexpr, start: tl.constexpr, width: tl.constexpr, packed: tl.constexpr,
    pair_block: tl.constexpr, rest: tl.constexpr,
    token_block: tl.constexpr, head_block: tl.constexpr,
):  # fmt: skip
    """See `backends.triton.kernels.rotation`, whose arguments these are.

    And: ``q_weight`` and ``k_weight`` point to contiguous weights; ``norm_eps`` is the bits of a
    float64, as ``gain``; ``width`` are the columns of a head, and ``rest`` those that are not
    rotated, or the next power of two; 0 if there are none.
    """
    dtype: tl.constexpr = tl.float64 if q.dtype.element_ty == tl.float64 else tl.float32
    q_blocks = tl.cdiv(q_heads, head_block)
    blocks = q_blocks + tl.cdiv(k_heads, head_block)
    block, outer, token = tile_index(
        tl.program_id(0), blocks, blocks_reciprocal, inner, tiles_reciprocal, token_block
    )

    x, y, weight, n_heads, first = q, q_out, q_weight, q_heads, block
    x_outer, x_inner, x_head, x_step = q_outer, q_inner, q_head, q_step
    y_outer, y_inner, y_head, y_step = q_out_outer, q_out_inner, q_out_head, q_out_step
    if block >= q_blocks:
        x, y, weight, n_heads, first = k, k_out, k_weight, k_heads, block - q_blocks
        x_outer, x_inner, x_head, x_step = k_outer, k_inner, k_head, k_step
        y_outer, y_inner, y_head, y_step = k_out_outer, k_out_inner, k_out_head, k_out_step
    # [heads, 1, 1], then [heads, tokens, 1]
    head = (first * head_block + tl.arange(0, head_block))[:, None, None]
    exists = (head < n_heads) & (token < inner)[None, :, None]
    x += outer * x_outer + head * x_head + token[None, :, None] * x_inner
    y += outer * y_outer + head * y_head + token[None, :, None] * y_inner
    if packed:
        x, x_step = tl.multiple_of(x, (16, 16, 16)), 1
        y, y_step = tl.multiple_of(y, (16, 16, 16)), 1

    # loads in the order of `kernels.rotation`: positions, heads, table rows
    pair = tl.arange(0, pair_block)[None, :]
    angle0, angle1 = load_angles(
        angles, tables, axis_of_pair, outer, token, token < inner,
        angle_outer, angle_inner, angle_step, sin_outer, sin_inner, sin_step,
        pair, num_pairs, source,
    )  # fmt: skip
    x0, x1 = load_pairs(x + start * x_step, x_step, exists, num_pairs, pair_block)
    if rest > 0:
        column = _rest_of_head(start, num_pairs, rest)
        in_head = exists & (column < width)
        unrotated = tl.load(x + column * x_step, mask=in_head, other=0.0).to(dtype)
    tl.debug_barrier()
    cos, sin = cos_sin(angle0, angle1, tables, pair, gain, num_pairs, source, dtype)
    x0, x1 = x0.to(dtype), x1.to(dtype)
    # [heads, tokens, pairs] -> [heads, tokens]
    squares = tl.sum(x0 * x0 + x1 * x1, axis=2)
    if rest > 0:
        squares += tl.sum(unrotated * unrotated, axis=2)
    mean = squares / width + from_float64_bits(norm_eps, dtype)
    inverse_rms = (1.0 / _sqrt(mean))[:, :, None]
    no_mask = tl.full((1, 1, 1), 1, tl.int1)
    w0, w1 = load_pairs(weight + start, 1, no_mask, num_pairs, pair_block)
    n0, n1 = x0 * inverse_rms * w0.to(dtype), x1 * inverse_rms * w1.to(dtype)
    y0, y1 = tl.fma(n0, cos, -(n1 * sin)), tl.fma(n1, cos, n0 * sin)
    out_dtype = y.dtype.element_ty
    y0, y1 = y0.to(out_dtype), y1.to(out_dtype)
    store_pairs(y + start * y_step, y_step, exists, y0, y1, num_pairs, pair_block)
    if rest > 0:
        w = tl.load(weight + column, mask=column < width, other=0.0).to(dtype)
        value = (unrotated * inverse_rms * w).to(out_dtype)
        tl.store(y + column * y_step, value, mask=in_head)


@triton.jit(
    do_not_specialize_on_alignment=["x", "y_grad", "x_grad", "angles"],
    do_not_specialize=[
        *("items", "n_heads", *_COUNTS),
        *stride_names("x", "y_grad", "x_grad"),
        *ANGLE_STRIDES,
    ],
)
def backward(
    x, y_grad, x_grad, weight, parts, angles, tables, axis_of_pair,
    items: tl.int64, inner: tl.int64, n_heads: tl.int64,
    blocks_reciprocal: tl.int64, tiles_reciprocal: tl.int64, gain: tl.int64, norm_eps: tl.int64,
    x_outer: tl.int64, x_inner: tl.int64, x_head: tl.int64, x_step: tl.int64,
    y_grad_outer: tl.int64, y_grad_inner: tl.int64, y_grad_head: tl.int64, y_grad_step: tl.int64,
    x_grad_outer: tl.int64, x_grad_inner: tl.int64, x_grad_head: tl.int64, x_grad_step: tl.int64,
    angle_outer: tl.int64, angle_inner: tl.int64, angle_step: tl.int64,
    sin_outer: tl.int64, sin_inner: tl.int64, sin_step: tl.int64,
    source: tl.constexpr, load_pairs: tl.constexpr, load_grad: tl.constexpr,
    store_pairs: tl.constexpr,
    num_pairs: tl.constexpr, start: tl.constexpr, width: tl.constexpr, packed: tl.constexpr,
    pair_block: tl.constexpr, rest: tl.constexpr,
    token_block: tl.constexpr, head_block: tl.constexpr,
):  # fmt: skip
    """The gradients of ``x`` and of the weight from ``y_grad``, that of the result.

    ``parts`` points to ``[programs, width]``, where each program adds up its part of the ``items``
    tiles for the gradient of the weight. ``load_grad`` reads the pairs of ``y_grad``,
    ``load_pairs`` those of ``x``, and ``store_pairs`` writes those of ``x_grad``; the rest is as in
    `forward`.
    """
    dtype: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    blocks = tl.cdiv(n_heads, head_block)
    pair = tl.arange(0, pair_block)[None, :]
    no_mask = tl.full((1, 1, 1), 1, tl.int1)
    w0, w1 = load_pairs(weight + start, 1, no_mask, num_pairs, pair_block)
    w0, w1 = w0.to(dtype), w1.to(dtype)
    # the weight's gradient is summed within threads, and across threads only at the end, because
    # that takes barriers
    groups: tl.constexpr = 4 if head_block > 4 else head_block
    w0_grad = tl.zeros((groups, token_block, pair_block), dtype)
    w1_grad = tl.zeros((groups, token_block, pair_block), dtype)
    if packed:
        x_step, y_grad_step, x_grad_step = 1, 1, 1
    if rest > 0:
        column = _rest_of_head(start, num_pairs, rest)
        w = tl.load(weight + column, mask=column < width, other=0.0).to(dtype)
        w_grad = tl.zeros((groups, token_block, rest), dtype)
    for item in range(tl.program_id(0), items.to(tl.int32), tl.num_programs(0)):
        block, outer, token = tile_index(
            item, blocks, blocks_reciprocal, inner, tiles_reciprocal, token_block
        )
        # [heads, 1, 1], then [heads, tokens, 1]
        head = (block * head_block + tl.arange(0, head_block))[:, None, None]
        exists = (head < n_heads) & (token < inner)[None, :, None]
        source_tile = x + outer * x_outer + head * x_head + token[None, :, None] * x_inner
        grad_tile = (
            y_grad + outer * y_grad_outer + head * y_grad_head + token[None, :, None] * y_grad_inner
        )
        target_tile = (
            x_grad + outer * x_grad_outer + head * x_grad_head + token[None, :, None] * x_grad_inner
        )
        if packed:
            source_tile = tl.multiple_of(source_tile, (16, 16, 16))
            grad_tile = tl.multiple_of(grad_tile, (16, 16, 16))
            target_tile = tl.multiple_of(target_tile, (16, 16, 16))
        angle0, angle1 = load_angles(
            angles, tables, axis_of_pair, outer, token, token < inner,
            angle_outer, angle_inner, angle_step, sin_outer, sin_inner, sin_step,
            pair, num_pairs, source,
        )  # fmt: skip
        x0, x1 = load_pairs(source_tile + start * x_step, x_step, exists, num_pairs, pair_block)
        g0, g1 = load_grad(
            grad_tile + start * y_grad_step, y_grad_step, exists, num_pairs, pair_block
        )
        if rest > 0:
            in_head = exists & (column < width)
            unrotated = tl.load(source_tile + column * x_step, mask=in_head, other=0.0).to(dtype)
            v = tl.load(grad_tile + column * y_grad_step, mask=in_head, other=0.0).to(dtype)
        tl.debug_barrier()
        cos, sin = cos_sin(angle0, angle1, tables, pair, gain, num_pairs, source, dtype)
        x0, x1, g0, g1 = x0.to(dtype), x1.to(dtype), g0.to(dtype), g1.to(dtype)
        # the gradient rotated back
        v0, v1 = tl.fma(g0, cos, g1 * sin), tl.fma(g1, cos, -(g0 * sin))
        # [heads, tokens, pairs] -> [heads, tokens]
        squares = tl.sum(x0 * x0 + x1 * x1, axis=2)
        if rest > 0:
            squares += tl.sum(unrotated * unrotated, axis=2)
        mean_square = squares / width + from_float64_bits(norm_eps, dtype)
        inverse_rms = (1.0 / _sqrt(mean_square))[:, :, None]
        # past the last token this would be 1 / 0 where norm_eps is 0
        inverse_rms = tl.where(exists, inverse_rms, 0.0)
        n0, n1 = x0 * inverse_rms, x1 * inverse_rms
        w0_grad += _sum_in_threads(v0 * n0, groups)
        w1_grad += _sum_in_threads(v1 * n1, groups)
        v0, v1 = v0 * w0, v1 * w1
        mean = tl.sum(v0 * n0 + v1 * n1, axis=2)
        if rest > 0:
            n = unrotated * inverse_rms
            w_grad += _sum_in_threads(v * n, groups)
            v = v * w
            mean += tl.sum(v * n, axis=2)
        mean = (mean / width)[:, :, None]
        d0, d1 = (v0 - n0 * mean) * inverse_rms, (v1 - n1 * mean) * inverse_rms
        out_dtype = x_grad.dtype.element_ty
        d0, d1 = d0.to(out_dtype), d1.to(out_dtype)
        target = target_tile + start * x_grad_step
        store_pairs(target, x_grad_step, exists, d0, d1, num_pairs, pair_block)
        if rest > 0:
            value = ((v - n * mean) * inverse_rms).to(out_dtype)
            tl.store(target_tile + column * x_grad_step, value, mask=in_head)
    parts += tl.program_id(0).to(tl.int64) * width
    total0, total1 = _sum_columns(w0_grad), _sum_columns(w1_grad)
    store_pairs(parts + start, 1, no_mask, total0, total1, num_pairs, pair_block)
    if rest > 0:
        tl.store(parts + column, _sum_columns(w_grad), mask=column < width)
