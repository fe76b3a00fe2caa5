"""What a conversion takes for the queries and keys of each layer, and what its plan says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phasor.files.checkpoint import Patterns, plan_conversion
from phasor.files.checkpoint.model import find_projection

from ..refusals import refused
from .checkpoints import Tensors, llama, llama_tensors, save, save_folder, tensor

LATENT = {"model_type": "deepseek_v3", "qk_rope_head_dim": 8, "qk_nope_head_dim": 12}


def latent_layer(layer: int) -> Tensors:
    """Queries of 20 rows a head, and a key of 8 after a latent vector of 10."""
    name = f"model.layers.{layer}.self_attn."
    return {
        f"{name}q_b_proj.weight": tensor(np.zeros((80, 6))),
        f"{name}kv_a_proj_with_mqa.weight": tensor(np.zeros((18, 32))),
    }


def test_layers_without_rotation_keep_every_byte(tmp_path: Path) -> None:
    """There is nothing to re-pair where nothing turns."""
    config = llama(model_type="smollm3", no_rope_layers=[1, 0])
    folder = save_folder(tmp_path / "a", config, llama_tensors())
    assert {name.split(".")[2] for name in plan_conversion(folder, "interleaved").changes} == {"0"}


def test_towers_for_pictures_are_left_alone_and_named(tmp_path: Path) -> None:
    """Their heads and their rotation are other ones."""
    tower = "vision_tower.encoder.layers.0.self_attn.q_proj.weight"
    tensors = llama_tensors() | {tower: tensor(np.zeros((6, 6)))}
    config = {"model_type": "llava", "text_config": llama()}
    found = plan_conversion(save_folder(tmp_path / "a", config, tensors), "interleaved")
    assert tower not in found.changes
    assert dict(found.unchanged_lookalikes) == {
        "vision_tower.encoder.layers.*.self_attn.q_proj.weight": 1
    }


def test_layers_for_several_tokens_take_the_one_rope(tmp_path: Path) -> None:
    """DeepSeek's stand after the layers that the config counts."""
    tensors = latent_layer(0) | latent_layer(1)
    config = llama(num_hidden_layers=1) | LATENT
    found = plan_conversion(save_folder(tmp_path / "a", config, tensors), "half")
    assert sorted(name.split(".")[2] for name in found.changes) == ["0", "0", "1", "1"]


OWN_FILES: dict[str, tuple[dict[str, Any], dict[str, tuple[int, int]], list[str]]] = {
    "Meta's": (
        {
            "dim": 32,
            "n_layers": 1,
            "n_heads": 4,
            "n_kv_heads": 2,
            "hidden_dim": 88,
            "rope_theta": 100.0,
        },
        {"attention.wq": (32, 32), "attention.wk": (16, 32), "attention.wv": (16, 32)},
        ["wq", "wk"],
    ),
    "DeepSeek's": (
        {"dim": 32, "n_layers": 1, "n_heads": 4, "inter_dim": 8, "qk_rope_head_dim": 8},
        {"attn.wq_b": (80, 6), "attn.wkv_a": (18, 32), "attn.wkv_b": (24, 10)},
        ["wq_b", "wkv_a"],
    ),
}


@pytest.mark.parametrize("author", OWN_FILES)
def test_files_of_a_models_authors_are_interleaved(tmp_path: Path, author: str) -> None:
    """Their configs say so by their form, and their tensors have other names."""
    config, shapes, changed = OWN_FILES[author]
    tensors = {f"layers.0.{name}.weight": tensor(np.zeros(s)) for name, s in shapes.items()}
    found = plan_conversion(save(tmp_path / "a.safetensors", tensors), "half", model=config)
    assert found.source == "interleaved"
    assert [name.split(".")[3] for name in found.changes] == changed


def test_a_module_for_several_tokens_counts_its_layers_anew(tmp_path: Path) -> None:
    """Qwen3-Next's layer 0 does not rotate; the layer 0 of its other module does."""
    config = llama(model_type="qwen3_next", layer_types=["linear_attention", "full_attention"])
    config |= {"head_dim": 8, "partial_rotary_factor": 0.5}
    kept = {n: t for n, t in llama_tensors().items() if ".1.self_attn" in n}
    extra = {n.replace("model.layers.1", "mtp.layers.0"): t for n, t in kept.items()}
    found = plan_conversion(save_folder(tmp_path / "a", config, kept | extra), "interleaved")
    assert {name.split(".self_attn")[0] for name in found.changes} == {
        "model.layers.1",
        "mtp.layers.0",
    }


def test_a_layer_beyond_the_config_is_refused_where_ropes_differ(tmp_path: Path) -> None:
    """Which of the ropes turns it is not known."""
    config = llama(model_type="gemma3_text", head_dim=8, rope_local_base_freq=10.0)
    config |= {"layer_types": ["full_attention", "sliding_attention"]}
    tensors = llama_tensors()
    assert plan_conversion(save_folder(tmp_path / "a", config, tensors), "interleaved").changes
    beyond = {n.replace("layers.1", "layers.2"): t for n, t in tensors.items()}
    with refused("other_layer", count=2):
        plan_conversion(save_folder(tmp_path / "b", config, beyond), "interleaved")


