"""`plan_for`: a Llama from Meta's files to transformers', or back: names, pairing, config, ranks.

The facts are those of llama-models 0.3 (``llama3/model.py``, ``checkpoint.py``): which module is
split over ranks on which axis, and how wide its layers are.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from phasor._checks import short_repr
from phasor.checkpoint.files import CHUNK, FLOATS, Rows, open_checkpoint, rows_of
from phasor.checkpoint.llama import Llama, config_json, params_json, read_config, read_params
from phasor.checkpoint.model import Part
from phasor.checkpoint.planning import Change, listed
from phasor.checkpoint.pth import open_pth
from phasor.checkpoint.rows import Layout, Reorder, period_order
from phasor.errors import CheckpointError
from phasor.pairings import Pairing, opposite
from phasor.rope import Rope

Program = Literal["transformers", "meta"]
PROGRAMS: tuple[Program, ...] = ("transformers", "meta")


@dataclass(frozen=True, slots=True)
class _Weight:
    """A weight of a Llama: its two names, its shape, and the axis on which ranks divide it.

    The axis is None where every rank has all of it; ``role`` is that of weights with pairs.
    """

    meta: str
    transformers: str
    shape: tuple[str, ...]
    axis: int | None
    role: Literal["query", "key"] | None = None

    def name(self, program: Program) -> str:
        """Its name in the files of a program."""
        return self.meta if program == "meta" else self.transformers


_BEFORE_LAYERS = (
    # Llama 2 divides it on axis 1, which the shape tells
    _Weight("tok_embeddings.weight", "model.embed_tokens.weight", ("vocab", "dim"), 0),
)
_OF_LAYER = (
    _Weight("attention_norm", "input_layernorm", ("dim",), None),
    _Weight("attention.wq", "self_attn.q_proj", ("queries", "dim"), 0, "query"),
    _Weight("attention.wk", "self_attn.k_proj", ("keys", "dim"), 0, "key"),
    _Weight("attention.wv", "self_attn.v_proj", ("keys", "dim"), 0),
    _Weight("attention.wo", "self_attn.o_proj", ("dim", "queries"), 1),
    _Weight("ffn_norm", "post_attention_layernorm", ("dim",), None),
    _Weight("feed_forward.w1", "mlp.gate_proj", ("hidden", "dim"), 0),
    _Weight("feed_forward.w2", "mlp.down_proj", ("dim", "hidden"), 1),
    _Weight("feed_forward.w3", "mlp.up_proj", ("hidden", "dim"), 0),
)
_AFTER_LAYERS = (
    _Weight("norm.weight", "model.norm.weight", ("dim",), None),
    _Weight("output.weight", "lm_head.weight", ("vocab", "dim"), 0),
)
# tables of frequencies that old files store beside the weights
_FREQUENCIES = re.compile(r"rope\.freqs|model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
_META_WEIGHTS = "consolidated.safetensors"


@dataclass(frozen=True, slots=True)
class JoinedTensor:
    """One tensor of the result, and the pieces of the source that it is made of.

    Attributes:
        ranks: The pieces, in the order of the ranks.
        axis: The axis on which they are joined.
        shape: The shape of the result.
        reorder: The new order of the rows of each head; None where rows stay.
    """

    ranks: tuple[Rows, ...]
    axis: int
    shape: tuple[int, ...]
    reorder: Reorder | None

    @property
    def size(self) -> int:
        """Bytes of the tensor."""
        return sum(rank.shape[0] * rank.row_bytes for rank in self.ranks)

    def steps(self, rank: Rows) -> Iterator[tuple[int, int]]:
        """First row and number of rows of each chunk of a rank, heads never cut."""
        period = 1 if self.reorder is None else len(self.reorder.order)
        # the rows of all ranks may be in memory at once
        step = period * max(1, CHUNK // (len(self.ranks) * rank.row_bytes * period))
        for first in range(0, rank.shape[0], step):
            yield first, min(step, rank.shape[0] - first)

    def chunks(self) -> Iterator[NDArray[np.uint8]]:
        """The bytes of the result in order, a few megabytes at a time."""
        if self.axis == 1:
            for first, count in self.steps(self.ranks[0]):
                # a row of the result is the ranks' rows side by side
                yield np.concatenate([rank.read(first, count) for rank in self.ranks], axis=1)
            return
        for rank in self.ranks:
            for first, count in self.steps(rank):
                rows = rank.read(first, count)
                if self.reorder is not None:
                    order = self.reorder.order
                    rows = rows.reshape(-1, len(order), rank.row_bytes)[:, order]
                yield rows


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramPlan:
    """The description of a conversion between programs, for `write` and `verify`.

    Attributes:
        path: The source, a folder.
        program: Whose files the result has.
        ranks: How many files of ranks are joined.
        source: The pairing of its rows.
        target: The pairing of the result's rows.
        weights_file: Name of the file of weights in the result, a safetensors file.
        config_file: Name of the config in the result.
        config: What it holds.
        tensors: The tensors of the result by name, in the order of the file.
        changes: The queries and keys among them, whose rows get a new order.
        notes: What to know when using the result, a sentence each.
    """

    path: Path
    program: Program
    ranks: int
    source: Pairing
    target: Pairing
    weights_file: str
    config_file: str
    config: Mapping[str, Any]
    tensors: Mapping[str, JoinedTensor]
    changes: Mapping[str, Change]
    notes: tuple[str, ...]

    def lines(self) -> list[str]:
        """What is converted and what to know of it, a line each."""
        ranks = "" if self.ranks == 1 else f" of {self.ranks} ranks"
        return [
            f"{self.path}: {len(self.tensors)} tensors{ranks} for {self.program}, "
            f"{len(self.changes)} from {self.source} to {self.target}",
            *self.notes,
        ]

    def __repr__(self) -> str:
        return f"ProgramPlan({self.lines()[0]!r})"

    def __str__(self) -> str:
        return "\n".join(self.lines())

    @property
    def header(self) -> bytes:
        """The header of the file of weights, with its length before it."""
        described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for name, tensor in self.tensors.items():
            offsets = [at, at + tensor.size]
            dtype, shape = tensor.ranks[0].dtype, list(tensor.shape)
            described[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
            at = offsets[1]
        text = json.dumps(described).encode()
        text += b" " * (-len(text) % 8)  # readers map the data, which begins at a multiple of 8
        return len(text).to_bytes(8, "little") + text

    @property
    def config_text(self) -> str:
        """The text of the config."""
        return json.dumps(dict(self.config), indent=2) + "\n"

    @property
    def size(self) -> int:
        """Bytes of the file of weights."""
        return len(self.header) + sum(tensor.size for tensor in self.tensors.values())


def plan_for(path: str | os.PathLike[str], program: Program) -> ProgramPlan:
    """The conversion of a Llama for another program: names, pairing and config.

    For ``"transformers"`` the source is a folder of Meta's: ``params.json``, and one
    ``consolidated.NN.pth`` for each rank or ``consolidated.safetensors``. The result is a folder
    with ``config.json`` and ``model.safetensors``, queries and keys in half pairs. For ``"meta"``
    it is the other way round, and the result has interleaved pairs in a single
    ``consolidated.safetensors``. Tokenizers are not converted. Only headers are read, and the
    norms where there are several ranks.

    Args:
        path: The folder of the source.
        program: Whose files the result has.

    Returns:
        The plan, for `write` and `verify`.

    Raises:
        CheckpointError: If a file is damaged or missing, ranks disagree, a tensor is missing,
            unknown or of another shape than the config says, or ``program`` does not exist.
        ConfigError: If the config cannot be read, or says what the other program's cannot.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} must be a folder with a config and weights, and is not")
    match program:
        case "transformers":
            model, ranks = read_params(folder / "params.json"), _open_consolidated(folder)
        case "meta":
            model, ranks = read_config(folder / "config.json"), [_rows_by_name(folder)]
        case _:
            raise CheckpointError(
                f"program must be one of {', '.join(PROGRAMS)}, got {short_repr(program)}"
            )
    target: Pairing = "half" if program == "transformers" else "interleaved"
    sizes, tensors, changes = _join(model, program, ranks, target)
    write_config = config_json if program == "transformers" else params_json
    config, notes = write_config(model, sizes)
    if program == "transformers":
        config["dtype"] = FLOATS[next(iter(tensors.values())).ranks[0].dtype]
    return ProgramPlan(
        path=folder,
        program=program,
        ranks=len(ranks),
        source=opposite(target),
        target=target,
        weights_file="model.safetensors" if program == "transformers" else _META_WEIGHTS,
        config_file="config.json" if program == "transformers" else "params.json",
        config=MappingProxyType(config),
        tensors=MappingProxyType(tensors),
        changes=MappingProxyType(changes),
        notes=(*model.notes, *notes, "The tokenizer is not converted."),
    )


