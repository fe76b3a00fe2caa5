"""What vLLM and sglang share: a command that overrides a config, and a factory ``get_rope``.

sglang's factory began as a copy of vLLM's; both read a block like transformers' rope_parameters.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from phasor.axes import OneAxis
from phasor.configs.writing import rope_parameters
from phasor.errors import ConfigError
from phasor.layers import LayerRopes
from phasor.rope import Rope
from phasor.scaling import Law, Linear, PerPair, Proportional, Rule
from phasor.translation.target import Part, Target, TranslationError, plain_candidates
from phasor.translation.transformers import class_notes, in_config_form, with_divisors

Block = dict[str, Any]


def block(
    target: Target, rope: Rope, context: int, *, with_axes: tuple[type, ...] = (type(None),)
) -> Block:
    """``rope_parameters`` of the slice of a head from ``rope.rotary_start`` on.

    What `in_config_form` makes of it, with the names that the factories read. ``with_axes`` are
    the laws that the factory combines with sections.

    Raises:
        TranslationError: If no block of the factories says it.
    """
    rope = replace(rope, head_dim=rope.head_dim - rope.rotary_start, rotary_start=0)
    in_text = replace(rope, axes=OneAxis())
    if rope.axes.n_axes not in (1, 3):
        target.refuse(f"positions of {rope.axes.n_axes} axes", rope, context, [in_text])
    form = in_config_form(target, rope, context)
    if isinstance(form.scaling, Linear) and form.scaling.factor < 1:
        # the factories' tables of a linear law end at the factor times the context
        form = with_divisors(target, form, context)
    law, name = form.scaling, _name(rope.scaling)
    missing, nearby = "", plain_candidates(in_text)
    if isinstance(law, Proportional) and law.factor != 1:
        missing = f"pairs that stand still beside pairs divided by {law.factor:g}"
    elif isinstance(law, PerPair) and rope.pairing == "interleaved":
        missing = f"the law {name} for interleaved pairs"
    elif rope.axes.n_axes > 1 and not isinstance(law, with_axes):
        missing = f"the law {name} with positions of three axes"
        nearby.append(in_text)
    if missing:
        target.refuse(missing, rope, context, nearby)
    try:
        keys = rope_parameters(form, context)
    except ConfigError as error:
        raise TranslationError(f"{target.name} cannot express it: {error}") from None
    if isinstance(law, PerPair):
        # the length picks neither list nor factor: both are the same
        del keys["attention_factor"]
        keys |= dict.fromkeys(("short_mscale", "long_mscale"), law.attention_factor)
    if "mrope_section" in keys:
        # interleaved sections may count pairs that there are not; the factories check the sum
        axes = rope.axes.axis_of_pair(rope.num_pairs)
        keys["mrope_section"] = [axes.count(axis) for axis in range(3)]
    return keys


def _name(law: Law | Rule | None) -> str:
    return "of explicit frequencies" if law is None else type(law).__name__


def parts(
    target: Target,
    ropes: LayerRopes,
    context: int,
    *,
    block: Callable[[Rope, int], Block],
    get_rope: Callable[[Rope, int, Block], Block],
    module: str,
    command: str,
) -> tuple[Part, ...]:
    """The one `Part` of a model: ``command`` with its override, or calls of ``get_rope``.

    Args:
        target: The engine.
        ropes: The model's, as the engine reads them.
        context: Tokens.
        block: The block of a rope.
        get_rope: The arguments of the factory for a rope and its block.
        module: Where the factory is.
        command: Where the override follows; ``{}`` stands for the context.
    """
    kinds = {kind: rope for kind, rope in ropes.kinds.items() if rope is not None}
    calls = {kind: get_rope(rope, context, block(rope, context)) for kind, rope in kinds.items()}
    settings: dict[str, Any] = {"get_rope": calls}
    if ropes.in_config.fixed:
        # the class reads no law from a config, and its authors call the factory
        lines = [f"get_rope(**{arguments})  # {kind} layers" for kind, arguments in calls.items()]
        code = "\n".join([f"from {module} import get_rope", "", *lines])
    else:
        override = settings["override"] = _override(target, ropes, context, block)
        code = f"{command.format(context)} {shlex.quote(json.dumps(override))}"
    notes = class_notes(target, kinds.values())
    return (Part(ropes=kinds, settings=settings, code=code, notes=notes),)


def _override(
    target: Target, ropes: LayerRopes, context: int, block: Callable[[Rope, int], Block]
) -> Block:
    """The keys of the config, nested as in the config."""
    try:
        blocks = ropes.config_blocks()
    except ConfigError as error:
        raise TranslationError(f"{target.name} cannot express it: {error}") from None
    keys: Block = {
        "max_position_embeddings": context,
        "rope_parameters": block(blocks, context)
        if isinstance(blocks, Rope)
        else {label: rope and block(rope, context) for label, rope in blocks.items()},
    }
    for name in reversed(ropes.in_config.inside.split(".") if ropes.in_config.inside else ()):
        keys = {name: keys}
    return keys
