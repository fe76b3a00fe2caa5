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
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from phasor.errors import install_hint
from phasor.files import refusal
from phasor.files.checkpoint.conversion import (
    ConversionPlan,
    Program,
    ResultFile,
    ResultTensor,
    list_kinds,
)
from phasor.files.checkpoint.model import Projection
from phasor.files.checkpoint.rows import Change, order_of_heads
from phasor.files.configs.source import read_source
from phasor.files.dialects.blocks import CONTEXT_KEY
from phasor.files.dialects.model_files import keys_for_file
from phasor.files.reading import load
from phasor.files.tensors import FLOATS, Rows, open_checkpoint
from phasor.layers import one_layer
from phasor.pairings import Pairing, opposite
from phasor.rope import Rope
from phasor.scaling import Llama3

if TYPE_CHECKING:
    import torch

_CONFIGS = {"transformers": "config.json", "meta": "params.json"}
_WEIGHTS = {"transformers": "model.safetensors", "meta": "consolidated.safetensors"}
_PAIRINGS: dict[Program, Pairing] = {"transformers": "half", "meta": "interleaved"}
_KNOWN_PARAMS = {
    "dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "hidden_dim", "vocab_size",
    "multiple_of", "ffn_dim_multiplier", "norm_eps", "rope_theta", "use_scaled_rope",
    "rope_scaling_factor", "rope_high_freq_factor", "max_seq_len", "max_batch_size",
}  # fmt: skip
_SCALED_CONTEXT = (
    131_072  # the numbers of every release with use_scaled_rope: Llama 3.1, 3.2 and 3.3
)


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
    tied_embeddings: bool
    notes: tuple[str, ...]


def read_llama(path: Path, program: Program) -> Llama:
    """Read the config of ``program``; refuse values that the other program cannot have."""
    if not path.is_file():
        raise refusal("no_sizes", path=path)
    config = read_source(path)
    if program == "meta":
        dim, heads, norm, usual_eps = "dim", "n_heads", "norm_eps", 1e-5
        if unknown := sorted(k for k, v in config.values.items() if k not in _KNOWN_PARAMS and v):
            raise refusal("params", path=path, keys=", ".join(unknown))
    else:
        dim, heads, norm, usual_eps = "hidden_size", "num_attention_heads", "rms_norm_eps", 1e-6
        for key, words in (("model_type", ("llama",)), ("hidden_act", ("silu", None))):
            if config.text(key) not in words:
                config.refuse(key, f"{words[0]}, the one that Meta's code computes")
    ropes = load(path)
    rope, law = ropes.ropes[0], ropes.ropes[0].scaling
    num_heads = config.require(heads, ropes.num_heads)
    embed_dim = config.require(dim, config.whole(dim))
    if program == "transformers":
        if rope.head_dim * num_heads != embed_dim:
            sizes = {"embed_dim": embed_dim, "num_heads": num_heads}
            raise refusal("widths", head_dim=rope.head_dim, **sizes)
        is_metas = law is None or (
            isinstance(law, Llama3)
            and (law.low_freq_factor, law.original_max_positions) == (1, 8192)
        )
        if rope.rotary_dim != rope.head_dim or not is_metas:
            widths = {"rotary_dim": rope.rotary_dim, "head_dim": rope.head_dim}
            raise refusal("law", law=law, **widths)
    scaled_context = _SCALED_CONTEXT if isinstance(law, Llama3) else None
    return Llama(
        rope=replace(rope, pairing="half"),
        num_layers=len(ropes),
        embed_dim=embed_dim,
        num_heads=num_heads,
        num_kv_heads=ropes.num_kv_heads or num_heads,
        norm_eps=config.number(norm, above=0) or usual_eps,
        context=ropes.context or scaled_context,
        tied_embeddings=config.flag("tie_word_embeddings") or False,
        notes=ropes.notes,
    )


