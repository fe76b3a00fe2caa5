"""Checks the keys about positions that a model type's class does not read.

A key whose value changes nothing, or asks for what the class does anyway, is *neutral* and ignored.
A key about something other than the rotation is *noted*. A key that asks for another pairing,
width, base, law or choice of layers is *refused* (all of a file in one error), because the file or
its model type is then probably wrong; with ``strict=False`` it is noted and ignored, as the class
ignores it. ``keys.toml`` says what each key means.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

from phasor._checks import short_repr
from phasor.axes import AXES
from phasor.configs.block import Block
from phasor.configs.facts import read_table, tuples_for_lists
from phasor.errors import ConfigError
from phasor.rope import Rope
from phasor.scaling import Linear

# not the "rope" in "properties"
_ABOUT_POSITIONS = re.compile(r"(?<!p)rope|rotary|alibi", re.IGNORECASE)
Topic = Literal[
    "pairing", "rotates", "axes", "base", "fraction", "width", "factor", "divides", "switch", "note"
]


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """The meaning of a key that its model type's class does not read.

    Attributes:
        means: The property of a rope that it sets; a ``switch`` is neutral only if false, a
            ``note`` is not about the rotation.
        says: An explanation, as the rest of a sentence that begins with the key and its value.
        values: By JSON text of a value, the property that it stands for.
        neutral: Values besides null that change nothing in any model.
    """

    means: Topic
    says: str
    values: Mapping[str, Any] = field(default_factory=dict[str, Any])
    neutral: tuple[Any, ...] = ()

    def is_neutral(self, value: Any, ropes: Sequence[Rope]) -> bool:
        """Whether the model's ropes already have the property that ``value`` asks for."""
        if value in self.neutral:
            return True
        if self.values:
            value = self.values.get(json.dumps(value, default=repr).strip('"'))
        match self.means:
            case "rotates":
                return value == bool(ropes)
            case "pairing":
                return all(rope.pairing == value for rope in ropes)
            case "axes":
                # a layout's name, or how many there are
                return all(
                    value == rope.axes.n_axes or type(rope.axes) is AXES.get(str(value))
                    for rope in ropes
                )
            case "base":
                return all(rope.base == value for rope in ropes)
            case "fraction":
                return isinstance(value, (int, float)) and all(
                    int(rope.head_dim * value) == rope.rotary_dim for rope in ropes
                )
            case "width":
                return all(rope.rotary_dim == value for rope in ropes)
            case "factor":
                return value == 1
            case "divides":
                laws = (rope.scaling for rope in ropes)
                return value == 1 or all(isinstance(x, Linear) and x.factor == value for x in laws)
            case "switch":
                return value is False
            case "note":
                return False


@lru_cache(maxsize=1)
def meanings() -> Mapping[str, Meaning]:
    """``keys.toml``, read once."""
    entries = read_table("keys.toml").items()
    return {key: Meaning(**tuples_for_lists(entry)) for key, entry in entries}


def check_unread_keys(
    config: Block, blocks: Iterable[Block], ropes: Sequence[Rope], model_type: str, *, strict: bool
) -> list[str]:
    """Notes about the keys that were not read.

    Args:
        config: The file's config, after reading.
        blocks: Its rope blocks that a layer uses, after reading.
        ropes: The ropes that were read from it.
        model_type: The model's type.
        strict: Whether to refuse keys that contradict the class.

    Raises:
        ConfigError: If keys contradict what the class does and ``strict`` is set.
    """
    notes: list[str] = []
    refused: list[str] = []
    unused: dict[str, None] = {}
    for block in (*blocks, config):
        in_block = block is not config
        for key, value in block.unread().items():
            meaning = meanings().get(key)
            if meaning is None:
                has_no_effect = value is False or (value == 1.0 and isinstance(value, float))
                is_relevant = in_block or bool(ropes and _ABOUT_POSITIONS.search(key))
            else:
                has_no_effect = meaning.is_neutral(value, ropes)
                is_relevant = in_block or bool(ropes) or meaning.means == "rotates"
            if has_no_effect or not is_relevant:
                continue
            name = block.path_of(key)
            if meaning is None and in_block:
                unused[name] = None
                continue
            explanation = "is not a key that phasor knows" if meaning is None else meaning.says
            sentence = f"{name} (got {short_repr(value)}) {explanation}"
            if meaning is not None and meaning.means == "note":
                notes.append(f"Not part of the rotation: {sentence}.")
            else:
                refused.append(sentence)
    if unused:
        listed = ", ".join(unused)
        notes.insert(0, f"Nothing depends on {listed}: the law of that block does not use it.")
    if refused and strict:
        raise ConfigError(
            f"{refused[0].split(' ')[0]} is not a key that phasor understands for the model type "
            f"{model_type}. {'; '.join(refused)}. Remove what nothing depends on, or read the file "
            f"as a {model_type} does, without it: load(..., strict=False), on the command line "
            "--lenient; a model with code of its own is described with phasor.Rope(...)"
        )
    return [*notes, *(f"Left aside: {sentence}." for sentence in refused)]