def _open_consolidated(folder: Path) -> list[Mapping[str, Rows]]:
    """The tensors of each rank in Meta's folder."""
    by_rank = {
        int(match[1]): path
        for path in folder.iterdir()
        if (match := re.fullmatch(r"consolidated\.(\d\d)\.pth", path.name))
    }
    single = folder / _META_WEIGHTS
    if single.exists() == bool(by_rank):
        raise CheckpointError(
            f"{folder} must hold either consolidated.00.pth and so on or {_META_WEIGHTS}, got "
            f"{'both' if by_rank else 'neither'}"
        )
    if not by_rank:
        return [_rows_by_name(single)]
    missing = sorted(set(range(max(by_rank) + 1)) - set(by_rank))
    if missing:
        raise CheckpointError(
            f"{folder} holds {by_rank[max(by_rank)].name}, and consolidated.{missing[0]:02}.pth is "
            "missing"
        )
    ranks = [open_pth(by_rank[rank]) for rank in sorted(by_rank)]
    for number, rank in enumerate(ranks):
        if differing := sorted(set(rank) ^ set(ranks[0])):
            raise CheckpointError(
                f"the ranks in {folder} must hold tensors of the same names, and only one of "
                f"{by_rank[0].name} and {by_rank[number].name} holds {listed(differing)}"
            )
    return list(ranks)


