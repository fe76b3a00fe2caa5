"""Launches of the kernels that do more than rotate: norm and rotation, rotation and cache write.

Tokens, tiles and rows are found as for the rotation itself. Where tokens lie too unevenly for one
launch, these work on contiguous copies.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phasor.torch._fused import FLOAT8, inverse_unit
from phasor.torch._layout import count_axes, read_layout
from phasor.torch._triton.tiles import Rows, broadcast, module, source_of, tile, walk

#: A norm keeps its tile until the sum over a head is there, and a backward pass keeps two.
FORWARD_PARTS, BACKWARD_PARTS = 2, 4
_PROGRAMS = 1024  # of a backward pass at most: each leaves a row of the weights' gradient
_VECTOR = 16


class _Tokens(NamedTuple):
    """Tokens in two dimensions, and the rows that they find there."""

    inner: int
    outer: int
    steps: list[tuple[int, int]]  # of every tensor, from one token to the next: outer, inner
    source: Rows
    placed: tuple[int, ...]  # where rows are found, as kernels take it


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
    alike = xs[0].dtype == xs[-1].dtype
    for part in [slice(None)] if alike else [slice(i, i + 1) for i in range(len(xs))]:
        _norm(xs[part], weights[part], outs[part], angles, rope, epsilon, gain)
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
    of_weights = [
        _norm_gradient(*each, angles, rope, epsilon, gain)
        for each in zip(grads, xs, weights, of_xs, strict=True)
    ]
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
    tokens = _tokens([q, k, v], positions, rope, slots)
    caches = key_cache, value_cache
    if tokens is None:
        turned = q.contiguous()
        whole = _of_each(positions, q, rope)
        rotate_and_cache_(
            turned, k.contiguous(), v.contiguous(), whole, slots.contiguous(), key_cache,
            value_cache, rope, gain, key_unit, value_unit,
        )  # fmt: skip
        q.copy_(turned)
        return
    layout = read_layout(rope)
    pairs = tokens.source.pairs
    wide, many, heads = tile(pairs, tokens.inner * tokens.outer, q.element_size())
    blocks = -(-q.shape[-2] // heads) + 2 * -(-k.shape[-2] // heads)
    programs = tokens.outer * -(-tokens.inner // many) * blocks
    if programs == 0 or key_cache.numel() + value_cache.numel() == 0:
        return
    placed, packed = _placed((q, k, v), tokens)
    packed = packed and all(_in_pieces(cache, cache.stride()[:-1]) for cache in caches)
    with _device(q):
        module("cache").rotate_and_cache[(programs,)](
            *(q, k, v, *caches, slots),
            *(tokens.source.angles, tokens.source.more, tokens.source.axes),
            *(tokens.inner, q.shape[-2], k.shape[-2], _bits(gain)),
            *(_bits(inverse_unit(unit)) for unit in (key_unit, value_unit)),
            *key_cache.shape[:2],
            *placed,
            *key_cache.stride(),
            *value_cache.stride(),
            *tokens.steps[3],
            *tokens.placed,
            source=tokens.source.function,
            read=module("kernels").READ[layout.pairing],
            write=module("kernels").WRITE[layout.pairing_out],
            moves=layout.pairing != layout.pairing_out,
            narrow_keys=key_cache.dtype == FLOAT8,
            narrow_values=value_cache.dtype == FLOAT8,
            pairs=pairs,
            start=layout.rotary_start,
            width=q.shape[-1],
            value_width=v.shape[-1],
            packed=packed,
            wide=wide,
            tokens=many,
            heads=heads,
        )
    # autograd counts writes, and does not see these
    written = [x for x in (q, key_cache, value_cache) if not x.is_inference()]
    torch.autograd.graph.increment_version(written)


def _norm(
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    outs: Sequence[Tensor],
    angles: Sequence[Tensor],
    rope: str,
    epsilon: float,
    gain: float,
) -> None:
    tensors = xs[0], xs[-1], outs[0], outs[-1]
    tokens = _tokens(tensors, angles[0], rope)
    if tokens is None:
        whole = [_of_each(angles[0], xs[0], rope)]
        made = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in xs]
        _norm([x.contiguous() for x in xs], weights, made, whole, rope, epsilon, gain)
        for out, y in zip(outs, made, strict=True):
            out.copy_(y)
        return
    layout = read_layout(rope)
    q_heads, k_heads = xs[0].shape[-2], xs[1].shape[-2] if len(xs) == 2 else 0
    pairs, width = tokens.source.pairs, xs[0].shape[-1]
    size = tokens.inner * tokens.outer
    wide, many, heads = tile(pairs, size, xs[0].element_size(), parts=FORWARD_PARTS)
    blocks = -(-q_heads // heads) + -(-k_heads // heads)
    programs = tokens.outer * -(-tokens.inner // many) * blocks
    if programs == 0:
        return
    placed, packed = _placed(tensors, tokens)
    with _device(xs[0]):
        module("norm").forward[(programs,)](
            *tensors,
            *(weights[0].contiguous(), weights[-1].contiguous()),
            *(tokens.source.angles, tokens.source.more, tokens.source.axes),
            *(tokens.inner, q_heads, k_heads, _bits(gain), _bits(epsilon)),
            *placed,
            *tokens.placed,
            source=tokens.source.function,
            read=module("kernels").READ[layout.pairing],
            write=module("kernels").WRITE[layout.pairing_out],
            pairs=pairs,
            start=layout.rotary_start,
            width=width,
            packed=packed,
            wide=wide,
            rest=_power(width - 2 * pairs),
            tokens=many,
            heads=heads,
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
    """Writes ``out``, the gradient of ``x``; returns that of ``weight``."""
    tokens = _tokens([x, grad, out], angles[0], rope)
    if tokens is None:
        whole = [_of_each(angles[0], x, rope)]
        made = torch.empty_like(x, memory_format=torch.contiguous_format)
        given_ = grad.contiguous(), x.contiguous(), weight, made
        of_weight = _norm_gradient(*given_, whole, rope, epsilon, gain)
        out.copy_(made)
        return of_weight
    layout = read_layout(rope)
    pairs, width = tokens.source.pairs, x.shape[-1]
    size = tokens.inner * tokens.outer
    wide, many, heads = tile(pairs, size, x.element_size(), parts=BACKWARD_PARTS)
    items = tokens.outer * -(-tokens.inner // many) * -(-x.shape[-2] // heads)
    kind = torch.float64 if x.dtype == torch.float64 else torch.float32
    parts = torch.zeros(min(items, _PROGRAMS), width, dtype=kind, device=x.device)
    if items == 0:
        return parts.sum(0).to(weight.dtype)
    placed, packed = _placed((x, grad, out), tokens)
    with _device(x):
        module("norm").backward[(len(parts),)](
            *(x, grad, out, weight.contiguous(), parts),
            *(tokens.source.angles, tokens.source.more, tokens.source.axes),
            *(items, tokens.inner, x.shape[-2], _bits(gain), _bits(epsilon)),
            *placed,
            *tokens.placed,
            source=tokens.source.function,
            read=module("kernels").READ[layout.pairing],
            read_grad=module("kernels").READ[layout.pairing_out],
            write=module("kernels").WRITE[layout.pairing],
            pairs=pairs,
            start=layout.rotary_start,
            width=width,
            packed=packed,
            wide=wide,
            rest=_power(width - 2 * pairs),
            tokens=many,
            heads=heads,
        )
    return parts.sum(0).to(weight.dtype)


def _placed(xs: Sequence[Tensor], tokens: _Tokens) -> tuple[list[int], bool]:
    """Strides of every tensor, and whether all heads lie in pieces that are moved whole."""
    placed: list[int] = []
    packed = True
    for x, step in zip(xs, tokens.steps, strict=False):
        placed += (*step, x.stride(-2), x.stride(-1))
        packed = packed and _in_pieces(x, (*step, x.stride(-2)))
    return placed, packed


def _in_pieces(x: Tensor, strides: Sequence[int]) -> bool:
    on_boundaries = all(step * x.element_size() % _VECTOR == 0 for step in strides)
    return on_boundaries and x.data_ptr() % _VECTOR == 0 and x.stride(-1) == 1


def _tokens(xs: Sequence[Tensor], positions: Tensor, rope: str, *others: Tensor) -> _Tokens | None:
    """How the tokens of ``xs``, and ``others`` without heads, are walked; None if they are not."""
    source = source_of(positions, rope, xs[0].dtype)
    lead = xs[0].shape[:-2]
    given = source.function is module("angles").given
    last = 1 if given or source.axes is not None else 0
    strides = [x.stride()[:-2] for x in xs] + [x.stride() for x in others]
    angles = (source.angles, source.more) if given else (source.angles,)
    strides += [broadcast(a, last, lead) for a in angles]
    walked = walk(lead, strides)
    if len(walked) > 2:
        return None
    walked += [(1, (0,) * len(strides))] * (2 - len(walked))
    (inner, inner_steps), (outer, outer_steps) = walked
    steps = list(zip(outer_steps, inner_steps, strict=True))
    known = len(xs) + len(others)
    placed = (*steps[known], source.angles.stride(-1) if last else 0)
    more = (*steps[-1], source.more.stride(-1)) if given else (0, 0, 0)
    return _Tokens(inner, outer, steps[:known], source, (*placed, *more))


def _of_each(positions: Tensor, x: Tensor, rope: str) -> Tensor:
    """``positions``, written out for every token of ``x``."""
    coordinates = [count_axes(rope)] if count_axes(rope) > 1 else []
    return positions.expand(*x.shape[:-2], *coordinates).contiguous()


def _device(x: Tensor) -> AbstractContextManager[Any]:
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def _power(n: int) -> int:
    """The power of two from ``n`` on; 0 for none."""
    return 1 << (n - 1).bit_length() if n else 0


def _bits(value: float) -> int:
    """An argument cannot be a float64, but its bits can."""
    return struct.unpack("q", struct.pack("d", value))[0]
