"""``phasor bench``: what the rotation costs on this machine, next to moving its bytes.

A small version of the repository's benchmark, which also measures other packages. Each form of the
rotation is timed only if it is close enough to the float64 result. In every round each form has one
turn, in random order. What is reported is the median over the rounds of a form's time, divided by
the time that a `copy_` of the same tensors took in the same round: a busy machine disturbs this
ratio least.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from timeit import timeit

import numpy as np
import torch
from numpy.typing import NDArray
from rich import box
from rich.progress import track
from rich.table import Table
from torch import Tensor

from phasor.angles import cos_sin
from phasor.cli.common import Screen
from phasor.errors import VerificationError
from phasor.pairings import PAIRINGS, Pairing, slices
from phasor.rope import Rope
from phasor.torch import rotate_qk, rotate_qk_

COPY, MULTIPLY = "copy_", "multiply in place"
#: Largest error of a form that is timed, relative to the pair's length. A float32 row is within
#: 2**-22 of the exact one and its product adds as much; bfloat16 adds three roundings, of rows,
#: products and sums in plain torch, to each of two coordinates.
TOLERANCE = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-8 + 3 * 2**0.5 * 2.0**-9}
_CACHE_BYTES = 2**24  # up to so many, a model's last operation leaves query and key in some cache
_LEAST_ROUNDS, _MOST_ROUNDS = 5, 200
_Call = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """A query and a key of Llama 3.1 8B: 32 and 8 heads of 128.

    Attributes:
        name: What the table calls it.
        dtype: Of the tensors.
        seq: Tokens in a sequence; one is a decode step.
        batch: Sequences.
    """

    name: str
    dtype: torch.dtype
    seq: int
    batch: int = 1

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Query and key ``[batch, seq, heads, 128]`` of normal numbers, the same every time."""
        generator = torch.Generator().manual_seed(0)
        q, k = (
            torch.randn(self.batch, self.seq, heads, 128, generator=generator).to(self.dtype)
            for heads in (32, 8)
        )
        return q, k

    def positions(self) -> Tensor:
        """int64 ``[seq]``, or ``[batch, 1]`` for decode."""
        if self.seq > 1:
            return torch.arange(self.seq)
        return ((4096 + 997 * torch.arange(self.batch)) % 2**15).unsqueeze(-1)


CASES = [
    *(Case(f"prefill {n}", torch.bfloat16, n) for n in (64, 512, 4096)),
    Case("prefill 4096", torch.float32, 4096),
    Case("decode 32", torch.bfloat16, 1, 32),
]
Rotation = Callable[[Tensor, Tensor, Tensor, Rope], tuple[Tensor, Tensor]]
ROTATIONS: dict[str, Rotation] = {
    "in place": rotate_qk_,
    "new output": rotate_qk,
    "plain torch": lambda q, k, positions, rope: rotate_qk(q, k, positions, rope, backend="eager"),
}


def run(cases: Sequence[Case] = CASES, *, seconds: float = 6.0) -> None:
    """Measure, and print a table of ratios to `copy_`.

    Args:
        cases: What to measure.
        seconds: Spent on each case.

    Raises:
        VerificationError: If a form is not within the tolerance of the truth.
    """
    screen = Screen()
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True)
    table.add_column("case\n  copy_", no_wrap=True)
    table.add_column("pairing", no_wrap=True)
    for title in (MULTIPLY, *ROTATIONS):
        table.add_column(title.replace(" ", "\n", 1), justify="right", no_wrap=True)
    for case in track(cases, "measuring", console=screen, transient=True):
        samples = measure(case, seconds=seconds)
        copies = samples[COPY]
        dtype = str(case.dtype).removeprefix("torch.")
        labels = (case.name, f"  {dtype}, {1e6 * statistics.median(copies):.1f} µs")
        for label, pairing in zip(labels, PAIRINGS, strict=True):
            keys = (MULTIPLY, *(f"{form}, {pairing}" for form in ROTATIONS))
            table.add_row(label, pairing, *(_ratio(samples[key], copies) for key in keys))
    screen.print_line(
        f"Time / time of copy_ of the same query and key, {torch.get_num_threads()} threads: "
        "median and half"
    )
    screen.print_line(
        "the interquartile range. In place moves fewer bytes than a copy and may be below 1."
    )
    screen.print(table)


