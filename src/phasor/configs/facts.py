"""The TOML tables of this package as Python values: what a model's class implies.

``huggingface.toml`` and ``gguf.toml`` have an entry for each model type; ``class_sizes.toml`` has
the default sizes of transformers' classes. What a table may say is checked by its test.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from importlib import resources
from types import MappingProxyType
from typing import Any, cast

from phasor.configs.block import Block
from phasor.pairings import Pairing

_NO_PART = "holds the configs of its parts, and this file has none that phasor looks for"


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What is different in one kind of layer, where the file has no block for each kind.

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
    """Facts that replace those of the model type, depending on a switch in the file.

    Attributes:
        key: The switch.
        value: The value for which the facts apply; None for any value.
        unless: Whether the facts apply for every value except ``value`` instead.
        default: The class's default for an absent switch.
        facts: The facts that replace those of the model type.
    """

    key: str
    value: bool | str | int | None = None
    unless: bool = False
    default: bool | str | int | None = None
    facts: Mapping[str, Any]

    def applies(self, config: Block) -> bool:
        """Whether the switch in the file has the value that the facts are for."""
        if self.value is None:
            return config.has(self.key)
        listed = config.values.get(self.key)
        if isinstance(listed, (list, tuple)):  # of architectures
            return self.value in listed
        readers = {bool: config.flag, str: config.text, int: partial(config.whole, least=0)}
        value = readers[type(self.value)](self.key)
        return ((self.default if value is None else value) == self.value) != self.unless


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Facts of one model class; ``huggingface.toml`` explains each where it lists them."""

    pairing: Pairing = "half"
    pairing_out: Pairing | None = None
    direction: int = 1
    base: float | None = None
    base_unit: str | None = None
    factor_key: str | None = None
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
    carried: tuple[str, ...] = ()
    divisors: bool = False
    refused: str | None = None
    note: str | None = None

    @property
    def pairing_key(self) -> str | None:
        """The key of the file that selects the pairing, if the class has one."""
        return next((v.key for v in self.variants if "pairing" in v.facts), None)

    def kind(self, kind: str) -> Kind:
        """What is different in layers of that kind."""
        return self.kinds.get(self.labels.get(kind, kind), Kind())


@dataclass(frozen=True, kw_only=True)
class Table:
    """Both tables of model types.

    Attributes:
        huggingface: Facts by ``model_type``.
        marks: By type, the keys that tell files of it which name none.
        gguf: Facts by ``general.architecture``.
        without_rope: Kinds of layers that rotate in no model.
        layer_words: Kinds of layers that a file may name.
        key_lists: Lists of keys that any file may have, by what they are: ``contexts``,
            ``language_models``, ``replaced``, ``replaced_by_kind`` and ``other_objects``.
        other_models: A pattern of the keys of objects that describe another model.
        sizes: A pattern of the keys that may hold a size of the model.
        mlc_names: By key, the name that MLC's files may have for it besides.
        foreign_files: Of files that hold no config of a model: the keys that tell one, and what it is.
        instead: By ``position_embedding_type``, what a model has in place of a rotation.
    """

    huggingface: Mapping[str, Architecture]
    marks: Mapping[str, list[str]]
    gguf: Mapping[str, Architecture]
    without_rope: frozenset[str]
    layer_words: frozenset[str]
    key_lists: Mapping[str, list[str]]
    other_models: str
    sizes: str
    mlc_names: Mapping[str, str]
    foreign_files: Sequence[Mapping[str, Any]]
    instead: Mapping[str, str]


@lru_cache(maxsize=1)
def table() -> Table:
    """The tables of model types, read once."""
    huggingface, gguf = read_table("huggingface.toml"), read_table("gguf.toml")
    types: dict[str, dict[str, Any]] = huggingface["model_types"]
    for uses, names in huggingface["without_rotation"].items():
        types |= {name: {"uses": uses} for name in names}
    for name, keys in huggingface["carried"].items():
        types[name] = types[name] | {"carried": keys}
    for name, parts in huggingface["parts"].items():
        uses = [types.get(part, {}).get("uses") for part in parts.values()]
        default = {"uses": uses[0]} if all(uses) else {"refused": _NO_PART}
        types[name] = types.get(name, default) | {"parts": parts}
    sizes: dict[str, list[int]] = read_table("class_sizes.toml")
    for name in sizes.keys() & types.keys():
        keys = ("num_hidden_layers", "hidden_size", "num_attention_heads")
        known = {key: n for key, n in zip(keys, sizes[name], strict=True) if n}
        types[name] = {"sizes": known} | types[name]
    return Table(
        huggingface=_architectures(types, huggingface["names"]),
        marks=MappingProxyType(huggingface["marks"]),
        gguf=_architectures(gguf, {}),
        without_rope=frozenset(huggingface["layers"]["without_rope"]),
        layer_words=frozenset(huggingface["layers"]["known"]),
        key_lists=MappingProxyType(huggingface["keys"]),
        **huggingface["patterns"],
        mlc_names=MappingProxyType(huggingface["mlc_names"]),
        foreign_files=tuple(huggingface["foreign_files"]),
        instead=MappingProxyType(huggingface["instead"]),
    )


def read_table(name: str) -> dict[str, Any]:
    """A TOML file of this package."""
    return tomllib.loads(resources.files("phasor.configs").joinpath(name).read_text("utf-8"))


def tuples_for_lists(entry: Mapping[str, Any]) -> dict[str, Any]:
    """An entry whose values can be fields of a frozen dataclass."""
    return {
        key: tuple(cast("list[Any]", value)) if isinstance(value, list) else value
        for key, value in entry.items()
    }


def inherit(entry: Mapping[str, Any], entries: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The entry merged with the one of ``entries`` that it is ``like``."""
    own = dict(entry)
    like = own.pop("like", None)
    return own if like is None else inherit(entries[like], entries) | own


def _architectures(
    plain: Mapping[str, dict[str, Any]], names: Mapping[str, list[str]]
) -> Mapping[str, Architecture]:
    """The entries of a table, which all have these names of keys besides their own."""

    def build_variant(name: str, entry: dict[str, Any]) -> Variant:
        entry = dict(entry)
        condition = {"key": entry.pop("key"), "default": entry.pop("default", None)}
        condition["unless"] = "unless" in entry
        condition["value"] = entry.pop("is", entry.pop("unless", None))
        entry.pop("present", None)
        facts = inherit(entry, plain)
        if "like" in entry:
            # the other type's facts replace all of this one's, so these return to their defaults
            facts = {k: getattr(Architecture(), k) for k in inherit(plain[name], plain)} | facts
        return Variant(**condition, facts=_freeze_names(facts, names))

    def build(name: str) -> Architecture:
        entry = inherit(plain[name], plain)
        entry["kinds"] = {kind: Kind(**facts) for kind, facts in entry.get("kinds", {}).items()}
        entry["variants"] = tuple(build_variant(name, v) for v in entry.get("variants", ()))
        return Architecture(**_freeze_names({"names": dict[str, Any](), **entry}, names))

    return MappingProxyType({name: build(name) for name in plain})


def _freeze_names(entry: dict[str, Any], names: Mapping[str, list[str]]) -> dict[str, Any]:
    """``entry`` with tuples for TOML's lists; a single name of a key becomes a tuple of one."""
    entry = tuples_for_lists(entry)
    if "names" in entry:
        entry["names"] = {**names, **entry["names"]}
    for fact in entry.keys() & {"names", "block_names"}:
        entry[fact] = {
            key: (name,) if isinstance(name, str) else tuple(name)
            for key, name in entry[fact].items()
        }
    return entry
