"""The kind of every layer, and the rope block that layers of a kind read.

Kinds come from a list in the file, or from the pattern of its model class. A file has one block for
all layers, or one for each kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phasor._checks import short_repr
from phasor.errors import ConfigError
from phasor.files.configs.block import Block, require, single_value
from phasor.files.configs.facts import Architecture, table
from phasor.files.configs.laws import normalize

# far above any model's, so that a damaged count cannot fill the memory
MOST_LAYERS = 100_000
# transformers reads block.get("truncate", True), so a null counts as false
_NULLS = {"truncate": False}


def layer_kinds(config: Block, facts: Architecture) -> tuple[str, ...]:
    """One kind per layer: the file's names for them, else ``rope`` and ``nope``."""
    count = config.whole("num_hidden_layers", most=MOST_LAYERS)
    count = require(config, "num_hidden_layers", count)
    rule, files = facts.layers, table().files
    if "no_rope_interval" in rule or "bases_key" in rule:
        # in these models layer_types is about the mask, not the rope
        config.ignore("layer_types")
        read = _layers_by_base if "bases_key" in rule else _layers_by_switch
        return read(config, rule, count)
    if "blocks_key" in rule:
        return _layers_by_attention(config, rule["blocks_key"], count)
    key = "layers_block_type" if config.has("layers_block_type") else "layer_types"
    kinds = config.texts(key)
    if kinds is None:
        return layers_by_pattern(config, facts, count)
    if len(kinds) != count:
        raise ConfigError(
            f"{config.name(key)} must name the kind of each of the {count} layers, got {len(kinds)}"
        )
    known = {rule[word] for word in ("hit", "miss", "absent") if word in rule}
    known |= {*facts.labels, *rule.get("codes", {}).values(), *files["without_rope"]}
    # a special kind must be named by its own name, which has the kind's facts
    if not (facts.without_rope or facts.kinds):
        known |= {*files["layer_words"]}
    for i, word in enumerate(kinds):
        if word not in known:
            raise ConfigError(
                f"{config.name(key)}.{i} must be one of {', '.join(sorted(known))}, "
                f"got {short_repr(word)}"
            )
    return kinds


def has_rope(kind: str, config: Block, facts: Architecture) -> bool:
    """Whether layers of this kind rotate at all."""
    if kind in table().files["without_rope"]:
        return False
    needs = facts.without_rope_needs
    return kind not in facts.without_rope or not (needs is None or config.has(needs))


def _layers_by_switch(config: Block, rule: Mapping[str, Any], count: int) -> tuple[str, ...]:
    """Kinds from a list of ones (rope) and zeros (none), or from an interval without rope."""
    switches = config.wholes("no_rope_layers")
    interval = config.whole("no_rope_layer_interval") or rule["no_rope_interval"]
    if switches:
        if len(switches) != count or not set(switches) <= {0, 1}:
            config.refuse("no_rope_layers", f"a list of {count} ones (rope) and zeros (none)")
        return tuple("rope" if switch else "nope" for switch in switches)
    return tuple("rope" if (i + 1) % interval else "nope" for i in range(count))


def _layers_by_base(config: Block, rule: Mapping[str, Any], count: int) -> tuple[str, ...]:
    """Kinds from a list of bases, 0 for no rope; all others must be the same base."""
    key = rule["bases_key"]
    bases = require(config, key, config.items(key))
    nonzero = {base for base in bases if base}
    if len(bases) != count or len(nonzero) > 1:
        config.refuse(key, f"one base, or 0 for no rope, for each of {count} layers")
    base = (config.block("rope_parameters") or config).number("rope_theta", above=1)
    single_value([(config.name(key), next(iter(nonzero), None)), (config.name("rope_theta"), base)])
    return tuple("rope" if base else "nope" for base in bases)


def _layers_by_attention(config: Block, key: str, count: int) -> tuple[str, ...]:
    """Kinds from a list of blocks, some of which have no attention (Nemotron-NAS)."""
    blocks = config.items(key)
    if blocks is None or len(blocks) != count or not all(isinstance(b, Mapping) for b in blocks):
        config.refuse(key, f"a list of one object for each of {count} layers")
    kinds: list[str] = []
    for i, block in enumerate(blocks):
        attention = Block(block, f"{config.name(key)}.{i}").block("attention")
        switches = ("no_op", "replace_with_linear")
        no_attention = attention is not None and any(map(attention.flag, switches))
        kinds.append("nope" if no_attention else "rope")
    return tuple(kinds)


def layers_by_pattern(config: Block, facts: Architecture, count: int) -> tuple[str, ...]:
    """One kind per layer by the pattern of the model class, for files without a list of kinds."""
    rule = facts.layers
    if not rule:
        return ("rope",) * count
    if "listed" in rule:
        require(config, "layer_types", None)
    if "codes_key" in rule:
        key, codes = rule["codes_key"], rule["codes"]
        numbers = config.wholes(key)
        if numbers is None or len(numbers) < count or not {*map(str, numbers)} <= codes.keys():
            config.refuse(key, f"a list of one of {', '.join(codes)} for each of {count} layers")
        # further entries are for the drafter of DeepSeek V4
        return tuple(codes[str(code)] for code in numbers[:count])
    if "indices_key" in rule:
        indices = config.wholes(rule["indices_key"])
        if indices is None and "absent" in rule:
            return (rule["absent"],) * count
        hits = {*require(config, rule["indices_key"], indices)}
    elif "cycle_key" in rule:
        cycle = config.texts(rule["cycle_key"]) or rule["cycle"]
        hits = {i for i in range(count) if cycle[i % len(cycle)] == rule["word"]}
    elif "needs" in rule and not config.has(rule["needs"]):
        config.ignore(*rule.get("keys", ()))
        hits = range(count)
    else:
        hits = _hits_by_interval(config, rule, count)
    return tuple(rule["hit"] if i in hits else rule["miss"] for i in range(count))


