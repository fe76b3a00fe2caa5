"""The pictures: what their artists hold, never their pixels."""

from __future__ import annotations

import cmath
import itertools
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

import phasor
from phasor import NTK, Hope, Linear, Llama3, Rope, Sectioned, Yarn, figures
from phasor.analysis import RECIPES, angle_errors, coverage
from phasor.errors import SpecError, TensorError

ROPE = Rope(head_dim=128, pairing="half", base=10_000.0)
SMALL = Rope(head_dim=8, pairing="half", base=100.0)
SEVEN = {f"base {base}": replace(ROPE, base=float(base)) for base in range(100, 800, 100)}
WAYS = {
    "unchanged": coverage(ROPE, 4096, ROPE, 16384),
    "linear": coverage(ROPE, 4096, replace(ROPE, scaling=Linear(factor=4.0)), 16384),
    "ntk": coverage(ROPE, 4096, replace(ROPE, scaling=NTK(factor=4.0)), 16384),
}
LAWS = {
    "linear": Linear(factor=8.0),
    "NTK": NTK(factor=8.0),
    "YaRN": Yarn(factor=8.0, original_max_positions=4096),
    "Llama 3": Llama3(factor=8.0, original_max_positions=4096),
    "HoPE": Hope(original_max_positions=4096),
}
DRAWN: dict[str, Figure] = {
    "rotation_figure": figures.rotation_figure(ROPE, pairs=[0, 9, 16, 40], tokens=12),
    "decay_figure": figures.decay_figure(SEVEN, range(64), window=(6, 22)),
    "cosine_figure": figures.cosine_figure(SEVEN, [1, 10, 100], seed=3),
    "wavelength_figure": figures.wavelength_figure(SEVEN, context=4096),
    "scaling_figure": figures.scaling_figure(ROPE, LAWS),
    "attention_figure": figures.attention_figure(ROPE, [0, 1, 3], alpha=12.0, tokens=9),
    "usage_figure": figures.usage_figure({"0": np.ones((2, 4)), "1": np.ones((3, 4))}),
    "coverage_figure": figures.coverage_figure(WAYS),
    "precision_figure": figures.precision_figure(ROPE, bits=6, draws=2),
    "linear_figure": figures.linear_figure(SMALL, [8, 64], draws=3),
}
every_picture = pytest.mark.parametrize("name", DRAWN)


def inv_freq(rope: Rope) -> list[float]:
    """Frequencies of a plain rope, by their definition."""
    assert rope.scaling is None
    return [rope.base ** (-2 * k / rope.rotary_dim) for k in range(rope.num_pairs)]


def curves(figure: Figure, panel: int = 0) -> dict[str, Any]:
    """The named curves of a panel, by name."""
    lines = figure.axes[panel].lines
    return {str(line.get_label()): line for line in lines if not is_mark(line)}


def is_mark(line: Line2D) -> bool:
    """Whether a line only marks a level: it has no name of its own."""
    return str(line.get_label()).startswith("_")


def heat(figure: Figure, panel: int = 0) -> Any:
    """The numbers of a panel's heat map, cells without one masked."""
    return figure.axes[panel].images[0].get_array()


# what all of them keep


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


# one by one


@pytest.mark.parametrize("direction", [1, -1])
def test_rotation_shows_where_each_pair_points(direction: int) -> None:
    """(cos, sin) of the angle, coloured by the position."""
    rope = replace(ROPE, direction=direction)
    figure = figures.rotation_figure(rope, pairs=[0, 20], tokens=7)
    for axes, pair in zip(figure.axes, (0, 20), strict=False):
        arms, tips = axes.collections
        points = [complex(*tip) for tip in tips.get_offsets()]
        turned = [cmath.exp(1j * direction * p * inv_freq(ROPE)[pair]) for p in range(7)]
        np.testing.assert_allclose(points, turned, atol=1e-15)
        assert list(tips.get_array()) == list(range(7))
        ends = [arm.tolist() for arm in arms.get_segments()]
        assert ends == [[[0, 0], [tip.real, tip.imag]] for tip in points]


def test_rotation_titles_say_how_fast() -> None:
    """Tokens per turn, and a word where nothing turns."""
    rope = Rope(head_dim=4, pairing="half", inv_freq=(math.pi / 2, 0.0))
    figure = figures.rotation_figure(rope, pairs=[0, 1], tokens=2)
    titles = [axes.get_title() for axes in figure.axes[:2]]
    assert titles == ["pair 0\n4 tokens per turn", "pair 1\ndoes not turn"]


