"""Write the tables of ``docs/translate.md``: the targets, and which of them can say each preset.

Usage: python tools/translation_map.py [--write]

Without ``--write`` it prints them. Every preset is translated for every target; whether a target
then rotates so is what ``tests/files/translation`` proves.
"""

from __future__ import annotations

import datetime
import re
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import phasor
from phasor import LayerRopes
from phasor.files.translation import TARGETS, Translation, TranslationError, translate
from phasor.scaling import Rule

PAGE = Path(__file__).parent.parent / "docs" / "translate.md"
CONTEXT = 4096  # where a model has none
PROOFS = {"run": "✓", "description": "○"}
REORDERED, ONE_LENGTH, REFUSED = "↔", "=", "✗"


class Cell(NamedTuple):
    """What a target makes of a preset.

    Attributes:
        symbols: How it is proved and what it takes, or `REFUSED`.
        reason: Why it is refused; empty where it is not.
        radians: How far off the nearest that it can is; None without one.
    """

    symbols: str
    reason: str = ""
    radians: float | None = None


def cell(ropes: LayerRopes, target: str) -> Cell:
    """Translate one preset for one target; a rule that the target lacks at the context alone."""
    context = ropes.context or CONTEXT
    rules = any(isinstance(rope.scaling, Rule) for rope in ropes.ropes)
    at = context if rules and not applies_rules(ropes, target) else None
    try:
        translated = translate(ropes, target, context=context, at=at)
    except TranslationError as error:
        reason = str(error).partition("; the nearest")[0].partition(", and nothing")[0]
        reason = reason.replace(f"{target} cannot", "it cannot").replace(ropes.name, "the model")
        return Cell(REFUSED, re.sub(r"\b\d+(\.\d+)?\b", "n", reason), error.radians)
    symbols = [PROOFS[TARGETS[target].checked]]
    if is_reordered(ropes, translated):
        symbols.append(REORDERED)
    if at is not None:
        symbols.append(ONE_LENGTH)
    return Cell(" ".join(symbols))


def applies_rules(ropes: LayerRopes, target: str) -> bool:
    """Whether the target picks laws by the length itself."""
    rules = TARGETS[target].rules
    return all(
        isinstance(rope.scaling, rules) for rope in ropes.ropes if isinstance(rope.scaling, Rule)
    )


def is_reordered(ropes: LayerRopes, translated: Translation) -> bool:
    """Whether weights have to be reordered to another pairing first."""
    return any(
        performed.pairing != model.pairing
        for part in translated.parts
        for kind, performed in part.ropes.items()
        if (model := ropes.kinds[kind]) is not None
    )


def targets_table() -> Iterator[str]:
    """A line for each target: what it is given, and how that is checked."""
    yield "| `--to` | what it is given | checked |"
    yield "|---|---|---|"
    for name, target in sorted(TARGETS.items()):
        proof = {
            "run": f"{PROOFS['run']} its own code is run",
            "description": f"{PROOFS['description']} against its description, not proved",
        }[target.checked]
        yield f"| `{name}` | {target.program} ([documentation]({target.source})) | {proof} |"


def map_table() -> Iterator[str]:
    """A line for each group of presets with the same cells, then their names and the reasons."""
    groups: dict[tuple[tuple[str, str], ...], list[str]] = {}
    radians: dict[str, list[float]] = {}
    for name in phasor.preset_names():
        ropes = phasor.preset(name)
        cells = [cell(ropes, target) for target in sorted(TARGETS)]
        groups.setdefault(tuple((one.symbols, one.reason) for one in cells), []).append(name)
        for one in cells:
            if one.reason:
                radians.setdefault(one.reason, [])
            if one.radians is not None:
                radians[one.reason].append(one.radians)
    rows = sorted(groups.items(), key=lambda group: (-len(group[1]), group[1]))
    reasons = list(dict.fromkeys(reason for row, _ in rows for _, reason in row if reason))
    yield f"| presets | {' | '.join(f'`{name}`' for name in sorted(TARGETS))} |"
    yield "|---" + "|:-:" * len(TARGETS) + "|"
    for number, (row, names) in enumerate(rows, 1):
        shown = [
            f"{symbols} <sup>{reasons.index(reason) + 1}</sup>" if reason else symbols
            for symbols, reason in row
        ]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield f"| {number}. `{names[0]}`{more} | {' | '.join(shown)} |"
    yield from ("", "Reasons:", "")
    for number, reason in enumerate(reasons, 1):
        yield f"{number}. {reason}{distance(radians[reason])}."
    yield from ("", "The presets of each row:", "")
    for number, (_, names) in enumerate(rows, 1):
        yield f"{number}. {', '.join(f'`{name}`' for name in names)}"


def distance(radians: list[float]) -> str:
    """How far off the nearest are at the last position, in words."""
    if not radians:
        return ""
    if not any(radians):
        return "; the nearest is exact for text"
    ends = list(dict.fromkeys(f"{float(f'{end:.2g}'):,g}" for end in (min(radians), max(radians))))
    return f"; the nearest is off by {' to '.join(ends)} radians at the end of the context"


def made() -> str:
    """When, and with which programs of those that are run; not held by the tests."""
    versions: list[str] = []
    for name, target in sorted(TARGETS.items()):
        if target.checked == "run":
            try:
                versions.append(f"{target.package or name} {version(target.package or name)}")
            except PackageNotFoundError:
                versions.append(name)
    return f"Made on {datetime.date.today()} with {', '.join(versions)}."


#: By the word between the page's markers, what is there.
SECTIONS = {"targets": targets_table, "map": map_table, "made": lambda: iter([made()])}


def fill(page: str, *names: str) -> str:
    """The page with these sections made anew."""
    for name in names:
        start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, rest = page.split(start)
        _, after = rest.split(end)
        page = "\n".join([f"{before}{start}\n", *SECTIONS[name](), f"\n{end}{after}"])
    return page


def main() -> None:
    """Print the sections, or write them into the page."""
    if sys.argv[1:] == ["--write"]:
        page = fill(PAGE.read_text("utf-8"), *SECTIONS)
        PAGE.write_text(page, encoding="utf-8")
    else:
        for lines in SECTIONS.values():
            print("\n".join(lines()), end="\n\n")


if __name__ == "__main__":
    main()
