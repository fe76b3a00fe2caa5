"""MaxText: keys of the YAML file that makes a model. No reader of its files is here."""

from __future__ import annotations

from dataclasses import replace
from typing import NoReturn

from phasor.axes import InterleavedSections, OneAxis
from phasor.files.configs.writing import rotated_fraction
from phasor.files.dialects.target import (
    LLAMA4_FACTOR,
    SOFTMAX_NOTE,
    Keys,
    ProgramSettings,
    Target,
    as_yaml,
    law_numbers,
    layers_with,
    linear_factor,
    main_and_local,
    model_family,
    ntk_as_base,
    plain_candidates,
    rotating,
    with_whole_base,
)
from phasor.layers import LayerRopes, one_layer
from phasor.pairings import Pairing
from phasor.rope import Rope
from phasor.scaling import Llama3, Proportional, Yarn, yarn_multiplier


def _written(ropes: LayerRopes, pairing: Pairing) -> dict[str, Rope]:
    """The ropes of a program that writes these pairs."""
    return {kind: replace(rope, pairing_out=pairing) for kind, rope in rotating(ropes).items()}


def _refuse(rope: Rope) -> NoReturn:
    """Refuse a law with these numbers, or what is no power of a base."""
    law = rope.scaling
    feature = f"the law {type(law).__name__} with these numbers" if law else "such a base here"
    if rope.rotary_start:
        feature = f"a rotation from coordinate {rope.rotary_start} on"
    elif rope.base is None:
        feature = "frequencies without a base"
    near = [replace(plain, axes=OneAxis()) for plain in plain_candidates(rope)]
    MAXTEXT.refuse(feature, rope, [*near, *map(with_whole_base, near)])


#: Divides bases that are no whole numbers, of which it takes none; a power of two divides exactly.
_UNIT = 2**24


def _maxtext_keys(rope: Rope) -> Keys:
    """The keys of one rope; none if no class of MaxText turns so."""
    form = ntk_as_base(rope)
    base, law, sections = form.base, form.scaling, not isinstance(form.axes, OneAxis)
    if base is None or form.rotary_start:
        return {}
    half, whole_head = form.pairing == "half", form.rotary_dim == form.head_dim and not sections
    factor, whole = linear_factor(form), base.is_integer()
    if half and factor is not None and whole_head:
        unit = 1 if whole else _UNIT
        return {
            "rope_type": "default",
            "rope_min_timescale": unit,
            "rope_max_timescale": round(base * unit),
            "rope_linear_scaling_factor": factor / unit,
        }
    if law == Llama3(factor=8.0, original_max_positions=8192) and not half:
        factor = 1.0  # the law is in the code of a class
    scale = int(factor) if factor is not None and factor.is_integer() else 0
    scaled = {"rope_min_timescale": scale, "rope_max_timescale": int(base * scale)}
    if half and scale and whole:
        keys: Keys = {"rope_type": "default", **scaled, "rope_linear_scaling_factor": 1.0}
        keys["partial_rotary_factor"] = rotated_fraction(form.rotary_dim, form.head_dim)
        counts = {"use_mrope": True, "mrope_section": list(form.axes.counts(form.num_pairs))}
        return keys | counts if sections else keys
    if not whole or not whole_head:
        return {}
    if not half and scale:
        return {"rope_type": "llama3.1", "rope_use_scale": isinstance(law, Llama3), **scaled}
    return _maxtext_yarn(form, law, base) if isinstance(law, Yarn) else {}


def _maxtext_yarn(rope: Rope, law: Yarn, base: float) -> Keys:
    gain = rope.attention_factor
    numbers = law_numbers(law, "beta_fast", "beta_slow", factor="rope_factor")
    usual_gain = gain in (1, yarn_multiplier(law.factor, 1))
    if not usual_gain or not all(map(float.is_integer, numbers.values())):
        return {}
    interleaved = rope.pairing == "interleaved"
    return {
        "rope_type": "yarn",
        "rope_max_timescale": int(base),
        "original_max_position_embeddings": law.original_max_positions,
        **{name: int(number) for name, number in numbers.items()},
        "mscale": law.mscale_all_dim,  # of latent attention's softmax
        "rope_interleave": interleaved,
        "rope_pairwise": interleaved and rope.output_pairing == "interleaved",
        "rope_truncate": law.truncate,
        "rope_attention_scaling": gain != 1,
    }


def _deepseek4_keys(ropes: LayerRopes) -> Keys:
    """The bases of DeepSeek V4's block, which turns the end of a head; none for other ropes."""
    keys: Keys = {"rope_type": "default"}
    for kind, rope in rotating(ropes).items():
        form = ntk_as_base(rope)
        at_end = 0 < form.rotary_start == form.head_dim - form.rotary_dim
        plain = form.base and form.base.is_integer() and form.scaling is None
        if not at_end or not plain or form.pairing == "half" or form.axes.n_axes > 1:
            return {}
        base = int(form.base or 0)
        key = "compressed_rope_max_timescale" if "compressed" in kind else "rope_max_timescale"
        if keys.setdefault(key, base) != base:
            return {}
    return keys


