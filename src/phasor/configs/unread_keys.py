"""What becomes of keys about positions that a model type's class does not read.

One rule. A key that says nothing, or what the class does anyway, is *neutral* and passed over. One
that cannot change the rotation that the class performs is *noted*. One that asks for another
pairing, width, base, law or choice of layers is *refused*, all of a file in one error, for either
the file or its model type is not what it seems; ``strict=False`` reads the file as the class does
and notes these too. ``keys.toml`` says what single keys mean.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any

from phasor._checks import shown
from phasor.axes import Alternating, Axes, InterleavedSections, Sectioned
from phasor.configs.block import Block
from phasor.configs.facts import read_table, slip
from phasor.errors import ConfigError
from phasor.rope import Rope

# not the "rope" in "properties"
_ABOUT_POSITIONS = re.compile(r"(?<!p)rope|rotary|alibi", re.IGNORECASE)
_MEANINGS = ("pairing", "rotates", "axes", "base", "fraction", "width", "factor", "switch", "note")
_LAYOUTS: Mapping[type[Axes], str] = {
    Sectioned: "sectioned",
    InterleavedSections: "interleaved",
    Alternating: "alternating",
}


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """What a key says where its model type's class does not read it.

    Attributes:
        means: What of a rope it speaks of; a ``switch`` is neutral at false alone, a
            ``note`` is about something else than the rotation.
        says: What is known about it, the rest of a sentence that begins with the key and its value.
        values: What its values stand for, by their JSON text.
        neutral: Values that change nothing whatever the model is, beside null.
    """

    means: str
    says: str
    values: Mapping[str, Any] = field(default_factory=dict[str, Any])
    neutral: tuple[Any, ...] = ()

    def is_neutral(self, value: Any, ropes: Sequence[Rope]) -> bool:
        """Whether ``value`` is what the model's ropes are anyway."""
        if value in self.neutral:
            return True
        meaning = self.values.get(json.dumps(value, default=repr).strip('"'))
        number = float(value) if isinstance(value, (int, float)) else None
        match self.means:
            case "rotates":
                return meaning == bool(ropes)
            case "pairing":
                return all(rope.pairing == meaning for rope in ropes)
            case "axes":
                return all(_LAYOUTS.get(type(rope.axes)) == meaning for rope in ropes)
            case "base":
                return all(rope.base == number for rope in ropes)
            case "fraction":
                return number is not None and all(
                    int(rope.head_dim * number) == rope.rotary_dim for rope in ropes
                )
            case "width":
                return all(rope.rotary_dim == number for rope in ropes)
            case "factor":
                return number == 1
            case "switch":
                return value is False
            case _:
                return False


@lru_cache(maxsize=1)
def meanings() -> Mapping[str, Meaning]:
    """``keys.toml``, read once."""
    known = {one.name for one in fields(Meaning)}
    found: dict[str, Meaning] = {}
    for key, own in read_table("keys.toml").items():
        for fact in own:
            if fact not in known:
                raise slip("keys.toml", key, fact, f"has the unknown fact {fact!r}")
        if own.get("means") not in _MEANINGS or "says" not in own:
            raise slip("keys.toml", key, "means", f"must mean one of {', '.join(_MEANINGS)}")
        if "neutral" in own:
            own = own | {"neutral": tuple(own["neutral"])}
        found[key] = Meaning(**own)
    return found


def check_unread_keys(
    config: Block, blocks: Iterable[Block], ropes: Sequence[Rope], model_type: str, *, strict: bool
) -> list[str]:
    """Notes about the keys that nobody read.

    Args:
        config: The file's config, read.
        blocks: Its rope blocks that some layer uses, read.
        ropes: What was read.
        model_type: The model's type.
        strict: Whether what contradicts the class is refused.

    Raises:
        ConfigError: If keys contradict what the class does and ``strict`` is set.
    """
    notes: list[str] = []
    refused: list[str] = []
    unused: list[str] = []
    for block in blocks:
        for key, value in block.unread().items():
            meaning = meanings().get(key)
            if _says_nothing(value, meaning, ropes):
                continue
            if meaning is None:
                unused.append(block.place(key))
            else:
                _note_or_refuse(block.place(key), value, meaning, notes, refused)
    if unused:
        listed = ", ".join(dict.fromkeys(unused))
        notes.append(f"Nothing depends on {listed}: the law of that block does not use it.")
    for key, value in config.unread().items():
        meaning = meanings().get(key)
        if meaning is None and (not ropes or not _ABOUT_POSITIONS.search(key)):
            continue
        if not _says_nothing(value, meaning, ropes):
            meaning = meaning or Meaning(means="switch", says="is not a key that phasor knows")
            if not ropes and meaning.means != "rotates":
                continue
            _note_or_refuse(config.place(key), value, meaning, notes, refused)
    if refused and strict:
        raise ConfigError(
            f"{refused[0].split(' ')[0]} is not a key that phasor understands for the model type "
            f"{model_type}. {'; '.join(refused)}. Remove what nothing depends on, or read the file "
            f"as a {model_type} does, without it: load(..., strict=False), on the command line "
            "--lenient; a model with code of its own is described with phasor.Rope(...)"
        )
    return [*notes, *(f"Left aside: {one}." for one in refused)]


def _says_nothing(value: Any, meaning: Meaning | None, ropes: Sequence[Rope]) -> bool:
    if meaning is not None:
        return meaning.is_neutral(value, ropes)
    return value is False or (value == 1.0 and isinstance(value, float))


def _note_or_refuse(
    name: str, value: Any, meaning: Meaning, notes: list[str], refused: list[str]
) -> None:
    sentence = f"{name} (got {shown(value)}) {meaning.says}"
    if meaning.means == "note":
        notes.append(f"Not part of the rotation: {sentence}.")
    else:
        refused.append(sentence)
