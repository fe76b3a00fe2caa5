"""Launches of the kernels that do more than rotate: norm and rotation, rotation and cache write.

Tokens, tiles and tables are found as for the rotation itself, once for tensors of the same shapes
and strides. Where strides are too irregular for one launch, these work on contiguous copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from phasor.torch._internals import count_writes
from phasor.torch._tables import compute_dtype, read_layout
from phasor.torch.backends.triton.launching import (
    FLOAT8,
    VECTOR_BYTES,
    LaunchPlan,
    Plans,
    choose_tile,
    expand_angles,
    find_plan,
    find_tokens,
    float64_bits,
    head_strides,
    inverse_unit,
    is_packed,
    load_kernels,
    normalize_angles,
    on_device_of,
    reciprocal,
)

#: Divisors of a tile: a norm holds its tile until a head's sum is complete, its gradient holds two.
FORWARD_PARTS, BACKWARD_PARTS = 2, 4
_MOST_PROGRAMS = 1024  # of a backward pass: each writes a row of the weights' gradient
_PLANS: Plans = {}


def norm_rotate(
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    angles: Sequence[Tensor],
    rope: str,
    norm_eps: float,
    gain: float,
) -> list[Tensor]:
    """New tensors with the strides of ``xs``."""
    outs = [torch.empty_like(x) for x in xs]
    weights = [weight.contiguous() for weight in weights]
    share_dtype = xs[0].dtype == xs[-1].dtype
    for part in [slice(None)] if share_dtype else [slice(i, i + 1) for i in range(len(xs))]:
        own_angles = normalize_angles(angles, rope, xs[part][0].dtype)
        with on_device_of(xs[0]):
            _launch_norm(xs[part], weights[part], outs[part], own_angles, rope, norm_eps, gain)
    return outs


def norm_rotate_backward(
    grads: Sequence[Tensor],
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    angles: Sequence[Tensor],
    rope: str,
    norm_eps: float,
    gain: float,
) -> list[Tensor]:
    """Gradients of ``xs``, then of ``weights``."""
    x_grads = [torch.empty_like(x) for x in xs]
    weight_grads: list[Tensor] = []
    for grad, x, w, x_grad in zip(grads, xs, weights, x_grads, strict=True):
        tensors = x, grad, x_grad, w.contiguous()
        own_angles = normalize_angles(angles, rope, x.dtype)
        with on_device_of(x):
            weight_grads.append(
                _launch_norm_gradient(tensors, own_angles, rope, norm_eps, gain).to(w.dtype)
            )
    return x_grads + weight_grads


def rotate_and_cache_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    slots: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    rope: str,
    gain: float,
    key_unit: float,
    value_unit: float,
) -> None:
    """Rotate the query in place, and write key and value into their caches."""
    caches = (c.view(torch.uint8) if c.dtype == FLOAT8 else c for c in (key_cache, value_cache))
    tensors = q, k, v, *caches, slots
    angles = normalize_angles([positions], rope, q.dtype)
    with on_device_of(q):
        _launch_cache_write(tensors, angles, rope, gain, (key_unit, value_unit))
    count_writes((q, key_cache, value_cache))


def _launch_norm(
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    outs: Sequence[Tensor],
    angles: Sequence[Tensor],
    rope: str,
    norm_eps: float,
    gain: float,
) -> None:
    q, k, has_key = xs[0], xs[-1], len(xs) == 2
    tensors = q, k, outs[0], outs[-1], weights[0], weights[-1]
    heads = q.shape[-2], k.shape[-2] if has_key else 0

    def plan_launch() -> LaunchPlan | None:
        return _plan_norm("forward", tensors[:4], heads, angles, rope, norm_eps, gain)

    plan = _find_plan(("norm", has_key, rope, norm_eps, gain), tensors, angles, plan_launch)
    if plan is not None:
        plan.launch(tensors, angles)
        return
    copies = [x.contiguous() for x in xs]
    results = [torch.empty_like(x) for x in copies]
    _launch_norm(copies, weights, results, _copy_angles(angles, rope, q), rope, norm_eps, gain)
    for out, y in zip(outs, results, strict=True):
        out.copy_(y)


def _launch_norm_gradient(
    tensors: Sequence[Tensor], angles: Sequence[Tensor], rope: str, norm_eps: float, gain: float
) -> Tensor:
    """Write the gradient of ``x``, and return that of the weight in the dtype it is computed in.

    ``tensors`` are ``x``, the gradient of the output, the gradient of ``x``, and the weight.
    """
    x, grad, x_grad, weight = tensors

    def plan_launch() -> LaunchPlan | None:
        return _plan_norm("backward", tensors[:3], x.shape[-2:-1], angles, rope, norm_eps, gain)

    plan = _find_plan(("gradient", rope, norm_eps, gain), tensors, angles, plan_launch)
    if plan is not None:
        # [programs, head_dim], of which each program writes its whole row
        shape = plan.programs, x.shape[-1]
        parts = torch.empty(shape, dtype=compute_dtype(x.dtype), device=x.device)
        plan.launch((*tensors, parts), angles)
        return parts.sum(0)
    result = torch.empty_like(x, memory_format=torch.contiguous_format)
    copies = x.contiguous(), grad.contiguous(), result, weight
    weight_grad = _launch_norm_gradient(copies, _copy_angles(angles, rope, x), rope, norm_eps, gain)
    x_grad.copy_(result)
    return weight_grad


def _plan_norm(
    kernel: Literal["forward", "backward"],
    tensors: Sequence[Tensor],
    heads: Sequence[int],
    angles: Sequence[Tensor],
    rope: str,
    norm_eps: float,
    gain: float,
) -> LaunchPlan | None:
    """The launch of a kernel in `norm`, or None where strides are too irregular for one.

    ``tensors`` have heads, and ``heads`` says how many, of a query and a key where there are both.
    """
    tokens = find_tokens(tensors, angles, rope)
    if tokens is None:
        return None
    layout, kernels, head_dim = read_layout(rope), load_kernels("kernels"), tensors[0].shape[-1]
    strides, packed = head_strides(tensors, tokens)
    rest = _power_of_two(head_dim - 2 * tokens.num_pairs)
    backward = kernel == "backward"
    parts = BACKWARD_PARTS if backward else FORWARD_PARTS
    tile = choose_tile(tokens, tensors[0], packed, parts, rest)
    blocks, tiles = tile.count_heads(*heads), tile.count_tokens(tokens)
    items = tokens.outer * tiles * blocks
    # the gradient comes in the pairing of the result, and leaves in that of ``x``
    written = layout.pairing if backward else layout.pairing_out
    return LaunchPlan(
        ("norm", kernel),
        min(items, _MOST_PROGRAMS) if backward else items,
        tokens.tables,
        tokens.axes,
        (
            *((items,) if backward else ()),
            *(tokens.inner, *heads, reciprocal(blocks), reciprocal(tiles)),
            *(float64_bits(gain), float64_bits(norm_eps)),
            *(*strides, *tokens.angle_strides, tokens.source),
            kernels.load_function(layout.pairing),
            *((kernels.load_function(layout.pairing_out),) if backward else ()),
            kernels.store_function(written),
            *(tokens.num_pairs, layout.rotary_start, head_dim, packed),
            *(tile.pairs, rest, tile.tokens, tile.heads),
        ),
    )


def _launch_cache_write(
    tensors: Sequence[Tensor],
    angles: Sequence[Tensor],
    rope: str,
    gain: float,
    units: tuple[float, float],
) -> None:
    """``tensors`` are query, key, value, their two caches, and slots."""
    q, k, v, key_cache, value_cache, slots = tensors

    def plan_launch() -> LaunchPlan | None:
        tokens = find_tokens([q, k, v], angles, rope, slots)
        if tokens is None:
            return None
        layout, kernels = read_layout(rope), load_kernels("kernels")
        strides, packed = head_strides((q, k, v), tokens)
        caches = key_cache, value_cache
        packed = packed and all(is_packed(cache, cache.stride()[:-1]) for cache in caches)
        tile = choose_tile(tokens, q, packed)
        q_heads, k_heads = q.shape[-2], k.shape[-2]
        # blocks of the query, of the key, and of the value
        blocks, tiles = tile.count_heads(q_heads, k_heads, k_heads), tile.count_tokens(tokens)
        return LaunchPlan(
            ("cache", "rotate_and_cache"),
            tokens.outer * tiles * blocks,
            tokens.tables,
            tokens.axes,
            (
                *(tokens.inner, q_heads, k_heads, reciprocal(blocks), reciprocal(tiles)),
                *(float64_bits(gain), *(float64_bits(inverse_unit(unit)) for unit in units)),
                # a cache without rows stores nothing, and nothing is divided by their number
                *(key_cache.shape[:2] if key_cache.numel() else (0, 1)),
                *(*strides, *key_cache.stride(), *value_cache.stride()),
                *(*tokens.strides[3], *tokens.angle_strides, tokens.source),
                kernels.load_function(layout.pairing),
                kernels.store_function(layout.pairing_out),
                layout.pairing != layout.pairing_out or tokens.are_few,
                *(tokens.num_pairs, layout.rotary_start, q.shape[-1], v.shape[-1]),
                *(packed, *tile),
            ),
        )

    plan = _find_plan(("cache", rope, gain, *units), tensors, angles, plan_launch)
    if plan is not None:
        plan.launch(tensors, angles)
        return
    rotated = q.contiguous()
    copies = rotated, k.contiguous(), v.contiguous(), key_cache, value_cache, slots.contiguous()
    _launch_cache_write(copies, _copy_angles(angles, rope, q), rope, gain, units)
    q.copy_(rotated)


def _find_plan(
    work_key: tuple[Any, ...],
    tensors: Sequence[Tensor],
    angles: Sequence[Tensor],
    plan_launch: Callable[[], LaunchPlan | None],
) -> LaunchPlan | None:
    """The plan for this work on tensors like these."""
    # with the alignment of every pointer, on some of which Triton specializes
    all_tensors = *tensors, *angles
    keys = [(t.shape, t.stride(), t.dtype, t.data_ptr() % VECTOR_BYTES == 0) for t in all_tensors]
    return find_plan(_PLANS, (*work_key, tensors[0].device, *keys), plan_launch)


def _copy_angles(angles: Sequence[Tensor], rope: str, x: Tensor) -> list[Tensor]:
    """Contiguous angles for contiguous copies of tensors like ``x``."""
    return [a.contiguous() for a in expand_angles(angles, rope, x.shape[:-2])]


def _power_of_two(n: int) -> int:
    """The smallest power of two that is at least ``n``; 0 for none."""
    return 1 << (n - 1).bit_length() if n else 0
