"""Hugging Face ``config.json``, of transformers 5 (``rope_parameters``) and 4 (``rope_scaling``).

What the file says is read from it; what only the model class says comes from ``huggingface.toml``;
what both leave open is asked for; and keys that nothing read are left to `unread_keys`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace

from phasor._checks import shown
from phasor.axes import Axes, Axial, InterleavedSections, OneAxis, Sectioned
from phasor.configs import laws
from phasor.configs.block import Block, renamed_keys, single_value
from phasor.configs.facts import CONTEXTS, SIZES, Architecture, Kind, Variant, table
from phasor.configs.layer_kinds import MOST_LAYERS, Blocks, has_rope, layer_kinds
from phasor.configs.sources import select_config
from phasor.configs.unread_keys import check_unread_keys
from phasor.errors import ConfigError, PhasorWarning
from phasor.layers import InConfig, LayerRopes
from phasor.rope import WIDEST, Rope
from phasor.scaling import Law, Proportional, Rule


def load_huggingface(top: Block, *, part: str | None, like: str | None, strict: bool) -> LayerRopes:
    """The rope of each layer of a Hugging Face config; the arguments are those of `load`."""
    levels, model_type = select_config(top, part, like)
    config, facts = _config(levels[-1], table().huggingface[model_type])
    notes = [facts.note] if facts.note else []
    if like is not None:
        said = levels[-1].text("model_type")
        notes.append(f"Read as model type {like}; the file says {said or 'none'}.")
    if facts.refused is not None:
        raise ConfigError(f"{config.name('model_type')} {model_type!r} here {facts.refused}")
    _assume_sizes(config, facts, model_type, notes)
    blocks = Blocks(config, facts)
    if blocks.assumed:
        notes.append(
            f"The file has no rope_parameters; {dict(facts.block)} is what {model_type} assumes."
        )
    contexts = _contexts(config, notes)
    kinds: dict[str, Rope | None] = {}
    labels: dict[str, str] = {}
    unread: dict[str, Rope] = {}
    if facts.uses is not None:
        count = config.whole("num_hidden_layers", most=MOST_LAYERS) or 1
        kinds_in_order: tuple[str, ...] = ("nope",) * count
        kinds["nope"] = None
        instead = facts.uses.removeprefix("none: ")
        notes.append(f"{model_type} has no rotary embedding; in its place: {instead}.")
    else:
        kinds_in_order = layer_kinds(config, facts)
        widths = widths_apart(config, facts, kinds_in_order)
        for kind in dict.fromkeys(kinds_in_order):
            rotates = has_rope(kind, config, facts)
            kinds[kind] = (
                _rope(config, facts, blocks, kind, widths, contexts, notes) if rotates else None
            )
        for kind, label in facts.labels.items():
            if label not in {*unread, *map(facts.labels.get, kinds)}:
                rope = _rope(config, facts, blocks, kind, widths, contexts, [])
                assert rope is not None, "a class with labels has a block for each"
                unread[label] = rope
        if facts.nested or facts.labels or blocks.by_kind:
            labels = {kind: facts.labels.get(kind, kind) for kind in kinds}
        elif len({rope for rope in kinds.values() if rope is not None}) > 1:
            labels = dict.fromkeys(kinds, "rope_parameters")
    ropes = tuple(rope for rope in kinds.values() if rope is not None)
    notes += check_unread_keys(config, blocks.used, ropes, model_type, strict=strict)
    return LayerRopes(
        name=top.text("_name_or_path") or config.text("_name_or_path") or model_type,
        layer_kinds=kinds_in_order,
        kinds=kinds,
        context=contexts[0][1] if contexts else None,
        query_heads=config.largest("num_attention_heads"),
        # latent attention rotates one key for all heads
        key_heads=1 if facts.latent else config.largest("num_key_value_heads"),
        notes=tuple(dict.fromkeys(notes)),
        in_config=InConfig(labels=labels, unread=unread, fixed=facts.fixed, inside=config.path),
    )


def _config(given: Block, facts: Architecture) -> tuple[Block, Architecture]:
    """The config under the names of its type, and the facts that its switches call for."""
    switches = Block(given.values, given.path)
    switches_read = [variant.key for variant in facts.variants]
    for variant in facts.variants:
        if _variant_applies(variant, switches):
            facts = replace(facts, **variant.facts)
            break
    names = {**SIZES, **facts.names}
    config = Block(given.values, given.path, names=names, nulls=facts.nulls)
    config.ignore(*switches_read)
    return config, facts


def _variant_applies(variant: Variant, config: Block) -> bool:
    if variant.value is None:
        return config.has(variant.key)
    if isinstance(variant.value, bool):
        given: bool | str | int | None = config.flag(variant.key)
    elif isinstance(variant.value, str):
        given = config.text(variant.key)
    else:
        given = config.whole(variant.key, least=0)
    return ((variant.default if given is None else given) == variant.value) != variant.unless


def _assume_sizes(config: Block, facts: Architecture, model_type: str, notes: list[str]) -> None:
    """Put the sizes that the class assumes where the file has none, and say so."""
    wanted = ["num_hidden_layers"]
    width = _width_key(facts)
    if not config.has(width) and (facts.head_dim is None or config.states(width)):
        wanted += ["hidden_size", "num_attention_heads"]
    assumed = {
        key: facts.sizes[key] for key in wanted if key in facts.sizes and not config.states(key)
    }
    if assumed and facts.uses is None:
        sizes = " and ".join(f"{key} {size}" for key, size in assumed.items())
        notes.append(f"The file does not say its size; {sizes} is what {model_type} assumes.")
        warnings.warn(notes[-1], PhasorWarning, stacklevel=4)
    config.assume(assumed)


def _contexts(config: Block, notes: list[str]) -> list[tuple[str, int]]:
    """What each name of the context says; the first counts where nothing is computed from it."""
    said = [(config.name(key), config.whole(key)) for key in CONTEXTS if config.has(key)]
    given = [(name, length) for name, length in said if length is not None]
    if len({length for _, length in given}) > 1:
        listed = ", ".join(f"{name} {length}" for name, length in given)
        notes.append(f"The file gives several contexts ({listed}); the first is taken.")
        warnings.warn(notes[-1], PhasorWarning, stacklevel=4)
    return given


def _rope(
    config: Block,
    facts: Architecture,
    blocks: Blocks,
    kind: str,
    widths: Mapping[str, int],
    contexts: Sequence[tuple[str, int]],
    notes: list[str],
) -> Rope | None:
    block = blocks.of(kind)
    if block is None:
        return None
    apart = facts.kinds.get(facts.labels.get(kind, kind), Kind())
    flat = not blocks.by_kind
    lawful = block if apart.scaled or not flat else Block({}, block.path)
    name = laws.rope_type(lawful, facts)
    head_dim = widths[kind] if kind in widths else head_width(config, facts, apart)
    proportional = name == "proportional"
    if facts.positions:
        # as many pairs for every axis as the head holds; what is left over stays
        width = head_dim // (2 * len(facts.positions)) * 2 * len(facts.positions)
    else:
        width = head_dim if proportional else rotated_width(config, block, facts, head_dim)
    model = laws.Model(
        # what its class puts into one block for all, it leaves out of blocks of single kinds
        architecture=facts if flat else replace(facts, yarn_attention_factor=None),
        rotary_dim=width,
        contexts=tuple(contexts),
        original=_outer_original(config),
    )
    law = laws.scaling(lawful, model)
    if proportional:
        law = _fraction_beside(config, block, law)
    base = _base(config, facts, apart, block, flat=flat, notes=notes)
    if facts.fixed and (law is not None or base != facts.base):
        raise ConfigError(
            f"{block.path or 'the config'} asks for the {'base' if law is None else 'law'} "
            f"{shown(base if law is None else name)}, and transformers turns this model type by "
            f"the plain powers of {facts.base:g} whatever its config says; remove it, or describe "
            "the embedding with phasor.Rope(...) directly"
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
    """The rope of a tower that turns patches of images: its pairs shared among the axes."""
    axes, each = len(facts.positions), rope.num_pairs // len(facts.positions)
    where = f", counted from {facts.origin}" if facts.origin else ""
    notes.append(f"Positions are ({', '.join(facts.positions)}) of a patch{where}.")
    if rope.scaling is not None:
        raise ConfigError(f"no rope of patches takes the law {shown(rope.scaling)}; remove it")
    if facts.axes == "axial":
        return replace(rope, axes=Axial((each,) * axes))
    base, pairs = rope.base or 1.0, range(rope.num_pairs)
    if facts.axes == "dealt":
        inv_freq = tuple(base ** -(pair // axes / each) for pair in pairs)
        layout: Axes = InterleavedSections((each,) * axes)
    else:
        # axis after axis, each with every other frequency of one spectrum
        order = [pair for axis in range(axes) for pair in pairs[axis::axes]]
        inv_freq = tuple(base ** -(pair / rope.num_pairs) for pair in order)
        layout = Sectioned((each,) * axes)
    return replace(rope, base=None, explicit_inv_freq=inv_freq, axes=layout)


def _outer_original(config: Block) -> tuple[str, int | None]:
    key = "original_max_position_embeddings"
    return config.name(key), config.whole(key)


def _fraction_beside(config: Block, block: Block, law: Law | Rule | None) -> Law | Rule | None:
    """The law with the fraction that may stand outside the block of a proportional rope."""
    key = "partial_rotary_factor"
    outside = config.number(key, least=0)
    inside = block.number(key, least=0)
    fraction = single_value([(block.name(key), inside), (config.name(key), outside)])
    if inside is not None or fraction is None or not isinstance(law, Proportional):
        return law
    with renamed_keys(config, {"fraction": key}):
        return Proportional(fraction=fraction, factor=law.factor)


def _base(
    config: Block, facts: Architecture, apart: Kind, block: Block, *, flat: bool, notes: list[str]
) -> float:
    inside = (block.name("rope_theta"), block.number("rope_theta", above=1))
    key = apart.base_key or "rope_theta"
    beside = [(config.name(key), config.number(key, above=1))]
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
    base = single_value([inside, *beside])
    if base is not None:
        return base
    default = facts.base if apart.base is None else apart.base
    if default is None:
        raise ConfigError(
            f"{block.name('rope_theta')} is absent and this model type has no default; add it"
        )
    notes.append(
        f"The file has no {config.name(key)}; {default:g} is the class default of this model type."
    )
    return default


def _width_key(facts: Architecture) -> str:
    return "qk_rope_head_dim" if facts.latent else "head_dim"


def head_width(config: Block, facts: Architecture, apart: Kind) -> int:
    """Width of the part of a head that the model's rotation is given."""
    key, default = _width_key(facts), facts.head_dim
    if apart.head_dim_key is not None:
        key, default = apart.head_dim_key, apart.head_dim
    given = config.whole(key, least=2, most=WIDEST)
    if given is not None:
        return given
    # the class default is for a file without the key: a null overrides it
    if default is not None and not config.states(key):
        return default
    hidden, heads = config.whole("hidden_size"), config.whole("num_attention_heads")
    if hidden is None or heads is None:
        raise ConfigError(
            f"{config.name(key)} is absent and cannot be derived; add it, or both hidden_size and "
            "num_attention_heads"
        )
    if hidden % heads or not 2 <= hidden // heads <= WIDEST:
        raise ConfigError(
            f"{config.name(key)} is absent, and hidden_size / num_attention_heads "
            f"({hidden} / {heads}) must be a whole number from 2 to {WIDEST}; add it"
        )
    return hidden // heads


