"""A longer context: train at 128 tokens, read 1,024 with each law, before and after fine-tuning.

The model learns two things at once. The text loss is that of the next byte of Python's standard
library. Retrieval is a secret token somewhere in the first half, which has to be named wherever
the query token stands in the second: attention by content, at any distance.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import altair as alt
import numpy as np
import torch
import torch.nn.functional as nnf
from torch import Tensor

from phasor import Rope
from phasor.scaling import NTK, Law, Linear, Yarn

from .models import Transformer, rotary
from .pictures import band, contest, lines, log2, marked
from .study import Row, Study
from .training import Text, bits_by_length, doublings, fit

SECRETS, QUERY = 16, 256 + 16  # tokens 0 to 255 are bytes, 256 to 271 secrets
BASES = {"base 10 000": 10_000.0, "base 500 000": 500_000.0}
LAWS = ("unchanged", "linear", "NTK", "YaRN")
WAYS = (*product(list(BASES)[:1], LAWS), (list(BASES)[1], LAWS[0]))
STAGES = BEFORE, AFTER = ("as trained", "fine-tuned")
WHAT = {"bits": "bits per byte", "retrieval": "secrets named"}


def settings(quick: bool) -> Row:
    """The sizes; the quick ones take seconds and learn little."""
    sizes = {"width": 64, "heads": 2, "layers": 2, "context": 128, "target": 1024, "tokens": 512}
    plan = {"steps": 600, "tuning_steps": 40, "windows": 16, "secrets": 64}
    rates = {"rates": [1e-3, 3e-3, 1e-2, 3e-2], "tuning_rates": [3e-4, 1e-3, 3e-3, 1e-2]}
    if quick:
        sizes |= {"width": 32, "heads": 1, "context": 32, "target": 128, "tokens": 256}
        plan = {"steps": 20, "tuning_steps": 2, "windows": 2, "secrets": 8}
        rates = {"rates": [1e-2], "tuning_rates": [3e-3]}
    return sizes | plan | rates


def run(study: Study) -> None:
    """Both bases with every rate; every law read as trained, and fine-tuned with every rate."""
    text, made = Text.load(), study.settings
    for name, law in WAYS:
        study.compare(name, partial(_pretrain, study, text, BASES[name]))
        load = partial(_with_law, study, text, name, law)
        read = partial(_read, made, text, longest=made["target"])
        before, after = (_way(study, name, law, stage) for stage in STAGES)
        study.each_seed(before, lambda n, m=load, read=read: read(m(n)))
        study.compare(after, partial(_tune, made, text, load), "tuning_rates")


def _way(study: Study, name: str, law: str, stage: str) -> str:
    """The key of a base with a law, which goes on from the best rate of the training."""
    return f"{name}, from {study.rate(name):g}, {law}, {stage}"


def _tuning_rate(study: Study) -> float:
    """The rate of fine-tuning at which all laws together lose least.

    The best one of a single law is drawn by the seeds: two of its rates lose the same, and differ
    by as much as two laws in the loss of the text alone.
    """
    losses = [study.losses(_way(study, *way, AFTER)) for way in WAYS]
    shared = sorted(set[float].intersection(*map(set, losses)))
    return min(shared, key=lambda rate: sum(of_law[rate] for of_law in losses))


def _contender(study: Study, name: str, law: str, stage: str) -> str:
    """The key of what the tables compare: a way, fine-tuned at the rate of all."""
    way = _way(study, name, law, stage)
    return way if stage == BEFORE else f"{way}/rate {_tuning_rate(study):g}"


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


def _with_law(study: Study, text: Text, name: str, law_name: str, seed: int) -> Transformer:
    """The trained model with another rope, which is no weight."""
    made, base = study.settings, BASES[name]
    model = rotary(made, QUERY + 1, _rope(made, base, law_name))
    trained = _trained(study, text, base, study.rate(name), seed)
    model.load_state_dict(trained.state_dict())
    return model


def _tune(
    made: Row, text: Text, load: Callable[[int], Transformer], key: str, rate: float, seed: int
) -> Row:
    model = load(seed)
    _train(made, text, model, key, rate, seed, "target")
    return _read(made, text, model, made["target"])


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

    fit(model, loss, {"steps": steps}, rate, label)


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
    """Loss and retrieval at the target and at each length."""
    made = study.settings
    lengths = [str(length) for length in doublings(made["context"], made["target"])]

    def columns(way: Sequence[str], stage: str, what: str) -> list[list[float]]:
        return study.columns(_contender(study, *way, stage), what)

    reads = tuple(product(STAGES, WHAT))[:-1]  # a page is too narrow for the last too
    told = (f"{WHAT[what]}, {stage}" for stage, what in reads)
    ends = {
        f"{name}, {law}": ([], [columns((name, law), *read)[-1] for read in reads])
        for name, law in WAYS
    }
    parts = [contest([f"at {lengths[-1]} tokens", *told], ends, 2)]
    for stage, (what, title) in product(STAGES, WHAT.items()):
        rows: dict[str, tuple[Sequence[object], Sequence[Sequence[float]]]] = {}
        for name, law in WAYS:
            rate = study.told_rate(name) if stage == BEFORE else f"{_tuning_rate(study):g}"
            rows[f"{name}, {law}"] = [rate], columns((name, law), stage, what)
        least = f"best of {len(made['rates'])} rates" if stage == BEFORE else "best rate for all"
        parts.append(contest([f"{title}, {stage}, at", least, *lengths], rows, 2))
    return "\n\n".join(parts)


def chart(study: Study) -> alt.TopLevelMixin:
    """Loss and retrieval against length, a column for each stage."""
    lengths = doublings(study.settings["context"], study.settings["target"])
    # from half the trained length on, so that the mark does not lie on the axis
    domain = [lengths[0] // 2, lengths[-1]]
    x = log2("tokens", lengths).scale(type="log", base=2, domain=domain, nice=False)
    names = {", ".join(way): way for way in WAYS}

    def panel(what: str, stage: str) -> alt.LayerChart:
        rows: list[Row] = []
        for name, way in names.items():
            contender = _contender(study, *way, stage)
            rows += band(study.over_seeds(contender, what), lengths, name)
        scale = alt.Scale(zero=False) if what == "bits" else alt.Scale(domain=[0, 1])
        y = alt.Y("mean:Q", title=WHAT[what], scale=scale)
        chance = {} if what == "bits" else {"y": 1 / SECRETS}
        drawn = lines(rows, tuple(names), x=x, y=y, title=stage, height=190)
        return marked(drawn, x=study.settings["context"], **chance)

    return alt.vconcat(*(alt.hconcat(*(panel(what, s) for s in STAGES)) for what in WHAT))
