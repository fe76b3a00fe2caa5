"""The keys that give a model's own ``config.json`` other ropes, in the style of that file.

transformers 4 reads ``rope_theta`` and ``rope_scaling``, as do programs that read a config by
themselves, and most published files have these keys; transformers 5 reads them too, but writes
``rope_parameters``, which the older programs ignore. `keys_for_file` writes and prints all keys for
transformers: a file in the style of transformers 4 keeps it, and any other gets both styles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from phasor.files import refusal
from phasor.files.configs.facts import NO_FACTS, Architecture, Kind, table
from phasor.files.configs.model_class import read_model_config
from phasor.files.configs.rewrites import BASE_UNITS, WITHOUT_OLD_STYLE
from phasor.files.configs.ropes import huggingface_ropes
from phasor.files.configs.source import JsonObject
from phasor.files.dialects.blocks import (
    BLOCK_DIALECT,
    BLOCK_KEY,
    CONTEXT_KEY,
    config_keys,
    rope_parameters,
    yarn_reach,
)
from phasor.files.dialects.by_reading import Dialect, FaultError, read_as
from phasor.files.dialects.target import Keys
from phasor.layers import LayerRopes
from phasor.rope import Rope
from phasor.scaling import Yarn

_ORIGINAL = "original_max_position_embeddings"
_BASE, _FRACTION = "rope_theta", "partial_rotary_factor"
_LISTS = {"type", "short_factor", "long_factor"}
#: Keys of the block that transformers 4 reads outside of ``rope_scaling``.
_OUTSIDE = (_BASE, _FRACTION, _ORIGINAL)
#: Types whose class of transformers 5 reads ``rope_parameters`` and no other key.
BLOCK_ALONE = frozenset({
    *("beam", "diffusion_gemma_text", "embedding_gemma2_text", "gemma4_text"),
    *("gemma4_unified_text", "laguna", "mellum", "mimo_v2_flash"),
})  # fmt: skip
# of transformers 4: modeling_rope_utils.py of 4.55.4; mlx-lm's classes, of 0.32.2, run in the tests
_OLD_STYLE = "{old}: for transformers 4 and 5, and the classes of mlx-lm that know these keys."
_BOTH_STYLES = (
    "rope_parameters: for transformers 5. {old}: the same for transformers 4 and the classes of "
    "mlx-lm that know these keys."
)
_NEW_STYLE = (
    "rope_parameters: for transformers 5 alone. The keys that transformers 4 and most classes of "
    "mlx-lm read, rope_theta and rope_scaling, cannot express this rotation."
)
_BLOCK_ALONE = (
    "rope_parameters: for transformers 5 alone, whose class of this type ignores rope_theta and "
    "rope_scaling next to it."
)
_NO_FILE = (
    "rope_parameters: for transformers 5 alone. For transformers 4 and most classes of mlx-lm give "
    "the path of the model's config.json: the keys of kinds of layers depend on its type."
)


@dataclass(frozen=True, kw_only=True)
class FileKeys:
    """Keys for a ``config.json``."""

    keys: Mapping[str, Any]  # null for keys that the file must lose
    readers: str  # which programs read them, in a sentence

    @property
    def to_set(self) -> dict[str, Any]:
        """The keys that get a value."""
        return {key: value for key, value in self.keys.items() if value is not None}

    @property
    def to_remove(self) -> tuple[str, ...]:
        """The keys that the file must lose."""
        return tuple(key for key, value in self.keys.items() if value is None)


def keys_for_file(
    ropes: LayerRopes,
    context: int,
    to: int,
    block_of: Callable[[Rope, int], Keys] = rope_parameters,
) -> FileKeys:
    """The keys that give a model's file these ropes for ``to`` tokens, ``context`` of the training.

    A file of transformers 4 keeps its style, ``rope_theta`` and ``rope_scaling``. Any other file
    gets ``rope_parameters``, and also those two keys if they can express the same. The first style
    that reads back as the ropes is used.

    Raises:
        ConfigError: If the format cannot express these ropes.

    >>> from phasor import preset
    >>> written = keys_for_file(preset("llama-2-7b"), 4096, 4096)
    >>> written.keys["rope_theta"], written.keys["rope_parameters"]
    (10000.0, {'rope_type': 'default', 'rope_theta': 10000.0})
    """
    for style in _styles(config_keys(ropes.config_blocks(), context, to, block_of), ropes):
        if all(_is_read_right(style.keys, ropes, versions, context) for versions in style.readings):
            exception = "" if style.readings == ((5,),) else _other_factors(style.keys, ropes)
            return FileKeys(keys=style.keys, readers=style.readers + exception)
    raise refusal("file_cannot", model_type=ropes.in_config.model_type)


@dataclass(frozen=True, kw_only=True)
class _Style:
    """Keys for a model's file, and the versions of transformers that must read them correctly."""

    keys: dict[str, Any]
    readings: tuple[tuple[int, ...], ...]  # versions that read the same keys together
    readers: str  # which programs read the keys, in a sentence


