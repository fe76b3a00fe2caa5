"""The tables of model types have no slip; one that is made is told with its file and line."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import fields
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

import phasor.files
from phasor.files.configs.facts import Architecture, AxesFacts, Kind, LayerRule, table
from phasor.files.configs.rewrites import REWRITES
from phasor.files.configs.ropes import TURNS
from phasor.files.configs.unread_keys import MEANINGS, Meaning
from phasor.files.dialects.diffusers import _SPLITS, Transformer
from phasor.files.dialects.gguf import _REWRITES
from phasor.pairings import PAIRINGS

#: The class of a file's entries, and the table that they are in; without one, the file itself.
ENTRIES = {
    "huggingface.toml": (Architecture, "model_types"),
    "gguf.toml": (Architecture, "architectures"),
    "diffusers.toml": (Transformer, "rotating"),
    "keys.toml": (Meaning, None),
}
#: An entry that is not like another says one of these.
NEEDED = {
    Architecture: ({"pairing", "other_positions", "refused"},),
    Transformer: ({"pairing"}, {"base"}),
    Meaning: ({"means"}, {"says"}),
}
WORDS = {
    "pairing": PAIRINGS,
    "pairing_out": PAIRINGS,
    "split": tuple(_SPLITS),
    "means": MEANINGS,
    "turns": tuple(TURNS),
    "rewrite": (*REWRITES, *_REWRITES),
}
CONDITIONS = {"is", "unless", "present"}

SLIPS = {
    "an unknown fact": ("huggingface.toml", "cohere2_moe", "pairing =", "pairings =", "pairings"),
    "a pairing that is none": (
        "huggingface.toml",
        "mixtral",
        'mixtral = { pairing = "half"',
        'mixtral = { pairing = "halves"',
        "halves",
    ),
    "a model type that is none": (
        "huggingface.toml",
        "aria",
        'aria = { like = "aria_text"',
        'aria = { like = "arya"',
        "arya",
    ),
    "a variant without a value": (
        "huggingface.toml",
        "falcon",
        'key = "alibi", is = true, other_positions',
        'key = "alibi", other_positions',
        "variant",
    ),
    "an unknown fact of a pattern": (
        "huggingface.toml",
        "plamo3",
        'every = 8, keys = ["sliding_window_pattern"]',
        'evry = 8, keys = ["sliding_window_pattern"]',
        "evry",
    ),
    "an unknown meaning": (
        "keys.toml",
        "use_rope",
        'use_rope = { means = "rotates"',
        'use_rope = { means = "spins"',
        "spins",
    ),
    "an unknown split": (
        "diffusers.toml",
        "CosmosTransformer3DModel",
        'split = "wan"',
        'split = "van"',
        "van",
    ),
}


def text_of(file: str) -> str:
    """A table of the package."""
    package = "dialects" if file in ("diffusers.toml", "gguf.toml") else "configs"
    return resources.files(f"phasor.files.{package}").joinpath(file).read_text("utf-8")


def slips(file: str, text: str) -> Iterator[str]:
    """Each slip in a table, with its line: that of the entry, or of the fact in it."""
    cls, inside = ENTRIES[file]
    plain = tomllib.loads(text)
    entries = plain if inside is None else plain[inside]
    for name, entry in entries.items():
        findings = [*slips_of_entry(entry, entries, cls)]
        findings += [
            ("", f"says none of {', '.join(sorted(facts))}")
            for facts in NEEDED[cls]
            if "like" not in entry and not facts & entry.keys()
        ]
        for fact, what in findings:
            yield f"{file}:{line_of(text, name, fact)}: {name} {what}"


def slips_of_entry(
    entry: Mapping[str, Any], entries: Mapping[str, Any], cls: type
) -> Iterator[tuple[str, str]]:
    """Facts that are wrong, and what is wrong with them."""
    known = {field.name for field in fields(cls)} | {"like"}
    for fact, value in entry.items():
        allowed = tuple(entries) if fact == "like" else WORDS.get(fact, (value,))
        if fact not in known:
            yield fact, f"has the unknown fact {fact!r}"
        elif value not in allowed:
            yield fact, f"has no such {fact} as {value!r}"
    for kind in entry.get("kinds", {}).values():
        yield from slips_of_entry(kind, {}, Kind)
    for fact, of_fact in (("axes", AxesFacts), ("layers", LayerRule)):
        if cls is Architecture and isinstance(entry.get(fact), Mapping):
            yield from slips_of_entry(entry[fact], {}, of_fact)
    for variant in entry.get("variants", ()):
        one_condition = len(CONDITIONS & variant.keys()) == 1
        if "key" not in variant or not one_condition or variant.get("present", True) is not True:
            yield "variants", "has a variant without a key, or without one condition"
        facts = {k: v for k, v in variant.items() if k not in CONDITIONS | {"key", "default"}}
        yield from slips_of_entry(facts, entries, Architecture)


def line_of(text: str, entry: str, fact: str) -> int:
    """The line of an entry, or of the fact in it."""
    lines = text.splitlines()
    heads = rf'\[([\w-]+\.)*"?{re.escape(entry)}"?\]|"?{re.escape(entry)}"?\s*='
    start = next(i for i, line in enumerate(lines) if re.match(heads, line))
    stated = re.compile(rf'(^|[{{,]\s*)"?{re.escape(fact)}"?\s*=')
    found = (i for i in range(start, len(lines)) if fact and stated.search(lines[i]))
    return next(found, start) + 1


@pytest.mark.parametrize("file", ENTRIES)
def test_a_table_has_no_slip(file: str) -> None:
    """No fact that is none, no word that is none, and all that is needed."""
    assert [*slips(file, text_of(file))] == []


@pytest.mark.parametrize("name", SLIPS)
def test_a_slip_is_told_with_its_line(name: str) -> None:
    """So the test above can fail, and says where to look."""
    file, entry, right, wrong, says = SLIPS[name]
    text = text_of(file)
    start = text.index(f"\n[model_types.{entry}]") if right.endswith("=") else 0
    assert right in text[start:]
    damaged = text[:start] + text[start:].replace(right, wrong, 1)
    line = next(i for i, one in enumerate(damaged.splitlines(), 1) if wrong in one)
    findings = [*slips(file, damaged)]
    assert any(re.match(rf"{file}:{line}: {entry} .*{says}", one) for one in findings), findings


def test_keys_that_tell_a_program_tell_one_of_the_table() -> None:
    """And no file that names its type has need of them."""
    known = table()
    assert known.files["marks"].keys() <= known.huggingface.keys()
    assert all(len(keys) > 1 for keys in known.files["marks"].values())


def test_each_reason_to_refuse_has_one_sentence_and_is_used():
    """A name in two tables would have the error and the sentence of the last."""
    folder = Path(phasor.files.__file__).parent
    tables = tomllib.loads((folder / "refusals.toml").read_text("utf-8")).values()
    reasons = [reason for table in tables for reason in table]
    code = "".join(file.read_text("utf-8") for file in folder.rglob("*.py"))
    assert sorted(reasons) == sorted(set(re.findall(r'refusal\(\s*"(\w+)"', code)))
