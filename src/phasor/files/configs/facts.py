"""The TOML tables of this package as Python values: facts that a model's class implies.

``huggingface.toml`` has an entry for each model type; ``class_sizes.toml`` has
the default sizes of transformers' classes. Tests check the values of a table.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import resources
from types import MappingProxyType
from typing import Any, TypeVar, cast

from phasor.pairings import Pairing

#: Why a file of a model with several parts is refused, if no object is its language model.
NO_PART = "has its language model in a nested config, and this file has no key for it"


def _empty() -> Any:
    # ``dict[str, Any]``, called for each mapping, would take half the time of a class's facts
    return {}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """The facts of one kind of layer; ``huggingface.toml`` explains each."""

    base: float | None = None
    base_key: str | None = None
    scaled: bool = True
    head_dim: int | None = None
    head_dim_key: str | None = None


@dataclass(frozen=True, kw_only=True)
class AxesFacts:
    """The axes of a class; ``huggingface.toml`` explains each fact."""

    layout: str
    sections: tuple[int, ...] = ()
    positions: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class AuxiliaryRope:
    """How a rotation outside attention differs from it; ``huggingface.toml`` explains each."""

    kinds: tuple[str, ...] = ()
    head_dim: int | None = 128
    head_dim_key: str = "index_head_dim"
    pairing: Pairing | None = None
    trailing: bool = False
    every: int = 1


@dataclass(frozen=True, kw_only=True)
class LayerRule:
    """How a class tells its layers apart; ``huggingface.toml`` explains each fact."""

    hit: str = ""
    miss: str = ""
    absent: str | None = None
    listed: bool = False
    needs: str | None = None
    every: int | None = None
    keys: tuple[str, ...] = ()
    shift: int = 1
    also: tuple[int, ...] = ()
    first: tuple[str, ...] = ()
    or_last: bool = False
    indices_key: str | None = None
    cycle_key: str | None = None
    cycle: tuple[Any, ...] = ()
    word: str = ""
    codes_key: str | None = None
    codes: Mapping[str, str] = field(default_factory=_empty)
    first_codes: tuple[int, ...] = ()
    no_rope_interval: int | None = None
    bases_key: str | None = None
    blocks_key: str | None = None
    mtp: str | None = None

    @property
    def words(self) -> set[str]:
        """The kinds of layers that the rule distinguishes."""
        return {self.hit, self.miss, self.absent or "", *self.codes.values()} - {""}

    @property
    def is_about_masks(self) -> bool:
        """Whether ``layer_types`` states which keys a layer sees, instead of its rope."""
        return self.no_rope_interval is not None or self.bases_key is not None

    def coded(self, numbers: Iterable[int]) -> list[str]:
        """The kinds of layers with these codes."""
        return [self.codes[str(number)] for number in numbers]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Facts that replace those of the model type if the switch ``key`` has ``value``.

    With ``unless``, if it has any other value. If ``value`` is None, any value will do.
    """

    key: str
    value: bool | str | float | None = None
    unless: bool = False
    default: bool | str | float | None = None
    facts: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Facts of one model class; ``huggingface.toml`` explains each where it lists them."""

    pairing: Pairing = "half"
    pairing_out: Pairing | None = None
    turns: str | None = None
    rewrite: str | None = None
    base: float | None = None
    fixed: bool = False
    block: Mapping[str, Any] = field(default_factory=_empty)
    partial: bool = False
    fraction: float | None = None
    rotary_dim: int | None = None
    head_dim: int | None = None
    latent: bool = False
    axes: AxesFacts | None = None
    softmax: bool = False
    ntk_alpha: bool = False
    laws: Mapping[str, str] = field(default_factory=_empty)
    layers: LayerRule | None = None
    labels: Mapping[str, str] = field(default_factory=_empty)
    nested: bool = False
    without_rope: tuple[str, ...] = ()
    kinds: Mapping[str, Kind] = field(default_factory=_empty)
    auxiliary_ropes: Mapping[str, AuxiliaryRope] = field(default_factory=_empty)
    names: Mapping[str, tuple[str, ...]] = field(default_factory=_empty)
    variants: tuple[Variant, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=_empty)
    query_factor: Mapping[str, Any] = field(default_factory=_empty)
    other_positions: str | None = None
    unused_keys: tuple[str, ...] = ()
    refused: str | None = None
    note: str | None = None

    @property
    def positions(self) -> tuple[str, ...]:
        """The axes of a vision tower that rotates patches; empty for other classes."""
        return () if self.axes is None else self.axes.positions

    @property
    def pairing_key(self) -> str | None:
        """The key of the file that selects the pairing, if the class has one."""
        return next((v.key for v in self.variants if "pairing" in v.facts), None)

    @property
    def width_key(self) -> str:
        """The key of the width of a head, or of its rotated slice in latent attention."""
        return "qk_rope_head_dim" if self.latent else "head_dim"

    def kind(self, kind: str) -> Kind:
        """The facts that differ in layers of that kind."""
        return self.kinds.get(self.labels.get(kind, kind), Kind())


NO_FACTS = Architecture()
_OF_A_SWITCH = {"key", "is", "unless", "present", "default"}
_Facts = TypeVar("_Facts")


@dataclass(frozen=True, kw_only=True)
class Table:
    """Facts by ``model_type``, and the entries that ``files.toml`` explains."""

    huggingface: Mapping[str, Architecture]
    parts: Mapping[str, Mapping[str, str]]  # by type: the types of the inner configs by their keys
    outer_ropes: Mapping[
        str, str
    ]  # by type: the parts that rope keys outside the inner config turn
    files: Mapping[str, Any]


@lru_cache(maxsize=1)
def table() -> Table:
    """The tables of model types, read once."""
    huggingface, files = read_table("huggingface.toml"), read_table("files.toml")
    types: dict[str, dict[str, Any]] = huggingface["model_types"]
    for replacement, names in huggingface["without_rotation"].items():
        types |= {name: {"other_positions": replacement} for name in names}
    for name, keys in huggingface["unused_keys"].items():
        types[name] = types[name] | {"unused_keys": keys}
    for name, parts in huggingface["parts"].items():
        replacement = [types.get(part, {}).get("other_positions") for part in parts.values()]
        default = {"other_positions": replacement[0]} if all(replacement) else {"refused": NO_PART}
        types.setdefault(name, default)
    keys = ("num_hidden_layers", "hidden_size", "num_attention_heads")
    for name, sizes in read_table("class_sizes.toml").items():
        if name in types:
            class_sizes = {key: size for key, size in zip(keys, sizes, strict=True) if size}
            types[name] = {"sizes": class_sizes} | types[name]
    parts = {name: _inherited_parts(name, types, huggingface["parts"]) for name in types}
    return Table(
        huggingface=architectures(types, files["names"]),
        parts=MappingProxyType(parts),
        outer_ropes=MappingProxyType(huggingface["outer_ropes"]),
        files=MappingProxyType(files),
    )


def _inherited_parts(
    name: str, types: Mapping[str, Mapping[str, Any]], parts: Mapping[str, Mapping[str, str]]
) -> Mapping[str, str]:
    """The parts of a model type, or of the type that it is ``like``."""
    while name not in parts and "like" in types[name]:
        name = types[name]["like"]
    return parts.get(name, {})


def read_table(name: str, package: str = "phasor.files.configs") -> dict[str, Any]:
    """A TOML file of a package."""
    return tomllib.loads(resources.files(package).joinpath(name).read_text("utf-8"))


def frozen(entry: Mapping[str, Any]) -> dict[str, Any]:
    """An entry whose values can be fields of a frozen dataclass."""
    items = entry.items()
    return {k: tuple(cast("list[Any]", v)) if isinstance(v, list) else v for k, v in items}


def tuples(names: Mapping[str, str | list[str]]) -> dict[str, tuple[str, ...]]:
    """Names of keys as a tuple, from one name or a list."""
    return {k: (name,) if isinstance(name, str) else tuple(name) for k, name in names.items()}


def inherit(entry: Mapping[str, Any], entries: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The entry merged with the one of ``entries`` that it is ``like``."""
    facts = dict(entry)
    like = facts.pop("like", None)
    return facts if like is None else inherit(entries[like], entries) | facts