def _styles(keys: Mapping[str, Any], ropes: LayerRopes) -> Iterator[_Style]:
    """The styles of ``keys``, from the one that most programs read to that of transformers 5."""
    file, model_type = ropes.in_config.values, ropes.in_config.model_type
    new = _keys_in_new_style(keys, ropes)
    old = _keys_in_old_style(new, ropes, _class_facts(ropes))
    names = " and ".join(key for key, value in old.items() if value is not None)
    outer_keys = {
        key: value
        for key, value in {**new, **old}.items()
        if key != BLOCK_KEY and (value is not None or file.get(key) is not None)
    }
    if file and not file.get(BLOCK_KEY):
        yield _Style(keys=outer_keys, readings=((4, 5),), readers=_OLD_STYLE.format(old=names))
    # transformers reads rope_scaling as the block too, so the block has to come after it
    both_styles = outer_keys | {BLOCK_KEY: new[BLOCK_KEY]}
    yield _Style(keys=both_styles, readings=((4,), (5,)), readers=_BOTH_STYLES.format(old=names))
    readers = _NEW_STYLE if file or "rope_type" in new[BLOCK_KEY] else _NO_FILE
    if model_type in BLOCK_ALONE:
        readers = _BLOCK_ALONE
    yield _Style(keys=new, readings=((5,),), readers=readers)


def _class_facts(ropes: LayerRopes) -> Architecture:
    """The facts of the class that reads the model's file."""
    return table().huggingface.get(ropes.in_config.model_type, NO_FACTS)


def _is_read_right(
    keys: Mapping[str, Any], ropes: LayerRopes, versions: tuple[int, ...], context: int
) -> bool:
    """Whether the file with these keys describes the ropes, apart from what its class decides."""
    kinds_model = _one_layer_per_kind(ropes)
    return (
        read_as(_class_dialect(kinds_model, versions), dict(keys), kinds_model, context) is not None
    )


def _class_dialect(ropes: LayerRopes, versions: tuple[int, ...]) -> Dialect:
    """How the model's class, in some versions of transformers, reads its file with other keys.

    Without a file, the class is assumed to turn pairs like the model, by its only block. The
    settings are those of `keys_for_file`.
    """
    values, facts = ropes.in_config.values, _class_facts(ropes)

    def read(file: JsonObject) -> LayerRopes:
        keys = {key: value for key, value in file.values.items() if value is not None}
        if 4 in versions:
            _check_old_class(facts, ropes.in_config.model_type)
            _check_old_law(_object(keys, "rope_scaling"))
        if not values:
            return (
                ropes if 5 in versions else replace(ropes, kinds=_read_old_block(file, keys, ropes))
            )
        if 4 in versions:
            keys.pop(BLOCK_KEY, None)
        kinds = _read_file(keys, ropes)
        if 5 in versions and BLOCK_KEY not in keys:
            _check_shared_bases(kinds, ropes, facts)
        return replace(ropes, kinds=kinds)

    def sizes(ropes: LayerRopes, context: int) -> Keys:
        return {**values} or BLOCK_DIALECT.sizes(ropes, context)

    return Dialect(read=read, settings=lambda ropes, context: iter(()), sizes=sizes)


