"""The second stage: how the class of a model reads a Hugging Face config, as a `ModelConfig`.

The config of the part to load is selected, and its model type looked up in ``huggingface.toml``.
Then keys get the names that the class reads, absent sizes get the values that the class assumes,
and each layer gets a kind, from a list in the file or from the pattern of the class.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise
from typing import cast

from phasor.errors import PhasorWarning
from phasor.files import refusal
from phasor.files.configs.facts import NO_PART, Architecture, Variant, table
from phasor.files.configs.layer_pattern import rule_kinds
from phasor.files.configs.rewrites import REWRITES
from phasor.files.configs.rope_blocks import RopeBlocks, doubt, normalize
from phasor.files.configs.source import JsonObject
from phasor.files.configs.unread_keys import objects_inside

#: Model types with learned frequencies, and the names of the tensors whose exp multiplies them.
LEARNED: Mapping[str, tuple[str, ...]] = {
    "mistral_large4_text": ("rotary_emb.alpha", "lerope.alpha"),
}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A config as the class of its model type reads it."""

    levels: Sequence[JsonObject]  # from the top of the file to the part, the innermost last
    model_type: str  # the type whose class reads the config
    states_type: bool  # whether the file names that type itself
    config: JsonObject  # the part; its keys have the names that the class reads
    facts: Architecture  # of the class, for the switches of the file
    assumed_sizes: Mapping[str, int]  # sizes that the file does not state and the class assumes
    blocks: RopeBlocks
    layer_kinds: tuple[str, ...]  # the kind of each layer; nope if the class never rotates
    context: int | None


def read_model_config(top: JsonObject, *, part: str | None, like: str | None) -> ModelConfig:
    """How the model's class reads a file; the arguments are those of `load`."""
    levels, model_type = select_config(top, part, like)
    config, facts = _select_facts(levels[-1], table().huggingface[model_type])
    notes = config.notes
    for outer in levels[:-1]:
        keys = [outer.name(key) for key in _ROPE_KEYS if outer.has(key)]
        if keys and (turned_parts := _outer_ropes(outer)) is not None:
            notes.append(f"{' and '.join(keys)} outside {config.path} turns {turned_parts}.")
    file_type = type_in_file(levels)
    if like is not None:
        notes.append(f"Read as model type {like}; the file says {file_type or 'none'}.")
    elif file_type is None:
        notes.append(f"The file has no model_type; its architectures are those of {model_type}.")
    weights = [] if top.folder is None else [*top.folder.glob("*.safetensors")]
    if facts.refused is not None and not (model_type in LEARNED and weights):
        reason = facts.refused
        if reason == NO_PART:
            reason = (
                f"{reason}; {_ways_out(top, part, None) or 'give the config of its language model'}"
            )
        raise refusal("type_unread", key=config.name("model_type"), name=model_type, why=reason)
    assumed_sizes = _assumed_sizes(config, facts)
    config = config.with_defaults(assumed_sizes)
    if facts.rewrite is not None:
        config = REWRITES[facts.rewrite](config)
    blocks = RopeBlocks(config, facts)
    if blocks.assumed:
        source = f"{dict(facts.block)} is what {model_type} assumes"
        notes.append(f"The file has no rope_parameters; {source}.")
    context = _context(config)
    if facts.other_positions is None or (facts.query_factor and config.has("num_hidden_layers")):
        kinds = layer_kinds(config, facts)
    else:
        kinds = ("nope",) * (config.layers() if config.has("num_hidden_layers") else 1)
    return ModelConfig(
        levels=levels,
        model_type=model_type,
        states_type=like is None and file_type is not None,
        config=config,
        facts=facts,
        assumed_sizes=assumed_sizes,
        blocks=blocks,
        layer_kinds=kinds,
        context=context,
    )


# Which config of the file, and of which model type.


def language_models(top: JsonObject) -> list[JsonObject]:
    """``top`` and each config inside it that describes its language model, the innermost last."""
    levels, files = [top], table().files
    while inner := (
        [key for key in files["language_models"] if levels[-1].has(key)]
        or [key for key in files["speech_models"] if levels[-1].has(key)]
    ):
        outer = levels[-1]
        if len(inner) > 1:
            first, second = map(outer.name, inner[:2])
            raise refusal("two_language_models", first=first, second=second, part=inner[0])
        levels.append(cast(JsonObject, outer.object(inner[0])))
    return levels


