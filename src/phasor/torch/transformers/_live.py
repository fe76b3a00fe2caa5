"""What a live model rotates with: its modules that do, the Rope of each, and the proof."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from phasor.configs import load, model_types
from phasor.errors import ConfigError
from phasor.layers import LayerRopes
from phasor.scaling import Rule
from phasor.spec import Rope
from phasor.torch.transformers._carriers import Turns
from phasor.torch.transformers._forms import measured
from phasor.torch.transformers._fresh import Fresh, held
from phasor.torch.transformers._handling import mishandled, unpacks
from phasor.torch.transformers._methods import (
    covering,
    methods,
    named_modules,
    original,
    rotating_methods,
    rotations,
)
from phasor.torch.transformers._sines import TABLE, FreshTable, holds_table

_EMBEDDING = re.compile(r"Rotary")
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_TAKES = (("self", "x", "position_ids"), ("self", "x", "position_ids", "layer_type"))
_COUNTS = ("num_hidden_layers", "n_layer", "num_layers")


@dataclass(frozen=True, kw_only=True)
class Part:
    """One module that takes part in the rotation.

    Attributes:
        path: Its name in the model.
        module: The module.
        cls: The class it was born with.
        config: Its config, or that of the nearest module around it that has one.
    """

    path: str
    module: nn.Module
    cls: type
    config: Any


@dataclass(frozen=True, kw_only=True)
class Embedding:
    """A module that makes cosines and sines of positions.

    Attributes:
        part: The module.
        ropes: The rope of every kind of layer that it can be asked for.
        single: Whether it answers with one complex tensor.
        held: What a new instance of its class multiplies by.
    """

    part: Part
    ropes: dict[str | None, Rope]
    single: bool
    held: dict[str, Tensor]

    def turns(self, seq_len: int | None) -> dict[str | None, Turns]:
        """How every kind of layer turns, under the law for ``seq_len`` tokens if one is given."""
        return {kind: _turns(rope, seq_len) for kind, rope in self.ropes.items()}


@dataclass(frozen=True, kw_only=True)
class Live:
    """A model's rotation as it is.

    Attributes:
        layers: The rope of every layer, or why that is not known.
        embeddings: Modules that make cosines and sines of positions.
        rotating: Modules that rotate queries and keys, each with the functions that do.
    """

    layers: LayerRopes | str
    embeddings: tuple[Embedding, ...]
    rotating: tuple[tuple[Part, dict[str, Any]], ...]


def read(model: nn.Module) -> Live:
    """Everything that rotates in ``model``, understood, or an error that names what is not."""
    parts = list(_parts(model))
    rotating = [(part, functions) for part in parts if (functions := rotations(part.cls))]
    tables = [part for part, _ in rotating if holds_table(part.module)]
    found = [part for part in parts if _EMBEDDING.search(part.cls.__name__)] + tables
    if not rotating or not found:
        what = "calls a rotation" if not rotating else "makes cosines and sines of positions"
        raise ConfigError(
            f"model must rotate queries and keys in a way that phasor knows, and no module of "
            f"{type(model).__name__} {what} as those of transformers do"
        )
    _check_classes(parts, {part.path for part, _ in rotating})
    for part, functions in rotating:
        _check_functions(part, functions)
    for part in [*found, *(part for part, _ in rotating)]:
        _check_forward(part)
    described = _described(found)
    done: dict[tuple[type, int], Embedding] = {}
    embeddings: list[Embedding] = []
    for part in found:
        key = (part.cls, id(part.config))
        if key not in done:
            done[key] = _embedding(part, described, _functions_beside(part, rotating))
        embeddings.append(replace(done[key], part=part))
        _check_held(embeddings[-1])
    layers = _identified_layers(embeddings) if described is None else described
    return Live(layers=layers, embeddings=tuple(embeddings), rotating=tuple(rotating))


def _parts(model: nn.Module) -> Iterator[Part]:
    configs: dict[str, Any] = {}
    for path, module in named_modules(model):
        around = configs.get(path.rpartition(".")[0]) if path else None
        config = configs[path] = getattr(module, "config", None) or around
        cls = original(module) or type(module)
        yield Part(path=path or cls.__name__, module=module, cls=cls, config=config)


def _refusal(part: Part, why: str) -> ConfigError:
    return ConfigError(
        f"{part.path} ({part.cls.__name__}) is not understood: {why}; nothing was changed. "
        "If another part of the model is meant, hand over that submodule"
    )


def _check_forward(part: Part) -> None:
    if "forward" in part.module.__dict__:
        raise _refusal(part, "a hook has taken its forward; patch the model before it is placed")


def _check_classes(parts: Sequence[Part], rotating: set[str]) -> None:
    """Refuse a module that would be handed positions and rotates with code of its own."""
    places = {_NUMBER.sub("*", path) for path in rotating}
    for part in parts:
        name = covering(part.cls)
        if name:
            why = f"its {name} overrides one that rotates; a rotation must be in the class itself"
            raise _refusal(part, why)
        # a module beside those that rotate, which neither does nor holds one that does
        if _NUMBER.sub("*", part.path) not in places or any(
            path == part.path or path.startswith(f"{part.path}.") for path in rotating
        ):
            continue
        for method in methods(part.cls).values():
            used = unpacks(method)
            if used:
                why = f"its {method.__name__} makes use of {used} and calls no rotation"
                raise _refusal(part, why)


def _check_functions(part: Part, functions: dict[str, Any]) -> None:
    for name, function in functions.items():
        if measured(function) is None:
            raise _refusal(part, f"it rotates with {name}, which turns no pairs that phasor knows")
    for method in rotating_methods(part.cls):
        wrong = mishandled(method, functions)
        if wrong:
            raise _refusal(
                part, f"its {method.__name__} does more with cosines than rotate: {wrong}"
            )


def _described(found: Sequence[Part]) -> LayerRopes | None:
    """The ropes that the config behind the embeddings describes; None for an unknown model type."""
    for part in found:
        if part.config is None:
            raise _refusal(part, "it has no config")
    first = found[0].config.to_dict()
    if first.get("model_type") not in model_types():
        return None
    for part in found:
        if part.config is not found[0].config and part.config.to_dict() != first:
            raise _refusal(part, f"its config is not that of {found[0].path}")
    try:
        return load(first)
    except ConfigError as error:
        raise _refusal(found[0], f"its config cannot be read ({error})") from None


def _functions_beside(part: Part, rotating: Sequence[tuple[Part, dict[str, Any]]]) -> list[Any]:
    """The rotation functions of the same file, or that modules from it call."""
    found = {
        id(function): function
        for other, functions in rotating
        if _files(part.cls) & (_files(other.cls) | {one.__module__ for one in functions.values()})
        for function in functions.values()
    }
    if not found:
        raise _refusal(part, "no module of the model rotates by what it returns")
    return list(found.values())


def _files(cls: type) -> set[str]:
    """Where a class and those that it is made from are written."""
    return {base.__module__ for base in cls.__mro__ if base not in (object, nn.Module)}


def _embedding(part: Part, described: LayerRopes | None, functions: Sequence[Any]) -> Embedding:
    """How every kind of layer turns, verified against the class's own arithmetic."""
    if holds_table(part.module):
        return _tabled(part, described, functions)
    names = tuple(inspect.signature(cast(Any, part.cls).forward).parameters)
    if names not in _TAKES:
        raise _refusal(part, f"its forward takes ({', '.join(names[1:])})")
    kinds = getattr(part.module, "rope_type", None)
    labels = list(cast("dict[str, Any]", kinds)) if kinds and isinstance(kinds, dict) else [None]
    ropes: dict[str | None, Rope] = {}
    single, says = False, dict[str, Tensor]()
    for label in labels:
        fresh = Fresh(part.cls, part.config, label)
        single = fresh.single
        rope = _rope(fresh, label, described, functions)
        if rope is None:
            kind = "" if label is None else f" for {label} layers"
            raise _refusal(part, f"its cosines{kind} are not those that its config describes")
        ropes[label] = rope
        says = fresh.held
    return Embedding(part=part, ropes=ropes, single=single, held=says)


