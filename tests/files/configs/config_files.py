"""Hugging Face configs for tests: files of published models, and the least one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONFIGS = Path(__file__).parent


def plain(name: str) -> dict[str, Any]:
    """A fixture as the dictionary it holds."""
    return json.loads((CONFIGS / f"{name}.json").read_text("utf-8"))


def sized(model_type: str, **more: Any) -> dict[str, Any]:
    """A config that says its size alone: four layers with 128-wide heads."""
    return {
        "model_type": model_type,
        "num_hidden_layers": 4,
        "hidden_size": 512,
        "num_attention_heads": 4,
    } | more


def small(model_type: str = "llama", **more: Any) -> dict[str, Any]:
    """A config with the least that a llama-like model needs: a size, a context and a base.

    The context is 8192, or what the factor of a YaRN makes of its original one.
    """
    context = 8192
    for block in (more.get("rope_scaling"), more.get("rope_parameters")):
        if isinstance(block, dict) and "yarn" in (block.get("rope_type"), block.get("type")):
            factor, original = map(block.get, ("factor", "original_max_position_embeddings"))
            if type(factor) in (int, float) and 1 < factor < 1e6 and type(original) is int:
                context = round(factor * original)
    return sized(model_type, max_position_embeddings=context, rope_theta=500000.0) | more


def gguf(architecture: str = "llama", **more: Any) -> dict[str, Any]:
    """Metadata of a small model, keys given without their prefix and with _ for the dots."""
    keys = {"block_count": 4, "context_length": 8192, "embedding_length": 512}
    keys |= {"attention.head_count": 4, "rope.freq_base": 500000.0}
    keys |= {key.replace("__", "."): value for key, value in more.items()}
    prefixed = {f"{architecture}.{k}": v for k, v in keys.items() if v is not None}
    return {"general.architecture": architecture} | prefixed
