"""The operator on a GPU: one launch for a query and a key, in Triton.

Nothing waits for the device, and after a first call, which compiles, a call can be captured in a
graph. A kernel is compiled for each combination of

    the Rope's layout   number of pairs, first coordinate, pairing in and out
    the direction       forward, or inverse (which is the backward pass)
    the source          one axis, several axes, or cos and sin
    the dtype           of the tensors, and of positions or given cos and sin
    memory              every head one piece on 16-byte boundaries, or anything else
    what is written     the rotated slice (in place, or all of the head), or the rest as well
    the tile            for many tokens, or for few

and for nothing else: not for a size, a stride, a position or a gain.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from phasor.angles import turn_limbs
from phasor.pairings import by_pairing
from phasor.torch._operator.angles import cos_sin
from phasor.torch._operator.arguments import Call, Unchecked
from phasor.torch._operator.in_place import (
    QKMemory,
    check_cos_sin,
    check_no_self_overlap,
    check_writable,
    qk_memory,
)
from phasor.torch._operator.internals import (
    cached_constant,
    count_writes,
    hold_for_graph,
    warn_of_absence,
)
from phasor.torch._operator.text import (
    compute_dtype,
    count_axes,
    mixes_axes,
    read_layout,
    read_rope,
)

#: From this many tokens on, a program shares cos and sin among heads; below, more programs run.
MANY_TOKENS = 2048
VECTOR_BYTES = 16  # bytes that memory is moved by at a time
SHIFT_OFFSET = 40  # where the shift of a `reciprocal` begins, above its multiplier
_LARGE_TILE, _SMALL_TILE = 32768, 4096  # bytes of a tile, of many tokens and of few
_PLANS: dict[tuple[Any, ...], LaunchPlan | None] = {}
_MOST_PLANS = 256


def unsupported_reason(x: Tensor) -> str:
    """Why this backend cannot rotate ``x``; nothing if it can."""
    device = x.device.type
    if device == "cuda" or (device == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"):
        return _report_absence()
    return f"it needs a tensor on a GPU, got one on {x.device}"


def run_into(call: Call, outs: Sequence[Tensor]) -> None:
    """The operator's kernel: from ``xs`` to ``outs``, which are ``xs`` in place."""
    xs, in_place = call.xs, outs is call.xs
    if in_place and len(call.source) == 2:
        check_cos_sin(xs, call.source)
    if len(call.source) == 1 and mixes_axes(call.text):
        call = call._replace(source=cos_sin(call.source[0], call.text, compute_dtype(xs[0].dtype)))
    with torch.cuda.device(xs[0].device) if xs[0].is_cuda else nullcontext():
        _launch(call._replace(source=widen_positions(call.source)), outs)
    if in_place:
        count_writes(xs)


def try_kernel(arguments: Unchecked, outs: Sequence[Tensor]) -> bool:
    """Repeat an earlier launch for tensors like these, checked at that time; false without one."""
    xs, source, _, inverse, gain, _ = arguments
    if type(inverse) is not bool or (type(gain) is not float and type(gain) is not int):
        return False
    plan = _PLANS.get(plan_key(arguments, outs))
    if plan is None or (xs[0].is_cuda and xs[0].device.index != torch.cuda.current_device()):
        return False
    plan.launch(_operands(xs, outs), source)
    return True


@cached_constant
def _report_absence() -> str:
    """Why Triton cannot be used; "" if it can."""
    try:
        import_module("triton")
    except ImportError as error:
        reason = f"triton cannot be imported ({error}); install it beside torch"
        return warn_of_absence("GPU", reason)
    return ""


def _launch(call: Call, outs: Sequence[Tensor]) -> None:
    xs, key = call.xs, plan_key(call, outs)
    plan: LaunchPlan | Literal[False] | None = _PLANS.get(key, False)
    if plan is False:
        if outs is xs:
            check_no_self_overlap(xs)
        if len(_PLANS) >= _MOST_PLANS:
            _PLANS.clear()
        # not read back: another thread may have cleared the plans in between
        plan = _PLANS[key] = make_plan(call, outs)
    if plan is not None:
        plan.launch(_operands(xs, outs), call.source)
        return
    if outs is xs:
        check_writable(xs)
    # strides too irregular for one launch: one for every index of the first dimension
    token_shape, own_dims = xs[0].shape[:-2], call.own_dims
    source = [a.expand(*token_shape, *a.shape[a.dim() - own_dims :]) for a in call.source]
    for i in range(token_shape[0]):
        inputs = [x[i] for x in xs]
        outputs = inputs if outs is xs else [out[i] for out in outs]
        _launch(call._replace(xs=inputs, source=[a[i] for a in source]), outputs)


