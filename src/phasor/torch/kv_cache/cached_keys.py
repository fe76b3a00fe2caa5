"""`CachedKeys`: the functions for cached keys, for every layer of a cache at once.

Caches of transformers are recognised by their class. This module never imports transformers,
because a process with such a cache has already done so.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import call
from typing import Any, cast

from torch import Tensor

from phasor._checks import whole
from phasor._tensors import check_rope
from phasor.errors import PositionError, SpecError, TensorError
from phasor.rope import Rope
from phasor.torch._operator.arguments import ARRAYS
from phasor.torch._operator.in_place import check_mutable
from phasor.torch._operator.internals import copy_all
from phasor.torch.kv_cache.cache import KVCache
from phasor.torch.kv_cache.edits import Distance, evict, insert_tokens, retune_, shift_

_Ropes = Rope | Sequence[Rope | None]
_KeyEdit = Callable[[Tensor, Any], Tensor]  # edits keys in place, given their positions
_SUPPORTED_CACHES = (
    "a phasor KVCache, or a DynamicCache or StaticCache of transformers 5 whose layers keep every "
    "token"
)


class CachedKeys:
    """The rotated keys of a whole cache, and the Ropes that rotated them.

    Its methods write into every layer of the cache itself, or raise an error and write nothing. To
    do so they first compute the new keys of all layers, which takes memory for old and new keys.
    Models number the next token by the number of cached tokens, so after `evict_` or `insert_` it
    directly follows the last.

    Args:
        cache: A `KVCache`, or a ``DynamicCache`` or ``StaticCache`` of transformers 5 in which
            every layer keeps every token (``DynamicLayer``, ``StaticLayer``). It must not be empty.
        ropes: One Rope for all layers, or a sequence with one per layer (None for a layer without
            rotation), such as `phasor.load` returns; with laws, not rules. Keys must include
            ``rope.attention_factor``, as in these models.

    Attributes:
        ropes: One per layer; `retune_` changes them.

    Raises:
        TensorError: For any other cache: empty, quantised, offloaded, sliding or recurrent.
        SpecError: If there is not one Rope per layer, or they differ in their number of axes.

    >>> import torch
    >>> from phasor.torch import rotate
    >>> rope = Rope(head_dim=4, pairing="half")
    >>> cache = KVCache(batch_size=1, capacity=8, num_kv_heads=1, head_dim=4)
    >>> raw = torch.ones(1, 6, 1, 4)
    >>> cache.append(rotate(raw, range(6), rope), raw)
    >>> CachedKeys(cache, rope).evict_(1, 3)
    >>> cache.lengths.tolist()
    [4]
    >>> torch.allclose(cache.keys, rotate(raw[:, :4], range(4), rope), atol=1e-6)
    True
    """

    ropes: tuple[Rope | None, ...]

    def __init__(self, cache: Any, ropes: _Ropes) -> None:
        self._layers = _wrap_layers("cache", cache)
        self.ropes = self._rope_per_layer(ropes)

    def __len__(self) -> int:
        """The number of cached tokens, or of columns if there is padding."""
        return _count_tokens("cache", self._layers)

    def shift_(self, delta: Any) -> None:
        """Apply `phasor.torch.kv_cache.shift_` to the keys of every layer."""
        edits = [rope and partial(shift_, rope=rope) for rope in self.ropes]
        self._rewrite(edits, delta, self.ropes)

    def retune_(self, positions: Any, ropes: _Ropes) -> None:
        """Apply `phasor.torch.kv_cache.retune_` to every layer's keys, attention factor included.

        Args:
            positions: Positions of the tokens, as for `phasor.torch.rotate`.
            ropes: The new Ropes, in the form that the class takes.
        """
        new_ropes = self._rope_per_layer(ropes)
        edits: list[_KeyEdit | None] = []
        for index, (old, new) in enumerate(zip(self.ropes, new_ropes, strict=True)):
            if old is not None and new is not None:
                gain = new.attention_factor / old.attention_factor
                edits.append(partial(retune_, old=old, new=new, gain=gain))
            elif old is new:
                edits.append(None)
            else:
                raise SpecError(
                    f"ropes must be None exactly for layers without rotation, got {new} for layer "
                    f"{index}, whose Rope is {old}"
                )
        self._rewrite(edits, positions, new_ropes)

    def evict_(self, start: int, stop: int, *, gap: Distance | None = None) -> None:
        """Apply `phasor.torch.kv_cache.evict` to every layer; the cache becomes shorter.

        Remove the same columns from the model's attention mask, if it has one.
        """
        edits = [partial(evict, start=start, stop=stop, rope=rope, gap=gap) for rope in self.ropes]
        self._replace(edits, [()] * len(edits), start, stop)

    def insert_(
        self, at: int, other: Any, *, offset: Distance | None = None, gap: Distance | None = None
    ) -> None:
        """Apply `phasor.torch.kv_cache.insert` with all tokens of another, unchanged cache.

        ``insert_(len(cached), other)`` appends it.

        Raises:
            TensorError: If ``other`` has different layers, or there is no room for its tokens.
        """
        at = whole("at", at, least=0, most=len(self), error=PositionError)
        other_layers = _wrap_layers("other", other)
        count = _count_tokens("other", other_layers)
        if len(other_layers) != len(self._layers):
            raise TensorError(
                f"other must have the layers of the cache ({len(self._layers)}), "
                f"got {len(other_layers)}"
            )
        for layer, other_layer in zip(self._layers, other_layers, strict=True):
            if set(other_layer.row_lengths()) != {count}:
                raise TensorError(
                    f"other must hold {count} tokens in every row, got {other_layer.row_lengths()};"
                    " insert rows of different lengths separately"
                )
            shortest = min(layer.row_lengths())
            if at > shortest:
                raise TensorError(
                    "at must be within every row of the cache, and the shortest holds "
                    f"{shortest} tokens, got {at}"
                )
        names = ["keys of other", "values of other"]
        options: dict[str, Any] = {"at": at, "offset": offset, "gap": gap, "names": names}
        edits = [partial(insert_tokens, rope=rope, **options) for rope in self.ropes]
        self._replace(edits, [(layer.keys, layer.values) for layer in other_layers], at, at)

    def _rewrite(
        self, edits: Sequence[_KeyEdit | None], positions: Any, ropes: tuple[Rope | None, ...]
    ) -> None:
        """Replace the keys of every layer by as many edited keys, rotated by ``ropes``."""
        _count_tokens("cache", self._layers)
        exchange = _Exchange()
        exchange.assign(self, "ropes", ropes)
        for layer, edit in zip(self._layers, edits, strict=True):
            if edit is not None:
                layer.add_to(exchange, {"keys": edit(layer.keys.clone(), positions)})
        exchange.make()

    def _replace(
        self,
        edits: Sequence[Callable[..., tuple[Tensor, Tensor]]],
        new: Sequence[tuple[Tensor, ...]],
        start: int,
        stop: int,
    ) -> None:
        """Replace the tensors of every layer; tokens ``start`` to ``stop`` are new or removed."""
        _count_tokens("cache", self._layers)
        exchange = _Exchange()
        for layer, edit, others in zip(self._layers, edits, new, strict=True):
            for x in others:
                ARRAYS.check_device("other", x, layer.keys.device)
            keys, values = edit(layer.keys, layer.values, *others)
            layer.add_to(exchange, {"keys": keys, "values": values})
            layer.add_lengths_to(exchange, keys.shape[1], start, stop)
        exchange.make()

    def _rope_per_layer(self, ropes: _Ropes) -> tuple[Rope | None, ...]:
        if isinstance(ropes, Rope):
            ropes = (ropes,) * len(self._layers)
        if not isinstance(cast(object, ropes), Sequence):
            raise SpecError(
                f"ropes must be a phasor.Rope, or one per layer, got {type(ropes).__name__}"
            )
        if len(ropes) != len(self._layers):
            raise SpecError(
                f"ropes must be one Rope, or one per layer of the cache ({len(self._layers)}), "
                f"got {len(ropes)}"
            )
        for index, (layer, rope) in enumerate(zip(self._layers, ropes, strict=True)):
            if rope is not None:
                check_rope(rope, f"ropes[{index}]")
                ARRAYS.check_heads(f"keys of layer {index}", layer.keys, head_dim=rope.head_dim)
        axes = {rope.axes.n_axes for rope in ropes if rope is not None}
        if len(axes) > 1:
            raise SpecError(
                f"ropes must have the same number of axes, got {sorted(axes)}: call the functions "
                f"of phasor.torch.kv_cache for each layer instead"
            )
        return tuple(ropes)


class _Exchange:
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
        steps: list[Callable[[], object]] = [partial(setattr, *it) for it in self._attributes]
        if self._memory:
            steps.insert(0, partial(copy_all, self._memory, self._written))
        deque(map(call, steps), maxlen=0)


class _Layer:
    """A layer of a cache: a ``DynamicLayer``, which gets new tensors, or one with a capacity.

    A ``StaticLayer`` or `KVCache` is written in place, because compiled models keep addresses.
    """

    def __init__(self, layer: Any, capacity: int | None = None) -> None:
        self._layer = layer
        self._capacity = capacity  # the number of tokens that fit; None if memory grows
        self._is_own = isinstance(layer, KVCache)

    @property
    def keys(self) -> Tensor:
        """The keys ``[batch, seq, heads, head_dim]``, a view of the cache."""
        return self._view(self._layer.keys)

    @property
    def values(self) -> Tensor:
        """The values, in the shape of the keys."""
        return self._view(self._layer.values)

    def _view(self, cached: Tensor) -> Tensor:
        if self._is_own:
            return cached
        # [batch, heads, seq, head_dim] -> [batch, seq, heads, head_dim]
        cached = cached.transpose(1, 2)
        return cached if self._capacity is None else cached[:, : int(self._lengths)]

    @property
    def _lengths(self) -> Tensor:
        """Tokens in each row, or in all rows, at most the columns; only with a capacity."""
        return self._layer.lengths if self._is_own else self._layer.cumulative_length

    def row_lengths(self) -> list[int]:
        """The number of tokens in each row of the batch."""
        if self._is_own:
            return self._layer.lengths.tolist()
        batch, seq = self.keys.shape[:2]
        return [seq] * batch

    def add_to(self, exchange: _Exchange, new: Mapping[str, Tensor]) -> None:
        """Plan to store these keys and values, by name, ``[batch, seq, heads, head_dim]``."""
        for name, x in new.items():
            if self._capacity is None:
                # [batch, seq, heads, head_dim] -> [batch, heads, seq, head_dim]
                exchange.assign(self._layer, name, x.transpose(1, 2))
            else:
                exchange.write(self._room(name, x.shape[1]), x)

    def add_lengths_to(self, exchange: _Exchange, seq: int, start: int, stop: int) -> None:
        """Plan new lengths: rows lose tokens ``start`` to ``stop - 1`` or gain some."""
        if self._capacity is None:
            return
        lengths, inserted = self._lengths, max(0, seq - self.keys.shape[1])
        # a row may end inside or before the range
        removed = lengths.clamp(start, stop) - start
        exchange.write(lengths, lengths + inserted - removed)
        if self._is_own:
            exchange.assign(self._layer, "used", seq)

    def _room(self, name: str, seq: int) -> Tensor:
        """The memory for ``seq`` tokens, ``[batch, seq, heads, head_dim]``, or an error."""
        if self._capacity is not None and seq > self._capacity:
            raise TensorError(
                f"the cache must have room for {seq} tokens, got {self._capacity}; make a "
                "longer cache or evict some first"
            )
        memory: Tensor = getattr(self._layer, f"_{name}" if self._is_own else name)
        return (memory if self._is_own else memory.transpose(1, 2))[:, :seq]


def _wrap_layers(name: str, cache: Any) -> Sequence[_Layer]:
    """The layers of a cache, or an error if it is not supported or holds no tokens."""
    library: Any = sys.modules.get("transformers.cache_utils")
    layers: list[_Layer] = []
    foreign: Sequence[Any] = ()
    if isinstance(cache, KVCache):
        layers = [_Layer(cache, cache.capacity)]
    elif library is None or type(cache) not in (library.DynamicCache, library.StaticCache):
        raise TensorError(f"{name} must be {_SUPPORTED_CACHES}, got {type(cache).__name__}")
    elif cache.offloading:
        raise TensorError(
            f"{name} must not be offloaded, because its layers move between devices; make it with "
            "offloading=False"
        )
    else:
        foreign = cache.layers
    for index, layer in enumerate(foreign):
        # compared by type, because a subclass may keep fewer tokens, or other tensors
        if type(layer) not in (library.DynamicLayer, library.StaticLayer):
            raise TensorError(
                f"{name} must be {_SUPPORTED_CACHES}, got a {type(layer).__name__} as layer {index}"
            )
        if not layer.is_initialized:
            raise TensorError(f"{name} must hold tokens in every layer, got none in layer {index}")
        is_static = type(layer) is library.StaticLayer
        layers.append(_Layer(layer, layer.max_cache_len if is_static else None))
    if not layers or any(layer.keys.shape[1] == 0 for layer in layers):
        raise TensorError(f"{name} must hold tokens in every layer; run the prompt first")
    return layers


def _count_tokens(name: str, layers: Sequence[_Layer]) -> int:
    """The number of tokens in every layer, or an error if the layers differ."""
    shapes = {tuple(layer.keys.shape[:2]) for layer in layers}
    if len(shapes) > 1:
        raise TensorError(
            f"the layers of {name} must hold the same rows and tokens, got {sorted(shapes)}"
        )
    return shapes.pop()[1]
