"""Linear against softmax attention: ``python bench/linear_attention.py``, in three minutes.

Writes ``bench/results/linear-attention.md``: how time grows with the length, with memory that
malloc keeps and with malloc as it comes, where linear attention becomes cheaper than
``scaled_dot_product_attention``, and what memory training takes.
"""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import linear_regression, median
from typing import Any

import torch
from device import THREADS, peak_rise, processor, restart_with_kept_memory
from facts import fresh
from report import table
from torch import Tensor

from phasor import Rope
from phasor.errors import DISTRIBUTION
from phasor.torch import rotate_qk
from phasor.torch.papers.linear import BLOCK, CHUNK, linear_attention

HEADS, WIDTH = 8, 64
LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
LONGEST_SOFTMAX = {"forward": 8192, "training": 4096}
# a longer length stops after enough seconds, a short one does not: one odd call would show in few
ROUNDS, FEWEST, SHORT, ENOUGH_SECONDS = 15, 3, 1024, 2.0
# time grows as tokens to this power at most, from the first to the last of the lengths
EXPONENT, GROWN = 1.05, (4096, 8192, 16384, 32768, 65536)
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


def least(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """An output and gradients of the same sizes, and as little work as there can be."""
    return torch.addcmul(q, k, v)


ATTENTIONS: dict[str, Attention] = {"linear": linear, "softmax": softmax, "least": least}


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


def seconds(*, training: bool, names: Iterable[str] | None = None) -> dict[str, dict[int, float]]:
    """Median time of a call by attention (of all, or of ``names``) and length, taken in turn."""
    names = ATTENTIONS if names is None else names
    longest = LONGEST_SOFTMAX["training" if training else "forward"]
    cases = [
        (name, seq) for name in names for seq in LENGTHS if name != "softmax" or seq <= longest
    ]
    inputs = {seq: random_inputs(seq, training=training) for seq in LENGTHS}
    samples: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    for attempt in range(ROUNDS + 1):
        print(f"{'training' if training else 'forward'}, {attempt}/{ROUNDS}", file=sys.stderr)
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
        for name in names
    }


def exponents(times: Mapping[int, float]) -> tuple[float, float]:
    """Of tokens, how time grows: between the ends of `GROWN`, and fitted to all of it."""
    logs = [(math.log(seq), math.log(times[seq])) for seq in GROWN]
    (x0, y0), *_, (x1, y1) = logs
    return (y1 - y0) / (x1 - x0), linear_regression(*zip(*logs, strict=True)).slope


def crossing(times: dict[str, dict[int, float]]) -> str:
    """The first length from which linear attention stays the faster one."""
    both = sorted(times["softmax"])
    slower = [seq for seq in both if times["linear"][seq] >= times["softmax"][seq]]
    after = [seq for seq in both if seq > max(slower, default=0)]
    if not after:
        return f"beyond {both[-1]} tokens"
    return f"between {max(slower)} and {after[0]} tokens" if slower else f"below {both[0]} tokens"


def section(title: str, times: dict[str, dict[int, float]], usual: dict[str, Any]) -> str:
    """Times, both ratios by length, and the verdicts of one kind of call."""
    rows: list[tuple[str, ...]] = []
    for seq in LENGTHS:
        mine, other = times["linear"][seq], times["softmax"].get(seq)
        softmaxes = ("–", "–") if other is None else (f"{1e3 * other:.3g}", f"{other / mine:.2f}")
        ours = (mine, usual["linear"][seq], usual["least"][seq])
        each = (f"{1e3 * some:.3g} ({1e6 * some / seq:.2f})" for some in ours)
        rows.append((f"{seq}", *each, *softmaxes))
    titles = ("tokens", "linear, ms (µs per token)", "with malloc as it comes", "`q + k * v` there",
              "softmax, ms", "softmax / linear")  # fmt: skip
    grown: list[str] = []
    for memory, found in (("", times), (" with malloc as it comes", usual)):
        ends, fitted = exponents(found["linear"])
        held = "held" if ends <= EXPONENT else "**short**"
        grown.append(f"{ends:.2f}{memory} (fitted {fitted:.2f}; {held})")
    rest = {seq: max(1e-9, usual["linear"][seq] - usual["least"][seq]) for seq in GROWN}
    return (
        f"### {title}\n\n{table(titles, rows)}\n\n"
        f"From {GROWN[0]} to {GROWN[-1]} tokens time grows as tokens to the power "
        f"{' and '.join(grown)}; the target is at most {EXPONENT}. There, outputs of 32 MB "
        "or more are new pages at every call, which `q + k * v` pays for as well; without its time "
        f"the power is {exponents(rest)[0]:.2f}. Linear attention is the faster one "
        f"{crossing(times)}."
    )


def about() -> str:
    """When, where and with what."""
    return (
        f"Measured {datetime.now(UTC):%Y-%m-%d %H:%M UTC} on {THREADS} threads of "
        f"{processor()}, Python {platform.python_version()}, torch {torch.__version__}, phasor "
        f"{version(DISTRIBUTION)}, load average before {os.getloadavg()[0]:.1f}. "
        f"One sequence of {HEADS} heads of {WIDTH}, float32, causal, rotation included; medians "
        f"of {ROUNDS} rounds in which all are called in turn (of fewer, {FEWEST} at least, where a "
        f"call of more than {SHORT} tokens is slow); chunks of {CHUNK} tokens, blocks of "
        f"{CHUNK * BLOCK}. malloc keeps the memory it was given back, but for the column that says "
        "otherwise, which is from a process of its own."
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
    if sys.argv[1:] == ["--system-memory"]:
        found = [
            seconds(training=training, names=["linear", "least"]) for training in (False, True)
        ]
        plain = [{name: list(one.items()) for name, one in times.items()} for times in found]
        print(json.dumps(plain))
        return
    told = about()
    forward, training = (
        {name: dict(pairs) for name, pairs in times.items()}
        for times in fresh("linear_attention.py", "--system-memory")
    )
    parts = [
        told,
        section("Forward", seconds(training=False), forward),
        section("Forward and backward", seconds(training=True), training),
        memory(),
    ]
    text = "\n\n".join(parts) + "\n"
    print(text)
    RESULT.write_text(text, "utf-8")


if __name__ == "__main__":
    restart_with_kept_memory()
    main()
