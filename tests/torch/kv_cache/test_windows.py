"""Layers with sliding windows, static ones and recurrent ones are edited like any other.

A model that goes on from an edited cache answers like one that reads the tokens anew.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import cache_utils

import phasor
from phasor import PhasorWarning, Rope, SpecError, TensorError
from phasor.torch import rotate
from phasor.torch.kv_cache import CachedKeys

from ...rounding import rounding
from ..attention_reference import HALF
from ..live.live_models import cache_name, difference
from .filled_caches import OTHER, config, raw

WINDOW, SEQ = 6, 12
ROPES = (HALF, OTHER, None)
# two rotations in float64, of numbers below 8
CLOSE = {"rtol": 0.0, "atol": 8 * 1e-14}
kinds = pytest.mark.parametrize("kind", ["dynamic", "static"])
hybrids = pytest.mark.skipif(
    not hasattr(cache_utils, "LinearAttentionLayer"),
    reason="this transformers has a cache class for each model with recurrent layers",
)


def windowed(kind: str, seq: int = SEQ, first: int = 0) -> Any:
    """A layer that slides, one that keeps everything, and one more that slides."""
    if kind == "dynamic":
        slides = [cache_utils.DynamicSlidingWindowLayer(sliding_window=WINDOW) for _ in range(2)]
        layers = [slides[0], cache_utils.DynamicLayer(), slides[1]]
    else:
        options = {"max_cache_len": 20, "sliding_window": WINDOW}
        slides = [cache_utils.StaticSlidingWindowLayer(**options) for _ in range(2)]
        layers = [slides[0], cache_utils.StaticLayer(max_cache_len=20), slides[1]]
    cache = transformers.DynamicCache()
    cache.layers = layers
    for start in range(0, seq, 4):  # a prompt in chunks, so that windows slide
        stop = min(start + 4, seq)
        for index, rope in enumerate(ROPES):
            k, v = (raw(20, seed)[:, first + start : first + stop] for seed in (index, index + 50))
            k = k if rope is None else rotate(k, range(start, stop), rope)
            layers[index].update(k.transpose(1, 2), v.transpose(1, 2))
    return cache


def assert_holds(cache: Any, tokens: Sequence[int], at: Any, kept: Sequence[range]) -> None:
    """In each layer the kept ones of these tokens of `raw`, with keys rotated to ``at``."""
    at = torch.as_tensor(at).expand(2, -1)
    for index, (rope, indices) in enumerate(zip(ROPES, kept, strict=True)):
        layer, held = cache.layers[index], list(indices)
        assert int(layer.get_seq_length()) == len(tokens) == indices.stop
        k, v = (raw(20, seed)[:, [tokens[i] for i in held]] for seed in (index, index + 50))
        k = k if rope is None else rotate(k, at[:, held], rope)
        # a static window that has slid holds its tokens behind a slot that nobody reads again
        first = 1 if len(held) < len(tokens) and hasattr(layer, "max_cache_len") else 0
        slots = slice(first, first + len(held))
        keys, values = (x[:, :, slots].transpose(1, 2) for x in (layer.keys, layer.values))
        torch.testing.assert_close(keys, k, **CLOSE)
        assert torch.equal(values, v)


def last(count: int, of: int) -> list[range]:
    """What the three layers keep of so many tokens."""
    window = range(of - count, of)
    return [window, range(of), window]


@kinds
@pytest.mark.parametrize(
    ("start", "stop", "window"), [(0, 3, 5), (2, 6, 5), (0, 8, 4), (0, 10, 2), (7, 7, 5)]
)
def test_a_range_before_the_window_moves_it(kind: str, start: int, stop: int, window: int) -> None:
    """It then holds as many tokens as before, or all that are left if the range begins them."""
    cache = windowed(kind)
    held = CachedKeys(cache, ROPES)
    held.evict_(start, stop)
    tokens = [i for i in range(SEQ) if not start <= i < stop]
    assert len(held) == len(tokens)
    assert list(held.kept) == last(window, len(tokens))
    assert_holds(cache, tokens, range(len(tokens)), held.kept)


@kinds
@pytest.mark.parametrize(("start", "stop"), [(2, 9), (8, 10), (11, 12)])
def test_tokens_that_would_come_back_into_a_window_are_named(
    kind: str, start: int, stop: int
) -> None:
    """Token 7 is the first that the window still holds; nothing is written."""
    cache = windowed(kind)
    held = CachedKeys(cache, ROPES)
    with pytest.raises(TensorError, match=r"fell out of its window \(it holds those from 7 on\)"):
        held.evict_(start, stop)
    assert_holds(cache, range(SEQ), range(SEQ), last(5, SEQ))


@kinds
@pytest.mark.parametrize(("seq", "new"), [(12, range(11, 14)), (11, range(12, 20))])
@pytest.mark.parametrize("place", [0, 6, 7, 10, -1])
def test_tokens_put_in_push_others_out_of_the_window(
    kind: str, seq: int, new: range, place: int
) -> None:
    """Also if those are themselves what is left of a window."""
    cache = windowed(kind, seq)
    at = place if place >= 0 else seq
    held = CachedKeys(cache, ROPES)
    held.insert_(at, windowed("dynamic", seq=len(new), first=new.start))
    tokens = [*range(at), *new, *range(at, seq)]
    assert list(held.kept) == last(5, len(tokens))
    assert_holds(cache, tokens, range(len(tokens)), held.kept)


@kinds
@pytest.mark.parametrize("seq", [4, 6, 7])
def test_a_window_that_is_not_full_keeps_everything(kind: str, seq: int) -> None:
    """A static one holds one token more than a growing one, until the next comes."""
    cache = windowed(kind, seq)
    held = CachedKeys(cache, ROPES)
    window = min(seq, 6 if (kind, seq) == ("static", 6) else 5)
    assert list(held.kept) == last(window, seq)
    held.evict_(0, 2)
    assert_holds(cache, range(2, seq), range(seq - 2), last(min(seq - 2, window), seq - 2))


@kinds
def test_every_token_is_shifted_by_its_own_distance(kind: str) -> None:
    """Distances are those of all tokens, so a window takes the last ones."""
    cache, delta = windowed(kind), torch.arange(2 * SEQ).view(2, SEQ)
    CachedKeys(cache, ROPES).shift_(delta)
    assert_holds(cache, range(SEQ), torch.arange(SEQ) + delta, last(5, SEQ))


@kinds
def test_a_windows_keys_are_retuned_at_their_positions(kind: str) -> None:
    """Of the whole sequence, of which it holds the last."""
    cache = windowed(kind)
    CachedKeys(cache, ROPES).retune_(range(SEQ), (OTHER, HALF, None))
    for index, rope in ((0, OTHER), (1, HALF)):
        layer, tokens = cache.layers[index], range(7, SEQ) if index == 0 else range(SEQ)
        first = 1 if index == 0 and kind == "static" else 0
        keys = layer.keys[:, :, first : first + len(tokens)].transpose(1, 2)
        expected = rotate(raw(20, index)[:, tokens], tokens, rope)
        torch.testing.assert_close(keys, expected, **CLOSE)


def test_a_static_window_stays_where_it_is_in_memory() -> None:
    """And what it does not hold is untouched: the slot that is over, and the empty ones."""
    cache = windowed("static", seq=5)
    layer = cache.layers[0]
    where = [x.data_ptr() for x in (layer.keys, layer.values, layer.cumulative_length)]
    layer.keys[:, :, 5:] = 7.0
    CachedKeys(cache, ROPES).shift_(3)
    assert [x.data_ptr() for x in (layer.keys, layer.values, layer.cumulative_length)] == where
    assert bool((layer.keys[:, :, 5:] == 7.0).all())


@pytest.mark.skipif(
    not hasattr(cache_utils.DynamicSlidingWindowLayer, "activate_past_recording"),
    reason="this transformers cannot roll a window back",
)
def test_a_window_that_records_its_past_is_rolled_back() -> None:
    """Rejected tokens of a draft are the last ones."""
    cache = windowed("dynamic", seq=8)
    cache.activate_past_recording()
    for index in range(3):
        k, v = (raw(20, seed)[:, 8:12].transpose(1, 2) for seed in (index, index + 50))
        rope = ROPES[index]
        if rope is not None:
            k = rotate(k, range(8, 12), rope, heads_first=True)
        cache.layers[index].update(k, v)
    held = CachedKeys(cache, ROPES)
    held.evict_(9, 12)
    assert_holds(cache, range(9), range(9), [range(3, 9), range(9), range(3, 9)])


SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
WIDE = SIZES | {"head_dim": 8}


def gemma3(layers: int) -> Any:
    """Sliding and full layers in turn, each with another base."""
    kinds = ["sliding_attention", "full_attention"] * 2
    more = {"sliding_window": 8, "layer_types": kinds[:layers]}
    return transformers.Gemma3TextConfig(num_hidden_layers=layers, **WIDE, **more)


def mistral(layers: int) -> Any:
    """Sliding layers only."""
    return transformers.MistralConfig(num_hidden_layers=layers, sliding_window=8, **WIDE)


def llama(layers: int) -> Any:
    """Layers that keep every token."""
    return transformers.LlamaConfig(num_hidden_layers=layers, **WIDE)


def lfm2(layers: int) -> Any:
    """Convolutions and full layers in turn."""
    kinds = ["conv", "full_attention"] * 2
    return transformers.Lfm2Config(num_hidden_layers=layers, layer_types=kinds[:layers], **SIZES)


def falcon_h1(layers: int) -> Any:
    """Mamba and attention in the same layers."""
    mamba = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8}
    return transformers.FalconH1Config(num_hidden_layers=layers, mamba_n_groups=1, **mamba, **WIDE)


MODELS = [
    *(llama, gemma3, mistral),
    *(pytest.param(make, marks=hybrids) for make in (lfm2, falcon_h1)),
]


def ropes_of(settings: Any) -> Any:
    """Those of the config."""
    return phasor.load(json.loads(settings.to_json_string()))


def ids(count: int, seed: int = 0) -> Tensor:
    """Two rows of tokens."""
    return torch.randint(3, 50, (2, count), generator=torch.Generator().manual_seed(seed))


def new_cache(settings: Any, kind: str) -> Any:
    """A cache as the model's program makes it."""
    if kind == "dynamic":
        return transformers.DynamicCache(config=settings)
    return transformers.StaticCache(config=settings, max_cache_len=48)