def _write_maxtext(ropes: LayerRopes, context: int) -> ProgramSettings:
    main, local = main_and_local(ropes)
    if keys := _deepseek4_keys(ropes):
        sizes = f"head_dim {main.head_dim} and qk_rope_head_dim {main.rotary_dim}"
        note = f"The decoder_block has to be deepseek4, with {sizes}: others turn from the start."
        return as_yaml(keys, [note], _written(ropes, "interleaved"))
    keys = _maxtext_keys(main)
    notes = [f"head_dim, in latent attention qk_rope_head_dim, has to be {main.head_dim}."]
    if local is not None:
        keys, name = _maxtext_pair(ropes, main, local)
        if name:
            notes = [f"model_name has to begin with {name}: others turn these layers otherwise."]
        else:
            notes.append("The decoder_block decides which layers are local.")
    if not keys:
        _refuse(main)
    if keys["rope_type"] == "yarn":
        # the length of its table, and beyond the first length it scales latent attention's softmax
        start = keys["original_max_position_embeddings"]
        keys["max_position_embeddings"] = max(context, start + 1)
    elif ropes.num_kv_heads == 1:
        keys["mscale"] = 0.0
    if keys["rope_type"] != "llama3.1":
        notes.append("model_name must not begin with llama3.1, whose rope is in the code.")
    if keys.get("partial_rotary_factor", 1) != 1:
        notes.append("The decoder_block has to be qwen3_next or qwen3_5: others turn whole heads.")
    if interval := layers_with(ropes, None).interval:
        keys["nope_layer_interval"] = interval
        notes.append("Of the decoder_blocks that of Llama 4 alone reads nope_layer_interval.")
    if LLAMA4_FACTOR in ropes.query_factors.values():
        keys["temperature_tuning"] = True
    in_pairs = keys["rope_type"] == "llama3.1" or keys.get("rope_pairwise")
    pairs: Pairing = "interleaved" if in_pairs else "half"
    return as_yaml(keys, notes, _written(ropes, pairs))


def _maxtext_pair(ropes: LayerRopes, main: Rope, local: Rope) -> tuple[Keys, str]:
    """The keys of two ropes, and how the model's name has to begin."""
    name = model_family(ropes).replace("-", "").replace("_", "")
    sliding = all(("sliding" in kind) == (rope == local) for kind, rope in ropes.kinds.items())
    law, second = main.scaling, _maxtext_keys(local)
    of_gemma4 = isinstance(law, Proportional) and law.factor == 1 and name.startswith("gemma4")
    first = _maxtext_keys(replace(main, scaling=None) if of_gemma4 else main)
    of_gemma3 = local.scaling is None and law is not None and name.startswith("gemma3")
    units = [keys.get("rope_min_timescale") for keys in (first, second)]
    whole_heads = "rope_linear_scaling_factor" in first and max(len(first), len(second)) <= 4
    has_keys = whole_heads and units[0] == units[1]
    if of_gemma3 or of_gemma4:  # which divide no positions in sliding layers
        has_keys = has_keys and second["rope_linear_scaling_factor"] == 1
    else:
        has_keys = has_keys and local.scaling == law
    if not sliding or len(ropes.ropes) > 2 or not has_keys:
        MAXTEXT.only_rope(ropes)
    if isinstance(law, Proportional):
        turning = 2 * int(law.fraction * main.rotary_dim // 2)
        return {
            **first,
            "global_rope_max_timescale": first["rope_max_timescale"],
            "global_rope_proportion": rotated_fraction(turning, main.rotary_dim),
            "local_rope_max_timescale": second["rope_max_timescale"],
            "local_rope_proportion": 1.0,
        }, "gemma4"
    first["local_rope_max_timescale"] = second["rope_max_timescale"]
    return first, "gemma3" if of_gemma3 else ""


MAXTEXT = Target(
    name="maxtext",
    program="keys of a configuration of MaxText",
    source="https://github.com/AI-Hypercomputer/maxtext/blob/main/src/maxtext/configs/base.yml",
    checked="engine",
    write=_write_maxtext,
    takes=lambda rope: bool(_maxtext_keys(rope) or _deepseek4_keys(one_layer(rope))),
    other_pairs_out=True,
    axes=(OneAxis, InterleavedSections),
    softmax_note=f"In other than latent attention: {SOFTMAX_NOTE}",
    leaves_layers="The decoder_block",
    query_factor=lambda factor, rope: factor == LLAMA4_FACTOR,
)
