"""The geometry of the rotation functions of transformers, measured, and the ropes of their rows.

A function is given random heads and random angles, and what it makes of them tells which pairs it
reads and writes, in which slice of a head and which way. Rows are the cosines and sines that a
function takes, one for each token.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phasor.errors import PhasorError
from phasor.identification import Identification, identify_samples
from phasor.pairings import PAIRINGS, Pairing, slices
from phasor.positions import every_axis
from phasor.rope import Rope

Grid = NDArray[np.int64]  # positions [axes, seq]
Rows = NDArray[np.float64]  # [seq, num_pairs]
#: At this position the angle of a slow pair exceeds the rounding of float32.
FARTHEST = 1 << 14
#: Parameters for cosines and sines as complex numbers.
COMPLEX_ROWS = ("freqs_cis", "freqs_ci")
ROWS = ("cos", "sin", *COMPLEX_ROWS)
_OPTIONS = ("position_ids", "unsqueeze_dim")
# of the heads that measure a function: rotated pairs, and further coordinates
_PAIRS, _SPARE = 4, 6
# of the random vectors that rows are identified by
_HEADS = 8
_TOLERANCE = 1e-6
_FLOAT32_ROUNDING = 2.0**-24
# what a function reads, what it writes, and which way it turns where these are one
_PAIRINGS_AND_DIRECTIONS: list[tuple[Pairing, Pairing, int]] = [
    (source, target, direction)
    for source, target in itertools.product(PAIRINGS, PAIRINGS)
    for direction in ((1, -1) if source == target else (1,))
]
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


def parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    """The parameters of a function, by name."""
    # the kernels package turns a function into a module
    target = function.forward if isinstance(function, torch.nn.Module) else function
    return inspect.signature(target).parameters


def tensor_parameters(function: Any) -> tuple[str, ...]:
    """The parameters of a rotation function that it rotates: all but its rows and options."""
    return tuple(name for name in parameters(function) if name not in (*ROWS, *_OPTIONS))


@lru_cache(maxsize=256)
def measure_signature(function: Any, batched: bool = True) -> RotationSignature | None:
    """The geometry with which `turn` does what a function does to random tensors; None if none."""
    rows = {*parameters(function)} & {*ROWS}
    takes_rows = rows == {"cos", "sin"} or len(rows) == 1
    if not takes_rows or len(tensor_parameters(function)) not in (1, 2):
        return None
    widths: tuple[RowWidth, ...] = ("twice", "repeated", "half") if len(rows) == 2 else ("complex",)
    shape = (1, 3, _PAIRS) if batched else (3, _PAIRS)  # of cosines, [..., seq, pairs]
    generator = torch.Generator().manual_seed(0)
    phases = torch.rand(shape, generator=generator) * 6
    # a wider head shows which slice is rotated, if the function takes one
    for width, heads_first, spare in itertools.product(widths, (True, False), (_SPARE, 0)):
        # [..., seq, heads, head_dim]
        x = torch.randn(*shape[:-1], 2, 2 * _PAIRS + spare, generator=generator)
        inputs = x.transpose(-3, -2) if heads_first else x
        try:
            y = _call(function, inputs, _make_rows(phases, width))
        except (RuntimeError, ValueError, IndexError, TypeError):
            continue  # the function does not take these shapes
        y = y.transpose(-3, -2) if heads_first else y
        places: tuple[RotatedSlice, ...] = ("start", "end") if spare else ("exact",)
        for pairings, place in itertools.product(_PAIRINGS_AND_DIRECTIONS, places):
            measured = RotationSignature(*pairings, place, width, heads_first)
            predicted = turn(x, phases.cos(), phases.sin(), measured)
            if y.shape == x.shape and torch.allclose(predicted, y, 0, _TOLERANCE):
                return measured
    return None


def turn(x: Tensor, cos: Tensor, sin: Tensor, signature: RotationSignature) -> Tensor:
    """``x`` ``[..., seq, heads, head_dim]`` turned by cos and sin ``[..., seq, num_pairs]``."""
    pairs = cos.shape[-1]
    start = x.shape[-1] - 2 * pairs if signature.slice == "end" else 0
    first, second = (x[..., part] for part in slices(signature.pairing, pairs, start))
    # [..., seq, num_pairs] -> [..., seq, 1, num_pairs], for every head
    cos, sin = cos.unsqueeze(-2), signature.direction * sin.unsqueeze(-2)
    y = x.clone()
    to_first, to_second = slices(signature.pairing_out, pairs, start)
    y[..., to_first] = first * cos - second * sin
    y[..., to_second] = first * sin + second * cos
    return y


def _call(function: Any, x: Tensor, rows: Any) -> Tensor:
    """``x`` rotated by ``function``, with rows ``(cos, sin)`` or complex numbers."""
    cos, sin = (rows, rows) if isinstance(rows, Tensor) else rows
    values_by_name = {"cos": cos, "sin": sin} | dict.fromkeys(COMPLEX_ROWS, cos)
    values_by_name["position_ids"] = torch.zeros(cos.shape[:-1], dtype=torch.int64)
    needed = {
        name
        for name, parameter in parameters(function).items()
        if parameter.default is parameter.empty
    }
    # a copy for each parameter, because a function may write into its arguments
    names = [name for name in parameters(function) if name in needed or name not in _OPTIONS]
    y = function(*(values_by_name[name] if name in values_by_name else x.clone() for name in names))
    return cast(Tensor, y[0] if isinstance(y, tuple) else y)


def _make_rows(phases: Tensor, width: RowWidth) -> Any:
    cos, sin = phases.cos(), phases.sin()
    match width:
        case "twice":
            return tuple(torch.cat((row, row), -1) for row in (cos, sin))
        case "repeated":
            return tuple(row.repeat_interleave(2, -1) for row in (cos, sin))
        case "half":
            return cos, sin
        case "complex":
            return torch.complex(cos, sin)


def each_row(answer: Any) -> tuple[Tensor, ...]:
    """The tensors of an answer: cosines and sines, or one tensor that holds both."""
    return (answer,) if isinstance(answer, Tensor) else tuple(answer)


def half_rows(answer: Any, signature: RotationSignature | None) -> tuple[Rows, Rows]:
    """Cosines and sines ``[seq, num_pairs]`` of one sequence, from rows for that signature."""
    assert signature is not None, "a rope was found for it"
    # [1, seq, width] -> [seq, width]
    rows = [row.reshape(-1, row.shape[-1]) for row in each_row(answer)]
    match signature.width:
        case "complex":
            rows = torch.view_as_real(rows[0]).unbind(-1)
        case "twice":
            rows = [row.chunk(2, -1)[0] for row in rows]
        case "repeated":
            rows = [row[..., ::2] for row in rows]
        case "half":
            pass
    cos, sin = (row.double().numpy() for row in rows)
    return cos, sin


def rope_error(rope: Rope, signature: RotationSignature, answer: Any, grid: Grid) -> float:
    """The distance of the rows from those of ``rope``, as a share of what float32 explains.

    At most 1 is right; infinity where pairs or direction differ. Head and slice are not compared.
    """
    if signature[:3] != (rope.pairing, rope.output_pairing, rope.direction):
        return math.inf
    rows, pairs = half_rows(answer, signature), rope.num_pairs
    if rows[0].shape[-1] != pairs or len(grid) != rope.axes.n_axes:
        return math.inf
    angles = grid[list(rope.axes.axis_of_pair(pairs))].T * rope.inv_freq
    # the logarithm of a frequency is ln(base) times an exponent, and a rounding of that is a
    # relative error; the law, the angle, the cosine and its gain add some roundings more
    roundings = np.log(rope.base or 1e4) * np.arange(pairs) / pairs + 8
    allowed = np.abs(angles) * roundings + 8
    gain = rope.attention_factor
    error = np.hypot(rows[0] - gain * np.cos(angles), rows[1] - gain * np.sin(angles))
    share = error / (gain * allowed * _FLOAT32_ROUNDING)
    # rows with a NaN match no rope
    return float(share.max()) if np.isfinite(share).all() else math.inf


def spread_positions(end: int, n_axes: int = 1) -> Grid:
    """Positions ``[axes, seq]`` below ``end``: on all axes at once, then along each alone."""
    # close together for the fastest pair, and far apart for the slowest
    steps = list(range(min(9, max(end, 2))))
    while (next_step := steps[-1] + steps[-1] // 2) < end:
        steps.append(next_step)
    positions = np.array(steps)
    if n_axes == 1:
        return positions[None]
    single = [np.where(np.arange(n_axes) == axis, positions[1:, None], 0) for axis in range(n_axes)]
    return np.concatenate([every_axis(positions, n_axes), *single]).T


def identify_rows(answer: Any, signature: RotationSignature, grid: Grid) -> Identification | None:
    """What rows made for ``grid`` turn by, told by vectors that they rotate; None if nothing."""
    cos, sin = (torch.from_numpy(row) for row in half_rows(answer, signature))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(len(cos), _HEADS, 2 * cos.shape[-1], generator=generator, dtype=torch.float64)
    y = turn(x, cos, sin, signature._replace(slice="exact"))
    # [seq, heads, head_dim] -> [seq * heads, head_dim]
    before, after = (tensor.flatten(0, 1).numpy() for tensor in (x, y))
    positions = grid[0] if len(grid) == 1 else grid.T
    with suppress(PhasorError):
        return identify_samples(before, after, positions.repeat(_HEADS, axis=0))
    return None
