"""Hugging Face ``config.json``, of transformers 5 (``rope_parameters``) and 4 (``rope_scaling``).

Values come from the file, or else from the model class's entry in ``huggingface.toml``; a value
that neither has is an error. Keys that nothing read are passed to `unread_keys`.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace

from phasor._checks import short_repr
from phasor.axes import Axes, Axial, InterleavedSections, OneAxis, Sectioned
from phasor.errors import ConfigError, PhasorWarning
from phasor.files.configs import laws
from phasor.files.configs.block import Block, head_width, or_default, renamed_keys, single_value
from phasor.files.configs.facts import Architecture, Kind, table
from phasor.files.configs.layer_kinds import MOST_LAYERS, Blocks, has_rope, layer_kinds
from phasor.files.configs.sources import select_config, type_in_file
from phasor.files.configs.unread_keys import check_unread_keys, objects_inside
from phasor.layers import InConfig, LayerRopes
from phasor.rope import WIDEST, Rope
from phasor.scaling import Linear


def load_huggingface(top: Block, *, part: str | None, like: str | None, strict: bool) -> LayerRopes:
    """The rope of each layer of a Hugging Face config; the arguments are those of `load`."""
    levels, model_type = select_config(top, part, like)
    config, facts = _select_facts(levels[-1], table().huggingface[model_type])
    notes = [facts.note] if facts.note else []
    file_type = type_in_file(levels)
    if like is not None:
        notes.append(f"Read as model type {like}; the file says {file_type or 'none'}.")
    elif file_type is None:
        notes.append(f"The file has no model_type; its architectures are those of {model_type}.")
    if facts.refused is not None:
        raise ConfigError(f"{config.name('model_type')} {model_type!r} here {facts.refused}")
    assumed = _assume_sizes(config, facts)
    blocks = Blocks(config, facts)
    if blocks.assumed:
        notes.append(
            f"The file has no rope_parameters; {dict(facts.block)} is what {model_type} assumes."
        )
    context = _context(config, notes)
    kinds: dict[str, Rope | None] = {}
    labels: dict[str, str] = {}
    unread: dict[str, Rope] = {}
    if facts.uses is not None:
        count = config.whole("num_hidden_layers", most=MOST_LAYERS) or 1
        kinds_in_order: tuple[str, ...] = ("nope",) * count
        kinds["nope"] = None
        instead = table().files["instead"]
        replacement = instead.get(config.text("position_embedding_type") or "", facts.uses)
        blocks.used = [b for b in (blocks.by_kind or {"": blocks.top}).values() if b is not None]
        notes.append(f"{model_type} has no rotary embedding; in its place: {replacement}.")
    else:
        kinds_in_order = layer_kinds(config, facts)
        widths = widths_of_single_layers(config, facts, kinds_in_order)
        for kind in dict.fromkeys(kinds_in_order):
            rotates = has_rope(kind, config, facts)
            kinds[kind] = _rope(blocks, kind, widths, notes) if rotates else None
        for kind, label in facts.labels.items():
            if label not in {*unread, *map(facts.labels.get, kinds)}:
                rope = _rope(blocks, kind, widths, [])
                assert rope is not None, "a class with labels has a block for each"
                unread[label] = rope
        if facts.nested or facts.labels or blocks.by_kind:
            labels = {kind: facts.labels.get(kind, kind) for kind in kinds}
        elif len({rope for rope in kinds.values() if rope is not None}) > 1:
            labels = dict.fromkeys(kinds, "rope_parameters")
    if assumed and facts.uses is None:
        if like is not None or file_type is None:
            raise ConfigError(
                f"{config.name(next(iter(assumed)))} is absent; add it, as the sizes that "
                f"{model_type} assumes are those of another model"
            )
        _check_no_size_is_left(levels, config, facts, model_type)
        sizes = " and ".join(f"{key} {size}" for key, size in assumed.items())
        notes.append(f"The file does not say its size; {sizes} is what {model_type} assumes.")
        warnings.warn(notes[-1], PhasorWarning, stacklevel=3)
    what = f"a file of model type {model_type!r}"
    # a plain class of transformers is known to have no code for other keys
    is_plain = facts.sizes and not (facts.uses or facts.axes or facts.block or facts.nested)
    program = "transformers' class" if is_plain and not config.has("auto_map") else None
    notes += check_unread_keys(
        config, blocks.used, kinds.values(), what, strict=strict, facts=facts, ignored_by=program
    )
    return LayerRopes(
        name=top.text("_name_or_path") or config.text("_name_or_path") or model_type,
        layer_kinds=kinds_in_order,
        kinds=kinds,
        context=context,
        num_heads=config.largest("num_attention_heads"),
        # latent attention rotates one key for all heads
        num_kv_heads=1 if facts.latent else config.largest("num_key_value_heads"),
        notes=tuple(dict.fromkeys(notes)),
        in_config=InConfig(
            labels=labels,
            unread=unread,
            fixed=facts.fixed,
            inside=config.path,
            keys=frozenset(levels[-1].values),
        ),
    )


def _select_facts(block: Block, facts: Architecture) -> tuple[Block, Architecture]:
    """The config with the key names of its model type, and the facts for its switches."""
    plain, values, switches = Block(block.values, block.path), block.values, facts.variants
    variant = next((v for v in switches if v.applies(plain)), None)
    facts = facts if variant is None else replace(facts, **variant.facts)
    names = dict(facts.names)
    swapped_by = "rope_traditional of MLX" if values.get("rope_traditional") is True else None
    if block.path.partition(".")[0] == "model_config":  # of MLC
        own = table().files["mlc_names"]
        # there 0 and -1 stand for an absent number
        values = {k: v for k, v in values.items() if k not in own.values() or v not in (0, -1)}
        names |= {key: (*names.get(key, (key,)), name) for key, name in own.items()}
        facts = replace(facts, laws={**facts.laws, "gptj": "default"})
        if plain.has("rope_scaling") and plain.text("rope_scaling.rope_type") == "gptj":
            swapped_by = "rope_type gptj of MLC"
    config = Block(values, block.path, names=names, nulls=facts.nulls)
    config.ignore(*(switch.key for switch in switches))
    if facts.pairing == "half" and swapped_by is not None:
        config.ignore("rope_traditional")
        why = f"as {swapped_by} says; transformers rotates halves without a word."
        note = " ".join(filter(None, (facts.note, f"Pairs are interleaved, {why}")))
        facts = replace(facts, pairing="interleaved", note=note)
    return config, facts


def _assume_sizes(config: Block, facts: Architecture) -> dict[str, int]:
    """Add the class's default sizes where the file has none, and return them."""
    needed = ["num_hidden_layers"]
    width = facts.width_key
    if not config.has(width) and (facts.head_dim is None or config.contains(width)):
        needed += ["hidden_size", "num_attention_heads"]
    absent = [key for key in needed if key in facts.sizes and not config.contains(key)]
    assumed = {key: facts.sizes[key] for key in absent}
    config.add_defaults(assumed)
    return assumed


