"""Megatron-LM: flags of its training command."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NoReturn

from phasor.axes import OneAxis, Sectioned
from phasor.files.configs.writing import rotated_fraction
from phasor.files.translation.target import (
    ProgramSettings,
    Target,
    TranslationError,
    ntk_as_base,
    plain_candidates,
    softmax_note,
    whole_model,
    yarn_mscale,
)
from phasor.layers import LayerRopes
from phasor.rope import Rope
from phasor.scaling import Law, Linear, Llama3, Rule, Yarn

Flags = dict[str, Any]

# constants in the code of --use-rope-scaling, which reads only the factor
_LLAMA3: Flags = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_positions": 8192}
# constants in the code of latent attention
_LATENT_YARN: Flags = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_positions": 4096,
    "truncate": True,
}


def _write(ropes: LayerRopes, context: int) -> tuple[ProgramSettings, ...]:
    rope, *others = ropes.ropes
    if others:
        raise TranslationError(
            f"megatron has one rotation for all layers, and {ropes.name} has {len(ropes.ropes)} "
            "ropes: translate one of them"
        )
    if rope.rotary_start:
        TARGET.refuse(f"a rotation from coordinate {rope.rotary_start} on", rope, context)
    # latent attention rotates a slice that is a head of its own, with one key for all heads
    whole_head = rope.rotary_dim == rope.head_dim and isinstance(rope.axes, OneAxis)
    latent = rope.pairing == "interleaved" and whole_head and ropes.num_kv_heads == 1
    notes: list[str] = []
    needs_half = isinstance(rope.scaling, Yarn) or isinstance(rope.axes, Sectioned)
    if rope.pairing == "interleaved" and needs_half and not latent:
        rope, note = TARGET.reorder(rope, "half")
        notes.append(note)
    flags = _latent_flags(rope, context) if latent else _usual_flags(rope, context)
    unrotated = [int(ropes.kinds[kind] is None) for kind in ropes.layer_kinds]
    if any(unrotated):
        flags["--no-rope-freq"] = f"[{','.join(map(str, unrotated))}]"
    target_rope = replace(rope, pairing_out="half" if latent else None)
    if target_rope != rope:
        notes.append(
            f"megatron writes {target_rope.output_pairing} pairs here: attention scores are the "
            "same, coordinates of cached keys are in another order."
        )
    if rope.softmax_factor != 1 and not latent:
        notes.append(softmax_note(rope.softmax_factor))
    notes.append(
        "Megatron-Bridge and NeMo read the same numbers as fields of a model's configuration: "
        "rotary_base, rotary_percent, seq_len_interpolation_factor, yarn_rotary_scaling_factor."
    )
    # a shell would read the list's brackets as a pattern of file names
    texts = {name: f"'{v}'" if str(v).startswith("[") else v for name, v in flags.items()}
    words = [name if text is True else f"{name} {text}" for name, text in texts.items()]
    return whole_model(ropes, target_rope, flags, " ".join(words), notes)


def _usual_flags(rope: Rope, context: int) -> Flags:
    """The flags of usual attention."""
    base, law = _base_and_law(rope, context)
    flags: Flags = {"--position-embedding-type": "rope", "--kv-channels": rope.head_dim}
    flags["--rotary-base"] = base
    if rope.rotary_dim < rope.head_dim:
        flags["--rotary-percent"] = rotated_fraction(rope.rotary_dim, rope.head_dim)
    if rope.pairing == "interleaved":
        flags["--rotary-interleaved"] = True
    if isinstance(rope.axes, Sectioned):
        if rope.axes.n_axes != 3 or not isinstance(law, (type(None), Linear)):
            _refuse(f"positions of {rope.axes.n_axes} axes with {_law_name(law)}", rope, context)
        flags["--position-embedding-type"] = "mrope"
        flags["--mrope-section"] = " ".join(map(str, rope.axes.sections))
    if isinstance(law, Linear) and law.factor.is_integer():
        flags["--rotary-seq-len-interpolation-factor"] = int(law.factor)
    elif isinstance(law, Llama3) and _has_constants(law, _LLAMA3):
        flags |= {"--use-rope-scaling": True, "--rope-scaling-factor": law.factor}
    elif isinstance(law, Yarn):
        if rope.rotary_dim < rope.head_dim:
            _refuse(f"YaRN of {rope.rotary_dim} of {rope.head_dim} coordinates", rope, context)
        flags |= {
            "--position-embedding-type": "yarn",
            "--rotary-scaling-factor": law.factor,
            "--yarn-original-max-position-embeddings": law.original_max_positions,
            "--yarn-beta-fast": law.beta_fast,
            "--yarn-beta-slow": law.beta_slow,
            **_mscale_flags(law, rope, context),
        }
        rounded = "yarn-correction-range-round-to-int"
        flags[f"--{rounded}" if law.truncate else f"--no-{rounded}"] = True
    elif law is not None:
        _refuse_law(rope, context)
    return flags


def _latent_flags(rope: Rope, context: int) -> Flags:
    """The flags of latent attention, which reads interleaved pairs and writes half pairs."""
    base, law = _base_and_law(rope, context)
    flags: Flags = {
        "--multi-latent-attention": True,
        "--qk-pos-emb-head-dim": rope.head_dim,
        "--rope-type": "rope",
        "--rotary-base": base,
    }
    if isinstance(law, Yarn) and _has_constants(law, _LATENT_YARN):
        flags |= {"--rope-type": "yarn", "--rotary-scaling-factor": law.factor}
        flags |= _mscale_flags(law, rope, context)
    elif law is not None:
        _refuse_law(rope, context)
    return flags


def _base_and_law(rope: Rope, context: int) -> tuple[int, Law | None]:
    """``--rotary-base``, raised by an NTK law, and the remaining law."""
    form = ntk_as_base(rope)
    if form.base is None:
        _refuse("frequencies without a base", rope, context)
    if not form.base.is_integer():
        _refuse(f"a base of {form.base!r}, which is no whole number", rope, context)
    return int(form.base), form.law()


def _mscale_flags(law: Yarn, rope: Rope, context: int) -> Flags:
    if law.factor <= 1 and rope.attention_factor != 1:
        _refuse(f"YaRN by {law.factor:g} with a factor on cos and sin", rope, context)
    return {"--mscale": yarn_mscale(law), "--mscale-all-dim": law.mscale_all_dim}


def _has_constants(law: Llama3 | Yarn, constants: Mapping[str, Any]) -> bool:
    return all(getattr(law, name) == value for name, value in constants.items())


def _refuse_law(rope: Rope, context: int) -> NoReturn:
    has_flags = isinstance(rope.scaling, (Linear, Llama3, Yarn))
    numbers = " with other numbers than its code has" if has_flags else ""
    _refuse(_law_name(rope.scaling) + numbers, rope, context)


def _law_name(law: Law | Rule | None) -> str:
    return "no law" if law is None else f"the law {type(law).__name__}"


def _refuse(feature: str, rope: Rope, context: int) -> NoReturn:
    candidates = [other for other in plain_candidates(rope) if other.scaling is None]
    if isinstance(rope.scaling, Llama3):
        candidates.append(replace(rope, scaling=replace(rope.scaling, **_LLAMA3)))
    if isinstance(rope.scaling, Yarn):
        candidates.append(replace(rope, scaling=replace(rope.scaling, **_LATENT_YARN)))
    with_whole_base = [
        replace(other, axes=OneAxis(), base=float(max(2, round(other.base or 2))))
        for other in candidates
    ]
    TARGET.refuse(feature, rope, context, with_whole_base)


TARGET = Target(
    name="megatron",
    program="flags of Megatron-LM's training command",
    source="https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/training/arguments.py",
    checked="run",
    package="megatron-core",
    write=_write,
    needs_context=False,
    axes=(OneAxis, Sectioned),
    softmax=True,
    other_pairs_out=True,
)
