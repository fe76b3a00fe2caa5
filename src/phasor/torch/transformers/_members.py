"""The modules of a model, and which part of it each belongs to.

A model of pictures and text holds a config for each, and its modules carry theirs. A part is named
by the key under which its config stands in the config file: ``text_config``, ``vision_config``,
or several keys joined by dots; by nothing where it is that of the whole model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import FunctionType, MethodType
from typing import Any, cast

from torch import nn

from phasor.errors import ConfigError
from phasor.torch.transformers._methods import named_modules, original, rotations
from phasor.torch.transformers._sines import holds_table

_EMBEDDING = re.compile(r"Rotary")


@dataclass(frozen=True, kw_only=True)
class Member:
    """One module of a model.

    Attributes:
        path: Its name in the model.
        module: The module.
        cls: The class it was born with.
        config: Its config, or that of the nearest module around it that has one.
        part: The key of that config in the model's; the module's path where it has none.
    """

    path: str
    module: nn.Module
    cls: type
    config: Any
    part: str


def members(model: nn.Module) -> Iterator[Member]:
    """Every module of ``model``."""
    around: dict[str, tuple[Any, str]] = {"": (None, "")}
    outermost: list[tuple[Any, str]] = []
    for path, module in named_modules(model):
        config, part = around[path.rpartition(".")[0]]
        own = getattr(module, "config", None)
        if own is not config and hasattr(own, "to_dict"):
            if config is None:
                # parts of a list of modules, of one model or of several
                found = (part for other, part in outermost if _equal(own, other))
                config, part = own, next(found, path if outermost else "")
                outermost.append((config, part))
            else:
                config, part = own, _part(own, config, part, path)
        around[path] = config, part
        cls = original(module) or type(module)
        yield Member(path=path or cls.__name__, module=module, cls=cls, config=config, part=part)


def parts(model: nn.Module) -> dict[str, list[Member]]:
    """The modules of each part of ``model`` in which something rotates or makes cosines.

    A module with a config of its own that rotates by the cosines of a part around it is of that.

    Raises:
        ConfigError: If there is no such part.
    """
    ones = list(members(model))
    rotating = [one for one in ones if rotations(one.cls)]
    making = {one.part for one in ones if makes_cosines(one)}
    if not rotating or not making:
        what = "calls a rotation" if not rotating else "makes cosines and sines of positions"
        raise ConfigError(
            f"model must rotate queries and keys in a way that phasor knows, and no module of "
            f"{type(model).__name__} {what} as those of transformers do"
        )
    at = {one.path: one.part for one in ones}
    without = {one.part for one in rotating} - making
    found: dict[str, list[Member]] = {}
    for one in ones:
        outer = one.path
        while at.get(outer) in without and "." in outer:
            outer = outer.rpartition(".")[0]
        part = at[outer] if at.get(outer) in making else one.part
        found.setdefault(part, []).append(replace(one, part=part))
    return {part: found[part] for part in found if part in making | without}


def makes_cosines(member: Member) -> bool:
    """Whether a module turns positions into cosines and sines, or keeps a table of them."""
    return bool(_EMBEDDING.search(member.cls.__name__)) or (
        holds_table(member.module) and bool(rotations(member.cls))
    )


def _part(own: Any, outer: Any, part: str, path: str) -> str:
    """The key of a module's config, given that of the modules around it and its key."""
    if _equal(own, outer):
        return part
    inside = list(_configs(outer))
    # a model of parts may have copied their configs, and changed the copies since
    named = (
        [key for key, one in inside if one is own]
        or [key for key, one in inside if _equal(one, own)]
        or [key for key, one in inside if type(one) is type(own)]
    )
    return f"{part}.{named[0]}".lstrip(".") if named else path


def _configs(config: Any, depth: int = 3) -> Iterator[tuple[str, Any]]:
    """The configs inside one, with their keys joined by dots, the outer ones first."""
    held = cast("dict[str, Any]", vars(config))
    found = {key: one for key, one in held.items() if hasattr(one, "to_dict")}
    yield from found.items()
    for key, one in found.items() if depth else ():
        yield from ((f"{key}.{inner}", deep) for inner, deep in _configs(one, depth - 1))


def _equal(one: Any, other: Any) -> bool:
    return type(one) is type(other) and one.to_dict() == other.to_dict()


def own_methods(module: nn.Module) -> Mapping[str, str]:
    """Methods of its own class that a module keeps in itself, bound, each with its name there.

    accelerate keeps the ``forward`` that it wraps so when it spreads a model over devices.
    """
    return {
        name: value.__name__
        for name, value in vars(module).items()
        if isinstance(value, MethodType)
        and value.__self__ is module
        and isinstance(value.__func__, FunctionType)
        and getattr(type(module), value.__name__, None) is value.__func__
    }


def become(module: nn.Module, cls: type) -> None:
    """Give a module another class, and the methods that it keeps in itself with it."""
    kept = own_methods(module)
    module.__class__ = cls
    for name, method in kept.items():
        module.__dict__[name] = MethodType(getattr(cls, method), module)


def is_hooked(member: Member) -> bool:
    """Whether somebody's ``forward`` stands before the class's, and does not say what it calls."""
    module = member.module
    return "forward" in module.__dict__ and "forward" not in own_methods(module).values()