def _tabled(part: Part, described: LayerRopes | None, functions: Sequence[Any]) -> Embedding:
    table = dict(part.module.named_buffers())[TABLE]
    fresh = FreshTable(part.cls, table)
    rope = _rope(fresh, None, described, functions)
    if rope is None:
        raise _refusal(part, "its table of sines is not that which its config describes")
    return Embedding(part=part, ropes={None: rope}, single=False, held=fresh.held)


def _rope(
    fresh: Fresh, label: str | None, described: LayerRopes | None, functions: Sequence[Any]
) -> Rope | None:
    if described is None:
        return fresh.identified(functions)
    known = label in described.kinds
    candidates = [described.kinds[cast(str, label)]] if known else list(described.ropes)
    agreed = next((rope for rope in candidates if rope and fresh.is_by(rope, functions)), None)
    if agreed is None and label is not None and not known:
        return fresh.identified(functions)  # a kind that no layer of this config is of
    return agreed


def _check_held(one: Embedding) -> None:
    """Refuse frequencies or factors that somebody has changed in the live module."""
    # a rule writes those of the last call here, and what it makes them of is beside them
    written = {
        "inv_freq" if kind is None else f"{kind}_inv_freq"
        for kind, rope in one.ropes.items()
        if isinstance(rope.scaling, Rule)
    }
    for name, live in held(one.part.module).items():
        if live.is_meta or name not in one.held or name in written:
            continue
        # a cast to 16 bit is no change of mind; float16 steps by 6e-8 near zero
        off, near = (1e-5, 0.0) if live.dtype == torch.float32 else (0.01, 1e-7)
        exact = one.held[name].float()
        if not torch.allclose(live.cpu().float(), exact, rtol=off, atol=near):
            raise _refusal(one.part, f"its {name} is not what its config says")


def _turns(rope: Rope, seq_len: int | None) -> Turns:
    law = rope if seq_len is None else rope.at(seq_len)
    gain = 1.0 if isinstance(law.scaling, Rule) else law.attention_factor
    return Turns(replace(law, direction=1).to_json(), gain)


def _identified_layers(embeddings: Sequence[Embedding]) -> LayerRopes | str:
    """The rope of every layer, where only the code said it."""
    config = embeddings[0].part.config
    count = next((n for key in _COUNTS if (n := getattr(config, key, None))), None)
    kinds = {label or "rope": rope for one in embeddings for label, rope in one.ropes.items()}
    different = {rope for one in embeddings for rope in one.ropes.values()}
    order = getattr(config, "layer_types", None) if len(different) > 1 else ["rope"] * (count or 0)
    if len(different) == 1:
        kinds = {"rope": different.pop()}
    if not order or not set(order) <= set(kinds):
        return f"phasor does not know which layer of a {config.model_type} has which rope"
    note = (
        f"The model type {config.model_type} is not one whose configs phasor reads: its ropes were "
        "identified from its code, and layers without position embedding are not told apart."
    )
    return LayerRopes(name=config.model_type, layer_kinds=tuple(order), kinds=kinds, notes=(note,))
