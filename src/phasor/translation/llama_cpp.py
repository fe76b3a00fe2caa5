"""llama.cpp: the flags that replace what a GGUF file says about scaling."""

from __future__ import annotations

from typing import Any

from phasor.axes import InterleavedSections, OneAxis, Sectioned
from phasor.layers import LayerRopes
from phasor.rope import Rope
from phasor.scaling import Linear, Yarn, yarn_multiplier
from phasor.translation.gguf import ggml_form, is_ggml_yarn
from phasor.translation.target import Part, Target, plain_candidates


def _write(ropes: LayerRopes, context: int) -> tuple[Part, ...]:
    rope, sections, notes = ggml_form(TARGET, TARGET.only_rope(ropes, context), context)
    settings = {"--rope-freq-base": rope.base, **_scaling(rope, context)}
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
    return (
        Part(
            ropes={kind: rope for kind, other in ropes.kinds.items() if other is not None},
            settings=settings,
            code=f"llama-server -m FILE {flags}",
            notes=(
                *notes,
                f"{file}.",
                "The file must not have rope_freqs or rope_factors tensors, nor the keys "
                "rope.scaling.attn_factor and rope.scaling.yarn_log_multiplier: they would scale "
                "too.",
                "Most architectures with sliding windows (gemma3 and gpt-oss) give those layers "
                "the base and the scale of the file, whatever the flags are.",
            ),
        ),
    )


def _scaling(rope: Rope, context: int) -> dict[str, Any]:
    law = rope.scaling
    if rope.base is not None and law is None:
        return {"--rope-scaling": "none"}
    if isinstance(law, Linear):
        return {"--rope-scaling": "linear", "--rope-scale": law.factor}
    if not is_ggml_yarn(rope) and rope.attention_factor != 1:
        TARGET.refuse(
            f"cos and sin multiplied by {rope.attention_factor:g} (a GGUF file can: gguf)",
            rope, context, plain_candidates(rope),
        )  # fmt: skip
    if not isinstance(law, Yarn) or not is_ggml_yarn(rope):
        TARGET.refuse(
            "frequencies other than base ** (-2k / d), or these divided by one factor or by YaRN's "
            "ramp between whole pairs (a GGUF file can: gguf)",
            rope, context, plain_candidates(rope),
        )  # fmt: skip
    usual = yarn_multiplier(law.factor, 1.0)
    if rope.attention_factor != usual:
        # --yarn-attn-factor is overwritten where YaRN is on
        TARGET.refuse(
            f"YaRN with cos and sin multiplied by {rope.attention_factor:g}: its flags always give "
            f"{usual:g} (a GGUF file can: gguf)",
            rope, context, plain_candidates(rope),
        )  # fmt: skip
    return {
        "--rope-scaling": "yarn",
        "--rope-scale": law.factor,
        "--yarn-orig-ctx": law.original_max_positions,
        "--yarn-beta-fast": law.beta_fast,
        "--yarn-beta-slow": law.beta_slow,
    }


TARGET = Target(
    name="llama.cpp",
    program="flags for a GGUF file without scaling",
    source="https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md",
    checked="description",
    write=_write,
    axes=(OneAxis, Sectioned, InterleavedSections),
)
