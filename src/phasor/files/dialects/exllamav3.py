"""exllamav3: ``config.json``; for some laws it uses a context of its own."""

from __future__ import annotations

from collections.abc import Iterator

from phasor.files.configs.rope_blocks import LawContext, read_law, rope_type
from phasor.files.configs.source import JsonObject
from phasor.files.dialects.blocks import (
    BLOCK_KEY,
    CONTEXT_KEY,
    ORIGINAL_KEY,
    class_facts,
    is_list,
    named_blocks,
    read_slice,
    slice_of,
    slice_sizes,
)
from phasor.files.dialects.by_reading import Dialect, settings_by_rope
from phasor.files.dialects.config_blocks import (
    ConfigTarget,
    counting_coordinates,
    list_by_lengths,
    only_length,
    read_list,
    write_config,
)
from phasor.files.dialects.target import Keys, ProgramSettings, has_steps
from phasor.layers import LayerRopes, QueryFactor
from phasor.rope import Rope
from phasor.scaling import Law, Rule, Yarn

# Reading: the block for one rope. The class decides which pairs turn, where, and by which axes.


def _read_settings(file: JsonObject) -> LayerRopes:
    ropes = read_slice(class_facts(file), _read_law, file)
    if ropes.ropes[0].axes.n_axes not in (1, 3):
        file.refuse(BLOCK_KEY, "of positions on one axis or three")
    return ropes


def _read_law(block: JsonObject, law_context: LawContext, length: int) -> Law | Rule | None:
    kind, original = rope_type(block), block.number(ORIGINAL_KEY, above=1)
    if kind == "longrope":  # the model's length selects one list
        is_long = length > block.require(ORIGINAL_KEY, original)
        return read_list(block, "long_factor" if is_long else "short_factor", law_context, length)
    if kind == "yarn":
        # the factor is a quotient of lengths if the block has the length before the extension
        factor = block.number("factor") if original is None else length / original
        lengths = {ORIGINAL_KEY: original or length, "factor": factor}
        block = block.with_values({**block.values, **lengths})
    return read_law(block, law_context)


# Writing.


def _settings(ropes: LayerRopes, length: int) -> Iterator[Keys]:
    rope = slice_of(ropes.ropes[0])
    for block in named_blocks(counting_coordinates(rope)):
        if isinstance(rope.scaling, Yarn):
            block["attention_factor"] = rope.attention_factor  # its classes differ here
        yield {BLOCK_KEY: block}
        yield {BLOCK_KEY: {key: block[key] for key in block if key != ORIGINAL_KEY}}
    yield from ({BLOCK_KEY: block} for block in list_by_lengths(rope, length))


_DIALECT = Dialect(read=_read_settings, settings=_settings, sizes=slice_sizes, scales_softmax=False)


def _length(law: Yarn) -> int:
    """The length from which it computes YaRN's factor, else the original context."""
    length = round(law.factor * law.original_max_positions)
    is_exact = length / law.original_max_positions == law.factor
    return length if is_exact else law.original_max_positions


def _write(ropes: LayerRopes, context: int) -> ProgramSettings:
    laws = [rope.scaling for rope in ropes.ropes]
    length = only_length(
        EXLLAMAV3, ropes, {_length(law) for law in laws if isinstance(law, Yarn)}, context
    )

    _, settings = settings_by_rope(EXLLAMAV3, _DIALECT, ropes, length, is_list=is_list)
    blocks = {rope: written.keys[BLOCK_KEY] for rope, written in settings.items()}
    keys = {CONTEXT_KEY: length}
    return write_config(EXLLAMAV3, ropes, keys, blocks.__getitem__, whole_lengths=True)


def _multiplies_queries(factor: QueryFactor, rope: Rope | None) -> bool:
    """Whether it multiplies queries: only its code for YaRN does, with the law's length."""
    law = rope.scaling if rope and rope.direction > 0 else None
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
