"""Where a config may come from, and which part of it is meant."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from phasor.axes import InterleavedSections
from phasor.files.configs.facts import table
from phasor.files.reading import load
from phasor.scaling import Llama3, PerPair

from ..refusals import refused
from .config_files import small


def test_a_byte_order_mark_is_no_reason_to_refuse(tmp_path: Path) -> None:
    """Some editors of Windows write one."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(small()), "utf-8-sig")
    assert load(path) == load(small())


def test_a_dash_is_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for other programs."""
    text = json.dumps(small()).encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    assert load("-") == load(small())


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    """Nobody may ever write into it."""
    os.mkfifo(tmp_path / "config.json")
    with refused("not_file"):
        load(tmp_path / "config.json")


def test_a_live_config_of_transformers_is_read_as_its_file() -> None:
    """Whole, or the language model's inside a larger one."""
    from transformers import LlamaConfig, Qwen2VLConfig

    live = LlamaConfig(
        hidden_size=512,
        num_attention_heads=4,
        num_hidden_layers=4,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )
    assert load(live).ropes == load(small()).ropes
    assert load(Qwen2VLConfig()).ropes == load(Qwen2VLConfig().to_dict()).ropes


@pytest.mark.parametrize(
    "key", ["text_config", "llm_config", "language_config", "language", "decoder_config", "decoder"]
)
def test_an_inner_config_is_found_under_the_keys_that_files_have(key: str) -> None:
    """The model type of the whole need not be known."""
    assert load({"model_type": "whole", key: small()}) == load(small())


def test_a_part_is_read_by_its_key() -> None:
    """Dotted where it lies deeper; its type is its own, or what the whole has there."""
    tower = {"depth": 32, "embed_dim": 1280, "num_heads": 16, "hidden_size": 3584}
    config = small("qwen2_vl", vision_config=tower | {"model_type": "qwen2_vl"})
    ropes = load(config, part="vision_config")
    assert (len(ropes), ropes.num_heads, ropes.in_config.path) == (32, 16, "vision_config")
    rope = ropes[0]
    assert rope is not None
    assert (rope.head_dim, rope.pairing, rope.axes.axis_of_pair(40)) == (
        80,
        "half",
        (0,) * 20 + (1,) * 20,
    )
    assert load({"model_type": "whole", "inner": config}, part="inner.vision_config") == ropes
    with refused("part", part="tower"):
        load(config, part="tower")


