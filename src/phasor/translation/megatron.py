"""Megatron-LM: flags of its training command."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NoReturn

from phasor.axes import OneAxis, Sectioned
from phasor.configs.writing import rotated_fraction
from phasor.layers import LayerRopes
from phasor.rope import Rope
from phasor.scaling import Law, Linear, Llama3, Rule, Yarn
from phasor.translation.target import (
    Part,
    Target,
    TranslationError,
    ntk_as_base,
    plain_candidates,
    softmax_note,
    yarn_mscale,
)

Flags = dict[str, Any]

# what the code of --use-rope-scaling has for everything but the factor
_LLAMA3: Flags = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_positions": 8192}
# what latent attention has, which reads no flags for these
_LATENT_YARN: Flags = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_positions": 4096,
    "truncate": True,
}


def _write(ropes: LayerRopes, context: int) -> tuple[Part, ...]:
    rope, *others = ropes.ropes
    if others:
        raise TranslationError(
            f"megatron has one rotation for all layers, and {ropes.name} has {len(ropes.ropes)} "
            "ropes: translate one of them"
        )
    if rope.rotary_start:
        TARGET.refuse(f"a rotation from coordinate {rope.rotary_start} on", rope, context)
    # latent attention rotates a part of its own, with one key for all heads
    whole = rope.rotary_dim == rope.head_dim and isinstance(rope.axes, OneAxis)
    latent = rope.pairing == "interleaved" and whole and ropes.num_kv_heads == 1
    notes: list[str] = []
    only_half = isinstance(rope.scaling, Yarn) or isinstance(rope.axes, Sectioned)
    if rope.pairing == "interleaved" and only_half and not latent:
        rope, note = TARGET.reorder(rope, "half")
        notes.append(note)
    flags = _latent(rope, context) if latent else _common(rope, context)
    skipped = [int(ropes.kinds[kind] is None) for kind in ropes.layer_kinds]
    if any(skipped):
        flags["--no-rope-freq"] = f"[{','.join(map(str, skipped))}]"
    performed = replace(rope, pairing_out="half" if latent else None)
    if performed != rope:
        notes.append(
            f"megatron writes {performed.output_pairing} pairs here: attention scores are the "
            "same, coordinates of cached keys are in another order."
        )
    if rope.softmax_factor != 1 and not latent:
        notes.append(softmax_note(rope.softmax_factor))
    return (
        Part(
            ropes={kind: performed for kind, other in ropes.kinds.items() if other is not None},
            settings=flags,
            code=" ".join(
                name if value is True else f"{name} {_in_shell(value)}"
                for name, value in flags.items()
            ),
            notes=tuple(notes),
        ),
    )


def _in_shell(value: Any) -> str:
    # a shell reads brackets as a pattern of file names
    return f"'{value}'" if str(value).startswith("[") else str(value)


def _common(rope: Rope, context: int) -> Flags:
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
            _refuse(f"positions of {rope.axes.n_axes} axes with {_name(law)}", rope, context)
        flags["--position-embedding-type"] = "mrope"
        flags["--mrope-section"] = " ".join(map(str, rope.axes.sections))
    if isinstance(law, Linear) and law.factor.is_integer():
        flags["--rotary-seq-len-interpolation-factor"] = int(law.factor)
    elif isinstance(law, Llama3) and _has(law, _LLAMA3):
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
            **_mscales(law, rope, context),
        }
        rounded = "yarn-correction-range-round-to-int"
        flags[f"--{rounded}" if law.truncate else f"--no-{rounded}"] = True
    elif law is not None:
        _refuse_law(rope, context)
    return flags


def _latent(rope: Rope, context: int) -> Flags:
    """The flags of latent attention, which reads interleaved pairs and writes halves."""
    base, law = _base_and_law(rope, context)
    flags: Flags = {
        "--multi-latent-attention": True,
        "--qk-pos-emb-head-dim": rope.head_dim,
        "--rope-type": "rope",
        "--rotary-base": base,
    }
    if isinstance(law, Yarn) and _has(law, _LATENT_YARN):
        flags |= {"--rope-type": "yarn", "--rotary-scaling-factor": law.factor}
        flags |= _mscales(law, rope, context)
    elif law is not None:
        _refuse_law(rope, context)
    return flags


def _base_and_law(rope: Rope, context: int) -> tuple[int, Law | None]:
    """``--rotary-base``, with what NTK laws make of it, and the law that is left."""
    form = ntk_as_base(rope)
    if form.base is None:
        _refuse("frequencies without a base", rope, context)
    if not form.base.is_integer():
        _refuse(f"a base of {form.base!r}, which is no whole number", rope, context)
    return int(form.base), form.law()


def _mscales(law: Yarn, rope: Rope, context: int) -> Flags:
    if law.factor <= 1 and rope.attention_factor != 1:
        _refuse(f"YaRN by {law.factor:g} with a factor on cos and sin", rope, context)
    return {"--mscale": yarn_mscale(law), "--mscale-all-dim": law.mscale_all_dim}


def _has(law: Llama3 | Yarn, constants: Mapping[str, Any]) -> bool:
    return all(getattr(law, name) == value for name, value in constants.items())


def _refuse_law(rope: Rope, context: int) -> NoReturn:
    known = isinstance(rope.scaling, (Linear, Llama3, Yarn))
    more = " with other numbers than its code has" if known else ""
    _refuse(_name(rope.scaling) + more, rope, context)


def _name(law: Law | Rule | None) -> str:
    return "no law" if law is None else f"the law {type(law).__name__}"


def _refuse(what: str, rope: Rope, context: int) -> NoReturn:
    known = [other for other in plain_candidates(rope) if other.scaling is None]
    if isinstance(rope.scaling, Llama3):
        known.append(replace(rope, scaling=replace(rope.scaling, **_LLAMA3)))
    if isinstance(rope.scaling, Yarn):
        known.append(replace(rope, scaling=replace(rope.scaling, **_LATENT_YARN)))
    whole = [
        replace(other, axes=OneAxis(), base=float(max(2, round(other.base or 2))))
        for other in known
    ]
    TARGET.refuse(what, rope, context, whole)


TARGET = Target(
    name="megatron",
    program="flags of Megatron-LM's training command",
    source="https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/training/arguments.py",
    checked="run",
    package="megatron-core",
    write=_write,
    axes=(OneAxis, Sectioned),
    softmax=True,
    other_pairs_out=True,
)
