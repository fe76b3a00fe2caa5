"""Conversion of whole models: transformers' logits, with weights in either order."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from phasor.checkpoint import plan, write

from .checkpoints import load

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
SMALL: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 48,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_implementation": "eager",
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 12,
}


def saved_model(folder: Path, model_type: str, **changes: Any) -> Any:
    """A random model of two layers, in float64, and its files."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **(SMALL | changes))
    kinds = transformers.AutoModelForCausalLM, transformers.AutoModel
    kind = next(k for k in kinds if type(config) in k._model_mapping)
    model = kind.from_config(config).double().eval()
    for parameter in model.parameters():
        # scales of norms begin as ones and biases as zeros, whose order nobody sees
        parameter.data = torch.randn_like(parameter) * (0.3 if parameter.ndim > 1 else 1.0)
    model.save_pretrained(folder)
    return model


def outputs(model: Any) -> np.ndarray:
    """Logits, or the last hidden states of a model without a head."""
    with torch.no_grad():
        found = model(torch.tensor([TOKENS]))
    return found[0].numpy()[0]


def loaded(model: Any, folder: Path) -> Any:
    """The model with the weights of another folder and its own config."""
    shutil.copy(folder.parent / "a" / "config.json", folder)
    return (
        type(model).from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()
    )


def metas_llama(weights: dict[str, np.ndarray], config: dict[str, Any]) -> np.ndarray:
    """Logits of a Llama as Meta wrote it, with complex numbers on neighbouring rows."""
    heads, key_heads = config["num_attention_heads"], config["num_key_value_heads"]
    width, count = config["head_dim"], len(TOKENS)
    step = config["rope_parameters"]["rope_theta"] ** (-np.arange(0, width, 2) / width)
    turn = np.exp(1j * np.outer(np.arange(count), step))

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        size = np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"])
        return x / size * weights[f"{name}.weight"]

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)

    def rotated(x: np.ndarray) -> np.ndarray:
        turned = (x[:, 0::2] + 1j * x[:, 1::2]) * turn
        return np.stack((turned.real, turned.imag), -1).reshape(x.shape)

    x = weights["model.embed_tokens.weight"][TOKENS]
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        y = norm(x, f"{name}.input_layernorm")
        q, k, v = (linear(y, f"{name}.self_attn.{c}_proj") for c in "qkv")
        mixed = []
        for head in range(heads):
            mine = slice(head * width, head * width + width)
            of_group = head // (heads // key_heads) * width
            theirs = slice(of_group, of_group + width)
            logits = rotated(q[:, mine]) @ rotated(k[:, theirs]).T / np.sqrt(width)
            logits[np.triu_indices(count, 1)] = -np.inf
            share = np.exp(logits - logits.max(-1, keepdims=True))
            mixed.append(share / share.sum(-1, keepdims=True) @ v[:, theirs])
        x = x + linear(np.concatenate(mixed, -1), f"{name}.self_attn.o_proj")
        y = norm(x, f"{name}.post_attention_layernorm")
        gate = linear(y, f"{name}.mlp.gate_proj")
        x = x + linear(
            gate / (1 + np.exp(-gate)) * linear(y, f"{name}.mlp.up_proj"), f"{name}.mlp.down_proj"
        )
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return norm(x, "model.norm") @ head.T


SHAPES = {
    "one key head a query head": {"num_key_value_heads": 4},
    "grouped queries": {"num_key_value_heads": 2},
    "one key head, biases": {"num_key_value_heads": 1, "attention_bias": True},
    "tied embeddings": {"tie_word_embeddings": True},
    "square projections": {"num_key_value_heads": 4, "head_dim": 12},
}
# transformers makes cosines in float32: half an ulp each, which two layers may magnify
CLOSE = 2.0**-24 * 64


@pytest.mark.parametrize("shape", SHAPES)
def test_metas_weights_give_transformers_logits(tmp_path: Path, shape: str) -> None:
    """From interleaved rows: Meta's logits before are transformers' after the conversion."""
    model = saved_model(tmp_path / "a", "llama", **({"head_dim": 16} | SHAPES[shape]))
    config = json.loads((tmp_path / "a/config.json").read_text())
    meta = metas_llama(load(tmp_path / "a/model.safetensors"), config)
    write(plan(tmp_path / "a", "half", source="interleaved"), tmp_path / "b", verified=True)
    found = outputs(loaded(model, tmp_path / "b"))
    np.testing.assert_allclose(found, meta, rtol=0, atol=CLOSE * np.abs(meta).max())
    assert np.abs(outputs(model) - meta).max() > 0.01 * np.abs(meta).max()


