"""ggml: the metadata and tensors of a GGUF file, and the flags of llama.cpp that replace them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import NoReturn

import numpy as np

from phasor.axes import InterleavedSections, OneAxis, Sectioned
from phasor.files.configs.source import JsonObject
from phasor.files.dialects.by_reading import (
    Dialect,
    FaultError,
    find_fault,
    find_named_settings,
    settings_or_refusal,
)
from phasor.files.dialects.gguf import (
    BASE_KEY,
    BETA_KEYS,
    DEFAULT_BETAS,
    GAIN_KEY,
    LOG_MULTIPLIER_KEY,
    ORIGINAL_KEY,
    SECTIONS_KEY,
    SETTINGS_DIALECT,
    WIDTH_KEY,
    architecture_facts,
    architecture_of,
    is_tensor,
    needs_tensor,
    pairs_of_a_fourth_axis,
    rope_keys,
    rope_settings,
)
from phasor.files.dialects.target import (
    LLAMA4_FACTOR,
    Keys,
    ProgramSettings,
    Target,
    change_ropes,
    drop_axes,
    has_steps,
    linear_factor,
    model_family,
    ntk_as_base,
    plain_candidates,
    rotating,
    softmax_notes,
)
from phasor.layers import LayerRopes, QueryFactor, one_layer
from phasor.pairings import Pairing, by_pairing
from phasor.rope import Rope
from phasor.scaling import LongRope, Rule, Yarn

_TENSOR_NOTE = (
    "These tensors are float32. The architecture has to read them: llama does; the loader of one "
    "that does not refuses the file."
)

# Models with two ropes, for two kinds of layers; only the first has laws.


@dataclass(frozen=True, kw_only=True)
class _TwoRopes:
    """An architecture that reads two bases, and a sentence about its limits."""

    name: str
    kinds: tuple[str, str]
    base_keys: tuple[str, str]
    check: Callable[[Keys, Rope], None]


_BASE_OF_SLIDING, _WIDTH_OF_SLIDING = f"{BASE_KEY}_swa", f"{WIDTH_KEY}_swa"


# source: ggml-org/llama.cpp: gemma4-iswa.cpp (0a40e49d), olmo2.cpp (8a5c4e03) and deepseek4.cpp
# of src/models
def _check_gemma4(keys: Keys, _scaled: Rope) -> None:
    if keys.get(GAIN_KEY, 1.0) != 1.0:
        raise FaultError("gemma4 gives a factor on cos and sin to sliding layers too")


def _check_olmo2(keys: Keys, _scaled: Rope) -> None:
    has_one_base = keys[BASE_KEY] == keys[_BASE_OF_SLIDING]
    if not has_one_base or _WIDTH_OF_SLIDING in keys or needs_tensor(keys):
        raise FaultError("olmo2 has one base and one width for both, and loads no tensors")


def _check_deepseek4(keys: Keys, scaled: Rope) -> None:
    if needs_tensor(keys) or scaled.attention_factor != 1:
        raise FaultError("deepseek4 reads neither tensors nor a factor on cos and sin")


_READERS_OF_TWO = (
    _TwoRopes(
        name="gemma4",
        kinds=("full", "sliding"),
        base_keys=(BASE_KEY, _BASE_OF_SLIDING),
        check=_check_gemma4,
    ),
    _TwoRopes(
        name="olmo2",
        kinds=("full", "sliding"),
        base_keys=(BASE_KEY, _BASE_OF_SLIDING),
        check=_check_olmo2,
    ),
    _TwoRopes(
        name="deepseek4",
        kinds=("compressed", "sliding"),
        base_keys=("attention.compress_rope_freq_base", BASE_KEY),
        check=_check_deepseek4,
    ),
)


def _two_dialect(reader: _TwoRopes) -> Dialect:
    return Dialect(
        read=partial(_read_two, reader),
        settings=partial(_two_rope_settings, reader),
        sizes=_two_rope_sizes,
        scales_softmax=False,
    )


def _two_rope_sizes(ropes: LayerRopes, context: int) -> Keys:
    """The sizes that the rope of each kind of layer is read with."""
    return {
        kind: SETTINGS_DIALECT.sizes(one_layer(rope), context)
        for kind, rope in rotating(ropes).items()
    }


def _two_rope_settings(reader: _TwoRopes, ropes: LayerRopes, context: int) -> Iterator[Keys]:
    scaled, plain = (rotating(ropes)[kind] for kind in reader.kinds)
    if plain.base is None:
        return
    widths = {} if plain.rotary_dim == scaled.rotary_dim else {_WIDTH_OF_SLIDING: plain.rotary_dim}
    for keys in rope_settings(one_layer(scaled), context):
        bases = dict(zip(reader.base_keys, (keys[BASE_KEY], plain.base), strict=True))
        law_keys = {key: value for key, value in keys.items() if key not in (BASE_KEY, WIDTH_KEY)}
        yield {**bases, WIDTH_KEY: scaled.rotary_dim, **widths, **law_keys}


def _read_two(reader: _TwoRopes, file: JsonObject) -> LayerRopes:
    keys = {key: value for key, value in file.values.items() if key not in reader.kinds}
    bases = [keys[key] for key in reader.base_keys]
    width = keys.get(_WIDTH_OF_SLIDING, keys[WIDTH_KEY])
    law_keys = {k: v for k, v in keys.items() if k not in (*reader.base_keys, _WIDTH_OF_SLIDING)}
    axes_keys = {SECTIONS_KEY: keys[SECTIONS_KEY]} if SECTIONS_KEY in keys else {}
    files = (
        {**law_keys, BASE_KEY: bases[0]},
        {**axes_keys, BASE_KEY: bases[1], WIDTH_KEY: width},
    )
    kinds = {
        kind: SETTINGS_DIALECT.read(JsonObject({**file.values[kind], **kind_keys})).ropes[0]
        for kind, kind_keys in zip(reader.kinds, files, strict=True)
    }
    reader.check(keys, kinds[reader.kinds[0]])
    order = tuple(kind for kind in file.values if kind in reader.kinds)
    return LayerRopes(name=reader.name, layer_kinds=order, kinds=kinds)


def _find_two(pair: LayerRopes, context: int) -> tuple[Keys, _TwoRopes] | None:
    """The keys of two ropes, and the architecture that reads them; None if none does."""
    for reader in _find_readers(pair.kinds):
        dialect = _two_dialect(reader)
        written = find_named_settings(dialect, pair, context, is_list=needs_tensor)
        if written is not None:
            return written.keys, reader
    return None


def _find_readers(kinds: Iterable[str]) -> list[_TwoRopes]:
    return [reader for reader in _READERS_OF_TWO if {*reader.kinds} == {*kinds}]


def _two_rope_keys(pair: LayerRopes, context: int) -> tuple[Keys, _TwoRopes]:
    """The keys of two ropes, and the architecture that reads them.

    Raises:
        RefusalError: If none does.
    """
    written = _find_two(pair, context)
    return _refuse_two(pair, context) if written is None else written


def _refuse_two(pair: LayerRopes, context: int) -> NoReturn:
    """Refuse two ropes, and name what each architecture lacks for them."""
    for rope in pair.ropes:  # each by itself
        rope_keys(GGUF, rope, context)
    readers = _find_readers(pair.kinds)
    faults = [find_fault(_two_dialect(reader), pair, context) for reader in readers]
    if not all(faults):  # an architecture does all that is asked, but not with these ropes
        GGUF.only_rope(pair)
        raise AssertionError("there are two")
    name = readers[0].kinds[0]
    scaled = rotating(pair)[name].at(context)
    candidates = [
        rope
        for rope in plain_candidates(scaled)
        if _find_two(replace(pair, kinds={**pair.kinds, name: rope}), context) is not None
    ]
    because = ", and ".join(dict.fromkeys(filter(None, faults)))
    feature = f"different ropes in {' and '.join(pair.kinds)} layers"
    GGUF.refuse("ropes", feature, scaled, candidates, because=because)


def _write_gguf(ropes: LayerRopes, context: int) -> ProgramSettings:
    raised = change_ropes(ropes, ntk_as_base)
    kinds = rotating(raised)
    notes = [_rotation_note(GGUF, ropes, rope, context) for rope in kinds.values()]
    # DeepSeek V4's file tells two kinds of compressed layers apart
    classes = {
        "compressed" if "compressed" in kind else kind.removesuffix("_attention"): rope
        for kind, rope in kinds.items()
    }
    are_two = len(raised.ropes) == 2 and {*classes.values()} == {*raised.ropes}
    if are_two and _find_readers(classes):
        pair = LayerRopes(name=ropes.name, layer_kinds=tuple(classes), kinds=classes)
        keys, reader = _two_rope_keys(pair, context)
        kind = reader.kinds[0]
        scaled, scaled_layers = classes[kind], f"{kind} layers alone, as {reader.name} does"
    else:
        scaled, scaled_layers = GGUF.only_rope(raised), ""
        keys = rope_keys(GGUF, scaled, context, architecture_of(model_family(ropes)))
        if "sliding" in classes:
            keys[_BASE_OF_SLIDING] = keys[BASE_KEY]
            scaled_layers = "sliding layers too, as exaone4 does"
    if scaled_layers and scaled.scaling is not None:
        notes.append(f"The architecture has to scale {scaled_layers}.")
    for kind, factor in ropes.query_factors.items():
        if factor.first == 0 and _multiplies_queries(factor, ropes.kinds[kind]):
            keys["attention.temperature_scale"] = factor.strength
            # the keys of the length in latent attention, and in mistral3
            keys["attention.temperature_length"] = factor.length
            keys.setdefault(ORIGINAL_KEY, factor.length)
    tensors = {key: np.array(keys[key]) for key in keys if is_tensor(key)}
    settings = {f"{{arch}}.{key}": keys[key] for key in keys if key not in tensors} | tensors
    notes += _law_notes(scaled, keys)
    return ProgramSettings(settings, _writing_code(settings), tuple(dict.fromkeys(notes)), kinds)


def _sections(rope: Rope) -> list[int]:
    """How many pairs each of the four coordinates turns; empty for positions of one axis."""
    if isinstance(rope.axes, (Sectioned, InterleavedSections)):
        return [*rope.axes.sections, 0, 0][:4]
    return []


def _rotation_note(target: Target, ropes: LayerRopes, rope: Rope, context: int) -> str:
    """Which rotation of ggml the architecture has to have.

    Refused if llama.cpp would turn pairs by a fourth coordinate. All files of Qwen3-VL do that, so
    there the note says it.
    """
    architecture, sections = architecture_of(model_family(ropes)), _sections(rope)
    rope_type = by_pairing(rope.pairing, half="NEOX", interleaved="NORM")
    still_text, axes = "", rope.axes
    if isinstance(axes, (Sectioned, InterleavedSections)):
        rope_type = "IMROPE" if isinstance(axes, InterleavedSections) else "MROPE"
        extra_pairs = pairs_of_a_fourth_axis(axes, rope.num_pairs)
        if extra_pairs and rope_type == "IMROPE" and architecture == "qwen3vl":
            radians = (context - 1) * rope.inv_freq[extra_pairs].max()
            still_text = (
                f"In llama.cpp pairs {' and '.join(map(str, extra_pairs))} stand still, in every "
                "file of this model: they turn by a fourth coordinate, which is 0 in text. Their "
                f"angles are off by up to {radians:.3g} radians at position {context - 1}. "
            )
        elif extra_pairs:
            first, last = extra_pairs[0], extra_pairs[-1]
            fourth = "by a fourth coordinate, which is 0 in text"
            target.refuse(
                "axes",
                f"{type(axes).__name__} axes of {axes.sections} pairs",
                rope,
                [drop_axes(rope)],
                because=f"it turns pairs {first} to {last} {fourth}",
            )
    start = f" from coordinate {rope.rotary_start} on" if rope.rotary_start else ""
    permuted = "" if sections else _permutation(architecture, rope.pairing)
    return (
        f"{still_text}The architecture has to rotate {rope.pairing} pairs{start} "
        f"(rope type {rope_type}){permuted}."
    )


def _permutation(architecture: str | None, pairing: Pairing) -> str:
    """The end of a sentence that tells whether weights with these pairs have to be permuted."""
    converter_note = "the weights have to be permuted, which llama.cpp's converter does"
    if architecture is None:
        return f". If it rotates the other pairs, {converter_note} for those that it knows"
    its_pairing = architecture_facts()[architecture].pairing
    if its_pairing == pairing:
        return f", and {architecture} does: the weights need not be permuted"
    return f", and {architecture} rotates {its_pairing} ones: {converter_note}"


def _law_notes(rope: Rope, keys: Keys) -> list[str]:
    """Notes on further steps that these keys and tensors of a law need."""
    law, notes = rope.scaling, list[str]()
    if needs_tensor(keys):
        notes.append(_TENSOR_NOTE)
    if isinstance(law, LongRope):
        notes.append(
            "llama.cpp takes the long list if it is started with a context (-c, which it rounds up "
            f"to a multiple of 256) of more than {law.original_max_positions} tokens, whatever the "
            "length of the sequence is."
        )
    if isinstance(law, Yarn) and BETA_KEYS[0] in keys:
        fast, slow = (f"{keys[key]:g}" for key in BETA_KEYS)
        notes.append(
            "Most architectures do not read yarn_beta_fast and yarn_beta_slow (grok and mistral3 "
            f"do): start llama.cpp with --yarn-beta-fast {fast} --yarn-beta-slow {slow} as well."
        )
    if LOG_MULTIPLIER_KEY in keys:
        notes.append(
            "The architecture has to be deepseek2, or one like it, which multiplies its softmax "
            f"scale by {rope.softmax_factor:.6g} for yarn_log_multiplier."
        )
    elif not isinstance(law, Rule):
        notes += softmax_notes(rope.softmax_factor)
    return notes


def _writing_code(settings: Keys) -> str:
    """Python that adds the settings to a file; tensors are float32."""
    methods = {float: "float32", int: "uint32", str: "string", list: "array"}
    imports: list[str] = []
    lines = ["# writer is the gguf.GGUFWriter of the file, before its header is written"]
    for key, value in settings.items():
        if isinstance(value, np.ndarray):
            imports = ["import numpy as np", ""]
            numbers = ", ".join(str(np.float32(x)) for x in value.tolist())
            array = f"np.array([{numbers}], dtype=np.float32)"
            lines.append(f"writer.add_tensor({json.dumps(key)}, {array})")
        else:
            name = json.dumps(key).replace("{arch}", "{writer.arch}")
            lines.append(f"writer.add_{methods[type(value)]}(f{name}, {json.dumps(value)})")
    return "\n".join(imports + lines)


def _multiplies_queries(factor: QueryFactor, rope: Rope | None) -> bool:
    """Whether llama.cpp applies the factor: Mistral's in the file, or Llama 4's constant."""
    length = getattr(rope and rope.scaling, "original_max_positions", factor.length)
    from_0 = has_steps(factor) and factor.first == 0 and factor.length == length
    return from_0 or factor == LLAMA4_FACTOR


_Ggml = partial(
    Target,
    checked="engine",
    only_pairs=lambda rope: "half" if rope.axes.n_axes > 1 else None,
    axes=(OneAxis, Sectioned, InterleavedSections),
    query_factor=_multiplies_queries,
)

GGUF = _Ggml(
    name="gguf",
    program="Python that writes metadata and tensors of a file for llama.cpp",
    source="https://github.com/ggml-org/ggml/blob/master/docs/gguf.md",
    write=_write_gguf,
    backwards=True,
    rules=(LongRope,),
    softmax_note="",
    leaves_layers="The architecture",
)


# llama.cpp: the flags that replace the scaling keys of a GGUF file.


# by flag, the key that it replaces; --yarn-attn-factor is overwritten where YaRN is on
_FLAGS = {
    "--rope-freq-base": BASE_KEY,
    "--rope-scaling": "rope.scaling.type",
    "--rope-scale": "rope.scaling.factor",
    "--yarn-orig-ctx": ORIGINAL_KEY,
    "--yarn-beta-fast": BETA_KEYS[0],
    "--yarn-beta-slow": BETA_KEYS[1],
}
# keys that no flag replaces, and the file has to have
_OF_FILE = WIDTH_KEY, SECTIONS_KEY


def _flags(ropes: LayerRopes, context: int) -> Iterator[Keys]:
    for keys in rope_settings(ropes, context):
        if keys.keys() <= {*_FLAGS.values(), *_OF_FILE}:
            law = keys.get("rope.scaling.type", "none")
            betas = DEFAULT_BETAS if law == "yarn" else {}
            settings = {"rope.scaling.type": law, **betas, **keys}
            yield {flag: settings[key] for flag, key in _FLAGS.items() if key in settings}


def _read_flags(file: JsonObject) -> LayerRopes:
    values = {_FLAGS.get(name, name): value for name, value in file.values.items()}
    return SETTINGS_DIALECT.read(file.with_values(values))


def _flag_sizes(ropes: LayerRopes, context: int) -> Keys:
    keys = next(rope_settings(ropes, context))
    file_keys = {key: keys[key] for key in _OF_FILE if key in keys}
    return {**SETTINGS_DIALECT.sizes(ropes, context), **file_keys}


_FLAG_DIALECT = Dialect(read=_read_flags, settings=_flags, sizes=_flag_sizes, scales_softmax=False)


def _write_llama_cpp(ropes: LayerRopes, context: int) -> ProgramSettings:
    rope = ntk_as_base(LLAMA_CPP.only_rope(ropes))
    notes = [_rotation_note(LLAMA_CPP, ropes, rope, context)]
    written = settings_or_refusal(LLAMA_CPP, _FLAG_DIALECT, one_layer(rope), context)
    settings = {"-c": context, **written.keys}
    flags = " ".join(f"{name} {value}" for name, value in settings.items())
    if rope.scaling is not None:
        notes.append(
            "llama-server gives no sequence more tokens than the file's context_length. If that "
            f"is below {context}, add --override-kv ARCH.context_length=int:{context}, with the "
            "file's general.architecture for ARCH."
        )
    if (factor := linear_factor(rope)) is None:
        same = "KoboldCpp, LM Studio and ollama have a scale and a base alone: use --to gguf."
    else:
        same = (
            f"KoboldCpp takes the same as --ropeconfig {1 / factor!r} {rope.base!r}, LM Studio "
            "in its fields of these two; ollama takes what the file says (--to gguf)."
        )
    sections = _sections(rope)
    and_sections = f" and {SECTIONS_KEY} = {sections}" if sections else ""
    notes += (
        same,
        f"The file has to have {WIDTH_KEY} = {rope.rotary_dim}{and_sections}.",
        "The file must not have rope_freqs or rope_factors tensors, nor the keys "
        f"{GAIN_KEY} and {LOG_MULTIPLIER_KEY}: they would scale too.",
        "Most architectures with sliding windows (gemma3 and gpt-oss) give those layers the base "
        "and the scale of the file, whatever the flags are.",
    )
    kinds = dict.fromkeys(rotating(ropes), rope)
    return ProgramSettings(settings, f"llama-server -m FILE {flags}", tuple(notes), kinds)


LLAMA_CPP = _Ggml(
    name="llama.cpp",
    program="flags for a GGUF file without scaling",
    alternative="gguf",
    source="https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md",
    write=_write_llama_cpp,
)
