"""The modules of a model, which part of it each belongs to, and the classes of a patched model.

A model of pictures and text holds a config for each, and its modules carry theirs. A part is named
by the key under which its config stands in the config file: ``text_config``, ``vision_config``,
or several keys joined by dots; by nothing where it is that of the whole model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from types import FunctionType, MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn

from phasor.errors import ConfigError
from phasor.torch.hf.carriers import Carrier, CarrierTable, carry_positions, substitute
from phasor.torch.hf.methods import (
    methods_of,
    named_modules,
    original_class,
    rotations_of,
    subclass_calling,
    subclass_of,
)

#: Where attention of GPT-J and CodeGen keeps its table of sines, and what makes the table.
TABLE = "embed_positions"
TABLE_MAKER = "create_sinusoidal_positions"
#: Where a patched module that makes cosines keeps the rope of each kind of layer.
CARRIED_ROPES = "_phasor_ropes"
#: A number between the dots of a path.
NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
#: What names of rotary embeddings have in them.
_ROTATION = re.compile(r"(?i)rotary|rotate|(?<![a-z])rope(?![a-z])|inv_freq|freqs_cis|sinusoid")


@dataclass(frozen=True, kw_only=True)
class Member:
    """One module of a model.

    Attributes:
        path: Its name in the model.
        module: The module.
        cls: The class that it had before it was patched.
        config: Its config, or that of the nearest module around it that has one.
        part: The key of that config in the model's; the module's path where it has none.
    """

    path: str
    module: nn.Module
    cls: type
    config: Any
    part: str


def members_of(model: nn.Module) -> Iterator[Member]:
    """Every module of ``model``."""
    around: dict[str, tuple[Any, str]] = {"": (None, "")}
    outermost: list[tuple[Any, str]] = []
    for path, module in named_modules(model):
        config, part = around[path.rpartition(".")[0]]
        own = getattr(module, "config", None)
        if own is not config and hasattr(own, "to_dict"):
            if config is None:
                # parts of a list of modules, of one model or of several
                same = (part for other, part in outermost if _equal(own, other))
                config, part = own, next(same, path if outermost else "")
                outermost.append((config, part))
            else:
                config, part = own, _part_key(own, config, part, path)
        around[path] = config, part
        cls = original_class(module) or type(module)
        yield Member(path=path or cls.__name__, module=module, cls=cls, config=config, part=part)


def parts_of(model: nn.Module) -> dict[str, list[Member]]:
    """The modules of each part of ``model`` in which something rotates or makes cosines.

    A module with a config of its own that rotates by the cosines of a part around it is of that.

    Raises:
        ConfigError: If nothing rotates as models of transformers do.
    """
    ones = list(members_of(model))
    rotating = [one for one in ones if rotations_of(one.cls)]
    making = {one.part for one in ones if makes_cosines(one)}
    if not rotating or not making:
        raise _no_known_rotation(model, ones)
    part_at = {one.path: one.part for one in ones}
    without = {one.part for one in rotating} - making
    found: dict[str, list[Member]] = {}
    for one in ones:
        outer = one.path
        while part_at.get(outer) in without and "." in outer:
            outer = outer.rpartition(".")[0]
        part = part_at[outer] if part_at.get(outer) in making else one.part
        found.setdefault(part, []).append(replace(one, part=part))
    return {part: found[part] for part in found if part in making | without}


def _no_known_rotation(model: nn.Module, members: Sequence[Member]) -> ConfigError:
    """The error for a model with a rotation of its own, or for one without any."""
    name = type(model).__name__
    for one in members:
        if used := _own_rotation(one):
            return ConfigError(
                f"model must rotate as those of transformers do, and {one.path} "
                f"({one.cls.__name__}) of {name} has a rotation of its own ({used}): call "
                "phasor.torch.rotate_qk(q, k, positions, rope) in its place; phasor.identify says "
                "which rope that is"
            )
    return ConfigError(
        f"model must have a rotary position embedding, and no module of {name} does anything like "
        "one: there is nothing to replace"
    )


def _own_rotation(member: Member) -> str:
    """A buffer or a name in the class's own methods that speaks of a rotation; "" if none."""
    if type(member.module).__module__.startswith("torch.nn."):
        return ""
    used = [name for name, _ in member.module.named_buffers(recurse=False)]
    for method in methods_of(member.cls).values():
        used += method.__code__.co_names
    return next((name for name in [*used, member.cls.__name__] if _ROTATION.search(name)), "")


