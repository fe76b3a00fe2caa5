"""Parts of all charts: colours for paper and for screens, records, curves and reference lines."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar, cast

import altair as alt
import numpy as np
from numpy.typing import ArrayLike

from phasor._checks import short_repr
from phasor.errors import SpecError
from phasor.layers import rope_hint

#: A row of a chart's data: JSON values by field.
Record = Mapping[str, Any]
AnyChart = alt.Chart | alt.LayerChart | alt.ConcatChart | alt.VConcatChart | alt.FacetChart
AChart = TypeVar("AChart", bound=AnyChart)

# every series keeps a contrast of 3 to 1 with its background (WCAG 2.2), and any two series differ
# in their dashes by a factor of 1.5 at least, so that they can be told apart in grey
_LIGHT: dict[str, Any] = {
    "ink": "#1c2024", "rule": "#8a939e", "grid": "#e3e6ea",
    "series": ("#0072b2", "#c44e00", "#00805f", "#a84a83", "#9a6a00", "#7a3fb0", "#2f86b8",
               "#5a6370"),
}  # fmt: skip
_DARK: dict[str, Any] = {
    "ink": "#e8eaed", "rule": "#7b8490", "grid": "#2b3038",
    "series": ("#5ab0ee", "#ff9154", "#3fcf9f", "#e795c4", "#edb83d", "#c39bf0", "#8ed1f2",
               "#b3bac4"),
}  # fmt: skip
DASHES = [
    [1, 0], [10, 4], [12, 4, 2, 4], [2, 3], [24, 6], [12, 4, 2, 4, 2, 4], [5, 3], [24, 4, 4, 4],
]  # fmt: skip


def _config(
    ink: str,
    rule: str,
    grid: str,
    series: Sequence[str],
    *,
    background: str,
    font: str,
    columns: int,
) -> dict[str, Any]:
    """Vega-Lite's configuration of a chart in these colours."""
    words = {"labelColor": ink, "titleColor": ink, "labelFontSize": 12, "titleFontSize": 12}
    words |= {"titleFontWeight": "normal"}
    axis = {"domainColor": rule, "tickColor": rule, "gridColor": grid}
    legend = {"orient": "top", "direction": "horizontal", "columns": columns, "offset": 24}
    return {
        "background": background,
        "font": font,
        "range": {"category": list(series)},
        "mark": {"color": series[0]},
        "line": {"strokeWidth": 2},
        "view": {"stroke": None},
        "title": {"color": ink, "fontSize": 12, "fontWeight": "normal", "offset": 8},
        "header": words | {"labelFontWeight": "normal"},
        "axis": words | axis | {"labelOverlap": True, "labelFlush": False},
        "legend": words | legend | {"symbolStrokeWidth": 2, "labelLimit": 260},
        "text": {"color": ink, "fontSize": 12},
        # `style` of marks that are not curves
        "style": {
            "first-series": {"color": series[0]},
            "reference": {"color": rule, "strokeWidth": 1},
            "shade": {"color": rule, "opacity": 0.25},
        },
    }


#: Dark on white, for saved charts.
PAPER = _config(**_LIGHT, background="white", font="sans-serif", columns=3)
#: Colours that `stylesheet` defines, for pages.
SCREEN = _config(
    "var(--ink)",
    "var(--rule)",
    "var(--grid)",
    [f"var(--series-{index})" for index in range(len(DASHES))],
    background="transparent",
    font="system-ui, sans-serif",
    columns=2,
)


def stylesheet() -> str:
    """CSS that defines the colours of `SCREEN` on light screens and in print, and on dark ones."""
    light, dark = (
        "; ".join(
            [f"--{name}: {colours[name]}" for name in ("ink", "rule", "grid")]
            + [f"--series-{index}: {colour}" for index, colour in enumerate(colours["series"])]
        )
        for colours in (_LIGHT, _DARK)
    )
    dark_screen = "@media screen and (prefers-color-scheme: dark)"
    return f":root {{ {light} }}\n{dark_screen} {{ :root {{ {dark} }} }}"


def picture_stylesheet() -> str:
    """CSS for a picture in the colours of `PAPER` that exchanges them on dark screens.

    A renderer that knows no stylesheets, or no variables in them, draws the picture as it is.
    """
    colours = zip(
        *((each["ink"], each["rule"], each["grid"], *each["series"]) for each in (_LIGHT, _DARK)),
        strict=True,
    )
    rules = (
        f'[{attribute}="{light}"] {{ {attribute}: {dark} }}'
        for light, dark in colours
        for attribute in ("fill", "stroke")
    )
    return f"@media screen and (prefers-color-scheme: dark) {{\n{chr(10).join(rules)}\n}}"


def screen_spec(chart: AnyChart, **changes: Any) -> dict[str, Any]:
    """The Vega-Lite description of ``chart`` in the colours of `SCREEN`, with top-level changes."""
    # validation would take a third of a page's time; tests/charts validates every chart
    return chart.to_dict(validate=False) | {"config": SCREEN} | changes


def style_for_paper(chart: AChart, description: str) -> AChart:
    """The chart in the colours of `PAPER`, with a description for screen readers."""
    return chart.configure(**PAPER).properties(description=description)


def records(**columns: Any) -> list[Record]:
    """Records of equally long columns; a column that is one text or number is in every record.

    A number that is not finite becomes None, which interrupts a curve.
    """
    arrays = {name: np.asarray(column) for name, column in columns.items()}
    length = max(array.size for array in arrays.values())
    lists = [np.broadcast_to(array, (length,)).tolist() for array in arrays.values()]
    return [
        {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in zip(arrays, values, strict=True)
        }
        for values in zip(*lists, strict=True)
    ]


