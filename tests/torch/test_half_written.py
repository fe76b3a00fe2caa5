"""What is refused is refused before a byte is written, of two tensors and of many layers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from phasor import PositionError, Rope, TensorError
from phasor.torch import rotate_, rotate_qk_
from phasor.torch.kv_cache import CachedKeys, KVCache, edits, retune_

ROPE = Rope(head_dim=8, pairing="half")
PLACES = torch.arange(1, 5)


def leaf() -> Tensor:
    """A leaf that requires a gradient."""
    return torch.ones(4, 2, 8, requires_grad=True)


def view_of_leaf() -> Tensor:
    """A view of one."""
    return leaf()[:]


def inference() -> Tensor:
    """A tensor of inference mode."""
    with torch.inference_mode():
        return torch.ones(4, 2, 8)


def one_of_many() -> Tensor:
    """A view of which torch cannot tell the neighbours."""
    return (torch.ones(2, 4, 2, 8, requires_grad=True) * 1).unbind(0)[0]


def quiet_view() -> Tensor:
    """A view, made without a graph, of what has one."""
    base = torch.ones(4, 2, 8, requires_grad=True) * 1
    with torch.no_grad():
        return base[:]


@pytest.mark.parametrize("refused", [leaf, view_of_leaf, inference, one_of_many, quiet_view])
@pytest.mark.parametrize("first", [False, True], ids=["key", "query"])
@pytest.mark.parametrize("recorded", [False, True], ids=["plain", "recorded"])
@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_a_query_and_a_key_are_both_written_or_neither(
    refused: Callable[[], Tensor], first: bool, recorded: bool, backend: str
) -> None:
    """Whichever of them torch would not let be written, and whether the other has a graph."""
    bad, good = refused(), torch.ones(4, 3, 8, requires_grad=recorded) * 1
    q, k = (bad, good) if first else (good, bad)
    with pytest.raises((RuntimeError, TensorError)):
        rotate_qk_(q, k, PLACES, ROPE, backend=backend)
    assert torch.equal(good, torch.ones(4, 3, 8))
    assert torch.equal(bad, torch.ones(4, 2, 8))


def test_a_key_that_is_not_batched_is_refused_before_the_query_is_written() -> None:
    """Under vmap, where rows of positions differ."""
    q, k = torch.ones(2, 4, 1, 8), torch.ones(4, 1, 8)

    def rotated(q: Tensor, places: Tensor) -> Tensor:
        return rotate_qk_(q, k, places, ROPE)[0]

    with pytest.raises(TensorError, match="k must be batched"):
        torch.func.vmap(rotated)(q, torch.arange(8).reshape(2, 4))
    assert torch.equal(q, torch.ones(2, 4, 1, 8))


def test_a_captured_key_is_refused_before_the_query_is_written() -> None:
    """In a gradient of torch.func, which lets nothing outside be written."""
    k = torch.ones(4, 1, 8)
    seen = []

    def loss(q: Tensor) -> Tensor:
        copy = q * 1
        seen.append(copy)
        try:
            rotate_qk_(copy, k, PLACES, ROPE)
        except RuntimeError:
            return copy.sum() + 7
        raise AssertionError("torch lets captured tensors be written now")

    gradient, value = torch.func.grad_and_value(loss)(torch.ones(4, 1, 8))
    assert value.item() == 4 * 8 + 7
    assert torch.equal(gradient, torch.ones(4, 1, 8))


def test_the_way_in_place_leaves_one_node_behind() -> None:
    """To look first costs the graph nothing: the last node is that of the copy."""
    q, k = (torch.ones(4, 2, 8, requires_grad=True) * 1 for _ in range(2))
    before = k.grad_fn
    rotate_qk_(q, k, PLACES, ROPE)
    assert "CopyBackwards" in k.grad_fn.name()
    assert k.grad_fn.next_functions[0][0] is before


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """`retune_` takes a token at a time."""
    monkeypatch.setattr(edits, "CHUNK", 1)


@pytest.mark.usefixtures("in_parts")
def test_keys_are_retuned_at_all_positions_or_at_none() -> None:
    """The last of them is no position."""
    keys = torch.ones(3, 1, 8)
    other = Rope(head_dim=8, pairing="half", base=500.0)
    with pytest.raises(PositionError):
        retune_(keys, [1.5, 2.0, float("inf")], ROPE, other)
    assert torch.equal(keys, torch.ones(3, 1, 8))


@pytest.mark.usefixtures("in_parts")
def test_keys_that_overlap_from_token_to_token_are_not_retuned() -> None:
    """Each token alone is in a piece of memory of its own."""
    memory = torch.ones(12)
    keys = memory.as_strided((2, 1, 8), (4, 8, 1))
    with pytest.raises(TensorError, match="keys"):
        retune_(keys, [1, 2], ROPE, Rope(head_dim=8, pairing="half", base=500.0))
    assert torch.equal(memory, torch.ones(12))


def filled(second: Callable[[], Tensor]) -> tuple[CachedKeys, list[Tensor]]:
    """A cache of two layers, the second of which holds ``second`` for keys."""
    transformers = pytest.importorskip("transformers")
    cache = transformers.DynamicCache()
    for layer in range(2):
        cache.update(torch.ones(1, 2, 4, 8), torch.ones(1, 2, 4, 8), layer)
    cache.layers[1].keys = second()
    return CachedKeys(cache, ROPE), [layer.keys for layer in cache.layers]


def inference_keys() -> Tensor:
    """Keys of inference mode."""
    with torch.inference_mode():
        return torch.ones(1, 2, 4, 8)


LAYERS = {
    "inference": inference_keys,
    "a leaf": lambda: torch.ones(1, 2, 4, 8, requires_grad=True),
    "one memory": lambda: torch.ones(1, 2, 1, 8).expand(1, 2, 4, 8),
}
MOVES = {
    "shift_": (torch.tensor(3),),
    "retune_": (torch.arange(4), Rope(head_dim=8, pairing="half", base=500.0)),
}


@pytest.mark.parametrize("verb", MOVES)
def test_all_layers_are_moved_or_none(verb: str) -> None:
    """Where the second is on another device than the positions."""
    cached, keys = filled(lambda: torch.ones(1, 2, 4, 8, device="meta"))
    with pytest.raises(PositionError, match="device"):
        getattr(cached, verb)(*MOVES[verb])
    assert torch.equal(keys[0], torch.ones(1, 2, 4, 8))
    assert cached.ropes == (ROPE, ROPE)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("verb", MOVES)
def test_a_layer_that_cannot_be_written_gets_new_keys(name: str, verb: str) -> None:
    """The first layer's are the same numbers, and what stood in the second is not written."""
    cached, keys = filled(LAYERS[name])
    getattr(cached, verb)(*MOVES[verb])
    first, second = (layer.held.keys for layer in cached._layers)
    assert torch.equal(first, second)
    assert not torch.equal(first, torch.ones(1, 4, 2, 8))
    assert torch.equal(keys[1], torch.ones(1, 2, 4, 8))