def architectures(
    plain: Mapping[str, dict[str, Any]],
    names: Mapping[str, list[str]],
    entry_type: type[_Facts] = Architecture,
) -> Mapping[str, _Facts]:
    """The entries of a table, each with these names of keys added."""

    def freeze(entry: dict[str, Any]) -> dict[str, Any]:
        entry = frozen(entry)
        if "names" in entry:
            entry["names"] = {**names, **entry["names"]}
        lists = {fact: tuples(entry[fact]) for fact in entry.keys() & {"names"}}
        values: dict[str, Any] = {
            fact: {k: fact_type(**frozen(facts)) for k, facts in entry[fact].items()}
            for fact, fact_type in (("kinds", Kind), ("auxiliary_ropes", AuxiliaryRope))
            if fact in entry
        }
        if "axes" in entry:
            values["axes"] = AxesFacts(**frozen(entry["axes"]))
        if "layers" in entry:
            values["layers"] = LayerRule(**frozen(entry["layers"])) if entry["layers"] else None
        return entry | lists | values

    def build_variant(name: str, entry: dict[str, Any]) -> Variant:
        facts = inherit(entry, plain)
        if "like" in entry:
            # the other type's facts replace all facts of this type, which return to their defaults
            facts = {k: getattr(Architecture(), k) for k in inherit(plain[name], plain)} | facts
        unless = facts.get("unless")
        switch = {"value": facts.get("is", unless), "default": facts.get("default")}
        rest = {k: v for k, v in facts.items() if k not in _OF_A_SWITCH}
        return Variant(key=facts["key"], unless=unless is not None, facts=freeze(rest), **switch)

    def build(name: str) -> _Facts:
        entry: dict[str, Any] = {"names": dict[str, Any](), **inherit(plain[name], plain)}
        if "variants" in entry:
            entry["variants"] = tuple(build_variant(name, v) for v in entry["variants"])
        return entry_type(**freeze(entry))

    return MappingProxyType({name: build(name) for name in plain})
