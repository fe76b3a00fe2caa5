"""What the fused functions are tested with: their implementations, and ropes of every kind."""

from __future__ import annotations

import pytest

from phasor import Rope

from .triton_runs import APART, runs_kernels

# a process of kernels alone is started by one in which these have run
once = pytest.mark.skipif(APART, reason="it has nothing to do with kernels")
BACKENDS = [
    pytest.param("eager", marks=once),
    pytest.param("triton", marks=runs_kernels),
]
HALF = Rope(head_dim=8, pairing="half")
ROPES = {
    "half": HALF,
    "interleaved": Rope(head_dim=8, pairing="interleaved"),
    "slice": Rope(
        head_dim=10, rotary_dim=4, rotary_start=2, pairing="interleaved", pairing_out="half",
        direction=-1,
    ),
    "odd width": Rope(head_dim=6, pairing="half", pairing_out="interleaved"),
}  # fmt: skip
