"""Conversion of models that rotate beside attention: transformers' logits, in either order."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from phasor.files.checkpoint import plan_conversion, write

from ..refusals import refused
from .checkpoints import Tensors, load, save_folder, tensor

TOKENS = torch.arange(3, 27)[None]
# few keys are chosen, so that logits tell which
CHOICE = {"index_topk": 3, "vocab_size": 32}
INTERLEAVE = "apply_rotary_pos_emb_interleave"
QWEN = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 96,
    "indexer_budget": 4,
    "indexer_compress_ratio": 2,
}
MISTRAL = {
    "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 32,
    "num_key_value_heads": 4, "intermediate_size": 32, "moe_intermediate_size": 16,
    "n_routed_experts": 2, "num_experts_per_tok": 1, "kv_lora_rank": 8, "qk_rope_head_dim": 12,
    "qk_nope_head_dim": 4, "v_head_dim": 8, "index_head_dim": 16, "index_n_heads": 2,
    "bos_token_id": 1, "eos_token_id": 2, "no_rope_layers": [1, 0, 1, 1], "index_topk": 3,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v32": (INTERLEAVE, CHOICE),
    "glm_moe_dsa": (INTERLEAVE, CHOICE | {"indexer_types": ["full", "shared"]}),
    "hy_v4": ("apply_rotary_pos_emb", CHOICE),
    # rows of a gate follow those of each query head
    "axk2": (INTERLEAVE, CHOICE),
    # learned frequencies, which are in the folder, and a layer in which nothing rotates
    "mistral_large4_text": (INTERLEAVE, MISTRAL),
    "qwen4_exp_text": ("apply_rotary_pos_emb", QWEN),
    "minimax_m3_vl_text": (
        "apply_rotary_pos_emb",
        {
            "num_hidden_layers": 2,
            "index_topk_blocks": 2,
            "index_block_size": 2,
            "layer_types": ["full_attention", "minimax_m3_sparse"],
        },
    ),
    "deepseek_v4": (
        "apply_rotary_pos_emb",
        {
            "index_topk": 2,
            "layer_types": [
                "sliding_attention",
                "compressed_sparse_attention",
                "heavily_compressed_attention",
            ],
            "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 3},
            "num_hidden_layers": 3,
        },
    ),
}


def tiny(model_type: str, **changes: Any) -> Any:
    """A random model in float64."""
    from tools.tiny_models import special_cases, tiny_model
    from transformers import AutoConfig, AutoModel

    published = special_cases()["published"].get(model_type, {})
    if model_type == "mistral_large4_text":
        model = AutoModel.from_config(AutoConfig.for_model(model_type, **changes))
        model.set_attn_implementation("eager")
    else:
        model = tiny_model(model_type, published | changes)
    model = model.double().eval()
    model.set_experts_implementation("eager")
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * (0.3 if parameter.ndim > 1 else 1.0)
    return model


def logits(model: Any) -> np.ndarray:
    """Of every token."""
    with torch.no_grad():
        return model(TOKENS)[0].numpy()[0]


def to_halves(x: torch.Tensor) -> torch.Tensor:
    """Interleaved pairs as halves."""
    return torch.cat((x[..., 0::2], x[..., 1::2]), -1)


def to_pairs(x: torch.Tensor) -> torch.Tensor:
    """Halves as interleaved pairs."""
    return torch.stack(x.chunk(2, -1), -1).flatten(-2)


def with_other_pairs(function: Any, model_type: str) -> Any:
    """The class's rotation, given its coordinates in the other order."""
    of_halves = model_type in ("hy_v4", "qwen4_exp_text", "minimax_m3_vl_text")
    before = to_halves if of_halves else to_pairs
    after = to_pairs if of_halves else to_halves if model_type == "deepseek_v4" else (lambda x: x)

    def at_slice(change: Any, x: Any, cos: Any) -> Any:
        if model_type == "deepseek_v4":
            n = x.shape[-1] - 2 * cos.shape[-1]
            return torch.cat((x[..., :n], change(x[..., n:])), -1)
        n = cos.shape[-1]
        return torch.cat((change(x[..., :n]), x[..., n:]), -1)

    def apply(*args: Any, **kwargs: Any) -> Any:
        args = tuple(a for a in args if a is not None)
        cos, sin = [kwargs.pop("cos"), kwargs.pop("sin")] if "cos" in kwargs else args[-2:]
        vectors = args if len(args) < 3 and args[-1] is not sin else args[:-2]
        if len(vectors) > 1 or "k" in kwargs or model_type != "deepseek_v4":
            found = function(
                *(at_slice(before, x, cos) for x in vectors), cos=cos, sin=sin, **kwargs
            )
        else:
            found = function(at_slice(before, vectors[0], cos), cos, sin, **kwargs)
        several = isinstance(found, tuple)
        found = [at_slice(after, x, cos) for x in (found if several else (found,))]
        return tuple(found) if several else found[0]

    return apply