@pytest.mark.parametrize("shape", SHAPES)
def test_transformers_weights_give_metas_logits(tmp_path: Path, shape: str) -> None:
    """And the other way round."""
    model = saved_model(tmp_path / "a", "llama", **({"head_dim": 16} | SHAPES[shape]))
    config = json.loads((tmp_path / "a/config.json").read_text())
    write(plan(tmp_path / "a", "interleaved"), tmp_path / "b", verified=True)
    meta = metas_llama(load(tmp_path / "b/model.safetensors"), config)
    np.testing.assert_allclose(meta, outputs(model), rtol=0, atol=CLOSE * np.abs(meta).max())


def swapped(pairing: str) -> Any:
    """A rotation for transformers' models that pairs the other way."""

    def rotated(x: Any, cos: Any, sin: Any) -> Any:
        n = cos.shape[-1] // 2
        # either layout of the table, pair by pair or twice in a row, is read where both agree
        halves = torch.equal(cos[..., :n], cos[..., n:])
        c, s = (t[..., :n] if halves else t[..., 0::2] for t in (cos, sin))
        part, rest = x[..., : 2 * n], x[..., 2 * n :]
        if pairing == "half":
            z = torch.complex(part[..., :n], part[..., n:]) * torch.complex(c, s)
            return torch.cat((z.real, z.imag, rest), -1)
        z = torch.complex(part[..., 0::2], part[..., 1::2]) * torch.complex(c, s)
        return torch.cat((torch.stack((z.real, z.imag), -1).flatten(-2), rest), -1)

    def apply(q: Any, k: Any, cos: Any, sin: Any, *_: Any, unsqueeze_dim: int = 1) -> Any:
        cos, sin = (t.double().unsqueeze(unsqueeze_dim) for t in (cos, sin))
        return rotated(q, cos, sin), rotated(k, cos, sin)

    return apply


MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 16},
    "olmo2": {},
    "phi3": {},
    "gpt_neox": {"rotary_pct": 0.5},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False},
    "persimmon": {"qk_layernorm": True},
    "stablelm": {"qk_layernorm": True, "use_qkv_bias": True, "partial_rotary_factor": 0.5},
    "modernbert": {},
    "cohere": {"use_qk_norm": True},
    "glm4": {"head_dim": 16, "partial_rotary_factor": 0.5, "attention_bias": True},
    "qwen3_next": {
        "head_dim": 16,
        "partial_rotary_factor": 0.5,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "mlp_only_layers": [0, 1],
    },
}
INTERLEAVED = ("cohere", "glm4")


@pytest.mark.parametrize("model_type", MODELS)
def test_a_model_with_the_other_rotation_gives_the_same_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str
) -> None:
    """Transformers' own forward pass; only the function that rotates is exchanged."""
    target: Any = "half" if model_type in INTERLEAVED else "interleaved"
    model = saved_model(tmp_path / "a", model_type, **MODELS[model_type])
    wanted = outputs(model)
    write(plan(tmp_path / "a", target), tmp_path / "b", verified=True)
    converted = loaded(model, tmp_path / "b")
    wrong = outputs(converted)
    module = importlib.import_module(type(model).__module__)
    monkeypatch.setattr(module, "apply_rotary_pos_emb", swapped(target))
    np.testing.assert_allclose(
        outputs(converted), wanted, rtol=0, atol=CLOSE * np.abs(wanted).max()
    )
    assert np.abs(wrong - wanted).max() > 1e-3 * np.abs(wanted).max()


@pytest.mark.parametrize("ranks", [{}, {"q_lora_rank": None}], ids=["low rank", "full rank"])
def test_latent_attention_reads_halves_when_its_config_says_so(
    tmp_path: Path, ranks: dict[str, Any]
) -> None:
    """DeepSeek's class has the switch that the plan names, and gives its old logits with it."""
    experts = {
        "first_k_dense_replace": 2,
        "n_group": 1,
        "topk_group": 1,
        "n_routed_experts": 2,
        "num_experts_per_tok": 1,
    }
    model = saved_model(tmp_path / "a", "deepseek_v3", **(LATENT | experts | ranks))
    conversion = plan(tmp_path / "a", "half")
    assert conversion.notes[-1] == "Its config must say rope_interleave: false."
    write(conversion, tmp_path / "b", verified=True)
    converted = loaded(model, tmp_path / "b")
    wanted, wrong = outputs(model), outputs(converted)
    assert np.abs(wrong - wanted).max() > 1e-3 * np.abs(wanted).max()
    path = tmp_path / "b/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_interleave": False}))
    right = type(model).from_pretrained(
        tmp_path / "b", dtype=torch.float64, attn_implementation="eager"
    )
    np.testing.assert_allclose(
        outputs(right.eval()), wanted, rtol=0, atol=CLOSE * np.abs(wanted).max()
    )
