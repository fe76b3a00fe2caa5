"""What the pictures share: panels, and curves that can be told apart without colour."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from numpy.typing import NDArray

from phasor.errors import SpecError

# later curves are thinner, so that one that covers another leaves its edges to be seen
_STYLES: tuple[tuple[str, Any, float], ...] = (
    ("#0072B2", "-", 2.6),
    ("#D55E00", (0, (5, 2)), 2.4),
    ("#009E73", (0, (6, 2, 1, 2)), 2.2),
    ("#000000", (0, (1, 1.5)), 2.0),
    ("#CC79A7", (0, (12, 3)), 1.8),
    ("#E69F00", (0, (6, 2, 1, 2, 1, 2)), 1.6),
    ("#56B4E9", (0, (2.5, 1)), 1.4),
)
HEAT = "Blues"
NOTHING = "0.88"  # cells of a heat map that hold no number


def panels(
    rows: int = 1, columns: int = 1, *, size: tuple[float, float], **options: Any
) -> tuple[Figure, list[Axes]]:
    """A figure and its panels, row by row; ``options`` are those of `Figure.subplots`."""
    with mpl.rc_context({"axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(w_pad=0.1))
        grid = figure.subplots(rows, columns, squeeze=False, **options)
    return figure, list(grid.flat)


def label(axes: Axes, x: str, y: str) -> None:
    """Names of both axes, and a grid behind the curves."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(visible=True, color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)


def styled(names: Iterable[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each name with the look of its curve.

    Raises:
        SpecError: If there is none, or more than can be told apart.
    """
    given = list(names)
    if not 0 < len(given) <= len(_STYLES):
        raise SpecError(
            f"a picture must have 1 to {len(_STYLES)} curves, which can be told apart without "
            f"colour, got {len(given)}; draw several pictures"
        )
    for name, (colour, style, width) in zip(given, _STYLES, strict=False):
        yield name, {"color": colour, "linestyle": style, "linewidth": width, "label": name}


def legend(figure: Figure, axes: Axes, columns: int = 3) -> None:
    """The names of the curves of one panel, in rows above all of them."""
    named = axes.get_legend_handles_labels()
    figure.legend(
        *named,
        loc="outside upper center",
        ncols=min(columns, len(named[1])),
        frameon=False,
        handlelength=4,  # a whole period of the longest dashes
    )


def gaps(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """``values`` for a logarithmic axis, which has no place for 0 and infinity."""
    return np.where(np.isfinite(values) & (values > 0), values, np.nan)
