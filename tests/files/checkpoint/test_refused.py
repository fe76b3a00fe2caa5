"""Checkpoints that are whole and cannot be converted: refused, with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phasor import Rope
from phasor.files.checkpoint import Patterns, plan_conversion

from ..refusals import refused
from .checkpoints import llama, llama_tensors, save, save_folder, tensor

SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "heads that do not divide": (
        {"head_dim": 12},
        {},
        "rows: [32, 32]",
    ),
    "too few heads": ({"num_attention_heads": 8, "head_dim": 8}, {}, "rows: must hold 8 heads"),
    "keys that do not divide": (
        {"num_key_value_heads": 1},
        {"model.layers.0.self_attn.k_proj.weight": tensor(np.zeros((24, 32)))},
        "rows: its heads must divide the 4 query heads",
    ),
    "latent queries that are too narrow": (
        {"model_type": "deepseek_v3", "qk_rope_head_dim": 8},
        {"model.layers.0.self_attn.q_proj.weight": tensor(np.zeros((16, 32)))},
        "rows: must hold 4 heads of 8 rows or more",
    ),
    "an odd part of a head": ({"head_dim": 7}, {}, "odd_width: partial_rotary_factor"),
    "keys that are values": (
        {},
        {"model.layers.0.self_attn.v_proj.weight": None},
        "shared_values: v_proj",
    ),
    "a packed weight": (
        {},
        {"model.layers.0.self_attn.q_proj.qweight": tensor(np.zeros((4, 32)))},
        "packed: model.layers.0.self_attn.q_proj",
    ),
    "a scale of unknown use": (
        {},
        {"model.layers.0.self_attn.q_proj.weight_scales": tensor(np.zeros((32, 1)))},
        "rows: what it holds is not known",
    ),
    "a fused projection of unknown order": (
        {},
        {"model.layers.0.self_attn.qkv_proj.weight": tensor(np.zeros((64, 32)))},
        "qkv: model.layers.0.self_attn.qkv_proj.weight",
    ),
    "an index over keys": (
        {},
        {"model.layers.0.self_attn.indexer.wk.weight": tensor(np.zeros((8, 32)))},
        "auxiliary_rope: model.layers.0.self_attn.indexer.wk.weight",
    ),
    "queries without keys": (
        {},
        {name: None for name in llama_tensors() if "k_proj" in name},
        "one_role: model.layers.0.self_attn",
    ),
    "a layer without its keys": (
        {},
        {"model.layers.1.self_attn.k_proj.weight": None},
        "one_role: model.layers.1.self_attn",
    ),
    "a layer without its queries": (
        {},
        {"model.layers.0.self_attn.q_proj.weight": None},
        "one_role: model.layers.0.self_attn",
    ),
    "a layer of biases alone": (
        {},
        {f"model.layers.0.self_attn.{one}_proj.weight": None for one in "qk"},
        "one_role: model.layers.0.self_attn",
    ),
    "nothing to convert": (
        {},
        {name: None for name in llama_tensors() if "self_attn" in name},
        "nothing: model.embed_tokens.weight (1)",
    ),
    "a latent key without latent attention": (
        {},
        {"model.layers.0.self_attn.kv_a_proj_with_mqa.weight": tensor(np.zeros((16, 32)))},
        "rows: no latent attention",
    ),
    "values that are rotated": (
        {"model_type": "roformer", "rotary_value": True, "rope_theta": 10_000.0},
        {},
        "rotary_value",
    ),
    "four slices": (
        {"model_type": "codegen", "rotary_dim": 4, "rope_theta": 10_000.0},
        {},
        "type_refused: has four slices",
    ),
    "a weight of nothing": (
        {},
        {"model.layers.0.self_attn.q_proj.weight": tensor(np.zeros((32, 0)))},
        "rows: rows of whole bytes",
    ),
    "rows of half a byte more": (
        {},
        {"model.layers.0.self_attn.q_proj.weight": ("F4", [32, 3], bytes(48))},
        "rows: rows of whole bytes",
    ),
    "a scalar for a weight": (
        {},
        {"model.layers.0.self_attn.q_proj.weight": tensor(np.float64(1))},
        "rows: rows of whole bytes",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", SHAPES)
def test_what_cannot_be_converted_is_refused_and_named(tmp_path: Path, kind: str) -> None:
    """Rather than left as it is beside what was converted."""
    config, changes, said = SHAPES[kind]
    tensors = {n: t for n, t in (llama_tensors() | changes).items() if t is not None}
    folder = save_folder(tmp_path / "a", llama() | config, tensors)
    with refused(said):
        plan_conversion(folder, "interleaved", source="half")


def test_patterns_that_match_nothing_or_twice_are_refused(tmp_path: Path) -> None:
    """They match whole names, and a tensor is one thing."""
    file = save(tmp_path / "a.safetensors", {"Q.weight": tensor(np.zeros((8, 2)))})
    rope = Rope(head_dim=8, pairing="half")

    def planned(**patterns: tuple[str, ...]) -> None:
        plan_conversion(file, "interleaved", model=rope, patterns=Patterns(**patterns))

    with refused("unmatched", pattern="Q"):
        planned(query=("Q",))
    with refused("two_roles", roles="key, query"):
        planned(query=("Q.*",), key=(".*weight",))
    with refused("regex", role="query", pattern="("):
        planned(query=("(",))
    with refused("num_heads"):
        planned(blocks=("Q.*",))


SPEECH = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
BEFORE_PROJECTION: dict[str, dict[str, Any]] = {
    "wav2vec2-conformer": {**SPEECH, "position_embeddings_type": "rotary"},
    "wav2vec2-bert": {**SPEECH, "position_embeddings_type": "rotary"},
    "clvp_encoder": {**SPEECH, "hidden_size": 128, "projection_dim": 128},
}


@pytest.mark.parametrize("model_type", BEFORE_PROJECTION)
def test_what_turns_before_it_is_projected_or_turns_values_is_refused(
    model_type: str, tmp_path: Path
) -> None:
    """Even where the patterns say which weights are of queries and keys."""
    tensors = {
        f"encoder.layers.0.self_attn.linear_{name}.weight": tensor(np.zeros((32, 32)))
        for name in "qkv"
    }
    config = {"model_type": model_type, **BEFORE_PROJECTION[model_type]}
    folder = save_folder(tmp_path / "a", config, tensors)
    patterns = Patterns(query=(r".*linear_q\.weight",), key=(r".*linear_k\.weight",))
    with refused("type_refused", model_type=model_type):
        plan_conversion(folder, "interleaved", patterns=patterns)
