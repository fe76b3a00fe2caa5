"""Charts as SVG, so narrow that their labels are read on a phone."""

from __future__ import annotations

import re
from copy import deepcopy
from itertools import product
from typing import Any

import vl_convert

WIDEST = 470  # pixels: on a phone of 390, labels of 12 are 9
_ABOVE = {"orient": "top", "direction": "horizontal", "columns": 8}


def fit(spec: dict[str, Any]) -> str:
    """The chart that Vega-Lite's ``spec`` describes, in panels as wide as there is room for."""
    sizes = [(1, width) for width in range(400, 90, -10)]
    if any(one.get("width", WIDEST) <= 200 for one in spec.get("concat", ())):
        sizes = [(2, width) for width in (150, 140, 130, 120)] + sizes
    for legend, (columns, width) in product((_ABOVE, {}), sizes):
        narrow = deepcopy(spec)
        _narrow(narrow, columns, width, legend)
        drawn = vl_convert.vegalite_to_svg(narrow)
        if float(re.findall(r'width="([\d.]+)"', drawn)[0]) <= WIDEST:
            return drawn
    raise ValueError(f"this chart is wider than {WIDEST}: {spec.get('description')}")


def _narrow(part: Any, columns: int, width: int, legend: dict[str, Any]) -> None:
    """Give panels at most this width, so many a row, and put legends beside them there."""
    if isinstance(part, list):
        for one in part:
            _narrow(one, columns, width, legend)
    elif isinstance(part, dict):
        for key, inside in part.items():
            if key not in ("data", "datasets", "config"):
                _narrow(inside, columns, width, legend)
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
