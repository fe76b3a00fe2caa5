"""The modules of a model, and which part of it each belongs to.

A model of pictures and text has a config for each, and its modules hold their own. A part is named
by the key of its config in the config file: ``text_config``, ``vision_config``, or several keys
joined by dots. The name is empty for the config of the whole model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import nn

from phasor._checks import short_repr
from phasor.errors import ConfigError
from phasor.torch.hf.classes import bound_methods, methods_of, original_class, rotations_of

#: The buffer in which attention of GPT-J and CodeGen keeps its table of sines, and the function
#: that makes the table.
TABLE = "embed_positions"
TABLE_MAKER = "create_sinusoidal_positions"
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


def named_modules(model: object) -> Iterator[tuple[str, nn.Module]]:
    """Every module of ``model`` with its name; an error if it is no module."""
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model must be a torch.nn.Module, such as a model of transformers or a part of one, "
            f"got {short_repr(model)}"
        )
    return cast("Iterator[tuple[str, nn.Module]]", model.named_modules())


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


def has_foreign_forward(info: ModuleInfo) -> bool:
    """Whether the module has a ``forward`` attribute that is not a method of its class."""
    module = info.module
    return "forward" in module.__dict__ and "forward" not in bound_methods(module).values()


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