def select_config(
    top: JsonObject, part: str | None, like: str | None
) -> tuple[list[JsonObject], str]:
    """The configs from the top to the part, the innermost last, and the type that reads it."""
    levels = language_models(top) if part is None else _path_to_part(top, part)
    for outer, inner in pairwise(levels) if part is None else ():
        _check_same_ropes(outer, inner)
    types, name, config = table().huggingface, type_in_file(levels), levels[-1]
    if like is not None and like not in types:
        raise refusal("like", like=like)
    proposed = _type_of_architectures(config)
    model_type = like or name or proposed
    if model_type is not None and model_type in types:
        return levels, model_type
    for level in levels:
        for file in table().files["foreign_files"]:
            if all(map(level.has, file["keys"])):
                raise refusal("foreign_file", what=file["is"].format_map(level.values))
    key, direct_way = config.name("model_type"), "describe its embedding with phasor.Rope(...)"
    hint = _ways_out(top, part, proposed)
    ways_out = direct_way if hint is None else f"{hint}; or {direct_way}"
    if name is not None:
        if hint is None:
            call = "name the known type whose attention its code has, load(..., like=...)"
            ways_out = f"{call}, on the command line --like; or {direct_way}"
        raise refusal("model_type", key=key, name=name, ways_out=ways_out)
    sizes = JsonObject(config.values, names=table().files["names"])
    has_sizes = all(map(sizes.has, ("num_hidden_layers", "hidden_size", "num_attention_heads")))
    if has_sizes or hint is not None:
        raise refusal("no_model_type", key=key, ways_out=ways_out)
    raise refusal("no_model", key=key, ways_out=ways_out)


def _ways_out(top: JsonObject, part: str | None, proposed: str | None) -> str | None:
    """How a file of an unknown type can be read: by a config inside it, or as another type."""
    if part is None and (inner := _known_inner_config(top)) is not None:
        call = f"load(..., part={inner!r}), on the command line --part {inner}"
        return f"read the {inner} inside: {call}"
    if proposed is None:
        return None
    text = f"its architectures are those of {proposed}, as which load(..., like={proposed!r}), "
    condition = ", if its own code (auto_map) rotates as that does" if top.has("auto_map") else ""
    return f"{text}on the command line --like {proposed}, reads it{condition}"


def _type_of_architectures(config: JsonObject) -> str | None:
    """The known type whose classes the file names, if the file has the sizes that it reads."""
    architectures = config.values.get("architectures")
    names = cast("list[object]", architectures) if isinstance(architectures, (list, tuple)) else []
    types_by_stem = _types_by_stem()
    for name in names:
        stem = re.sub(r"(For[A-Z]\w{0,80}|LMHeadModel|Model)$", "", str(name)).lower()
        if stem in types_by_stem and _states_sizes(
            config, table().huggingface[types_by_stem[stem]]
        ):
            return types_by_stem[stem]
    return None


@lru_cache(maxsize=1)
def _types_by_stem() -> Mapping[str, str]:
    """The known types by the stem of their classes' names, in small letters: ``gptneox``."""
    # sorted, so that "emu3" replaces "Emu3"
    return {re.sub("[_-]", "", name).lower(): name for name in sorted(table().huggingface)}


def _known_inner_config(top: JsonObject) -> str | None:
    """The key of the one config inside the file that has a known type and sizes."""
    keys = _known_configs_inside(top)
    return keys[0] if len(keys) == 1 else None


def _known_configs_inside(outer: JsonObject, depth: int = 3) -> list[str]:
    """The keys of the configs with a known type and sizes, at any depth but inside one another."""
    pattern, keys = table().files["other_models"], list[str]()
    for inner in outer.unread_objects() if depth else ():
        if re.search(pattern, inner.path):
            continue
        facts = table().huggingface.get(str(inner.values.get("model_type")))
        if facts is not None and _states_sizes(inner, facts):
            keys.append(inner.path)
        else:
            keys += _known_configs_inside(inner, depth - 1)
    return keys


