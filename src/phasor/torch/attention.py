"""`RotaryAttention`: attention whose queries and keys are rotated.

It uses ``scaled_dot_product_attention``. Torch's kernels apply full and causal masks themselves.
All other masks are boolean tensors for `CHUNK` queries at a time, so that memory is proportional to
the sequence. FlexAttention would need no masks, but uncompiled it writes all scores to memory, and
compiled it has no backward pass on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NoReturn, cast

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from phasor._checks import boolean, number, short_repr, whole
from phasor._tensors import check_counts_tokens, check_placed, check_rope
from phasor.errors import SpecError, TensorError
from phasor.layers import QueryFactor
from phasor.rope import Rope
from phasor.torch._operator.arguments import ARRAYS
from phasor.torch._operator.internals import is_exporting, refuse_torchscript, refuse_tracing
from phasor.torch.kv_cache.cache import KVCache, check_attention_mask
from phasor.torch.module import as_rotation, count_positions, drop_tables, read_bounds
from phasor.torch.rotation import Rotation

#: Number of queries that share a mask.
CHUNK = 512
_ONE_AXIS = Rope(head_dim=2, pairing="half")  # for checks of positions in layers without a rope


class RotaryAttention(nn.Module):
    """``softmax(factor (R(m) q)ᵀ (R(n) k)) v`` between projections (RoFormer 2104.09864, eq. 16).

    ``factor`` is ``head_dim**-0.5 * rope.softmax_factor``. Cos and sin are multiplied by the rope's
    `attention_factor`; coordinates that are not rotated are unchanged. The module holds the Rope
    and its weights: no table, no buffer, no maximum length. Its parameters have the names of
    transformers, so ``load_state_dict`` loads the weights of a Llama layer, and with
    ``qk_norm=True`` those of a Qwen3 layer.

    Args:
        rope: The rope of queries and keys; None for a layer without positions.
        embed_dim: Width of the input and the output.
        num_heads: Heads of queries.
        num_kv_heads: Heads of keys and of values, a divisor of ``num_heads``; each is shared by
            ``num_heads / num_kv_heads`` query heads (grouped-query attention, 2305.13245).
            ``num_heads`` if None.
        head_dim: Width of a head; required if ``rope`` is None, else taken from the Rope.
        causal: Whether a query sees only its own and earlier tokens.
        window: Number of tokens that a causal query sees, its own included; None for all. It counts
            tokens, not positions.
        query_factor: The factor on queries as a function of position, from
            `LayerRopes.query_factor` (Llama 4, even where ``rope`` is None). Only for one axis.
        qk_norm: Whether to apply an RMS norm with weights to each head of queries and keys before
            the rotation (Qwen3, 2505.09388).
        norm_eps: Epsilon of these norms.
        dropout: Probability of setting an attention weight to 0 in training.
        qkv_bias: Whether ``q_proj``, ``k_proj`` and ``v_proj`` have biases.
        o_bias: Whether ``o_proj`` has one.
        device: Device of the weights; torch's default if None.
        dtype: Dtype of the weights; torch's default if None.

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
        query_factor: QueryFactor | None = None,
        qk_norm: bool = False,
        norm_eps: float = 1e-6,
        dropout: float = 0.0,
        qkv_bias: bool = False,
        o_bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        embed_dim = whole("embed_dim", embed_dim, least=1)
        self.num_heads = whole("num_heads", num_heads, least=1)
        kv_heads = self.num_heads if num_kv_heads is None else num_kv_heads
        self.num_kv_heads = whole("num_kv_heads", kv_heads, least=1)
        if self.num_heads % self.num_kv_heads:
            raise SpecError(
                f"num_kv_heads must divide num_heads ({self.num_heads}), got {self.num_kv_heads}"
            )
        if rope is not None and head_dim is None:
            check_rope(rope)
            head_dim = rope.head_dim
        self.head_dim = whole("head_dim", head_dim, least=1)
        self.causal = boolean("causal", causal)
        self.window = None if window is None else whole("window", window, least=1)
        if window is not None and not causal:
            raise SpecError(f"window must be None in a layer with causal=False, got {window}")
        if not isinstance(cast(object, query_factor), QueryFactor | None):
            raise SpecError(f"query_factor must be a QueryFactor, got {short_repr(query_factor)}")
        self.query_factor = query_factor if query_factor != QueryFactor() else None
        boolean("qk_norm", qk_norm, "; norm_eps is the epsilon")
        boolean("qkv_bias", qkv_bias)
        boolean("o_bias", o_bias)
        norm_eps = number("norm_eps", norm_eps, above=0)
        self.dropout = number("dropout", dropout, least=0, most=1)
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
        self.register_load_state_dict_pre_hook(drop_tables)

    @property
    def rope(self) -> Rope | None:
        """The rope. Assign another with the same ``head_dim`` for a longer context."""
        return self._rope

    @rope.setter
    def rope(self, rope: Rope | None) -> None:
        if rope is not None:
            check_rope(rope)
            if rope.head_dim != self.head_dim:
                raise SpecError(
                    f"rope must have the head_dim of this layer ({self.head_dim}), "
                    f"got {rope.head_dim}"
                )
            if self.query_factor is not None and rope.axes.n_axes > 1:
                raise SpecError(f"query_factor needs a Rope with one axis, got {rope.axes.n_axes}")
        self._rope = rope
        softmax_factor = 1.0 if rope is None else rope.softmax_factor
        self._factor = self.head_dim**-0.5 * softmax_factor

    def forward(
        self,
        x: Tensor,
        positions: Tensor | Rotation | None = None,
        *,
        attention_mask: Tensor | None = None,
        cu_seqlens: Sequence[int] | Tensor | None = None,
        cache: KVCache | None = None,
        key_value_states: Tensor | None = None,
        key_value_positions: Tensor | Rotation | None = None,
    ) -> Tensor:
        """The attention output of every token.

        Args:
            x: ``[batch, seq, embed_dim]``.
            positions: As for `phasor.torch.rotate`, ``[seq]`` or ``[batch, seq]``. If None, 0, 1,
                2, ... from the first token of each sequence: cached tokens count, padding does not.
                Required for a Rope of several axes. A layer without Rope and ``query_factor``
                ignores them, so that a model can call all its layers in the same way. A `Rotation`
                that the model makes once for all its layers is accepted too.
            attention_mask: Bools ``[batch, seq]``: True is a token, False is padding, on either
                side. No token sees padding, and the output for padding is meaningless. With
                ``key_value_states`` it masks these, ``[batch, key_seq]``.
            cu_seqlens: Boundaries of packed sequences in every row, ``[0, ..., seq]``; no sequence
                sees another. The host reads them, so under ``torch.compile`` and on accelerators
                pass a list of ints.
            cache: From `make_cache`. It holds the earlier tokens; these are appended.
            key_value_states: ``[batch, key_seq, embed_dim]``, for cross-attention: keys and values
                are projected from these, for example an encoder's output, and queries from ``x``.
                Every query sees every key, so the layer needs ``causal=False``.
            key_value_positions: Positions of these keys, in the shapes of ``positions`` and on the
                same scale, because a score depends on the distance between query and key. If None,
                they are counted as for ``x``.

        Returns:
            ``[batch, seq, embed_dim]``.

        Raises:
            TensorError: If ``x``, ``key_value_states``, ``attention_mask`` or ``cache`` do not fit,
                or if a cache would have to record a gradient.
            PositionError: If positions or boundaries do not fit.
            SpecError: If a cache is combined with packed sequences or ``causal=False``; if
                ``key_value_states`` are combined with packed sequences or ``causal=True``, or are
                missing although their positions are given.
        """
        refuse_tracing()  # lengths would be tensors
        key_inputs, bounds = self._read_inputs(
            x, attention_mask, cu_seqlens, cache, key_value_states, key_value_positions
        )
        batch, seq, _ = x.shape
        # [batch, seq, embed_dim] -> [batch, seq, num_heads, head_dim]
        q = self.q_proj(x).view(batch, seq, self.num_heads, self.head_dim)
        # [batch, key_seq, embed_dim] -> [batch, key_seq, num_kv_heads, head_dim]
        key_shape = (batch, key_inputs.shape[1], self.num_kv_heads, self.head_dim)
        k = self.k_proj(key_inputs).view(key_shape)
        v = self.v_proj(key_inputs).view(key_shape)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if positions is None and (self.rope is not None or self.query_factor is not None):
            mask = attention_mask if key_value_states is None else None
            positions = _default_positions(x, self.rope, mask, bounds, cache)
        if self.query_factor is not None:
            q = _multiply(q, positions, self.query_factor)
        if key_value_states is not None:
            if self.rope is not None:
                if key_value_positions is None:
                    key_value_positions = _default_positions(key_inputs, self.rope, attention_mask)
                q = self._rotation(q, positions)(q)
                k = self._rotation(k, key_value_positions)(k)
            # [batch, key_seq] -> [batch, heads, seq, key_seq], of size 1 where all are equal
            visible = None if attention_mask is None else attention_mask[:, None, None]
            options = {"attn_mask": visible, "dropout_p": self._current_dropout()}
            y = _sdpa(q, k, v, self._factor, **options)
        else:
            if self.rope is not None:
                q, k = self._rotation(q, positions)(q, k)
            y = self._attend(q, k, v, attention_mask, bounds, cache)
        # [batch, seq, num_heads, head_dim] -> [batch, seq, embed_dim]
        return self.o_proj(y.reshape(batch, seq, self.num_heads * self.head_dim))

    def make_cache(
        self, batch_size: int, capacity: int, *, dtype: torch.dtype | None = None
    ) -> KVCache:
        """An empty cache for this layer, on the device of its weights.

        Args:
            batch_size: Number of rows.
            capacity: Total number of tokens for `forward`, padding included.
            dtype: Dtype of keys and values. If None, autocast's dtype if it is on, else that of the
                weights; if something else casts the weights (FSDP's mixed precision), pass that
                dtype.
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
        dropout = f", dropout={self.dropout}" if self.dropout else ""
        factor = "" if self.query_factor is None else f", query_factor={self.query_factor!r}"
        return (
            f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, "
            f"causal={self.causal}{window}{dropout}, rope={self.rope}{factor}"
        )

    def _rotation(self, x: Tensor, positions: Any) -> Rotation:
        """The rotation of the tokens of ``x``, unless the model passed it as ``positions``."""
        assert self.rope is not None
        return as_rotation(x, positions, self.rope)

    def _current_dropout(self) -> float:
        return self.dropout if self.training else 0.0

    def _read_inputs(
        self,
        x: Tensor,
        attention_mask: Tensor | None,
        cu_seqlens: Any,
        cache: Any,
        key_value_states: Tensor | None,
        key_value_positions: object,
    ) -> tuple[Tensor, list[int] | None]:
        """The input of the key projection, and boundaries as a list; arguments are checked."""
        options: dict[str, Any] = {"attention_mask": attention_mask, "cache": cache}
        options["key_value_states"] = key_value_states
        for name, value in options.items():
            if value is not None and cu_seqlens is not None:
                raise SpecError(f"cu_seqlens and {name} exclude each other; pass only one")
        for name, causal in (("cache", True), ("key_value_states", False)):
            if options[name] is not None and self.causal != causal:
                raise SpecError(
                    f"{name} must be None in a layer with causal={self.causal}; build it with "
                    f"causal={causal}"
                )
        if key_value_positions is not None and key_value_states is None:
            raise SpecError("key_value_positions need key_value_states, got None")
        if not isinstance(cache, KVCache | None):
            raise TensorError(f"cache must be a KVCache, got {type(cache).__name__}")
        self._check_tokens("x", x)
        key_inputs = x if key_value_states is None else key_value_states
        self._check_tokens("key_value_states", key_inputs)
        counted = key_inputs if cache is None else cache.lengths
        if counted.shape[0] != x.shape[0]:
            raise TensorError(
                f"{'key_value_states' if cache is None else 'cache'} must have the batch of x "
                f"({x.shape[0]}), got {counted.shape[0]}"
            )
        if attention_mask is not None:
            check_attention_mask(attention_mask, key_inputs.shape[:2])
        return key_inputs, None if cu_seqlens is None else read_bounds(cu_seqlens, x.shape[1])

    def _check_tokens(self, name: str, x: Tensor) -> None:
        ARRAYS.check_kind(name, x)
        if x.dim() != 3 or x.shape[-1] != self.q_proj.in_features:
            raise TensorError(
                f"{name} must be [batch, seq, embed_dim] with embed_dim "
                f"{self.q_proj.in_features}, got shape {list(x.shape)}"
            )

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attention_mask: Tensor | None,
        bounds: list[int] | None,
        cache: KVCache | None,
        /,
    ) -> Tensor:
        """``[batch, seq, num_heads, head_dim]`` of rotated queries and keys."""
        factor = self._factor
        options: dict[str, Any] = {"causal": self.causal, "window": self.window}
        options["dropout"] = self._current_dropout()
        if bounds is not None:
            outputs = [
                attend(q[:, a:b], k[:, a:b], v[:, a:b], factor, **options)
                for a, b in pairwise(bounds)
            ]
            return torch.cat(outputs, dim=1) if outputs else q
        if cache is not None:
            is_first = cache.used == 0
            index = cache.next_positions(q.shape[1], attention_mask)
            cache.append(k, v, attention_mask)
            if not is_first:
                return attend(q, cache.keys, cache.values, factor, index=index, **options)
        return attend(q, k, v, factor, attention_mask=attention_mask, **options)


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
    dropout: float = 0.0,
) -> Tensor:
    """Softmax attention ``[batch, new, num_heads, head_dim]`` with any of the layer's masks.

    Queries are ``[batch, new, num_heads, head_dim]``; keys and values ``[batch, seq, num_kv_heads,
    head_dim]``, in causal order. ``index`` ``[batch, new]`` is the index in ``k`` of each query's
    own token, for new tokens in a cache; None if queries and keys have the same tokens. In
    ``attention_mask``, bools ``[batch, seq]``, padding is False; padding sees only itself, because
    a softmax over nothing would be NaN.
    """
    length = q.shape[1]
    # an exported program has one graph for all lengths, so it must not depend on the length
    is_exported = is_exporting()
    unmasked = window is None or (not is_exported and length <= window)
    if index is None and attention_mask is None and unmasked:
        return _sdpa(q, k, v, factor, is_causal=causal, dropout_p=dropout)
    all_keys = torch.arange(k.shape[1], device=q.device)  # their indices in ``k``
    outputs: list[Tensor] = []
    # counted in chunks, so that with dynamic lengths a compiler makes one graph for each number of
    # chunks instead of one for each length
    for chunk in range(1 if is_exported else -(-length // CHUNK)):
        start = chunk * CHUNK
        stop = length if is_exported else min(start + CHUNK, length)
        queries = all_keys[start:stop, None] if index is None else index[:, start:stop, None]
        # these queries see only keys [first, last)
        first, last = 0, k.shape[1]
        if index is None and causal:
            first, last = 0 if window is None else max(0, start - window + 1), stop
        keys = all_keys[first:last]
        # [queries, keys], or [batch, queries, keys] with an index or an attention mask
        visible = keys <= queries if causal else torch.ones_like(keys <= queries)
        if window is not None:
            visible = visible & (keys > queries - window)
        if attention_mask is not None:
            visible = (visible & attention_mask[:, None, first:last]) | (keys == queries)
        visible = visible.unsqueeze(-3)  # a mask for all heads
        chunk = q[:, start:stop], k[:, first:last], v[:, first:last]
        outputs.append(_sdpa(*chunk, factor, attn_mask=visible, dropout_p=dropout))
    return torch.cat(outputs, dim=1) if outputs else q


def _sdpa(q: Tensor, k: Tensor, v: Tensor, factor: float, **options: Any) -> Tensor:
    """Torch's attention and its options, for ``[batch, seq, heads, head_dim]``."""
    options |= {"scale": factor, "enable_gqa": q.shape[2] != k.shape[2]}
    # [batch, seq, heads, head_dim] -> [batch, heads, seq, head_dim], and back
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return nnf.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)


