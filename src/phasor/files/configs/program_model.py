"""Read the sizes, the rope, the law and the layers of a model from a program's file."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from importlib import resources
from types import MappingProxyType
from typing import Any

from phasor.axes import Alternating, Axial, InterleavedSections, Sectioned
from phasor.errors import PhasorWarning
from phasor.files.configs.facts import Architecture, read_table, tuples
from phasor.files.configs.layer_pattern import LayerPattern
from phasor.files.configs.rope_blocks import LawContext, read_law
from phasor.files.configs.ropes import layer_ropes, rotated_width
from phasor.files.configs.source import MOST_LAYERS, JsonObject, renamed_keys
from phasor.files.texts import Unclear
from phasor.layers import LayerRopes
from phasor.pairings import Pairing
from phasor.rope import Rope
from phasor.scaling import Linear, PerPair, Proportional

CONTEXT = "max_position_embeddings"
_NONE: Mapping[str, Any] = MappingProxyType({})
_PLAIN = Architecture(ntk_alpha=True)
_LATENT = Architecture(latent=True, softmax=True, ntk_alpha=True)


@lru_cache(maxsize=1)
def read_programs() -> Mapping[str, Mapping[str, Any]]:
    """The facts about each program, from the table of its dialect."""
    package = resources.files("phasor.files.dialects")
    names = sorted(file.name for file in package.iterdir() if file.name.endswith(".toml"))
    tables = [read_table(name, "phasor.files.dialects") for name in names]
    return {table["program"]: table for table in tables if "program" in table}


def spellings(keys: Iterable[str]) -> tuple[str, ...]:
    """The keys as they are, and as flags of a command line."""
    return (*keys, *(f"--{key.replace('_', '-')}" for key in keys))


def _names(plain: Mapping[str, str | list[str]]) -> dict[str, tuple[str, ...]]:
    return {key: spellings(names) for key, names in tuples(plain).items()}


@lru_cache(maxsize=64)  # more than the number of programs
def _program_names(program: str) -> Mapping[str, tuple[str, ...]]:
    """The names of keys in files of a program."""
    return MappingProxyType(_names(read_programs()[program]["names"]))


@lru_cache(maxsize=64)
def _names_in_law(program: str, kind: str) -> Mapping[str, tuple[str, ...]]:
    """The names of a law's numbers in files of a program."""
    return MappingProxyType(_names(read_programs()[program]["laws"].get(kind, {}).get("names", {})))


@lru_cache(maxsize=64)
def _ignored_keys(program: str) -> tuple[str, ...]:
    """Keys of the program's files that do not affect the rotation."""
    return spellings(read_programs()[program]["ignored"])


def _resolve(values: Mapping[str, Any], value: Any) -> Any:
    """The value itself, or the one that OmegaConf's ``${.seq_length}`` refers to."""
    reference = re.fullmatch(r"\$\{\.(\w+)\}", value) if isinstance(value, str) else None
    return values.get(reference[1], value) if reference else value


