"""`plan`: which tensors of a checkpoint change and how, settled before a byte is written."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from phasor._checks import choice
from phasor.checkpoint.files import Checkpoint, open_checkpoint
from phasor.checkpoint.model import Model, Part, Patterns, describe, known_part, looks_alike
from phasor.checkpoint.rows import Context, Reorder, reorder
from phasor.errors import CheckpointError
from phasor.pairings import PAIRINGS, Pairing, by_pairing, opposite
from phasor.rope import Rope

_SHOWN = 12  # kinds of names in a message


@dataclass(frozen=True, slots=True)
class Change:
    """One tensor that changes.

    Attributes:
        part: What it is.
        rope: What turns it.
        reorder: How its bytes move.
    """

    part: Part
    rope: Rope
    reorder: Reorder


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversionPlan:
    """A conversion that has been thought through and not begun.

    Attributes:
        checkpoint: What is read.
        source: The pairing its rows have.
        target: The pairing they get.
        changes: The tensors that change, by name.
        alike: Kinds of names that look like queries or keys and stay as they are, with counts;
            numbers in them are written as ``*``.
        notes: What the reader of the result has to know, a sentence each.
    """

    checkpoint: Checkpoint
    source: Pairing
    target: Pairing
    changes: Mapping[str, Change]
    alike: Mapping[str, int]
    notes: tuple[str, ...]


def plan(
    path: str | os.PathLike[str],
    target: Pairing,
    *,
    source: Pairing | None = None,
    model: str | os.PathLike[str] | Mapping[str, Any] | Rope | None = None,
    patterns: Patterns | None = None,
    like: str | None = None,
    strict: bool = True,
) -> ConversionPlan:
    """The conversion of a checkpoint's queries and keys to another pairing.

    Only headers are read. Query and key projections, their biases, QK-norms and LoRA's outer
    matrices get a new order of rows; scores stay what they are, as both get the same.

    Args:
        path: A safetensors file, or a folder with one or with an index and its shards.
        target: The pairing wanted.
        source: The pairing the rows have; what the model's config means unless given. Say it where
            weights and config disagree, such as Meta's rows under transformers' names.
        model: The model's config (path, folder or dictionary), or a `Rope` for all layers; the
            config beside the weights unless given.
        patterns: Which tensors to convert, in place of the names that phasor knows.
        like: As for `phasor.load`: a known model type to read an unknown one as.
        strict: As for `phasor.load`: whether keys are refused that contradict the model's class.

    Returns:
        The plan, for `write` and `verify`.

    Raises:
        CheckpointError: If the files are damaged, nothing is to be converted, or a tensor that
            looks as if it should cannot be.
        ConfigError: If the config cannot be read.
        SpecError: If a pairing does not exist.
    """
    choice("target", target, PAIRINGS)
    if source is not None:
        choice("source", source, PAIRINGS)
    checkpoint = open_checkpoint(Path(path))
    described = _beside(checkpoint) if model is None else model
    known = describe(described, like=like, strict=strict)
    rows = _source(known, source, target)
    context = Context(known, rows, target, MappingProxyType(dict(checkpoint.tensors())))
    changes: dict[str, Change] = {}
    alike: list[str] = []
    for name in context.entries:
        part = known_part(name) if patterns is None else patterns.part(name)
        if part is None:
            alike += [name] if looks_alike(name) else []
            continue
        rope = known.rope_of(name, part)
        moved = None if rope is None else reorder(context, name, part, rope)
        if rope is not None and moved is not None:
            changes[name] = Change(part, rope, moved)
    _check(checkpoint, context, changes, patterns)
    return ConversionPlan(
        checkpoint=checkpoint,
        source=rows,
        target=target,
        changes=MappingProxyType(changes),
        alike=MappingProxyType(_kinds(alike)),
        notes=tuple(_notes(known, target, whole=patterns is None or not alike)),
    )


def _beside(checkpoint: Checkpoint) -> Path:
    folder = checkpoint.path if checkpoint.is_folder else checkpoint.path.parent
    if any((folder / name).is_file() for name in ("config.json", "params.json")):
        return folder
    raise CheckpointError(
        f"{folder} holds no config.json, so where heads begin is unknown; name the model's config, "
        "or give a Rope (--head-dim on the command line)"
    )


def _source(model: Model, source: Pairing | None, target: Pairing) -> Pairing:
    rows = model.pairing if source is None else source
    if rows is None:
        raise CheckpointError("no layer of this model rotates, or they differ in pairing")
    if rows == target:
        way_out = (
            ""
            if source is not None
            else "; if they have the other order, as Meta's do under transformers' names, say that "
            f"the source is {opposite(target)} (--from)"
        )
        raise CheckpointError(f"the weights are in {target} pairing already{way_out}")
    return rows


def _check(
    checkpoint: Checkpoint,
    context: Context,
    changes: Mapping[str, Change],
    patterns: Patterns | None,
) -> None:
    names = context.entries
    if patterns is not None:
        if unused := patterns.unused(names):
            raise CheckpointError(
                f"the pattern {unused[0]!r} must match a whole name, and matches none of "
                f"{_listed(names)}"
            )
    elif strange := next((n for n in names if re.search(r"\.(indexer|compressor)\.", n)), None):
        raise CheckpointError(
            f"{strange!r} belongs to an index over keys with a rotation of its own, which phasor "
            "does not know how to convert"
        )
    if not changes:
        raise CheckpointError(
            f"{checkpoint.path} holds nothing to convert; its tensors are {_listed(names)}. "
            "Say which are queries and keys (--query, --key)"
        )
    # a LoRA may well be of queries alone; its keys are in the base model
    if patterns is None and not any("lora_" in name for name in names):
        _check_sides(checkpoint, context, changes)


def _check_sides(checkpoint: Checkpoint, context: Context, changes: Mapping[str, Change]) -> None:
    """Refuse attention whose queries would get another order than its keys."""
    found: dict[str, set[str]] = {}
    borrowed: set[str] = set()
    for name, change in changes.items():
        part = change.part
        place = name.removesuffix(f".{part.module}.{part.suffix}")
        roles = found.setdefault(place, set())
        # biases and norms may well be of one side alone
        if part.role != "vectors" and not part.suffix.endswith("bias"):
            roles.add(part.role)
        if context.model.borrows_keys(part):
            borrowed.add(place)
    for place, roles in found.items():
        if roles == {"query"} and place in borrowed:
            continue
        if roles <= {"query"} or roles <= {"key", "latent key"}:
            beside = [name for name in context.entries if name.startswith(f"{place}.")]
            raise CheckpointError(
                f"{checkpoint.path} must hold queries and keys of {place}, got "
                f"{f'only {roles.pop()}' if roles else 'neither'}; its tensors are "
                f"{_listed(beside)}"
            )


def _kinds(names: Iterable[str]) -> dict[str, int]:
    return dict(Counter(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names))


def _listed(names: Iterable[str]) -> str:
    kinds = _kinds(names)
    some = [f"{kind} ({count})" for kind, count in list(kinds.items())[:_SHOWN]]
    more = len(kinds) - len(some)
    return ", ".join(some) + (f" and {more} more" if more else "")


def _notes(model: Model, target: Pairing, *, whole: bool) -> list[str]:
    if not whole:
        return [
            f"What the patterns matched is in {target} pairing now, and nothing else: scores are "
            "what they were only where queries and keys were both matched."
        ]
    notes = [f"The result is in {target} pairing."]
    if model.model_type is None:
        return notes
    if model.pairing == target:
        return [*notes, "That is what the config describes."]
    if model.switch is not None:
        value = by_pairing(target, half="false", interleaved="true")
        return [*notes, f"Its config must say {model.switch}: {value}."]
    return [
        *notes,
        f"A config.json with model_type {model.model_type} means {model.pairing} pairing and has "
        f"no word for another: run the result with code that rotates {target} pairs.",
    ]