def _check_no_size_is_left(
    levels: Sequence[Block], config: Block, facts: Architecture, model_type: str
) -> None:
    """Check that the file has no size, and nothing that may hold one, where nothing reads it."""
    known = {*facts.parts, *table().files["other_objects"]}
    objects = [
        inner.path
        for inner in config.unread_objects()
        if inner.path.rpartition(".")[2] not in known and not inner.has("model_type")
    ]
    numbers = [
        block.path_of(key)
        for level in (*levels[:-1], config)
        for block in (level, *objects_inside(level))
        for key, value in block.unread().items()
        if type(value) in (int, float) and re.fullmatch(table().files["sizes"], key)
    ]
    if found := objects + numbers:
        alone = f", or load it alone, with its model_type in it: load(..., part={found[0]!r})"
        raise ConfigError(
            f"{found[0]} may say the model's size, and nothing reads it in a file of model type "
            f"{model_type!r}; add num_hidden_layers, hidden_size and num_attention_heads where its "
            f"other keys are{alone if objects else ''}"
        )


def _context(config: Block, notes: list[str]) -> int | None:
    """The first context of the file; `laws.Model.context` refuses several that disagree."""
    keys = [key for key in table().files["contexts"] if config.has(key)]
    contexts = {config.name(key): config.whole(key) for key in keys}
    if len(set(contexts.values())) > 1:
        listed = ", ".join(f"{name} {length}" for name, length in contexts.items())
        notes.append(f"The file gives several contexts ({listed}); the first is taken.")
        warnings.warn(notes[-1], PhasorWarning, stacklevel=4)
    return next(iter(contexts.values()), None)


