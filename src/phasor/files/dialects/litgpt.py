"""litgpt: ``model_config.yaml``, also inside the file of a training run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from phasor.files import refusal
from phasor.files.configs.layer_pattern import flag_pattern
from phasor.files.configs.program_model import ProgramModel, divided
from phasor.files.configs.source import JsonObject, renamed_keys
from phasor.files.dialects.blocks import rotated_fraction
from phasor.files.dialects.by_reading import Dialect, settings_or_refusal
from phasor.files.dialects.target import (
    Keys,
    ProgramSettings,
    Target,
    as_yaml,
    law_numbers,
    layers_with,
    linear_factor,
    main_and_local,
    mscales,
    yarn_ramp,
)
from phasor.layers import LayerRopes
from phasor.rope import Rope
from phasor.scaling import Linear, Llama3, PerPair, Yarn, yarn_multiplier

_ORIGINAL = "original_max_seq_len"


# Reading.


def read(model: ProgramModel) -> LayerRopes:
    """The rope of each layer."""
    config = model.config
    plain = model.rope("interleaved" if config.flag("rope_interleave") else "half", "half")
    ratio = config.number("rope_condense_ratio", above=0)
    block = config.object("rope_adjustments")
    with renamed_keys(block or config):
        wide = divided(plain if block is None else _adjusted(model, block, plain), ratio)
    local_base = config.number("rope_local_base_freq", above=1)
    indices = config.wholes("rope_indices")
    if local_base is None:
        if indices is not None:
            absent, indices = map(config.name, ("rope_local_base_freq", "rope_indices"))
            raise refusal("no_local_base", absent=absent, indices=indices)
        return model.ropes({"rope": wide})
    local = divided(replace(plain, base=local_base), ratio)
    if (gain := wide.attention_factor) != 1:  # all layers share the factor on cos and sin
        law = PerPair(factors=(ratio or 1.0,) * wide.num_pairs, attention_factor=gain)
        local = replace(local, scaling=law)
    # without a list all layers are local
    kinds, count = {"sliding_attention": local, "full_attention": wide}, model.config.layers()
    if indices is None:
        return model.ropes(kinds)
    return model.ropes(kinds, flag_pattern(config, "rope_indices", indices[:count], count))


def _adjusted(model: ProgramModel, block: JsonObject, rope: Rope) -> Rope:
    """The rope with the law of ``rope_adjustments``; its keys tell litgpt which law it is."""
    model.blocks.append(block)
    factor, notes = block.number("factor", above=0), model.config.notes
    # with a scale below 0 the factor on cos and sin is below 1
    mscale, all_dim = block.number("mscale"), block.number("mscale_all_dim", least=0)
    bands, betas = ("low_freq_factor", "high_freq_factor"), ("beta_fast", "beta_slow")
    llama3_keys, yarn_keys = ([*filter(block.contains, keys)] for keys in (bands, betas))
    if llama3_keys and yarn_keys:
        raise refusal("two_laws", llama3=block.name(llama3_keys[0]), yarn=block.name(yarn_keys[0]))
    if all_dim and factor and not yarn_keys:
        softmax = yarn_multiplier(factor, all_dim)  # for any law
        notes.append(f"The softmax scale is multiplied by {softmax * softmax!r} as well.")
    if llama3_keys:
        return model.law("llama3", rope, block)
    if not yarn_keys:
        return divided(rope, factor)
    factor, pairs = block.require("factor", factor), rope.num_pairs
    original = block.require(_ORIGINAL, block.whole(_ORIGINAL))
    values = [block.require(key, block.number(key, above=0)) for key in betas]
    turns, step = math.log(original / (2 * math.pi)), math.log(rope.base or 1) / pairs
    low, high = ((turns - math.log(beta)) / step for beta in values)
    low, high = max(math.floor(low), 0), min(math.ceil(high), pairs - 1)
    gains = [yarn_multiplier(factor, coefficient or 0) for coefficient in (mscale, all_dim)]
    gain = gains[0] / gains[1] if mscale and all_dim else gains[0] * gains[1]
    if low > high >= 0 and (low < 2 * pairs or high == pairs - 1):
        # a reversed ramp equals YaRN's if it ends at the last coordinate or contains no pair
        ends = {k: math.exp(turns - i * step) for k, i in zip(betas, (high, low), strict=True)}
        ends |= {"mscale_all_dim": all_dim or 0.0, "attention_factor": gain}
        law = Yarn(factor=factor, original_max_positions=original, truncate=False, **ends)
        return replace(rope, scaling=law)
    notes.append(model.facts["yarn"].format(softmax=gains[1] * gains[1]))
    ramp = np.clip((np.arange(pairs) - low) / (high - low or 0.001), 0, 1)
    divisors = tuple((1 / ((1 - ramp) / factor + ramp)).tolist())
    return replace(rope, scaling=PerPair(factors=divisors, attention_factor=gain))


# Writing.


def _settings(ropes: LayerRopes, _context: int) -> Iterator[Keys]:
    main, local = main_and_local(ropes)
    if local is not None and main.scaling is None and local.scaling is not None:
        main, local = local, main
    if main.base is None:
        return
    keys: Keys = {
        "rope_base": int(main.base) if main.base.is_integer() else main.base,
        "rotary_percentage": rotated_fraction(main.rotary_dim, main.head_dim),
        "rope_interleave": main.pairing == "interleaved",
    }
    local_keys: Keys = {}
    if local is not None:
        factor, ratio = linear_factor(main), linear_factor(local)
        if local.scaling and factor and ratio:  # this divides the positions of all layers
            keys["rope_condense_ratio"] = ratio
            main = replace(main, scaling=Linear(factor=factor / ratio))
        indices = layers_with(ropes, local).numbers
        local_keys = {"rope_local_base_freq": local.base, "rope_indices": indices}
    adjustments = _adjustments(main)
    if adjustments is not None:
        law_keys = {"rope_adjustments": adjustments} if adjustments else {}
        yield keys | law_keys | local_keys


def _adjustments(rope: Rope) -> Keys | None:
    """``rope_adjustments`` for the rope's law; None if litgpt lacks the law."""
    law, size, base = rope.scaling, rope.rotary_dim, rope.base
    if law is None:
        return {}
    if isinstance(law, Linear):
        return {"factor": law.factor}
    original = {"original_max_positions": _ORIGINAL}
    if isinstance(law, Llama3):
        return law_numbers(law, "factor", "low_freq_factor", "high_freq_factor", **original)
    ramp = yarn_ramp(rope)
    if not isinstance(law, Yarn) or ramp is None or base is None:
        return None
    # its ramp falls from the first index to the second, and both are rounded towards each other
    turns, (begin, end) = law.original_max_positions / (2 * math.pi), ramp
    keys = law_numbers(law, "factor", **original) | {
        "beta_fast": turns * base ** (-(2 * max(end, begin + 1) + 1) / size),
        "beta_slow": turns * base ** (-(2 * begin - 1) / size),
    }
    if law.mscale_all_dim or rope.attention_factor != 1:
        # a scale of 0 counts as absent
        keys |= mscales(law)
        keys["mscale"] = keys["mscale"] or 1e-30
    return keys


