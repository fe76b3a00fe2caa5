"""How a kernel walks tokens and heads, and where it finds their rows."""

from __future__ import annotations

import struct
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
VECTOR = 16  # bytes that memory is moved by at a time
TIMES_BITS = 40  # of a `reciprocal`, before the bits to shift by
_BROAD, _NARROW = 32768, 4096  # bytes of a tile of many tokens, and of few


class Rows(NamedTuple):
    """Where a kernel finds its rows: a source of `backends.triton.angles`, and what that reads."""

    source: str
    tables: Tensor | None  # None where rows are given
    axes: Tensor | None
    pairs: int


class Tokens(NamedTuple):
    """Tokens in two dimensions, and the rows that they find there."""

    inner: int
    outer: int
    steps: list[tuple[int, int]]  # of every tensor, from one token to the next: outer, inner
    rows: Rows
    placed: tuple[int, ...]  # where rows are found, as kernels take it


def module(name: str) -> Any:
    """A module of kernels."""
    # triton is optional, and takes its time
    return import_module(f"phasor.torch.backends.triton.{name}")


def settled(angles: Sequence[Tensor], rope: str, dtype: torch.dtype) -> Sequence[Tensor]:
    """``angles`` as kernels take them: int32 or int64 positions, or rows, as fractions become."""
    if len(angles) == 2 or angles[0].dtype in (torch.int64, torch.int32):
        return angles
    if angles[0].is_floating_point():
        return rows(angles, rope, _kind(dtype), DIGITS)
    return [angles[0].long()]


def rows_of(angles: Sequence[Tensor], rope: str, dtype: torch.dtype) -> Rows:
    """The rows of `settled` angles for tensors of ``dtype``."""
    if len(angles) == 2:
        return Rows("given", None, None, angles[0].shape[-1])
    positions = angles[0]
    tables = _tables.digit_tables(rope, positions.device, _kind(dtype))
    if count_axes(rope) == 1:
        return Rows("one axis", tables, None, tables.shape[-1])
    axes = _tables.axis_of_pair(rope, positions.device)
    return Rows("several axes", tables, axes, tables.shape[-1])


def own_dimensions(angles: Sequence[Tensor], rope: str) -> int:
    """How many dimensions `settled` angles have that tokens have not: coordinates, or pairs."""
    return 1 if len(angles) == 2 or count_axes(rope) > 1 else 0


def of_each(angles: Sequence[Tensor], rope: str, lead: Sequence[int]) -> list[Tensor]:
    """Views of `settled` angles with a place for every token of the dimensions ``lead``."""
    last = own_dimensions(angles, rope)
    return [a.expand(*lead, *a.shape[a.dim() - last :]) for a in angles]


def broadcast(t: Tensor, last: int, lead: Sequence[int]) -> tuple[int, ...]:
    """Strides of ``t`` over the dimensions ``lead``, which all but its ``last`` ones match."""
    known = t.dim() - last
    steps = (0 if t.shape[i] == 1 else t.stride(i) for i in range(known))
    return (0,) * (len(lead) - known) + tuple(steps)


def walk(
    lead: Sequence[int], strides: Sequence[tuple[int, ...]]
) -> list[tuple[int, tuple[int, ...]]]:
    """Sizes and strides of the dimensions to be walked, innermost first.

    Two dimensions are one where every tensor steps over both alike, and so are all where one is
    empty.

    Args:
        lead: Sizes of the dimensions.
        strides: Of each tensor over them.
    """
    if 0 in lead:
        return [(0, (0,) * len(strides))]
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


