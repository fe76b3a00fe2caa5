"""The operators on a GPU, in Triton, with one launch each.

`cos_sin` computes rows of cos and sin, `run_into` rotates a query and a key by them. Nothing waits
for the device, and after a first call, which compiles, calls can be captured in a CUDA graph. The
kernel that rotates is compiled for each combination of

    layout              number of pairs, first coordinate, pairing in and out
    direction           forward, or transposed (the backward pass)
    dtype               of the tensors, and of cos and sin
    memory              every head contiguous and aligned to 16 bytes, or anything else
    coordinates         whether coordinates that are not rotated must be copied
    tile                for many tokens, for hundreds, or for few

but not for each size or stride. The kernel that computes rows is compiled for the dtypes of
positions and rows, and the numbers of axes and pairs, but not for frequencies, positions or gains.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from phasor.angles import turn_limbs
from phasor.pairings import by_pairing
from phasor.torch._operator import angles
from phasor.torch._operator.arguments import Rows, Turn
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
from phasor.torch._operator.text import mixes_axes, read_rope

#: From the first number of tokens on, a program rotates the second number of heads, one after
#: another. For fewer tokens than any of these, it rotates all its heads at once.
HEAD_STEPS = ((2048, 8), (256, 2))
VECTOR_BYTES = 16  # the widest load or store of a thread
SHIFT_OFFSET = 40  # the first bit of the shift in a `reciprocal`, above its multiplier
_TILE = 4096  # bytes that a program loads and stores at a time
_ROWS_TILE = 1024  # number of cosines that a program computes
_PLANS: dict[tuple[Any, ...], LaunchPlan | None] = {}
_MOST_PLANS = 256


def unsupported_reason(device: torch.device, width: int) -> str:
    """Why this backend cannot rotate on this device; "" if it can."""
    del width
    interpreted = device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    if device.type == "cuda" or interpreted:
        return _report_absence()
    return f"it needs a tensor on a GPU, got one on {device}"


def cos_sin(positions: Tensor, text: str, gain: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cos and sin ``[..., seq, num_pairs]`` times the gain."""
    if mixes_axes(text):
        return angles.cos_sin(positions, text, gain, dtype)
    n_axes, pairs = read_rope(text).axes.n_axes, read_rope(text).num_pairs
    tokens = positions.shape[:-1] if n_axes > 1 else positions.shape
    cos, sin = (torch.empty((*tokens, pairs), dtype=dtype, device=positions.device) for _ in "cs")
    if cos.numel() == 0:
        return cos, sin
    is_read = positions.is_floating_point() or positions.dtype in (torch.int64, torch.int32)
    positions = (positions if is_read else positions.long()).contiguous()
    constants = rope_constants(text, positions.device)
    hold_for_graph(constants)
    count, pair_block = cos.numel() // pairs, _power_of_two(pairs)
    token_block = max(1, _ROWS_TILE // pair_block)
    gain_bits = int(np.float64(gain).view(np.int64))
    kernel = load_kernels().cos_sin_rows[(-(-count // token_block), 1, 1)]
    with _on_device(positions):
        kernel(
            *(positions, constants, cos, sin, count, gain_bits),
            *(n_axes, pairs, pair_block, token_block),
        )
    return cos, sin


def run_into(turn: Turn, outs: Sequence[Tensor]) -> None:
    """The operator's kernel: rotate ``xs`` into ``outs``; in place, both are the same sequence."""
    xs, in_place = turn.xs, outs is turn.xs
    if in_place:
        check_cos_sin(xs, (turn.cos, turn.sin))
    with _on_device(xs[0]):
        _launch(turn, outs)
    if in_place:
        count_writes(xs)


def try_turn(xs: Sequence[Tensor], rows: Rows, outs: Sequence[Tensor]) -> bool:
    """Repeat an earlier launch with tensors of the same layout; False if there was none.

    The earlier launch has checked these layouts.
    """
    cos, sin, head_dim = rows.cos, rows.sin, rows.head_dim
    if head_dim is not None and xs[0].shape[-1:] != (head_dim,):
        return False
    plan = _PLANS.get(plan_key(Turn(xs, cos, sin, *rows.layout, rows.transposed), outs))
    if outs is xs:
        check_cos_sin(xs, (cos, sin))
    if plan is None or (xs[0].is_cuda and xs[0].device.index != torch.cuda.current_device()):
        return False
    plan.launch(_operands(xs, outs), cos, sin)
    return True


def _on_device(x: Tensor) -> AbstractContextManager[Any]:
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


@cached_constant
def _report_absence() -> str:
    """Why Triton cannot be used; "" if it can."""
    try:
        import_module("triton")
    except ImportError as error:
        reason = f"triton cannot be imported ({error}); install it with torch"
        return warn_of_absence("GPU", reason)
    return ""


def _launch(turn: Turn, outs: Sequence[Tensor]) -> None:
    xs, key = turn.xs, plan_key(turn, outs)
    plan: LaunchPlan | Literal[False] | None = _PLANS.get(key, False)
    if plan is False:
        if outs is xs:
            check_no_self_overlap(xs)
        if len(_PLANS) >= _MOST_PLANS:
            _PLANS.clear()
        # do not read it back: another thread may have cleared the plans in the meantime
        plan = _PLANS[key] = make_plan(turn, outs)
    if plan is not None:
        plan.launch(_operands(xs, outs), turn.cos, turn.sin)
        return
    if outs is xs:
        check_writable(xs)
    # the strides are too irregular for one launch: launch for each index of the first dimension
    tokens, pairs = xs[0].shape[:-2], turn.cos.shape[-1]
    cos, sin = (row.expand(*tokens, pairs) for row in (turn.cos, turn.sin))
    for i in range(tokens[0]):
        inputs = [x[i] for x in xs]
        outputs = inputs if outs is xs else [out[i] for out in outs]
        _launch(turn._replace(xs=inputs, cos=cos[i], sin=sin[i]), outputs)


def _operands(xs: Sequence[Tensor], outs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """A query, a key (or the query again), and the output of each."""
    return xs[0], xs[-1], outs[0], outs[-1]


def plan_key(turn: Turn, outs: Sequence[Tensor]) -> tuple[Any, ...]:
    """Everything that a plan depends on, or that was checked before it was made.

    In place, ``outs`` is ``xs``.
    """
    xs, cos, sin, *options, _ = turn
    tensors, addresses = _operands(xs, outs), 0
    for t in tensors:
        addresses |= t.data_ptr()
    row_addresses = cos.data_ptr() | sin.data_ptr()
    return (
        *(*options, len(xs), outs is xs),
        *(addresses % VECTOR_BYTES == 0, row_addresses % VECTOR_BYTES == 0),
        *[(t.shape, t.stride(), t.dtype, t.device) for t in (*tensors, cos, sin)],
    )


def make_plan(turn: Turn, outs: Sequence[Tensor]) -> LaunchPlan | None:
    """The launch for the arguments of `plan_key`; None if strides are too irregular for one."""
    xs, rows, layout = turn.xs, (turn.cos, turn.sin), turn.layout()
    q, k, *_ = tensors = _operands(xs, outs)
    has_key, is_new = len(xs) == 2, outs is not xs
    token_shape, pairs = q.shape[:-2], turn.cos.shape[-1]
    # the strides of every tensor, and of cos and sin, over the dimensions of tokens
    steps = [_broadcast_strides(x, 2, token_shape) for x in tensors]
    steps += [_broadcast_strides(row, 1, token_shape) for row in rows]
    dimensions = _merge_dimensions(token_shape, steps)
    if len(dimensions) > 2:
        return None
    dimensions += [(1, (0,) * len(steps))] * (2 - len(dimensions))
    (inner, inner_steps), (outer, outer_steps) = dimensions
    token_strides = list(zip(outer_steps, inner_steps, strict=True))
    # the stride of a single head is never used, so it may have any value
    head_strides = [x.stride(-2) if x.shape[-2] > 1 else 0 for x in tensors]
    per_head, steps_of_rows = token_strides[: len(tensors)], token_strides[len(tensors) :]
    steps_of_heads = [
        (*token_steps, head) for token_steps, head in zip(per_head, head_strides, strict=True)
    ]
    packed = all(map(_is_packed, tensors, steps_of_heads))
    rows_packed = all(map(_is_packed, rows, steps_of_rows))
    strides: list[int] = []
    for x, steps_of_x in zip((*tensors, *rows), steps_of_heads + steps_of_rows, strict=True):
        strides += (*steps_of_x, x.stride(-1))
    tile = choose_tile(pairs, inner * outer, q.element_size())
    _, token_block, head_block, head_steps = tile
    program_heads = head_block * head_steps
    q_heads, k_heads = q.shape[-2], k.shape[-2] if has_key else 0
    blocks = -(-q_heads // program_heads) + -(-k_heads // program_heads)
    tiles = -(-inner // token_block)
    kernels = load_kernels()
    load = kernels.load_half, kernels.load_interleaved
    store = kernels.store_half, kernels.store_interleaved
    return LaunchPlan(
        outer * tiles * blocks,
        (
            *(inner, q_heads, k_heads, reciprocal(blocks), reciprocal(tiles), *strides),
            by_pairing(layout.pairing, half=load[0], interleaved=load[1]),
            by_pairing(layout.pairing_out, half=store[0], interleaved=store[1]),
            *(layout.pairing != layout.pairing_out or head_steps == 1, turn.transposed),
            *(pairs, layout.rotary_start),
            q.shape[-1] if is_new and q.shape[-1] > 2 * pairs else 0,
            *(packed, rows_packed, *tile),
        ),
        qk_memory(q, k) if has_key and not is_new else None,
    )


def load_kernels() -> Any:
    """The module of kernels, imported late: Triton is optional, and slow to import."""
    return import_module("phasor.torch._operator.triton.kernels")


@dataclass(slots=True)
class LaunchPlan:
    """All arguments of a launch except the tensors."""

    programs: int
    arguments: tuple[Any, ...]
    memory: QKMemory | None = None  # if a query and a key are both written in place
    compiled: Any = None

    def launch(self, tensors: Sequence[Tensor], cos: Tensor, sin: Tensor) -> None:
        """Run the kernel on ``tensors``: query, key, and the output of each."""
        if self.memory is not None:
            self.memory.check_apart(tensors[0].data_ptr(), tensors[1].data_ptr())
        if self.programs == 0:
            return
        # Triton's lookup of the compiled kernel takes as long as a small rotation, so from the
        # second launch on the compiled kernel is called directly
        kernel = self.compiled or load_kernels().rotation
        launched = kernel[(self.programs, 1, 1)](*tensors, cos, sin, *self.arguments)
        self.compiled = launched or self.compiled


@lru_cache(maxsize=64)
def rope_constants(text: str, device: torch.device) -> Tensor:
    """int32 ``[7, num_pairs]``: the bits of `phasor.angles.turn_limbs`, then each pair's axis.

    They take 28 bytes a pair on the device, and are cached for the latest Ropes only.
    """
    spec = read_rope(text)
    rows = np.empty((7, spec.num_pairs), np.int32)
    rows[:6] = turn_limbs(spec).view(np.int32).T
    rows[6] = spec.axes.axis_of_pair(spec.num_pairs)
    return torch.from_numpy(rows).to(device)


def _broadcast_strides(x: Tensor, pair_dims: int, token_shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of ``x`` after broadcasting all but its last ``pair_dims`` to ``token_shape``."""
    matching = x.dim() - pair_dims
    # an empty tensor is never read, so its strides do not matter
    strides = (x.stride(i) if x.shape[i] > 1 and x.numel() else 0 for i in range(matching))
    return (0,) * (len(token_shape) - matching) + tuple(strides)


def _merge_dimensions(
    token_shape: Sequence[int], strides: Sequence[tuple[int, ...]]
) -> list[tuple[int, tuple[int, ...]]]:
    """Merge the dimensions of tokens to as few as possible; lengths and strides, innermost first.

    Two dimensions merge if for every tensor the outer stride equals the inner stride times the
    inner length. If a dimension is empty, all of them merge.
    """
    if 0 in token_shape:
        return [(0, (0,) * len(strides))]
    merged: list[tuple[int, tuple[int, ...]]] = []
    for dim in reversed(range(len(token_shape))):
        length, steps = token_shape[dim], tuple(tensor_strides[dim] for tensor_strides in strides)
        if length == 1:
            continue
        if merged and steps == tuple(merged[-1][0] * step for step in merged[-1][1]):
            merged[-1] = length * merged[-1][0], merged[-1][1]
        else:
            merged.append((length, steps))
    return merged


def choose_tile(num_pairs: int, tokens: int, item_bytes: int) -> tuple[int, int, int, int]:
    """The pairs, tokens and heads in a tile, and the number of tiles per program."""
    pairs = _power_of_two(num_pairs)
    budget = max(1, _TILE // (2 * item_bytes * pairs))
    for least, head_steps in HEAD_STEPS:
        if tokens >= least:
            return pairs, budget, 1, head_steps
    heads = min(budget, 32)
    return pairs, budget // heads, heads, 1


def _power_of_two(count: int) -> int:
    """The smallest power of two that is at least ``count``."""
    return 1 << (max(count, 1) - 1).bit_length()


def _is_packed(x: Tensor, steps: Sequence[int]) -> bool:
    """Whether the last dimension is contiguous, and aligned to 16 bytes after any of the steps."""
    offsets = x.data_ptr(), *(step * x.element_size() for step in steps)
    return x.stride(-1) == 1 and not any(offset % VECTOR_BYTES for offset in offsets)


def reciprocal(n: int) -> int:
    """A multiplier and a shift by which kernels divide by ``n``, in one number.

    ``count * multiplier >> shift`` is ``count // n`` for every count below 2**31: rounding up makes
    ``n * multiplier`` larger than ``2**shift`` by less than ``n``, and so by at most
    ``2**(shift - 31)`` (Granlund and Montgomery 1994). ``multiplier`` is at most ``2**32``;
    ``shift`` is stored in the bits above it.
    """
    shift = 31 + (max(n, 1) - 1).bit_length()
    return shift << SHIFT_OFFSET | -(-(2**shift) // max(n, 1))