def _states_sizes(config: JsonObject, facts: Architecture) -> bool:
    """Whether a file states the sizes that ropes need: layers, and the width of a head."""
    has = JsonObject(config.values, names=facts.names).has
    widths = [facts.width_key] if facts.latent else ["hidden_size", "num_attention_heads"]
    has_sizes = has("num_hidden_layers") and (has(facts.width_key) or all(map(has, widths)))
    return facts.other_positions is None and facts.refused is None and has_sizes


def _path_to_part(top: JsonObject, part: str) -> list[JsonObject]:
    levels = [top]
    for key in part.split("."):
        if not isinstance(levels[-1].values.get(key), Mapping):
            inner = [k for k, v in levels[-1].values.items() if isinstance(v, Mapping)]
            raise refusal("part", inner_keys=", ".join(inner) or "it holds none", part=part)
        levels.append(cast(JsonObject, levels[-1].object(key)))
    return levels


def type_in_file(levels: list[JsonObject]) -> str | None:
    """The innermost config's type: its own, the one its outer class implies, or the outer one."""
    model_type: str | None = None
    for level in levels:
        outer = table().parts.get(model_type or "", {})
        implied_type = outer.get(level.path.rpartition(".")[2])
        # keys that only one program writes
        marks = table().files["marks"].items()
        marked = (name for name, keys in marks if all(map(level.has, keys)))
        file_type = level.text("model_type") or next(marked, None)
        # transformers also saves the type of the whole model in the configs of its parts
        is_implied = implied_type is not None and file_type in (None, model_type)
        model_type = implied_type if is_implied else file_type or model_type
    return model_type


_ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")


def _check_same_ropes(outer: JsonObject, inner: JsonObject) -> None:
    for key in () if _outer_ropes(outer) else _ROPE_KEYS:
        if outer.has(key) and normalize(outer.values.get(key)) != normalize(inner.values.get(key)):
            raise refusal("inner_differs", outer=outer.name(key), inner=inner.name(key))


def _outer_ropes(outer: JsonObject) -> str | None:
    """The parts that a class rotates by rope keys outside the config of its language model."""
    return table().outer_ropes.get(str(outer.values.get("model_type")))


# The facts of the class.


def facts_for(config: JsonObject, facts: Architecture) -> Architecture:
    """The facts, merged with those of the first variant that applies to the file."""
    variant = next((variant for variant in facts.variants if _applies(variant, config)), None)
    return facts if variant is None else replace(facts, **variant.facts)


def _applies(variant: Variant, config: JsonObject) -> bool:
    """Whether the variant's switch has its value in the file."""
    if variant.value is None:
        return config.has(variant.key)
    listed = config.values.get(variant.key)
    if isinstance(listed, (list, tuple)):  # of architectures
        return variant.value in listed
    whole = partial(config.whole, least=0)
    readers = {bool: config.flag, str: config.text, int: whole, float: config.number}
    value = readers[type(variant.value)](variant.key)
    return ((variant.default if value is None else value) == variant.value) != variant.unless


def _select_facts(block: JsonObject, facts: Architecture) -> tuple[JsonObject, Architecture]:
    """The config with the key names of its model type, and the facts for its switches."""
    plain, values, switches = JsonObject(block.values, block.path), block.values, facts.variants
    facts = facts_for(plain, facts)
    names: dict[str, Sequence[str]] = {**facts.names}
    swapping_key = "rope_traditional of MLX" if values.get("rope_traditional") is True else None
    if block.path.partition(".")[0] == "model_config":  # of MLC
        mlc_names = table().files["mlc_names"]
        # MLC writes 0 and -1 for an absent number
        values = {
            k: v for k, v in values.items() if k not in mlc_names.values() or v not in (0, -1)
        }
        names |= {key: (*names.get(key, (key,)), name) for key, name in mlc_names.items()}
        facts = replace(facts, laws={**facts.laws, "gptj": "default"})
        if plain.has("rope_scaling") and plain.text("rope_scaling.rope_type") == "gptj":
            swapping_key = "rope_type gptj of MLC"
    config = JsonObject(values, block.path, names=names, strict=block.strict)
    config.ignore(*(switch.key for switch in switches))
    if facts.pairing == "half" and swapping_key is not None:
        config.ignore("rope_traditional")
        reason = f"as {swapping_key} says; transformers silently rotates halves."
        note = " ".join(filter(None, (facts.note, f"Pairs are interleaved, {reason}")))
        facts = replace(facts, pairing="interleaved", note=note)
    config.notes += [facts.note] if facts.note else []
    return config, facts


