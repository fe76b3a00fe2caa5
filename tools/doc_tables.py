"""Write the tables of the documentation that are made of a registry: laws, translations, defects.

Usage: python -m tools.doc_tables [--write [PAGE ...]]

Without ``--write`` it prints them. Every preset is translated for every target; whether a target
then rotates so is what ``tests/files/translation`` proves. Each program that the page says is run
is run here too, on one preset: one that fails, or is not installed, stops the script.
"""

from __future__ import annotations

import datetime
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import phasor
from phasor import LayerRopes
from phasor.files.translation import TARGETS, Translation, TranslationError, translate
from phasor.identification.report import NAMES
from phasor.scaling import LAWS, REGISTRY, Rule

DOCS = Path(__file__).parent.parent / "docs"
CONTEXT = 4096  # where a model has none
#: By target, what tools/engines.py kept of its runs.
ENGINES = tomllib.loads((Path(__file__).parent / "engines.toml").read_text("utf-8"))
RUN_ON = "llama-2-7b"  # which every program can express
PROOFS = {"run": "✓", "engine": "✓", "description": "○"}
REORDERED, ONE_LENGTH, REFUSED = "↔", "=", "✗"


class Cell(NamedTuple):
    """What a target makes of a preset."""

    symbols: str  # how it is proved and what it takes, or `REFUSED`
    reason: str = ""  # why it is refused
    radians: float | None = None  # how far off the nearest that it can is


def cell(ropes: LayerRopes, target: str) -> Cell:
    """Translate one preset for one target; a rule that the target lacks at the context alone."""
    context = ropes.context or CONTEXT
    rules = [rope.scaling for rope in ropes.ropes if isinstance(rope.scaling, Rule)]
    # the target may pick laws by the length itself
    at = None if all(isinstance(rule, TARGETS[target].rules) for rule in rules) else context
    try:
        translated = translate(ropes, target, context=context, seq_len=at)
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
    yield "| `--to` | what it is given | |"
    yield "|---|---|---|"
    for name, target in sorted(TARGETS.items()):
        version = f" {ENGINES[name]['version']}" if target.checked == "engine" else ""
        proof = f"{PROOFS[target.checked]}{version}"
        yield f"| `{name}` | [{target.program}]({target.source}) | {proof} |"


def map_table() -> Iterator[str]:
    """A line for each group of presets with the same cells, then the reasons and their names.

    A cell is empty where nothing has to be said; `tables.css` shows a tick there.
    """
    groups: dict[tuple[tuple[str, str], ...], list[str]] = {}
    radians: dict[str, list[float]] = {}
    for name in phasor.preset_names():
        ropes = phasor.preset(name)
        cells = [cell(ropes, target) for target in sorted(TARGETS)]
        groups.setdefault(tuple((one.symbols, one.reason) for one in cells), []).append(name)
        for one in cells:
            known = radians.setdefault(one.reason, [])
            if one.radians is not None:
                known.append(one.radians)
    rows = sorted(groups.items(), key=lambda group: (-len(group[1]), group[1]))
    reasons = list(dict.fromkeys(reason for row, _ in rows for _, reason in row if reason))
    yield f"| presets | {' | '.join(f'`{name}`' for name in sorted(TARGETS))} |"
    yield "|---" + "|:-:" * len(TARGETS) + "|"
    for number, (row, names) in enumerate(rows, 1):
        shown = [
            f"{symbols}<sup>{reasons.index(reason) + 1}</sup>" if reason else symbols[1:].strip()
            for symbols, reason in row
        ]
        more = f" +{len(names) - 1}" if len(names) > 1 else ""
        yield f"| {number}. `{names[0]}`{more} | {' | '.join(shown)} |"
    yield from ("", "Reasons:", "")
    for number, reason in enumerate(reasons, 1):
        first, _, what = reason.partition("it cannot express ")
        told = f"{what}{': ' * bool(first)}{first.rstrip(': ')}" if what else reason
        yield f"{number}. {told}{distance(radians[reason])}."
    yield from ("", "The presets of each row:", "")
    for number, (_, names) in enumerate(rows, 1):
        if len(names) > 1:
            yield f"{number}. {', '.join(f'`{name}`' for name in names)}"


def distance(radians: list[float]) -> str:
    """How far off the nearest are at the last position."""
    if not radians:
        return ""
    if not any(radians):
        return " (exact for text)"
    ends = list(dict.fromkeys(f"{float(f'{end:.2g}'):,g}" for end in (min(radians), max(radians))))
    return f" ({'–'.join(ends)} rad)"


