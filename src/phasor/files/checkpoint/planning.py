"""Decides which tensors of a checkpoint change and how, before a byte is written."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from phasor.errors import SpecError
from phasor.files import refusal
from phasor.files.checkpoint.conversion import (
    PROGRAMS,
    ConversionPlan,
    Program,
    ResultFile,
    ResultTensor,
    count_kinds,
    list_kinds,
)
from phasor.files.checkpoint.from_gguf import FLOAT_TYPES, FloatType, plan_from_gguf
from phasor.files.checkpoint.model import (
    CheckpointModel,
    Patterns,
    describe,
    find_projection,
    looks_alike,
)
from phasor.files.checkpoint.programs import plan_program
from phasor.files.checkpoint.rows import Candidate, Change
from phasor.files.checkpoint.storage import check_companions
from phasor.files.tensors import Checkpoint, Entry, is_gguf_file, open_checkpoint
from phasor.pairings import Pairing, by_pairing, checked_pairing, opposite
from phasor.rope import Rope


def plan_conversion(
    path: str | os.PathLike[str],
    target: Pairing | Program,
    *,
    source: Pairing | None = None,
    model: str | os.PathLike[str] | Mapping[str, Any] | Rope | None = None,
    patterns: Patterns | None = None,
    like: str | None = None,
    strict: bool = True,
    dtype: FloatType | None = None,
) -> ConversionPlan:
    """The conversion of a checkpoint to another pairing, or of a model for another program.

    Only headers are read, and the norms of several ranks. For another pairing, query and key
    projections, their biases, QK-norms and LoRA's outer matrices get a new row order, the same for
    queries and keys, so scores do not change.

    For a program, names and config change as well. A GGUF file of a Llama, Qwen 2 or Qwen 3 for
    ``"transformers"`` is dequantised to ``dtype``. Otherwise the source of that is a folder
    from Meta with ``params.json`` and either one ``consolidated.NN.pth`` per rank or
    ``consolidated.safetensors``. The result is a folder with ``config.json`` and
    ``model.safetensors``, with queries and keys in half pairs. For ``"meta"`` it is the reverse,
    and the result has interleaved pairs in a single ``consolidated.safetensors``. Tokenizers are
    not converted. A program allows no other arguments, because the folder's config has all facts.

    Args:
        path: A safetensors file, or a folder with one file or with an index and its shards; for a
            program, the folder of the source.
        target: The pairing of the result, or the program whose files it has: ``"transformers"`` or
            ``"meta"``.
        source: The pairing of the rows; by default the config's. Pass it if weights and config
            disagree, such as Meta's rows under transformers' names.
        model: The model's config (path, folder or dictionary), or a `Rope` for all layers; by
            default the config next to the weights.
        patterns: Which tensors to convert, instead of the known names.
        like: As for `phasor.load`: a known model type, to read an unknown one.
        strict: As for `phasor.load`: whether to refuse keys that contradict the model's class.
        dtype: For a GGUF file and ``"transformers"``: the float type that its tensors get.

    Raises:
        CheckpointError: If the files are damaged, there is nothing to convert, or a tensor that
            looks like a query or key cannot be converted. For a program, if ranks disagree, or a
            tensor is missing, unknown or does not have the shape in the config.
        ConfigError: If the config cannot be read, or the program's format cannot express it.
    """
    if dtype is not None and dtype not in FLOAT_TYPES:
        raise SpecError(f"dtype must be one of {', '.join(FLOAT_TYPES)}, got {dtype!r}")
    if target == "transformers" or target == "meta":
        if (source, model, patterns, like, strict) != (None, None, None, None, True):
            raise SpecError(f"no other argument goes with the program {target}: leave them out")
        if is_gguf_file(Path(path)):
            if target == "meta" or dtype is None:
                raise refusal("gguf_program", path=path)
            return plan_from_gguf(Path(path), dtype)
    if dtype is not None:
        raise SpecError("dtype is for a GGUF file and transformers; other weights keep their own")
    if target == "transformers" or target == "meta":
        return plan_program(Path(path), target)
    programs = " or ".join(map(repr, PROGRAMS))
    checked_pairing(f"target, if it is not {programs},", target)
    if source is not None:
        checked_pairing("source", source)
    checkpoint = open_checkpoint(Path(path))
    config = _config_folder(checkpoint) if model is None else model
    described = describe(config, like=like, strict=strict)
    if checkpoint.is_gguf and source is None and (model is not None or described.pairing != target):
        raise refusal("gguf_pairing", path=checkpoint.path, target=target, source=opposite(target))
    pairing = _source_pairing(described, source, target)
    headers = checkpoint.files.values()
    entries = {name: entry for header in headers for name, entry in header.tensors.items()}
    changes: dict[str, Change] = {}
    similar_names: list[str] = []
    unchanged: dict[str, Pairing] = {}
    for name in entries:
        if patterns is None:
            part = find_projection(name, shares_values=described.shares_values)
        else:
            part = patterns.part(name)
        if part is None:
            similar_names += [name] if looks_alike(name) else []
            continue
        rope = described.rope_of(name, part)
        if rope is None:
            continue  # rows of a layer that does not rotate keep their order
        if part.auxiliary and rope.pairing != described.pairing:
            # it already has the pairing of the result, because its pairing differs from attention's
            unchanged[part.auxiliary] = rope.pairing
            continue
        candidate = Candidate(described, pairing, target, entries, name, part, rope)
        if change := candidate.change():
            changes[name] = change
    if patterns is not None and (unused := patterns.unused_patterns(entries)):
        raise refusal("unmatched", pattern=unused[0], names=list_kinds(entries))
    check_companions(changes, entries)
    if not changes:
        raise refusal("nothing", path=checkpoint.path, names=list_kinds(entries))
    # a LoRA may have queries only; its keys are in the base model
    if patterns is None and not any("lora_" in name for name in entries):
        _check_roles(checkpoint.path, described, changes, entries)
    index, is_complete = checkpoint.index, patterns is None or not similar_names
    notes = _describe_result(described, target, is_complete=is_complete)
    notes += [f"The {name} stays in its {pairing} pairing." for name, pairing in unchanged.items()]
    return ConversionPlan(
        path=checkpoint.path,
        source=pairing,
        target=target,
        files={
            name: ResultFile(
                header.data,
                {
                    tensor: _result_tensor(entry, changes.get(tensor))
                    for tensor, entry in header.tensors.items()
                },
            )
            for name, header in checkpoint.files.items()
        },
        other_files={} if index is None else {index: (checkpoint.path / index).read_bytes()},
        changes=MappingProxyType(changes),
        unchanged_lookalikes=MappingProxyType(count_kinds(similar_names)),
        notes=tuple(notes),
    )


def _result_tensor(entry: Entry, change: Change | None) -> ResultTensor:
    # copied in bytes, whatever its dtype
    pieces = (entry.rows(1),) if change is None else change.pieces(entry)
    if entry.padding:
        pieces = (*pieces, replace(entry.rows(1, entry.size), num_rows=entry.padding))
    return ResultTensor(pieces)


def _config_folder(checkpoint: Checkpoint) -> Path:
    if checkpoint.is_gguf:
        return checkpoint.path
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    if any((folder / name).is_file() for name in ("config.json", "params.json")):
        return folder
    raise refusal("no_config", folder=folder)


def _source_pairing(model: CheckpointModel, source: Pairing | None, target: Pairing) -> Pairing:
    pairing = source or model.pairing
    if pairing is None:
        raise refusal("no_pairing")
    if pairing == target:
        hint = (
            "; if they have the other order, as Meta's do under transformers' names, state the "
            f"source as {opposite(target)} (--from)"
        )
        raise refusal("same_pairing", target=target, hint="" if source else hint)
    return pairing


def _check_roles(
    path: Path, model: CheckpointModel, changes: Mapping[str, Change], names: Iterable[str]
) -> None:
    """Refuse to change only the queries or only the keys of an attention."""
    roles_by_place: dict[str, set[str]] = {}
    borrowing_places: set[str] = set()
    for change in changes.values():
        part = change.part
        roles = roles_by_place.setdefault(part.place, set())
        # only queries, or only keys, may have a bias or a norm
        if part.role != "vectors" and not part.suffix.endswith("bias"):
            roles.add(part.role)
        if model.borrows_keys(part):
            borrowing_places.add(part.place)
    for place, roles in roles_by_place.items():
        if roles == {"query"} and place in borrowing_places:
            continue
        if roles <= {"query"} or roles <= {"key", "latent key"}:
            attention = place.removesuffix(".indexer")
            siblings = list_kinds(name for name in names if name.startswith(f"{attention}."))
            roles_text = f"only {roles.pop()}" if roles else "neither"
            raise refusal("one_role", path=path, place=place, found=roles_text, names=siblings)


def _describe_result(model: CheckpointModel, target: Pairing, *, is_complete: bool) -> list[str]:
    if not is_complete:
        return [
            f"Only the tensors that the patterns matched are in {target} pairing now: scores are "
            "unchanged only where queries and keys were both matched."
        ]
    notes = [f"The result is in {target} pairing."]
    if model.architecture is not None:
        is_same = model.pairing == target
        meaning = f"general.architecture {model.architecture} means {model.pairing} pairing"
        hint = f"run the result with code that rotates {target} pairs"
        return [*notes, f"{meaning}, as here." if is_same else f"{meaning}: {hint}."]
    if model.model_type is None:
        return notes
    if model.pairing == target:
        return [*notes, "That is what the config describes."]
    # a key of the config that selects the pairing, such as rope_interleave
    if model.pairing_key is not None:
        value = by_pairing(target, half="false", interleaved="true")
        return [*notes, f"Its config must say {model.pairing_key}: {value}."]
    return [
        *notes,
        f"A config.json with model_type {model.model_type} means {model.pairing} pairing and "
        f"cannot state another: run the result with code that rotates {target} pairs.",
    ]
