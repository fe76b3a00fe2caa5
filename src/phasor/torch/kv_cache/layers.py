"""The layers of a cache, read and written in one form: `CachedLayer`.

Caches of transformers are recognised by their class. This module never imports transformers,
because a process with such a cache has already done so.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from operator import call
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phasor.errors import TensorError
from phasor.torch._operator.arguments import ARRAYS
from phasor.torch._operator.in_place import check_mutable
from phasor.torch._operator.internals import copy_all
from phasor.torch.kv_cache.cache import KVCache
from phasor.torch.kv_cache.eight_bit import is_eight_bit, narrowed, widened

_CACHES = "DynamicCache", "StaticCache", "QuantizedCache"
_WITH_KEYS = (
    *("DynamicLayer", "DynamicSlidingWindowLayer", "StaticLayer", "StaticSlidingWindowLayer"),
    *("LinearAttentionAndFullAttentionLayer", "LinearAttentionAndStaticFullAttentionLayer"),
    "LinearAttentionAndSlidingWindowAttentionLayer",
    "LinearAttentionAndStaticSlidingWindowAttentionLayer",
    "Fp8QuantizedLayer",
)
_WITHOUT_KEYS = "LinearAttentionLayer", "DummyLayer"
_SUPPORTED = (
    "a phasor KVCache, or a DynamicCache, StaticCache or float8 QuantizedCache of transformers 5"
)


class Exchange:
    """New contents of a cache; all are computed before the first is stored."""

    def __init__(self) -> None:
        self._memory: list[Tensor] = []
        self._written: list[Tensor] = []
        self._attributes: list[tuple[Any, str, Any]] = []

    def write(self, memory: Tensor, new: Tensor) -> None:
        """Plan to copy ``new`` into ``memory``, of the same shape, dtype and device."""
        check_mutable([memory])
        self._memory.append(memory)
        self._written.append(new)

    def assign(self, owner: Any, name: str, value: Any) -> None:
        """Plan to set the attribute ``name`` of ``owner`` to ``value``."""
        self._attributes.append((owner, name, value))

    def make(self) -> None:
        """Store everything. This cannot fail: torch writes all tensors in one call.

        A loop in C, such as `deque`'s, is not interrupted by signals either.
        """
        steps: list[Callable[[], object]] = [
            partial(setattr, *attribute) for attribute in self._attributes
        ]
        if self._memory:
            steps.insert(0, partial(copy_all, self._memory, self._written))
        deque(map(call, steps), maxlen=0)


class HeldTokens(NamedTuple):
    """The tokens that a layer holds, ``[batch, seq, heads, ...]``; keys of 8 bits are float32."""

    keys: Tensor
    values: Tensor
    scales: Tensor | None  # the scales of 8-bit keys, if each token has its own scale

    def last(self, count: int) -> HeldTokens:
        """The last ``count`` tokens."""
        first = self.keys.shape[1] - count
        scales = None if self.scales is None else self.scales[:, first:]
        return HeldTokens(self.keys[:, first:], self.values[:, first:], scales)


class CachedLayer:
    """A layer of a cache: the last tokens of a sequence of ``length``, or all of them.

    A ``StaticLayer`` or `KVCache` is written in place, because compiled models keep addresses; any
    other layer gets new tensors.

    Args:
        layer: A layer of transformers, or a `KVCache`.
        index: Its place in the cache, for messages.
        scales: Multiplied into keys of 8 bits; in the layout of the layer.
    """

    def __init__(self, layer: Any, index: int = 0, scales: Tensor | None = None) -> None:
        self._layer = layer
        self._is_own = isinstance(layer, KVCache)
        self._is_quantized = hasattr(layer, "_quantized_keys")
        self._is_sliding = bool(getattr(layer, "is_sliding", False))
        # the number of tokens that fit; None if memory grows
        capacity = "capacity" if self._is_own else "max_cache_len"
        self._capacity: int | None = getattr(layer, capacity, None)
        self._keys_name = f"keys of layer {index}"
        self.scales = scales
        self.name = type(layer).__name__
        self.has_keys = self.name not in _WITHOUT_KEYS
        self.has_state = hasattr(layer, "recurrent_states")

    @property
    def length(self) -> int:
        """The number of tokens of the sequence, or of columns if there is padding."""
        return self._layer.used if self._is_own else int(self._layer.get_seq_length())

    @property
    def count(self) -> int:
        """The number of tokens that the layer holds."""
        if self._capacity is None:
            return self._memory("keys").shape[1]
        return self._window(self.length)

    @property
    def fallen_out(self) -> int:
        """The number of first tokens that are no longer in the window of the layer."""
        return self.length - self.count

    @property
    def batch_size(self) -> int:
        """The number of rows."""
        return self._memory("keys").shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the stored keys."""
        return self._memory("keys").dtype

    @property
    def held(self) -> HeldTokens:
        """The tokens that the layer holds; views of the cache if their keys do not have 8 bits."""
        return self._first(self.count)

    def check_heads(self, head_dim: int) -> Tensor:
        """The keys of the first token that is held; refused unless they are ``head_dim`` wide."""
        keys = self._first(1).keys
        ARRAYS.check_heads(self._keys_name, keys, head_dim=head_dim)
        return keys

    def row_lengths(self) -> list[int]:
        """The number of tokens in each row of the batch."""
        if self._is_own:
            return self._layer.lengths.tolist()
        return [self.length] * self.batch_size

    def fit_window(self, held: HeldTokens, fallen_out: int, length: int) -> HeldTokens:
        """``held`` without tokens that leave the window, or an error if one is missing.

        They are the tokens from ``fallen_out`` on of a new sequence of ``length``.
        """
        if not self._is_sliding:
            return held
        window = self._window(length)
        first = length - window  # the number of tokens that the layer needs
        if fallen_out > first:
            raise TensorError(
                f"a {self.name} must hold the last {window} tokens, but those from {first} to "
                f"{fallen_out - 1} of the new sequence fell out of its window (it holds those from "
                f"{self.fallen_out} on); remove tokens before {self.fallen_out}, or all from 0 on, "
                "or fill a DynamicCache() without config, which keeps every token"
            )
        records_past = getattr(self._layer, "record_past", False)
        return held if records_past else held.last(window)

    def add_keys_to(self, exchange: Exchange, keys: Tensor) -> None:
        """Plan to replace the keys by other keys of the same number."""
        held = self.held._replace(keys=keys)
        self._store(exchange, "keys", held, self.length)

    def add_to(
        self, exchange: Exchange, held: HeldTokens, start: int, stop: int, added: int
    ) -> None:
        """Plan to hold these tokens, after ``stop - start`` were removed or ``added`` inserted."""
        length = self.length + added - (stop - start)
        self._store(exchange, "keys", held, length)
        self._store(exchange, "values", held, length)
        if self._is_own:
            # a row may end inside or before the range
            lengths: Tensor = self._layer.lengths
            removed = lengths.clamp(start, stop) - start
            exchange.write(lengths, lengths + added - removed)
            exchange.assign(self._layer, "used", length)
            return
        for name in ("cumulative_length", "cumulative_length_int"):
            counted = getattr(self._layer, name, None)
            if isinstance(counted, Tensor):
                exchange.write(counted, torch.full_like(counted, length))
            elif counted is not None:
                exchange.assign(self._layer, name, length)

    def _window(self, length: int) -> int:
        """How many of the latest tokens the layer holds, of a sequence of ``length``."""
        if not self._is_sliding:
            return length
        if self._capacity is None:
            return min(length, self._layer.sliding_window - 1)
        # a static layer holds one more token until the next token comes
        return length if length <= self._capacity else self._capacity - 1

    def _first_slot(self, length: int) -> int:
        """Where in its memory the layer holds its first token; a full window has one slot more."""
        return int(self._capacity is not None and length > self._window(length))

    def _memory(self, name: str) -> Tensor:
        """The stored tensor ``[batch, seq, heads, head_dim]``, a view with its whole capacity."""
        if self._is_own:
            return getattr(self._layer, f"_{name}")
        if self._is_quantized:
            memory, _ = getattr(self._layer, f"_quantized_{name}")
        else:
            memory = getattr(self._layer, name)
        return _swap(memory)

    def _find_scales(self, name: str) -> Tensor | None:
        """The scales of stored keys or values, in the layout of `_memory`."""
        if self._is_quantized:
            _, scale = getattr(self._layer, f"_quantized_{name}")
            return scale
        return None if name == "values" or self.scales is None else _swap(self.scales)

    def _is_by_token(self, scales: Tensor) -> bool:
        return scales.dim() == 4 and scales.shape[1] == self._memory("keys").shape[1]

    def _first(self, count: int) -> HeldTokens:
        """The first tokens that are held."""
        start = self._first_slot(self.length)
        slots = slice(start, start + count)
        keys, values = (self._memory(name)[:, slots] for name in ("keys", "values"))
        scales, value_scales = (self._find_scales(name) for name in ("keys", "values"))
        token_scales = None
        if scales is not None and self._is_by_token(scales):
            scales = token_scales = scales[:, slots]
        if value_scales is not None:  # values without known scales can only be cut
            values = widened(values, value_scales, "values")
        return HeldTokens(widened(keys, scales, self._keys_name), values, token_scales)

    def _store(self, exchange: Exchange, name: str, held: HeldTokens, length: int) -> None:
        """Plan to store the keys or the values of the last tokens of ``length``."""
        x = held.keys if name == "keys" else held.values
        memory, memory_of_scales = self._memory(name), self._find_scales(name)
        slots = slice(self._first_slot(length), self._first_slot(length) + x.shape[1])
        if self._capacity is not None and slots.stop > self._capacity:
            raise TensorError(
                f"the cache must have room for {x.shape[1]} tokens, got {self._capacity}; make a "
                "longer cache or evict some first"
            )
        scales = memory_of_scales
        if name == "keys" and held.scales is not None:
            scales = held.scales
            memory_of_scales = None if memory_of_scales is None else memory_of_scales[:, slots]
        if scales is not None or (name == "keys" and is_eight_bit(memory.dtype)):
            x, scales = narrowed(x, memory.dtype, scales, self._keys_name)
        if self._is_quantized:
            exchange.assign(self._layer, f"_quantized_{name}", (_swap(x), scales))
        elif self._capacity is not None:
            exchange.write(memory[:, slots], x)
            if memory_of_scales is not None and scales is not None:
                exchange.write(memory_of_scales, scales)
        else:
            exchange.assign(self._layer, name, _swap(x))
            if scales is not None:
                exchange.assign(self, "scales", _swap(scales))


