"""Decay, drawn as the papers draw it: bounds, cosines and sums, and a head that it turns away."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import altair as alt
import numpy as np

from phasor import Rope
from phasor.numpy import rotate, score
from phasor.papers import abel_bound, cosine, decay, semantic_head
from phasor.scaling import Proportional

from .pictures import band, lines, mean_and_spread, table
from .study import Row, Study

BASES = {"base 10 000": 10_000.0, "base 500 000": 500_000.0}
LENGTHS = (1024, 4096, 16_384, 40_000, 65_536)
OFFSETS = (1, 7, 100, 4000)


def settings(quick: bool) -> Row:
    """Widths of the papers: 128, and 64 for linear attention."""
    widths = {"head_dim": 128, "linear_head_dim": 64}
    return widths | {"draws": 20 if quick else 200, "farthest": 100_000}


def run(study: Study) -> None:
    """Every curve once; random vectors for every seed, as often as the settings say."""
    for name, base in BASES.items():
        _curves(study, name, base)
    width, slow = study.settings["head_dim"], Proportional(fraction=0.75)
    head = Rope(head_dim=width, pairing="half", scaling=slow)
    study.measure("p = 0.75/semantic", lambda: _semantic(head))


def _curves(study: Study, name: str, base: float) -> None:
    made = study.settings
    far, lengths = _spaced(1, made["farthest"], 120), _spaced(1, LENGTHS[-1], 60)
    near = np.arange(1, made["farthest"])
    rope, narrow = (
        Rope(head_dim=made[width], pairing="half", base=base)
        for width in ("head_dim", "linear_head_dim")
    )
    curves: dict[str, Callable[[], Any]] = {
        "bound": lambda: list(decay(rope, np.arange(257))),
        "aligned": lambda: list(cosine(rope, far, "aligned")),
        "opposite": lambda: list(cosine(rope, far, "opposite")),
        "negative from": lambda: 1 + int(np.argmax(cosine(rope, near, "aligned") < 0)),
        "linear": lambda: [cosine(narrow, np.arange(x), "aligned").mean() for x in lengths],
        "linear at": lambda: [cosine(narrow, np.arange(x), "aligned").mean() for x in LENGTHS],
        "semantic": lambda: _semantic(rope),
    }
    for what, curve in curves.items():
        study.measure(f"{name}/{what}", curve)
    draws: dict[str, Callable[[int], Any]] = {
        "independent": lambda seed: _independent(rope, far, made["draws"], seed),
        "share of the bound": lambda seed: _share_of_bound(rope, made["draws"], seed),
        "nearest to the offset": lambda seed: _farthest_miss(rope, seed),
    }
    for what, drawn in draws.items():
        study.each_seed(f"{name}/{what}", drawn)


def _spaced(first: int, last: int, count: int) -> list[int]:
    return sorted({round(x) for x in np.geomspace(first, last, count)})


def _independent(rope: Rope, distances: list[int], draws: int, seed: int) -> Row:
    """Mean and deviation over Gaussian queries and keys, at every distance."""
    seeds = range(seed * draws, (seed + 1) * draws)
    found = np.stack([cosine(rope, distances, "independent", seed=number) for number in seeds])
    return {"mean": list(found.mean(0)), "deviation": list(found.std(0))}


def _semantic(rope: Rope) -> list[float]:
    """The weight on the first token of each length, which is the one that a head looks for.

    The sharpness is what gives it 0.99 of the longest where the slowest pair stands still.
    """
    alpha = np.log(99 * LENGTHS[-1]) * rope.head_dim**0.5
    head = semantic_head(rope, 1, alpha=float(alpha), width=2)
    distances = np.array(LENGTHS) - 1
    scores = score(head.query[:, 0], head.key[:, 1], distances, rope) / rope.head_dim**0.5
    return list(1 / (1 + distances * np.exp(-scores)))


def _share_of_bound(rope: Rope, draws: int, seed: int) -> float:
    """The largest ratio of a score of Gaussian vectors to the bound of RoFormer's eq. 37."""
    q, k = np.random.default_rng(seed).standard_normal((2, draws, rope.head_dim))
    distances = np.arange(1, 4096, 13)[:, None]
    return float((np.abs(score(q, k, distances, rope)) / abel_bound(q, k, distances, rope)).max())


