"""GGUF: the metadata and tensors of a file that llama.cpp runs."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from phasor.axes import InterleavedSections, OneAxis, Sectioned
from phasor.extending import with_raised_base
from phasor.layers import LayerRopes
from phasor.pairings import by_pairing
from phasor.rope import Rope
from phasor.scaling import NTK, Linear, LongRope, Rule, Yarn, yarn_multiplier
from phasor.translation.target import Part, Target, TranslationError

#: What converters divide by so that a pair stands still: infinity is not safe on every device.
_STILL = 1e30
_BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}  # llama.cpp's own, for most architectures


class _TwoRopes(NamedTuple):
    """Kinds of layers that have a base each; scaling keys are for one of them."""

    scaled: str
    plain: str
    scaled_base: str
    plain_base: str
    architectures: str


_TWO_ROPES = (
    _TwoRopes("full", "sliding", "rope.freq_base", "rope.freq_base_swa", "gemma4 and olmo2 do"),
    _TwoRopes(
        "compressed",
        "sliding",
        "attention.compress_rope_freq_base",
        "rope.freq_base",
        "deepseek4 does",
    ),
)


def _write(ropes: LayerRopes, context: int) -> tuple[Part, ...]:
    forms = {kind: ggml_form(TARGET, rope, context) for kind, rope in ropes.kinds.items() if rope}
    kinds = {kind: rope for kind, (rope, _) in forms.items()}
    notes = dict.fromkeys(note for _, of_form in forms.values() for note in of_form)
    scaled, *others = dict.fromkeys(kinds.values())
    keys: dict[str, Any] = {}
    if others:
        two = _two_ropes(kinds)
        if two is None:
            TARGET.refuse_different_ropes(ropes, context)
        by_name = {_short_name(kind): rope for kind, rope in kinds.items()}
        scaled, plain = by_name[two.scaled], by_name[two.plain]
        keys |= {two.plain_base: plain.base, two.scaled_base: scaled.base}
        if plain.rotary_dim != scaled.rotary_dim:
            keys["rope.dimension_count_swa"] = plain.rotary_dim
        if scaled.scaling is not None:
            notes[
                f"The architecture has to scale {two.scaled} layers alone, as "
                f"{two.architectures}."
            ] = None
    else:
        keys["rope.freq_base"] = scaled.base or 10_000.0
    keys["rope.dimension_count"] = scaled.rotary_dim
    if not isinstance(scaled.axes, OneAxis):
        keys["rope.dimension_sections"] = [*scaled.axes.sections, 0, 0][:4]
    law, tensors, law_notes = _law(scaled)
    settings = {f"{{arch}}.{key}": value for key, value in (keys | law).items()} | tensors
    still = [kind for kind, rope in ropes.kinds.items() if rope is None]
    if still:
        notes[f"The architecture has to leave {' and '.join(still)} layers as they are."] = None
    return (
        Part(
            ropes=kinds,
            settings=settings,
            code="\n".join(f"{key} = {_text(value)}" for key, value in settings.items()),
            notes=("{arch} is the file's general.architecture.", *notes, *law_notes),
        ),
    )


def ggml_form(target: Target, rope: Rope, context: int) -> tuple[Rope, tuple[str, ...]]:
    """The rope in a form that ggml has, and what the architecture has to be for it.

    NTK-aware scaling becomes a raised base; with several axes ggml turns half pairs only.

    Raises:
        TranslationError: If ggml deals pairs out to axes in another way.
    """
    notes: list[str] = []
    if isinstance(rope.scaling, NTK):
        rope = with_raised_base(rope, rope.scaling.factor)
    if isinstance(rope.axes, OneAxis):
        kind = by_pairing(rope.pairing, half="NEOX", interleaved="NORM")
    else:
        kind = "IMROPE" if isinstance(rope.axes, InterleavedSections) else "MROPE"
        if rope.pairing == "interleaved":
            notes.append(
                f"{target.name} turns half pairs where positions have axes: reorder the weights "
                "first (phasor convert FOLDER OUT --to half)."
            )
            rope = replace(rope, pairing="half")
        fourth = [k for k, axis in enumerate(_ggml_axes(rope)) if axis == 3]
        if fourth:
            target.refuse(
                f"{type(rope.axes).__name__} axes of {rope.axes.sections} pairs: it turns pairs "
                f"{fourth[0]} to {fourth[-1]} by a fourth coordinate, which is 0 in text",
                rope, context, [replace(rope, axes=OneAxis())],
            )  # fmt: skip
    where = f" from coordinate {rope.rotary_start} on" if rope.rotary_start else ""
    notes.append(f"The architecture has to turn {rope.pairing} pairs{where} (rope type {kind}).")
    return rope, tuple(notes)


def _ggml_axes(rope: Rope) -> tuple[int, ...]:
    """The axis that ggml turns each pair by: the Rope's, or 3, which is none of these."""
    assert isinstance(rope.axes, (Sectioned, InterleavedSections)), "Target.check was called"
    sections = (*rope.axes.sections, 0, 0)[:3]
    if isinstance(rope.axes, Sectioned):
        dealt = [axis for axis, count in enumerate(sections) for _ in range(count)]
        return tuple((dealt + [3] * rope.num_pairs)[: rope.num_pairs])
    return tuple(k % 3 if k < 3 * sections[k % 3] else 3 for k in range(rope.num_pairs))


