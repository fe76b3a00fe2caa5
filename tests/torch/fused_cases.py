"""What the fused functions are tested with: implementations, ropes, and what is right."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from phasor import Rope

from ..gpu.triton_runs import APART, runs_kernels
from .torch_oracle import bound, float64, pair_places, row_error, turns

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


def normed_and_turned(
    x: np.ndarray, weight: np.ndarray, positions: Any, rope: Rope, norm_eps: float, gain: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What is right, its two terms' sizes and its pair's size: head by head, pair by pair."""
    value = np.empty_like(x)
    terms, size = np.zeros_like(x), np.zeros_like(x)
    rows = gain * turns(rope, positions)
    rows = np.broadcast_to(rows, (*x.shape[:-2], rows.shape[-1]))
    before = pair_places(rope.pairing, rope.rotary_start, rows.shape[-1])
    after = pair_places(rope.output_pairing, rope.rotary_start, rows.shape[-1])
    for at in np.ndindex(*x.shape[:-1]):
        head = [float(v) for v in x[at]]
        length = math.sqrt(math.fsum(v * v for v in head) / len(head) + norm_eps)
        normed = [v / length * float(w) for v, w in zip(head, weight, strict=True)]
        value[at] = normed
        terms[at] = np.abs(normed)
        for k, row in enumerate(rows[at[:-1]]):
            a, b = (normed[places[k]] for places in before)
            z = complex(a, b) * row
            i, j = (places[k] for places in after)
            value[at][i], value[at][j] = z.real, z.imag
            terms[at][i] = abs(a * row.real) + abs(b * row.imag)
            terms[at][j] = abs(a * row.imag) + abs(b * row.real)
            size[at][i] = size[at][j] = abs(gain) * (abs(a) + abs(b))
    return value, terms, size


def assert_normed(
    y: Tensor,
    x: Tensor,
    weight: Tensor,
    positions: Any,
    rope: Rope,
    norm_eps: float = 1e-6,
    gain: float = 1.0,
) -> None:
    """To within the rotation's bound, and a sum of squares, a root and two products before it."""
    given, w = float64(x), float64(weight)
    value, terms, size = normed_and_turned(given, w, positions, rope, norm_eps, gain)
    limit = bound(x.dtype, value, terms, size, row_error(x.dtype, positions))
    wide = torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32)
    # half of the sum's relative error enters through the root; 4 units are root and products
    limit += 2 * (x.shape[-1] / 2 + 4) * wide.eps * terms
    off = np.abs(float64(y) - value)
    assert (off <= limit).all(), f"{(off / limit).max():.3g} times the bound"
