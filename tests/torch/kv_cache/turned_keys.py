"""Stored keys of every layout, and what a turn of them must give."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from phasor import Rope
from phasor.axes import Alternating, Axial, InterleavedSections, Sectioned
from phasor.scaling import LongRope

from ..torch_arrays import excess_by

LONG = LongRope(
    short_factors=(1.0, 1.5, 1.0, 3.0),
    long_factors=(1.0, 4.5, 8.0, 33.0),
    original_max_positions=16,
    factor=4.0,
    short_attention_factor=1.1,
    long_attention_factor=1.4,
)
# of every layout one, for 8 coordinates
LAYOUTS: dict[str, Rope] = {
    "half": Rope(head_dim=8, pairing="half"),
    "interleaved": Rope(head_dim=8, pairing="interleaved"),
    "written in another pairing": Rope(head_dim=8, pairing="interleaved", pairing_out="half"),
    "a slice": Rope(head_dim=8, pairing="half", rotary_dim=4, rotary_start=3),
    "clockwise": Rope(head_dim=8, pairing="half", direction=-1),
    "sectioned": Rope(head_dim=8, pairing="half", axes=Sectioned((2, 1, 1))),
    "axial": Rope(head_dim=8, pairing="half", axes=Axial((1, 3))),
    "interleaved sections": Rope(head_dim=8, pairing="half", axes=InterleavedSections((2, 1, 1))),
    "alternating": Rope(head_dim=8, pairing="half", axes=Alternating((2, 1, 1))),
}
HALF, SECTIONED = LAYOUTS["half"], LAYOUTS["sectioned"]


def assert_turned(
    actual: Tensor, stored: Tensor, rows: np.ndarray, rope: Rope, *, error: float, gain: float = 1.0
) -> None:
    """``actual`` is ``stored`` times ``rows``, rounded once, in the pairing that keys lie in."""
    pairing = (rope.output_pairing, rope.output_pairing)
    worst = excess_by(actual, stored, rows, pairing, rope.rotary_start, gain=gain, error=error)
    assert worst <= 1, f"{stored.dtype}: {worst:.3g} times the bound"


def places(rope: Rope, *tokens: int, seed: int = 0) -> Tensor:
    """Positions from -40 to 40, with an axis of coordinates where the Rope has several."""
    generator = torch.Generator().manual_seed(seed)
    axes = () if rope.axes.n_axes == 1 else (rope.axes.n_axes,)
    return torch.randint(-40, 41, (*tokens, *axes), generator=generator)
