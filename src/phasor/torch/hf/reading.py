"""What a part of a live model rotates with: its modules that do, their Ropes, and the proof."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from phasor._checks import short_repr
from phasor.axes import Axial
from phasor.configs import load, model_types
from phasor.configs.facts import table
from phasor.errors import ConfigError, PhasorError
from phasor.layers import LayerRopes
from phasor.rope import Rope
from phasor.scaling import Rule
from phasor.torch.hf.carriers import CarriedRope, measure_form
from phasor.torch.hf.embeddings import (
    FOREIGN_ERRORS,
    FreshEmbedding,
    FreshGrid,
    FreshTable,
    buffers_and_factors,
    isolated_torch_state,
)
from phasor.torch.hf.methods import (
    function_given_cosines,
    methods_of,
    misused_cosines,
    override_of_rotation,
    rotating_methods,
    rotations_of,
    used_cosine_parameter,
)
from phasor.torch.hf.modules import (
    NUMBER,
    TABLE,
    Member,
    has_foreign_forward,
    holds_table,
    makes_cosines,
    parts_of,
)

_PARAMETERS = (("self", "x", "position_ids"), ("self", "x", "position_ids", "layer_type"))
_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "depth")


@dataclass(frozen=True, kw_only=True)
class Embedding:
    """A module that makes cosines and sines of positions.

    Attributes:
        member: The module.
        ropes: The rope of every kind of layer that it can be asked for.
        fresh: What a new instance of its class answers.
    """

    member: Member
    ropes: dict[str | None, Rope]
    fresh: FreshEmbedding

    def carried_ropes(self, seq_len: int | None) -> dict[str | None, CarriedRope]:
        """How every kind of layer rotates, under the law for ``seq_len`` tokens if one is given."""
        laws = {k: rope if seq_len is None else rope.at(seq_len) for k, rope in self.ropes.items()}
        return {
            kind: CarriedRope(
                replace(law, direction=1).to_json(),
                1.0 if isinstance(law.scaling, Rule) else law.attention_factor,
                self.fresh.layout,
            )
            for kind, law in laws.items()
        }


@dataclass(frozen=True, kw_only=True)
class PartRotation:
    """The rotation of one part of a model as it is.

    Attributes:
        layers: The rope of every layer, or why that is not known.
        embeddings: Modules that make cosines and sines of positions.
        rotating: Modules that rotate queries and keys.
    """

    layers: LayerRopes | str
    embeddings: tuple[Embedding, ...]
    rotating: tuple[Member, ...]


# ---- the parts of a model ----


def read_parts(model: nn.Module, part: str | None, verb: str) -> list[PartRotation]:
    """What the part of that name, and the parts inside it, rotate with; all of the model if None.

    ``verb`` is the caller's name, for the call that works where this one does not.

    Raises:
        ConfigError: If there is no such part, or one of them is not understood.
    """
    every = parts_of(model)
    chosen = [name for name in every if part in (None, name) or name.startswith(f"{part}.")]
    if not chosen:
        names = ", ".join(map(repr, every))
        raise ConfigError(f"part must be one of {names} in this model, got {short_repr(part)}")
    understood: dict[str, PartRotation] = {}
    refused: list[ConfigError] = []
    for name in chosen:
        try:
            understood[name] = _read_part(every[name])
        except ConfigError as error:
            refused.append(error)
    if refused:
        calls = " or ".join(f'{verb}(model, part="{name}")' for name in understood)
        way_out = f", and for the other parts {calls} works" if calls else ""
        raise ConfigError(f"{refused[0]}; nothing was changed{way_out}")
    return list(understood.values())


def language_part(model: nn.Module) -> str:
    """The part of a model that is its language model, or the only one.

    Raises:
        ConfigError: If there are several and it cannot be told which.
    """
    every = parts_of(model)
    keys = {*table().key_lists["language_models"], ""}
    languages = [name for name in every if keys.issuperset(name.split("."))]
    if len(every) == 1 or languages:
        return max(languages, key=len) if languages else next(iter(every))
    raise ConfigError(f"part must say which of {', '.join(map(repr, every))} is meant")


# ---- one part ----


@isolated_torch_state()
def _read_part(members: Sequence[Member]) -> PartRotation:
    """Everything that rotates in one of `parts_of`; what is not understood is named in an error."""
    rotating = [one for one in members if rotations_of(one.cls)]
    making = [one for one in members if makes_cosines(one)]
    if not making:
        raise _refusal(rotating[0], "no module of its part of the model makes cosines for it")
    _check_classes(members, {one.path for one in rotating})
    for one in rotating:
        _check_functions(one)
    for one in [*making, *rotating]:
        if has_foreign_forward(one):
            why = "a hook has taken its forward; patch the model before it is placed"
            raise _refusal(one, why)
    described = _ropes_of_config(making)
    read: dict[tuple[type, int], Embedding] = {}
    embeddings: list[Embedding] = []
    for one in making:
        key = (one.cls, id(one.config))
        if key not in read:
            read[key] = _read_embedding(one, described, _functions_beside(one, rotating))
        embeddings.append(replace(read[key], member=one))
    if len({one.fresh.layout.batched for one in embeddings}) > 1:
        raise _refusal(embeddings[-1].member, "others beside it answer with a batch, it without")
    layers = _layers_by_code(embeddings) if described is None else described
    return PartRotation(layers=layers, embeddings=tuple(embeddings), rotating=tuple(rotating))


def _refusal(member: Member, why: str) -> ConfigError:
    return ConfigError(f"{member.path} ({member.cls.__name__}) is not understood: {why}")


def _check_classes(members: Sequence[Member], rotating: set[str]) -> None:
    """Refuse a module that would be handed positions and rotates with code of its own."""
    without_numbers = {NUMBER.sub("*", path) for path in rotating}
    parents = {path.rpartition(".")[0] for path in rotating}
    for member in members:
        name = override_of_rotation(member.cls)
        if name:
            why = f"its {name} overrides one that rotates; a rotation must be in the class itself"
            raise _refusal(member, why)
        if member.path in rotating:
            continue
        holds_rotating = any(path.startswith(f"{member.path}.") for path in rotating)
        is_beside = not holds_rotating and NUMBER.sub("*", member.path) in without_numbers
        for method in methods_of(member.cls).values():
            if member.path in parents and (other := function_given_cosines(method)):
                why = f"its {method.__name__} hands cosines to {other}, which is no rotation"
                raise _refusal(member, why)
            if is_beside and (used := used_cosine_parameter(method)):
                why = f"its {method.__name__} makes use of {used} and calls no rotation"
                raise _refusal(member, why)


def _check_functions(member: Member) -> None:
    functions = rotations_of(member.cls)
    for name, function in functions.items():
        if all(measure_form(function, batched) is None for batched in (True, False)):
            raise _refusal(
                member, f"it rotates with {name}, which turns no pairs that phasor knows"
            )
    for method in rotating_methods(member.cls):
        wrong = misused_cosines(method, functions)
        if wrong:
            raise _refusal(
                member, f"its {method.__name__} does more with cosines than rotate: {wrong}"
            )


def _ropes_of_config(making: Sequence[Member]) -> LayerRopes | None:
    """The ropes that the config behind the embeddings describes; None for an unknown model type."""
    for member in making:
        if member.config is None:
            raise _refusal(member, "it has no config")
    first = making[0].config.to_dict()
    if first.get("model_type") not in model_types():
        return None
    for member in making:
        if member.config is not making[0].config and member.config.to_dict() != first:
            raise _refusal(member, f"its config is not that of {making[0].path}")
    try:
        # what the class does not read is a note: the rotation is proved on the modules themselves
        ropes = load(first, strict=False)
    except ConfigError as error:
        raise _refusal(making[0], f"its config cannot be read ({error})") from None
    # which coordinate a tower asks for first is its modules' own matter, and measured on them
    over_patches = any(isinstance(one.axes, Axial) or one.base is None for one in ropes.ropes)
    return None if over_patches else ropes


def _functions_beside(member: Member, rotating: Sequence[Member]) -> list[Any]:
    """The rotation functions of the same file, or that modules from it call."""
    found: dict[int, Any] = {}
    for other in rotating:
        functions = rotations_of(other.cls).values()
        if _files(member.cls) & (_files(other.cls) | {one.__module__ for one in functions}):
            found |= {id(function): function for function in functions}
    if not found:
        raise _refusal(member, "no module of the model rotates by what it returns")
    return list(found.values())


def _files(cls: type) -> set[str]:
    """Where a class and those that it is made from are written."""
    return {base.__module__ for base in cls.__mro__ if base not in (object, nn.Module)}


def _read_embedding(
    member: Member, described: LayerRopes | None, functions: Sequence[Any]
) -> Embedding:
    """How every kind of layer rotates, verified against the class's own arithmetic."""
    by_kind = getattr(member.module, "rope_type", None)
    kinds = list(cast("dict[str, Any]", by_kind)) if isinstance(by_kind, dict) else []
    fresh: list[FreshEmbedding] = []
    ropes: dict[str | None, Rope] = {}
    for kind in kinds or [None]:
        try:
            fresh.append(_fresh(member, kind))
            rope = _agreed_rope(fresh[-1], kind, described, functions)
        except PhasorError:
            raise
        except FOREIGN_ERRORS as error:
            why = f"a new one, asked for cosines, says {' '.join(str(error).split()) or error!r}"
            raise _refusal(member, why) from None
        if rope is None:
            of_kind = "" if kind is None else f" for {kind} layers"
            why = f"its cosines{of_kind} are not those that its config describes"
            raise _refusal(member, why)
        ropes[kind] = rope
    return Embedding(member=member, ropes=ropes, fresh=fresh[0])