def test_rotation_and_attention_see_several_axes_as_text() -> None:
    """Each token at one place on all of them, as the same rope of one axis."""
    video = replace(SMALL, axes=Sectioned((2, 1, 1)))
    one, three = (figures.rotation_figure(r, pairs=[3], tokens=5) for r in (SMALL, video))
    points = [f.axes[0].collections[1].get_offsets() for f in (one, three)]
    np.testing.assert_array_equal(*points)
    maps = [figures.attention_figure(r, [1], alpha=3.0, tokens=5) for r in (SMALL, video)]
    np.testing.assert_array_equal(*(heat(f) for f in maps))


@pytest.mark.parametrize(
    ("pairs", "tokens", "said"),
    [
        ([], 4, "number of pairs"),
        ([64], 4, "each pair"),
        ([-1], 4, "each pair"),
        ([0], 1, "tokens"),
    ],
)
def test_rotation_refuses_what_is_not_there(pairs: list[int], tokens: int, said: str) -> None:
    """A pair past the last would wrap round in NumPy."""
    with pytest.raises(SpecError, match=said):
        figures.rotation_figure(ROPE, pairs=pairs, tokens=tokens)


def test_decay_is_roformers_figure_whole_and_cut() -> None:
    """The published numbers, in both panels; only the axis differs."""
    figure = figures.decay_figure({"one": ROPE}, [0, 8, 256, 8192], window=(6, 22))
    for panel in (0, 1):
        curve = curves(figure, panel)["one"]
        assert list(curve.get_xdata()) == [0, 8, 256, 8192]
        published = [32.5, 19.8173951304, 6.5430973230, 4.9018775731]
        np.testing.assert_allclose(curve.get_ydata(), published, atol=1e-10)
    whole, cut = figure.axes
    assert whole.get_ylim()[0] == 0
    assert whole.get_ylim()[1] > 32.5
    assert cut.get_ylim() == (6, 22)


def test_decay_is_one_panel_without_a_window() -> None:
    """Nothing is cut unless asked."""
    assert len(figures.decay_figure({"one": ROPE}, [0, 1]).axes) == 1


def test_cosines_are_the_published_ones() -> None:
    """Aligned and opposite vectors, for both bases, under their titles."""
    ropes = {"1e4": ROPE, "5e5": replace(ROPE, base=500_000.0)}
    figure = figures.cosine_figure(ropes, [10, 1000, 100_000], seed=0)
    published = {"1e4": [0.669063, 0.159027, 0.056119], "5e5": [0.764205, 0.492264, 0.001479]}
    for panel, sign in ((0, 1), (1, -1)):
        for name, curve in curves(figure, panel).items():
            expected = sign * np.array(published[name])
            np.testing.assert_allclose(curve.get_ydata(), expected, atol=1e-6)
    starts = [axes.get_title().split(":")[0] for axes in figure.axes]
    assert starts == ["aligned", "opposite", "random", "independent"]


@pytest.mark.parametrize(("panel", "same"), [(2, True), (3, False)], ids=["random", "independent"])
def test_drawn_cosines_come_from_the_seed(panel: int, same: bool) -> None:
    """By complex multiplication of the vectors that the seed draws."""
    draw = np.random.default_rng(5)
    q = draw.standard_normal(8)
    k = q if same else draw.standard_normal(8)
    expected = []
    for r in (1, 3, 50):
        pairs = zip(q[:4] + 1j * q[4:], k[:4] + 1j * k[4:], inv_freq(SMALL), strict=True)
        dot = sum((a * (b * cmath.exp(1j * r * f)).conjugate()).real for a, b, f in pairs)
        expected.append(dot / math.sqrt(sum(q * q) * sum(k * k)))
    figure = figures.cosine_figure({"one": SMALL}, [1, 3, 50], seed=5)
    drawn = curves(figure, panel)["one"].get_ydata()
    np.testing.assert_allclose(drawn, expected, atol=1e-14)


def test_the_band_is_one_deviation_of_independent_vectors() -> None:
    """``128 ** -0.5`` either way, in the last panel alone."""
    figure = DRAWN["cosine_figure"]
    assert [len(axes.patches) for axes in figure.axes] == [0, 0, 0, 1]
    (band,) = figure.axes[3].patches
    assert (band.get_y(), band.get_height()) == pytest.approx((-(128**-0.5), 2 * 128**-0.5))


def test_wavelengths_are_drawn_against_the_context() -> None:
    """Curves are ``2 pi base ** (2k / d)``, and the context is a level line."""
    figure = figures.wavelength_figure({"plain": ROPE}, context=8192)
    curve, context = figure.axes[0].lines
    expected = [2 * math.pi * 10_000.0 ** (k / 64) for k in range(64)]
    np.testing.assert_allclose(curve.get_ydata(), expected, rtol=1e-14)
    assert list(context.get_ydata()) == [8192, 8192]


