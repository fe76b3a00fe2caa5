"""A Llama from Meta's files to transformers', or back: names, pairing, config, ranks.

The facts are those of llama-models 0.3 (``llama3/model.py``, ``checkpoint.py``): which module is
split over ranks on which axis, and how wide its layers are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from phasor.errors import install_hint
from phasor.files import refusal
from phasor.files.checkpoint.conversion import (
    Change,
    ConversionPlan,
    Piece,
    Program,
    ResultFile,
    ResultTensor,
    list_kinds,
)
from phasor.files.checkpoint.files import FLOATS, Rows, open_checkpoint, rows_of
from phasor.files.checkpoint.model import Projection
from phasor.files.checkpoint.rows import HeadRows, Reorder, reorder_heads
from phasor.files.configs import load
from phasor.files.configs.source import JsonObject, read_source
from phasor.files.configs.writing import rope_parameters
from phasor.pairings import Pairing, opposite
from phasor.rope import Rope
from phasor.scaling import Llama3

if TYPE_CHECKING:
    import torch

# The config of a Llama, as Meta's ``params.json`` and as transformers' ``config.json``.

_KNOWN_PARAMS = {
    "dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "hidden_dim", "vocab_size",
    "multiple_of", "ffn_dim_multiplier", "norm_eps", "rope_theta", "use_scaled_rope",
    "rope_scaling_factor", "rope_high_freq_factor", "max_seq_len", "max_batch_size",
}  # fmt: skip
_SCALED_CONTEXT = 131_072  # of every release with use_scaled_rope: Llama 3.1, 3.2 and 3.3


@dataclass(frozen=True, kw_only=True, slots=True)
class Llama:
    """The facts about a Llama that both programs' configs have."""

    rope: Rope
    num_layers: int
    embed_dim: int
    num_heads: int
    num_kv_heads: int
    norm_eps: float
    context: int | None
    tied_embeddings: bool = False
    notes: tuple[str, ...] = ()


def read_params(path: Path) -> Llama:
    """Read Meta's ``params.json``."""
    config = _read_config_file(path)
    if unknown := sorted(k for k, v in config.values.items() if k not in _KNOWN_PARAMS and v):
        raise refusal("params", path=path, keys=", ".join(unknown))
    ropes = load(path)
    rope = replace(ropes.ropes[0], pairing="half")
    num_heads = config.require("n_heads", ropes.num_heads)
    scaled = isinstance(rope.scaling, Llama3)
    return Llama(
        rope=rope,
        num_layers=len(ropes),
        embed_dim=config.require("dim", config.whole("dim")),
        num_heads=num_heads,
        num_kv_heads=ropes.num_kv_heads or num_heads,
        norm_eps=config.number("norm_eps", above=0) or 1e-5,  # the default of Meta's code
        context=ropes.context or (_SCALED_CONTEXT if scaled else None),
        notes=ropes.notes,
    )


