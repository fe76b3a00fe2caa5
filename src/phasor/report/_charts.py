"""The charts of a report: Vega-Lite descriptions, made and checked by Altair.

Colours are CSS variables and ``currentColor``, which the page sets for light, dark and print;
what colour tells, shape or dash tells too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import altair as alt

from phasor.report._numbers import Row

_COLOURS = [f"var(--series-{index})" for index in range(8)]
_DASHES = [[1, 0], [6, 3], [2, 2], [8, 3, 2, 3], [10, 4], [4, 1], [1, 3], [12, 2]]
_WITHIN, _WHOLE, _NEW = "only angles met in training", "every angle met", "new angles"
_CONFIG: dict[str, Any] = {
    "background": "transparent",
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "axis": {
        "labelColor": "currentColor",
        "titleColor": "currentColor",
        "domainColor": "var(--rule)",
        "tickColor": "var(--rule)",
        "gridColor": "var(--grid)",
        "labelFontSize": 12,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
        "labelOverlap": True,
        "labelFlush": False,
    },
    "legend": {
        "labelColor": "currentColor",
        "titleColor": "currentColor",
        "labelFontSize": 12,
        "titleFontSize": 12,
        "orient": "top",
        "direction": "horizontal",
        "columns": 2,
        "symbolStrokeWidth": 2,
        "labelLimit": 220,
        "offset": 24,
    },
    "text": {"color": "currentColor", "fontSize": 12},
    "rule": {"color": "var(--rule)"},
}


def coverage_chart(
    rows: Sequence[Row], laws: Sequence[str], context: int, to: int
) -> dict[str, Any]:
    """Turns of every pair over a context that a slider sets, under a law that a menu picks."""
    step = max(1, context // 8)
    tokens = alt.param(
        name="tokens",
        value=context,
        bind=alt.binding_range(
            min=context - (context - 1) // step * step, max=to, step=step, name="Context, tokens "
        ),
    )
    law = _menu(laws, laws[0])
    slowest = min((row["inv_freq"] for row in rows if row["inv_freq"]), default=1e-6)
    fastest = max((row["inv_freq"] for row in rows), default=1.0) or 1.0
    turn = 2 * math.pi
    shown = [_WHOLE, _WITHIN, _NEW]
    chosen = (
        alt.Chart(alt.Data(values=list(rows)))
        .transform_filter("datum.law == law && datum.inv_freq > 0")
        .transform_calculate(
            turns=f"tokens * datum.inv_freq / {turn}",
            phases=f"datum.first_new !== null && datum.first_new < tokens ? '{_NEW}' : "
            f"datum.turned ? '{_WHOLE}' : '{_WITHIN}'",
        )
    )
    points = chosen.mark_point(size=45, filled=True, opacity=1).encode(
        x=_pairs(),
        y=alt.Y(
            "turns:Q",
            title="turns over the context",
            scale=alt.Scale(
                type="log", domain=[slowest * step / turn, fastest * to / turn], nice=False
            ),
            axis=alt.Axis(
                format="~g", values=_powers(10, slowest * step / turn, fastest * to / turn)
            ),
        ),
        color=_colour("phases", shown, [_COLOURS[3], _COLOURS[1], _COLOURS[2]], shapes=True),
        shape=alt.Shape(
            "phases:N",
            sort=shown,
            scale=alt.Scale(domain=shown, range=["circle", "square", "cross"]),
        ),
        tooltip=[
            alt.Tooltip("pair:Q"),
            alt.Tooltip("turns:Q", format=".4~g"),
            alt.Tooltip("phases:N"),
            alt.Tooltip("first_new:Q", title="first new distance", format=","),
        ],
    )
    whole = (
        alt.Chart(alt.Data(values=[{"turns": 1}])).mark_rule(strokeDash=[4, 4]).encode(y="turns:Q")
    )
    count = (
        chosen.transform_aggregate(total="count()", groupby=["phases"])
        .transform_filter(f"datum.phases == '{_NEW}'")
        .transform_calculate(
            said="datum.total + (datum.total == 1 ? ' pair shows' : ' pairs show') + ' new angles'"
        )
        .mark_text(align="right", baseline="top", fontWeight="bold")
        .encode(x=alt.value("width"), y=alt.value(4), text="said:N")
    )
    layered = _layer(whole, points, count).add_params(tokens, law)
    return _finished(
        layered,
        "Turns of each pair over the context, marked by whether training met all the angles "
        "that it shows.",
        320,
    )


def slowing_chart(rows: Sequence[Row], laws: Sequence[str]) -> dict[str, Any]:
    """What each law divides frequencies by, pair by pair."""
    divisors = [row["divided_by"] for row in rows] or [1.0]
    line = _lines(rows, laws, "law").encode(
        x=_pairs(),
        y=alt.Y(
            "divided_by:Q",
            title="frequency divided by",
            scale=alt.Scale(type="log", base=2),
            axis=alt.Axis(format="~g", values=_powers(2, min(divisors), max(divisors))),
        ),
        tooltip=["law:N", "pair:Q", alt.Tooltip("divided_by:Q", format=".4~g")],
    )
    return _finished(line, "What each law divides the frequency of each pair by.")


def cosine_chart(
    rows: Sequence[Row], laws: Sequence[str], recommended: str, context: int
) -> dict[str, Any]:
    """The cosine of like vectors against distance, unchanged and under a law from a menu."""
    law = _menu(laws, recommended)
    line = (
        alt.Chart(alt.Data(values=list(rows)))
        .transform_filter("datum.law == law || datum.law == 'unchanged'")
        .mark_line(strokeWidth=1.5)
        .encode(
            x=_tokens("distance", "distance, tokens"),
            y=alt.Y("cosine:Q", title="C(r) / n"),
            color=_colour("law", laws, _COLOURS[: len(laws)]),
            strokeDash=_dash("law", laws),
            tooltip=["law:N", alt.Tooltip("distance:Q", format=","), _rounded("cosine")],
        )
    )
    return _finished(
        _layer(_mark_context(context, "distance"), line).add_params(law),
        "Cosine between a rotated query and an equal key against their distance, unchanged and "
        "under the law that the menu picks.",
    )


def decay_chart(rows: Sequence[Row], context: int) -> dict[str, Any]:
    """RoFormer's decay curve."""
    line = (
        alt.Chart(alt.Data(values=list(rows)))
        .mark_line(color=_COLOURS[1], strokeWidth=2)
        .encode(
            x=_tokens("distance", "distance, tokens"),
            y=alt.Y("decay:Q", title="mean length of partial sums"),
            tooltip=[alt.Tooltip("distance:Q", format=","), _rounded("decay")],
        )
    )
    return _finished(
        _layer(_mark_context(context, "distance"), line),
        "RoFormer's decay curve, the mean length of partial sums, against distance.",
    )