def _swap(x: Tensor) -> Tensor:
    """``[batch, heads, seq, ...]`` from ``[batch, seq, heads, ...]``, and back; or one scale."""
    return x.transpose(1, 2) if x.dim() == 4 else x


def wrap_layers(
    name: str, cache: Any, scales: Sequence[Tensor | None] | None = None
) -> Sequence[CachedLayer]:
    """The layers of a cache, or an error if it is not supported or holds no tokens."""
    library: Any = sys.modules.get("transformers.cache_utils")
    if isinstance(cache, KVCache):
        if scales is not None:
            raise TensorError("scales must be None for a KVCache, whose tensors have none")
        layers = [CachedLayer(cache)]
    elif library is None or not _is_instance(library, cache, _CACHES):
        raise TensorError(f"{name} must be {_SUPPORTED}, got {type(cache).__name__}")
    elif cache.offloading:
        raise TensorError(
            f"{name} must not be offloaded, because its layers move between devices; make it with "
            "offloading=False"
        )
    else:
        layers = _wrap_foreign(name, cache.layers, library, scales)
    key_layers = [layer for layer in layers if layer.has_keys]
    if layers and not key_layers:
        names = sorted({layer.name for layer in layers})
        raise TensorError(f"{name} must have a layer with keys, got only {', '.join(names)}")
    if not layers or any(layer.length == 0 for layer in key_layers):
        raise TensorError(f"{name} must hold keys of tokens; run the prompt first")
    return layers