class ProgramModel:
    """The facts that files of every program contain: sizes, a rope, and the numbers of a law."""

    def __init__(
        self, program: str, config: JsonObject, title: str = "", entry: Mapping[str, Any] = _NONE
    ) -> None:
        # ``entry`` has the facts of the file's class, which replace those of the program
        self.facts, self.program, self.title = read_programs()[program], program, title
        self.names = names = {**_program_names(program), **_names(entry.get("names", {}))}
        values = {key: _resolve(config.values, value) for key, value in config.values.items()}
        self.config = JsonObject(values, config.path, names=names, strict=config.strict)
        self.config.ignore(*_ignored_keys(program))
        lengths = map(self.config.find, names.get(CONTEXT, ()))
        for length in (length for length in lengths if isinstance(length, Unclear)):
            other_values = {k: v for k, v in values.items() if k not in spellings([CONTEXT])}
            self.config = self.config.with_values(
                {**other_values, CONTEXT: None}
            )  # it does not affect the rotation
            self.config.notes.append(f"{CONTEXT} is not read: it is {length}.")
        self.defaults, self.assumes = {**self.facts["defaults"], **entry}, f"what {program} assumes"
        key = "qk_rope_head_dim"
        self.latent = self.turns_all = key in names and self.config.has(key)
        self.blocks: list[JsonObject] = []

    def _class_facts(self) -> Architecture:
        return _LATENT if self.latent else _PLAIN

    def _size(self, key: str) -> int:
        """A size of the model; if it is absent, the program's default, with a warning."""
        config, most = self.config, MOST_LAYERS if key == "num_hidden_layers" else 2**31
        if (size := config.whole(key, most=most)) is not None:
            return size
        size = int(config.or_default(key, None, self.defaults.get(key), self.assumes))
        warnings.warn(config.notes[-1], PhasorWarning, stacklevel=6)
        self.config = config.with_defaults({key: size})
        return size

    def rope(
        self, pairing: Pairing, pairing_out: Pairing | None = None, base: float | None = None
    ) -> Rope:
        """The rope of a head, or of the slice of a head in latent attention.

        Pass ``base`` for files whose key for it holds several numbers.
        """
        config, defaults = self.config, self.defaults
        key, names = "partial_rotary_factor", self.names
        fraction = defaults.get(key)
        width = self._class_facts().width_key
        self._size("num_hidden_layers")
        head_dim = config.width(width)
        if head_dim is None and width in defaults:
            head_dim = int(config.or_default(width, None, defaults[width], self.assumes))
        if head_dim is None:
            for size in ("hidden_size", "num_attention_heads"):
                self._size(size)
            head_dim = self.config.head_dim(width)
        if "multiple_of" in defaults:  # heads are padded, and an even number of coordinates turns
            multiple = config.whole(defaults["multiple_of"]) or 1
            head_dim = -(-head_dim // multiple) * multiple
            fraction = config.number(key, above=0, most=1) or defaults[key]
            rotary_dim = int(head_dim * fraction) // 2 * 2
        elif self.turns_all:
            rotary_dim = head_dim
        else:  # none of these programs has a block with a fraction
            part = Architecture(partial=True, fraction=fraction, names=names)
            rotary_dim = rotated_width(config, JsonObject({}, config.path), part, head_dim)
        default = defaults["rope_theta"] or None
        if base is None and names["rope_theta"]:
            file_base = config.number("rope_theta", above=1)
            base = config.or_default("rope_theta", file_base, default, self.assumes)
        elif base is None:  # this program's files do not contain it
            base = default
        numbers: dict[str, Any] = {"head_dim": head_dim, "base": base, "rotary_dim": rotary_dim}
        with renamed_keys(config):
            return Rope(pairing=pairing, pairing_out=pairing_out, **numbers)

    def law(self, kind: str, rope: Rope, block: JsonObject | None = None) -> Rope:
        """The rope with the law of that name in the table, whose numbers are in ``block``."""
        config, law_entry = block or self.config, self.facts["laws"].get(kind, {})
        self.blocks += [] if block is None else [block]
        key = "type" if config.has("type") else "rope_type"
        # no program here reads attention_factor or truncate
        names = {"attention_factor": (), "truncate": (), "rope_type": (key,)}
        names = {**names, **_names_in_law(self.program, kind)}
        values = {**config.values, key: law_entry.get("law", kind)}
        numbers = JsonObject(values, config.path, names=names)
        numbers = numbers.with_defaults(law_entry.get("defaults", {}))
        length = JsonObject({CONTEXT: self.config.whole(CONTEXT)})
        facts = self._class_facts()
        law_context = LawContext(facts, rope.rotary_dim, length, single_mscale=True)
        law = read_law(numbers, law_context)
        law = None if law == Linear(factor=1.0) else law  # KerasHub writes that for no law
        config.ignore(*numbers.keys_read)
        return replace(rope, scaling=law, direction=numbers.sign("short_factor"))

    def ropes_by_kind(
        self, rope: Rope, entry: Mapping[str, Any], divisor: float = 1.0
    ) -> LayerRopes:
        """The ropes of all layers by kind, for positions divided by ``divisor``."""
        kinds: Mapping[str, Any] = entry.get("kinds", {"rope": {}, "nope": False})
        rule = entry.get("layers", {"every": 1})
        turning = {
            kind: {**entry, **changes} for kind, changes in kinds.items() if changes is not False
        }
        ropes = {kind: self._kind_rope(rope, changes, divisor) for kind, changes in turning.items()}
        pattern = self._pattern(rule, [*kinds])
        return self.ropes({kind: ropes.get(kind) for kind in kinds}, pattern)

    def _kind_rope(self, rope: Rope, entry: Mapping[str, Any], divisor: float) -> Rope:
        """The rope of one kind of layer, from the keys for this kind."""
        config, key, base = self.config, entry.get("base_key"), entry.get("base", rope.base)
        if key is not None:
            base = config.or_default(key, config.number(key, above=1), base, self.assumes)
        width = config.width(entry.get("head_dim_key", "")) or rope.head_dim
        rotary_dim = width if "head_dim_key" in entry else rope.rotary_dim
        rope = replace(rope, base=base, head_dim=width, rotary_dim=rotary_dim)
        divisor *= config.number(entry.get("factor_key", ""), above=0) or 1.0
        fraction = config.number(entry.get("fraction_key", ""), least=2 / width, most=1)
        law = Proportional(fraction=fraction or 1.0, factor=divisor)
        return divided(rope, divisor) if law.fraction == 1 else replace(rope, scaling=law)

    def _pattern(self, rule: Mapping[str, Any], words: Sequence[str]) -> LayerPattern:
        """The layers of the first kind: every n-th, or by a list of words or flags."""
        config, layers, key = self.config, self.config.layers(), rule.get("key", "")
        if "switch" in rule and not config.values.get(rule["switch"], rule.get("on")):
            return LayerPattern.every(1, layers)
        if isinstance(value := config.value(key), int):
            return LayerPattern.every(config.whole(key) or 1, layers)
        if value is None and "every" in rule:
            interval = config.whole(rule.get("every_key", "")) or rule["every"]
            return LayerPattern.every(interval, layers)
        items, allowed = config.require(key, config.items(key)), [*words, 0, 1]
        if "beyond" in rule:  # all layers after the end of the list are of the first kind
            items, allowed = [*items, *[1] * layers], [0, 1]
        if "counts" in rule and [*map(type, items[:2])] == [int, int] and sum(items[:2]) > 0:
            return LayerPattern.repeat([False] * items[0] + [True] * items[1], layers)
        if len(items) < layers or any(item not in allowed for item in items[:layers]):
            requirement = f"{rule.get('counts', '')}one of {', '.join(map(str, allowed))}"
            config.refuse(key, f"{requirement} for each of {layers} layers")
        first = (words[0], rule.get("flag", 1))
        return LayerPattern(tuple(item in first for item in items[:layers]))

    def ropes(
        self,
        kinds: Mapping[str, Rope | None],
        pattern: LayerPattern | None = None,
        attention_free: Sequence[str] = (),
    ) -> LayerRopes:
        """The ropes of all layers: layers that the pattern marks are of the first kind.

        Without a pattern, all layers are of the first kind. ``attention_free`` has the kind of each
        layer without attention, and "" for each layer with attention.
        """
        config, layers = self.config, self.config.layers()
        on, off, *_ = *kinds, ""
        pattern_kinds = (pattern or LayerPattern.every(1, layers)).kinds(on, off)
        layer_kinds = [
            special or kind
            for special, kind in zip(attention_free or layers * [""], pattern_kinds, strict=True)
        ]
        for key in ("rope_scaling", "rope_parameters"):
            is_block = config.strict and isinstance(config.values.get(key), Mapping)
            if is_block and key in config.unread():
                config.refuse(key, f"absent, as {self.program} reads no such block")
        return layer_ropes(
            config,
            {kind: kinds.get(kind) for kind in dict.fromkeys(layer_kinds)},
            layer_kinds,
            f"a file of {self.program}",
            facts=self._class_facts(),
            blocks=self.blocks,
            name=self.program,
            context=config.whole(CONTEXT),
        )

    def position_type(self) -> str:
        """The type of the position embedding; for most classes an absent type means learned."""
        words, key = (*self.facts["rotating"], *self.facts["instead"]), "position_embedding_type"
        if (position_type := self.config.text(key, *words)) is None:
            position_type = self.config.require(
                key, self.defaults.get(key, "learned_absolute") or None
            )
            note = f"The file has no {self.config.name(key)}; {position_type} is {self.assumes}."
            self.config.notes.append(note)
        return position_type

    def no_rotation(self, subject: str, word: str) -> LayerRopes:
        """The layers of a model whose file has no rotation."""
        replacement = self.defaults.get("instead") or self.facts["instead"][word]
        self.config.notes.append(f"{subject} has no rotary embedding; instead: {replacement}.")
        return self.ropes({"nope": None})


def divided(rope: Rope, divisor: float | None) -> Rope:
    """The rope for positions that are divided by a number."""
    if divisor in (None, 1):
        return rope
    if rope.scaling is None:
        return replace(rope, scaling=Linear(factor=divisor))
    divisors = divisor * replace(rope, scaling=None).inv_freq / rope.inv_freq
    gain = rope.attention_factor
    return replace(rope, scaling=PerPair(factors=tuple(divisors.tolist()), attention_factor=gain))


def with_sections(rope: Rope, block: JsonObject, sections: Any, layout: Any = None) -> Rope:
    """The rope whose axes have these numbers of pairs, from the ``mrope_section`` of ``block``."""
    axes_types = {"alternating": Alternating, "interleaved": InterleavedSections, "axial": Axial}
    sections = tuple[int, ...](block.require("mrope_section", sections))
    if layout != "axial" and len(sections) != 3:
        block.refuse("mrope_section", "three counts of pairs, for time, height and width")
    # in alternating sections, time comes last
    sections = sections[2:] + sections[:2] if layout == "alternating" else sections
    with renamed_keys(block):
        return replace(rope, axes=axes_types.get(layout, Sectioned)(sections))