NAMES = {
    "model.layers.0.self_attn.q_proj.weight": "query",  # Llama and most others
    "language_model.model.layers.0.self_attn.k_proj.bias": "key",
    "base_model.model.model.layers.0.self_attn.q_proj.lora_B.default.weight": "query",
    "backbone_model.layers.0.self_attn.q_proj.weight": "query",  # CSM
    "model.layers.0.self_attn.q_proj.linear.weight": "query",  # Moshi
    "transformer.h.0.attn.attention.k_proj.weight": "key",  # EXAONE
    "transformer.h.0.attn.q_proj.weight": "query",  # GPT-J
    "roformer.encoder.layer.0.attention.self.key.weight": "key",
    "layers.0.attention.wq.weight": "query",  # Meta's and Mistral's own files
    "layers.0.attention.wkv_a_with_mqa.weight": "latent key",  # Mistral's own files
    "layers.0.attn.wq_b.weight": "query",  # DeepSeek's own files
    "layers.0.attn.wkv_a.weight": "latent key",
    "model.layers.0.self_attn.1.kv_a_proj_with_mqa.weight": "latent key",  # LongCat
    "transformer.encoder.layers.0.self_attention.query_key_value.weight": "fused",  # ChatGLM
    "encoder.layers.0.attn.Wqkv.weight": "fused",  # Nomic
    "model.layers.0.self_attn.key_layernorm.weight": "vectors",  # Hunyuan
    "mtp.layers.0.self_attn.q_norm.weight": "vectors",  # Qwen3-Next
    "model.layers.0.self_attn.indexer.wq_b.weight": "query",  # DeepSeek V3.2
    "model.layers.0.self_attn.indexer.wk.weight": "key",
    "model.layers.0.self_attn.indexer.k_norm.bias": "vectors",
    "model.layers.0.self_attn.indexer.weights_proj.weight": None,
    "layers.0.attn.indexer.compressor.ape": "vectors",  # DeepSeek V4's own files
    "layers.0.attn.compressor.wgate.weight": "shared",
    "mtp.0.attn.wq_b.weight": "query",
    "model.layers.0.self_attn.index_q_proj.weight": "query",  # MiniMax M3
    "model.layers.0.self_attn.kv_proj.weight": None,
    "layers.0.attn_norm.weight": None,
    "model.layers.0.self_attn.v_proj.weight": None,
    "model.layers.0.self_attn.q_a_proj.weight": None,
    "model.layers.0.self_attn.kv_a_layernorm.weight": None,
    "model.layers.0.self_attn.kv_b_proj.weight": None,
    "model.layers.0.cross_attn.q_proj.weight": None,
    "model.layers.0.linear_attn.q_proj.weight": None,
    "model.layers.0.self_attn.q_proj_like.weight": None,
    "model.vision_tower.encoder.layers.0.self_attn.q_proj.weight": None,
    "visual.blocks.0.attn.qkv.weight": None,
    "depth_decoder.model.layers.0.self_attn.q_proj.weight": None,
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_says_what_a_tensor_is(name: str) -> None:
    """By the names that model classes and their authors' files use."""
    part = find_projection(name)
    assert (None if part is None else part.role) == NAMES[name]


@pytest.mark.parametrize(
    ("config", "target", "last"),
    [
        (llama(), "interleaved", "means half pairing and cannot state another"),
        (llama() | LATENT, "half", "must say rope_interleave: false."),
    ],
    ids=["no word", "a switch"],
)
def test_the_plan_says_what_the_config_would_get_wrong(
    tmp_path: Path, config: dict[str, Any], target: Any, last: str
) -> None:
    """The result's pairing is stated, and what a config can or cannot say about it."""
    tensors = latent_layer(0) if "qk_rope_head_dim" in config else llama_tensors()
    folder = save_folder(tmp_path / "a", config, tensors)
    notes = plan_conversion(folder, target).notes
    assert notes[0] == f"The result is in {target} pairing."
    assert last in notes[-1]


@pytest.mark.parametrize("matched", ["q", "[qk]"])
def test_patterns_that_leave_queries_or_keys_do_not_make_a_whole(
    tmp_path: Path, matched: str
) -> None:
    """The result has a pairing where both were matched, and is not said to have one otherwise."""
    folder = save_folder(tmp_path / "a", llama(), llama_tensors())
    patterns = Patterns(query=(rf".*{matched}_proj\.(weight|bias)",))
    found = plan_conversion(folder, "interleaved", patterns=patterns)
    half_done = matched == "q"
    assert bool(found.unchanged_lookalikes) is half_done
    assert ("The result is in interleaved pairing." in found.notes) is not half_done
    assert ("Only the tensors that the patterns" in found.notes[0]) is half_done


@pytest.mark.parametrize("shared", [1, 0])
def test_a_layer_may_use_the_keys_of_an_earlier_one(tmp_path: Path, shared: int) -> None:
    """Gemma 3n's last layers have queries alone, as its config says, and then only."""
    config = llama(
        model_type="gemma3n_text",
        head_dim=8,
        num_kv_shared_layers=shared,
        layer_types=["full_attention", "full_attention"],
    )
    tensors = {
        name: one
        for name, one in llama_tensors().items()
        if not name.startswith(("model.layers.1.self_attn.k", "model.layers.1.self_attn.v"))
    }
    folder = save_folder(tmp_path / "a", config, tensors)
    if shared:
        changes = plan_conversion(folder, "interleaved").changes
        assert [name for name in changes if "layers.1" in name and "q_proj" not in name] == []
        assert "model.layers.1.self_attn.q_proj.weight" in changes
    else:
        with refused("one_role"):
            plan_conversion(folder, "interleaved")


def test_the_source_may_differ_from_its_config(tmp_path: Path) -> None:
    """Meta's rows under transformers' names: the result is what the config describes."""
    folder = save_folder(tmp_path / "a", llama(), llama_tensors())
    found = plan_conversion(folder, "half", source="interleaved")
    assert found.source == "interleaved"
    assert found.notes[-1] == "That is what the config describes."
    with refused("same_pairing", target="half"):
        plan_conversion(folder, "half")
