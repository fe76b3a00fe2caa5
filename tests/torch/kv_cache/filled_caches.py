"""Caches of transformers, empty and filled with rotated keys."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

from phasor import Rope
from phasor.torch import rotate

from ..attention_reference import HALF
from ..torch_arrays import normal

OTHER = Rope(head_dim=8, pairing="half", base=777.0)
ROPES = (HALF, None, OTHER)


def raw(seq: int, seed: int) -> Tensor:
    """Keys or values before anything: ``[batch, seq, heads, width]``."""
    return normal(2, seq, 3, 8, dtype=torch.float64, seed=seed)


def config(layers: int, **more: Any) -> Any:
    """A small Llama of transformers."""
    shape = {
        "vocab_size": 50,
        "hidden_size": 48,
        "intermediate_size": 32,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 8,
        "num_hidden_layers": layers,
        "max_position_embeddings": 512,
    }
    return transformers.LlamaConfig(**shape | more)


def empty(kind: str, capacity: int = 20, layers: int = 3) -> Any:
    """A cache of transformers for that many layers."""
    if kind == "dynamic":
        return transformers.DynamicCache()
    if kind == "dynamic, of a config":
        return transformers.DynamicCache(config=config(layers))
    return transformers.StaticCache(config=config(layers), max_cache_len=capacity)


def filled(kind: str, seq: int = 9, ropes: Any = ROPES, first: int = 0, at: int = 0) -> Any:
    """A cache of tokens ``first`` onwards of `raw`, standing at ``at`` onwards."""
    cache = empty(kind)
    for index, rope in enumerate(ropes):
        k, v = (raw(20, seed)[:, first : first + seq] for seed in (index, index + 50))
        k = k if rope is None else rotate(k, range(at, at + seq), rope, gain=rope.attention_factor)
        cache.update(k.transpose(1, 2), v.transpose(1, 2), index)
    return cache


def layered(count: int) -> Any:
    """A cache of two layers that holds ``count`` tokens."""
    made = transformers.DynamicCache()
    for index in range(2):
        made.update(*normal(2, 1, 1, count, 4, seed=index), index)
    return made
