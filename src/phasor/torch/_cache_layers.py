"""Layers of caches, ours and transformers', seen alike: tokens of keys and values.

Caches of transformers are known by their class. transformers is never imported here: where such a
cache is given, somebody has.
"""

from __future__ import annotations

import sys
from typing import Any, Protocol, cast

from torch import Tensor

from phasor.errors import TensorError
from phasor.torch._in_place import check_mutable
from phasor.torch.key_cache import KeyCache

_WANTED = (
    "a phasor KeyCache, or a DynamicCache or StaticCache of transformers 5 whose layers keep every "
    "token"
)


class Layer(Protocol):
    """One layer of a cache."""

    @property
    def keys(self) -> Tensor:
        """``[batch, seq, heads, head_dim]``, a view of what is cached."""
        ...

    @property
    def values(self) -> Tensor:
        """As `keys`."""
        ...

    def check_room(self, at: int, count: int) -> None:
        """Refuse ``count`` more tokens before token ``at`` where they cannot stand."""
        ...

    def check_writable(self) -> None:
        """Refuse where torch would not let `hold` write."""
        ...

    def check_whole(self) -> None:
        """Refuse to be put into another cache where rows are of different lengths."""
        ...

    def hold(self, keys: Tensor, values: Tensor, start: int, stop: int) -> None:
        """Keep these instead: without tokens ``start`` to ``stop``, or grown where that is 0."""
        ...


def layers_of(name: str, cache: Any) -> list[Layer]:
    """The layers of a supported cache that holds something.

    Raises:
        TensorError: For any other.
    """
    found: list[Layer] = [_Own(cache)] if isinstance(cache, KeyCache) else _foreign(name, cache)
    if not found or any(layer.keys.shape[1] == 0 for layer in found):
        raise TensorError(f"{name} must hold tokens in every layer; run the prompt first")
    return found


class _Own:
    def __init__(self, cache: KeyCache) -> None:
        self._cache = cache

    @property
    def keys(self) -> Tensor:
        return self._cache.keys

    @property
    def values(self) -> Tensor:
        return self._cache.values

    def check_room(self, at: int, count: int) -> None:
        _check_capacity(self._cache.used + count, self._cache.capacity)
        shortest = int(self._cache.lengths.min())
        if at > shortest:
            raise TensorError(
                f"at must be within every row of the cache, the shortest of which holds "
                f"{shortest} tokens, got {at}"
            )

    def check_writable(self) -> None:
        check_mutable((self._cache.lengths, self.keys, self.values))

    def check_whole(self) -> None:
        lengths = cast(list[int], self._cache.lengths.tolist())
        if set(lengths) != {self._cache.used}:
            raise TensorError(
                f"other must hold {self._cache.used} tokens in every row, got {lengths}; "
                "insert rows of different lengths one by one"
            )

    def hold(self, keys: Tensor, values: Tensor, start: int, stop: int) -> None:
        cache, count = self._cache, keys.shape[1]
        grown = max(0, count - cache.used)
        # a row may end before the range does, or before it begins
        cache.lengths += grown - (cache.lengths.clamp(start, stop) - start)
        cache.used = count
        cache.keys[:] = keys
        cache.values[:] = values


class _Dynamic:
    def __init__(self, layer: Any) -> None:
        self._layer = layer

    @property
    def keys(self) -> Tensor:
        return self._layer.keys.transpose(1, 2)

    @property
    def values(self) -> Tensor:
        return self._layer.values.transpose(1, 2)

    def check_room(self, at: int, count: int) -> None:
        del at, count

    def check_writable(self) -> None:
        return None

    def check_whole(self) -> None:
        return None

    def hold(self, keys: Tensor, values: Tensor, start: int, stop: int) -> None:
        del start, stop
        self._layer.keys = keys.transpose(1, 2)
        self._layer.values = values.transpose(1, 2)


class _Static(_Dynamic):
    @property
    def keys(self) -> Tensor:
        return self._layer.keys[:, :, : self._length].transpose(1, 2)

    @property
    def values(self) -> Tensor:
        return self._layer.values[:, :, : self._length].transpose(1, 2)

    def check_room(self, at: int, count: int) -> None:
        _check_capacity(self._length + count, self._layer.max_cache_len)

    def check_writable(self) -> None:
        check_mutable((self._layer.cumulative_length, self.keys, self.values))

    def hold(self, keys: Tensor, values: Tensor, start: int, stop: int) -> None:
        # in place, for compiled models remember where these three are
        self._layer.cumulative_length.fill_(keys.shape[1])
        self.keys[:] = keys
        self.values[:] = values

    @property
    def _length(self) -> int:
        return int(self._layer.cumulative_length)


def _foreign(name: str, cache: Any) -> list[Layer]:
    known: Any = sys.modules.get("transformers.cache_utils")
    if known is None or type(cache) not in (known.DynamicCache, known.StaticCache):
        raise TensorError(f"{name} must be {_WANTED}, got {type(cache).__name__}")
    if cache.offloading:
        raise TensorError(
            f"{name} must not be offloaded, for its layers are under way between devices; make it "
            "with offloading=False"
        )
    seen = {known.DynamicLayer: _Dynamic, known.StaticLayer: _Static}
    for index, layer in enumerate(cache.layers):
        # a class made of one of the two keeps more, or less, than keys and values of every token
        if type(layer) not in seen:
            raise TensorError(
                f"{name} must be {_WANTED}, got a {type(layer).__name__} as layer {index}"
            )
        if not layer.is_initialized:
            raise TensorError(f"{name} must hold tokens in every layer, got none in layer {index}")
    return [seen[type(layer)](layer) for layer in cache.layers]


def _check_capacity(wanted: int, capacity: int) -> None:
    if wanted > capacity:
        raise TensorError(
            f"the cache must have room for {wanted} tokens, got {capacity}; make a longer cache "
            "or evict some first"
        )
