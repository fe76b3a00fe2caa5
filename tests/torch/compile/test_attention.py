"""A compiled training step and a compiled decode step of attention: one graph, counted.

Dynamo makes a graph of its own for a length of 1 unless it is told that 1 is a length as any
other: the dimension is marked, and `backed_size_oblivious` is on. Inductor's own treatment of
scaled_dot_product_attention asks all the same, so that there a length of 1 is a second graph.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._functorch import config as joint_caches
from torch._inductor import config as graph_caches
from torch.fx.experimental import _config as shapes

from phasor import Rope
from phasor.torch import RotaryAttention, rotate_qk
from phasor.torch._operator import inductor as _inductor
from phasor.torch.kv_cache import KVCache

from ..torch_arrays import normal
from ..torch_cases import agree

ROPE = Rope(head_dim=8, pairing="half", base=500_000.0)
LENGTHS = [8, 1, 2, 5, 512, 8192]
WIDTH = 16


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """Every test compiles from nothing, and finds the counters at zero."""
    torch._dynamo.reset()
    counters.clear()
    # the caches on disk bring the guards of whoever filled them
    with graph_caches.patch(fx_graph_cache=False), joint_caches.patch(enable_autograd_cache=False):
        yield
    torch._dynamo.reset()


def attention(**more: Any) -> RotaryAttention:
    """Two query heads that share a key head, with weights that are the same every time."""
    torch.manual_seed(0)
    return RotaryAttention(ROPE, WIDTH, num_heads=2, num_kv_heads=1, **more)


def compiled(function: Callable[..., Any], backend: str = "aot_eager") -> Callable[..., Any]:
    """``function`` as one graph, without the disk's."""
    return torch.compile(function, fullgraph=True, dynamic=True, backend=backend)


def graphs() -> int:
    """How many graphs there are; none of them broken."""
    assert not counters["graph_break"]
    return counters["stats"]["unique_graphs"]


def tokens(length: int, batch: int = 2) -> Tensor:
    """Tokens whose length is said to change."""
    x = normal(batch, length, WIDTH, seed=length)
    torch._dynamo.mark_dynamic(x, 1)
    return x


def gradients(step: Callable[[Tensor], Tensor], module: RotaryAttention, x: Tensor) -> list[Tensor]:
    """The loss of one step, and the gradient of every weight."""
    module.zero_grad()
    loss = step(x)
    loss.backward()
    return [loss.detach(), *(p.grad for p in module.parameters() if p.grad is not None)]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    """Equal but for the order in which a compiler adds up to 2**14 terms, and rotates."""
    return all(
        bool((a - b).abs().max() <= 2**-24 * 128 * b.abs().max())
        for a, b in zip(found, expected, strict=True)
    )


def test_a_training_step_is_one_graph_from_length_1_to_8192() -> None:
    """Forward and backward through dynamo and AOT autograd, eager's losses and gradients."""
    module = attention()

    def step(x: Tensor) -> Tensor:
        return module(x).square().mean()

    quick = compiled(step)
    with shapes.patch(backed_size_oblivious=True):
        for length in LENGTHS:
            found = gradients(quick, module, tokens(length))
            assert same(found, gradients(step, module, tokens(length)))
            assert graphs() == 1


def test_without_the_setting_a_length_of_1_is_a_second_graph() -> None:
    """What dynamo does unless told otherwise; from 2 on there is one."""
    module = attention()
    quick = compiled(module)
    counted: list[int] = []
    for length in (8, 8192, 3, 1, 1):
        quick(normal(2, length, WIDTH))
        counted.append(graphs())
    assert counted == [1, 1, 1, 2, 2]


def test_inductor_trains_in_one_graph_from_length_2_and_one_for_1() -> None:
    """The second graph is there because of torch's attention, as the next test shows.

    The loss stands outside: Inductor adds up few numbers otherwise than many, and so makes one
    graph of a sum of at most 4096 and another beyond.
    """
    module = attention()
    quick = compiled(module, "inductor")
    counted: list[int] = []
    for length in (8, 2, 8192, 1, 1):
        x = normal(2, length, WIDTH, seed=length)
        found, expected = (
            gradients(lambda x, of=of: of(x).square().mean(), module, x) for of in (quick, module)
        )
        assert same(found, expected)
        counted.append(graphs())
    assert counted == [1, 1, 1, 2, 2]


@pytest.mark.parametrize(("limit", "counted"), [(0, 1), (sys.maxsize, 2)])
def test_inductor_makes_one_graph_of_the_operator_and_two_of_operations(
    limit: int, counted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator asks nothing of a length; Inductor asks of plain operations whether it is 1."""
    rule = dict.fromkeys(_inductor.OPERATOR_FROM, limit)
    monkeypatch.setattr(_inductor, "OPERATOR_FROM", rule)

    def turned(x: Tensor) -> tuple[Tensor, Tensor]:
        return rotate_qk(x, x[:, :, :1], torch.arange(x.shape[1]), ROPE)

    quick = compiled(turned, "inductor")
    with shapes.patch(backed_size_oblivious=True):
        for length in LENGTHS:
            x = normal(2, length, 3, 8)
            torch._dynamo.mark_dynamic(x, 1)
            for y, expected in zip(quick(x), turned(x), strict=True):
                assert agree(y, expected)
    assert graphs() == counted


def filled(module: RotaryAttention, used: int, capacity: int) -> KVCache:
    """A cache that holds ``used`` tokens."""
    cache = module.make_cache(batch_size=2, capacity=capacity)
    k, v = (normal(2, used, 1, 8, seed=seed) for seed in (1, 2))
    cache.append(k, v)
    return cache


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_decode_step_is_one_graph_for_every_length_of_the_cache(backend: str) -> None:
    """One token after 1, 2, 3, ... 8191, in the same cache and in others; eager's numbers."""
    module = attention()

    def step(x: Tensor, cache: KVCache) -> Tensor:
        return module(x, cache=cache)

    quick = compiled(step, backend)
    with torch.no_grad():
        for used in (1, 2, 3, 100, 511, 512, 513, 4096, 8191):
            caches = [filled(module, used, capacity=8192) for _ in range(2)]
            x = normal(2, 1, WIDTH, seed=used)
            assert same([quick(x, caches[0])], [step(x, caches[1])])
            assert caches[0].used == used + 1
            assert same([caches[0].keys], [caches[1].keys])
            assert graphs() == 1


def test_decoding_from_an_empty_cache_is_two_graphs() -> None:
    """The first token sees itself alone; all after it are one graph."""
    module = attention()
    quick, cache = compiled(module), module.make_cache(batch_size=2, capacity=12)
    x = normal(2, 12, WIDTH)
    with torch.no_grad():
        steps = [quick(x[:, i : i + 1], cache=cache) for i in range(12)]
        assert same([torch.cat(steps, dim=1)], [module(x)])
    assert graphs() == 2


def test_a_windowed_layer_has_a_graph_for_every_512_tokens() -> None:
    """Masks are made for 512 queries at a time, and a compiler writes every one of them down."""
    module = attention(window=64)
    quick = compiled(module)
    counted: list[int] = []
    with torch.no_grad():
        for length in (100, 65, 512, 514, 1000, 1024):
            x = normal(1, length, WIDTH, seed=length)
            assert same([quick(x)], [module(x)])
            counted.append(graphs())
    assert counted == [1, 1, 1, 2, 2, 2]
