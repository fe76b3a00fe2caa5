"""What a rotated numerator does to the weights of linear attention."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from phasor._checks import whole
from phasor.errors import SpecError
from phasor.figures._style import label, legend, panels, styled
from phasor.papers import expected_linear_sum, linear_weights
from phasor.rope import Rope


def linear_figure(rope: Rope, lengths: Sequence[int], *, draws: int) -> Figure:
    """Share of negative weights of linear attention, and their sum, against the number of keys.

    Weights of RoFormer's eq. 19 (2104.09864), `phasor.papers.linear_weights`, of Gaussian
    queries and keys: means over the draws, and bands of one standard deviation. Without a
    rotation no weight would be negative, and they would sum to 1. Work grows as
    ``draws * sum(lengths)``: 32 draws of 8192 keys at width 64 take a second.

    Args:
        rope: What rotates, along one axis.
        lengths: Numbers of keys, ascending.
        draws: How many queries, each with keys of its own, at each length.

    Returns:
        A figure of two panels.

    Raises:
        SpecError: If there is no length, or a number is not in its range.

    >>> figure = linear_figure(Rope(head_dim=64, pairing="half"), [64, 256], draws=4)
    >>> [axes.get_ylabel() for axes in figure.axes]
    ['share of weights below 0', 'sum of weights']
    """
    if not lengths:
        raise SpecError("lengths must hold a number of keys at least, got none")
    whole("draws", draws, least=1)
    negative, total = (
        np.array(measure)
        for measure in zip(*(_drawn(rope, n, draws) for n in lengths), strict=True)
    )
    expected = [expected_linear_sum(rope, n) for n in lengths]
    (_, mean), (_, theory) = styled([f"mean of {draws} draws", "expected sum"])
    figure, (left, right) = panels(1, 2, size=(9, 4))
    label(left, "keys (tokens)", "share of weights below 0")
    label(right, "keys (tokens)", "sum of weights")
    for axes, drawn in ((left, negative), (right, total)):
        middle, spread = drawn.mean(-1), drawn.std(-1)
        axes.semilogx(lengths, middle, **mean)
        band = np.maximum(middle - spread, 0) if axes is left else middle - spread
        axes.fill_between(
            lengths, band, middle + spread, color="0.87", zorder=0, label="± one deviation"
        )
        axes.set_xscale("log", base=2)
    right.semilogx(lengths, expected, **theory)
    right.set_xscale("log", base=2)
    left.set_ylim(bottom=0)
    right.axhline(0, color="0.4", linewidth=0.8)
    left.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    legend(figure, right)
    return figure


def _drawn(rope: Rope, length: int, draws: int) -> tuple[list[float], list[float]]:
    """Negative share and sum of the weights of each draw."""
    negative: list[float] = []
    total: list[float] = []
    for seed in range(draws):
        draw = np.random.default_rng(seed)
        query, keys = (
            draw.standard_normal(rope.head_dim),
            draw.standard_normal((length, rope.head_dim)),
        )
        weights = linear_weights(query, keys, rope)
        negative.append(float((weights < 0).mean()))
        total.append(float(weights.sum()))
    return negative, total
