"""The operator in plain torch operations: every device, every dtype, every transformation.

It is the definition that the other backends are checked against, and what ``torch.func`` and
double differentiation run through.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from phasor.angles import DIGIT_BITS, DIGITS, POSITION_LIMIT, ROWS
from phasor.angles import rows as exact_rows
from phasor.torch import _tables
from phasor.torch._layout import Layout, count_axes, read_layout, read_rope


def rotate(
    xs: Sequence[Tensor], angles: Sequence[Tensor], rope: str, inverse: bool, gain: float
) -> list[Tensor]:
    """New tensors with the strides of ``xs``; the operator's out-of-place kernel."""
    outs: list[Tensor] = []
    angles, digits = _reach(xs, angles, rope)
    layout = _layout(rope, inverse)
    for x, cos, sin in _with_rows(xs, angles, rope, inverse, gain, digits):
        out = torch.empty_like(x)
        start, end = layout.rotary_start, layout.rotary_start + 2 * cos.shape[-1]
        out[..., :start] = x[..., :start]
        out[..., end:] = x[..., end:]
        _write(out, _turned(x, cos, sin, layout), layout)
        outs.append(out)
    return outs


def rotate_(
    xs: Sequence[Tensor], angles: Sequence[Tensor], rope: str, inverse: bool, gain: float
) -> None:
    """The operator's in-place kernel: only the rotated slice is written."""
    angles, digits = _reach(xs, angles, rope)
    layout = _layout(rope, inverse)
    for x, cos, sin in _with_rows(xs, angles, rope, inverse, gain, digits):
        _write(x, _turned(x, cos, sin, layout), layout)


def composite(
    xs: Sequence[Tensor], angles: Sequence[Tensor], rope: str, inverse: bool, gain: float
) -> list[Tensor]:
    """The same values without a write or a look at the data, for those who follow each step."""
    outs: list[Tensor] = []
    layout = _layout(rope, inverse)
    for x, cos, sin in _with_rows(xs, angles, rope, inverse, gain, DIGITS):
        start, end = layout.rotary_start, layout.rotary_start + 2 * cos.shape[-1]
        # [N, 2] read row by row is interleaved, [2, N] is two halves
        side = -1 if layout.pairing_out == "interleaved" else -2
        turned = torch.stack(_turned(x, cos, sin, layout), side)
        turned = turned.reshape(*turned.shape[:-2], end - start).to(x.dtype)
        outs.append(torch.cat((x[..., :start], turned, x[..., end:]), -1))
    return outs


def _layout(rope: str, inverse: bool) -> Layout:
    layout = read_layout(rope)
    return layout.turned_round() if inverse else layout


def _turned(x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Both coordinates of every pair after the turn, in the dtype of the rows: ``[..., N]``."""
    first, second = layout.slices(layout.pairing, cos.shape[-1])
    x0, x1 = x[..., first].to(cos.dtype), x[..., second].to(cos.dtype)
    return torch.addcmul(x0 * cos, x1, sin, value=-1), torch.addcmul(x0 * sin, x1, cos)


def _write(out: Tensor, turned: tuple[Tensor, Tensor], layout: Layout) -> None:
    places = layout.slices(layout.pairing_out, turned[0].shape[-1])
    for place, values in zip(places, turned, strict=True):
        out[..., place] = values


def _with_rows(
    xs: Sequence[Tensor],
    angles: Sequence[Tensor],
    rope: str,
    inverse: bool,
    gain: float,
    digits: int,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Each tensor with its cos and sin ``[..., S, 1, N]``, in the dtype it is computed in."""
    made: dict[torch.dtype, tuple[Tensor, Tensor]] = {}
    for x in xs:
        kind = torch.float64 if x.dtype == torch.float64 else torch.float32
        if kind not in made:
            cos, sin = _rows(angles, rope, kind, digits)
            if gain != 1.0:
                cos, sin = cos * gain, sin * gain
            made[kind] = cos.unsqueeze(-2), (-sin if inverse else sin).unsqueeze(-2)
        yield x, *made[kind]


def _reach(
    xs: Sequence[Tensor], angles: Sequence[Tensor], rope: str
) -> tuple[Sequence[Tensor], int]:
    """How many digits the positions have, and exact rows in their place where four are too few.

    Only positions in the CPU's memory are looked at. Elsewhere the look would stop the device:
    all four digits are used, and a row they do not reach is NaN.
    """
    positions = angles[0]
    if len(angles) == 2 or positions.device.type != "cpu" or positions.numel() == 0:
        return angles, DIGITS
    low, high = (end.item() for end in positions.aminmax())
    furthest = max(-low, high)
    if furthest < POSITION_LIMIT:
        return angles, max(1, -(-int(furthest + 1).bit_length() // DIGIT_BITS))
    kind = np.float64 if any(x.dtype == torch.float64 for x in xs) else np.float32
    return torch.tensor(exact_rows(read_rope(rope), positions.numpy(), kind)).unbind(-1), DIGITS


def _rows(
    angles: Sequence[Tensor], rope: str, dtype: torch.dtype, digits: int
) -> tuple[Tensor, Tensor]:
    """Every token's cos and sin ``[..., S, N]``: given as they are, or made from positions."""
    if len(angles) == 2:
        return angles[0].to(dtype), angles[1].to(dtype)
    positions = angles[0]
    if count_axes(rope) == 1:
        places = positions.unsqueeze(-1)  # [..., S, 1]
    else:
        places = positions[..., _tables.axis_of_pair(rope, positions.device)]  # [..., S, N]
    if not positions.is_floating_point():
        return _digit_rows(places.long(), rope, dtype, digits)
    nearest = places.double().round()
    cos, sin = _digit_rows(nearest.long(), rope, dtype, digits)
    rest = (places.double() - nearest) * _tables.steps(rope, positions.device)
    c, s = rest.cos().to(dtype), rest.sin().to(dtype)
    return cos * c - sin * s, sin * c + cos * s


def _digit_rows(
    places: Tensor, rope: str, dtype: torch.dtype, digits: int
) -> tuple[Tensor, Tensor]:
    """Products of the digits' rows: ``R(p) = R(d3) R(d2) R(d1) R(d0)``, conjugate below zero."""
    tables = _tables.digit_tables(rope, places.device, dtype)
    size = places.abs()
    cos, sin = _looked_up(tables[0], size & (ROWS - 1))
    for digit in range(1, digits):
        c, s = _looked_up(tables[digit], (size >> (DIGIT_BITS * digit)) & (ROWS - 1))
        cos, sin = cos * c - sin * s, cos * s + sin * c
    sin = torch.where(places < 0, -sin, sin)
    if digits < DIGITS:
        return cos, sin
    # no digit row: poison it, for it must never look like a rotation. |-2**63| is negative
    outside = (size >= POSITION_LIMIT) | (size < 0)
    return cos.masked_fill(outside, torch.nan), sin.masked_fill(outside, torch.nan)


def _looked_up(table: Tensor, digits: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of ``table [1024, N, 2]`` at ``digits [..., 1]``, or pair by pair at ``[..., N]``."""
    if digits.shape[-1] == 1:
        row = table[digits.squeeze(-1)]
    else:
        row = table[digits, torch.arange(table.shape[1], device=table.device)]
    return row[..., 0], row[..., 1]
