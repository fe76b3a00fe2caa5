"""Faster convergence: masked bytes, five ways to say where a token stands, equal steps for each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import altair as alt
import numpy as np
import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from phasor import Rope

from .models import Attention, Transformer
from .pictures import bands, contest, lines, mean_and_spread
from .study import Row, Study
from .training import Text, fit

MASK = 256  # bytes are tokens 0 to 255
CONTENDERS = ("RoPE", "sinusoidal", "learned", "ALiBi", "none")


def settings(quick: bool) -> Row:
    """The sizes; the quick ones take seconds."""
    sizes = {"width": 64, "heads": 4, "head_dim": 32, "layers": 2, "seq": 64, "rows": 16}
    plan = {"masked": 0.15, "steps": 800, "every": 40, "test_rows": 64, "test_rows_at_last": 512}
    plan["rates"] = [1e-3, 3e-3, 1e-2]
    if quick:
        sizes |= {"width": 32, "heads": 2, "head_dim": 16, "rows": 8}
        plan |= {"steps": 40, "every": 20, "test_rows_at_last": 64, "rates": [1e-2]}
    return sizes | plan


def run(study: Study, contenders: Sequence[str] = CONTENDERS) -> None:
    """Every contender with an equally searched rate."""
    text = Text.load()
    for name in contenders:
        study.compare(name, partial(_train, study, text, name))


def rope(made: Row) -> Rope:
    """The rope of every layer."""
    return Rope(head_dim=made["head_dim"], pairing="half", base=10_000.0)


class Sinusoidal(nn.Module):
    """Sines and cosines of the position, added to the embeddings (Vaswani et al., section 3.5)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inv_freq = 10_000.0 ** (-torch.arange(0, width, 2) / width)

    def forward(self, seq: int) -> Tensor:
        angles = torch.arange(seq)[:, None] * self.inv_freq
        return torch.cat((angles.sin(), angles.cos()), -1)


class Learned(nn.Module):
    """A vector for each position, drawn as the embeddings of the tokens are."""

    def __init__(self, width: int, longest: int) -> None:
        super().__init__()
        self.vectors = nn.Embedding(longest, width)

    def forward(self, seq: int) -> Tensor:
        return self.vectors.weight[:seq]


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

    absolute = {"sinusoidal": Sinusoidal(width), "learned": Learned(width, made["seq"])}.get(name)
    return Transformer(MASK + 1, width, made["layers"], attention, absolute)


def mask(rows: Tensor, share: float, seed: list[int]) -> tuple[Tensor, Tensor]:
    """The rows with some of their bytes masked, and which ones; the same for every contender."""
    hidden = torch.from_numpy(np.random.default_rng(seed).random(rows.shape) < share)
    return rows.masked_fill(hidden, MASK), hidden


def _train(study: Study, text: Text, name: str, key: str, rate: float, seed: int) -> Row:
    made, trained = study.settings, model(study.settings, name, seed)

    def loss_of(rows: Tensor, numbers: list[int]) -> Tensor:
        masked, hidden = mask(rows, made["masked"], numbers)
        return nnf.cross_entropy(trained(masked)[hidden], rows[hidden])

    def loss(step: int) -> Tensor:
        return loss_of(text.batch([seed, step], made["rows"], made["seq"]), [seed, step, 1])

    def bits(rows: int) -> float:
        return loss_of(text.test(rows, made["seq"]), [rows]).item() / math.log(2)

    curve = fit(
        *(trained, loss),
        steps=made["steps"],
        rate=rate,
        label=key,
        watch=lambda: bits(made["test_rows"]),
        every=made["every"],
    )
    study.keep(key, trained)
    with torch.no_grad():
        return {"rate": rate, "curve": curve, "loss": bits(made["test_rows_at_last"])}


def _steps_to(made: Row, curve: list[float], goal: float) -> float | None:
    """Steps after which the curve first comes down to the goal, between the two measured ones."""
    steps = [made["every"] * (n + 1) for n in range(len(curve))]
    for (a, high), (b, low) in pairwise(zip(steps, curve, strict=True)):
        if high > goal >= low:
            return a + (b - a) * (high - goal) / (high - low)
    return None


def tables(study: Study) -> str:
    """The last loss, and how many steps RoPE needs for the last loss of each other contender."""
    ropes = study.over_seeds("RoPE", "curve")

    def needed(name: str) -> str:
        goals = [curve[-1] for curve in study.over_seeds(name, "curve")]
        steps = [_steps_to(study.settings, a, goal) for a, goal in zip(ropes, goals, strict=True)]
        reached = [step for step in steps if step is not None]
        return mean_and_spread(reached, 0) if len(reached) == len(steps) > 0 else ""

    rows = {
        name: (
            [study.rate(name), "" if name == "RoPE" else needed(name)],
            [study.over_seeds(name, "loss")],
        )
        for name in CONTENDERS
    }
    header = ["", "rate", "steps RoPE needs for the last of its curve", "bits for a masked byte"]
    return contest(header, rows)


def chart(study: Study) -> alt.TopLevelMixin:
    """Held-out loss against steps."""
    made = study.settings
    steps = [made["every"] * (n + 1) for n in range(made["steps"] // made["every"])]
    rows = bands(study, CONTENDERS, "curve", steps)
    x = alt.X("x:Q", title="steps")
    y = alt.Y("mean:Q", title="bits for a masked byte", scale=alt.Scale(zero=False))
    return lines(rows, CONTENDERS, x=x, y=y, width=520, height=300)
