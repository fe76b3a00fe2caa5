"""The rope blocks of a Hugging Face config: one for all layers, or one per kind of layer."""

from __future__ import annotations

from collections.abc import Mapping

from phasor._checks import shown
from phasor.configs.block import Block
from phasor.configs.facts import Architecture
from phasor.configs.laws import comparable
from phasor.errors import ConfigError

# transformers asks a block for "truncate" with a default, which a null is not
_NULLS = {"truncate": False}


class Blocks:
    """The rope blocks of a file: one for all layers, or one per kind of layer."""

    def __init__(self, config: Block, facts: Architecture) -> None:
        new, old = (_block(config, facts, key) for key in ("rope_parameters", "rope_scaling"))
        if new is not None and old is not None:
            _agree(new, old)
            old.ignore(*old.values)
        if facts.nested and new is not None and new.values:
            _refuse_flat(new)
        if facts.block_key is not None and new is None and old is None:
            old = _block(config, facts, facts.block_key)
        whole = new if new is not None and (new.values or old is None) else old
        self.assumed = bool(facts.block) and not (whole is not None and whole.values)
        if self.assumed:
            whole = Block(facts.block, "rope_parameters")
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


def _block(config: Block, facts: Architecture, key: str) -> Block | None:
    # left over from programs that hold a factor there; as a number it scales nothing
    if config.values.get(key) in (False, 1):
        config.ignore(key)
        return None
    given = config.block(key)
    return given and Block(given.values, given.path, names=facts.block_names, nulls=_NULLS)


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
