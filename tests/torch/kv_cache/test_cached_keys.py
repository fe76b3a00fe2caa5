"""Whole caches are cut, joined and retuned as if the model had seen the tokens where they stand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from phasor import Rope
from phasor.axes import Axial, Sectioned
from phasor.scaling import Yarn
from phasor.torch import rotate
from phasor.torch.kv_cache import CachedKeys

from ...rounding import rounding
from ..attention_reference import HALF, WIDTH, layer
from ..live.live_models import difference
from ..torch_arrays import assert_rotated, normal
from .filled_caches import ROPES, config, empty, filled, layered, raw

WARM = Rope(
    head_dim=8,
    pairing="half",
    scaling=Yarn(factor=8.0, original_max_positions=64, attention_factor=1.25),
)
# two rotations in float64, of numbers below 8
CLOSE = {"rtol": 0.0, "atol": 8 * 1e-14}


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
    cache, k = transformers.DynamicCache(), raw(5, 0)
    at = torch.tensor([0, 1, 1, 2, 3])[:, None].expand(5, 3)
    cache.update(rotate(k, at, rope).transpose(1, 2), k.transpose(1, 2), 0)
    CachedKeys(cache, rope).evict_(1, 4, gap=[2, 2, 2])
    kept = rotate(k[:, [0, 4]], [[0] * 3, [1] * 3], rope).transpose(1, 2)
    torch.testing.assert_close(cache.layers[0].keys, kept, **CLOSE)


LLAMA = Rope(head_dim=8, pairing="half")


def model(**more: Any) -> Any:
    """One layer, so that a key depends on its own token only."""
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config(1, **more)).eval()


def filling(net: Any, kind: str, tokens: Tensor) -> Any:
    """The cache after a prompt."""
    cache = empty(kind, layers=1)
    net(tokens, None, None, cache, use_cache=True)
    return cache


@kinds
@torch.no_grad()
def test_a_model_goes_on_as_if_the_range_had_never_been(kind: str) -> None:
    """To a rounding, of which the model's float32 angles are one."""
    net, tokens = model(), normal(1, 16).mul(20).long().remainder(50)
    cache = filling(net, kind, tokens[:, :12])
    CachedKeys(cache, LLAMA).evict_(2, 8)
    ids = [0, 1, *range(8, 16)]
    logits = net(tokens[:, 12:], None, None, cache, use_cache=True).logits
    expected = net(tokens[:, ids]).logits[:, -4:]
    unmoved = filling(net, "dynamic", tokens[:, :12])
    for held in unmoved.layers:
        held.keys, held.values = (x[:, :, ids[:-4]] for x in (held.keys, held.values))
    wrong = net(tokens[:, 12:], None, None, unmoved, use_cache=True).logits
    assert difference(expected, logits) <= rounding(net, lambda net: net(tokens[:, ids]).logits)
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
    # both models' angles are off by 40 units of 2**-24; two rotations and three factors, by 16
    assert (keys - expected).abs().max() <= (2 * 40 + 16) * 2**-24 * 2**0.5 * expected.abs().max()


FED = {"even": None, "padded": [[False, False, True], [True, True, True]]}


@pytest.mark.parametrize("fed", FED)
@torch.no_grad()
def test_our_layer_goes_on_as_if_the_range_had_never_been(fed: str) -> None:
    """Also where one row ends within the range, and another behind it."""
    attention, x = layer(), normal(2, 11, WIDTH, dtype=torch.float64)
    mask = torch.ones(2, 9, dtype=torch.bool)
    if fed == "padded":
        mask[0, :3] = mask[0, 7] = False  # row 0 holds 5 tokens
    cache = attention.make_cache(batch_size=2, capacity=11)
    attention(x[:, :9], attention_mask=mask, cache=cache)
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
    cache, other = (attention.make_cache(batch_size=2, capacity=n) for n in (12, 4))
    attention(x[:, :6], attention_mask=mask, cache=cache)
    attention(x[:, 6:10], cache=other)
    CachedKeys(cache, HALF).insert_(3, other)
    y = attention(x[:, 10:], cache=cache)
    for row, held in enumerate([[2, 3, 4, 5], [0, 1, 2, 3, 4, 5]]):
        order = [*held[:3], 6, 7, 8, 9, *held[3:], 10, 11]
        expected = attention(x[row : row + 1, order])[0, -2:]
        torch.testing.assert_close(y[row], expected, rtol=0.0, atol=1e-12)


def test_layers_without_rope_stand_beside_layers_of_several_axes() -> None:
    """Their keys stand nowhere: only the others are moved, by one number per axis."""
    rope = Rope(head_dim=4, pairing="half", axes=Axial((1, 1)))
    cache = layered(6)
    before = [layer.keys.clone() for layer in cache.layers]
    CachedKeys(cache, [None, rope]).evict_(1, 3, gap=(2, 1))
    still, moved = (layer.keys[0, 0] for layer in cache.layers)
    assert torch.equal(still, before[0][0, 0, [0, 3, 4, 5]])
    assert torch.equal(moved[:1], before[1][0, 0, :1])
    assert_rotated(moved[1:, None], before[1][0, 0, 3:, None], [(-2, -1)] * 3, rope)