def _rope(blocks: Blocks, kind: str, widths: Mapping[str, int], notes: list[str]) -> Rope | None:
    config, facts, block = blocks.config, blocks.facts, blocks.block_of(kind)
    if block is None:
        return None
    kind_facts = facts.kind(kind)
    one_block = not blocks.by_kind
    scaling_block = block if kind_facts.scaled or not one_block else Block({}, block.path)
    name = laws.rope_type(scaling_block, facts)
    head_dim = widths[kind] if kind in widths else _head_width(config, facts, kind_facts)
    if facts.positions:
        # the same number of pairs for each axis; coordinates left over are not rotated
        width = head_dim // (2 * len(facts.positions)) * 2 * len(facts.positions)
    elif name == "proportional":
        width = head_dim
    else:
        width = rotated_width(config, block, facts, head_dim)
    # the class adds its attention factor to one block for all layers, not to blocks by kind
    law_facts = facts if one_block else replace(facts, yarn_attention_factor=None)
    model = laws.Model(architecture=law_facts, rotary_dim=width, config=config)
    config.whole("original_max_position_embeddings")  # whether the law uses it or not
    law = laws.scaling(scaling_block, model)
    if facts.factor_key is not None:
        law = Linear(factor=config.number(facts.factor_key, above=0) or 1.0)
    base = _base(blocks, kind_facts, block, notes)
    if facts.fixed and (law is not None or base != facts.base):
        raise ConfigError(
            f"{block.path or 'the config'} asks for the {'base' if law is None else 'law'} "
            f"{short_repr(base if law is None else name)}, and transformers turns this model type "
            f"by the plain powers of {facts.base:g} whatever its config says; remove it, or "
            "describe the embedding with phasor.Rope(...) directly"
        )
    with renamed_keys(config, {"rotary_dim": "partial_rotary_factor", "base": "rope_theta"}):
        rope = Rope(
            head_dim=head_dim,
            pairing=facts.pairing,
            pairing_out=facts.pairing_out or facts.pairing,
            base=base,
            rotary_dim=width,
            rotary_start=head_dim - width if facts.trailing else 0,
            scaling=law,
            axes=OneAxis() if facts.positions else laws.axes(block, model) or OneAxis(),
            direction=1 if facts.direction == 1 else -1,
        )
    return _patch_grid_rope(rope, facts, notes) if facts.positions else rope


