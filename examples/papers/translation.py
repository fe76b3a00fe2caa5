"""Translation: an encoder reads dates in digits, a decoder writes them in words.

A sentence is a row of dates, month before day: ``03210704``. Its translation has the day first, and
a word or two for it: ``twenty one march four july``. So what is translated next stands at no
fixed distance.
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
from phasor.torch import RotaryAttention

from .convergence import Sinusoidal
from .models import Block
from .pictures import bands, by_rate, lines, marked
from .study import Row, Study
from .training import fit

ONES = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
ONES += "fifteen sixteen seventeen eighteen nineteen"
MONTHS = "january february march april may june july august september october november december"
WORDS = ["<end>", "<begin>", *ONES.split(), "twenty", "thirty", *MONTHS.split()]
INDEX = {word: number for number, word in enumerate(WORDS)}
CONTENDERS = ("RoPE", "sinusoidal")


def settings(quick: bool) -> Row:
    """The sizes; the quick ones take seconds and learn little."""
    sizes = {"width": 64, "heads": 2, "layers": 2, "dates": 4, "longer": [5, 6, 8], "rows": 64}
    plan = {"steps": 400, "every": 40, "test_rows": 256, "rates": [1e-3, 3e-3, 1e-2, 3e-2]}
    if quick:
        sizes |= {"width": 32, "heads": 1, "layers": 1, "rows": 8}
        plan |= {"steps": 10, "every": 5, "test_rows": 16, "rates": [1e-2]}
    return sizes | plan


def run(study: Study) -> None:
    """Both contenders with every rate."""
    for name in CONTENDERS:
        study.compare(name, partial(_train, study.settings, name))


class Translator(nn.Module):
    """Digits ``[batch, digits]`` and the words so far ``[batch, words]`` to logits of the next."""

    def __init__(self, made: Row, name: str) -> None:
        super().__init__()
        width, head_dim = made["width"], made["width"] // made["heads"]
        rope = Rope(head_dim=head_dim, pairing="half") if name == "RoPE" else None
        layer = partial(RotaryAttention, rope, width, made["heads"], head_dim=head_dim)
        blocks = range(made["layers"])
        self.digits, self.words = nn.Embedding(10, width), nn.Embedding(len(WORDS), width)
        self.absolute = Sinusoidal(width) if rope is None else None
        self.encoder = nn.ModuleList(Block(width, layer(causal=False)) for _ in blocks)
        # of words by words before them, then of words by digits
        self.decoder = nn.ModuleList(
            Block(width, layer(causal=causal)) for _ in blocks for causal in (True, False)
        )
        self.encoded, self.logits = nn.RMSNorm(width), nn.Linear(width, len(WORDS))

    def forward(self, digits: Tensor, words: Tensor) -> Tensor:
        memory, x = self.digits(digits), self.words(words)
        if self.absolute is not None:
            memory, x = (part + self.absolute(part.shape[1]) for part in (memory, x))
        for block in self.encoder:
            memory = block(memory)
        memory = self.encoded(memory)
        for block in self.decoder:
            x = block(x) if block.attention.causal else block(x, key_value_states=memory)
        return self.logits(x)


def translate(month: int, day: int) -> list[str]:
    """A date in words."""
    ones = [ONES.split()[day % 10 if day > 19 else day]] if day < 20 or day % 10 else []
    tens = ["twenty" if day < 30 else "thirty"] if day > 19 else []
    return [*tens, *ones, MONTHS.split()[month - 1]]


def sentences(seed: list[int], rows: int, dates: int) -> tuple[Tensor, Tensor]:
    """Digits ``[rows, 4 dates]``, and words that end with one ``<end>`` at least."""
    draw = np.random.default_rng(seed)
    months, days = draw.integers(1, 13, (rows, dates)), draw.integers(1, 32, (rows, dates))
    digits = np.stack([months // 10, months % 10, days // 10, days % 10], -1).reshape(rows, -1)
    spoken = [
        [INDEX[word] for date in zip(*row, strict=True) for word in translate(*date)]
        for row in zip(months, days, strict=True)
    ]
    longest = 1 + max(map(len, spoken))
    words = [row + [INDEX["<end>"]] * (longest - len(row)) for row in spoken]
    return torch.from_numpy(digits), torch.tensor(words)


def _train(made: Row, name: str, key: str, rate: float, seed: int) -> Row:
    torch.manual_seed(seed)
    model = Translator(made, name)

    def read(digits: Tensor, words: Tensor) -> Tensor:
        before = nnf.pad(words[:, :-1], (1, 0), value=INDEX["<begin>"])
        return model(digits, before).mT

    def loss(step: int) -> Tensor:
        dates = 1 + step % made["dates"]
        digits, words = sentences([seed, step], made["rows"], dates)
        return nnf.cross_entropy(read(digits, words), words)

    @torch.no_grad()
    def test(dates: int) -> tuple[float, float]:
        """Bits for a word; the share of sentences that greedy decoding writes without a mistake."""
        # it does so where every word is the likeliest after the right ones before it
        digits, words = sentences([10**6, dates], made["test_rows"], dates)
        logits = read(digits, words)
        exact = (logits.argmax(1) == words).all(1).double().mean().item()
        return nnf.cross_entropy(logits, words).item() / math.log(2), exact

    curve = fit(model, loss, made, rate, key, lambda: test(made["dates"])[1])
    bits, exact = zip(*map(test, [made["dates"], *made["longer"]]), strict=True)
    return {"curve": curve, "loss": bits[0], "bits": bits, "exact": exact}


def tables(study: Study) -> str:
    """Exact match and bits, by the number of dates in a sentence."""
    dates = [study.settings["dates"], *study.settings["longer"]]
    return "\n\n".join(
        by_rate(study, [f"{title}, dates", *dates], CONTENDERS, [what])
        for title, what in (("sentences without a mistake", "exact"), ("bits for a word", "bits"))
    )


def chart(study: Study) -> alt.TopLevelMixin:
    """Exact match against the number of dates."""
    dates = [study.settings["dates"], *study.settings["longer"]]
    x = alt.X("x:Q", title="dates", scale=alt.Scale(domain=[dates[0] - 1, dates[-1]]))
    y = alt.Y("mean:Q", title="sentences without a mistake", scale=alt.Scale(domain=[0, 1]))
    rows = bands(study, CONTENDERS, "exact", dates)
    return marked(lines(rows, CONTENDERS, x=x, y=y, width=520, height=260), x=dates[0])
