"""No pattern takes more than a moment for any text: runs of each class of characters are tried."""

from __future__ import annotations

import ast
import importlib
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import phasor

ROOT = Path(phasor.__file__).parent
METHODS = {"compile", "match", "search", "fullmatch", "sub", "split", "findall", "finditer"}
# arguments of the functions that hold them: patterns of users, or of callers that are here too
GIVEN = {"pattern", "words"}
LENGTH = 20_000  # a quadratic pattern takes seconds for it, a linear one milliseconds
RUNS = [
    *" \t\n\r_aZ0()[]{}$-#=,.*+&|/\"':;\\<>", "\r\n", "$((", "${a", "$a ", "[0", "([", "0,", "0 ",
    "0*", "0 * ", "* ", "] ", "]*", "]+[", "a.", "a=", " a=", "a=b-", "${a-", "layers.1.", "ForA",
    "Model", "#\n", " \n", "---\n", "lora_A.", "self_attn.q_proj.", "rope", "apply_", "--", "1.e",
]  # fmt: skip
STARTS = ["", "[", "${a", "x.layers.1."]
SECONDS = 1.0  # of the processor, for one text


def local_texts(tree: ast.AST) -> dict[str, ast.expr]:
    """What single names inside functions are set to."""
    assigned = (node for node in ast.walk(tree) if isinstance(node, ast.Assign))
    return {
        node.targets[0].id: node.value for node in assigned if isinstance(node.targets[0], ast.Name)
    }


def value_of(node: ast.expr, names: dict[str, Any], texts: dict[str, ast.expr]) -> Any:
    """The value of an expression in its module, or of the local one that it names."""
    if isinstance(node, ast.Name) and node.id not in names and node.id in texts:
        node = texts[node.id]
    return eval(compile(ast.Expression(node), "pattern", "eval"), names)


def methods_of(tree: ast.AST, call: ast.Call, method: str) -> set[str]:
    """How a pattern is used: of a compiled one, how the name is that it is given."""
    if method != "compile":
        return {method}
    given = [n.targets[0] for n in ast.walk(tree) if isinstance(n, ast.Assign) and n.value is call]
    used = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    names = {ast.unparse(name) for name in given}
    return {node.attr for node in used if ast.unparse(node.value) in names} & METHODS


def patterns_of(path: Path) -> Iterator[tuple[str, str | bytes, str]]:
    """Every pattern of a file with its place and how it is used."""
    tree = ast.parse(path.read_text("utf-8"))
    name = ".".join(["phasor", *path.relative_to(ROOT).with_suffix("").parts])
    names = vars(importlib.import_module(name.removesuffix(".__init__")))
    for node in ast.walk(tree):
        is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if not is_call or ast.unparse(node.func.value) != "re" or node.func.attr not in METHODS:
            continue
        place = f"{path.relative_to(ROOT)}:{node.lineno}"
        if isinstance(node.args[0], ast.Name) and node.args[0].id in GIVEN:
            continue
        pattern = value_of(node.args[0], names, local_texts(tree))
        for method in methods_of(tree, node, node.func.attr) or {"search"}:
            yield place, pattern, method if "match" in method else "findall"


PATTERNS = [
    item for path in sorted(ROOT.rglob("*.py")) if re.search(r"\bre\.", path.read_text("utf-8"))
    for item in patterns_of(path)
]  # fmt: skip


def too_slow(*_: object) -> None:
    """Called where the time is over; `re` asks for signals while it searches."""
    raise TimeoutError


@pytest.mark.parametrize(
    ("pattern", "method"),
    [(pattern, method) for _, pattern, method in PATTERNS],
    ids=[place for place, *_ in PATTERNS],
)
def test_a_pattern_takes_a_time_that_grows_with_the_text(pattern: str | bytes, method: str) -> None:
    """However often it begins to match."""
    search = getattr(re.compile(pattern), method)
    before = signal.signal(signal.SIGVTALRM, too_slow)
    try:
        for text in (s + run * (LENGTH // len(run)) + "\0" for run in RUNS for s in STARTS):
            signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
            try:
                search(text.encode() if isinstance(pattern, bytes) else text)
            except TimeoutError:
                pytest.fail(f"{pattern!r} is slow for {text[:40]!r}...")
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
