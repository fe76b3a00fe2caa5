"""What programs share that read a model's config.json in a way of their own: blocks, and places."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from phasor.axes import AXES, InterleavedSections, OneAxis, Sectioned
from phasor.files.configs.facts import Architecture, AxesFacts
from phasor.files.configs.file_keys import keys_over_file
from phasor.files.configs.rope_blocks import LawContext, axes, rope_type
from phasor.files.configs.source import JsonObject, renamed_keys
from phasor.files.configs.writing import CONTEXT_KEY, WRITERS, rope_parameters, rotated_fraction
from phasor.files.dialects.target import (
    Keys,
    ProgramSettings,
    Target,
    as_json,
    base_and_divisors,
    first_length,
    main_and_local,
    ntk_as_base,
    slice_width,
)
from phasor.layers import LayerRopes, one_layer
from phasor.rope import Rope
from phasor.scaling import Law, Linear, Llama3, PerPair, Proportional, Rule, Yarn

BLOCK_KEY, ORIGINAL_KEY = "rope_parameters", "original_max_position_embeddings"

THREE_AXES = OneAxis, Sectioned, InterleavedSections
#: A program whose class for a model decides which pairs turn.
ConfigTarget = partial(
    Target,
    axes=THREE_AXES,
    class_decides="no config says which",
)


def in_config_form(target: Target, rope: Rope) -> Rope:
    """The rope with a law that has a ``rope_type``: a raised base, or a divisor for each pair."""
    # the classes of transformers round each frequency to float32
    form = ntk_as_base(replace(rope, inv_freq_dtype="exact"))
    law = form.scaling
    if isinstance(law, Yarn) and law.mscale != 1 and not (law.mscale and law.mscale_all_dim):
        # a block's mscale is only read beside a mscale_all_dim, and neither may be 0
        law = replace(law, mscale=1.0, attention_factor=rope.attention_factor)
        return replace(form, scaling=law)
    if form.explicit_inv_freq is None and type(law) in WRITERS:
        return form
    return with_divisors(target, replace(form, inv_freq_dtype=rope.inv_freq_dtype))


def with_divisors(target: Target, rope: Rope) -> Rope:
    """The same rotation by a base and a divisor for each pair; refused if a pair stands still."""
    base, divisors = base_and_divisors(replace(rope, direction=1), math.inf)
    if not np.isfinite(divisors).all():
        target.refuse("pairs that stand still, but for those of p-RoPE", rope)
    law = PerPair(factors=tuple(divisors.tolist()), attention_factor=rope.attention_factor)
    return replace(rope, inv_freq_dtype="exact", base=base, explicit_inv_freq=None, scaling=law)


def slice_block(rope: Rope, context: int) -> Keys:
    """``rope_parameters`` of the slice of a head that begins with the rotation."""
    return rope_parameters(replace(rope, head_dim=slice_width(rope), rotary_start=0), context)


def blocks_of(ropes: LayerRopes, block: Callable[[Rope], Keys]) -> tuple[Keys, list[Keys]]:
    """``rope_parameters`` of all layers, or by label; and the blocks in it."""
    blocks = ropes.config_blocks()
    if isinstance(blocks, Rope):
        parameters = block(blocks)
        return parameters, [parameters]
    by_label = {label: rope and block(rope) for label, rope in blocks.items()}
    return by_label, [found for found in by_label.values() if found]


def place_notes(ropes: LayerRopes) -> tuple[str, ...]:
    """Where keys belong that are written without the way to them."""
    path = ropes.in_config.path
    return (f"These keys belong inside {path} of the config.",) if path else ()


# mlx-lm and exllamav3: keys that older classes read outside the block too; other frequencies than
# those of a law with a name are the divisors of a longrope.


def has_name(rope: Rope) -> bool:
    """Whether its law is of a type that both programs know."""
    form = ntk_as_base(rope)
    whole_head = form.rotary_start + form.rotary_dim == form.head_dim
    laws = (type(None), Linear, Llama3, Yarn, *((Proportional,) if whole_head else ()))
    return form.direction == 1 and form.base is not None and isinstance(form.scaling, laws)


def named_block(target: Target, rope: Rope, length: int) -> Keys:
    """The block for a law that has a name."""
    if isinstance(law := rope.scaling, Proportional):
        # some programs count coordinates where others count pairs
        turning = int(law.fraction * rope.rotary_dim // 2)
        fraction = rotated_fraction(2 * turning, rope.rotary_dim)
        rope = replace(rope, scaling=replace(law, fraction=fraction))
    return slice_block(in_config_form(target, rope), length)


def class_facts(rope: Rope) -> Architecture:
    """Of a class that turns the rope's pairs by its axes, as no config says."""
    if isinstance(rope.axes, OneAxis):
        return Architecture(pairing=rope.pairing)
    layout = next(name for name, kind in AXES.items() if type(rope.axes) is kind)
    return Architecture(pairing=rope.pairing, axes=AxesFacts(layout=layout))


def list_block(target: Target, rope: Rope, length: int) -> Keys:
    """LongRoPE with one list, whose factor on cos and sin comes from two lengths."""
    gain, (base, divisors) = rope.attention_factor, base_and_divisors(rope)
    if gain < 1:
        target.refuse(f"cos and sin multiplied by {gain:g}", rope)
    original = first_length(gain, length)
    plain = replace(rope, base=base, scaling=None, explicit_inv_freq=None)
    return named_block(target, plain, length) | {
        "rope_type": "longrope",
        "factor": length / original,
        **dict.fromkeys(("short_factor", "long_factor"), divisors.tolist()),
        ORIGINAL_KEY: original,
    }


