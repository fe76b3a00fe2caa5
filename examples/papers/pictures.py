"""Tables and pictures of the experiments."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from string import ascii_lowercase

import altair as alt

from .study import Row, Study


def mean_and_spread(values: Sequence[float], digits: int = 3) -> str:
    """``mean ± standard deviation`` over seeds."""
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.{digits}f} ± {spread:.{digits}f}"


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; the first column is text, the others numbers."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def contest(
    header: Sequence[object],
    rows: Mapping[str, tuple[Sequence[object], Sequence[Sequence[float]]]],
    digits: int = 3,
) -> str:
    """A table of contenders that says which of them the seeds do not tell apart.

    Each has a letter, and a cell ends with the letters of those in its column whose mean is
    nearer to its own than the two spreads are together.

    Args:
        header: The names of the columns.
        rows: Of every contender the cells that are no measurement, and the columns of seeds.
        digits: After the point.
    """
    letters = dict(zip(rows, ascii_lowercase, strict=False)) if len(rows) > 1 else {}

    def cell(name: str, column: int) -> str:
        values = rows[name][1][column]
        alike = [
            letter
            for other, letter in letters.items()
            if other != name and not _parted(values, rows[other][1][column])
        ]
        told = mean_and_spread(values, digits)
        return f"{told} ≈ {''.join(alike)}" if alike else told

    lines = (
        [
            f"{letters[name]}: {name}" if letters else name,
            *cells,
            *(cell(name, i) for i in range(len(columns))),
        ]
        for name, (cells, columns) in rows.items()
    )
    return table(header, lines)


def _parted(first: Sequence[float], second: Sequence[float]) -> bool:
    """Whether the means are further apart than the two spreads are together."""
    spreads = sum(statistics.stdev(x) if len(x) > 1 else 0.0 for x in (first, second))
    return abs(statistics.mean(first) - statistics.mean(second)) > spreads


def by_seeds(
    study: Study, header: Sequence[object], names: Iterable[str], *path: str, digits: int = 3
) -> str:
    """`contest` of contenders, with a column for their rates."""
    rows = {name: ([study.rate(name)], study.columns(name, *path)) for name in names}
    return contest([header[0], "rate", *header[1:]], rows, digits)


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


COLOURS = ["#3b7dd8", "#d9730d", "#2a9d5c", "#9b5fc0", "#d64550", "#1798a6", "#a0693a", "#80858f"]
DASHES = [[1, 0], [7, 3], [2, 2], [9, 3, 2, 3], [4, 2], [12, 3], [1, 3], [6, 2, 1, 2]]


def log2(title: str, values: Sequence[int]) -> alt.X:
    """A logarithmic axis with these values, each twice the one before."""
    scale, axis = alt.Scale(type="log", base=2), alt.Axis(values=list(values), format="d")
    return alt.X("x:Q", title=title, scale=scale, axis=axis)


def lines(
    rows: Sequence[Row],
    series: Sequence[str],
    *,
    x: alt.X,
    y: alt.Y,
    title: str = "",
    width: int = 300,
    height: int = 230,
) -> alt.LayerChart:
    """Mean curves with bands from the lowest to the highest seed, a colour and dash for each."""
    chart = alt.Chart(alt.Data(values=list(rows))).transform_filter(
        alt.FieldOneOfPredicate("series", list(series))
    )
    told: Row = {"title": None, "sort": None, "legend": alt.Legend(columns=max(2, width // 150))}
    colours = alt.Scale(domain=list(series), range=COLOURS)
    colour = alt.Color("series:N", scale=colours, **told)
    dashes = alt.Scale(domain=list(series), range=DASHES)
    dash = alt.StrokeDash("series:N", scale=dashes, **told)
    bands = chart.mark_area(opacity=0.25, clip=True).encode(
        x=x, y=alt.Y("low:Q", title=y["title"], scale=y["scale"]), y2="high:Q", color=colour
    )
    means = chart.mark_line(strokeWidth=2, clip=True).encode(
        x=x, y=y, color=colour, strokeDash=dash
    )
    return alt.layer(bands, means).properties(title=title, width=width, height=height)


def marked(chart: alt.LayerChart, **places: float) -> alt.LayerChart:
    """The chart with a thin line at an ``x``, a ``y``, or both."""
    channels = {"x": alt.XDatum, "y": alt.YDatum}
    rules = (
        alt.Chart(alt.Data(values=[{}]))
        .mark_rule(strokeDash=[3, 3], color="#80858f")
        .encode(channels[name](value))
        for name, value in places.items()
    )
    return alt.layer(chart, *rules)