def config_json(model: Llama, sizes: Mapping[str, int]) -> tuple[dict[str, Any], list[str]]:
    """The ``config.json`` of transformers, and notes on it."""
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
        # the class's defaults, 1 and 2, would be wrong for Llama 3
        "bos_token_id": None,
        "eos_token_id": None,
    }
    ropes = replace(one_layer(model.rope), context=model.context)
    file_keys = keys_for_file(ropes, model.context or 1, model.context or 1)
    config |= file_keys.keys
    notes = [file_keys.readers, "Add the tokenizer's bos and eos ids."]
    if model.context is None:
        del config[CONTEXT_KEY]
        notes.append("params.json does not state the context: add max_position_embeddings.")
    return config, notes


def params_json(model: Llama, sizes: Mapping[str, int]) -> tuple[dict[str, Any], list[str]]:
    """Meta's ``params.json``, and notes on it."""
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


class _Weight(NamedTuple):
    """A weight of a Llama, by each program's name of its module.

    Ranks divide it on ``axis``; every one has the whole if that is None.
    """

    meta: str
    transformers: str
    shape: tuple[str, ...]
    axis: int | None
    role: Literal["query", "key"] | None = None  # the names of tensors with pairs


# in the order of Meta's files; all but the first and the last two are repeated in each layer
_LLAMAS_WEIGHTS = (
    # Llama 2 divides it on axis 1, which its shape shows
    _Weight("tok_embeddings", "model.embed_tokens", ("vocab", "dim"), 0),
    _Weight("attention_norm", "input_layernorm", ("dim",), None),
    _Weight("attention.wq", "self_attn.q_proj", ("queries", "dim"), 0, "query"),
    _Weight("attention.wk", "self_attn.k_proj", ("keys", "dim"), 0, "key"),
    _Weight("attention.wv", "self_attn.v_proj", ("keys", "dim"), 0),
    _Weight("attention.wo", "self_attn.o_proj", ("dim", "queries"), 1),
    _Weight("ffn_norm", "post_attention_layernorm", ("dim",), None),
    _Weight("feed_forward.w1", "mlp.gate_proj", ("hidden", "dim"), 0),
    _Weight("feed_forward.w2", "mlp.down_proj", ("dim", "hidden"), 1),
    _Weight("feed_forward.w3", "mlp.up_proj", ("hidden", "dim"), 0),
    _Weight("norm", "model.norm", ("dim",), None),
    _Weight("output", "lm_head", ("vocab", "dim"), 0),
)
# tables of frequencies that old files store with the weights
_FREQUENCIES = re.compile(r"rope\.freqs|model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
_DTYPES = {f"torch.{theirs}": ours for ours, theirs in FLOATS.items()}


def _list_weights(num_layers: int) -> Iterator[_Weight]:
    """Every weight of a Llama, with the full names of its tensors."""
    first, *layer_weights, norm, output = _LLAMAS_WEIGHTS
    prefixes = [(f"layers.{i}.", f"model.layers.{i}.") for i in range(num_layers)]
    layers = [(weight, *prefix) for prefix in prefixes for weight in layer_weights]
    for weight, meta, their_name in [(first, "", ""), *layers, (norm, "", ""), (output, "", "")]:
        names = {"meta": meta + weight.meta, "transformers": their_name + weight.transformers}
        yield weight._replace(**{program: f"{name}.weight" for program, name in names.items()})


def plan_program(folder: Path, program: Program) -> ConversionPlan:
    """`plan_conversion` of a folder for another program."""
    if not folder.is_dir():
        raise refusal("no_folder", path=folder)
    source: Program = "meta" if program == "transformers" else "transformers"
    model = read_llama(folder / _CONFIGS[source], source)
    ranks = _open_consolidated(folder) if source == "meta" else [_open_safetensors(folder)]
    sizes, file, changes = _build_result(model, program, ranks)
    config, notes = (config_json if program == "transformers" else params_json)(model, sizes)
    if program == "transformers":
        config["dtype"] = FLOATS[next(iter(file.tensors.values())).pieces[0].dtype]
    return ConversionPlan(
        path=folder,
        program=program,
        ranks=len(ranks),
        source=opposite(_PAIRINGS[program]),
        target=_PAIRINGS[program],
        files={_WEIGHTS[program]: file},
        other_files={_CONFIGS[program]: (json.dumps(config, indent=2) + "\n").encode()},
        changes=MappingProxyType(changes),
        notes=(*model.notes, *notes, "The tokenizer is not converted."),
    )


def _open_consolidated(folder: Path) -> list[dict[str, Rows]]:
    """The tensors of each rank in Meta's folder."""
    # consolidated.00.pth and so on, one for each rank of the training
    files_by_rank = {
        int(match[1]): path
        for path in folder.iterdir()
        if (match := re.fullmatch(r"consolidated\.(\d\d)\.pth", path.name))
    }
    single = folder / _WEIGHTS["meta"]
    if single.exists() == bool(files_by_rank):
        raise refusal("consolidated", folder=folder, found="both" if files_by_rank else "neither")
    if not files_by_rank:
        return [_open_safetensors(single)]
    if missing := sorted({*range(max(files_by_rank))} - files_by_rank.keys()):
        last = files_by_rank[max(files_by_rank)].name
        raise refusal("rank_missing", folder=folder, last=last, missing=missing[0])
    ranks = [_open_pth(files_by_rank[rank]) for rank in sorted(files_by_rank)]
    for number, rank in enumerate(ranks):
        if differing := sorted(set(rank) ^ set(ranks[0])):
            pair = {"first": files_by_rank[0].name, "other": files_by_rank[number].name}
            raise refusal("rank_names", folder=folder, names=list_kinds(differing), **pair)
    return ranks


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
    except Exception as error:  # torch passes on any error of its unpickler and its zip reader
        first_line = str(error).strip().partition("\n")[0]
        raise refusal("pickle", path=path, error=first_line) from None
    if not isinstance(state, dict) or not state:
        kind = "an empty one" if isinstance(state, dict) else f"a {type(state).__name__}"
        raise refusal("no_tensors", path=path, kind=kind)
    rows_by_name: dict[str, Rows] = {}
    for name, tensor in cast(dict[Any, object], state).items():
        if not isinstance(tensor, torch.Tensor):
            raise refusal("no_tensor", path=path, name=str(name), kind=type(tensor))
        dtype = _DTYPES.get(str(tensor.dtype))
        if dtype is None or not tensor.ndim or not tensor.numel() or tensor.layout != torch.strided:
            got = {"dtype": tensor.dtype, "shape": list(tensor.shape)}
            dtypes = ", ".join(FLOATS.values())
            raise refusal("dense", path=path, name=str(name), dtypes=dtypes, **got)
        rows_by_name[str(name)] = _rows_of_tensor(tensor, dtype)
    return rows_by_name


def _rows_of_tensor(tensor: torch.Tensor, dtype: str) -> Rows:
    import torch

    row_bytes = tensor.element_size() * tensor[:1].numel()

    def read(first: int, count: int) -> NDArray[np.uint8]:
        # contiguous before the view as bytes, which copies these rows at most
        rows = tensor[first : first + count].contiguous()
        return rows.view(torch.uint8).reshape(count, row_bytes).numpy()

    return Rows(dtype, tuple(tensor.shape), len(tensor), row_bytes, read)


def _open_safetensors(path: Path) -> dict[str, Rows]:
    """The tensors of a safetensors file, or of a folder with one or with an index."""
    rows_by_name: dict[str, Rows] = {}
    for header in open_checkpoint(path).files.values():
        for name, entry in header.tensors.items():
            if entry.dtype not in FLOATS or not entry.shape or not entry.count:
                got = {"dtype": entry.dtype, "shape": list(entry.shape)}
                raise refusal("floats", name=name, dtypes=", ".join(FLOATS), **got)
            rows_by_name[name] = entry.rows(entry.size // entry.shape[0])
    return rows_by_name


def _build_result(
    model: Llama, program: Program, ranks: list[dict[str, Rows]]
) -> tuple[dict[str, int], ResultFile, dict[str, Change]]:
    """The sizes that `_Weight.shape` names, the file of the result, and its changes."""
    weights = list(_list_weights(model.num_layers))
    source_names = {
        entry.meta: entry.meta if program == "transformers" else entry.transformers
        for entry in weights
    }
    # with tied embeddings the head has no tensor, or one that transformers does not use
    if model.tied_embeddings:
        source_names["output.weight"] = source_names["tok_embeddings.weight"]
    rank = ranks[0]
    if missing := [name for name in source_names.values() if name not in rank]:
        names = {"names": list_kinds(missing), "others": list_kinds(rank)}
        raise refusal("missing", layers=model.num_layers, **names)
    weight_names = {*source_names.values(), *(("lm_head.weight",) if model.tied_embeddings else ())}
    unknown = [
        name for name in rank if name not in weight_names and not _FREQUENCIES.fullmatch(name)
    ]
    if unknown:
        raise refusal("unknown", layers=model.num_layers, names=list_kinds(unknown))
    num_rows = {entry: len(ranks) * rank[name].num_rows for entry, name in source_names.items()}
    width, target = model.rope.head_dim, _PAIRINGS[program]
    sizes = {
        "dim": model.embed_dim,
        "queries": model.num_heads * width,
        "keys": model.num_kv_heads * width,
        "hidden": num_rows["layers.0.feed_forward.w1.weight"],
        "vocab": num_rows["output.weight"],
    }
    # a rank holds whole heads, so the order is the same on each
    order = order_of_heads(model.rope, opposite(target), target)
    tensors: dict[str, ResultTensor] = {}
    changes: dict[str, Change] = {}
    header_entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for weight in weights:
        name, new_name = source_names[weight.meta], cast(str, getattr(weight, program))
        shape = [sizes[word] for word in weight.shape]
        rows, axis = _join_ranks(name, [rank[name] for rank in ranks], shape, weight)
        if weight.role is not None:
            if rows[0].num_rows % width:
                raise refusal("split_heads", name=name, width=width, rows=rows[0].num_rows)
            part, periods = Projection(weight.role, None), shape[0] // width
            changes[new_name] = Change(part, model.rope, (0,), order, periods, shape[0])
            rows = [replace(piece, order=order) for piece in rows]
        tensors[new_name] = ResultTensor(tuple(rows), axis)
        offsets = [end, end := end + tensors[new_name].size]
        header_entries[new_name] = {"dtype": rows[0].dtype, "shape": shape, "data_offsets": offsets}
    header = json.dumps(header_entries).encode()
    header += b" " * (-len(header) % 8)  # readers map the data, which begins at a multiple of 8
    file = ResultFile(len(header).to_bytes(8, "little") + header, tensors)
    return sizes, file, changes


def _join_ranks(
    name: str, rows: list[Rows], shape: list[int], weight: _Weight
) -> tuple[list[Rows], int]:
    """The rows of the ranks that make a tensor of ``shape``, and the axis that joins them."""
    first, axis = rows[0], weight.axis
    for number, piece in enumerate(rows):
        if (piece.dtype, piece.shape) != (first.dtype, first.shape):
            got = {"dtype": first.dtype, "shape": list(first.shape), "rank": number}
            difference = {"other_dtype": piece.dtype, "other_shape": list(piece.shape)}
            raise refusal("ranks_differ", name=name, **got, **difference)
    if axis is None:
        copies = [part.read(0, part.num_rows) for part in rows]
        for number, copy in enumerate(copies):
            if not np.array_equal(copy, copies[0]):
                raise refusal("copies_differ", name=name, rank=number)
        rows, axis = rows[:1], 0
    elif weight.meta == "tok_embeddings.weight" and first.shape[1:] != tuple(shape[1:]):
        axis = 1
    # ranks lie side by side on this axis
    joined_shape = list(first.shape)
    if len(joined_shape) == len(shape):
        joined_shape[axis] *= len(rows)
    if joined_shape != shape:
        ranks_text = "" if len(rows) == 1 else f" of {len(rows)} ranks together"
        raise refusal("shape", name=name, shape=shape, joined=joined_shape, of_ranks=ranks_text)
    return rows, axis
