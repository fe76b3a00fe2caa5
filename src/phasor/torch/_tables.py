"""A Rope's digit tables as tensors on a device, cached on the whole Rope.

They are forgotten in time, for a rule makes a Rope for every length. Not so those that a CUDA graph
was captured with: it holds their addresses, and nothing else would hold their memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, Concatenate, ParamSpec

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phasor import angles
from phasor.rope import Rope
from phasor.torch._internals import constant_to_the_compiler, outside_modes, outside_transforms
from phasor.torch._layout import read_rope

_P = ParamSpec("_P")
_Table = Callable[Concatenate[str, torch.device, _P], Tensor]

_DIGITS = np.arange(angles.DIGITS)
_FEW = 256  # positions at a time for which rows are made one by one
_OFTEN = 16  # times, after which a Rope is no passing one

_CAPTURED: dict[int, Tensor] = {}


def hold_in_graph(*tables: Tensor | None) -> None:
    """Keep these for good if a CUDA graph is being captured."""
    held = [t for t in tables if t is not None and t.is_cuda]
    if held and torch.cuda.is_current_stream_capturing():
        _CAPTURED.update({t.data_ptr(): t for t in held})


def _kept(function: _Table[_P]) -> _Table[_P]:
    """``function``, computed once for each of the latest Ropes."""
    cached = lru_cache(maxsize=64)(function)

    # the compiler looks through the cache, so the mark stands on a function of its own
    @constant_to_the_compiler
    @wraps(function)
    def looked_up(text: str, device: torch.device, *rest: _P.args, **named: _P.kwargs) -> Tensor:
        table = cached(text, device, *rest, **named)
        hold_in_graph(table)
        return table

    return looked_up


def _constant(values: Any, device: torch.device) -> Tensor:
    """A tensor that outlives whatever was going on when it was first asked for.

    One made in inference mode could not serve training later, one made inside a ``torch.func``
    transformation would belong to it, and one made under a fake mode would be fake.
    """
    with torch.inference_mode(mode=False), outside_transforms(), outside_modes():
        return torch.tensor(values, device=device)


@_kept
def digit_tables(text: str, device: torch.device, dtype: torch.dtype) -> Tensor:
    """``[4, 1024, 2, num_pairs]``: the cosines, then the sines, of every value of every digit.

    What `phasor.angles.digit_tables` says, laid out so that a row of either is one piece of
    memory: 2 MB for a Rope of 64 pairs in float32, 4 MB in float64.
    """
    if device.type == "cpu":
        return growing_tables(text, dtype).filled()
    kind = np.float64 if dtype == torch.float64 else np.float32
    table = angles.digit_tables(read_rope(text), kind)
    return _constant(np.ascontiguousarray(table.swapaxes(-1, -2)), device)


class GrowingTables:
    """`digit_tables` in the CPU's memory, of which rows are made when positions first need them.

    A rule picks a law for every length, and a step of decoding needs four rows of its tables, not
    4,096. A row of float32 is rounded once from 60 digits, so it is the same whenever it is made;
    tables of float64, whose last bit may hang on how many are made at once, are filled at once.
    """

    def __init__(self, rope: Rope, dtype: torch.dtype) -> None:
        self._rope = rope
        self._seen: set[tuple[torch.dtype, bytes]] | None = set()
        shape = angles.DIGITS, angles.ROWS, 2, rope.num_pairs
        # what is not made is not read, and not worth the time to clear it
        self._rows = np.empty(shape, np.float64 if dtype == torch.float64 else np.float32)
        self._made = np.zeros(shape[:2], dtype=bool)
        with torch.inference_mode(mode=False), outside_transforms(), outside_modes():
            self._tables = torch.from_numpy(self._rows)
        if dtype == torch.float64:
            self.filled()

    def filled(self) -> Tensor:
        """The tables with every row."""
        if self._seen is not None:
            self._make(~self._made)
            self._seen = None
        return self._tables

    def reaching(self, positions: Tensor) -> Tensor:
        """The tables with every row that ``positions`` ask for, if a kernel takes these at all."""
        seen = self._seen
        if seen is None or not _are_integers(positions):
            return self._tables
        if positions.numel() > _FEW or len(seen) > _OFTEN:
            return self.filled()
        given = positions.numpy()
        key = positions.dtype, given.tobytes()
        if key not in seen:
            size = np.abs(given.astype(np.int64)).reshape(-1, 1)
            values = (size >> (angles.DIGIT_BITS * _DIGITS)) & (angles.ROWS - 1)
            wanted = np.zeros_like(self._made)
            wanted[_DIGITS, values] = True
            self._make(wanted & ~self._made)
            seen.add(key)
        return self._tables

    def _make(self, wanted: NDArray[np.bool_]) -> None:
        digits, values = np.nonzero(wanted)
        made = angles.digit_rows(self._rope, digits, values, self._rows.dtype.type)
        self._rows[digits, values] = made.swapaxes(-1, -2)
        self._made |= wanted


def _are_integers(positions: Tensor) -> bool:
    whole = positions.dtype in (torch.int64, torch.int32)
    return whole and positions.is_cpu and positions.layout == torch.strided


@lru_cache(maxsize=64)
def growing_tables(text: str, dtype: torch.dtype) -> GrowingTables:
    """The tables in the CPU's memory, for tensors that are computed in ``dtype``."""
    return GrowingTables(read_rope(text), dtype)


@_kept
def axis_of_pair(text: str, device: torch.device) -> Tensor:
    """``[num_pairs]`` index of the position axis that drives each pair."""
    rope = read_rope(text)
    return _constant(rope.axes.axis_of_pair(rope.num_pairs), device)


@_kept
def steps(text: str, device: torch.device) -> Tensor:
    """``[num_pairs]`` signed radians per position, float64, for fractions of a position."""
    rope = read_rope(text)
    return _constant(rope.direction * rope.inv_freq, device)
