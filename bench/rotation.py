"""The rotation itself, against a copy of the same bytes and against other implementations."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from statistics import median
from typing import Any

import torch
from cases import CASES, FAR_CASES, LARGE, LAUNCH, SAMPLE, Case
from contenders import IN_PLACE, PROBES, everyone, probes, table_recipes
from device import EMPTY, Cpu, alone, host_timer, peak_rise
from measure import COPY, MULTIPLY, TOLERANCE, Measured, UnableError, admit, measure
from report import Section
from targets import FAR_BOUND, cpu_rows, gpu_rows, moved
from timing import interleave

QUICK = (
    *("prefill 512, bf*", "prefill 4096, bf*", "decode 1, bf*", "decode 32, bf*"),
    "DeepSeek MLA, bf*",
    *(f"{model}, {work}, bf*" for model in ("Llama-3-8B", "Qwen3-30B")
      for work in ("prefill 4096", "training*", "decode 64")),
)  # fmt: skip
# what is measured besides the cases
TABLES, FAR, SYSTEM, PEAKS = "tables", "exactness", "the system's allocator", "memory"
HOST = "the host's part"
_TABLE_LENGTHS = 131_072, 1_048_576, 10_485_760
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
_HOST = "Microseconds from a call to its return for {case}, while the device works on its own."
_SYSTEM = """\
As above, with malloc as it comes: every output of 32 MB or more is new memory from the system,
whose pages are filled with zeros at first touch. `copy_` writes to memory that is there already."""
_OTHER_WAYS = "In place, half pairing, divided by `phasor.torch.rotate_qk_` on the same tensors."
_PEAKS = """\
Rise of the peak of resident memory during one call on 8192 tokens in bfloat16, in a process of its
own, divided by the size of query and key. New outputs alone are 1."""
_TABLES = """\
What is kept for positions up to a length, for heads of 128 in bfloat16, and the time to build it:
of rows, those of 1024 positions multiplied. phasor's constants serve every position."""
_EXACT = """\
Largest distance from the float64 truth for pairs of length 1, base 500 000, over the last 256
positions before one. The derived bound of phasor in float32 is {bound:.1e}."""


def steps(device: Cpu, seconds: float) -> dict[str, Callable[[], Any]]:
    """Every case, and what is no ratio of times: memory, tables, exactness, the host's part."""
    kind = device.kind

    def time_case(case: Case) -> dict[str, Any]:
        contenders = everyone(case, kind) + (probes(case) if kind == "cpu" else [])
        return asdict(measure(case, contenders, seconds=seconds, device=device))

    def time_launches() -> list[dict[str, Any]]:
        found, calls = admit(LAUNCH, everyone(LAUNCH, kind), device.where)
        found.seconds.update(interleave(calls, seconds=seconds, warm=True, timed=host_timer))
        return [asdict(found)]

    found: dict[str, Callable[[], Any]] = {c.label: partial(time_case, c) for c in CASES[kind]}
    found |= {TABLES: partial(table_costs, device.where), FAR: partial(far_errors, device)}
    if kind == "cuda":
        return found | {HOST: time_launches}
    return found | {SYSTEM: partial(alone, time_with_system_memory, seconds), PEAKS: peaks}


def time_with_system_memory(seconds: float) -> list[dict[str, Any]]:
    """The large prefill again, for a process with malloc as it comes."""
    some = [case for case in CASES["cpu"] if case.name == "prefill 4096"]
    return [asdict(measure(case, everyone(case, "cpu"), seconds=seconds)) for case in some]


def peak(key: str) -> int | None:
    """Bytes by which one call raises this process's resident memory; None if it is unable."""
    contender = next(one for one in everyone(LARGE, "cpu") if one.key == key)
    try:
        rotation = contender.build(LARGE, LARGE.positions())
    except (UnableError, ImportError):
        return None
    q, k = (x.transpose(1, 2) if contender.heads_first else x for x in LARGE.tensors())
    rotation(q, k)
    return peak_rise(lambda: rotation(q, k))


def peaks() -> dict[str, int | None]:
    """`peak` of every contender, each in a process of its own."""
    return {one.key: alone(peak, one.key) for one in everyone(LARGE, "cpu")}


def far_errors(device: Cpu) -> dict[str, dict[str, float | str]]:
    """Each contender's error at far positions, by position and dtype, or why there is none.

    The gate's tolerance is for cases nearer by; here the error itself is the result.
    """
    found: dict[str, dict[str, float | str]] = {}
    for case in FAR_CASES[device.kind]:
        torch.compiler.reset()
        measured, _ = admit(case, everyone(case, device.kind), device.where)
        for key, result in (measured.left_out | measured.errors).items():
            found.setdefault(key, {})[case.label] = result
    return found


def table_costs(device: torch.device) -> list[dict[str, Any]]:
    """Seconds to build and bytes of each recipe's position tables, by length.

    Rows are built for the positions of `SAMPLE`, and their time and bytes are multiplied.
    """
    found: list[dict[str, Any]] = []
    for recipe, build in table_recipes(SAMPLE, device).items():
        seconds: list[float] = []
        try:
            for _ in range(4):  # the first is not counted
                start = time.perf_counter()
                made = build()
                seconds.append(time.perf_counter() - start)
        except ImportError:
            continue
        size = sum(x.numel() * x.element_size() for x in made)
        for length in _TABLE_LENGTHS:
            times = 1 if recipe == "phasor" else length / SAMPLE.seq
            row = {"recipe": recipe, "length": length, "bytes": size * times}
            found.append(row | {"seconds": median(seconds[1:]) * times})
    return found