def needed_chart(rows: Sequence[Row], weights: Sequence[str], context: int) -> dict[str, Any]:
    """The sharpness that a previous-token head needs, against context."""
    line = _lines(rows, weights, "weight", first=1).encode(
        x=_tokens("context", "context, tokens"),
        y=alt.Y("alpha:Q", title="sharpness needed (alpha)", scale=alt.Scale(zero=True)),
        tooltip=["weight:N", alt.Tooltip("context:Q", format=","), _rounded("alpha")],
    )
    return _finished(
        _layer(_mark_context(context, "context"), line),
        "Sharpness that a previous-token head needs to give its token a weight, against context.",
    )


def kept_chart(rows: Sequence[Row], laws: Sequence[str], context: int) -> dict[str, Any]:
    """The weight that a trained previous-token head keeps under each law."""
    line = _lines(rows, laws, "law").encode(
        x=_tokens("context", "context, tokens"),
        y=alt.Y("weight:Q", title="weight of the previous token", scale=alt.Scale(domain=[0, 1])),
        tooltip=["law:N", alt.Tooltip("context:Q", format=","), _rounded("weight")],
    )
    return _finished(
        _layer(_mark_context(context, "context"), line),
        "Attention that a trained previous-token head keeps on its token, for each law.",
    )


def precision_chart(rows: Sequence[Row], recipes: Sequence[str], context: int) -> dict[str, Any]:
    """The error of cos and sin against position, for each recipe."""
    line = _lines(rows, recipes, "recipe", first=1).encode(
        x=_tokens("position", "position, tokens"),
        y=alt.Y(
            "error:Q",
            title="largest error of cos and sin",
            scale=alt.Scale(type="log"),
            axis=alt.Axis(format=".0e", tickCount=8),
        ),
        tooltip=[
            "recipe:N",
            alt.Tooltip("position:Q", format=","),
            alt.Tooltip("error:Q", format=".2e"),
        ],
    )
    return _finished(
        _layer(_mark_context(context, "position"), line),
        "Largest error of cos and sin against position, for each way of making them.",
    )


