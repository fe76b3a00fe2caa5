"""What a part of a live model rotates with: its modules that do, their Ropes, and the proof."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from phasor.axes import Axial
from phasor.configs import load, model_types
from phasor.errors import ConfigError, PhasorError
from phasor.layers import LayerRopes
from phasor.rope import Rope
from phasor.scaling import Rule
from phasor.torch.transformers._carriers import Form, Ids, Turns
from phasor.torch.transformers._forms import measured
from phasor.torch.transformers._fresh import FOREIGN, Fresh, held, undisturbed
from phasor.torch.transformers._handling import hands_on, mishandled, unpacks
from phasor.torch.transformers._members import Member, is_hooked, makes_cosines
from phasor.torch.transformers._methods import covering, methods, rotating_methods, rotations
from phasor.torch.transformers._sines import TABLE, FreshGrid, FreshTable, holds_table

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_TAKES = (("self", "x", "position_ids"), ("self", "x", "position_ids", "layer_type"))
_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "depth")


@dataclass(frozen=True, kw_only=True)
class Embedding:
    """A module that makes cosines and sines of positions.

    Attributes:
        member: The module.
        ropes: The rope of every kind of layer that it can be asked for.
        single: Whether it answers with one complex tensor.
        held: What a new instance of its class multiplies by.
        ids: How positions come to it.
        form: The geometry of the function that turns by its rows.
    """

    member: Member
    ropes: dict[str | None, Rope]
    single: bool
    held: dict[str, Tensor]
    ids: Ids
    form: Form

    def turns(self, seq_len: int | None) -> dict[str | None, Turns]:
        """How every kind of layer turns, under the law for ``seq_len`` tokens if one is given."""
        return {kind: _turns(rope, seq_len, self.ids) for kind, rope in self.ropes.items()}


@dataclass(frozen=True, kw_only=True)
class Live:
    """The rotation of one part of a model as it is.

    Attributes:
        part: The key of its config in the model's; "" for the model's own.
        layers: The rope of every layer, or why that is not known.
        embeddings: Modules that make cosines and sines of positions.
        rotating: Modules that rotate queries and keys, each with the functions that do.
    """

    part: str
    layers: LayerRopes | str
    embeddings: tuple[Embedding, ...]
    rotating: tuple[tuple[Member, dict[str, Any]], ...]

    @property
    def batched(self) -> bool:
        """Whether cosines of this part have a batch."""
        return self.embeddings[0].ids.batched

    @property
    def members(self) -> tuple[Member, ...]:
        """Every module that takes part."""
        return (*(one.member for one in self.embeddings), *(one for one, _ in self.rotating))


@undisturbed()
def read(part: str, ones: Sequence[Member]) -> Live:
    """Everything that rotates in one of `parts`, understood, or an error that names what is not."""
    rotating = [(one, functions) for one in ones if (functions := rotations(one.cls))]
    making = [one for one in ones if makes_cosines(one)]
    if not making:
        raise _refusal(rotating[0][0], "no module of its part of the model makes cosines for it")
    _check_classes(ones, {one.path for one, _ in rotating})
    for one, functions in rotating:
        _check_functions(one, functions)
    for one in [*making, *(one for one, _ in rotating)]:
        if is_hooked(one):
            why = "a hook has taken its forward; patch the model before it is placed"
            raise _refusal(one, why)
    described = _described(making)
    done: dict[tuple[type, int], Embedding] = {}
    embeddings: list[Embedding] = []
    for one in making:
        key = (one.cls, id(one.config))
        if key not in done:
            done[key] = _embedding(one, described, _functions_beside(one, rotating))
        embeddings.append(replace(done[key], member=one))
    if len({one.ids.batched for one in embeddings}) > 1:
        raise _refusal(embeddings[-1].member, "others beside it answer with a batch, it without")
    layers = _identified_layers(embeddings) if described is None else described
    return Live(part=part, layers=layers, embeddings=tuple(embeddings), rotating=tuple(rotating))


def _refusal(member: Member, why: str) -> ConfigError:
    return ConfigError(f"{member.path} ({member.cls.__name__}) is not understood: {why}")


def _check_classes(ones: Sequence[Member], rotating: set[str]) -> None:
    """Refuse a module that would be handed positions and rotates with code of its own."""
    places = {_NUMBER.sub("*", path) for path in rotating}
    for member in ones:
        name = covering(member.cls)
        if name:
            why = f"its {name} overrides one that rotates; a rotation must be in the class itself"
            raise _refusal(member, why)
        if member.path in rotating:
            continue
        inside = [path for path in rotating if path.startswith(f"{member.path}.")]
        for method in methods(member.cls).values():
            if any(path.rpartition(".")[0] == member.path for path in inside):
                other = hands_on(method)
                if other:
                    why = f"its {method.__name__} hands cosines to {other}, which is no rotation"
                    raise _refusal(member, why)
            elif not inside and _NUMBER.sub("*", member.path) in places:
                used = unpacks(method)
                if used:
                    why = f"its {method.__name__} makes use of {used} and calls no rotation"
                    raise _refusal(member, why)


def _check_functions(member: Member, functions: dict[str, Any]) -> None:
    for name, function in functions.items():
        if all(measured(function, batched) is None for batched in (True, False)):
            raise _refusal(
                member, f"it rotates with {name}, which turns no pairs that phasor knows"
            )
    for method in rotating_methods(member.cls):
        wrong = mishandled(method, functions)
        if wrong:
            raise _refusal(
                member, f"its {method.__name__} does more with cosines than rotate: {wrong}"
            )


def _described(found: Sequence[Member]) -> LayerRopes | None:
    """The ropes that the config behind the embeddings describes; None for an unknown model type."""
    for member in found:
        if member.config is None:
            raise _refusal(member, "it has no config")
    first = found[0].config.to_dict()
    if first.get("model_type") not in model_types():
        return None
    for member in found:
        if member.config is not found[0].config and member.config.to_dict() != first:
            raise _refusal(member, f"its config is not that of {found[0].path}")
    try:
        # what the class does not read is a note: the rotation is proved on the modules themselves
        ropes = load(first, strict=False)
    except ConfigError as error:
        raise _refusal(found[0], f"its config cannot be read ({error})") from None
    # which coordinate a tower asks for first is its modules' own matter, and measured on them
    over_patches = any(isinstance(one.axes, Axial) or one.base is None for one in ropes.ropes)
    return None if over_patches else ropes


def _functions_beside(
    member: Member, rotating: Sequence[tuple[Member, dict[str, Any]]]
) -> list[Any]:
    """The rotation functions of the same file, or that modules from it call."""
    found = {
        id(function): function
        for other, functions in rotating
        if _files(member.cls) & (_files(other.cls) | {one.__module__ for one in functions.values()})
        for function in functions.values()
    }
    if not found:
        raise _refusal(member, "no module of the model rotates by what it returns")
    return list(found.values())


def _files(cls: type) -> set[str]:
    """Where a class and those that it is made from are written."""
    return {base.__module__ for base in cls.__mro__ if base not in (object, nn.Module)}


def _embedding(member: Member, described: LayerRopes | None, functions: Sequence[Any]) -> Embedding:
    """How every kind of layer turns, verified against the class's own arithmetic."""
    kinds = getattr(member.module, "rope_type", None)
    labels = list(cast("dict[str, Any]", kinds)) if kinds and isinstance(kinds, dict) else [None]
    try:
        found = {label: _verified(member, label, described, functions) for label in labels}
    except PhasorError:
        raise
    except FOREIGN as error:
        why = f"a new one, asked for cosines, says {' '.join(str(error).split()) or error!r}"
        raise _refusal(member, why) from None
    fresh = found[labels[0]][0]
    return Embedding(
        member=member,
        ropes={label: rope for label, (_, rope) in found.items()},
        single=fresh.single,
        held=fresh.held,
        ids=fresh.ids,
        form=cast(Form, fresh.form),
    )


