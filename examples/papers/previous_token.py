"""A previous-token head, learned: which head does training find, and is it the one built by hand?

One attention head reads Gaussian tokens and has to return the token before each one, so its
weights can only come from positions. The construction (Wendler 2025) needs a constant coordinate
in every token; it is left out in one contender, the rope in another.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import altair as alt
import numpy as np
import torch
from torch import Tensor, nn

from phasor import Rope
from phasor.papers import positional_score
from phasor.papers.heads import attention_weight, required_alpha

from .models import Attention
from .pictures import band, by_rate, curves, lines, mean_and_spread, table
from .study import Row, Study
from .training import fit

# name: whether there is a rope, a constant coordinate, a vocabulary in place of fresh vectors
CONTENDERS = {
    "RoPE and a constant": (True, True, False),
    "RoPE, no constant": (True, False, False),
    "constant, no RoPE": (False, True, False),
    "RoPE, no constant, 32 words": (True, False, True),
}


def settings(quick: bool) -> Row:
    """The sizes; the quick ones take seconds."""
    sizes = {"width": 64, "words": 32, "seq": 64, "longer": 512, "batch": 16}
    # the variance of what is returned is 1
    plan = {"steps": 600, "every": 30, "rates": [3e-3, 1e-2, 3e-2, 1e-1], "enough": 0.01}
    if quick:
        sizes |= {"width": 32, "words": 16, "seq": 16, "longer": 64}
        plan = {"steps": 200, "every": 25, "rates": [3e-2]}
    return sizes | plan


class Head(nn.Module):
    """One causal head whose values are its inputs: what it returns is what it looks at."""

    def __init__(self, width: int, rope: Rope | None) -> None:
        super().__init__()
        self.attention = Attention(width, 1, rope=rope)
        self.attention.v_proj = self.attention.o_proj = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x)


def run(study: Study) -> None:
    """Every contender with a searched rate; the pairs that trained heads use."""
    for name in CONTENDERS:
        study.compare(name, partial(_train, study.settings, name))


def _rope(made: Row) -> Rope:
    return Rope(head_dim=made["width"], pairing="half", base=10_000.0)


def _train(made: Row, name: str, key: str, rate: float, seed: int) -> Row:
    with_rope, constant, words = CONTENDERS[name]
    torch.manual_seed(seed)
    rope = _rope(made)
    head = Head(made["width"], rope if with_rope else None)
    vocabulary = torch.randn(made["words"], made["width"])

    def tokens(numbers: list[int], batch: int, seq: int) -> Tensor:
        state = int(np.random.SeedSequence(numbers).generate_state(1)[0])
        draw = torch.Generator().manual_seed(state)
        x = torch.randn(batch, seq, made["width"], generator=draw)
        if words:
            x = vocabulary[torch.randint(made["words"], (batch, seq), generator=draw)]
        x[..., 0] = 1.0 if constant else x[..., 0]
        return x

    def loss(step: int) -> Tensor:
        x = tokens([seed, step], made["batch"], made["seq"])
        return (head(x)[:, 1:] - x[:, :-1]).square().mean()

    def weight(seq: int) -> float:
        found = head.attention.weights(tokens([seed, 10**6], 8, seq))
        return float(positional_score(found.numpy(), -1)[0])

    curve = fit(head, loss, made, rate, key, lambda: weight(made["seq"]))
    found = {"loss": loss(10**6).item(), "curve": curve, "weight": curve[-1]}
    found["longer"] = weight(made["longer"])
    if with_rope and constant:
        found |= _pairs(made, head.attention, rope)
    return found


@torch.no_grad()
def _pairs(made: Row, attention: Any, rope: Rope) -> Row:
    """What the constant coordinate adds to a score, pair by pair.

    Of the constant alone pair ``p`` adds ``Re(q_p conj(k_p) exp(i (m - n) inv_freq[p]))``. By hand
    ``|q_p conj(k_p)|`` is alpha, and its angle ``-inv_freq[p]``.
    """
    half = made["width"] // 2
    q, k = (
        torch.complex(weight[:half, 0], weight[half:, 0]).numpy()
        for weight in (attention.q_proj.weight.double(), attention.k_proj.weight.double())
    )
    products = q * k.conj()
    inv_freq = 10_000.0 ** (-np.arange(half) / half)
    return {
        "towards": (products * np.exp(1j * inv_freq)).real,
        "alpha": float(np.abs(products).mean()),
        "used": float(np.abs(products).sum() ** 2 / (np.abs(products) ** 2).sum()),
    }


def tables(study: Study) -> str:
    """The weight on the previous token, and the trained head beside the one built by hand."""
    made, rope = study.settings, _rope(study.settings)

    name = next(iter(CONTENDERS))
    weights, lengths = study.over_seeds(name, "weight"), (made["seq"], made["longer"])
    by_hand = [required_alpha(rope, made["seq"], min(weight, 0.9999)) for weight in weights]
    far = [attention_weight(rope, alpha, made["longer"]) for alpha in by_hand]
    alpha, used, longer = (study.over_seeds(name, what) for what in ("alpha", "used", "longer"))
    heads = [
        ["mean alpha of a pair", *(mean_and_spread(x, 1) for x in (alpha, by_hand))],
        ["pairs in use", mean_and_spread(used, 1), made["width"] // 2],
        [f"weight on the previous of {lengths[1]} tokens", *map(mean_and_spread, (longer, far))],
    ]
    header = ["weight on the previous token of", *lengths]
    weights_of_all = by_rate(study, header, CONTENDERS, ["weight"], ["longer"])
    caption = f"the same weight at {made['seq']} tokens"
    return f"{weights_of_all}\n\n{table([caption, 'trained', 'by hand'], heads)}"


def chart(study: Study) -> alt.TopLevelMixin:
    """The weight while training, and what each pair adds to the score of the wanted token."""
    made, name = study.settings, next(iter(CONTENDERS))
    weight = curves(study, CONTENDERS, "weight on the previous token")
    towards = np.array(study.over_seeds(name, "towards"))
    shares = (towards / towards.sum(1, keepdims=True)).tolist()
    pairs = range(made["width"] // 2)
    rows = band(shares, pairs, "trained")
    rows += band([[1 / len(pairs)] * len(pairs)], pairs, "by hand")
    y = alt.Y("mean:Q", title="share of the score")
    x = alt.X("x:Q", title="pair, fast to slow", scale=alt.Scale(domain=[0, len(pairs) - 1]))
    usage = lines(rows, ("trained", "by hand"), x=x, y=y)
    return alt.hconcat(weight, usage).resolve_scale(color="independent", strokeDash="independent")
