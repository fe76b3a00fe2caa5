"""The rotation itself, against a copy of the same bytes and against other implementations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from cases import CASES, Case
from contenders import PROBES, everyone
from device import EMPTY, Cpu, alone
from measure import COPY, MULTIPLY, TOLERANCE, Measured, admit, measure, references
from report import Section
from targets import FAR_BOUND, TARGETS, moved
from timing import Call, Times, interleave

from phasor.torch import rotate_qk_
from phasor.torch._operator import cpu
from phasor.torch._operator.internals import count_writes, dispatch_is_plain, may_write

QUICK = (
    *("prefill 512, bf*", "prefill 4096, bf*", "decode 1, bf*", "decode 32, bf*"),
    "DeepSeek MLA, bf*",
    *(f"{model}, {work}, bf*" for model in ("Llama-3-8B", "Qwen3-30B")
      for work in ("prefill 4096", "training*", "decode 64")),
)  # fmt: skip
_RATIOS = """\
Each number is a time divided by the time of torch's `copy_` on the same query and key in the same
round: the median over the rounds, and half the interquartile range in per cent of it. 1 is a copy;
below 1 is possible because a call in place moves fewer bytes than a copy does. A call with both
directions is divided by two copies. Bold is the fastest contender of a column. A dash: the
contender cannot do the case. *Wrong*: it was not within the tolerance ({gate}) and was not timed;
the number is its error as a part of the pair's length."""
_CPU_NOTE = """\
The machine is shared and the numbers are noisy: between runs, times move by tens of per cent and
ratios by several. "In-place multiply" is torch's `mul_` by -1 on the slice that turns, bfloat16 as
float32 of the same bytes; it stands for a multiplication in C, and where memory is strided it is
slower than one."""
_GPU_NOTE = """\
The second number of a cell is the bytes a second that it moved, in GB, of those that have to be
moved. Calls are timed between two events on the device, each by itself; graphs are the same calls
captured and replayed, so that the host has no part in them."""
# calls that a small call is taken apart by
WHOLE, EXTENSION, ALONE, ARGUMENTS = "call", "extension", "one thread", "no tokens"
#: By what is asked: the title of a table, and what stands below it.
_SECTIONS = {
    "malloc": ("New outputs from the system's allocator", """\
With malloc as it comes: every output of 32 MB or more is new memory from the system, whose pages
are filled with zeros at first touch. `copy_` writes to memory that is there already."""),
    "parts": ("Where the time of a small call goes", """\
`rotate_qk_` in place, half pairing, bfloat16, taken apart; shares are of the median call. Arguments
are the call of the extension on tensors without tokens."""),
    "host": ("The host's part", """\
Microseconds from a call to its return, while the device works on its own."""),
    "errors": ("Exactness far out", f"""\
Largest distance from the float64 truth for pairs of length 1, base 500 000, over the last 256
positions before one. The derived bound of phasor in float32 is {FAR_BOUND:.1e}."""),
}  # fmt: skip


def steps(device: Cpu, seconds: float, skip: Sequence[str] = ()) -> dict[str, Callable[[], Any]]:
    """What is asked about every case, without contenders whose names have one of these words."""

    def answer(case: Case) -> Measured:
        contenders = [
            contender
            for contender in everyone(case, device.kind)
            if not any(word in contender.name for word in skip)
        ]
        match case.asks:
            case "parts":
                return Measured(case=case, seconds=time_parts(case, seconds))
            case "malloc":
                return alone(measure_in_turn, case, seconds)
            case "errors":
                # the gate's tolerance is for cases nearer by; here the error itself is the result
                return admit(case, contenders, device.where)[0]
            case _:
                return measure(case, contenders, seconds=seconds, device=device)

    cases = map(device.sized, CASES[device.kind])
    return {case.label: lambda case=case: asdict(answer(case)) for case in cases}


def measure_in_turn(case: Case, seconds: float) -> Measured:
    """For a process of its own."""
    return measure(case, everyone(case, "cpu"), seconds=seconds)


def parts(case: Case) -> dict[str, Call]:
    """The whole call and its parts, each on tensors of that case."""
    (q, k), out = case.tensors(), case.tensors()
    positions, rope = case.positions(), case.rope("half")
    packed, native = cpu._pack(rope.to_json()), cpu._native

    def extension(q: Any, k: Any, positions: Any) -> Call:
        rest = positions, None, False, 1.0, cpu._path_index, False
        xs = q, k
        return lambda: native.rotate(packed.plan, *rest, xs, xs)

    return {
        **references(case, (q, k), out, out),
        WHOLE: lambda: rotate_qk_(q, k, positions, rope),
        EXTENSION: extension(q, k, positions),
        # the same tensors without tokens: everything is read and checked, and there is no work
        ARGUMENTS: extension(q[:, :0], k[:, :0], positions[..., :0]),
        # the checks in Python, each by itself
        "plain dispatch?": lambda: dispatch_is_plain((q, k)),
        "may write?": lambda: may_write((q, k)),
        "count writes": lambda: count_writes((q, k)),
        "find the plan": lambda: cpu._pack(rope.to_json()),
    }


