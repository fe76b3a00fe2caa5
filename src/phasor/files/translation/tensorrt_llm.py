"""TensorRT-LLM: keys of a checkpoint's config.json, from which its engines are built."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

from phasor.axes import OneAxis, Sectioned
from phasor.files.configs.writing import rotated_fraction
from phasor.files.translation.target import (
    PICK_LAW,
    ProgramSettings,
    Target,
    TranslationError,
    base_and_divisors,
    ntk_as_base,
    plain_candidates,
    yarn_mscale,
)
from phasor.files.translation.yaml_settings import main_and_local
from phasor.layers import LayerRopes
from phasor.pairings import PAIRINGS, Pairing, by_pairing
from phasor.rope import Rope
from phasor.scaling import Linear, Llama3, LongRope, Yarn

Keys = dict[str, Any]


def _scaling(rope: Rope) -> Keys | None:
    """``rotary_scaling`` of a law that has a type; None for one that is a list of divisors."""
    form = ntk_as_base(rope)
    law = form.scaling
    if form.direction < 0 or form.base is None:
        return None
    if law is None:
        return (
            {"type": "mrope", "mrope_section": list(form.axes.sections)}
            if isinstance(form.axes, Sectioned)
            else {}
        )
    original = {"original_max_position_embeddings": getattr(law, "original_max_positions", None)}
    if isinstance(law, Linear):
        return {"type": "linear", "factor": law.factor}
    if isinstance(law, Llama3):
        ends = {"low_freq_factor": law.low_freq_factor, "high_freq_factor": law.high_freq_factor}
        return {"type": "llama3", "factor": law.factor, **ends, **original}
    if isinstance(law, Yarn) and law.truncate and (law.factor > 1 or rope.attention_factor == 1):
        ends = {"beta_fast": law.beta_fast, "beta_slow": law.beta_slow}
        scales = {"mscale": yarn_mscale(law), "mscale_all_dim": law.mscale_all_dim}
        return {"type": "yarn", "factor": law.factor, **original, **ends, **scales}
    return None


def _lists(rope: Rope, context: int) -> Keys:
    """Two lists of divisors; the factor on cos and sin comes from two lengths."""
    law = rope.scaling
    if isinstance(law, LongRope):
        start = law.original_max_positions
        short, long = rope.at(start), rope.at(start + 1)
        gains = {short.attention_factor, long.attention_factor}
        # of the larger of them, and below 2**58 where no length gives them
        length = round(start ** min(max(gains) ** 2, 40 / math.log(start)))
        own = math.sqrt(max(1, math.log(length) / math.log(start)))
        if any(abs(gain - own) > 2**-24 for gain in gains):
            raise TranslationError(
                "tensorrt-llm computes one factor on cos and sin for both lists of LongRope, of "
                f"two lengths, and these have others; {PICK_LAW}"
            )
    else:
        short = long = rope
        length, gain = context, rope.attention_factor
        if gain < 1:
            feature = f"cos and sin multiplied by {gain:g}"
            TENSORRT_LLM.refuse(feature, rope, context, plain_candidates(rope))
        start = context if gain == 1 else context ** (1 / gain**2)
    base = base_and_divisors(long)[0]
    return {
        "position_embedding_type": "long_rope",
        "rotary_base": base,
        "max_position_embeddings": length,
        "original_max_position_embeddings": start,
        "longrope_scaling_short_factors": base_and_divisors(short)[1].tolist(),
        "longrope_scaling_long_factors": base_and_divisors(long)[1].tolist(),
        "rotary_scaling": None,
    }


def _pairings(rope: Rope) -> tuple[Pairing, ...]:
    return PAIRINGS if _scaling(rope) is not None and rope.axes.n_axes == 1 else ("half",)


def _write(ropes: LayerRopes, context: int) -> tuple[ProgramSettings, ...]:
    main, local = main_and_local(ropes)
    if main.rotary_start:
        feature = f"a rotation from coordinate {main.rotary_start} on"
        TENSORRT_LLM.refuse(feature, main, context)
    scaling = None if isinstance(main.scaling, LongRope) else _scaling(main)
    if main.axes.n_axes > 1 and (
        main.axes.n_axes != 3 or not scaling or scaling["type"] != "mrope"
    ):
        feature = f"positions of {main.axes.n_axes} axes with this law"
        TENSORRT_LLM.refuse(feature, main, context, [replace(main, axes=OneAxis())])
    keys: Keys = {"head_size": main.head_dim}
    if main.rotary_dim != main.head_dim:
        keys["rotary_pct"] = rotated_fraction(main.rotary_dim, main.head_dim)
    if scaling is None:
        keys |= _lists(main, context)
    else:
        word = by_pairing(main.pairing, half="rope_gpt_neox", interleaved="rope_gptj")
        keys |= {
            "position_embedding_type": "mrope" if main.axes.n_axes > 1 else word,
            "rotary_base": ntk_as_base(main).base,
            "max_position_embeddings": context,
            "rotary_scaling": scaling or None,
        }
    if local is not None:
        # it scales both alike; those of YaRN and of lists have no second base
        same = replace(ntk_as_base(local), base=ntk_as_base(main).base) == ntk_as_base(main)
        if len(ropes.ropes) > 2 or not same or isinstance(main.scaling, Yarn) or scaling is None:
            TENSORRT_LLM.only_rope(ropes, context)
        keys["rope_local_base_freq"] = ntk_as_base(local).base
    kinds = {kind: rope for kind, rope in ropes.kinds.items() if rope is not None}
    notes = ["Its PyTorch backend reads none of these keys, but those for transformers."]
    if isinstance(main.scaling, LongRope):
        notes.append("Which list a batch takes is decided in its kernels, which were not run.")
    if unrotated := [kind for kind, rope in ropes.kinds.items() if rope is None]:
        notes.append(f"The architecture has to leave {' and '.join(unrotated)} layers as they are.")
    if not isinstance(main.scaling, LongRope) and main.softmax_factor != 1:
        notes.append(
            f"The architecture has to multiply its softmax scale by {main.softmax_factor!r}: that "
            "of DeepSeek does."
        )
    return (ProgramSettings(keys, json.dumps(keys, indent=2), tuple(notes), kinds),)


TENSORRT_LLM = Target(
    name="tensorrt-llm",
    program="keys of a checkpoint's config.json for TensorRT-LLM",
    source="https://github.com/NVIDIA/TensorRT-LLM/blob/main/tensorrt_llm/layers/attention.py",
    checked="description",
    write=_write,
    pairings=_pairings,
    backwards=True,
    axes=(OneAxis, Sectioned),
    rules=(LongRope,),
    softmax=True,
)
