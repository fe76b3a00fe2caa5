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
    """A config with the least that a llama-like model needs: a size, a context and a base."""
    return sized(model_type, max_position_embeddings=8192, rope_theta=500000.0) | more
