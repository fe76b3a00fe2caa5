"""Which frequencies a trained model uses, which heads look at places, and p-RoPE.

The usage is read from the masked models of ``convergence`` and from the causal ones trained here,
which differ in the share of their pairs that turn.
"""

from __future__ import annotations

from typing import Any

import altair as alt
import numpy as np
import torch
from torch import nn

from phasor import Rope
from phasor.analysis import positional_score, semantic_score
from phasor.scaling import Proportional
from phasor.torch.usage import watch_usage

from . import convergence
from .shared import Attention, Row, Study, Text, Transformer, attention_inputs, band, fit, lines
from .shared import mean_and_spread, next_token_bits, table

FRACTIONS = (1.0, 0.75, 0.25, 0.0)
MODELS = {"causal": "p = 1", "masked": "RoPE"}
SCORES = ("itself", "previous", "first")


def settings(quick: bool) -> Row:
    """The sizes; the quick ones take seconds."""
    sizes = {"width": 64, "heads": 4, "head_dim": 32, "layers": 2, "seq": 128, "rows": 8}
    plan = {"steps": 800, "every": 40, "test_rows": 64, "test_rows_at_last": 256}
    plan["rates"] = [1e-3, 3e-3, 1e-2]
    if quick:
        sizes |= {"width": 32, "heads": 2, "head_dim": 16, "seq": 32}
        plan |= {"steps": 30, "every": 15, "test_rows": 32, "test_rows_at_last": 32, "rates": [1e-2]}
    return sizes | plan


def run(study: Study) -> None:
    """p-RoPE with an equally searched rate for each p, then the heads of both kinds of model."""
    text, made = Text.load(), study.settings
    for fraction in FRACTIONS:

        def train(key: str, rate: float, seed: int, fraction: float = fraction) -> Row:
            return _train(study, text, fraction, key, rate, seed)

        study.compare(f"p = {fraction:g}", train)
    masked = Study("convergence", convergence.settings(made["rates"] == [1e-2]), study.folder, study.seeds)
    convergence.run(masked)
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

    def attention() -> Attention:
        return Attention(made["width"], made["heads"], head_dim=made["head_dim"], rope=rope)

    return Transformer(256, made["width"], made["layers"], attention)


def _train(study: Study, text: Text, fraction: float, key: str, rate: float, seed: int) -> Row:
    made, model = study.settings, _model(study.settings, fraction, seed)

    def loss(step: int) -> torch.Tensor:
        return next_token_bits(model, text.batch([seed, step], made["rows"], made["seq"] + 1)).mean()

    def bits(rows: int) -> float:
        return next_token_bits(model, text.test(rows, made["seq"] + 1)).mean().item()

    curve = fit(
        *(model, loss),
        **{"steps": made["steps"], "rate": rate, "label": key},
        **{"watch": lambda: bits(made["test_rows"]), "every": made["every"]},
    )
    study.keep(key, model)
    with torch.no_grad():
        return {"rate": rate, "curve": curve, "loss": bits(made["test_rows_at_last"])}


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
        first = np.zeros(weights.shape[-2:], dtype=bool)
        # the first token attends to itself alone where attention is causal
        first[1:, 0] = True
        found["itself"] += list(positional_score(weights, 0))
        found["previous"] += list(positional_score(weights, -1))
        found["first"] += list(semantic_score(weights, first))
    return found
