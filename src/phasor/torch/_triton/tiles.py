"""How a kernel walks tokens and heads, and where it finds their rows."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phasor.angles import DIGITS
from phasor.torch import _tables
from phasor.torch._layout import count_axes
from phasor.torch._rows import rows

#: From this many tokens on, a program shares its rows among heads; below, there are more programs.
MANY = 2048
_BROAD, _NARROW = 32768, 4096  # bytes of a tile of many tokens, and of few


class Rows(NamedTuple):
    """Where a kernel finds its rows: a function of `_triton.angles`, and what that reads."""

    function: Any
    angles: Tensor
    more: Tensor
    axes: Tensor | None
    pairs: int


def module(name: str) -> Any:
    """A module of kernels."""
    # triton is optional, and takes its time
    return import_module(f"phasor.torch._triton.{name}")


def source_of(positions: Tensor, rope: str, dtype: torch.dtype) -> Rows:
    """The rows of ``positions`` for tensors of ``dtype``; fractions are made into rows first."""
    sources = module("angles")
    kind = torch.float64 if dtype == torch.float64 else torch.float32
    if positions.is_floating_point():
        cos, sin = rows([positions], rope, kind, DIGITS)
        return Rows(sources.given, cos, sin, None, cos.shape[-1])
    if positions.dtype not in (torch.int64, torch.int32):
        positions = positions.long()
    tables = _tables.digit_tables(rope, positions.device, kind)
    if count_axes(rope) == 1:
        return Rows(sources.one_axis, positions, tables, None, tables.shape[-1])
    axes = _tables.axis_of_pair(rope, positions.device)
    return Rows(sources.several_axes, positions, tables, axes, tables.shape[-1])


def broadcast(t: Tensor, last: int, lead: Sequence[int]) -> tuple[int, ...]:
    """Strides of ``t`` over the dimensions ``lead``, which all but its ``last`` ones match."""
    known = t.dim() - last
    steps = (0 if t.shape[i] == 1 else t.stride(i) for i in range(known))
    return (0,) * (len(lead) - known) + tuple(steps)


def walk(
    lead: Sequence[int], strides: Sequence[tuple[int, ...]]
) -> list[tuple[int, tuple[int, ...]]]:
    """Sizes and strides of the dimensions to be walked, innermost first.

    Two dimensions are one where every tensor steps over both alike.

    Args:
        lead: Sizes of the dimensions.
        strides: Of each tensor over them.
    """
    found: list[tuple[int, tuple[int, ...]]] = []
    for at in reversed(range(len(lead))):
        size, steps = lead[at], tuple(each[at] for each in strides)
        if size == 1:
            continue
        if found and steps == tuple(found[-1][0] * step for step in found[-1][1]):
            found[-1] = size * found[-1][0], found[-1][1]
        else:
            found.append((size, steps))
    return found


def tile(pairs: int, tokens: int, itemsize: int, *, parts: int = 1) -> tuple[int, int, int]:
    """Pairs, tokens and heads of a program's tile.

    Args:
        pairs: Pairs of a head.
        tokens: Tokens there are.
        itemsize: Bytes of a number.
        parts: What a broad tile is divided by, for kernels that hold more than it in registers.
    """
    wide = 1 << (max(pairs, 1) - 1).bit_length()
    many = tokens >= MANY
    budget = max(1, (_BROAD // parts if many else _NARROW) // (2 * itemsize * wide))
    heads = min(budget, 8 if many else 32)
    return wide, budget // heads, heads
