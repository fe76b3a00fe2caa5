"""The charts: the numbers that they hold, how they read in grey, and the gallery."""

from __future__ import annotations

import cmath
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import vl_convert

from phasor import Rope, charts
from phasor.axes import Sectioned
from phasor.charts import style
from phasor.errors import SpecError, TensorError
from phasor.extending import coverage
from phasor.papers import RECIPES, angle_errors
from phasor.scaling import NTK, Hope, Linear

ROPE = Rope(head_dim=128, pairing="half", base=10_000.0)
SMALL = Rope(head_dim=8, pairing="half", base=100.0)
EIGHT = {f"base {base}": replace(ROPE, base=float(base)) for base in range(100, 900, 100)}
WAYS = {
    "unchanged": coverage(ROPE, 4096, ROPE, 16384),
    "linear": coverage(ROPE, 4096, replace(ROPE, scaling=Linear(factor=4.0)), 16384),
    "ntk": coverage(ROPE, 4096, replace(ROPE, scaling=NTK(factor=4.0)), 16384),
}
CHARTS: dict[str, Callable[[], Any]] = {
    "rotation_chart": lambda: charts.rotation_chart(ROPE, pairs=[0, 9, 16, 40], tokens=12),
    "decay_chart": lambda: charts.decay_chart(EIGHT, range(64), window=(6, 22)),
    "cosine_chart": lambda: charts.cosine_chart(EIGHT, [1, 10, 100], seed=3),
    "pairs_chart": lambda: charts.pairs_chart({"small": SMALL, "other": ROPE}, [1, 5, 40]),
    "scaling_chart": lambda: charts.scaling_chart(ROPE, EIGHT),
    "attention_chart": lambda: charts.attention_chart(ROPE, [0, 1, 3], alpha=12.0, tokens=9),
    "usage_chart": lambda: charts.usage_chart({"0": np.ones((2, 4)), "1": np.ones((3, 4))}),
    "coverage_chart": lambda: charts.coverage_chart(WAYS),
    "turns_chart": lambda: charts.turns_chart(WAYS),
    "precision_chart": lambda: charts.precision_chart(ROPE, bits=6, draws=2),
    "linear_chart": lambda: charts.linear_chart(SMALL, [8, 64], draws=3),
}
every_chart = pytest.mark.parametrize("name", CHARTS)


@cache
def drawn(name: str) -> Any:
    """A chart, drawn once."""
    return CHARTS[name]()


def panels(chart: Any) -> list[Any]:
    """The panels of a chart, itself if it has one."""
    for parts in ("concat", "vconcat"):
        found = getattr(chart, parts, None)
        if isinstance(found, list):
            return found
    return [chart]


def rows(chart: Any, panel: int = 0) -> list[dict[str, Any]]:
    """The largest set of records in a panel."""
    one = panels(chart)[panel]
    # records that several layers or panels share are moved to what holds them
    holders = [*getattr(one, "layer", []), one, chart]
    return max((h.data.values for h in holders if hasattr(h.data, "values")), key=len)


def column(chart: Any, field: str, panel: int = 0, **where: Any) -> list[Any]:
    """One field of the records that have the given values."""
    return [
        row[field]
        for row in rows(chart, panel)
        if all(row[key] == value for key, value in where.items())
    ]


def test_every_function_is_drawn_here() -> None:
    """So that the tests below speak of all; the report is a page."""
    assert set(CHARTS) == {*charts.__all__} - {"report"}


@every_chart
def test_every_chart_can_be_drawn(name: str) -> None:
    """Altair checks it against Vega-Lite's schema, and it has marks and a description."""
    assert len(vl_convert.vegalite_to_svg(drawn(name).to_dict())) > 2000
    assert len(drawn(name).description) > 20


@pytest.mark.parametrize(
    ("ending", "beginning"), [("png", b"\x89PNG"), ("svg", b"<svg"), ("pdf", b"%PDF")]
)
def test_a_chart_is_saved_for_a_paper(tmp_path: Path, ending: str, beginning: bytes) -> None:
    """Each format begins as it should."""
    path = tmp_path / f"chart.{ending}"
    drawn("coverage_chart").save(path)
    assert path.read_bytes().startswith(beginning)


@every_chart
def test_the_colours_of_a_page_are_all_defined(name: str) -> None:
    """A chart names no colour itself: those of paper are exchanged for variables of the page."""
    text = str(style.screen_spec(drawn(name)))
    assert "#" not in text
    assert all(
        f"--{part.split(')')[0]}:" in style.stylesheet() for part in text.split("var(--")[1:]
    )


