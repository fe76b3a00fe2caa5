"""Charts of turning pairs, of scaled frequencies, and of scores and errors against distance."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import numpy as np
from numpy.typing import ArrayLike

from phasor._checks import short_repr, whole
from phasor.angles import cos_sin, wavelengths
from phasor.charts.style import (
    chart_of,
    check_by_name,
    check_list,
    curves,
    darkness,
    heat_map,
    horizontal_line,
    index_ticks,
    layer,
    pair_axis,
    records,
    style_for_paper,
    token_axis,
    trained_mark,
)
from phasor.errors import SpecError
from phasor.layers import check_rope
from phasor.numpy import every_axis_of
from phasor.papers import KINDS, RECIPES, Kind, Recipe, angle_errors, cosine, decay
from phasor.positions import span
from phasor.rope import Rope

_KIND_TITLES: dict[Kind, str] = {
    "aligned": "aligned: q = k = (1, 1, …)",
    "opposite": "opposite: q = (1, 1, …) = −k",
    "random": "random: q = k, one Gaussian draw",
    "independent": "independent: q and k, one Gaussian draw each",
}
#: Names of recipes in a legend, where they differ.
_RECIPE_NAMES: dict[Recipe, str] = {"float32 rows": "phasor, float32"}


def rotation_chart(rope: Rope, *, pairs: Sequence[int], tokens: int) -> alt.ConcatChart:
    """The vector (1, 0) in a pair after its rotation, token by token.

    A pair is a plane, and position ``p`` turns its vector by ``p * inv_freq[k]`` (RoFormer
    2104.09864, eq. 13-15): the first pairs complete a turn every few tokens, the last hardly move.
    The points are `phasor.angles.cos_sin`.

    Args:
        rope: The rope; with several axes, tokens have the same position on every axis.
        pairs: The pairs to draw, one panel each, three in a row.
        tokens: Number of positions, from 0 (faint) to ``tokens - 1`` (strong).

    >>> chart = rotation_chart(Rope(head_dim=128, pairing="half"), pairs=[0, 16], tokens=16)
    >>> chart.concat[1].title
    ['pair 16', '62.83 tokens per turn']
    """
    check_rope("rope", rope)
    check_list("pairs", pairs)
    indices = [whole("each pair", pair, least=0, most=rope.num_pairs - 1) for pair in pairs]
    positions = span(whole("tokens", tokens, least=2))
    cos, sin = cos_sin(every_axis_of(rope, positions), rope)
    lengths = wavelengths(rope)

    def axis(channel: Any, field: str, title: str) -> Any:
        coordinate = channel(f"{field}:Q").title(title).scale(domain=[-1.15, 1.15])
        return coordinate.axis(values=[-1, 0, 1], format="d")

    opacity = darkness("position", "position (tokens)", symbol="circle", range=[0.25, 1])
    x, y = "first coordinate", "second coordinate"
    panels: list[alt.LayerChart] = []
    for pair in indices:
        points = records(position=positions, start=0, first=cos[:, pair], second=sin[:, pair])
        chart = chart_of(points).encode(opacity=opacity)
        vectors = chart.mark_rule(style="first-series").encode(
            x=axis(alt.X, "start", x), y=axis(alt.Y, "start", y), x2="first:Q", y2="second:Q"
        )
        tips = chart.mark_point(filled=True, size=35).encode(
            x=axis(alt.X, "first", x), y=axis(alt.Y, "second", y), tooltip=["position:Q"]
        )
        turns = np.isfinite(lengths[pair])
        speed = f"{lengths[pair]:.4g} tokens per turn" if turns else "does not turn"
        title = [f"pair {pair}", speed]
        panels.append(layer(vectors, tips).properties(title=title, width=150, height=150))
    return style_for_paper(
        alt.concat(*panels, columns=3),
        "The vector in a pair at successive positions, one panel per pair.",
    )


def scaling_chart(rope: Rope, scaled: Mapping[str, Rope]) -> alt.Chart:
    """Every pair's frequency under several scalings, divided by its unscaled frequency.

    Position interpolation is a horizontal line at ``1 / factor`` (Chen et al. 2306.15595); the
    other laws fall from 1 for fast pairs to some smaller value for slow ones. The numbers are
    ``scaled[name].inv_freq / rope.inv_freq``.

    Args:
        rope: The unscaled rope; a pair that it does not turn has no point.
        scaled: Up to eight Ropes, by the name of their curve.

    >>> from dataclasses import replace
    >>> from phasor.scaling import Linear
    >>> rope = Rope(head_dim=4, pairing="half")
    >>> chart = scaling_chart(rope, {"linear": replace(rope, scaling=Linear(factor=8.0))})
    >>> [row["frequency"] for row in chart.data.values]
    [0.125, 0.125]
    """
    check_rope("rope", rope)
    check_by_name("scaled", scaled, Rope)
    plain_inv_freq = np.where(rope.inv_freq > 0, rope.inv_freq, np.nan)
    for name, scaled_rope in scaled.items():
        if scaled_rope.num_pairs != rope.num_pairs:
            raise SpecError(
                f"scaled must hold Ropes of as many pairs as rope ({rope.num_pairs}), got "
                f"{scaled_rope.num_pairs} in {name!r}; draw it separately"
            )
    ratios = {name: scaled_rope.inv_freq / plain_inv_freq for name, scaled_rope in scaled.items()}
    y = alt.Y("frequency:Q", title="frequency / unscaled frequency", scale=alt.Scale(zero=True))
    chart = curves(range(rope.num_pairs), ratios, pair_axis(), y).properties(width=480, height=300)
    return style_for_paper(
        chart, "Frequency of each pair under each law, divided by its unscaled frequency."
    )


def decay_chart(
    ropes: Mapping[str, Rope],
    distances: ArrayLike,
    *,
    window: tuple[float, float] | None = None,
    context: int | None = None,
    log: bool = False,
) -> alt.ConcatChart | alt.LayerChart:
    """RoFormer's decay curve in full, and in a second panel cut off as in the printed figures.

    The mean length of the partial sums of ``exp(i r inv_freq[k])``, `phasor.papers.decay` (Su
    et al. 2104.09864, section 3.4.3). Their figure 2 is width 128, base 10000, distances 0 to
    256, and shows 6 to 22 of a curve that begins at 32.5.

    Args:
        ropes: Up to eight Ropes, by the name of their curve.
        distances: Integers or floats, ascending; ``[n]``, along every axis of the Ropes.
        window: The lowest and highest value shown in a second panel; None for no second panel.
        context: Training context, marked by a line.
        log: Use a logarithmic axis for distances, which must then be above 0.

    >>> ropes = {"base 10 000": Rope(head_dim=128, pairing="half")}
    >>> chart = decay_chart(ropes, range(257), window=(6, 22))
    >>> chart.concat[1].title
    'cut to 6 … 22'
    """
    check_by_name("ropes", ropes, Rope)
    check_list("distances", distances)
    series = {name: decay(rope, every_axis_of(rope, distances)) for name, rope in ropes.items()}

    def panel(**scale: Any) -> alt.LayerChart:
        y = alt.Y("decay:Q", title="mean length of partial sums", scale=alt.Scale(**scale))
        x = token_axis("distance", log=log)
        lines = curves(distances, series, x, y, clickable=window is None)
        return layer(trained_mark(context, "distance"), lines).properties(width=380, height=260)

    description = "RoFormer's decay curve, the mean length of partial sums, against distance."
    if window is None:
        return style_for_paper(panel(zero=True), description)
    low, high = window
    full_panel = panel(zero=True).properties(title="whole")
    window_panel = panel(domain=[low, high]).properties(title=f"cut to {low:g} … {high:g}")
    return style_for_paper(alt.concat(full_panel, window_panel), description)


def cosine_chart(
    ropes: Mapping[str, Rope],
    distances: ArrayLike,
    *,
    kinds: Sequence[Kind] = KINDS,
    seed: int | None = None,
    context: int | None = None,
    menu: str | None = None,
) -> alt.ConcatChart | alt.LayerChart:
    """Cosine between a rotated query and a rotated key by distance, one panel per kind.

    `phasor.papers.cosine`: it falls for aligned vectors, rises for opposite ones, and stays within
    a few ``head_dim ** -0.5`` of 0 for independent ones at every distance, which is the grey band
    (Barbero et al. 2410.06205, proposition 3.2 and figure 2).

    Args:
        ropes: Up to eight Ropes, by the name of their curve; those with equal ``head_dim`` get the
            same vectors.
        distances: Integers or floats above 0, ascending; ``[n]``, along every axis of the Ropes.
        kinds: Kinds of vectors, from `phasor.papers.KINDS`.
        seed: Seed of the Gaussian vectors of ``"random"`` and ``"independent"``.
        context: Training context, marked by a line.
        menu: The name of a Rope to show next to the first, with a menu to pick another; only for a
            single kind. None shows all Ropes.

    >>> chart = cosine_chart({"base 10 000": Rope(head_dim=128, pairing="half")}, [1, 10], seed=0)
    >>> chart.concat[0].title
    'aligned: q = k = (1, 1, …)'
    """
    check_by_name("ropes", ropes, Rope)
    check_list("distances", distances)
    check_list("kinds", kinds)
    if menu is not None and len(kinds) > 1:
        raise SpecError(f"kinds must be a single kind with a menu, got {len(kinds)}")

    def panel(kind: Kind) -> alt.LayerChart:
        kind_seed = seed if kind in ("random", "independent") else None
        series = {
            name: cosine(rope, every_axis_of(rope, distances), kind, seed=kind_seed)
            for name, rope in ropes.items()
        }
        y = alt.Y("cosine:Q", title="cosine", axis=alt.Axis(tickCount=5))
        lines = curves(distances, series, token_axis("distance"), y, clickable=len(kinds) == 1)
        if menu is not None:
            first = json.dumps(next(iter(ropes)))
            lines = lines.transform_filter(f"datum.name == law || datum.name == {first}")
            lines = lines.add_params(law_menu(ropes, menu))
        band = None
        if kind == "independent":
            spread = min(rope.head_dim for rope in ropes.values()) ** -0.5
            band = chart_of([{"low": -spread, "high": spread}]).mark_rect(style="shade")
            band = band.encode(y=alt.Y("low:Q", title="cosine"), y2="high:Q")
        marked = layer(band, horizontal_line(0), trained_mark(context, "distance"), lines)
        return marked.properties(width=380, height=220)

    description = "Cosine between a rotated query and a rotated key by distance."
    if len(kinds) == 1:
        return style_for_paper(panel(kinds[0]), description)
    panels = [panel(kind).properties(title=_KIND_TITLES[kind]) for kind in kinds]
    return style_for_paper(alt.concat(*panels, columns=2).resolve_scale(y="shared"), description)


def pairs_chart(ropes: Mapping[str, Rope], distances: Sequence[int]) -> alt.ConcatChart:
    """The cosine of every pair at every distance, one panel per rope.

    If query and key have the same direction in a pair, the pair adds their product times this
    cosine to the score: `phasor.angles.cos_sin` at that distance. Where the cosine is near 1 the
    pair does not distinguish the distance from 0; at larger distances it makes full turns.

    Args:
        ropes: Ropes by the title of their panel. With several axes, a distance is along every axis.
        distances: From 1 on, each larger than the one before, at least two.

    >>> chart = pairs_chart({"base 100": Rope(head_dim=16, pairing="half", base=100.0)}, [1, 2, 4])
    >>> chart.concat[0].title
    'base 100'
    """
    check_by_name("ropes", ropes, Rope)
    check_list("distances", distances)
    each = [whole("each distance", distance, least=1) for distance in distances]
    if len(each) < 2 or each != sorted(set(each)):
        raise SpecError(
            "distances must be two or more increasing numbers, such as [1, 2, 4, 8], "
            f"got {short_repr(distances)}"
        )
    # a cell reaches half way to its neighbours on the logarithmic axis
    middles = np.sqrt(np.array(each[:-1], float) * np.array(each[1:], float))
    edges = [each[0] ** 2 / middles[0], *middles, each[-1] ** 2 / middles[-1]]

    def panel(name: str, rope: Rope) -> alt.Chart:
        cos, _ = cos_sin(every_axis_of(rope, each), rope)
        tables = (
            records(pair=pair, distance=each, start=edges[:-1], end=edges[1:], cosine=cos[:, pair])
            for pair in range(rope.num_pairs)
        )
        x = token_axis("start").title("distance (tokens)")
        y = alt.Y("pair:O").title("pair (index)").axis(values=index_ticks(rope.num_pairs))
        cells = chart_of(*tables).encode(x=x, x2="end:Q", y=y)
        labels = "pair:O", "distance:Q"
        cells = heat_map(cells, "cosine", "cosine", *labels, digits=".3~f", domain=[-1, 1])
        return cells.properties(title=name, width=240, height=220)

    panels = [panel(name, rope) for name, rope in ropes.items()]
    description = "Cosine of the angle of each pair at each distance, one panel per rope."
    return style_for_paper(alt.concat(*panels, columns=3), description)


def law_menu(laws: Mapping[str, Any], first: str) -> alt.Parameter:
    """A menu; expressions in a chart refer to the choice as ``law``."""
    menu = alt.binding_select(options=list(laws), name="Law ")
    return alt.param(name="law", value=first, bind=menu)


def precision_chart(
    rope: Rope, *, bits: int = 40, draws: int = 32, context: int | None = None
) -> alt.LayerChart:
    """Largest error of cos and sin by position, for each recipe of `angle_errors`.

    Args:
        rope: The rope; with several axes, a position is along every axis, as in text.
        bits: Positions run up to ``2 ** bits``.
        draws: Random positions drawn in each octave; the curve is their maximum.
        context: Training context, marked by a line.

    >>> chart = precision_chart(Rope(head_dim=128, pairing="half"), bits=20, draws=4)
    >>> len(chart.data.values)  # five recipes, twenty octaves
    100
    """
    check_rope("rope", rope)
    bits, draws = whole("bits", bits, least=1, most=63), whole("draws", draws, least=1)
    generator = np.random.default_rng(0)
    octaves = [generator.integers(2**bit, 2 ** (bit + 1), draws) for bit in range(bits)]
    # an exact result has no logarithm
    errors = {
        _RECIPE_NAMES.get(recipe, recipe): [
            max(float(angle_errors(rope, every_axis_of(rope, octave), recipe).max()), 2.0**-54)
            for octave in octaves
        ]
        for recipe in RECIPES
    }
    y = alt.Y("error:Q").title("largest error of cos and sin").scale(type="log")
    y = y.axis(format=".0e", values=[10.0**power for power in range(-16, 1, 2)])
    lines = curves([2**bit for bit in range(bits)], errors, token_axis("position"), y)
    return style_for_paper(
        layer(trained_mark(context, "position"), lines).properties(width=480, height=300),
        "Largest error of cos and sin by position, for each way to compute them.",
    )
