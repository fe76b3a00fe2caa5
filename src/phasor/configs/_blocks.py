"""The rope blocks of a Hugging Face config: one for all layers, or one per kind of layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from phasor._checks import shown
from phasor.configs._laws import rope_type
from phasor.configs._reading import Block
from phasor.configs._table import Architecture
from phasor.errors import ConfigError


def comparable(value: Any) -> Any:
    """A rope block in the spelling of transformers 5, for comparison."""
    if not isinstance(value, Mapping):
        return value
    block = Block(cast(Mapping[str, Any], value))
    plain = {k: v for k, v in block.values.items() if v is not None and k != "type"}
    if plain and not any(isinstance(v, Mapping) for v in plain.values()):
        plain["rope_type"] = rope_type(block)
    return plain


class Blocks:
    """The rope blocks of a file: one for all layers, or one per kind of layer."""

    def __init__(self, config: Block, facts: Architecture) -> None:
        new, old = config.block("rope_parameters"), config.block("rope_scaling")
        if new is not None and old is not None:
            _agree(new, old)
            old.ignore(*old.values)
        if facts.nested and new is not None and new.values:
            _refuse_flat(new)
        whole = new if new is not None and (new.values or old is None) else old
        self.stated = whole is not None and bool(whole.values)
        self.flat = whole or Block({}, "rope_parameters")
        self.by_kind: dict[str, Block | None] = {}
        self.used: list[Block] = []
        self._labels = facts.labels
        nested = [k for k, v in self.flat.values.items() if isinstance(v, Mapping)]
        if nested:
            # saved beside the blocks of ZAYA, whose class removes it
            idle = {"rope_type", "type"} if facts.nested else set[str]()
            idle = {key for key in idle if self.flat.values.get(key) == "default"}
            rest = [key for key in self.flat.values if key not in idle]
            others = [key for key in rest if self.flat.has(key) and key not in nested]
            if others:
                raise ConfigError(
                    f"{self.flat.name(others[0])} stands beside the blocks of single layer types "
                    f"({', '.join(nested)}); move it into the ones it is meant for"
                )
            absent = [one for one in facts.labels.values() if one not in nested]
            if absent:
                raise ConfigError(
                    f"{self.flat.name(absent[0])} must be an object, as transformers ignores "
                    f"{', '.join(nested)} without it, got {shown(self.flat.values.get(absent[0]))}"
                    "; add it, even if no layer reads it"
                )
            self.by_kind = {key: self.flat.block(key) for key in rest}
            self._agree_on_base(config)

    def _agree_on_base(self, config: Block) -> None:
        """One base beside several blocks must be that of at least one of them."""
        stated = config.number("rope_theta", above=1)
        inside = [b.number("rope_theta", above=1) for b in self.by_kind.values() if b is not None]
        if stated is not None and None not in inside and stated not in inside:
            raise ConfigError(
                f"{config.name('rope_theta')} is {stated:g}, which none of the blocks of "
                f"{self.flat.name('')[:-1]} says; remove it"
            )

    def of(self, kind: str) -> Block | None:
        """The block for layers of this kind; None where the file says they have no rope."""
        if not self.by_kind:
            self.used = [self.flat]
            return self.flat
        label = self._labels.get(kind, kind)
        if label not in self.by_kind:
            raise ConfigError(
                f"{self.flat.name(label)} is absent, but layers of the kind {kind!r} exist "
                f"(blocks: {', '.join(self.by_kind)}); add it, null if they have no rope, or "
                "layer_types if the file has none"
            )
        block = self.by_kind[label]
        if block is not None:
            self.used.append(block)
        return block


def _refuse_flat(block: Block) -> None:
    """One block for all layers, where transformers reads one for each kind and no other."""
    if not any(isinstance(value, Mapping) for value in block.values.values()):
        raise ConfigError(
            f"{block.path} must hold a block for each kind of layer, as transformers reads no "
            f"other for this model type, got {', '.join(block.values)}; put the keys into the "
            "blocks of the kinds they are meant for"
        )


def _agree(new: Block, old: Block) -> None:
    mine, theirs = (comparable(block.values) for block in (new, old))
    # the new block also holds what used to stand beside the old one
    moved = {"rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}
    for key in sorted(set(mine) | set(theirs), key=str):
        if mine.get(key) != theirs.get(key) and not (key in moved and key not in theirs):
            raise ConfigError(
                f"{new.name(key)} and {old.name(key)} differ "
                f"({shown(mine.get(key))}, {shown(theirs.get(key))}); remove one block"
            )