def _check_old_class(facts: Architecture, model_type: str) -> None:
    """Refuse types without a class that reads ``rope_theta`` and ``rope_scaling``."""
    if model_type in BLOCK_ALONE:
        raise FaultError("transformers 4 has no class of this type")
    if facts.rewrite in WITHOUT_OLD_STYLE:
        raise FaultError("the class of this type has other names for these keys")


def _check_old_law(law: Mapping[str, Any]) -> None:
    """Refuse a ``rope_scaling`` that transformers 4 cannot read."""
    word = law.get("rope_type", law.get("type"))
    if word == "proportional" or "short_mscale" in law:
        raise FaultError("transformers 4 has one factor for both lists, and no proportional law")


def _check_shared_bases(
    kinds: Mapping[str, Rope | None], ropes: LayerRopes, facts: Architecture
) -> None:
    """Refuse a ``rope_theta`` that transformers 5 replaces by the base of the class.

    Classes with nested configs replace it in layers without ``rope_scaling``, unless these layers
    have their own key for the base.
    """
    if not facts.nested or not ropes.has_blocks_by_kind:
        return
    for kind, rope in kinds.items():
        kind_facts = facts.kind(ropes.in_config.label(kind))
        is_shared = not kind_facts.scaled and kind_facts.base_key is None
        if is_shared and rope is not None and rope.base != facts.base:
            raise FaultError("transformers 5 takes the base of the class there")


def _read_file(keys: Mapping[str, Any], ropes: LayerRopes) -> Mapping[str, Rope | None]:
    """The ropes that the model's class reads in its file, by kind of layer."""
    config = JsonObject({**keys, "model_type": ropes.in_config.model_type}, strict=False)
    read_kinds = huggingface_ropes(read_model_config(config, part=None, like=None)).kinds
    return {
        kind: _set_class_fields(read_kinds.get(kind), rope) for kind, rope in ropes.kinds.items()
    }


def _read_old_block(
    file: JsonObject, keys: Mapping[str, Any], ropes: LayerRopes
) -> Mapping[str, Rope | None]:
    """The rope that the older keys give to all layers, by kind of layer."""
    if "rope_type" not in keys[BLOCK_KEY]:
        raise FaultError("the older keys for kinds of layers depend on the model's type")
    law = _object(keys, "rope_scaling") or {"rope_type": "default"}
    block = {**law, **{key: keys[key] for key in _OUTSIDE if key in keys}}
    if block == keys[BLOCK_KEY]:  # the block has been read back already
        return ropes.kinds
    (rope,) = BLOCK_DIALECT.read(file.with_values({**file.values, BLOCK_KEY: block})).ropes
    return {kind: kind_rope and rope for kind, kind_rope in ropes.kinds.items()}


def _set_class_fields(rope: Rope | None, expected: Rope | None) -> Rope | None:
    """``rope`` with the fields that a model's class decides taken from ``expected``."""
    if rope is None or expected is None:
        return rope
    fields = ("pairing", "pairing_out", "rotary_start", "direction")
    return replace(rope, **{field: getattr(expected, field) for field in fields})


def _one_layer_per_kind(ropes: LayerRopes) -> LayerRopes:
    """The model with one layer of each kind."""
    kinds = tuple(ropes.kinds)
    return ropes if kinds == ropes.layer_kinds else replace(ropes, layer_kinds=kinds)


def _other_factors(keys: Mapping[str, Any], ropes: LayerRopes) -> str:
    """A sentence if older programs compute another factor from the lengths, else ""."""
    block = _object(keys, "rope_scaling")
    if block.get("type") == "longrope" and not block.keys() <= _LISTS:
        return (
            " But mlx-lm takes the attention factor from the lengths, and transformers 4's class "
            "of Phi-3 refuses more keys than the lists."
        )
    context, laws = keys[CONTEXT_KEY], (rope.scaling for rope in ropes.ropes)
    law = next((law for law in laws if isinstance(law, Yarn) and yarn_reach(law) != context), None)
    if law is None:
        return ""
    return (
        f" But transformers 4 takes YaRN's factor from the lengths, {context} / "
        f"{law.original_max_positions}, not the {law.factor:g} of the block."
    )


# The two styles.


