"""A Rope written as a Hugging Face config: its block, and the context beside it.

Each block is read back before it is returned, to check that it describes exactly its Rope. What the
keys are in a model's own file is decided in `file_keys`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from phasor._checks import whole
from phasor.axes import AXES, Alternating, Axes, InterleavedSections, OneAxis, Sectioned
from phasor.files import refusal
from phasor.files.configs import rope_blocks
from phasor.files.configs.facts import Architecture, AxesFacts
from phasor.files.configs.source import KEYS, JsonObject
from phasor.rope import Rope
from phasor.scaling import DynamicNTK, Linear, Llama3, LongRope, PerPair, Proportional, Yarn

CONTEXT_KEY = "max_position_embeddings"


def rope_parameters(rope: Rope, context: int) -> dict[str, Any]:
    """The block of a Hugging Face ``config.json`` for ``rope``, as transformers 5 writes it.

    It has the base, the rotated fraction of a head, the law or rule, and the sections of a
    multimodal rope. Pairing, direction and the start of the slice depend on the model class.
    The format has no name for `PerPair`: it becomes a ``longrope`` block with the same list twice
    and ``context``, the tokens of the training, and reads back as a rule that picks that law at
    every length. The original context of dynamic NTK is outside its block too: `config_keys` sets
    it.

    Raises:
        ConfigError: If the format cannot say this Rope.

    >>> from phasor import Rope
    >>> from phasor.scaling import Linear
    >>> rope_parameters(Rope(head_dim=64, pairing="half", scaling=Linear(factor=4.0)), 2048)
    {'rope_type': 'linear', 'factor': 4.0, 'rope_theta': 10000.0}
    """
    whole("context", context, least=1)
    if rope.explicit_inv_freq is not None or rope.inv_freq_dtype != "exact":
        raise refusal("no_base")
    write = WRITERS.get(type(rope.scaling))
    if write is None:
        laws = sorted(law.__name__ for law in WRITERS if law is not type(None))
        raise refusal("no_rope_type", law=rope.scaling, laws=", ".join(laws))
    law = _as_rule(rope.scaling, context) if isinstance(rope.scaling, PerPair) else rope.scaling
    block = write(law)
    block["rope_theta"] = rope.base
    if rope.rotary_dim != rope.head_dim:
        block["partial_rotary_factor"] = rotated_fraction(rope.rotary_dim, rope.head_dim)
    block |= _section_keys(rope.axes)
    _check_block(rope, block, context)
    return block


def config_keys(rope: Rope | Mapping[str, Rope | None], context: int, to: int) -> dict[str, Any]:
    """The keys to set in a ``config.json`` for a context of ``to`` tokens.

    The block of `rope_parameters`, of all layers or by label, null for a kind without a rope; and
    ``max_position_embeddings``: ``to``, except for dynamic NTK, whose readers use that key for
    the context before the extension, and for YaRN that reaches further: transformers 4.55 takes
    its factor from the quotient of that key and the original context.

    Raises:
        ConfigError: As `rope_parameters`, or if dynamic ropes start from different contexts.

    >>> from phasor import Rope
    >>> from phasor.scaling import DynamicNTK
    >>> law = DynamicNTK(factor=4.0, original_max_positions=2048)
    >>> keys = config_keys(Rope(head_dim=64, pairing="half", scaling=law), 2048, 8192)
    >>> keys["max_position_embeddings"]
    2048
    """
    ropes = {"": rope} if isinstance(rope, Rope) else rope
    blocks = {k: None if r is None else rope_parameters(r, context) for k, r in ropes.items()}
    length = whole("to", to, least=1)
    laws_of_kinds = [r.scaling for r in ropes.values() if r is not None]
    starts = {law.original_max_positions for law in laws_of_kinds if isinstance(law, DynamicNTK)}
    if len(starts) > 1:
        raise refusal("dynamic_starts", starts=" and ".join(map(str, sorted(starts))))
    reaches = {yarn_reach(law) for law in laws_of_kinds if isinstance(law, Yarn)}
    if len(reaches) == 1 and (reach := reaches.pop()) is not None:
        length = max(length, reach)
    block = blocks[""] if isinstance(rope, Rope) else blocks
    return {CONTEXT_KEY: min(starts, default=length), "rope_parameters": block}


def read_as(rope: Rope, context: int) -> Rope:
    """The rope that readers make of its block: a rule where the format has no name for its law."""
    law = rope.scaling
    return replace(rope, scaling=_as_rule(law, context)) if isinstance(law, PerPair) else rope


def yarn_reach(law: Yarn) -> int | None:
    """The context that YaRN's factor makes of the original one; None if that is not whole."""
    reach = law.factor * law.original_max_positions
    return round(reach) if math.isclose(reach, round(reach), rel_tol=1e-9) else None