@pytest.mark.transformers
def test_a_cache_of_inference_mode_is_shortened_there_or_not_at_all() -> None:
    """A static one, whose count is no tensor of that mode."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, num_attention_heads=2, num_hidden_layers=1, max_position_embeddings=8
    )
    cache = transformers.StaticCache(config=config, max_cache_len=8)
    with torch.inference_mode():
        cache.update(torch.ones(1, 2, 4, 8), torch.ones(1, 2, 4, 8), 0)
    with pytest.raises(TensorError, match="inference"):
        CachedKeys(cache, ROPE).evict_(1, 3)
    assert len(CachedKeys(cache, ROPE)) == 4
    assert torch.equal(cache.layers[0].keys[:, :, :4], torch.ones(1, 2, 4, 8))


def test_a_key_cache_of_inference_mode_is_shortened_there_or_not_at_all() -> None:
    """Its lengths stay with its keys."""
    with torch.inference_mode():
        cache = KVCache(batch_size=1, capacity=8, num_kv_heads=2, head_dim=8)
        cache.append(torch.ones(1, 4, 2, 8), torch.ones(1, 4, 2, 8))
    with pytest.raises(TensorError, match="inference"):
        CachedKeys(cache, ROPE).evict_(1, 3)
    assert (cache.used, cache.lengths.tolist()) == (4, [4])


def test_what_may_be_written_still_is() -> None:
    """A leaf where nothing is recorded, and a graph's own tensor."""
    x = leaf()
    with torch.no_grad():
        rotate_(x, PLACES, ROPE)
    assert not torch.equal(x, torch.ones(4, 2, 8))
