"""A Rope written as a Hugging Face config: its block, and the keys outside it.

Each block is read back before it is returned, to check that it describes exactly its Rope.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from phasor._checks import whole
from phasor.axes import Alternating, Axes, InterleavedSections, OneAxis, Sectioned
from phasor.files import refusal
from phasor.files.configs import rope_blocks
from phasor.files.configs.facts import Architecture, table
from phasor.files.configs.source import KEYS, JsonObject
from phasor.layers import LayerRopes
from phasor.rope import Rope
from phasor.scaling import DynamicNTK, Linear, Llama3, LongRope, PerPair, Proportional, Yarn

_CONTEXT, _ORIGINAL_KEY = "max_position_embeddings", "original_max_position_embeddings"


def rope_parameters(rope: Rope, context: int) -> dict[str, Any]:
    """The block of a Hugging Face ``config.json`` for ``rope``, as transformers 5 writes it.

    It has the base, the rotated fraction of a head, the law or rule, and the sections of a
    multimodal rope. Pairing, direction and the start of the slice depend on the model class.
    The format has no name for `PerPair`: it becomes a ``longrope`` block with the same list twice
    and ``context``, the tokens of the training, and reads back as a rule that picks that law at
    every length. The original context of dynamic NTK is outside its block: `config_keys` sets it.

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
    the context before the extension.

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
    block = blocks[""] if isinstance(rope, Rope) else blocks
    return {"max_position_embeddings": min(starts, default=length), "rope_parameters": block}


def keys_over_file(keys: Mapping[str, Any], ropes: LayerRopes) -> dict[str, Any]:
    """``keys`` for the config of a model, and those that overwrite what else its own file says.

    They leave nothing of an older block, whether they replace keys of the file or are merged into
    its objects. A number outside the block becomes that of the new rope, or null.
    """
    file, blocks, context = ropes.in_config.values, keys["rope_parameters"], keys[_CONTEXT]
    facts = table().huggingface.get(file.get("model_type", ""), Architecture())
    old = _object(file, "rope_parameters")
    # what the keys outside a block have to say, by what they are about; else null
    # transformers takes no null for the context before the extension
    says: dict[str, Any] = {"context": context, "original": context, "switch": False}
    bases: dict[str, Any] = {}  # by key, of blocks for single kinds
    if "rope_type" in blocks:
        base = blocks["rope_theta"]
        says |= {
            "base": base,
            "base_unit": facts.base and base / facts.base,
            "factor": blocks["factor"] if blocks["rope_type"] == "linear" else 1.0,
            "fraction": blocks.get("partial_rotary_factor", 1.0),
            "original": blocks.get(_ORIGINAL_KEY, context),
        }
        # before the nulls, one of which would stand for the length
        blocks = with_query_factor(blocks, ropes)
        blocks = _block_over(blocks, {**_object(file, "rope_scaling"), **old})
    else:
        for kind, block in blocks.items():
            key, base = facts.kind(kind).base_key or "rope_theta", block and block["rope_theta"]
            bases[key] = base if bases.get(key, base) == base else None
        if isinstance(listed := file.get("rope_theta"), list):  # one for each layer
            own = [blocks[ropes.in_config.label(kind)] for kind in ropes.layer_kinds]
            bases["rope_theta"] = [b and b["rope_theta"] for b in own] + listed[len(own) :]
        blocks = {kind: b and _block_over(b, _object(old, kind)) for kind, b in blocks.items()}
    if "qk_rope_head_dim" in file:  # there the fraction is one of a wider head
        says["fraction"] = file.get("partial_rotary_factor")
    replaced = {**table().files["replaced"], **table().files["replaced_by_kind"]}
    # and bases of single kinds that classes read outside a block, which the file may leave to them
    said = {key: base for key, base in bases.items() if "model_type" in file and base is not None}
    about = {key: word for key, word in replaced.items() if {**said, **file}.get(key) is not None}
    outside = {key: bases.get(key, says.get(word)) for key, word in about.items()}
    for factor in ropes.query_factors.values():
        if (factor.form, factor.first) == ("steps", 1):  # of Llama 4
            numbers = {"floor_scale": factor.length, "attn_scale": factor.strength}
            wanted = {"attn_temperature_tuning": True, **numbers}
            outside |= {key: value for key, value in wanted.items() if file.get(key) != value}
    # transformers takes a rope_scaling for the block, so the block has to come after it
    return outside | {**keys, "rope_parameters": blocks}


def with_query_factor(block: Mapping[str, Any], ropes: LayerRopes) -> dict[str, Any]:
    """The block of all layers, and what Mistral's classes multiply queries by, which stands in it.

    Raises:
        ConfigError: If the law starts from another length, for which they have the same key.
    """
    block = dict(block)
    for factor in ropes.query_factors.values():
        if (factor.form, factor.first) == ("steps", 0):
            block["llama_4_scaling_beta"] = factor.strength
            if block.setdefault(_ORIGINAL_KEY, factor.length) != factor.length:
                raise refusal("query_length", key=_ORIGINAL_KEY, law=block[_ORIGINAL_KEY], q=factor)
    return block


def _object(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = values.get(key)
    return cast(Mapping[str, Any], value) if isinstance(value, Mapping) else {}


def _block_over(block: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, Any]:
    """The block, and the keys of laws and axes that only ``old`` has, saying nothing."""
    keys = table().files["block_keys"]
    known = {*keys["names"]}.union(*table().files["law_numbers"].values())
    neutral = {key: keys["neutral"].get(key) for key in old if key in known and key not in block}
    # vLLM refuses two different words for the law
    return {**block, **neutral, **({"type": block["rope_type"]} if "type" in old else {})}


def _check_block(rope: Rope, block: dict[str, Any], context: int) -> None:
    """Refuse a block whose law or axes, when read back, are not the Rope's."""
    law = rope.scaling
    facts = Architecture(
        pairing=rope.pairing,
        axes=None if rope.axes == OneAxis() else rope.to_dict()["axes"]["layout"],
        axis_order=_alternating_facts().axis_order if isinstance(rope.axes, Alternating) else (),
        softmax=isinstance(law, Yarn) and law.mscale_all_dim > 0,
    )
    start = {_CONTEXT: law.original_max_positions} if isinstance(law, DynamicNTK) else {}
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
        by_axis = dict(zip(_alternating_facts().axis_order, axes.sections, strict=True))
        return {"mrope_section": [by_axis[axis] for axis in sorted(by_axis)]}
    raise refusal("axes_cannot", axes=type(axes).__name__)


def _alternating_facts() -> Architecture:
    """The facts of a class with alternating axes; all of them have one order of sections."""
    return next(f for f in table().huggingface.values() if f.axes == "alternating")


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
    # the original context is max_position_embeddings, outside the block
    DynamicNTK: _field_writer("dynamic", "factor"),
    Llama3: _field_writer(
        "llama3", "factor", "low_freq_factor", "high_freq_factor", "original_max_positions"
    ),
    Proportional: _write_proportional,
    Yarn: _write_yarn,
    LongRope: _write_longrope,
    PerPair: _write_longrope,
}
