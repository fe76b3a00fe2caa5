"""The Markdown that the documentation includes, from the results as they were written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from targets import target_rows

from phasor.bench import COPY, MULTIPLY, TOLERANCE, Case, Measured, spread

_PROBES = ("phasor, bare", "phasor, positions", "phasor, rows", "phasor, avx")
_GROUPS: dict[str, Callable[[Case], bool]] = {
    "Prefill": lambda c: c.name.startswith("prefill"),
    "Training, forward and backward": lambda c: c.backward,
    "Decode, one token per sequence": lambda c: c.seq == 1,
    "Other models": lambda c: not c.name.startswith("prefill") and not c.backward and c.seq > 1,
}
_NOTE = """\
Each number is a time divided by the time of torch's `copy_` on the same query and key in the same
round: the median over the rounds, and half the interquartile range in per cent of it. 1 is a copy;
below 1 is possible because a call in place moves fewer bytes than a copy does. A call with both
directions is divided by two copies. Bold is the fastest contender of a column. A dash: the
contender cannot do the case. *Wrong*: it was not within the tolerance and was not timed; the number
is its error as a part of the pair's length.

The machine is shared and the numbers are noisy: between runs, times move by tens of per cent and
ratios by several. "In-place multiply" is torch's `mul_` by -1 on the slice that turns, bfloat16 as
float32 of the same bytes; it stands for a multiplication in C, and where memory is strided it is
slower than one."""


def markdown(results: Mapping[str, Any]) -> str:
    """Every table."""
    measured = [Measured.from_plain(plain) for plain in results["cases"]]
    parts = [_about(results), _NOTE, "### Targets", _targets(measured)]
    for title, belongs in _GROUPS.items():
        for dtype in ("bfloat16", "float32"):
            group = [m for m in measured if belongs(m.case) and m.case.dtype == dtype]
            if group:
                parts += [f"### {title}, {dtype}", _ratios(group)]
    system = [Measured.from_plain(plain) for plain in results["system_memory"]]
    if system:
        parts += ["### New outputs from the system's allocator", _SYSTEM, _ratios(system)]
    if any(key.startswith(_PROBES) for m in measured for key in m.seconds):
        parts += ["### phasor, other ways", _OTHER_WAYS, _probes(measured)]
    if results["peaks"]:
        parts += ["### Memory of one call", _PEAKS, _peaks(results["peaks"], results["inputs"])]
    if results["tables"]:
        parts += ["### Position tables", _TABLES, _tables(results["tables"])]
    if results["far"]:
        parts += ["### Exactness far out", _EXACT, _far(results["far"])]
    parts += ["### Left out", left_out([*measured, *system])]
    return "\n\n".join(parts) + "\n"


_SYSTEM = """\
As above, with malloc as it comes: every output of 32 MB or more is new memory from the system,
whose pages are filled with zeros at first touch. `copy_` writes to memory that is there already."""
_OTHER_WAYS = "In place, half pairing, divided by `phasor.torch.rotate_qk_` on the same tensors."
_PEAKS = """\
Rise of the peak of resident memory during one call on 8192 tokens in bfloat16, in a process of its
own, divided by the size of query and key. New outputs alone are 1."""
_TABLES = """\
What is kept for positions up to a length, and the median time to build it. phasor's digit tables
serve every position below 2^40."""
_EXACT = """\
Largest distance from the float64 truth, for pairs of length 1 rotated in float32, base 500 000."""


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first stand right."""
    marks = ["---", *["---:"] * (len(titles) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (titles, marks, *rows))


def _about(results: Mapping[str, Any]) -> str:
    machine, versions = results["machine"], results["versions"]
    named = ", ".join(f"{name} {number}" for name, number in versions.items())
    tolerance = ", ".join(f"{value:.1e} in {dtype}" for dtype, value in TOLERANCE.items())
    kind = " This was a quick run, with few cases and rounds." if results["quick"] else ""
    return (
        f"Measured {results['date']} at commit {results['commit']}, on {machine['processor']} "
        f"({machine['processors']} processors, {results['threads']} threads used, "
        f"{machine['path']} path), {machine['system']}, Python {machine['python']}; {named}. "
        f"{machine['allocator']} Load average before: {machine['load']}. "
        f"Tolerance of the gate: {tolerance}.{kind}"
    )


def _targets(measured: Sequence[Measured]) -> str:
    return table(("target", "limit", "measured", "held"), target_rows(measured))


def _ratios(group: Sequence[Measured]) -> str:
    keys = dict.fromkeys(
        key for m in group for key in (*m.seconds, *m.refused) if not key.startswith(_PROBES)
    )
    rows = [[key, *(_cell(m, key) for m in group)] for key in keys if key != COPY]
    rows.append(["`copy_`, µs", *(f"{1e6 * spread(m.seconds[COPY]).median:.4g}" for m in group)])
    several = len({m.case.dtype for m in group}) > 1
    titles = (f"{m.case.name}, {m.case.dtype}" if several else m.case.name for m in group)
    return table(["", *titles], rows)


def _cell(m: Measured, key: str) -> str:
    if key in m.refused:
        return f"*wrong:* {m.errors[key]:.0e}"
    if key not in m.seconds:
        return "–"
    rivals = [k for k in m.seconds if k not in (COPY, MULTIPLY) and not k.startswith(_PROBES)]
    fastest = min(rivals, key=lambda k: m.ratio(k).median)
    text = str(m.ratio(key))
    return f"**{text}**" if key == fastest else text


def _probes(measured: Sequence[Measured]) -> str:
    to = "phasor, in place, half"
    found = [m for m in measured if any(k.startswith(_PROBES) for k in m.seconds)]
    keys = dict.fromkeys(k for m in found for k in m.seconds if k.startswith(_PROBES))
    rows = [
        [f"{m.case.name}, {m.case.dtype}"]
        + [str(m.ratio(k, to)) if k in m.seconds and to in m.seconds else "–" for k in keys]
        for m in found
    ]
    return table(["", *(k.removeprefix("phasor, ").removesuffix(", half") for k in keys)], rows)


def _peaks(peaks: Mapping[str, int | None], inputs: int) -> str:
    known = {key: size for key, size in peaks.items() if size is not None}
    rows = [(key, f"{size / inputs:.2f}", f"{size / 2**20:.0f} MB") for key, size in known.items()]
    return table(("", "of query and key", "rise"), rows)


def _tables(rows: Sequence[Mapping[str, Any]]) -> str:
    cells = [
        (row["recipe"], f"{row['length']}", f"{1e3 * row['median']:.3g} ms",
         f"{row['bytes'] / 2**20:.4g} MB")
        for row in rows
    ]  # fmt: skip
    return table(("recipe", "positions", "time", "size"), cells)


def _far(far: Mapping[str, Mapping[str, float | str]]) -> str:
    places = list(next(iter(far.values())))
    rows = [
        [key, *(f"{e:.0e}" if isinstance(e, float) else "–" for e in found.values())]
        for key, found in far.items()
        if any(isinstance(e, float) for e in found.values())
    ]
    return table(["", *places], rows)


def left_out(measured: Sequence[Measured]) -> str:
    """Who was not measured, why, and in how many cases."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for m in measured:
        for key, reason in m.left_out.items():
            reasons.setdefault((key, reason), []).append(f"{m.case.name} {m.case.dtype}")
    lines = [
        f"* {key}: {reason} ({len(cases)} of {len(measured)} cases)"
        for (key, reason), cases in reasons.items()
    ]
    return "\n".join(lines) or "Nobody."
