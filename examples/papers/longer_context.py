"""A longer context: train at 128 tokens, read 2,048 with each law, before and after fine-tuning.

The model learns two things at once. The text loss is that of the next byte of Python's standard
library. Retrieval is a secret token somewhere in the first half, which has to be named wherever
the query token stands in the second: attention by content, at any distance.
"""

from __future__ import annotations

import math
import statistics
from functools import partial

import altair as alt
import numpy as np
import torch
import torch.nn.functional as nnf
from torch import Tensor

from phasor import Rope
from phasor.scaling import NTK, Law, Linear, Yarn

from .models import Transformer, rotary
from .pictures import band, contest, lines, log2, marked, mean_and_spread, table
from .study import Row, Study
from .training import Text, bits_by_length, doublings, fit

SECRETS, QUERY = 16, 256 + 16  # tokens 0 to 255 are bytes, 256 to 271 secrets
BASES = {"base 10 000": 10_000.0, "base 500 000": 500_000.0}
LAWS = ("unchanged", "linear", "NTK", "YaRN")
Read = tuple[str, str]  # base and law, and the stage
Way = tuple[float, str, float]  # the base, the law and the rate of the training
STAGES = BEFORE, AFTER = ("as trained", "fine-tuned")
_10K, _500K = (tuple(f"{base}, {law}" for law in LAWS) for base in BASES)
#: What is read, who should be ahead at which stage, who behind, and who published it.
CLAIMS = (
    ("bits", (_10K[2], BEFORE), (_10K[0], BEFORE), "Su, kexue.fm/9706"),
    ("bits", (_10K[0], BEFORE), (_10K[1], BEFORE), "Su, kexue.fm/9706"),
    ("bits", (_10K[3], BEFORE), (_10K[2], BEFORE), "Peng et al., 2309.00071"),
    ("bits", (_10K[1], AFTER), (_10K[1], BEFORE), "Chen et al., 2306.15595"),
    ("bits", (_10K[1], AFTER), (_10K[0], AFTER), "Chen et al., 2306.15595"),
    ("bits", (_10K[1], AFTER), (_10K[2], AFTER), "Peng et al., 2309.00071"),
    ("bits", (_10K[3], AFTER), (_10K[2], AFTER), "Peng et al., 2309.00071"),
    ("retrieval", (_500K[0], AFTER), (_10K[0], AFTER), "Xiong et al., 2309.16039"),
)


def settings(quick: bool) -> Row:
    """The sizes; the quick ones take seconds and learn little."""
    sizes = {"width": 64, "heads": 2, "layers": 2, "context": 128, "target": 2048, "tokens": 1024}
    plan = {"steps": 1200, "tuning_steps": 40, "windows": 16, "secrets": 64}
    rates = {"rates": [1e-3, 3e-3, 1e-2], "tuning_rates": [1e-3, 3e-3]}
    if quick:
        sizes |= {"width": 32, "heads": 1, "context": 32, "target": 128, "tokens": 256}
        plan = {"steps": 20, "tuning_steps": 2, "windows": 2, "secrets": 8}
        rates = {"rates": [1e-2], "tuning_rates": [3e-3]}
    return sizes | plan | rates


def run(study: Study) -> None:
    """Both bases trained alike; every law read before and after an equally searched fine-tuning."""
    text = Text.load()
    for name, base in BASES.items():
        rate = study.search(name, partial(_pretrain, study, text, base))
        for law_name in LAWS:
            tune = partial(_tune, study, text, (base, law_name, rate))
            study.compare(f"{name}, {law_name}", tune, "tuning_rates")


def _pretrain(study: Study, text: Text, base: float, _key: str, rate: float, seed: int) -> Row:
    model = _trained(study, text, base, rate, seed)
    return _read(study.settings, text, model, study.settings["context"])


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


def _trained(study: Study, text: Text, base: float, rate: float, seed: int) -> Transformer:
    made = study.settings
    torch.manual_seed(seed)
    model = rotary(made, QUERY + 1, _rope(made, base, "unchanged"))
    key = f"base {base:g}, rate {rate:g}, seed {seed}"
    study.train(key, model, lambda: _train(made, text, model, key, rate, seed, "context"))
    return model


