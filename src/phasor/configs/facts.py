"""The tables beside this file as Python values: what a model's class implies.

``huggingface.toml`` and ``gguf.toml`` hold an entry for each model type, ``class_sizes.toml`` the
sizes that classes of transformers assume, ``keys.toml`` what keys beside those mean. A slip in one
of them is an error that names the file and the line.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from importlib import resources
from types import MappingProxyType
from typing import Any, cast

from phasor.errors import ConfigError
from phasor.pairings import PAIRINGS, Pairing

_TUPLES = ("axis_order", "sections", "without_rope", "positions")
#: What a size is called by the types that do not say otherwise.
SIZES: Mapping[str, tuple[str, ...]] = {
    "num_hidden_layers": (
        "num_hidden_layers",
        "n_layer",
        "n_layers",
        "num_layers",
        "decoder_num_hidden_layers",
    ),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_attention_heads": (
        "num_attention_heads",
        "n_head",
        "n_heads",
        "decoder_num_attention_heads",
    ),
    "num_key_value_heads": (
        "num_key_value_heads",
        "num_kv_heads",
        "n_head_kv",
        "multi_query_group_num",
    ),
}
_NO_PART = "holds the configs of its parts, and this file has none that phasor looks for"
#: Names of the context; a file may hold several that differ.
CONTEXTS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


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
class Variant:
    """Other facts of the same model type, where a switch of the file says so.

    Attributes:
        key: The switch.
        value: The value that calls for these facts; None if any does.
        unless: Whether any other value than ``value`` calls for them.
        default: What the class takes for an absent switch.
        facts: What is different.
    """

    key: str
    value: bool | str | int | None = None
    unless: bool = False
    default: bool | str | int | None = None
    facts: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Facts of one model class; ``huggingface.toml`` explains each where it lists them."""

    pairing: Pairing = "half"
    pairing_out: Pairing | None = None
    direction: int = 1
    base: float | None = None
    base_unit: str | None = None
    fixed: bool = False
    block: Mapping[str, Any] = field(default_factory=dict[str, Any])
    partial: bool = False
    fraction: float | None = None
    rotary_dim: int | None = None
    trailing: bool = False
    head_dim: int | None = None
    latent: bool = False
    axes: str | None = None
    axis_order: tuple[int, ...] = ()
    sections: tuple[int, ...] = ()
    positions: tuple[str, ...] = ()
    origin: int = 0
    softmax: bool = False
    ntk_alpha: bool = False
    yarn_attention_factor: float | None = None
    log_multiplier_unit: float = 1.0
    laws: Mapping[str, str] = field(default_factory=dict[str, str])
    layers: Mapping[str, Any] = field(default_factory=dict[str, Any])
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    nested: bool = False
    without_rope: tuple[str, ...] = ()
    without_rope_needs: str | None = None
    kinds: Mapping[str, Kind] = field(default_factory=dict[str, Kind])
    block_key: str | None = None
    factor: float | None = None
    block_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    nulls: Mapping[str, Any] = field(default_factory=dict[str, Any])
    variants: tuple[Variant, ...] = ()
    parts: Mapping[str, str] = field(default_factory=dict[str, str])
    sizes: Mapping[str, int] = field(default_factory=dict[str, int])
    uses: str | None = None
    refused: str | None = None
    note: str | None = None

    @property
    def pairing_key(self) -> str | None:
        """The switch of the file that says how coordinates are paired, if the class has one."""
        return next((one.key for one in self.variants if "pairing" in one.facts), None)


@dataclass(frozen=True, kw_only=True)
class Table:
    """Both tables of model types.

    Attributes:
        huggingface: Facts by ``model_type``.
        gguf: Facts by ``general.architecture``.
        without_rope: Kinds of layers that rotate in no model.
        layer_words: Kinds of layers that a file may name.
    """

    huggingface: Mapping[str, Architecture]
    gguf: Mapping[str, Architecture]
    without_rope: frozenset[str]
    layer_words: frozenset[str]


