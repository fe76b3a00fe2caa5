"""What the methods of a class call, and a subclass whose methods call something else.

A method finds the functions that it calls among its globals. Made again over a copy of those
globals in which the rotation is another function, and put into a subclass, it serves the modules
that are given that subclass, and nobody else: not the class, not its file, not another model.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from types import CellType, CodeType, FunctionType
from typing import Any, cast

import torch

from phasor._checks import short_repr
from phasor.errors import ConfigError

#: What functions call cosines and sines as complex numbers.
COMPLEX_ROWS = ("freqs_cis", "freqs_ci")
ROWS = ("cos", "sin", *COMPLEX_ROWS)
#: Where a class that was made here keeps the one it was made from.
ORIGINAL = "_phasor_original"
_BOTH_ROWS = "position_embeddings"
_ROTATION = re.compile(r"\w*apply_\w*(rotary|rope)\w*")


def parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    """The parameters of a function, by name."""
    # the kernels package makes a module of a function
    plain = function.forward if isinstance(function, torch.nn.Module) else function
    return inspect.signature(plain).parameters


def named_modules(model: object) -> Iterator[tuple[str, torch.nn.Module]]:
    """Every module of ``model`` with its name.

    Raises:
        ConfigError: If it is no module.
    """
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(
            f"model must be a torch.nn.Module, such as a model of transformers or a part of one, "
            f"got {short_repr(model)}"
        )
    return cast("Iterator[tuple[str, torch.nn.Module]]", model.named_modules())


# ---- what a class calls ----


@lru_cache(maxsize=1024)
def methods_of(cls: type) -> dict[str, FunctionType]:
    """Every method that an instance of ``cls`` has of its own kind of module."""
    found: dict[str, FunctionType] = {}
    for base in reversed(cls.__mro__):
        if base in (object, torch.nn.Module):
            continue
        for name, value in vars(base).items():
            function = _function(value)
            if function is not None:
                found[name] = function
            else:
                found.pop(name, None)
    return found


def _function(value: object) -> FunctionType | None:
    plain = value.__func__ if isinstance(value, staticmethod) else value
    return plain if isinstance(plain, FunctionType) else None


def _with_wrapped(function: FunctionType) -> Iterator[FunctionType]:
    """A function and those that its decorators wrapped."""
    yield function
    inner = function.__dict__.get("__wrapped__")
    if isinstance(inner, FunctionType):
        yield from _with_wrapped(inner)


def _rotations_in(function: FunctionType) -> dict[str, Any]:
    names = (name for name in _names(function.__code__) if _ROTATION.fullmatch(name))
    scope = function.__globals__
    return {name: scope[name] for name in names if callable(scope.get(name))}


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def rotating_methods(cls: type) -> list[FunctionType]:
    """The methods of ``cls`` that call a rotation function, without their decorators."""
    every = (one for method in methods_of(cls).values() for one in _with_wrapped(method))
    return [function for function in every if _rotations_in(function)]


def rotations_of(cls: type) -> dict[str, Any]:
    """The rotation functions that methods of ``cls`` call, by the name they call them."""
    found: dict[str, Any] = {}
    for method in rotating_methods(cls):
        found.update(_rotations_in(method))
    return found


@lru_cache(maxsize=1024)
def override_of_rotation(cls: type) -> str:
    """The method of ``cls`` that overrides a rotating one and may call it by super; "" if none."""
    effective = methods_of(cls)
    for base in cls.__mro__:
        for name, value in vars(base).items():
            function, mine = _function(value), effective.get(name)
            if function is None or function is mine:
                continue
            if not any(map(_rotations_in, _with_wrapped(function))):
                continue
            inside = [] if mine is None else list(_with_wrapped(mine))
            calls_super = any("super" in _names(one.__code__) for one in inside)
            if calls_super or not any(map(_rotations_in, inside)):
                return name
    return ""


# ---- what a method does with its cosines, read off its source ----
#
# A patched model hands positions on in the place of cosines. A method may take them as they come,
# negate the sines, move them to a device and hand them to a rotation function. One that slices
# tokens out of them or computes with them has to be found before it runs: a model is changed
# entirely or not at all.


def misused_cosines(method: FunctionType, functions: Mapping[str, Any]) -> str:
    """The expression in which ``method`` does more with cosines than rotate; "" if nowhere."""
    tree = _source_tree(method)
    if tree is None:
        return "code whose source cannot be found"
    arguments = list(_cosine_arguments(tree, functions))
    names: set[str] = set()
    for node in arguments:
        variable = _without_allowed_changes(node)
        if not isinstance(variable, ast.Name):
            return ast.unparse(node)
        names.add(variable.id)
    allowed = {id(inner) for node in arguments for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and not _assigns_whole_cosines(node, names):
            return ast.unparse(node)
    return next((n.id for n in _names_read(tree) if n.id in names and id(n) not in allowed), "")


def used_cosine_parameter(method: FunctionType) -> str:
    """The parameter for cosines whose value ``method`` uses; "" if none."""
    taken = set(parameters(method)) & {_BOTH_ROWS, *ROWS}
    tree = _source_tree(method) if taken else None
    if tree is None:
        return min(taken, default="")
    return next((node.id for node in _names_read(tree) if node.id in taken), "")


def function_given_cosines(method: FunctionType) -> str:
    """The function, neither a module nor a method, that is handed the cosines; "" if none."""
    tree = _source_tree(method)
    taken = {
        name
        for name, one in parameters(method).items()
        if name in (_BOTH_ROWS, *ROWS) or one.kind is inspect.Parameter.VAR_KEYWORD
    }
    for function, call in () if tree is None else _calls_by_name(tree):
        words = [word.value for word in call.keywords if word.arg in (None, _BOTH_ROWS, *ROWS)]
        names = {n.id for n in (*call.args, *words) if isinstance(n, ast.Name)}
        if names & taken and not hasattr(builtins, function):
            return function
    return ""


def _source_tree(method: FunctionType) -> ast.AST | None:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(method)))
    except (OSError, SyntaxError):
        return None


def _names_read(tree: ast.AST) -> Iterator[ast.Name]:
    """The names whose values are used; a comparison with None is no use."""
    compared = {
        id(node.left)
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare)
        and ast.unparse(node).endswith((" is None", " is not None"))
    }
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Name)
            and isinstance(node.ctx, ast.Load)
            and id(node) not in compared
        ):
            yield node


def _calls_by_name(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.func.id, node


def _cosine_arguments(tree: ast.AST, functions: Mapping[str, Any]) -> Iterator[ast.expr]:
    """What is given as cosines or sines to a rotation function."""
    for function, call in _calls_by_name(tree):
        if function in functions:
            names = parameters(functions[function])
            yield from (arg for name, arg in zip(names, call.args, strict=False) if name in ROWS)
            yield from (word.value for word in call.keywords if word.arg in ROWS)


def _without_allowed_changes(node: ast.expr) -> ast.expr:
    """The expression without what a carrier can do: ``-x``, ``x.to(...)`` and ``x[..., :n]``."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return _without_allowed_changes(node.operand)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return _without_allowed_changes(node.func.value) if node.func.attr == "to" else node
    if isinstance(node, ast.Subscript) and ast.unparse(node.slice).startswith("(..., :"):
        return _without_allowed_changes(node.value)
    return node