def _check_block(rope: Rope, block: dict[str, Any], context: int) -> None:
    """Refuse a block whose law or axes, when read back, are not the Rope's."""
    law = rope.scaling
    facts = Architecture(
        pairing=rope.pairing,
        axes=_axes_facts(rope.axes),
        softmax=isinstance(law, Yarn) and law.mscale_all_dim > 0,
    )
    start = {CONTEXT_KEY: law.original_max_positions} if isinstance(law, DynamicNTK) else {}
    outside = rope_blocks.LawContext(facts, rope.rotary_dim, JsonObject(start))
    read = JsonObject(block, "rope_parameters")
    read_law = rope_blocks.read_law(read, outside)
    read_axes = rope_blocks.axes(read, outside) or OneAxis()
    expected = _as_rule(law, context) if isinstance(law, PerPair) else law
    # both would be written as partial_rotary_factor
    ambiguous = isinstance(law, Proportional) and rope.rotary_dim != rope.head_dim
    if ambiguous or (read_law, read_axes) != (expected, rope.axes):
        widths = {"rotary_dim": rope.rotary_dim, "head_dim": rope.head_dim}
        raise refusal("block_cannot", rope_type=block["rope_type"], law=law, **widths)


def _axes_facts(axes: Axes) -> AxesFacts | None:
    layout = next(name for name, kind in AXES.items() if type(axes) is kind)
    return None if isinstance(axes, OneAxis) else AxesFacts(layout=layout)


def rotated_fraction(rotary_dim: int, head_dim: int) -> float:
    """The fraction for which readers compute ``int(head_dim * fraction) == rotary_dim``."""
    exact = rotary_dim / head_dim
    return exact if int(head_dim * exact) == rotary_dim else (rotary_dim + 0.5) / head_dim


def _section_keys(axes: Axes) -> dict[str, Any]:
    if isinstance(axes, OneAxis):
        return {}
    if isinstance(axes, Sectioned):
        return {"mrope_section": list(axes.sections)}
    if isinstance(axes, InterleavedSections):
        return {"mrope_section": list(axes.sections), "mrope_interleaved": True}
    if isinstance(axes, Alternating):
        by_axis = dict(zip(rope_blocks.ALTERNATING, axes.sections, strict=True))
        return {"mrope_section": [by_axis[axis] for axis in sorted(by_axis)]}
    raise refusal("axes_cannot", axes=type(axes).__name__)


def _field_writer(rope_type: str, *fields: str) -> Callable[[Any], dict[str, Any]]:
    """A writer for laws whose block has their own fields."""
    keys = {KEYS.get(field, field): field for field in fields}
    return lambda law: {"rope_type": rope_type, **{k: getattr(law, f) for k, f in keys.items()}}


def _write_proportional(law: Proportional) -> dict[str, Any]:
    block: dict[str, Any] = {"rope_type": "proportional", "partial_rotary_factor": law.fraction}
    return block if law.factor == 1 else block | {"factor": law.factor}


def _write_yarn(law: Yarn) -> dict[str, Any]:
    block = _field_writer("yarn", "factor", "beta_fast", "beta_slow", "original_max_positions")(law)
    scales = {"mscale": law.mscale, "mscale_all_dim": law.mscale_all_dim}
    if not law.truncate:
        block["truncate"] = False
    if law.attention_factor is not None:
        block["attention_factor"] = law.attention_factor
        del scales["mscale"]
    return block | scales if law.mscale_all_dim else block


def _write_longrope(law: LongRope) -> dict[str, Any]:
    gains = {"short_mscale": law.short_attention_factor, "long_mscale": law.long_attention_factor}
    if law.short_attention_factor == law.long_attention_factor:
        gains = {"attention_factor": law.short_attention_factor}
    fields = ("factor", "short_factors", "long_factors", "original_max_positions")
    block = _field_writer("longrope", *fields)(law)
    block |= {key: list(value) for key, value in block.items() if isinstance(value, tuple)}
    return block | {key: gain for key, gain in gains.items() if gain is not None}


def _as_rule(law: PerPair, context: int) -> LongRope:
    """A rule that picks the law at every length; the format has no name for the law itself."""
    return LongRope(
        short_factors=law.factors,
        long_factors=law.factors,
        original_max_positions=context,
        factor=1.0,
        short_attention_factor=law.attention_factor,
        long_attention_factor=law.attention_factor,
    )


#: By law or rule, the function that writes its block; for `PerPair` it is given `_as_rule`.
WRITERS: Mapping[type, Callable[[Any], dict[str, Any]]] = {
    type(None): _field_writer("default"),
    Linear: _field_writer("linear", "factor"),
    # readers take max_position_embeddings for the original context, which has to agree
    DynamicNTK: _field_writer("dynamic", "factor", "original_max_positions"),
    Llama3: _field_writer(
        "llama3", "factor", "low_freq_factor", "high_freq_factor", "original_max_positions"
    ),
    Proportional: _write_proportional,
    Yarn: _write_yarn,
    LongRope: _write_longrope,
    PerPair: _write_longrope,
}
