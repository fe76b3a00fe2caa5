"""Programs that train: flags of Megatron-LM, and YAML files for litgpt and MaxText."""

from __future__ import annotations

from dataclasses import replace
from typing import NoReturn

from phasor.axes import InterleavedSections, OneAxis, Sectioned
from phasor.files.configs.writing import rotated_fraction
from phasor.files.dialects.target import (
    LLAMA4_FACTOR,
    SOFTMAX_NOTE,
    Keys,
    ProgramSettings,
    Target,
    TranslationError,
    as_yaml,
    is_latent,
    law_numbers,
    layers_with,
    linear_factor,
    main_and_local,
    model_family,
    mscales,
    ntk_as_base,
    plain_candidates,
    rotating,
    softmax_notes,
    with_whole_base,
)
from phasor.layers import LayerRopes, one_layer
from phasor.pairings import Pairing
from phasor.rope import Rope
from phasor.scaling import Law, Linear, Llama3, Proportional, Rule, Yarn, yarn_multiplier

# Megatron-LM: flags of its training command.

#: The flag for the kind of rotation, by whether attention is latent.
_TYPE_FLAG = {False: "--position-embedding-type", True: "--rope-type"}
# constants in the code of --use-rope-scaling, which reads only the factor
_LLAMA3: Keys = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_positions": 8192}
# constants in the code of latent attention
_LATENT_YARN: Keys = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_positions": 4096,
    "truncate": True,
}


def _write_megatron(ropes: LayerRopes, _context: int) -> ProgramSettings:
    rope, *others = ropes.ropes
    if others:
        raise TranslationError(
            f"megatron has one rotation for all layers, and {ropes.name} has {len(ropes.ropes)} "
            "ropes: translate one of them"
        )
    if rope.rotary_start:
        MEGATRON.refuse(f"a rotation from coordinate {rope.rotary_start} on", rope, [])
    latent = is_latent(ropes, rope)  # then it reads interleaved pairs and writes half pairs
    if not latent and (isinstance(rope.scaling, Yarn) or isinstance(rope.axes, Sectioned)):
        rope = replace(rope, pairing="half", pairing_out=None)
    form = ntk_as_base(rope)
    if form.base is None:
        _refuse_flags("frequencies without a base", rope)
    if not form.base.is_integer():
        _refuse_flags(f"a base of {form.base!r}, which is no whole number", rope)
    width = "--qk-pos-emb-head-dim" if latent else "--kv-channels"
    flags: Keys = {"--multi-latent-attention": True} if latent else {}
    # without the first flag Megatron adds learned embeddings, also beside latent attention
    flags |= {_TYPE_FLAG[False]: "rope", _TYPE_FLAG[latent]: "rope"}
    flags |= {width: rope.head_dim, "--rotary-base": int(form.base)}
    if rope.rotary_dim < rope.head_dim:
        flags["--rotary-percent"] = rotated_fraction(rope.rotary_dim, rope.head_dim)
    if rope.pairing == "interleaved" and not latent:
        flags["--rotary-interleaved"] = True
    if isinstance(rope.axes, Sectioned):
        if rope.axes.n_axes != 3 or not isinstance(form.scaling, (type(None), Linear)):
            law = _law_name(form.scaling)
            _refuse_flags(f"positions of {rope.axes.n_axes} axes with {law}", rope)
        flags[_TYPE_FLAG[False]] = "mrope"
        flags["--mrope-section"] = " ".join(map(str, rope.axes.sections))
    if form.scaling is not None:
        flags |= _law_flags(rope, form.scaling, latent=latent)
    unrotated = layers_with(ropes, None).numbers
    notes = [] if latent else softmax_notes(rope.softmax_factor)
    if latent and any(unrotated):
        notes.append("Latent attention rotates in all its layers: others must be of another kind.")
    elif any(unrotated):
        flags["--no-rope-freq"] = f"[{','.join(map(str, unrotated))}]"
    notes.append(
        "Megatron-Bridge and NeMo read the same numbers as fields of a model's configuration: "
        "rotary_base, rotary_percent, seq_len_interpolation_factor, "
        f"{'' if latent else 'yarn_'}rotary_scaling_factor."
    )
    # a shell would read the list's brackets as a pattern of file names
    texts = {name: f"'{v}'" if str(v).startswith("[") else v for name, v in flags.items()}
    words = [name if text is True else f"{name} {text}" for name, text in texts.items()]
    kinds = dict.fromkeys(rotating(ropes), replace(rope, pairing_out="half" if latent else None))
    return ProgramSettings(flags, " ".join(words), tuple(notes), kinds)


