"""The operator on a GPU: one launch for a query and a key, in Triton.

Nothing waits for the device, and after a first call, which compiles, a call can be captured in a
graph. `_operator.triton.launching` says how few kernels are compiled.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from phasor.pairings import by_pairing
from phasor.torch._operator.angles import cos_sin
from phasor.torch._operator.arguments import Call
from phasor.torch._operator.in_place import (
    check_cos_sin,
    check_no_self_overlap,
    check_writable,
    qk_memory,
)
from phasor.torch._operator.internals import cached_constant, count_writes
from phasor.torch._operator.text import (
    compute_dtype,
    count_own_dimensions,
    mixes_axes,
    read_layout,
)
from phasor.torch._operator.triton.launching import (
    VECTOR_BYTES,
    LaunchPlan,
    choose_tile,
    find_tokens,
    head_strides,
    load_kernels,
    reciprocal,
    widen_positions,
)

_PLANS: dict[tuple[Any, ...], LaunchPlan | None] = {}
_MOST_PLANS = 256


def unsupported_reason(x: Tensor) -> str:
    """Why this backend cannot rotate ``x``; nothing if it can."""
    device = x.device.type
    if device == "cuda" or (device == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"):
        return _report_absence()
    return f"it needs a tensor on a GPU, got one on {x.device}"


def rotate_into(call: Call, outs: Sequence[Tensor]) -> None:
    """The operator's kernel: from ``xs`` to ``outs``, which are ``xs`` in place.

    One launch for tensors of one dtype, which share cos and sin; else one for each.
    """
    xs, in_place = call.xs, outs is call.xs
    if in_place and len(call.source) == 2:
        check_cos_sin(xs, call.source)
    if xs[0].dtype != xs[-1].dtype:
        if in_place:
            check_writable(xs)  # every error comes before the first write
        for x, out in zip(xs, outs, strict=True):
            single = [x]
            rotate_into(call._replace(xs=single), single if in_place else [out])
        return
    if len(call.source) == 1 and mixes_axes(call.text):
        call = call._replace(source=cos_sin(call.source[0], call.text, compute_dtype(xs[0].dtype)))
    with torch.cuda.device(xs[0].device) if xs[0].is_cuda else nullcontext():
        _launch(call._replace(source=widen_positions(call.source)), outs)
    if in_place:
        count_writes(xs)


def try_kernel(
    xs: Sequence[Tensor],
    outs: Sequence[Tensor],
    positions: Tensor,
    text: str,
    inverse: bool,
    gain: float,
) -> bool:
    """Repeat an earlier launch for tensors like these, checked at that time; false without one.

    It writes from ``xs`` to ``outs``, which are ``xs`` in place.
    """
    if type(inverse) is not bool or (type(gain) is not float and type(gain) is not int):
        return False
    call = Call(xs, (positions,), text, inverse, gain)
    plan = _PLANS.get(plan_key(call, outs))
    if plan is None or (xs[0].is_cuda and xs[0].device.index != torch.cuda.current_device()):
        return False
    plan.launch(_operands(call, outs), call.source)
    return True


@cached_constant
def _report_absence() -> str:
    """Why Triton cannot be used, with a warning the first time; "" if it can."""
    try:
        import_module("triton")
    except ImportError as error:
        reason = f"triton cannot be imported ({error}); install it beside torch"
        warnings.warn(
            f"phasor rotates with plain torch operations on this GPU: {reason}",
            RuntimeWarning,
            stacklevel=2,
        )
        return reason
    return ""


def _launch(call: Call, outs: Sequence[Tensor]) -> None:
    xs, in_place, key = call.xs, outs is call.xs, plan_key(call, outs)
    plan: LaunchPlan | Literal[False] | None = _PLANS.get(key, False)
    if plan is False:
        if in_place:
            check_no_self_overlap(xs)
        if len(_PLANS) >= _MOST_PLANS:
            _PLANS.clear()
        # not read back: another thread may have cleared the plans in between
        plan = _PLANS[key] = make_plan(call, outs)
    if plan is not None:
        plan.launch(_operands(call, outs), call.source)
        return
    if in_place:
        check_writable(xs)
    # strides too irregular for one launch: one for every index of the first dimension
    token_shape, own_dims = xs[0].shape[:-2], count_own_dimensions(call.source, call.text)
    source = [a.expand(*token_shape, *a.shape[a.dim() - own_dims :]) for a in call.source]
    for i in range(token_shape[0]):
        inputs = [x[i] for x in xs]
        outputs = inputs if in_place else [out[i] for out in outs]
        _launch(call._replace(xs=inputs, source=[a[i] for a in source]), outputs)


def _operands(call: Call, outs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """A query, a key (or the query again), and where each is written to."""
    return call.xs[0], call.xs[-1], outs[0], outs[-1]


def plan_key(call: Call, outs: Sequence[Tensor]) -> tuple[Any, ...]:
    """All that a plan depends on, and all that was checked before it was made.

    The positions of ``call`` are widened; ``outs`` are its ``xs`` in place.
    """
    xs, source, text, inverse, gain, _ = call
    tensors, addresses = _operands(call, outs), 0
    for t in tensors:
        addresses |= t.data_ptr()
    return (
        *(text, inverse, gain, len(xs), outs is xs, addresses % VECTOR_BYTES == 0),
        # Triton specializes on the alignment of the pointer to sin
        source[-1].data_ptr() % VECTOR_BYTES == 0,
        *[(t.shape, t.stride(), t.dtype, t.device) for t in (*tensors, *source)],
    )


def make_plan(call: Call, outs: Sequence[Tensor]) -> LaunchPlan | None:
    """The launch for the arguments of `plan_key`; None where strides are too irregular for one."""
    xs, source, text, inverse, gain, _ = call
    q, k, *_ = tensors = _operands(call, outs)
    has_key, is_new = len(xs) == 2, outs is not xs
    layout = read_layout(text).inverse() if inverse else read_layout(text)
    tokens = find_tokens(tensors, source, text)
    if tokens is None:
        return None
    q_heads, k_heads = q.shape[-2], k.shape[-2] if has_key else 0
    strides, packed = head_strides(tensors, tokens)
    tile = choose_tile(tokens, q, packed)
    blocks = -(-q_heads // tile.heads) + -(-k_heads // tile.heads)
    tiles = -(-tokens.inner // tile.tokens)
    kernels, gain_bits = load_kernels(), int(np.float64(gain).view(np.int64))
    load = kernels.load_half, kernels.load_interleaved
    store = kernels.store_half, kernels.store_interleaved
    return LaunchPlan(
        tokens.outer * tiles * blocks,
        tokens.constants,
        (
            *(tokens.inner, q_heads, k_heads, reciprocal(blocks), reciprocal(tiles)),
            *(gain_bits, *strides, *tokens.angle_strides, tokens.source_kind),
            by_pairing(layout.pairing, half=load[0], interleaved=load[1]),
            by_pairing(layout.pairing_out, half=store[0], interleaved=store[1]),
            *(layout.pairing != layout.pairing_out or tokens.are_few, inverse),
            *(tokens.num_pairs, layout.rotary_start),
            q.shape[-1] if is_new and q.shape[-1] > 2 * tokens.num_pairs else 0,
            *(packed, *tile),
        ),
        qk_memory(q, k) if has_key and not is_new else None,
    )