def time_parts(case: Case, seconds: float) -> Times:
    """Every part in turn, and the loop on one thread."""
    calls, threads = parts(case), torch.get_num_threads()
    times = interleave(calls, seconds=seconds, warm=True)
    # by itself, because a change of their number starts threads anew
    torch.set_num_threads(1)
    times |= interleave({ALONE: calls[EXTENSION]}, seconds=seconds / 10, warm=True)
    torch.set_num_threads(threads)
    return times


def shares(times: Times) -> dict[str, str]:
    """The parts of the whole call's median; what no part takes is left for Python's own calls."""
    took = {part: times.median(part) for part in times}
    copy, multiply, whole, loop, arguments, single = (
        took.pop(part) for part in (COPY, MULTIPLY, WHOLE, EXTENSION, ARGUMENTS, ALONE)
    )
    parts = {
        "the loop, on all threads": loop - arguments,
        "on one thread": single - arguments,
        "arguments, read and checked": arguments,
        **took,
        "Python's calls": whole - loop - sum(took.values()),
    }
    ratios = {"call / `copy_`": f"{whole / copy:.2f}", "call / multiply": f"{whole / multiply:.2f}"}
    return ratios | {name: f"{part / whole:.0%}" for name, part in parts.items()}


def sections(results: Mapping[str, Any], device: str) -> Iterator[Section]:
    """Every table."""
    measured = [Measured.from_plain(plain) for plain in results.values()]
    gate = ", ".join(f"{value:.1e} in {dtype}" for dtype, value in TOLERANCE.items())
    yield Section(note=_RATIOS.format(gate=gate), after=_GPU_NOTE if device != "cpu" else _CPU_NOTE)
    targets = {target.what: target.row(measured) for target in TARGETS[device]}
    yield Section("Targets", rows=targets, corner="target")
    short = {name: row | {"held": row["held"].partition(":")[0]} for name, row in targets.items()}
    yield Section("Targets in short", rows=short, corner="target")
    groups: dict[tuple[str, str], list[Measured]] = {}
    for m in measured:
        calls = f"{m.case.group}, {m.case.dtype}", "Calls:" if m.replays else ""
        groups.setdefault(_SECTIONS.get(m.case.asks, calls), []).append(m)
    for (title, note), group in groups.items():
        yield Section(title, note, grid(group, device))
        yield Section("", "Graphs:", grid([m.replayed() for m in group if m.replays], device))
    reasons = Counter(entry for m in measured for entry in m.left_out.items())
    lines = [
        f"* {key}: {reason} ({count} of {len(measured)} cases)"
        for (key, reason), count in reasons.items()
    ]
    yield Section("Left out", "\n".join(lines) or "Nobody.")


def grid(measured: Sequence[Measured], device: str) -> dict[str, dict[str, str]]:
    """A row for each contender, a column for each case."""
    has_dtypes = len({m.case.dtype for m in measured}) > 1
    rows: dict[str, dict[str, str]] = {}
    for m in measured:
        title = m.case.name.removeprefix(f"{m.case.group}, ")
        for key, text in cells(m, device).items():
            rows.setdefault(key, {})[f"{title}, {m.case.dtype}" if has_dtypes else title] = text
    return rows


def cells(m: Measured, device: str) -> dict[str, str]:
    """What is said of each contender in one case."""
    match m.case.asks:
        case "parts":
            return shares(m.seconds)
        case "host":
            return {key: f"{1e6 * m.seconds.median(key):.1f}" for key in m.seconds}
        case "errors":
            return {key: f"{error:.1e}" for key, error in m.errors.items()}
        case _:
            return ratios(m, device)


def ratios(m: Measured, device: str) -> dict[str, str]:
    """Of each time to the copy's, and its GB a second on a GPU; of who was wrong the error."""

    def speed(key: str) -> str:
        per_second = moved(m.case, key) / m.seconds.median(key)
        return f", {per_second / 1e9:.0f}" if device != "cpu" and key != EMPTY else ""

    cells = {"`copy_`, µs": f"{1e6 * m.seconds.median(COPY):.4g}{speed(COPY)}"}
    rivals = [k for k in m.seconds if not k.startswith((COPY, MULTIPLY, EMPTY, *PROBES))]
    fastest = min(rivals, key=lambda k: m.seconds.ratio(k, COPY).median, default=None)
    for key in m.seconds:
        if key != COPY:
            text = f"{m.seconds.ratio(key, COPY)}{speed(key)}"
            cells[key] = f"**{text}**" if key == fastest else text
    return cells | {key: f"*wrong:* {m.errors[key]:.0e}" for key in m.refused}
