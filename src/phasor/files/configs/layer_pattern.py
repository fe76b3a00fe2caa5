"""Which layer is of which kind: one value, parsed from every notation and printed in each.

Files state it as every n-th layer, a list with a number or a word for each, letters that repeat,
the indices of some layers, or not at all: then the model's class has a `LayerRule`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phasor.files import refusal
from phasor.files.budget import MOST_ELEMENTS
from phasor.files.configs.facts import LayerRule
from phasor.files.configs.source import JsonObject, single_value


@dataclass(frozen=True)
class LayerPattern:
    """Which layers are marked, of two kinds.

    >>> pattern = LayerPattern.every(3, 6)
    >>> pattern.kinds("full", "sliding")
    ('sliding', 'sliding', 'full', 'sliding', 'sliding', 'full')
    >>> pattern.interval, pattern.numbers, pattern.indices
    (3, [0, 0, 1, 0, 0, 1], [2, 5])
    >>> LayerPattern.repeat([False, True], 5).interval
    2
    """

    marked: tuple[bool, ...]

    @classmethod
    def every(cls, interval: int, count: int, *, shift: int = 0) -> LayerPattern:
        """Every ``interval``-th layer, counted from 1 and ``shift`` earlier; 0 marks none."""
        layers = range(1 + shift, count + 1 + shift)
        return cls(tuple(bool(interval) and layer % interval == 0 for layer in layers))

    @classmethod
    def from_indices(cls, indices: Collection[int], count: int) -> LayerPattern:
        """The layers with these indices."""
        return cls(tuple(layer in indices for layer in range(count)))

    @classmethod
    def repeat(cls, cycle: Sequence[bool], count: int) -> LayerPattern:
        """A cycle, over and over."""
        return cls(tuple(cycle[layer % len(cycle)] for layer in range(count)))

    def kinds(self, on: str, off: str) -> tuple[str, ...]:
        """The kind of each layer: ``on`` of the marked ones."""
        return tuple(on if mark else off for mark in self.marked)

    @property
    def interval(self) -> int | None:
        """N if exactly every n-th layer is marked, 0 if none is, None for any other order."""
        first = next(iter(self.indices), -1) + 1
        return first if self == LayerPattern.every(first, len(self.marked)) else None

    @property
    def numbers(self) -> list[int]:
        """A 1 for each marked layer, and a 0 for the others."""
        return [int(mark) for mark in self.marked]

    @property
    def indices(self) -> list[int]:
        """The indices of the marked layers."""
        return [layer for layer, mark in enumerate(self.marked) if mark]


def flag_pattern(config: JsonObject, key: str, flags: Sequence[Any], count: int) -> LayerPattern:
    """The pattern of a list of ones and zeros, or of true and false, at ``key``."""
    if len(flags) != count or any(flag not in (0, 1) for flag in flags):
        config.refuse(key, f"a list of a 0 or a 1, false or true, for each of {count} layers")
    return LayerPattern(tuple(bool(flag) for flag in flags))


def number_pattern(config: JsonObject, key: str, count: int) -> LayerPattern | None:
    """The pattern of an interval, a list of ones and zeros, or its text; None if absent."""
    numbers = whole_numbers(config, key)
    if numbers is None:
        return None
    if len(numbers) == 1:
        return LayerPattern.every(numbers[0], count)
    return flag_pattern(config, key, numbers, count)


def whole_numbers(config: JsonObject, key: str) -> tuple[int, ...] | None:
    """A whole number, a list, or the text of one, such as ``16 24 24`` or ``([0]*3+[1])*2``."""
    value, before = config.value(key), None
    while isinstance(value, str) and value != before and len(value) < 2**14:
        before = value
        times = r"\[([\d,\s]*)\]\s*\*\s*(\d{1,4})"
        if sum(len(items) * int(n) for items, n in re.findall(times, value)) > MOST_ELEMENTS:
            raise refusal("too_many", origin=config.name(key), most=MOST_ELEMENTS)
        value = re.sub(times, lambda m: f"[{','.join([m[1]] * int(m[2]))}]", value)
        value = re.sub(r"\]\s*\+\s*\[", ",", value)
        value = re.sub(r"\((\[[\d,\s]*\])\)", r"\1", value)
    if isinstance(value, str) and re.fullmatch(r"\[?\s*\d{1,9}([\s,]+\d{1,9})*\s*\]?", value):
        return tuple(map(int, re.findall(r"\d+", value)))
    if isinstance(value, (int, float)):
        return (config.whole(key, least=0) or 0,)
    return config.wholes(key)


# The pattern of a class.


def rule_kinds(config: JsonObject, rule: LayerRule | None, count: int) -> tuple[str, ...]:
    """The kind of each layer by the rule of a class, for a file without a list of kinds."""
    if rule is None:
        return ("rope",) * count
    if rule.no_rope_interval is not None:
        return _rotating(config, rule.no_rope_interval, count).kinds("rope", "nope")
    if rule.bases_key is not None:
        return _bases_pattern(config, rule.bases_key, count).kinds("rope", "nope")
    if rule.blocks_key is not None:
        return _attention_pattern(config, rule.blocks_key, count).kinds("rope", "nope")
    indices = None if rule.indices_key is None else config.wholes(rule.indices_key)
    if rule.listed and indices is None:
        config.require("layer_types", None)
    if rule.codes_key is not None:
        return _coded_kinds(config, rule, rule.codes_key, count)
    if rule.indices_key is not None:
        if indices is None and rule.absent is not None:
            return (rule.absent,) * count
        pattern = LayerPattern.from_indices(config.require(rule.indices_key, indices), count)
    elif rule.cycle_key is not None:
        cycle = config.texts(rule.cycle_key) or rule.cycle
        pattern = LayerPattern.repeat([word == rule.word for word in cycle], count)
    elif rule.needs is not None and not config.has(rule.needs):
        config.ignore(*rule.keys)
        pattern = LayerPattern.every(1, count)
    else:
        pattern = _interval_pattern(config, rule, count)
    return pattern.kinds(rule.hit, rule.miss)


def _rotating(config: JsonObject, interval: int, count: int) -> LayerPattern:
    """Mark all layers except every n-th, or those in a list."""
    key = "no_rope_layers"
    switches = config.wholes(key)
    interval = config.whole("no_rope_layer_interval") or interval
    if switches:
        return flag_pattern(config, key, switches, count)
    unrotated = LayerPattern.every(interval, count)
    return LayerPattern(tuple(not mark for mark in unrotated.marked))


def _bases_pattern(config: JsonObject, key: str, count: int) -> LayerPattern:
    """The layers with a base in a list, where 0 is no rope; all others must be the same base."""
    bases = config.require(key, config.items(key))
    nonzero = {base for base in bases if base}
    if len(bases) != count or len(nonzero) > 1:
        config.refuse(key, f"one base, or 0 for no rope, for each of {count} layers")
    base = (config.object("rope_parameters") or config).number("rope_theta", above=1)
    single_value([(config.name(key), next(iter(nonzero), None)), (config.name("rope_theta"), base)])
    return LayerPattern(tuple(bool(base) for base in bases))


def _attention_pattern(config: JsonObject, key: str, count: int) -> LayerPattern:
    """The layers with attention in a list of blocks (Nemotron-NAS)."""
    blocks = config.items(key)
    if blocks is None or len(blocks) != count or not all(isinstance(b, Mapping) for b in blocks):
        config.refuse(key, f"a list of one object for each of {count} layers")

    def attends(layer: int, block: Mapping[str, Any]) -> bool:
        attention = JsonObject(block, f"{config.name(key)}.{layer}").object("attention")
        switches = ("no_op", "replace_with_linear")
        return attention is None or not any(map(attention.flag, switches))

    return LayerPattern(tuple(attends(layer, block) for layer, block in enumerate(blocks)))


def _coded_kinds(config: JsonObject, rule: LayerRule, key: str, count: int) -> tuple[str, ...]:
    """Kinds by a number for each layer; further ones are for the drafter of DeepSeek V4."""
    numbers = config.wholes(key)
    if numbers is None and rule.absent is not None:
        return (rule.absent,) * count
    if numbers is None and rule.first_codes:
        numbers = (*rule.first_codes, *rule.cycle * count)
    if numbers is None or len(numbers) < count or not {*map(str, numbers)} <= rule.codes.keys():
        config.refuse(key, f"a list of one of {', '.join(rule.codes)} for each of {count} layers")
    return tuple(rule.coded(numbers[:count]))


def _interval_pattern(config: JsonObject, rule: LayerRule, count: int) -> LayerPattern:
    """Every n-th layer, or a pattern in letters (EXAONE 4): L is local, G global."""
    interval = rule.every or 1
    for key in rule.keys:
        if isinstance(config.values.get(key), str):
            word = config.text(key) or ""
            if not word or set(word) - {"L", "G"}:
                config.refuse(key, 'a number of layers or a word of "L" and "G" such as "LLLG"')
            return LayerPattern.repeat([letter == "G" for letter in word], count)
        interval = config.whole(key) or interval
    extra, start = {layer % count for layer in rule.also}, 0
    if rule.first:  # the first layers have their own interval
        number, step = (config.whole(key, least=0) for key in rule.first)
        start = number or 0
        extra |= {*LayerPattern.every(step or 1, start).indices}
    regular = LayerPattern.every(interval, count - start, shift=rule.shift - 1).indices
    marked = extra | {start + layer for layer in regular}
    return LayerPattern.from_indices(marked or ({count - 1} if rule.or_last else set()), count)


# Layers with a rotation outside attention.


def indexer_pattern(config: JsonObject, every: int, count: int) -> LayerPattern:
    """The layers that have an indexer; other layers reuse the choice of the layer before."""
    key, words = "indexer_types", config.texts("indexer_types")
    if words is None:
        key = "index_topk_pattern"
        words = (config.text if isinstance(config.values.get(key), str) else config.texts)(key)
    if words is None:
        every = config.whole("index_topk_freq", least=0) or every
        offset = config.whole("index_skip_topk_offset", least=0)
        first = (2 if offset is None else offset) - 1
        return LayerPattern(tuple(max(i - first, 0) % every == 0 for i in range(count)))
    if len(words) < count or not {*words} <= {"full", "shared", "F", "S"}:
        config.refuse(key, f"full or shared (in a pattern F or S) for each of {count} layers")
    return LayerPattern(tuple(word in ("full", "F") for word in words[:count]))
