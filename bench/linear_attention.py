"""Linear against softmax attention: ``python bench/linear_attention.py``, in two minutes.

Writes ``bench/results/linear-attention.md``: how time grows with the length, where linear
attention becomes cheaper than ``scaled_dot_product_attention``, and what memory each takes.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median

import torch
from device import THREADS, peak_rise, processor, restart_with_kept_memory
from facts import fresh
from report import table
from torch import Tensor

from phasor import Rope
from phasor.torch import rotate_qk
from phasor.torch.papers.linear import CHUNK, linear_attention

HEADS, WIDTH = 8, 64
LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
LONGEST_SOFTMAX = {"forward": 8192, "training": 4096}
# a longer length stops after enough seconds, a short one does not: one odd call would show in few
ROUNDS, FEWEST, SHORT, ENOUGH_SECONDS, LIMIT = 15, 3, 1024, 2.0, 1.15
ROPE = Rope(head_dim=WIDTH, pairing="half", base=500_000.0)
RESULT = Path(__file__).with_name("results") / "linear-attention.md"
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Eq. 19, causal."""
    return linear_attention(q, k, v, torch.arange(q.shape[-3]), ROPE, causal=True)


def softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same with softmax: rotated, causal."""
    q, k = rotate_qk(q, k, torch.arange(q.shape[-3]), ROPE)
    heads_first = (x.transpose(-3, -2) for x in (q, k, v))
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(*heads_first, is_causal=True).transpose(-3, -2)


ATTENTIONS: dict[str, Attention] = {"linear": linear, "softmax": softmax}


def random_inputs(seq: int, *, training: bool) -> tuple[Tensor, ...]:
    """A query, a key and a value of one sequence."""
    torch.manual_seed(seq)
    return tuple(torch.randn(1, seq, HEADS, WIDTH, requires_grad=training) for _ in range(3))


def call(attention: Attention, inputs: tuple[Tensor, ...], *, training: bool) -> None:
    """One pass, or one each way."""
    if training:
        attention(*inputs).sum().backward()
    else:
        with torch.no_grad():
            attention(*inputs)


def seconds(*, training: bool) -> dict[str, dict[int, float]]:
    """Median time of a call by attention and length, all taken in turn."""
    longest = LONGEST_SOFTMAX["training" if training else "forward"]
    cases = [
        (name, seq) for name in ATTENTIONS for seq in LENGTHS if name == "linear" or seq <= longest
    ]
    inputs = {seq: random_inputs(seq, training=training) for seq in LENGTHS}
    samples: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    for attempt in range(ROUNDS + 1):
        for name, seq in cases:
            taken = samples[name, seq]
            if seq > SHORT and len(taken) >= FEWEST and sum(taken) > ENOUGH_SECONDS:
                continue
            for x in inputs[seq]:
                x.grad = None
            start = time.perf_counter()
            call(ATTENTIONS[name], inputs[seq], training=training)
            if attempt:
                taken.append(time.perf_counter() - start)
    return {
        name: {seq: median(taken) for (one, seq), taken in samples.items() if one == name}
        for name in ATTENTIONS
    }


def crossing(times: dict[str, dict[int, float]]) -> str:
    """The first length from which linear attention stays the faster one."""
    both = sorted(times["softmax"])
    slower = [seq for seq in both if times["linear"][seq] >= times["softmax"][seq]]
    after = [seq for seq in both if seq > max(slower, default=0)]
    if not after:
        return f"beyond {both[-1]} tokens"
    return f"between {max(slower)} and {after[0]} tokens" if slower else f"below {both[0]} tokens"


def section(title: str, times: dict[str, dict[int, float]]) -> str:
    """Times, both ratios by length, and the verdicts of one kind of call."""
    rows: list[tuple[str, ...]] = []
    for seq in LENGTHS:
        mine, other = times["linear"][seq], times["softmax"].get(seq)
        softmaxes = ("–", "–") if other is None else (f"{1e3 * other:.3g}", f"{other / mine:.2f}")
        rows.append((f"{seq}", f"{1e3 * mine:.3g}", f"{1e6 * mine / seq:.2f}", *softmaxes))
    titles = ("tokens", "linear, ms", "µs per token", "softmax, ms", "softmax / linear")
    grown = times["linear"][65536] / times["linear"][4096] / 16
    held = "held" if grown <= LIMIT else "**short**"
    return (
        f"### {title}\n\n{table(titles, rows)}\n\n"
        f"From 4096 to 65536 tokens time grows by {grown:.2f} times the linear factor "
        f"(limit {LIMIT}: {held}). Linear attention is the faster one {crossing(times)}."
    )


def about() -> str:
    """When, where and with what."""
    return (
        f"Measured {datetime.now(UTC):%Y-%m-%d %H:%M UTC} on {THREADS} threads of "
        f"{processor()}, Python {platform.python_version()}, torch {torch.__version__}, phasor "
        f"{version('phasor')}, load average before {os.getloadavg()[0]:.1f}. "
        f"One sequence of {HEADS} heads of {WIDTH}, float32, causal, rotation included; medians "
        f"of {ROUNDS} rounds in which all are called in turn (of fewer, {FEWEST} at least, where a "
        f"call of more than {SHORT} tokens is slow); chunks of {CHUNK} tokens. malloc "
        "keeps the memory it was given back."
    )


def memory() -> str:
    """How far the peak rises in training, by length, each in a process of its own."""
    rows: list[tuple[str, ...]] = []
    for seq in (4096, 16384, 65536):
        rise, inputs = fresh("linear_attention.py", "--rise", str(seq)), 3 * 4 * seq * HEADS * WIDTH
        rows.append((f"{seq}", f"{rise / 2**20:.0f}", f"{rise / inputs:.1f}"))
    note = (
        "Rise of the peak of resident memory during one forward and backward pass, gradients "
        f"included. A matrix of 65536 × 65536 scores in float32 for {HEADS} heads is "
        f"{HEADS * 2**34 / 2**20:.0f} MB."
    )
    found = table(("tokens", "rise, MB", "of query, key and value"), rows)
    return f"### Memory in training\n\n{found}\n\n{note}"


def main() -> None:
    """Measure, print and write; or measure one peak of memory."""
    torch.set_num_threads(THREADS)
    if sys.argv[1:2] == ["--rise"]:
        call(linear, random_inputs(256, training=True), training=True)
        inputs = random_inputs(int(sys.argv[2]), training=True)
        print(peak_rise(lambda: call(linear, inputs, training=True)))
        return
    parts = [
        about(),
        section("Forward", seconds(training=False)),
        section("Forward and backward", seconds(training=True)),
        memory(),
    ]
    text = "\n\n".join(parts) + "\n"
    print(text)
    RESULT.write_text(text, "utf-8")


if __name__ == "__main__":
    restart_with_kept_memory()
    main()
