"""Checkpoints that are whole and cannot be converted: refused, with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phasor import PhasorError, Rope
from phasor.files.checkpoint import CheckpointError, Patterns, plan_conversion

from .checkpoints import llama, llama_tensors, save, save_folder, tensor

SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "heads that do not divide": (
        {"head_dim": 12},
        {},
        "rows must be whole heads of head_dim 12, got F64 \\[32, 32\\]",
    ),
    "too few heads": ({"num_attention_heads": 8, "head_dim": 8}, {}, "must hold 8 heads"),
    "keys that do not divide": (
        {"num_key_value_heads": 1},
        {"model.layers.0.self_attn.k_proj.weight": tensor(np.zeros((24, 32)))},
        "its heads must divide the 4 query heads",
    ),
    "latent queries that are too narrow": (
        {"model_type": "deepseek_v3", "qk_rope_head_dim": 8},
        {"model.layers.0.self_attn.q_proj.weight": tensor(np.zeros((16, 32)))},
        "must hold 4 heads of 8 rows or more",
    ),
    "an odd part of a head": ({"head_dim": 7}, {}, "even"),
    "keys that are values": (
        {},
        {"model.layers.0.self_attn.v_proj.weight": None},
        "needs a separate v_proj",
    ),
    "a packed weight": (
        {},
        {"model.layers.0.self_attn.q_proj.qweight": tensor(np.zeros((4, 32)))},
        "what it holds is not known",
    ),
    "a fused projection of unknown order": (
        {},
        {"model.layers.0.self_attn.qkv_proj.weight": tensor(np.zeros((64, 32)))},
        "in blocks or in groups,",
    ),
    "an index over keys": (
        {},
        {"model.layers.0.self_attn.indexer.wk.weight": tensor(np.zeros((8, 32)))},
        "a rotation outside attention that",
    ),
    "queries without keys": (
        {},
        {name: None for name in llama_tensors() if "k_proj" in name},
        r"queries and keys of model\.layers\.0\.self_attn, got only query",
    ),
    "a layer without its keys": (
        {},
        {"model.layers.1.self_attn.k_proj.weight": None},
        r"queries and keys of model\.layers\.1\.self_attn, got only query",
    ),
    "a layer without its queries": (
        {},
        {"model.layers.0.self_attn.q_proj.weight": None},
        r"queries and keys of model\.layers\.0\.self_attn, got only key",
    ),
    "a layer of biases alone": (
        {},
        {f"model.layers.0.self_attn.{one}_proj.weight": None for one in "qk"},
        r"queries and keys of model\.layers\.0\.self_attn, got neither",
    ),
    "nothing to convert": (
        {},
        {name: None for name in llama_tensors() if "self_attn" in name},
        r"nothing to convert; its tensors are model.embed_tokens.weight \(1\)",
    ),
    "a latent key without latent attention": (
        {},
        {"model.layers.0.self_attn.kv_a_proj_with_mqa.weight": tensor(np.zeros((16, 32)))},
        "no latent attention",
    ),
    "values that are rotated": (
        {"model_type": "roformer", "rotary_value": True, "rope_theta": 10_000.0},
        {},
        "rotary_value",
    ),
    "four slices": (
        {"model_type": "codegen", "rotary_dim": 4, "rope_theta": 10_000.0},
        {},
        "has four slices",
    ),
    "a weight of nothing": (
        {},
        {"model.layers.0.self_attn.q_proj.weight": tensor(np.zeros((32, 0)))},
        "rows of whole bytes",
    ),
    "rows of half a byte more": (
        {},
        {"model.layers.0.self_attn.q_proj.weight": ("F4", [32, 3], bytes(48))},
        "rows of whole bytes",
    ),
    "a scalar for a weight": (
        {},
        {"model.layers.0.self_attn.q_proj.weight": tensor(np.float64(1))},
        "rows of whole bytes",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", SHAPES)
def test_what_cannot_be_converted_is_refused_and_named(tmp_path: Path, kind: str) -> None:
    """Rather than left as it is beside what was converted."""
    config, changes, said = SHAPES[kind]
    tensors = {n: t for n, t in (llama_tensors() | changes).items() if t is not None}
    folder = save_folder(tmp_path / "a", llama() | config, tensors)
    with pytest.raises(PhasorError, match=said):
        plan_conversion(folder, "interleaved", source="half")


def test_patterns_that_match_nothing_or_twice_are_refused(tmp_path: Path) -> None:
    """They match whole names, and a tensor is one thing."""
    file = save(tmp_path / "a.safetensors", {"Q.weight": tensor(np.zeros((8, 2)))})
    rope = Rope(head_dim=8, pairing="half")

    def planned(**patterns: tuple[str, ...]) -> None:
        plan_conversion(file, "interleaved", model=rope, patterns=Patterns(**patterns))

    with pytest.raises(CheckpointError, match=r"'Q' must match a whole name, but matches none of"):
        planned(query=("Q",))
    with pytest.raises(CheckpointError, match="of one kind, got key, query"):
        planned(query=("Q.*",), key=(".*weight",))
    with pytest.raises(CheckpointError, match=r"query must be a regular expression, got '\('"):
        planned(query=("(",))
    with pytest.raises(CheckpointError, match="without the number of query heads"):
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
    with pytest.raises(CheckpointError, match=f"{model_type} cannot be converted: "):
        plan_conversion(folder, "interleaved", patterns=patterns)
