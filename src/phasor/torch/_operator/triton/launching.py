"""Plans of launches: tokens in two dimensions, a tile, strides and the kernel's other arguments.

A kernel is compiled for each combination of

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

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from phasor.angles import turn_limbs
from phasor.torch._operator.in_place import QKMemory
from phasor.torch._operator.internals import hold_for_graph
from phasor.torch._operator.text import count_axes, count_own_dimensions, read_rope

#: From this many tokens on, a program shares cos and sin among heads; below, more programs run.
MANY_TOKENS = 2048
VECTOR_BYTES = 16  # bytes that memory is moved by at a time
SHIFT_OFFSET = 40  # where the shift of a `reciprocal` begins, above its multiplier
_LARGE_TILE, _SMALL_TILE = 32768, 4096  # bytes of a tile, of many tokens and of few


def load_kernels() -> Any:
    """The module of kernels, imported late: Triton is optional, and slow to import."""
    return import_module("phasor.torch._operator.triton.kernels")


# Plans


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


# Tokens


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


class Tokens(NamedTuple):
    """Tokens in two dimensions, and where a kernel finds their cos and sin."""

    inner: int
    outer: int
    strides: list[tuple[int, int]]  # of every tensor over the tokens: outer, inner
    angle_strides: tuple[int, ...]  # of positions or cos, and of sin: outer, inner, within a row
    source_kind: str  # as in `kernels`
    constants: Tensor | None  # None for given cos and sin
    num_pairs: int

    @property
    def are_few(self) -> bool:
        """Whether they get the small tile."""
        return self.inner * self.outer < MANY_TOKENS


def widen_positions(source: Sequence[Tensor]) -> Sequence[Tensor]:
    """``source`` as kernels take them: int32, int64 or float positions, or cos and sin."""
    positions = source[0]
    if positions.is_floating_point() or positions.dtype in (torch.int64, torch.int32):
        return source
    return [positions.long()]


def find_tokens(xs: Sequence[Tensor], source: Sequence[Tensor], text: str) -> Tokens | None:
    """The tokens of ``xs`` in two dimensions; None if they need more. ``source`` is widened."""
    token_shape, own_dims = xs[0].shape[:-2], count_own_dimensions(source, text)
    # an empty tensor is never read, so its strides do not matter
    strides = [x.stride()[:-2] if x.numel() else (0,) * len(token_shape) for x in xs]
    strides += [_broadcast_strides(each, own_dims, token_shape) for each in source]
    dimensions = _merge_dimensions(token_shape, strides)
    if len(dimensions) > 2:
        return None
    dimensions += [(1, (0,) * len(strides))] * (2 - len(dimensions))
    (inner, inner_strides), (outer, outer_strides) = dimensions
    token_strides = list(zip(outer_strides, inner_strides, strict=True))
    angle_strides: list[int] = []
    for each, steps in zip(source, token_strides[len(xs) :], strict=True):
        angle_strides += (*steps, each.stride(-1) if own_dims else 0)
    angle_strides += [0] * (6 - len(angle_strides))
    if len(source) == 2:
        found = "cos_sin", None, source[0].shape[-1]
    else:
        constants = rope_constants(text, source[0].device)
        kind = "one axis" if count_axes(text) == 1 else "several axes"
        found = kind, constants, constants.shape[-1]
    return Tokens(inner, outer, token_strides[: len(xs)], tuple(angle_strides), *found)


def _broadcast_strides(x: Tensor, own_dims: int, token_shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of ``x`` over ``token_shape``, to which all but its last ``own_dims`` broadcast."""
    matching = x.dim() - own_dims
    strides = (0 if x.shape[i] == 1 else x.stride(i) for i in range(matching))
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


# Tiles


class Tile(NamedTuple):
    """The pairs, tokens and heads of a program."""

    pairs: int
    tokens: int
    heads: int


def choose_tile(tokens: Tokens, x: Tensor, packed: bool) -> Tile:
    """The tile of a program for heads of ``x``.

    Heads that are ``packed`` are moved in pieces of 16 bytes. If they are not, every number has an
    address of its own in registers, and a large tile is a quarter.
    """
    pairs = 1 << (max(tokens.num_pairs, 1) - 1).bit_length()
    size = _SMALL_TILE if tokens.are_few else _LARGE_TILE // (1 if packed else 4)
    budget = max(1, size // (2 * x.element_size() * pairs))
    heads = min(budget, 32 if tokens.are_few else 8)
    return Tile(pairs, budget // heads, heads)


def head_strides(xs: Sequence[Tensor], tokens: Tokens) -> tuple[list[int], bool]:
    """Strides of every tensor as kernels take them, and whether all heads are packed."""
    strides: list[int] = []
    packed = True
    for x, token_strides in zip(xs, tokens.strides, strict=True):
        # the stride of a single head is never used, and may be anything
        steps = (*token_strides, x.stride(-2) if x.shape[-2] > 1 else 0)
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
