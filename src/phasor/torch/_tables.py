"""The operator's ``rope`` argument, and the cosines and sines that follow from it.

The operator carries a Rope as its canonical JSON text: a string is a constant to a compiler, it
survives export, and it is a safe cache key. If cos and sin are given, the text holds only the
layout of the pairs.

Cosines and sines come from digit tables (`phasor.angles`), made once for a Rope and a device. The
caches keep the latest Ropes only, because a rule makes one for every length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from typing import Any, Concatenate, ParamSpec

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phasor import angles as numpy_angles
from phasor.angles import DIGIT_BITS, DIGITS, POSITION_LIMIT, ROWS
from phasor.rope import Rope
from phasor.torch._internals import (
    dispatch_is_plain,
    mark_constant,
    outside_modes,
    outside_transforms,
)
from phasor.torch._text import (  # noqa: F401
    Layout,
    compute_dtype,
    count_axes,
    count_own_dimensions,
    layout_text,
    read_layout,
    read_rope,
)

_P = ParamSpec("_P")
_Table = Callable[Concatenate[str, torch.device, _P], Tensor]

#: The answer of `count_digits` if four digits are too few.
TOO_FAR = 0
_FEW_POSITIONS = 256  # up to so many, only the rows that they need are made
_MOST_GROWTHS = 16  # after so many a Rope is in steady use, and all its rows are made
_DIGIT_INDICES = np.arange(DIGITS)

# Tables that CUDA graphs were captured with. A graph holds their addresses but not their memory.
_CAPTURED_TABLES: dict[int, Tensor] = {}


# The tables


def keep_for_graph(*tables: Tensor | None) -> None:
    """Keep these tables alive forever if a CUDA graph is being captured."""
    on_gpu = [t for t in tables if t is not None and t.is_cuda]
    if on_gpu and torch.cuda.is_current_stream_capturing():
        _CAPTURED_TABLES.update({t.data_ptr(): t for t in on_gpu})


def _cached_table(function: _Table[_P]) -> _Table[_P]:
    """``function``, computed once for each of the latest Ropes; a constant to a compiler."""
    cached = lru_cache(maxsize=64)(function)

    @mark_constant
    @wraps(function)
    def look_up(text: str, device: torch.device, *rest: _P.args, **named: _P.kwargs) -> Tensor:
        table = cached(text, device, *rest, **named)
        keep_for_graph(table)
        return table

    return look_up


def _make_tensor(values: Any, device: torch.device) -> Tensor:
    """A tensor that is valid in every later call, whatever mode the first one ran in.

    One made in inference mode could not serve training later, one made inside a ``torch.func``
    transformation would belong to it, and one made under a fake mode would be fake.
    """
    with torch.inference_mode(mode=False), outside_transforms(), outside_modes():
        return torch.tensor(values, device=device)


@_cached_table
def digit_tables(text: str, device: torch.device, dtype: torch.dtype) -> Tensor:
    """``[4, 1024, 2, num_pairs]``: the cosines, then the sines, of every value of every digit.

    `phasor.angles.digit_tables`, with the cosines of a row in one piece of memory, and its sines:
    2 MB for a Rope of 64 pairs in float32, 4 MB in float64.
    """
    if device.type == "cpu":
        return growing_tables(text, dtype).make_all_rows()
    # [4, 1024, num_pairs, 2] -> [4, 1024, 2, num_pairs]
    table = numpy_angles.digit_tables(read_rope(text), _numpy_dtype(dtype)).swapaxes(-1, -2)
    return _make_tensor(np.ascontiguousarray(table), device)


class GrowingTables:
    """`digit_tables` in the CPU's memory, of which rows are made when positions first need them.

    A rule picks a law for every length, and a step of decoding needs four rows of its tables, not
    4,096. A row of float32 is rounded once from 60 decimal digits, so it is the same whenever it is
    made. The last bit of a float64 row may depend on which others are made with it, so float64
    tables are filled at once.

    Attributes:
        made_rows: bool ``[1 + 4 * 1024]``: whether all rows are made, then whether each is.
    """

    def __init__(self, rope: Rope, dtype: torch.dtype) -> None:
        self._rope = rope
        self._times_grown = 0
        self.made_rows = np.zeros(1 + DIGITS * ROWS, dtype=bool)
        self._is_made = self.made_rows[1:].reshape(DIGITS, ROWS)
        # empty, because a row is not read before it is made; by torch, because it aligns memory to
        # cache lines and NumPy does not
        with torch.inference_mode(mode=False), outside_transforms(), outside_modes():
            self.tables = torch.empty(DIGITS, ROWS, 2, rope.num_pairs, dtype=dtype, device="cpu")
            self._values = self.tables.numpy()
        if dtype == torch.float64:
            self.make_all_rows()

    def make_all_rows(self) -> Tensor:
        """The tables with every row."""
        if not self.made_rows[0]:
            self._make_rows(~self._is_made)
            self.made_rows[0] = True
        return self.tables

    def make_needed_rows(self, positions: Tensor) -> Tensor:
        """The tables with at least the rows that ``positions`` need.

        Only int32 and int64 positions in memory are read, the ones that the CPU kernel takes.
        """
        readable = positions.dtype in (torch.int64, torch.int32) and positions.is_cpu
        if self.made_rows[0] or not readable or positions.layout != torch.strided:
            return self.tables
        if positions.numel() > _FEW_POSITIONS or self._times_grown == _MOST_GROWTHS:
            return self.make_all_rows()
        numbers = positions.numpy().astype(np.int64).reshape(-1, 1)
        # [n, 1] >> [4] -> [n, 4]: the four digits of every position
        digits = (np.abs(numbers) >> (DIGIT_BITS * _DIGIT_INDICES)) & (ROWS - 1)
        needed = np.zeros_like(self._is_made)
        needed[_DIGIT_INDICES, digits] = True
        missing = needed & ~self._is_made
        if missing.any():
            self._make_rows(missing)
            self._times_grown += 1
        return self.tables

    def _make_rows(self, missing: NDArray[np.bool_]) -> None:
        digits, values = np.nonzero(missing)
        rows = numpy_angles.digit_rows(self._rope, digits, values, self._values.dtype.type)
        # [n, num_pairs, 2] -> [n, 2, num_pairs]
        self._values[digits, values] = rows.swapaxes(-1, -2)
        self._is_made |= missing


@lru_cache(maxsize=64)
def growing_tables(text: str, dtype: torch.dtype) -> GrowingTables:
    """The tables in the CPU's memory, for tensors that are computed in ``dtype``."""
    return GrowingTables(read_rope(text), dtype)


