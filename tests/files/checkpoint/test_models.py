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

from phasor import load as load_ropes
from phasor.files.checkpoint import plan_conversion, write
from phasor.scaling import Llama3

from .checkpoints import load
from .metas_llama import PARAMS, forward, random_weights, save_meta, turns

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


METAS_NAMES = {
    "model.": "",
    "embed_tokens": "tok_embeddings",
    "self_attn.": "attention.",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.": "feed_forward.",
    "gate_proj": "w1",
    "down_proj": "w2",
    "up_proj": "w3",
    "lm_head": "output",
} | {f"{c}_proj": f"w{c}" for c in "qkvo"}


def metas_llama(weights: dict[str, np.ndarray], config: dict[str, Any]) -> np.ndarray:
    """Logits of a Llama as Meta wrote it, of weights under transformers' names."""
    renamed = {}
    for name, weight in weights.items():
        for theirs, metas in METAS_NAMES.items():
            name = name.replace(theirs, metas)
        renamed[name] = weight
    params = {
        "n_layers": config["num_hidden_layers"],
        "n_heads": config["num_attention_heads"],
        "n_kv_heads": config["num_key_value_heads"],
        "head_dim": config["head_dim"],
        "norm_eps": config["rms_norm_eps"],
        "rope_theta": config["rope_parameters"]["rope_theta"],
    }
    renamed.setdefault("output.weight", renamed["tok_embeddings.weight"])
    return forward(renamed, params, TOKENS, turns(params, range(len(TOKENS))))


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
    write(
        plan_conversion(tmp_path / "a", "half", source="interleaved"), tmp_path / "b", verified=True
    )
    found = outputs(loaded(model, tmp_path / "b"))
    np.testing.assert_allclose(found, meta, rtol=0, atol=CLOSE * np.abs(meta).max())
    assert np.abs(outputs(model) - meta).max() > 0.01 * np.abs(meta).max()


@pytest.mark.parametrize("shape", SHAPES)
def test_transformers_weights_give_metas_logits(tmp_path: Path, shape: str) -> None:
    """And the other way round."""
    model = saved_model(tmp_path / "a", "llama", **({"head_dim": 16} | SHAPES[shape]))
    config = json.loads((tmp_path / "a/config.json").read_text())
    write(plan_conversion(tmp_path / "a", "interleaved"), tmp_path / "b", verified=True)
    meta = metas_llama(load(tmp_path / "b/model.safetensors"), config)
    np.testing.assert_allclose(meta, outputs(model), rtol=0, atol=CLOSE * np.abs(meta).max())


POSITIONS = [0, 1, 2, 40, 41, 200, 500, 501, 900, 1300]  # so that scaling is seen


def numbers(weights: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Weights for the oracle."""
    return {name: weight.double().numpy() for name, weight in weights.items()}


def logits_far_apart(folder: Path) -> np.ndarray:
    """What transformers' class computes in float64 from a folder."""
    model = transformers.LlamaForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    )
    with torch.no_grad():
        out = model(torch.tensor([TOKENS]), position_ids=torch.tensor([POSITIONS]))
    return out.logits[0].numpy()


def room(weights: dict[str, np.ndarray], params: dict[str, Any]) -> float:
    """How far apart logits may be by what transformers computes in float32 in any model.

    In units of 2^-24, half an ulp: an angle is a power, at most four operations of the law and a
    product, and its cosine is within two (the first pair's angles are whole numbers, and exact); a
    norm and a softmax have fewer than six, and the scores before that, below 10, as many units as
    they are large. The oracle itself says what so much does to its logits, with signs by chance, of
    which the largest of eight answers is taken, twice.
    """
    exact = turns(params, POSITIONS)
    wanted = forward(weights, params, TOKENS, exact)
    rng = np.random.default_rng(0)

    def moved(x: np.ndarray, by: np.ndarray | float) -> np.ndarray:
        return x + rng.choice([-1.0, 1.0], x.shape) * by * 2.0**-24

    def answer() -> np.ndarray:
        angles = moved(exact, 2 + 6 * exact * (np.arange(exact.shape[1]) > 0))
        return forward(weights, params, TOKENS, angles, lambda x: moved(x, 16 * np.abs(x)))

    return 2 * max(np.abs(answer() - wanted).max() for _ in range(8))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("embeddings_on", [0, 1], ids=["as Llama 3", "as Llama 2"])
def test_metas_files_give_metas_logits_in_transformers(
    tmp_path: Path, ranks: int, embeddings_on: int
) -> None:
    """Grouped queries, Llama 3's scaling, one rank and two; without the scaling it is far off."""
    weights = random_weights(PARAMS)
    folder = save_meta(tmp_path / "a", PARAMS, weights, ranks, tok_embeddings=embeddings_on)
    write(plan_conversion(folder, "transformers"), tmp_path / "b", verified=True)
    found, allowed = logits_far_apart(tmp_path / "b"), room(numbers(weights), PARAMS)
    wanted = forward(numbers(weights), PARAMS, TOKENS, turns(PARAMS, POSITIONS))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=allowed)
    plain = turns(PARAMS | {"use_scaled_rope": False}, POSITIONS)
    unscaled = forward(numbers(weights), PARAMS, TOKENS, plain)
    assert np.abs(unscaled - wanted).max() > 100 * allowed


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_files_give_its_logits_in_metas_code(tmp_path: Path, tied: bool) -> None:
    """The other way round; tied embeddings become two tensors, and any width is said exactly."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=20,
        hidden_size=32,
        intermediate_size=57,  # 57 / 85 * 85 is less in floating point
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        max_position_embeddings=131072,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "a", max_shard_size="20KB")
    assert (tmp_path / "a/model.safetensors.index.json").exists()
    planned = plan_conversion(tmp_path / "a", "meta")
    assert any("scales by 8" in note for note in planned.notes)
    write(planned, tmp_path / "b", verified=True)
    weights = load(tmp_path / "b/consolidated.safetensors")
    params = json.loads((tmp_path / "b/params.json").read_text())
    assert load_ropes(tmp_path / "b")[0].scaling == Llama3(factor=32.0, original_max_positions=8192)
    hidden = int(params["ffn_dim_multiplier"] * int(2 * 4 * params["dim"] / 3))
    assert (hidden, params["multiple_of"]) == (57, 1)
    wanted = forward(weights, params, TOKENS, turns(params, POSITIONS))
    allowed = room(weights, params)
    np.testing.assert_allclose(logits_far_apart(tmp_path / "a"), wanted, rtol=0, atol=allowed)


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
    write(plan_conversion(tmp_path / "a", target), tmp_path / "b", verified=True)
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
    conversion = plan_conversion(tmp_path / "a", "half")
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
