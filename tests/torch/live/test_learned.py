"""Learned frequencies are read from the checkpoint that transformers' class saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModel

from phasor import CheckpointError, ConfigError, LayerRopes, load
from phasor.angles import cos_sin
from phasor.torch import rotate

SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 4,
    "intermediate_size": 32, "moe_intermediate_size": 16, "vocab_size": 64, "n_routed_experts": 2,
    "num_experts_per_tok": 1, "kv_lora_rank": 8, "qk_rope_head_dim": 12, "qk_nope_head_dim": 4,
    "v_head_dim": 8, "index_head_dim": 16, "index_n_heads": 2, "max_position_embeddings": 2**20,
    "bos_token_id": 1, "eos_token_id": 2, "first_k_dense_replace": 5,
}  # fmt: skip
PAIRS = 6
FLAT = {"rope_type": "default", "rope_theta": 500.0}
WARM = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
        "original_max_position_embeddings": 2**18}  # fmt: skip
ALPHA = torch.linspace(-0.9, 1.3, PAIRS)


def saved(folder: Path, *, nested: bool = False, alpha: Tensor = ALPHA, **keys: Any) -> Any:
    """A random model whose frequencies were learned, and its checkpoint in ``folder``."""
    torch.manual_seed(0)
    shards = keys.pop("max_shard_size", "1GB")
    text = SIZES | keys
    if nested:
        vision = {"model_type": "pixtral", "hidden_size": 32, "num_attention_heads": 2,
                  "num_hidden_layers": 1, "intermediate_size": 32}  # fmt: skip
        config = AutoConfig.for_model("mistral_large4", text_config=text, vision_config=vision)
        model = AutoModel.from_config(config)
        module = model.language_model.rotary_emb
    else:
        model = AutoModel.from_config(AutoConfig.for_model("mistral_large4_text", **text))
        module = model.rotary_emb
    module.alpha.copy_(alpha)
    model.save_pretrained(folder, max_shard_size=shards)
    return module


def assert_turns_like(module: Any, ropes: LayerRopes) -> None:
    """Frequencies to 1e-6 of each, and cos and sin of the class's own forward; factors included."""
    (rope,) = ropes.ropes
    right = (module.inv_freq.double() * module.alpha.double().exp()).numpy()
    assert np.abs(rope.inv_freq / right - 1).max() < 1e-6
    places = torch.arange(0, 512)
    with torch.no_grad():
        rows = module(torch.zeros(1), places[None])
    for ours, theirs in zip(cos_sin(places.numpy(), rope), rows, strict=True):
        half = theirs[0, :, :PAIRS].double().numpy()
        # in float32 the class's powers and exp are off by a unit, two products by half of one
        room = np.maximum(1e-6, 3 * 2.0**-23 * places.numpy()[:, None] * rope.inv_freq)
        assert np.all(np.abs(rope.attention_factor * ours - half) < room)


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"nested": True},
        {"max_shard_size": "8KB"},
        {"nested": True, "max_shard_size": "8KB"},
        {"rope_parameters": FLAT, "no_rope_layers": [1, 1, 0, 0, 1]},
        {"rope_parameters": WARM},
    ],
    ids=str,
)
def test_the_ropes_of_a_folder_turn_like_its_class(tmp_path: Path, keys: dict[str, Any]) -> None:
    """In one file and in shards, alone and inside a larger model, with any law of its block."""
    module = saved(tmp_path, **keys)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == ("max_shard_size" in keys)
    ropes = load(tmp_path)
    assert_turns_like(module, ropes)
    switches = keys.get("no_rope_layers", [1, 1, 1, 0, 1])
    assert [rope is not None for rope in ropes] == [bool(switch) for switch in switches]
    if "rope_parameters" not in keys:
        assert ropes[0].explicit_inv_freq is not None
    assert ropes.auxiliary_rope("indexer", 0).inv_freq.tolist() == ropes[0].inv_freq.tolist()


def test_it_rotates_queries_as_the_class_does(tmp_path: Path) -> None:
    """Interleaved pairs, written back as halves."""
    from transformers.models.mistral_large4.modeling_mistral_large4 import (
        apply_rotary_pos_emb_interleave,
    )

    module = saved(tmp_path)
    rope = load(tmp_path)[0]
    assert rope is not None
    x, places = torch.randn(1, 9, 3, 2 * PAIRS), torch.arange(9)
    with torch.no_grad():
        cos, sin = module(x, places[None])
    right, _ = apply_rotary_pos_emb_interleave(x, None, cos, sin, unsqueeze_dim=2)
    assert (rotate(x, places, rope) - right).abs().max() < 1e-5


