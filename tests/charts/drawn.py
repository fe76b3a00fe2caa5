"""Every picture drawn once, and how to read curves and numbers off it again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from phasor import Rope, figures
from phasor.papers import coverage
from phasor.scaling import NTK, Hope, Linear, Llama3, Yarn

ROPE = Rope(head_dim=128, pairing="half", base=10_000.0)
SMALL = Rope(head_dim=8, pairing="half", base=100.0)
SEVEN = {f"base {base}": replace(ROPE, base=float(base)) for base in range(100, 800, 100)}
WAYS = {
    "unchanged": coverage(ROPE, 4096, ROPE, 16384),
    "linear": coverage(ROPE, 4096, replace(ROPE, scaling=Linear(factor=4.0)), 16384),
    "ntk": coverage(ROPE, 4096, replace(ROPE, scaling=NTK(factor=4.0)), 16384),
}
LAWS = {
    "linear": Linear(factor=8.0),
    "NTK": NTK(factor=8.0),
    "YaRN": Yarn(factor=8.0, original_max_positions=4096),
    "Llama 3": Llama3(factor=8.0, original_max_positions=4096),
    "HoPE": Hope(original_max_positions=4096),
}
DRAWN: dict[str, Figure] = {
    "rotation_figure": figures.rotation_figure(ROPE, pairs=[0, 9, 16, 40], tokens=12),
    "decay_figure": figures.decay_figure(SEVEN, range(64), window=(6, 22)),
    "cosine_figure": figures.cosine_figure(SEVEN, [1, 10, 100], seed=3),
    "wavelength_figure": figures.wavelength_figure(SEVEN, context=4096),
    "scaling_figure": figures.scaling_figure(ROPE, LAWS),
    "attention_figure": figures.attention_figure(ROPE, [0, 1, 3], alpha=12.0, tokens=9),
    "usage_figure": figures.usage_figure({"0": np.ones((2, 4)), "1": np.ones((3, 4))}),
    "coverage_figure": figures.coverage_figure(WAYS),
    "precision_figure": figures.precision_figure(ROPE, bits=6, draws=2),
    "linear_figure": figures.linear_figure(SMALL, [8, 64], draws=3),
}


def inv_freq(rope: Rope) -> list[float]:
    """Frequencies of a plain rope, by their definition."""
    assert rope.scaling is None
    return [rope.base ** (-2 * k / rope.rotary_dim) for k in range(rope.num_pairs)]


def curves(figure: Figure, panel: int = 0) -> dict[str, Any]:
    """The named curves of a panel, by name."""
    lines = figure.axes[panel].lines
    return {str(line.get_label()): line for line in lines if not is_mark(line)}


def is_mark(line: Line2D) -> bool:
    """Whether a line only marks a level: it has no name of its own."""
    return str(line.get_label()).startswith("_")


def heat(figure: Figure, panel: int = 0) -> Any:
    """The numbers of a panel's heat map, cells without one masked."""
    return figure.axes[panel].images[0].get_array()
