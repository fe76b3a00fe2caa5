"""What the tables of model types remember: ``python -m tools.sources`` prints it, a line each.

A fact about a program or a model type is run here, read, or remembered. It is run where it is
transformers' own type, whose class the tests hold it to, or a type of a published file with its
reading in ``tests/files/configs/published``; it is read where a ``# source:`` stands above its
line, its table or all. A type that is ``like`` another is as good as that one.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "src/phasor/files/configs/huggingface.toml"
PUBLISHED = ROOT / "tests/files/configs/published"


def has_source(lines: list[str], i: int) -> bool:
    """Whether a source stands above line ``i``, its table or one around that, or all tables."""
    heads = [0, i]
    table = next((line for line in reversed(lines[:i]) if line.startswith("[")), "")
    while table and table != "[model_types]":  # a table of all types has no source of all
        heads += [lines.index(table)] if table in lines else []
        table = table.rpartition(".")[0] and table.rpartition(".")[0] + "]"
    return any("# source: " in comment for head in heads for comment in _comments(lines, head))


def _comments(lines: list[str], i: int) -> list[str]:
    """The comments right above line ``i``, or those at the beginning."""
    lines_above = lines if i == 0 else lines[i - 1 :: -1]
    return [*takewhile(lambda line: line.startswith("#"), lines_above)]


@cache
def transformers_types() -> frozenset[str]:
    """The types of transformers' own classes, inner ones too."""
    import transformers

    folder = Path(transformers.__file__).parent / "models"
    texts = (path.read_text("utf-8") for path in folder.rglob("configuration_*.py"))
    words = r'^    model_type(?:: str)? = "([^"]+)"'
    return frozenset(word for text in texts for word in re.findall(words, text, re.MULTILINE))


@cache
def published_types() -> frozenset[str]:
    """The types in published files, but for those that are recalled."""
    texts = (path.read_text("utf-8") for path in PUBLISHED.glob("*.jsonl"))
    cases = (json.loads(line) for text in texts for line in text.splitlines())
    files = (json.dumps(case["config"]) for case in cases if "recalled" not in case["source"])
    return frozenset(
        word for file in files for word in re.findall(r'"model_type": "([^"]+)"', file)
    )


def remembered() -> Iterator[str]:
    """The types that are neither run nor read, in the table's order."""
    text = TABLE.read_text("utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#   ")]
    tables = tomllib.loads(text)
    unrotated = {name for names in tables["without_rotation"].values() for name in names}
    rows: Mapping[str, Any] = {**tables["model_types"], **{name: {} for name in sorted(unrotated)}}
    for name in rows:
        if not _is_known(name, rows, lines):
            yield name


def _is_known(name: str, rows: Mapping[str, Any], lines: list[str]) -> bool:
    parent = rows.get(name, {}).get("like")
    if name in transformers_types() | published_types():
        return True
    line = re.compile(rf'\[?[\w.]*"?{re.escape(name)}"?(\.\w+)?(\]| =)')
    has_line = any(has_source(lines, i) for i, text in enumerate(lines) if line.match(text))
    return has_line or (parent is not None and _is_known(parent, rows, lines))


if __name__ == "__main__":
    print("\n".join(remembered()))
