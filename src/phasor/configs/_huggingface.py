"""Hugging Face ``config.json``, of transformers 5 (``rope_parameters``) and 4 (``rope_scaling``).

What the file says is read from it; what only the model class says comes from
``architectures.toml``; what both leave open is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

from phasor._checks import shown
from phasor.axes import OneAxis
from phasor.configs import _laws
from phasor.configs._blocks import Blocks, comparable
from phasor.configs._layers import has_rope, layer_kinds
from phasor.configs._model import Model, renamed
from phasor.configs._reading import Block, agreed, language_models
from phasor.configs._table import Architecture, Kind, table
from phasor.configs._width import HEADS, head_width, rotated_width, widths_apart
from phasor.errors import ConfigError
from phasor.layers import InConfig, LayerRopes
from phasor.scaling import Law, Proportional, Rule
from phasor.spec import Pairing, Rope

_BASES = ("rope_theta", "rotary_emb_base", "rotary_embedding_base")
_CONTEXTS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
_ABOUT_ROPE = re.compile("rope|rotary")
_WAY_OUT = (
    "describe its embedding with phasor.Rope(...) directly, or add the model type to "
    "architectures.toml"
)


def load_huggingface(top: Block) -> LayerRopes:
    """The rope of each layer of a Hugging Face config."""
    config, model_type = _text_model(top)
    facts = table().huggingface[model_type]
    notes = [facts.note] if facts.note else []
    config.ignore(*facts.harmless)
    kinds_in_order = layer_kinds(config, facts)
    kinds: dict[str, Rope | None] = {}
    labels: dict[str, str] = {}
    unread: dict[str, Rope] = {}
    if _rotates(config, facts):
        blocks = Blocks(config, facts)
        widths = widths_apart(config, facts, kinds_in_order)
        for kind in dict.fromkeys(kinds_in_order):
            rotates = has_rope(kind, config, facts)
            kinds[kind] = _rope(config, facts, blocks, kind, widths, notes) if rotates else None
        for kind, label in facts.labels.items():
            if label not in {*unread, *map(facts.labels.get, kinds)}:
                rope = _rope(config, facts, blocks, kind, widths, [])
                assert rope is not None, "a class with labels has a block for each"
                unread[label] = rope
        if any(kinds.values()):
            _refuse_strays(config, model_type, blocks)
        if facts.nested or facts.labels or blocks.by_kind:
            labels = {kind: facts.labels.get(kind, kind) for kind in kinds}
        elif len({rope for rope in kinds.values() if rope is not None}) > 1:
            labels = dict.fromkeys(kinds, "rope_parameters")
    else:
        kinds_in_order = ("nope",) * len(kinds_in_order)
        kinds["nope"] = None
    return LayerRopes(
        name=top.text("_name_or_path") or config.text("_name_or_path") or model_type,
        layer_kinds=kinds_in_order,
        kinds=kinds,
        context=config.first(_CONTEXTS, Block.whole),
        query_heads=config.first(HEADS, Block.whole),
        key_heads=_key_heads(config, facts),
        notes=tuple(dict.fromkeys(notes)),
        in_config=InConfig(labels=labels, unread=unread, fixed=facts.fixed, inside=config.path),
    )


def _key_heads(config: Block, facts: Architecture) -> int | None:
    given = config.first(_KEY_HEADS, Block.whole)
    # latent attention rotates one key for all heads
    return 1 if facts.head_dim_key == "qk_rope_head_dim" else given


def _text_model(top: Block) -> tuple[Block, str]:
    """The config of the text model, which may lie inside that of a larger one, and its type."""
    levels = language_models(top)
    for outer, inner in pairwise(levels):
        _agree_with_outer(outer, inner)
    config = levels[-1]
    model_type = next((said for one in reversed(levels) if (said := one.text("model_type"))), None)
    known = table().huggingface
    if model_type is None:
        raise ConfigError(
            f"{config.name('model_type')} is absent, and without it the pairing of coordinates is "
            f"unknown; add it, or {_WAY_OUT}"
        )
    if model_type not in known:
        raise ConfigError(
            f"{config.name('model_type')} must be one that phasor knows "
            f"(phasor.configs.model_types() lists them), got {shown(model_type)}; {_WAY_OUT}"
        )
    return config, model_type


def _agree_with_outer(outer: Block, inner: Block) -> None:
    for key in ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor"):
        if outer.has(key):
            said = [comparable(block.values.get(key)) for block in (outer, inner)]
            if said[0] != said[1]:
                raise ConfigError(
                    f"{outer.name(key)} and {inner.name(key)} differ; the inner one counts, so "
                    "remove the outer one or make them agree"
                )


def _rotates(config: Block, facts: Architecture) -> bool:
    """Whether the switch that some classes have for their kind of position embedding is on."""
    condition = facts.only_if
    if not condition:
        return True
    wanted = condition["value"]
    read = Block.flag if isinstance(wanted, bool) else Block.text
    given = read(config, condition["key"])
    return (condition["default"] if given is None else given) == wanted


def _rope(
    config: Block,
    facts: Architecture,
    blocks: Blocks,
    kind: str,
    widths: Mapping[str, int],
    notes: list[str],
) -> Rope | None:
    block = blocks.of(kind)
    if block is None:
        return None
    apart = facts.kinds.get(facts.labels.get(kind, kind), Kind())
    flat = not blocks.by_kind
    if facts.scaled_default and not blocks.stated:
        raise ConfigError(
            f"{config.name('rope_parameters')} is absent, and what transformers then takes for "
            "this model type scales the frequencies; write the block out"
        )
    lawful = block if apart.scaled or not flat else Block({}, block.path)
    name = _laws.rope_type(lawful)
    head_dim = widths[kind] if kind in widths else head_width(config, facts, apart)
    proportional = name == "proportional"
    width = head_dim if proportional else rotated_width(config, block, facts, head_dim)
    model = Model(
        # what its class puts into one block for all, it leaves out of blocks of single kinds
        architecture=facts if flat else replace(facts, yarn_attention_factor=None),
        rotary_dim=width,
        context=config.first(_CONTEXTS, Block.whole),
        original=_outer_original(config),
    )
    law = _laws.scaling(lawful, model)
    if proportional:
        law = _fraction_beside(config, block, law)
    pairing, pairing_out = _pairing(config, facts)
    base = _base(config, facts, apart, block, flat=flat, notes=notes)
    if facts.fixed and (law is not None or base != facts.base):
        raise ConfigError(
            f"{block.path or 'the config'} asks for the {'base' if law is None else 'law'} "
            f"{shown(base if law is None else name)}, and transformers turns this model type by "
            f"the plain powers of {facts.base:g} whatever its config says; remove it, or describe "
            "the embedding with phasor.Rope(...) directly"
        )
    with renamed(config, {"rotary_dim": "partial_rotary_factor", "base": "rope_theta"}):
        return Rope(
            head_dim=head_dim,
            pairing=pairing,
            pairing_out=pairing_out or pairing,
            base=base,
            rotary_dim=width,
            rotary_start=head_dim - width if facts.trailing else 0,
            scaling=law,
            axes=_laws.axes(block, model) or OneAxis(),
            direction=1 if facts.direction == 1 else -1,
        )


def _outer_original(config: Block) -> tuple[str, int | None]:
    key = "original_max_position_embeddings"
    return config.name(key), config.whole(key)


def _fraction_beside(config: Block, block: Block, law: Law | Rule | None) -> Law | Rule | None:
    """The law with the fraction that may stand outside the block of a proportional rope."""
    key = "partial_rotary_factor"
    outside = config.number(key, least=0)
    inside = block.number(key, least=0)
    fraction = agreed([(block.name(key), inside), (config.name(key), outside)])
    if inside is not None or fraction is None or not isinstance(law, Proportional):
        return law
    with renamed(config, {"fraction": key}):
        return Proportional(fraction=fraction, factor=law.factor)


def _pairing(config: Block, facts: Architecture) -> tuple[Pairing, Pairing | None]:
    """The class's pairings; some classes have a switch for weights that need no reordering."""
    if config.flag("rotary_emb_interleaved") and facts.pairing == "half":
        config.refuse("rotary_emb_interleaved", "false, as this model type rotates halves")
    if facts.pairing_key is not None and config.flag(facts.pairing_key) is False:
        return "half", None
    return facts.pairing, facts.pairing_out


