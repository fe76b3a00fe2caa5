"""GGUF files in the other pairing: rows move as blocks, and the file stays GGUF."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES

from phasor import Rope
from phasor.files.checkpoint import plan_conversion, verify, write

from ..refusals import refused
from .checkpoints import contents
from .test_scores import CASES, OTHER, Heads, scores

Kind = gguf.GGMLQuantizationType
#: Every type that the package can dequantise, and plain floats.
KINDS = [Kind.F32, Kind.F16, *gguf.quants._type_traits]
Stored = Mapping[str, tuple[np.ndarray, Kind]]


def random_rows(rng: np.random.Generator, kind: Kind, rows: int, inputs: int) -> np.ndarray:
    """Rows of random blocks, those with numbers of a moderate size."""
    if kind in (Kind.F32, Kind.F16):
        return rng.standard_normal((rows, inputs)).astype(f"f{GGML_QUANT_SIZES[kind][1]}")
    block, size = GGML_QUANT_SIZES[kind]
    blocks = np.empty((0, size), np.uint8)
    while len(blocks) < rows * inputs // block:
        tried = rng.integers(0, 256, (4096, size), dtype=np.uint8)
        with np.errstate(all="ignore"):
            largest = np.abs(gguf.dequantize(tried, kind).reshape(len(tried), -1)).max(1)
        blocks = np.concatenate([blocks, tried[(largest > 1e-3) & (largest < 1e3)]])
    return blocks[: rows * inputs // block].reshape(rows, -1)


def save_gguf(path: Path, architecture: str, metadata: Mapping[str, Any], stored: Stored) -> Path:
    """A file by the package's own writer."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        name = f"{architecture}.{key}"
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)
        else:
            writer.add_uint32(name, value)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "c"])
    for name, (array, kind) in stored.items():
        writer.add_tensor(name, array, raw_dtype=None if array.dtype.kind == "f" else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def dense(path: Path) -> dict[str, np.ndarray]:
    """The numbers of a file, by the package."""
    tensors = gguf.GGUFReader(path).tensors
    return {t.name: gguf.dequantize(t.data, t.tensor_type).astype(float) for t in tensors}


SIZES = {
    "block_count": 1,
    "context_length": 64,
    "embedding_length": 256,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 8,
    "rope.dimension_count": 8,
    "rope.freq_base": 100.0,
}
#: The names in a GGUF file of those in `CASES`.
NAMES = {
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "qkv_proj": "attn_qkv",
    "q_b_proj": "attn_q_b",
    "kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "q_a_proj": "attn_q_a",
    "kv_a_layernorm": "attn_kv_a_norm",
}
# the case, its architecture and metadata
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "grouped-query heads and biases": ("qwen2", {}),
    "a part of the head": ("stablelm", {"rope.dimension_count": 4}),
    "scales of a head": ("qwen3", {}),
    "scales of all heads": ("olmo2", {}),
    "fused in blocks": ("phi3", {}),
    "gated queries": ("qwen3next", {"rope.dimension_count": 4, "full_attention_interval": 1}),
    "latent attention": (
        "deepseek2",
        {"attention.kv_lora_rank": 10, "attention.key_length": 20, "attention.head_count_kv": 4},
    ),
}


def convert(file: Path, source: str, out: Path) -> None:
    """The file in the other pairing, whatever its architecture."""
    target: Any = OTHER[source]
    write(plan_conversion(file, target, source=source), out, verified=True)  # type: ignore[arg-type]


def check_scores(
    read: Callable[..., Heads], files: tuple[Path, Path], names: Mapping[str, str], rope: Rope
) -> None:
    """Scores of heads that are read from the file stay, in its new pairing."""
    old_t, new_t = (
        {f"L.{name}": found[stored] for name, stored in names.items()}
        for found in map(dense, files)
    )
    inputs = next(array.shape[-1] for array in old_t.values() if array.ndim == 2)
    x = np.random.default_rng(1).standard_normal(max(inputs, 32))
    other = {"pairing": OTHER[rope.pairing], "pairing_out": OTHER[rope.pairing]}
    old = scores(read(old_t, x), rope)
    new = scores(read(new_t, x), Rope.from_dict(rope.to_dict() | other))
    # sums of at most 256 products of 256 terms, in another order: far below 2**-36 of their size
    np.testing.assert_allclose(new, old, rtol=0, atol=np.abs(old).max() * 2.0**-36)
    assert np.abs(scores(read(new_t, x), rope) - old).max() > np.abs(old).max() * 1e-3


