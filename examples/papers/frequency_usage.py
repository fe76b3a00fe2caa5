"""Which frequencies a trained model uses, which heads look at places, and p-RoPE.

The usage is read from the masked models of ``convergence`` and from the causal ones trained here,
which differ in the share of their pairs that turn.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import altair as alt
import numpy as np
import torch

from phasor import Rope
from phasor.papers import positional_score
from phasor.scaling import Proportional
from phasor.torch.papers.usage import watch_usage

from . import convergence
from .shared import (
    Row,
    Study,
    Text,
    Transformer,
    attention_inputs,
    lines,
    mean_and_spread,
    rotary,
    table,
    train_on_text,
)

FRACTIONS = (1.0, 0.75, 0.25, 0.0)
MODELS = {"causal": "p = 1", "masked": "RoPE"}
SCORES = ("itself", "previous", "first")
LOOKS = 0.25  # of its weight on one place, and a head is said to look there


def settings(quick: bool) -> Row:
    """The sizes; the quick ones take seconds."""
    sizes = {"width": 64, "heads": 4, "head_dim": 32, "layers": 2, "seq": 128, "rows": 8}
    plan = {"steps": 600, "every": 40, "rates": [3e-3, 1e-2, 3e-2]}
    if quick:
        sizes |= {"width": 32, "heads": 2, "head_dim": 16, "seq": 32, "rows": 4}
        plan |= {"steps": 30, "every": 15, "rates": [1e-2]}
    return sizes | plan | {"masked": convergence.settings(quick)}


def run(study: Study) -> None:
    """p-RoPE with an equally searched rate for each p, then the heads of both kinds of model."""
    text, made = Text.load(), study.settings
    for fraction in FRACTIONS:
        study.compare(f"p = {fraction:g}", partial(_train, study, text, fraction))
    masked = Study("convergence", made["masked"], study.folder, study.seeds)
    convergence.run(masked, ("RoPE",))
    for seed in range(study.seeds):
        rows = text.test(32, masked.settings["seq"])
        hidden, _ = convergence.mask(rows, masked.settings["masked"], [seed])
        model = convergence.model(masked.settings, "RoPE", seed)
        model.load_state_dict(torch.load(masked.weights(f"RoPE/seed {seed}"), weights_only=True))
        study.measure(f"masked/heads {seed}", lambda m=model, t=hidden: _heads(m, t))
        causal = _model(made, 1.0, seed)
        causal.load_state_dict(torch.load(study.weights(f"p = 1/seed {seed}"), weights_only=True))
        study.measure(f"causal/heads {seed}", lambda m=causal, t=rows: _heads(m, t))


def _model(made: Row, fraction: float, seed: int) -> Transformer:
    torch.manual_seed(seed)
    rope = Rope(head_dim=made["head_dim"], pairing="half", scaling=Proportional(fraction=fraction))
    return rotary(made, 256, rope)


def _train(study: Study, text: Text, fraction: float, key: str, rate: float, seed: int) -> Row:
    made, model = study.settings, _model(study.settings, fraction, seed)

    found = train_on_text(made, text, model, key, rate, seed)
    study.keep(key, model)
    return found


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
    """Loss for each p, and how many heads look at a place."""

    def of_fraction(fraction: float) -> list[str]:
        name = f"p = {fraction:g}"
        return [name, study.rate(name), mean_and_spread(study.over_seeds(name, "loss"))]

    rows = []
    for model in MODELS:
        heads = [study.measured[f"{model}/heads {seed}"] for seed in range(study.seeds)]
        for place in SCORES:
            chosen = [np.array(one[place]) > LOOKS for one in heads]
            rows.append([f"{model}: {place}", *_row_of_heads(heads, chosen)])
        others = [
            ~np.any([np.array(one[place]) > LOOKS for place in SCORES], axis=0) for one in heads
        ]
        rows.append([f"{model}: none of these", *_row_of_heads(heads, others)])
    header = [
        "a quarter of the weight on",
        "heads of a model",
        "usage of the faster half of the pairs",
    ]
    losses = table(["", "rate", "bits per byte"], map(of_fraction, FRACTIONS))
    return f"{losses}\n\n{table(header, rows)}"


def _row_of_heads(heads: list[Row], chosen: list[Any]) -> list[str]:
    """How many heads of each seed were chosen, and what share of their usage is in fast pairs."""
    usages = [np.array(one["usage"])[which] for one, which in zip(heads, chosen, strict=True)]
    fast = [row[: len(row) // 2].sum() for usage in usages for row in usage]
    counts = [float(which.sum()) for which in chosen]
    return [mean_and_spread(counts, 1), mean_and_spread(fast, 2) if fast else "no head"]


def chart(study: Study) -> alt.TopLevelMixin:
    """Usage by head and pair of the first seed, and the curves of p-RoPE."""
    made = study.settings
    steps = range(made["every"], made["steps"] + 1, made["every"])
    names = [f"p = {fraction:g}" for fraction in FRACTIONS]
    rows = study.bands(names, "curve", steps)
    y = alt.Y("mean:Q", title="bits per byte", scale=alt.Scale(zero=False))
    curves = lines(rows, names, x=alt.X("x:Q", title="steps"), y=y, title="p-RoPE", width=620)
    maps = [_map(f"{model}, seed 0", study.measured[f"{model}/heads 0"], made) for model in MODELS]
    return alt.vconcat(alt.hconcat(*maps), curves).resolve_scale(
        color="independent", strokeDash="independent"
    )


def _map(title: str, heads: Row, made: Row) -> alt.Chart:
    """One row for each head, with the place that it looks at, if there is one."""
    rows = []
    for i, usage in enumerate(heads["usage"]):
        place = max(SCORES, key=lambda place: heads[place][i])
        role = f" {place}" if heads[place][i] > LOOKS else ""
        name = f"{i // made['heads']}.{i % made['heads']}{role}"
        rows += [{"head": name, "pair": pair, "usage": share} for pair, share in enumerate(usage)]
    x = alt.X(
        "pair:O",
        title="pair, fast to slow",
        axis=alt.Axis(labelAngle=0, values=list(range(0, 64, 4))),
    )
    y = alt.Y("head:N", title="layer and head", sort=None)
    colour = alt.Color("usage:Q", title="share of the usage", scale=alt.Scale(scheme="viridis"))
    chart = alt.Chart(alt.Data(values=rows)).mark_rect().encode(x=x, y=y, color=colour)
    return chart.properties(title=title, width=250, height=200)