def read_slice(
    facts: Architecture,
    start: int,
    law_of: Callable[[JsonObject, LawContext, int], Law | Rule | None],
    file: JsonObject,
) -> LayerRopes:
    """The rope that a class makes of a block, in the slice of a head from ``start`` on.

    ``law_of`` reads the law, of the block and the length of the file.
    """
    block = file.require(BLOCK_KEY, file.object(BLOCK_KEY))
    length = file.require(CONTEXT_KEY, file.whole(CONTEXT_KEY))
    width = file.require("head_dim", file.width("head_dim"))
    is_part = rope_type(block) != "proportional"
    fraction = block.number("partial_rotary_factor") if is_part else None
    rotary_dim = int(width * (fraction or 1))
    outside = LawContext(facts, rotary_dim, file)
    with renamed_keys(block):
        rope = Rope(
            head_dim=start + width,
            pairing=facts.pairing,
            base=block.number("rope_theta", above=1),
            rotary_dim=rotary_dim,
            rotary_start=start,
            scaling=law_of(block, outside, length),
            axes=axes(block, outside) or OneAxis(),
            direction=block.sign("long_factor"),
        )
    return one_layer(rope)


def read_list(block: JsonObject, key: str, outside: LawContext, length: int) -> PerPair:
    """The law of one list of a longrope, whose factor on cos and sin comes from two lengths."""
    original = block.require(ORIGINAL_KEY, block.number(ORIGINAL_KEY, above=1))
    divisors = block.require(key, block.numbers_per_pair(key, outside.rotary_dim // 2))
    gain = math.sqrt(1 + max(0.0, math.log(length / original) / math.log(original)))
    return PerPair(factors=divisors, attention_factor=gain)


def is_list(keys: Keys) -> bool:
    """Whether the block is that of `list_block`."""
    return keys[BLOCK_KEY]["rope_type"] == "longrope"


def slice_sizes(ropes: LayerRopes, length: int) -> Keys:
    """Of a file, what the block of one rope depends on: the slice of a head, and a length."""
    return {"head_dim": slice_width(ropes.ropes[0]), CONTEXT_KEY: length}


def only_length(target: Target, ropes: LayerRopes, lengths: set[int], context: int) -> int:
    """The length by which the laws of all layers are computed, or the context."""
    if len(lengths) > 1:
        target.only_rope(ropes)
    return min(lengths, default=context)


def write_config(
    target: Target,
    ropes: LayerRopes,
    keys: Keys,
    block: Callable[[Rope], Keys],
    *,
    whole_lengths: bool = False,
) -> ProgramSettings:
    """The keys of a config: ``block`` of every rope, and outside it what older classes read."""
    parameters, blocks = blocks_of(ropes, block)
    notes, by_kind = place_notes(ropes), ropes.has_blocks_by_kind
    outside = ["rope_theta", "partial_rotary_factor"]
    outside += [ORIGINAL_KEY] if parameters.get("rope_type") == "longrope" else []
    keys |= {key: parameters[key] for key in outside if key in parameters and not by_kind}
    factors = ropes.query_factors.items()
    # what it would multiply by otherwise is left out
    its_own = {kind: f for kind, f in factors if target.query_factor(f, ropes.kinds[kind])}
    its_ropes = replace(ropes, query_factors=its_own)
    keys = keys_over_file({**keys, "rope_parameters": parameters}, its_ropes)
    if whole_lengths and ORIGINAL_KEY in keys:
        keys[ORIGINAL_KEY] = round(keys[ORIGINAL_KEY])  # it reads that of the block
    if by_kind:
        # of these classes older ones read one law, and know themselves which layers have it
        main, _ = main_and_local(ropes)
        kind = next(kind for kind, rope in ropes.kinds.items() if rope == main)
        scaled = keys["rope_parameters"][ropes.in_config.label(kind)]
        keys["rope_scaling"] = None if scaled["rope_type"] == "default" else scaled
        if not ropes.in_config.values:  # of no file, as Gemma 3's classes call the bases
            names = {"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"}
            found = [(key, parameters.get(label)) for label, key in names.items()]
            keys |= {key: own["rope_theta"] for key, own in found if own}
        note = f"The class for the model in {target.name} must read a block for each kind"
        if all(found in ({**found, "rope_type": "default"}, block(main)) for found in blocks):
            note += ", or a base for each and rope_scaling for all but sliding layers"
        notes += (f"{note}.",)
    else:
        block_of_file = keys["rope_parameters"]
        if parameters["rope_type"] == "yarn" and ORIGINAL_KEY not in parameters:
            block_of_file.pop(ORIGINAL_KEY, None)  # with it exllamav3 would not read the factor
        nothing = block_of_file["rope_type"] == "default" and "mrope_section" not in parameters
        keys["rope_scaling"] = None if nothing else block_of_file
    if any(not float(found.get(ORIGINAL_KEY, 0)).is_integer() for found in blocks):
        notes += (
            f"{ORIGINAL_KEY} gives the factor on cos and sin; it is no length, and other "
            "programs refuse it.",
        )
    return as_json(keys, notes)
