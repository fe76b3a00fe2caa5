"""exllamav3: ``config.json``, with a context of its own for some laws."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from phasor.axes import OneAxis
from phasor.files.configs.rope_blocks import LawContext, read_law, rope_type
from phasor.files.configs.source import JsonObject
from phasor.files.configs.writing import CONTEXT_KEY
from phasor.files.dialects.by_reading import Dialect, words_for_rope
from phasor.files.dialects.config_blocks import (
    BLOCK_KEY,
    ORIGINAL_KEY,
    ConfigTarget,
    class_facts,
    has_name,
    is_list,
    list_block,
    named_block,
    only_length,
    read_list,
    read_slice,
    slice_sizes,
    write_config,
)
from phasor.files.dialects.target import Keys, ProgramSettings, has_steps
from phasor.layers import LayerRopes, QueryFactor
from phasor.rope import Rope
from phasor.scaling import Law, Rule, Yarn

# Reading: the block for one rope. The class decides which pairs turn, from where on, by which axes.


def _read_law(block: JsonObject, outside: LawContext, length: int) -> Law | Rule | None:
    kind, original = rope_type(block), block.number(ORIGINAL_KEY, above=1)
    if kind == "longrope":  # one list for all lengths, by that of the model
        is_long = length > block.require(ORIGINAL_KEY, original)
        return read_list(block, "long_factor" if is_long else "short_factor", outside, length)
    if kind == "yarn":
        # the factor is that of two lengths, where the block has the one before the extension
        factor = block.number("factor") if original is None else length / original
        own = {ORIGINAL_KEY: original or length, "factor": factor}
        block = block.with_values({**block.values, **own})
    return read_law(block, outside)


# Writing.


def _words(ropes: LayerRopes, length: int) -> Iterator[Keys]:
    rope = ropes.ropes[0]
    if has_name(rope):
        block = named_block(EXLLAMAV3, rope, length)
        if isinstance(rope.scaling, Yarn):
            block["attention_factor"] = rope.attention_factor  # the classes compute different ones
        yield {BLOCK_KEY: block}
        yield {BLOCK_KEY: {key: block[key] for key in block if key != ORIGINAL_KEY}}
    yield {BLOCK_KEY: list_block(EXLLAMAV3, rope, length)}


def _length(law: Yarn) -> int:
    """The tokens by which it computes YaRN's factor, or those before the extension if it cannot."""
    length = round(law.factor * law.original_max_positions)
    is_exact = length / law.original_max_positions == law.factor
    return length if is_exact else law.original_max_positions


def _write(ropes: LayerRopes, context: int) -> ProgramSettings:
    laws = [rope.scaling for rope in ropes.ropes]
    length = only_length(
        EXLLAMAV3, ropes, {_length(law) for law in laws if isinstance(law, Yarn)}, context
    )

    def block(rope: Rope) -> Keys:
        if rope.axes.n_axes not in (1, 3):
            one_axis = replace(rope, axes=OneAxis())
            EXLLAMAV3.refuse(f"positions of {rope.axes.n_axes} axes", rope, [one_axis])
        read = partial(read_slice, class_facts(rope), rope.rotary_start, _read_law)
        dialect = Dialect(read=read, words=_words, sizes=slice_sizes, says_softmax=False)
        keys = words_for_rope(EXLLAMAV3, dialect, rope, length, is_list=is_list)
        return keys[BLOCK_KEY]

    return write_config(EXLLAMAV3, ropes, {CONTEXT_KEY: length}, block, whole_lengths=True)


def _multiplies_queries(factor: QueryFactor, rope: Rope | None) -> bool:
    """Only the code of YaRN reads the factor, whose length it takes from the law."""
    law = rope.scaling if rope and has_name(rope) else None
    from_0 = has_steps(factor) and factor.first == 0
    return from_0 and isinstance(law, Yarn) and law.original_max_positions == factor.length


EXLLAMAV3 = ConfigTarget(
    name="exllamav3",
    program="keys of a model's config.json for exllamav3",
    source="https://github.com/turboderp-org/exllamav3/blob/master/exllamav3/util/rope.py",
    checked="engine",
    write=_write,
    backwards=True,
    query_factor=_multiplies_queries,
)
