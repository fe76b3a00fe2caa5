"""The text, the training loop and the losses of the experiments."""

from __future__ import annotations

import math
import statistics
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as nnf
from rich.progress import track
from torch import Tensor, nn

from .study import Row


@dataclass(frozen=True, eq=False)
class Text:
    """The bytes of Python's own standard library, every eighth file held out."""

    train: np.ndarray
    held_out: np.ndarray

    @classmethod
    def load(cls) -> Text:
        """The modules that stand directly in the folder of the standard library."""
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        content = [np.frombuffer(file.read_bytes(), np.uint8) for file in files]
        train = [text for i, text in enumerate(content) if i % 8]
        return cls(np.concatenate(train), np.concatenate(content[::8]))

    def batch(self, seed: Sequence[int], rows: int, length: int) -> Tensor:
        """Training bytes ``[rows, length]``, drawn by the seed alone."""
        return _windows(self.train, np.random.default_rng(seed), rows, length)

    def test(self, rows: int, length: int) -> Tensor:
        """Held-out bytes ``[rows, length]``, the same whoever asks."""
        return _windows(self.held_out, np.random.default_rng(0), rows, length)


def _windows(text: np.ndarray, draw: np.random.Generator, rows: int, length: int) -> Tensor:
    starts = draw.integers(len(text) - length, size=rows)
    return torch.from_numpy(np.stack([text[s : s + length] for s in starts]).astype(np.int64))


def doublings(first: int, last: int) -> list[int]:
    """``first``, twice as much, and so on up to ``last``."""
    return [first << n for n in range(40) if first << n <= last]


def next_token_bits(model: nn.Module, rows: Tensor) -> Tensor:
    """Bits needed for each token but the first, ``[batch, seq] -> [batch, seq - 1]``."""
    logits = model(rows[:, :-1])
    return nnf.cross_entropy(logits.mT, rows[:, 1:], reduction="none") / math.log(2)


def bits_by_length(model: nn.Module, rows: Tensor, ends: Sequence[int]) -> list[float]:
    """Mean bits of the tokens up to the first end, from there to the second, and so on."""
    with torch.no_grad():
        bits = torch.cat([next_token_bits(model, row[None]) for row in rows])
    return [bits[:, a:b].mean().item() for a, b in pairwise([0, *ends])]


def fit(
    model: nn.Module,
    loss: Callable[[int], Tensor],
    made: Row,
    rate: float,
    label: str,
    watch: Callable[[], float] | None = None,
) -> list[float]:
    """Train with AdamW: a short warm-up, then half a cosine down to a tenth of the rate.

    ``made`` says how many ``steps``, and ``every`` how many ``watch`` is called, without a
    gradient; what it returned is returned.
    """
    steps = made["steps"]
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=rate, betas=(0.9, 0.95), weight_decay=0.01)
    warmup = max(1, steps // 20)

    def factor(step: int) -> float:
        done = max(0, step - warmup) / max(1, steps - warmup)
        return min(1.0, (step + 1) / warmup) * (0.55 + 0.45 * math.cos(math.pi * done))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    watched: list[float] = []
    for step in track(range(steps), description=label):
        optimizer.zero_grad()
        loss(step).backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        if watch is not None and (step + 1) % made["every"] == 0:
            with torch.no_grad():
                watched.append(watch())
    return watched


def train_on_text(made: Row, text: Text, model: nn.Module, key: str, rate: float, seed: int) -> Row:
    """Train on the next byte with the sizes in ``made``; the curve of the held-out bits."""
    test = text.test(64, made["seq"] + 1)

    def loss(step: int) -> Tensor:
        rows = text.batch([seed, step], made["rows"], made["seq"] + 1)
        return next_token_bits(model, rows).mean()

    def watch() -> float:
        return next_token_bits(model, test).mean().item()

    curve = fit(model, loss, made, rate, key, watch)
    return {"curve": curve, "loss": curve[-1]}


def milliseconds(call: Callable[[], object], calls: int) -> float:
    """Processor time of one call: the median, each over enough calls for the clock."""
    times: list[float] = []
    call()
    for _ in range(calls):
        begin, done = time.process_time(), 0
        while done == 0 or time.process_time() - begin < 0.002:
            call()
            done += 1
        times.append((time.process_time() - begin) / done)
    return 1000 * statistics.median(times)
