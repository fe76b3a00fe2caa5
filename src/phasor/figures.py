"""Pictures of what `phasor.analysis` and `phasor.frequencies` return, one function each.

Colours are Okabe and Ito's, which colour-blind readers can tell apart; line styles differ as
well, so that a picture reads in grey.
"""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from phasor.analysis import RECIPES, Recipe, angle_errors
from phasor.frequencies import wavelengths
from phasor.spec import Rope

_STYLES = (
    ("#0072B2", "-"),
    ("#D55E00", "--"),
    ("#009E73", "-."),
    ("#CC79A7", ":"),
    ("#E69F00", (0, (5, 1))),
    ("#56B4E9", (0, (1, 1))),
)
_NAMES: dict[Recipe, str] = {
    "float32 angle": "float32 angle, the usual recipe",
    "float64 angle": "float64 angle",
    "float32 rows": "phasor, float32",
    "float64 rows": "phasor, float64",
}


def precision_figure(rope: Rope, *, bits: int = 40, draws: int = 32) -> Figure:
    """Largest error of cos and sin against position, for each recipe of `angle_errors`.

    Args:
        rope: A Rope of one axis.
        bits: Positions run up to ``2 ** bits``.
        draws: Random positions drawn in each octave; the curve is their maximum.

    Returns:
        A figure with one curve for each recipe.
    """
    draw = np.random.default_rng(0)
    octaves = [draw.integers(2**b, 2 ** (b + 1), draws) for b in range(bits)]
    figure, axes = _axes("position (tokens)", "largest error of cos and sin")
    for recipe, (colour, style) in zip(RECIPES, _STYLES, strict=False):
        worst = [float(angle_errors(rope, octave, recipe).max()) for octave in octaves]
        floor = np.maximum(worst, 2.0**-54)  # an exact result has no logarithm
        axes.loglog(
            2.0 ** np.arange(bits), floor, color=colour, linestyle=style, label=_NAMES[recipe]
        )
    axes.set_xscale("log", base=2)
    axes.legend(frameon=False)
    return figure


def wavelength_figure(ropes: Mapping[str, Rope], *, context: int | None = None) -> Figure:
    """Positions per turn of every pair, one curve for each Rope.

    Args:
        ropes: Ropes with static laws, by the name their curve gets.
        context: Drawn as a line: a pair above it never comes round within it.

    Returns:
        A figure with one curve for each Rope.
    """
    figure, axes = _axes("pair", "wavelength (positions per turn)")
    for (name, rope), (colour, style) in zip(ropes.items(), _STYLES, strict=False):
        lengths = wavelengths(rope)
        axes.semilogy(
            np.arange(len(lengths)),
            np.where(np.isfinite(lengths), lengths, np.nan),
            color=colour,
            linestyle=style,
            label=name,
        )
    if context is not None:
        axes.axhline(context, color="0.4", linewidth=0.8)
        axes.annotate(
            f"context {context}", (0, context), color="0.3", va="bottom", fontsize="small"
        )
    axes.legend(frameon=False)
    return figure


def _axes(x: str, y: str) -> tuple[Figure, Axes]:
    with mpl.rc_context({"axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.add_subplot()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(visible=True, color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    return figure, axes