def widths_apart(config: Block, facts: Architecture, kinds: Sequence[str]) -> dict[str, int]:
    """Head widths by kind of layer, in files whose ``per_layer_config`` sets single layers apart.

    Raises:
        ConfigError: If layers of one kind have heads of several widths.
    """
    name = "per_layer_config"
    single = config.block(name)
    if single is None or not single.values:
        return {}
    # "05" is layer 5; a dictionary that was never a file may hold the number itself
    if any(not str(key).isdecimal() or int(key) >= len(kinds) for key in single.values):
        config.refuse(name, f"an object from numbers below {len(kinds)} to what those layers say")
    single = Block({str(key): value for key, value in single.values.items()}, single.path)
    own = _width_key(facts)
    said: dict[int, int | None] = {}
    for key in single.values:
        layer = single.block(key) or Block({}, single.name(key))
        for stray in layer.values:
            if ("rope" in stray and stray != own) or "rotary" in stray:
                layer.refuse(stray, "in the block of a kind of layer, not of a single one")
        said[int(key)] = layer.whole(own, least=2, most=WIDEST)
    # what the class takes for a kind of layer is, in such a file, written at its layers
    usual = head_width(config, facts, Kind())
    found: dict[str, int] = {}
    for kind in dict.fromkeys(kinds):
        widths = {said.get(i) or usual for i, one in enumerate(kinds) if one == kind}
        if len(widths) > 1:
            raise ConfigError(
                f"{config.name(name)} gives layers of the kind {kind!r} heads of different widths "
                f"({', '.join(map(str, sorted(widths)))}); give those layers a kind of their own "
                "in layer_types"
            )
        apart = facts.kinds.get(facts.labels.get(kind, kind), Kind()).head_dim_key
        beside = None if apart is None else config.whole(apart, least=2, most=WIDEST)
        here = f"{config.name(name)} at layers of the kind {kind!r}"
        single_value([(here, width := widths.pop()), (str(apart), beside)])
        found[kind] = width
    return found


