"""vLLM and sglang: a command that overrides a config, and the arguments of their factory get_rope.

sglang's factory began as a copy of vLLM's. Both read the block of transformers, and the class of a
model decides which pairs turn, from which coordinate on, by which axes.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from phasor.axes import Alternating, InterleavedSections, OneAxis
from phasor.files.configs.rope_blocks import LawContext, axes, read_law, rope_type
from phasor.files.configs.source import JsonObject
from phasor.files.dialects.blocks import (
    BLOCK_KEY,
    CONTEXT_KEY,
    LawReader,
    class_facts,
    decided_by_class,
    is_list,
    list_blocks,
    read_slice,
    slice_of,
    slice_sizes,
)
from phasor.files.dialects.by_reading import Dialect, FaultError, settings_by_rope
from phasor.files.dialects.config_blocks import THREE_AXES, ConfigTarget, blocks_of
from phasor.files.dialects.model_files import keys_over_file
from phasor.files.dialects.target import (
    Keys,
    ProgramSettings,
    Target,
    has_steps,
    rotating,
    slice_width,
)
from phasor.layers import LayerRopes, one_layer
from phasor.rope import Rope
from phasor.scaling import Law, Linear, PerPair, Proportional, Rule

#: A serving program that has Ernie 4.5 VL's class.
Engine = partial(ConfigTarget, axes=(*THREE_AXES, Alternating), query_factor=has_steps)

# Reading: the block for one rope.


# laws that a factory can combine with sections
_WITH_SECTIONS = ("default", "yarn")


def _read_settings(law_of: LawReader, file: JsonObject) -> LayerRopes:
    """The rope that a factory, or Ernie 4.5 VL's class, reads."""
    block = file.require(BLOCK_KEY, file.object(BLOCK_KEY))
    facts = class_facts(file, laws={"ntk": "ntk_mixed"})
    if facts.axes is not None and facts.axes.layout == "alternating":
        return one_layer(_read_ernies(block, file))
    if facts.axes is not None and rope_type(block, facts) not in _WITH_SECTIONS:
        raise FaultError("its factory has no code for sections with this law")
    ropes = read_slice(facts, law_of, file)
    if facts.axes is not None:
        sections = block.require("mrope_section", block.wholes("mrope_section"))
        if len(sections) != 3 or sum(sections) != ropes.ropes[0].num_pairs:
            block.refuse("mrope_section", "three counts of pairs, that add up to all of them")
    return ropes


def _read_ernies(block: JsonObject, file: JsonObject) -> Rope:
    """The rope that Ernie 4.5 VL's class reads: a base and the pairs of each axis."""
    if rope_type(block) != "default":
        raise FaultError("Ernie 4.5 VL's class reads no law")
    if block.has("partial_rotary_factor") or decided_by_class(file)["rotary_start"]:
        raise FaultError("Ernie 4.5 VL's class turns whole heads")
    width = file.require("head_dim", file.width("head_dim"))
    rope_axes = axes(block, LawContext(class_facts(file), width, file))
    return Rope(
        head_dim=width,
        rotary_dim=width,
        pairing="interleaved",
        base=block.number("rope_theta", above=1),
        axes=rope_axes or OneAxis(),
    )


def read_engines_law(block: JsonObject, law_context: LawContext, length: int) -> Law | Rule | None:
    """A law that both factories read in the same way."""
    law = read_law(block, law_context)
    if isinstance(law, Linear) and law.factor < 1:
        end = int(law.factor * length)
        raise FaultError(f"its table of a linear law ends at position {end}")
    # no factor is read for p-RoPE
    return Proportional(fraction=law.fraction) if isinstance(law, Proportional) else law


