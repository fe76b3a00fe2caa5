"""Every token's cosines and sines in plain torch operations, from positions or as given."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from phasor import angles as numpy_angles
from phasor.angles import DIGIT_BITS, DIGITS, POSITION_LIMIT, ROWS
from phasor.torch import _tables
from phasor.torch._internals import unheard
from phasor.torch._layout import count_axes, read_rope

#: What `reach` answers when four digits are too few.
TOO_FAR = 0


def reach(angles: Sequence[Tensor]) -> int:
    """How many digits the positions need, or `TOO_FAR`.

    Only positions in the CPU's memory are looked at. Elsewhere the look would stop the device:
    all four digits are used, and a row they do not reach is NaN.
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


def rows(
    angles: Sequence[Tensor], rope: str, dtype: torch.dtype, digits: int = DIGITS
) -> tuple[Tensor, Tensor]:
    """Cos and sin ``[..., S, N]`` in ``dtype``, without gain.

    Args:
        angles: ``[positions]``, or ``[cos, sin]``.
        rope: The operator's text.
        dtype: float32, or float64 for float64 tensors.
        digits: What `reach` said of the positions.
    """
    if len(angles) == 2:
        return angles[0].to(dtype), angles[1].to(dtype)
    positions = angles[0]
    if digits == TOO_FAR:
        kind = np.float64 if dtype == torch.float64 else np.float32
        exact = torch.tensor(numpy_angles.rows(read_rope(rope), positions.numpy(), kind))
        return exact[..., 0], exact[..., 1]
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
    if places.is_cpu and unheard([places]):
        tables = _tables.growing_tables(rope, dtype).reaching(places)
    else:
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
    """Rows of ``table [1024, 2, N]`` at ``digits [..., 1]``, or pair by pair at ``[..., N]``."""
    if digits.shape[-1] == 1:
        # not table[digits]: a digit without dimensions would be read on the host
        row = table.index_select(0, digits.reshape(-1))
        cos, sin = row.reshape(*digits.shape[:-1], 2, table.size(-1)).unbind(-2)
        return cos, sin
    pairs = torch.arange(table.size(-1), device=table.device)
    return table[digits, 0, pairs], table[digits, 1, pairs]
