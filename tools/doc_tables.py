"""Write the tables of the documentation that are made of a registry: laws, translations, defects.

Usage: python -m tools.doc_tables [--write [PAGE ...]]

Without ``--write`` it prints them. Whether a target rotates as the table of translations says is
what ``tests/files/translation`` proves. Each program that the page says is run
is run here too, on one preset: one that fails, or is not installed, stops the script.
"""

from __future__ import annotations

import datetime
import sys
import tomllib
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import phasor
from phasor.cli.translate import Answer, answer
from phasor.files.translation import TARGETS
from phasor.identification.report import NAMES
from phasor.scaling import LAWS, REGISTRY

DOCS = Path(__file__).parent.parent / "docs"
#: By target, what tools/engines.py kept of its runs.
ENGINES = tomllib.loads((Path(__file__).parent / "engines.toml").read_text("utf-8"))
RUN_ON = "llama-2-7b"  # which every program can express
PROOFS = {"run": "✓", "engine": "✓", "description": "○"}
#: The models of the short map, one of each kind that programs treat differently.
SHOWN = (
    *("llama-3.1-8b", "qwen3-8b-yarn", "gemma-3-27b", "deepseek-r1"),
    *("gpt-oss-20b", "phi-4-mini", "qwen2.5-vl-7b", "flux.1-dev"),
)
REORDERED, ONE_LENGTH, REFUSED = "↔", "=", "✗"


def targets_table() -> Iterator[str]:
    """A line for each target: what it is given, and how that is checked."""
    yield "| `--to` | output | |"
    yield "|---|---|---|"
    for name, target in sorted(TARGETS.items()):
        version = f" {ENGINES[name]['version']}" if target.checked == "engine" else ""
        proof = f"{PROOFS[target.checked]}{version}"
        yield f"| `{name}` | [{target.program}]({target.source}) | {proof} |"


def map_table() -> Iterator[str]:
    """A line for each target, a column for each of `SHOWN`.

    A cell is empty where nothing has to be said; `tables.css` shows a tick there.
    """
    yield f"| `--to` | {' | '.join(f'`{name}`' for name in SHOWN)} |"
    yield "|---" + "|:-:" * len(SHOWN) + "|"
    models = [phasor.preset(name) for name in SHOWN]
    for target in sorted(TARGETS):
        cells = [sign(answer(ropes, target)) for ropes in models]
        yield f"| `{target}` | {' | '.join(cells)} |"


def sign(answer: Answer) -> str:
    """What a target makes of a model, in a sign or two."""
    if not answer.can:
        return REFUSED
    return " ".join(
        (REORDERED,) * answer.is_reordered + (ONE_LENGTH,) * (answer.at_length is not None)
    )


def generated_tables() -> Iterator[str]:
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
        rest = f" and {len(presets) - 3} more" if len(presets) > 3 else ""
        law = type(example).__name__
        link = f"[`{law}`](api/scaling.md#phasor.scaling.{law})"
        yield f"| {link} | `{name}` | {formula} | {', '.join(presets[:3])}{rest} |"


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
    """A table for each file of published defects."""
    from tests.identification.defects import PUBLISHED

    for heading, group in PUBLISHED.items():
        yield from (f"## {heading.removesuffix('.')}", "")
        yield "| Symptom | Program | `verify` names |"
        yield "|---|---|---|"
        for defect in group:
            changes = [names for part in defect.replay() for names in part.changes.values()]
            names = dict.fromkeys(f"`{name}`" for findings in changes for name in findings)
            program = f"[{defect.program.partition(',')[0]}]({defect.thread})"
            yield f"| {defect.symptom} | {program} | {', '.join(names)} |"
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
    "translate.md": {"targets": targets_table, "map": map_table, "made": generated_tables},
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
