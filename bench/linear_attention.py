"""Linear against softmax attention.

How time grows with the length, with memory that malloc keeps and with malloc as it comes, where
linear attention becomes cheaper than ``scaled_dot_product_attention``, and what memory training
takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median
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
# time grows as tokens to this power at most, between these lengths
EXPONENT, GROWN = 1.05, (4096, 65536)
ROPE = Rope(head_dim=WIDTH, pairing="half", base=500_000.0)
_NOTE = f"""\
One sequence of {HEADS} heads of {WIDTH}, float32, causal, rotation included; medians of {ROUNDS}
rounds in which all are called in turn (of fewer, {FEWEST} at least, where a call of more than
{SHORT} tokens is slow); chunks of {CHUNK} tokens, blocks of {CHUNK * BLOCK}. Milliseconds, and
microseconds a token; those with malloc as it comes are from a process of its own."""
_GROWTH = f"""\
From {GROWN[0]} to {GROWN[1]} tokens time grows as tokens to the power {{0:.2f}} ({{3}}), and
{{1:.2f}} ({{4}}) with malloc as it comes; the target is at most {EXPONENT}. There, outputs of 32 MB
or more are new pages at every call, which `q + k * v` pays for as well; without its time the power
is {{2:.2f}}."""
LEAST, AS_IT_COMES = "`q + k * v`", ", malloc as it comes"
#: Whose growth is told, in order: with memory that is kept, without, and the least.
TIMED = "linear", f"linear{AS_IT_COMES}", f"{LEAST}{AS_IT_COMES}"
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
    "linear": linear, "softmax": softmax, LEAST: torch.addcmul,
}  # fmt: skip


def make_call(name: str, seq: int, kind: str) -> Callable[[], object]:
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
    calls = {name: make_call(name, seq, kind) for name in names}
    return interleave(calls, seconds=seconds / 2 * len(calls), rounds=rounds)


def both_times(kind: str, seq: int, seconds: float) -> dict[str, list[float]]:
    """Of all with memory that is kept, and of linear attention and the least without."""
    names = [name for name in ATTENTIONS if name != "softmax" or seq <= LONGEST_SOFTMAX[kind]]
    system = alone(times, kind, seq, ["linear", LEAST], seconds)
    again = {f"{name}{AS_IT_COMES}": samples for name, samples in system.items()}
    return times(kind, seq, names, seconds) | again


def training_rise(seq: int) -> int:
    """Bytes by which the peak of resident memory rises."""
    make_call("linear", 256, TRAINING)()  # for what is loaded once
    return peak_rise(make_call("linear", seq, TRAINING))


def steps(device: Any, seconds: float) -> dict[str, Callable[[], Any]]:
    """Both kinds of calls at every length, and memory in training."""
    lengths = [(kind, seq) for kind in LONGEST_SOFTMAX for seq in LENGTHS]
    calls = {f"{kind}, {n}": partial(both_times, kind, n, seconds) for kind, n in lengths}
    return calls | {f"{MEMORY}, {n}": partial(alone, training_rise, n) for n in LENGTHS[4::2]}


def growth(seconds: Mapping[int, float]) -> float:
    """The power of tokens as which time grows between both lengths of `GROWN`."""
    first, last = GROWN
    return math.log(seconds[last] / seconds[first]) / math.log(last / first)


def sections(results: Mapping[str, Any], device: str) -> Iterator[Section]:
    """Times by length, how they grow, and where linear attention becomes the faster one."""
    yield Section(note=_NOTE)
    for kind in LONGEST_SOFTMAX:
        times_by_name: dict[str, dict[int, float]] = {}
        for seq in LENGTHS:
            for name, samples in results.get(f"{kind}, {seq}", {}).items():
                times_by_name.setdefault(name, {})[seq] = median(samples)
        rows = {
            f"{n}": {name: f"{1e3 * times[n]:.3g} ({1e6 * times[n] / n:.2f})"
                     for name, times in times_by_name.items() if n in times}
            for n in times_by_name.get("linear", ())
        }  # fmt: skip
        for n, took in times_by_name.get("softmax", {}).items():
            rows[f"{n}"]["softmax / linear"] = f"{took / times_by_name['linear'][n]:.2f}"
        constant, usual, least = (times_by_name.get(name, {}) for name in TIMED)
        softmax = times_by_name.get("softmax", {})
        slower = max((n for n in softmax if constant[n] >= softmax[n]), default=0)
        after = [f"Linear attention is the faster one from {n} tokens on."
                 for n in softmax if n > slower][:1]  # fmt: skip
        if {*GROWN} <= constant.keys():
            rest = {n: max(1e-9, usual[n] - least[n]) for n in GROWN}
            powers = [growth(constant), growth(usual), growth(rest)]
            verdicts = ["held" if power <= EXPONENT else "**short**" for power in powers]
            after.insert(0, _GROWTH.format(*powers, *verdicts))
        yield Section(kind, "", rows, " ".join(after), corner="tokens")
    rises = {seq: rise for seq in LENGTHS if (rise := results.get(f"{MEMORY}, {seq}"))}
    rows = {
        f"{seq}": {"rise, MB": f"{rise / 2**20:.0f}",
                   "of query, key and value": f"{rise / (3 * 4 * seq * HEADS * WIDTH):.1f}"}
        for seq, rise in rises.items()
    }  # fmt: skip
    yield Section(MEMORY, "", rows, _MEMORY, corner="tokens")
