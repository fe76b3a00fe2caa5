"""GGUF: metadata and tensors of the rope that llama.cpp runs, with what its architectures imply."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any

from phasor._checks import letters_and_numbers
from phasor.axes import Axes, InterleavedSections, OneAxis, Sectioned
from phasor.files import refusal
from phasor.files.configs.facts import Architecture, architectures, read_table
from phasor.files.configs.layer_pattern import flag_pattern, rule_kinds
from phasor.files.configs.model_class import facts_for, has_rope
from phasor.files.configs.rope_blocks import query_factors
from phasor.files.configs.ropes import layer_ropes
from phasor.files.configs.source import JsonObject, renamed_keys, single_value
from phasor.files.dialects.blocks import class_facts, class_sizes, decided_by_class, keys_of_file
from phasor.files.dialects.by_reading import Dialect, FaultError, settings_for_rope
from phasor.files.dialects.target import Keys, Target, base_and_divisors, yarn_ramp
from phasor.layers import LayerRopes, one_layer
from phasor.rope import Rope
from phasor.scaling import NTK, Law, Linear, LongRope, PerPair, Rule, Yarn, yarn_multiplier

FREQS = "rope_freqs.weight"
_SHORT, _LONG = "rope_factors_short.weight", "rope_factors_long.weight"
#: Tensors with divisors of the frequencies.
DIVISOR_TENSORS = FREQS, _SHORT, _LONG
BASE_KEY, WIDTH_KEY = "rope.freq_base", "rope.dimension_count"
SECTIONS_KEY = "rope.dimension_sections"
ORIGINAL_KEY, GAIN_KEY = "rope.scaling.original_context_length", "rope.scaling.attn_factor"
LOG_MULTIPLIER_KEY = "rope.scaling.yarn_log_multiplier"
_PATTERN_KEY = "attention.sliding_window_pattern"
# keys for which 0 means none; architectures without attention have no heads
_ZERO_IS_NONE = ("attention.sliding_window", "attention.head_count", "attention.head_count_kv")
_WINDOWED = ("sliding_attention", "chunked_attention")
BASE = 10_000.0  # llama.cpp's default


# Reading.


@lru_cache(maxsize=1)
def _tables() -> Mapping[str, Any]:
    return MappingProxyType(read_table("gguf.toml", "phasor.files.dialects"))


@lru_cache(maxsize=1)
def architecture_facts() -> Mapping[str, Architecture]:
    """The facts that llama.cpp implies, by ``general.architecture``."""
    return architectures(_tables()["architectures"], {})


def read(top: JsonObject) -> LayerRopes | None:
    """The rope of each layer of a model; None if the file is not GGUF."""
    if (name := top.text("general.architecture")) is None:
        return None
    if (facts := architecture_facts().get(name)) is None:
        expected = (
            "one that phasor knows, such as gguf.MODEL_ARCH_NAMES lists (else load the model's "
        )
        way_out = "config.json, or describe its embedding with phasor.Rope(...))"
        top.refuse("general.architecture", expected + way_out)
    return _read_as(top, name, facts)


def _read_as(top: JsonObject, name: str, facts: Architecture) -> LayerRopes:
    """The rope of each layer of an architecture with these facts."""
    config, facts = _select_facts(top, name, facts)
    layer_kinds = _kinds_in_order(config, facts, config.layers())
    kinds = {kind: _rope(top, config, facts, kind) for kind in dict.fromkeys(layer_kinds)}
    if facts.other_positions is not None:
        config.notes.append(f"{name} has no rotary embedding; instead: {facts.other_positions}.")
    return layer_ropes(
        config,
        kinds,
        layer_kinds,
        f"a GGUF file of architecture {name!r}",
        facts=facts,
        ignoring_program="llama.cpp",
        read_heads=JsonObject.largest,
        name=top.text("general.name") or name,
        context=config.whole("context_length"),
        query_factors=query_factors(facts.query_factor, config, kinds),
    )


def architecture_of(name: str) -> str | None:
    """The architecture of llama.cpp for a model, by its type or the name of its preset."""
    words, begins = letters_and_numbers(name), _converted()
    longest_first = (words[:count] for count in range(len(words), 0, -1))
    return next((begins[start] or None for start in longest_first if start in begins), None)


@lru_cache(maxsize=1)
def _converted() -> Mapping[tuple[str, ...], str]:
    """llama.cpp's architectures, by the words that the model types they are for begin with."""
    return {tuple(words.split()): name for words, name in _tables()["converted"].items()}


