"""Faster convergence: masked bytes, five ways to say where a token stands, equal steps for each.

What was trained at positions from 0 on is then read at positions from others on.
"""

from __future__ import annotations

import math
from functools import partial

import altair as alt
import numpy as np
import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from phasor import Rope

from .models import Attention, Transformer
from .pictures import by_rate, curves, mean_and_spread, steps_of, table
from .study import Row, Study
from .training import Text, fit

MASK = 256  # bytes are tokens 0 to 255
CONTENDERS = ("RoPE", "sinusoidal", "learned", "ALiBi", "none")


def settings(quick: bool) -> Row:
    """The sizes; the quick ones take seconds."""
    sizes = {"width": 64, "heads": 4, "head_dim": 32, "layers": 2, "seq": 64, "rows": 8}
    plan = {"masked": 0.15, "steps": 400, "every": 40, "test_rows": 64, "test_rows_at_last": 256}
    plan |= {"rates": [1e-3, 3e-3, 1e-2, 3e-2], "first": [0, 64]}
    if quick:
        sizes |= {"width": 32, "heads": 2, "head_dim": 16}
        plan |= {"steps": 40, "every": 20, "test_rows_at_last": 64, "rates": [1e-2]}
    return sizes | plan


def run(study: Study) -> None:
    """Every contender with every rate."""
    text = Text.load()
    for name in CONTENDERS:
        study.compare(name, partial(_train, study.settings, text, name))


def rope(made: Row) -> Rope:
    """The rope of every layer."""
    return Rope(head_dim=made["head_dim"], pairing="half", base=10_000.0)


class Sinusoidal(nn.Module):
    """Sines and cosines of the position, added to the embeddings (Vaswani et al., section 3.5)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inv_freq, self.first = 10_000.0 ** (-torch.arange(0, width, 2) / width), 0

    def forward(self, seq: int) -> Tensor:
        angles = (self.first + torch.arange(seq))[:, None] * self.inv_freq
        return torch.cat((angles.sin(), angles.cos()), -1)


class Learned(nn.Module):
    """A vector for each position, drawn as the embeddings of the tokens are."""

    def __init__(self, width: int, longest: int) -> None:
        super().__init__()
        self.vectors, self.first = nn.Embedding(longest, width), 0

    def forward(self, seq: int) -> Tensor:
        return self.vectors.weight[self.first : self.first + seq]


def alibi(heads: int, seq: int) -> Tensor:
    """ALiBi's bias on the scores, ``[heads, seq, seq]``: distance times a slope for each head.

    Symmetric, as encoders have it (Press et al. 2108.12409 for the slopes).
    """
    slopes = 2.0 ** (-8 * torch.arange(1, heads + 1) / heads)
    positions = torch.arange(seq)
    return -slopes[:, None, None] * (positions[:, None] - positions).abs()


def model(made: Row, name: str, seed: int) -> Transformer:
    """A contender with its first weights."""
    torch.manual_seed(seed)
    width, heads = made["width"], made["heads"]

    def attention() -> Attention:
        return Attention(
            *(width, heads),
            head_dim=made["head_dim"],
            rope=rope(made) if name == "RoPE" else None,
            bias=(lambda seq: alibi(heads, seq)) if name == "ALiBi" else None,
            causal=False,
        )

    longest = made["seq"] + max(made["first"])  # training meets the vectors of the first seq
    absolute = {"sinusoidal": Sinusoidal(width), "learned": Learned(width, longest)}.get(name)
    return Transformer(MASK + 1, width, made["layers"], attention, absolute)


def mask(rows: Tensor, share: float, seed: list[int]) -> tuple[Tensor, Tensor]:
    """The rows with some of their bytes masked, and which ones; the same for every contender."""
    hidden = torch.from_numpy(np.random.default_rng(seed).random(rows.shape) < share)
    return rows.masked_fill(hidden, MASK), hidden


def _train(made: Row, text: Text, name: str, key: str, rate: float, seed: int) -> Row:
    trained = model(made, name, seed)

    def loss_of(rows: Tensor, numbers: list[int]) -> Tensor:
        masked, hidden = mask(rows, made["masked"], numbers)
        return nnf.cross_entropy(trained(masked)[hidden], rows[hidden])

    def loss(step: int) -> Tensor:
        return loss_of(text.batch([seed, step], made["rows"], made["seq"]), [seed, step, 1])

    def bits(rows: int) -> float:
        return loss_of(text.test(rows, made["seq"]), [rows]).item() / math.log(2)

    def moved(first: int) -> float:
        for part in trained.modules():
            if hasattr(part, "first"):
                part.first = first
        with torch.no_grad():
            return bits(made["test_rows_at_last"])

    curve = fit(trained, loss, made, rate, key, lambda: bits(made["test_rows"]))
    read = [moved(first) for first in made["first"]]
    return {"curve": curve, "loss": read[0], "moved": read[1:]}


def tables(study: Study) -> str:
    """The last loss, read elsewhere too, and the steps that RoPE needs for that of the others."""
    steps = steps_of(study.settings)

    def needed(name: str) -> list[int]:
        pairs = zip(study.over_seeds("RoPE", "curve"), study.over_seeds(name, "curve"), strict=True)
        found = [[n for n, x in zip(steps, a, strict=True) if x <= b[-1]] for a, b in pairs]
        return [ns[0] for ns in found] if all(found) else []

    rows = [[name, mean_and_spread(ns, 0)] for name in CONTENDERS[1:] if (ns := needed(name))]
    header = ["bits per masked byte, from position", *study.settings["first"]]
    return "\n\n".join(
        (
            by_rate(study, header, CONTENDERS, ["loss"], ["moved"]),
            table(["", "steps until RoPE is below the end of its curve"], rows),
        )
    )


def chart(study: Study) -> alt.TopLevelMixin:
    """Held-out loss against steps."""
    return curves(study, CONTENDERS, "bits for a masked byte", width=520, height=300)
