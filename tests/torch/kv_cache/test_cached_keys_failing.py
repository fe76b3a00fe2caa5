"""An edit that fails at any operation of torch's leaves the whole cache as it was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from phasor import Rope
from phasor.torch.kv_cache import CachedKeys, KVCache

from ..attention_reference import HALF
from ..torch_arrays import normal
from .filled_caches import ROPES, filled
from .test_eight_bit import cache_of
from .test_windows import ROPES as WINDOWED
from .test_windows import windowed

LONGER = Rope(head_dim=8, pairing="half", base=777.0)


class FailsAt(TorchDispatchMode):
    """The operation of this number finds no memory."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.left = number

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Count, and fail instead of the operation."""
        self.left -= 1
        if self.left < 0:
            raise torch.OutOfMemoryError("no memory")
        return func(*args, **kwargs or {})


def own() -> KVCache:
    """A cache of ours with rows of 5 and 3 tokens."""
    cache, k = KVCache(2, 12, 3, 8, dtype=torch.float64), normal(2, 5, 3, 8, dtype=torch.float64)
    cache.append(k, k + 1, torch.arange(5) < torch.tensor([[5], [3]]))
    return cache


def of(cache: Any, ropes: Any, scales: Any = None) -> tuple[Any, CachedKeys]:
    """A cache and what edits it."""
    return cache, CachedKeys(cache, ropes, scales=scales)


def in_int8(kind: str) -> tuple[Any, CachedKeys]:
    """With one scale for each token and head."""
    cache, scales, _ = cache_of(kind, 5, 0, "token")
    return of(cache, HALF, scales)


CACHES: dict[str, Callable[[], tuple[Any, CachedKeys]]] = {
    "own": lambda: of(own(), HALF),
    "dynamic": lambda: of(filled("dynamic"), ROPES),
    "static": lambda: of(filled("static"), ROPES),
    "sliding": lambda: of(windowed("dynamic", seq=5), WINDOWED),
    "static and sliding": lambda: of(windowed("static", seq=5), WINDOWED),
    "int8": lambda: in_int8("dynamic"),
    "static int8": lambda: in_int8("static"),
}


def contents(cache: Any, cached: CachedKeys) -> list[Any]:
    """All that a cache says it holds, copied, and the scales of its keys."""
    if isinstance(cache, KVCache):
        return [cache.keys.clone(), cache.values.clone(), cache.lengths.clone(), cache.used]
    kept = [(it.keys.clone(), it.values.clone(), int(it.get_seq_length())) for it in cache.layers]
    scales = [x.clone() for x in cached.scales if x is not None]
    return [*(x for layer in kept for x in layer), *scales]


def is_same(before: Sequence[Any], after: Sequence[Any]) -> bool:
    """Bit by bit."""
    pairs = zip(before, after, strict=True)
    return all(torch.equal(x, y) if isinstance(x, Tensor) else x == y for x, y in pairs)


EDITS: dict[str, Callable[[CachedKeys, Any], None]] = {
    "shift_": lambda cached, _: cached.shift_(3),
    "retune_": lambda cached, _: cached.retune_(
        torch.arange(len(cached)), [rope and LONGER for rope in cached.ropes]
    ),
    "evict_": lambda cached, _: cached.evict_(1, 3),
    "insert_": lambda cached, other: cached.insert_(1, other),
}


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("verb", EDITS)
def test_an_edit_that_runs_out_of_memory_anywhere_writes_nothing(kind: str, verb: str) -> None:
    """At its first operation, its second, and so on to the last; then it is made."""
    for number in count():
        (cache, cached), (_, shortened) = CACHES[kind](), CACHES[kind]()
        shortened.evict_(2, len(shortened))  # to two tokens in every row
        before = contents(cache, cached)
        ropes_before = cached.ropes
        try:
            with FailsAt(number):
                EDITS[verb](cached, shortened)
        except torch.OutOfMemoryError:
            assert is_same(before, contents(cache, cached)), f"operation {number}"
            assert cached.ropes == ropes_before
        else:
            assert not is_same(before, contents(cache, cached))
            assert number > 3
            return
