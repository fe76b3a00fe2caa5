"""Linear against softmax attention.

How time grows with the length, with memory that malloc keeps and with malloc as it comes, where
linear attention becomes cheaper than ``scaled_dot_product_attention``, and what memory training
takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import linear_regression
from typing import Any

import torch
from device import alone, peak_rise
from report import Section
from timing import Times, interleave
from torch import Tensor

from phasor import Rope
from phasor.torch import rotate_qk
from phasor.torch.papers.linear import BLOCK, CHUNK, linear_attention

HEADS, WIDTH = 8, 64
LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
FORWARD, TRAINING, MEMORY = "Forward", "Forward and backward", "Memory in training"
LONGEST_SOFTMAX = {FORWARD: 8192, TRAINING: 4096}
QUICK = ("Forward, ????", "Memory in training, 4096")
# a longer length stops after enough seconds, a short one does not: one odd call would show in few
ROUNDS, FEWEST, SHORT = 15, 3, 1024
# time grows as tokens to this power at most, from the first to the last of the lengths
EXPONENT, GROWN = 1.05, (4096, 8192, 16384, 32768, 65536)
ROPE = Rope(head_dim=WIDTH, pairing="half", base=500_000.0)
_TITLES = (
    *("tokens", "linear, ms (µs per token)", "with malloc as it comes", "`q + k * v` there"),
    *("softmax, ms", "softmax / linear"),
)
_NOTE = f"""\
One sequence of {HEADS} heads of {WIDTH}, float32, causal, rotation included; medians of {ROUNDS}
rounds in which all are called in turn (of fewer, {FEWEST} at least, where a call of more than
{SHORT} tokens is slow); chunks of {CHUNK} tokens, blocks of {CHUNK * BLOCK}. The column of malloc
as it comes is from a process of its own."""
_GROWTH = f"""\
From {GROWN[0]} to {GROWN[-1]} tokens time grows as tokens to the power {{kept}} and {{usual}} with
malloc as it comes; the target is at most {EXPONENT}. There, outputs of 32 MB or more are new pages
at every call, which `q + k * v` pays for as well; without its time the power is {{rest:.2f}}."""
_MEMORY = f"""\
Rise of the peak of resident memory during one forward and backward pass, gradients included. A
matrix of 65536 × 65536 scores in float32 for {HEADS} heads is {HEADS * 2**34 / 2**20:.0f} MB."""


def linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Eq. 19, causal."""
    return linear_attention(q, k, v, torch.arange(q.shape[-3]), ROPE, causal=True)


def softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same with softmax: rotated, causal."""
    q, k = rotate_qk(q, k, torch.arange(q.shape[-3]), ROPE)
    heads_first = (x.transpose(-3, -2) for x in (q, k, v))
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(*heads_first, is_causal=True).transpose(-3, -2)


#: The last has an output and gradients of the same sizes, and as little work as there can be.
ATTENTIONS: dict[str, Callable[..., Tensor]] = {
    "linear": linear, "softmax": softmax, "least": torch.addcmul,
}  # fmt: skip


def call_of(name: str, seq: int, kind: str) -> Callable[[], object]:
    """One pass over a sequence, or one each way."""
    torch.manual_seed(seq)
    training, attention = kind != FORWARD, ATTENTIONS[name]
    inputs = [torch.randn(1, seq, HEADS, WIDTH, requires_grad=training) for _ in range(3)]
    if training:
        return lambda: torch.autograd.grad(attention(*inputs).sum(), inputs)
    return torch.no_grad()(lambda: attention(*inputs))


def times(kind: str, seq: int, names: Sequence[str], seconds: float) -> Times:
    """Of calls of one length, in turn."""
    rounds = FEWEST if seq > SHORT else ROUNDS, ROUNDS
    calls = {name: call_of(name, seq, kind) for name in names}
    return interleave(calls, seconds=seconds / 2 * len(calls), rounds=rounds)


def both_times(kind: str, seq: int, seconds: float) -> dict[str, Times]:
    """Of all with memory that is kept, and of linear attention and the least without."""
    names = [name for name in ATTENTIONS if name != "softmax" or seq <= LONGEST_SOFTMAX[kind]]
    system = alone(times, kind, seq, ["linear", "least"], seconds)
    return {"kept": times(kind, seq, names, seconds), "system": system}


def training_rise(seq: int) -> int:
    """Bytes by which the peak of resident memory rises."""
    call_of("linear", 256, TRAINING)()  # for what is loaded once
    return peak_rise(call_of("linear", seq, TRAINING))


def steps(device: Any, seconds: float) -> dict[str, Callable[[], Any]]:
    """Both kinds of calls at every length, and memory in training."""
    lengths = [(kind, seq) for kind in LONGEST_SOFTMAX for seq in LENGTHS]
    found = {f"{kind}, {n}": partial(both_times, kind, n, seconds) for kind, n in lengths}
    return found | {f"{MEMORY}, {n}": partial(alone, training_rise, n) for n in LENGTHS[4::2]}


def growth(times: Mapping[int, float]) -> tuple[float, str]:
    """Of tokens, how time grows: between the ends of `GROWN`; and in words, fitted to all of it."""
    logs = [(math.log(seq), math.log(times[seq])) for seq in GROWN]
    (x0, y0), *_, (x1, y1) = logs
    ends, fitted = (y1 - y0) / (x1 - x0), linear_regression(*zip(*logs, strict=True)).slope
    held = "held" if ends <= EXPONENT else "**short**"
    return ends, f"{ends:.2f} (fitted {fitted:.2f}; {held})"


def crossing(linear: Mapping[int, float], softmax: Mapping[int, float]) -> str:
    """The first length from which linear attention stays the faster one."""
    slower = [seq for seq in softmax if linear[seq] >= softmax[seq]]
    after = [seq for seq in softmax if seq > max(slower, default=0)]
    if not after:
        return f"beyond {max(softmax)} tokens"
    return f"between {max(slower)} and {after[0]} tokens" if slower else f"below {after[0]} tokens"


def medians(found: Mapping[str, Any], kind: str, memory: str, name: str) -> dict[int, float]:
    """Seconds of one of the attentions, by length."""
    lengths = {seq: found.get(f"{kind}, {seq}", {}).get(memory, {}) for seq in LENGTHS}
    return {seq: Times(times).median(name) for seq, times in lengths.items() if name in times}


def sections(found: Mapping[str, Any], device: str) -> Iterator[Section]:
    """Times, both ratios by length, and the verdicts of both kinds of calls."""
    yield Section(note=_NOTE)
    for kind in LONGEST_SOFTMAX:
        kept, softmax = (medians(found, kind, "kept", name) for name in ("linear", "softmax"))
        usual, least = (medians(found, kind, "system", name) for name in ("linear", "least"))
        rows = [
            [f"{n}", *(f"{1e3 * t[n]:.3g} ({1e6 * t[n] / n:.2f})" for t in (kept, usual, least)),
             *([f"{1e3 * softmax[n]:.3g}", f"{softmax[n] / kept[n]:.2f}"] if n in softmax
               else "––")]
            for n in kept
        ]  # fmt: skip
        after = f"Linear attention is the faster one {crossing(kept, softmax)}." if softmax else ""
        if {*GROWN} <= kept.keys():
            rest = {seq: max(1e-9, usual[seq] - least[seq]) for seq in GROWN}
            powers = {"kept": growth(kept)[1], "usual": growth(usual)[1], "rest": growth(rest)[0]}
            after = f"{_GROWTH.format(**powers)} {after}"
        yield Section(kind, "", _TITLES, rows, after)
    rows = [
        [f"{seq}", f"{rise / 2**20:.0f}", f"{rise / (3 * 4 * seq * HEADS * WIDTH):.1f}"]
        for seq in LENGTHS
        if (rise := found.get(f"{MEMORY}, {seq}"))
    ]
    yield Section(MEMORY, "", ("tokens", "rise, MB", "of query, key and value"), rows, _MEMORY)