def check_by_name(argument: str, values: object, kind: type) -> None:
    """Refuse what does not hold values of ``kind`` by the names of their curves."""
    wrong = values
    if isinstance(values, Mapping) and values:
        named = cast(Mapping[object, object], values).values()
        others = [value for value in named if not isinstance(value, kind)]
        if not others:
            return
        wrong = others[0]
    raise SpecError(
        f"{argument} must be a {kind.__name__} by the name of each curve, such as "
        f"{{'mine': {kind.__name__.lower()}}}, got {short_repr(wrong)}{rope_hint(wrong)}"
    )


def check_list(argument: str, values: object) -> None:
    """Refuse what is no list, range or array of one dimension, or is empty."""
    if np.ndim(cast(Any, values)) != 1 or not len(cast(Any, values)):
        raise SpecError(
            f"{argument} must be a list of numbers, such as range(1, 257), got {short_repr(values)}"
        )


def chart_of(*tables: Iterable[Record]) -> alt.Chart:
    """A chart of the records of all tables, still without a mark."""
    return alt.Chart(alt.Data(values=list(chain.from_iterable(tables))))


def curves(
    xs: ArrayLike, series: Mapping[str, ArrayLike], x: alt.X, y: alt.Y, *, clickable: bool = True
) -> alt.Chart:
    """A line over ``xs`` for each of the ``series``, with a colour and a dash of its own.

    If it is ``clickable``, a click on a name in the legend fades the others; panels that share a
    legend are not clickable. A single curve has no legend.
    """
    names = list(series)
    if len(names) > len(DASHES):
        raise SpecError(
            f"a chart must have at most {len(DASHES)} curves, which can be told apart without "
            f"colour, got {len(names)}; draw several charts"
        )
    tables = (
        records(**{"name": name, field_of(x): xs, field_of(y): ys}) for name, ys in series.items()
    )
    legend = {"symbolSize": 600} if len(names) > 1 else None
    dashes = alt.Scale(domain=names, range=DASHES[: len(names)])
    chart = (
        chart_of(*tables)
        .mark_line(clip=True)
        .encode(
            x=x,
            y=y,
            color=colour("name", names, legend),
            strokeDash=alt.StrokeDash("name:N", sort=names, scale=dashes),
            tooltip=[alt.Tooltip("name:N", title=" "), rounded_tooltip(x), rounded_tooltip(y)],
        )
    )
    if not clickable or legend is None:
        return chart
    selection = alt.selection_point(fields=["name"], bind="legend")
    opacity = alt.condition(selection, alt.value(1), alt.value(0.15))
    return chart.encode(opacity=opacity).add_params(selection)


def colour(field: str, names: Sequence[str], legend: Mapping[str, Any] | None) -> alt.Color:
    """Colours in the order of ``names``, with an untitled legend of these options."""
    shown = None if legend is None else alt.Legend(**legend)
    scale = alt.Scale(domain=list(names))
    return alt.Color(f"{field}:N", title=None, sort=list(names), scale=scale, legend=shown)


def darkness(field: str, title: str, *, symbol: str = "square", **scale: Any) -> alt.Opacity:
    """A heat map's encoding: a larger number is more opaque, so darker on white."""
    legend = alt.Legend(orient="right", direction="vertical", columns=1, symbolType=symbol,
                        symbolSize=200, offset=12)  # fmt: skip
    return alt.Opacity(f"{field}:Q", title=title, legend=legend, scale=alt.Scale(**scale))


def field_of(channel: alt.X | alt.Y) -> str:
    """The field of the records that a coordinate shows."""
    described: Any = channel.to_dict()  # pyright: ignore[reportUnknownVariableType]
    return described["field"]


def rounded_tooltip(channel: alt.X | alt.Y) -> alt.Tooltip:
    """A tooltip with one of a mark's coordinates."""
    return alt.Tooltip(f"{field_of(channel)}:Q", format=".4~g")


def pair_axis(field: str = "pair", **scale: Any) -> alt.X:
    """The pairs of a head from left to right."""
    axis = alt.Axis(tickMinStep=1, grid=False)
    return alt.X(
        f"{field}:Q", title="pair (index)", scale=alt.Scale(nice=False, **scale), axis=axis
    )


def token_axis(field: str, *, log: bool = True) -> alt.X:
    """Tokens from left to right."""
    scale = alt.Scale(type="log" if log else "linear", nice=False)
    axis = alt.Axis(format="~s", tickCount=6, grid=False)
    return alt.X(f"{field}:Q", title=f"{field} (tokens)", scale=scale, axis=axis)


def powers(base: int, low: float, high: float) -> list[float]:
    """The powers from just below ``low`` to just above ``high``, for an axis's labels."""
    first, last = math.floor(math.log(low, base)), math.ceil(math.log(high, base))
    return [float(base) ** power for power in range(first, last + 1)]


def horizontal_line(value: float) -> alt.Chart:
    """A thin line across the chart."""
    return chart_of([{"level": value}]).mark_rule(style="reference").encode(y="level:Q")


def layer(*charts: alt.Chart | alt.LayerChart | None) -> alt.LayerChart:
    """Charts drawn over each other, the first at the bottom."""
    return alt.LayerChart(layer=[chart for chart in charts if chart is not None])


def trained_mark(context: int | None, field: str) -> alt.LayerChart | None:
    """A dashed line with a label where the trained context ends."""
    if context is None:
        return None
    base = chart_of([{field: context}]).encode(x=f"{field}:Q")
    label = base.mark_text(align="center", baseline="bottom").encode(
        y=alt.value(-4), text=alt.value("trained")
    )
    return layer(base.mark_rule(style="reference", strokeDash=[4, 4]), label)
