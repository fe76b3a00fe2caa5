"""`RotaryAttention`: self-attention whose queries and keys are rotated.

It runs on ``scaled_dot_product_attention``. Where torch's own kernels know the mask (full, causal),
they apply it. Every other mask is a boolean one for `CHUNK` queries at a time, so that memory is
proportional to the sequence. FlexAttention would do without masks, but uncompiled it writes all
scores to memory, and compiled it has no backward pass on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NoReturn, cast

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from phasor._checks import number, short_repr, whole
from phasor.errors import PositionError, SpecError, TensorError
from phasor.rope import Rope
from phasor.torch._arguments import check_is_tensor, check_rope
from phasor.torch._internals import refuse_torchscript
from phasor.torch.functional import rotate_qk
from phasor.torch.kv_cache.cache import KVCache, check_attention_mask

#: Queries that share one mask.
CHUNK = 512


class RotaryAttention(nn.Module):
    """``softmax(factor (R(m) q)ᵀ (R(n) k)) v`` between projections (RoFormer 2104.09864, eq. 16).

    ``factor`` is ``head_dim**-0.5 * rope.softmax_factor``. Where the rope's law has an
    `attention_factor`, cos and sin are multiplied by it, so that coordinates that are not rotated
    stay as they are. The module holds the Rope and its weights: no table, no buffer, no longest
    sequence. Its parameters are named as in transformers, so the weights of a Llama layer load by
    ``load_state_dict``, and those of a Qwen3 layer with ``qk_norm=True``.

    Args:
        rope: What rotates queries and keys; None for a layer without positions.
        embed_dim: Width of the input and the output.
        num_heads: Heads of queries.
        num_kv_heads: Heads of keys and of values, a divisor of ``num_heads``, each shared by as
            many queries (grouped-query attention, 2305.13245); ``num_heads`` if None.
        head_dim: Width of a head. Needed where ``rope`` is None, else the Rope's.
        causal: Whether a query sees nothing after itself.
        window: Tokens that a causal query sees, itself included; None for all. Counted in tokens,
            whatever their positions are.
        qk_norm: Whether each head of queries and keys goes through an RMS norm with weights before
            the rotation (Qwen3, 2505.09388).
        norm_eps: Epsilon of these norms.
        qkv_bias: Whether ``q_proj``, ``k_proj`` and ``v_proj`` have biases.
        o_bias: Whether ``o_proj`` has one.
        device: Where the weights are; torch's default if None.
        dtype: Of the weights; torch's default if None.

    Attributes:
        q_proj: ``nn.Linear``, ``embed_dim`` to ``num_heads * head_dim``.
        k_proj: ``nn.Linear``, ``embed_dim`` to ``num_kv_heads * head_dim``.
        v_proj: The same shape.
        o_proj: ``nn.Linear``, ``num_heads * head_dim`` to ``embed_dim``.
        q_norm: ``nn.RMSNorm`` over ``head_dim``, or None.
        k_norm: The same.

    Raises:
        SpecError: If a size does not fit the others, or the Rope's scaling is a rule.

    >>> import torch
    >>> from phasor import Rope
    >>> rope = Rope(head_dim=16, pairing="half", base=500_000.0)
    >>> attention = RotaryAttention(rope, embed_dim=64, num_heads=4, num_kv_heads=2)
    >>> x = torch.randn(1, 10, 64)
    >>> with torch.no_grad():
    ...     cache = attention.make_cache(batch_size=1, capacity=10)
    ...     steps = [attention(x[:, i : i + 1], cache=cache) for i in range(10)]
    ...     bool(torch.allclose(torch.cat(steps, dim=1), attention(x), atol=1e-5))
    True
    """

    def __init__(
        self,
        rope: Rope | None,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        head_dim: int | None = None,
        causal: bool = True,
        window: int | None = None,
        qk_norm: bool = False,
        norm_eps: float = 1e-6,
        qkv_bias: bool = False,
        o_bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        embed_dim = whole("embed_dim", embed_dim, least=1)
        self.num_heads = whole("num_heads", num_heads, least=1)
        given = self.num_heads if num_kv_heads is None else num_kv_heads
        self.num_kv_heads = whole("num_kv_heads", given, least=1)
        if self.num_heads % self.num_kv_heads:
            raise SpecError(
                f"num_kv_heads must divide num_heads ({self.num_heads}), got {self.num_kv_heads}"
            )
        self.head_dim = _head_dim(rope, head_dim)
        self.causal = causal
        self.window = None if window is None else whole("window", window, least=1)
        if window is not None and not causal:
            raise SpecError(f"window is for causal attention, got causal=False and window={window}")
        if type(qk_norm) is not bool:
            raise SpecError(
                f"qk_norm must be True or False, got {short_repr(qk_norm)}; norm_eps is the epsilon"
            )
        norm_eps = number("norm_eps", norm_eps, above=0)
        self.rope = rope

        q_dim, kv_dim = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(embed_dim, q_dim, qkv_bias, device, dtype)
        self.k_proj = nn.Linear(embed_dim, kv_dim, qkv_bias, device, dtype)
        self.v_proj = nn.Linear(embed_dim, kv_dim, qkv_bias, device, dtype)
        self.o_proj = nn.Linear(q_dim, embed_dim, o_bias, device, dtype)
        self.q_norm = self.k_norm = None
        if qk_norm:
            self.q_norm = nn.RMSNorm(self.head_dim, norm_eps, device=device, dtype=dtype)
            self.k_norm = nn.RMSNorm(self.head_dim, norm_eps, device=device, dtype=dtype)

    @property
    def rope(self) -> Rope | None:
        """What rotates. Another of the same ``head_dim`` can be assigned, for a longer context."""
        return self._rope

    @rope.setter
    def rope(self, rope: Rope | None) -> None:
        if rope is not None and _head_dim(rope, None) != self.head_dim:
            raise SpecError(
                f"rope must have the head_dim of this layer ({self.head_dim}), got {rope.head_dim}"
            )
        self._rope = rope
        self._gain, self._factor = logit_factors(rope, self.head_dim)

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        cu_seqlens: Sequence[int] | Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """The attention output of every token.

        Args:
            x: ``[batch, seq, embed_dim]``.
            positions: As for `phasor.torch.rotate`, ``[seq]`` or ``[batch, seq]``. If None, 0, 1,
                2, ... from the first token of each sequence: padding is not counted, cached tokens
                are. A Rope of several axes needs them; a layer without Rope ignores them, so that
                all layers of a model can be called alike.
            attention_mask: Bools ``[batch, seq]``: True is a token, False is padding, on either
                side. No token sees padding, and the output for padding means nothing.
            cu_seqlens: Boundaries of sequences packed end to end in every row, ``[0, ..., seq]``;
                no sequence sees another. They are read on the host, so under ``torch.compile`` and
                on accelerators give a list of ints.
            cache: From `make_cache`. Holds the tokens before these, and then these too.

        Returns:
            ``[batch, seq, embed_dim]``.

        Raises:
            TensorError: If ``x``, ``attention_mask`` or ``cache`` do not fit, or a cache would
                have to record a gradient.
            PositionError: If positions or boundaries do not fit.
            SpecError: If a cache is given with packed sequences, or to attention that is not
                causal.
        """
        self._check_inputs(x, attention_mask, cu_seqlens, cache)
        batch, seq, _ = x.shape
        bounds = None if cu_seqlens is None else _checked_bounds(cu_seqlens, seq)
        # [batch, seq, embed_dim] -> [batch, seq, num_heads, head_dim]
        q = self.q_proj(x).view(batch, seq, self.num_heads, self.head_dim)
        # [batch, seq, embed_dim] -> [batch, seq, num_kv_heads, head_dim]
        k = self.k_proj(x).view(batch, seq, self.num_kv_heads, self.head_dim)
        v = self.v_proj(x).view(batch, seq, self.num_kv_heads, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope is not None:
            if positions is None:
                positions = _default_positions(x, self.rope, attention_mask, bounds, cache)
            q, k = rotate_qk(q, k, positions, self.rope, gain=self._gain)
        y = self._attend(q, k, v, attention_mask, bounds, cache)
        # [batch, seq, num_heads, head_dim] -> [batch, seq, embed_dim]
        return self.o_proj(y.reshape(batch, seq, self.num_heads * self.head_dim))

    def make_cache(
        self, batch_size: int, capacity: int, *, dtype: torch.dtype | None = None
    ) -> KVCache:
        """An empty cache for this layer, on the device of its weights.

        Args:
            batch_size: Rows.
            capacity: Tokens that can be given to `forward`, padding included.
            dtype: Of keys and values. If None, autocast's where it is on, else the weights' own;
                where something else casts the weights (FSDP's mixed precision), give its dtype.
        """
        weight = self.k_proj.weight
        device_type = weight.device.type
        # autocast casts everything but float64
        castable = weight.dtype != torch.float64 and torch.amp.is_autocast_available(device_type)
        if dtype is None and castable and torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)
        dtype = weight.dtype if dtype is None else dtype
        sizes = batch_size, capacity, self.num_kv_heads, self.head_dim
        return KVCache(*sizes, device=weight.device, dtype=dtype)

    def __prepare_scriptable__(self) -> NoReturn:
        refuse_torchscript()

    def extra_repr(self) -> str:
        window = "" if self.window is None else f", window={self.window}"
        return (
            f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, "
            f"causal={self.causal}{window}, rope={self.rope}"
        )

    def _check_inputs(
        self, x: Tensor, attention_mask: Tensor | None, cu_seqlens: object, cache: KVCache | None
    ) -> None:
        check_is_tensor("x", x)
        if x.dim() != 3 or x.shape[-1] != self.q_proj.in_features:
            raise TensorError(
                f"x must be [batch, seq, embed_dim] with embed_dim {self.q_proj.in_features}, "
                f"got shape {list(x.shape)}"
            )
        if attention_mask is not None:
            check_attention_mask(attention_mask, x.shape[:2])
        if cu_seqlens is not None and (attention_mask is not None or cache is not None):
            other = "attention_mask" if attention_mask is not None else "cache"
            raise SpecError(f"cu_seqlens and {other} exclude each other; give one of them")
        if cache is None:
            return
        if not isinstance(cast(object, cache), KVCache):
            raise TensorError(f"cache must be a KVCache, got {type(cache).__name__}")
        if not self.causal:
            raise SpecError("cache is for causal attention, and this layer has causal=False")
        if cache.lengths.shape[0] != x.shape[0]:
            raise TensorError(
                f"cache must have the batch of x ({x.shape[0]}), got {cache.lengths.shape[0]}"
            )

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attention_mask: Tensor | None,
        bounds: list[int] | None,
        cache: KVCache | None,
    ) -> Tensor:
        """``[batch, seq, num_heads, head_dim]`` of rotated queries and keys."""
        factor, causal, window = self._factor, self.causal, self.window
        if bounds is not None:
            parts = [
                attend(q[:, a:b], k[:, a:b], v[:, a:b], factor, causal=causal, window=window)
                for a, b in pairwise(bounds)
            ]
            return torch.cat(parts, dim=1) if parts else q
        if cache is not None:
            is_first, index = cache.used == 0, cache.next_positions(q.shape[1], attention_mask)
            cache.append(k, v, attention_mask)
            if not is_first:
                k, v = cache.keys, cache.values
                return attend(q, k, v, factor, causal=True, window=window, index=index)
        return attend(q, k, v, factor, causal=causal, window=window, attention_mask=attention_mask)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    factor: float,
    *,
    causal: bool,
    window: int | None = None,
    attention_mask: Tensor | None = None,
    index: Tensor | None = None,
) -> Tensor:
    """Softmax attention with any of the layer's masks.

    Args:
        q: ``[batch, new, num_heads, head_dim]``.
        k: ``[batch, seq, num_kv_heads, head_dim]``, in causal order.
        v: The same shape.
        factor: On the scores.
        causal: Whether a query sees nothing after itself.
        window: Tokens that a causal query sees, itself included; None for all.
        attention_mask: Bools ``[batch, seq]``, False for padding. Padding is seen by itself only,
            because a softmax over nothing would be NaN.
        index: ``[batch, new]``, the index in ``k`` of each query's own token, as of new tokens in
            a cache. None where queries and keys are of the same tokens.

    Returns:
        ``[batch, new, num_heads, head_dim]``.
    """
    length = q.shape[1]
    if index is None and attention_mask is None and (window is None or length <= window):
        return _sdpa(q, k, v, factor, causal=causal)
    keys = torch.arange(k.shape[1], device=q.device)
    parts: list[Tensor] = []
    # counted in chunks: a compiler that does not know the length then makes one graph for each
    # number of chunks, and not one for each length
    for chunk in range(-(-length // CHUNK)):
        start, stop = chunk * CHUNK, min((chunk + 1) * CHUNK, length)
        queries = keys[start:stop, None] if index is None else index[:, start:stop, None]
        # keys [first, last) are all that these queries may see
        first, last = 0, k.shape[1]
        if index is None and causal:
            first, last = 0 if window is None else max(0, start - window + 1), stop
        others = keys[first:last]
        # [queries, keys], or [batch, queries, keys] with an index or an attention mask
        visible = others <= queries if causal else torch.ones_like(others <= queries)
        if window is not None:
            visible = visible & (others > queries - window)
        if attention_mask is not None:
            visible = (visible & attention_mask[:, None, first:last]) | (others == queries)
        visible = visible.unsqueeze(-3)  # the same for all heads
        parts.append(_sdpa(q[:, start:stop], k[:, first:last], v[:, first:last], factor, visible))
    return torch.cat(parts, dim=1) if parts else q


def _sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    factor: float,
    visible: Tensor | None = None,
    *,
    causal: bool = False,
) -> Tensor:
    # [batch, seq, heads, head_dim] -> [batch, heads, seq, head_dim], and back
    y = nnf.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=visible,
        is_causal=causal,
        scale=factor,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return y.transpose(1, 2)


def logit_factors(rope: Rope | None, head_dim: int) -> tuple[float, float]:
    """The gain on cos and sin, and the factor on the scores of a head.

    Together they are ``head_dim**-0.5 * rope.logit_factor`` for a fully rotated head; the gain
    does not act on coordinates that are not rotated, as in the models that have it.

    Raises:
        SpecError: If ``rope.scaling`` is a rule.
    """
    if rope is None:
        return 1.0, head_dim**-0.5
    return rope.attention_factor, head_dim**-0.5 * rope.softmax_factor


def _head_dim(rope: Rope | None, head_dim: int | None) -> int:
    if rope is None:
        if head_dim is None:
            raise SpecError("head_dim must be given where rope is None")
        return whole("head_dim", head_dim, least=1)
    check_rope(rope)
    if head_dim not in (None, rope.head_dim):
        raise SpecError(f"head_dim must be the Rope's ({rope.head_dim}), got {head_dim}")
    return rope.head_dim


def _checked_bounds(cu_seqlens: Sequence[int] | Tensor, seq: int) -> list[int]:
    """The boundaries as a list, or an error if they do not divide ``seq`` tokens."""
    if isinstance(cu_seqlens, Tensor):
        given = cast(list[Any], cu_seqlens.flatten().tolist())
    elif isinstance(cast(object, cu_seqlens), Sequence):
        given = list(cu_seqlens)
    else:
        came = type(cu_seqlens).__name__
        raise PositionError(f"cu_seqlens must be whole numbers [0, ..., {seq}], got {came}")
    bounds = [whole("cu_seqlens", bound, least=0, error=PositionError) for bound in given]
    rising = all(a <= b for a, b in pairwise(bounds))
    if not bounds or bounds[0] != 0 or bounds[-1] != seq or not rising:
        raise PositionError(
            f"cu_seqlens must rise from 0 to the number of tokens ({seq}), got {bounds}; "
            "lengths become boundaries by a cumulative sum"
        )
    return bounds


def _default_positions(
    x: Tensor,
    rope: Rope,
    attention_mask: Tensor | None,
    bounds: list[int] | None,
    cache: KVCache | None,
) -> Tensor:
    """Positions counted from the first token of each sequence, ``[seq]`` or ``[batch, seq]``."""
    if rope.axes.n_axes > 1:
        raise PositionError(
            f"positions must be given for a Rope of {rope.axes.n_axes} axes, got None; "
            "phasor.positions.every_axis makes them of text positions"
        )
    seq = x.shape[1]
    if cache is not None:
        return cache.next_positions(seq, attention_mask)
    if attention_mask is not None:
        return (attention_mask.cumsum(-1) - 1) * attention_mask
    index = torch.arange(seq, device=x.device)
    if bounds is None:
        return index
    starts = [index[a:b] - a for a, b in pairwise(bounds)]
    return torch.cat(starts) if starts else index
