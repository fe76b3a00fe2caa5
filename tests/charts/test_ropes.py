"""Pictures of turning pairs: what their artists hold, never their pixels."""

from __future__ import annotations

import cmath
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from phasor import Rope, figures
from phasor.axes import Sectioned
from phasor.errors import SpecError
from phasor.papers import RECIPES, angle_errors, coverage
from phasor.scaling import Linear

from .drawn import DRAWN, ROPE, SMALL, WAYS, curves, heat


@pytest.mark.parametrize("direction", [1, -1])
def test_rotation_shows_where_each_pair_points(direction: int) -> None:
    """(cos, sin) of the angle, coloured by the position."""
    rope = replace(ROPE, direction=direction)
    figure = figures.rotation_figure(rope, pairs=[0, 20], tokens=7)
    for axes, pair in zip(figure.axes, (0, 20), strict=False):
        arms, tips = axes.collections
        points = [complex(*tip) for tip in tips.get_offsets()]
        turned = [cmath.exp(1j * direction * p * ROPE.inv_freq[pair]) for p in range(7)]
        np.testing.assert_allclose(points, turned, atol=1e-15)
        assert list(tips.get_array()) == list(range(7))
        ends = [arm.tolist() for arm in arms.get_segments()]
        assert ends == [[[0, 0], [tip.real, tip.imag]] for tip in points]


def test_rotation_titles_say_how_fast() -> None:
    """Tokens per turn, and a word where nothing turns."""
    rope = Rope(head_dim=4, pairing="half", explicit_inv_freq=(math.pi / 2, 0.0))
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
        pairs = zip(q[:4] + 1j * q[4:], k[:4] + 1j * k[4:], SMALL.inv_freq, strict=True)
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
    rope = Rope(head_dim=4, pairing="half", explicit_inv_freq=(1.0, 0.0))
    drawn = curves(figures.wavelength_figure({"one": rope}))["one"].get_ydata()
    np.testing.assert_array_equal(drawn, [2 * math.pi, math.nan])


def test_scaling_is_the_share_of_the_frequency_that_is_left() -> None:
    """1/s, ``s ** (-2k / (d - 2))``, and 0 for a pair that is stopped."""
    drawn = {name: line.get_ydata() for name, line in curves(DRAWN["scaling_figure"]).items()}
    np.testing.assert_allclose(drawn["linear"], 0.125, rtol=1e-15)
    np.testing.assert_allclose(drawn["NTK"], [8 ** (-2 * k / 126) for k in range(64)], rtol=1e-14)
    turned = [4096 * f / (2 * math.pi) >= 1 for f in ROPE.inv_freq]
    np.testing.assert_array_equal(drawn["HoPE"], np.array(turned, dtype=float))


def test_scaling_starts_from_the_plain_rope() -> None:
    """A law of the Rope's own is no part of the comparison."""
    scaled = replace(ROPE, scaling=Linear(factor=2.0))
    figure = figures.scaling_figure(scaled, {"linear": Linear(factor=8.0)})
    np.testing.assert_allclose(curves(figure)["linear"].get_ydata(), 0.125, rtol=1e-15)


def test_coverage_shows_turns_and_new_phases() -> None:
    """Turns by their definition; shares by counting every distance."""
    figure = DRAWN["coverage_figure"]
    drawn = {name: line.get_ydata() for name, line in curves(figure).items()}
    assert list(drawn) == ["in training", *WAYS]
    turn = np.array(ROPE.inv_freq) / (2 * math.pi)
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