def _select_facts(
    top: JsonObject, name: str, facts: Architecture
) -> tuple[JsonObject, Architecture]:
    """The architecture's keys, and its facts for this file's switches."""
    start = f"{name}."
    values = {k.removeprefix(start): v for k, v in top.values.items() if k.startswith(start)}
    facts = facts_for(JsonObject(values, name), facts)
    if facts.refused is not None:
        raise refusal("architecture_refused", name=name, why=facts.refused)
    values = {k: v for k, v in values.items() if v != 0 or k not in _ZERO_IS_NONE}
    if isinstance(values.get(_PATTERN_KEY), (list, tuple)) and not _lists_windows(facts):
        del values[_PATTERN_KEY]  # llama.cpp reads a number here, and ignores lists
    config = JsonObject(values, name, names=_tables()["names"], strict=top.strict)
    config.notes += [facts.note] if facts.note else []
    # for a list with one number per layer, the largest is read
    heads = {"attention.head_count": config.largest("num_attention_heads")}
    config = config.with_values({**values, **heads})
    if facts.rewrite is not None:
        config = _REWRITES[facts.rewrite](config, top)
    # converters also write these keys where nothing uses them
    config.ignore("attention.max_alibi_bias", "rope.scaling.finetuned", ORIGINAL_KEY)
    for key, value in values.items():
        # ignore a key for layers with a window that repeats the one for all layers, and keys that
        # confirm that nothing rotates
        is_same = key.endswith("_swa") and value == values.get(key.removesuffix("_swa"))
        if is_same or (facts.other_positions is not None and value in (0, 1, "none")):
            config.ignore(key)
    return config, facts


def _log_multiplier(config: JsonObject, top: JsonObject) -> JsonObject:
    """Multiply YaRN's log multiplier by ten: DeepSeek's architectures count it in tenths."""
    if config.values.get("rope.scaling.type") != "yarn":
        return config
    multiplier = config.number(LOG_MULTIPLIER_KEY, least=0)
    if multiplier is None:
        return config
    return config.with_values({**config.values, LOG_MULTIPLIER_KEY: multiplier / 0.1})


def _add_divisors(config: JsonObject, top: JsonObject) -> JsonObject:
    """Refuse Gemma 4 without the tensor that has the divisors of its full layers."""
    has_law = config.values.get("rope.scaling.type") in ("yarn", "longrope")
    if not has_law and not any(map(top.has, (FREQS, _SHORT, _LONG))):
        raise refusal("gguf_divisors", tensor=FREQS, path=config.path)
    return config


#: By the ``rewrite`` of an architecture, a function of its keys and the whole file.
_REWRITES: Mapping[str, Callable[[JsonObject, JsonObject], JsonObject]] = {
    "divisors": _add_divisors,
    "log_multiplier": _log_multiplier,
}


def _lists_windows(facts: Architecture) -> bool:
    """Whether files list which layers have a window."""
    return facts.layers is not None and facts.layers.listed


