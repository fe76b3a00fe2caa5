"""Checks the keys about positions that a model type's class does not read.

A key whose value changes nothing, or asks for what the class does anyway, is *neutral* and ignored.
A key about something other than the rotation is *noted*. A key that asks for another pairing,
width, base, law or choice of layers, or for a rotation in a class that has none, is *refused*
because the file or its model type is then probably wrong; one error lists all such keys of a file.
With ``strict=False`` these keys are ignored, as the class ignores them, with a note and a warning.
Keys in an object that nothing reads are treated like the keys next to that object. ``keys.toml``
lists the meaning of each key; for other keys, ``asks_for`` in ``files.toml`` lists the meaning of
words in their names.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from phasor._checks import short_repr
from phasor.errors import PhasorWarning
from phasor.files import LEFT_ASIDE, refusal
from phasor.files.configs.facts import NO_FACTS, Architecture, frozen, read_table, table
from phasor.files.configs.rope_blocks import doubt
from phasor.files.configs.source import JsonObject
from phasor.rope import Rope
from phasor.scaling import Linear

# not the "rope" in "properties"
_ABOUT_POSITIONS = re.compile(r"(?<!p)rope|rotary|alibi|key_length_swa", re.IGNORECASE)
#: For each meaning of a key, whether a rope has the property that a value asks for.
_HAS: Mapping[str, Callable[[Rope, Any], bool]] = {
    "pairing": lambda rope, value: rope.pairing == value,
    # their name, or how many there are
    "axes": lambda rope, value: value in (rope.axes.n_axes, rope.to_dict()["axes"]["layout"]),
    "base": lambda rope, value: rope.base == value,
    "fraction": lambda rope, value: (
        # neither infinite nor NaN
        isinstance(value, (int, float))
        and 0 <= value <= 1
        and int(rope.head_dim * value) == rope.rotary_dim
    ),
    "width": lambda rope, value: rope.rotary_dim == value,
    "divides": lambda rope, value: type(rope.scaling) is Linear and rope.scaling.factor == value,
}
MEANINGS = (*_HAS, "rotates", "law", "switch", "note")


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """The meaning of a key that its model type's class does not read; ``keys.toml`` explains it."""

    means: str
    says: str
    values: Mapping[str, Any] = field(default_factory=dict[str, Any])
    neutral: tuple[Any, ...] = ()
    source: str | None = None

    def is_neutral(self, value: Any, ropes: Sequence[Rope]) -> bool:
        """Whether a kind of layers already has the property that ``value`` asks for."""
        if value in self.neutral:
            return True
        json_text = json.dumps(value).strip('"') if isinstance(value, (str, int, float)) else ""
        target = self.values.get(json_text) if self.values else value
        match self.means:
            case "rotates":
                return target == bool(ropes)
            case "switch":
                return value is False
            case "unknown":
                return value is False or json_text == "1.0"
            case "law" | "note":
                return False
            case _:  # where nothing rotates, any value asks for a rotation
                # a key may be about one kind of layers only
                return any(_HAS[self.means](rope, target) for rope in ropes) if ropes else not value


_UNKNOWN = Meaning(means="unknown", says="is not a key that phasor knows here")


def _meaning_from_words(key: str) -> Meaning:
    """The meaning of a key that ``keys.toml`` does not list, by the words in its name."""
    for topic, words in table().files["asks_for"].items():
        if re.search(words, key, re.IGNORECASE):
            return Meaning(means="unknown", says=f"is, by its name, about {topic}")
    return _UNKNOWN


@lru_cache(maxsize=1)
def meanings() -> Mapping[str, Meaning]:
    """``keys.toml``, read once."""
    entries = read_table("keys.toml").items()
    return {key: Meaning(**frozen(entry)) for key, entry in entries}


def objects_inside(block: JsonObject, depth: int = 8) -> Iterator[JsonObject]:
    """The objects inside ``block`` that nothing read, except configs of other models."""
    for inner in block.unread_objects() if depth else ():
        name = inner.path.rpartition(".")[2]
        if not inner.has("model_type") and not re.search(table().files["other_models"], name):
            yield inner
            yield from objects_inside(inner, depth - 1)


