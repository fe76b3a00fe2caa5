"""How fast each pair turns, and what the laws make of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

from phasor.figures._style import gaps, label, legend, panels, styled
from phasor.frequencies import wavelengths
from phasor.rope import Rope
from phasor.scaling import Law


def wavelength_figure(ropes: Mapping[str, Rope], *, context: int | None = None) -> Figure:
    """Positions per turn of every pair, one curve for each Rope.

    Args:
        ropes: Up to seven Ropes with static laws, by the name their curve gets. A pair that does
            not turn leaves a gap.
        context: Drawn as a line: a pair above it never comes round within it.

    Returns:
        A figure with one curve for each Rope.

    Raises:
        SpecError: If there are more Ropes than styles of lines, or one's scaling is a rule that
            has not picked its law.

    >>> rope = Rope(head_dim=128, pairing="half")
    >>> figure = wavelength_figure({"base 10 000": rope}, context=4096)
    >>> figure.axes[0].lines[0].get_ydata()[:2].round(2)
    array([6.28, 7.26])
    """
    figure, (axes,) = panels(size=(7.5, 4.6))
    label(axes, "pair (index)", "wavelength (tokens per turn)")
    for name, look in styled(ropes):
        axes.semilogy(gaps(wavelengths(ropes[name])), **look)
    if context is not None:
        axes.axhline(context, color="0.4", linewidth=0.8)
        axes.annotate(
            f"context of {context} tokens", (0, context), color="0.3", va="bottom", fontsize="small"
        )
    legend(figure, axes)
    return figure


def scaling_figure(rope: Rope, laws: Mapping[str, Law]) -> Figure:
    """What is left of every pair's frequency under each law, 1 for all of it.

    Position interpolation is a level line at ``1 / factor`` (Chen et al. 2306.15595); the other
    laws bend between 1 for fast pairs and their own end for slow ones.

    Args:
        rope: What the laws are applied to; its own scaling is taken off first.
        laws: Up to seven static laws, by the name their curve gets.

    Returns:
        A figure with one curve for each law. A pair that stood still before has no point.

    Raises:
        SpecError: If there are more laws than styles of lines, or one does not fit the Rope.

    >>> from phasor.scaling import Linear
    >>> figure = scaling_figure(Rope(head_dim=4, pairing="half"), {"linear": Linear(factor=8.0)})
    >>> figure.axes[0].lines[0].get_ydata()
    array([0.125, 0.125])
    """
    plain = dataclasses.replace(rope, scaling=None)
    before = gaps(plain.inv_freq)
    figure, (axes,) = panels(size=(7.5, 4.6))
    label(axes, "pair (index)", "frequency / plain frequency")
    for name, look in styled(laws):
        scaled = dataclasses.replace(plain, scaling=laws[name])
        axes.plot(np.asarray(scaled.inv_freq / before), **look)
    axes.set_ylim(bottom=-0.02)  # a curve along 0 is not to lie under the frame
    legend(figure, axes)
    return figure