def _operands(xs: Sequence[Tensor], outs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """A query, a key (or the query again), and where each is written to."""
    return xs[0], xs[-1], outs[0], outs[-1]


def plan_key(arguments: Unchecked, outs: Sequence[Tensor]) -> tuple[Any, ...]:
    """All that a plan depends on, and all that was checked before it was made.

    Positions are widened; ``outs`` are the ``xs`` in place.
    """
    xs, source, text, inverse, gain, _ = arguments
    tensors, addresses = _operands(xs, outs), 0
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
    q, k, *_ = tensors = _operands(xs, outs)
    has_key, is_new = len(xs) == 2, outs is not xs
    layout, own_dims, token_shape = read_layout(text, inverse), call.own_dims, q.shape[:-2]
    # of every tensor over the tokens, and of positions or cos, and of sin
    steps = [_broadcast_strides(x, 2, token_shape) for x in tensors]
    steps += [_broadcast_strides(each, own_dims, token_shape) for each in source]
    dimensions = _merge_dimensions(token_shape, steps)
    if len(dimensions) > 2:
        return None
    dimensions += [(1, (0,) * len(steps))] * (2 - len(dimensions))
    (inner, inner_steps), (outer, outer_steps) = dimensions
    token_strides = list(zip(outer_steps, inner_steps, strict=True))
    strides, packed = _head_strides(tensors, token_strides[: len(tensors)])
    for each, over_tokens in zip(source, token_strides[len(tensors) :], strict=True):
        strides += (*over_tokens, each.stride(-1) if own_dims else 0)
    if len(source) == 2:
        source_kind, constants, pairs = "cos_sin", None, source[0].shape[-1]
    else:
        source_kind = "one axis" if count_axes(text) == 1 else "several axes"
        constants = rope_constants(text, source[0].device)
        pairs = constants.shape[-1]
        strides += (0, 0, 0)  # there is no sin
    few = inner * outer < MANY_TOKENS
    _, token_block, head_block = tile = choose_tile(pairs, few, q.element_size(), packed)
    q_heads, k_heads = q.shape[-2], k.shape[-2] if has_key else 0
    blocks = -(-q_heads // head_block) + -(-k_heads // head_block)
    tiles = -(-inner // token_block)
    kernels, gain_bits = load_kernels(), int(np.float64(gain).view(np.int64))
    load = kernels.load_half, kernels.load_interleaved
    store = kernels.store_half, kernels.store_interleaved
    return LaunchPlan(
        outer * tiles * blocks,
        constants,
        (
            *(inner, q_heads, k_heads, reciprocal(blocks), reciprocal(tiles)),
            *(gain_bits, *strides, source_kind),
            by_pairing(layout.pairing, half=load[0], interleaved=load[1]),
            by_pairing(layout.pairing_out, half=store[0], interleaved=store[1]),
            *(layout.pairing != layout.pairing_out or few, inverse),
            *(pairs, layout.rotary_start),
            q.shape[-1] if is_new and q.shape[-1] > 2 * pairs else 0,
            *(packed, *tile),
        ),
        qk_memory(q, k) if has_key and not is_new else None,
    )


def load_kernels() -> Any:
    """The module of kernels, imported late: Triton is optional, and slow to import."""
    return import_module("phasor.torch._operator.triton.kernels")


@dataclass(slots=True)
class LaunchPlan:
    """A launch without the pointers to a call's tensors."""

    programs: int
    constants: Tensor | None  # None for given cos and sin
    arguments: tuple[Any, ...]
    memory: QKMemory | None = None  # of a query and a key that are both written
    compiled: Any = None

    def launch(self, tensors: Sequence[Tensor], source: Sequence[Tensor]) -> None:
        """Run the kernel on ``tensors``, of which the first two are query and key."""
        if self.memory is not None:
            self.memory.check_apart(tensors[0].data_ptr(), tensors[1].data_ptr())
        if self.programs == 0:
            return
        constants = self.constants
        if constants is not None:
            hold_for_graph(constants)
        pointers = *tensors, source[0], source[1] if constants is None else constants
        # Triton's search for the compiled kernel takes as long as a small rotation; from the second
        # launch on the kernel is called directly
        kernel = self.compiled or load_kernels().rotation
        launched = kernel[(self.programs, 1, 1)](*pointers, *self.arguments)
        self.compiled = launched or self.compiled


@lru_cache(maxsize=64)
def rope_constants(text: str, device: torch.device) -> Tensor:
    """int32 ``[7, num_pairs]``: the bits of `phasor.angles.turn_limbs`, then each pair's axis.

    28 bytes a pair, on the device once for each of the latest Ropes.
    """
    spec = read_rope(text)
    rows = np.empty((7, spec.num_pairs), np.int32)
    rows[:6] = turn_limbs(spec).view(np.int32).T
    rows[6] = spec.axes.axis_of_pair(spec.num_pairs)
    return torch.from_numpy(rows).to(device)


def widen_positions(source: Sequence[Tensor]) -> Sequence[Tensor]:
    """``source`` as kernels take them: int32, int64 or float positions, or cos and sin."""
    positions = source[0]
    if positions.is_floating_point() or positions.dtype in (torch.int64, torch.int32):
        return source
    return [positions.long()]


def _broadcast_strides(x: Tensor, own_dims: int, token_shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of ``x`` over ``token_shape``, to which all but its last ``own_dims`` broadcast."""
    matching = x.dim() - own_dims
    # an empty tensor is never read, so its strides do not matter
    strides = (x.stride(i) if x.shape[i] > 1 and x.numel() else 0 for i in range(matching))
    return (0,) * (len(token_shape) - matching) + tuple(strides)


def _merge_dimensions(
    token_shape: Sequence[int], strides: Sequence[tuple[int, ...]]
) -> list[tuple[int, tuple[int, ...]]]:
    """Lengths and strides of as few dimensions as possible, innermost first.

    Two dimensions are one where the outer stride of every tensor is the inner one times the inner
    length. All are one where one is empty.
    """
    if 0 in token_shape:
        return [(0, (0,) * len(strides))]
    merged: list[tuple[int, tuple[int, ...]]] = []
    for dim in reversed(range(len(token_shape))):
        length, steps = token_shape[dim], tuple(each[dim] for each in strides)
        if length == 1:
            continue
        if merged and steps == tuple(merged[-1][0] * step for step in merged[-1][1]):
            merged[-1] = length * merged[-1][0], merged[-1][1]
        else:
            merged.append((length, steps))
    return merged


def choose_tile(num_pairs: int, few: bool, item_bytes: int, packed: bool) -> tuple[int, int, int]:
    """The pairs, tokens and heads of a program.

    Heads that are ``packed`` are moved in pieces of 16 bytes. If they are not, every number has an
    address of its own in registers, and a large tile is a quarter.
    """
    pairs = 1 << (max(num_pairs, 1) - 1).bit_length()
    size = _SMALL_TILE if few else _LARGE_TILE // (1 if packed else 4)
    budget = max(1, size // (2 * item_bytes * pairs))
    heads = min(budget, 32 if few else 8)
    return pairs, budget // heads, heads


def _head_strides(
    xs: Sequence[Tensor], token_strides: Sequence[tuple[int, int]]
) -> tuple[list[int], bool]:
    """Strides of every tensor as kernels take them, and whether all heads are packed."""
    strides: list[int] = []
    packed = True
    for x, over_tokens in zip(xs, token_strides, strict=True):
        # the stride of a single head is never used, and may be anything
        steps = (*over_tokens, x.stride(-2) if x.shape[-2] > 1 else 0)
        strides += (*steps, x.stride(-1))
        # one piece on 16-byte boundaries, wherever these steps lead
        offsets = x.data_ptr(), *(step * x.element_size() for step in steps)
        packed = packed and x.stride(-1) == 1 and not any(n % VECTOR_BYTES for n in offsets)
    return strides, packed


def reciprocal(n: int) -> int:
    """The number by which kernels multiply counts, instead of dividing them by ``n``.

    ``count * multiplier >> shift`` is the quotient of every count below 2**31: rounding up makes
    ``n * multiplier`` larger than ``2**shift`` by less than ``n``, and so by at most
    ``2**(shift - 31)`` (Granlund and Montgomery 1994). ``multiplier`` is at most ``2**32``;
    ``shift`` is stored above it.
    """
    shift = 31 + (max(n, 1) - 1).bit_length()
    return shift << SHIFT_OFFSET | -(-(2**shift) // max(n, 1))