def _verified(
    member: Member, label: str | None, described: LayerRopes | None, functions: Sequence[Any]
) -> tuple[Fresh, Rope]:
    fresh = _fresh(member, label)
    rope = _rope(fresh, label, described, functions)
    if rope is None:
        kind = "" if label is None else f" for {label} layers"
        what = "table of sines is" if holds_table(member.module) else f"cosines{kind} are"
        source = "that which" if holds_table(member.module) else "those that"
        raise _refusal(member, f"its {what} not {source} its config describes")
    return fresh, rope


def _fresh(member: Member, label: str | None) -> Fresh:
    cls = cast(Any, member.cls)
    if holds_table(member.module):
        return FreshTable(cls, dict(member.module.named_buffers())[TABLE])
    names = tuple(inspect.signature(cls.forward).parameters)
    if names in _TAKES:
        return Fresh(cls, member.config, label)
    if len(names) == 2:
        return FreshGrid(cls, member.config)
    raise _refusal(member, f"its forward takes ({', '.join(names[1:])})")


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


@undisturbed()
def check_held(live: Live) -> None:
    """Refuse frequencies or factors that somebody has changed in a live module.

    What was lost is no obstacle, for a patched module needs none: what is on the meta device, and
    what no program computes, as in memory that nobody has written.
    """
    for one in live.embeddings:
        # a rule writes those of the last call here, and what it makes them of is beside them
        written = {
            "inv_freq" if kind is None else f"{kind}_inv_freq"
            for kind, rope in one.ropes.items()
            if isinstance(rope.scaling, Rule)
        }
        for name, found in held(one.member.module).items():
            if name in one.held and name not in written and not is_lost(found, one.held[name]):
                _check_same(one.member, name, found, one.held[name])


