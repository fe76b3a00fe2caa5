"""mlx-lm: ``config.json``, from which its classes make a rotation with ``initialize_rope``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from phasor.files.configs.facts import Architecture
from phasor.files.configs.rope_blocks import LawContext, read_law, rope_type
from phasor.files.configs.source import JsonObject
from phasor.files.dialects.blocks import (
    BLOCK_KEY,
    CONTEXT_KEY,
    is_list,
    named_blocks,
    read_slice,
    slice_of,
    slice_sizes,
)
from phasor.files.dialects.by_reading import Dialect, FaultError, settings_by_rope
from phasor.files.dialects.config_blocks import (
    counting_coordinates,
    list_by_lengths,
    only_length,
    read_list,
    write_config,
)
from phasor.files.dialects.target import (
    Keys,
    ProgramSettings,
    Target,
    has_steps,
    model_family,
    mscales,
)
from phasor.layers import LayerRopes
from phasor.scaling import DynamicNTK, Law, LongRope, Rule, Yarn

_PAIRING_KEY = "rope_traditional"

# Reading: the block for one rope. The class decides at which coordinate the rotation begins.


def _read_settings(file: JsonObject, *, family: str = "") -> LayerRopes:
    block = file.require(BLOCK_KEY, file.object(BLOCK_KEY))
    is_longrope = rope_type(block) == "longrope"
    if is_longrope and family.startswith("gpt-oss"):
        raise FaultError("gpt-oss's class passes no max_position_embeddings to a list of divisors")
    interleaved = file.flag(_PAIRING_KEY) and not is_longrope
    facts = Architecture(pairing="interleaved" if interleaved else "half")
    return read_slice(facts, _read_law, file)


def _read_law(block: JsonObject, law_context: LawContext, length: int) -> Law | Rule | None:
    kind = rope_type(block)
    if kind == "longrope":
        if block.value("short_factor") != block.value("long_factor"):
            raise FaultError("its code always takes the long list")
        return read_list(block, "long_factor", law_context, length)
    if kind == "yarn":
        # refused if transformers would derive another factor on cos and sin from this config.json
        read_law(block, law_context)
        ignored_keys = ("attention_factor", "truncate")
        block = block.with_values({k: v for k, v in block.values.items() if k not in ignored_keys})
    return read_law(block, replace(law_context, single_mscale=True))


# Writing.


def _settings(ropes: LayerRopes, length: int) -> Iterator[Keys]:
    rope, keys = slice_of(ropes.ropes[0]), dict[str, bool]()
    keys[_PAIRING_KEY] = rope.pairing == "interleaved"
    law_keys = mscales(rope.scaling) if isinstance(rope.scaling, Yarn) else {}
    for block in named_blocks(counting_coordinates(rope)):
        yield keys | {BLOCK_KEY: block | law_keys}
    if isinstance(rope.scaling, LongRope):  # a rule may pick the same law at all lengths
        rope = rope.at(length)
    yield from (keys | {BLOCK_KEY: block} for block in list_by_lengths(rope, length))


_DIALECT = Dialect(
    read=_read_settings,
    settings=_settings,
    sizes=slice_sizes,
    has_both_pairings=False,
    scales_softmax=False,
)


def _write(ropes: LayerRopes, context: int) -> ProgramSettings:
    laws = [rope.scaling for rope in ropes.ropes]
    starts = {law.original_max_positions for law in laws if isinstance(law, DynamicNTK)}
    length = only_length(MLX_LM, ropes, starts, context)
    family = model_family(ropes).replace("_", "-")
    dialect = replace(_DIALECT, read=partial(_read_settings, family=family))
    ropes, settings = settings_by_rope(MLX_LM, dialect, ropes, length, is_list=is_list)
    pairings = {rope.pairing for rope in ropes.ropes}
    if len(pairings) > 1:  # one key for all layers
        MLX_LM.only_rope(ropes)
    # some classes read the other key
    blocks = {
        rope: written.keys[BLOCK_KEY] | {"type": written.keys[BLOCK_KEY]["rope_type"]}
        for rope, written in settings.items()
    }
    keys = {CONTEXT_KEY: length, _PAIRING_KEY: pairings == {"interleaved"}}
    return write_config(MLX_LM, ropes, keys, blocks.__getitem__)


MLX_LM = Target(
    name="mlx-lm",
    program="keys of a model's config.json for mlx-lm",
    source="https://github.com/ml-explore/mlx-lm/blob/main/mlx_lm/models/rope_utils.py",
    checked="run",
    write=_write,
    backwards=True,
    rules=(DynamicNTK, LongRope),
    class_decides="not every one reads rope_traditional and rope_scaling",
    query_factor=has_steps,
)
