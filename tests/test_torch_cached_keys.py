"""Whole caches are cut, joined and retuned as if the model had seen the tokens where they stand."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import cache_utils
from transformers.models.llama import configuration_llama, modeling_llama

from phasor import (
    Axial,
    DynamicNTK,
    PhasorError,
    PositionError,
    Rope,
    Sectioned,
    SpecError,
    TensorError,
    Yarn,
)
from phasor.torch import rotate
from phasor.torch.cached_keys import CachedKeys
from phasor.torch.key_cache import KeyCache

from .attention_oracle import HALF, WIDTH, layer
from .torch_oracle import normal

OTHER = Rope(head_dim=8, pairing="half", base=777.0)
WARM = Rope(
    head_dim=8,
    pairing="half",
    scaling=Yarn(factor=8.0, original_max_positions=64, attention_factor=1.25),
)
ROPES = (HALF, None, OTHER)
# two rotations in float64, of numbers below 8
CLOSE = {"rtol": 0.0, "atol": 8 * 1e-14}


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
    return configuration_llama.LlamaConfig(**shape | more)


def empty(kind: str, capacity: int = 20, layers: int = 3) -> Any:
    """A cache of transformers for that many layers."""
    if kind == "dynamic":
        return cache_utils.DynamicCache()
    if kind == "dynamic, of a config":
        return cache_utils.DynamicCache(config=config(layers))
    return cache_utils.StaticCache(config=config(layers), max_cache_len=capacity)


def filled(kind: str, seq: int = 9, ropes: Any = ROPES, first: int = 0, at: int = 0) -> Any:
    """A cache of tokens ``first`` onwards of `raw`, standing at ``at`` onwards."""
    cache = empty(kind)
    for index, rope in enumerate(ropes):
        k, v = (raw(20, seed)[:, first : first + seq] for seed in (index, index + 50))
        k = k if rope is None else rotate(k, range(at, at + seq), rope, gain=rope.attention_factor)
        cache.update(k.transpose(1, 2), v.transpose(1, 2), index)
    return cache


def assert_holds(cache: Any, tokens: list[int], at: Any, ropes: Any = ROPES) -> None:
    """Those tokens of `raw` in that order, keys rotated to ``at``, values as they were."""
    assert int(cache.get_seq_length()) == len(tokens)
    for index, rope in enumerate(ropes):
        k, v = raw(20, index)[:, tokens], raw(20, index + 50)[:, tokens]
        k = k if rope is None else rotate(k, at, rope, gain=rope.attention_factor)
        held = cache.layers[index]
        keys, values = (x[:, :, : len(tokens)].transpose(1, 2) for x in (held.keys, held.values))
        torch.testing.assert_close(keys, k, **CLOSE)
        assert torch.equal(values, v)


KINDS = ["dynamic", "dynamic, of a config", "static"]
kinds = pytest.mark.parametrize("kind", KINDS)


@kinds
@pytest.mark.parametrize(("start", "stop"), [(0, 2), (3, 7), (5, 9), (4, 4)])
def test_every_layer_loses_the_range(kind: str, start: int, stop: int) -> None:
    """Each by its own Rope; one without positions keeps its keys as they are."""
    cache = filled(kind)
    held = CachedKeys(cache, ROPES)
    held.evict_(start, stop)
    tokens = [i for i in range(9) if not start <= i < stop]
    assert len(held) == len(tokens)
    assert_holds(cache, tokens, range(len(tokens)))


@kinds
@pytest.mark.parametrize("at", [0, 4, 6])
def test_every_layer_takes_in_the_other_cache(kind: str, at: int) -> None:
    """At the end, that merges the two; the other one stays as it was."""
    cache, other = filled(kind, seq=6), filled("dynamic", seq=3, first=10)
    held = CachedKeys(cache, ROPES)
    held.insert_(at, other)
    tokens = [*range(at), 10, 11, 12, *range(at, 6)]
    assert_holds(cache, tokens, range(9))
    assert_holds(other, [10, 11, 12], range(3))


@kinds
def test_every_layer_is_shifted(kind: str) -> None:
    """Row by row and token by token."""
    cache, delta = filled(kind), torch.arange(18).view(2, 9)
    CachedKeys(cache, ROPES).shift_(delta)
    assert_holds(cache, list(range(9)), torch.arange(9) + delta)


@kinds
def test_every_layer_is_retuned_with_its_factor(kind: str) -> None:
    """Each from its own Rope to its own; what was known of the cache is brought up to date."""
    cache, new = filled(kind), (WARM, None, HALF)
    held = CachedKeys(cache, ROPES)
    held.retune_(range(9), new)
    assert held.ropes == new
    assert_holds(cache, list(range(9)), range(9), new)
    held.retune_(range(9), ROPES)
    assert_holds(cache, list(range(9)), range(9))


def test_a_static_cache_stays_where_it_is_in_memory() -> None:
    """Compiled models have noted its three addresses."""
    cache = filled("static")
    one = cache.layers[0]
    where = [x.data_ptr() for x in (one.keys, one.values, one.cumulative_length)]
    held = CachedKeys(cache, ROPES)
    held.evict_(2, 5)
    held.insert_(1, filled("static", seq=4))
    assert [x.data_ptr() for x in (one.keys, one.values, one.cumulative_length)] == where
    assert one.keys.shape[2] == 20


def test_several_axes_name_their_gap() -> None:
    """A passage of 3 tokens that stood on 2 positions of every axis."""
    rope = Rope(head_dim=8, pairing="half", axes=Sectioned((2, 1, 1)))
    cache, k = cache_utils.DynamicCache(), raw(5, 0)
    at = torch.tensor([0, 1, 1, 2, 3])[:, None].expand(5, 3)
    cache.update(rotate(k, at, rope).transpose(1, 2), k.transpose(1, 2), 0)
    CachedKeys(cache, rope).evict_(1, 4, gap=[2, 2, 2])
    kept = rotate(k[:, [0, 4]], [[0] * 3, [1] * 3], rope).transpose(1, 2)
    torch.testing.assert_close(cache.layers[0].keys, kept, **CLOSE)


# --- models go on

LLAMA = Rope(head_dim=8, pairing="half")


def model(**more: Any) -> Any:
    """One layer, so that a key depends on its own token only."""
    torch.manual_seed(0)
    return modeling_llama.LlamaForCausalLM(config(1, **more)).eval()


def filling(net: Any, kind: str, tokens: Tensor) -> Any:
    """The cache after a prompt."""
    cache = empty(kind, layers=1)
    net(tokens, past_key_values=cache, use_cache=True)
    return cache


@kinds
@torch.no_grad()
def test_a_model_goes_on_as_if_the_range_had_never_been(kind: str) -> None:
    """To 1e-5: the model's float32 angles are off by 2e-6 at these positions."""
    net, tokens = model(), normal(1, 16).mul(20).long().remainder(50)
    cache = filling(net, kind, tokens[:, :12])
    CachedKeys(cache, LLAMA).evict_(2, 8)
    ids = [0, 1, *range(8, 16)]
    logits = net(tokens[:, 12:], past_key_values=cache, use_cache=True).logits
    expected = net(tokens[:, ids]).logits[:, -4:]
    unmoved = filling(net, "dynamic", tokens[:, :12])
    for held in unmoved.layers:
        held.keys, held.values = (x[:, :, ids[:-4]] for x in (held.keys, held.values))
    wrong = net(tokens[:, 12:], past_key_values=unmoved, use_cache=True).logits
    assert (logits - expected).abs().max() < 1e-5 * expected.abs().max()
    assert (wrong - expected).abs().max() > 1e-3 * expected.abs().max()