def test_pairs_that_do_not_turn_leave_a_gap_in_wavelengths() -> None:
    """Infinity has no place on the axis."""
    rope = Rope(head_dim=4, pairing="half", inv_freq=(1.0, 0.0))
    drawn = curves(figures.wavelength_figure({"one": rope}))["one"].get_ydata()
    np.testing.assert_array_equal(drawn, [2 * math.pi, math.nan])


def test_scaling_is_the_share_of_the_frequency_that_is_left() -> None:
    """1/s, ``s ** (-2k / (d - 2))``, and 0 for a pair that is stopped."""
    drawn = {name: line.get_ydata() for name, line in curves(DRAWN["scaling_figure"]).items()}
    np.testing.assert_allclose(drawn["linear"], 0.125, rtol=1e-15)
    np.testing.assert_allclose(drawn["NTK"], [8 ** (-2 * k / 126) for k in range(64)], rtol=1e-14)
    turned = [4096 * f / (2 * math.pi) >= 1 for f in inv_freq(ROPE)]
    np.testing.assert_array_equal(drawn["HoPE"], np.array(turned, dtype=float))


def test_scaling_starts_from_the_plain_rope() -> None:
    """A law of the Rope's own is no part of the comparison."""
    scaled = replace(ROPE, scaling=Linear(factor=2.0))
    figure = figures.scaling_figure(scaled, {"linear": Linear(factor=8.0)})
    np.testing.assert_allclose(curves(figure)["linear"].get_ydata(), 0.125, rtol=1e-15)


def test_attention_is_the_softmax_of_summed_cosines() -> None:
    """Of ``alpha C(n - m + offset) / sqrt(d)``, entry by entry; later keys hold nothing."""
    figure = DRAWN["attention_figure"]
    for panel, offset in enumerate((0, 1, 3)):
        drawn = np.asarray(heat(figure, panel).filled(-1.0))
        for m in range(9):
            scores = [
                12 * sum(math.cos((n - m + offset) * f) for f in inv_freq(ROPE)) / math.sqrt(128)
                for n in range(m + 1)
            ]
            shares = [math.exp(score - max(scores)) for score in scores]
            expected = [share / sum(shares) for share in shares] + [-1.0] * (8 - m)
            np.testing.assert_allclose(drawn[m], expected, atol=1e-13)


def test_the_previous_token_gets_the_published_weight() -> None:
    """Width 64, sharpness 10, the seventeenth token: .654992."""
    rope = Rope(head_dim=64, pairing="interleaved", base=10_000.0)
    figure = figures.attention_figure(rope, [1], alpha=10.0, tokens=17)
    assert heat(figure)[16, 15] == pytest.approx(0.654992, abs=1e-6)
    assert figure.axes[0].get_title() == "offset 1 (the previous token)"


@pytest.mark.parametrize("offsets", [[], [9], [-1]])
def test_attention_refuses_offsets_that_no_token_has(offsets: list[int]) -> None:
    """Under the causal mask nothing ahead can be seen."""
    with pytest.raises(SpecError, match="offset"):
        figures.attention_figure(ROPE, offsets, alpha=1.0, tokens=9)


def test_usage_stacks_the_heads_of_all_layers() -> None:
    """A row each, lines between layers, a name in the middle of each."""
    first, second = 3 + np.arange(8.0).reshape(2, 4), 10 + np.arange(12.0).reshape(3, 4)
    figure = figures.usage_figure({"embed": first, "top": second})
    axes = figure.axes[0]
    np.testing.assert_array_equal(heat(figure), np.concatenate([first, second]))
    assert [list(line.get_ydata()) for line in axes.lines] == [[1.5, 1.5]]
    assert list(axes.get_yticks()) == [0.5, 3]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["embed", "top"]
    assert axes.images[0].get_clim() == (0, 21)


@pytest.mark.parametrize(
    "norms",
    [{}, {"0": np.ones(4)}, {"0": np.ones((2, 4)), "1": np.ones((2, 3))}, {"0": np.ones((0, 4))}],
    ids=["no-layer", "no-heads-axis", "other-width", "empty"],
)
def test_usage_refuses_what_is_not_heads_by_pairs(norms: dict[str, Any]) -> None:
    """And says which layer it is."""
    with pytest.raises(TensorError, match="norms must"):
        figures.usage_figure(norms)


def test_coverage_shows_turns_and_new_phases() -> None:
    """Turns by their definition; shares by counting every distance."""
    figure = DRAWN["coverage_figure"]
    drawn = {name: line.get_ydata() for name, line in curves(figure).items()}
    assert list(drawn) == ["in training", *WAYS]
    turn = np.array(inv_freq(ROPE)) / (2 * math.pi)
    np.testing.assert_allclose(drawn["in training"], 4096 * turn, rtol=1e-14)
    np.testing.assert_allclose(drawn["unchanged"], 16384 * turn, rtol=1e-14)
    np.testing.assert_allclose(drawn["linear"], 4096 * turn, rtol=1e-14)
    seen = 4096 * turn
    phases = np.arange(16384)[:, None] * turn % 1
    shares = np.where(seen < 1, (phases >= seen).mean(0), 0)
    np.testing.assert_allclose(heat(figure, 1)[0], shares, atol=1e-15)
    np.testing.assert_array_equal(heat(figure, 1)[1], 0)
    rows = [tick.get_text() for tick in figure.axes[1].get_yticklabels()]
    assert rows == list(WAYS)


