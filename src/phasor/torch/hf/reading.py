"""How a part of a live model rotates: its rotating modules, and their Ropes, each verified."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from phasor._checks import short_repr
from phasor.axes import Axial
from phasor.errors import ConfigError, PhasorError, PhasorWarning
from phasor.files.configs import load, model_types
from phasor.files.configs.facts import table
from phasor.files.configs.unread_keys import LEFT_ASIDE
from phasor.layers import LayerRopes
from phasor.rope import Rope
from phasor.scaling import Rule
from phasor.torch.hf.embeddings import (
    FOREIGN_ERRORS,
    Embedding,
    EmbeddingGrid,
    buffers_and_factors,
    isolated_torch_state,
)
from phasor.torch.hf.modules import REORDERING, ModuleInfo, methods_of, parts_of, rotations_of
from phasor.torch.hf.rotations import measure_signature
from phasor.torch.hf.trial import find_misuse, modules_to_run, one_line

_FORWARD_PARAMETERS = (("self", "x", "position_ids"), ("self", "x", "position_ids", "layer_type"))


class PartRotation(NamedTuple):
    """The rotation of one part of a model in its present state."""

    layers: LayerRopes | str  # the rope of every layer, or the reason why that is not known
    embeddings: list[tuple[Embedding, ModuleInfo]]  # every module that makes cosines, and its class
    rotating: list[ModuleInfo]  # these rotate queries and keys
    reordering: list[ModuleInfo]  # these put tokens, and their cosines, in another order


def read_parts(model: nn.Module, part: str | None, verb: str) -> list[PartRotation]:
    """The rotation of a part and those inside it, or of all; ``verb`` is the caller, for errors."""
    parts = parts_of(model)
    chosen = [name for name in parts if part in (None, name) or name.startswith(f"{part}.")]
    if not chosen:
        names = ", ".join(map(repr, parts))
        raise ConfigError(f"part must be one of {names} in this model, got {short_repr(part)}")
    rotations: dict[str, PartRotation] = {}
    errors: list[ConfigError] = []
    for name in chosen:
        try:
            rotations[name] = _read_part(parts[name])
        except ConfigError as error:
            errors.append(error)
    if errors:
        calls = " or ".join(f'{verb}(model, part="{name}")' for name in rotations)
        way_out = f", and for the other parts {calls} works" if calls else ""
        raise ConfigError(f"{errors[0]}; nothing was changed{way_out}")
    return list(rotations.values())


def language_part(model: nn.Module) -> str:
    """The name of the part that is the language model, or of the only part; else an error."""
    names, keys = list(parts_of(model)), {*table().files["language_models"], ""}
    languages = [name for name in names if keys.issuperset(name.split("."))]
    if not languages and len(names) > 1:
        raise ConfigError(f"part must say which of {', '.join(map(repr, names))} is meant")
    return max(languages or names, key=len)


@isolated_torch_state()
def _read_part(infos: Sequence[ModuleInfo]) -> PartRotation:
    """The rotation of one of `parts_of`; an error names a module that is not understood."""
    rotating = [info for info in infos if rotations_of(info.cls)]
    rotary_embeddings = [info for info in infos if info.is_rotary_embedding]
    if not rotary_embeddings:
        raise _refusal(rotating[0], "no module of its part of the model makes cosines for it")
    # no config describes parts of a head that rotate as heads of their own
    has_subheads = False
    for info in rotating:
        for name, function in rotations_of(info.cls).items():
            # with cosines that have a batch, or without
            signature = measure_signature(function) or measure_signature(function, False)
            if signature is None:
                says = f"it rotates with {name}, which turns no pairs that phasor knows"
                raise _refusal(info, says)
            has_subheads = has_subheads or signature.subheads > 1
    for info in (*rotary_embeddings, *rotating):
        if info.has_foreign_forward:
            says = "a hook has taken its forward; patch the model before it is placed"
            raise _refusal(info, says)
    described = None if has_subheads else _ropes_of_config(rotary_embeddings)
    groups: dict[tuple[type, int], list[ModuleInfo]] = {}
    for info in rotary_embeddings:
        groups.setdefault((info.cls, id(info.config)), []).append(info)
    embeddings = [_read_embedding(group, described, rotating) for group in groups.values()]
    for group in modules_to_run(infos, rotating):
        if reason := find_misuse(group, embeddings):
            raise _refusal(group[0], reason)
    return PartRotation(
        layers=_layers_by_code(embeddings) if described is None else described,
        embeddings=[(embedding, info) for embedding in embeddings for info in embedding.modules],
        rotating=rotating,
        reordering=[info for info in infos if REORDERING in methods_of(info.cls)],
    )


def _refusal(info: ModuleInfo, reason: str) -> ConfigError:
    return ConfigError(f"{info.path} ({info.cls.__name__}) is not understood: {reason}")


def _ropes_of_config(rotary_embeddings: Sequence[ModuleInfo]) -> LayerRopes | None:
    """The ropes that the config of the embeddings describes; None if only the code tells them."""
    first = rotary_embeddings[0]
    for info in rotary_embeddings:
        if info.config is None:
            raise _refusal(info, "it has no config")
    config = first.config.to_dict()
    if config.get("model_type") not in model_types():
        return None
    for info in rotary_embeddings:
        if info.config is not first.config and info.config.to_dict() != config:
            raise _refusal(info, f"its config is not that of {first.path}")
    try:
        with warnings.catch_warnings():
            # a key that the class does not read may stay: the rotation is verified on the modules
            warnings.filterwarnings("ignore", LEFT_ASIDE, PhasorWarning)
            ropes = load(config, strict=False)
    except ConfigError as error:
        facts = table().huggingface[config["model_type"]]
        if facts.layers or facts.axes or facts.refused:
            raise _refusal(first, f"its config cannot be read ({error})") from None
        # where all layers are alike the modules tell all
        text = f"The config of {first.path} cannot be read ({error}); its modules are followed"
        warnings.warn(text, PhasorWarning, stacklevel=5)
        return None
    # no config says in which order a picture's coordinates come: that is measured on the modules
    has_pictures = any(isinstance(rope.axes, Axial) or rope.base is None for rope in ropes.ropes)
    return None if has_pictures else ropes


def _functions_for(rotary_embedding: ModuleInfo, rotating: Sequence[ModuleInfo]) -> list[Any]:
    """The rotation functions from the file of a rotary embedding, or called by modules from it."""

    def files_of(cls: type) -> set[str]:
        return {base.__module__ for base in cls.__mro__ if base not in (object, nn.Module)}

    found: dict[int, Any] = {}
    for info in rotating:
        functions = rotations_of(info.cls).values()
        files = files_of(info.cls) | {function.__module__ for function in functions}
        if files_of(rotary_embedding.cls) & files:
            found |= {id(function): function for function in functions}
    if not found:
        raise _refusal(rotary_embedding, "no module of the model rotates by what it returns")
    return list(found.values())


def _read_embedding(
    modules: Sequence[ModuleInfo], described: LayerRopes | None, rotating: Sequence[ModuleInfo]
) -> Embedding:
    """The embeddings of one class, with Ropes that were verified against a new instance of it."""
    info, make = modules[0], Embedding
    functions = _functions_for(info, rotating)
    if not info.holds_table:
        taken = tuple(inspect.signature(cast(Any, info.cls).forward).parameters)
        if taken not in _FORWARD_PARAMETERS and len(taken) != 2:
            raise _refusal(info, f"its forward takes ({', '.join(taken[1:])})")
        make = EmbeddingGrid if len(taken) == 2 else Embedding
    try:
        embedding = make(modules)
        for kind in embedding.kinds:
            rope = _find_rope(embedding, kind, described, functions)
            if rope is None:
                which = "cosines" if kind is None else f"cosines for {kind} layers"
                raise _refusal(info, f"its {which} are not those that its config describes")
            embedding.ropes[kind] = rope
    except PhasorError:
        raise
    except FOREIGN_ERRORS as error:
        says = f"a new one, asked for cosines, says {one_line(error)}"
        raise _refusal(info, says) from None
    return embedding


def _find_rope(
    embedding: Embedding, kind: str | None, described: LayerRopes | None, functions: Sequence[Any]
) -> Rope | None:
    """The rope that the config describes and the class computes; None if they differ."""
    if described is None:
        return embedding.identify(functions, kind)
    is_named = kind in described.kinds
    for rope in [described.kinds[cast(str, kind)]] if is_named else described.ropes:
        if rope and embedding.matches(rope, functions, kind):
            return rope
    # a kind that no layer uses is absent from the config's ropes
    return None if kind is None or is_named else embedding.identify(functions, kind)


def _layers_by_code(embeddings: Sequence[Embedding]) -> LayerRopes | str:
    """The rope of every layer, as found from the code; the reason if that is not known."""
    config = embeddings[0].info.config
    if any(it.signature and it.signature.subheads > 1 for it in embeddings):
        return "the parts of a head rotate as heads of their own, which no Rope says"
    counts = ("num_hidden_layers", "n_layer", "num_layers", "depth")
    count = next((n for key in counts if (n := getattr(config, key, None))), 0)
    kinds = {kind or "rope": rope for it in embeddings for kind, rope in it.ropes.items()}
    ropes = {rope for it in embeddings for rope in it.ropes.values()}
    order = getattr(config, "layer_types", None)
    if len(ropes) == 1:
        kinds, order = {"rope": ropes.pop()}, ["rope"] * count
    if not order or not set(order) <= set(kinds):
        return f"phasor does not know which layer of a {config.model_type} has which rope"
    notes = [
        f"The ropes of this {config.model_type} were identified from its code, not read from its "
        "config, and layers without position embedding are not told apart."
    ]
    axis_orders = (it.position_format.axis_order for it in embeddings)
    if order_of_axes := next(filter(None, axis_orders), ()):
        notes.append(f"Its ropes' axes are the coordinates {order_of_axes} of its position_ids.")
    name, layer_kinds = config.model_type, tuple(order)
    return LayerRopes(name=name, layer_kinds=layer_kinds, kinds=kinds, notes=tuple(notes))


@isolated_torch_state()
def check_buffers(rotation: PartRotation) -> None:
    """Refuse frequencies or factors that were changed in a live module; lost ones are accepted."""
    for embedding, info in rotation.embeddings:
        # a rule writes the frequencies of the last call here; their source is another buffer
        rewritten = {
            "inv_freq" if kind is None else f"{kind}_inv_freq"
            for kind, rope in embedding.ropes.items()
            if isinstance(rope.scaling, Rule)
        }
        for name, live in buffers_and_factors(info.module).items():
            expected = embedding.buffers.get(name)
            if expected is None or name in rewritten or is_lost(live, expected):
                continue
            # a cast to 16 bit is accepted; float16 steps by 6e-8 near zero
            rtol, atol = (0.01, 1e-7) if live.element_size() < 4 else (1e-5, 0.0)
            dtype = torch.complex64 if expected.is_complex() else torch.float32
            if not torch.allclose(live.cpu().to(dtype), expected.to(dtype), rtol=rtol, atol=atol):
                way_out = f'; if it was lost and not changed, move {info.path} to "meta", for a '
                way_out = f"{way_out}patched module needs none" if live.dim() else ""
                raise _refusal(info, f"its {name} is not what its config says{way_out}")


def is_lost(live: Tensor, expected: Tensor) -> bool:
    """Whether a buffer holds nothing: no memory, no numbers, zeros, or cosines without sines."""
    if live.is_meta or live.is_complex() is not expected.is_complex():
        return True
    return live.dim() > 0 and not (bool(live.isfinite().all()) and bool(live.any()))
