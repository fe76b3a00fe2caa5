"""Charts of the turns of each pair in training, and of new phases in a longer context."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import chain

import altair as alt
import numpy as np

from phasor.charts.curves import law_menu
from phasor.charts.style import (
    chart_of,
    check_by_name,
    colour,
    curves,
    heat_map,
    horizontal_line,
    layer,
    pair_axis,
    records,
    style_for_paper,
)
from phasor.errors import SpecError
from phasor.extending import Coverage

_TRAINED = "in training"
_WITHIN, _NEW, _WHOLE = "only angles seen in training", "new angles", "every angle seen"


def coverage_chart(ways: Mapping[str, Coverage]) -> alt.VConcatChart:
    """Turns of every pair in training and in the longer context, and the pair's new phases.

    In the upper panel, a pair below one turn (grey) did not complete a turn in training: it is
    beyond the critical dimension of Liu et al. (2310.05209). The lower panel has one row per
    extension, dark where the longer context shows angles that did not occur in training.

    Args:
        ways: Up to seven extensions of the same training, by name: results of
            `phasor.extending.coverage`, or the ``coverage`` of options of
            `phasor.extending.plan_extension`.

    >>> from phasor import preset
    >>> from phasor.extending import plan_extension
    >>> ways = plan_extension(preset("llama-2-7b"), 32_768).options
    >>> chart = coverage_chart({name: way.coverage for name, way in ways.items()})
    >>> len(chart.vconcat[1].data.values)  # six ways, 64 pairs
    384
    """
    first = _shared_training(ways)
    pairs = np.arange(len(first.trained_turns))
    turns = {_TRAINED: first.trained_turns} | {n: way.extended_turns for n, way in ways.items()}
    # zero has no logarithm
    series = {name: np.where(values > 0, values, np.nan) for name, values in turns.items()}
    title = ["turns", f"(training {first.context},", f"extended {first.to} tokens)"]
    y = alt.Y("turns:Q").title(title).scale(type="log").axis(format="~g", tickCount=6)
    never_turned = pairs[first.never_turned]
    bands = records(start=never_turned - 0.5, end=never_turned + 0.5) if len(never_turned) else []
    unturned = chart_of(bands).mark_rect(style="shade").encode(x="start:Q", x2="end:Q")
    edges = [-0.5, len(pairs) - 0.5]
    lines = curves(pairs, series, pair_axis(domain=edges), y)
    turns_panel = layer(unturned, horizontal_line(1), lines)

    left, right = pairs - 0.5, pairs + 0.5
    cells = (
        records(name=name, pair=pairs, start=left, end=right, share=way.new_share)
        for name, way in ways.items()
    )
    names = alt.Y("name:N", title="extension", sort=list(ways))
    share_panel = chart_of(*cells).encode(x=pair_axis("start", domain=edges), x2="end:Q", y=names)
    share_panel = heat_map(
        share_panel, "share", "share of new distances", "name:N", "pair:Q", domain=[0, 1]
    )
    return style_for_paper(
        alt.vconcat(
            turns_panel.properties(width=480, height=280),
            share_panel.properties(width=480, height=alt.Step(20)),
        ),
        "Turns of each pair in training and in the longer context, and its share of distances with "
        "new angles.",
    )


def turns_chart(ways: Mapping[str, Coverage]) -> alt.LayerChart:
    """Turns of every pair over a context, with a slider for the context and a menu for the law.

    The mark of a pair shows whether all its angles over that context occurred in training. The
    initial state, also of a saved picture, is the longest context with the first law.

    Args:
        ways: Extensions of the same training, by name, as for `coverage_chart`.

    >>> from phasor import Rope
    >>> from phasor.extending import coverage
    >>> rope = Rope(head_dim=128, pairing="half")
    >>> chart = turns_chart({"unchanged": coverage(rope, 4096, rope, 32_768)})
    >>> [param.name for param in chart.params]
    ['tokens', 'law']
    """
    trained = _shared_training(ways)
    context, to = trained.context, trained.to
    step = max(1, context // 8)
    shortest = context - (context - 1) // step * step
    slider = alt.binding_range(min=shortest, max=to, step=step, name="Context, tokens ")
    tokens = alt.param(name="tokens", value=to, bind=slider)
    pairs, turned = range(len(trained.trained_turns)), trained.trained_turns >= 1
    tables = [
        records(law=name, pair=pairs, turns_per_token=way.extended_turns / to,
                first_new=way.first_new, turned=turned)
        for name, way in ways.items()
    ]  # fmt: skip
    rates = [row["turns_per_token"] for row in chain(*tables) if row["turns_per_token"] > 0] or [
        1.0
    ]
    low, high = min(rates) * step, max(rates) * to
    powers_of_ten = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    phases = [_WITHIN, _NEW, _WHOLE]
    current_pairs = (
        chart_of(*tables)
        .transform_filter("datum.law == law && datum.turns_per_token > 0")
        .transform_calculate(
            turns="tokens * datum.turns_per_token",
            phases=f"datum.first_new !== null && datum.first_new < tokens ? '{_NEW}' : "
            f"datum.turned ? '{_WHOLE}' : '{_WITHIN}'",
        )
    )
    shapes = alt.Scale(domain=phases, range=["square", "cross", "circle"])
    points = current_pairs.mark_point(size=45, filled=True, opacity=1).encode(
        x=pair_axis(),
        y=alt.Y("turns:Q")
        .title("turns over the context")
        .scale(type="log", domain=[low, high], nice=False)
        .axis(format="~g", values=[10.0**power for power in powers_of_ten]),
        color=colour("phases", phases, {"symbolSize": 90, "columns": 1}),
        shape=alt.Shape("phases:N", sort=phases, scale=shapes),
        tooltip=["pair:Q", alt.Tooltip("turns:Q", format=".4~g"), "phases:N",
                 alt.Tooltip("first_new:Q", title="first new distance", format=",")],
    )  # fmt: skip
    count = (
        current_pairs.transform_aggregate(total="count()", groupby=["phases"])
        .transform_filter(f"datum.phases == '{_NEW}'")
        .transform_calculate(
            words="datum.total + (datum.total == 1 ? ' pair shows' : ' pairs show') + ' new angles'"
        )
        .mark_text(align="right", baseline="top", fontWeight="bold")
        .encode(x=alt.value("width"), y=alt.value(4), text="words:N")
    )
    menu = law_menu(ways, next(iter(ways)))
    chart = layer(horizontal_line(1), points, count).add_params(tokens, menu)
    return style_for_paper(
        chart.properties(width=480, height=320),
        "Turns of each pair over the context; marks show whether all its angles occurred in "
        "training.",
    )


def _shared_training(ways: Mapping[str, Coverage]) -> Coverage:
    """The first of the extensions, after a check that all share their training and length."""
    check_by_name("ways", ways, Coverage)
    first = next(iter(ways.values()))
    for name, coverage in ways.items():
        same_lengths = (coverage.context, coverage.to) == (first.context, first.to)
        if not same_lengths or not np.array_equal(coverage.trained_turns, first.trained_turns):
            raise SpecError(
                f"ways must all extend the same training to the same length ({first.context} to "
                f"{first.to} tokens), got {coverage.context} to {coverage.to} in {name!r}, or "
                "other frequencies; draw them in separate charts"
            )
    return first
