"""A longer context: train at 128 tokens, read 2,048 with each law, before and after fine-tuning.

The model learns two things at once. The text loss is that of the next byte of Python's standard
library. Retrieval is a secret token somewhere in the first half, which has to be named wherever
the query token stands in the second: attention by content, at any distance.
"""

from __future__ import annotations

import math
import statistics
from itertools import pairwise
from typing import Any

import altair as alt
import numpy as np
import torch
import torch.nn.functional as nnf
from torch import Tensor

from phasor import Rope
from phasor.scaling import NTK, Law, Linear, Yarn

from .shared import Attention, Row, Study, Text, Transformer, band, fit, lines, mean_and_spread
from .shared import next_token_bits, table

SECRETS, QUERY = 16, 256 + 16  # tokens 0 to 255 are bytes, 256 to 271 secrets
BASES = {"base 10 000": 10_000.0, "base 500 000": 500_000.0}
LAWS = ("unchanged", "linear", "NTK", "YaRN")
STAGES = ("as trained", "fine-tuned")


def settings(quick: bool) -> Row:
    """The sizes; the quick ones take seconds and learn little."""
    sizes = {"width": 64, "heads": 2, "layers": 2, "context": 128, "target": 2048, "tokens": 1024}
    plan = {"steps": 1200, "tuning_steps": 40, "windows": 16, "secrets": 64}
    rates = {"rates": [1e-3, 3e-3, 1e-2], "tuning_rates": [1e-3, 3e-3]}
    if quick:
        sizes |= {"width": 32, "heads": 1, "context": 32, "target": 128}
        plan = {"steps": 40, "tuning_steps": 4, "windows": 4, "secrets": 16}
        rates = {"rates": [1e-2], "tuning_rates": [3e-3]}
    return sizes | plan | rates


def run(study: Study) -> None:
    """Both bases trained alike; every law read before and after an equally searched fine-tuning."""
    text = Text.load()
    for name, base in BASES.items():

        def pretrain(_key: str, rate: float, seed: int, base: float = base) -> Row:
            model = _trained(study, text, base, rate, seed)
            return _read(study.settings, text, model, study.settings["context"])

        rate = study.search(name, pretrain)
        for law_name in LAWS:

            def tune(
                key: str, tuning_rate: float, seed: int, way: tuple[float, str, float] = (base, law_name, rate)
            ) -> Row:
                return _tune(study, text, way, key, tuning_rate, seed)

            study.compare(f"{name}, {law_name}", tune, "tuning_rates")


def _rope(made: Row, base: float, law_name: str) -> Rope:
    factor = made["target"] / made["context"]
    laws: dict[str, Law | None] = {
        "unchanged": None,
        "linear": Linear(factor=factor),
        "NTK": NTK(factor=factor),
        "YaRN": Yarn(factor=factor, original_max_positions=made["context"]),
    }
    head_dim = made["width"] // made["heads"]
    return Rope(head_dim=head_dim, pairing="half", base=base, scaling=laws[law_name])


def _model(made: Row, rope: Rope) -> Transformer:
    def attention() -> Attention:
        return Attention(made["width"], made["heads"], rope=rope)

    return Transformer(QUERY + 1, made["width"], made["layers"], attention)


def _trained(study: Study, text: Text, base: float, rate: float, seed: int) -> Transformer:
    made = study.settings
    torch.manual_seed(seed)
    model = _model(made, _rope(made, base, "unchanged"))
    key = f"base {base:g}, rate {rate:g}, seed {seed}"
    study.train(key, model, lambda: _train(made, text, model, key, rate, seed, "context"))
    return model


def _tune(
    study: Study, text: Text, way: tuple[float, str, float], key: str, tuning_rate: float, seed: int
) -> Row:
    """Read at every length with the law, as trained and after a few steps at the target."""
    made, (base, law_name, rate) = study.settings, way
    model = _model(made, _rope(made, base, law_name))
    # the rope is no weight: a model with another one takes the weights as they are
    model.load_state_dict(_trained(study, text, base, rate, seed).state_dict())
    before = _read(made, text, model, made["target"])
    _train(made, text, model, key, tuning_rate, seed, "target")
    after = _read(made, text, model, made["target"])
    return {"loss": after["loss"], "rate": tuning_rate, STAGES[0]: before, STAGES[1]: after}


def _hide(rows: Tensor, seed: list[int], queries: int) -> tuple[Tensor, Tensor, Tensor]:
    """Put a secret into the first half of each row, and query tokens into the second.

    Returns:
        The rows, the places of the queries ``[rows, queries]`` and the secrets ``[rows, queries]``.
    """
    draw, (count, length) = np.random.default_rng(seed), rows.shape
    secrets = 256 + torch.from_numpy(draw.integers(SECRETS, size=(count, 1)))
    where = torch.from_numpy(draw.integers(length // 2, size=(count, 1)))
    places = torch.from_numpy(draw.integers(length // 2, length, size=(count, queries)))
    rows = rows.scatter(1, where, secrets).scatter(1, places, QUERY)
    return rows, places, secrets.expand_as(places)


def _train(
    made: Row, text: Text, model: Transformer, label: str, rate: float, seed: int, length_name: str
) -> None:
    length, steps = made[length_name], made["steps" if length_name == "context" else "tuning_steps"]

    def loss(step: int) -> Tensor:
        text_rows = text.batch([seed, length, step], max(1, made["tokens"] // length), length + 1)
        rows, places, secrets = _hide(text_rows[:, :-1], [seed, length, step, 1], length // 16)
        logits = model(rows)
        # [rows, length, tokens] -> [rows, queries, tokens]
        answers = logits.gather(1, places[..., None].expand(-1, -1, logits.shape[-1]))
        text_loss = nnf.cross_entropy(logits.mT, text_rows[:, 1:])
        return text_loss + nnf.cross_entropy(answers.mT, secrets)

    fit(model, loss, steps=steps, rate=rate, label=label)


@torch.no_grad()
def _read(made: Row, text: Text, model: Transformer, longest: int) -> Row:
    """Bits per byte by position and the secrets that are named, for each length up to the longest."""
    lengths = _lengths(made, longest)
    windows = text.test(made["windows"], longest + 1)
    by_position = torch.cat([next_token_bits(model, part) for part in windows.split(4)])
    bits = [by_position[:, a:b].mean().item() for a, b in pairwise([0, *lengths])]
    named, missed = [], []
    for length in lengths:
        rows, places, secrets = _hide(text.test(made["secrets"], length), [length], 1)
        logits = torch.cat([model(part) for part in rows.split(max(1, 4096 // length))])
        answers = logits[torch.arange(len(rows)), places[:, 0], 256 : 256 + SECRETS]
        named.append((answers.argmax(-1) + 256 == secrets[:, 0]).double().mean().item())
        missed.append(nnf.cross_entropy(answers, secrets[:, 0] - 256).item() / math.log(2))
    return {"loss": statistics.mean(bits) + statistics.mean(missed), "bits": bits, "retrieval": named}


def _lengths(made: Row, longest: int) -> list[int]:
    return [made["context"] << n for n in range(20) if made["context"] << n <= longest]
