"""A GGUF file for transformers: dequantised, under its names, with a ``config.json``.

The names and the config are those of transformers 5.23; the tests compare both with its own loader
of GGUF files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from phasor.files import refusal
from phasor.files.checkpoint.conversion import (
    ConversionPlan,
    ResultFile,
    ResultTensor,
    count_kinds,
)
from phasor.files.checkpoint.model import Projection
from phasor.files.checkpoint.rows import Change, order_of_heads
from phasor.files.dialects.gguf import DIVISOR_TENSORS
from phasor.files.dialects.model_files import keys_for_file
from phasor.files.gguf_header import read_gguf_header
from phasor.files.reading import load
from phasor.files.tensors import FLOATS, Entry, Rows, read_header
from phasor.layers import LayerRopes, one_layer
from phasor.pairings import Pairing
from phasor.rope import Rope
from phasor.scaling import Llama3, PerPair

FloatType = Literal["float32", "float16", "bfloat16"]
FLOAT_TYPES: tuple[FloatType, ...] = ("float32", "float16", "bfloat16")


class _Class(NamedTuple):
    """A class of transformers: which projections have a bias, and whether heads have norms."""

    name: str
    biases: tuple[str, ...] = ()
    has_norms: bool = False


_CLASSES = {
    "llama": _Class("LlamaForCausalLM"),
    "qwen2": _Class("Qwen2ForCausalLM", biases=("attn_q", "attn_k", "attn_v")),
    "qwen3": _Class("Qwen3ForCausalLM", has_norms=True),
}
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
_HEAD = {"output": "lm_head"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
#: Keys of a model that `_config` reads, or that it can ignore.
_KNOWN_KEYS = {
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size",
    "attention.head_count", "attention.head_count_kv", "attention.key_length",
    "attention.value_length", "attention.layer_norm_rms_epsilon",
}  # fmt: skip
# the factors of Llama 3's releases; their GGUF files hold divisors instead
_RELEASED = [
    Llama3(factor=factor, low_freq_factor=1, high_freq_factor=4, original_max_positions=8192)
    for factor in (8.0, 32.0)
]


def plan_from_gguf(path: Path, dtype: FloatType) -> ConversionPlan:
    """`plan_conversion` of a GGUF file for transformers, in this float type."""
    top = read_gguf_header(path)
    ropes = load(top)
    architecture = str(top["general.architecture"])
    if (llama_class := _CLASSES.get(architecture)) is None:
        raise refusal("gguf_class", architecture=architecture, known=", ".join(_CLASSES))
    start = f"{architecture}."
    keys = {k.removeprefix(start): v for k, v in top.items() if k.startswith(start)}
    unknown = [
        key
        for key, value in keys.items()
        # a list has a number for each layer, because layers differ
        if isinstance(value, list) or not (key in _KNOWN_KEYS or key.startswith("rope."))
    ]
    if unknown:
        raise refusal("gguf_keys", path=path, keys=", ".join(unknown), class_name=llama_class.name)
    entries = {n: e for n, e in read_header(path).tensors.items() if n not in DIVISOR_TENSORS}
    names = _names(llama_class, len(ropes), has_head="output.weight" in entries)
    if names.keys() != entries.keys():
        missing = list(count_kinds(n for n in names if n not in entries))
        surplus = list(count_kinds(n for n in entries if n not in names))
        counts = {"missing": missing or "none", "unknown": surplus or "none"}
        raise refusal(
            "gguf_tensors", path=path, class_name=llama_class.name, layers=len(ropes), **counts
        )
    rope = ropes.ropes[0]
    assert rope is not None
    file, changes = _result(entries, names, rope, dtype)
    config, notes = _config(llama_class.name, keys, entries, ropes, dtype)
    return ConversionPlan(
        path=path,
        program="transformers",
        source=rope.pairing,
        target="half",
        files={"model.safetensors": file},
        other_files={"config.json": json.dumps(config, indent=2).encode() + b"\n"},
        changes=MappingProxyType(changes),
        notes=(*notes, "The tokenizer is not converted."),
    )


def _names(llama_class: _Class, num_layers: int, *, has_head: bool) -> dict[str, str]:
    """The names in transformers of the tensors of a model, by their GGUF names."""
    outer_names = _OUTSIDE | (_HEAD if has_head else {})
    layer_names = _IN_LAYER | (_NORMS if llama_class.has_norms else {})
    names = {f"{name}.weight": f"{their_name}.weight" for name, their_name in outer_names.items()}
    for i in range(num_layers):
        for name, their_name in layer_names.items():
            for suffix in ("weight", "bias") if name in llama_class.biases else ("weight",):
                names[f"blk.{i}.{name}.{suffix}"] = f"model.layers.{i}.{their_name}.{suffix}"
    return names


def _result(
    entries: Mapping[str, Entry], names: Mapping[str, str], rope: Rope, dtype: FloatType
) -> tuple[ResultFile, dict[str, Change]]:
    """The file of the result, and its changes."""
    target: Pairing = "half"
    order = order_of_heads(rope, rope.pairing, target)
    spelling = next(ours for ours, torch_dtype in FLOATS.items() if torch_dtype == dtype)
    tensors: dict[str, ResultTensor] = {}
    changes: dict[str, Change] = {}
    header_entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, entry in entries.items():
        new_name, rows = names[name], _dequantised(name, entry, dtype)
        module = name.split(".")[2] if name.startswith("blk.") else ""
        if module in ("attn_q", "attn_k") and rope.pairing != target:
            periods, remainder = divmod(rows.num_rows, rope.head_dim)
            if remainder:
                raise refusal("split_heads", name=name, width=rope.head_dim, rows=rows.num_rows)
            part = Projection("query" if module == "attn_q" else "key", None)
            changes[new_name] = Change(part, rope, (0,), order, periods, rows.num_rows)
            rows = replace(rows, order=order)
        tensors[new_name] = ResultTensor((rows,))
        offsets = [end, end := end + rows.size]
        shape = list(entry.shape)
        header_entries[new_name] = {"dtype": spelling, "shape": shape, "data_offsets": offsets}
    header = json.dumps(header_entries).encode()
    header += b" " * (-len(header) % 8)  # readers map the data, which begins at a multiple of 8
    return ResultFile(len(header).to_bytes(8, "little") + header, tensors), changes


def _dequantised(name: str, entry: Entry, dtype: FloatType) -> Rows:
    """The rows of a tensor as floats, which the gguf package computes."""
    from gguf import GGMLQuantizationType, dequantize, quantize

    kind = GGMLQuantizationType[entry.dtype]
    num_rows = entry.shape[0]
    quantised_rows = entry.rows(entry.size // num_rows)
    numbers_in_row = entry.count // num_rows

    def read(first: int, count: int) -> NDArray[np.uint8]:
        rows = quantised_rows.read(first, count)
        numbers = dequantize(rows, kind)  # [count, numbers_in_row], float32
        if dtype == "bfloat16":
            return quantize(numbers, GGMLQuantizationType.BF16).reshape(count, -1)
        if dtype == "float16":
            with np.errstate(over="ignore"):
                halves = numbers.astype("<f2")
            if np.isinf(halves).any() and not np.isinf(numbers).any():
                raise refusal("gguf_overflow", name=name)
            numbers = halves
        return np.ascontiguousarray(numbers).reshape(count, -1).view(np.uint8)

    try:
        read(0, 1)
    except NotImplementedError:
        raise refusal("gguf_kind", name=name, kind=entry.dtype) from None
    width = numbers_in_row * (4 if dtype == "float32" else 2)
    return Rows(dtype, entry.shape, num_rows, width, read)


def _config(
    class_name: str,
    keys: Mapping[str, Any],
    entries: Mapping[str, Entry],
    ropes: LayerRopes,
    dtype: FloatType,
) -> tuple[dict[str, Any], list[str]]:
    """The ``config.json`` of a class, and notes on it."""
    rope = ropes.ropes[0]
    assert rope is not None
    config: dict[str, Any] = {
        "architectures": [class_name],
        "model_type": class_name.removesuffix("ForCausalLM").lower(),
        "dtype": dtype,
        "vocab_size": entries["token_embd.weight"].shape[0],
        "hidden_size": entries["token_embd.weight"].shape[1],
        "intermediate_size": entries["blk.0.ffn_up.weight"].shape[0],
        "num_hidden_layers": len(ropes),
        "num_attention_heads": ropes.num_heads,
        "num_key_value_heads": ropes.num_kv_heads or ropes.num_heads,
        "head_dim": rope.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": keys["attention.layer_norm_rms_epsilon"],
        "tie_word_embeddings": "output.weight" not in entries,
        # the default of the class would be wrong for most models
        "bos_token_id": None,
        "eos_token_id": None,
    }
    model = replace(one_layer(_stated_law(rope)), context=ropes.context)
    context = ropes.context or 1
    file_keys = keys_for_file(model, context, context)
    return {**config, **file_keys.keys}, [file_keys.readers, "Add the tokenizer's bos and eos ids."]


def _stated_law(rope: Rope) -> Rope:
    """The rope in half pairs; with Llama 3's law if the file has its divisors."""
    rope = replace(rope, pairing="half")
    if isinstance(rope.scaling, PerPair):
        for law in _RELEASED:
            result = replace(rope, scaling=law)
            # divisors are stored in float32
            if np.allclose(result.inv_freq, rope.inv_freq, rtol=2.0**-22, atol=0):
                return result
    return rope