def tile(
    pairs: int,
    tokens: int,
    itemsize: int,
    *,
    parts: int = 1,
    rest: int = 0,
    packed: bool = True,
) -> tuple[int, int, int]:
    """Pairs, tokens and heads of a program's tile.

    Args:
        pairs: Pairs of a head.
        tokens: Tokens there are.
        itemsize: Bytes of a number.
        parts: What a broad tile is divided by, for kernels that hold more than it in registers.
        rest: Columns that are held beside the pairs; 0, or a power of two.
        packed: Whether heads lie in pieces of 16 bytes. If not, every number has an address of its
            own in registers, and a broad tile is halved.
    """
    wide = 1 << (max(pairs, 1) - 1).bit_length()
    many = tokens >= MANY
    size = _BROAD // (parts if packed else 4 * parts) if many else _NARROW
    budget = max(1, size // (2 * itemsize * max(wide, rest)))
    heads = min(budget, 8 if many else 32)
    return wide, budget // heads, heads


def are_few(walked: Tokens) -> bool:
    """Whether the tile is the one of few tokens."""
    return walked.inner * walked.outer < MANY


def strides_of(xs: Sequence[Tensor], tokens: Tokens) -> tuple[list[int], bool]:
    """Strides of every tensor, and whether all heads lie in pieces that are moved whole."""
    placed: list[int] = []
    packed = True
    for x, step in zip(xs, tokens.steps, strict=False):
        # the stride of a single head means nothing, and may be anything
        steps = (*step, x.stride(-2) if x.shape[-2] > 1 else 0)
        placed += (*steps, x.stride(-1))
        packed = packed and in_pieces(x, steps)
    return placed, packed


def in_pieces(x: Tensor, strides: Sequence[int]) -> bool:
    """Whether heads of ``x``, which ``strides`` lead to, begin on boundaries and have no gaps."""
    on_boundaries = all(step * x.element_size() % VECTOR == 0 for step in strides)
    return on_boundaries and x.data_ptr() % VECTOR == 0 and x.stride(-1) == 1


def tokens_of(
    xs: Sequence[Tensor], angles: Sequence[Tensor], rope: str, *others: Tensor
) -> Tokens | None:
    """How the tokens of ``xs``, and ``others`` without heads, are walked; None if they are not."""
    found = rows_of(angles, rope, xs[0].dtype)
    lead, last = xs[0].shape[:-2], own_dimensions(angles, rope)
    # nobody walks what is empty: however it lies, it is in nobody's way
    strides = [x.stride()[:-2] if x.numel() else (0,) * len(lead) for x in xs]
    strides += [x.stride() for x in others]
    strides += [broadcast(a, last, lead) for a in angles]
    walked = walk(lead, strides)
    if len(walked) > 2:
        return None
    walked += [(1, (0,) * len(strides))] * (2 - len(walked))
    (inner, inner_steps), (outer, outer_steps) = walked
    steps = list(zip(outer_steps, inner_steps, strict=True))
    known = len(xs) + len(others)
    placed = [
        each
        for a, step in zip(angles, steps[known:], strict=True)
        for each in (*step, a.stride(-1) if last else 0)
    ]
    placed += [0] * (6 - len(placed))
    return Tokens(inner, outer, steps[:known], found, tuple(placed))


def tile_of(walked: Tokens, x: Tensor, packed: bool, **held: int) -> tuple[int, int, int]:
    """`tile` for the heads of ``x``."""
    tokens = walked.inner * walked.outer
    return tile(walked.rows.pairs, tokens, x.element_size(), packed=packed, **held)


def reciprocal(n: int) -> int:
    """What `backends.triton.kernels.placed` multiplies by where it would divide counts by ``n``.

    ``count * times >> bits`` is the quotient of every count below 2**31: rounding up makes
    ``n * times`` larger than ``2**bits`` by less than ``n``, and so by at most ``2**(bits - 31)``
    (Granlund and Montgomery 1994). ``times`` is at most ``2**32``; ``bits`` stands above it.
    """
    bits = 31 + (max(n, 1) - 1).bit_length()
    return bits << TIMES_BITS | -(-(2**bits) // max(n, 1))


def bits_of(value: float) -> int:
    """An argument cannot be a float64, but its bits can."""
    return struct.unpack("q", struct.pack("d", value))[0]


def _kind(dtype: torch.dtype) -> torch.dtype:
    """What tensors of ``dtype`` are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32