def _rows_by_name(path: Path) -> Mapping[str, Rows]:
    """The tensors of a safetensors file, or of a folder with one or with an index."""
    checkpoint = open_checkpoint(path)
    found: dict[str, Rows] = {}
    for file, header in checkpoint.files.items():
        for name, entry in header.tensors.items():
            if entry.dtype not in FLOATS or not entry.shape or not entry.count:
                raise CheckpointError(
                    f"{short_repr(name)} must have a dtype of {', '.join(FLOATS)} and rows, got "
                    f"{entry.dtype} {list(entry.shape)}; convert before quantising"
                )
            found[name] = rows_of(checkpoint.location(file), entry)
    return found


def _weights(layers: int) -> Iterator[_Weight]:
    """Every weight of a Llama, in the order of Meta's files."""
    yield from _BEFORE_LAYERS
    for layer in range(layers):
        for weight in _OF_LAYER:
            meta = f"layers.{layer}.{weight.meta}.weight"
            transformers = f"model.layers.{layer}.{weight.transformers}.weight"
            yield replace(weight, meta=meta, transformers=transformers)
    yield from _AFTER_LAYERS


def _join(
    model: Llama, program: Program, ranks: list[Mapping[str, Rows]], target: Pairing
) -> tuple[dict[str, int], dict[str, JoinedTensor], dict[str, Change]]:
    """The sizes of the shapes; the tensors of the result, and those that change, by name."""
    origin: Program = "meta" if program == "transformers" else "transformers"
    weights = list(_weights(model.layers))
    source = {weight.meta: weight.name(origin) for weight in weights}
    # with tied embeddings the head has no tensor, or one that transformers does not use
    if model.tied:
        source["output.weight"] = source["tok_embeddings.weight"]
    _check_names(model, ranks[0], source)
    sizes = {
        "dim": model.dim,
        "queries": model.heads * model.rope.head_dim,
        "keys": model.num_kv_heads * model.rope.head_dim,
        "hidden": len(ranks) * ranks[0][source["layers.0.feed_forward.w1.weight"]].shape[0],
        "vocab": len(ranks) * ranks[0][source["output.weight"]].shape[0],
    }
    tensors: dict[str, JoinedTensor] = {}
    changes: dict[str, Change] = {}
    for weight in weights:
        name, new_name = source[weight.meta], weight.name(program)
        pieces = tuple(rank[name] for rank in ranks)
        shape = tuple(sizes[word] for word in weight.shape)
        tensor = _joined(name, pieces, shape, weight)
        if weight.role is not None:
            order = _reorder(name, tensor, model.rope, target)
            changes[new_name] = Change(Part(weight.role, None), model.rope, order)
            tensor = replace(tensor, reorder=order)
        tensors[new_name] = tensor
    return sizes, tensors, changes