@pytest.mark.parametrize("case", MODELS)
def test_scores_of_an_architecture_stay(tmp_path: Path, case: str) -> None:
    """Names, fused projections and latent attention as llama.cpp's converter writes them."""
    (read, _, shapes, rope), (architecture, more) = CASES[case], MODELS[case]
    rng = np.random.default_rng(0)
    names = {}
    for name in shapes:
        module, _, suffix = name.rpartition(".")
        names[name] = f"blk.0.{NAMES[module]}.{suffix}"
    stored = {
        "token_embd.weight": (rng.standard_normal((3, 32)).astype(np.float32), Kind.F32),
        **{
            names[name]: (rng.standard_normal(shape).astype(np.float32), Kind.F32)
            for name, shape in shapes.items()
        },
    }
    file = save_gguf(tmp_path / "a.gguf", architecture, SIZES | more, stored)
    convert(file, rope.pairing, tmp_path / "b.gguf")
    check_scores(read, (file, tmp_path / "b.gguf"), names, rope)
    convert(tmp_path / "b.gguf", OTHER[rope.pairing], tmp_path / "c.gguf")
    assert (tmp_path / "c.gguf").read_bytes() == file.read_bytes()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_rows_of_every_quantisation_move_whole(tmp_path: Path, kind: Kind) -> None:
    """What the package dequantises has its rows in the other order, and the rest is the same."""
    rng = np.random.default_rng(0)
    stored = {
        f"blk.0.attn_{name}.weight": (random_rows(rng, kind, rows, 256), kind)
        for name, rows in (("q", 32), ("k", 16), ("v", 16))
    }
    # its bytes are no multiple of the alignment, so padding follows
    stored["blk.0.attn_norm.weight"] = (np.ones(5, np.float32), Kind.F32)
    file = save_gguf(tmp_path / "a.gguf", "llama", SIZES, stored)
    convert(file, "interleaved", tmp_path / "b.gguf")
    old, new = dense(file), dense(tmp_path / "b.gguf")
    order = [8 * head + i for head in range(4) for i in (0, 2, 4, 6, 1, 3, 5, 7)]
    for name, rows in (("q", 32), ("k", 16)):
        name = f"blk.0.attn_{name}.weight"
        assert np.array_equal(new[name], old[name][order[:rows]])
    for name in ("blk.0.attn_v.weight", "blk.0.attn_norm.weight"):
        assert np.array_equal(new[name], old[name])
    names = {f"{c}_proj.weight": f"blk.0.attn_{c}.weight" for c in "qk"}

    def read(t: dict[str, np.ndarray], x: np.ndarray) -> Heads:
        queries, keys = (t[f"L.{c}_proj.weight"] @ x for c in "qk")
        return list(queries.reshape(-1, 8)), list(keys.reshape(-1, 8))

    rope = Rope(head_dim=8, pairing="interleaved", base=100.0)
    check_scores(read, (file, tmp_path / "b.gguf"), names, rope)
    convert(tmp_path / "b.gguf", "half", tmp_path / "c.gguf")
    assert (tmp_path / "c.gguf").read_bytes() == file.read_bytes()


def small_file(path: Path, architecture: str = "llama", **metadata: Any) -> Path:
    """A file of one layer."""
    rng = np.random.default_rng(0)
    stored = {
        f"blk.0.attn_{name}.weight": (random_rows(rng, Kind.Q4_K, rows, 256), Kind.Q4_K)
        for name, rows in (("q", 32), ("k", 16), ("v", 16))
    }
    return save_gguf(path, architecture, SIZES | metadata, stored)


def test_a_pairing_that_the_architecture_does_not_have_is_refused_unless_stated(
    tmp_path: Path,
) -> None:
    """Every program that reads the file takes the pairing from its architecture."""
    file = small_file(tmp_path / "a.gguf")
    before = contents(tmp_path)
    with refused("gguf_pairing", target="half", source="interleaved"):
        plan_conversion(file, "half")
    with refused("same_pairing"):
        plan_conversion(file, "interleaved")
    # a config of transformers has another pairing than the file
    rope = Rope(head_dim=8, pairing="half", base=100.0)
    for target in ("half", "interleaved"):
        with refused("gguf_pairing"):
            plan_conversion(file, target, model=rope)  # type: ignore[arg-type]
    assert contents(tmp_path) == before
    notes = plan_conversion(file, "half", source="interleaved").notes
    assert "rotates half pairs" in notes[-1]


def test_rows_that_are_in_the_wrong_order_are_mended(tmp_path: Path) -> None:
    """Halves under an architecture that means interleaved pairs."""
    file = small_file(tmp_path / "a.gguf")
    plan = plan_conversion(file, "interleaved", source="half")
    assert "as here" in plan.notes[-1]
    write(plan, tmp_path / "b.gguf")
    verify(plan, tmp_path / "b.gguf")


def test_verify_finds_one_wrong_byte_anywhere(tmp_path: Path) -> None:
    """In the header, in a block, and in the padding between tensors."""
    file = small_file(tmp_path / "a.gguf")
    plan = plan_conversion(file, "half", source="interleaved")
    write(plan, tmp_path / "b.gguf")
    good = (tmp_path / "b.gguf").read_bytes()
    for at in range(8, len(good), 97):
        spoiled = bytearray(good)
        spoiled[at] ^= 1
        (tmp_path / "b.gguf").write_bytes(spoiled)
        with pytest.raises(Exception, match=r"b\.gguf"):
            verify(plan, tmp_path / "b.gguf")


def test_files_that_are_no_whole_model_are_refused(tmp_path: Path) -> None:
    """A part of a model, a folder, a file that was cut."""
    part = tmp_path / "part.gguf"
    writer = gguf.GGUFWriter(part, "llama")
    writer.add_uint16("split.count", 2)
    writer.add_tensor("blk.0.attn_q.weight", np.ones((8, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with refused("gguf_split"):
        plan_conversion(part, "half", source="interleaved")
    with refused("no_weights", hint="pass the GGUF file"):
        plan_conversion(tmp_path, "half", source="interleaved")
    whole = small_file(tmp_path / "whole.gguf").read_bytes()
    for size in (4, 30, len(whole) // 2, len(whole) - 40):
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        with refused("gguf_damaged"):
            plan_conversion(tmp_path / "cut.gguf", "half", source="interleaved")