@_cached_table
def axis_of_pair(text: str, device: torch.device) -> Tensor:
    """``[num_pairs]`` index of the position axis that drives each pair."""
    rope = read_rope(text)
    return _make_tensor(rope.axes.axis_of_pair(rope.num_pairs), device)


@_cached_table
def radians_per_position(text: str, device: torch.device) -> Tensor:
    """``[num_pairs]`` signed radians per position, float64, for fractions of a position."""
    rope = read_rope(text)
    return _make_tensor(rope.direction * rope.inv_freq, device)


def _numpy_dtype(dtype: torch.dtype) -> type[np.float32] | type[np.float64]:
    return np.float64 if dtype == torch.float64 else np.float32


# Cosines and sines of positions, in plain torch operations


def count_digits(angles: Sequence[Tensor]) -> int:
    """The number of digits that the positions need, or `TOO_FAR`.

    Only positions in the CPU's memory are read, because the host would wait for another device.
    There all four digits are used, and positions beyond them become NaN.
    """
    positions = angles[0]
    if len(angles) == 2 or positions.device.type != "cpu" or positions.numel() == 0:
        return DIGITS
    if positions.is_floating_point():
        positions = positions.round()
    low, high = (end.item() for end in positions.aminmax())
    furthest = max(-low, high)
    if not furthest < POSITION_LIMIT:
        return TOO_FAR
    return max(1, -(-int(furthest).bit_length() // DIGIT_BITS))


def cos_sin(
    angles: Sequence[Tensor], text: str, dtype: torch.dtype, digits: int = DIGITS
) -> tuple[Tensor, Tensor]:
    """Cos and sin ``[..., seq, num_pairs]`` of every token, without gain.

    Args:
        angles: ``[positions]``, or ``[cos, sin]``.
        text: The operator's text.
        dtype: float32, or float64 for float64 tensors.
        digits: `count_digits` of the positions.
    """
    if len(angles) == 2:
        return angles[0].to(dtype), angles[1].to(dtype)
    positions = angles[0]
    if digits == TOO_FAR:
        # [..., seq, num_pairs, 2]
        exact = numpy_angles.rows(read_rope(text), positions.numpy(), _numpy_dtype(dtype))
        values = torch.tensor(exact)
        return values[..., 0], values[..., 1]
    if count_axes(text) == 1:
        # [..., seq] -> [..., seq, 1]
        positions = positions.unsqueeze(-1)
    else:
        # [..., seq, n_axes] -> [..., seq, num_pairs]
        positions = positions[..., axis_of_pair(text, positions.device)]
    if not positions.is_floating_point():
        return _digit_product(positions.long(), text, dtype, digits)
    # R(p) = R(nearest integer) R(rest); the rest is at most 1/2, where float64 cos is accurate
    nearest = positions.double().round()
    cos, sin = _digit_product(nearest.long(), text, dtype, digits)
    rest = (positions.double() - nearest) * radians_per_position(text, positions.device)
    c, s = rest.cos().to(dtype), rest.sin().to(dtype)
    return cos * c - sin * s, sin * c + cos * s


def _digit_product(
    positions: Tensor, text: str, dtype: torch.dtype, digits: int
) -> tuple[Tensor, Tensor]:
    """``R(p) = R(d3) R(d2) R(d1) R(d0)``, the product of the digits' rotations.

    Args:
        positions: int64 ``[..., seq, 1]``, or pair by pair ``[..., seq, num_pairs]``.
        text: The operator's text.
        dtype: As for `cos_sin`.
        digits: How many digits are multiplied.
    """
    if positions.is_cpu and dispatch_is_plain([positions]):
        tables = growing_tables(text, dtype).make_needed_rows(positions)
    else:
        tables = digit_tables(text, positions.device, dtype)
    size = positions.abs()
    cos, sin = _look_up(tables[0], size & (ROWS - 1))
    for digit in range(1, digits):
        c, s = _look_up(tables[digit], (size >> (DIGIT_BITS * digit)) & (ROWS - 1))
        cos, sin = cos * c - sin * s, cos * s + sin * c
    sin = torch.where(positions < 0, -sin, sin)  # R(-p) is the conjugate of R(p)
    if digits < DIGITS:
        return cos, sin
    # beyond the tables: NaN, so that it is never taken for a rotation. abs(-2**63) is negative
    outside = (size >= POSITION_LIMIT) | (size < 0)
    return cos.masked_fill(outside, torch.nan), sin.masked_fill(outside, torch.nan)


def _look_up(table: Tensor, digits: Tensor) -> tuple[Tensor, Tensor]:
    """Cos and sin of ``table [1024, 2, num_pairs]`` at ``digits [..., 1 or num_pairs]``."""
    if digits.shape[-1] == 1:
        # not table[digits], which would read a 0-dimensional digit on the host
        row = table.index_select(0, digits.reshape(-1))
        # [n, 2, num_pairs] -> twice [..., num_pairs]
        cos, sin = row.reshape(*digits.shape[:-1], 2, table.size(-1)).unbind(-2)
        return cos, sin
    pairs = torch.arange(table.size(-1), device=table.device)
    return table[digits, 0, pairs], table[digits, 1, pairs]
