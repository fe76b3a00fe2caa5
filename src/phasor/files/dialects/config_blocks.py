"""Keys for programs that read a model's config.json in their own way: their places, and lists."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from phasor.axes import InterleavedSections, OneAxis, Sectioned
from phasor.files.configs.rope_blocks import LawContext
from phasor.files.configs.source import JsonObject
from phasor.files.dialects.blocks import (
    ORIGINAL_KEY,
    rotated_fraction,
    with_place,
)
from phasor.files.dialects.model_files import keys_over_file
from phasor.files.dialects.target import (
    Keys,
    ProgramSettings,
    Target,
    as_json,
    base_and_divisors,
    first_length,
    main_and_local,
    rotating,
)
from phasor.layers import LayerRopes
from phasor.rope import Rope
from phasor.scaling import PerPair, Proportional, Rule

THREE_AXES = OneAxis, Sectioned, InterleavedSections
#: A program whose class for a model decides which pairs turn.
ConfigTarget = partial(Target, axes=THREE_AXES, class_decides="no config says which")


def blocks_of(ropes: LayerRopes, block: Callable[[Rope], Keys]) -> tuple[Keys, list[Keys]]:
    """``rope_parameters``, with one block or one for each label; and the blocks as a list."""
    blocks = ropes.config_blocks()
    if isinstance(blocks, Rope):
        parameters = block(blocks)
        return parameters, [parameters]
    blocks_by_label = {label: rope and block(rope) for label, rope in blocks.items()}
    return blocks_by_label, [block_keys for block_keys in blocks_by_label.values() if block_keys]


def place_notes(ropes: LayerRopes) -> tuple[str, ...]:
    """A note on where the keys belong, for a model whose config is inside another one."""
    path = ropes.in_config.path
    return (f"These keys belong inside {path} of the config.",) if path else ()


# mlx-lm and exllamav3: older classes read some keys outside the block as well, and frequencies of a
# law without a name are written as the divisors of a longrope block.


def counting_coordinates(rope: Rope) -> Rope:
    """The rope with the fraction of its coordinates that turn; other programs count pairs."""
    law = rope.scaling
    if not isinstance(law, Proportional):
        return rope
    turning = 2 * int(law.fraction * rope.rotary_dim // 2)
    return replace(rope, scaling=replace(law, fraction=rotated_fraction(turning, rope.rotary_dim)))


def list_by_lengths(rope: Rope, length: int) -> Iterator[Keys]:
    """A longrope block with one list for all lengths.

    The quotient of its two lengths determines the factor on cos and sin.
    """
    if isinstance(rope.scaling, Rule):
        return
    gain, (base, divisors) = rope.attention_factor, base_and_divisors(rope)
    if gain < 1:
        return
    original = first_length(gain, length)
    lists = dict.fromkeys(("short_factor", "long_factor"), divisors.tolist())
    law = {"rope_type": "longrope", "factor": length / original, **lists, ORIGINAL_KEY: original}
    yield with_place(law, rope, base)


def read_list(block: JsonObject, key: str, law_context: LawContext, length: int) -> PerPair:
    """The law of a block from `list_by_lengths`."""
    original = block.require(ORIGINAL_KEY, block.number(ORIGINAL_KEY, above=1))
    divisors = block.require(key, block.numbers_per_pair(key, law_context.rotary_dim // 2))
    gain = math.sqrt(1 + max(0.0, math.log(length / original) / math.log(original)))
    return PerPair(factors=divisors, attention_factor=gain)


def only_length(target: Target, ropes: LayerRopes, lengths: set[int], context: int) -> int:
    """The one length that the laws of all layers are computed for; the context if there is none."""
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
    """The keys of a config: each rope's ``block``, and around it the keys for older classes."""
    parameters, blocks = blocks_of(ropes, block)
    notes, has_blocks_by_kind = place_notes(ropes), ropes.has_blocks_by_kind
    outer_keys = ["rope_theta", "partial_rotary_factor"]
    outer_keys += [ORIGINAL_KEY] if parameters.get("rope_type") == "longrope" else []
    keys |= {
        key: parameters[key] for key in outer_keys if key in parameters and not has_blocks_by_kind
    }
    factors = ropes.query_factors.items()
    # other factors are left out, because the program would multiply by something else
    program_factors = {kind: f for kind, f in factors if target.query_factor(f, ropes.kinds[kind])}
    its_ropes = replace(ropes, query_factors=program_factors)
    keys = keys_over_file({**keys, "rope_parameters": parameters}, its_ropes)
    if whole_lengths and ORIGINAL_KEY in keys:
        keys[ORIGINAL_KEY] = round(keys[ORIGINAL_KEY])  # the program reads the length in the block
    if has_blocks_by_kind:
        # older classes of such models read one law, and know themselves which layers have it
        main, _ = main_and_local(ropes)
        kind = next(kind for kind, rope in ropes.kinds.items() if rope == main)
        scaled = keys["rope_parameters"][ropes.in_config.label(kind)]
        keys["rope_scaling"] = None if scaled["rope_type"] == "default" else scaled
        if not ropes.in_config.values:  # without a file, use the names of Gemma 3's classes
            names = {"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"}
            found = [(key, parameters.get(label)) for label, key in names.items()]
            keys |= {key: kind_block["rope_theta"] for key, kind_block in found if kind_block}
        note = f"The class for the model in {target.name} must read a block for each kind"
        if all(found in ({**found, "rope_type": "default"}, block(main)) for found in blocks):
            note += ", or a base for each and rope_scaling for all but sliding layers"
        notes += (f"{note}.",)
    else:
        block_of_file = keys["rope_parameters"]
        if parameters["rope_type"] == "yarn" and ORIGINAL_KEY not in parameters:
            block_of_file.pop(
                ORIGINAL_KEY, None
            )  # if it were there, exllamav3 would not read the factor
        nothing = block_of_file["rope_type"] == "default" and "mrope_section" not in parameters
        keys["rope_scaling"] = None if nothing else block_of_file
    if any(not float(found.get(ORIGINAL_KEY, 0)).is_integer() for found in blocks):
        notes += (
            f"{ORIGINAL_KEY} gives the factor on cos and sin; it is not a length, and other "
            f"programs refuse it.",
        )
    return as_json(keys, notes, rotating(ropes))
