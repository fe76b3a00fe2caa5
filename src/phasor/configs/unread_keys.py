"""Checks the keys about positions that a model type's class does not read.

A key whose value changes nothing, or asks for what the class does anyway, is *neutral* and ignored.
A key about something other than the rotation is *noted*. A key that asks for another pairing,
width, base, law or choice of layers, or for any rotation of a class that has none, is *refused*
(all of a file in one error), because the file or its model type is then probably wrong; with
``strict=False`` it is noted and ignored, as the class ignores it. Keys of an object that nothing
reads count like those beside it. ``keys.toml`` says what each key means.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

from phasor._checks import short_repr
from phasor.axes import AXES
from phasor.configs.block import Block
from phasor.configs.facts import Architecture, read_table, table, tuples_for_lists
from phasor.configs.laws import laws_of_untyped
from phasor.errors import ConfigError
from phasor.rope import Rope
from phasor.scaling import Linear

# not the "rope" in "properties"
_ABOUT_POSITIONS = re.compile(r"(?<!p)rope|rotary|alibi", re.IGNORECASE)
Topic = Literal[
    "pairing",
    "rotates",
    "axes",
    "base",
    "fraction",
    "width",
    "factor",
    "divides",
    "law",
    "switch",
    "note",
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
        if not ropes and self.means in ("pairing", "axes", "base", "fraction", "width"):
            return not value  # any other value asks for a rotation, and there is none
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
                laws = [rope.scaling for rope in ropes]
                divided = [isinstance(law, Linear) and law.factor == value for law in laws]
                return value == 1 or (bool(laws) and all(divided))
            case "switch":
                return value is False
            case "law" | "note":
                return False


@lru_cache(maxsize=1)
def meanings() -> Mapping[str, Meaning]:
    """``keys.toml``, read once."""
    entries = read_table("keys.toml").items()
    return {key: Meaning(**tuples_for_lists(entry)) for key, entry in entries}


def objects_inside(block: Block, depth: int = 8) -> Iterator[Block]:
    """The objects inside ``block`` that nothing read, but for configs of other models."""
    for inner in block.unread_objects() if depth else ():
        name = inner.path.rpartition(".")[2]
        if not inner.has("model_type") and not re.search(table().files["other_models"], name):
            yield inner
            yield from objects_inside(inner, depth - 1)


def check_unread_keys(
    config: Block,
    blocks: Iterable[Block],
    ropes: Sequence[Rope],
    what: str,
    *,
    strict: bool,
    facts: Architecture | None = None,
) -> list[str]:
    """Notes about the keys that were not read.

    Args:
        config: The file's config, after reading.
        blocks: Its rope blocks that a layer uses, after reading.
        ropes: The ropes that were read from it.
        what: The kind of file, such as ``model type 'llama'``.
        strict: Whether to refuse keys that contradict the class.
        facts: The facts of its class, if the file names one.

    Raises:
        ConfigError: If keys contradict what the class does and ``strict`` is set.
    """
    facts = facts or Architecture()
    notes: list[str] = []
    refused: list[str] = []
    unused: list[str] = []
    # what a class of transformers is known to ignore, as it has no code for it
    is_ignored = bool(facts.sizes) and facts.uses is None and not config.has("auto_map")
    rope_blocks = list(blocks)
    for block in (*rope_blocks, config, *objects_inside(config)):
        in_block = block in rope_blocks
        for key, value in block.unread().items():
            meaning = meanings().get("rope_type" if in_block and key == "type" else key)
            name = block.path_of(key)
            said = f"{name} (got {short_repr(value)})"
            inside = key if in_block else name.removeprefix(f"{config.path}.")
            if facts.uses is not None and inside in facts.carried:
                unused.append(name)
            elif in_block and (laws := laws_of_untyped(block, key)):
                refused.append(f"{said} is of a law, and no rope_type says which: {laws}")
            elif in_block and (meaning is None or (ropes and meaning.means == "law")):
                # its value makes no key neutral here, because it may be a misspelt one
                unused.append(name)
            elif meaning is None:
                has_no_effect = value is False or (value == 1.0 and isinstance(value, float))
                can_matter = bool(ropes) or facts.uses is not None
                if can_matter and not has_no_effect and _ABOUT_POSITIONS.search(key):
                    refused.append(f"{said} is not a key that phasor knows")
            elif meaning.is_neutral(value, ropes):
                continue
            elif meaning.means == "note":
                if in_block or ropes:
                    notes.append(f"Not part of the rotation: {said} {meaning.says}.")
            elif in_block or ropes or facts.uses is not None or meaning.means == "rotates":
                refused.append(f"{said} {meaning.says}")
                is_ignored = False
    if unused:
        reason = "the law of that block does not use it" if ropes else "nothing rotates"
        notes.insert(0, f"Nothing depends on {', '.join(dict.fromkeys(unused))}: {reason}.")
    if refused and strict:
        key = refused[0].split(" ")[0]
        why = f"is not a key that phasor understands in {what}"
        ways_out = "Remove what nothing depends on"
        if facts.uses is not None:
            why = f"is a key of models that rotate, and {what} has no rotary embedding"
        if is_ignored:
            ways_out += (
                ", or read the file as transformers' class does, which ignores it: "
                "load(..., strict=False), on the command line --lenient"
            )
        raise ConfigError(
            f"{key} {why}. {'; '.join(refused)}. {ways_out}; a model with code of its own is "
            "described with phasor.Rope(...)"
        )
    return [*notes, *(f"Left aside: {sentence}." for sentence in refused)]