def _sizes(ropes: LayerRopes, context: int) -> Keys:
    return {
        "n_layer": len(ropes),
        "n_head": 1,
        "n_embd": ropes.ropes[0].head_dim,
        "head_size": ropes.ropes[0].head_dim,
        "block_size": context,
    }


DIALECT = Dialect(
    read=lambda file: read(ProgramModel("litgpt", file)), settings=_settings, sizes=_sizes
)


def _write(ropes: LayerRopes, context: int) -> ProgramSettings:
    written = settings_or_refusal(LITGPT, DIALECT, ropes, context)
    main, _ = main_and_local(written.form)
    notes = [f"head_size, in latent attention qk_rope_head_dim, has to be {main.head_dim}."]
    laws = [rope.scaling for rope in written.form.ropes]
    notes += [_fault_note(law) for law in laws if isinstance(law, Yarn)]
    return as_yaml(written.keys, notes, written.performed)


def _fault_note(law: Yarn) -> str:
    return (
        "litgpt 0.5.13 divides the fast pairs instead of the slow ones: these betas make it divide "
        "the right ones. A version without that fault needs "
        f"beta_fast: {law.beta_fast:g} and beta_slow: {law.beta_slow:g}."
    )


LITGPT = Target(
    name="litgpt",
    program="keys of a model_config.yaml",
    source="https://github.com/Lightning-AI/litgpt/blob/main/litgpt/config.py",
    checked="engine",
    write=_write,
    other_pairs_out=True,
    softmax_note="",
)