def test_coverage_marks_pairs_that_never_came_round() -> None:
    """46 to 63 of Llama 2: its critical dimension is 92."""
    (marked,) = DRAWN["coverage_figure"].axes[0].collections
    spans = [path.get_extents().x0 for path in marked.get_paths()]
    assert spans == [pair - 0.5 for pair in range(46, 64)]
    assert marked.get_label() == "no whole turn in training"


@pytest.mark.parametrize(
    "other",
    [
        coverage(ROPE, 2048, ROPE, 16384),
        coverage(ROPE, 4096, ROPE, 8192),
        coverage(replace(ROPE, base=500.0), 4096, ROPE, 16384),
    ],
    ids=["context", "reach", "frequencies"],
)
def test_coverage_of_another_training_is_refused(other: Any) -> None:
    """One curve stands for the training of all."""
    with pytest.raises(SpecError, match=r"one training to one length.*'other'"):
        figures.coverage_figure({**WAYS, "other": other})


def test_coverage_of_nothing_is_refused() -> None:
    """There would be no training to draw."""
    with pytest.raises(SpecError, match="a coverage at least"):
        figures.coverage_figure({})


def test_precision_is_the_largest_error_over_the_draws_of_an_octave() -> None:
    """A curve for each recipe; each point is the worst of what was drawn there."""
    figure = figures.precision_figure(ROPE, bits=12, draws=8)
    lines = figure.axes[0].lines
    assert len(lines) == len(RECIPES)
    draw = np.random.default_rng(0)
    octaves = [draw.integers(2**b, 2 ** (b + 1), 8) for b in range(12)]
    usual = [angle_errors(ROPE, octave, "float32 angle").max() for octave in octaves]
    np.testing.assert_array_equal(lines[0].get_ydata(), usual)


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
                for j, f in enumerate(inv_freq(SMALL))
            ) / total
        )  # fmt: skip
    return found


def test_linear_weights_are_means_over_draws() -> None:
    """Share below 0 on the left, sum on the right, one deviation as a band."""
    figure = DRAWN["linear_figure"]
    name = "mean of 3 draws"
    for panel, measure in enumerate((lambda w: np.mean(np.array(w) < 0), sum)):
        found = np.array([[measure(weights(n, seed)) for seed in range(3)] for n in (8, 64)])
        curve = curves(figure, panel)[name]
        assert list(curve.get_xdata()) == [8, 64]
        np.testing.assert_allclose(curve.get_ydata(), found.mean(-1), atol=1e-13)
        corners = figure.axes[panel].collections[0].get_paths()[0].vertices
        top = found.mean(-1) + found.std(-1)
        assert corners[:, 1].max() == pytest.approx(top.max(), abs=1e-13)


def test_the_expected_sum_is_a_mean_of_cosines() -> None:
    """Over distances and pairs."""
    drawn = curves(DRAWN["linear_figure"], 1)["expected sum"].get_ydata()
    for length, found in zip((8, 64), drawn, strict=True):
        cosines = [math.cos(r * f) for r in range(length) for f in inv_freq(SMALL)]
        assert found == pytest.approx(sum(cosines) / len(cosines), abs=1e-14)


@pytest.mark.parametrize(("lengths", "draws"), [([], 2), ([8], 0)])
def test_linear_refuses_nothing_to_draw(lengths: list[int], draws: int) -> None:
    """A mean of no draws is not a number."""
    with pytest.raises(SpecError, match=r"lengths|draws"):
        figures.linear_figure(SMALL, lengths, draws=draws)


# the gallery

DOCS = Path(__file__).parents[1] / "docs"


def test_the_gallery_calls_every_function() -> None:
    """Its blocks run in the tests of the documentation."""
    page = (DOCS / "figures.md").read_text("utf-8")
    assert [name for name in figures.__all__ if f"figures.{name}(" not in page] == []


def test_pictures_are_small_and_all_in_the_gallery() -> None:
    """A file that nothing draws any more would grow stale."""
    page = (DOCS / "figures.md").read_text("utf-8")
    example = {"extending.png"}  # which examples/extend_context draws
    for picture in (DOCS / "images").glob("*.png"):
        assert picture.name in example or f"(images/{picture.name})" in page
        assert picture.stat().st_size < 150_000
