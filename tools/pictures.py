"""Charts as SVG files: narrow enough for a phone, in plain colours that a dark page exchanges."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable
from copy import deepcopy
from functools import cache, partial
from itertools import product
from typing import Any

import vl_convert

from phasor.charts.style import PAPER, picture_stylesheet

WIDEST = 470  # pixels: on a phone of 390, labels of 12 are 9
# the text beside a picture says what is in it, so no mark has to
# a font that is wide leaves room for whichever font a reader has
_CONFIG = PAPER | {
    "aria": False,
    "background": "transparent",
    "font": "DejaVu Sans, Verdana, sans-serif",
    "legend": PAPER["legend"] | {"columns": 2},
}
_ABOVE = {"orient": "top", "direction": "horizontal", "columns": 8}


def draw(chart: Any) -> str:
    """The file of a chart."""
    drawn = _fit(chart.to_dict(validate=False) | {"config": _CONFIG})
    # a hundredth of a pixel is plenty
    drawn = re.sub(r"\d+\.\d{5,}(e-\d+)?", lambda long: f"{float(long[0]):.2f}", drawn)
    opening = drawn.index(">") + 1
    return f"{drawn[:opening]}<style>{picture_stylesheet()}</style>{drawn[opening:]}\n"


def _fit(spec: dict[str, Any]) -> str:
    """The chart that Vega-Lite's ``spec`` describes, in panels as wide as there is room for."""
    sizes = {1: range(400, 90, -10)}
    if any(panel.get("width", WIDEST) <= 200 for panel in spec.get("concat", ())):
        sizes = {2: range(150, 110, -10)} | sizes
    narrowest: list[tuple[float, str]] = []
    for legend, (columns, widths) in product((_ABOVE, {}), sizes.items()):
        drawn = cache(partial(_draw_panels, spec, legend, columns))
        count = 0  # the widest panels fit most often; narrower ones make no wider picture
        if not _fits(drawn, widths[0]):
            count = bisect_left(widths, True, 1, key=partial(_fits, drawn))
        if count < len(widths):
            return drawn(widths[count])[1]
        narrowest.append(drawn(widths[-1]))
    return min(narrowest)[1]  # a legend may be wider than that; tools.site_check says so


def _fits(drawn: Callable[[int], tuple[float, str]], width: int) -> bool:
    return drawn(width)[0] <= WIDEST


def _draw_panels(
    spec: dict[str, Any], legend: dict[str, Any], columns: int, width: int
) -> tuple[float, str]:
    """The picture's own width, and the picture."""
    narrow = deepcopy(spec)
    _narrow(narrow, columns, width, legend)
    drawn = vl_convert.vegalite_to_svg(narrow)
    return float(re.findall(r'width="([\d.]+)"', drawn)[0]), drawn


def _narrow(part: Any, columns: int, width: int, legend: dict[str, Any]) -> None:
    """Give panels at most this width, so many a row, and put legends beside them there."""
    if isinstance(part, list):
        for entry in part:
            _narrow(entry, columns, width, legend)
    elif isinstance(part, dict):
        for key, value in part.items():
            if key not in ("data", "datasets", "config"):
                _narrow(value, columns, width, legend)
        if "hconcat" in part:
            part["concat"] = part.pop("hconcat")
        if "concat" in part:
            part["columns"] = columns
        if part.get("orient") == "right":
            part |= legend
        if isinstance(part.get("width"), int) and part["width"] > width:
            if part["width"] == part.get("height"):
                part["height"] = width
            part["width"] = width
