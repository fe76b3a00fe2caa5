"""Linear attention with and without a rope, and with a denominator that is rotated too.

A model of bytes is trained on 128 tokens with each kind of attention and read at up to 2,048.
Beside it: how often a rotated denominator is not positive for random queries and keys, and how
time grows with the length.
"""

from __future__ import annotations

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
from phasor.torch.papers.feature_maps import FeatureMaps, PositiveRandomFeatures
from phasor.torch.papers.linear import linear_attention

from .models import Attention, Transformer, rotary
from .pictures import bands, by_rate, curves, lines, log2, mean_and_spread, table
from .study import Row, Study
from .training import Text, bits_by_length, doublings, milliseconds, train_on_text

# name: features (none for softmax), whether it rotates, and the denominator too
CONTENDERS = {
    "softmax, RoPE": ("", True, False),
    "linear, no RoPE": ("elu", False, False),
    "linear, RoPE (eq. 19)": ("elu", True, False),
    "linear, RoPE below too": ("elu", True, True),
    "Performer, no RoPE": ("random", False, False),
    "Performer, RoPE (eq. 19)": ("random", True, False),
}


def settings(quick: bool) -> Row:
    """The sizes; the quick ones take seconds."""
    sizes = {"width": 64, "heads": 2, "head_dim": 32, "layers": 2, "seq": 128, "longest": 2048}
    plan = {"rows": 4, "steps": 240, "every": 30, "windows": 4, "rates": [1e-3, 3e-3, 1e-2, 3e-2]}
    sums = {"draws": 20, "sums": doublings(128, 32_768), "timed": doublings(256, 8192)}
    if quick:
        sizes |= {"width": 32, "heads": 1, "seq": 64, "longest": 128}
        plan |= {"steps": 20, "every": 10, "windows": 1, "rates": [1e-2]}
        sums = {"draws": 5, "sums": [128, 1024], "timed": [128, 256]}
    return sizes | plan | sums


def run(study: Study) -> None:
    """Random draws and times first, then every contender with every rate."""
    study.measure("not positive", lambda: _not_positive(study.settings))
    study.measure("milliseconds", lambda: _milliseconds(study.settings))
    text = Text.load()
    for name in CONTENDERS:
        study.compare(name, partial(_train, study.settings, text, name))


def elu_plus_one(x: Tensor) -> Tensor:
    """The features of Katharopoulos et al. (2006.16236), all positive."""
    return nnf.elu(x) + 1


def rotated_below(q: Tensor, k: Tensor, v: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
    """RoFormer's eq. 19 with a denominator that is rotated too: output, denominators."""
    rotated = rotate_qk(elu_plus_one(q), elu_plus_one(k), torch.arange(q.shape[1]), rope)
    # [batch, seq, heads, features] -> [batch, heads, seq, seq]
    weights = torch.einsum("bmhd,bnhd->bhmn", *rotated).tril()
    below = weights.sum(-1, keepdim=True)
    return torch.einsum("bhmn,bnhd->bmhd", weights / below, v), below


class LinearAttention(nn.Module):
    """Causal linear attention between linear maps, with one of the contenders' denominators."""

    def __init__(self, made: Row, features: str, rotates: bool, below_too: bool) -> None:
        super().__init__()
        self.heads, inner = made["heads"], made["heads"] * made["head_dim"]
        self.features: FeatureMaps = elu_plus_one
        count = made["head_dim"]
        if features == "random":  # positive and orthogonal (Performer 2009.14794), twice as many
            count, drawn = 2 * count, int(torch.randint(2**31, ()))
            self.features = PositiveRandomFeatures(made["head_dim"], count, seed=drawn)
        # no pair of p-RoPE with p = 0 turns, so that both contenders run the same code
        law = None if rotates else Proportional(fraction=0.0)
        self.rope = Rope(head_dim=count, pairing="half", scaling=law)
        self.below_too, self.not_positive = below_too, 0.0
        self.projections = nn.ModuleList(nn.Linear(made["width"], inner, bias=False) for _ in "qkv")
        self.o_proj = nn.Linear(inner, made["width"], bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # [batch, seq, width] -> [batch, seq, heads, head_dim]
        q, k, v = (project(x).unflatten(-1, (self.heads, -1)) for project in self.projections)
        if self.below_too:
            out, below = rotated_below(q, k, v, self.rope)
            self.not_positive = (below <= 0).double().mean().item()
        else:
            positions = torch.arange(x.shape[1])
            out = linear_attention(
                *(q, k, v, positions, self.rope), causal=True, feature_map=self.features
            )
        return self.o_proj(out.flatten(2))


def _train(made: Row, text: Text, name: str, key: str, rate: float, seed: int) -> Row:
    torch.manual_seed(seed)
    sizes = 256, made["width"], made["layers"]
    layer = partial(LinearAttention, made, *CONTENDERS[name])
    rope = Rope(head_dim=made["head_dim"], pairing="half")
    model = Transformer(*sizes, layer) if CONTENDERS[name][0] else rotary(made, 256, rope)
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
    layers = {"softmax": softmax, "linear": LinearAttention(made, "elu", True, False)}
    inputs = [torch.randn(1, length, made["width"]) for length in made["timed"]]
    return {
        name: [milliseconds(partial(layer, x), 5) for x in inputs] for name, layer in layers.items()
    }


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
            by_rate(study, ["bits per byte, tokens", *ends], CONTENDERS, ["bits"]),
            table([f"draws of {made['draws']}, tokens", *made["sums"]], [draws]),
            f"Of the trained models' rotated denominators a share of {share} is not positive "
            f"within {made['longest']} tokens, in the layer that has more of them.",
            table(["time, softmax at the first length = 1, tokens", *made["timed"]], times),
        )
    )


def chart(study: Study) -> alt.TopLevelMixin:
    """Held-out loss by step and by length."""
    made, names = study.settings, tuple(CONTENDERS)
    ends = doublings(made["seq"], made["longest"])
    x = log2("tokens", ends)
    y = alt.Y("mean:Q", title="bits per byte", scale=alt.Scale(zero=False))
    by_length = lines(bands(study, names, "bits", ends), names, x=x, y=y)
    return alt.hconcat(curves(study, names, "bits per byte"), by_length)
