"""Ropes that several files ask about."""

from __future__ import annotations

from typing import Any

from phasor import Rope

LLAMA_2 = Rope(head_dim=128, pairing="half", base=10_000.0)
# the second method of Men et al. 2405.14591, table 4
METHOD_2 = tuple(
    1e4 ** (-k / 64) / 8 if k >= 44 else (1e4 * 8 ** (128 / 88)) ** (-k / 64) for k in range(64)
)


def head(width: int = 128, base: float | None = 10_000.0, **fields: Any) -> Rope:
    """A plain head."""
    return Rope(head_dim=width, pairing="half", base=base, **fields)


def at_0(rope: Rope) -> Any:
    """The first position, on every axis."""
    return [0] * rope.axes.n_axes if rope.axes.n_axes > 1 else 0