def _multiply(q: Tensor, positions: Any, factor: QueryFactor) -> Tensor:
    """Queries ``[batch, seq, num_heads, head_dim]`` times their positions' factors."""
    if isinstance(positions, Rotation):
        raise SpecError(
            "positions must not be a Rotation in a layer with a query_factor, which needs positions"
        )
    positions = ARRAYS.read_positions(positions, _ONE_AXIS, q.device)
    check_placed(positions.shape, q.shape, _ONE_AXIS, heads_first=False)
    if (
        q.dtype == torch.float64 or not positions.is_floating_point()
    ):  # 32 bits, because a length has too many digits for 16
        positions = positions.to(torch.float64 if q.dtype == torch.float64 else torch.int64)
    # [..., seq] -> [..., seq, 1, 1]
    return (q * factor(positions, torch)[..., None, None]).to(q.dtype)


def _default_positions(
    x: Tensor,
    rope: Rope | None,
    attention_mask: Tensor | None = None,
    bounds: list[int] | None = None,
    cache: KVCache | None = None,
) -> Tensor:
    """Positions counted from the first token of each sequence, ``[seq]`` or ``[batch, seq]``."""
    check_counts_tokens(rope or _ONE_AXIS)
    seq = x.shape[1]
    if cache is not None:
        return cache.next_positions(seq, attention_mask)
    if attention_mask is not None:
        return (attention_mask.cumsum(-1) - 1) * attention_mask
    return count_positions([seq], x.device, cu_seqlens=bounds)
