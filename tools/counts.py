"""How long src is, what of it explains, refuses and works: ``python -m tools.counts [PLACE ...]``.

A line refuses if that is its only job: an ``if``, a ``case`` or a handler that does nothing but
raise, a function named ``check…``, ``checked…``, ``…_error`` or ``…_hint``, and a statement that
calls one. All other code but imports works.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[1] / "src" / "phasor"
REFUSES = re.compile(r"_*check(ed)?(_|$)|.*(_error|_hint)$|_*(error|hint)$")
VERBS = ("functional.py", "attention.py", "module.py", "_operator/arguments.py",
         "_operator/in_place.py")  # fmt: skip


def _only_raises(body: list[ast.stmt]) -> bool:
    return isinstance(body[-1], ast.Raise) and all(
        isinstance(statement, ast.Assign | ast.AnnAssign) for statement in body[:-1]
    )


def _calls_check(statement: ast.AST) -> bool:
    return any(
        REFUSES.match(getattr(node.func, "attr", getattr(node.func, "id", "")))
        for node in ast.walk(statement)
        if isinstance(node, ast.Call)
    )


def _refusing(node: ast.AST) -> Iterator[ast.AST]:
    """The largest parts whose only job is to refuse."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.FunctionDef() if REFUSES.match(child.name):
                yield child
            case ast.If() if _only_raises(child.body):
                yield from (child.test, *child.body)
                yield from _refusing(ast.Module(child.orelse, []))
            case ast.ExceptHandler() | ast.match_case() if _only_raises(child.body):
                yield from child.body
            case ast.Raise():
                yield child
            case ast.Expr() | ast.Assign() | ast.AnnAssign() | ast.Return() if _calls_check(child):
                yield child
            case _:
                yield from _refusing(child)


def _lines(nodes: Iterable[Any]) -> set[int]:
    return {line for node in nodes for line in range(node.lineno, node.end_lineno + 1)}


def count(path: Path) -> tuple[int, int, int, int, int]:
    """Lines of a file: all, code, comments, and of code what refuses and what works.

    What is in none but the first is blank or a docstring.
    """
    text = path.read_text("utf-8")
    nodes = [*ast.walk(ast.parse(text))]
    rows = {number: line.strip() for number, line in enumerate(text.splitlines(), 1)}
    docstrings = _lines(
        node
        for node in nodes
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    )
    code_lines = {number for number, row in rows.items() if row} - docstrings
    comments = {number for number in code_lines if rows[number].startswith("#")}
    code = code_lines - comments
    imports = _lines(node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom))
    refusing = code & _lines(_refusing(nodes[0]))
    works = code - refusing - imports
    return len(rows), len(code), len(comments), len(refusing), len(works)


def main(places: list[str]) -> None:
    """Print a row for each place: the verbs, the rooms, and all."""
    rooms = sorted(path for path in SOURCE.rglob("*") if path.is_dir() and any(path.glob("*.py")))
    chosen = {place: [Path(place)] for place in places} or {
        "the verbs": [SOURCE / "torch" / name for name in VERBS],
        **{str(room.relative_to(SOURCE)): [room] for room in rooms},
        "all": [SOURCE],
    }
    print(f"{'':26} files  lines   code  comments  refuses  works  ratio")
    for name, paths in chosen.items():
        files = [
            file for path in paths for file in ([path] if path.is_file() else path.rglob("*.py"))
        ]
        lines, code, comments, refuses, works = map(sum, zip(*map(count, files), strict=True))
        print(f"{name:26} {len(files):5} {lines:6} {code:6} {comments / lines:9.1%} {refuses:8}"
              f" {works:6} {refuses / max(works, 1):6.2f}")  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