def makes_cosines(member: Member) -> bool:
    """Whether a module turns positions into cosines and sines, or keeps a table of them."""
    return "Rotary" in member.cls.__name__ or (
        holds_table(member.module) and bool(rotations_of(member.cls))
    )


def layer_number(member: Member) -> int | None:
    """The number of the layer that a module belongs to, where it has one."""
    # the path, for a module that several layers share has one layer_idx
    numbers = NUMBER.findall(member.path)
    return int(numbers[-1]) if numbers else getattr(member.module, "layer_idx", None)


def holds_table(module: Any) -> bool:
    """Whether an attention module keeps a table of sines."""
    cls = cast(Any, type(module))
    return TABLE in module._buffers and TABLE_MAKER in getattr(cls.forward, "__globals__", {})


def _part_key(own: Any, outer: Any, part: str, path: str) -> str:
    """The key of a module's config, given that of the modules around it and its key."""
    if _equal(own, outer):
        return part
    inside = list(_configs_inside(outer))
    # a model of parts may have copied their configs, and changed the copies since
    keys = (
        [key for key, one in inside if one is own]
        or [key for key, one in inside if _equal(one, own)]
        or [key for key, one in inside if type(one) is type(own)]
    )
    return f"{part}.{keys[0]}".lstrip(".") if keys else path


def _configs_inside(config: Any, depth: int = 3) -> Iterator[tuple[str, Any]]:
    """The configs inside one, with their keys joined by dots, the outer ones first."""
    attributes = cast("dict[str, Any]", vars(config))
    found = {key: one for key, one in attributes.items() if hasattr(one, "to_dict")}
    yield from found.items()
    for key, one in found.items() if depth else ():
        yield from ((f"{key}.{inner}", deep) for inner, deep in _configs_inside(one, depth - 1))


def _equal(one: Any, other: Any) -> bool:
    return type(one) is type(other) and one.to_dict() == other.to_dict()


# ---- another class for a module ----


def bound_methods(module: nn.Module) -> Mapping[str, str]:
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


def set_class(module: nn.Module, cls: type) -> None:
    """Give a module another class, and the methods that it keeps in itself with it."""
    bound = bound_methods(module)
    module.__class__ = cls
    for name, method in bound.items():
        module.__dict__[name] = MethodType(getattr(cls, method), module)


def has_foreign_forward(member: Member) -> bool:
    """Whether somebody's ``forward`` stands before the class's, and does not say what it calls."""
    module = member.module
    return "forward" in module.__dict__ and "forward" not in bound_methods(module).values()


# ---- the classes of a patched model, each a subclass of the module's own ----


@lru_cache(maxsize=512)
def rotating_class(cls: type, batched: bool, with_table: bool) -> type:
    """For a module that rotates: its methods call phasor's operator.

    ``batched`` says whether its cosines have a batch, ``with_table`` whether it looks them up in a
    table of its own.
    """

    def table(self: Any) -> CarrierTable:
        return CarrierTable(self._phasor_ropes[None], self._buffers[TABLE].device)

    substitutes = {name: substitute(one, batched) for name, one in rotations_of(cls).items()}
    rebuild = partial(rotating_class, batched=batched, with_table=with_table)
    body = {TABLE: property(table)} if with_table else {}
    return subclass_calling(cls, substitutes, rebuild, body)


@lru_cache(maxsize=512)
def carrying_class(cls: type, fixed: bool, single: bool) -> type:
    """For a module that makes cosines: it answers with positions in their place.

    With ``fixed`` it knows the positions of all tokens and is told none; with ``single`` it answers
    once, as with complex numbers, and not with cosines and sines.
    """

    def forward(
        self: Any, x: Tensor, position_ids: Tensor | None = None, layer_type: Any = None
    ) -> Carrier | tuple[Carrier, Carrier]:
        by = self._phasor_ropes[layer_type]
        if fixed:
            position_ids = torch.tensor(by.layout.fixed, device=x.device)
        assert position_ids is not None
        carrier = carry_positions(by, position_ids, x.dtype)
        return carrier if single else (carrier, carrier)

    rebuild = partial(carrying_class, fixed=fixed, single=single)
    return subclass_of(cls, {"forward": forward}, rebuild)
