"""The drawings of docs/architecture.md say what the code is."""

from __future__ import annotations

import re
from itertools import combinations

import pytest
from docs import diagrams
from docs.diagrams import DIAGRAMS, ROOMS, WIDTH, Box
from tools.public_names import ROOT, find

from .test_architecture import SRC, room_of, uses


@pytest.mark.parametrize("name", DIAGRAMS)
def test_a_picture_is_what_its_command_draws(name: str) -> None:
    """``python -m docs.draw diagrams``."""
    picture = ROOT / "docs/images" / f"{name}.svg"
    assert picture.read_text("utf-8") == diagrams.draw(DIAGRAMS[name])
    assert f"](images/{name}.svg)" in (ROOT / "docs/architecture.md").read_text("utf-8")


@pytest.mark.parametrize("name", DIAGRAMS)
def test_what_a_box_names_is_there(name: str) -> None:
    """The module, class or function that it stands for; and arrows join boxes of the drawing."""
    boxes = [box for row in DIAGRAMS[name].rows for box in row]
    for box in boxes:
        if box.in_code:
            assert find(f"phasor.{box.in_code}") is not None
    titles = [box.title for box in boxes]
    assert {end for arrow in DIAGRAMS[name].arrows for end in arrow} <= set(titles)
    assert len(set(titles)) == len(titles)


@pytest.mark.parametrize("name", DIAGRAMS)
def test_no_box_covers_another(name: str) -> None:
    """Nor leaves the drawing."""
    for row in DIAGRAMS[name].rows:
        for box in row:
            assert box.left >= 0
            assert box.left + box.width <= WIDTH
        for one, other in combinations(row, 2):
            first, second = sorted((one, other), key=left_edge)
            assert first.left + first.width < second.left - 5


def left_edge(box: Box) -> float:
    """Where a box begins."""
    return box.left


def test_the_rooms_are_joined_as_they_import() -> None:
    """An arrow for each room that another imports, but where others imply it."""
    imports: dict[str, set[str]] = {}
    for importer, imported in uses(SRC):
        room = room_of(importer)
        above = imports.setdefault(room, set())
        if imported != "<torch>" and room_of(imported) != room:
            above.add(room_of(imported))

    def reached(room: str) -> set[str]:
        return imports[room].union(*map(reached, imports[room]))

    needed = {
        (above, room)
        for room, direct in imports.items()
        for above in direct
        if not any(above in reached(other) for other in direct)
    }
    assert set(ROOMS.arrows) == needed


def test_the_table_of_rooms_names_what_is_there() -> None:
    """And nothing of the top level is missing."""
    page = (ROOT / "docs/architecture.md").read_text("utf-8")
    rows = re.findall(r"^\| (`[\w/]+\W.*?) \|", page[page.index("| In `src/phasor`") :], re.M)
    named = {name for row in rows for name in re.findall(r"`([\w/]+(?:\.py|/))`", row)}
    folder = ROOT / "src/phasor"
    missing = {name for name in named if not (folder / name).exists() and name != "csrc/"}
    assert missing == set()
    files = {path.split("/")[0] + "/" * ("/" in path) for path in SRC}
    anywhere = set(re.findall(r"`([\w/]+(?:\.pyi?|/))`", page))
    assert files - anywhere == {"__init__.py", "__main__.py"}
