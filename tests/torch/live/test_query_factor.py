"""Queries that grow with their positions are those of transformers' own classes."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel

from phasor import LayerRopes, load
from phasor.torch import RotaryAttention
from phasor.torch.live import from_model, patch

from ...rounding import UNIT, rounding
from .live_models import difference

LENGTH, SEQ = 5, 33
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": LENGTH,
}  # fmt: skip
SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 32, "vocab_size": 64, "max_position_embeddings": 20,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_local_experts": 2, "n_routed_experts": 2, "num_experts": 2, "n_group": 1,
           "topk_group": 1, "num_experts_per_tok": 1, "moe_intermediate_size": 16}  # fmt: skip
LATENT = {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "q_lora_rank": 8,
          "kv_lora_rank": 8, "head_dim": 16, "num_key_value_heads": 4}  # fmt: skip
HYBRID = ["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"]
INKLING = {"log_scaling_n_floor": LENGTH, "log_scaling_alpha": 0.4, "layer_types": HYBRID,
           "d_rel": 4, "rel_extent": 8, "swa_num_attention_heads": 4, "swa_head_dim": 8,
           "swa_num_key_value_heads": 2, "sliding_window_size": 8}  # fmt: skip
#: By type its keys, and those that leave the queries as they are.
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama4_text": (
        {"floor_scale": LENGTH, "attn_scale": 0.3, "no_rope_layers": [1, 0, 0, 1], "moe_layers": [],
         "use_qk_norm": False, "intermediate_size_mlp": 16, "attention_chunk_size": 64},
        {"attn_temperature_tuning": False},
    ),
    "ministral3": (
        {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.3}},
        {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.0}},
    ),
    "mistral4": (
        {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.2}, **EXPERTS, **LATENT},
        {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.0}},
    ),
    "inkling_text": (INKLING | EXPERTS, {"log_scaling_n_floor": None}),
    "inkling2_text": (INKLING | EXPERTS, {"log_scaling_alpha": 0.0}),
}  # fmt: skip


def tiny(model_type: str, keys: dict[str, Any], seed: int = 0) -> Any:
    """A random model in float64, run by its own plain attention."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **SIZES | keys, attn_implementation="eager")
    model = AutoModel.from_config(config, experts_implementation="eager").double().eval()
    for module in model.modules():
        if type(module).__name__ == "Inkling2TopKRouter":
            module.float()
    return model


def tokens() -> Tensor:
    """Two rows of ``SEQ`` tokens, several times as long as ``LENGTH``."""
    return torch.randint(3, 64, (2, SEQ), generator=torch.Generator().manual_seed(1))


def recorded_queries(model: Any, patcher: pytest.MonkeyPatch) -> list[Tensor]:
    """What its attention is given for queries, layer by layer ``[batch, heads, seq, head_dim]``."""
    queries: list[Tensor] = []
    module = importlib.import_module(type(model).__module__)
    plain = module.eager_attention_forward

    def record(layer: Any, query: Tensor, key: Tensor, *rest: Any, **more: Any) -> Any:
        queries.append(query)
        # the layers after it must be given the same states
        return plain(layer, query * 0, key, *rest, **more)

    patcher.setattr(module, "eager_attention_forward", record)
    with torch.no_grad():
        model(tokens(), use_cache=False)
    patcher.undo()
    return queries


def read(model: Any) -> LayerRopes:
    """What phasor reads of its config, as a file would hold it."""
    return load(model.config.to_dict())


@pytest.mark.parametrize("name", MODELS)
def test_recorded_queries_are_multiplied_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer by layer, up to six times the length from which they grow."""
    keys, off = MODELS[name]
    # a position bias that is multiplied, too, is not to reach the next layer
    warm, cold = tiny(name, keys), tiny(name, keys | off)
    if name.startswith("inkling"):
        for model in (warm, cold):
            for layer in model.layers:
                torch.nn.init.zeros_(layer.self_attn.r_proj.weight)
    ropes = read(warm)
    pairs = zip(
        recorded_queries(warm, monkeypatch), recorded_queries(cold, monkeypatch), strict=True
    )
    grown = 0
    for layer, (queries, plain) in enumerate(pairs):
        factor = torch.from_numpy(ropes.query_factor(layer)(range(SEQ)))[:, None]
        # the classes compute their factor, and some the product, in float32
        assert (queries - plain * factor).abs().max() <= 16 * UNIT * queries.abs().max()
        grown += bool(factor[-1] > 1.2)
    assert grown == (4 if "stral" in name else 2)
    assert read(cold).query_factors == {}
    if not name.startswith("inkling"):
        assert from_model(warm).query_factors == ropes.query_factors


def test_beams_queries_are_multiplied_so() -> None:
    """Its numbers are constants of its code."""
    from transformers.models.beam.modeling_beam import compute_attention_scaling

    kinds = ["sliding_attention", "full_attention"]
    block = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    ropes = load(
        {"model_type": "beam", "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4,
         "layer_types": kinds, "rope_parameters": block | {"full_attention": None}}
    )  # fmt: skip
    places = torch.arange(0, 9000, 7)
    right = compute_attention_scaling(places[None])[0, 0, :, 0].double().numpy()
    assert abs(ropes.query_factor(1)(places) - right).max() < 4 * UNIT
    assert (ropes.query_factor(0)(places) == 1).all()


@pytest.mark.parametrize("name", ["llama4_text", "ministral3"])
def test_the_layer_says_what_the_class_says(name: str) -> None:
    """Every layer of both, from its weights, in one call and from a cache."""
    model = tiny(name, MODELS[name][0])
    ropes = read(model)
    x = torch.randn(1, SEQ, 32, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    places = torch.arange(SEQ)[None]
    mask = torch.full((SEQ, SEQ), -torch.inf, dtype=torch.float64).triu(1)
    rows = model.rotary_emb(x, places)
    for i, block in enumerate(model.layers):
        ours = RotaryAttention(
            ropes[i], 32, 4, 2, head_dim=8, query_factor=ropes.query_factor(i), dtype=torch.float64
        )
        ours.load_state_dict(block.self_attn.state_dict())
        with torch.no_grad():
            right, _ = block.self_attn(
                x, position_embeddings=rows, attention_mask=mask[None, None], position_ids=places
            )
            cache = ours.make_cache(1, SEQ)
            steps = [ours(x[:, j : j + 3], cache=cache) for j in range(0, SEQ, 3)]
            # the class has cosines and factors in float32, of angles up to its last position
            room = 4 * SEQ * UNIT * right.abs().max()
            assert (ours(x) - right).abs().max() <= room
            assert (torch.cat(steps, 1) - right).abs().max() <= room
            ours.query_factor = None
            assert ropes.query_factor(i)(SEQ) == 1 or (ours(x) - right).abs().max() > 100 * room


@pytest.mark.parametrize("name", ["llama4_text", "ministral3", "mistral4"])
def test_a_patched_model_keeps_its_own(name: str) -> None:
    """It says what it said, to a rounding, where without the factor it says something else."""
    keys, off = MODELS[name]
    model, without = tiny(name, keys).float(), tiny(name, keys | off).float()

    def answer(one: Any) -> Tensor:
        with torch.no_grad():
            return one(tokens()).last_hidden_state

    before, room = answer(model), rounding(model, answer)
    patch(model)
    assert difference(before, answer(model)) <= room
    assert difference(before, answer(without)) > 20 * room
