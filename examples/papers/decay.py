"""Decay, drawn as the papers draw it: bounds, cosines and sums, and a head that it turns away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import altair as alt
import numpy as np

from phasor import Rope
from phasor.numpy import rotate, score
from phasor.papers import abel_bound, cosine, decay, semantic_head
from phasor.scaling import Proportional

from .pictures import lines, mean_and_spread, table
from .study import Row, Study

BASES = {"base 10 000": 10_000.0, "base 500 000": 500_000.0}
LENGTHS = (1024, 4096, 16_384, 40_000, 65_536)
OFFSETS = (1, 7, 100, 4000)


def settings(quick: bool) -> Row:
    """Widths of the papers: 128, and 64 for linear attention."""
    return {
        "head_dim": 128,
        "linear_head_dim": 64,
        "draws": 20 if quick else 200,
        "farthest": 100_000,
    }


def run(study: Study) -> None:
    """Every curve once; random vectors for every seed, as often as the settings say."""
    made = study.settings
    far = _spaced(1, made["farthest"], 120)
    lengths = _spaced(1, LENGTHS[-1], 60)
    for name, base in BASES.items():
        rope = Rope(head_dim=made["head_dim"], pairing="half", base=base)
        narrow = Rope(head_dim=made["linear_head_dim"], pairing="half", base=base)
        curves: dict[str, Callable[[Rope, Rope], Any]] = {
            "bound": lambda r, _: list(decay(r, np.arange(257))),
            "aligned": lambda r, _: list(cosine(r, far, "aligned")),
            "opposite": lambda r, _: list(cosine(r, far, "opposite")),
            "negative from": lambda r, _: _negative_from(r),
            "linear": lambda _, n: [cosine(n, np.arange(x), "aligned").mean() for x in lengths],
            "linear at": lambda _, n: [cosine(n, np.arange(x), "aligned").mean() for x in LENGTHS],
            "semantic": lambda r, _: _semantic(r),
        }
        for what, curve in curves.items():
            study.measure(f"{name}/{what}", lambda c=curve, r=rope, n=narrow: c(r, n))
        draws: dict[str, Callable[[Rope, int], Any]] = {
            "independent": lambda r, seed: _independent(r, far, made["draws"], seed),
            "share of the bound": lambda r, seed: _share_of_bound(r, made["draws"], seed),
            "nearest to the offset": _farthest_miss,
        }
        for what, drawn in draws.items():
            study.each_seed(f"{name}/{what}", lambda seed, d=drawn, r=rope: d(r, seed))
    slow = Rope(head_dim=made["head_dim"], pairing="half", scaling=Proportional(fraction=0.75))
    study.measure("p = 0.75/semantic", lambda: _semantic(slow))


def _spaced(first: int, last: int, count: int) -> list[int]:
    return sorted({round(x) for x in np.geomspace(first, last, count)})


def _independent(rope: Rope, distances: list[int], draws: int, seed: int) -> Row:
    """Mean and deviation over Gaussian queries and keys, at every distance."""
    drawn = (
        cosine(rope, distances, "independent", seed=seed * draws + number)
        for number in range(draws)
    )
    found = np.stack(list(drawn))
    return {"mean": list(found.mean(0)), "deviation": list(found.std(0))}


def _negative_from(rope: Rope) -> int:
    """The first distance at which a key equal to the query scores below 0."""
    curve = cosine(rope, np.arange(1, 100_000), "aligned")
    return int(np.argmax(curve < 0)) + 1


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
        "RoFormer's curve at distance 0": lambda name: f"{cell(name, 'bound')[0]:.2f}",
        "at 8": lambda name: f"{cell(name, 'bound')[8]:.2f}",
        "at 256": lambda name: f"{cell(name, 'bound')[256]:.2f}",
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
    made = study.settings
    far, lengths = _spaced(1, made["farthest"], 120), _spaced(1, LENGTHS[-1], 60)
    found = {
        name: {what: study.measured[f"{name}/{what}"] for what in ("bound", "aligned", "linear")}
        for name in BASES
    }
    first = next(iter(BASES))
    independent = [
        np.mean(study.over_seeds(f"{first}/independent", what), axis=0).tolist()
        for what in ("mean", "deviation")
    ]

    def curve(name: str, xs: Any, ys: list[float], spread: list[float] | None = None) -> list[Row]:
        widths = spread or [0.0] * len(ys)
        return [
            {"series": name, "x": x, "mean": y, "low": y - w, "high": y + w}
            for x, y, w in zip(xs, ys, widths, strict=True)
        ]

    log, any_scale = alt.Scale(type="log"), alt.Scale(zero=False)
    tokens = alt.X("x:Q", title="distance", scale=log, axis=alt.Axis(format="~s", tickCount=5))
    bound = lines(
        [row for name, m in found.items() for row in curve(name, range(257), m["bound"])],
        tuple(BASES),
        x=alt.X("x:Q", title="distance"),
        y=alt.Y("mean:Q", title="mean |S(r)|", scale=any_scale),
        title="RoFormer's figure 2",
    )
    cosines = lines(
        [row for name, m in found.items() for row in curve(name, far, m["aligned"])]
        + curve("opposite, 10 000", far, study.measured[f"{first}/opposite"])
        + curve("independent, 10 000", far, *independent),
        (*BASES, "opposite, 10 000", "independent, 10 000"),
        x=tokens,
        y=alt.Y("mean:Q", title="cosine", scale=any_scale),
        title="a key that is the query, its opposite, or independent of it",
        width=670,
    )
    sums = lines(
        [row for name, m in found.items() for row in curve(name, lengths, m["linear"])],
        tuple(BASES),
        x=alt.X("x:Q", title="keys", scale=log, axis=alt.Axis(format="~s", tickCount=5)),
        y=alt.Y("mean:Q", title="expected sum of weights", scale=any_scale),
        title="linear attention, eq. 19",
    )
    return alt.vconcat(alt.hconcat(bound, sums), cosines).resolve_scale(
        color="independent", strokeDash="independent"
    )
