"""``transformer/config.json`` of diffusers, by its ``_class_name``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from phasor._checks import short_repr
from phasor.axes import Axial, OneAxis
from phasor.errors import ConfigError
from phasor.files.configs import rope_blocks
from phasor.files.configs.facts import Architecture, inherit, read_table, tuples_for_lists
from phasor.files.configs.model_class import MOST_LAYERS
from phasor.files.configs.source import JsonObject, renamed_keys
from phasor.files.configs.unread_keys import check_unread_keys
from phasor.layers import LayerRopes
from phasor.pairings import Pairing
from phasor.rope import WIDEST, Rope


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """Facts of a class of diffusers; ``diffusers.toml`` explains each where it lists them."""

    pairing: Pairing = "half"
    base: float = 10_000.0
    base_key: str | None = None
    axes_key: str | None = None
    dims: tuple[int, ...] = ()
    split: str | None = None
    head_dim: int | None = None
    head_dim_key: str = "attention_head_dim"
    head_dim_from: tuple[str, ...] = ()
    heads: str = "num_attention_heads"
    scaling_key: str | None = None
    fraction: float | None = None
    layers: tuple[str, ...] = ("num_layers",)
    order: tuple[str, ...] = ()
    only_if: str | None = None
    uses: str | None = None
    refused: str | None = None
    note: str | None = None


def load_diffusers(config: JsonObject, *, strict: bool) -> LayerRopes:
    """The rope of each layer of a transformer of diffusers, the same for all."""
    name = config.text("_class_name") or ""
    facts = _classes().get(name)
    if facts is None:
        config.refuse(
            "_class_name",
            "a transformer that phasor knows (of a pipeline give its transformer/config.json, else "
            "describe the embedding with phasor.Rope(...))",
        )
    if facts.refused is not None:
        raise ConfigError(f"{config.name('_class_name')} {name} cannot be read: {facts.refused}")
    notes = [facts.note] if facts.note else []
    layers = sum(config.whole(key, least=0, most=MOST_LAYERS) or 0 for key in facts.layers)
    rope, blocks = None, ()
    if facts.uses is not None:
        notes.append(f"{name} has no rotary embedding; in its place: {facts.uses}.")
        blocks = filter(None, map(config.object, ("rope_scaling", "rope_parameters")))
    else:
        config.require(facts.layers[0], layers or None)
        rope = _rope(config, facts)
        notes += [f"Axes are ({', '.join(facts.order)})."] * bool(facts.order)
    if facts.only_if is not None and config.flag(facts.only_if) is not True:
        rope = None
        notes.append(f"{config.name(facts.only_if)} is off: positions are sinusoidal.")
    what, classless = f"a diffusers {name}", Architecture(uses=facts.uses)
    notes += check_unread_keys(config, blocks, (rope,), what, strict=strict, facts=classless)
    kind = "nope" if rope is None else "rope"
    return LayerRopes(
        name=name,
        layer_kinds=(kind,) * (layers or 1),
        kinds={kind: rope},
        num_heads=None if facts.uses is not None else config.whole(facts.heads),
        notes=tuple(notes),
    )


def _rope(config: JsonObject, facts: Transformer) -> Rope:
    head_dim = _head_dim(config, facts)
    sizes = _axis_sizes(config, facts, head_dim)
    base = None if facts.base_key is None else config.number(facts.base_key, above=1)
    block = None if facts.scaling_key is None else config.object(facts.scaling_key)
    outside = rope_blocks.LawContext(facts=Architecture(), rotary_dim=head_dim, config=config)
    with renamed_keys(config, {"sections": facts.axes_key or facts.head_dim_key}):
        return Rope(
            head_dim=head_dim,
            pairing=facts.pairing,
            base=facts.base if base is None else base,
            rotary_dim=sum(sizes) if sizes else int(head_dim * (facts.fraction or 1)),
            scaling=None if block is None else rope_blocks.scaling(block, outside),
            axes=Axial(tuple(size // 2 for size in sizes)) if sizes else OneAxis(),
        )


def _head_dim(config: JsonObject, facts: Transformer) -> int:
    if len(facts.head_dim_from) == 2:
        width, heads = (config.whole(key, least=1) for key in facts.head_dim_from)
        if width is not None and heads is not None and 2 <= width // heads <= WIDEST:
            return width // heads
        both, got = (
            " and ".join(facts.head_dim_from),
            f"{short_repr(width)} and {short_repr(heads)}",
        )
        raise ConfigError(f"{config.path_of(both)} must give the width of a head, got {got}")
    if facts.head_dim_from:
        return sum(config.wholes(facts.head_dim_from[0]) or facts.dims)
    width = config.whole(facts.head_dim_key, least=2, most=WIDEST) or facts.head_dim
    return config.require(facts.head_dim_key, width)


def _axis_sizes(config: JsonObject, facts: Transformer, head_dim: int) -> tuple[int, ...]:
    """Rotated coordinates of each axis."""
    if facts.split is not None:
        return _SPLITS[facts.split](head_dim)
    if facts.axes_key is None:
        return ()
    dims = config.wholes(facts.axes_key) or facts.dims
    if any(size % 2 for size in dims) or sum(dims) > head_dim:
        config.refuse(facts.axes_key, f"even numbers of coordinates, at most {head_dim} together")
    return dims


_SPLITS: Mapping[str, Callable[[int], tuple[int, ...]]] = {
    "wan": lambda n: (n - 4 * (n // 6), 2 * (n // 6), 2 * (n // 6)),
    "cogvideox": lambda n: (n // 4, n // 8 * 3, n // 8 * 3),
    "halves": lambda n: (n // 2, n // 2),
}


@lru_cache(maxsize=1)
def _classes() -> Mapping[str, Transformer]:
    """``diffusers.toml``, read once."""
    plain = read_table("diffusers.toml")
    entries: dict[str, Mapping[str, Any]] = plain["rotating"]
    entries |= {name: {"uses": uses} for name, uses in plain["without_rotation"].items()}
    entries |= {name: {"refused": why} for name, why in plain["refused"].items()}
    return {k: Transformer(**tuples_for_lists(inherit(v, entries))) for k, v in entries.items()}