def numbers(folder: Path) -> dict[str, bytes]:
    """The files of the weights."""
    return {p.name: p.read_bytes() for p in sorted(folder.glob("*.safetensors*"))}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", MODELS)
def test_all_that_rotates_takes_the_other_pairing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str
) -> None:
    """The model's own forward, given the other order everywhere; and back to the same bytes."""
    name, changes = MODELS[model_type]
    model = tiny(model_type, **changes)
    wanted = logits(model)
    model.save_pretrained(
        tmp_path / "a", max_shard_size="20KB" if model_type == "mistral_large4_text" else "2MB"
    )
    assert (tmp_path / "a/model.safetensors.index.json").exists()
    is_half = model_type in ("hy_v4", "qwen4_exp_text", "minimax_m3_vl_text")
    source, target = ("half", "interleaved") if is_half else ("interleaved", "half")
    planned = plan_conversion(tmp_path / "a", target)
    write(planned, tmp_path / "b", verified=True)
    (tmp_path / "b/config.json").write_bytes((tmp_path / "a/config.json").read_bytes())
    converted = (
        type(model)
        .from_pretrained(
            tmp_path / "b",
            dtype=torch.float64,
            attn_implementation="eager",
            experts_implementation="eager",
        )
        .eval()
    )
    wrong = logits(converted)
    module = importlib.import_module(type(model).__module__)
    rotate = getattr(module, name)
    monkeypatch.setattr(module, name, with_other_pairs(rotate, model_type))
    size = np.abs(wanted).max()
    np.testing.assert_allclose(logits(converted), wanted, rtol=0, atol=2.0**-16 * size)
    assert np.abs(wrong - wanted).max() > 1e-3 * size
    back = plan_conversion(tmp_path / "b", source, source=target)
    write(back, tmp_path / "c", verified=True)
    assert numbers(tmp_path / "c") == numbers(tmp_path / "a")


def dsa_tensors(layer: str = "model.layers.0", indexer: str = "indexer.") -> Tensors:
    """Attention and an indexer with 2 heads of 12, of which 8 turn; rows have their numbers."""
    sizes = {
        "q_b_proj": 2 * 16,
        "kv_a_proj_with_mqa": 4 + 8,
        f"{indexer}wq_b": 2 * 12,
        f"{indexer}wk": 12,
        f"{indexer}weights_proj": 2,
    }
    place = f"{layer}.self_attn."
    tensors = {
        f"{place}{name}.weight": tensor(np.arange(rows, dtype=np.float32)[:, None])
        for name, rows in sizes.items()
    }
    for name in ("weight", "bias"):
        tensors[f"{place}{indexer}k_norm.{name}"] = tensor(np.arange(12, dtype=np.float32))
    return tensors


GLM = {
    "model_type": "glm_moe_dsa",
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "hidden_size": 8,
    "qk_rope_head_dim": 8,
    "index_head_dim": 12,
    "num_nextn_predict_layers": 1,
}
HALVES = [0, 2, 4, 6, 1, 3, 5, 7]  # of interleaved pairs


def test_an_indexer_beside_shards_and_extra_layers_is_permuted(tmp_path: Path) -> None:
    """The first coordinates of each of its heads; in the layer of multi-token prediction too."""
    shards = dsa_tensors(), dsa_tensors("model.layers.1")
    folder = save_folder(tmp_path / "a", GLM, *shards)
    write(plan_conversion(folder, "half"), tmp_path / "b", verified=True)
    for layer in (0, 1):
        found = load(tmp_path / f"b/model-{layer + 1}-of-2.safetensors")
        place = f"model.layers.{layer}.self_attn.indexer."
        head = [*HALVES, 8, 9, 10, 11]
        assert found[f"{place}wk.weight"][:, 0].tolist() == head
        assert found[f"{place}k_norm.bias"].tolist() == head
        assert found[f"{place}wq_b.weight"][:, 0].tolist() == [*head, *(12 + i for i in head)]
        assert found[f"{place}weights_proj.weight"][:, 0].tolist() == [0, 1]