def _wrap_foreign(
    name: str, foreign: Sequence[Any], library: Any, scales: Sequence[Tensor | None] | None
) -> Sequence[CachedLayer]:
    if scales is None:
        scales = [None] * len(foreign)
    elif len(scales) != len(foreign):
        raise TensorError(
            f"scales must be one tensor or None for each layer ({len(foreign)}), got {len(scales)}"
        )
    for index, layer in enumerate(foreign):
        # compared by type, because a subclass may keep fewer tokens, or other tensors
        if not _is_instance(library, layer, (*_WITH_KEYS, *_WITHOUT_KEYS)):
            raise TensorError(
                f"{name} must have layers of keys or of recurrent states that phasor knows "
                f"({', '.join((*_WITH_KEYS, *_WITHOUT_KEYS))}), got a {type(layer).__name__} as "
                f"layer {index}"
            )
        if type(layer).__name__ in _WITH_KEYS and not layer.is_initialized:
            raise TensorError(f"{name} must hold tokens in every layer, got none in layer {index}")
        _check_scales(layer, index, scales[index])
    indexed = zip(foreign, range(len(foreign)), scales, strict=True)
    return [CachedLayer(*item) for item in indexed]


def _check_scales(layer: Any, index: int, scales: Tensor | None) -> None:
    """Refuse scales of a layer without keys, or of another number of tokens."""
    if scales is None:
        return
    keys: Tensor | None = getattr(layer, "keys", None)
    if keys is None or keys.dim() != 4:
        raise TensorError(
            f"scales must be None for layer {index}, because its {type(layer).__name__} has no "
            "keys that scales could belong to"
        )
    ARRAYS.check_kind(f"scales[{index}]", scales)
    columns = keys.shape[2]
    if scales.dim() == 4 and scales.shape[2] not in (1, columns):
        raise TensorError(
            f"scales[{index}] must be [batch, heads, seq, groups] with one scale for each of the "
            f"{columns} columns of the layer, or 1 for all, got {list(scales.shape)}"
        )


def _is_instance(library: Any, x: Any, names: Sequence[str]) -> bool:
    """Whether ``x`` is an instance of one of these classes of transformers, not of a subclass."""
    return type(x).__name__ in names and type(x) is getattr(library, type(x).__name__, None)


def count_tokens(name: str, layers: Sequence[CachedLayer]) -> int:
    """The number of tokens of the sequence, or an error if the layers differ."""
    shapes = {(layer.batch_size, layer.length) for layer in layers if layer.has_keys}
    if len(shapes) > 1:
        raise TensorError(
            f"the layers of {name} must hold the same rows and tokens, got {sorted(shapes)}"
        )
    return shapes.pop()[1]
