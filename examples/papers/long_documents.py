"""Long documents: a label whose evidence lies beyond the length of the training.

A document is a row of letters with one mark among them, and its label is the letter after the mark.
The model answers at the document's first token. Trained documents have the mark anywhere; longer
ones have it where no trained document reached.
"""

from __future__ import annotations

from functools import partial

import altair as alt
import numpy as np
import torch
import torch.nn.functional as nnf
from torch import Tensor

from phasor import Rope

from .convergence import Learned
from .models import Attention, Transformer
from .pictures import bands, by_rate, lines, log2, marked
from .study import Row, Study
from .training import doublings, fit

LETTERS = 16
MARK, FIRST = LETTERS, LETTERS + 1
CONTENDERS = ("RoPE", "learned")


def settings(quick: bool) -> Row:
    """The sizes; the quick ones take seconds and learn little."""
    sizes = {"width": 64, "heads": 2, "layers": 2, "seq": 32, "longest": 256, "rows": 32}
    plan = {"steps": 500, "every": 50, "test_rows": 256, "rates": [1e-3, 3e-3, 1e-2, 3e-2]}
    if quick:
        sizes |= {"width": 32, "heads": 1, "rows": 8, "longest": 64}
        plan |= {"steps": 10, "every": 5, "test_rows": 16, "rates": [1e-2]}
    return sizes | plan


def run(study: Study) -> None:
    """Both contenders with every rate."""
    for name in CONTENDERS:
        study.compare(name, partial(_train, study.settings, name))


def documents(seed: list[int], rows: int, first: int, length: int) -> tuple[Tensor, Tensor]:
    """Tokens ``[rows, length]``, the mark at ``first`` or after it; and the labels ``[rows]``."""
    draw = np.random.default_rng(seed)
    tokens = torch.from_numpy(draw.integers(LETTERS, size=(rows, length)))
    marks = torch.from_numpy(draw.integers(max(1, first), length - 1, size=(rows, 1)))
    labels = tokens.gather(1, marks + 1)[:, 0]
    tokens[:, 0] = FIRST
    return tokens.scatter(1, marks, MARK), labels


def _train(made: Row, name: str, key: str, rate: float, seed: int) -> Row:
    torch.manual_seed(seed)
    width, heads = made["width"], made["heads"]
    rope = Rope(head_dim=width // heads, pairing="half") if name == "RoPE" else None
    # training meets the vectors of the first seq positions only
    absolute = None if rope else Learned(width, made["longest"])
    layer = partial(Attention, width, heads, rope=rope, causal=False)
    model = Transformer(FIRST + 1, width, made["layers"], layer, absolute)

    def loss(step: int) -> Tensor:
        # some are shorter, as documents are, and show first what to look for
        length = made["seq"] >> step % 4
        tokens, labels = documents([seed, step], made["rows"], 0, length)
        return nnf.cross_entropy(model(tokens)[:, 0], labels)

    @torch.no_grad()
    def test(length: int) -> tuple[float, float]:
        first = made["seq"] if length > made["seq"] else 0
        tokens, labels = documents([10**6, length], made["test_rows"], first, length)
        answers = torch.cat([model(part)[:, 0] for part in tokens.split(16)])
        right = (answers.argmax(-1) == labels).double().mean().item()
        return nnf.cross_entropy(answers, labels).item(), right

    curve = fit(model, loss, made, rate, key, lambda: test(made["seq"])[1])
    losses, accuracy = zip(*map(test, doublings(made["seq"], made["longest"])), strict=True)
    return {"curve": curve, "loss": losses[0], "accuracy": accuracy}


def tables(study: Study) -> str:
    """Accuracy against length."""
    lengths = doublings(study.settings["seq"], study.settings["longest"])
    return by_rate(study, ["labels found, of documents of", *lengths], CONTENDERS, ["accuracy"])


def chart(study: Study) -> alt.TopLevelMixin:
    """Accuracy against length, with the trained length and what guessing finds."""
    lengths = doublings(study.settings["seq"], study.settings["longest"])
    x = log2("tokens", lengths).scale(type="log", base=2, domain=[lengths[0] / 2, lengths[-1]])
    y = alt.Y("mean:Q", title="labels found", scale=alt.Scale(domain=[0, 1]))
    rows = bands(study, CONTENDERS, "accuracy", lengths)
    curves = lines(rows, CONTENDERS, x=x, y=y, width=520, height=260)
    return marked(curves, x=lengths[0], y=1 / LETTERS)