@torch.no_grad()
def run(net: Any, tokens: Tensor, cache: Any, first: int | None = None) -> Tensor:
    """Logits, with tokens at ``first`` onwards or where the cache ends."""
    at = None if first is None else torch.arange(first, first + tokens.shape[1])[None]
    options = {cache_name(net): cache, "position_ids": at, "use_cache": True}
    return net(tokens, **options).logits


def built(settings: Any) -> Any:
    """A model with random weights, the same each time."""
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(settings).eval()


@kinds
@pytest.mark.parametrize("make", MODELS)
def test_a_deep_model_goes_on_from_shifted_keys(make: Any, kind: str) -> None:
    """As if the prompt had been at other positions; recurrent states know none."""
    settings, tokens = make(4), ids(24)
    net = built(settings)

    def anew(net: Any) -> Tensor:
        return run(net, tokens, new_cache(settings, kind), first=100)[:, 20:]

    cache = new_cache(settings, kind)
    run(net, tokens[:, :20], cache)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PhasorWarning)
        CachedKeys(cache, ropes_of(settings)).shift_(100)
    logits = run(net, tokens[:, 20:], cache, first=120)
    assert difference(anew(net), logits) <= rounding(net, anew)


# a single layer, because a key of a deeper one depends on the tokens that the model saw before it
SINGLE = [llama, gemma3, mistral]


