"""Tables and pictures of the experiments."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from string import ascii_lowercase
from typing import Any

import altair as alt

from phasor.charts import style

from .study import Row, Study

#: Standard errors that a paired difference has to be from 0: with three seeds a chance of 6 %, with
#: nine of 0.4 %.
TOLD_APART = 4


def mean_and_spread(values: Sequence[float], digits: int = 3) -> str:
    """``mean ± standard deviation`` over seeds."""
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.{digits}f} ± {spread:.{digits}f}"


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; the first column is text, the others numbers."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join(map(row, lines))


def row(cells: Iterable[object]) -> str:
    """A row of a Markdown table."""
    return "| " + " | ".join(map(str, cells)) + " |"


def contest(
    header: Sequence[object],
    rows: Mapping[str, tuple[Sequence[object], Sequence[Sequence[float]]]],
    digits: int = 3,
) -> str:
    """A table of contenders in pairs, as they share seeds: each against the first.

    Of every contender ``rows`` has the cells that are no measurement, and columns of seeds. The
    first is told as it is. Of each other a cell has the paired difference from the first: the mean
    and deviation over seeds of its number less that of the first with the same seed. It ends with
    the letters of those in its column that the pairs do not tell apart.
    """
    letters = dict(zip(rows, ascii_lowercase, strict=False))
    first = next(iter(rows), "")

    def cell(name: str, column: int) -> str:
        values = rows[name][1][column]
        alike = [
            letter
            for other, letter in letters.items()
            if other != name and not _parted(_differences(rows[other][1][column], values))
        ]
        if name == first:
            told = mean_and_spread(values, digits)
        else:
            told = signed(_differences(rows[first][1][column], values), digits)
        return f"{told} ≈ {''.join(alike)}" if alike else told

    lines = (
        [f"{letters[name]}: {name}", *cells, *(cell(name, i) for i in range(len(columns)))]
        for name, (cells, columns) in rows.items()
    )
    told = f"{header[0]}; others: paired difference from a" if len(rows) > 1 else header[0]
    return table([str(told).removeprefix("; "), *map(str, header[1:])], lines)


def signed(differences: Sequence[float], digits: int = 3) -> str:
    """`mean_and_spread` of differences, with a sign."""
    told = mean_and_spread(differences, digits)
    return told if told.startswith("-") else f"+{told}"


def _differences(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """Of the second from the first, seed by seed."""
    return [y - x for x, y in zip(first, second, strict=True)]


def _parted(differences: Sequence[float]) -> bool:
    """Whether their mean is `TOLD_APART` standard errors from 0."""
    deviation = statistics.stdev(differences) if len(differences) > 1 else 0.0
    error = deviation / math.sqrt(len(differences))
    return abs(statistics.mean(differences)) > TOLD_APART * error


def by_rate(
    study: Study, header: Sequence[object], names: Iterable[str], *paths: Sequence[str]
) -> str:
    """`contest` of contenders at their best rates, which have a column; lists have one for each."""
    found = {name: [x for path in paths for x in study.columns(name, *path)] for name in names}
    rows = {name: ([study.told_rate(name)], values) for name, values in found.items()}
    told = f"best of {len(study.settings['rates'])} rates"
    return contest([header[0], told, *header[1:]], rows)


def steps_of(made: Row) -> range:
    """The steps after which a curve was measured."""
    return range(made["every"], made["steps"] + 1, made["every"])


def band(curves: Sequence[Sequence[float]], xs: Iterable[float], series: str) -> list[Row]:
    """A row for each ``x``: mean, lowest and highest of the curves of all seeds."""
    return [
        {"series": series, "x": x, "mean": statistics.mean(y), "low": min(y), "high": max(y)}
        for x, *y in zip(xs, *curves, strict=True)
    ]


def bands(study: Study, names: Iterable[str], path: str, xs: Iterable[float]) -> list[Row]:
    """`band` of each contender, under its name."""
    xs = list(xs)
    return [row for c in names for row in band(study.over_seeds(c, path), xs, c)]


def log2(title: str, values: Sequence[int]) -> alt.X:
    """A logarithmic axis with these values, each twice the one before."""
    scale, axis = alt.Scale(type="log", base=2), alt.Axis(values=list(values), format="d")
    return alt.X("x:Q", title=title, scale=scale, axis=axis)


def lines(
    rows: Sequence[Row], series: Sequence[str], *, x: alt.X, y: alt.Y, **looks: Any
) -> alt.LayerChart:
    """Mean curves with bands from the lowest to the highest seed, a colour and dash for each."""
    looks = {"width": 300, "height": 230} | looks
    chart = alt.Chart(alt.Data(values=list(rows)))
    legend = {"symbolSize": 600, "symbolType": "stroke", "symbolOpacity": 1}
    colour = style.colour("series", series, legend)
    scale = alt.Scale(domain=list(series), range=style.DASHES[: len(series)])
    dash = alt.StrokeDash("series:N", title=None, sort=list(series), scale=scale)
    bands = chart.mark_area(opacity=0.25, clip=True).encode(
        x=x, y=alt.Y("low:Q", title=y["title"], scale=y["scale"]), y2="high:Q", color=colour
    )
    means = chart.mark_line(strokeWidth=2, clip=True).encode(
        x=x, y=y, color=colour, strokeDash=dash
    )
    return alt.layer(bands, means).properties(**looks)


def curves(study: Study, names: Iterable[str], told: str, **looks: Any) -> alt.LayerChart:
    """What was measured while each contender was trained, against steps."""
    y = alt.Y("mean:Q", title=told, scale=alt.Scale(zero=False))
    rows = bands(study, names, "curve", steps_of(study.settings))
    return lines(rows, tuple(names), x=alt.X("x:Q", title="steps"), y=y, **looks)


def marked(chart: alt.LayerChart, **places: float) -> alt.LayerChart:
    """The chart with a thin line at an ``x``, a ``y``, or both."""
    channels = {"x": alt.XDatum, "y": alt.YDatum}
    rule = alt.Chart(alt.Data(values=[{}])).mark_rule(style="reference", strokeDash=[4, 4])
    return alt.layer(chart, *(rule.encode(channels[name](at)) for name, at in places.items()))
