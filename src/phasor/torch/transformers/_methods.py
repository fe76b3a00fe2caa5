"""A class whose methods call other functions: how one module changes and its class does not.

A method finds the functions it calls among the globals it was made with. Made again over a copy of
those globals in which the rotation is another, and put into a subclass, it serves the modules whose
class that subclass becomes, and nobody else: not the class, not its module, not another model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from types import CellType, CodeType, FunctionType
from typing import Any, cast

import torch

_ROTATION = re.compile(r"\w*apply_\w*(rotary|rope)\w*")
#: Where a class that was made here keeps the one it was made from.
ORIGINAL = "_phasor_original"


def rotations(cls: type) -> dict[str, Any]:
    """The rotation functions that methods of ``cls`` call, by the name they call them."""
    found: dict[str, Any] = {}
    for method in methods(cls).values():
        for function in _inside(method):
            found.update(_called(function))
    return found


def rotating_methods(cls: type) -> list[FunctionType]:
    """The methods of ``cls`` that call a rotation function, without their decorators."""
    inside = (function for method in methods(cls).values() for function in _inside(method))
    return [function for function in inside if _called(function)]


@lru_cache(maxsize=1024)
def covering(cls: type) -> str:
    """The method of ``cls`` over one that rotates, which it may call as it was; "" if none."""
    effective = methods(cls)
    for base in cls.__mro__:
        for name, value in vars(base).items():
            plain, mine = _plain(value), effective.get(name)
            if plain is None or plain is mine or not any(map(_called, _inside(plain))):
                continue
            inside = [] if mine is None else list(_inside(mine))
            if not any(map(_called, inside)) or any("super" in _names(f.__code__) for f in inside):
                return name
    return ""


def with_methods(
    cls: type, replaced: Mapping[str, Any], rebuild: Any, more: Mapping[str, Any] | None = None
) -> type:
    """A subclass of ``cls`` that rotates with other functions.

    Args:
        cls: A class of modules.
        replaced: What stands in for the functions that `rotations` named, and for other globals of
            the methods that call one.
        rebuild: Called with ``cls`` where an instance is unpickled; gives the instance's class.
        more: What else the subclass has.
    """
    remade: dict[str, Any] = {
        name: _remade(method, replaced)
        for name, method in methods(cls).items()
        if any(_called(function) for function in _inside(method))
    }
    return derived(cls, {**remade, **(more or {})}, rebuild)


def derived(cls: type, body: Mapping[str, Any], rebuild: Callable[[type], type]) -> type:
    """A subclass with the name of ``cls``, for code that goes by names; it can be pickled.

    Only modules that are there become one. A new instance is one of ``cls``: nobody has told it
    which Rope it turns by.
    """

    def new(made: type, *args: Any, **words: Any) -> Any:
        del made
        return cls(*args, **words)

    def reduced(self: Any, protocol: Any) -> Any:
        del protocol
        return _blank, (rebuild, cls), self.__dict__

    full = {**body, ORIGINAL: cls, "__new__": new, "__reduce_ex__": reduced}
    full["__module__"], full["__qualname__"] = cls.__module__, cls.__qualname__
    return type(cls.__name__, (cls,), full)


def _blank(rebuild: Callable[[type], type], cls: type) -> Any:
    made: Any = rebuild(cls)
    return object.__new__(made)


def named_modules(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Every module of ``model`` with its name."""
    return cast("Iterator[tuple[str, torch.nn.Module]]", model.named_modules())


def original(module: Any) -> type | None:
    """The class that a module had before, or None where its class was not made here."""
    found = type(module).__dict__.get(ORIGINAL)
    return cast("type | None", found)


@lru_cache(maxsize=1024)
def methods(cls: type) -> dict[str, FunctionType]:
    """Every method that an instance of ``cls`` has of its own kind of module."""
    found: dict[str, FunctionType] = {}
    for base in reversed(cls.__mro__):
        if base in (object, torch.nn.Module):
            continue
        for name, value in vars(base).items():
            plain = _plain(value)
            if plain is not None:
                found[name] = plain
            else:
                found.pop(name, None)
    return found


def _plain(value: object) -> FunctionType | None:
    plain = value.__func__ if isinstance(value, staticmethod) else value
    return plain if isinstance(plain, FunctionType) else None


def _inside(function: FunctionType) -> Iterator[FunctionType]:
    """A function and those that its decorators wrapped."""
    yield function
    inner = function.__dict__.get("__wrapped__")
    if isinstance(inner, FunctionType):
        yield from _inside(inner)


def _called(function: FunctionType) -> dict[str, Any]:
    names = (name for name in _names(function.__code__) if _ROTATION.fullmatch(name))
    scope = function.__globals__
    return {name: scope[name] for name in names if callable(scope.get(name))}


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _remade(function: FunctionType, replaced: Mapping[str, Any]) -> FunctionType:
    scope = {**function.__globals__, **replaced}
    # a compiler looks a function's globals up in the module that they name, unless they name none
    scope.pop("__name__", None)
    own = dict(function.__dict__)
    cells = function.__closure__
    wrapped = own.get("__wrapped__")
    if isinstance(wrapped, FunctionType) and any(map(_called, _inside(wrapped))):
        inner = own["__wrapped__"] = _remade(wrapped, replaced)
        cells = tuple(CellType(inner) if _holds(cell, wrapped) else cell for cell in cells or ())
    made = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, cells)
    made.__kwdefaults__ = function.__kwdefaults__
    made.__dict__.update(own)
    made.__doc__, made.__qualname__ = function.__doc__, function.__qualname__
    made.__annotations__ = function.__annotations__
    return made


def _holds(cell: CellType, value: object) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:  # an empty cell
        return False
