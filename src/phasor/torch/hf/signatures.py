"""The geometry of foreign rotation functions, measured by calling them."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from phasor.errors import TensorError
from phasor.pairings import PAIRINGS, Pairing
from phasor.torch.functional import rotate_by

#: Parameters for cosines and sines as complex numbers.
COMPLEX_ROWS = ("freqs_cis", "freqs_ci")
ROWS = ("cos", "sin", *COMPLEX_ROWS)
_OPTIONS = ("position_ids", "unsqueeze_dim")
# of the heads that measure a function: rotated pairs, and further coordinates
_PAIRS, _SPARE = 4, 6
# a head rotates as one, or in halves by a coordinate each, as in the tower of Gemma 4
_SUBHEADS = (1, 2)
_TOLERANCE = 1e-6
#: How a function takes cosines and sines: once per pair ("half"), with a copy after them ("twice"),
#: each twice in a row ("repeated"), or as complex numbers ("complex").
RowWidth = Literal["twice", "repeated", "half", "complex"]
RotatedSlice = Literal["start", "end", "exact"]


class RotationSignature(NamedTuple):
    """The geometry of one foreign rotation function, as it was measured."""

    pairing: Pairing
    pairing_out: Pairing
    direction: int  # -1 where positive angles turn clockwise
    slice: RotatedSlice  # of a head wider than the rotation; "exact" where it takes no such head
    width: RowWidth
    heads_first: bool  # whether tensors are [..., heads, seq, head_dim] by default
    subheads: int = 1  # equal parts of a head, each rotated as a head of its own


def parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    """The parameters of a function, by name."""
    # the kernels package turns a function into a module
    called = function.forward if isinstance(function, torch.nn.Module) else function
    return inspect.signature(called).parameters


def tensor_parameters(function: Any) -> tuple[str, ...]:
    """The parameters of a rotation function that it rotates: all but its rows and options."""
    return tuple(name for name in parameters(function) if name not in (*ROWS, *_OPTIONS))


def heads_come_first(unsqueeze_dim: int, rank: int) -> bool:
    """Whether ``unsqueeze_dim`` puts heads before tokens in cosines ``[..., seq, width]``."""
    axis = unsqueeze_dim % (rank + 1)
    if axis not in (rank - 2, rank - 1):
        raise TensorError(
            f"unsqueeze_dim must be {rank - 2} or {rank - 1} in a patched model, "
            f"got {unsqueeze_dim}"
        )
    return axis == rank - 2


@lru_cache(maxsize=256)
def measure_signature(function: Any, batched: bool = True) -> RotationSignature | None:
    """The geometry of a rotation function, by what it makes of random tensors; None without one."""
    rows = {*parameters(function)} & {*ROWS}
    takes_rows = rows == {"cos", "sin"} or len(rows) == 1
    if not takes_rows or len(tensor_parameters(function)) not in (1, 2):
        return None
    widths: tuple[RowWidth, ...] = ("twice", "repeated", "half") if len(rows) == 2 else ("complex",)
    shape = (1, 3, _PAIRS) if batched else (3, _PAIRS)  # of cosines, [..., seq, pairs]
    with torch.device("cpu"), torch.no_grad():
        phases = torch.rand(shape, generator=torch.Generator().manual_seed(0)) * 6
        for subheads, width, heads_first in itertools.product(_SUBHEADS, widths, (True, False)):
            rows, spare = _make_rows(phases, width, subheads), _SPARE if subheads == 1 else 0
            # a wider head shows which slice is rotated, if the function takes one
            sample = _sample_rotation(function, rows, heads_first, 2 * _PAIRS + spare)
            sample = sample or _sample_rotation(function, rows, heads_first, 2 * _PAIRS)
            geometry = sample and _find_geometry(*sample, phases, subheads)
            if geometry:
                return RotationSignature(*geometry, width, heads_first, subheads)
    return None


def call_rotation(function: Any, x: Tensor, rows: Any) -> Tensor:
    """``x`` rotated by ``function``, with rows ``(cos, sin)`` or complex numbers."""
    cos, sin = (rows, rows) if isinstance(rows, Tensor) else rows
    by_name = {"cos": cos, "sin": sin} | dict.fromkeys(COMPLEX_ROWS, cos)
    # those of Gemma 4's tower only say by their last size how many subheads there are
    by_name["position_ids"] = torch.zeros(*cos.shape[:-1], _SUBHEADS[-1])
    needed = {name for name, it in parameters(function).items() if it.default is it.empty}
    # a copy for each parameter, because a function may write into its arguments
    names = [name for name in parameters(function) if name in needed or name not in _OPTIONS]
    y = function(*(by_name[name] if name in by_name else x.clone() for name in names))
    return cast(Tensor, y[0] if isinstance(y, tuple) else y)


def _make_rows(phases: Tensor, width: RowWidth, subheads: int) -> Any:
    phases = split_last(phases, subheads)
    cos, sin = phases.cos(), phases.sin()
    match width:
        case "twice":
            return tuple(torch.cat((row, row), -1).flatten(-2) for row in (cos, sin))
        case "repeated":
            return tuple(row.repeat_interleave(2, -1).flatten(-2) for row in (cos, sin))
        case "half":
            return cos.flatten(-2), sin.flatten(-2)
        case "complex":
            return torch.complex(cos, sin).flatten(-2)


def split_last(x: Tensor, count: int) -> Tensor:
    """``[..., n] -> [..., count, n / count]``."""
    return x.reshape(*x.shape[:-1], count, -1)


def split_heads(x: Tensor, subheads: int) -> Tensor:
    """``[..., seq, heads, head_dim] -> [..., seq, subheads, heads, head_dim / subheads]``."""
    # each part of a head is then a token with rows of its own
    return split_last(x, subheads).transpose(-3, -2)


def join_heads(x: Tensor) -> Tensor:
    """The inverse of `split_heads`."""
    return x.transpose(-3, -2).flatten(-2)


def _sample_rotation(
    function: Any, rows: Any, heads_first: bool, width: int
) -> tuple[Tensor, Tensor] | None:
    """A random tensor and the rotated one, ``[..., seq, heads, width]``; None if it fails."""
    generator = torch.Generator().manual_seed(1)
    leading = (rows if isinstance(rows, Tensor) else rows[0]).shape[:-1]
    x = torch.randn(*leading, 2, width, generator=generator)
    try:
        y = call_rotation(function, x.transpose(-3, -2) if heads_first else x, rows)
    except (RuntimeError, ValueError, IndexError, TypeError):
        return None  # the function does not take these shapes
    y = y.transpose(-3, -2) if heads_first else y
    return (x, y) if y.shape == x.shape else None


def _find_geometry(
    x: Tensor, y: Tensor, phases: Tensor, subheads: int
) -> tuple[Pairing, Pairing, int, RotatedSlice] | None:
    """The pairings, direction and slice of the rotation that makes ``y`` of ``x``, if one does."""
    spare = x.shape[-1] - 2 * _PAIRS
    starts: dict[RotatedSlice, int] = {"start": 0, "end": spare} if spare else {"exact": 0}
    x, phases = split_heads(x, subheads), split_last(phases, subheads)
    for rotated, source, target in itertools.product(starts, PAIRINGS, PAIRINGS):
        for direction in (1, -1) if source == target else (1,):
            expected = rotate_by(
                x, phases.cos(), direction * phases.sin(),
                pairing=source, pairing_out=target, rotary_start=starts[rotated], backend="eager",
            )  # fmt: skip
            if torch.allclose(join_heads(expected), y, atol=_TOLERANCE, rtol=0):
                return source, target, direction, rotated
    return None
