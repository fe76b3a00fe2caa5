"""The pictures: what all of them keep, and the gallery that shows them."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

import phasor
from phasor import figures
from phasor.errors import SpecError

from .drawn import DRAWN, ROPE, curves

every_picture = pytest.mark.parametrize("name", DRAWN)


def test_every_function_is_drawn_here() -> None:
    """So that the tests below speak of all."""
    assert set(DRAWN) == set(figures.__all__)


@every_picture
def test_every_panel_names_its_axes(name: str) -> None:
    """Once for a row and once for a column of panels; colour bars too."""
    rows: dict[int, list[str]] = {}
    columns: dict[int, list[str]] = {}
    for axes in DRAWN[name].axes:
        place = axes.get_subplotspec()
        if axes.get_label() == "<colorbar>":
            assert axes.get_ylabel()
            continue
        rows.setdefault(place.rowspan.start, []).append(axes.get_ylabel())
        columns.setdefault(place.colspan.start, []).append(axes.get_xlabel())
    assert all(any(said) for said in (*rows.values(), *columns.values()))


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("rotation_figure", {"first coordinate", "second coordinate", "position (tokens)"}),
        ("decay_figure", {"distance (tokens)", "mean length of partial sums"}),
        ("cosine_figure", {"distance (tokens)", "cosine"}),
        ("wavelength_figure", {"pair (index)", "wavelength (tokens per turn)"}),
        ("scaling_figure", {"pair (index)", "frequency / plain frequency"}),
        ("attention_figure", {"key (token)", "query (token)", "attention weight"}),
        (
            "usage_figure",
            {"pair (index)", "layer, a row for each head", "mean length of the pair"},
        ),
        (
            "coverage_figure",
            {
                "pair (index)",
                "turns (training 4096,\nextended 16384 tokens)",
                "extension",
                "share of distances\nwith a new phase",
            },
        ),
        ("precision_figure", {"position (tokens)", "largest error of cos and sin"}),
        ("linear_figure", {"keys (tokens)", "share of weights below 0", "sum of weights"}),
    ],
)
def test_labels_say_what_is_drawn_and_in_what_unit(name: str, labels: set[str]) -> None:
    """These and no others."""
    said = {text for a in DRAWN[name].axes for text in (a.get_xlabel(), a.get_ylabel())}
    assert said - {""} == labels


def luminance(colour: Any) -> float:
    """Relative luminance of an sRGB colour (WCAG 2.2): how light it is in grey."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def strokes(line: Line2D) -> list[float]:
    """Lengths of the strokes in one period of a line's dashes, longest first."""
    dashes = line._unscaled_dash_pattern[1]  # no public getter has it
    return sorted(dashes[::2], reverse=True) if dashes else [math.inf]


def alike_in_grey(one: Line2D, other: Line2D) -> bool:
    """Whether neither dashes nor lightness tell two lines apart."""
    a, b = strokes(one), strokes(other)
    same_dashes = len(a) == len(b) and all(
        x == y or max(x, y) < 1.5 * min(x, y) for x, y in zip(a, b, strict=True)
    )
    light, dark = sorted((luminance(one.get_color()), luminance(other.get_color())), reverse=True)
    return same_dashes and (light + 0.05) / (dark + 0.05) < 3  # what WCAG 2.2 asks of graphics


@every_picture
def test_curves_can_be_told_apart_in_grey(name: str) -> None:
    """Any two of a panel, also of seven, the most there can be."""
    for panel in range(len(DRAWN[name].axes)):
        pairs = itertools.combinations(curves(DRAWN[name], panel).values(), 2)
        assert not [(a.get_label(), b.get_label()) for a, b in pairs if alike_in_grey(a, b)]


def test_curves_that_differ_in_hue_alone_are_found() -> None:
    """Orange and sky blue are one grey, and two kinds of short dash one kind."""
    axes = Figure().add_subplot()
    orange, blue = (
        axes.plot([0, 1], color=colour, linestyle=style)[0]
        for colour, style in (("#E69F00", (0, (5, 2))), ("#56B4E9", (0, (6, 2))))
    )
    assert alike_in_grey(orange, blue)
    blue.set_linestyle(":")
    assert not alike_in_grey(orange, blue)


@pytest.mark.parametrize(
    "name", ["rotation_figure", "attention_figure", "usage_figure", "coverage_figure"]
)
def test_heat_darkens_steadily(name: str) -> None:
    """A larger number is darker in grey, and white paper is the lightest."""
    mapped = [m for a in DRAWN[name].axes for m in (*a.images, *a.collections) if m.get_cmap()]
    mapped = [m for m in mapped if m.get_array() is not None]
    assert mapped
    for one in mapped:
        tones = [luminance(tone[:3]) for tone in one.get_cmap()(np.linspace(0, 1, 64))]
        assert all(later < earlier for earlier, later in itertools.pairwise(tones))


def test_pyplot_stays_out() -> None:
    """No window, no backend, no figure that someone else's `plt.show()` finds."""
    code = "import sys, phasor.figures; sys.exit('matplotlib.pyplot' in sys.modules)"
    source = str(Path(phasor.__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": source}, check=False)
    assert done.returncode == 0


def test_settings_of_the_caller_come_back() -> None:
    """Spines are ours, matplotlib's settings are not."""
    before = dict(mpl.rcParams)
    figures.wavelength_figure({"one": ROPE})
    assert dict(mpl.rcParams) == before


@pytest.mark.parametrize("count", [0, 8])
def test_too_many_or_no_curves_are_refused(count: int) -> None:
    """Rather than left out."""
    ropes = {str(n): ROPE for n in range(count)}
    with pytest.raises(SpecError, match=f"must have 1 to 7 curves.*got {count}"):
        figures.wavelength_figure(ropes)


# the gallery

DOCS = Path(__file__).parents[2] / "docs"


def test_the_gallery_calls_every_function() -> None:
    """Its blocks run in the tests of the documentation."""
    page = (DOCS / "figures.md").read_text("utf-8")
    assert [name for name in figures.__all__ if f"figures.{name}(" not in page] == []


def test_pictures_are_small_and_all_in_the_gallery() -> None:
    """A file that nothing draws any more would grow stale."""
    page = (DOCS / "figures.md").read_text("utf-8")
    for picture in (DOCS / "images").glob("*.png"):
        assert f"(images/{picture.name})" in page
        assert picture.stat().st_size < 150_000
