"""`plan`: decides which tensors of a checkpoint change and how, before a byte is written."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from phasor.checkpoint.files import Checkpoint, open_checkpoint
from phasor.checkpoint.model import Model, Part, Patterns, describe, known_part, looks_alike
from phasor.checkpoint.rows import Context, Reorder, reorder
from phasor.errors import CheckpointError
from phasor.pairings import Pairing, by_pairing, checked_pairing, opposite
from phasor.rope import Rope

_SHOWN = 12  # kinds of names in a message


@dataclass(frozen=True, slots=True)
class Change:
    """One tensor that changes.

    Attributes:
        part: What the tensor is.
        rope: The rope of its layer.
        reorder: The new order of its bytes.
    """

    part: Part
    rope: Rope
    reorder: Reorder


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversionPlan:
    """The description of a conversion, for `write` and `verify`.

    Attributes:
        checkpoint: The source.
        source: The pairing of its rows.
        target: The pairing of the result's rows.
        changes: The tensors that change, by name.
        alike: Names that look like queries or keys of tensors that do not change, with counts;
            numbers in names are written as ``*``.
        notes: What to know when using the result, a sentence each.
    """

    checkpoint: Checkpoint
    source: Pairing
    target: Pairing
    changes: Mapping[str, Change]
    alike: Mapping[str, int]
    notes: tuple[str, ...]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return self.checkpoint.size

    def lines(self) -> list[str]:
        """What changes and what stays, by kinds of names, a line each."""
        every = sum(len(header.tensors) for header in self.checkpoint.files.values())
        found = [
            f"{self.checkpoint.path}: {self.source} to {self.target}, "
            f"{len(self.changes)} of {every} tensors change"
        ]
        roles = {name: change.part.role for name, change in self.changes.items()}
        for role in dict.fromkeys(roles.values()):
            kinds = _kinds(name for name in roles if roles[name] == role)
            found += [f"  {kind}  {count} x {role}" for kind, count in kinds.items()]
        if self.alike:
            found.append("Named alike and left as they are:")
            found += [f"  {kind}  {count}" for kind, count in self.alike.items()]
        return [*found, *self.notes]

    def __repr__(self) -> str:
        return (
            f"ConversionPlan({str(self.checkpoint.path)!r}, {self.source} to {self.target}, "
            f"{len(self.changes)} tensors)"
        )

    def __str__(self) -> str:
        return "\n".join(self.lines())


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
    matrices get a new row order. It is the same for queries and keys, so scores do not change.

    Args:
        path: A safetensors file, or a folder with one or with an index and its shards.
        target: The pairing of the result.
        source: The pairing of the rows; by default the config's. Give it where weights and config
            disagree, such as Meta's rows under transformers' names.
        model: The model's config (path, folder or dictionary), or a `Rope` for all layers; the
            config beside the weights unless given.
        patterns: Which tensors to convert, in place of the known names.
        like: As for `phasor.load`: a known model type to read an unknown one as.
        strict: As for `phasor.load`: whether to refuse keys that contradict the model's class.

    Returns:
        The plan, for `write` and `verify`.

    Raises:
        CheckpointError: If the files are damaged, nothing is to be converted, or a tensor that
            looks as if it should cannot be.
        ConfigError: If the config cannot be read.
        SpecError: If a pairing does not exist.
    """
    checked_pairing("target", target)
    if source is not None:
        checked_pairing("source", source)
    checkpoint = open_checkpoint(Path(path))
    config = _config_folder(checkpoint) if model is None else model
    described = describe(config, like=like, strict=strict)
    origin = _source_pairing(described, source, target)
    context = Context(described, origin, target, MappingProxyType(dict(checkpoint.tensors())))
    changes: dict[str, Change] = {}
    alike: list[str] = []
    for name in context.entries:
        part = known_part(name) if patterns is None else patterns.part(name)
        if part is None:
            alike += [name] if looks_alike(name) else []
            continue
        rope = described.rope_of(name, part)
        order = None if rope is None else reorder(context, name, part, rope)
        if rope is not None and order is not None:
            changes[name] = Change(part, rope, order)
    _check(checkpoint, context, changes, patterns)
    return ConversionPlan(
        checkpoint=checkpoint,
        source=origin,
        target=target,
        changes=MappingProxyType(changes),
        alike=MappingProxyType(_kinds(alike)),
        notes=tuple(_notes(described, target, whole=patterns is None or not alike)),
    )


def _config_folder(checkpoint: Checkpoint) -> Path:
    folder = checkpoint.path if checkpoint.is_folder else checkpoint.path.parent
    if any((folder / name).is_file() for name in ("config.json", "params.json")):
        return folder
    raise CheckpointError(
        f"{folder} holds no config.json, so where heads begin is unknown; name the model's config, "
        "or give a Rope (--head-dim on the command line)"
    )


def _source_pairing(model: Model, source: Pairing | None, target: Pairing) -> Pairing:
    origin = model.pairing if source is None else source
    if origin is None:
        raise CheckpointError("no layer of this model rotates, or they differ in pairing")
    if origin == target:
        way_out = (
            ""
            if source is not None
            else "; if they have the other order, as Meta's do under transformers' names, say that "
            f"the source is {opposite(target)} (--from)"
        )
        raise CheckpointError(f"the weights are in {target} pairing already{way_out}")
    return origin


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
                f"{listed(names)}"
            )
    elif indexer := next((n for n in names if re.search(r"\.(indexer|compressor)\.", n)), None):
        raise CheckpointError(
            f"{indexer!r} belongs to an index over keys with a rotation of its own, which phasor "
            "does not know how to convert"
        )
    if not changes:
        raise CheckpointError(
            f"{checkpoint.path} holds nothing to convert; its tensors are {listed(names)}. "
            "Say which are queries and keys (--query, --key)"
        )
    # a LoRA may have queries only; its keys are in the base model
    if patterns is None and not any("lora_" in name for name in names):
        _check_sides(checkpoint, context, changes)


def _check_sides(checkpoint: Checkpoint, context: Context, changes: Mapping[str, Change]) -> None:
    """Refuse attention of which only the queries or only the keys would change."""
    roles_at: dict[str, set[str]] = {}
    borrowed: set[str] = set()
    for name, change in changes.items():
        part = change.part
        place = name.removesuffix(f".{part.module}.{part.suffix}")
        roles = roles_at.setdefault(place, set())
        # only queries, or only keys, may have a bias or a norm
        if part.role != "vectors" and not part.suffix.endswith("bias"):
            roles.add(part.role)
        if context.model.borrows_keys(part):
            borrowed.add(place)
    for place, roles in roles_at.items():
        if roles == {"query"} and place in borrowed:
            continue
        if roles <= {"query"} or roles <= {"key", "latent key"}:
            siblings = [name for name in context.entries if name.startswith(f"{place}.")]
            raise CheckpointError(
                f"{checkpoint.path} must hold queries and keys of {place}, got "
                f"{f'only {roles.pop()}' if roles else 'neither'}; its tensors are "
                f"{listed(siblings)}"
            )


def _kinds(names: Iterable[str]) -> dict[str, int]:
    """Names with their numbers as ``*``, and how many tensors have each."""
    return dict(Counter(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names))


def listed(names: Iterable[str]) -> str:
    """Kinds of names with their counts, for messages."""
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
