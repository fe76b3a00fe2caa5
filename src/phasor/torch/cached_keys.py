"""`CachedKeys`: the verbs of `cache` and `splice` on every layer of a cache at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor

from phasor.errors import SpecError, TensorError
from phasor.rope import Rope
from phasor.torch._arguments import check_rope
from phasor.torch._cache_layers import Layer, layers_of
from phasor.torch.cache import check_retunable, check_shiftable, retune_, shift_
from phasor.torch.splice import Steps, checked_places, checked_range, evict, insert

_Ropes = Rope | Sequence[Rope | None]


class CachedKeys:
    """The keys of a whole cache that a model has rotated, and the Ropes that rotated them.

    What is done is done to the cache itself, to keys and values of all layers; where something
    does not fit, nothing is written. Models number the next token by how many are cached, so it
    stands right behind the last one when a gap is closed.

    Args:
        cache: A `KeyCache`, or a ``DynamicCache`` or ``StaticCache`` of transformers 5 in which
            every layer keeps every token (``DynamicLayer``, ``StaticLayer``). It holds tokens.
        ropes: One Rope for all layers, or one for each, None where a layer rotates nothing, as
            `phasor.load` returns them. A rule has to have picked its law. Keys are taken to carry
            ``rope.attention_factor``, by which these models multiply cos and sin.

    Raises:
        TensorError: For any other cache: empty, quantised, offloaded, sliding or recurrent.
        SpecError: If there is not one Rope per layer, a scaling is a rule, or the Ropes differ in
            their number of axes.

    >>> import torch
    >>> from phasor.torch import rotate
    >>> from phasor.torch.key_cache import KeyCache
    >>> rope = Rope(head_dim=4, pairing="half")
    >>> cache = KeyCache(batch=1, capacity=8, key_heads=1, head_dim=4)
    >>> raw = torch.ones(1, 6, 1, 4)
    >>> cache.append(rotate(raw, range(6), rope), raw)
    >>> CachedKeys(cache, rope).evict_(1, 3)
    >>> cache.lengths.tolist()
    [4]
    >>> torch.allclose(cache.keys, rotate(raw[:, :4], range(4), rope), atol=1e-6)
    True
    """

    #: One per layer; `retune_` changes them.
    ropes: tuple[Rope | None, ...]

    def __init__(self, cache: Any, ropes: _Ropes) -> None:
        self._layers = layers_of("cache", cache)
        self.ropes = self._one_each(ropes)

    def __len__(self) -> int:
        """How many tokens are cached; with padding, in columns."""
        return _tokens("cache", self._layers)[1]

    def shift_(self, delta: Any) -> None:
        """`phasor.torch.shift_` of the keys of every layer.

        Raises:
            PositionError: If ``delta`` does not fit the keys.
        """
        _tokens("cache", self._layers)
        turned = [
            (layer.keys, rope)
            for layer, rope in zip(self._layers, self.ropes, strict=True)
            if rope is not None
        ]
        for keys, rope in turned:
            check_shiftable(keys, delta, rope)
        for keys, rope in turned:
            shift_(keys, delta, rope)

    def retune_(self, positions: Any, ropes: _Ropes) -> None:
        """`phasor.torch.retune_` of the keys of every layer, attention factor included.

        Args:
            positions: Where the tokens stand, as for `phasor.torch.rotate`.
            ropes: The new Ropes, as for the class.

        Raises:
            SpecError: If they differ from the old ones in more than frequencies and direction.
            PositionError: If the positions do not fit the keys.
        """
        _tokens("cache", self._layers)
        wanted = self._one_each(ropes)
        turned: list[tuple[Tensor, Rope, Rope]] = []
        for index, (old, new) in enumerate(zip(self.ropes, wanted, strict=True)):
            if (old is None) != (new is None):
                raise SpecError(
                    f"ropes must be None for the layers that rotate nothing and for no other, "
                    f"got {new} for layer {index}, whose Rope is {old}"
                )
            if old is not None and new is not None:
                turned.append((self._layers[index].keys, old, new))
        for keys, old, new in turned:
            check_retunable(keys, positions, old, new)
        for keys, old, new in turned:
            gain = new.attention_factor / old.attention_factor
            retune_(keys, positions, old, new, gain=gain)
        self.ropes = wanted

    def evict_(self, start: int, stop: int, *, gap: Steps | None = None) -> None:
        """`phasor.torch.evict`, written into the cache, which is shorter then.

        A mask of the model's tokens has to lose the same columns.

        Raises:
            PositionError: If the range is not within the tokens, or ``gap`` is missing or does not
                fit.
        """
        _tokens("cache", self._layers)
        both = list(zip(self._layers, self.ropes, strict=True))
        # every refusal comes before the first write; a long cache has no room for all results
        for layer, rope in both:
            checked_range(layer.keys, layer.values, start, stop, rope, gap)
            layer.check_writable()
        for layer, rope in both:
            layer.hold(*evict(layer.keys, layer.values, start, stop, rope, gap=gap), start, stop)

    def insert_(
        self, at: int, other: Any, *, offset: Steps | None = None, gap: Steps | None = None
    ) -> None:
        """`phasor.torch.insert` of all tokens of another cache, which is left as it is.

        ``insert_(len(cached), other)`` merges the two.

        Raises:
            TensorError: If ``other`` has other layers, or there is no room for its tokens.
            PositionError: If ``at`` is not within the tokens, or ``offset`` or ``gap`` is missing
                or does not fit.
        """
        _tokens("cache", self._layers)
        others = layers_of("other", other)
        count = _tokens("other", others)[1]
        if len(others) != len(self._layers):
            raise TensorError(
                f"other must have the layers of the cache ({len(self._layers)}), got {len(others)}"
            )
        triples = list(zip(self._layers, others, self.ropes, strict=True))
        for layer, new, rope in triples:
            new.check_whole()
            layer.check_room(at, count)
            layer.check_writable()
            for what in ("keys", "values"):
                _check_alike(what, getattr(layer, what), getattr(new, what))
            pair = new.keys, new.values
            checked_places(layer.keys, layer.values, at, *pair, rope, offset, gap)
        for layer, new, rope in triples:
            pair = new.keys, new.values
            joined = insert(layer.keys, layer.values, at, *pair, rope, offset=offset, gap=gap)
            layer.hold(*joined, at, at)

    def _one_each(self, ropes: _Ropes) -> tuple[Rope | None, ...]:
        if isinstance(ropes, Rope):
            found: tuple[Rope | None, ...] = (ropes,) * len(self._layers)
        elif isinstance(cast(object, ropes), Sequence):
            found = tuple(ropes)
        else:
            raise SpecError(
                f"ropes must be a phasor.Rope, or one per layer, got {type(ropes).__name__}"
            )
        if len(found) != len(self._layers):
            raise SpecError(
                f"ropes must be one Rope, or one per layer of the cache ({len(self._layers)}), "
                f"got {len(found)}"
            )
        for index, (layer, rope) in enumerate(zip(self._layers, found, strict=True)):
            if rope is None:
                continue
            check_rope(rope, f"ropes[{index}]")
            if layer.keys.shape[-1] != rope.head_dim:
                raise TensorError(
                    f"the keys of layer {index} must be as wide as their Rope's head_dim "
                    f"({rope.head_dim}), got shape {list(layer.keys.shape)}"
                )
        axes = {rope.axes.n_axes for rope in found if rope is not None}
        if len(axes) > 1:
            raise SpecError(
                f"ropes must have the same number of axes, got {sorted(axes)}: their positions "
                "differ; use the verbs of phasor.torch layer by layer"
            )
        return found


def _tokens(name: str, layers: Sequence[Layer]) -> tuple[int, int]:
    """Rows and tokens, once every layer is known to hold the same ones."""
    shapes = {(layer.keys.shape[0], layer.keys.shape[1]) for layer in layers}
    if len(shapes) > 1:
        raise TensorError(
            f"the layers of {name} must hold the same rows and tokens, got {sorted(shapes)}"
        )
    return shapes.pop()


def _check_alike(what: str, old: Any, new: Any) -> None:
    """Say of ``other`` what `insert` would say of its own arguments."""
    had, came = ((x.shape[0], *x.shape[2:], x.dtype, x.device) for x in (old, new))
    if had != came:
        raise TensorError(f"{what} of other must be like those of the cache {had}, got {came}")