def sections(found: Mapping[str, Any], device: str) -> Iterator[Section]:
    """Every table."""
    of_facts = {TABLES: [], FAR: {}, PEAKS: {}, SYSTEM: [], HOST: []}
    tables, far, rises, *groups = (found.get(name, none) for name, none in of_facts.items())
    groups.append([found[name] for name in found if name not in of_facts])
    system, host, cases = ([Measured.from_plain(plain) for plain in group] for group in groups)
    gate = ", ".join(f"{value:.1e} in {dtype}" for dtype, value in TOLERANCE.items())
    yield Section(note=_RATIOS.format(gate=gate), after=_GPU_NOTE if device != "cpu" else _CPU_NOTE)
    held = cpu_rows(cases, system) if device == "cpu" else gpu_rows(cases, host, tables, far)
    yield Section("Targets", "", ("target", "limit", "measured", "held"), held)
    for group, dtype in dict.fromkeys((m.case.group, m.case.dtype) for m in cases):
        some = [m for m in cases if (m.case.group, m.case.dtype) == (group, dtype)]
        yield Section(f"{group}, {dtype}", "Calls:" if device != "cpu" else "", *ratios(some))
        if replayed := [m.replayed() for m in some if m.replays]:
            yield Section("", "Graphs:", *ratios(replayed))
    for m in host:
        rows = [(key, f"{1e6 * m.seconds.median(key):.1f}") for key in m.seconds]
        yield Section("The host's part", _HOST.format(case=m.case.label), ("", "µs"), rows)
    if system:
        yield Section("New outputs from the system's allocator", _SYSTEM, *ratios(system))
    yield Section("phasor, other ways", _OTHER_WAYS, *_probes(cases))
    rows = [
        (key, f"{rise / LARGE.size:.2f}", f"{rise / 2**20:.0f} MB")
        for key, rise in rises.items()
        if rise is not None
    ]
    yield Section("Memory of one call", _PEAKS, ("", "of query and key", "rise"), rows)
    rows = [
        (row["recipe"], f"{row['length']}", f"{1e3 * row['seconds']:.3g} ms",
         f"{row['bytes'] / 2**20:.4g} MB")
        for row in tables
    ]  # fmt: skip
    yield Section("Position tables", _TABLES, ("recipe", "positions", "time", "size"), rows)
    yield Section("Exactness far out", _EXACT.format(bound=FAR_BOUND), *_far(far))
    yield Section("Left out", _left_out([*cases, *system, *host]))


def ratios(group: Sequence[Measured]) -> tuple[list[str], list[list[str]]]:
    """A column for each case, a row for each contender."""
    keys = dict.fromkeys(
        key for m in group for key in (*m.seconds, *m.refused) if not key.startswith(PROBES)
    )
    rows = [[key, *(_cell(m, key) for m in group)] for key in keys if key != COPY]
    copies = [f"{1e6 * m.seconds.median(COPY):.4g}{_speed(m, COPY)}" for m in group]
    several = len({m.case.dtype for m in group}) > 1
    names = ((m.case.label if several else m.case.name, f"{m.case.group}, ") for m in group)
    titles = ["", *(name.removeprefix(model) for name, model in names)]
    return titles, [*rows, ["`copy_`, µs", *copies]]


def _cell(m: Measured, key: str) -> str:
    if key in m.refused:
        return f"*wrong:* {m.errors[key]:.0e}"
    if key not in m.seconds:
        return "–"
    rivals = [k for k in m.seconds if not k.startswith((COPY, MULTIPLY, EMPTY, *PROBES))]
    fastest = min(rivals, key=lambda k: m.seconds.ratio(k, COPY).median, default=None)
    text = f"{m.seconds.ratio(key, COPY)}{_speed(m, key)}"
    return f"**{text}**" if key == fastest else text


def _speed(m: Measured, key: str) -> str:
    """GB a second that the median round moved, on a GPU, whose cases are named by model."""
    if not m.case.name.startswith(f"{m.case.group}, ") or key == EMPTY:
        return ""
    return f", {moved(m.case, key) / m.seconds.median(key) / 1e9:.0f}"


def _probes(measured: Sequence[Measured]) -> tuple[list[str], list[list[str]]]:
    to = f"{IN_PLACE}, half"
    keys = dict.fromkeys(key for m in measured for key in m.seconds if key.startswith(PROBES))
    rows = [
        [m.case.label]
        + [str(m.seconds.ratio(k, to)) if {k, to} <= m.seconds.keys() else "–" for k in keys]
        for m in measured
        if keys.keys() & m.seconds.keys()
    ]
    return ["", *(k.removeprefix("phasor, ").removesuffix(", half") for k in keys)], rows


def _far(far: Mapping[str, Mapping[str, float | str]]) -> tuple[list[str], list[list[str]]]:
    places = list(dict.fromkeys(place for found in far.values() for place in found))
    rows = [
        [key, *(f"{e:.1e}" if isinstance(e := found.get(p), float) else "–" for p in places)]
        for key, found in far.items()
        if any(isinstance(e, float) for e in found.values())
    ]
    return ["", *places], rows


def _left_out(measured: Sequence[Measured]) -> str:
    """Who was not measured, why, and in how many cases."""
    reasons = Counter(entry for m in measured for entry in m.left_out.items())
    lines = [
        f"* {key}: {reason} ({count} of {len(measured)} cases)"
        for (key, reason), count in reasons.items()
    ]
    return "\n".join(lines) or "Nobody."