def _two_ropes(kinds: dict[str, Rope]) -> _TwoRopes | None:
    """The base keys for these kinds of layers, if there are, and only one kind has a law."""
    by_name = {_short_name(kind): rope for kind, rope in kinds.items()}
    for two in _TWO_ROPES:
        if by_name.keys() == {two.scaled, two.plain}:
            plain = by_name[two.plain]
            unscaled = plain.scaling is None and plain.base and plain.direction == 1
            same_axes = plain.axes == by_name[two.scaled].axes
            return two if unscaled and same_axes and by_name[two.scaled].base else None
    return None


def _short_name(kind: str) -> str:
    return kind.removesuffix("_attention")


def _law(rope: Rope) -> tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]:
    """Keys and tensors of the scaling law, with notes."""
    law = rope.scaling
    if isinstance(law, LongRope):
        return _longrope(law)
    assert not isinstance(law, Rule), "Target.check was called"
    if rope.direction == 1 and rope.base is not None:
        if law is None:
            return {}, {}, ()
        if isinstance(law, Linear):
            return {"rope.scaling.type": "linear", "rope.scaling.factor": law.factor}, {}, ()
        if isinstance(law, Yarn) and law.truncate:
            return _yarn(law)
    plain = replace(rope, scaling=None, explicit_inv_freq=None)
    with np.errstate(divide="ignore"):
        divisors = rope.direction * plain.inv_freq / rope.inv_freq
    divisors[np.isinf(divisors)] = _STILL
    keys = {} if rope.attention_factor == 1 else {_GAIN: rope.attention_factor}
    return keys, {"rope_freqs.weight": divisors}, (_READS, *_softmax(rope.softmax_factor))


_GAIN = "rope.scaling.attn_factor"
_READS = (
    "The architecture has to read these tensors: llama does, and an architecture that does not "
    "refuses the file."
)


def _softmax(factor: float) -> tuple[str, ...]:
    if factor == 1:
        return ()
    return (f"The model multiplies its softmax scale by {factor!r}: do that besides.",)


def _longrope(law: LongRope) -> tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]:
    original = law.original_max_positions
    gain, beyond = (law.at(length).attention_factor for length in (original, original + 1))
    if gain != beyond:
        raise TranslationError(
            f"gguf keeps one attention factor for both lists of LongRope, and these have {gain:g} "
            f"and {beyond:g}; translate rope.at(seq_len), or give --at TOKENS"
        )
    keys = {
        "rope.scaling.type": "longrope",
        "rope.scaling.original_context_length": original,
        _GAIN: gain,
    }
    tensors = {
        "rope_factors_short.weight": np.array(law.short_factors),
        "rope_factors_long.weight": np.array(law.long_factors),
    }
    picks = (
        f"llama.cpp takes the long list if it is started with a context (-c) of more than "
        f"{original} tokens, whatever the length of the sequence is."
    )
    return keys, tensors, (_READS, picks)


def _yarn(law: Yarn) -> tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]:
    """YaRN by name; llama.cpp multiplies cos and sin by ``m(1)``, and by the key besides."""
    keys: dict[str, Any] = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": law.factor,
        "rope.scaling.original_context_length": law.original_max_positions,
    }
    notes: tuple[str, ...] = ()
    betas = {f"yarn_{name}": getattr(law, name) for name in _BETAS}
    if betas != {f"yarn_{name}": value for name, value in _BETAS.items()}:
        keys |= {f"rope.scaling.{name}": value for name, value in betas.items()}
        flags = " ".join(f"--{name.replace('_', '-')} {value:g}" for name, value in betas.items())
        notes += (
            f"Most architectures do not read yarn_beta_fast and yarn_beta_slow (grok and mistral3 "
            f"do): start llama.cpp with {flags} besides.",
        )
    gain, softmax = law.temperature()
    if softmax != 1 and gain == 1:
        # deepseek2 divides by its unit of 0.1, keeps cos and sin, and scales the softmax
        keys["rope.scaling.yarn_log_multiplier"] = 0.1 * law.mscale_all_dim
        return keys, {}, (
            *notes,
            "The architecture has to be deepseek2, or one like it, which multiplies its softmax "
            f"scale by {softmax:.6g} for yarn_log_multiplier.",
        )  # fmt: skip
    extra = gain / yarn_multiplier(law.factor, 1.0)
    if extra != 1:
        keys[_GAIN] = extra
    return keys, {}, (*notes, *_softmax(softmax))


def _text(value: Any) -> str:
    """A value as it is shown; tensors are float32."""
    if isinstance(value, np.ndarray):
        return f"[{', '.join(map(str, value.astype(np.float32)))}]"
    return json.dumps(value)


TARGET = Target(
    name="gguf",
    program="metadata and tensors of a file for llama.cpp",
    source="https://github.com/ggml-org/ggml/blob/master/docs/gguf.md",
    checked="description",
    write=_write,
    backwards=True,
    axes=(OneAxis, Sectioned, InterleavedSections),
    rules=(LongRope,),
    softmax=True,
)
