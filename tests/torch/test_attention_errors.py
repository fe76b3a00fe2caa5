"""`RotaryAttention` refuses layers that cannot be and calls that mean nothing, in words."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from phasor import PhasorError, PositionError, Rope, SpecError, TensorError
from phasor.axes import Sectioned
from phasor.scaling import DynamicNTK
from phasor.torch.kv_cache import KVCache

from .attention_reference import HALF, WIDTH, layer

RULE = Rope(head_dim=8, pairing="half", scaling=DynamicNTK(factor=2.0, original_max_positions=64))
SWITCHES = ("causal", "qkv_bias", "o_bias")
#: What is said of a layer that is built so.
BUILDS: dict[str, dict[str, Any]] = {
    "num_kv_heads must divide num_heads (4), got 3": {"num_kv_heads": 3},
    "head_dim must be a whole number >= 1, got None": {"rope": None},
    "rope must have the head_dim of this layer (16), got 8": {"head_dim": 16},
    "window must be None in a layer with causal=False, got 4": {"window": 4, "causal": False},
    "dropout must be a finite number >= 0 and <= 1, got 1.5": {"dropout": 1.5},
    "window must be a whole number >= 1, got 0": {"window": 0},
    "num_heads must be a whole number >= 1, got 0": {"num_heads": 0},
    "norm_eps must be a finite number > 0, got 0.0": {"norm_eps": 0.0},
    "qk_norm must be True or False, got 1e-06; norm_eps is the epsilon": {"qk_norm": 1e-6},
    **{f"{name} must be True or False, got 'no'": {name: "no"} for name in SWITCHES},
    "causal must be True or False, got 1": {"causal": 1},
    "scaling is the rule DynamicNTK, whose law depends on the length of the sequence; "
    "use rope.at(seq_len)": {"rope": RULE},
}


@pytest.mark.parametrize("text", BUILDS)
def test_layers_that_cannot_be_are_refused(text: str) -> None:
    """With the argument, what was expected and what came."""
    with pytest.raises(SpecError) as refused:
        layer(**BUILDS[text])
    assert str(refused.value) == text


TOKENS = torch.zeros(1, 5, WIDTH)
BOOLS = "; convert 0 and 1 with .bool()"
#: What is said of a call of a causal layer.
CAUSAL: dict[type[PhasorError], dict[str, dict[str, Any]]] = {
    TensorError: {
        "x must be [batch, seq, embed_dim] with embed_dim 12, got shape [5, 12]": {"x": TOKENS[0]},
        "x must be a dense torch.Tensor, got list": {"x": [1.0]},
        "attention_mask must be a dense torch.Tensor, got list": {"attention_mask": [1]},
        "cache must be a KVCache, got int": {"cache": 3},
        "cache must have the batch of x (1), got 3": {"cache": KVCache(3, 9, 4, 8)},
        "attention_mask must be bools of shape [1, 5], True for tokens, got torch.float32 of shape "
        f"[1, 5]{BOOLS}": {"attention_mask": torch.ones(1, 5)},
        "attention_mask must be bools of shape [1, 5], True for tokens, got torch.bool of shape "
        f"[5, 5]{BOOLS}": {"attention_mask": torch.ones(5, 5).bool()},
    },
    PositionError: {
        "cu_seqlens must be a whole number >= 0, got 2.5": {"cu_seqlens": [0, 2.5, 5]},
        "cu_seqlens must be whole numbers [0, ..., 5], got int": {"cu_seqlens": 5},
        "cu_seqlens must rise from 0 to the number of tokens (5), got [0, 4, 3, 5]; lengths "
        "become boundaries by a cumulative sum": {"cu_seqlens": [0, 4, 3, 5]},
        "cu_seqlens must rise from 0 to the number of tokens (5), got [0, 4]; lengths become "
        "boundaries by a cumulative sum": {"cu_seqlens": [0, 4]},
        "positions must be given for a Rope of 3 axes, got None; "
        "phasor.positions has grid for images and videos, multimodal for text with images, and "
        "every_axis for text": {
            "rope": Rope(head_dim=8, pairing="half", axes=Sectioned((2, 1, 1)))
        },
    },
    SpecError: {
        "cu_seqlens and attention_mask exclude each other; pass only one": {
            "cu_seqlens": [0, 5],
            "attention_mask": torch.ones(1, 5).bool(),
        },
        "cu_seqlens and cache exclude each other; pass only one": {
            "cu_seqlens": [0, 5],
            "cache": KVCache(1, 9, 4, 8),
        },
        "key_value_states must be None in a layer with causal=True; build it with causal=False": {
            "key_value_states": TOKENS
        },
    },
}
#: What is said of a call of a layer where every query sees every key.
FULL: dict[type[PhasorError], dict[str, dict[str, Any]]] = {
    TensorError: {
        "key_value_states must be [batch, seq, embed_dim] with embed_dim 12, got shape [1, 5, 8]": {
            "key_value_states": TOKENS[..., :8]
        },
        "key_value_states must have the batch of x (1), got 2": {
            "key_value_states": TOKENS.expand(2, 5, WIDTH)
        },
        "attention_mask must be bools of shape [1, 3], True for tokens, got torch.bool of shape "
        f"[1, 5]{BOOLS}": {
            "key_value_states": TOKENS[:, :3],
            "attention_mask": torch.ones(1, 5).bool(),
        },
    },
    SpecError: {
        "cache must be None in a layer with causal=False; build it with causal=True": {
            "cache": KVCache(1, 9, 4, 8)
        },
        "key_value_positions need key_value_states, got None": {
            "key_value_positions": torch.arange(5)
        },
        "cu_seqlens and key_value_states exclude each other; pass only one": {
            "key_value_states": TOKENS,
            "cu_seqlens": [0, 5],
        },
    },
}
CALLS = [
    pytest.param(causal, kind, text, call, id=text)
    for causal, kinds in ((True, CAUSAL), (False, FULL))
    for kind, calls in kinds.items()
    for text, call in calls.items()
]


@pytest.mark.parametrize(("causal", "kind", "text", "call"), CALLS)
def test_calls_that_mean_nothing_are_refused(
    causal: bool, kind: type[PhasorError], text: str, call: dict[str, Any]
) -> None:
    """With the argument, what was expected and what came."""
    given = {"x": TOKENS} | call
    attention = layer(torch.float32, causal=causal, rope=given.pop("rope", HALF))
    with pytest.raises(kind) as refused:
        attention(**given)
    assert str(refused.value) == text