def _keys_in_new_style(keys: Mapping[str, Any], ropes: LayerRopes) -> dict[str, Any]:
    """``keys``, and further keys that override numbers outside the block of the model's own file.

    Such a number becomes that of the new rope, or null.
    """
    file, blocks, context = ropes.in_config.values, keys["rope_parameters"], keys[CONTEXT_KEY]
    facts = _class_facts(ropes)
    # the values of keys outside a block, by meaning; None removes the value. The context before the
    # extension has a value, because transformers does not accept null for it
    new_values: dict[str, Any] = {"context": context, "original": context, "switch": False}
    bases: dict[str, Any] = {}  # the bases of blocks for single kinds, by key
    if "rope_type" in blocks:
        base = blocks[_BASE]
        new_values |= {
            "base": base,
            "base_unit": facts.base and base / facts.base,
            "factor": blocks["factor"] if blocks["rope_type"] == "linear" else 1.0,
            "fraction": blocks.get(_FRACTION, 1.0),
            "original": blocks.get(_ORIGINAL, context),
        }
        blocks = _add_query_factor(blocks, ropes)
    else:
        fractions = {block.get(_FRACTION, 1.0) for block in blocks.values() if block}
        new_values["fraction"] = fractions.pop() if len(fractions) == 1 else None
        for kind, block in blocks.items():
            key, base = facts.kind(kind).base_key or _BASE, block and block[_BASE]
            bases[key] = base if bases.get(key, base) == base else None
        if isinstance(listed := file.get(_BASE), list):  # one for each layer
            layer_blocks = [blocks[ropes.in_config.label(kind)] for kind in ropes.layer_kinds]
            bases[_BASE] = [b and b[_BASE] for b in layer_blocks] + listed[len(layer_blocks) :]
    if "qk_rope_head_dim" in file:  # in latent attention the fraction is for a wider head
        new_values["fraction"] = file.get(_FRACTION)
    replaced = {**table().files["replaced"], **table().files["replaced_by_kind"]}
    # also the bases of single kinds that classes read outside a block, even if the file lacks them
    base_keys = {
        key: base for key, base in bases.items() if "model_type" in file and base is not None
    }
    meanings = {
        key: word for key, word in replaced.items() if {**base_keys, **file}.get(key) is not None
    }
    outer_values = {key: bases.get(key, new_values.get(word)) for key, word in meanings.items()}
    for factor in ropes.query_factors.values():
        if (factor.form, factor.first) == ("steps", 1):  # of Llama 4
            numbers = {"floor_scale": factor.length, "attn_scale": factor.strength}
            tuning = {"attn_temperature_tuning": True, **numbers}
            outer_values |= {key: value for key, value in tuning.items() if file.get(key) != value}
    # transformers reads rope_scaling as the block too, so the block has to come after it
    return outer_values | {**keys, "rope_parameters": blocks}


def _keys_in_old_style(
    new: Mapping[str, Any], ropes: LayerRopes, facts: Architecture
) -> dict[str, Any]:
    """What transformers 4 reads instead of ``rope_parameters``, if it can express the rope."""
    blocks: Mapping[str, Any] = new[BLOCK_KEY]
    kinds_with_blocks = [(Kind(), blocks)]
    if "rope_type" not in blocks:
        kinds_with_blocks = [(facts.kind(label), block) for label, block in blocks.items() if block]
    keys: dict[str, Any] = {}
    for kind, block in kinds_with_blocks:
        keys.setdefault(kind.base_key or _key_in_file(_BASE, ropes, facts), block[_BASE])
    unit_key = BASE_UNITS.get(facts.rewrite or "")
    if unit_key is not None and facts.base is not None:
        keys = {unit_key: keys[_BASE] / facts.base}
    fraction = kinds_with_blocks[0][1].get(_FRACTION)
    if fraction is not None and not _states_width(ropes, facts):
        keys[_FRACTION] = fraction
    law = next((_old_law(block) for kind, block in kinds_with_blocks if kind.scaled), None)
    if law is not None and law["rope_type"] == "longrope":
        return keys | _longrope_in_old_style(law, new[CONTEXT_KEY])
    return keys | {"rope_scaling": law}


