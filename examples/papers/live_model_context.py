"""The trained model's loss with pairs that stand still, and beyond its own context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import compress, pairwise
from statistics import mean

import altair as alt
import numpy as np

from phasor import Rope, scaling

from .live_model_reading import TEXTS, Reader, losses
from .pictures import band, contest, lines, log2
from .study import Study
from .training import doublings

Curves = dict[str, list[list[float]]]  # of every text, by what it was read with
PLAIN = "unchanged"
#: All of phasor's laws but those whose numbers are searched for each model, or stop pairs; at a
#: single length stepped NTK is dynamic NTK.
_OTHERS = ("per_pair", "longrope", "proportional", "stepped_ntk")
LAWS = (PLAIN, *(law for law in scaling.LAWS if law not in _OTHERS))
#: Where there are more: those that are known best, and those that do otherwise.
DRAWN = (PLAIN, "yarn", "ntk", "llama3", "linear", "hope")
STOPPED = (
    *(PLAIN, "fastest quarter", "middle quarter", "slowest quarter, p = 0.75"),
    *("slowest half, p = 0.5", "slower three quarters, p = 0.25"),
)
BINS = 16  # of the model's own context


def truncated(rope: Rope, name: str) -> Rope:
    """``rope`` with some of its pairs standing still."""
    if "p = " in name:
        fraction = float(name.split("p = ")[1])
        return replace(rope, scaling=scaling.Proportional(fraction=fraction))
    inv_freq, count = rope.inv_freq.copy(), rope.num_pairs
    first = {PLAIN: count, "fastest quarter": 0, "middle quarter": 3 * count // 8}[name]
    inv_freq[first : first + count // 4] = 0
    return replace(rope, base=None, explicit_inv_freq=tuple(inv_freq.tolist()))


def extended(rope: Rope, name: str, context: int, length: int) -> Rope:
    """``rope`` for ``length`` tokens by a law, with the numbers that its paper gives."""
    if name == PLAIN:
        return rope
    law = scaling.LAWS[name]
    given = {"factor": length / context, "original_max_positions": context}
    given["num_pairs"] = rope.num_pairs * 5 // 16  # CoPE's 20 of 64
    wanted = {field.name for field in fields(law)}
    made = law(**{name: value for name, value in given.items() if name in wanted})
    return replace(rope, scaling=made).at(length)


def run(study: Study, reader: Reader) -> None:
    """Pairs stopped, then every law at the first length and the best ones at the second."""
    made, ends = study.settings, doublings(*study.settings["stopped"])

    def stopped(number: int, name: str) -> list[float]:
        rope = truncated(reader.rope, name)
        found = losses(reader.model, reader.window(number, ends[-1] + 1), rope)
        return [found[a:b].mean() for a, b in pairwise([0, *ends])]

    def read(law: str, length: int, seed: int) -> list[float]:
        rope = extended(reader.rope, law, context, length)
        found = losses(reader.model, reader.window(seed, length + 1), rope)
        return found.reshape(-1, context // BINS).mean(1).tolist()

    for number, text in enumerate(TEXTS):
        for name in STOPPED:
            study.measure(f"stopped/{name}/{text}", lambda n=number, s=name: stopped(n, s))
    context = study.measured["model"]["context"]
    laws: Sequence[str] = LAWS
    for length in (factor * context for factor in made["factors"]):
        for law in laws:
            for seed in study.seeds:
                study.measure(f"{length}, {law}/seed {seed}", partial(read, law, length, seed))
        laws = list(_curves(study, 0))[: made["best"]]


def _stopped(study: Study) -> Curves:
    keys = [[f"stopped/{name}/{text}" for text in TEXTS] for name in STOPPED]
    done = [all(key in study.measured for key in of_text) for of_text in zip(*keys, strict=True)]
    return {
        name: [study.measured[key] for key in compress(of_name, done)]
        for name, of_name in zip(STOPPED, keys, strict=True)
    }


def _by_fours(means: Sequence[float]) -> list[float]:
    """Of numbers up to every doubling those up to every other; a stretch is twice the last."""
    return [means[0], *((a + 2 * b) / 3 for a, b in zip(means[1::2], means[2::2], strict=False))]


def _curves(study: Study, which: int) -> Curves:
    """Loss by position at the first or the second length; first the law best beyond the context."""
    length = study.settings["factors"][which] * study.measured["model"]["context"]
    read = {law: {seed: f"{length}, {law}/seed {seed}" for seed in study.seeds} for law in LAWS}
    laws = [law for law in LAWS if read[law][study.seeds[0]] in study.measured]
    seeds = [n for n in study.seeds if all(read[law][n] in study.measured for law in laws)]
    found = {law: [study.measured[read[law][seed]] for seed in seeds] for law in laws}
    return dict(sorted(found.items(), key=lambda it: np.mean([c[BINS:] for c in it[1]])))


def tables(study: Study) -> str:
    """Loss with pairs stopped and with every law, in nats."""
    ends = doublings(*study.settings["stopped"])[::2]
    stopped = {name: [_by_fours(c) for c in found] for name, found in _stopped(study).items()}
    parts = [_table("pairs stopped", ends, stopped)]
    context = study.measured["model"]["context"]
    for which, factor in enumerate(study.settings["factors"]):
        bins = range(0, factor * BINS + 1, BINS)
        curves = {
            law: [[mean(curve[a:b]) for a, b in pairwise(bins)] for curve in found]
            for law, found in _curves(study, which).items()
        }
        ends = [end * context // BINS for end in bins[1:]]
        if curves:
            drawn, title = _drawn(curves), f"{factor * context} tokens"
            parts.append(_table(title, ends, drawn))
            others = {law: curve for law, curve in curves.items() if law not in drawn}
            if others:
                plain = {PLAIN: curves[PLAIN]}
                parts.append(_table(f"{title}, other laws", ends, plain | others))
    return "\n\n".join(parts)


def _drawn(curves: Curves) -> Curves:
    """The curves that a picture and the page have room for."""
    return {
        law: found for law, found in curves.items() if len(curves) <= len(DRAWN) or law in DRAWN
    }


def _more(curves: Curves) -> Curves:
    """How many nats more than the unchanged rope each of the others needs, text by text."""
    plain = np.array(curves[PLAIN])
    return {name: (found - plain).tolist() for name, found in curves.items() if name != PLAIN}


def _table(title: str, ends: Sequence[int], curves: Curves) -> str:
    """Nats of the first, the unchanged rope where it is there, and how many more others need."""
    texts = len(next(iter(curves.values())))
    ordered = sorted(curves.items(), key=lambda curve: curve[0] != PLAIN)
    rows = {name: ([], list(zip(*found, strict=True))) for name, found in ordered}
    header = f"nats, {title}, {texts} text{'s' * (texts > 1)}"
    return contest([header, *(f"to {end}" for end in ends)], rows)


def chart(study: Study) -> alt.TopLevelMixin:
    """Loss against position, with pairs stopped and with laws."""
    ends, context = doublings(*study.settings["stopped"]), study.measured["model"]["context"]
    panels = [
        (
            "nats more with pairs that stand still",
            _more(_stopped(study)),
            ends,
            log2("tokens", ends),
        )
    ]
    for which, factor in enumerate(study.settings["factors"]):
        places = [(i + 1) * context // BINS for i in range(BINS * factor)]
        title, x = (
            f"{factor * context} tokens, trained on {context}",
            alt.X("x:Q", title="tokens", axis=alt.Axis(format="~s")),
        )
        panels.append((title, _curves(study, which), places, x))
    drawn = list[alt.TopLevelMixin]()
    for title, curves, places, x in panels:
        shown = list(_drawn(curves))
        rows = [row for name in shown for row in band(curves[name], places, name)]
        y = alt.Y("mean:Q", title="nats", scale=alt.Scale(zero=False))
        panel = lines(rows, shown, x=x, y=y, title=title, width=620)
        if places[-1] > context:
            panel += alt.Chart(alt.Data(values=[{}])).mark_rule().encode(x=alt.XDatum(context))
        if shown:
            drawn.append(panel)
    return alt.vconcat(*drawn).resolve_scale(color="independent", strokeDash="independent")
