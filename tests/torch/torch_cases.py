"""Ropes and positions that several test files of the torch verbs take."""

from __future__ import annotations

import torch

from phasor import Rope
from phasor.axes import Sectioned

HALF = Rope(head_dim=8, pairing="half")
HALF_16 = Rope(head_dim=16, pairing="half")
PART = Rope(head_dim=8, pairing="interleaved", rotary_dim=4, rotary_start=2)
MIXED = Rope(
    head_dim=8,
    rotary_dim=4,
    rotary_start=2,
    pairing="interleaved",
    pairing_out="half",
    direction=-1,
)
THREE = Rope(head_dim=8, pairing="half", axes=Sectioned((2, 1, 1)))
PLACES = torch.tensor([3, 70_001, -5, 2**33])
