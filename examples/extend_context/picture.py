"""Loss against position, in the look of phasor's figures."""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from phasor.figures._style import label, panels, styled

# seven curves can be told apart; both columns have the unchanged Rope and the reference
_COLUMNS = {
    "every pair by one formula": ("none", "linear", "ntk", "ntk_mixed", "dynamic_ntk", "window"),
    "pair by pair, or by distance": (
        *("none", "part_ntk", "yarn", "llama3", "hope", "rerope", "window"),
    ),
}
_LEGEND: dict[str, Any] = {"frameon": False, "handlelength": 4, "fontsize": "small"}


def write_picture(results: Mapping[str, Any], path: Path) -> None:
    """`picture` as a PNG; 256 colours are plenty for curves, and a third of the bytes."""
    drawn = BytesIO()
    picture(results).savefig(drawn, dpi=150)
    Image.open(drawn).convert("RGB").quantize(128).save(path, format="PNG", optimize=True)


def picture(results: Mapping[str, Any]) -> Figure:
    """A panel for each stage and group of ways, with bands of one standard error.

    The bands are those of the difference to attention within a window: all ways read the same
    bytes, and what these cost differs more from file to file than from way to way.
    """
    measured, size = results["measured"], results["bin"]
    places = (np.arange(results["ranges"][-1][1] // size) + 0.5) * size
    figure, drawn = panels(len(measured), len(_COLUMNS), size=(11, 8), sharex=True, sharey="row")
    cells = [(stage, group) for stage in measured for group in _COLUMNS]
    for axes, (stage, group) in zip(drawn, cells, strict=True):
        label(axes, "position in the window (bytes)", "bits per byte")
        axes.axvline(results["ranges"][0][1], color="0.6", linewidth=0.8)
        axes.set_title(f"{stage}: {group}", fontsize="medium")
        for name, look in styled(_COLUMNS[group]):
            if name not in measured[stage]:
                continue
            curve = np.array(measured[stage][name]["curve"])
            error = np.array(measured[stage][name]["curve_above_window_error"])
            axes.plot(places, curve, **(look | {"label": results["ways"][name]["title"]}))
            axes.fill_between(places, curve - error, curve + error, color=look["color"], alpha=0.15)
        axes.set_xlim(0, results["ranges"][-1][1])
    for axes in drawn[: len(_COLUMNS)]:  # the panels below have no curves but these
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.08), ncols=3, **_LEGEND)
    return figure