@kinds
@pytest.mark.parametrize("make", SINGLE)
@pytest.mark.parametrize(("start", "stop"), [(2, 9), (0, 15), (0, 4)])
def test_a_model_goes_on_without_the_range(make: Any, kind: str, start: int, stop: int) -> None:
    """Token by token, so that windows slide further."""
    settings, tokens = make(1), ids(24)
    net = built(settings)
    kept = [i for i in range(24) if not start <= i < stop]

    def anew(net: Any) -> Tensor:
        return run(net, tokens[:, kept], new_cache(settings, kind))[:, -4:]

    cache = new_cache(settings, kind)
    run(net, tokens[:, :20], cache)
    CachedKeys(cache, ropes_of(settings)).evict_(start, stop)
    logits = [run(net, tokens[:, i : i + 1], cache) for i in range(20, 24)]
    assert difference(anew(net), torch.cat(logits, 1)) <= rounding(net, anew)


@kinds
@pytest.mark.parametrize("make", SINGLE)
@pytest.mark.parametrize("at", [0, 7, 14, 20])
def test_a_model_goes_on_behind_what_was_put_in(make: Any, kind: str, at: int) -> None:
    """Also where both caches are windows that have slid."""
    settings, tokens, new = make(1), ids(24), ids(12, seed=1)
    net = built(settings)
    joined = torch.cat((tokens[:, :at], new, tokens[:, at:]), 1)

    def anew(net: Any) -> Tensor:
        return run(net, joined, new_cache(settings, kind))[:, -4:]

    cache, other = new_cache(settings, kind), new_cache(settings, "dynamic")
    run(net, tokens[:, :20], cache)
    run(net, new, other)
    CachedKeys(cache, ropes_of(settings)).insert_(at, other)
    logits = [run(net, tokens[:, i : i + 1], cache) for i in range(20, 24)]
    assert difference(anew(net), torch.cat(logits, 1)) <= rounding(net, anew)