def config_json(model: Llama, sizes: Mapping[str, int]) -> tuple[dict[str, Any], list[str]]:
    """The ``config.json`` of transformers 5."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": sizes["vocab"],
        "hidden_size": model.embed_dim,
        "intermediate_size": sizes["hidden"],
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.rope.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        # the class's own, 1 and 2, would be wrong for Llama 3
        "bos_token_id": None,
        "eos_token_id": None,
        "rope_parameters": rope_parameters(model.rope, model.context or 1),
    }
    notes = ["config.json is for transformers 5; add the tokenizer's bos and eos ids."]
    if model.context is None:
        notes.append("params.json does not say the context: add max_position_embeddings.")
    else:
        config["max_position_embeddings"] = model.context
    return config, notes


def read_config(path: Path) -> Llama:
    """Read the ``config.json`` of a Llama; refuse what ``params.json`` cannot say."""
    config = _read_config_file(path)
    if config.text("model_type") != "llama":
        config.refuse("model_type", "llama, the one that Meta's code computes")
    if config.text("hidden_act") not in (None, "silu"):
        config.refuse("hidden_act", "silu, the one that Meta's code computes")
    ropes = load(path)
    rope = ropes.ropes[0]
    num_heads = config.require("num_attention_heads", ropes.num_heads)
    embed_dim = config.require("hidden_size", config.whole("hidden_size"))
    if rope.head_dim * num_heads != embed_dim:
        sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "head_dim": rope.head_dim}
        raise refusal("widths", **sizes)
    law = rope.scaling
    is_metas = law is None or (
        isinstance(law, Llama3) and (law.low_freq_factor, law.original_max_positions) == (1, 8192)
    )
    if rope.rotary_dim != rope.head_dim or not is_metas:
        widths = {"rotary_dim": rope.rotary_dim, "head_dim": rope.head_dim}
        raise refusal("law", law=law, **widths)
    return Llama(
        rope=rope,
        num_layers=len(ropes),
        embed_dim=embed_dim,
        num_heads=num_heads,
        num_kv_heads=ropes.num_kv_heads or num_heads,
        norm_eps=config.number("rms_norm_eps", above=0) or 1e-6,  # the default of transformers
        context=ropes.context,
        tied_embeddings=config.flag("tie_word_embeddings") or False,
        notes=ropes.notes,
    )


def params_json(model: Llama, sizes: Mapping[str, int]) -> tuple[dict[str, Any], list[str]]:
    """Meta's ``params.json``."""
    # Meta's code: hidden = int(ffn_dim_multiplier * int(8 dim / 3)), rounded up to multiple_of.
    # Half a unit more than the quotient, so that no rounding reaches the next integer.
    multiplier = (sizes["hidden"] + 0.5) / int(2 * (4 * model.embed_dim) / 3)
    law = model.rope.scaling
    params: dict[str, Any] = {
        "dim": model.embed_dim,
        "n_layers": model.num_layers,
        "n_heads": model.num_heads,
        "n_kv_heads": model.num_kv_heads,
        "vocab_size": sizes["vocab"],
        "ffn_dim_multiplier": multiplier,
        "multiple_of": 1,
        "norm_eps": model.norm_eps,
        "rope_theta": model.rope.base,
        "use_scaled_rope": law is not None,
    }
    notes: list[str] = []
    if model.tied_embeddings:
        notes.append("output.weight is a copy of tok_embeddings.weight: the source ties them.")
    if isinstance(law, Llama3):
        params["rope_scaling_factor"] = law.factor
        params["rope_high_freq_factor"] = law.high_freq_factor
        if (law.factor, law.high_freq_factor) != (8, 4):
            notes.append(
                "Meta's code for Llama 3 (llama-models 0.3) scales by 8 with a high_freq_factor of "
                f"4 whatever params.json says; this model needs {law.factor:g} and "
                f"{law.high_freq_factor:g} there."
            )
    return params, notes


def _read_config_file(path: Path) -> JsonObject:
    if not path.is_file():
        raise refusal("no_sizes", path=path)
    return read_source(path)


# Its tensors.


@dataclass(frozen=True, slots=True)
class _Weight:
    """A weight of a Llama: its two names, its shape, and the axis on which ranks divide it.

    The axis is None if every rank has the whole weight. Only weights with pairs have a ``role``.
    """

    meta: str
    transformers: str
    shape: tuple[str, ...]
    axis: int | None
    role: Literal["query", "key"] | None = None

    def name(self, program: Program) -> str:
        """Its name in the files of a program."""
        return self.meta if program == "meta" else self.transformers


