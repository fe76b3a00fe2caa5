"""diffusers: ``transformer/config.json``, which is read by its ``_class_name``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from phasor.axes import Axes, Axial, InterleavedSections, OneAxis
from phasor.files import refusal
from phasor.files.configs import rope_blocks
from phasor.files.configs.facts import NO_FACTS, Architecture, architectures, read_table
from phasor.files.configs.ropes import layer_ropes
from phasor.files.configs.source import MOST_LAYERS, JsonObject, renamed_keys
from phasor.layers import LayerRopes
from phasor.pairings import Pairing
from phasor.rope import Rope
from phasor.scaling import NTK


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """Facts about a class of diffusers; ``diffusers.toml`` explains them."""

    pairing: Pairing = "half"
    base: float | None = None
    head_dim: int | None = None
    fraction: float | None = None
    other_positions: str | None = None
    refused: str | None = None
    note: str | None = None
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    axes_key: str | None = None
    dims: tuple[int, ...] = ()
    summed: bool = False
    interleaved: bool = False
    split: str | None = None
    scale_key: str | None = None
    scales: tuple[float, ...] = ()
    layer_keys: tuple[str, ...] = ("num_layers",)
    order: tuple[str, ...] = ()
    only_if: str | None = None
    ignored: tuple[str, ...] = ()


def read(top: JsonObject) -> LayerRopes | None:
    """The rope of a transformer of diffusers, the same in all layers."""
    if (name := top.text("_class_name")) is None:
        return None
    if (facts := _classes().get(name)) is None:
        classes = (
            "a transformer that phasor knows (of a pipeline give its transformer/config.json, "
        )
        top.refuse("_class_name", f"{classes}else describe the embedding with phasor.Rope(...))")
    if facts.refused is not None:
        key = top.name("_class_name")
        raise refusal("class_refused", key=key, name=name, why=facts.refused)
    names = {"num_attention_heads": ()} if facts.other_positions else facts.names
    config = JsonObject(top.values, names=names, strict=top.strict)
    config.notes += [facts.note] if facts.note else []
    config.ignore(*facts.ignored)
    layers = sum(config.whole(key, least=0, most=MOST_LAYERS) or 0 for key in facts.layer_keys)
    rope, blocks = None, ()
    if facts.other_positions is not None:
        config.notes.append(f"{name} has no rotary embedding; instead: {facts.other_positions}.")
        blocks = filter(None, map(config.object, ("rope_scaling", "rope_parameters")))
    else:
        config.require(facts.layer_keys[0], layers or None)
        rope = _transformer_rope(config, facts)
        config.notes += [f"Axes are ({', '.join(facts.order)})."] * bool(facts.order)
    if facts.only_if is not None and config.flag(facts.only_if) is not True:
        rope = None
        config.notes.append(f"{config.name(facts.only_if)} is off: positions are sinusoidal.")
    kind = "nope" if rope is None else "rope"
    return layer_ropes(
        config,
        {kind: rope},
        (kind,) * (layers or 1),
        f"a diffusers {name}",
        facts=Architecture(other_positions=facts.other_positions),
        blocks=blocks,
        name=name,
    )


def _transformer_rope(config: JsonObject, facts: Transformer) -> Rope:
    sizes = () if facts.axes_key is None else config.wholes(facts.axes_key) or facts.dims
    head_dim = sum(sizes)
    if not facts.summed:
        # a class with a key for the width of all heads together has none for a single head
        default = None if "hidden_size" in facts.names else facts.head_dim
        head_dim = config.width("head_dim") or default or config.head_dim()
    if facts.interleaved:
        first = head_dim // 2 - sum(sizes[1:])
        sizes = (2 * first, *(2 * pairs for pairs in sizes[1:]))
    if facts.split is not None:
        sizes = _SPLITS[facts.split](head_dim)
    elif facts.axes_key and (any(size % 2 for size in sizes) or sum(sizes) > head_dim):
        config.refuse(facts.axes_key, f"even numbers of coordinates, at most {head_dim} together")
    base, block = config.number("rope_theta", above=1), config.object("rope_scaling")
    law_context = rope_blocks.LawContext(NO_FACTS, head_dim, config)
    pairs = tuple(size // 2 for size in sizes)
    axes: Axes = OneAxis()
    if pairs:
        kind = InterleavedSections if facts.interleaved else Axial
        axes = kind(pairs, scaling=_laws_of_axes(config, facts))
    with renamed_keys(config, sections=facts.axes_key or "head_dim"):
        return Rope(
            head_dim=head_dim,
            pairing=facts.pairing,
            base=facts.base if base is None else base,
            rotary_dim=sum(sizes) if sizes else int(head_dim * (facts.fraction or 1)),
            scaling=None if block is None else rope_blocks.read_law(block, law_context),
            axes=axes,
        )


def _laws_of_axes(config: JsonObject, facts: Transformer) -> tuple[NTK | None, ...] | None:
    """NTK-aware scaling of each axis by its factor; None for classes without such factors."""
    if facts.scale_key is None:
        return None
    factors = config.numbers(facts.scale_key, above=0) or facts.scales
    if len(factors) != len(facts.scales):
        config.refuse(facts.scale_key, f"a factor for each of {len(facts.scales)} axes")
    return tuple(None if factor == 1 else NTK(factor=factor) for factor in factors)


_SPLITS: Mapping[str, Callable[[int], tuple[int, ...]]] = {
    "wan": lambda n: (n - 4 * (n // 6), 2 * (n // 6), 2 * (n // 6)),
    "cogvideox": lambda n: (n // 4, n // 8 * 3, n // 8 * 3),
    "halves": lambda n: (n // 2, n // 2),
}


@lru_cache(maxsize=1)
def _classes() -> Mapping[str, Transformer]:
    """``diffusers.toml``, read once."""
    plain = read_table("diffusers.toml", "phasor.files.dialects")
    entries: dict[str, dict[str, Any]] = plain["rotating"]
    entries |= {
        name: {"other_positions": replacement}
        for name, replacement in plain["without_rotation"].items()
    }
    entries |= {name: {"refused": reason} for name, reason in plain["refused"].items()}
    return architectures(entries, plain["names"], Transformer)