def _fresh(member: Member, kind: str | None) -> FreshEmbedding:
    cls = cast(Any, member.cls)
    if holds_table(member.module):
        return FreshTable(cls, dict(member.module.named_buffers())[TABLE])
    names = tuple(inspect.signature(cls.forward).parameters)
    if names in _PARAMETERS:
        return FreshEmbedding(cls, member.config, kind)
    if len(names) == 2:
        return FreshGrid(cls, member.config)
    raise _refusal(member, f"its forward takes ({', '.join(names[1:])})")


def _agreed_rope(
    fresh: FreshEmbedding,
    kind: str | None,
    described: LayerRopes | None,
    functions: Sequence[Any],
) -> Rope | None:
    """The rope that both the config describes and the class computes."""
    if described is None:
        return fresh.identify(functions)
    is_named = kind in described.kinds
    candidates = [described.kinds[cast(str, kind)]] if is_named else described.ropes
    agreed = next((rope for rope in candidates if rope and fresh.turns_by(rope, functions)), None)
    if agreed is None and kind is not None and not is_named:
        return fresh.identify(functions)  # a kind that no layer of this config is of
    return agreed


def _layers_by_code(embeddings: Sequence[Embedding]) -> LayerRopes | str:
    """The rope of every layer, where only the code said it."""
    config = embeddings[0].member.config
    count = next((n for key in _LAYER_COUNTS if (n := getattr(config, key, None))), None)
    kinds = {kind or "rope": rope for one in embeddings for kind, rope in one.ropes.items()}
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
    if swapped := next(
        (one.fresh.layout.axis_order for one in embeddings if one.fresh.layout.axis_order), ()
    ):
        notes.append(f"The axes of its ropes are the coordinates {swapped} of its position_ids.")
    return LayerRopes(
        name=config.model_type, layer_kinds=tuple(order), kinds=kinds, notes=tuple(notes)
    )


