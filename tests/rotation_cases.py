"""The ropes, layouts and positions that the tests of every framework rotate by."""

from __future__ import annotations

from typing import Any

from phasor import Rope
from phasor.axes import Sectioned
from phasor.scaling import DynamicNTK, Linear, Llama3

PLACES = [1_000, 100_000, 1_000_000, 2**24 + 1, 2**31 + 7, 2**39]
POSITIONS = [0, *PLACES, *(-p for p in PLACES)]
#: What int32 holds.
POSITIONS_32 = [0, 1, -1, *PLACES[:4], *(-p for p in PLACES[:4]), 2**31 - 1, -(2**31)]
#: Near, far, between two integers, and where a float is an integer.
FLOATS = [0.0, 0.5, -0.5, 0.3, -1000.25, 70_001.125, 2.0**-20, -(2.0**33), 2.0**40 + 2.0**20]

PAIRINGS = ["half", "interleaved"]
SLICES: dict[str, dict[str, int]] = {"whole": {}, "slice": {"rotary_dim": 8, "rotary_start": 6}}
LLAMA3 = Llama3(factor=8.0, original_max_positions=64, low_freq_factor=1.0, high_freq_factor=4.0)

#: Frequencies of every kind, each with positions near and far.
ROPES = {
    "another base": Rope(head_dim=16, pairing="half", base=500_000.0),
    "linear": Rope(head_dim=16, pairing="half", scaling=Linear(factor=3.0)),
    "llama3": Rope(head_dim=16, pairing="half", scaling=LLAMA3),
    "explicit": Rope(head_dim=6, pairing="interleaved", explicit_inv_freq=(3.0, 0.1, 0.0)),
    "above a turn": Rope(head_dim=4, pairing="half", explicit_inv_freq=(1e9, 7.0)),
    "one pair": Rope(head_dim=2, pairing="half"),
    "64 pairs": Rope(head_dim=128, pairing="half"),
}
THREE = Rope(head_dim=8, pairing="half", axes=Sectioned((2, 1, 1)))
RULE = Rope(head_dim=8, pairing="half", scaling=DynamicNTK(factor=2.0, original_max_positions=4096))


def layouts(**fields: Any) -> dict[str, Rope]:
    """Ropes of 16 coordinates in every layout: pairings in and out, slice, direction."""
    return {
        f"{pairing} to {pairing_out}, {width}, {direction}": Rope(
            head_dim=16,
            pairing=pairing,
            pairing_out=pairing_out,
            direction=direction,
            **SLICES[width],
            **fields,
        )
        for pairing in PAIRINGS
        for pairing_out in PAIRINGS
        for width in SLICES
        for direction in (1, -1)
    }
