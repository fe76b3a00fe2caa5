"""`CachedKeys`: the functions for cached keys, for every layer of a cache at once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

from torch import Tensor

from phasor._checks import whole
from phasor._tensors import check_rope
from phasor.errors import PhasorWarning, PositionError, SpecError, TensorError
from phasor.rope import Rope
from phasor.torch._operator.arguments import ARRAYS
from phasor.torch.kv_cache.edits import Distance, distances, evict, insert_tokens, retune_, shift_
from phasor.torch.kv_cache.eight_bit import is_eight_bit
from phasor.torch.kv_cache.layers import (
    CachedLayer,
    Exchange,
    HeldTokens,
    count_tokens,
    wrap_layers,
)

_Ropes = Rope | Sequence[Rope | None]
_KeyEdit = Callable[[Tensor, Any], Tensor]  # edits keys in place, given their positions


class CachedKeys:
    """The rotated keys of a whole cache, and the Ropes that rotated them.

    Its methods write into every layer of the cache itself, or raise an error and write nothing. To
    do so they first compute the new keys of all layers, which takes memory for old and new keys.
    Models number the next token by the number of cached tokens, so after `evict_` or `insert_` it
    directly follows the last cached token.

    A layer with a sliding window holds the latest tokens only. They are edited as in any other
    layer; `kept` lists them. A layer without keys (Mamba, linear attention) is left as it is:
    exactly right for `shift_` and `retune_`, while `evict_` and `insert_` warn that its state still
    covers the tokens it has seen.

    Args:
        cache: A `KVCache`, or a ``DynamicCache``, ``StaticCache`` or float8 ``QuantizedCache`` of
            transformers 5, with or without sliding windows and recurrent layers. It must not be
            empty.
        ropes: One Rope for all layers, or a sequence with one per layer (None for a layer without
            rotation or without keys), such as `phasor.load` returns; with laws, not rules. Keys
            must include ``rope.attention_factor``, as in these models.
        scales: One tensor per layer of a cache of transformers, for keys in int8 or float8: as for
            `phasor.torch.kv_cache.shift_`, in the layout of the layer, ``[batch, heads, seq, 1]``
            for one scale per token and head. A ``StaticCache`` has scales for its whole capacity,
            which are written in place.

    Attributes:
        ropes: One per layer; `retune_` changes them.

    Raises:
        TensorError: For any other cache: empty, quantised to fewer bits, offloaded or of a model's
            own class; or if scales do not fit.
        SpecError: If there is not one Rope per layer, or they differ in their number of axes.

    >>> import torch
    >>> from phasor.torch import rotate
    >>> from phasor.torch.kv_cache import KVCache
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

    def __init__(
        self, cache: Any, ropes: _Ropes, *, scales: Sequence[Tensor | None] | None = None
    ) -> None:
        self._layers = wrap_layers("cache", cache, scales)
        self.ropes = self._rope_per_layer(ropes)

    def __len__(self) -> int:
        """The number of tokens, fallen out or not, or of columns if there is padding."""
        return count_tokens("cache", self._layers)

    @property
    def kept(self) -> tuple[range | None, ...]:
        """The tokens whose keys each layer holds, by index; None for a layer without keys.

        Tokens before the range fell out of the layer's sliding window.
        """
        return tuple(
            range(layer.fallen_out, layer.length) if layer.has_keys else None
            for layer in self._layers
        )

    @property
    def scales(self) -> tuple[Tensor | None, ...]:
        """The scales of each layer, as passed and edited since."""
        return tuple(layer.scales for layer in self._layers)

    def shift_(self, delta: Any) -> None:
        """Apply `phasor.torch.kv_cache.shift_` to the keys of every layer.

        One ``delta`` per token covers all tokens, those that fell out of a window included.
        """
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

        Remove the same columns from the model's attention mask, if it has one, and from scales of
        values.

        Raises:
            TensorError: If a sliding window would reach back to tokens that fell out of it.
        """
        stop = whole("stop", stop, least=0, most=len(self), error=PositionError)
        start = whole("start", start, least=0, most=stop, error=PositionError)

        def edit(index: int) -> tuple[HeldTokens, int]:
            layer, rope = self._layers[index], self.ropes[index]
            steps = distances("gap", gap, stop - start, rope)
            fallen_out = layer.fallen_out
            # the range among the tokens that are held
            first, last = max(start - fallen_out, 0), max(stop - fallen_out, 0)
            keys, values, scales = layer.held
            keys, values = evict(keys, values, first, last, rope, gap=steps)
            if scales is not None:
                scales, _ = evict(scales, scales, first, last, None)
            removed_before = min(max(fallen_out, start), stop) - start
            return HeldTokens(keys, values, scales), fallen_out - removed_before

        self._replace(edit, start, stop, 0)

    def insert_(
        self, at: int, other: Any, *, offset: Distance | None = None, gap: Distance | None = None
    ) -> None:
        """Apply `phasor.torch.kv_cache.insert` with all tokens of another, unchanged cache.

        ``insert_(len(cached), other)`` appends it. If its keys have scales, ``other`` must be its
        `CachedKeys`.

        Raises:
            SpecError: If ``other`` has other Ropes.
            TensorError: If ``other`` has different layers, or there is no room for its tokens.
        """
        at = whole("at", at, least=0, most=len(self), error=PositionError)
        if isinstance(other, CachedKeys):
            other_layers = other._layers
            if other.ropes != self.ropes:
                raise SpecError(
                    f"other must be rotated by the same ropes {self.ropes}, got {other.ropes}; "
                    "retune_ its keys first"
                )
        else:
            other_layers = wrap_layers("other", other)
        count = count_tokens("other", other_layers)
        self._check_insertable(at, other_layers, count)

        def edit(index: int) -> tuple[HeldTokens, int]:
            rope = self.ropes[index]
            steps = {
                "offset": distances("offset", offset, at, rope),
                "gap": distances("gap", gap, count, rope),
            }
            return _insert(self._layers[index], at, other_layers[index], rope, **steps)

        self._replace(edit, at, at, count)

    def _check_insertable(self, at: int, other_layers: Sequence[CachedLayer], count: int) -> None:
        """Refuse layers of another cache that differ from the layers of this one."""
        if len(other_layers) != len(self._layers):
            raise TensorError(
                f"other must have the layers of the cache ({len(self._layers)}), "
                f"got {len(other_layers)}"
            )
        for index, (layer, other_layer) in enumerate(zip(self._layers, other_layers, strict=True)):
            if layer.has_keys != other_layer.has_keys:
                raise TensorError(
                    f"other must have the layers of the cache, which has a {layer.name} as layer "
                    f"{index}, got a {other_layer.name}"
                )
            if not layer.has_keys:
                continue
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

    def _rewrite(
        self, edits: Sequence[_KeyEdit | None], positions: Any, ropes: tuple[Rope | None, ...]
    ) -> None:
        """Replace the keys of every layer by as many edited keys, rotated by ``ropes``."""
        count_tokens("cache", self._layers)
        exchange = Exchange()
        exchange.assign(self, "ropes", ropes)
        for layer, edit, rope in zip(self._layers, edits, self.ropes, strict=True):
            if edit is not None and rope is not None:
                keys = layer.held.keys.clone()
                held_positions = _positions_of_held(positions, layer, rope)
                layer.add_keys_to(exchange, edit(keys, held_positions))
        exchange.make()

    def _replace(
        self, edit: Callable[[int], tuple[HeldTokens, int]], start: int, stop: int, added: int
    ) -> None:
        """Replace what every layer holds; tokens ``start`` to ``stop - 1`` go or ``added`` come.

        ``edit`` takes the index of a layer and returns its new tokens, and how many tokens of the
        sequence before them are not held.
        """
        removed = stop - start
        length = count_tokens("cache", self._layers) + added - removed
        exchange = Exchange()
        for index, layer in enumerate(self._layers):
            if layer.has_keys:
                held = layer.fit_window(*edit(index), length)
                layer.add_to(exchange, held, start, stop, added)
        states = [index for index, layer in enumerate(self._layers) if layer.has_state]
        if states and (added or removed):
            covers = f"covers none of the {added} inserted"
            if removed:
                covers = f"still covers the {removed} removed"
            warnings.warn(
                f"layers {states} have a recurrent state, which stays as it is: it {covers} tokens",
                PhasorWarning,
                stacklevel=3,
            )
        exchange.make()

    def _rope_per_layer(self, ropes: _Ropes) -> tuple[Rope | None, ...]:
        if isinstance(ropes, Rope):
            ropes = tuple(ropes if layer.has_keys else None for layer in self._layers)
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
                if not layer.has_keys:
                    raise SpecError(
                        f"ropes[{index}] must be None, because layer {index}, a {layer.name}, has "
                        f"no keys, got {rope}"
                    )
                layer.check_heads(rope.head_dim)
        axes = {rope.axes.n_axes for rope in ropes if rope is not None}
        if len(axes) > 1:
            raise SpecError(
                f"ropes must have the same number of axes, got {sorted(axes)}: call the functions "
                f"of phasor.torch.kv_cache for each layer instead"
            )
        return tuple(ropes)


def _insert(
    layer: CachedLayer, at: int, other: CachedLayer, rope: Rope | None, **steps: list[int]
) -> tuple[HeldTokens, int]:
    """The tokens that a layer holds with those of another before token ``at`` of the sequence.

    The second result is the number of tokens before them that are not held.
    """
    held, new, fallen_out = layer.held, other.held, layer.fallen_out
    if at < fallen_out:  # the new tokens come before all tokens that the layer holds
        new, fallen_out = new.last(0), fallen_out + other.length
        first = 0
    elif other.fallen_out:  # the earlier tokens are no longer next to the new tokens
        held, fallen_out = held.last(layer.length - at), at + other.fallen_out
        first = 0
    else:
        first = at - fallen_out
    for x in (new.keys, new.values):
        ARRAYS.check_device("other", x, held.keys.device)
    is_alike = (layer.dtype, held.scales is None) == (other.dtype, new.scales is None)
    if not is_alike and (is_eight_bit(layer.dtype) or is_eight_bit(other.dtype)):
        raise TensorError(
            f"other must hold keys in {layer.dtype} with the same kind of scales as the cache, got "
            f"{other.dtype}; pass the CachedKeys of a cache that has scales"
        )
    names = ["keys of other", "values of other"]
    keys, values = insert_tokens(
        held.keys, held.values, new.keys, new.values, first, rope, names=names, **steps
    )
    scales = held.scales
    if scales is not None and new.scales is not None:
        names = ["scales of other"] * 2
        none: Any = {"offset": None, "gap": None, "names": names}
        scales, _ = insert_tokens(scales, scales, new.scales, new.scales, first, None, **none)
    return HeldTokens(keys, values, scales), fallen_out


def _positions_of_held(positions: Any, layer: CachedLayer, rope: Rope) -> Any:
    """The positions of the tokens that a layer holds, of those of the whole sequence."""
    if not layer.fallen_out:
        return positions
    # any keys of all tokens, whose shape the positions must fit
    keys = layer.check_heads(rope.head_dim).expand(-1, layer.length, -1, -1)
    readable: Tensor = ARRAYS.fit_positions(positions, [keys], rope, False, ["keys"])
    token_dim = -2 if rope.axes.n_axes > 1 else -1
    if readable.dim() < -token_dim or readable.shape[token_dim] == 1:
        return readable  # the same for all tokens
    return readable.narrow(token_dim, layer.fallen_out, layer.count)
