"""Files of programs that several tests change."""

from __future__ import annotations

from typing import Any

LITGPT = {
    "n_layer": 4,
    "n_head": 4,
    "n_embd": 512,
    "rotary_percentage": 1.0,
    "rope_base": 500000,
    "block_size": 8192,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_seq_len": 8192,
}
MEGATRON = {
    "num_layers": 4,
    "hidden_size": 512,
    "num_attention_heads": 4,
    "position_embedding_type": "rope",
    "rotary_base": 10000,
}
LITGPT_YARN = {"factor": 8.0, "beta_fast": 1.0, "beta_slow": 32.0, "original_max_seq_len": 4096}


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    """The config without some of its keys."""
    return {key: value for key, value in config.items() if key not in keys}
