"""Common elements of charts: colours for paper and screens, records, curves, reference lines."""

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

# Colours on light screens and paper, and on dark screens. Every series has a contrast of at least
# 3 to 1 with its background (WCAG 2.2), and any two series differ in their dashes by a factor of at
# least 1.5, so that they are distinguishable in grey.
_COLOURS = {
    "ink": ("#1c2024", "#e8eaed"),
    "rule": ("#8a939e", "#7b8490"),
    "grid": ("#e3e6ea", "#2b3038"),
    "series-0": ("#0072b2", "#5ab0ee"),
    "series-1": ("#c44e00", "#ff9154"),
    "series-2": ("#00805f", "#3fcf9f"),
    "series-3": ("#a84a83", "#e795c4"),
    "series-4": ("#9a6a00", "#edb83d"),
    "series-5": ("#7a3fb0", "#c39bf0"),
    "series-6": ("#2f86b8", "#8ed1f2"),
    "series-7": ("#5a6370", "#b3bac4"),
}
LIGHT, DARK = ({name: both[i] for name, both in _COLOURS.items()} for i in (0, 1))
DASHES = [
    [1, 0], [10, 4], [12, 4, 2, 4], [2, 3], [24, 6], [12, 4, 2, 4, 2, 4], [5, 3], [24, 4, 4, 4],
]  # fmt: skip