def _old_law(block: Mapping[str, Any]) -> dict[str, Any] | None:
    """The block without the keys that transformers 4 reads outside; None if nothing is left."""
    law = {key: value for key, value in block.items() if key not in (_BASE, _FRACTION)}
    return None if law == {"rope_type": "default"} else law


def _longrope_in_old_style(law: Mapping[str, Any], context: int) -> dict[str, Any]:
    """Phi-3's keys: lists inside the block; outside, lengths whose quotient is the factor."""
    original, outer_keys = law[_ORIGINAL], ("rope_type", "factor", _ORIGINAL)
    lists = {"type": "longrope", **{key: law[key] for key in law if key not in outer_keys}}
    if law["factor"] != context / original:
        lists["factor"] = law["factor"]
    return {_ORIGINAL: original, "rope_scaling": lists}


def _key_in_file(key: str, ropes: LayerRopes, facts: Architecture) -> str:
    """The name that this file, or its model type, has for a key."""
    names = facts.names.get(key, (key,))
    return next((name for name in names if name in ropes.in_config.values), names[0])


def _states_width(ropes: LayerRopes, facts: Architecture) -> bool:
    """Whether the file states how much of a head turns, or its class reads no fraction."""
    config = JsonObject(ropes.in_config.values, names=facts.names)
    return config.has(_FRACTION) or config.has("rotary_dim") or facts.rotary_dim is not None


def _add_query_factor(block: Mapping[str, Any], ropes: LayerRopes) -> dict[str, Any]:
    """The block with the factor on queries added, where Ministral 3's class reads it."""
    block = dict(block)
    for factor in ropes.query_factors.values():
        if (factor.form, factor.first) == ("steps", 0):
            block["llama_4_scaling_beta"] = factor.strength
            if block.setdefault(_ORIGINAL, factor.length) != factor.length:
                raise refusal("query_length", key=_ORIGINAL, law=block[_ORIGINAL], q=factor)
    return block


# Keys that are merged into a file's objects.


def keys_over_file(keys: Mapping[str, Any], ropes: LayerRopes) -> dict[str, Any]:
    """``keys`` that override a model's config, for programs that read ``rope_parameters``.

    Nothing of an older block remains, whether the keys replace those of the file or are merged into
    its objects.
    """
    return merged_over(_keys_in_new_style(keys, ropes), ropes)


def merged_over(keys: Mapping[str, Any], ropes: LayerRopes) -> dict[str, Any]:
    """``keys``, and values without effect for the other keys of the file's objects."""
    file = ropes.in_config.values
    old, scaling = _object(file, "rope_parameters"), _object(file, "rope_scaling")
    merged = dict(keys)
    blocks = keys.get("rope_parameters")
    if blocks is not None and "rope_type" in blocks:
        merged["rope_parameters"] = _block_over(blocks, {**scaling, **old})
    elif blocks is not None:
        merged["rope_parameters"] = {
            kind: block and _block_over(block, _object(old, kind)) for kind, block in blocks.items()
        }
    if (law := keys.get("rope_scaling")) is not None:
        block = cast(Mapping[str, Any], blocks or {})
        # rope_scaling has to agree with the block, in numbers that the file has in both places and
        # in those that no longer have an effect
        agreed = {key: block[key] for key in scaling if key in block}
        stale = {key: old[key] for key in old if key not in block} if block else {}
        merged["rope_scaling"] = _block_over({**agreed, **law}, {**scaling, **stale})
    return merged


def _object(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = values.get(key)
    return cast(Mapping[str, Any], value) if isinstance(value, Mapping) else {}


def _block_over(block: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, Any]:
    """The block, and values without effect for keys of laws and axes that only ``old`` has."""
    keys = table().files["block_keys"]
    law_keys = {*keys["names"]}.union(*table().files["law_numbers"].values())
    neutral = {key: keys["neutral"].get(key) for key in old if key in law_keys and key not in block}
    # vLLM refuses a file with two different names for the law
    name = block.get("rope_type", block.get("type"))
    names = {key: name for key in ("rope_type", "type") if key in old or key in block}
    return {**block, **neutral, **names}
