"""Which frequencies a trained model uses, which heads look at places, and the ropes of table 2."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import altair as alt
import numpy as np
import torch

from phasor import Rope
from phasor.papers import positional_score
from phasor.scaling import Proportional
from phasor.torch.papers.usage import watch_usage

from .models import Transformer, attention_inputs, rotary
from .pictures import by_rate, curves, mean_and_spread, table
from .study import Row, Study
from .training import Text, train_on_text

FRACTIONS = {"p = 1": 1.0, "p = 0.75": 0.75, "p = 0.25": 0.25, "p = 0": 0.0}
CONTENDERS = (*FRACTIONS, "base 500 000", "p = 0.75, reversed", "p = 0.75, partial")
SCORES = ("itself", "previous", "first")
LOOKS = 0.25  # of its weight on one place, and a head is said to look there
FASTEST = 2  # pairs whose share of the usage is told


def settings(quick: bool) -> Row:
    """The sizes; the quick ones take seconds."""
    sizes = {"width": 64, "heads": 4, "head_dim": 32, "layers": 2, "seq": 128, "rows": 4}
    plan = {"steps": 300, "every": 30, "rates": [1e-3, 3e-3, 1e-2, 3e-2]}
    if quick:
        sizes |= {"width": 32, "heads": 2, "head_dim": 16, "seq": 32}
        plan |= {"steps": 30, "every": 15, "rates": [1e-2]}
    return sizes | plan


def run(study: Study) -> None:
    """Every rope with every rate."""
    text = Text.load()
    for name in CONTENDERS:
        study.compare(name, partial(_train, study.settings, text, name))


def _rope(head_dim: int, name: str) -> Rope:
    """One of Round and Round's table 2: pairs stand still from the slow end, or the fast one."""
    plain, still = Rope(head_dim=head_dim, pairing="half"), head_dim // 8
    if name == "base 500 000":
        return replace(plain, base=500_000.0)
    if name == "p = 0.75, partial":  # all frequencies, in three quarters of the coordinates
        return replace(plain, rotary_dim=head_dim - 2 * still)
    if name == "p = 0.75, reversed":
        frequencies = (*[0.0] * still, *plain.inv_freq[still:].tolist())
        return Rope(head_dim=head_dim, pairing="half", explicit_inv_freq=frequencies)
    return replace(plain, scaling=Proportional(fraction=FRACTIONS[name]))


def _train(made: Row, text: Text, name: str, key: str, rate: float, seed: int) -> Row:
    torch.manual_seed(seed)
    model = rotary(made, 256, _rope(made["head_dim"], name))
    found = train_on_text(made, text, model, key, rate, seed)
    return found | {"heads": _heads(model, text.test(32, made["seq"]))}


def _heads(model: Transformer, tokens: torch.Tensor) -> Row:
    """Of every head, layer by layer: the usage of its pairs, and where it looks.

    Usage is the product of the mean norms of a query's and a key's pair, which bounds what the
    pair can add to a score, divided by the sum over the pairs of the head.
    """
    rope = model.blocks[0].attention.rope
    with watch_usage(model, rope) as layers:
        inputs = attention_inputs(model, tokens)
    found: Row = {"usage": [], **{name: [] for name in SCORES}}
    for layer, (attention, x) in zip(layers, inputs, strict=True):
        usage = layer.queries.mean * layer.keys.mean
        found["usage"] += list(usage / usage.sum(-1, keepdims=True))
        weights = attention.weights(x).double().numpy()
        found["itself"] += list(positional_score(weights, 0))
        found["previous"] += list(positional_score(weights, -1))
        # the first token attends to itself alone where attention is causal
        found["first"] += list(weights[:, :, 1:, 0].mean((0, 2)))
    return found


def tables(study: Study) -> str:
    """Loss for each rope, and what the heads that look at a place use."""
    fast = f"usage of the fastest {FASTEST} pairs of {study.settings['head_dim'] // 2}"
    header = ["heads by where they look", "heads of a model", "seeds with one", fast]
    losses = by_rate(study, ["", "bits per byte"], CONTENDERS, ["loss"])
    return f"{losses}\n\n{table(header, _heads_by_place(study))}"


def _role(heads: Row, i: int) -> str:
    """The place on which a head has most weight, where that is enough to be said to look there."""
    place = max(SCORES, key=lambda place: heads[place][i])
    return place if heads[place][i] > LOOKS else "nowhere"


def _heads_by_place(study: Study) -> list[list[str]]:
    rows: list[list[str]] = []
    for place in (*SCORES, "nowhere"):
        counts, shares = [], []
        for heads in study.over_seeds("p = 1", "heads"):
            chosen = [u for i, u in enumerate(heads["usage"]) if _role(heads, i) == place]
            counts.append(float(len(chosen)))
            shares += [float(np.mean([sum(u[:FASTEST]) for u in chosen]))] if chosen else []
        if shares:
            seeds = f"{len(shares)} of {len(counts)}"
            rows.append([place, mean_and_spread(counts, 1), seeds, mean_and_spread(shares, 2)])
    return rows


def chart(study: Study) -> alt.TopLevelMixin:
    """Usage by pair of each kind of head, head by head in every seed, and the curves of p-RoPE."""
    below = curves(study, CONTENDERS, "bits per byte", title="ropes", width=680)
    maps = alt.concat(*(_map(study, seed) for seed in study.seeds), columns=2)
    return alt.vconcat(maps, below).resolve_scale(color="independent", strokeDash="independent")


def _map(study: Study, seed: int) -> alt.Chart:
    """One row for each head of p = 1, with the place that it looks at, if there is one."""
    heads, rows = study.measured[study.key("p = 1", seed)]["heads"], []
    for i, usage in enumerate(heads["usage"]):
        role = _role(heads, i).replace("nowhere", "")
        name = "{}.{} {}".format(*divmod(i, study.settings["heads"]), role)
        rows += [{"head": name, "pair": pair, "usage": share} for pair, share in enumerate(usage)]
    axis = alt.Axis(labelAngle=0, values=list(range(0, 64, 4)))
    x = alt.X("pair:O", title="pair, fast to slow", axis=axis)
    y = alt.Y("head:N", title=None, sort=None)
    colour = alt.Color("usage:Q", title="share of the usage", scale=alt.Scale(scheme="viridis"))
    chart = alt.Chart(alt.Data(values=rows)).mark_rect().encode(x=x, y=y, color=colour)
    return chart.properties(title=f"seed {seed}", width=260, height=150)
