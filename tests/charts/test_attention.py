"""Pictures of attention: what their artists hold, never their pixels."""

from __future__ import annotations

import cmath
import math
from typing import Any

import numpy as np
import pytest

from phasor import Rope, figures
from phasor.errors import SpecError, TensorError

from .drawn import DRAWN, ROPE, SMALL, curves, heat


def test_attention_is_the_softmax_of_summed_cosines() -> None:
    """Of ``alpha C(n - m + offset) / sqrt(d)``, entry by entry; later keys hold nothing."""
    figure = DRAWN["attention_figure"]
    for panel, offset in enumerate((0, 1, 3)):
        drawn = np.asarray(heat(figure, panel).filled(-1.0))
        for m in range(9):
            scores = [
                12 * sum(math.cos((n - m + offset) * f) for f in ROPE.inv_freq) / math.sqrt(128)
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
        cosines = [math.cos(r * f) for r in range(length) for f in SMALL.inv_freq]
        assert found == pytest.approx(sum(cosines) / len(cosines), abs=1e-14)


@pytest.mark.parametrize(("lengths", "draws"), [([], 2), ([8], 0)])
def test_linear_refuses_nothing_to_draw(lengths: list[int], draws: int) -> None:
    """A mean of no draws is not a number."""
    with pytest.raises(SpecError, match=r"lengths|draws"):
        figures.linear_figure(SMALL, lengths, draws=draws)