def read_engines_list(block: JsonObject, law_context: LawContext, *, long: bool) -> PerPair:
    """The one list of a longrope block that is used at this length."""
    if law_context.facts.pairing == "interleaved":
        raise FaultError("it has no lists of divisors for interleaved pairs")
    word = "long" if long else "short"
    key, gain = f"{word}_factor", block.number(f"{word}_mscale")
    divisors = block.require(key, block.numbers_per_pair(key, law_context.rotary_dim // 2))
    return PerPair(factors=divisors, attention_factor=block.require(f"{word}_mscale", gain))


# Writing.


def engine_dialect(law_of: LawReader, settings: Callable[[Rope], Iterator[Keys]]) -> Dialect:
    """The dialect of an engine; ``settings`` writes the blocks that name a law."""

    def all_settings(ropes: LayerRopes, length: int) -> Iterator[Keys]:
        rope = slice_of(ropes.ropes[0])
        # interleaved sections may add up to too many pairs, and get_rope checks the sum
        if isinstance(rope.axes, InterleavedSections):
            rope = replace(rope, axes=InterleavedSections(rope.axes.counts(rope.num_pairs)))
        for block in settings(rope):
            yield {BLOCK_KEY: block}
        for block in list_blocks(rope, length):
            # both lists are the same, so the factor must be the same at all lengths too
            gain = block.pop("attention_factor")
            yield {BLOCK_KEY: block | dict.fromkeys(("short_mscale", "long_mscale"), gain)}

    read = partial(_read_settings, law_of)
    return Dialect(read=read, settings=all_settings, sizes=slice_sizes, scales_softmax=False)


def write_for_engine(
    target: Target,
    dialect: Dialect,
    ropes: LayerRopes,
    context: int,
    *,
    arguments: Callable[[Rope, Keys], Keys],
    module: str,
    command: str,
) -> ProgramSettings:
    """The settings of a whole model: ``command`` with its override, or calls of ``get_rope``.

    ``arguments`` returns the arguments of this factory alone, for a rope and its block.
    """
    alternating = [rope.axes for rope in ropes.ropes if isinstance(rope.axes, Alternating)]
    if alternating:  # Ernie's class turns only interleaved pairs
        dialect = replace(dialect, has_both_pairings=False)
    ropes, settings = settings_by_rope(target, dialect, ropes, context, is_list=is_list)
    block_of = {rope: written.keys[BLOCK_KEY] for rope, written in settings.items()}
    calls = {
        kind: {
            "head_size": slice_width(rope),
            "max_position": context,
            "is_neox_style": rope.pairing == "half",
            **arguments(rope, block_of[rope]),
        }
        for kind, rope in rotating(ropes).items()
        if not isinstance(rope.axes, Alternating)
    }
    if ropes.in_config.ignores_scaling:
        # the class reads no law from a config: the code of the model calls the factory
        lines = [f"get_rope(**{given})  # {kind} layers" for kind, given in calls.items()]
        code = "\n".join([f"from {module}.layers.rotary_embedding import get_rope", "", *lines])
        return ProgramSettings({"get_rope": calls}, code, (), rotating(ropes))
    parameters, blocks = blocks_of(ropes, block_of.__getitem__)
    override: Keys = {CONTEXT_KEY: context}
    bases = {block["rope_theta"] for block in blocks}
    if len(bases) == 1:
        override["rope_theta"] = bases.pop()  # some classes read it here alone
    override = keys_over_file({**override, BLOCK_KEY: parameters}, ropes)
    given_too = ", which is given too" if override.get("rope_theta") else ""
    notes = (
        f"The class for the model in {target.name} must read rope_parameters: some read "
        f"rope_theta alone{given_too}.",
    )
    for axes_of_class in alternating:
        override["freq_allocation"] = axes_of_class.sections[0]
        notes = (f"Ernie 4.5 VL's class in {target.name} has these axes; its factory does not.",)
    for name in reversed(ropes.in_config.path.split(".") if ropes.in_config.path else ()):
        override = {name: override}
    code = f"{command} {shlex.quote(json.dumps(override))}"
    settings = {k: v for k, v in {"get_rope": calls, "override": override}.items() if v}
    return ProgramSettings(settings, code, notes, rotating(ropes))
