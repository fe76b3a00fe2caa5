"""Decay, drawn as the papers draw it: bounds, cosines, pairs and sums. Nothing is trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import altair as alt
import numpy as np

from phasor import Rope
from phasor.angles import cos_sin
from phasor.numpy import rotate, score
from phasor.papers import abel_bound, cosine, decay

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
    """Every curve once; random vectors as often as the settings say."""
    made = study.settings
    far = _spaced(1, made["farthest"], 120)
    for name, base in BASES.items():
        rope = Rope(head_dim=made["head_dim"], pairing="half", base=base)
        study.measure(f"{name}/bound", lambda r=rope: list(decay(r, np.arange(257))))
        study.measure(f"{name}/aligned", lambda r=rope: list(cosine(r, far, "aligned")))
        study.measure(f"{name}/opposite", lambda r=rope: list(cosine(r, far, "opposite")))
        study.measure(f"{name}/independent", lambda r=rope: _independent(r, far, made["draws"]))
        study.measure(f"{name}/pairs", lambda r=rope: _pairs(r))
        study.measure(f"{name}/negative from", lambda r=rope: _negative_from(r))
        study.measure(
            f"{name}/share of the bound", lambda r=rope: _share_of_bound(r, made["draws"])
        )
        study.measure(f"{name}/nearest to the offset", lambda r=rope: _farthest_miss(r))
        narrow = Rope(head_dim=made["linear_head_dim"], pairing="half", base=base)
        lengths = _spaced(1, LENGTHS[-1], 60)
        study.measure(
            f"{name}/linear",
            lambda r=narrow, n=lengths: [cosine(r, np.arange(x), "aligned").mean() for x in n],
        )
        study.measure(
            f"{name}/linear at",
            lambda r=narrow: [cosine(r, np.arange(x), "aligned").mean() for x in LENGTHS],
        )


def _spaced(first: int, last: int, count: int) -> list[int]:
    return sorted({round(x) for x in np.geomspace(first, last, count)})


def _independent(rope: Rope, distances: list[int], draws: int) -> Row:
    """Mean and deviation over Gaussian queries and keys, at every distance."""
    found = np.stack([cosine(rope, distances, "independent", seed=seed) for seed in range(draws)])
    return {"mean": list(found.mean(0)), "deviation": list(found.std(0))}


def _pairs(rope: Rope) -> Row:
    """The cosine that every fourth pair has at distances from 1 to 100 000."""
    distances = _spaced(1, 100_000, 32)
    cos, _ = cos_sin(rope, distances)
    return {"distances": distances, "cos": [list(row) for row in cos[:, ::4].T]}


def _negative_from(rope: Rope) -> int:
    """The first distance at which a key equal to the query scores below 0."""
    curve = cosine(rope, np.arange(1, 100_000), "aligned")
    return int(np.argmax(curve < 0)) + 1


def _share_of_bound(rope: Rope, draws: int) -> float:
    """The largest ratio of a score of Gaussian vectors to the bound of RoFormer's eq. 37."""
    q, k = np.random.default_rng(0).standard_normal((2, draws, rope.head_dim))
    distances = np.arange(1, 4096, 13)[:, None]
    return float((np.abs(score(q, k, distances, rope)) / abel_bound(q, k, distances, rope)).max())


def _farthest_miss(rope: Rope) -> int:
    """How far from the wanted offset the best distance is, for keys that are rotated queries."""
    query = np.random.default_rng(0).standard_normal(rope.head_dim)
    distances, worst = np.arange(-8192, 8193), 0
    for offset in OFFSETS:
        key = rotate(query, offset, rope)
        best = int(distances[np.argmax(score(query, key, distances, rope))])
        worst = max(worst, abs(best + offset))
    return worst


def tables(study: Study) -> str:
    """What can be read off the curves, and sums of weights by length."""
    found = {name: _of(study, name) for name in BASES}
    offsets = ", ".join(map(str, OFFSETS))
    rows: dict[str, Callable[[Row], object]] = {
        "RoFormer's curve at distance 0": lambda m: f"{m['bound'][0]:.2f}",
        "at 8": lambda m: f"{m['bound'][8]:.2f}",
        "at 256": lambda m: f"{m['bound'][256]:.2f}",
        "steps of 256 on which it rises": lambda m: sum(np.diff(m["bound"]) > 0),
        "largest share of it that a score reaches": lambda m: f"{m['share of the bound']:.3f}",
        "first distance at which an equal key scores below 0": lambda m: m["negative from"],
        "cosine of independent vectors, mean over all distances": lambda m: mean_and_spread(
            m["independent"]["mean"], 4
        ),
        f"best distance less the one asked for ({offsets})": lambda m: m["nearest to the offset"],
    }
    for i, length in enumerate(LENGTHS):
        name = f"sum of linear weights over {length} tokens"
        rows[name] = lambda m, i=i: f"{m['linear at'][i]:.4f}"
    return table(["", *BASES], ([n, *(map(row, found.values()))] for n, row in rows.items()))


def _of(study: Study, name: str) -> dict[str, Any]:
    first = f"{name}/"
    return {
        key[len(first) :]: value for key, value in study.measured.items() if key.startswith(first)
    }


def chart(study: Study) -> alt.TopLevelMixin:
    """The bound, the cosines, the pairs and the sums of linear weights, both bases in each."""
    made = study.settings
    far, lengths = _spaced(1, made["farthest"], 120), _spaced(1, LENGTHS[-1], 60)
    found = {name: _of(study, name) for name in BASES}

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
        + curve("opposite, 10 000", far, found["base 10 000"]["opposite"])
        + curve("independent, 10 000", far, *found["base 10 000"]["independent"].values()),
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
    maps = [_map(name, m["pairs"]) for name, m in found.items()]
    top = alt.hconcat(bound, sums)
    return alt.vconcat(top, cosines, alt.hconcat(*maps)).resolve_scale(
        color="independent", strokeDash="independent"
    )


def _map(name: str, pairs: Row) -> alt.Chart:
    """Pair by distance: where the cosine is 1 the pair does not tell the two places apart."""
    rows = [
        {"pair": 4 * pair, "x": str(distance), "cos": cos}
        for pair, row in enumerate(pairs["cos"])
        for distance, cos in zip(pairs["distances"], row, strict=True)
    ]
    shown = [str(distance) for distance in pairs["distances"]]
    axis = alt.Axis(values=shown[::8], labelAngle=0)
    return (
        alt.Chart(alt.Data(values=rows))
        .mark_rect()
        .encode(
            x=alt.X("x:N", title="distance", sort=shown, axis=axis),
            y=alt.Y("pair:O", title="pair", axis=alt.Axis(values=list(range(0, 64, 16)))),
            color=alt.Color(
                "cos:Q", title="cos", scale=alt.Scale(scheme="blueorange", domain=[-1, 1])
            ),
        )
        .properties(title=f"pairs at {name}", width=300, height=200)
    )
