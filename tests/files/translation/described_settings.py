"""Programs that make frequencies of settings, written from their documentation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .described import llama3, plain, yarn, yarn_multiplier


def long_factor_gain(length: float, original: float) -> float:
    """LongRoPE's factor on cos and sin, of two lengths."""
    if length <= original:
        return 1.0
    return math.sqrt(1 + math.log(length / original) / math.log(original))


def exllamav3(config: Mapping[str, Any], width: int) -> tuple[Tensor, float]:
    """Frequencies and the factor on cos and sin of a config, for a head of ``width``."""
    block, length = config["rope_parameters"], config["max_position_embeddings"]
    base, kind = block["rope_theta"], block["rope_type"]
    fraction = block.get("partial_rotary_factor", 1.0)
    freqs = plain(width if kind == "proportional" else int(width * fraction), base)
    if kind == "linear":
        freqs = freqs / block["factor"]
    elif kind == "llama3":
        original = block["original_max_position_embeddings"]
        low, high = block["low_freq_factor"], block["high_freq_factor"]
        freqs = llama3(freqs, block["factor"], low, high, original)
    elif kind == "proportional":
        freqs[int(fraction * width // 2) :] = 0
        freqs = freqs / block.get("factor", 1.0)
    elif kind == "yarn":
        # the factor is that of two lengths, where the block has the one before the extension
        assert isinstance(length, int)
        original = block.get("original_max_position_embeddings", length)
        factor = length / original if "original_max_position_embeddings" in block else None
        factor = factor or block["factor"]
        betas = {name: block[name] for name in ("beta_fast", "beta_slow")}
        truncate = block.get("truncate", True)
        freqs = yarn(freqs, base, factor, original, truncate=truncate, **betas)
        return freqs, block.get("attention_factor", yarn_multiplier(factor))
    elif kind == "longrope":
        original = block["original_max_position_embeddings"]
        which = "long_factor" if length > original else "short_factor"
        return freqs / torch.tensor(block[which]), long_factor_gain(length, original)
    else:
        assert kind == "default"
    return freqs, 1.0
