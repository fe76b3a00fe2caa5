"""mlx-lm: ``config.json``, whose classes make a rotation of it in ``initialize_rope``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from phasor.axes import OneAxis
from phasor.files.configs.facts import Architecture
from phasor.files.configs.rope_blocks import LawContext, read_law, rope_type
from phasor.files.configs.source import JsonObject
from phasor.files.configs.writing import CONTEXT_KEY
from phasor.files.dialects.by_reading import Dialect, find_words, words_for_rope
from phasor.files.dialects.config_blocks import (
    BLOCK_KEY,
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
from phasor.files.dialects.target import (
    PICK_LAW,
    Keys,
    ProgramSettings,
    Target,
    TranslationError,
    has_steps,
    model_family,
    mscales,
)
from phasor.layers import LayerRopes, one_layer
from phasor.rope import Rope
from phasor.scaling import DynamicNTK, Law, LongRope, Rule, Yarn

_PAIRING_KEY = "rope_traditional"

# Reading: the block for one rope. The class decides from where on it turns.


def _read(start: int, file: JsonObject) -> LayerRopes:
    block = file.require(BLOCK_KEY, file.object(BLOCK_KEY))
    interleaved = file.flag(_PAIRING_KEY) and rope_type(block) != "longrope"
    facts = Architecture(pairing="interleaved" if interleaved else "half")
    return read_slice(facts, start, _read_law, file)


def _read_law(block: JsonObject, outside: LawContext, length: int) -> Law | Rule | None:
    kind = rope_type(block)
    if kind == "longrope":  # the long list, for all lengths
        return read_list(block, "long_factor", outside, length)
    if kind == "yarn":
        unread = ("attention_factor", "truncate")
        block = block.with_values({k: v for k, v in block.values.items() if k not in unread})
    return read_law(block, replace(outside, mscale_alone=True))


# Writing.


def _words(ropes: LayerRopes, length: int) -> Iterator[Keys]:
    rope, keys = ropes.ropes[0], dict[str, bool]()
    keys[_PAIRING_KEY] = rope.pairing == "interleaved"
    if has_name(rope) or isinstance(rope.scaling, DynamicNTK):
        block = named_block(MLX_LM, rope, length)
        of_law = mscales(rope.scaling) if isinstance(rope.scaling, Yarn) else {}
        yield keys | {BLOCK_KEY: block | of_law}
    if not isinstance(rope.scaling, Rule):
        yield keys | {BLOCK_KEY: list_block(MLX_LM, rope, length)}


def _dialect_of(rope: Rope) -> Dialect:
    """The words as a class reads them that turns the slice of a head with the rope."""
    read = partial(_read, rope.rotary_start)
    return Dialect(read=read, words=_words, sizes=slice_sizes, says_softmax=False)


def _turns_interleaved(rope: Rope) -> bool:
    """Whether its code has the law for pairs beside each other: that of lists has not."""
    law = rope.scaling
    length = law.original_max_positions if isinstance(law, DynamicNTK) else 2
    one_axis = replace(rope, axes=OneAxis(), inv_freq_dtype="exact")
    try:
        return find_words(_dialect_of(rope), one_layer(one_axis), length) is not None
    except TranslationError:
        return False


def _write(ropes: LayerRopes, context: int) -> ProgramSettings:
    laws = [rope.scaling for rope in ropes.ropes]
    starts = {law.original_max_positions for law in laws if isinstance(law, DynamicNTK)}
    length = only_length(MLX_LM, ropes, starts, context)

    def block(rope: Rope) -> Keys:
        law = rope.scaling
        if isinstance(law, DynamicNTK) and rope.direction < 0:
            raise TranslationError(
                f"mlx-lm keeps one law for clockwise pairs, and DynamicNTK picks one; {PICK_LAW}"
            )
        if isinstance(law, LongRope):
            start = law.original_max_positions
            short, rope = rope.at(start), rope.at(start + 1)
            if short != rope:
                MLX_LM.refuse(
                    "the short list of LongRope, which picks one by the length of the sequence: "
                    f"its code always takes the long one; {PICK_LAW}",
                    short,
                    [rope],
                    start,
                )
        found = words_for_rope(MLX_LM, _dialect_of(rope), rope, length, is_list=is_list)
        if is_list(found) and model_family(ropes).replace("_", "-").startswith("gpt-oss"):
            MLX_LM.refuse(
                "truncate: false for gpt-oss, whose class gives a list of divisors no "
                "max_position_embeddings",
                rope,
            )
        keys: Keys = found[BLOCK_KEY]
        return keys | {"type": keys["rope_type"]}  # some classes ask for this word

    pairings = {rope.pairing for rope in ropes.ropes}
    if len(pairings) > 1:  # the key is of all layers
        MLX_LM.only_rope(ropes)
    keys = {CONTEXT_KEY: length, _PAIRING_KEY: pairings == {"interleaved"}}
    return write_config(MLX_LM, ropes, keys, block)


MLX_LM = Target(
    name="mlx-lm",
    program="keys of a model's config.json for mlx-lm",
    source="https://github.com/ml-explore/mlx-lm/blob/main/mlx_lm/models/rope_utils.py",
    checked="run",
    write=_write,
    takes=lambda rope: rope.pairing == "half" or _turns_interleaved(rope),
    backwards=True,
    rules=(DynamicNTK, LongRope),
    class_decides="not every one reads rope_traditional and rope_scaling",
    query_factor=has_steps,
)
