"""Whether a method does with its cosines only what positions can stand in for.

That is: take them as they come, perhaps negate the sines, move them to a device or cut off
nothing, and hand them to a rotation function. A method that slices tokens out of them, or computes
with them, has to be seen before it runs, for a model is changed entirely or not at all.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any, TypeGuard

from phasor.torch.transformers._forms import COMPLEX, parameters

_ROWS = ("cos", "sin", *COMPLEX)
_BOTH = "position_embeddings"


def mishandled(method: FunctionType, rotations: Mapping[str, Any]) -> str:
    """The expression in which ``method`` does something else with its cosines; "" if nowhere."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    except (OSError, SyntaxError):
        return "code whose source cannot be found"
    handed = list(_handed(tree, rotations))
    names: set[str] = set()
    for node in handed:
        plain = _plain(node)
        if not isinstance(plain, ast.Name):
            return ast.unparse(node)
        names.add(plain.id)
    fine = {id(inner) for node in handed for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and not _taken_whole(node, names):
            return ast.unparse(node)
    return next((n.id for n in _used(tree) if n.id in names and id(n) not in fine), "")


def unpacks(method: FunctionType) -> str:
    """The parameter for cosines that a method which calls no rotation makes use of; "" if none."""
    taken = set(inspect.signature(method).parameters) & {_BOTH, *_ROWS}
    if not taken:
        return ""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    except (OSError, SyntaxError):
        return min(taken)
    return next((node.id for node in _used(tree) if node.id in taken), "")


def hands_on(method: FunctionType) -> str:
    """What a method hands its cosines to that is neither a module nor a method; "" if nothing."""
    taken = set(inspect.signature(method).parameters) & {_BOTH, *_ROWS}
    taken |= {
        one.name
        for one in inspect.signature(method).parameters.values()
        if one.kind is inspect.Parameter.VAR_KEYWORD
    }
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    except (OSError, SyntaxError):
        return ""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            continue
        starred = [word.value for word in node.keywords if word.arg in (None, _BOTH, *_ROWS)]
        names = {n.id for n in (*node.args, *starred) if isinstance(n, ast.Name)}
        if names & taken and not hasattr(builtins, node.func.id):
            return node.func.id
    return ""


def _used(tree: ast.AST) -> Iterator[ast.Name]:
    """The names whose values are made use of; to ask whether one is None is not to use it."""
    asked = {id(node.left) for node in ast.walk(tree) if _asks_for_none(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and id(node) not in asked:
            yield node


def _asks_for_none(node: ast.AST) -> TypeGuard[ast.Compare]:
    return (
        isinstance(node, ast.Compare)
        and isinstance(node.ops[0], (ast.Is, ast.IsNot))
        and [ast.unparse(one) for one in node.comparators] == ["None"]
    )


def _handed(tree: ast.AST, rotations: Mapping[str, Any]) -> Iterator[ast.expr]:
    """What is given as cosines or sines to a rotation function."""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            continue
        if node.func.id not in rotations:
            continue
        takes = parameters(rotations[node.func.id])
        yield from (given for name, given in zip(takes, node.args, strict=False) if name in _ROWS)
        yield from (word.value for word in node.keywords if word.arg in _ROWS)


def _plain(node: ast.expr) -> ast.expr:
    """The expression without what a carrier can do: ``-x``, ``x.to(...)`` and ``x[..., :n]``."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return _plain(node.operand)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return _plain(node.func.value) if node.func.attr == "to" else node
    if isinstance(node, ast.Subscript) and ast.unparse(node.slice).startswith("(..., :"):
        return _plain(node.value)
    return node


def _taken_whole(node: ast.Assign, names: set[str]) -> bool:
    """Whether an assignment to one of the names takes what an embedding module answered."""
    targets = {n.id for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)}
    if not targets & names:
        return True
    if isinstance(node.value, ast.Subscript):
        # of a mapping from kinds of layers, not of tokens
        return not any(isinstance(n, (ast.Slice, ast.Tuple)) for n in ast.walk(node.value.slice))
    if isinstance(node.value, ast.Tuple):
        return all(isinstance(one, ast.Constant) for one in node.value.elts)
    return isinstance(node.value, (ast.Name, ast.Attribute, ast.Call))
