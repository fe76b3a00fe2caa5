"""Draw the pictures of the README and the documentation: ``make figures``.

Three pages say how: each picture is the ``chart`` of the code below it; those of the benchmarks are
in ``bench/pictures.py``, the drawings of the architecture in ``docs/diagrams.py``, and the lesson's
notebook in ``docs/notebook.py``.
"""

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import tools.pictures
from docs import diagrams, notebook

DOCS = Path(__file__).parent
PAGES = ("figures.md", "lesson.md", "dynamic-resolution.md")
PICTURE_OR_CODE = re.compile(
    r"\]\((images/[\w-]+\.svg)\)|^```python\n(.*?)^```", re.M | re.S
)


def main() -> None:
    """Write every picture of the pages, or those of the pages that are named."""
    for page in sys.argv[1:] or (*PAGES, "bench", "diagrams", "notebook"):
        if page == "notebook":
            notebook.main()
        elif page == "diagrams":
            for name, diagram in diagrams.DIAGRAMS.items():
                write(diagrams.draw(diagram), f"images/{name}.svg")
        elif page == "bench":
            sys.path.insert(0, str(DOCS.parent / "bench"))
            for name, chart in importlib.import_module("pictures").pictures():
                write(tools.pictures.draw(chart), f"images/{name}.svg")
        else:
            draw(page)


def draw(page: str) -> None:
    """Run the code of ``page`` and write its pictures."""
    names: dict[str, Any] = {}
    chosen = ""
    for drawn in PICTURE_OR_CODE.finditer((DOCS / page).read_text("utf-8")):
        picture, code = drawn.groups()
        if picture:
            chosen = picture
            continue
        names.pop("chart", None)
        exec(code, names)
        if chosen and "chart" in names:
            write(tools.pictures.draw(names["chart"]), chosen)
            chosen = ""


def write(picture: str, text: str) -> None:
    """Write one picture."""
    (DOCS / text).write_text(picture, "utf-8")
    print(DOCS / text)


if __name__ == "__main__":
    main()