# ---- what the live modules hold ----


@isolated_torch_state()
def check_buffers(one: PartRotation) -> None:
    """Refuse frequencies or factors that somebody has changed in a live module.

    What was lost is no obstacle, for a patched module needs none: what is on the meta device, and
    what no program computes, as in memory that nobody has written.
    """
    for embedding in one.embeddings:
        # a rule writes those of the last call here, and what it makes them of is beside them
        rewritten = {
            "inv_freq" if kind is None else f"{kind}_inv_freq"
            for kind, rope in embedding.ropes.items()
            if isinstance(rope.scaling, Rule)
        }
        for name, live in buffers_and_factors(embedding.member.module).items():
            expected = embedding.fresh.buffers.get(name)
            if expected is None or name in rewritten or is_lost(live, expected):
                continue
            # a cast to 16 bit is no change of mind; float16 steps by 6e-8 near zero
            rtol, atol = (0.01, 1e-7) if live.element_size() < 4 else (1e-5, 0.0)
            kind = torch.complex64 if expected.is_complex() else torch.float32
            if not torch.allclose(live.cpu().to(kind), expected.to(kind), rtol=rtol, atol=atol):
                why = f"its {name} is not what its config says"
                if live.dim():
                    path = embedding.member.path
                    why += f'; if it was lost and not changed, move {path} to "meta", for a '
                    why += "patched module needs none"
                raise _refusal(embedding.member, why)


def is_lost(live: Tensor, expected: Tensor) -> bool:
    """Whether a buffer holds nothing: no memory, no numbers, zeros, or cosines without sines."""
    if live.is_meta or live.is_complex() is not expected.is_complex():
        return True
    return live.dim() > 0 and not (bool(live.isfinite().all()) and bool(live.any()))
