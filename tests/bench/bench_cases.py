"""Tiny cases for the benchmark's harness, and a contender by hand that may be spoilt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from phasor import bench
from phasor.bench import Case, Contender, Measured

TINY = Case(name="tiny", dtype="float32", seq=5, batch=2, q_heads=3, k_heads=1, head_dim=8)
SHAPES = {
    "prefill": TINY,
    "bfloat16": replace(TINY, dtype="bfloat16"),
    "heads first": replace(TINY, heads_first=True),
    "partial": replace(TINY, rotary_dim=4),
    "several axes": replace(TINY, sections=(2, 1, 1)),
    "rows cut": replace(TINY, rows=(24, 20)),
    "decode": replace(TINY, seq=1, batch=6),
    "backward": replace(TINY, backward=True),
    "far": replace(TINY, first=10**6),
}


def by_hand(case: Case, positions: Tensor) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The half pairing of one axis from plain cosines, in float64."""
    width = case.head_dim
    inv_freq = case.base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = positions.double()[..., None, None] * inv_freq
    cos, sin = angles.cos(), angles.sin()

    def turned(x: Tensor) -> Tensor:
        a, b = x.double().chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)

    return lambda q, k: (turned(q), turned(k))


def spoilt(spoil: Callable[[Tensor], Tensor]) -> Contender:
    """`by_hand` with something wrong in its query."""

    def build(case: Case, positions: Tensor) -> Any:
        right = by_hand(case, positions)

        def rotation(q: Tensor, k: Tensor) -> Sequence[Tensor]:
            new_q, new_k = right(q, k)
            return spoil(new_q), new_k

        return rotation

    return Contender(name="by hand", pairing="half", build=build)


def measured_alone(case: Case, contender: Contender) -> Measured:
    """What comes of a case with one contender."""
    return bench.measure(case, [contender], seconds=0.0)
