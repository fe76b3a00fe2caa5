"""Linear attention with and without a rope, and with a denominator that is rotated too.

A model of bytes is trained on 128 tokens with each kind of attention and read at up to 2,048.
Beside it: how often a rotated denominator is not positive for random queries and keys, how time
grows with the length, and whether the state carried from token to token gives the same sums.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import pairwise

import altair as alt
import numpy as np
import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from phasor import Rope
from phasor.analysis import linear_weights
from phasor.scaling import Proportional
from phasor.torch import LinearState, linear_attention, rotate_qk

from .shared import Attention, Row, Study, Text, Transformer, band, fit, lines, mean_and_spread
from .shared import next_token_bits, table

# name: features per coordinate (0 for softmax), whether it rotates, and the denominator too
CONTENDERS = {
    "softmax, RoPE": (0, True, False),
    "linear, no RoPE": (1, False, False),
    "linear, RoPE (eq. 19)": (1, True, False),
    "linear, RoPE below too": (1, True, True),
    "wide linear, no RoPE": (2, False, False),
    "wide linear, RoPE (eq. 19)": (2, True, False),
}


def settings(quick: bool) -> Row:
    """The sizes; the quick ones take seconds."""
    sizes = {"width": 64, "heads": 2, "head_dim": 32, "layers": 2, "seq": 128, "longest": 2048}
    plan = {"rows": 8, "steps": 600, "every": 40, "windows": 8, "rates": [1e-3, 3e-3, 1e-2]}
    sums = {"draws": 20, "sums": [2**n for n in range(7, 16)], "timed": [2**n for n in range(8, 14)]}
    if quick:
        sizes |= {"width": 32, "heads": 1, "seq": 64, "longest": 128}
        plan |= {"steps": 20, "every": 10, "windows": 2, "rates": [1e-2]}
        sums = {"draws": 5, "sums": [128, 1024], "timed": [128, 256]}
    return sizes | plan | sums


def run(study: Study) -> None:
    """Random draws and times first, then every contender with an equally searched rate."""
    study.measure("not positive", lambda: _not_positive(study.settings))
    study.measure("seconds", lambda: _seconds(study.settings))
    study.measure("streaming", lambda: _streaming(study.settings))
    text = Text.load()
    for name in CONTENDERS:

        def train(key: str, rate: float, seed: int, name: str = name) -> Row:
            return _train(study.settings, text, name, key, rate, seed)

        study.compare(name, train)


def elu_plus_one(x: Tensor) -> Tensor:
    """The features of Katharopoulos et al. (2006.16236), all positive."""
    return nnf.elu(x) + 1


def wide(x: Tensor) -> Tensor:
    """Twice as many features, of a coordinate and of its opposite: twice as wide a state."""
    return torch.cat((elu_plus_one(x), elu_plus_one(-x)), -1)


def rotated_sums(q: Tensor, k: Tensor, v: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
    """RoFormer's eq. 19 with the rotation below the fraction bar as well, in quadratic time.

    Returns:
        The attention output ``[batch, seq, heads, values]`` and the denominators
        ``[batch, heads, seq]``.
    """
    features = rotate_qk(elu_plus_one(q), elu_plus_one(k), torch.arange(q.shape[1]), rope)
    # [batch, seq, heads, features] -> [batch, heads, seq, seq]
    weights = torch.einsum("bmhd,bnhd->bhmn", *features).tril()
    below = weights.sum(-1)
    return torch.einsum("bhmn,bnhd->bmhd", weights / below[..., None], v), below


class LinearAttention(nn.Module):
    """Causal linear attention between linear maps, with one of the contenders' denominators."""

    def __init__(self, made: Row, widening: int, rotates: bool, below_too: bool) -> None:
        super().__init__()
        self.heads, inner = made["heads"], made["heads"] * made["head_dim"]
        self.features: Callable[[Tensor], Tensor] = elu_plus_one if widening == 1 else wide
        # no pair of p-RoPE with p = 0 turns, so that both contenders run the same code
        law = None if rotates else Proportional(fraction=0.0)
        self.rope = Rope(head_dim=widening * made["head_dim"], pairing="half", scaling=law)
        self.below_too, self.not_positive = below_too, 0.0
        self.projections = nn.ModuleList(nn.Linear(made["width"], inner, bias=False) for _ in "qkv")
        self.o_proj = nn.Linear(inner, made["width"], bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # [batch, seq, width] -> [batch, seq, heads, head_dim]
        q, k, v = (project(x).unflatten(-1, (self.heads, -1)) for project in self.projections)
        if self.below_too:
            out, below = rotated_sums(q, k, v, self.rope)
            self.not_positive = (below <= 0).double().mean().item()
        else:
            positions = torch.arange(x.shape[1])
            out = linear_attention(
                *(q, k, v, positions, self.rope), causal=True, feature_map=self.features
            )
        return self.o_proj(out.flatten(2))


def _model(made: Row, name: str) -> Transformer:
    widening, rotates, below_too = CONTENDERS[name]

    def attention() -> nn.Module:
        if widening:
            return LinearAttention(made, widening, rotates, below_too)
        rope = Rope(head_dim=made["head_dim"], pairing="half")
        return Attention(made["width"], made["heads"], head_dim=made["head_dim"], rope=rope)

    return Transformer(256, made["width"], made["layers"], attention)


def _train(made: Row, text: Text, name: str, key: str, rate: float, seed: int) -> Row:
    torch.manual_seed(seed)
    model = _model(made, name)
    test = text.test(64, made["seq"] + 1)

    def loss(step: int) -> Tensor:
        return next_token_bits(model, text.batch([seed, step], made["rows"], made["seq"] + 1)).mean()

    def watch() -> float:
        return next_token_bits(model, test).mean().item()

    every = made["every"]
    curve = fit(model, loss, steps=made["steps"], rate=rate, label=key, watch=watch, every=every)
    ends = _lengths(made)
    with torch.no_grad():
        windows = text.test(made["windows"], made["longest"] + 1)
        read = [next_token_bits(model, row[None]) for row in windows]
    bits = [torch.cat(read)[:, a:b].mean().item() for a, b in pairwise([0, *ends])]
    below = [getattr(block.attention, "not_positive", 0.0) for block in model.blocks]
    return {"rate": rate, "curve": curve, "loss": curve[-1], "bits": bits, "not positive": max(below)}


def _lengths(made: Row) -> list[int]:
    return [made["seq"] << n for n in range(20) if made["seq"] << n <= made["longest"]]


def _not_positive(made: Row) -> list[int]:
    """In how many draws the rotated denominator of the last token is 0 or less, by length."""
    rope = Rope(head_dim=64, pairing="half")
    found = [0] * len(made["sums"])
    for seed in range(made["draws"]):
        draw = np.random.default_rng(seed)
        query, keys = draw.standard_normal(64), draw.standard_normal((max(made["sums"]), 64))
        for i, length in enumerate(made["sums"]):
            # the weights are divided by the unrotated denominator, which is positive
            found[i] += bool(linear_weights(query, keys[:length], rope).sum() <= 0)
    return found


@torch.no_grad()
def _seconds(made: Row) -> dict[str, list[float]]:
    """Seconds for the attention of 2 heads of 32, forwards, by length: the median of five."""
    rope = Rope(head_dim=32, pairing="half")
    found: dict[str, list[float]] = {"softmax": [], "linear": []}
    for length in made["timed"]:
        q, k, v = torch.randn(3, 1, length, 2, 32)
        positions = torch.arange(length)

        def softmax() -> None:
            turned = rotate_qk(q, k, positions, rope)  # noqa: B023
            heads = [x.transpose(1, 2) for x in (*turned, v)]  # noqa: B023
            nnf.scaled_dot_product_attention(*heads, is_causal=True)

        def linear() -> None:
            linear_attention(q, k, v, positions, rope, causal=True)  # noqa: B023

        for name, call in (("softmax", softmax), ("linear", linear)):
            times: list[float] = []
            for _ in range(6):
                begin = time.process_time()
                call()
                times.append(time.process_time() - begin)
            found[name].append(statistics.median(times[1:]))
    return found


def _streaming(made: Row) -> float:
    """The largest difference between one token at a time and the quadratic sum, in float64."""
    rope = Rope(head_dim=32, pairing="half")
    q, k, v = torch.randn(3, 1, 200, 2, 32, dtype=torch.float64)
    above, below = rotate_qk(elu_plus_one(q), elu_plus_one(k), torch.arange(200), rope), None
    weights = torch.einsum("bmhd,bnhd->bhmn", *above).tril()
    below = torch.einsum("bmhd,bnhd->bhmn", elu_plus_one(q), elu_plus_one(k)).tril().sum(-1)
    wanted = torch.einsum("bhmn,bnhd->bmhd", weights / below[..., None], v)
    state = LinearState()
    steps = [
        linear_attention(*(x[:, p : p + 1] for x in (q, k, v)), p, rope, causal=True, state=state)
        for p in range(200)
    ]
    return (torch.cat(steps, 1) - wanted).abs().max().item()
