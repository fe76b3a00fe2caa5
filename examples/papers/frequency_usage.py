"""Which frequencies a trained model uses, which heads look at places, and p-RoPE.

The usage is read from the masked models of ``convergence`` and from the causal ones trained here,
which differ in the share of their pairs that turn.
"""

from __future__ import annotations

from functools import partial

import altair as alt
import numpy as np
import torch

from phasor import Rope
from phasor.papers import positional_score
from phasor.scaling import Proportional
from phasor.torch.papers.usage import watch_usage

from . import convergence
from .models import Transformer, attention_inputs, rotary
from .pictures import bands, contest, lines, mean_and_spread
from .study import Row, Study
from .training import Text, train_on_text

FRACTIONS = (1.0, 0.75, 0.25, 0.0)
MODELS = {"causal": "p = 1", "masked": "RoPE"}
SCORES = ("itself", "previous", "first")
LOOKS = 0.25  # of its weight on one place, and a head is said to look there
FASTEST = 2  # pairs whose share of the usage is told


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
    for seed in study.seeds:
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


def _contenders() -> list[str]:
    return [f"p = {fraction:g}" for fraction in FRACTIONS]


def tables(study: Study) -> str:
    """Loss for each rope, and what the heads that look at a place use."""
    losses = {
        name: ([study.rate(name)], [study.over_seeds(name, "loss")]) for name in _contenders()
    }
    fast = [f"usage of the fastest {FASTEST} pairs", f"of {study.settings['head_dim'] // 2}"]
    header = ["heads by where they look", "heads of a model", "seeds with one", " ".join(fast)]
    return "\n\n".join(
        (
            contest(["", "rate", "bits per byte"], losses),
            *(_table_of_heads(study, model, header) for model in MODELS),
        )
    )


def _role(heads: Row, i: int) -> str:
    """The place on which a head has most weight, where that is enough to be said to look there."""
    place = max(SCORES, key=lambda place: heads[place][i])
    return place if heads[place][i] > LOOKS else "nowhere"


def _table_of_heads(study: Study, model: str, header: list[str]) -> str:
    rows: dict[str, tuple[list[str], list[list[float]]]] = {}
    for place in (*SCORES, "nowhere"):
        counts, shares = [], []
        for seed in study.seeds:
            heads = study.measured[f"{model}/heads {seed}"]
            chosen = [u for i, u in enumerate(heads["usage"]) if _role(heads, i) == place]
            counts.append(float(len(chosen)))
            shares += [float(np.mean([sum(u[:FASTEST]) for u in chosen]))] if chosen else []
        if shares:
            told = [mean_and_spread(counts, 1), f"{len(shares)} of {len(counts)}"]
            rows[f"{model}, {place}"] = (told, [shares])
    return contest(header, rows, 2)


def chart(study: Study) -> alt.TopLevelMixin:
    """Usage by pair of each kind of head, head by head in every seed, and the curves of p-RoPE."""
    made = study.settings
    steps = range(made["every"], made["steps"] + 1, made["every"])
    rows = bands(study, _contenders(), "curve", steps)
    y = alt.Y("mean:Q", title="bits per byte", scale=alt.Scale(zero=False))
    curves = lines(
        rows, _contenders(), x=alt.X("x:Q", title="steps"), y=y, title="p-RoPE", width=680
    )
    maps = [
        alt.hconcat(*(_map(study, model, made, seed) for model in MODELS)) for seed in study.seeds
    ]
    return alt.vconcat(*maps, curves).resolve_scale(color="independent", strokeDash="independent")


def _map(study: Study, model: str, made: Row, seed: int) -> alt.Chart:
    """One row for each head, with the place that it looks at, if there is one."""
    heads, rows = study.measured[f"{model}/heads {seed}"], []
    for i, usage in enumerate(heads["usage"]):
        role = _role(heads, i).replace("nowhere", "")
        name = f"{i // made['heads']}.{i % made['heads']} {role}"
        rows += [{"head": name, "pair": pair, "usage": share} for pair, share in enumerate(usage)]
    axis = alt.Axis(labelAngle=0, values=list(range(0, 64, 4)))
    x = alt.X("pair:O", title="pair, fast to slow", axis=axis)
    y = alt.Y("head:N", title=None, sort=None)
    colour = alt.Color("usage:Q", title="share of the usage", scale=alt.Scale(scheme="viridis"))
    chart = alt.Chart(alt.Data(values=rows)).mark_rect().encode(x=x, y=y, color=colour)
    return chart.properties(title=f"{model}, seed {seed}", width=260, height=150)