def _assumed_sizes(config: JsonObject, facts: Architecture) -> dict[str, int]:
    """The class's default sizes where the file has none."""
    needed = ["num_hidden_layers"]
    width = facts.width_key
    if not config.has(width) and (facts.head_dim is None or config.contains(width)):
        needed += ["hidden_size", "num_attention_heads"]
    absent = [key for key in needed if key in facts.sizes and not config.contains(key)]
    return {key: facts.sizes[key] for key in absent}


def note_assumed_sizes(model: ModelConfig) -> str:
    """The note about sizes that the class assumes; call it after all known keys were read.

    Refused if the file has a size, or an object that may hold one, where nothing reads it; also if
    it does not state its type, because the sizes may then belong to another model.
    """
    config, name, assumed = model.config, model.model_type, model.assumed_sizes
    if not model.states_type:
        raise refusal("no_size", size=config.name(next(iter(assumed))), model_type=name)
    expected_objects = {*table().parts.get(name, {}), *table().files["other_objects"]}
    for inner in config.unread_objects():
        if inner.path.rpartition(".")[2] not in expected_objects and not inner.has("model_type"):
            hint = f", or load it alone, with its model_type in it: load(..., part={inner.path!r})"
            raise refusal("size_elsewhere", found=inner.path, model_type=name, alone=hint)
    for level in (*model.levels[:-1], config):
        for block in (level, *objects_inside(level)):
            for key, value in block.unread().items():
                if type(value) in (int, float) and re.fullmatch(table().files["sizes"], key):
                    path = block.path_of(key)
                    raise refusal("size_elsewhere", found=path, model_type=name, alone="")
    sizes = " and ".join(f"{key} {size}" for key, size in assumed.items())
    note = f"The file does not say its size; {sizes} is what {name} assumes."
    warnings.warn(note, PhasorWarning, stacklevel=4)
    return note


def _context(config: JsonObject) -> int | None:
    """The first context of the file; `LawContext.context` refuses several that disagree."""
    keys = [key for key in table().files["contexts"] if config.has(key)]
    contexts = {config.name(key): config.whole(key) for key in keys}
    if len(set(contexts.values())) > 1:
        listed = ", ".join(f"{name} {length}" for name, length in contexts.items())
        note = f"The file gives several contexts ({listed}); the first is used."
        doubt(config, note)
    return next(iter(contexts.values()), None)


# The kind of every layer.


def layer_kinds(config: JsonObject, facts: Architecture) -> tuple[str, ...]:
    """One kind per layer: the file's names for them, else ``rope`` and ``nope``."""
    rule, files, count = facts.layers, table().files, config.layers()
    is_about_masks = rule is not None and rule.is_about_masks
    key = "layers_block_type" if config.has("layers_block_type") else "layer_types"
    if is_about_masks:
        config.ignore("layer_types")
    kinds = None if is_about_masks or (rule and rule.blocks_key) else config.texts(key)
    if kinds is None:
        return rule_kinds(config, rule, count)
    if len(kinds) != count:
        raise refusal("kinds", key=config.name(key), count=count, got=len(kinds))
    words = {*facts.labels, *files["without_rope"], *(rule.words if rule else ())}
    # a special kind needs its own name, because its facts are under that name
    if not (facts.without_rope or facts.kinds):
        words |= {*files["layer_words"]}
    for i, word in enumerate(kinds):
        if word not in words:
            listed = ", ".join(sorted(words))
            raise refusal("layer_kind", key=config.name(key), i=i, known=listed, word=word)
    return kinds


def has_rope(kind: str, facts: Architecture) -> bool:
    """Whether layers of this kind rotate at all."""
    if kind in table().files["without_rope"]:
        return False
    return kind not in facts.without_rope