@lru_cache(maxsize=1)
def table() -> Table:
    """The tables of model types, read once."""
    huggingface, gguf = read_table("huggingface.toml"), read_table("gguf.toml")
    types: dict[str, dict[str, Any]] = huggingface["model_types"]
    for uses, names in huggingface["without_rotation"].items():
        types |= {name: {"uses": uses} for name in names}
    for name, parts in huggingface["parts"].items():
        instead = [types.get(part, {}).get("uses") for part in parts.values()]
        whole = {"uses": instead[0]} if all(instead) else {"refused": _NO_PART}
        types[name] = types.get(name, whole) | {"parts": parts}
    sizes: dict[str, list[int]] = read_table("class_sizes.toml")
    for name in sizes.keys() & types.keys():
        keys = ("num_hidden_layers", "hidden_size", "num_attention_heads")
        given = {key: n for key, n in zip(keys, sizes[name], strict=True) if n}
        types[name] = {"sizes": given} | types[name]
    return Table(
        huggingface=_architectures("huggingface.toml", types),
        gguf=_architectures("gguf.toml", gguf),
        without_rope=frozenset(huggingface["layers"]["without_rope"]),
        layer_words=frozenset(huggingface["layers"]["known"]),
    )


def read_table(name: str) -> dict[str, Any]:
    """A TOML file of this package."""
    return tomllib.loads(_text(name))


def slip(file: str, entry: str, fact: str | None, what: str) -> ConfigError:
    """The error about a slip in a table, with its line."""
    wanted = [rf'\[([\w-]+\.)*"?{re.escape(entry)}"?\]', rf'"?{re.escape(entry)}"?\s*=']
    lines = _text(file).splitlines()
    number = next((i for i, line in enumerate(lines) if re.match("|".join(wanted), line)), 0)
    if fact is not None:
        here = re.compile(rf'(^|[{{,]\s*)"?{re.escape(fact)}"?\s*=')
        number = next((i for i in range(number, len(lines)) if here.search(lines[i])), number)
    return ConfigError(f"{file}:{number + 1}: {entry} {what}")


def _text(name: str) -> str:
    return resources.files("phasor.configs").joinpath(name).read_text("utf-8")


def _architectures(file: str, plain: Mapping[str, dict[str, Any]]) -> Mapping[str, Architecture]:
    known = [one.name for one in fields(Architecture)]

    def completed(name: str, own: dict[str, Any]) -> dict[str, Any]:
        own = dict(own)
        like = cast("str | None", own.pop("like", None))
        if like is not None and like not in plain:
            raise slip(file, name, "like", f"is like {like!r}, which is no entry")
        return own if like is None else completed(like, plain[like]) | own

    def check(name: str, own: Mapping[str, Any]) -> None:
        for fact in own:
            if fact not in known:
                raise slip(file, name, fact, f"has the unknown fact {fact!r}")
        for fact in ("pairing", "pairing_out"):
            if own.get(fact, "half") not in PAIRINGS:
                raise slip(file, name, fact, f"has no such {fact} as {own[fact]!r}")

    def variant(name: str, own: dict[str, Any]) -> Variant:
        own = dict(own)
        if "key" not in own or ("is" in own and "unless" in own):
            raise slip(file, name, "variants", "has a variant without a key, or with two values")
        condition = {"key": own.pop("key"), "default": own.pop("default", None)}
        condition["unless"] = "unless" in own
        condition["value"] = own.pop("is", own.pop("unless", None))
        if condition["value"] is None and own.pop("present", False) is not True:
            raise slip(file, name, "variants", "has a variant without a value")
        different = completed(name, own) if "like" in own else own
        if "like" in own:
            # nothing of the type itself is left
            blank = {one.name: one.default for one in fields(Architecture)}
            different = {k: v for k, v in blank.items() if k in plain[name]} | different
        check(name, different)
        return Variant(**condition, facts=_freeze_lists(different))

    def built(name: str) -> Architecture:
        check(name, {key: said for key, said in plain[name].items() if key != "like"})
        own = completed(name, plain[name])
        if "pairing" not in own and "uses" not in own and "refused" not in own:
            raise slip(file, name, None, "says neither its pairing nor what it uses instead")
        if "kinds" in own:
            try:
                own["kinds"] = {kind: Kind(**said) for kind, said in own["kinds"].items()}
            except TypeError as error:
                raise slip(file, name, "kinds", str(error)) from None
        own["variants"] = tuple(variant(name, one) for one in own.get("variants", ()))
        return Architecture(**_freeze_lists(own))

    return MappingProxyType({name: built(name) for name in plain})


def _freeze_lists(own: dict[str, Any]) -> dict[str, Any]:
    """A frozen value holds tuples, and TOML has lists; one name need not stand in a list."""
    own |= {key: tuple(own[key]) for key in _TUPLES if key in own}
    for fact in ("names", "block_names"):
        if fact in own:
            own[fact] = {
                key: (called,) if isinstance(called, str) else tuple(called)
                for key, called in own[fact].items()
            }
    return own
