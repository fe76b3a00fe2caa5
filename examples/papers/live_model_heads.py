"""Which pairs the trained model's heads use, where they look, and how long their vectors are."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import altair as alt
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phasor.papers import positional_score, sink_score, token_norms
from phasor.torch.papers import watch_usage

from .live_model_reading import TEXTS, Reader, hooked
from .pictures import mean_and_spread, table
from .study import Row, Study

#: How much of its weight on what makes a head one of these, and the score that says it.
ROLES: dict[str, tuple[float, str, Callable[[Any], NDArray[np.float64]]]] = {
    "sink": (0.5, "the first token", sink_score),
    "previous": (0.4, "the previous token", partial(positional_score, offset=-1)),
    "diagonal": (0.4, "itself", partial(positional_score, offset=0)),
}
VECTORS = {"queries": ".q_proj", "keys": ".k_proj", "values": ".v_proj"}


def run(study: Study, reader: Reader) -> None:
    """The usage over all texts, then the scores of every head, text by text."""
    lengths = study.settings["windows"]
    study.measure("usage", lambda: _usage(reader, lengths[-1]))
    for length in lengths:
        for number, name in enumerate(TEXTS):
            tokens = reader.window(number, length)
            study.measure(f"heads/{length}, {name}", lambda t=tokens: _scores(reader, t))


@torch.no_grad()
def _usage(reader: Reader, length: int) -> Row:
    """Mean norms ``[layers, heads, pairs]``, and those of first and of other whole vectors."""
    norms = {vectors: list[NDArray[np.float64]]() for vectors in VECTORS}

    def add(vectors: str, x: Tensor) -> None:
        norms[vectors].append(token_norms(x.unflatten(-1, (-1, reader.rope.head_dim))))

    with ExitStack() as stack:
        layers = stack.enter_context(watch_usage(reader.model))
        for vectors, end in VECTORS.items():
            stack.enter_context(hooked(reader.model, end, partial(add, vectors)))
        for number in range(len(TEXTS)):
            reader.model.get_decoder()(reader.window(number, length)[None])
    found: Row = {
        vectors: [getattr(layer, vectors).mean for layer in layers if layer is not None]
        for vectors in VECTORS
    }
    for vectors, each in norms.items():
        # [texts * layers, heads, seq] -> [layers, heads, seq]
        mean = np.reshape(each, (len(TEXTS), -1, *each[0].shape)).mean(0)
        found[f"{vectors}, first"], found[f"{vectors}, others"] = (
            mean[..., 0],
            mean[..., 1:].mean(-1),
        )
    return found


@torch.no_grad()
def _scores(reader: Reader, tokens: Tensor) -> Row:
    """The scores of every head ``[layers, heads]``; no more than one layer's weights at once."""
    model, found = reader.model, {role: list[NDArray[np.float64]]() for role in ROLES}

    def read(output: tuple[Tensor, Tensor]) -> tuple[Tensor, None]:
        for role, (_, _, score) in ROLES.items():
            found[role].append(score(output[1][0]))
        return output[0], None

    before = model.config._attn_implementation
    model.set_attn_implementation("eager")  # the one that returns its weights
    with hooked(model, ".self_attn", read):
        model.get_decoder()(tokens[None])
    model.set_attn_implementation(before)
    return found


