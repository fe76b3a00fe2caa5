"""How far the common ways of making cos and sin are off."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from phasor.figures._style import label, legend, panels, styled
from phasor.papers import RECIPES, Recipe, angle_errors
from phasor.rope import Rope

_NAMES: dict[Recipe, str] = {
    "float32 angle": "float32 angle, the usual recipe",
    "float64 angle": "float64 angle",
    "float32 rows": "phasor, float32",
    "float64 rows": "phasor, float64",
    "complex64": "complex64 exponential",
    "bfloat16 table": "float32 angle, table in bfloat16",
}


def precision_figure(rope: Rope, *, bits: int = 40, draws: int = 32) -> Figure:
    """Largest error of cos and sin against position, for each recipe of `angle_errors`.

    Args:
        rope: A Rope of one axis.
        bits: Positions run up to ``2 ** bits``.
        draws: Random positions drawn in each octave; the curve is their maximum.

    Returns:
        A figure with one curve for each recipe.

    >>> figure = precision_figure(Rope(head_dim=128, pairing="half"), bits=20, draws=4)
    >>> figure.axes[0].lines[2].get_label()
    'phasor, float32'
    """
    draw = np.random.default_rng(0)
    octaves = [draw.integers(2**b, 2 ** (b + 1), draws) for b in range(bits)]
    figure, (axes,) = panels(size=(7, 4.4))
    label(axes, "position (tokens)", "largest error of cos and sin")
    looks = styled(_NAMES[recipe] for recipe in RECIPES)
    for recipe, (_, look) in zip(RECIPES, looks, strict=True):
        worst = [float(angle_errors(rope, octave, recipe).max()) for octave in octaves]
        floor = np.maximum(worst, 2.0**-54)  # an exact result has no logarithm
        axes.loglog(2.0 ** np.arange(bits), floor, **look)
    axes.set_xscale("log", base=2)
    legend(figure, axes, columns=2)
    return figure