def is_lost(found: Tensor, exact: Tensor) -> bool:
    """Whether a buffer holds nothing: no memory, no numbers, zeros, or cosines without sines."""
    if found.is_meta or found.is_complex() is not exact.is_complex():
        return True
    return found.dim() > 0 and not (bool(found.isfinite().all()) and bool(found.any()))


def _check_same(member: Member, name: str, found: Tensor, exact: Tensor) -> None:
    # a cast to 16 bit is no change of mind; float16 steps by 6e-8 near zero
    off, near = (0.01, 1e-7) if found.element_size() < 4 else (1e-5, 0.0)
    kind = torch.complex64 if exact.is_complex() else torch.float32
    if not torch.allclose(found.cpu().to(kind), exact.to(kind), rtol=off, atol=near):
        way_out = (
            f'; if it was lost and not changed, move {member.path} to "meta", for a patched '
            "module needs none"
        )
        says = f"its {name} is not what its config says"
        raise _refusal(member, says + (way_out if found.dim() else ""))


def _turns(rope: Rope, seq_len: int | None, ids: Ids) -> Turns:
    law = rope if seq_len is None else rope.at(seq_len)
    gain = 1.0 if isinstance(law.scaling, Rule) else law.attention_factor
    return Turns(replace(law, direction=1).to_json(), gain, ids)


def _identified_layers(embeddings: Sequence[Embedding]) -> LayerRopes | str:
    """The rope of every layer, where only the code said it."""
    config = embeddings[0].member.config
    count = next((n for key in _COUNTS if (n := getattr(config, key, None))), None)
    kinds = {label or "rope": rope for one in embeddings for label, rope in one.ropes.items()}
    different = {rope for one in embeddings for rope in one.ropes.values()}
    order = getattr(config, "layer_types", None) if len(different) > 1 else ["rope"] * (count or 0)
    if len(different) == 1:
        kinds = {"rope": different.pop()}
    if not order or not set(order) <= set(kinds):
        return f"phasor does not know which layer of a {config.model_type} has which rope"
    notes = [
        f"The model type {config.model_type} is not one whose configs phasor reads: its ropes were "
        "identified from its code, and layers without position embedding are not told apart."
    ]
    if swapped := next((one.ids.order for one in embeddings if one.ids.order), ()):
        notes.append(f"The axes of its ropes are the coordinates {swapped} of its position_ids.")
    return LayerRopes(
        name=config.model_type, layer_kinds=tuple(order), kinds=kinds, notes=tuple(notes)
    )
