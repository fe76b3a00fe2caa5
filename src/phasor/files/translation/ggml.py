"""ggml: the metadata and tensors of a GGUF file, and the flags of llama.cpp that replace them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple, cast

import numpy as np

from phasor.axes import InterleavedSections, OneAxis, Sectioned
from phasor.files.configs.facts import table
from phasor.files.configs.gguf import architecture_of
from phasor.files.translation.target import (
    LLAMA4_FACTOR,
    PICK_LAW,
    ProgramSettings,
    Target,
    TranslationError,
    base_and_divisors,
    has_steps,
    model_family,
    ntk_as_base,
    plain_candidates,
    softmax_note,
    whole_model,
)
from phasor.layers import LayerRopes, QueryFactor
from phasor.pairings import Pairing, by_pairing
from phasor.rope import Rope
from phasor.scaling import Linear, LongRope, Yarn, yarn_multiplier

_BASE = 10_000.0  # llama.cpp's default
_GAIN_KEY = "rope.scaling.attn_factor"
_TENSOR_NOTE = (
    "These tensors are float32. The architecture has to read them: llama does; the loader of one "
    "that does not refuses the file."
)
# of most architectures of llama.cpp
_DEFAULT_BETAS = {"yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0}


class _GgmlForm(NamedTuple):
    """A rope with NTK laws as a raised base; in half pairs and ``sections`` if it has more axes."""

    rope: Rope
    sections: list[int]
    notes: tuple[str, ...]


class _TwoRopes(NamedTuple):
    """The base keys of two kinds of layers; scaling keys apply to the first of them."""

    scaled: str
    plain: str
    scaled_base: str
    plain_base: str
    architectures: str


_TWO_ROPES = (
    _TwoRopes("full", "sliding", "rope.freq_base", "rope.freq_base_swa", "gemma4 and olmo2 do"),
    _TwoRopes(
        scaled="compressed",
        plain="sliding",
        scaled_base="attention.compress_rope_freq_base",
        plain_base="rope.freq_base",
        architectures="deepseek4 does",
    ),
)


def _write_gguf(ropes: LayerRopes, context: int) -> tuple[ProgramSettings, ...]:
    forms = {
        kind: _ggml_form(GGUF, ropes, rope, context) for kind, rope in ropes.kinds.items() if rope
    }
    kinds = {kind: form.rope for kind, form in forms.items()}
    notes = [note for form in forms.values() for note in form.notes]
    two = _find_two_ropes(kinds)
    keys: dict[str, Any]
    scaled_layers = ""
    if two is None:
        scaled = GGUF.only_rope(replace(ropes, kinds={**ropes.kinds, **kinds}), context)
        keys = {"rope.freq_base": scaled.base or _BASE, "rope.dimension_count": scaled.rotary_dim}
        if any(_kind_name(kind) == "sliding" for kind in kinds):
            keys["rope.freq_base_swa"] = keys["rope.freq_base"]
            scaled_layers = "sliding layers too, as exaone4 does"
    else:
        scaled, plain = _rope_named(kinds, two.scaled), _rope_named(kinds, two.plain)
        keys = {two.scaled_base: scaled.base, two.plain_base: plain.base}
        keys["rope.dimension_count"] = scaled.rotary_dim
        if plain.rotary_dim != scaled.rotary_dim:
            keys["rope.dimension_count_swa"] = plain.rotary_dim
        scaled_layers = f"{two.scaled} layers alone, as {two.architectures}"
    if scaled_layers and scaled.scaling is not None:
        notes.append(f"The architecture has to scale {scaled_layers}.")
    sections = next(form.sections for form in forms.values() if form.rope == scaled)
    if sections:
        keys["rope.dimension_sections"] = sections
    unrotated = [kind for kind, rope in ropes.kinds.items() if rope is None]
    if unrotated:
        notes.append(f"The architecture has to leave {' and '.join(unrotated)} layers as they are.")
    law_keys, tensors, law_notes = _law_settings(scaled)
    if tensors and architecture_of(model_family(ropes)) == "gpt-oss":
        GGUF.refuse(
            "frequencies for gpt-oss that need a tensor rope_freqs.weight, which its loader does "
            "not take",
            scaled, context, [near for near in _near(scaled) if not _law_settings(near).tensors],
        )  # fmt: skip
    settings = {f"{{arch}}.{key}": value for key, value in (keys | law_keys).items()} | tensors
    return (
        ProgramSettings(
            ropes=kinds,
            settings=settings,
            code=_writing_code(settings),
            notes=tuple(dict.fromkeys((*notes, *law_notes))),
        ),
    )


def _near(rope: Rope) -> list[Rope]:
    """Ropes near one with frequencies that ggml cannot compute."""
    near = plain_candidates(rope)
    if isinstance(rope.scaling, Yarn):
        near.append(replace(rope, scaling=replace(rope.scaling, truncate=True)))
    return near


def _ggml_form(target: Target, ropes: LayerRopes, rope: Rope, context: int) -> _GgmlForm:
    """A rope of a model as ggml can express it.

    Refused where it would turn pairs by a fourth coordinate; Qwen3-VL, whose files all do that,
    gets a note.
    """
    rope = ntk_as_base(rope)
    notes: tuple[str, ...] = ()
    sections: list[int] = []
    rope_type = by_pairing(rope.pairing, half="NEOX", interleaved="NORM")
    if isinstance(rope.axes, (Sectioned, InterleavedSections)):
        rope_type = "IMROPE" if isinstance(rope.axes, InterleavedSections) else "MROPE"
        sections = [*rope.axes.sections, 0, 0][:4]
        # IMROPE deals pairs out to three axes in turn, until the section of an axis is full
        extra_pairs = [
            k
            for k, axis in enumerate(rope.axes.axis_of_pair(rope.num_pairs))
            if axis > 2 or (rope_type == "IMROPE" and k >= 3 * sections[k % 3])
        ]
        if (
            extra_pairs
            and rope_type == "IMROPE"
            and architecture_of(model_family(ropes)) == "qwen3vl"
        ):
            radians = (context - 1) * rope.inv_freq[extra_pairs].max()
            notes += (
                f"In llama.cpp pairs {' and '.join(map(str, extra_pairs))} stand still, in every "
                "file of this model: they turn by a fourth coordinate, which is 0 in text. Their "
                f"angles are off by up to {radians:.3g} radians at position {context - 1}.",
            )
        elif extra_pairs:
            target.refuse(
                f"{type(rope.axes).__name__} axes of {rope.axes.sections} pairs: it turns pairs "
                f"{extra_pairs[0]} to {extra_pairs[-1]} by a fourth coordinate, which is 0 in text",
                rope, context, [replace(rope, axes=OneAxis())],
            )  # fmt: skip
        if rope.pairing == "interleaved":
            notes += (
                f"{target.name} turns half pairs where positions have axes: reorder the weights "
                "first (phasor convert FOLDER OUT --to half).",
            )
            rope = replace(rope, pairing="half")
    start = f" from coordinate {rope.rotary_start} on" if rope.rotary_start else ""
    note = f"The architecture has to rotate {rope.pairing} pairs{start} (rope type {rope_type})"
    if not sections:
        note += _permutation(architecture_of(model_family(ropes)), rope.pairing)
    return _GgmlForm(rope, sections, (*notes, f"{note}."))


def _permutation(architecture: str | None, pairing: Pairing) -> str:
    """Whether weights with these pairs have to be permuted, for the end of a sentence."""
    by_converter = "the weights have to be permuted, which llama.cpp's converter does"
    if architecture is None:
        return f". If it rotates the other pairs, {by_converter} for those that it knows"
    own = table().gguf[architecture].pairing
    if own == pairing:
        return f", and {architecture} does: the weights need not be permuted"
    return f", and {architecture} rotates {own} ones: {by_converter}"


def _find_two_ropes(kinds: Mapping[str, Rope]) -> _TwoRopes | None:
    """The base keys for two different ropes, of which the second has no law; None for others."""
    if len(set(kinds.values())) == 1:
        return None
    for two in _TWO_ROPES:
        if {_kind_name(kind) for kind in kinds} == {two.scaled, two.plain}:
            scaled, plain = _rope_named(kinds, two.scaled), _rope_named(kinds, two.plain)
            same_axes = scaled.axes == plain.axes and scaled.direction == plain.direction == 1
            if same_axes and scaled.base and plain.base and plain.scaling is None:
                return two
    return None


def _rope_named(kinds: Mapping[str, Rope], name: str) -> Rope:
    return next(rope for kind, rope in kinds.items() if _kind_name(kind) == name)


def _kind_name(kind: str) -> str:
    return kind.removesuffix("_attention")


class _LawSettings(NamedTuple):
    keys: dict[str, Any]
    tensors: dict[str, Any]
    notes: tuple[str, ...]


def _law_settings(rope: Rope) -> _LawSettings:
    law = rope.scaling
    if isinstance(law, LongRope):
        return _longrope_settings(law)
    if rope.direction == 1 and rope.base is not None:
        if law is None:
            return _LawSettings({}, {}, ())
        if isinstance(law, Linear):
            keys = {"rope.scaling.type": "linear", "rope.scaling.factor": law.factor}
            return _LawSettings(keys, {}, ())
        if _is_ggml_yarn(rope):
            return _yarn_settings(cast(Yarn, law))
    _, divisors = base_and_divisors(rope)
    keys = {} if rope.attention_factor == 1 else {_GAIN_KEY: rope.attention_factor}
    notes = (_TENSOR_NOTE,)
    if rope.softmax_factor != 1:
        notes += (softmax_note(rope.softmax_factor),)
    return _LawSettings(keys, {"rope_freqs.weight": divisors}, notes)


def _is_ggml_yarn(rope: Rope) -> bool:
    """Whether the law is YaRN with a ramp between whole pairs, as ggml computes it.

    In heads so narrow that the ramp would end before it begins, ggml computes another one.
    """
    law, base = rope.scaling, rope.base
    if not isinstance(law, Yarn) or not law.truncate or base is None:
        return False

    def index(turns: float) -> float:
        inverse_frequency = law.original_max_positions / (2 * math.pi * turns)
        return rope.num_pairs * math.log(inverse_frequency) / math.log(base)

    begin, end = math.floor(index(law.beta_fast)), math.ceil(index(law.beta_slow))
    return max(begin, 0) <= min(end, rope.rotary_dim - 1)


def _longrope_settings(law: LongRope) -> _LawSettings:
    original = law.original_max_positions
    gain, long_gain = (law.at(length).attention_factor for length in (original, original + 1))
    if gain != long_gain:
        raise TranslationError(
            f"gguf keeps one attention factor for both lists of LongRope, and these have {gain:g} "
            f"and {long_gain:g}; {PICK_LAW}"
        )
    keys = {
        "rope.scaling.type": "longrope",
        "rope.scaling.original_context_length": original,
        _GAIN_KEY: gain,
    }
    tensors = {
        "rope_factors_short.weight": np.array(law.short_factors),
        "rope_factors_long.weight": np.array(law.long_factors),
    }
    list_note = (
        f"llama.cpp takes the long list if it is started with a context (-c) of more than "
        f"{original} tokens, whatever the length of the sequence is."
    )
    return _LawSettings(keys, tensors, (_TENSOR_NOTE, list_note))


def _yarn_settings(law: Yarn) -> _LawSettings:
    """YaRN by name; llama.cpp multiplies cos and sin by ``m(1)``, and by the key as well."""
    keys: dict[str, Any] = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": law.factor,
        "rope.scaling.original_context_length": law.original_max_positions,
    }
    notes: tuple[str, ...] = ()
    betas = {"yarn_beta_fast": law.beta_fast, "yarn_beta_slow": law.beta_slow}
    if betas != _DEFAULT_BETAS:
        keys |= {f"rope.scaling.{name}": value for name, value in betas.items()}
        flags = " ".join(f"--{name.replace('_', '-')} {value:g}" for name, value in betas.items())
        notes += (
            f"Most architectures do not read yarn_beta_fast and yarn_beta_slow (grok and mistral3 "
            f"do): start llama.cpp with {flags} as well.",
        )
    gain, softmax = law.temperature()
    if softmax != 1 and gain == 1:
        # deepseek2 divides the key by 0.1, leaves cos and sin alone, and scales the softmax
        keys["rope.scaling.yarn_log_multiplier"] = 0.1 * law.mscale_all_dim
        notes += (
            "The architecture has to be deepseek2, or one like it, which multiplies its softmax "
            f"scale by {softmax:.6g} for yarn_log_multiplier.",
        )
        return _LawSettings(keys, {}, notes)
    key_gain = gain / yarn_multiplier(law.factor, 1.0)
    if key_gain != 1:
        keys[_GAIN_KEY] = key_gain
    if softmax != 1:
        notes += (softmax_note(softmax),)
    return _LawSettings(keys, {}, notes)


def _writing_code(settings: Mapping[str, Any]) -> str:
    """Python that adds the settings to a file; tensors are float32."""
    methods = {float: "float32", int: "uint32", str: "string", list: "array"}
    lines = ["# writer is the gguf.GGUFWriter of the file, before its header is written"]
    for key, value in settings.items():
        if isinstance(value, np.ndarray):
            numbers = ", ".join(str(np.float32(x)) for x in value.tolist())
            array = f"np.array([{numbers}], dtype=np.float32)"
            lines.append(f"writer.add_tensor({json.dumps(key)}, {array})")
        else:
            name = json.dumps(key).replace("{arch}", "{writer.arch}")
            lines.append(f"writer.add_{methods[type(value)]}(f{name}, {json.dumps(value)})")
    uses_numpy = any(isinstance(value, np.ndarray) for value in settings.values())
    return "\n".join((["import numpy as np", ""] if uses_numpy else []) + lines)


def _multiplies_queries(factor: QueryFactor) -> bool:
    """By numbers of the file for Mistral, and by its own for Llama 4."""
    return (has_steps(factor) and factor.first == 0) or factor == LLAMA4_FACTOR


GGUF = Target(
    name="gguf",
    program="Python that writes metadata and tensors of a file for llama.cpp",
    source="https://github.com/ggml-org/ggml/blob/master/docs/gguf.md",
    checked="description",
    write=_write_gguf,
    needs_context=False,
    backwards=True,
    axes=(OneAxis, Sectioned, InterleavedSections),
    rules=(LongRope,),
    softmax=True,
    query_factor=_multiplies_queries,
)


# llama.cpp: the flags that replace the scaling keys of a GGUF file.


def _write_llama_cpp(ropes: LayerRopes, context: int) -> tuple[ProgramSettings, ...]:
    rope, sections, notes = _ggml_form(
        LLAMA_CPP, ropes, LLAMA_CPP.only_rope(ropes, context), context
    )
    settings = {"-c": context, "--rope-freq-base": rope.base, **_scaling_flags(rope, context)}
    flags = " ".join(f"{name} {value}" for name, value in settings.items())
    file = f"The file has to have rope.dimension_count = {rope.rotary_dim}"
    if sections:
        file += f" and rope.dimension_sections = {sections}"
    if rope.scaling is not None:
        notes += (
            "llama-server gives no sequence more tokens than the file's context_length. If that "
            f"is below {context}, add --override-kv ARCH.context_length=int:{context}, with the "
            "file's general.architecture for ARCH.",
        )
    if rope.scaling is None or isinstance(rope.scaling, Linear):
        scale = 1.0 if rope.scaling is None else 1 / rope.scaling.factor
        same = f"KoboldCpp takes the same as --ropeconfig {scale!r} {rope.base!r}, LM Studio in "
        same += "its fields of these two; ollama takes what the file says (--to gguf)."
    else:
        same = "KoboldCpp, LM Studio and ollama have a scale and a base alone: say --to gguf."
    notes += (
        same,
        f"{file}.",
        "The file must not have rope_freqs or rope_factors tensors, nor the keys "
        "rope.scaling.attn_factor and rope.scaling.yarn_log_multiplier: they would scale too.",
        "Most architectures with sliding windows (gemma3 and gpt-oss) give those layers the base "
        "and the scale of the file, whatever the flags are.",
    )
    return whole_model(ropes, rope, settings, f"llama-server -m FILE {flags}", notes)


def _scaling_flags(rope: Rope, context: int) -> dict[str, Any]:
    law = rope.scaling
    if rope.base is not None and law is None:
        return {"--rope-scaling": "none"}
    if isinstance(law, Linear):
        return {"--rope-scaling": "linear", "--rope-scale": law.factor}
    gain = rope.attention_factor
    yarn = law if isinstance(law, Yarn) and _is_ggml_yarn(rope) else None
    flag_gain = 1.0 if yarn is None else yarn_multiplier(yarn.factor, 1.0)
    if yarn is None or gain != flag_gain:
        if gain == flag_gain:
            feature = (
                "frequencies other than base ** (-2k / d), or these divided by one factor or by "
                "YaRN's ramp between whole pairs"
            )
        elif yarn is None:
            feature = f"cos and sin multiplied by {gain:g}"
        else:
            # llama.cpp overwrites --yarn-attn-factor if YaRN is on
            feature = (
                f"YaRN with cos and sin multiplied by {gain:g}: its flags always give {flag_gain:g}"
            )
        LLAMA_CPP.refuse(feature, rope, context, _near(rope))
    return {
        "--rope-scaling": "yarn",
        "--rope-scale": yarn.factor,
        "--yarn-orig-ctx": yarn.original_max_positions,
        "--yarn-beta-fast": yarn.beta_fast,
        "--yarn-beta-slow": yarn.beta_slow,
    }


LLAMA_CPP = Target(
    name="llama.cpp",
    program="flags for a GGUF file without scaling",
    alternative="gguf",
    source="https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md",
    checked="description",
    write=_write_llama_cpp,
    axes=(OneAxis, Sectioned, InterleavedSections),
    query_factor=_multiplies_queries,
)