def _kinds_in_order(config: JsonObject, facts: Architecture, count: int) -> tuple[str, ...]:
    """The kind of each layer; a layer without key heads has no attention and no rope."""
    if facts.other_positions is not None:
        return ("nope",) * count
    rule = facts.layers
    if rule is not None and rule.listed:
        windowed = config.require(_PATTERN_KEY, config.items(_PATTERN_KEY))
        kinds = flag_pattern(config, _PATTERN_KEY, windowed, count).kinds(rule.miss, rule.hit)
    else:
        kinds = rule_kinds(config, rule, count)
    key = "attention.head_count_kv"
    listed = isinstance(config.values.get(key), (list, tuple))
    heads = config.wholes(key) or () if listed else (config.whole(key),)
    if len(heads) == 1:
        return kinds
    if len(heads) != count:
        config.refuse(key, f"one number, or one for each of the {count} layers")
    return tuple(kind if n else "nope" for kind, n in zip(kinds, heads, strict=True))


def _key(config: JsonObject, kind: str, key: str) -> str:
    """``key``, or the key that layers with a sliding window may have instead."""
    windowed_key = f"{key}_swa"
    return windowed_key if kind in _WINDOWED and config.has(windowed_key) else key


def _rope(top: JsonObject, config: JsonObject, facts: Architecture, kind: str) -> Rope | None:
    if not has_rope(kind, facts):
        return None
    special = facts.kind(kind)
    width_key = _key(config, kind, WIDTH_KEY)
    # even a single kind may have its own key; an architecture with fixed widths turns whole heads
    config.ignore(BASE_KEY, WIDTH_KEY)
    width = None if facts.fixed else config.width(width_key)
    if facts.latent:
        head_dim = config.require(width_key, width)
    else:
        head_dim = config.head_dim(_key(config, kind, "attention.key_length"))
    width = width or head_dim
    pairs = width // 2
    if facts.fraction is not None and kind not in _WINDOWED:
        width = int(width * facts.fraction)
    if width % 2 or width > head_dim:
        config.refuse(width_key, f"an even number of coordinates, at most {head_dim}")
    key = special.base_key or _key(config, kind, BASE_KEY)
    base = config.or_default(key, config.number(key, above=1), BASE, "llama.cpp's default")
    # some kinds of layer ignore the scaling keys
    law = _read_scaling(top, config, facts, pairs) if special.scaled else None
    if isinstance(law, PerPair) and width < 2 * pairs:
        law = replace(law, factors=law.factors[: width // 2])
    if facts.fixed and (law is not None or base != BASE):
        facts_of_file = {"key": config.name(key), "base": base, "law": law}
        raise refusal("gguf_fixed", path=config.path, usual=BASE, **facts_of_file)
    with renamed_keys(config, base=key, rotary_dim=width_key, sections=SECTIONS_KEY):
        rope = Rope(
            head_dim=head_dim,
            pairing=facts.pairing,
            base=base,
            rotary_dim=width,
            scaling=law,
            axes=_axes(config, facts, width // 2),
            direction=top.sign(FREQS if isinstance(law, PerPair) else _SHORT) if law else 1,
        )
    if _has_other_ramp(rope):
        config.notes.append(f"{_OTHER_RAMP}.")
    return rope


# ggml_rope_yarn_corr_dims clips the ramp to the head, where it may end before it begins
_OTHER_RAMP = "In a head this narrow llama.cpp's YaRN ramp is not the law's"


def _has_other_ramp(rope: Rope) -> bool:
    """Whether llama.cpp's YaRN ramp differs from the law's."""
    law = rope.scaling
    return isinstance(law, Yarn) and law.truncate and yarn_ramp(rope) is None


def _axes(config: JsonObject, facts: Architecture, num_pairs: int) -> Axes:
    if facts.axes is None:
        return OneAxis()
    sections = config.require(SECTIONS_KEY, config.wholes(SECTIONS_KEY))
    while len(sections) > 3 and not sections[-1]:
        sections = sections[:-1]  # few models have a fourth axis
    if facts.axes.layout == "sectioned":
        return Sectioned(sections)
    axis_of_pair = InterleavedSections(sections).axis_of_pair(num_pairs)
    if any(axis_of_pair.count(axis) != n for axis, n in enumerate(sections)):
        # llama.cpp rotates the remaining pairs by a fourth coordinate, and the models by the first
        counts = f"pair counts that can be dealt out in turn over {num_pairs} pairs"
        config.refuse(SECTIONS_KEY, counts)
    axes = InterleavedSections(sections)
    if pairs := pairs_of_a_fourth_axis(axes, num_pairs):
        config.notes.append(
            f"In llama.cpp pairs {' and '.join(map(str, pairs))} stand still in text: they turn by "
            "a fourth coordinate, which is 0 there. The model turns them, and so does this rope."
        )
    return axes


def pairs_of_a_fourth_axis(axes: Sectioned | InterleavedSections, num_pairs: int) -> list[int]:
    """The pairs that ggml turns by a fourth coordinate, which is 0 in text."""
    fourth = [k for k, axis in enumerate(axes.axis_of_pair(num_pairs)) if axis > 2]
    if isinstance(axes, Sectioned):
        return fourth
    # ggml assigns pairs to three axes in turn, until an axis has all its pairs
    sections = (*axes.sections, 0)
    return sorted({*fourth, *(k for k in range(num_pairs) if k >= 3 * sections[k % 3])})


def _read_scaling(
    top: JsonObject, config: JsonObject, facts: Architecture, pairs: int
) -> Law | Rule | None:
    key = "rope.scaling.type"
    law_name = config.text(key, "none", "linear", "yarn", "longrope")
    keys = ("rope.scaling.factor", "rope.scale_linear")
    factor = single_value((config.name(k), config.number(k, least=0)) for k in keys) or 1.0
    divisors = [tensor for tensor in DIVISOR_TENSORS if top.has(tensor)]
    # llama.cpp divides by these tensors in addition to applying the law in the metadata
    further: list[str] = []
    if law_name == "yarn":
        further.append(config.name(key))
    if factor != 1:
        further.append(config.name(keys[0]))
    if FREQS in divisors:
        further += divisors[1:]
        if law_name == "longrope":
            further.append(config.name(key))
    if divisors and further:
        raise refusal("two_scalings", first=divisors[0], second=further[0])
    if law_name == "yarn":
        return _read_yarn(config, facts, factor)
    if law_name == "longrope" or _SHORT in divisors or _LONG in divisors:
        return _read_longrope(top, config, pairs)
    if (factors := top.numbers_per_pair(FREQS, pairs)) is not None:
        gain = config.number(GAIN_KEY, above=0) or 1.0
        return PerPair(factors=factors, attention_factor=gain)
    config.notes.append(
        f"Divisors of the frequencies are tensors of a GGUF file and not in its metadata "
        f"({FREQS} of Llama 3; {_SHORT} and {_LONG} of LongRoPE); none were given."
    )
    if config.number(GAIN_KEY) not in (None, 1.0):
        lists = f"{_SHORT} and {_LONG}"
        config.refuse(GAIN_KEY, f"1 unless the scaling type is yarn, or {lists} are given")
    if law_name == "none" and factor != 1:
        config.refuse(key, "linear, as there is a factor other than 1")
    if facts.ntk_alpha and (alpha := config.number("rope.scaling.alpha", least=0)):
        if factor != 1:
            config.refuse("rope.scaling.alpha", "0 with a factor other than 1")
        return NTK(factor=alpha)
    return None if factor == 1 else Linear(factor=factor)


def _original_length(config: JsonObject) -> int:
    length = config.whole(ORIGINAL_KEY) or config.whole("context_length")
    return config.require(ORIGINAL_KEY, length)


def _read_longrope(top: JsonObject, config: JsonObject, pairs: int) -> LongRope:
    short, long = (top.numbers_per_pair(key, pairs) for key in (_SHORT, _LONG))
    if short is None or long is None:
        raise refusal("gguf_lists", short=_SHORT, long=_LONG)
    if top.sign(_SHORT) != top.sign(_LONG):
        top.refuse(_LONG, f"negative where {_SHORT} is, and positive where it is not")
    original, gain = _original_length(config), config.number(GAIN_KEY, above=0) or 1.0
    with renamed_keys(config, original_max_positions=ORIGINAL_KEY):
        return LongRope(
            short_factors=short,
            long_factors=long,
            original_max_positions=original,
            factor=(config.whole("context_length") or original) / original,
            short_attention_factor=gain,
            long_attention_factor=gain,
        )


def _read_yarn(config: JsonObject, facts: Architecture, factor: float) -> Yarn:
    """YaRN as llama.cpp computes it; its log multiplier is ``mscale_all_dim``."""
    config = config.with_defaults(facts.block)
    for key in ("rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor"):
        if config.number(key) not in (None, 1.0):
            config.refuse(key, "1, as with another value llama.cpp runs no law that phasor knows")
    keys = {name: f"rope.scaling.yarn_{name}" for name in ("beta_fast", "beta_slow")}
    betas = {name: beta for name, key in keys.items() if (beta := config.number(key, above=0))}
    all_dim = config.number(LOG_MULTIPLIER_KEY, least=0) or 0.0
    mscale = all_dim if facts.softmax and all_dim else 1.0
    multiplier = partial(yarn_multiplier, factor)
    gain = config.number(GAIN_KEY, above=0) or 1.0
    derived = gain == 1 and (facts.softmax or not all_dim)
    with renamed_keys(config, **keys):
        return Yarn(
            factor=factor,
            original_max_positions=_original_length(config),
            **betas,
            truncate=True,  # llama.cpp rounds the ends of the ramp
            mscale=mscale,
            mscale_all_dim=all_dim if facts.softmax else 0.0,
            attention_factor=None if derived else gain * multiplier(mscale) / multiplier(all_dim),
        )


# Writing: the settings for one rope. The architecture decides which layers use them.

BETA_KEYS = "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"
# the default of most architectures
DEFAULT_BETAS = dict(zip(BETA_KEYS, (32.0, 1.0), strict=True))


def is_tensor(key: str) -> bool:
    """Whether this is the name of a tensor; other keys are metadata."""
    return key.endswith(".weight")


def needs_tensor(keys: Mapping[str, Any]) -> bool:
    """Whether any of these keys is a tensor."""
    return any(map(is_tensor, keys))


def rope_keys(target: Target, rope: Rope, context: int, architecture: str | None = None) -> Keys:
    """Metadata, without the architecture's prefix, and tensors for one rope.

    The architecture has to turn these pairs by these axes at these coordinates: no key states that.
    If a key can express the factor on the softmax, it is included.

    Raises:
        RefusalError: If no architecture could rotate like this.
    """
    dialect = replace(SETTINGS_DIALECT, read=partial(_read_settings, architecture=architecture))
    return settings_for_rope(target, dialect, rope, context, is_list=needs_tensor)


# source: ggml-org/llama.cpp: src/llama-model.cpp, llama_model_rope_type (22d46082): all of those
# that read it (deepseek2 and those like it, mistral3 and mistral4) have LLAMA_ROPE_TYPE_NORM
_OTHER_PAIRS = (
    "the architectures for which llama.cpp reads yarn_log_multiplier turn interleaved pairs by one "
    "axis"
)


def _read_settings(file: JsonObject, *, architecture: str | None = None) -> LayerRopes:
    """The rope that an architecture reads, with the facts that the class of ``file`` decides."""
    name, facts = "any", class_facts(file)
    if needs_tensor(file.values) and (facts.axes is not None or architecture == "gpt-oss"):
        condition = "with several axes" if facts.axes is not None else "of gpt-oss"
        raise FaultError(f"llama.cpp loads no tensor of frequencies for architectures {condition}")
    if LOG_MULTIPLIER_KEY in file.values:
        if facts.pairing == "half" or facts.axes is not None:
            raise FaultError(_OTHER_PAIRS)
        facts = replace(facts, softmax=True, rewrite="log_multiplier")
    values = {
        key if is_tensor(key) else f"{name}.{key}": value
        for key, value in keys_of_file(file).items()
    }
    read = _read_as(JsonObject({"general.architecture": name, **values}), name, facts)
    (rope,) = read.ropes
    if _has_other_ramp(rope):
        raise FaultError(_OTHER_RAMP)
    decided, axes = decided_by_class(file), rope.axes
    if isinstance(axes, Sectioned) and not any(axes.sections[decided["n_axes"] :]):
        axes = Sectioned(axes.sections[: decided["n_axes"]])  # the remaining axes have no pairs
    start = decided["rotary_start"]
    if axes is rope.axes and not start:
        return read
    return one_layer(replace(rope, rotary_start=start, axes=axes))


def _sizes(ropes: LayerRopes, context: int) -> Keys:
    rope = ropes.ropes[0]
    width = rope.head_dim
    heads = {"attention.head_count": 1, "attention.key_length": width, "embedding_length": width}
    return {"block_count": 1, "context_length": context, **heads, **class_sizes(rope)}


def rope_settings(ropes: LayerRopes, _context: int) -> Iterator[Keys]:
    """Proposals of keys and tensors for one rope."""
    rope = ropes.ropes[0]
    keys: Keys = {BASE_KEY: rope.base or BASE, WIDTH_KEY: rope.rotary_dim}
    if isinstance(rope.axes, (Sectioned, InterleavedSections)):
        # always four counts
        keys[SECTIONS_KEY] = [*rope.axes.sections, 0, 0][:4]
    for law_keys in _law_settings(rope):
        yield keys | law_keys


def _law_settings(rope: Rope) -> Iterator[Keys]:
    law = rope.scaling
    if law is None:
        yield {}
    elif isinstance(law, Linear):
        yield {"rope.scaling.type": "linear", "rope.scaling.factor": law.factor}
    elif isinstance(law, Yarn):
        yield from _yarn_settings(law)
    elif isinstance(law, LongRope):
        yield {
            "rope.scaling.type": "longrope",
            ORIGINAL_KEY: law.original_max_positions,
            GAIN_KEY: law.at(law.original_max_positions).attention_factor,
            _SHORT: [rope.direction * factor for factor in law.short_factors],
            _LONG: [rope.direction * factor for factor in law.long_factors],
        }
    if not isinstance(law, Rule):
        gain: Keys = {} if rope.attention_factor == 1 else {GAIN_KEY: rope.attention_factor}
        yield {**gain, FREQS: base_and_divisors(rope)[1].tolist()}


def _yarn_settings(law: Yarn) -> Iterator[Keys]:
    """YaRN by its name; llama.cpp multiplies cos and sin by ``m(1)`` and by the factor in a key."""
    keys: Keys = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": law.factor,
        ORIGINAL_KEY: law.original_max_positions,
    }
    betas = dict(zip(BETA_KEYS, (law.beta_fast, law.beta_slow), strict=True))
    if betas != DEFAULT_BETAS:
        keys |= betas
    if law.mscale_all_dim:
        # deepseek2 divides the key by 0.1, leaves cos and sin alone, and scales the softmax
        yield keys | {LOG_MULTIPLIER_KEY: 0.1 * law.mscale_all_dim}
    yield keys
    gain, _ = law.temperature()
    yield keys | {GAIN_KEY: gain / yarn_multiplier(law.factor, 1.0)}


#: Settings as an architecture reads them that turns the rope's pairs by its axes.
SETTINGS_DIALECT = Dialect(
    read=_read_settings, settings=rope_settings, sizes=_sizes, scales_softmax=False
)