def _assigns_whole_cosines(node: ast.Assign, names: set[str]) -> bool:
    """Whether an assignment to one of the names takes what an embedding module returned."""
    targets = {n.id for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)}
    if not targets & names:
        return True
    if isinstance(node.value, ast.Subscript):
        # of a mapping from kinds of layers, not of tokens
        return not any(isinstance(n, (ast.Slice, ast.Tuple)) for n in ast.walk(node.value.slice))
    if isinstance(node.value, ast.Tuple):
        return all(isinstance(one, ast.Constant) for one in node.value.elts)
    return isinstance(node.value, (ast.Name, ast.Attribute, ast.Call))


# ---- a subclass that calls other functions ----


def original_class(module: Any) -> type | None:
    """The class that a module had before, or None where its class was not made here."""
    return cast("type | None", type(module).__dict__.get(ORIGINAL))


def subclass_calling(
    cls: type, replaced: Mapping[str, Any], rebuild: Any, body: Mapping[str, Any] | None = None
) -> type:
    """A subclass of ``cls``, with more in its body, that rotates with other functions.

    ``replaced`` stands in for the functions that `rotations_of` named, and for other globals of the
    methods that call one. Unpickling calls ``rebuild(cls)`` for an instance's class.
    """
    remade: dict[str, Any] = {
        name: _remake(method, replaced)
        for name, method in methods_of(cls).items()
        if any(map(_rotations_in, _with_wrapped(method)))
    }
    return subclass_of(cls, {**remade, **(body or {})}, rebuild)


def subclass_of(cls: type, body: Mapping[str, Any], rebuild: Callable[[type], type]) -> type:
    """A subclass with the name of ``cls``, for code that goes by names; it can be pickled.

    Only existing modules are given it. A new instance is one of ``cls``: nobody has told it which
    Rope it rotates by.
    """

    def new(made: type, *args: Any, **words: Any) -> Any:
        del made
        return cls(*args, **words)

    def reduce_ex(self: Any, protocol: Any) -> Any:
        del protocol
        return _empty_instance, (rebuild, cls), self.__dict__

    full = {**body, ORIGINAL: cls, "__new__": new, "__reduce_ex__": reduce_ex}
    full["__module__"], full["__qualname__"] = cls.__module__, cls.__qualname__
    return type(cls.__name__, (cls,), full)


def _empty_instance(rebuild: Callable[[type], type], cls: type) -> Any:
    made: Any = rebuild(cls)
    return object.__new__(made)


def _remake(function: FunctionType, replaced: Mapping[str, Any]) -> FunctionType:
    """The function over a copy of its globals, in which others stand in for some."""
    scope = {**function.__globals__, **replaced}
    # a compiler looks a function's globals up in the module that they name, unless they name none
    scope.pop("__name__", None)
    attributes = dict(function.__dict__)
    cells = function.__closure__
    wrapped = attributes.get("__wrapped__")
    if isinstance(wrapped, FunctionType) and any(map(_rotations_in, _with_wrapped(wrapped))):
        inner = attributes["__wrapped__"] = _remake(wrapped, replaced)
        cells = tuple(CellType(inner) if _holds(cell, wrapped) else cell for cell in cells or ())
    made = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, cells)
    made.__kwdefaults__ = function.__kwdefaults__
    made.__dict__.update(attributes)
    made.__doc__, made.__qualname__ = function.__doc__, function.__qualname__
    made.__annotations__ = function.__annotations__
    return made


def _holds(cell: CellType, value: object) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:  # an empty cell
        return False
