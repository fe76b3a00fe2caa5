"""`RotaryAttention` refuses layers that cannot be and calls that mean nothing, in words."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from phasor import PositionError, Rope, SpecError, TensorError
from phasor.axes import Sectioned
from phasor.scaling import DynamicNTK
from phasor.torch.kv_cache import KVCache

from .attention_oracle import WIDTH, layer

BUILDS: dict[str, tuple[dict[str, Any], str]] = {
    "heads do not divide": (
        {"num_kv_heads": 3},
        "num_kv_heads must divide num_heads (4), got 3",
    ),
    "no width of heads": (
        {"rope": None},
        "head_dim must be given where rope is None",
    ),
    "two widths of heads": (
        {"head_dim": 16},
        "head_dim must be the Rope's (8), got 16",
    ),
    "a window of everything": (
        {"window": 4, "causal": False},
        "window is for causal attention, got causal=False and window=4",
    ),
    "more than all dropped": (
        {"dropout": 1.5},
        "dropout must be a finite number >= 0 and <= 1, got 1.5",
    ),
    "an empty window": ({"window": 0}, "window must be a whole number >= 1, got 0"),
    "no heads": ({"num_heads": 0}, "num_heads must be a whole number >= 1, got 0"),
    "no epsilon": ({"norm_eps": 0.0}, "norm_eps must be a finite number > 0, got 0.0"),
    "an epsilon for a switch": (
        {"qk_norm": 1e-6},
        "qk_norm must be True or False, got 1e-06; norm_eps is the epsilon",
    ),
    **{
        f"{name}: a word": ({name: "no"}, f"{name} must be True or False, got 'no'")
        for name in ("causal", "qkv_bias", "o_bias")
    },
    "causal: a number": ({"causal": 1}, "causal must be True or False, got 1"),
    "a rule": (
        {
            "rope": Rope(
                head_dim=8,
                pairing="half",
                scaling=DynamicNTK(factor=2.0, original_max_positions=64),
            )
        },
        "scaling is the rule DynamicNTK, whose law depends on the length of the sequence; "
        "use rope.at(seq_len)",
    ),
}


@pytest.mark.parametrize("case", BUILDS)
def test_layers_that_cannot_be_are_refused(case: str) -> None:
    """With the argument, what was expected and what came."""
    options, text = BUILDS[case]
    with pytest.raises(SpecError) as refused:
        layer(**options)
    assert str(refused.value) == text


TOKENS = torch.zeros(1, 5, WIDTH)
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = {
    "x": (
        {},
        {"x": TOKENS[0]},
        TensorError,
        "x must be [batch, seq, embed_dim] with embed_dim 12, got shape [5, 12]",
    ),
    "x is a list": ({}, {"x": [1.0]}, TensorError, "x must be a torch.Tensor, got list"),
    "mask is a list": (
        {},
        {"attention_mask": [1]},
        TensorError,
        "attention_mask must be a torch.Tensor, got list",
    ),
    "cache is a number": ({}, {"cache": 3}, TensorError, "cache must be a KVCache, got int"),
    "boundaries between tokens": (
        {},
        {"cu_seqlens": [0, 2.5, 5]},
        PositionError,
        "cu_seqlens must be a whole number >= 0, got 2.5",
    ),
    "one boundary": (
        {},
        {"cu_seqlens": 5},
        PositionError,
        "cu_seqlens must be whole numbers [0, ..., 5], got int",
    ),
    "mask of numbers": (
        {},
        {"attention_mask": torch.ones(1, 5)},
        TensorError,
        "attention_mask must be bools of shape [1, 5], True for tokens, got torch.float32 of shape "
        "[1, 5]; .bool() makes bools of 0 and 1",
    ),
    "mask of another shape": (
        {},
        {"attention_mask": torch.ones(5, 5, dtype=torch.bool)},
        TensorError,
        "attention_mask must be bools of shape [1, 5], True for tokens, got torch.bool of shape "
        "[5, 5]; .bool() makes bools of 0 and 1",
    ),
    "boundaries that fall": (
        {},
        {"cu_seqlens": [0, 4, 3, 5]},
        PositionError,
        "cu_seqlens must rise from 0 to the number of tokens (5), got [0, 4, 3, 5]; lengths "
        "become boundaries by a cumulative sum",
    ),
    "boundaries that end early": (
        {},
        {"cu_seqlens": [0, 4]},
        PositionError,
        "cu_seqlens must rise from 0 to the number of tokens (5), got [0, 4]; lengths become "
        "boundaries by a cumulative sum",
    ),
    "packed and padded": (
        {},
        {"cu_seqlens": [0, 5], "attention_mask": torch.ones(1, 5, dtype=torch.bool)},
        SpecError,
        "cu_seqlens and attention_mask exclude each other; give one of them",
    ),
    "packed and cached": (
        {},
        {"cu_seqlens": [0, 5], "cache": KVCache(1, 9, 4, 8)},
        SpecError,
        "cu_seqlens and cache exclude each other; give one of them",
    ),
    "cached and full": (
        {"causal": False},
        {"cache": KVCache(1, 9, 4, 8)},
        SpecError,
        "cache is for causal attention, and this layer has causal=False",
    ),
    "cache of another batch": (
        {},
        {"cache": KVCache(3, 9, 4, 8)},
        TensorError,
        "cache must have the batch of x (1), got 3",
    ),
    "keys for a causal layer": (
        {},
        {"key_value_states": TOKENS},
        SpecError,
        "key_value_states are seen by every query, and this layer has causal=True; build it with "
        "causal=False",
    ),
    "keys of another width": (
        {"causal": False},
        {"key_value_states": TOKENS[..., :8]},
        TensorError,
        "key_value_states must be [batch, seq, embed_dim] with embed_dim 12, got shape [1, 5, 8]",
    ),
    "keys of another batch": (
        {"causal": False},
        {"key_value_states": TOKENS.expand(2, 5, WIDTH)},
        TensorError,
        "key_value_states must have the batch of x (1), got 2",
    ),
    "positions of no keys": (
        {"causal": False},
        {"key_value_positions": torch.arange(5)},
        SpecError,
        "key_value_positions are those of key_value_states, got None for them",
    ),
    "packed queries and other keys": (
        {"causal": False},
        {"key_value_states": TOKENS, "cu_seqlens": [0, 5]},
        SpecError,
        "cu_seqlens and key_value_states exclude each other; pad the keys, and give their "
        "attention_mask",
    ),
    "a mask of the queries for other keys": (
        {"causal": False},
        {"key_value_states": TOKENS[:, :3], "attention_mask": torch.ones(1, 5).bool()},
        TensorError,
        "attention_mask must be bools of shape [1, 3], True for tokens, got torch.bool of shape "
        "[1, 5]; .bool() makes bools of 0 and 1",
    ),
    "no positions for several axes": (
        {"rope": Rope(head_dim=8, pairing="half", axes=Sectioned((2, 1, 1)))},
        {},
        PositionError,
        "positions must be given for a Rope of 3 axes, got None; "
        "phasor.positions.grid makes those of images and videos, multimodal those of text with "
        "images in it, every_axis those of text",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_calls_that_mean_nothing_are_refused(case: str) -> None:
    """With the argument, what was expected and what came."""
    options, call, kind, text = REFUSED[case]
    with pytest.raises(kind) as refused:
        layer(torch.float32, **options)(**{"x": TOKENS} | call)
    assert str(refused.value) == text