def _tune(study: Study, text: Text, way: Way, key: str, tuning_rate: float, seed: int) -> Row:
    """Read at every length with the law, as trained and after a few steps at the target."""
    made, (base, law_name, rate) = study.settings, way
    model = rotary(made, QUERY + 1, _rope(made, base, law_name))
    # the rope is no weight: a model with another one takes the weights as they are
    model.load_state_dict(_trained(study, text, base, rate, seed).state_dict())
    before = _read(made, text, model, made["target"])
    _train(made, text, model, key, tuning_rate, seed, "target")
    after = _read(made, text, model, made["target"])
    return {"loss": after["loss"], "rate": tuning_rate, BEFORE: before, AFTER: after}


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
    """Bits per byte by position, and the share of secrets that are named, at each length."""
    lengths = doublings(made["context"], longest)
    bits = bits_by_length(model, text.test(made["windows"], longest + 1), lengths)
    named, missed = [], []
    for length in lengths:
        rows, places, secrets = _hide(text.test(made["secrets"], length), [length], 1)
        logits = torch.cat([model(part) for part in rows.split(max(1, 4096 // length))])
        answers = logits[torch.arange(len(rows)), places[:, 0], 256 : 256 + SECRETS]
        named.append((answers.argmax(-1) + 256 == secrets[:, 0]).double().mean().item())
        missed.append(nnf.cross_entropy(answers, secrets[:, 0] - 256).item() / math.log(2))
    loss = statistics.mean(bits) + statistics.mean(missed)
    return {"loss": loss, "bits": bits, "retrieval": named}


def tables(study: Study) -> str:
    """Loss and retrieval at the target and at each length; how each published order came out."""
    made = study.settings
    lengths = [str(length) for length in doublings(made["context"], made["target"])]
    reads = [(what, stage) for what in ("bits", "retrieval") for stage in STAGES]
    told = ("bits per byte, as trained", "fine-tuned", "secrets named, as trained", "fine-tuned")
    ends = (
        [way, *(mean_and_spread(study.columns(way, stage, what)[-1], 2) for what, stage in reads)]
        for way in _10K + _500K
    )
    parts = [table([f"at {lengths[-1]} tokens", *told], ends)]
    for stage in STAGES:
        for what, title in (("bits", "bits per byte"), ("retrieval", "secrets named")):
            rows = {
                way: ([_rate(study, way, stage)], study.columns(way, stage, what))
                for way in _10K + _500K
            }
            parts.append(contest([f"{title}, {stage}, at", "rate", *lengths], rows, 2))
    orders = (_order(study, *claim) for claim in CLAIMS)
    parts.append(table(["published order: ahead by", "source", *lengths[1:]], orders))
    return "\n\n".join(parts)


def _rate(study: Study, way: str, stage: str) -> str:
    """That of the training or of the fine-tuning."""
    if stage == AFTER:
        return study.rate(way)
    keys = {rate: f"{way.split(',')[0]}/rate {rate:g}" for rate in study.settings["rates"]}
    searched = {rate: study.measured[key]["loss"] for rate, key in keys.items() if len(keys) > 1}
    return f"{min(searched or keys, key=lambda rate: searched.get(rate, 0.0)):g}"


def _order(study: Study, what: str, ahead: Read, behind: Read, source: str) -> list[str]:
    """By how much one is ahead of the other at each length, and in how many seeds."""
    sign, cells = 1 if what == "retrieval" else -1, list[str]()
    columns = zip(study.columns(*ahead, what), study.columns(*behind, what), strict=True)
    for first, second in list(columns)[1:]:
        gains = [sign * (a - b) for a, b in zip(first, second, strict=True)]
        held = f"{sum(gain > 0 for gain in gains)} of {len(gains)}"
        cells.append(f"{mean_and_spread(gains, 2)}, {held}")
    return [f"{what}: {', '.join(ahead)}, before {', '.join(behind)}", source, *cells]


def chart(study: Study) -> alt.TopLevelMixin:
    """Loss and retrieval against length, a column for each base and stage."""
    lengths = doublings(study.settings["context"], study.settings["target"])
    # from half the trained length on, so that the mark does not lie on the axis
    domain = [lengths[0] // 2, lengths[-1]]
    x = log2("tokens", lengths[::2]).scale(type="log", base=2, domain=domain, nice=False)

    def panel(base: str, stage: str, what: str, title: str) -> alt.LayerChart:
        found = {law: study.over_seeds(f"{base}, {law}", stage, what) for law in LAWS}
        rows = [row for law in LAWS for row in band(found[law], lengths, law)]
        scale = alt.Scale(domain=[2, 5.2] if what == "bits" else [0, 1])
        y = alt.Y("mean:Q", title=title, scale=scale)
        name = f"{base}, {stage}"
        curves = lines(rows, LAWS, x=x, y=y, title=name, width=160, height=150)
        chance = {} if what == "bits" else {"y": 1 / SECRETS}
        return marked(curves, x=study.settings["context"], **chance)

    return alt.vconcat(
        *(
            alt.hconcat(*(panel(base, stage, what, title) for base in BASES for stage in STAGES))
            for what, title in (("bits", "bits per byte"), ("retrieval", "secrets named"))
        )
    )
