"""``architectures.toml`` as Python values: what a model's class implies and its file leaves out."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from importlib import resources
from types import MappingProxyType
from typing import Any, cast

from phasor.spec import Pairing

_LISTS = ("axis_order", "sections", "without_rope", "harmless")


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What sets one kind of layer apart, where the file does not say it in a block of its own.

    Attributes:
        base: Class default of the base.
        base_key: Top-level key that holds this kind's base.
        scaled: Whether the one rope block of an old file applies to this kind.
        head_dim: Class default of the head width.
        head_dim_key: Top-level key that holds this kind's head width.
    """

    base: float | None = None
    base_key: str | None = None
    scaled: bool = True
    head_dim: int | None = None
    head_dim_key: str | None = None


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Facts of one model class; ``architectures.toml`` explains each where it lists them."""

    pairing: Pairing
    pairing_out: Pairing | None = None
    pairing_key: str | None = None
    direction: int = 1
    base: float | None = None
    base_unit: str | None = None
    fixed: bool = False
    scaled_default: bool = False
    partial: bool = False
    fraction: float | None = None
    rotary_dim: int | None = None
    rotary_dim_key: str = "rotary_dim"
    trailing: bool = False
    head_dim: int | None = None
    head_dim_key: str = "head_dim"
    axes: str | None = None
    axis_order: tuple[int, ...] = ()
    sections: tuple[int, ...] = ()
    softmax: bool = False
    ntk_alpha: bool = False
    yarn_attention_factor: float | None = None
    log_multiplier_unit: float = 1.0
    layers: Mapping[str, Any] = field(default_factory=dict[str, Any])
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    nested: bool = False
    without_rope: tuple[str, ...] = ()
    without_rope_needs: str | None = None
    only_if: Mapping[str, Any] = field(default_factory=dict[str, Any])
    kinds: Mapping[str, Kind] = field(default_factory=dict[str, Kind])
    harmless: tuple[str, ...] = ()
    note: str | None = None


@dataclass(frozen=True, kw_only=True)
class Table:
    """The whole file."""

    huggingface: Mapping[str, Architecture]
    gguf: Mapping[str, Architecture]
    deepseek: Mapping[str, float]
    without_rope: frozenset[str]
    layer_words: frozenset[str]


@lru_cache(maxsize=1)
def table() -> Table:
    """``architectures.toml``, read once."""
    text = resources.files("phasor").joinpath("architectures.toml").read_text("utf-8")
    plain = tomllib.loads(text)
    return Table(
        huggingface=_architectures(plain["huggingface"]),
        gguf=_architectures(plain["gguf"]),
        deepseek=plain["deepseek"],
        without_rope=frozenset(plain["layers"]["without_rope"]),
        layer_words=frozenset(plain["layers"]["known"]),
    )


def _architectures(plain: dict[str, dict[str, Any]]) -> Mapping[str, Architecture]:
    known = {one.name for one in fields(Architecture)}

    def facts(name: str) -> dict[str, Any]:
        own = dict(plain[name])
        like = cast("str | None", own.pop("like", None))
        return own if like is None else facts(like) | own

    def built(name: str) -> Architecture:
        own = facts(name)
        # a frozen value holds tuples, and TOML has lists
        own |= {key: tuple(own[key]) for key in _LISTS if key in own}
        assert own.keys() <= known, f"architectures.toml: {name} has an unknown fact"
        if "kinds" in own:
            own["kinds"] = {kind: Kind(**said) for kind, said in own["kinds"].items()}
        return Architecture(**own)

    return MappingProxyType({name: built(name) for name in plain})
