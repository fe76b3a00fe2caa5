"""The picture of ``phasor bench``; colours are those of `phasor.figures`."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib as mpl
from matplotlib.figure import Figure

from phasor.bench._measure import Measured

# Okabe and Ito's, which colour-blind readers can tell apart
_COLOURS = ("#999999", "#0072B2", "#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#D55E00")


def bar_figure(measured: Sequence[Measured], names: Sequence[str]) -> Figure:
    """Bars of the ratio to `copy_`, one group for each case, with the middle half as a line.

    Args:
        measured: What to draw.
        names: Contenders, in the order of their bars.
    """
    with mpl.rc_context({"axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(9, 4.5), layout="constrained")
        axes = figure.add_subplot()
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        ratios = [m.ratio(name) for m in measured]
        axes.bar(
            [group + (i - (len(names) - 1) / 2) * width for group in range(len(measured))],
            [r.median for r in ratios],
            width,
            yerr=[[r.median - r.low for r in ratios], [r.high - r.median for r in ratios]],
            color=_COLOURS[i % len(_COLOURS)],
            label=name,
        )
    axes.axhline(1, color="0.3", linewidth=0.8)
    axes.set_yscale("log")
    axes.set_ylabel("time / copy_ of the same tensors")
    axes.set_xticks(range(len(measured)), [f"{m.case.name}\n{m.case.dtype}" for m in measured])
    figure.legend(loc="outside upper center", ncols=4, frameon=False, fontsize="small")
    return figure
