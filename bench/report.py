"""The Markdown that the documentation includes, from the results as they were written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from contenders import IN_PLACE, PROBES
from device import EMPTY
from gate import TOLERANCE
from measure import COPY, MULTIPLY, Measured
from targets import FAR_BOUND, moved, target_rows

_RATIOS = """\
Each number is a time divided by the time of torch's `copy_` on the same query and key in the same
round: the median over the rounds, and half the interquartile range in per cent of it. 1 is a copy;
below 1 is possible because a call in place moves fewer bytes than a copy does. A call with both
directions is divided by two copies. Bold is the fastest contender of a column. A dash: the
contender cannot do the case. *Wrong*: it was not within the tolerance and was not timed; the number
is its error as a part of the pair's length."""
_CPU_NOTE = """\
The machine is shared and the numbers are noisy: between runs, times move by tens of per cent and
ratios by several. "In-place multiply" is torch's `mul_` by -1 on the slice that turns, bfloat16 as
float32 of the same bytes; it stands for a multiplication in C, and where memory is strided it is
slower than one."""
_GPU_NOTE = """\
The second number of a cell is the bytes a second that it moved, in GB. What is counted is the least
that has to be moved: query and key read and written once, in place only the slice that turns, and
twice that where gradients are asked.

Calls: between two events on the device, each call by itself. What fits twice into the cache is
warm, called in a row and can wait for the host; anything larger starts with an empty cache and
with the host ahead. Graphs: the same calls captured and replayed, twenty to a graph where they are
warm, so that the host has no part in them."""
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


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first stand right."""
    marks = ["---", *["---:"] * (len(titles) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (titles, marks, *rows))


def circumstances(about: Mapping[str, Any]) -> str:
    """When, where and with what: the head of every page."""
    named = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    return (
        f"Measured {about['date']} at commit {about['commit']}, on {about['machine']}, "
        f"Python {about['python']}; {named}."
    )


def markdown(results: Mapping[str, Any]) -> str:
    """Every table."""
    on_gpu = results["device"] != "cpu"
    measured = [Measured.from_plain(plain) for plain in results["cases"]]
    held = table(("target", "limit", "measured", "held"), target_rows(results))
    note = _GPU_NOTE if on_gpu else _CPU_NOTE
    gate = ", ".join(f"{value:.1e} in {dtype}" for dtype, value in TOLERANCE.items())
    some = "" if results["whole"] else " This was a run of some of the cases."
    parts = [
        f"{circumstances(results)} Tolerance of the gate: {gate}.{some}",
        _RATIOS,
        note,
        "### Targets",
        held,
    ]
    for group, dtype in dict.fromkeys((m.case.group, m.case.dtype) for m in measured):
        some = [m for m in measured if (m.case.group, m.case.dtype) == (group, dtype)]
        parts += [f"### {group}, {dtype}", *(["Calls:"] if on_gpu else []), ratios(some)]
        replayed = [m.replayed() for m in some if m.replays]
        if replayed:
            parts += ["Graphs:", ratios(replayed)]
    launches = [Measured.from_plain(plain) for plain in results["launches"]]
    for m in launches:
        body = [(key, f"{1e6 * m.median(key):.1f}") for key in m.seconds]
        parts += ["### The host's part", _HOST.format(case=m.case.label), table(("", "µs"), body)]
    system = [Measured.from_plain(plain) for plain in results["system_memory"]]
    if system:
        parts += ["### New outputs from the system's allocator", _SYSTEM, ratios(system)]
    if any(key.startswith(PROBES) for m in measured for key in m.seconds):
        parts += ["### phasor, other ways", _OTHER_WAYS, _probes(measured)]
    if results["peaks"]:
        size = results["inputs"]
        rows = [
            (key, f"{rise / size:.2f}", f"{rise / 2**20:.0f} MB")
            for key, rise in results["peaks"].items()
            if rise is not None
        ]
        parts += ["### Memory of one call", _PEAKS, table(("", "of query and key", "rise"), rows)]
    if results["tables"]:
        rows = [
            (row["recipe"], f"{row['length']}", f"{1e3 * row['seconds']:.3g} ms",
             f"{row['bytes'] / 2**20:.4g} MB")
            for row in results["tables"]
        ]  # fmt: skip
        titles = ("recipe", "positions", "time", "size")
        parts += ["### Position tables", _TABLES, table(titles, rows)]
    if results["far"]:
        bound = _EXACT.format(bound=FAR_BOUND)
        parts += ["### Exactness far out", bound, _far(results["far"])]
    parts += ["### Left out", left_out([*measured, *system, *launches])]
    if results["too_large"]:
        parts.append(f"Cases that the device has no memory for: {'; '.join(results['too_large'])}.")
    parts += [f"{what} failed: {reason}" for what, reason in results["failed"].items()]
    return "\n\n".join(parts) + "\n"


def ratios(group: Sequence[Measured]) -> str:
    """A column for each case, a row for each contender."""
    keys = dict.fromkeys(
        key for m in group for key in (*m.seconds, *m.refused) if not key.startswith(PROBES)
    )
    rows = [[key, *(_cell(m, key) for m in group)] for key in keys if key != COPY]
    copies = [f"{1e6 * m.median(COPY):.4g}{_speed(m, COPY)}" for m in group]
    rows.append(["`copy_`, µs", *copies])
    several = len({m.case.dtype for m in group}) > 1
    names = (m.case.label if several else m.case.name for m in group)
    titles = [n.removeprefix(f"{m.case.group}, ") for n, m in zip(names, group, strict=True)]
    return table(["", *titles], rows)


def _cell(m: Measured, key: str) -> str:
    if key in m.refused:
        return f"*wrong:* {m.errors[key]:.0e}"
    if key not in m.seconds:
        return "–"
    others = (COPY, MULTIPLY, EMPTY)
    rivals = [k for k in m.seconds if k not in others and not k.startswith(PROBES)]
    fastest = min(rivals, key=lambda k: m.ratio(k).median, default=None)
    text = f"{m.ratio(key)}{_speed(m, key)}"
    return f"**{text}**" if key == fastest else text


def _speed(m: Measured, key: str) -> str:
    """GB a second that the median round moved; only a GPU has replays, and its pages say it."""
    on_gpu = bool(m.replays) or EMPTY in m.seconds or m.case.name.startswith(f"{m.case.group}, ")
    if not on_gpu or key == EMPTY:
        return ""
    return f", {moved(m.case, key) / m.median(key) / 1e9:.0f}"


def _probes(measured: Sequence[Measured]) -> str:
    to = f"{IN_PLACE}, half"
    found = [m for m in measured if any(k.startswith(PROBES) for k in m.seconds)]
    keys = dict.fromkeys(k for m in found for k in m.seconds if k.startswith(PROBES))
    rows = [
        [m.case.label]
        + [str(m.ratio(k, to)) if k in m.seconds and to in m.seconds else "–" for k in keys]
        for m in found
    ]
    return table(["", *(k.removeprefix("phasor, ").removesuffix(", half") for k in keys)], rows)


def _far(far: Mapping[str, Mapping[str, float | str]]) -> str:
    places = list(dict.fromkeys(place for found in far.values() for place in found))
    rows = [
        [key, *(f"{e:.1e}" if isinstance(e := found.get(p), float) else "–" for p in places)]
        for key, found in far.items()
        if any(isinstance(e, float) for e in found.values())
    ]
    return table(["", *places], rows)


def left_out(measured: Sequence[Measured]) -> str:
    """Who was not measured, why, and in how many cases."""
    reasons: dict[tuple[str, str], int] = {}
    for m in measured:
        for entry in m.left_out.items():
            reasons[entry] = reasons.get(entry, 0) + 1
    lines = [
        f"* {key}: {reason} ({count} of {len(measured)} cases)"
        for (key, reason), count in reasons.items()
    ]
    return "\n".join(lines) or "Nobody."