def made() -> Iterator[str]:
    """When, and with which programs of those that are run; not held by the tests."""
    from tests.files.translation.test_translate import assert_turns

    versions: list[str] = []
    for name, target in sorted(TARGETS.items()):
        if target.checked == "run":
            versions.append(f"{target.package or name} {version(target.package or name)}")
            assert_turns(phasor.preset(RUN_ON), name)
    yield f"Made on {datetime.date.today()} with {', '.join(versions)}."


def laws_table() -> Iterator[str]:
    """A line for each law or rule: its formula, and presets that have it."""
    yield "| In `phasor.scaling` | JSON | Frequency of pair `k` | Presets that use it |"
    yield "|---|---|---|---|"
    users: dict[type, list[str]] = {}
    for preset in phasor.preset_names():
        for law in {type(rope.scaling): None for rope in phasor.preset(preset).ropes}:
            users.setdefault(law, []).append(f"`{preset}`")
    for name, (example, formula) in REGISTRY.items():
        presets = users.get(type(example), [])
        more = f" and {len(presets) - 3} more" if len(presets) > 3 else ""
        law = type(example).__name__
        link = f"[`{law}`](api/scaling.md#phasor.scaling.{law})"
        yield f"| {link} | `{name}` | {formula} | {', '.join(presets[:3])}{more} |"


def laws_index() -> Iterator[str]:
    """A line for each law or rule: the first of its docstring."""
    yield "| Law or rule | What it does |"
    yield "|---|---|"
    for law in LAWS.values():
        summary = str(law.__doc__).partition("\n")[0].rstrip(".").replace("``", "`")
        name = f"phasor.scaling.{law.__name__}"
        yield f"| [`scaling.{law.__name__}`][{name}] | {summary} |"


def laws_shown() -> Iterator[str]:
    """What shows the docstrings of laws and rules."""
    yield "::: phasor.scaling"
    yield "    options:"
    yield f"      members: [{', '.join(law.__name__ for law in LAWS.values())}]"
    yield '      filters: ["!."]'


def defects() -> Iterator[str]:
    """A table for each file of the museum of published defects."""
    from tests.verify.defects.table import GROUPS

    for heading, group in GROUPS.items():
        yield from (f"## {heading.removesuffix('.')}", "")
        yield "| Symptom | Program | `verify` names |"
        yield "|---|---|---|"
        for one in group:
            changes = [names for part in one.replay() for names in part.changes.values()]
            names = dict.fromkeys(f"`{name}`" for some in changes for name in some)
            program = f"[{one.program.partition(',')[0]}]({one.thread})"
            yield f"| {one.symptom} | {program} | {', '.join(names)} |"
        yield ""


def names_found() -> Iterator[str]:
    """The names of everything that identification finds."""
    yield "| About | Names |"
    yield "|---|---|"
    for about, names in NAMES.items():
        listed = ", ".join(f"`{name.replace('{dtype}', '…')}`" for name in names)
        yield f"| {about} | {listed} |"


#: By page and the word between its markers, what is there.
SECTIONS: dict[str, dict[str, Callable[[], Iterator[str]]]] = {
    "laws.md": {"laws": laws_table},
    "api/index.md": {"laws": laws_index},
    "api/scaling.md": {"laws": laws_shown},
    "translate.md": {"targets": targets_table, "map": map_table, "made": made},
    "verify-defects.md": {"defects": defects},
    "identify.md": {"names": names_found},
}


def fill(name: str, *words: str) -> str:
    """A page with these sections made anew; all unless named."""
    page = (DOCS / name).read_text("utf-8")
    for word in words or SECTIONS[name]:
        start, end = f"<!-- {word} -->", f"<!-- /{word} -->"
        before, rest = page.split(start)
        _, after = rest.split(end)
        page = "\n".join([f"{before}{start}\n", *SECTIONS[name][word](), f"\n{end}{after}"])
    return page


def main() -> None:
    """Print the sections, or write them into their pages; into all unless named."""
    if sys.argv[1:2] == ["--write"]:
        for name, page in {name: fill(name) for name in sys.argv[2:] or SECTIONS}.items():
            (DOCS / name).write_text(page, encoding="utf-8")
    else:
        for sections in SECTIONS.values():
            for lines in sections.values():
                print("\n".join(lines()), end="\n\n")


if __name__ == "__main__":
    main()