def _powers(base: int, low: float, high: float) -> list[float]:
    """The powers from just below ``low`` to just above ``high``, for an axis's labels."""
    first, last = math.floor(math.log(low, base)), math.ceil(math.log(high, base))
    return [float(base) ** power for power in range(first, last + 1)]


def _layer(*charts: alt.Chart | alt.LayerChart) -> alt.LayerChart:
    return alt.LayerChart(layer=list(charts))


def _menu(laws: Sequence[str], first: str) -> alt.Parameter:
    return alt.param(
        name="law", value=first, bind=alt.binding_select(options=list(laws), name="Law ")
    )


def _lines(rows: Sequence[Row], names: Sequence[str], field: str, first: int = 0) -> alt.Chart:
    """A line for each name, each with a colour and a dash of its own; a legend that picks."""
    picked = alt.selection_point(fields=[field], bind="legend")
    return (
        alt.Chart(alt.Data(values=list(rows)))
        .mark_line(strokeWidth=2)
        .encode(
            color=_colour(field, names, _COLOURS[first : first + len(names)]),
            strokeDash=_dash(field, names),
            opacity=alt.condition(picked, alt.value(1), alt.value(0.15)),
        )
        .add_params(picked)
    )


def _dash(field: str, names: Sequence[str]) -> alt.StrokeDash:
    scale = alt.Scale(domain=list(names), range=_DASHES[: len(names)])
    return alt.StrokeDash(f"{field}:N", sort=list(names), scale=scale)


def _colour(
    field: str, names: Sequence[str], colours: Sequence[str], *, shapes: bool = False
) -> alt.Color:
    return alt.Color(
        f"{field}:N",
        title=None,
        sort=list(names),
        scale=alt.Scale(domain=list(names), range=list(colours)),
        legend=alt.Legend(columns=1 if shapes else 2, symbolSize=90 if shapes else 600),
    )


def _pairs() -> alt.X:
    axis = alt.Axis(tickMinStep=1, grid=False)
    return alt.X("pair:Q", title="pair", scale=alt.Scale(nice=False), axis=axis)


def _tokens(field: str, title: str) -> alt.X:
    return alt.X(
        f"{field}:Q",
        title=title,
        scale=alt.Scale(type="log", nice=False),
        axis=alt.Axis(format="~s", tickCount=6, grid=False),
    )


def _rounded(field: str) -> alt.Tooltip:
    return alt.Tooltip(f"{field}:Q", format=".4~g")


def _mark_context(context: int, field: str) -> alt.LayerChart:
    """A line where the trained context ends, which says so."""
    base = alt.Chart(alt.Data(values=[{field: context}])).encode(x=f"{field}:Q")
    words = base.mark_text(align="center", baseline="bottom").encode(
        y=alt.value(-4), text=alt.value("trained")
    )
    return _layer(base.mark_rule(strokeDash=[4, 4]), words)


def _finished(
    chart: alt.Chart | alt.LayerChart, description: str, height: int = 260
) -> dict[str, Any]:
    sized = chart.properties(
        width="container",
        height=height,
        description=description,
        autosize=alt.AutoSizeParams(type="fit-x", contains="padding"),
    )
    return sized.to_dict() | {"config": _CONFIG}
