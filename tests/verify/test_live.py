"""Recordings of live models of transformers, in the dtypes that they run in."""

from __future__ import annotations

from importlib import import_module
from typing import Any
from unittest import mock

import pytest

import phasor
from phasor.identification.report import Verification

YARN = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128,
}  # fmt: skip
MODELS = {
    "Llama": {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "Qwen3": {"head_dim": 16, "max_position_embeddings": 512, "rope_parameters": YARN},
    "Glm4": {"head_dim": 16, "partial_rotary_factor": 0.5, "pad_token_id": 0},
    "Cohere": {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
SIZES = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 99,
    "intermediate_size": 64, "num_hidden_layers": 2,
}  # fmt: skip


def verified(name: str, dtype: str, *, casts_frequencies: bool) -> Verification:
    """What `verify` says of a small model that was cast to a dtype."""
    import torch

    module = import_module(f"transformers.models.{name.lower()}.modeling_{name.lower()}")
    config = getattr(module, f"{name}Config")(**SIZES, **MODELS[name])
    model = getattr(module, f"{name}ForCausalLM")(config)
    inv_freq = model.model.rotary_emb.inv_freq.clone()
    model.to(getattr(torch, dtype))
    if not casts_frequencies:
        model.model.rotary_emb.inv_freq = inv_freq
    recorded: dict[str, Any] = {"positions": torch.arange(200)}
    apply = module.apply_rotary_pos_emb

    def recording(q: Any, k: Any, *args: Any, **options: Any) -> Any:
        turned = apply(q, k, *args, **options)
        layer = len(recorded) // 4
        for side, tensor in zip(("q", "k", "q_rotated", "k_rotated"), (q, k, *turned), strict=True):
            recorded[f"layers.{layer}.{side}"] = tensor.clone()
        return turned

    with mock.patch.object(module, "apply_rotary_pos_emb", recording), torch.no_grad():
        model(torch.arange(200)[None] % 99)
    return phasor.verify(phasor.load(config), recorded)


@pytest.mark.transformers
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", MODELS)
def test_live_models_rotate_as_their_configs_say(name: str, dtype: str) -> None:
    """Both layers, queries and keys, though cos, sin and products are rounded to the dtype."""
    found = verified(name, dtype, casts_frequencies=False)
    assert len(found.sides) == 4
    assert not found, str(found)


@pytest.mark.transformers
@pytest.mark.parametrize("name", MODELS)
def test_frequencies_that_were_cast_with_the_model_are_named(name: str) -> None:
    """``model.to(torch.bfloat16)`` rounds the buffer too."""
    found = verified(name, "bfloat16", casts_frequencies=True)
    assert {change.name for side in found.sides for change in side.changes} == {
        "frequencies-in-bfloat16"
    }