@hybrids
@kinds
@pytest.mark.parametrize("make", [lfm2, falcon_h1])
def test_a_state_that_still_covers_removed_tokens_is_named(make: Any, kind: str) -> None:
    """The keys beside it are edited; layers without keys keep nothing that could be."""
    settings = make(2)
    net, cache = built(settings), new_cache(settings, kind)
    run(net, ids(20), cache)
    held = CachedKeys(cache, ropes_of(settings))
    held.evict_(2, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PhasorWarning)
        with pytest.raises(PhasorWarning):
            held.evict_(2, 7)
    assert len(held) == 20  # nothing was written
    states = "[0]" if make is lfm2 else "[0, 1]"
    assert held.kept == (None if make is lfm2 else range(20), range(20))
    with pytest.warns(PhasorWarning, match=r"still covers the 5 removed tokens") as caught:
        held.evict_(2, 7)
    assert f"layers {states} have a recurrent state" in str(caught[0].message)
    assert held.kept[1] == range(15)
    other = new_cache(settings, "dynamic")
    run(net, ids(3), other)
    with pytest.warns(PhasorWarning, match=r"covers none of the 3 inserted tokens"):
        held.insert_(0, other)


@hybrids
def test_a_layer_without_keys_takes_no_rope_of_its_own() -> None:
    """One Rope for all layers is for those with keys."""
    settings = lfm2(2)
    cache = new_cache(settings, "dynamic")
    run(built(settings), ids(4), cache)
    rope = Rope(head_dim=8, pairing="half", base=1e6)
    assert CachedKeys(cache, rope).ropes == (None, rope)
    with pytest.raises(SpecError, match=r"ropes\[0\] must be None, because layer 0"):
        CachedKeys(cache, [rope, rope])
    attention_only = transformers.DynamicCache(config=config(2))
    for index in range(2):
        attention_only.update(*(torch.ones(2, 2, 4, 8) for _ in range(2)), index)
    with pytest.raises(TensorError, match="which has a LinearAttentionLayer as layer 0, got a Dyn"):
        CachedKeys(cache, rope).insert_(0, attention_only)
    cache.layers = cache.layers[:1]
    with pytest.raises(TensorError, match="a layer with keys, got only LinearAttentionLayer"):
        CachedKeys(cache, rope)