def _farthest_miss(rope: Rope, seed: int) -> int:
    """How far from the wanted offset the best distance is, for keys that are rotated queries."""
    query = np.random.default_rng(seed).standard_normal(rope.head_dim)
    distances, worst = np.arange(-8192, 8193), 0
    for offset in OFFSETS:
        key = rotate(query, offset, rope)
        best = int(distances[np.argmax(score(query, key, distances, rope))])
        worst = max(worst, abs(best + offset))
    return worst


def tables(study: Study) -> str:
    """What can be read off the curves, and sums of weights by length."""
    made, offsets = study.settings, ", ".join(map(str, OFFSETS))

    def cell(name: str, what: str) -> Any:
        return study.measured[f"{name}/{what}"]

    def independent(name: str) -> str:
        means = [float(np.mean(one)) for one in study.over_seeds(f"{name}/independent", "mean")]
        return mean_and_spread(means, 4)

    rows: dict[str, Callable[[str], object]] = {
        title: lambda name, at=at: f"{cell(name, 'bound')[at]:.2f}"
        for title, at in (("RoFormer's curve at distance 0", 0), ("at 8", 8), ("at 256", 256))
    }
    rows |= {
        "steps of 256 on which it rises": lambda name: sum(np.diff(cell(name, "bound")) > 0),
        f"largest share of it that a score reaches, {made['draws']} draws": lambda name: (
            mean_and_spread(study.over_seeds(f"{name}/share of the bound"))
        ),
        "first distance at which an equal key scores below 0": lambda name: cell(
            name, "negative from"
        ),
        f"cosine of independent vectors, over all distances and {made['draws']} draws": independent,
        f"best distance less the one asked for ({offsets}), at most": lambda name: max(
            study.over_seeds(f"{name}/nearest to the offset")
        ),
    }
    sums = ([name, *(f"{one:.4f}" for one in cell(name, "linear at"))] for name in BASES)
    semantic = (
        [name, *(f"{weight:.2f}" for weight in cell(name, "semantic"))]
        for name in (*BASES, "p = 0.75")
    )
    return "\n\n".join(
        (
            table(["", *BASES], ([title, *map(row, BASES)] for title, row in rows.items())),
            table(["sum of linear weights over tokens", *LENGTHS], sums),
            table(["weight on the token looked for, of", *LENGTHS], semantic),
        )
    )


def chart(study: Study) -> alt.TopLevelMixin:
    """The bound, the cosines and the sums of linear weights, both bases in each."""
    far, lengths = _spaced(1, study.settings["farthest"], 120), _spaced(1, LENGTHS[-1], 60)
    first = next(iter(BASES))
    mean, deviation = (
        np.mean(study.over_seeds(f"{first}/independent", what), axis=0)
        for what in ("mean", "deviation")
    )
    independent = band([mean - deviation, mean, mean + deviation], far, "independent, 10 000")
    opposite = band([study.measured[f"{first}/opposite"]], far, "opposite, 10 000")

    def both(what: str, xs: Sequence[int]) -> list[Row]:
        return [row for name in BASES for row in band([study.measured[f"{name}/{what}"]], xs, name)]

    def draw(rows: list[Row], xs: str, ys: str, title: str, **looks: Any) -> alt.LayerChart:
        named = tuple(dict.fromkeys(row["series"] for row in rows))
        scale = alt.Scale(type="linear" if "|S" in ys else "log")
        x = alt.X("x:Q", title=xs, scale=scale, axis=alt.Axis(format="~s", tickCount=5))
        y = alt.Y("mean:Q", title=ys, scale=alt.Scale(zero=False))
        return lines(rows, named, x=x, y=y, title=title, **looks)

    bound = draw(both("bound", range(257)), "distance", "mean |S(r)|", "RoFormer's figure 2")
    sums = draw(both("linear", lengths), "keys", "sum of weights", "linear attention, eq. 19")
    title = "a key that is the query, its opposite, or independent of it"
    rows = [*both("aligned", far), *opposite, *independent]
    cosines = draw(rows, "distance", "cosine", title, width=670)
    return alt.vconcat(alt.hconcat(bound, sums), cosines).resolve_scale(
        color="independent", strokeDash="independent"
    )