def check_unread_keys(
    config: JsonObject,
    blocks: Iterable[JsonObject],
    layers: Iterable[Rope | None],
    file_kind: str,
    *,
    facts: Architecture = NO_FACTS,
    ignoring_program: str | None = None,
) -> list[str]:
    """Notes about the keys that were not read; those that contradict the class are refused.

    Args:
        config: The file's config, after reading.
        blocks: Its rope blocks that a layer uses, after reading.
        layers: The rope of each kind of layer.
        file_kind: The kind of file, such as ``a file of model type 'llama'``.
        facts: The facts of its class, if the file names one.
        ignoring_program: The program, if it is known to ignore all other keys.
    """
    notes: list[str] = []
    refused: list[str] = []
    asking: list[str] = []
    unused: list[str] = []
    rotates_nothing = facts.other_positions is not None
    ropes, rope_blocks = [rope for rope in layers if rope is not None], [*blocks]
    for block in (*rope_blocks, config, *objects_inside(config)):
        is_rope_block = block in rope_blocks
        for key, value in block.unread().items():
            meaning = meanings().get("rope_type" if is_rope_block and key == "type" else key)
            if meaning is None and not is_rope_block and not _ABOUT_POSITIONS.search(key):
                continue
            meaning = meaning or _meaning_from_words(key)
            name = block.path_of(key)
            key_text = f"{name} (got {short_repr(value)})"
            inner_key = key if is_rope_block else name.removeprefix(f"{config.path}.")
            if is_rope_block and key in table().files["factors"] and block.has("factor"):
                factor = block.values["factor"]
                if value != factor:
                    counts = f"{block.name('factor')} {short_repr(factor)} counts"
                    doubt(config, f"{counts}, and {name} {short_repr(value)} not.")
            elif rotates_nothing and inner_key in facts.unused_keys:
                unused.append(name)
            elif is_rope_block and (laws := _laws_of_untyped(block, key)):
                refused.append(f"{key_text} belongs to a law, but no rope_type names it: {laws}")
            elif is_rope_block and (
                meaning.means == "unknown" or (ropes and meaning.means == "law")
            ):
                # no value is neutral here, because the key may be misspelt
                unused.append(name)
            elif meaning.is_neutral(value, ropes):
                continue
            elif meaning.means == "note":
                if is_rope_block or ropes:
                    notes.append(f"Not part of the rotation: {key_text} {meaning.says}.")
            elif is_rope_block or ropes or rotates_nothing or meaning.means == "rotates":
                group = refused if meaning is _UNKNOWN else asking
                group.append(f"{key_text} {meaning.says}")
    if unused:
        reason = "the law of that block does not use it" if ropes else "nothing rotates"
        notes.insert(0, f"Nothing depends on {', '.join(dict.fromkeys(unused))}: {reason}.")
    refused = [*asking, *refused]
    if refused and config.strict:
        problem = f"is not a key that phasor knows in {file_kind}"
        if asking:
            problem = f"asks for something other than phasor reads in {file_kind}"
        if rotates_nothing:
            problem = f"is a key for models that rotate, but {file_kind} has no rotary embedding"
        key, sentences = refused[0].split(" ")[0], "; ".join(refused)
        ignore = f", or read the file as {ignoring_program} does, which ignores it: load(..., "
        ignore = f"{ignore}strict=False), on the command line --no-strict"
        or_ignore = ignore if ignoring_program and (rotates_nothing or not asking) else ""
        raise refusal("unread", key=key, why=problem, sentences=sentences, or_ignore=or_ignore)
    left_aside = [f"{LEFT_ASIDE}: {sentence}." for sentence in refused]
    for note in left_aside:
        warnings.warn(note, PhasorWarning, stacklevel=5)
    return [*notes, *left_aside]


def _laws_of_untyped(block: JsonObject, key: str) -> str:
    """The laws that a block without a type may mean, if ``key`` is a number of a law."""
    numbers = {law: set[str](keys) for law, keys in table().files["law_numbers"].items()}
    law_keys = set[str]().union(*numbers.values())
    if block.values.get("rope_type") or block.values.get("type") or key not in law_keys:
        return ""
    present = law_keys & {k for k in block.values if block.has(k)}
    return " or ".join(law for law, keys in numbers.items() if present <= keys) or "any"