@torch.no_grad()
def test_a_models_keys_are_retuned_to_those_of_another_scaling() -> None:
    """From plain to YaRN, whose factor transformers multiplies into cos and sin."""
    yarn = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 8.0}
    yarn |= {"original_max_position_embeddings": 64}
    plain, longer = model(), model(rope_parameters=yarn)
    longer.load_state_dict(plain.state_dict())
    tokens = torch.arange(40)[None]
    cache, wanted = filling(plain, "dynamic", tokens), filling(longer, "dynamic", tokens)
    law = Yarn(factor=8.0, original_max_positions=64)
    new = Rope(head_dim=8, pairing="half", scaling=law)
    assert new.attention_factor > 1.2
    CachedKeys(cache, LLAMA).retune_(range(40), new)
    keys, expected = cache.layers[0].keys, wanted.layers[0].keys
    # both models' angles are off by 40 units of 2**-24 and a bit
    assert (keys - expected).abs().max() < 1e-5 * expected.abs().max()


FED = {"even": None, "padded": [[False, False, True], [True, True, True]]}


@pytest.mark.parametrize("fed", FED)
@torch.no_grad()
def test_our_layer_goes_on_as_if_the_range_had_never_been(fed: str) -> None:
    """Also where one row ends within the range, and another behind it."""
    attention, x = layer(), normal(2, 11, WIDTH, dtype=torch.float64)
    mask = torch.ones(2, 9, dtype=torch.bool)
    if fed == "padded":
        mask[0, :3] = mask[0, 7] = False  # row 0 holds 5 tokens
    cache = attention.cache(batch=2, capacity=11)
    attention(x[:, :9], mask=mask, cache=cache)
    CachedKeys(cache, HALF).evict_(3, 7)
    y = attention(x[:, 9:], cache=cache)
    for row in range(2):
        held = mask[row].nonzero().flatten().tolist()
        kept = [*held[:3], *held[7:], 9, 10]
        expected = attention(x[row : row + 1, kept])[0, -2:]
        torch.testing.assert_close(y[row], expected, rtol=0.0, atol=1e-12)
        assert int(cache.lengths[row]) == len(kept)