def _law_flags(rope: Rope, law: Law | Rule, *, latent: bool) -> Keys:
    flags: Keys = {}
    if isinstance(law, Yarn) and (not latent or law == replace(law, **_LATENT_YARN)):
        if rope.rotary_dim < rope.head_dim:
            _refuse_flags(f"YaRN of {rope.rotary_dim} of {rope.head_dim} coordinates", rope)
        if law.factor <= 1 and rope.attention_factor != 1:
            _refuse_flags(f"YaRN by {law.factor:g} with a factor on cos and sin", rope)
        flags = {_TYPE_FLAG[latent]: "yarn", "--rotary-scaling-factor": law.factor}
        flags |= {f"--{name.replace('_', '-')}": value for name, value in mscales(law).items()}
        if not latent:
            rounded = "yarn-correction-range-round-to-int"
            flags[f"--{rounded}" if law.truncate else f"--no-{rounded}"] = True
            flags |= law_numbers(
                law,
                original_max_positions="--yarn-original-max-position-embeddings",
                beta_fast="--yarn-beta-fast",
                beta_slow="--yarn-beta-slow",
            )
    elif isinstance(law, Linear) and law.factor.is_integer() and not latent:
        flags = {"--rotary-seq-len-interpolation-factor": int(law.factor)}
    elif isinstance(law, Llama3) and law == replace(law, **_LLAMA3) and not latent:
        flags = {"--use-rope-scaling": True, "--rope-scaling-factor": law.factor}
    if not flags:
        has_flags = isinstance(rope.scaling, (Linear, Llama3, Yarn))
        numbers = " with other numbers than its code has" if has_flags else ""
        _refuse_flags(_law_name(rope.scaling) + numbers, rope)
    return flags


def _law_name(law: Law | Rule | None) -> str:
    return "no law" if law is None else f"the law {type(law).__name__}"


def _refuse_flags(feature: str, rope: Rope) -> NoReturn:
    candidates = [other for other in plain_candidates(rope) if other.scaling is None]
    if isinstance(law := rope.scaling, Llama3):
        candidates.append(replace(rope, scaling=replace(law, **_LLAMA3)))
    if isinstance(law, Yarn):
        candidates.append(replace(rope, scaling=replace(law, **_LATENT_YARN)))
    MEGATRON.refuse(feature, rope, map(with_whole_base, candidates))


MEGATRON = Target(
    name="megatron",
    program="flags of Megatron-LM's training command",
    source="https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/training/arguments.py",
    checked="run",
    package="megatron-core",
    write=_write_megatron,
    other_pairs_out=True,
    axes=(OneAxis, Sectioned),
    softmax_note="",
)


# litgpt and MaxText: keys of a YAML file that makes a model.


def _written(ropes: LayerRopes, pairing: Pairing) -> dict[str, Rope]:
    """The ropes of a program that writes these pairs."""
    return {kind: replace(rope, pairing_out=pairing) for kind, rope in rotating(ropes).items()}


def _refuse_keys(target: Target, rope: Rope) -> NoReturn:
    """Refuse a law with these numbers, or what is no power of a base."""
    law = rope.scaling
    feature = f"the law {type(law).__name__} with these numbers" if law else "such a base here"
    if rope.rotary_start:
        feature = f"a rotation from coordinate {rope.rotary_start} on"
    elif rope.base is None:
        feature = "frequencies without a base"
    near = [replace(plain, axes=OneAxis()) for plain in plain_candidates(rope)]
    target.refuse(feature, rope, [*near, *map(with_whole_base, near)])


# MaxText

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
        _refuse_keys(MAXTEXT, main)
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