def rotated_width(config: Block, block: Block, facts: Architecture, head_dim: int) -> int:
    """Coordinates that turn, on which every key about them must agree."""
    key = "partial_rotary_factor"
    stated_null = config.states(key) and not config.has(key) and not facts.nested
    if facts.fraction is not None and stated_null:
        # transformers takes a null for no fraction at all, not for the class default
        facts = replace(facts, fraction=None)
    # what stands beside blocks of single kinds, no class reads
    places = (block,) if facts.nested else (block, config)
    fractions = [(each.name(key), _fraction(each, key)) for each in places]
    if facts.latent:
        _agree_with_latent(config, fractions, head_dim)
        return head_dim
    said = [(name, None if f is None else int(head_dim * f)) for name, f in fractions]
    if "rotary_dim" in facts.names:
        said.append((config.name("rotary_dim"), config.whole("rotary_dim")))
    width = single_value(said)
    if width is None:
        width = facts.rotary_dim
    if width is None:
        width = head_dim if facts.fraction is None else int(head_dim * facts.fraction)
    source = next((name for name, value in said if value is not None), "partial_rotary_factor")
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


def _agree_with_latent(
    config: Block, fractions: list[tuple[str, float | None]], rotated: int
) -> None:
    """In latent attention the rotated part is a slice of its own; a fraction is of the whole."""
    still = config.whole("qk_nope_head_dim", least=0) or 0
    for name, fraction in fractions:
        whole = {still + rotated, config.whole("head_dim") or 0}
        if fraction not in (None, 1) and all(int(one * fraction) != rotated for one in whole):
            raise ConfigError(
                f"{name} says that {fraction:g} of {still + rotated} coordinates turn and "
                f"{config.name('qk_rope_head_dim')} says {rotated}; remove the wrong one"
            )
