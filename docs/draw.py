"""Draw the pictures of the README and the documentation: ``make figures``.

Two pages say how: each picture is the ``chart`` of the code below it; those of the benchmarks are
in ``bench/pictures.py``. A picture is an SVG file in plain colours, which
`phasor.charts.style.picture_stylesheet` exchanges on a dark page.
"""

import importlib
import re
import sys
from itertools import product
from pathlib import Path
from typing import Any

import vl_convert

from phasor.charts.style import PAPER, picture_stylesheet, screen_spec

DOCS = Path(__file__).parent
PAGES = ("figures.md", "lesson.md")
PICTURE_OR_CODE = re.compile(
    r"\]\((images/[\w-]+\.svg)\)|^```python\n(.*?)^```", re.M | re.S
)
# the text beside a picture says what is in it, so no mark has to
# a font that is wide leaves room for whichever font a reader has
CONFIG = PAPER | {
    "aria": False,
    "background": "transparent",
    "font": "DejaVu Sans, Verdana, sans-serif",
    "legend": PAPER["legend"] | {"columns": 2},
}
WIDEST = 470  # pixels: on a phone of 390 labels of 12 are 9


def main() -> None:
    """Write every picture of the pages, or those of the pages that are named."""
    for page in sys.argv[1:] or (*PAGES, "bench"):
        if page == "bench":
            sys.path.insert(0, str(DOCS.parent / "bench"))
            for name, chart in importlib.import_module("pictures").pictures():
                save(chart, f"images/{name}.svg")
        else:
            draw(page)


def draw(page: str) -> None:
    """Run the code of ``page`` and write its pictures."""
    names: dict[str, Any] = {}
    wanted = ""
    for found in PICTURE_OR_CODE.finditer((DOCS / page).read_text("utf-8")):
        picture, code = found.groups()
        if picture:
            wanted = picture
            continue
        names.pop("chart", None)
        exec(code, names)
        if wanted and "chart" in names:
            save(names["chart"], wanted)
            wanted = ""


def narrow(
    part: Any, columns: int, width: int, legend: dict[str, Any]
) -> None:
    """Give the panels of a chart at most this width, so many a row, and put legends there."""
    if isinstance(part, list):
        for one in part:
            narrow(one, columns, width, legend)
    elif isinstance(part, dict):
        for key, inside in part.items():
            if key not in ("data", "datasets", "config"):
                narrow(inside, columns, width, legend)
        if "concat" in part:
            part["columns"] = columns
        if part.get("orient") == "right":
            part |= legend
        if isinstance(part.get("width"), int) and part["width"] > width:
            if part["width"] == part.get("height"):
                part["height"] = width
            part["width"] = width


def fit(chart: Any) -> str:
    """The chart as SVG, so narrow that its labels are read on a phone."""
    sizes = [(1, width) for width in range(400, 90, -10)]
    if any(
        one.get("width", 999) <= 200
        for one in chart.to_dict().get("concat", ())
    ):
        sizes = [(2, width) for width in (150, 140, 130, 120)] + sizes
    above = {"orient": "top", "direction": "horizontal", "columns": 8}
    for legend, (columns, width) in product((above, {}), sizes):
        spec = screen_spec(chart, config=CONFIG)
        narrow(spec, columns, width, legend)
        drawn = vl_convert.vegalite_to_svg(spec)
        if float(re.findall(r'width="([\d.]+)"', drawn)[0]) <= WIDEST:
            return drawn
    raise ValueError(f"{chart.description} is wider than {WIDEST}")


def save(chart: Any, wanted: str) -> None:
    """Write one picture."""
    drawn = fit(chart)
    # a hundredth of a pixel is plenty
    drawn = re.sub(
        r"\d+\.\d{5,}(e-\d+)?", lambda long: f"{float(long[0]):.2f}", drawn
    )
    opening = drawn.index(">") + 1
    style = f"<style>{picture_stylesheet()}</style>"
    styled = f"{drawn[:opening]}{style}{drawn[opening:]}"
    (DOCS / wanted).write_text(styled + "\n", "utf-8")
    print(DOCS / wanted)


if __name__ == "__main__":
    main()
