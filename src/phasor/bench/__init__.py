"""``phasor bench``: what the rotation costs on this machine, next to moving its bytes.

The harness is the one the repository's own benchmark uses. A contender is timed only after it
came near enough to the float64 truth; contenders take turns in random order, round by round; and
what is reported is the median, over the rounds, of a contender's time divided by the time that a
`copy_` of the same tensors took in the same round, which a busy machine disturbs least.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from rich import box
from rich.progress import track
from rich.table import Table
from torch import Tensor

from phasor.bench._case import EPSILON, Case, Contender, Rotation, UnableError
from phasor.bench._gate import TOLERANCE, error, tolerance
from phasor.bench._measure import COPY, MULTIPLY, Measured, admitted, measure
from phasor.bench._timing import Call, Spread, Timer, by_clock, interleave, spread
from phasor.cli.common import Screen
from phasor.errors import VerificationError
from phasor.pairings import PAIRINGS, Pairing
from phasor.torch import rotate_qk, rotate_qk_

__all__ = [
    "COPY",
    "EPSILON",
    "MULTIPLY",
    "TOLERANCE",
    "Call",
    "Case",
    "Contender",
    "Measured",
    "Rotation",
    "Spread",
    "Timer",
    "UnableError",
    "admitted",
    "by_clock",
    "error",
    "interleave",
    "measure",
    "ours",
    "run",
    "spread",
    "tolerance",
]

#: A picture's worth of workloads: the shapes of Llama 3.1 8B.
_CASES = [
    *(Case(name=f"prefill {n}", dtype="bfloat16", seq=n) for n in (64, 512, 4096)),
    Case(name="prefill 4096", dtype="float32", seq=4096),
    Case(name="decode 32", dtype="bfloat16", seq=1, batch=32),
]
_FORMS = ("in place", "new output", "plain torch")


def ours() -> list[Contender]:
    """Phasor's verbs: in place, with new outputs, and in plain torch operations."""

    def in_place(pairing: Pairing) -> Callable[[Case, Tensor], Rotation]:
        def build(case: Case, positions: Tensor) -> Rotation:
            rope = case.rope(pairing)

            def rotation(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
                return rotate_qk_(q, k, positions, rope)

            return rotation

        return build

    def new(pairing: Pairing, backend: str) -> Callable[[Case, Tensor], Rotation]:
        def build(case: Case, positions: Tensor) -> Rotation:
            rope = case.rope(pairing)

            def rotation(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
                return rotate_qk(q, k, positions, rope, backend=backend)

            return rotation

        return build

    return [
        contender
        for p in PAIRINGS
        for contender in (
            Contender(name="phasor, in place", pairing=p, build=in_place(p), in_place=True),
            Contender(name="phasor, new output", pairing=p, build=new(p, "auto")),
            Contender(name="phasor, plain torch", pairing=p, build=new(p, "eager")),
        )
    ]


def run(save: Path | None = None, *, cases: list[Case] | None = None, seconds: float = 6.0) -> None:
    """Measure, print a table of ratios to `copy_`, and draw it if asked.

    Args:
        save: Where to write a picture; None for none.
        cases: What to measure; Llama 3.1 8B's shapes in prefill and decode unless given.
        seconds: Spent on each case.

    Raises:
        VerificationError: If one of phasor's own forms is not within the tolerance of the truth.
    """
    screen = Screen()
    work = _CASES if cases is None else cases
    measured = [
        measure(case, ours(), seconds=seconds)
        for case in track(work, "measuring", console=screen, transient=True)
    ]
    wrong = [f"{key} in {m.case.name}" for m in measured for key in m.refused]
    if wrong:
        raise VerificationError(
            f"not within the tolerance of the float64 truth: {'; '.join(wrong)}"
        )
    screen.say(
        f"Time / time of copy_ of the same query and key, {torch.get_num_threads()} threads: "
        "median and half"
    )
    screen.say(
        "the interquartile range. In place moves fewer bytes than a copy and may be below 1."
    )
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True)
    table.add_column("case\n  copy_", no_wrap=True)
    table.add_column("pairing", no_wrap=True)
    for title in ("multiply\nin place", *_FORMS):
        table.add_column(title.replace(" ", "\n"), justify="right", no_wrap=True)
    for m in measured:
        copy = f"  {m.case.dtype}, {1e6 * spread(m.seconds[COPY]).median:.1f} µs"
        labels = (m.case.name, copy)
        for label, pairing in zip(labels, PAIRINGS, strict=True):
            names = (MULTIPLY, *(f"phasor, {form}, {pairing}" for form in _FORMS))
            table.add_row(label, pairing, *(str(m.ratio(name)) for name in names))
    screen.print(table)
    if save is not None:
        from phasor.bench._figure import bar_figure

        bar_figure(measured, [MULTIPLY, *(contender.key for contender in ours())]).savefig(
            save, dpi=150
        )
        screen.say(f"Drawn: {save}")
