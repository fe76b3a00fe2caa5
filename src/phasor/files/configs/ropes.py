"""The third stage: ropes of a Hugging Face `ModelConfig`, and of any format the `LayerRopes`.

Values come from the file, or else from the model class's entry in ``huggingface.toml``; if neither
has a value, that is an error. Keys that nothing has read are passed to `unread_keys`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from phasor.axes import Axes, Axial, InterleavedSections, OneAxis, Sectioned
from phasor.files import refusal
from phasor.files.configs import rope_blocks
from phasor.files.configs.facts import NO_FACTS, Architecture, AuxiliaryRope, Kind, table
from phasor.files.configs.layer_pattern import indexer_pattern
from phasor.files.configs.learned import learned_ropes
from phasor.files.configs.model_class import LEARNED, ModelConfig, has_rope, note_assumed_sizes
from phasor.files.configs.source import JsonObject, renamed_keys, single_value
from phasor.files.configs.unread_keys import check_unread_keys
from phasor.layers import ConfigLocation, LayerRopes, NamedRope
from phasor.rope import Rope
from phasor.scaling import Llama3, Yarn

_MOST_EXTRA = 1_000  # layers that predict further tokens
#: For each value of ``turns``, how the rotation of such a class differs.
TURNS: Mapping[str, Callable[[Rope], Rope]] = {
    "clockwise": lambda rope: replace(rope, direction=-rope.direction),
    "end of head": lambda rope: replace(rope, rotary_start=rope.head_dim - rope.rotary_dim),
}


def layer_ropes(
    config: JsonObject,
    kinds: Mapping[str, Rope | None],
    order: Sequence[str],
    file_kind: str,
    *,
    facts: Architecture = NO_FACTS,
    blocks: Iterable[JsonObject] = (),
    ignoring_program: str | None = None,
    read_heads: Callable[[JsonObject, str], int | None] = JsonObject.whole,
    **fields: Any,
) -> LayerRopes:
    """The ropes of all layers; keys that nothing has read are checked first.

    `check_unread_keys` explains the arguments that it shares; ``fields`` are fields of the result.
    """
    ropes = kinds.values()
    unread = check_unread_keys(
        config, blocks, ropes, file_kind, facts=facts, ignoring_program=ignoring_program
    )
    key_heads = None if facts.latent else read_heads(config, "num_key_value_heads")
    return LayerRopes(
        layer_kinds=tuple(order),
        kinds=kinds,
        num_heads=read_heads(config, "num_attention_heads"),
        # latent attention rotates one key for all heads
        num_kv_heads=1 if facts.latent else key_heads,
        notes=tuple(dict.fromkeys([*config.notes, *unread])),
        **fields,
    )


def huggingface_ropes(model: ModelConfig) -> LayerRopes:
    """The rope of each layer."""
    config, facts, blocks = model.config, model.facts, model.blocks
    order, labels = model.layer_kinds, dict[str, str]()
    kinds: dict[str, Rope | None] = dict.fromkeys(order)
    unused: dict[str, Rope] = {}
    if facts.other_positions is not None:
        position_type = config.text("position_embedding_type") or ""
        replacement = table().files["instead"].get(position_type, facts.other_positions)
        config.notes.append(f"{model.model_type} has no rotary embedding; instead: {replacement}.")
        blocks.use_all()
    else:
        widths = widths_by_kind(config, facts, order)
        kinds = {kind: _rope(model, kind, widths) for kind in kinds}
        notes = [*config.notes]
        for kind, label in facts.labels.items():
            if label not in {*unused, *map(facts.labels.get, kinds)}:
                rope = _rope(model, kind, widths)
                assert rope is not None, "a class with labels has a block for each"
                unused[label] = rope
        config.notes = notes  # an assumption about layers that do not exist does not matter
        if facts.nested or facts.labels or blocks.by_kind:
            labels = {kind: facts.labels.get(kind, kind) for kind in kinds}
        elif len({*kinds.values()} - {None}) > 1:
            labels = dict.fromkeys(kinds, "rope_parameters")
        if model.assumed_sizes:
            config.notes.append(note_assumed_sizes(model))
    if model.model_type in LEARNED and model.levels[0].folder is not None:
        order, kinds = learned_ropes(model, model.levels[0].folder, kinds)
    factors = rope_blocks.query_factors(facts.query_factor, config, kinds, blocks.block_of)
    # plain classes of transformers have no code for other keys
    is_plain = facts.sizes and not (
        facts.other_positions or facts.axes or facts.block or facts.nested
    )
    labelled = {kind: unused[label] for kind, label in facts.labels.items() if label in unused}
    name = model.levels[0].text("_name_or_path") or config.text("_name_or_path")
    return layer_ropes(
        config,
        kinds,
        order,
        f"a file of model type {model.model_type!r}",
        facts=facts,
        blocks=blocks.used,
        ignoring_program="transformers' class" if is_plain and not config.has("auto_map") else None,
        read_heads=JsonObject.largest,
        name=name or model.model_type,
        context=model.context,
        auxiliary_ropes=read_auxiliary_ropes(config, facts, order, labelled | kinds),
        query_factors=factors,
        in_config=ConfigLocation(
            labels=labels,
            unused_blocks=unused,
            ignores_scaling=facts.fixed or model.model_type in LEARNED,
            path=config.path,
            model_type=model.model_type,
            values=model.levels[-1].values,
        ),
    )


def _rope(model: ModelConfig, kind: str, widths: Mapping[str, int]) -> Rope | None:
    config, facts = model.config, model.facts
    block = model.blocks.block_of(kind) if has_rope(kind, facts) else None
    if block is None:
        return None
    kind_facts = facts.kind(kind)
    has_one_block = not model.blocks.by_kind
    scaling_block = block if kind_facts.scaled or not has_one_block else JsonObject({}, block.path)
    name = rope_blocks.rope_type(scaling_block, facts)
    head_dim = widths[kind] if kind in widths else _head_dim(config, facts, kind_facts)
    if facts.positions:
        # the same number of pairs for each axis; coordinates left over are not rotated
        width = head_dim // (2 * len(facts.positions)) * 2 * len(facts.positions)
    elif name == "proportional":
        width = head_dim
    else:
        width = rotated_width(config, block, facts, head_dim)
    law_context = rope_blocks.LawContext(facts, width, config)
    config.whole("original_max_position_embeddings")  # whether the law uses it or not
    law = rope_blocks.read_law(scaling_block, law_context)
    if isinstance(law, Llama3) and law.original_max_positions > (law_context.context or math.inf):
        rope_blocks.doubt(
            config,
            f"{scaling_block.name('original_max_position_embeddings')} "
            f"{law.original_max_positions} is more than the context, {law_context.context}, "
            f"although it is the length before the extension.",
        )
    base = _base(model, kind_facts, block)
    if facts.fixed and (law is not None or base != facts.base):
        request = {"what": "base", "asked": base} if law is None else {"what": "law", "asked": name}
        raise refusal("fixed_class", block=block.path or "the config", base=facts.base, **request)
    with renamed_keys(config):
        rope = Rope(
            head_dim=head_dim,
            pairing=facts.pairing,
            pairing_out=facts.pairing_out or facts.pairing,
            base=base,
            rotary_dim=width,
            scaling=law,
            axes=OneAxis()
            if facts.positions
            else rope_blocks.axes(block, law_context) or OneAxis(),
            direction=scaling_block.sign("short_factor"),
        )
    if facts.turns is not None:
        rope = TURNS[facts.turns](rope)
    return _patch_grid_rope(rope, facts, config.notes) if facts.positions else rope


def _patch_grid_rope(rope: Rope, facts: Architecture, notes: list[str]) -> Rope:
    """The rope of a vision tower, whose axes are the coordinates of an image patch."""
    assert facts.axes is not None, "positions are of axes"
    axes, layout = len(facts.positions), facts.axes.layout
    sections = (rope.num_pairs // axes,) * axes
    notes.append(f"Positions are ({', '.join(facts.positions)}) of a patch.")
    if rope.scaling is not None:
        raise refusal("law_of_patches", law=rope.scaling)
    if layout == "axial":
        return replace(rope, axes=Axial(sections))
    base, pairs = rope.base or 1.0, range(rope.num_pairs)
    if layout == "dealt":
        inv_freq = tuple(base ** -(pair // axes / sections[0]) for pair in pairs)
        patch_axes: Axes = InterleavedSections(sections)
    else:
        # axis after axis; an axis has every second or third frequency of one spectrum
        order = [pair for axis in range(axes) for pair in pairs[axis::axes]]
        inv_freq = tuple(base ** -(pair / rope.num_pairs) for pair in order)
        patch_axes = Sectioned(sections)
    return replace(rope, base=None, explicit_inv_freq=inv_freq, axes=patch_axes)


def _base(model: ModelConfig, kind: Kind, block: JsonObject) -> float:
    config, facts, has_one_block = model.config, model.facts, not model.blocks.by_kind
    block_base = block.number("rope_theta", above=1)
    key = kind.base_key or "rope_theta"
    named_bases = [(config.name(key), config.number(key, above=1))]
    if not has_one_block and kind.base_key is None and block_base is not None:
        # a base outside several blocks belongs to some of them only: the block's own base counts
        named_bases = []
    is_of_block = not has_one_block or kind.base_key is None
    if has_one_block and facts.nested:  # in an old file, base and law are for the same kinds
        is_of_block = kind.scaled
    if is_of_block:
        named_bases.insert(0, (block.name("rope_theta"), block_base))
    base, default = single_value(named_bases), facts.base if kind.base is None else kind.base
    return config.or_default(key, base, default, "the class default of this model type")


def _head_dim(config: JsonObject, facts: Architecture, kind: Kind) -> int:
    """Width of a head, or of its rotated slice in latent attention."""
    if kind.head_dim_key is not None:
        return config.head_dim(kind.head_dim_key, kind.head_dim)
    return config.head_dim(facts.width_key, facts.head_dim)


def widths_by_kind(config: JsonObject, facts: Architecture, kinds: Sequence[str]) -> dict[str, int]:
    """Head widths by kind, of a ``per_layer_config`` for single layers; refused if they differ."""
    name = "per_layer_config"
    layers = config.object(name)
    if layers is None:
        return {}
    # "05" is layer 5; in a dictionary that was not read from JSON the index may be an int
    if any(not str(index).isdecimal() or int(index) >= len(kinds) for index in layers.values):
        config.refuse(name, f"an object from numbers below {len(kinds)} to what those layers say")
    layers = JsonObject({str(index): value for index, value in layers.values.items()}, layers.path)
    width_key = facts.width_key
    width_by_layer: dict[int, int | None] = {}
    for index in layers.values:
        layer = layers.object(index) or JsonObject({}, layers.name(index))
        for key in layer.values:
            if ("rope" in key and key != width_key) or "rotary" in key:
                layer.refuse(key, "in the block of a kind of layer, not of a single one")
        width_by_layer[int(index)] = layer.width(width_key)
    # per_layer_config lists the exceptional layers only: a kind's own default is not used here
    default = _head_dim(config, facts, Kind())
    width_by_kind: dict[str, int] = {}
    for kind in dict.fromkeys(kinds):
        widths = {width_by_layer.get(i) or default for i, k in enumerate(kinds) if k == kind}
        if len(widths) > 1:
            listed = ", ".join(map(str, sorted(widths)))
            raise refusal("layer_widths", key=config.name(name), kind=kind, widths=listed)
        width_by_kind[kind] = widths.pop()
        if (key := facts.kind(kind).head_dim_key) is not None:
            layers_of_kind = f"{config.name(name)} at layers of the kind {kind!r}"
            single_value([(layers_of_kind, width_by_kind[kind]), (key, config.width(key))])
    return width_by_kind


def rotated_width(config: JsonObject, block: JsonObject, facts: Architecture, head_dim: int) -> int:
    """Number of rotated coordinates; all keys that state it must agree."""
    key = "partial_rotary_factor"
    # transformers reads a null as "no fraction", not as the class default
    is_null = config.contains(key) and not config.has(key) and not facts.nested
    # with a block for each kind, no class reads the keys outside the blocks
    places = (block,) if facts.nested else (block, config)
    fractions = [(place.name(key), place.number(key, above=0, most=1)) for place in places]
    if facts.latent:
        whole = head_dim + (config.whole("qk_nope_head_dim", least=0) or 0)
        for name, fraction in fractions:
            wide = {whole, config.whole("head_dim") or 0}
            if fraction not in (None, 1) and all(int(n * fraction) != head_dim for n in wide):
                details = {"name": name, "fraction": fraction, "whole": whole, "rotated": head_dim}
                raise refusal(
                    "latent_fraction", **details, width_key=config.name("qk_rope_head_dim")
                )
        return head_dim
    widths = [(name, None if f is None else int(head_dim * f)) for name, f in fractions]
    if "rotary_dim" in facts.names:
        widths.append((config.name("rotary_dim"), config.whole("rotary_dim")))
    width = single_value(widths)
    if width is None:
        width = facts.rotary_dim or int(head_dim * (1 if is_null else facts.fraction or 1))
    source = next((name for name, value in widths if value is not None), key)
    if width % 2 or not 2 <= width <= head_dim:
        raise refusal("odd_width", source=source, head_dim=head_dim, width=width)
    if width != head_dim and not facts.partial:
        raise refusal("whole_heads", source=source, width=width, head_dim=head_dim)
    return width


# Rotations outside attention: of indexers and compressors, and of layers after the last.


def read_auxiliary_ropes(
    config: JsonObject,
    facts: Architecture,
    layer_kinds: Sequence[str],
    kinds: Mapping[str, Rope | None],
) -> tuple[NamedRope, ...]:
    """The rotations outside attention; ``kinds`` may have kinds that no layer has."""
    layers_by_rope: dict[tuple[str, Rope], list[int]] = {}
    for name, changes in facts.auxiliary_ropes.items():
        width = config.width(changes.head_dim_key) or changes.head_dim
        layers = indexer_pattern(config, changes.every, len(layer_kinds)).indices
        for kind in dict.fromkeys(layer_kinds[layer] for layer in layers):
            rope = kinds[kind]
            if rope is not None and width and (not changes.kinds or kind in changes.kinds):
                named_rope = (name, _auxiliary_rope(rope, changes, width))
                layers_by_rope.setdefault(named_rope, []).extend(
                    i for i in layers if layer_kinds[i] == kind
                )
    ropes = {rope for kind in {*layer_kinds} if (rope := kinds[kind]) is not None}
    only_rope = next(iter(ropes)) if len(ropes) == 1 else None
    rule = facts.layers
    codes = config.wholes(rule.codes_key) if rule and rule.codes_key else None
    # if layers differ, the file must state the kind of these layers
    coded = rule.coded((codes or ())[len(layer_kinds) :]) if rule else []
    extra = config.whole("num_nextn_predict_layers", least=0, most=_MOST_EXTRA) or 0
    listed = config.texts("mtp_layer_types") or coded
    for i in range(extra):
        kind = listed[i] if i < len(listed) else rule and rule.mtp
        rope = only_rope if kind is None else kinds.get(kind)
        if rope is not None:
            layers_by_rope.setdefault(("mtp", rope), []).append(len(layer_kinds) + i)
    return tuple(
        NamedRope(name, rope, tuple(sorted(layers)))
        for (name, rope), layers in layers_by_rope.items()
    )


def _auxiliary_rope(rope: Rope, changes: AuxiliaryRope, width: int) -> Rope:
    """Attention's rope in heads of another width: the same frequencies at one end of the head."""
    if not changes.head_dim_key:
        return rope
    pairing, law = changes.pairing, rope.scaling
    if isinstance(law, Yarn):
        # an indexer, which selects keys, has no softmax to scale
        law = replace(law, mscale=1.0, mscale_all_dim=0.0, attention_factor=rope.attention_factor)
    return replace(
        rope,
        head_dim=width,
        rotary_dim=rope.rotary_dim,
        rotary_start=width - rope.rotary_dim if changes.trailing else 0,
        pairing=pairing or rope.pairing,
        pairing_out=rope.pairing_out if pairing is None else None,
        scaling=law,
    )
