"""Decoding with a key cache is the full forward pass, however its rows are fed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from phasor import SpecError, TensorError
from phasor.torch import rotate, rotate_
from phasor.torch.attention import RotaryAttention
from phasor.torch.kv_cache import KVCache

from ..attention_reference import HALF, HEADS, WIDTH, assert_attends, causal, last, layer
from ..torch_arrays import normal

DTYPES = [torch.float64, torch.float32]
# name: arguments, and who sees whom
LAYERS: dict[str, tuple[dict[str, Any], Any]] = {
    "causal": ({}, causal),
    "window": ({"window": 3}, last(3)),
    "grouped, normed": ({"num_kv_heads": 1, "qk_norm": True}, causal),
    "without positions": ({"rope": None, "head_dim": 6}, causal),
}


def frozen(dtype: torch.dtype = torch.float64, **options: Any) -> RotaryAttention:
    """A layer that wants no gradient."""
    return layer(dtype, **options).requires_grad_(False)


FED = {
    "each with its own positions": [1] * 11,
    "a prompt, then each with its own positions": [6, 1, 1, 1, 1, 1],
    "in pieces": [2, 5, 4],
    "nothing first": [0, 4, 0, 7],
}


@pytest.mark.parametrize("fed", FED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_decoding_is_the_full_forward_pass(
    name: str, dtype: torch.dtype, fed: str, chunk: int
) -> None:
    """Token by token or in pieces, to within what rounding can do."""
    options, sees = LAYERS[name]
    attention, x = frozen(dtype, **options), normal(2, 11, WIDTH, dtype=dtype)
    cache = attention.make_cache(batch_size=2, capacity=11)
    y = torch.cat([attention(part, cache=cache) for part in x.split(FED[fed], dim=1)], dim=1)
    for row in range(2):
        assert_attends(y[row], attention, x[row], sees)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_rows_may_grow_from_different_lengths(
    name: str, dtype: torch.dtype, side: str, chunk: int
) -> None:
    """Prompts of 2, 5 and 0 tokens, 3 tokens more, and a last piece that some rows sit out."""
    options, sees = LAYERS[name]
    attention, x = frozen(dtype, **options), normal(3, 12, WIDTH, dtype=dtype)
    cache = attention.make_cache(batch_size=3, capacity=12)
    lengths = torch.tensor([2, 5, 0])[:, None]
    along = torch.arange(5)
    prompt = along >= 5 - lengths if side == "left" else along < lengths
    every = torch.ones(3, 1, dtype=torch.bool)
    end = torch.tensor([[True, False, True, False], [False] * 4, [True] * 4])
    masks = [prompt, every, every, every, end]
    parts = x.split([5, 1, 1, 1, 4], dim=1)
    y = torch.cat(
        [attention(p, attention_mask=m, cache=cache) for p, m in zip(parts, masks, strict=True)], 1
    )
    assert y.isfinite().all()
    assert cache.lengths.tolist() == [7, 8, 7]
    kept = torch.cat(masks, dim=1)
    for row in range(3):
        assert_attends(y[row, kept[row]], attention, x[row, kept[row]], sees)


def test_cached_keys_are_rotated_and_stand_in_order() -> None:
    """Each row's own tokens, padding left out, from its first place on."""
    attention, x = frozen(), normal(2, 4, WIDTH, dtype=torch.float64)
    cache = attention.make_cache(batch_size=2, capacity=6)
    mask = torch.tensor([[False, True, False, True], [True] * 4])
    attention(x, attention_mask=mask, cache=cache)
    for row in range(2):
        tokens = x[row, mask[row]]
        held = slice(0, len(tokens))
        keys = (tokens @ attention.k_proj.weight.mT).view(-1, HEADS, 8)
        expected = rotate(keys, range(len(tokens)), HALF)
        # dot products of 12 terms of size 1, in another order
        assert (cache.keys[row, held] - expected).abs().max() < 1e-14
        values = (tokens @ attention.v_proj.weight.mT).view(-1, HEADS, 8)
        assert (cache.values[row, held] - values).abs().max() < 1e-14