def _hits_by_interval(config: Block, rule: Mapping[str, Any], count: int) -> set[int]:
    """Every so many layers, or those of a pattern in letters (EXAONE 4): L is local, G global."""
    interval: int = rule["every"]
    for key in rule.get("keys", ()):
        if isinstance(config.values.get(key), str):
            word = config.text(key) or ""
            if not word or set(word) - {"L", "G"}:
                config.refuse(key, 'a number of layers or a word of "L" and "G" such as "LLLG"')
            return {i for i in range(count) if word[i % len(word)] == "G"}
        interval = config.whole(key) or interval
    also = {i % count for i in rule.get("also", ())}
    return also | {i for i in range(count) if (i + rule.get("shift", 1)) % interval == 0}


class Blocks:
    """The rope blocks of a file: one for all layers, or one per kind of layer."""

    def __init__(self, config: Block, facts: Architecture) -> None:
        self.config, self.facts = config, facts
        new, old = (_block(config, facts, key) for key in ("rope_parameters", "rope_scaling"))
        if new is not None and old is not None:
            _check_same_values(new, old)
            old.ignore(*old.values)
        if facts.nested and new is not None and new.values and not _keys_of_blocks(new):
            raise ConfigError(
                f"{new.path} must hold a block for each kind of layer, as transformers reads no "
                f"other for this model type, got {', '.join(new.values)}; put the keys into the "
                "blocks of the kinds they are meant for"
            )
        if facts.block_key is not None and new is None and old is None:
            old = _block(config, facts, facts.block_key)
        block = new if new is not None and (new.values or old is None) else old
        self.assumed = bool(facts.block) and not (block is not None and block.values)
        if self.assumed:
            block = Block(facts.block, "rope_parameters")
        self.top = block or Block({}, "rope_parameters")
        self.by_kind: dict[str, Block | None] = {}
        self.used: list[Block] = []
        if nested := _keys_of_blocks(self.top):
            # ZAYA's files have a "default" type beside the blocks, which its class removes
            types = ("rope_type", "type") if facts.nested else ()
            keys = [k for k, v in self.top.values.items() if k not in types or v != "default"]
            plain_keys = [key for key in keys if self.top.has(key) and key not in nested]
            if plain_keys:
                raise ConfigError(
                    f"{self.top.name(plain_keys[0])} stands beside the blocks of single layer "
                    f"types ({', '.join(nested)}); move it into the ones it is meant for"
                )
            absent = [label for label in facts.labels.values() if label not in nested]
            if absent:
                raise ConfigError(
                    f"{self.top.name(absent[0])} must be an object, as transformers ignores "
                    f"{', '.join(nested)} without it, "
                    f"got {short_repr(self.top.values.get(absent[0]))}; add it, "
                    "even if no layer reads it"
                )
            self.by_kind = {key: self.top.block(key) for key in keys}
            base = config.number("rope_theta", above=1)
            bases = [b.number("rope_theta", above=1) for b in self.by_kind.values() if b]
            if base is not None and None not in bases and base not in bases:
                raise ConfigError(
                    f"{config.name('rope_theta')} is {base:g}, which none of the blocks of "
                    f"{self.top.path} says; remove it"
                )

    def block_of(self, kind: str) -> Block | None:
        """The block for layers of this kind; None where the file says they have no rope."""
        if not self.by_kind:
            self.used = [self.top]
            return self.top
        label = self.facts.labels.get(kind, kind)
        if label not in self.by_kind:
            raise ConfigError(
                f"{self.top.name(label)} is absent, but layers of the kind {kind!r} exist "
                f"(blocks: {', '.join(self.by_kind)}); add it, null if they have no rope, or "
                "layer_types if the file has none"
            )
        block = self.by_kind[label]
        if block is not None:
            self.used.append(block)
        return block


def _keys_of_blocks(block: Block) -> list[str]:
    return [key for key, value in block.values.items() if isinstance(value, Mapping)]


def _block(config: Block, facts: Architecture, key: str) -> Block | None:
    # some programs wrote false in place of a null, or a factor, of which 1 is noted as unread
    value = config.values.get(key)
    if value is False or (key == "rope_scaling" and value is not True and value == 1):
        config.ignore(*(key,) * (value is False))
        return None
    block = config.block(key)
    return block and Block(block.values, block.path, names=facts.block_names, nulls=_NULLS)


def _check_same_values(new: Block, old: Block) -> None:
    """Check that ``rope_parameters`` and ``rope_scaling`` say the same."""
    new_values, old_values = (normalize(block.values) for block in (new, old))
    # keys that transformers 4 has outside its block, and transformers 5 inside
    moved = {"rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}
    for key in sorted(set(new_values) | set(old_values), key=str):
        value, old_value = new_values.get(key), old_values.get(key)
        if value != old_value and not (key in moved and key not in old_values):
            raise ConfigError(
                f"{new.name(key)} and {old.name(key)} differ "
                f"({short_repr(value)}, {short_repr(old_value)}); remove one block"
            )
