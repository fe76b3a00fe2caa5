"""The functions that the methods of a class call, and subclasses whose methods call others.

A method finds the functions that it calls among its globals. A copy of the method, over a copy of
those globals in which the rotation is another function, goes into a subclass. Only modules that are
given that subclass change: not the class, not its file, not another model.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from types import CellType, CodeType, FunctionType
from typing import Any, cast

import torch

from phasor._checks import short_repr
from phasor.errors import ConfigError

#: Parameters for cosines and sines as complex numbers.
COMPLEX_ROWS = ("freqs_cis", "freqs_ci")
ROWS = ("cos", "sin", *COMPLEX_ROWS)
#: The attribute in which a class that was made here keeps its original.
ORIGINAL = "_phasor_original"
_ROTATION_NAME = re.compile(r"\w*apply_\w*(rotary|rope)\w*")


def parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    """The parameters of a function, by name."""
    # the kernels package turns a function into a module
    called = function.forward if isinstance(function, torch.nn.Module) else function
    return inspect.signature(called).parameters


def named_modules(model: object) -> Iterator[tuple[str, torch.nn.Module]]:
    """Every module of ``model`` with its name; an error if it is no module."""
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(
            f"model must be a torch.nn.Module, such as a model of transformers or a part of one, "
            f"got {short_repr(model)}"
        )
    return cast("Iterator[tuple[str, torch.nn.Module]]", model.named_modules())


# ---- the rotations that a class calls ----


@lru_cache(maxsize=1024)
def methods_of(cls: type) -> dict[str, FunctionType]:
    """Every method of an instance of ``cls`` but those of ``torch.nn.Module`` itself."""
    found: dict[str, FunctionType] = {}
    for base in reversed(cls.__mro__):
        if base in (object, torch.nn.Module):
            continue
        for name, value in vars(base).items():
            function = value.__func__ if isinstance(value, staticmethod) else value
            if isinstance(function, FunctionType):
                found[name] = function
            else:
                found.pop(name, None)
    return found


def _with_wrapped(function: FunctionType) -> list[FunctionType]:
    """A function and those that its decorators wrapped."""
    inner = function.__dict__.get("__wrapped__")
    return [function, *(_with_wrapped(inner) if isinstance(inner, FunctionType) else [])]


@lru_cache(maxsize=1024)
def _rotation_names(code: CodeType) -> tuple[str, ...]:
    return tuple(name for name in _names_in(code) if _ROTATION_NAME.fullmatch(name))


def _rotations_in(function: FunctionType) -> dict[str, Any]:
    """The rotations that a function, or one that its decorators wrapped, calls now."""
    found: dict[str, Any] = {}
    for inner in _with_wrapped(function):
        scope = inner.__globals__
        names = _rotation_names(inner.__code__)
        found |= {name: scope[name] for name in names if callable(scope.get(name))}
    return found


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def rotations_of(cls: type) -> Mapping[str, Any]:
    """The rotation functions that methods of ``cls`` call, by their names there."""
    found: dict[str, Any] = {}
    for method in methods_of(cls).values():
        found |= _rotations_in(method)
    return found


# ---- a subclass that calls other functions ----


def original_class(module: Any) -> type | None:
    """The class that a module had before `subclass_of` made another; None if it did not."""
    return cast("type | None", type(module).__dict__.get(ORIGINAL))


def subclass_calling(
    cls: type, replaced: Mapping[str, Any], rebuild: Any, body: Mapping[str, Any] | None = None
) -> type:
    """A subclass of ``cls`` with ``body`` whose methods that rotate have other globals."""
    methods: dict[str, Any] = {
        name: copy_function(method, replaced)
        for name, method in methods_of(cls).items()
        if _rotations_in(method)
    }
    return subclass_of(cls, {**methods, **(body or {})}, rebuild)


def subclass_of(cls: type, body: Mapping[str, Any], rebuild: Callable[[type], type]) -> type:
    """A subclass with the name of ``cls``, for code that compares names, for existing modules."""

    # a new module has no Rope to rotate by, so it is one of `cls`
    def new(subclass: type, *args: Any, **kwargs: Any) -> Any:
        del subclass
        return cls(*args, **kwargs)

    # a pickle names a function that makes the class again, for no file has it
    def reduce_ex(self: Any, protocol: Any) -> Any:
        del protocol
        return _empty_instance, (rebuild, cls), self.__dict__

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    special = {ORIGINAL: cls, "__new__": new, "__reduce_ex__": reduce_ex}
    return type(cls.__name__, (cls,), {**body, **special, **names})


def _empty_instance(rebuild: Callable[[type], type], cls: type) -> Any:
    subclass: Any = rebuild(cls)
    return object.__new__(subclass)


def copy_function(function: FunctionType, replaced: Mapping[str, Any]) -> FunctionType:
    """A copy of the function over a copy of its globals, in which some are replaced."""
    scope = {**function.__globals__, **replaced}
    # a compiler looks a function's globals up in the module that they name, unless they name none
    scope.pop("__name__", None)
    attributes = dict(function.__dict__)
    cells = function.__closure__
    wrapped = attributes.get("__wrapped__")
    if isinstance(wrapped, FunctionType) and _rotations_in(wrapped):
        inner = attributes["__wrapped__"] = copy_function(wrapped, replaced)
        cells = tuple(CellType(inner) if _contains(cell, wrapped) else cell for cell in cells or ())
    copied = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, cells)
    copied.__kwdefaults__ = function.__kwdefaults__
    copied.__dict__.update(attributes)
    copied.__doc__, copied.__qualname__ = function.__doc__, function.__qualname__
    copied.__annotations__ = function.__annotations__
    return copied


def _contains(cell: CellType, value: object) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:  # an empty cell
        return False