def test_a_picture_is_in_plain_colours_that_a_dark_page_exchanges() -> None:
    """Each colour of the series has its dark one, for what is filled and for what is drawn."""
    css = style.picture_stylesheet()
    assert "var(" not in css
    for name, light in style.LIGHT.items():
        for attribute in ("fill", "stroke"):
            assert f'[{attribute}="{light}"] {{ {attribute}: {style.DARK[name]} }}' in css


def luminance(colour: str) -> float:
    """Relative luminance of an sRGB colour (WCAG 2.2): how light it is in grey."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize(("colours", "paper"), [(style.LIGHT, "#ffffff"), (style.DARK, "#1e2129")])
def test_curves_stand_out_from_their_background(colours: dict[str, str], paper: str) -> None:
    """WCAG 2.2 asks 3 of graphics and 4.5 of text, on white and on the dark pages of the site."""
    for name, wanted in [("ink", 4.5), *((f"series-{i}", 3.0) for i in range(8))]:
        low, high = sorted((luminance(paper), luminance(colours[name])))
        assert (high + 0.05) / (low + 0.05) >= wanted


def test_any_two_curves_differ_in_their_dashes() -> None:
    """In the number of strokes of a period, or in a stroke by a factor of 1.5: in grey as well."""
    strokes = [sorted(dash[::2], reverse=True) for dash in style.DASHES]
    strokes[0] = [math.inf]
    assert sum(name.startswith("series") for name in style.LIGHT) == len(strokes)
    for one, other in itertools.combinations(strokes, 2):
        pairs = zip(one, other, strict=False)
        assert len(one) != len(other) or any(max(p) >= 1.5 * min(p) for p in pairs)


@pytest.mark.parametrize("direction", [1, -1])
def test_rotation_shows_where_each_pair_points(direction: int) -> None:
    """(cos, sin) of the angle at each position."""
    chart = charts.rotation_chart(replace(ROPE, direction=direction), pairs=[0, 20], tokens=7)
    for panel, pair in enumerate((0, 20)):
        points = [complex(row["first"], row["second"]) for row in rows(chart, panel)]
        turned = [cmath.exp(1j * direction * p * ROPE.inv_freq[pair]) for p in range(7)]
        np.testing.assert_allclose(points, turned, atol=1e-15)
        assert column(chart, "position", panel) == list(range(7))


def test_rotation_titles_say_how_fast() -> None:
    """Tokens per turn, and a word where nothing turns."""
    rope = Rope(head_dim=4, pairing="half", explicit_inv_freq=(math.pi / 2, 0.0))
    chart = charts.rotation_chart(rope, pairs=[0, 1], tokens=2)
    titles = [panel.title for panel in chart.concat]
    assert titles == [["pair 0", "4 tokens per turn"], ["pair 1", "does not turn"]]


def test_several_axes_are_seen_as_text() -> None:
    """Each token at one place on all of them, as the same rope of one axis."""
    video = replace(SMALL, axes=Sectioned((2, 1, 1)))
    for draw in (
        lambda rope: charts.rotation_chart(rope, pairs=[3], tokens=5),
        lambda rope: charts.attention_chart(rope, [1], alpha=3.0, tokens=5),
        lambda rope: charts.decay_chart({"one": rope}, [1, 5]),
        lambda rope: charts.cosine_chart({"one": rope}, [1, 5], kinds=["aligned"]),
        lambda rope: charts.precision_chart(rope, bits=12, draws=3),
    ):
        assert rows(draw(SMALL)) == rows(draw(video))


def test_decay_is_roformers_figure_whole_and_cut() -> None:
    """The published numbers, in both panels; only the axis differs."""
    chart = charts.decay_chart({"one": ROPE}, [0, 8, 256, 8192], window=(6, 22))
    for panel in (0, 1):
        found = column(chart, "decay", panel)
        for value, distance in zip(found, (0, 8, 256, 8192), strict=True):
            sums = np.cumsum(np.exp(1j * distance * np.array(ROPE.inv_freq)))
            assert value == pytest.approx(np.abs(sums).mean(), abs=1e-9)
    assert '"domain": [6, 22]' in chart.to_json(indent=None)
    assert len(panels(charts.decay_chart({"one": ROPE}, [0, 1]))) == 1


def test_cosines_are_the_published_ones() -> None:
    """Aligned and opposite vectors, for both bases, under their titles."""
    ropes = {"1e4": ROPE, "5e5": replace(ROPE, base=500_000.0)}
    chart = charts.cosine_chart(ropes, [10, 1000, 100_000], seed=0)
    published = {"1e4": [0.669063, 0.159027, 0.056119], "5e5": [0.764205, 0.492264, 0.001479]}
    for panel, sign in ((0, 1), (1, -1)):
        for name, values in published.items():
            found = column(chart, "cosine", panel, name=name)
            np.testing.assert_allclose(found, sign * np.array(values), atol=1e-6)
    starts = [panel.title.split(":")[0] for panel in chart.concat]
    assert starts == ["aligned", "opposite", "random", "independent"]


@pytest.mark.parametrize(("panel", "same"), [(2, True), (3, False)], ids=["random", "independent"])
def test_drawn_cosines_come_from_the_seed(panel: int, same: bool) -> None:
    """By complex multiplication of the vectors that the seed draws."""
    draw = np.random.default_rng(5)
    q = draw.standard_normal(8)
    k = q if same else draw.standard_normal(8)
    expected = []
    for r in (1, 3, 50):
        pairs = zip(q[:4] + 1j * q[4:], k[:4] + 1j * k[4:], SMALL.inv_freq, strict=True)
        dot = sum((a * (b * cmath.exp(1j * r * f)).conjugate()).real for a, b, f in pairs)
        expected.append(dot / math.sqrt(sum(q * q) * sum(k * k)))
    chart = charts.cosine_chart({"one": SMALL}, [1, 3, 50], seed=5)
    np.testing.assert_allclose(column(chart, "cosine", panel), expected, atol=1e-14)


def test_the_band_is_one_deviation_of_independent_vectors() -> None:
    """``128 ** -0.5`` either way, in the last panel alone."""
    bands = [panel.layer[0].data.values for panel in drawn("cosine_chart").concat]
    assert bands[3] == [{"low": -(128**-0.5), "high": 128**-0.5}]
    assert all("low" not in band[0] for band in bands[:3])


def test_scaling_is_the_share_of_the_frequency_that_is_left() -> None:
    """1/s, ``s ** (-2k / (d - 2))``, and 0 for a pair that is stopped."""
    laws = {"linear": Linear(factor=8.0), "NTK": NTK(factor=8.0)}
    laws = laws | {"HoPE": Hope(original_max_positions=4096)}
    chart = charts.scaling_chart(ROPE, {n: replace(ROPE, scaling=law) for n, law in laws.items()})
    found = {name: column(chart, "frequency", name=name) for name in laws}
    np.testing.assert_allclose(found["linear"], 0.125, rtol=1e-15)
    np.testing.assert_allclose(found["NTK"], [8 ** (-2 * k / 126) for k in range(64)], rtol=1e-14)
    turned = [4096 * f / (2 * math.pi) >= 1 for f in ROPE.inv_freq]
    np.testing.assert_array_equal(found["HoPE"], np.array(turned, dtype=float))


def test_coverage_shows_turns_and_new_phases() -> None:
    """Turns by their definition; shares by counting every distance."""
    chart = drawn("coverage_chart")
    turn = np.array(ROPE.inv_freq) / (2 * math.pi)
    wanted = {"in training": 4096 * turn, "unchanged": 16384 * turn, "linear": 4096 * turn}
    for name, values in wanted.items():
        np.testing.assert_allclose(column(chart, "turns", name=name), values, rtol=1e-14)
    phases = np.arange(16384)[:, None] * turn % 1
    shares = np.where(4096 * turn < 1, (phases >= 4096 * turn).mean(0), 0)
    np.testing.assert_allclose(column(chart, "share", 1, name="unchanged"), shares, atol=1e-15)
    assert set(column(chart, "share", 1, name="linear")) == {0}


def test_coverage_marks_pairs_that_never_came_round() -> None:
    """46 to 63 of Llama 2: its critical dimension is 92."""
    marked = drawn("coverage_chart").vconcat[0].layer[0].data.values
    assert [row["start"] for row in marked] == [pair - 0.5 for pair in range(46, 64)]


@pytest.mark.parametrize("draw", [charts.coverage_chart, charts.turns_chart])
@pytest.mark.parametrize(
    "other",
    [
        coverage(ROPE, 2048, ROPE, 16384),
        coverage(ROPE, 4096, ROPE, 8192),
        coverage(replace(ROPE, base=500.0), 4096, ROPE, 16384),
    ],
    ids=["context", "reach", "frequencies"],
)
def test_coverage_of_another_training_is_refused(draw: Any, other: Any) -> None:
    """One curve stands for the training of all; and of nothing there would be none."""
    with pytest.raises(SpecError, match=r"same training to the same length.*'other'"):
        draw({**WAYS, "other": other})
    with pytest.raises(SpecError, match="from the name of a curve"):
        draw({})


def test_precision_is_the_largest_error_over_the_draws_of_an_octave() -> None:
    """A curve for each recipe; each point is the worst of what was drawn there."""
    chart = charts.precision_chart(ROPE, bits=12, draws=8)
    assert len(rows(chart)) == 12 * len(RECIPES)
    draw = np.random.default_rng(0)
    octaves = [draw.integers(2**b, 2 ** (b + 1), 8) for b in range(12)]
    usual = [angle_errors(ROPE, octave, "float32 angle").max() for octave in octaves]
    assert column(chart, "error", name="float32 angle") == usual


def test_attention_is_the_softmax_of_summed_cosines() -> None:
    """Of ``alpha C(n - m + offset) / sqrt(d)``, entry by entry; later keys hold nothing."""
    for panel, offset in enumerate((0, 1, 3)):
        for m in range(9):
            scores = [
                12 * sum(math.cos((n - m + offset) * f) for f in ROPE.inv_freq) / math.sqrt(128)
                for n in range(m + 1)
            ]
            shares = [math.exp(score - max(scores)) for score in scores]
            found = column(drawn("attention_chart"), "weight", panel, query=m)
            expected = [share / sum(shares) for share in shares]
            np.testing.assert_allclose(found[: m + 1], expected, atol=1e-13)
            assert found[m + 1 :] == [None] * (8 - m)


def test_usage_stacks_the_heads_of_all_layers() -> None:
    """A row each, by layer."""
    first, second = 3 + np.arange(8.0).reshape(2, 4), 10 + np.arange(12.0).reshape(3, 4)
    chart = charts.usage_chart({"embed": first, "top": second})
    assert column(chart, "length", layer="embed") == first.ravel().tolist()
    assert column(chart, "length", layer="top", head=2) == second[2].tolist()
    assert chart.to_dict()["facet"]["row"]["sort"] == ["embed", "top"]


def weights(length: int, seed: int) -> list[float]:
    """RoFormer's eq. 19 for the last of ``length`` tokens, by complex numbers."""
    draw = np.random.default_rng(seed)
    q, keys = draw.standard_normal(8), draw.standard_normal((length, 8))

    def features(x: np.ndarray) -> list[float]:
        return [v + 1 if v > 0 else math.exp(v) for v in x]

    fq = features(q)
    total = sum(a * b for k in keys for a, b in zip(fq, features(k), strict=True))
    found = []
    for n, k in enumerate(keys):
        fk, back = features(k), length - 1 - n
        found.append(
            sum(
                (complex(fq[j], fq[j + 4]) * complex(fk[j], -fk[j + 4])
                 * cmath.exp(1j * back * f)).real
                for j, f in enumerate(SMALL.inv_freq)
            ) / total
        )  # fmt: skip
    return found