@torch.no_grad()
def test_our_layer_goes_on_behind_what_was_put_in() -> None:
    """With rows of different lengths, both of which reach the place."""
    attention, x = layer(), normal(2, 12, WIDTH, dtype=torch.float64)
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[0, :2] = False
    cache, other = (attention.cache(batch=2, capacity=n) for n in (12, 4))
    attention(x[:, :6], mask=mask, cache=cache)
    attention(x[:, 6:10], cache=other)
    CachedKeys(cache, HALF).insert_(3, other)
    y = attention(x[:, 10:], cache=cache)
    for row, held in enumerate([[2, 3, 4, 5], [0, 1, 2, 3, 4, 5]]):
        order = [*held[:3], 6, 7, 8, 9, *held[3:], 10, 11]
        expected = attention(x[row : row + 1, order])[0, -2:]
        torch.testing.assert_close(y[row], expected, rtol=0.0, atol=1e-12)


# --- what is refused


def own(lengths: list[int], capacity: int = 8) -> KeyCache:
    """A cache of ours whose rows hold so many tokens."""
    cache, seq = KeyCache(len(lengths), capacity, 3, 8), max(lengths)
    k = torch.ones(len(lengths), seq, 3, 8)
    cache.append(k, k, torch.arange(seq) < torch.tensor(lengths)[:, None])
    return cache


def of_layers(*layers: Any) -> Any:
    """A DynamicCache of given layers, 4 tokens in each."""
    cache = cache_utils.DynamicCache()
    cache.layers = list(layers)
    for index in range(len(layers)):
        k = torch.ones(2, 3, 4, 8)
        cache.update(k, k, index)
    return cache


def offloaded() -> Any:
    """One that says so; where there is no accelerator, none can be filled."""
    cache = of_layers(cache_utils.DynamicLayer())
    cache.offloading = True
    return cache