def test_towers_that_deal_or_split_one_spectrum_keep_their_frequencies() -> None:
    """Kimi's pairs take turns, Pixtral's rows and columns have every other frequency."""
    size = {"hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 2}
    kimi = load({"model_type": "kimi_k25_vision"} | size)[0]
    pixtral = load({"model_type": "pixtral"} | size)[0]
    assert kimi is not None
    assert pixtral is not None
    assert kimi.axes == InterleavedSections((16, 16))
    pairs = np.arange(32)
    assert np.allclose(kimi.explicit_inv_freq or (), 1e4 ** -(pairs // 2 / 16), rtol=1e-15)
    order = np.concatenate([pairs[::2], pairs[1::2]])
    assert np.allclose(pixtral.explicit_inv_freq or (), 1e4 ** -(order / 32), rtol=1e-15)


_TOWER = {"model_type": "sam3_vit_model", "hidden_size": 64, "num_attention_heads": 4,
          "num_hidden_layers": 2}  # fmt: skip


def test_axial_is_how_transformers_5_says_that_a_tower_has_no_law() -> None:
    """And no law of text that a tower could have; a model of text has no such word."""
    block = {"rope_type": "axial", "rope_theta": 500.0}
    for keys in ({"rope_parameters": block}, {"rope_parameters": block, "rope_scaling": block}):
        assert load(_TOWER | keys) == load(_TOWER | {"rope_theta": 500.0})
    with refused("value", key="rope_parameters.rope_type", got="axial"):
        load(small(rope_parameters=block))
    with refused("law_of_patches"):
        load(_TOWER | {"rope_parameters": {"rope_type": "linear", "factor": 2.0}})


def test_the_memory_of_a_video_tracker_has_keys_of_its_own() -> None:
    """The base under its first name; heads narrower than the config's sizes are refused."""
    tracker = {
        "model_type": "sam2_video", "memory_attention_hidden_size": 128,
        "memory_attention_num_attention_heads": 2, "memory_attention_num_layers": 3,
        "memory_attention_rope_theta": 5000.0,
    }  # fmt: skip
    ropes = load(tracker)
    assert ropes[0] is not None
    assert (len(ropes), ropes[0].head_dim, ropes[0].base) == (3, 64, 5000.0)
    with refused("type_unread: memory_attention_downsample_rate"):
        load(tracker | {"memory_attention_downsample_rate": 2})


def gguf(path: Path, divisors: np.ndarray | None) -> Path:
    """A GGUF file of a small Llama, with a vocabulary and a weight."""
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(131072)
    writer.add_embedding_length(256)
    writer.add_head_count(2)
    writer.add_rope_dimension_count(128)
    writer.add_rope_freq_base(500000.0)
    writer.add_token_list([f"token {i}" for i in range(100)])
    writer.add_tensor("token_embd.weight", np.ones((100, 256), np.float16))
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", divisors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_is_read_from_its_header(tmp_path: Path) -> None:
    """Divisors of frequencies are a tensor there, and become the rope's."""
    plain = load(gguf(tmp_path / "plain.gguf", None))[0]
    assert plain is not None
    assert (plain.pairing, plain.base, plain.scaling) == ("interleaved", 500000.0, None)
    law = Llama3(factor=8.0, original_max_positions=8192)
    divisors = np.linspace(1, 8, 64, dtype=np.float32)
    scaled = load(gguf(tmp_path / "scaled.gguf", divisors))[0]
    assert scaled is not None
    assert scaled.scaling == PerPair(factors=tuple(map(float, divisors)))
    assert law != scaled.scaling


def test_a_damaged_gguf_file_is_refused(tmp_path: Path) -> None:
    """Cut anywhere in its header."""
    whole = gguf(tmp_path / "whole.gguf", None).read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in (4, 20, 100, 400):
        cut.write_bytes(whole[:length])
        with refused("gguf_damaged"):
            load(cut)


def test_a_pipelines_folder_is_read_through_its_transformer(tmp_path: Path) -> None:
    """Where diffusers keeps it."""
    config = {"_class_name": "FluxTransformer2DModel", "num_layers": 19, "num_single_layers": 38}
    (tmp_path / "transformer").mkdir()
    (tmp_path / "model_index.json").write_text('{"_class_name": "FluxPipeline"}', "utf-8")
    (tmp_path / "transformer" / "config.json").write_text(json.dumps(config), "utf-8")
    assert len(load(tmp_path)) == 57
    with refused("value: transformer/config.json", key="_class_name"):
        load(tmp_path / "model_index.json")


def test_printing_ropes_takes_a_few_lines() -> None:
    """However many layers there are."""
    assert str(load(small(num_hidden_layers=61))).splitlines() == [
        "llama: 61 layers, 4 query heads, 8192 positions",
        "  rope (61 layers): half pairs, 128 coordinates, base 500000",
    ]


@pytest.mark.slow
def test_no_type_of_transformers_is_missing() -> None:
    """Each of its config classes rotates, holds parts, or is answered with what it has instead."""
    from .class_sizes import config_classes

    known = table().huggingface
    assert sorted(name for name in config_classes() if name not in known) == []


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("name", ["a.json", "a.yaml"])
def test_a_file_in_utf_16_is_called_that(encoding: str, name: str, tmp_path: Path) -> None:
    """PowerShell writes it, with a mark at its beginning."""
    path, text = tmp_path / name, json.dumps({"model_type": "llama"})
    path.write_bytes((text if encoding == "utf-16" else f"\ufeff{text}").encode(encoding))
    with refused("utf16"):
        load(path)