def usage(study: Study) -> NDArray[np.float64]:
    """``[layers, heads, pairs]``: mean norm of a query's pair by that of its key's, 1 by head."""
    queries, keys = (np.array(study.measured["usage"][of]) for of in ("queries", "keys"))
    product = queries * keys.repeat(queries.shape[1] // keys.shape[1], 1)
    return product / product.sum(-1, keepdims=True)


def relative_norms(study: Study, vectors: str) -> NDArray[np.float64]:
    """``[layers, pairs]``: mean norm of a pair over heads, as a multiple of the layer's mean."""
    norms = np.array(study.measured["usage"][vectors]).mean(1)
    return norms / norms.mean(-1, keepdims=True)


def scores(study: Study, role: str, length: int) -> NDArray[np.float64]:
    """``[texts, layers, heads]``."""
    return np.array([study.measured[f"heads/{length}, {name}"][role] for name in TEXTS])


def rank_correlation(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    """Spearman's, of numbers that are all different."""
    ranks = [part.ravel().argsort().argsort() for part in (x, y)]
    return float(np.corrcoef(*ranks)[0, 1])


def heads_by_role(study: Study) -> dict[str, NDArray[np.bool_]]:
    """``[layers, heads]`` of each role, of the others and of all, in the longest windows."""
    length = study.settings["windows"][-1]
    chosen = {
        role: scores(study, role, length).mean(0) > threshold
        for role, (threshold, *_) in ROLES.items()
    }
    chosen["others"] = ~np.any(list(chosen.values()), axis=0)
    chosen["all"] = np.ones_like(chosen["sink"])
    return chosen


def tables(study: Study) -> str:
    """How many heads look where, which pairs they use, and how long their vectors are."""
    windows, shares, chosen = study.settings["windows"], usage(study), heads_by_role(study)
    counts = list[list[str]]()
    for role, (threshold, place, _) in ROLES.items():
        looking = [(scores(study, role, n) > threshold).sum((1, 2)).tolist() for n in windows]
        cells = (mean_and_spread(count, 1) for count in looking)
        counts.append([f"{role}: over {threshold} of the weight on {place}", *cells])
    quarter = shares.shape[-1] // 4
    parts = {
        "fastest quarter": shares[..., :quarter].sum(-1),
        "slower half": shares[..., 2 * quarter :].sum(-1),
        "slowest quarter": shares[..., 3 * quarter :].sum(-1),
    }
    layers = np.arange(len(shares))[:, None] + np.zeros_like(shares[..., 0])
    chosen |= {"first layer": layers == 0, "last layer": layers == len(shares) - 1}
    rows = [
        [
            role,
            which.sum(),
            *(f"{p[which].mean():.3f}" if which.any() else "" for p in parts.values()),
        ]
        for role, which in chosen.items()
    ]
    previous = scores(study, "previous", windows[-1]).mean(0)
    ranks = (f"{rank_correlation(previous, part):.2f}" for part in parts.values())
    rows.append(["rank correlation with previous-token weight", "", *ranks])
    saved, norms = study.measured["usage"], list[list[str]]()
    for vectors in VECTORS:
        first, others = (np.array(saved[f"{vectors}, {of}"]) for of in ("first", "others"))
        ratio = np.median(first / others)
        longest = np.median(relative_norms(study, vectors).max(-1))
        numbers = (first.mean(), others.mean(), ratio, longest)
        norms.append([vectors, *(f"{number:.2f}" for number in numbers)])
    heads = f"heads of {previous.size}"
    ratios = ("median ratio of a head", "a layer's longest pair to its mean")
    return "\n\n".join(
        [
            table([heads, *(f"{length} tokens" for length in windows)], counts),
            table([f"share of usage, {windows[-1]} tokens", heads, *parts], rows),
            table(["mean norm", "first token", "others", *ratios], norms),
        ]
    )


def chart(study: Study) -> alt.TopLevelMixin:
    """Usage and values by layer and pair, and each head's weight on the previous token."""
    shares, length = usage(study), study.settings["windows"][-1]
    layers, heads, pairs = shares.shape
    previous, sink = (scores(study, role, length).mean(0) for role in ("previous", "sink"))
    points = [
        {
            "previous": previous[head],
            "fast": shares[head][: pairs // 4].sum(),
            "head": "sink" if sink[head] > ROLES["sink"][0] else "other",
        }
        for head in np.ndindex(layers, heads)
    ]

    def ticks(count: int) -> alt.Axis:
        return alt.Axis(labelAngle=0, values=list(range(0, count, 4)))

    colours = alt.Scale(range=["#3b7dd8", "#d9730d"])
    scale = alt.Scale(scheme="viridis", type="sqrt")

    def by_pair(title: str, rows: str, shown: NDArray[np.float64]) -> alt.Chart:
        cells = [
            {rows: row, "pair": pair, "multiple": shown[row, pair]}
            for row, pair in np.ndindex(*shown.shape)
        ]
        return (
            alt.Chart(alt.Data(values=cells), title=title)
            .mark_rect()
            .encode(
                x=alt.X("pair:O", title="pair, fast to slow", axis=ticks(pairs)),
                y=alt.Y(f"{rows}:O", axis=ticks(len(shown)), sort="descending"),
                color=alt.Color("multiple:Q", title="times the mean", scale=scale),
            )
        )

    each = alt.Chart(alt.Data(values=points)).mark_point(opacity=0.8)
    each = each.encode(
        x=alt.X("previous:Q", title="weight on the previous token"),
        y=alt.Y("fast:Q", title="share of usage in the fastest quarter"),
        color=alt.Color("head:N", title=None, scale=colours),
    )
    size = {"width": 200, "height": 230}
    mean_usage = pairs * shares.mean(1)
    maps = alt.hconcat(
        by_pair("usage, mean of a layer's heads", "layer", mean_usage).properties(**size),
        by_pair("values, mean length", "layer", relative_norms(study, "values")).properties(**size),
        *(
            by_pair(f"usage, heads of the {place} layer", "head", pairs * shares[layer]).properties(
                width=200, height=90
            )
            for place, layer in (("first", 0), ("last", -1))
        ),
    )
    return alt.hconcat(maps, each.properties(title="every head", **size)).resolve_scale(
        color="independent"
    )
