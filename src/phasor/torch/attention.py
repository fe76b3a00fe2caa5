"""`RotaryAttention`: self-attention whose queries and keys are rotated."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from phasor._checks import number, whole
from phasor.errors import PositionError, SpecError, TensorError
from phasor.rope import Rope
from phasor.torch._arguments import check_is_tensor, check_rope
from phasor.torch._attend import attend, attend_cached, logit_factors
from phasor.torch._torchscript import refuse
from phasor.torch.functional import rotate_qk
from phasor.torch.key_cache import KeyCache


class RotaryAttention(nn.Module):
    """``softmax(factor (R(m) q)ᵀ (R(n) k)) v`` between linear maps (RoFormer 2104.09864, eq. 16).

    ``factor`` is ``head_dim**-0.5``, times whatever the rope's law does to the softmax; a law with
    an `attention_factor` multiplies cos and sin by it, so coordinates that do not turn are left
    alone. The module holds the Rope and its weights: no table, no buffer, no longest sequence.

    It runs on ``scaled_dot_product_attention``. Full and causal attention are one call, packed
    sequences one call each. A window, padding or a cache takes a boolean mask for 512 queries at a
    time, never one as large as the scores.

    Args:
        width: Of the tokens that come and go.
        query_heads: Heads of queries.
        rope: What rotates queries and keys; None for a layer without positions.
        key_heads: Heads of keys and of values, a divisor of ``query_heads``, of which each serves
            as many queries (grouped-query attention, 2305.13245); as many as queries if None.
        head_dim: Width of a head. The Rope says it; needed where there is none.
        causal: Whether a query sees nothing after itself.
        window: Tokens that a causal query sees, itself included; None for all. Counted in tokens,
            whatever their positions are.
        qk_norm: Epsilon of an RMS norm with weights on every head of queries and keys, before the
            rotation (Qwen3, 2505.09388); None for no norm.
        input_bias: Whether the maps to queries, keys and values have biases.
        output_bias: Whether the map back has one.
        device: Where the weights live; torch's default if None.
        dtype: Of the weights; torch's default if None.

    Raises:
        SpecError: If a size does not fit the others, or the Rope's law is not yet known.

    >>> import torch
    >>> from phasor import Rope
    >>> rope = Rope(head_dim=16, pairing="half", base=500_000.0)
    >>> attention = RotaryAttention(64, query_heads=4, rope=rope, key_heads=2)
    >>> x = torch.randn(1, 10, 64)
    >>> with torch.no_grad():
    ...     cache = attention.cache(batch=1, capacity=10)
    ...     steps = [attention(x[:, i : i + 1], cache=cache) for i in range(10)]
    ...     bool(torch.allclose(torch.cat(steps, dim=1), attention(x), atol=1e-5))
    True
    """

    def __init__(
        self,
        width: int,
        query_heads: int,
        rope: Rope | None,
        *,
        key_heads: int | None = None,
        head_dim: int | None = None,
        causal: bool = True,
        window: int | None = None,
        qk_norm: float | None = None,
        input_bias: bool = False,
        output_bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        width = whole("width", width, least=1)
        self.query_heads = whole("query_heads", query_heads, least=1)
        self.key_heads = self.query_heads
        if key_heads is not None:
            self.key_heads = whole("key_heads", key_heads, least=1)
        if self.query_heads % self.key_heads:
            raise SpecError(
                f"key_heads must divide query_heads ({self.query_heads}), got {self.key_heads}"
            )
        self.head_dim = _head_dim(rope, head_dim)
        self.causal = causal
        self.window = None if window is None else whole("window", window, least=1)
        if window is not None and not causal:
            raise SpecError(f"window is for causal attention, got causal=False and window={window}")
        self.rope = rope

        asked, held = self.query_heads * self.head_dim, self.key_heads * self.head_dim
        self.query = nn.Linear(width, asked, input_bias, device, dtype)
        self.key = nn.Linear(width, held, input_bias, device, dtype)
        self.value = nn.Linear(width, held, input_bias, device, dtype)
        self.output = nn.Linear(asked, width, output_bias, device, dtype)
        self.query_norm = self.key_norm = None
        if qk_norm is not None:
            epsilon = number("qk_norm", qk_norm, above=0)
            self.query_norm = nn.RMSNorm(self.head_dim, epsilon, device=device, dtype=dtype)
            self.key_norm = nn.RMSNorm(self.head_dim, epsilon, device=device, dtype=dtype)

    @property
    def rope(self) -> Rope | None:
        """What rotates. Another can take its place, for a longer context: heads as wide."""
        return self._rope

    @rope.setter
    def rope(self, rope: Rope | None) -> None:
        if rope is not None and _head_dim(rope, None) != self.head_dim:
            raise SpecError(
                f"rope must have the heads of this layer ({self.head_dim}), got {rope.head_dim}"
            )
        self._rope = rope
        self._gain, self._factor = logit_factors(rope, self.head_dim)

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        cu_seqlens: Sequence[int] | Tensor | None = None,
        cache: KeyCache | None = None,
    ) -> Tensor:
        """What every token has gathered.

        Args:
            x: ``[batch, seq, width]``.
            positions: Where tokens stand, as for `phasor.torch.rotate`. If None, 0, 1, 2, ... from
                the first token of each sequence: padding is not counted, cached tokens are. A
                Rope of several axes needs them; a layer without Rope has no use for them, and
                takes them so that all layers of a model can be called alike.
            mask: ``[batch, seq]`` bools, true for tokens and false for padding, on either side.
                Nothing sees padding but itself; what comes out for it means nothing.
            cu_seqlens: Boundaries of sequences packed end to end in every row, ``[0, ..., seq]``:
                none sees another. They are read on the host, so under ``torch.compile`` and on
                accelerators give a list of ints.
            cache: From `cache`. Holds the tokens before these, and these from now on.

        Returns:
            ``[batch, seq, width]``.

        Raises:
            TensorError: If ``x``, ``mask`` or ``cache`` do not fit, or a cache would have to
                record a gradient.
            PositionError: If positions or boundaries do not fit.
            SpecError: If a cache meets packed sequences or attention that is not causal.
        """
        self._check(x, mask, cu_seqlens, cache)
        batch, seq, _ = x.shape
        bounds = None if cu_seqlens is None else _bounds(cu_seqlens, seq)
        q = self.query(x).view(batch, seq, self.query_heads, self.head_dim)
        k = self.key(x).view(batch, seq, self.key_heads, self.head_dim)
        v = self.value(x).view(batch, seq, self.key_heads, self.head_dim)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        if self.rope is not None:
            if positions is None:
                positions = _standing(x, self.rope, mask, bounds, cache)
            q, k = rotate_qk(q, k, positions, self.rope, gain=self._gain)
        done = self._attended(q, k, v, mask, bounds, cache)
        return self.output(done.reshape(batch, seq, self.query_heads * self.head_dim))

    def cache(self, batch: int, capacity: int, *, dtype: torch.dtype | None = None) -> KeyCache:
        """An empty key cache for this layer, where its weights are.

        Args:
            batch: Rows.
            capacity: Columns that can be given to `forward`, at most.
            dtype: Of keys and values as they will come. If None, autocast's where it is on, else
                the weights' own; a mixed precision that casts weights has to be named.
        """
        like = self.key.weight
        kind = like.device.type
        # autocast casts everything but float64
        casts = like.dtype != torch.float64 and torch.amp.is_autocast_available(kind)
        if dtype is None and casts and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        heads, width = self.key_heads, self.head_dim
        made = like.dtype if dtype is None else dtype
        return KeyCache(batch, capacity, heads, width, device=like.device, dtype=made)

    def __prepare_scriptable__(self) -> NoReturn:
        refuse()

    def extra_repr(self) -> str:
        window = "" if self.window is None else f", window={self.window}"
        return (
            f"query_heads={self.query_heads}, key_heads={self.key_heads}, "
            f"causal={self.causal}{window}, rope={self.rope}"
        )

    def _check(
        self, x: Tensor, mask: Tensor | None, cu_seqlens: object, cache: KeyCache | None
    ) -> None:
        check_is_tensor("x", x)
        if x.dim() != 3 or x.shape[-1] != self.query.in_features:
            raise TensorError(
                f"x must be [batch, seq, width] with width {self.query.in_features}, "
                f"got shape {list(x.shape)}"
            )
        if mask is not None:
            check_is_tensor("mask", mask)
        if mask is not None and (mask.dtype != torch.bool or mask.shape != x.shape[:2]):
            raise TensorError(
                f"mask must be bools of shape {list(x.shape[:2])}, true for tokens, "
                f"got {mask.dtype} of shape {list(mask.shape)}"
            )
        if cu_seqlens is not None and (mask is not None or cache is not None):
            other = "mask" if mask is not None else "cache"
            raise SpecError(f"cu_seqlens and {other} exclude each other; give one of them")
        if cache is not None and not isinstance(cast(object, cache), KeyCache):
            raise TensorError(f"cache must be a KeyCache, got {type(cache).__name__}")
        if cache is not None and not self.causal:
            raise SpecError("cache is for causal attention, and this layer has causal=False")
        if cache is not None and cache.lengths.shape[0] != x.shape[0]:
            raise TensorError(
                f"cache must have the batch of x ({x.shape[0]}), got {cache.lengths.shape[0]}"
            )

    def _attended(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        bounds: list[int] | None,
        cache: KeyCache | None,
    ) -> Tensor:
        factor, causal, window = self._factor, self.causal, self.window
        if bounds is not None:
            parts = [
                attend(q[:, a:b], k[:, a:b], v[:, a:b], factor, causal=causal, window=window)
                for a, b in pairwise(bounds)
            ]
            return torch.cat(parts, dim=1) if parts else q
        if cache is None:
            return attend(q, k, v, factor, causal=causal, window=window, mask=mask)
        empty, places = cache.used == 0, cache.places(q.shape[1], mask)
        cache.append(k, v, mask)
        if empty:  # what there is to see is at hand, without the cache's order of places
            return attend(q, k, v, factor, causal=True, window=window, mask=mask)
        return attend_cached(q, cache.keys, cache.values, factor, places, window)


def _head_dim(rope: Rope | None, head_dim: int | None) -> int:
    if rope is None:
        if head_dim is None:
            raise SpecError("head_dim must be given where rope is None")
        return whole("head_dim", head_dim, least=1)
    check_rope(rope)
    if head_dim not in (None, rope.head_dim):
        raise SpecError(f"head_dim must be the Rope's ({rope.head_dim}), got {head_dim}")
    return rope.head_dim


def _bounds(cu_seqlens: Sequence[int] | Tensor, seq: int) -> list[int]:
    """The boundaries on the host, once they are known to cut ``seq`` tokens."""
    if not isinstance(cast(object, cu_seqlens), Tensor | Sequence):
        came = type(cu_seqlens).__name__
        raise PositionError(f"cu_seqlens must be whole numbers [0, ..., {seq}], got {came}")
    tensor = isinstance(cu_seqlens, Tensor)
    listed = cast(list[Any], cu_seqlens.flatten().tolist()) if tensor else list(cu_seqlens)
    given = [whole("cu_seqlens", bound, least=0, error=PositionError) for bound in listed]
    rising = all(a <= b for a, b in pairwise(given))
    if not given or given[0] != 0 or given[-1] != seq or not rising:
        raise PositionError(
            f"cu_seqlens must rise from 0 to the number of tokens ({seq}), got {given}; "
            "lengths become boundaries by a cumulative sum"
        )
    return given


def _standing(
    x: Tensor,
    rope: Rope,
    mask: Tensor | None,
    bounds: list[int] | None,
    cache: KeyCache | None,
) -> Tensor:
    """Positions counted from the first token of each sequence."""
    if rope.axes.n_axes > 1:
        raise PositionError(
            f"positions must be given for a Rope of {rope.axes.n_axes} axes, got None; "
            "phasor.positions.every_axis makes them of text positions"
        )
    seq = x.shape[1]
    if cache is not None:
        return cache.places(seq, mask)
    if mask is not None:
        return (mask.cumsum(-1) - 1) * mask
    along = torch.arange(seq, device=x.device)
    if bounds is None:
        return along
    starts = [along[b:c] - b for b, c in pairwise(bounds)]
    return torch.cat(starts) if starts else along