def measure(case: Case, *, seconds: float) -> dict[str, list[float]]:
    """Seconds of a call in each round, for `copy_`, a multiplication, and each form and pairing."""
    (q, k), scratch, target, positions = (
        case.tensors(), case.tensors(), case.tensors(), case.positions()
    )  # fmt: skip

    def copy() -> None:
        target[0].copy_(q)
        target[1].copy_(k)

    def multiply() -> None:
        # by -1, which no repetition lets overflow; bfloat16 as float32 of the same bytes, because
        # torch multiplies bfloat16 more slowly than memory delivers it
        for x in scratch:
            x.view(torch.float32).mul_(-1.0)

    calls: dict[str, _Call] = {COPY: copy, MULTIPLY: multiply}
    for pairing in PAIRINGS:
        rope = Rope(head_dim=128, pairing=pairing, base=500_000.0)
        for form, rotate in ROTATIONS.items():
            x, y = scratch if form == "in place" else (q, k)
            x.copy_(q)
            y.copy_(k)
            inputs = q.clone(), k.clone()
            largest_error = error(inputs, rotate(x, y, positions, rope), positions, rope)
            if not largest_error <= TOLERANCE[case.dtype]:
                raise VerificationError(
                    f"{form}, {pairing} in {case.name} must be within {TOLERANCE[case.dtype]:.1e} "
                    f"of the float64 truth, got {largest_error:.1e}; please report it"
                )
            calls[f"{form}, {pairing}"] = partial(rotate, x, y, positions, rope)
    return time_in_turn(calls, seconds=seconds, warm=q.nbytes + k.nbytes <= _CACHE_BYTES)


def error(
    inputs: Sequence[Tensor], results: Sequence[Tensor], positions: Tensor, rope: Rope
) -> float:
    """Largest distance from the inputs rotated in float64, in lengths of the pair.

    Infinite where a result has another shape or dtype, or is not finite.
    """
    cos, sin = cos_sin(rope, positions.numpy())
    turns = (cos + 1j * sin)[..., None, :]
    worst = 0.0
    for x, y in zip(inputs, results, strict=True):
        if x.shape != y.shape or x.dtype != y.dtype or not bool(y.isfinite().all()):
            return float("inf")
        before, after = _complex(x, rope.pairing), _complex(y, rope.pairing)
        worst = max(worst, float((np.abs(after - before * turns) / np.abs(before)).max()))
    return worst


def _complex(x: Tensor, pairing: Pairing) -> NDArray[np.complex128]:
    wide = x.double().numpy()
    first, second = slices(pairing, wide.shape[-1] // 2)
    return wide[..., first] + 1j * wide[..., second]


def time_in_turn(
    calls: Mapping[str, _Call], *, seconds: float, warm: bool
) -> dict[str, list[float]]:
    """Seconds of one call of each, in each of 5 to 200 rounds that take ``seconds`` in total.

    A call shorter than 0.1 ms is repeated within its turn. If the tensors fit a cache (``warm``),
    each call is made once before its turn without being timed, so that it finds its own tensors
    there.
    """
    durations: dict[str, float] = {}
    for name, call in calls.items():
        call()
        durations[name] = min(timeit(call, number=1) for _ in range(3))
    repeats = {name: max(1, min(1000, int(1e-4 / max(t, 1e-9)))) for name, t in durations.items()}
    round_seconds = sum(t * (repeats[name] + warm) for name, t in durations.items())
    rounds = max(_LEAST_ROUNDS, min(_MOST_ROUNDS, int(seconds / max(round_seconds, 1e-9))))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    generator = random.Random(0)
    for _ in range(rounds):
        for name in generator.sample(list(calls), len(calls)):
            if warm:
                calls[name]()
            samples[name].append(timeit(calls[name], number=repeats[name]) / repeats[name])
    return samples


def _ratio(times: Sequence[float], copies: Sequence[float]) -> str:
    """The median of the ratios round by round, and half their interquartile range in per cent."""
    ratios = [a / b for a, b in zip(times, copies, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return f"{median:.{2 if median < 10 else 0}f} ±{50 * (high - low) / median:.0f}%"
