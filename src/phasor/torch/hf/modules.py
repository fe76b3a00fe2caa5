"""The modules of a model, which part of it each belongs to, and the classes of a patched model.

A model of pictures and text has a config for each, and its modules hold their own. A part is named
by the key of its config in the config file: ``text_config``, ``vision_config``, or several keys
joined by dots. The name is empty for the config of the whole model.
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
from phasor.torch.hf.deferred import DeferredCosSin, defer_cos_sin, substitute
from phasor.torch.hf.methods import (
    methods_of,
    named_modules,
    original_class,
    rotations_of,
    subclass_calling,
    subclass_of,
)
from phasor.torch.hf.overrides import ROPES_OF_KINDS, overrides_of

#: The buffer in which attention of GPT-J and CodeGen keeps its table of sines, and the function
#: that makes the table.
TABLE = "embed_positions"
TABLE_MAKER = "create_sinusoidal_positions"
#: The method by which a tower with windows puts its tokens, and their cosines, in another order.
REORDERING = "permute_input_for_window_attn"
#: A number between the dots of a path.
NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
#: Parts of the names of rotary embeddings.
_ROTARY = re.compile(r"(?i)rotary|rotate|(?<![a-z])rope(?![a-z])|inv_freq|freqs_cis|sinusoid")


@dataclass(frozen=True, kw_only=True)
class ModuleInfo:
    """One module of a model."""

    path: str
    module: nn.Module
    cls: type  # the class that it had before it was patched
    config: Any  # its own, or that of the nearest module around it that has one
    part: str  # the key of that config in the model's; the module's path where it has none


def modules_of(model: nn.Module) -> Iterator[ModuleInfo]:
    """Every module of ``model``."""
    by_path: dict[str, tuple[Any, str]] = {"": (None, "")}
    outermost: list[tuple[Any, str]] = []
    for path, module in named_modules(model):
        config, part = by_path[path.rpartition(".")[0]]
        own = getattr(module, "config", None)
        if own is not config and hasattr(own, "to_dict"):
            if config is None:
                # a list of modules may be of one model or of several
                known_parts = (part for known, part in outermost if _equal(own, known))
                part = next(known_parts, path if outermost else "")
                outermost.append((own, part))
            else:
                part = _find_part(own, config, part, path)
            config = own
        by_path[path] = config, part
        cls = original_class(module) or type(module)
        yield ModuleInfo(
            path=path or cls.__name__, module=module, cls=cls, config=config, part=part
        )


def parts_of(model: nn.Module) -> dict[str, list[ModuleInfo]]:
    """The modules of each part of ``model`` in which something rotates or makes cosines."""
    infos = list(modules_of(model))
    rotating_parts = {info.part for info in infos if rotations_of(info.cls)}
    cosine_parts = {info.part for info in infos if is_rotary_embedding(info)}
    if not rotating_parts or not cosine_parts:
        raise _no_known_rotation(model, infos)
    part_of_path = {info.path: info.part for info in infos}
    found: dict[str, list[ModuleInfo]] = {}
    for info in infos:
        # what has its own config and rotates by cosines of an outer part belongs to that
        outer = info.path
        while part_of_path.get(outer) in rotating_parts - cosine_parts and "." in outer:
            outer = outer.rpartition(".")[0]
        part = part_of_path[outer] if part_of_path.get(outer) in cosine_parts else info.part
        found.setdefault(part, []).append(replace(info, part=part))
    return {part: found[part] for part in found if part in rotating_parts | cosine_parts}


def _no_known_rotation(model: nn.Module, infos: Sequence[ModuleInfo]) -> ConfigError:
    """The error for a model with a rotation of its own, or for one without any."""
    name = type(model).__name__
    for info in infos:
        if evidence := _own_rotation(info):
            return ConfigError(
                f"model must rotate as those of transformers do, and {info.path} "
                f"({info.cls.__name__}) of {name} has a rotation of its own ({evidence}): call "
                "phasor.torch.rotate_qk(q, k, positions, rope) in its place; phasor.identify says "
                "which rope that is"
            )
    return ConfigError(
        f"model must have a rotary position embedding, and no module of {name} does anything like "
        "one: there is nothing to replace"
    )


def _own_rotation(info: ModuleInfo) -> str:
    """A name in a class, or of a buffer, that is typical of a rotation; "" if there is none."""
    if type(info.module).__module__.startswith("torch.nn."):
        return ""
    names = [name for name, _ in info.module.named_buffers(recurse=False)]
    for method in methods_of(info.cls).values():
        names += method.__code__.co_names
    return next((name for name in [*names, info.cls.__name__] if _ROTARY.search(name)), "")


def is_rotary_embedding(info: ModuleInfo) -> bool:
    """Whether a module turns positions into cosines and sines, or keeps a table of them."""
    return "Rotary" in info.cls.__name__ or (
        holds_table(info.module) and bool(rotations_of(info.cls))
    )


def layer_number(info: ModuleInfo) -> int | None:
    """The number of the layer that a module belongs to, where it has one."""
    # from the path first: a module that several layers share has a single layer_idx
    numbers = NUMBER.findall(info.path)
    return int(numbers[-1]) if numbers else getattr(info.module, "layer_idx", None)


def holds_table(module: Any) -> bool:
    """Whether an attention module keeps a table of sines."""
    cls = cast(Any, original_class(module) or type(module))
    return TABLE in module._buffers and TABLE_MAKER in getattr(cls.forward, "__globals__", {})


def _find_part(config: Any, outer_config: Any, outer_part: str, path: str) -> str:
    """The part of the module at ``path`` with its own config inside a module of another part."""
    if _equal(config, outer_config):
        return outer_part
    configs = list(_configs_inside(outer_config))
    # a model may have copied the configs of its parts, and changed the copies since
    keys = (
        [key for key, inner in configs if inner is config]
        or [key for key, inner in configs if _equal(inner, config)]
        or [key for key, inner in configs if type(inner) is type(config)]
    )
    return f"{outer_part}.{keys[0]}".lstrip(".") if keys else path


def _configs_inside(config: Any, depth: int = 3) -> Iterator[tuple[str, Any]]:
    """The configs inside one, with their keys joined by dots, the outer ones first."""
    attributes = cast("dict[str, Any]", vars(config))
    found = {key: value for key, value in attributes.items() if hasattr(value, "to_dict")}
    yield from found.items()
    for key, outer in found.items() if depth else ():
        for inner_key, inner in _configs_inside(outer, depth - 1):
            yield f"{key}.{inner_key}", inner


def _equal(first: Any, second: Any) -> bool:
    return type(first) is type(second) and first.to_dict() == second.to_dict()


# ---- another class for a module ----


def bound_methods(module: nn.Module) -> Mapping[str, str]:
    """Bound methods that a module holds as attributes, with their names in its class."""
    # accelerate keeps the forward that it wraps so when it spreads a model over devices
    return {
        name: value.__name__
        for name, value in vars(module).items()
        if isinstance(value, MethodType)
        and value.__self__ is module
        and isinstance(value.__func__, FunctionType)
        and getattr(type(module), value.__name__, None) is value.__func__
    }


def set_class(module: nn.Module, cls: type) -> None:
    """Give a module another class, and bind the methods in its attributes to that class."""
    bound = bound_methods(module)
    module.__class__ = cls
    for name, method in bound.items():
        module.__dict__[name] = MethodType(getattr(cls, method), module)


def has_foreign_forward(info: ModuleInfo) -> bool:
    """Whether the module has a ``forward`` attribute that is not a method of its class."""
    module = info.module
    return "forward" in module.__dict__ and "forward" not in bound_methods(module).values()


# ---- the classes of a patched model, each a subclass of the module's own ----


@lru_cache(maxsize=512)
def rotating_class(cls: type) -> type:
    """The class for a module that rotates: by the operator."""
    substitutes = {name: substitute(it) for name, it in rotations_of(cls).items()}
    return subclass_calling(cls, substitutes, rotating_class, overrides_of(cls, substitutes))


@lru_cache(maxsize=512)
def deferring_class(cls: type, fixed: bool, single: bool) -> type:
    """The class for a module that makes cosines: it returns what stands for them."""

    def forward(
        self: Any, x: Tensor, position_ids: Tensor | None = None, layer_type: Any = None
    ) -> DeferredCosSin | tuple[DeferredCosSin, DeferredCosSin]:
        rope = getattr(self, ROPES_OF_KINDS)[layer_type]
        if fixed:  # its caller passes none
            position_ids = torch.tensor(rope.position_format.fixed_positions, device=x.device)
        assert position_ids is not None
        rows = defer_cos_sin(rope, position_ids, x.dtype)
        # complex numbers are one object, cosines and sines are two
        return rows if single else (rows, rows)

    rebuild = partial(deferring_class, fixed=fixed, single=single)
    return subclass_of(cls, {"forward": forward}, rebuild)


@lru_cache(maxsize=64)
def reordering_class(cls: type) -> type:
    """The class for a tower that puts its tokens in another order: those of rows follow."""
    reorder = methods_of(cls)[REORDERING]

    def method(self: Any, given: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(given, DeferredCosSin):
            cos, sin = (reorder(self, row, *args, **kwargs) for row in (given.cos, given.sin))
            return DeferredCosSin(cos, sin, given.inverse)
        return reorder(self, given, *args, **kwargs)

    return subclass_of(cls, {REORDERING: method}, reordering_class)
