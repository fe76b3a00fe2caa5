"""The Markdown of the GPU's results, as they were written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpu_cases import model_of, work_of
from gpu_measure import EMPTY, speed
from gpu_targets import FAR_BOUND, rows
from report import left_out, table

from phasor.bench import COPY, MULTIPLY, Measured, spread

_NOTE = """\
Each cell is a time divided by the time of torch's `copy_` on the same query and key in the same
round (the median over the rounds, and half the interquartile range in per cent of it), and the
bytes a second that it moved, in GB. What is counted is the least that has to be moved: query and
key read and written once, in place only the slice that turns, and twice that where gradients are
asked, with what came in read once more for the gradient of a norm. A training step is divided by
two copies. Bold is the fastest of a column, without the
references. A dash: the contender cannot do the case, or is not installed. *Wrong*: it was not
within the tolerance and was not timed; the number is its error as a part of the pair's length.

Calls: between two events on the device, each call by itself. What fits twice into the cache is
warm, called in a row and can wait for the host; anything larger starts with an empty cache and
with the host ahead. Graphs: the same calls captured and replayed, twenty to a graph where they are
warm, so that the host has no part in them."""
_HOST = "Microseconds from a call to its return for {case}, while the device works on its own."
_TABLES = "What is kept for positions up to a length, for heads of 128 in bfloat16."
_EXACT = """\
Largest distance from the float64 truth for pairs of length 1, over the last 256 positions before a
length. The derived bound of phasor in float32 is {bound:.1e}."""


def markdown(results: Mapping[str, Any]) -> str:
    """Every table."""
    measured = [Measured.from_plain(plain) for plain in results["cases"]]
    launches = [Measured.from_plain(plain) for plain in results["launches"]]
    held = rows(measured, launches, results["far"], results["tables"])
    titles = ("target", "limit", "measured", "held")
    parts = [_about(results), _NOTE, "### Targets", table(titles, held)]
    for model, dtype in dict.fromkeys((model_of(m.case), m.case.dtype) for m in measured):
        group = [m for m in measured if (model_of(m.case), m.case.dtype) == (model, dtype)]
        parts += [f"### {model}, {dtype}", "Calls:", _cells(group)]
        replayed = [m.replayed() for m in group if m.replays]
        if replayed:
            parts += ["Graphs:", _cells(replayed)]
    for m in launches:
        parts += ["### The host's part", _HOST.format(case=f"{m.case.name}, {m.case.dtype}")]
        parts.append(_microseconds(m))
    if results["tables"]:
        parts += ["### Position tables", _TABLES, _sizes(results["tables"])]
    if results["far"]:
        parts += ["### Exactness far out", _EXACT.format(bound=FAR_BOUND), _far(results["far"])]
    parts += ["### Left out", left_out([*measured, *launches])]
    if results["too_large"]:
        parts.append(f"Cases that the device has no memory for: {'; '.join(results['too_large'])}.")
    for what, reason in results["failed"].items():
        parts.append(f"{what} failed: {reason}")
    return "\n\n".join(parts) + "\n"


def _about(results: Mapping[str, Any]) -> str:
    machine = results["machine"]
    named = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    return (
        f"Measured {results['date']} at commit {results['commit']}, on {machine['device']} "
        f"({machine['memory']}, {machine['cache']} of L2 cache, CUDA {machine['cuda']}, driver "
        f"{machine['driver']}), Python {machine['python']}; {named}."
    )


def _cells(group: Sequence[Measured]) -> str:
    keys = dict.fromkeys(key for m in group for key in (*m.seconds, *m.refused))
    body = [[key, *(_cell(m, key) for m in group)] for key in keys if key != COPY]
    body.append(["`copy_`", *(_copied(m) for m in group)])
    return table(["", *(work_of(m.case) for m in group)], body)


def _cell(m: Measured, key: str) -> str:
    if key in m.refused:
        return f"*wrong:* {m.errors[key]:.0e}"
    if key not in m.seconds:
        return "–"
    if key == EMPTY:
        return str(m.ratio(key))
    rivals = [k for k in m.seconds if k not in (COPY, MULTIPLY, EMPTY)]
    text = f"{m.ratio(key)}, {speed(m, key) / 1e9:.0f}"
    return f"**{text}**" if key == min(rivals, key=lambda k: m.ratio(k).median) else text


def _copied(m: Measured) -> str:
    return f"{1e6 * spread(m.seconds[COPY]).median:.4g} µs, {speed(m, COPY) / 1e9:.0f}"


def _microseconds(m: Measured) -> str:
    body = [(key, f"{1e6 * spread(ts).median:.1f}") for key, ts in m.seconds.items()]
    return table(("", "µs"), body)


def _sizes(sizes: Sequence[Mapping[str, Any]]) -> str:
    lengths = dict.fromkeys(row["length"] for row in sizes)
    known = {(row["recipe"], row["length"]): f"{row['bytes'] / 2**20:.0f} MB" for row in sizes}
    body = [
        [recipe, *(known[recipe, length] for length in lengths)]
        for recipe in dict.fromkeys(row["recipe"] for row in sizes)
    ]
    return table(["recipe", *(f"{length // 10**6}M positions" for length in lengths)], body)


def _far(far: Mapping[str, Mapping[str, float | str]]) -> str:
    places = list(next(iter(far.values())))
    body = [
        [key, *(f"{e:.1e}" if isinstance(e, float) else "–" for e in found.values())]
        for key, found in far.items()
        if any(isinstance(e, float) for e in found.values())
    ]
    return table(["", *places], body)
