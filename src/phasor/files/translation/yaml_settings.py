"""litgpt and MaxText: keys of a YAML file that makes a model."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NoReturn, cast

from phasor.axes import InterleavedSections, OneAxis
from phasor.files.configs.writing import rotated_fraction
from phasor.files.translation.target import (
    LLAMA4_FACTOR,
    ProgramSettings,
    Target,
    TranslationError,
    model_family,
    ntk_as_base,
    plain_candidates,
    softmax_note,
    yarn_mscale,
)
from phasor.layers import LayerRopes
from phasor.pairings import PAIRINGS, Pairing, by_pairing
from phasor.rope import Rope
from phasor.scaling import Linear, Llama3, Proportional, Yarn, yarn_multiplier

Keys = dict[str, Any]


def _as_yaml(value: Any) -> str:
    """A value on one line, as every version of YAML reads it."""
    if isinstance(value, dict):
        items = cast(Keys, value).items()
        return f"{{{', '.join(f'{name}: {_as_yaml(one)}' for name, one in items)}}}"
    text = json.dumps(value)
    # version 1.1 takes a number with an exponent and no point for a text
    return text.replace("e", ".0e") if isinstance(value, float) and "." not in text else text


def _settings(
    target: Target, ropes: LayerRopes, kinds: Mapping[str, Rope], keys: Keys, notes: Iterable[str]
) -> tuple[ProgramSettings, ...]:
    """The one part of a file; a note says where it writes other pairs than the model."""
    written = {rope.output_pairing: ropes.kinds[kind] for kind, rope in kinds.items()}
    others = [
        pairing
        for pairing, model in written.items()
        if model is not None and pairing != model.output_pairing
    ]
    notes = (
        *notes,
        *(
            f"{target.name} writes {pairing} pairs here: attention scores are the same, "
            "coordinates of cached keys are in another order."
            for pairing in others
        ),
    )
    code = "\n".join(f"{name}: {_as_yaml(value)}" for name, value in keys.items())
    return (ProgramSettings(keys, code, tuple(notes), kinds),)


def main_and_local(ropes: LayerRopes) -> tuple[Rope, Rope | None]:
    """The rope of a model, or its two: the second is that of sliding layers, or has no law."""
    kinds = sorted(ropes.kinds.items(), key=lambda item: "sliding" in item[0])
    first, *others = dict.fromkeys(rope for _, rope in kinds if rope is not None)
    return first, others[0] if others else None


def _whole(number: float) -> float:
    return int(number) if number.is_integer() else number


def _refuse(target: Target, rope: Rope, context: int) -> NoReturn:
    """Refuse a law with these numbers, or what is no power of a base."""
    near = [*plain_candidates(rope), *map(_with_whole_base, plain_candidates(rope))]
    law = rope.scaling
    if isinstance(law, Yarn):
        near += [replace(rope, scaling=replace(law, truncate=True))]
    feature = f"the law {type(law).__name__} with these numbers" if law else "such a base here"
    if rope.rotary_start:
        feature = f"a rotation from coordinate {rope.rotary_start} on"
    elif rope.base is None:
        feature = "frequencies without a base"
    target.refuse(feature, rope, context, [replace(one, axes=OneAxis()) for one in near])


def _with_whole_base(rope: Rope) -> Rope:
    return replace(rope, base=float(max(2, round(rope.base or 2))))


# litgpt


def _adjustments(rope: Rope, context: int) -> Keys:
    """``rope_adjustments`` for a rope with a base."""
    law, size = rope.scaling, rope.rotary_dim
    if law is None:
        return {}
    if isinstance(law, Linear):
        return {"factor": law.factor}
    if isinstance(law, Llama3):
        ends = {"low_freq_factor": law.low_freq_factor, "high_freq_factor": law.high_freq_factor}
        return {"factor": law.factor, **ends, "original_max_seq_len": law.original_max_positions}
    gain = rope.attention_factor
    if not isinstance(law, Yarn) or not law.truncate or (law.factor <= 1 and gain != 1):
        _refuse(LITGPT, rope, context)
    begin, end = _ramp(rope, law)
    if begin > end:
        _refuse(LITGPT, rope, context)
    # its ramp falls from the first index to the second, which it rounds towards each other
    turns = law.original_max_positions / (2 * math.pi)
    assert rope.base is not None, "a law scales the powers of a base"
    keys: Keys = {
        "factor": law.factor,
        "beta_fast": turns * rope.base ** (-(2 * max(end, begin + 1) + 1) / size),
        "beta_slow": turns * rope.base ** (-(2 * begin - 1) / size),
        "original_max_seq_len": law.original_max_positions,
    }
    if law.mscale_all_dim or gain != 1:
        # a scale of 0 is none
        keys |= {"mscale": yarn_mscale(law) or 1e-30, "mscale_all_dim": law.mscale_all_dim}
    return keys


def _ramp(rope: Rope, law: Yarn) -> tuple[int, int]:
    """The whole indices between which a rounded ramp lies."""
    assert rope.base is not None, "a law scales the powers of a base"
    pairs_by_turns = rope.num_pairs / math.log(rope.base)
    turns = law.original_max_positions / (2 * math.pi)
    begin, end = (pairs_by_turns * math.log(turns / b) for b in (law.beta_fast, law.beta_slow))
    return max(math.floor(begin), 0), min(math.ceil(end), rope.rotary_dim - 1)


def _write_litgpt(ropes: LayerRopes, context: int) -> tuple[ProgramSettings, ...]:
    if None in ropes.kinds.values():
        raise TranslationError(
            f"litgpt rotates in every layer, and {ropes.name} has layers without a rotation"
        )
    main, local = (rope and ntk_as_base(rope) for rope in main_and_local(ropes))
    assert main is not None, "translate refuses models without a rotation"
    if local is not None and main.scaling is None and local.scaling is not None:
        main, local = local, main
    keys: Keys = {}
    if local is not None:
        same = replace(local, base=main.base, scaling=main.scaling) == main
        laws = isinstance(main.scaling, (Linear, type(None))), isinstance(local.scaling, Linear)
        gain = main.attention_factor != 1  # which it gives all layers
        if len(ropes.ropes) > 2 or not same or gain or (local.scaling and laws != (True, True)):
            LITGPT.only_rope(ropes, context)
        if isinstance(law := local.scaling, Linear):
            keys["rope_condense_ratio"] = law.factor
            factor = main.scaling.factor if isinstance(main.scaling, Linear) else 1.0
            main = replace(main, scaling=Linear(factor=factor / law.factor))
    if main.base is None or main.rotary_start:
        _refuse(LITGPT, main, context)
    keys = {
        "rope_base": _whole(main.base),
        "rotary_percentage": rotated_fraction(main.rotary_dim, main.head_dim),
        "rope_interleave": main.pairing == "interleaved",
        **keys,
    }
    notes = [f"head_size, in latent attention qk_rope_head_dim, has to be {main.head_dim}."]
    if adjustments := _adjustments(main, context):
        keys["rope_adjustments"] = adjustments
    if isinstance(law := main.scaling, Yarn):
        notes.append(
            "litgpt 0.5.13 divides the fast pairs in place of the slow ones: these betas are made "
            "so that it divides the right ones. A version without that fault is to be given "
            f"beta_fast: {law.beta_fast:g} and beta_slow: {law.beta_slow:g}."
        )
    if local is not None:
        is_local = {
            kind: int(rope is not None and ntk_as_base(rope) == local)
            for kind, rope in ropes.kinds.items()
        }
        keys["rope_local_base_freq"] = local.base
        keys["rope_indices"] = [is_local[kind] for kind in ropes.layer_kinds]
    kinds = {kind: replace(rope, pairing_out="half") for kind, rope in ropes.kinds.items() if rope}
    return _settings(LITGPT, ropes, kinds, keys, notes)


LITGPT = Target(
    name="litgpt",
    program="keys of a model_config.yaml",
    source="https://github.com/Lightning-AI/litgpt/blob/main/litgpt/config.py",
    checked="engine",
    write=_write_litgpt,
    needs_context=False,
    softmax=True,
    other_pairs_out=True,
)


# MaxText

#: Divides bases that are no whole numbers, of which it takes none; a power of two divides exactly.
_UNIT = 2**24


def _maxtext_keys(rope: Rope) -> Keys | None:
    """The keys of one rope; None if no class of MaxText turns so."""
    form = ntk_as_base(rope)
    base, law, sections = form.base, form.scaling, not isinstance(form.axes, OneAxis)
    if base is None or form.rotary_start:
        return None
    whole_head = form.rotary_dim == form.head_dim and not sections
    factor = law.factor if isinstance(law, Linear) else 1.0
    plain, whole = law is None or isinstance(law, Linear), base.is_integer()
    scaled = {"rope_min_timescale": int(factor), "rope_max_timescale": int(base * factor)}
    if form.pairing == "half" and plain and whole_head:
        unit = 1 if whole else _UNIT
        return {
            "rope_type": "default",
            "rope_min_timescale": unit,
            "rope_max_timescale": round(base * unit),
            "rope_linear_scaling_factor": factor / unit,
        }
    if form.pairing == "half" and plain and whole and factor.is_integer():
        keys: Keys = {"rope_type": "default", **scaled, "rope_linear_scaling_factor": 1.0}
        keys["partial_rotary_factor"] = rotated_fraction(form.rotary_dim, form.head_dim)
        if sections:
            axes = form.axes.axis_of_pair(form.num_pairs)
            keys |= {"use_mrope": True, "mrope_section": [axes.count(axis) for axis in range(3)]}
        return keys
    if not whole or not whole_head:
        return None
    if form.pairing == "interleaved" and plain and factor.is_integer():
        return {"rope_type": "llama3.1", "rope_use_scale": False, **scaled}
    if form.pairing == "interleaved" and law == Llama3(factor=8.0, original_max_positions=8192):
        return {"rope_type": "llama3.1", "rope_use_scale": True, **scaled}
    if isinstance(law, Yarn):
        return _maxtext_yarn(form, law, base)
    return None


def _maxtext_yarn(rope: Rope, law: Yarn, base: float) -> Keys | None:
    gain = rope.attention_factor
    numbers = (law.factor, law.beta_fast, law.beta_slow)
    if not all(map(float.is_integer, numbers)) or gain not in (1, yarn_multiplier(law.factor, 1)):
        return None
    interleaved = rope.pairing == "interleaved"
    return {
        "rope_type": "yarn",
        "rope_max_timescale": int(base),
        "rope_factor": int(law.factor),
        "original_max_position_embeddings": law.original_max_positions,
        "beta_fast": int(law.beta_fast),
        "beta_slow": int(law.beta_slow),
        "mscale": law.mscale_all_dim,  # of latent attention's softmax
        "rope_interleave": interleaved,
        "rope_pairwise": interleaved and rope.output_pairing == "interleaved",
        "rope_truncate": law.truncate,
        "rope_attention_scaling": gain != 1,
    }


def _pairings_of_maxtext(rope: Rope) -> tuple[Pairing, ...]:
    other: Pairing = by_pairing(rope.pairing, half="interleaved", interleaved="half")
    if _maxtext_keys(rope) or not _maxtext_keys(replace(rope, pairing=other, pairing_out=None)):
        return PAIRINGS
    return (other,)


def _write_maxtext(ropes: LayerRopes, context: int) -> tuple[ProgramSettings, ...]:
    main, local = main_and_local(ropes)
    keys = _maxtext_keys(main)
    notes = [f"head_dim, in latent attention qk_rope_head_dim, has to be {main.head_dim}."]
    if local is not None:
        keys, name = _maxtext_pair(ropes, main, local)
        if keys is None:
            MAXTEXT.only_rope(ropes, context)
        if name:
            notes = [f"model_name has to begin with {name}: others turn these layers otherwise."]
    if keys is None:
        _refuse(MAXTEXT, main, context)
    if keys["rope_type"] == "yarn":
        # the length of its table, and beyond the first length it scales latent attention's softmax
        start = keys["original_max_position_embeddings"]
        keys["max_position_embeddings"] = max(context, start + 1)
        if main.softmax_factor != 1:
            notes.append(f"In other than latent attention: {softmax_note(main.softmax_factor)}")
    elif ropes.num_kv_heads == 1:
        keys["mscale"] = 0.0
    if keys["rope_type"] != "llama3.1":
        notes.append("model_name must not begin with llama3.1, whose rope is in the code.")
    if keys.get("partial_rotary_factor", 1) != 1:
        notes.append("The decoder_block has to be qwen3_next or qwen3_5: others turn whole heads.")
    if unrotated := [kind for kind, rope in ropes.kinds.items() if rope is None]:
        notes.append(
            f"The decoder_block has to leave {' and '.join(unrotated)} layers as they are."
        )
    if LLAMA4_FACTOR in ropes.query_factors.values():
        keys["temperature_tuning"] = True
    writes: Pairing = "interleaved" if keys["rope_type"] == "llama3.1" else "half"
    if keys.get("rope_pairwise"):
        writes = "interleaved"
    kinds = {kind: replace(rope, pairing_out=writes) for kind, rope in ropes.kinds.items() if rope}
    return _settings(MAXTEXT, ropes, kinds, keys, notes)


def _maxtext_pair(ropes: LayerRopes, main: Rope, local: Rope) -> tuple[Keys | None, str]:
    """The keys of two ropes, and how the model's name has to begin; None if it has no such pair."""
    name = model_family(ropes).replace("-", "").replace("_", "")
    sliding = all(("sliding" in kind) == (rope == local) for kind, rope in ropes.kinds.items())
    law, first, second = main.scaling, _maxtext_keys(main), _maxtext_keys(local)
    if not sliding or len(ropes.ropes) > 2 or second is None or local.base is None:
        return None, ""
    if isinstance(law, Proportional) and law.factor == 1 and name.startswith("gemma4"):
        first = _maxtext_keys(replace(main, scaling=None))
        turning = 2 * int(law.fraction * main.rotary_dim // 2)
        if not first or (first["rope_min_timescale"], second["rope_min_timescale"]) != (1, 1):
            return None, ""
        return {
            **first,
            "global_rope_max_timescale": first["rope_max_timescale"],
            "global_rope_proportion": rotated_fraction(turning, main.rotary_dim),
            "local_rope_max_timescale": second["rope_max_timescale"],
            "local_rope_proportion": 1.0,
        }, "gemma4"
    if first is None or "rope_linear_scaling_factor" not in first or len(first) > 4:
        return None, ""
    of_gemma3 = local.scaling is None and law is not None and name.startswith("gemma3")
    units = first["rope_min_timescale"], second.get("rope_min_timescale")
    if units[0] != units[1] or len(second) > 4 or not (of_gemma3 or local.scaling == law):
        return None, ""
    first["local_rope_max_timescale"] = second["rope_max_timescale"]
    return first, "gemma3" if of_gemma3 else ""


MAXTEXT = Target(
    name="maxtext",
    program="keys of a configuration of MaxText",
    source="https://github.com/AI-Hypercomputer/maxtext/blob/main/src/maxtext/configs/base.yml",
    checked="engine",
    write=_write_maxtext,
    # the table of YaRN has a length
    needs_context=lambda rope: isinstance(rope.scaling, Yarn),
    pairings=_pairings_of_maxtext,
    axes=(OneAxis, InterleavedSections),
    softmax=True,
    query_factor=LLAMA4_FACTOR.__eq__,
    other_pairs_out=True,
)
