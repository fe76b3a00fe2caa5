"""Linear attention with and without a rope, and with a denominator that is rotated too.

A model of bytes is trained on 128 tokens with each kind of attention and read at up to 2,048.
Beside it: how often a rotated denominator is not positive for random queries and keys, how time
grows with the length, and whether the state carried from token to token gives the same sums.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import altair as alt
import numpy as np
import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from phasor import Rope
from phasor.papers import linear_weights
from phasor.scaling import Proportional
from phasor.torch import rotate_qk
from phasor.torch.papers.linear import LinearState, linear_attention

from .models import Attention, Transformer
from .pictures import bands, by_seeds, lines, log2, mean_and_spread, table
from .study import Row, Study
from .training import Text, bits_by_length, doublings, milliseconds, train_on_text

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
    plan = {"rows": 8, "steps": 600, "every": 40, "windows": 8, "rates": [3e-3, 1e-2, 3e-2]}
    sums = {"draws": 20, "sums": doublings(128, 32_768), "timed": doublings(256, 8192)}
    if quick:
        sizes |= {"width": 32, "heads": 1, "seq": 64, "longest": 128}
        plan |= {"rows": 4, "steps": 20, "every": 10, "windows": 1, "rates": [1e-2]}
        sums = {"draws": 5, "sums": [128, 1024], "timed": [128, 256]}
    return sizes | plan | sums


def run(study: Study) -> None:
    """Random draws and times first, then every contender with an equally searched rate."""
    study.measure("not positive", lambda: _not_positive(study.settings))
    study.measure("milliseconds", lambda: _milliseconds(study.settings))
    study.measure("streaming", _streaming)
    text = Text.load()
    for name in CONTENDERS:
        study.compare(name, partial(_train, study.settings, text, name))


def elu_plus_one(x: Tensor) -> Tensor:
    """The features of Katharopoulos et al. (2006.16236), all positive."""
    return nnf.elu(x) + 1


def wide(x: Tensor) -> Tensor:
    """Twice as many features, of a coordinate and of its opposite: twice as wide a state."""
    return torch.cat((elu_plus_one(x), elu_plus_one(-x)), -1)


def quadratic(
    q: Tensor, k: Tensor, v: Tensor, rope: Rope, *, below_too: bool
) -> tuple[Tensor, Tensor]:
    """RoFormer's eq. 19 as it is written, or with a rotated denominator: output, denominators."""
    plain = elu_plus_one(q), elu_plus_one(k)
    rotated = rotate_qk(*plain, torch.arange(q.shape[1]), rope)
    # [batch, seq, heads, features] -> [batch, heads, seq, seq]
    above = torch.einsum("bmhd,bnhd->bhmn", *rotated).tril()
    weights = above if below_too else torch.einsum("bmhd,bnhd->bhmn", *plain).tril()
    below = weights.sum(-1, keepdim=True)
    return torch.einsum("bhmn,bnhd->bmhd", above / below, v), below


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
            out, below = quadratic(q, k, v, self.rope, below_too=True)
            self.not_positive = (below <= 0).double().mean().item()
        else:
            positions = torch.arange(x.shape[1])
            out = linear_attention(
                *(q, k, v, positions, self.rope), causal=True, feature_map=self.features
            )
        return self.o_proj(out.flatten(2))


def _train(made: Row, text: Text, name: str, key: str, rate: float, seed: int) -> Row:
    torch.manual_seed(seed)
    layer = partial(LinearAttention, made, *CONTENDERS[name])
    if not CONTENDERS[name][0]:
        rope = Rope(head_dim=made["head_dim"], pairing="half")
        sizes = made["width"], made["heads"]
        layer = partial(Attention, *sizes, head_dim=rope.head_dim, rope=rope)
    model = Transformer(256, made["width"], made["layers"], layer)
    found = train_on_text(made, text, model, key, rate, seed)
    windows = text.test(made["windows"], made["longest"] + 1)
    found["bits"] = bits_by_length(model, windows, doublings(made["seq"], made["longest"]))
    below = [getattr(block.attention, "not_positive", 0.0) for block in model.blocks]
    return found | {"not positive": max(below)}


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
def _milliseconds(made: Row) -> dict[str, list[float]]:
    """Time for a layer of attention, forwards, by length."""
    rope = Rope(head_dim=made["head_dim"], pairing="half")
    softmax = Attention(made["width"], made["heads"], head_dim=rope.head_dim, rope=rope)
    found: dict[str, list[float]] = {}
    for name, layer in (("softmax", softmax), ("linear", LinearAttention(made, 1, True, False))):
        inputs = [torch.randn(1, length, made["width"]) for length in made["timed"]]
        found[name] = [milliseconds(partial(layer, x), 5) for x in inputs]
    return found


def _streaming() -> float:
    """The largest difference between a token at a time and eq. 19 as it is written, in float64."""
    rope = Rope(head_dim=32, pairing="half")
    q, k, v = torch.randn(3, 1, 200, 2, 32, dtype=torch.float64)
    wanted, _ = quadratic(q, k, v, rope, below_too=False)
    state = LinearState()
    steps = [
        linear_attention(*(x[:, p : p + 1] for x in (q, k, v)), p, rope, causal=True, state=state)
        for p in range(200)
    ]
    return (torch.cat(steps, 1) - wanted).abs().max().item()


def tables(study: Study) -> str:
    """Loss by length, denominators that are not positive, and time by length."""
    made, found = study.settings, study.measured
    ends = [f"to {end}" for end in doublings(made["seq"], made["longest"])]
    share = mean_and_spread(study.over_seeds("linear, RoPE below too", "not positive"))
    unit = found["milliseconds"]["softmax"][0]
    times = ([name, *(f"{x / unit:.1f}" for x in xs)] for name, xs in found["milliseconds"].items())
    draws = ["rotated denominator not positive", *found["not positive"]]
    return "\n\n".join(
        (
            by_seeds(study, ["bits per byte, tokens", *ends], CONTENDERS, "bits"),
            table([f"draws of {made['draws']}, tokens", *made["sums"]], [draws]),
            f"Of the trained models' rotated denominators a share of {share} is not positive "
            f"within {made['longest']} tokens, in the layer that has more of them.",
            table(["time, softmax at the first length = 1, tokens", *made["timed"]], times),
            f"A token at a time differs from eq. 19 as it is written by {found['streaming']:.1e} "
            "at most.",
        )
    )


def chart(study: Study) -> alt.TopLevelMixin:
    """Held-out loss by step and by length."""
    made, names = study.settings, tuple(CONTENDERS)
    steps = range(made["every"], made["steps"] + 1, made["every"])
    ends = doublings(made["seq"], made["longest"])
    x = log2("tokens", ends)
    y = alt.Y("mean:Q", title="bits per byte", scale=alt.Scale(zero=False))
    curves = bands(study, names, "curve", steps)
    by_length = lines(bands(study, names, "bits", ends), names, x=x, y=y)
    return alt.hconcat(lines(curves, names, x=alt.X("x:Q", title="steps"), y=y), by_length)