def test_linear_weights_are_means_over_draws() -> None:
    """Share below 0, sum and its expectation, a mean of cosines, with one deviation as a band."""
    chart = drawn("linear_chart")
    for panel, measure in enumerate((lambda w: np.mean(np.array(w) < 0), sum)):
        found = np.array([[measure(weights(n, seed)) for seed in range(3)] for n in (8, 64)])
        mean = {"name": "mean of 3 draws"}
        assert column(chart, "keys", panel, **mean) == [8, 64]
        middle, spread = found.mean(-1), found.std(-1)
        np.testing.assert_allclose(column(chart, "value", panel, **mean), middle, atol=1e-13)
        rows = chart.concat[panel].layer[0].data.values
        assert [row["keys"] for row in rows] == [8, 64]
        band = [row["high"] for row in rows]
        np.testing.assert_allclose(band, middle + spread, atol=1e-13)
    sums = column(chart, "value", 1, name="expected sum")
    for length, one in zip((8, 64), sums, strict=True):
        cosines = [math.cos(r * f) for r in range(length) for f in SMALL.inv_freq]
        assert one == pytest.approx(sum(cosines) / len(cosines), abs=1e-14)


# a chart of nothing, or of what is not there, and what is said of it
_rotation = partial(charts.rotation_chart, ROPE, pairs=[0], tokens=4)
_attention = partial(charts.attention_chart, ROPE, alpha=1.0, tokens=9)
_linear = partial(charts.linear_chart, SMALL)
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no curve": (partial(charts.scaling_chart, ROPE, {}), r"scaled must be .*got \{\}"),
    "nine curves": (partial(charts.scaling_chart, ROPE, {**EIGHT, "9": ROPE}), "at most 8 curves"),
    "other pairs": (partial(charts.scaling_chart, ROPE, {"small": SMALL}), "as many pairs as rope"),
    "no pair": (partial(_rotation, pairs=[]), "pairs must"),
    "a pair past the last": (partial(_rotation, pairs=[64]), "each pair"),
    "a pair before the first": (partial(_rotation, pairs=[-1]), "each pair"),
    "one token": (partial(_rotation, tokens=1), "tokens"),
    "no offset": (partial(_attention, []), "offsets must"),
    "an offset past the first token": (partial(_attention, [9]), "each offset"),
    "an offset ahead": (partial(_attention, [-1]), "each offset"),
    "four panels": (partial(charts.cosine_chart, EIGHT, [1], menu="base 100"), "a single kind"),
    "no length": (partial(_linear, [], draws=2), "lengths must"),
    "no draw": (partial(_linear, [8], draws=0), "draws must"),
    "no octave": (partial(charts.precision_chart, ROPE, bits=0), "bits must .* from 1 to 63"),
    "an octave past int64": (partial(charts.precision_chart, ROPE, bits=64), "bits must"),
    "no position": (partial(charts.precision_chart, ROPE, bits=3, draws=0), "draws must"),
    "no distance": (partial(charts.pairs_chart, {"a": ROPE}, []), "distances must"),
    "one distance": (partial(charts.pairs_chart, {"a": ROPE}, [4]), "distances must be two or more "
    ".*4"),
    "one twice": (partial(charts.pairs_chart, {"a": ROPE}, [1, 4, 4]), "distances must be two or "
    "more"),
    "no distance at all": (partial(charts.pairs_chart, {"a": ROPE}, [0, 4]), "each distance"),
    "no rope": (partial(charts.pairs_chart, {}, [1, 4]), "ropes must"),
    "no layer": (partial(charts.usage_chart, {}), "norms must"),
    "no axis of heads": (partial(charts.usage_chart, {"a": np.ones(4)}), "norms must.*'a'"),
    "other widths": (
        partial(charts.usage_chart, {"a": np.ones((2, 4)), "b": np.ones((2, 3))}), "norms.*'b'",
    ),
    "no head": (partial(charts.usage_chart, {"a": np.ones((0, 4))}), "norms must.*'a'"),
}  # fmt: skip