def uneven() -> Any:
    """Two layers, one of which was given a token more."""
    cache = of_layers(cache_utils.DynamicLayer(), cache_utils.DynamicLayer())
    cache.update(torch.ones(2, 3, 1, 8), torch.ones(2, 3, 1, 8), 1)
    return cache


RULE = Rope(
    head_dim=8,
    pairing="half",
    scaling=DynamicNTK(factor=2.0, original_max_positions=64),
)
MANY_AXES = Rope(head_dim=8, pairing="half", axes=Sectioned((2, 1, 1)))
REFUSED: dict[str, tuple[Callable[[], Any], type[PhasorError], str]] = {
    "a tensor": (
        lambda: CachedKeys(torch.ones(2, 3, 4, 8), HALF), TensorError,
        "cache must be a phasor KeyCache.*got Tensor"),
    "a cache of another class": (
        lambda: CachedKeys(cache_utils.EncoderDecoderCache(
            cache_utils.DynamicCache(), cache_utils.DynamicCache()), HALF),
        TensorError, "got EncoderDecoderCache"),
    "a sliding layer": (
        lambda: CachedKeys(of_layers(cache_utils.DynamicLayer(),
            cache_utils.DynamicSlidingWindowLayer(sliding_window=3)), HALF),
        TensorError, "keep every token, got a DynamicSlidingWindowLayer as layer 1"),
    "an empty cache": (
        lambda: CachedKeys(cache_utils.DynamicCache(), HALF), TensorError, "run the prompt first"),
    "an empty layer": (
        lambda: CachedKeys(empty("static"), HALF), TensorError, "none in layer 0"),
    "an empty cache of ours": (
        lambda: CachedKeys(KeyCache(1, 4, 1, 8), HALF), TensorError, "run the prompt first"),
    "an offloaded cache": (
        lambda: CachedKeys(offloaded(), HALF), TensorError, "must not be offloaded"),
    "a recurrent layer": (
        lambda: CachedKeys(of_layers(cache_utils.LinearAttentionAndFullAttentionLayer()), HALF),
        TensorError, "got a LinearAttentionAndFullAttentionLayer as layer 0"),
    "a rule": (
        lambda: CachedKeys(filled("dynamic"), [HALF, None, RULE]), SpecError,
        r"rope\.at\(seq_len\)"),
    "too few Ropes": (
        lambda: CachedKeys(filled("dynamic"), [HALF, HALF]), SpecError,
        r"one per layer of the cache \(3\), got 2"),
    "no Ropes": (
        lambda: CachedKeys(filled("dynamic"), [3, HALF, HALF]), SpecError,
        r"ropes\[0\] must be a phasor.Rope, got int"),
    "heads of another width": (
        lambda: CachedKeys(filled("dynamic"), Rope(head_dim=16, pairing="half")), TensorError,
        r"layer 0 .* \(16\)"),
    "Ropes of different axes": (
        lambda: CachedKeys(filled("dynamic"), [HALF, HALF, MANY_AXES]), SpecError,
        r"number of axes, got \[1, 3\]"),
    "layers of different lengths": (
        lambda: len(CachedKeys(uneven(), HALF)), TensorError, "same rows and tokens"),
    "no room in ours": (
        lambda: CachedKeys(own([5, 5]), HALF).insert_(0, own([4, 4])), TensorError,
        "room for 9 tokens, got 8"),
    "no room in theirs": (
        lambda: CachedKeys(filled("static", seq=18), ROPES).insert_(0, filled("dynamic", seq=3)),
        TensorError, "room for 21 tokens, got 20"),
    "a place behind the end of a row": (
        lambda: CachedKeys(own([5, 2]), HALF).insert_(3, own([1, 1])), TensorError,
        "shortest of which holds 2 tokens, got 3"),
    "rows of different lengths put in": (
        lambda: CachedKeys(own([2, 2]), HALF).insert_(0, own([3, 2])), TensorError,
        r"3 tokens in every row, got \[3, 2\]"),
    "another number of layers": (
        lambda: CachedKeys(filled("dynamic"), ROPES).insert_(0, own([1, 1])), TensorError,
        r"layers of the cache \(3\), got 1"),
    "another dtype": (
        lambda: CachedKeys(filled("dynamic", ropes=[HALF]), HALF).insert_(0, own([1, 1])),
        TensorError, "keys of other must be like .* torch.float64.* torch.float32"),
    "a Rope for a layer without": (
        lambda: CachedKeys(filled("dynamic"), ROPES).retune_(range(9), HALF), SpecError,
        "layer 1, whose Rope is None"),
    "another pairing": (
        lambda: CachedKeys(filled("dynamic"), HALF).retune_(
            range(9), Rope(head_dim=8, pairing="interleaved")), SpecError, "output_pairing of old"),
    "a range beyond the tokens": (
        lambda: CachedKeys(own([4, 2]), HALF).evict_(1, 5), PositionError, "stop must be"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_done_is_refused_in_words(case: str) -> None:
    """The argument, what it must be, and what came."""
    call, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        call()


def test_nothing_is_written_where_the_last_layer_does_not_fit() -> None:
    """All layers or none."""
    k = torch.ones(2, 3, 4, 8)
    cache, other = cache_utils.DynamicCache(), cache_utils.DynamicCache()
    for index in range(2):
        cache.update(k, k, index)
        other.update(k, k[..., : 8 - index], index)
    with pytest.raises(TensorError, match="values of other must be like"):
        CachedKeys(cache, HALF).insert_(0, other)
    assert cache.get_seq_length(0) == cache.get_seq_length(1) == 4


def test_transformers_is_not_imported_for_a_cache_of_ours() -> None:
    """In a fresh interpreter, where any other cache is refused all the same."""
    program = """
import sys
from phasor import Rope, TensorError
from phasor.torch.cached_keys import CachedKeys
from phasor.torch.key_cache import KeyCache
import torch
cache, k = KeyCache(1, 4, 1, 8), torch.ones(1, 3, 1, 8)
cache.append(k, k)
CachedKeys(cache, Rope(head_dim=8, pairing="half")).evict_(0, 1)
try:
    CachedKeys([k, k], Rope(head_dim=8, pairing="half"))
except TensorError as error:
    print(error)
print("transformers" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    refusal, imported = done.stdout.splitlines()
    assert refusal.endswith("got list")
    assert imported == "False"


def layered(count: int) -> Any:
    """A cache of two layers that holds ``count`` tokens."""
    made = cache_utils.DynamicCache()
    for index in range(2):
        made.update(*normal(2, 1, 1, count, 4, seed=index), index)
    return made


def test_layers_without_rope_stand_beside_layers_of_several_axes() -> None:
    """Their keys stand nowhere: only the others are moved, by one number per axis."""
    rope = Rope(head_dim=4, pairing="half", axes=Axial((1, 1)))
    cache = layered(6)
    before = [layer.keys.clone() for layer in cache.layers]
    CachedKeys(cache, [None, rope]).evict_(1, 3, gap=(2, 1))
    still, moved = (layer.keys[0, 0] for layer in cache.layers)
    assert torch.equal(still, before[0][0, 0, [0, 3, 4, 5]])
    back = rotate(before[1][0, 0, 3:, None], (-2, -1), rope)[:, 0]
    assert torch.allclose(moved, torch.cat((before[1][0, 0, :1], back)), atol=1e-6)


@pytest.mark.parametrize("verb", ["evict_", "insert_"])
def test_a_missing_gap_is_found_before_the_first_layer_is_written(verb: str) -> None:
    """The layer that needs it comes last."""
    cache = layered(6)
    keys = CachedKeys(cache, [None, Rope(head_dim=4, pairing="half", axes=Axial((1, 1)))])
    with pytest.raises(PositionError, match="must be given for a Rope of 2 axes"):
        keys.evict_(1, 3) if verb == "evict_" else keys.insert_(1, layered(2))
    assert len(keys) == 6