def _config(
    colours: Mapping[str, str], background: str, font: str, legend_columns: int
) -> dict[str, Any]:
    """Vega-Lite's configuration of a chart in these colours."""
    ink, rule, grid, *series = colours.values()
    words = {"labelColor": ink, "titleColor": ink, "labelFontSize": 12, "titleFontSize": 12}
    words |= {"titleFontWeight": "normal"}
    axis = {"domainColor": rule, "tickColor": rule, "gridColor": grid}
    legend = {"orient": "top", "direction": "horizontal", "columns": legend_columns, "offset": 24}
    return {
        "background": background,
        "font": font,
        "range": {"category": series},
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
PAPER = _config(LIGHT, "white", "sans-serif", 3)
#: Colours that `stylesheet` defines, for pages.
_VARIABLES = {name: f"var(--{name})" for name in _COLOURS}
SCREEN = _config(_VARIABLES, "transparent", "system-ui, sans-serif", 2)


def stylesheet() -> str:
    """CSS that defines the colours of `SCREEN`, for light screens and print, and for dark ones."""
    light, dark = (
        "; ".join(f"--{name}: {colour}" for name, colour in colours.items())
        for colours in (LIGHT, DARK)
    )
    dark_screen = "@media screen and (prefers-color-scheme: dark)"
    return f":root {{ {light} }}\n{dark_screen} {{ :root {{ {dark} }} }}"


def picture_stylesheet() -> str:
    """CSS that replaces the colours of `PAPER` in a picture on dark screens.

    A renderer that does not support stylesheets or their variables draws the picture unchanged.
    """
    rules = "\n".join(
        f'[{attribute}="{light}"] {{ {attribute}: {dark} }}'
        for light, dark in _COLOURS.values()
        for attribute in ("fill", "stroke")
    )
    return f"@media screen and (prefers-color-scheme: dark) {{\n{rules}\n}}"


def screen_spec(chart: AnyChart, **changes: Any) -> dict[str, Any]:
    """The Vega-Lite description of ``chart`` in the colours of `SCREEN`, with top-level changes."""
    # validation would take a third of a page's time; tests/charts validates every chart
    return chart.to_dict(validate=False) | {"config": SCREEN} | changes


def style_for_paper(chart: AChart, description: str) -> AChart:
    """The chart in the colours of `PAPER`, with a description for screen readers."""
    return chart.configure(**PAPER).properties(description=description)


def records(**columns: Any) -> list[Record]:
    """Records from columns of equal length; a single string or number is repeated in every record.

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


def check_by_name(argument: str, values: Any, kind: type) -> None:
    """Refuse anything but a dict from names of curves to values of ``kind``."""
    invalid = [values]
    if isinstance(values, Mapping) and values:
        chart_values = cast(Mapping[str, object], values).values()
        invalid = [value for value in chart_values if not isinstance(value, kind)]
    if invalid:
        raise SpecError(
            f"{argument} must be a dict from the name of a curve to its {kind.__name__}, such as "
            f"{{'mine': {kind.__name__.lower()}}}, got {short_repr(invalid[0])}"
            f"{rope_hint(invalid[0])}"
        )


def check_list(argument: str, values: object) -> None:
    """Refuse anything but a non-empty list, range or one-dimensional array."""
    if np.ndim(cast(Any, values)) != 1 or not len(cast(Any, values)):
        raise SpecError(
            f"{argument} must be a list of numbers, such as range(1, 257), got {short_repr(values)}"
        )


def chart_of(*tables: Iterable[Record]) -> alt.Chart:
    """A chart of the records of all tables, without a mark so far."""
    return alt.Chart(alt.Data(values=list(chain.from_iterable(tables))))


def curves(
    xs: ArrayLike, series: Mapping[str, ArrayLike], x: alt.X, y: alt.Y, *, clickable: bool = True
) -> alt.Chart:
    """A line over ``xs`` for each of the ``series``, each with its own colour and dash.

    If it is ``clickable``, a click on a name in the legend fades the others; panels that share a
    legend are not clickable. A single curve has no legend.
    """
    names = list(series)
    if len(names) > len(DASHES):
        raise SpecError(
            f"a chart must have at most {len(DASHES)} curves, which can be told apart without "
            f"colour, got {len(names)}; draw several charts"
        )
    across, up = (cast(Any, channel).to_dict()["field"] for channel in (x, y))
    tables = (records(**{"name": name, across: xs, up: ys}) for name, ys in series.items())
    legend = {"symbolSize": 600} if len(names) > 1 else None
    chart = (
        chart_of(*tables)
        .mark_line(clip=True)
        .encode(
            x=x,
            y=y,
            color=colour("name", names, legend),
            strokeDash=alt.StrokeDash("name:N")
            .sort(names)
            .scale(domain=names, range=DASHES[: len(names)]),
            tooltip=[
                alt.Tooltip("name:N", title=" "),
                *(alt.Tooltip(f"{field}:Q", format=".4~g") for field in (across, up)),
            ],
        )
    )
    if not clickable or legend is None:
        return chart
    selection = alt.selection_point(fields=["name"], bind="legend")
    opacity = alt.condition(selection, alt.value(1), alt.value(0.15))
    return chart.encode(opacity=opacity).add_params(selection)


def colour(field: str, names: Sequence[str], legend: Mapping[str, Any] | None) -> alt.Color:
    """Colours in the order of ``names``, with an untitled legend of these options."""
    legend_object = None if legend is None else alt.Legend(**legend)
    scale = alt.Scale(domain=list(names))
    return alt.Color(f"{field}:N", title=None, sort=list(names), scale=scale, legend=legend_object)


def darkness(field: str, title: str, *, symbol: str = "square", **scale: Any) -> alt.Opacity:
    """An encoding that draws larger numbers more opaque, so darker on white."""
    legend = alt.Legend(orient="right", direction="vertical", columns=1, symbolType=symbol,
                        symbolSize=200, offset=12)  # fmt: skip
    return alt.Opacity(f"{field}:Q", title=title, legend=legend, scale=alt.Scale(**scale))


def heat_map(
    cells: alt.Chart, field: str, title: str, *labels: str, digits: str = ".3~g", **scale: Any
) -> alt.Chart:
    """Rectangles at the coordinates of ``cells``, darker for a larger number."""
    return cells.mark_rect().encode(
        opacity=darkness(field, title, range=[0, 1], **scale),
        tooltip=[*labels, alt.Tooltip(f"{field}:Q", format=digits)],
    )


def index_ticks(count: int, most: int = 8) -> list[int]:
    """About ``most`` of the whole numbers below ``count``, for the labels of an axis."""
    return list(range(0, count, max(1, count // most)))


def pair_axis(field: str = "pair", **scale: Any) -> alt.X:
    """A horizontal axis for the pairs of a head."""
    axis = alt.Axis(tickMinStep=1, grid=False)
    return alt.X(
        f"{field}:Q", title="pair (index)", scale=alt.Scale(nice=False, **scale), axis=axis
    )


def token_axis(field: str, *, log: bool = True) -> alt.X:
    """A horizontal axis for tokens."""
    scale = alt.Scale(type="log" if log else "linear", nice=False)
    axis = alt.Axis(format="~s", tickCount=6, grid=False)
    return alt.X(f"{field}:Q", title=f"{field} (tokens)", scale=scale, axis=axis)


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