def _patch_grid_rope(rope: Rope, facts: Architecture, notes: list[str]) -> Rope:
    """The rope of a vision tower, whose axes are the coordinates of an image patch."""
    axes = len(facts.positions)
    sections = (rope.num_pairs // axes,) * axes
    where = f", counted from {facts.origin}" if facts.origin else ""
    notes.append(f"Positions are ({', '.join(facts.positions)}) of a patch{where}.")
    if rope.scaling is not None:
        raise ConfigError(f"no rope of patches takes the law {short_repr(rope.scaling)}; remove it")
    if facts.axes == "axial":
        return replace(rope, axes=Axial(sections))
    base, pairs = rope.base or 1.0, range(rope.num_pairs)
    if facts.axes == "dealt":
        inv_freq = tuple(base ** -(pair // axes / sections[0]) for pair in pairs)
        layout: Axes = InterleavedSections(sections)
    else:
        # axis after axis; an axis has every second or third frequency of one spectrum
        order = [pair for axis in range(axes) for pair in pairs[axis::axes]]
        inv_freq = tuple(base ** -(pair / rope.num_pairs) for pair in order)
        layout = Sectioned(sections)
    return replace(rope, base=None, explicit_inv_freq=inv_freq, axes=layout)


def _base(blocks: Blocks, kind: Kind, block: Block, notes: list[str]) -> float:
    config, facts, one_block = blocks.config, blocks.facts, not blocks.by_kind
    block_base = block.number("rope_theta", above=1)
    key = kind.base_key or "rope_theta"
    named_bases = [(config.name(key), config.number(key, above=1))]
    if facts.base_unit is not None:
        ratio = config.number(facts.base_unit, above=0)
        named_bases.append((config.name(facts.base_unit), ratio and ratio * (facts.base or 0)))
    if not one_block and kind.base_key is None and block_base is not None:
        # one base outside several blocks is that of some of them only, so the block's own counts
        named_bases = []
    if not one_block or kind.base_key is None:
        named_bases.insert(0, (block.name("rope_theta"), block_base))
    base, default = single_value(named_bases), facts.base if kind.base is None else kind.base
    return or_default(config, key, base, default, "the class default of this model type", notes)


def _head_width(config: Block, facts: Architecture, kind: Kind) -> int:
    """Width of a head, or of its rotated slice in latent attention."""
    key, default = facts.width_key, facts.head_dim
    if kind.head_dim_key is not None:
        key, default = kind.head_dim_key, kind.head_dim
    width = config.whole(key, least=2, most=WIDEST)
    if width is not None:
        return width
    # the class default is for an absent key; with a null the class divides the hidden size
    if default is not None and not config.contains(key):
        return default
    hidden, heads = config.whole("hidden_size"), config.whole("num_attention_heads")
    if hidden is None or heads is None:
        raise ConfigError(
            f"{config.name(key)} is absent and cannot be derived; add it, or both hidden_size and "
            "num_attention_heads"
        )
    return head_width(config, key, "hidden_size / num_attention_heads", hidden, heads)


def widths_of_single_layers(
    config: Block, facts: Architecture, kinds: Sequence[str]
) -> dict[str, int]:
    """Head widths by kind of layer, in files whose ``per_layer_config`` is for single layers.

    Raises:
        ConfigError: If layers of one kind have heads of several widths.
    """
    name = "per_layer_config"
    layers = config.block(name)
    if layers is None:
        return {}
    # "05" is layer 5; in a dictionary that was not read from JSON the index may be an int
    if any(not str(index).isdecimal() or int(index) >= len(kinds) for index in layers.values):
        config.refuse(name, f"an object from numbers below {len(kinds)} to what those layers say")
    layers = Block({str(index): value for index, value in layers.values.items()}, layers.path)
    width_key = facts.width_key
    width_of_layer: dict[int, int | None] = {}
    for index in layers.values:
        layer = layers.block(index) or Block({}, layers.name(index))
        for key in layer.values:
            if ("rope" in key and key != width_key) or "rotary" in key:
                layer.refuse(key, "in the block of a kind of layer, not of a single one")
        width_of_layer[int(index)] = layer.whole(width_key, least=2, most=WIDEST)
    # such a file gives the widths of special kinds at their layers: the default is for no kind
    default = _head_width(config, facts, Kind())
    width_of_kind: dict[str, int] = {}
    for kind in dict.fromkeys(kinds):
        widths = {width_of_layer.get(i) or default for i, k in enumerate(kinds) if k == kind}
        if len(widths) > 1:
            raise ConfigError(
                f"{config.name(name)} gives layers of the kind {kind!r} heads of different widths "
                f"({', '.join(map(str, sorted(widths)))}); give those layers a kind of their own "
                "in layer_types"
            )
        width_of_kind[kind] = widths.pop()
        if (kind_key := facts.kind(kind).head_dim_key) is not None:
            layers_of_kind = f"{config.name(name)} at layers of the kind {kind!r}"
            kind_width = config.whole(kind_key, least=2, most=WIDEST)
            single_value([(layers_of_kind, width_of_kind[kind]), (kind_key, kind_width)])
    return width_of_kind


def rotated_width(config: Block, block: Block, facts: Architecture, head_dim: int) -> int:
    """Number of rotated coordinates; all keys that state it must agree."""
    key = "partial_rotary_factor"
    # transformers reads a null as "no fraction", not as the class default
    is_null = config.contains(key) and not config.has(key) and not facts.nested
    # with a block for each kind, no class reads the keys outside the blocks
    places = (block,) if facts.nested else (block, config)
    fractions = [(place.name(key), _fraction(place, key)) for place in places]
    if facts.latent:
        _check_latent_fractions(config, fractions, head_dim)
        return head_dim
    widths = [(name, None if f is None else int(head_dim * f)) for name, f in fractions]
    if "rotary_dim" in facts.names:
        widths.append((config.name("rotary_dim"), config.whole("rotary_dim")))
    width = single_value(widths)
    if width is None:
        width = facts.rotary_dim or int(head_dim * (1 if is_null else facts.fraction or 1))
    source = next((name for name, value in widths if value is not None), key)
    if width % 2 or not 2 <= width <= head_dim:
        raise ConfigError(
            f"{source} must leave an even number of rotated coordinates from 2 to {head_dim}, "
            f"got {width}"
        )
    if width != head_dim and not facts.partial:
        raise ConfigError(
            f"{source} asks for {width} of {head_dim} coordinates, but this model type rotates "
            "whole heads; remove it, or describe the embedding with phasor.Rope(...) directly"
        )
    return width


def _fraction(block: Block, key: str) -> float | None:
    value = block.number(key, above=0)
    if value is not None and value > 1:
        block.refuse(key, "a number above 0 and at most 1")
    return value


def _check_latent_fractions(
    config: Block, fractions: list[tuple[str, float | None]], rotated: int
) -> None:
    """Check that fractions of the whole head agree with the width of the rotated slice."""
    unrotated = config.whole("qk_nope_head_dim", least=0) or 0
    for name, fraction in fractions:
        head_dims = {unrotated + rotated, config.whole("head_dim") or 0}
        if fraction not in (None, 1) and all(int(n * fraction) != rotated for n in head_dims):
            raise ConfigError(
                f"{name} says that {fraction:g} of {unrotated + rotated} coordinates turn and "
                f"{config.name('qk_rope_head_dim')} says {rotated}; remove the wrong one"
            )
