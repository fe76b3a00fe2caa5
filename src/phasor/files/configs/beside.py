"""The rotations beside attention: of indexers and compressors, and of layers after the last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from phasor.files.configs.facts import Architecture, Beside
from phasor.files.configs.source import JsonObject
from phasor.layers import NamedRope
from phasor.rope import WIDEST, Rope
from phasor.scaling import Yarn

_MOST_EXTRA = 1_000  # layers that predict further tokens


def ropes_beside(
    config: JsonObject,
    facts: Architecture,
    layer_kinds: Sequence[str],
    kinds: Mapping[str, Rope | None],
) -> tuple[NamedRope, ...]:
    """The rotations beside attention; ``kinds`` may have kinds that no layer is of."""
    found: dict[tuple[str, Rope], list[int]] = {}
    for name, beside in facts.beside.items():
        width = config.whole(beside.head_dim_key, least=2, most=WIDEST) or beside.head_dim
        for layer in _layers_with_own(config, beside, len(layer_kinds)):
            rope = kinds[kind := layer_kinds[layer]]
            if rope is not None and width and (not beside.kinds or kind in beside.kinds):
                own = _rope_beside(rope, beside, width)
                found.setdefault((name, own), []).append(layer)
    ropes = {rope for kind in layer_kinds if (rope := kinds[kind]) is not None}
    only_rope = next(iter(ropes)) if len(ropes) == 1 else None
    rule = facts.layers
    codes = config.wholes(rule["codes_key"]) if "codes_key" in rule else None
    # where layers differ, the file must say of which kind these are
    listed = config.texts("mtp_layer_types") or [
        rule["codes"][str(code)] for code in (codes or ())[len(layer_kinds) :]
    ]
    for i in range(config.whole("num_nextn_predict_layers", least=0, most=_MOST_EXTRA) or 0):
        rope = kinds.get(listed[i]) if i < len(listed) else only_rope
        if rope is not None:
            found.setdefault(("mtp", rope), []).append(len(layer_kinds) + i)
    return tuple(NamedRope(name, rope, tuple(layers)) for (name, rope), layers in found.items())


def _rope_beside(rope: Rope, beside: Beside, width: int) -> Rope:
    """The rope of attention for heads of another width: the same frequencies, at an end of them."""
    if not beside.head_dim_key:
        return rope
    pairing, law = beside.pairing, rope.scaling
    if isinstance(law, Yarn):
        # a choice of keys has no softmax to scale
        law = replace(law, mscale=1.0, mscale_all_dim=0.0, attention_factor=rope.attention_factor)
    return replace(
        rope,
        head_dim=width,
        rotary_dim=rope.rotary_dim,
        rotary_start=width - rope.rotary_dim if beside.trailing else 0,
        pairing=pairing or rope.pairing,
        pairing_out=rope.pairing_out if pairing is None else None,
        scaling=law,
    )


def _layers_with_own(config: JsonObject, beside: Beside, count: int) -> list[int]:
    """The layers with an indexer of their own; the others take the choice of the one before."""
    key, words = "indexer_types", config.texts("indexer_types")
    if words is None:
        key, words = "index_topk_pattern", config.text("index_topk_pattern")
    if words is None:
        every = config.whole("index_topk_freq") or beside.every
        offset = config.whole("index_skip_topk_offset", least=0)
        first = (2 if offset is None else offset) - 1
        return [layer for layer in range(count) if max(layer - first, 0) % every == 0]
    if len(words) < count or not {*words} <= {"full", "shared", "F", "S"}:
        config.refuse(key, f"full or shared (in a pattern F or S) for each of {count} layers")
    return [layer for layer in range(count) if words[layer] in ("full", "F")]
