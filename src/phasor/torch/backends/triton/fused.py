"""Launches of the kernels that do more than rotate: norm and rotation, rotation and cache write.

Tokens, tiles and rows are found as for the rotation itself, once for tensors of the same shapes and
strides. Where tokens lie too unevenly for one launch, these work on contiguous copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from phasor.torch._fused import FLOAT8, inverse_unit
from phasor.torch._internals import count_writes
from phasor.torch._layout import read_layout
from phasor.torch.backends.triton.plan import Plan, kept
from phasor.torch.backends.triton.tiles import (
    VECTOR,
    are_few,
    bits_of,
    in_pieces,
    module,
    of_each,
    reciprocal,
    settled,
    strides_of,
    tile_of,
    tokens_of,
)

#: A norm keeps its tile until the sum over a head is there, and a backward pass keeps two.
FORWARD_PARTS, BACKWARD_PARTS = 2, 4
_PROGRAMS = 1024  # of a backward pass at most: each leaves a row of the weights' gradient
_PLANS: dict[tuple[Any, ...], Plan | None] = {}


def norm_rotate(
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    angles: Sequence[Tensor],
    rope: str,
    epsilon: float,
    gain: float,
) -> list[Tensor]:
    """New tensors with the strides of ``xs``."""
    outs = [torch.empty_like(x) for x in xs]
    weights = [weight.contiguous() for weight in weights]
    alike = xs[0].dtype == xs[-1].dtype
    for part in [slice(None)] if alike else [slice(i, i + 1) for i in range(len(xs))]:
        turns = settled(angles, rope, xs[part][0].dtype)
        with _device(xs[0]):
            _norm(xs[part], weights[part], outs[part], turns, rope, epsilon, gain)
    return outs


def norm_rotate_backward(
    grads: Sequence[Tensor],
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    angles: Sequence[Tensor],
    rope: str,
    epsilon: float,
    gain: float,
) -> list[Tensor]:
    """Gradients of ``xs``, then of ``weights``."""
    of_xs = [torch.empty_like(x) for x in xs]
    of_weights: list[Tensor] = []
    for g, x, w, out in zip(grads, xs, weights, of_xs, strict=True):
        turns = settled(angles, rope, x.dtype)
        with _device(x):
            of_weight = _norm_gradient(g, x, w.contiguous(), out, turns, rope, epsilon, gain)
        of_weights.append(of_weight.to(w.dtype))
    return of_xs + of_weights


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
    """The query in place, and key and value into their caches."""
    caches = (c.view(torch.uint8) if c.dtype == FLOAT8 else c for c in (key_cache, value_cache))
    tensors = q, k, v, *caches, slots
    angles = settled([positions], rope, q.dtype)
    with _device(q):
        _store(tensors, angles, rope, gain, (key_unit, value_unit))
    count_writes((q, key_cache, value_cache))


def _norm(
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    outs: Sequence[Tensor],
    angles: Sequence[Tensor],
    rope: str,
    epsilon: float,
    gain: float,
) -> None:
    tensors = xs[0], xs[-1], outs[0], outs[-1], weights[0], weights[-1]
    key = _key(("norm", len(xs), rope, epsilon, gain), tensors, angles)
    plan = kept(_PLANS, key, lambda: _norm_plan(tensors, angles, rope, epsilon, gain, len(xs) == 2))
    if plan is not None:
        plan.launch(tensors, angles)
        return
    whole = [a.contiguous() for a in of_each(angles, rope, xs[0].shape[:-2])]
    made = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in xs]
    _norm([x.contiguous() for x in xs], weights, made, whole, rope, epsilon, gain)
    for out, y in zip(outs, made, strict=True):
        out.copy_(y)


def _norm_plan(
    tensors: Sequence[Tensor],
    angles: Sequence[Tensor],
    rope: str,
    epsilon: float,
    gain: float,
    together: bool,
) -> Plan | None:
    q, k = tensors[:2]
    walked = tokens_of(tensors[:4], angles, rope)
    if walked is None:
        return None
    layout, kernels = read_layout(rope), module("kernels")
    q_heads, k_heads = q.shape[-2], k.shape[-2] if together else 0
    placed, packed = strides_of(tensors[:4], walked)
    rest = _power(q.shape[-1] - 2 * walked.rows.pairs)
    wide, many, heads = tile_of(walked, q, packed, parts=FORWARD_PARTS, rest=rest)
    blocks, tiles = -(-q_heads // heads) + -(-k_heads // heads), -(-walked.inner // many)
    return Plan(
        ("norm", "forward"),
        walked.outer * tiles * blocks,
        walked.rows.tables,
        walked.rows.axes,
        (
            *(walked.inner, q_heads, k_heads, reciprocal(blocks), reciprocal(tiles)),
            *(bits_of(gain), bits_of(epsilon)),
            *(*placed, *walked.placed),
            *(walked.rows.source, kernels.reader(layout.pairing)),
            kernels.writer(layout.pairing_out),
            *(walked.rows.pairs, layout.rotary_start, q.shape[-1], packed),
            *(wide, rest, many, heads),
        ),
        None,
    )


def _norm_gradient(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    angles: Sequence[Tensor],
    rope: str,
    epsilon: float,
    gain: float,
) -> Tensor:
    """Writes ``out``, the gradient of ``x``; returns that of ``weight``, as it is computed."""
    tensors = x, grad, out, weight
    key = _key(("gradient", rope, epsilon, gain), tensors, angles)
    plan = kept(_PLANS, key, lambda: _gradient_plan(tensors, angles, rope, epsilon, gain))
    if plan is not None:
        kind = torch.float64 if x.dtype == torch.float64 else torch.float32
        # every program writes all of its row
        parts = torch.empty(plan.programs, x.shape[-1], dtype=kind, device=x.device)
        plan.launch((*tensors, parts), angles)
        return parts.sum(0)
    whole = [a.contiguous() for a in of_each(angles, rope, x.shape[:-2])]
    made = torch.empty_like(x, memory_format=torch.contiguous_format)
    copies = grad.contiguous(), x.contiguous(), weight, made
    of_weight = _norm_gradient(*copies, whole, rope, epsilon, gain)
    out.copy_(made)
    return of_weight


def _gradient_plan(
    tensors: Sequence[Tensor], angles: Sequence[Tensor], rope: str, epsilon: float, gain: float
) -> Plan | None:
    x = tensors[0]
    walked = tokens_of(tensors[:3], angles, rope)
    if walked is None:
        return None
    layout, kernels = read_layout(rope), module("kernels")
    placed, packed = strides_of(tensors[:3], walked)
    rest = _power(x.shape[-1] - 2 * walked.rows.pairs)
    wide, many, heads = tile_of(walked, x, packed, parts=BACKWARD_PARTS, rest=rest)
    blocks, tiles = -(-x.shape[-2] // heads), -(-walked.inner // many)
    items = walked.outer * tiles * blocks
    return Plan(
        ("norm", "backward"),
        min(items, _PROGRAMS),
        walked.rows.tables,
        walked.rows.axes,
        (
            *(items, walked.inner, x.shape[-2], reciprocal(blocks), reciprocal(tiles)),
            *(bits_of(gain), bits_of(epsilon)),
            *(*placed, *walked.placed),
            *(walked.rows.source, kernels.reader(layout.pairing)),
            *(kernels.reader(layout.pairing_out), kernels.writer(layout.pairing)),
            *(walked.rows.pairs, layout.rotary_start, x.shape[-1], packed),
            *(wide, rest, many, heads),
        ),
        None,
    )


def _store(
    tensors: Sequence[Tensor],
    angles: Sequence[Tensor],
    rope: str,
    gain: float,
    units: tuple[float, float],
) -> None:
    key = _key(("cache", rope, gain, *units), tensors, angles)
    plan = kept(_PLANS, key, lambda: _store_plan(tensors, angles, rope, gain, units))
    if plan is not None:
        plan.launch(tensors, angles)
        return
    q, k, v, *caches, slots = tensors
    whole = [a.contiguous() for a in of_each(angles, rope, q.shape[:-2])]
    turned = q.contiguous()
    copies = turned, k.contiguous(), v.contiguous(), *caches, slots.contiguous()
    _store(copies, whole, rope, gain, units)
    q.copy_(turned)


def _store_plan(
    tensors: Sequence[Tensor],
    angles: Sequence[Tensor],
    rope: str,
    gain: float,
    units: tuple[float, float],
) -> Plan | None:
    q, k, v, key_cache, value_cache, slots = tensors
    walked = tokens_of([q, k, v], angles, rope, slots)
    if walked is None:
        return None
    layout, kernels = read_layout(rope), module("kernels")
    placed, packed = strides_of((q, k, v), walked)
    caches = key_cache, value_cache
    packed = packed and all(in_pieces(cache, cache.stride()[:-1]) for cache in caches)
    wide, many, heads = tile_of(walked, q, packed)
    blocks, tiles = (
        -(-q.shape[-2] // heads) + 2 * -(-k.shape[-2] // heads),
        -(-walked.inner // many),
    )
    return Plan(
        ("cache", "rotate_and_cache"),
        walked.outer * tiles * blocks,
        walked.rows.tables,
        walked.rows.axes,
        (
            *(walked.inner, q.shape[-2], k.shape[-2], reciprocal(blocks), reciprocal(tiles)),
            *(bits_of(gain), *(bits_of(inverse_unit(unit)) for unit in units)),
            # nothing is kept in a cache without rows, nor divided by their number
            *(key_cache.shape[:2] if key_cache.numel() else (0, 1)),
            *(*placed, *key_cache.stride(), *value_cache.stride()),
            *(*walked.steps[3], *walked.placed),
            *(walked.rows.source, kernels.reader(layout.pairing)),
            kernels.writer(layout.pairing_out),
            layout.pairing != layout.pairing_out or are_few(walked),
            *(walked.rows.pairs, layout.rotary_start, q.shape[-1], v.shape[-1]),
            *(packed, wide, many, heads),
        ),
        None,
    )


def _key(
    work: tuple[Any, ...], tensors: Sequence[Tensor], angles: Sequence[Tensor]
) -> tuple[Any, ...]:
    """All that a plan depends on. Triton looks at where weights and rows begin, and so on."""
    return (
        *work,
        tensors[0].device,
        *[(t.shape, t.stride(), t.dtype, t.data_ptr() % VECTOR == 0) for t in tensors],
        *[(a.shape, a.stride(), a.dtype, a.data_ptr() % VECTOR == 0) for a in angles],
    )


def _power(n: int) -> int:
    """The power of two from ``n`` on; 0 for none."""
    return 1 << (n - 1).bit_length() if n else 0


def _device(x: Tensor) -> AbstractContextManager[Any]:
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        return torch.cuda.device(x.device)
    return nullcontext()