def test_an_indexer_with_the_other_pairing_stays(tmp_path: Path) -> None:
    """DeepSeek V3.2's: all is halves then, and it is as before on the way back."""
    folder = save_folder(tmp_path / "a", GLM | {"model_type": "deepseek_v32"}, dsa_tensors())
    planned = plan_conversion(folder, "half")
    assert not any("indexer" in name for name in planned.changes)
    assert "The indexer stays in its half pairing." in planned.notes
    write(planned, tmp_path / "b", verified=True)
    model = folder / "config.json"
    back = plan_conversion(tmp_path / "b", "interleaved", source="half", model=model)
    write(back, tmp_path / "c", verified=True)
    assert numbers(tmp_path / "c") == numbers(folder)


def test_half_of_an_indexer_and_what_is_not_known_of_one_are_refused(tmp_path: Path) -> None:
    """Its queries without its keys; a tensor of another name; a model that has none."""
    place = "model.layers.0.self_attn.indexer."
    tensors = dsa_tensors()
    cases: dict[str, tuple[dict[str, Any], Tensors]] = {
        "one_role: model.layers.0.self_attn.indexer": (
            GLM,
            {name: one for name, one in tensors.items() if name != f"{place}wk.weight"},
        ),
        "auxiliary_rope: indexer.w.weight": (
            GLM,
            tensors | {f"{place}w.weight": tensor(np.ones(3))},
        ),
        "auxiliary_rope: wq_b.weight": (
            GLM | {"model_type": "deepseek_v3"},
            tensors,
        ),
        "rows: it must hold 2 heads of 8 rows or more": (GLM | {"model_type": "axk2"}, tensors),
        "rows: it must hold 2 heads of 8 rows or more, 4 more before these": (
            GLM | {"qk_nope_head_dim": 4},
            tensors,
        ),
        "rows: its last axis must hold whole heads of head_dim 12": (
            GLM,
            tensors | {f"{place}k_norm.weight": tensor(np.ones(9, np.float32))},
        ),
    }
    for number, (message, (config, held)) in enumerate(cases.items()):
        folder = save_folder(tmp_path / f"{number}", config, held)
        with refused(message):
            plan_conversion(folder, "half")


def numbered(*shape: int) -> Any:
    """A tensor whose rows and columns are told by its numbers."""
    return tensor(np.arange(np.prod(shape), dtype=np.float32).reshape(shape))


def test_deepseeks_own_files_are_permuted_in_fp8_and_in_their_last_layer(tmp_path: Path) -> None:
    """Blocks keep their scales; what attention returns is permuted as columns; q_norm stays."""
    config = {
        "model_type": "deepseek_v4",
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "hidden_size": 128,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "compress_ratios": [4, 0],
        "num_nextn_predict_layers": 1,
        "quantization_config": {"weight_block_size": [128, 128]},
    }
    tensors: Tensors = {}
    for place in ("layers.0.attn", "mtp.0.attn"):
        tensors |= {
            f"{place}.q_norm.weight": numbered(64),
            f"{place}.wq_b.weight": numbered(1024, 64),
            f"{place}.wq_b.scale": numbered(8, 1),
            f"{place}.wkv.weight": numbered(512, 128),
            f"{place}.kv_norm.weight": numbered(512),
            f"{place}.wo_a.weight": numbered(256, 512),
            f"{place}.wo_a.scale": numbered(2, 4),
        }
    tensors |= {
        "layers.0.attn.indexer.wq_b.weight": numbered(256, 64),
        "layers.0.attn.indexer.weights_proj.weight": numbered(2, 128),
        "layers.0.attn.indexer.compressor.wkv.weight": numbered(256, 128),
        "layers.0.attn.indexer.compressor.ape": numbered(4, 256),
    }
    folder = save_folder(tmp_path / "a", config, tensors)
    write(plan_conversion(folder, "half"), tmp_path / "b", verified=True)
    before, after = (load(tmp_path / f"{name}/model.safetensors") for name in "ab")
    turned = np.r_[0:64:2, 1:64:2]  # halves of interleaved pairs
    of_head, of_index = np.r_[0:448, 448 + turned], np.r_[0:64, 64 + turned]
    two_heads, two_indices = np.r_[of_head, 512 + of_head], np.r_[of_index, 128 + of_index]
    rows = {"wq_b.weight": two_heads, "wkv.weight": of_head, "kv_norm.weight": of_head}
    for name, weight in before.items():
        place, _, module = name.partition(".attn.")
        assert place in ("layers.0", "mtp.0")
        expected = weight
        if module in rows:
            expected = weight[rows[module]]
        elif module == "wo_a.weight":
            expected = weight[:, of_head]
        elif module in ("indexer.wq_b.weight", "indexer.compressor.wkv.weight"):
            expected = weight[two_indices]
        elif module == "indexer.compressor.ape":
            expected = weight[:, two_indices]
        np.testing.assert_array_equal(after[name], expected, err_msg=name)
