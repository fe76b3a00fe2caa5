"""Programs that make frequencies of settings, written from their documentation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .described import angles_by_sections, llama3, plain, turned, yarn, yarn_multiplier


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


def litgpt(keys: Mapping[str, Any], width: int, *, local: bool) -> tuple[Tensor, float]:
    """Frequencies and the factor on cos and sin; its YaRN divides the pairs before the ramp."""
    n, condense = int(keys["rotary_percentage"] * width), keys.get("rope_condense_ratio", 1)
    given = keys.get("rope_adjustments", {})
    factor, gain = given.get("factor", 1.0), 1.0
    freqs = plain(n, keys["rope_base"])
    if "low_freq_factor" in given:
        ends = given["low_freq_factor"], given["high_freq_factor"], given["original_max_seq_len"]
        freqs = llama3(freqs, factor, *ends)
    elif "beta_fast" in given:
        own, every = given.get("mscale"), given.get("mscale_all_dim")
        if own or every:
            gain = yarn_multiplier(factor, own or every)
        if own and every:
            gain /= yarn_multiplier(factor, every)
        at = given["original_max_seq_len"] / (2 * math.pi)
        low, high = (
            n * math.log(at / given[name]) / (2 * math.log(keys["rope_base"]))
            for name in ("beta_fast", "beta_slow")
        )
        low, high = max(math.floor(low), 0), min(math.ceil(high), n // 2 - 1)
        assert low != high
        kept = ((torch.arange(n // 2) - low) / (high - low)).clamp(0, 1)
        freqs = freqs / factor * (1 - kept) + freqs * kept
    else:
        freqs = freqs / factor
    if local:
        freqs = plain(n, keys["rope_local_base_freq"])
    return freqs / condense, gain


def maxtext(keys: Mapping[str, Any], kind: str, x: Tensor, positions: Tensor) -> Tensor:
    """``x`` ``[seq, head_dim]`` turned by the class that the keys pick."""
    width, name = x.shape[-1], keys["rope_type"]
    for key, value in keys.items():
        if "proportion" not in key and key not in ("mscale", "partial_rotary_factor",
                                                  "rope_linear_scaling_factor"):  # fmt: skip
            assert not isinstance(value, float), "its configuration takes whole numbers here"
    if name == "yarn":
        assert positions.max() < keys["max_position_embeddings"], "beyond the table"
        original, base = keys["original_max_position_embeddings"], keys["rope_max_timescale"]
        betas = {key: keys[key] for key in ("beta_fast", "beta_slow")}
        freqs = yarn(plain(width, base), base, keys["rope_factor"], original,
                     truncate=keys["rope_truncate"], **betas)  # fmt: skip
        gain = yarn_multiplier(keys["rope_factor"]) if keys["rope_attention_scaling"] else 1.0
        angles = positions[:, None].float() * freqs
        out = turned(x, angles.cos(), angles.sin(), interleaved=keys["rope_interleave"]) * gain
        if keys["rope_interleave"] and not keys["rope_pairwise"]:
            out = torch.cat((out[..., ::2], out[..., 1::2]), -1)
        return out
    least, most = keys["rope_min_timescale"], keys["rope_max_timescale"]
    fraction, divisor, still = keys.get("partial_rotary_factor", 1.0), 1.0, None
    if name == "default":
        divisor = keys["rope_linear_scaling_factor"]
    if "sliding" in kind and "local_rope_max_timescale" in keys:
        most = keys["local_rope_max_timescale"]
        if keys["model_name"].startswith("gemma3"):
            divisor = 1.0
    elif "global_rope_proportion" in keys:
        assert keys["model_name"].startswith("gemma4")
        most, still = keys["global_rope_max_timescale"], keys["global_rope_proportion"]
    freqs = plain(int(width * fraction), most / least) / least / divisor
    if still is not None:
        freqs[int(width * still) // 2 :] = 0
    if keys.get("rope_use_scale"):
        freqs = llama3(freqs, 8, 1, 4, 8192)
    if positions.ndim == 1:
        angles = positions[:, None].float() * freqs
    else:
        assert sum(keys["mrope_section"]) == len(freqs)
        angles = angles_by_sections(positions, freqs, {**keys, "mrope_interleaved": True})
    return turned(x, angles.cos(), angles.sin(), interleaved=name == "llama3.1")


def tensorrt_llm(keys: Mapping[str, Any], *, local: bool, end: int) -> tuple[Tensor, float]:
    """Frequencies and the factor on cos and sin of a checkpoint, for a batch of ``end`` tokens."""
    base = keys["rope_local_base_freq"] if local else keys["rotary_base"]
    length = keys["max_position_embeddings"]
    if latent := "qk_rope_head_dim" in keys:
        assert not {"head_size", "position_embedding_type"} & keys.keys(), "they are in its code"
        assert keys["rotary_scaling"]["type"] == "yarn", "its code reads the numbers of no other"
        n = keys["qk_rope_head_dim"]
    else:
        n = int(keys["head_size"] * keys.get("rotary_pct", 1.0))
    assert end <= length, "beyond the table"
    freqs, law = plain(n, base), keys["rotary_scaling"] or {"type": "none"}
    if not latent and keys["position_embedding_type"] == "long_rope":
        original = keys["original_max_position_embeddings"]
        which = "long" if end > original else "short"
        freqs = freqs / torch.tensor(keys[f"longrope_scaling_{which}_factors"])
        return freqs, long_factor_gain(length, original)
    if law["type"] == "linear":
        freqs = freqs / law["factor"]
    elif law["type"] == "llama3":
        original = law["original_max_position_embeddings"]
        freqs = llama3(
            freqs, law["factor"], law["low_freq_factor"], law["high_freq_factor"], original
        )
    elif law["type"] == "yarn":
        betas = {name: law[name] for name in ("beta_fast", "beta_slow")}
        freqs = yarn(freqs, base, law["factor"], law["original_max_position_embeddings"], **betas)
        own, every = (
            yarn_multiplier(law["factor"], law[name]) for name in ("mscale", "mscale_all_dim")
        )
        return freqs, own / every
    else:
        assert law["type"] in ("none", "mrope")
    return freqs, 1.0