def rewritten(folder: Path, change: dict[str, Tensor | None]) -> None:
    """The file of ``folder`` with tensors put instead of, or beside, those there."""
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    kept = {name: t for name, t in tensors.items() if not name.endswith(".alpha")}
    save_file({n: t for n, t in (kept | change).items() if t is not None}, path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_every_plain_dtype_of_the_tensor_is_read(tmp_path: Path, dtype: torch.dtype) -> None:
    """To the last bit."""
    saved(tmp_path)
    rewritten(tmp_path, {"rotary_emb.alpha": torch.zeros(PAIRS)})
    plain = load(tmp_path)[0]
    rewritten(tmp_path, {"rotary_emb.alpha": ALPHA.to(dtype)})
    rope = load(tmp_path)[0]
    assert plain is not None
    assert rope is not None
    right = plain.inv_freq * ALPHA.to(dtype).double().exp().numpy()
    assert np.abs(rope.inv_freq / right - 1).max() < 1e-15


def test_a_factor_on_the_softmax_is_refused_beside_them(tmp_path: Path) -> None:
    """No Rope of explicit frequencies holds it."""
    saved(tmp_path, rope_parameters=WARM | {"mscale": 1.0, "mscale_all_dim": 1.0})
    with pytest.raises(ConfigError, match=r"rope_parameters\.mscale_all_dim must not scale"):
        load(tmp_path)


def test_each_layer_may_have_frequencies_of_its_own(tmp_path: Path) -> None:
    """Then a kind stands for those that are equal."""
    saved(tmp_path)
    plain = torch.zeros(PAIRS)
    own = {f"model.layers.{i}.self_attn.rotary_emb.alpha": plain + i // 2 for i in range(5)}
    rewritten(tmp_path, own)
    ropes = load(tmp_path)
    assert ropes.layer_kinds == ("rope", "rope", "rope 2", "nope", "rope 4")
    first, second = ropes[0], ropes[2]
    assert first is not None
    assert second is not None
    assert np.abs(second.inv_freq / first.inv_freq / np.e - 1).max() < 1e-15
    assert ropes.auxiliary_rope("indexer", 2).inv_freq.tolist() == second.inv_freq.tolist()


@pytest.mark.parametrize("name", ["mtp_dspark.lerope", "mtp_dspark.layers.0.rotary_emb"])
def test_a_drafting_head_has_frequencies_of_its_own(tmp_path: Path, name: str) -> None:
    """The class ignores them beside the model's, and they do not stand for the model's."""
    module = saved(tmp_path)
    rewritten(tmp_path, {"lerope.alpha": ALPHA, f"{name}.alpha": ALPHA + 1})
    assert_turns_like(module, load(tmp_path))
    rewritten(tmp_path, {f"{name}.alpha": ALPHA + 1})
    with pytest.raises(CheckpointError, match=r"must hold rotary_emb.alpha of layer 0, got None"):
        load(tmp_path)


def test_mistrals_own_name_of_the_tensor_is_read(tmp_path: Path) -> None:
    """Its release calls it lerope.alpha."""
    module = saved(tmp_path)
    rewritten(tmp_path, {"lerope.alpha": ALPHA})
    assert_turns_like(module, load(tmp_path))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, r"must hold rotary_emb.alpha of layer 0, got None"),
        ({"a.rotary_emb.alpha": ALPHA, "b.lerope.alpha": ALPHA + 1}, "a.rotary_emb.alpha.*b.ler"),
        (
            {"rotary_emb.alpha": torch.zeros(5)},
            "hold rotary_emb.alpha, with a float below 30 for each of 6.*shape .5.",
        ),
        ({"rotary_emb.alpha": torch.zeros(6, 1)}, "hold rotary_emb.alpha, with"),
        ({"rotary_emb.alpha": ALPHA * torch.nan}, "hold rotary_emb.alpha, with.*nan"),
        ({"rotary_emb.alpha": torch.arange(6)}, "hold rotary_emb.alpha, with"),
        ({"rotary_emb.alpha": ALPHA * 1e5}, "hold rotary_emb.alpha, with"),
        ({"rotary_emb.alpha": ALPHA * 0 + 40}, r"hold rotary_emb.alpha, with.*\[40.0"),
        ({"rotary_emb.alpha": ALPHA[:0]}, r"hold rotary_emb.alpha, with.*shape \[0\]"),
    ],
)
def test_a_tensor_that_is_missing_or_misshapen_is_named(
    tmp_path: Path, change: dict[str, Tensor], says: str
) -> None:
    """With the folder."""
    saved(tmp_path)
    rewritten(tmp_path, change)
    with pytest.raises(CheckpointError, match=says) as caught:
        load(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_shard_that_is_missing_is_named(tmp_path: Path) -> None:
    """The index says where it should be."""
    saved(tmp_path, max_shard_size="8KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[0]
    shard.unlink()
    with pytest.raises(CheckpointError, match=shard.name):
        load(tmp_path)


def test_a_config_alone_is_refused(tmp_path: Path) -> None:
    """As a file, as a dictionary, and in a folder without weights; the way out is named."""
    saved(tmp_path)
    config = tmp_path / "config.json"
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "config.json").write_text(config.read_text("utf-8"))
    values = json.loads(config.read_text("utf-8"))
    for source in (config, values, tmp_path / "alone"):
        with pytest.raises(ConfigError, match=r"rotary_emb.alpha.*load the folder"):
            load(source)