def test_moved_keys_serve_moved_queries() -> None:
    """Rotated in place by 5, and the next token at 4 + 5: only distances count."""
    attention, x = frozen(), normal(1, 5, WIDTH, dtype=torch.float64)
    cache = attention.make_cache(batch_size=1, capacity=5)
    attention(x[:, :4], cache=cache)
    rotate_(cache.keys, 5, HALF)
    y = attention(x[:, 4:], torch.tensor([9]), cache=cache)
    whole = attention(x)[:, 4:]
    # scores below 10 by rows that are each off by 4e-15
    assert (y - whole).abs().max() < 1e-12


def test_memory_is_taken_once() -> None:
    """What is held is in the same place after every token."""
    attention, x = frozen(), normal(1, 6, WIDTH, dtype=torch.float64)
    cache = attention.make_cache(batch_size=1, capacity=6)
    ends = []
    for token in x.split(1, dim=1):
        attention(token, cache=cache)
        ends.append([held.data_ptr() for held in (cache.keys, cache.values, cache.lengths)])
    assert ends == ends[:1] * 6
    assert cache.keys.shape == (1, 6, HEADS, 8)


def test_a_full_cache_refuses_and_keeps_what_it_holds() -> None:
    """Padding counts as a column: nothing asks the device which rows have room."""
    cache = KVCache(batch_size=1, capacity=3, num_kv_heads=1, head_dim=2)
    cache.append(*ones(1, 2), torch.tensor([[False, True]]))
    with pytest.raises(TensorError) as refused:
        cache.append(*ones(1, 2))
    assert str(refused.value) == (
        "capacity must be at least 4 for 2 more columns, got 3; make a longer cache"
    )
    assert (cache.used, cache.lengths.tolist()) == (2, [1])
    assert cache.keys[:, 1:].abs().max() == 0


def ones(batch: int, new: int, **kind: Any) -> tuple[Tensor, Tensor]:
    """A key and a value for a cache of one head of two coordinates."""
    return torch.ones(batch, new, 1, 2, **kind), torch.ones(batch, new, 1, 2, **kind)


HELD = "[2, 1, 1, 2] in torch.float32 like the cache, got"
REFUSED: dict[str, tuple[Any, ...]] = {
    f"k must be {HELD} [3, 1, 1, 2] in torch.float32": ones(3, 1),
    f"k must be {HELD} [2, 1, 2] in torch.float32": (torch.ones(2, 1, 2),) * 2,
    "v must be [2, 2, 1, 2] in torch.float32 like the cache, got [2, 1, 1, 2] in torch.float32": (
        ones(2, 2)[0],
        ones(2, 1)[0],
    ),
    f"k must be {HELD} [2, 1, 1, 2] in torch.float64": ones(2, 1, dtype=torch.float64),
    "k must not require a gradient: a cache is overwritten, so it cannot record one; "
    "decode inside torch.no_grad()": ones(2, 1, requires_grad=True),
    "attention_mask must be bools of shape [2, 1], True for tokens, got torch.bool of shape "
    "[1, 1]; convert 0 and 1 with .bool()": (*ones(2, 1), torch.ones(1, 1).bool()),
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_does_not_fit_is_refused(text: str) -> None:
    """With the argument, what was expected and what came; nothing is written."""
    cache = KVCache(batch_size=2, capacity=3, num_kv_heads=1, head_dim=2)
    with pytest.raises(TensorError) as refused:
        cache.append(*REFUSED[text])
    assert str(refused.value) == text
    assert cache.used == 0


def test_a_cache_of_no_size_is_refused() -> None:
    """With the argument's name."""
    with pytest.raises(SpecError, match=r"^capacity must be a whole number >= 1, got 0$"):
        KVCache(batch_size=1, capacity=0, num_kv_heads=1, head_dim=2)


def test_a_cache_of_inference_mode_is_appended_to_only_there() -> None:
    """As torch has it, and nothing is written."""
    k = torch.ones(1, 1, 1, 2)
    with torch.inference_mode():
        cache = KVCache(batch_size=1, capacity=3, num_kv_heads=1, head_dim=2)
        cache.append(k, k)
    with torch.no_grad(), pytest.raises(TensorError, match="an inference tensor outside"):
        cache.append(k, k)
    assert cache.used == 1
    with torch.inference_mode():
        cache.append(k, k)
    assert cache.used == 2


def test_training_through_a_cache_is_refused() -> None:
    """By the layer too, where weights want a gradient."""
    attention = layer(torch.float32)
    with pytest.raises(TensorError, match=r"^k must not require a gradient"):
        attention(normal(1, 2, WIDTH), cache=attention.make_cache(batch_size=1, capacity=2))
