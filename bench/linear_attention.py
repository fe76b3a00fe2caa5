"""Linear against softmax attention.

How time grows with the length, with memory that malloc keeps and with malloc as it comes, where
linear attention becomes cheaper than ``scaled_dot_product_attention``, and what memory training
takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from statistics import linear_regression, median

import torch
from device import alone, peak_rise, progress
from report import table
from timing import interleave
from torch import Tensor

from phasor import Rope
from phasor.torch import rotate_qk
from phasor.torch.papers.linear import BLOCK, CHUNK, linear_attention

HEADS, WIDTH = 8, 64
LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
LONGEST_SOFTMAX = {"Forward": 8192, "Forward and backward": 4096}
# a longer length stops after enough seconds, a short one does not: one odd call would show in few
ROUNDS, FEWEST, SHORT, ENOUGH_SECONDS = 15, 3, 1024, 2.0
# time grows as tokens to this power at most, from the first to the last of the lengths
EXPONENT, GROWN = 1.05, (4096, 8192, 16384, 32768, 65536)
ROPE = Rope(head_dim=WIDTH, pairing="half", base=500_000.0)
Times = dict[str, dict[int, float]]
_NOTE = f"""\
One sequence of {HEADS} heads of {WIDTH}, float32, causal, rotation included; medians of {ROUNDS}
rounds in which all are called in turn (of fewer, {FEWEST} at least, where a call of more than
{SHORT} tokens is slow); chunks of {CHUNK} tokens, blocks of {CHUNK * BLOCK}. The column of malloc
as it comes is from a process of its own."""
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
    training = kind != "Forward"
    inputs = [torch.randn(1, seq, HEADS, WIDTH, requires_grad=training) for _ in range(3)]
    attention = ATTENTIONS[name]
    if training:
        return lambda: torch.autograd.grad(attention(*inputs).sum(), inputs)
    return torch.no_grad()(lambda: attention(*inputs))


def seconds(kind: str, names: list[str]) -> Times:
    """Median time of a call by attention and length; all of one length take turns."""
    found: Times = {name: {} for name in names}
    for seq in LENGTHS:
        progress(f"{kind}, {seq}")
        here = [name for name in names if name != "softmax" or seq <= LONGEST_SOFTMAX[kind]]
        samples = interleave(
            {name: call_of(name, seq, kind) for name in here},
            seconds=ENOUGH_SECONDS * len(here), warm=False,
            rounds=(FEWEST if seq > SHORT else ROUNDS, ROUNDS),
        )  # fmt: skip
        for name, times in samples.items():
            found[name][seq] = median(times)
    return found


def system_seconds(kind: str) -> list[list[float]]:
    """Of linear attention and of the least there can be, for each length."""
    return [list(times.values()) for times in seconds(kind, ["linear", "least"]).values()]


def training_rise(seq: int) -> int:
    """Bytes by which the peak of resident memory rises."""
    call_of("linear", 256, "Forward and backward")()  # for what is loaded once
    return peak_rise(call_of("linear", seq, "Forward and backward"))


def exponents(times: Mapping[int, float]) -> tuple[float, float]:
    """Of tokens, how time grows: between the ends of `GROWN`, and fitted to all of it."""
    logs = [(math.log(seq), math.log(times[seq])) for seq in GROWN]
    (x0, y0), *_, (x1, y1) = logs
    return (y1 - y0) / (x1 - x0), linear_regression(*zip(*logs, strict=True)).slope


def crossing(times: Times) -> str:
    """The first length from which linear attention stays the faster one."""
    both = sorted(times["softmax"])
    slower = [seq for seq in both if times["linear"][seq] >= times["softmax"][seq]]
    after = [seq for seq in both if seq > max(slower, default=0)]
    if not after:
        return f"beyond {both[-1]} tokens"
    return f"between {max(slower)} and {after[0]} tokens" if slower else f"below {both[0]} tokens"


def section(kind: str) -> str:
    """Times, both ratios by length, and the verdicts of one kind of call."""
    system = alone("linear_attention", "system_seconds", kind)
    usual, least = (dict(zip(LENGTHS, times, strict=True)) for times in system)
    times = seconds(kind, list(ATTENTIONS))
    rows: list[list[str]] = []
    for seq in LENGTHS:
        mine, other = times["linear"][seq], times["softmax"].get(seq)
        softmaxes = ("–", "–") if other is None else (f"{1e3 * other:.3g}", f"{other / mine:.2f}")
        each = (f"{1e3 * t:.3g} ({1e6 * t / seq:.2f})" for t in (mine, usual[seq], least[seq]))
        rows.append([f"{seq}", *each, *softmaxes])
    titles = ("tokens", "linear, ms (µs per token)", "with malloc as it comes", "`q + k * v` there",
              "softmax, ms", "softmax / linear")  # fmt: skip
    grown: list[str] = []
    for memory, found in (("", times["linear"]), (" with malloc as it comes", usual)):
        ends, fitted = exponents(found)
        held = "held" if ends <= EXPONENT else "**short**"
        grown.append(f"{ends:.2f}{memory} (fitted {fitted:.2f}; {held})")
    rest = {seq: max(1e-9, usual[seq] - least[seq]) for seq in GROWN}
    return (
        f"### {kind}\n\n{table(titles, rows)}\n\n"
        f"From {GROWN[0]} to {GROWN[-1]} tokens time grows as tokens to the power "
        f"{' and '.join(grown)}; the target is at most {EXPONENT}. There, outputs of 32 MB "
        "or more are new pages at every call, which `q + k * v` pays for as well; without its time "
        f"the power is {exponents(rest)[0]:.2f}. Linear attention is the faster one "
        f"{crossing(times)}."
    )


def page() -> str:
    """Both kinds of calls, and memory in training."""
    rows: list[list[str]] = []
    for seq in (4096, 16384, 65536):
        rise, inputs = alone("linear_attention", "training_rise", seq), 3 * 4 * seq * HEADS * WIDTH
        rows.append([f"{seq}", f"{rise / 2**20:.0f}", f"{rise / inputs:.1f}"])
    found = table(("tokens", "rise, MB", "of query, key and value"), rows)
    sections = [section(kind) for kind in LONGEST_SOFTMAX]
    return "\n\n".join([_NOTE, *sections, "### Memory in training", found, _MEMORY])