_WEIGHTS_BEFORE_LAYERS = (
    # Llama 2 divides it on axis 1, which the shape tells
    _Weight("tok_embeddings.weight", "model.embed_tokens.weight", ("vocab", "dim"), 0),
)
_LAYER_WEIGHTS = (
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
_WEIGHTS_AFTER_LAYERS = (
    _Weight("norm.weight", "model.norm.weight", ("dim",), None),
    _Weight("output.weight", "lm_head.weight", ("vocab", "dim"), 0),
)
# tables of frequencies that old files store beside the weights
_FREQUENCIES = re.compile(r"rope\.freqs|model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
_META_WEIGHTS = "consolidated.safetensors"
_DTYPES = {f"torch.{theirs}": ours for ours, theirs in FLOATS.items()}


def plan_program(folder: Path, program: Program) -> ConversionPlan:
    """`plan_conversion` of a folder for another program."""
    if not folder.is_dir():
        raise refusal("no_folder", path=folder)
    if program == "transformers":
        model, ranks = read_params(folder / "params.json"), _open_consolidated(folder)
        weights_file, config_file, write_config = "model.safetensors", "config.json", config_json
        target: Pairing = "half"
    else:
        model, ranks = read_config(folder / "config.json"), [_open_safetensors(folder)]
        weights_file, config_file, write_config = _META_WEIGHTS, "params.json", params_json
        target = "interleaved"
    sizes, file, changes = _build_result(model, program, ranks, target)
    config, notes = write_config(model, sizes)
    if program == "transformers":
        config["dtype"] = FLOATS[next(iter(file.tensors.values())).pieces[0].rows.dtype]
    return ConversionPlan(
        path=folder,
        program=program,
        ranks=len(ranks),
        source=opposite(target),
        target=target,
        files={weights_file: file},
        other_files={config_file: (json.dumps(config, indent=2) + "\n").encode()},
        changes=MappingProxyType(changes),
        notes=(*model.notes, *notes, "The tokenizer is not converted."),
    )


def _open_consolidated(folder: Path) -> list[Mapping[str, Rows]]:
    """The tensors of each rank in Meta's folder."""
    # consolidated.00.pth and so on, one for each rank of the training
    by_rank = {
        int(match[1]): path
        for path in folder.iterdir()
        if (match := re.fullmatch(r"consolidated\.(\d\d)\.pth", path.name))
    }
    single = folder / _META_WEIGHTS
    if single.exists() == bool(by_rank):
        raise refusal("consolidated", folder=folder, found="both" if by_rank else "neither")
    if not by_rank:
        return [_open_safetensors(single)]
    missing = sorted(set(range(max(by_rank) + 1)) - set(by_rank))
    if missing:
        last = by_rank[max(by_rank)].name
        raise refusal("rank_missing", folder=folder, last=last, missing=missing[0])
    ranks = [_open_pth(by_rank[rank]) for rank in sorted(by_rank)]
    for number, rank in enumerate(ranks):
        if differing := sorted(set(rank) ^ set(ranks[0])):
            pair = {"first": by_rank[0].name, "other": by_rank[number].name}
            raise refusal("rank_names", folder=folder, names=list_kinds(differing), **pair)
    return list(ranks)


def _open_pth(path: Path) -> dict[str, Rows]:
    """The tensors of a file of torch.save, by name. The file is mapped into memory, not read.

    torch's loader runs with ``weights_only=True``: it makes only tensors and plain containers, and
    executes nothing that the pickle holds.
    """
    try:
        import torch
    except ImportError:
        raise refusal("no_torch", path=path, install=install_hint("torch")) from None
    try:
        state: object = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # torch raises what its unpickler and its zip reader happen to raise
        first_line = str(error).strip().partition("\n")[0]
        raise refusal("pickle", path=path, error=first_line) from None
    if not isinstance(state, dict) or not state:
        kind = "an empty one" if isinstance(state, dict) else f"a {type(state).__name__}"
        raise refusal("no_tensors", path=path, kind=kind)
    tensors = cast(dict[Any, Any], state).items()
    return {str(name): _map_rows(path, str(name), tensor) for name, tensor in tensors}


def _map_rows(path: Path, name: str, tensor: object) -> Rows:
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise refusal("no_tensor", path=path, name=name, kind=type(tensor))
    dtype = _DTYPES.get(str(tensor.dtype))
    if dtype is None or not tensor.ndim or not tensor.numel() or tensor.layout != torch.strided:
        got = {"dtype": tensor.dtype, "shape": list(tensor.shape)}
        raise refusal("dense", path=path, name=name, dtypes=", ".join(FLOATS.values()), **got)
    row_bytes = tensor.element_size() * tensor[:1].numel()

    def read(first: int, count: int) -> NDArray[np.uint8]:
        # contiguous before the view as bytes: a copy of these rows at most
        rows: torch.Tensor = tensor[first : first + count].contiguous()
        return rows.view(torch.uint8).reshape(count, row_bytes).numpy()

    return Rows(dtype, tuple(tensor.shape), row_bytes, read)


def _open_safetensors(path: Path) -> Mapping[str, Rows]:
    """The tensors of a safetensors file, or of a folder with one or with an index."""
    tensors: dict[str, Rows] = {}
    for header in open_checkpoint(path).files.values():
        for name, entry in header.tensors.items():
            if entry.dtype not in FLOATS or not entry.shape or not entry.count:
                got = {"dtype": entry.dtype, "shape": list(entry.shape)}
                raise refusal("floats", name=name, dtypes=", ".join(FLOATS), **got)
            row_bytes = (entry.end - entry.begin) // entry.shape[0]
            tensors[name] = rows_of(header.path, entry, row_bytes)
    return tensors


def _list_weights(num_layers: int) -> Iterator[_Weight]:
    """Every weight of a Llama, in the order of Meta's files."""
    yield from _WEIGHTS_BEFORE_LAYERS
    for layer in range(num_layers):
        for weight in _LAYER_WEIGHTS:
            meta = f"layers.{layer}.{weight.meta}.weight"
            transformers = f"model.layers.{layer}.{weight.transformers}.weight"
            yield replace(weight, meta=meta, transformers=transformers)
    yield from _WEIGHTS_AFTER_LAYERS


def _build_result(
    model: Llama, program: Program, ranks: list[Mapping[str, Rows]], target: Pairing
) -> tuple[dict[str, int], ResultFile, dict[str, Change]]:
    """The sizes that `_Weight.shape` names, the file of the result, and its changes by name."""
    source_program: Program = "meta" if program == "transformers" else "transformers"
    weights = list(_list_weights(model.num_layers))
    source_names = {weight.meta: weight.name(source_program) for weight in weights}
    # with tied embeddings the head has no tensor, or one that transformers does not use
    if model.tied_embeddings:
        source_names["output.weight"] = source_names["tok_embeddings.weight"]
    _check_names(model, ranks[0], source_names)
    sizes = {
        "dim": model.embed_dim,
        "queries": model.num_heads * model.rope.head_dim,
        "keys": model.num_kv_heads * model.rope.head_dim,
        "hidden": len(ranks) * ranks[0][source_names["layers.0.feed_forward.w1.weight"]].shape[0],
        "vocab": len(ranks) * ranks[0][source_names["output.weight"]].shape[0],
    }
    tensors: dict[str, ResultTensor] = {}
    changes: dict[str, Change] = {}
    header_entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for weight in weights:
        name, new_name = source_names[weight.meta], weight.name(program)
        rows = [rank[name] for rank in ranks]
        shape = [sizes[word] for word in weight.shape]
        rows, axis = _join_ranks(name, rows, shape, weight)
        order = None
        if weight.role is not None:
            reordering = _reorder_rank(name, rows[0], shape[0], model.rope, target)
            changes[new_name] = Change(Projection(weight.role, None), model.rope, reordering)
            order = reordering.order
        tensor = ResultTensor(tuple(Piece(part, 0, part.shape[0], order) for part in rows), axis)
        tensors[new_name] = tensor
        offsets = [end, end + tensor.size]
        header_entries[new_name] = {"dtype": rows[0].dtype, "shape": shape, "data_offsets": offsets}
        end = offsets[1]
    header = json.dumps(header_entries).encode()
    header += b" " * (-len(header) % 8)  # readers map the data, which begins at a multiple of 8
    return sizes, ResultFile(len(header).to_bytes(8, "little") + header, tensors), changes


def _check_names(model: Llama, rank: Mapping[str, Rows], source_names: Mapping[str, str]) -> None:
    if missing := [name for name in source_names.values() if name not in rank]:
        names = {"names": list_kinds(missing), "others": list_kinds(rank)}
        raise refusal("missing", layers=model.num_layers, **names)
    expected = {*source_names.values(), *(("lm_head.weight",) if model.tied_embeddings else ())}
    unknown = [name for name in rank if name not in expected and not _FREQUENCIES.fullmatch(name)]
    if unknown:
        raise refusal("unknown", layers=model.num_layers, names=list_kinds(unknown))


def _join_ranks(
    name: str, pieces: list[Rows], shape: list[int], weight: _Weight
) -> tuple[list[Rows], int]:
    """The pieces of the ranks that make a tensor of ``shape``, and the axis that joins them."""
    first, axis = pieces[0], weight.axis
    for number, piece in enumerate(pieces):
        if (piece.dtype, piece.shape) != (first.dtype, first.shape):
            got = {"dtype": first.dtype, "shape": list(first.shape), "rank": number}
            other = {"other_dtype": piece.dtype, "other_shape": list(piece.shape)}
            raise refusal("ranks_differ", name=name, **got, **other)
    if axis is None:
        for number, piece in enumerate(pieces):
            if not np.array_equal(piece.read(0, piece.shape[0]), first.read(0, first.shape[0])):
                raise refusal("copies_differ", name=name, rank=number)
        pieces, axis = pieces[:1], 0
    elif weight in _WEIGHTS_BEFORE_LAYERS and first.shape[1:] != tuple(shape[1:]):
        axis = 1
    # ranks lie side by side on this axis
    joined_shape = list(first.shape)
    if len(joined_shape) == len(shape):
        joined_shape[axis] *= len(pieces)
    if joined_shape != shape:
        of_ranks = "" if len(pieces) == 1 else f" of {len(pieces)} ranks together"
        raise refusal("shape", name=name, shape=shape, joined=joined_shape, of_ranks=of_ranks)
    return pieces, axis


def _reorder_rank(name: str, rank: Rows, rows: int, rope: Rope, target: Pairing) -> Reorder:
    """The new order of the rows of each head of a tensor with ``rows`` rows over all ranks."""
    width = rope.head_dim
    if rank.shape[0] % width:
        raise refusal("split_heads", name=name, width=width, rows=rank.shape[0])
    # a rank holds whole heads, so the order is the same on each
    layout = HeadRows(width, (0,), rows // width)
    return reorder_heads(rope, opposite(target), target, layout, rank.row_bytes)
