"""Checkpoints for tests: safetensors files written by hand, byte by byte."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

Tensors = dict[str, tuple[str, list[int], bytes]]

DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "U8": np.uint8,
    "I8": np.int8,
    "I32": np.int32,
    "U32": np.uint32,
    "I64": np.int64,
}


def header_of(tensors: Tensors, metadata: dict[str, str] | None = None) -> dict[str, Any]:
    """What the header of a file of ``tensors`` says, one after the other."""
    said: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    at = 0
    for name, (dtype, shape, data) in tensors.items():
        said[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    return said


def in_file(header: Any, data: bytes) -> bytes:
    """A safetensors file; the header may be text that is no header."""
    text = header.encode() if isinstance(header, str) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def save(path: Path, tensors: Tensors, metadata: dict[str, str] | None = None) -> Path:
    """A file that holds ``tensors``."""
    data = b"".join(data for _, _, data in tensors.values())
    path.write_bytes(in_file(header_of(tensors, metadata), data))
    return path


def save_folder(folder: Path, config: dict[str, Any], *shards: Tensors) -> Path:
    """A model's folder, with an index when there are several shards."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if len(shards) == 1:
        save(folder / "model.safetensors", shards[0], {"format": "pt"})
        return folder
    names = [f"model-{i + 1}-of-{len(shards)}.safetensors" for i in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        save(folder / name, shard, {"format": "pt"})
    weight_map = {t: name for name, shard in zip(names, shards, strict=True) for t in shard}
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def tensor(array: Any) -> tuple[str, list[int], bytes]:
    """An array as it stands in a file."""
    array = np.asarray(array)
    dtype = next(name for name, kind in DTYPES.items() if array.dtype == kind)
    return dtype, list(array.shape), array.tobytes()


def load(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a file, found by its header's offsets."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    arrays = {}
    for name, said in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__":
            begin, end = (8 + length + offset for offset in said["data_offsets"])
            numbers = np.frombuffer(data[begin:end], DTYPES[said["dtype"]])
            arrays[name] = numbers.reshape(said["shape"])
    return arrays


def llama(**changes: Any) -> dict[str, Any]:
    """The config of a small model with 4 query heads of 8."""
    return {
        "model_type": "llama",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_theta": 100.0,
    } | changes


def llama_tensors(seed: int = 0, dtype: Any = np.float64) -> Tensors:
    """Two layers of the model of `llama`, with biases and what surrounds them."""
    rng = np.random.default_rng(seed)

    def random(*shape: int) -> tuple[str, list[int], bytes]:
        return tensor(rng.standard_normal(shape).astype(dtype))

    tensors = {"model.embed_tokens.weight": random(5, 32)}
    for layer in ("model.layers.0.self_attn.", "model.layers.1.self_attn."):
        for name, rows in (("q", 32), ("k", 16), ("v", 16)):
            tensors[f"{layer}{name}_proj.weight"] = random(rows, 32)
            tensors[f"{layer}{name}_proj.bias"] = random(rows)
        tensors[f"{layer}o_proj.weight"] = random(32, 32)
    return tensors


def two_shards(tmp_path: Path) -> Path:
    """A folder with an index and two shards."""
    tensors = llama_tensors()
    names = list(tensors)
    return save_folder(
        tmp_path / "a",
        llama(),
        {n: tensors[n] for n in names[:4]},
        {n: tensors[n] for n in names[4:]},
    )


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