def _base(
    config: Block, facts: Architecture, apart: Kind, block: Block, *, flat: bool, notes: list[str]
) -> float:
    inside = (block.name("rope_theta"), block.number("rope_theta", above=1))
    keys = _BASES if apart.base_key is None else (apart.base_key,)
    beside = [(config.name(key), config.number(key, above=1)) for key in keys]
    if facts.base_unit is not None:
        ratio = config.number(facts.base_unit, above=0)
        beside.append(
            (config.name(facts.base_unit), None if ratio is None else ratio * (facts.base or 0))
        )
    if flat and apart.base_key is not None:
        inside = (inside[0], None)
    if not flat and apart.base_key is None and inside[1] is not None:
        # one base beside several blocks can only be that of some of them
        beside = []
    base = agreed([inside, *beside])
    if base is not None:
        return base
    default = facts.base if apart.base is None else apart.base
    if default is None:
        raise ConfigError(
            f"{block.name('rope_theta')} is absent and this model type has no default; add it"
        )
    notes.append(f"The file has no {keys[0]}; {default:g} is the class default of this model type.")
    return default


def _refuse_strays(config: Block, model_type: str, blocks: Blocks) -> None:
    """Refuse what stands in the file about its rope and was not understood."""
    for block in blocks.used:
        for key in block.not_asked():
            raise ConfigError(
                f"{block.name(key)} is not a key that phasor understands for this rope_type "
                f"and model type, got {shown(block.values[key])}; remove it if nothing "
                f"depends on it, else {_WAY_OUT}"
            )
    for key in config.not_asked():
        if _ABOUT_ROPE.search(key):
            raise ConfigError(
                f"{config.name(key)} is not a key that phasor understands for the model type "
                f"{model_type}, got {shown(config.values[key])}; remove it if nothing "
                f"depends on it, else {_WAY_OUT}"
            )