def _check_names(model: Llama, rank: Mapping[str, Rows], source: Mapping[str, str]) -> None:
    if missing := [name for name in source.values() if name not in rank]:
        raise CheckpointError(
            f"the config describes {model.layers} layers, and these tensors are missing: "
            f"{listed(missing)}; there are {listed(rank)}"
        )
    expected = {*source.values(), *(("lm_head.weight",) if model.tied else ())}
    unknown = [name for name in rank if name not in expected and not _FREQUENCIES.fullmatch(name)]
    if unknown:
        raise CheckpointError(
            f"only the tensors of a plain Llama of {model.layers} layers have a name in both "
            f"programs, got {listed(unknown)} as well"
        )


def _joined(
    name: str, pieces: tuple[Rows, ...], shape: tuple[int, ...], weight: _Weight
) -> JoinedTensor:
    """The pieces of the ranks, which must make a tensor of ``shape``."""
    first, axis = pieces[0], weight.axis
    for number, piece in enumerate(pieces):
        if (piece.dtype, piece.shape) != (first.dtype, first.shape):
            raise CheckpointError(
                f"{short_repr(name)} must have one dtype and shape on all ranks, got {first.dtype} "
                f"{list(first.shape)} on rank 0 and {piece.dtype} {list(piece.shape)} on {number}"
            )
    if axis is None:
        for number, piece in enumerate(pieces):
            if not np.array_equal(piece.read(0, piece.shape[0]), first.read(0, first.shape[0])):
                raise CheckpointError(
                    f"{short_repr(name)} must be the same on all ranks, and rank {number} differs "
                    "from rank 0; they are of different models"
                )
        pieces, axis = pieces[:1], 0
    elif weight in _BEFORE_LAYERS and first.shape[1:] != shape[1:]:
        axis = 1
    joined = list(first.shape)
    if len(joined) == len(shape):
        joined[axis] *= len(pieces)
    if tuple(joined) != shape:
        of_ranks = "" if len(pieces) == 1 else f" of {len(pieces)} ranks together"
        raise CheckpointError(
            f"{short_repr(name)} must have the shape {list(shape)} by the config, got {joined}"
            f"{of_ranks}; is the config of another model, or a rank missing?"
        )
    return JoinedTensor(pieces, axis, shape, None)


def _reorder(name: str, tensor: JoinedTensor, rope: Rope, target: Pairing) -> Reorder:
    """The new order of the rows of each head."""
    width, rows = rope.head_dim, tensor.ranks[0].shape[0]
    if rows % width:
        raise CheckpointError(
            f"{short_repr(name)} must hold whole heads of {width} rows on each rank, got {rows}"
        )
    layout = Layout(width, (0,), tensor.shape[0] // width)
    order = period_order(rope, opposite(target), target, layout)
    return Reorder(layout, order, tensor.ranks[0].row_bytes)