@pytest.mark.parametrize(("draw", "says"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_drawn_is_refused(draw: Callable[[], Any], says: str) -> None:
    """Rather than left out, wrapped round or a number of nothing."""
    with pytest.raises((SpecError, TensorError), match=says):
        draw()


def test_a_pair_has_the_cosine_of_its_angle_at_each_distance() -> None:
    """And cells that meet half way between two distances, on a logarithmic axis."""
    chart = charts.pairs_chart({"small": SMALL, "other": ROPE}, [1, 4, 16])
    for panel, rope in enumerate((SMALL, ROPE)):
        for row in rows(chart, panel):
            wanted = math.cos(row["distance"] * rope.inv_freq[row["pair"]])
            assert row["cosine"] == pytest.approx(wanted, abs=1e-12)
            assert (row["start"], row["end"]) == (row["distance"] / 2, row["distance"] * 2)
        assert len(rows(chart, panel)) == 3 * rope.num_pairs


# the gallery

DOCS = Path(__file__).parents[2] / "docs"
ON_THE_PAGE = {"turns_chart"}


def test_the_gallery_calls_every_function() -> None:
    """Its blocks run in the tests of the documentation; one chart is the report's."""
    page = (DOCS / "figures.md").read_text("utf-8")
    assert {name for name in CHARTS if f"charts.{name}(" not in page} == ON_THE_PAGE


def test_pictures_are_small_and_all_in_the_gallery() -> None:
    """A file that nothing draws any more would grow stale."""
    names = ("figures.md", "lesson.md", "benchmarks.md", "architecture.md", "dynamic-resolution.md")
    pages = [(DOCS / name).read_text("utf-8") for name in names]
    for picture in (DOCS / "images").glob("*.svg"):
        assert any(f"(images/{picture.name})" in page for page in pages)
        assert picture.stat().st_size < 150_000
