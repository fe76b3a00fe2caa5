"""Linear attention with RoPE (RoFormer 2104.09864, eq. 17 to 19), in three equivalent forms.

It sums over all tokens, over earlier tokens in chunks, or token by token with a state of fixed
size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor, nn

from phasor._checks import boolean, whole
from phasor._tensors import check_counts_tokens, check_rope
from phasor.errors import SpecError, TensorError
from phasor.rope import Rope
from phasor.torch._operator.arguments import ARRAYS, tokens_first
from phasor.torch._operator.internals import in_transform, is_exporting, outside_autocast
from phasor.torch.functional import rotate_qk
from phasor.torch.module import drop_tables
from phasor.torch.papers.feature_maps import (
    FeatureMap,
    FeatureMaps,
    check_features,
    find_feature_maps,
    maps_each_token,
    number_of_features,
)

# Tokens in a chunk of a causal sum. The work per token is CHUNK * (features + values) within its
# chunk and features * values for the state before it. For heads of 64 on one and two threads, 32
# and 64 take the same time within a tenth, and 128 up to a third more, forward and backward.
CHUNK = 64
# Limits on chunks in a block and on elements of a tensor: temporaries of this size stay in the
# cache, and malloc reuses their memory.
BLOCK, BLOCK_ELEMENTS = 8, 2**19


@dataclass(slots=True)
class LinearState:
    """The sums over earlier tokens from which causal linear attention continues.

    Their size does not depend on the number of tokens. A new state is empty; `linear_attention` and
    `RotaryLinearAttention` replace its tensors by sums that include the new tokens. Outside
    ``torch.no_grad`` they keep their autograd graph.

    >>> state = LinearState()
    >>> rope = Rope(head_dim=4, pairing="half")
    >>> q, k, v = torch.randn(3, 100, 2, 4, dtype=torch.float64)
    >>> for p in range(100):
    ...     now = slice(p, p + 1)
    ...     last = linear_attention(q[now], k[now], v[now], p, rope, causal=True, state=state)
    >>> whole = linear_attention(q, k, v, torch.arange(100), rope, causal=True)
    >>> torch.allclose(last, whole[-1:], atol=1e-13)
    True
    """

    values: Tensor | None = None  # Σ R(n) ϕ(k_n) v_nᵀ, [..., heads, features, values]
    weights: Tensor | None = None  # Σ ϕ(k_n), [..., heads, features]
    tokens: int = 0  # tokens in these sums


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Any,
    rope: Rope | None,
    *,
    causal: bool,
    feature_map: FeatureMaps = "elu",
    state: LinearState | None = None,
    heads_first: bool = False,
) -> Tensor:
    """Attention in time and memory linear in the number of tokens, with rotated features.

    ``Σ_n (R(m) φ(q_m) · R(n) ϕ(k_n)) v_n / Σ_n φ(q_m) · ϕ(k_n)`` (RoFormer 2104.09864, eq. 19): the
    numerator is rotated and the denominator is not, so weights may be negative and their sum
    shrinks with distance (`phasor.papers.linear_weights`). The sums run over all tokens, or with
    ``causal`` over a token and those before it *in the tensor*; positions only rotate. There is no
    mask: packed sequences see each other, and padding at the end of a causal sum changes only its
    own output.

    Arithmetic is float32 (float64 for float64 tensors) from the feature map on, also under
    autocast, with one rounding at the end. For the backward pass a causal sum keeps its inputs (or
    the features that a callable returned) and computes its blocks again, never an N×N matrix.
    Differentiable any number of times. ``rope.attention_factor`` is not applied, because it would
    only scale the result.

    Args:
        q: ``[..., seq, heads, head_dim]``: float64, float32, bfloat16 or float16, any strides.
        k: The same shape. Repeat keys that several heads share:
            ``k.repeat_interleave(groups, -2)``.
        v: ``[..., seq, heads, value_dim]``, with the same tokens and heads.
        positions: As for `phasor.torch.rotate`; ignored if ``rope`` is None.
        rope: Rotates the features: its ``head_dim`` is their number, which may exceed the
            ``head_dim`` of ``q``. None for eq. 18, without positions.
        causal: Whether a token sees only itself and earlier tokens.
        feature_map: ``"elu"``: ``φ(x) = ϕ(x) = elu(x) + 1`` (Katharopoulos et al. 2020,
            2006.16236). ``"softmax"``: ``φ`` the softmax over the features, ``ϕ`` the exponential,
            as RoFormer reads Shen et al.; float32 overflows where a key exceeds 88. ``"shen"``:
            ``ϕ`` the softmax over the tokens instead, as Shen et al. (1812.01243) write it, for
            sums over all tokens. `PositiveRandomFeatures` (FAVOR+) estimates the softmax. A
            callable returns features ``[..., seq, heads, features]`` for queries and for keys; a
            pair has one callable for each. With a Rope the number of features is ``rope.head_dim``.
            Features should be positive: a denominator of 0 makes a token NaN.
        state: The state to continue from, with ``causal``; it is updated to include these tokens.
        heads_first: Whether ``q``, ``k``, ``v`` and the result are ``[..., heads, seq, head_dim]``;
            ``positions`` and the arguments of feature maps keep their shapes.

    Returns:
        ``[..., seq, heads, value_dim]`` in the dtype of ``v``, contiguous; with ``heads_first`` a
        transposed view of it.

    >>> rope = Rope(head_dim=64, pairing="half")
    >>> q, k, v = torch.randn(3, 2, 500, 8, 64)
    >>> linear_attention(q, k, v, torch.arange(500), rope, causal=True).shape
    torch.Size([2, 500, 8, 64])
    """
    map_query, map_key = find_feature_maps(feature_map, causal)
    if state is not None and not (causal and isinstance(cast(object, state), LinearState)):
        raise SpecError(
            "state must be a LinearState with causal=True and None otherwise, because a sum over "
            f"all tokens has no order; got {type(state).__name__} with causal={causal}"
        )
    q, k, v = tokens_first([q, k, v], heads_first)
    _check_tensors(q, k, v)
    dtype = torch.float64 if v.dtype == torch.float64 else torch.float32
    with outside_autocast(q.device):
        maps = (map_query, map_key) if causal and maps_each_token(feature_map) else None
        if maps is None:
            features_q, features_k = map_query(q.to(dtype)), map_key(k.to(dtype))
        else:
            # features are computed block by block; empty views of their shapes are used for checks
            features_q, features_k = (
                x.new_empty(()).expand(*x.shape[:-1], number_of_features(feature_map, x.shape[-1]))
                for x in cast(list[Any], [q, k])
            )
        check_features(features_q, q, rope, None)
        check_features(features_k, k, rope, features_q.shape[-1])
        if rope is None:
            positions = q.new_zeros(())
        else:
            positions = ARRAYS.fit_positions(positions, [features_q, features_k], rope)
        sums = _initial_sums(state, features_k, v, dtype)
        if maps is None:
            q, k = features_q, features_k
        blocks = _Blocks(maps, rope, causal, _block_sizes(sums[0], q.shape[-3], causal))
        # torch.func and compilers need plain operations
        is_plain = len(blocks.sizes) == 1 or in_transform() or torch.compiler.is_compiling()
        attend = _attend if is_plain else cast(Any, _AttendAndRecompute.apply)
        y, value_sums, weight_sums = attend(blocks, positions, q, k, v, *sums)
        y = y.contiguous()
    if state is not None:
        state.values, state.weights = value_sums, weight_sums
        state.tokens += q.shape[-3]
    return tokens_first([y], heads_first)[0]


class RotaryLinearAttention(nn.Module):
    """`linear_attention` with projections, the counterpart of `RotaryAttention`.

    Args:
        rope: The rope of the features, so its ``head_dim`` is their number; None for a layer
            without positions (eq. 18).
        embed_dim: Width of the input and the output.
        num_heads: Heads of queries, keys and values.
        head_dim: Width of a head, before the feature map; the Rope's if not given. Required
            without a ``rope``, and with a map that returns more features than it takes.
        causal: Whether a token sees only itself and earlier tokens.
        feature_map: As for `linear_attention`.
        qkv_bias: Whether ``q_proj``, ``k_proj`` and ``v_proj`` have biases.
        o_bias: Whether ``o_proj`` has one.
        device: Device of the weights; torch's default if None.
        dtype: Dtype of the weights; torch's default if None.

    Attributes:
        q_proj: ``nn.Linear``, ``embed_dim`` to ``num_heads * head_dim``; so are k_proj and v_proj.
        o_proj: ``nn.Linear``, ``num_heads * head_dim`` to ``embed_dim``.

    >>> rope = Rope(head_dim=16, pairing="half")
    >>> attention = RotaryLinearAttention(rope, embed_dim=64, num_heads=4)
    >>> x, state = torch.randn(2, 30, 64), LinearState()
    >>> with torch.no_grad():
    ...     prompt = attention(x[:, :29], state=state)
    ...     token = attention(x[:, 29:], state=state)
    ...     torch.allclose(token, attention(x)[:, 29:], atol=1e-5)
    True
    """

    def __init__(
        self,
        rope: Rope | None,
        embed_dim: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        causal: bool = True,
        feature_map: FeatureMaps = "elu",
        qkv_bias: bool = False,
        o_bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(drop_tables)
        if rope is not None:
            check_rope(rope)
            head_dim = rope.head_dim if head_dim is None else head_dim
        embed_dim = whole("embed_dim", embed_dim, least=1)
        self.num_heads = whole("num_heads", num_heads, least=1)
        self.head_dim = whole("head_dim", head_dim, least=1)
        boolean("qkv_bias", qkv_bias)
        boolean("o_bias", o_bias)
        find_feature_maps(feature_map, causal)
        features = number_of_features(feature_map, self.head_dim)
        if rope is not None and features not in (None, rope.head_dim):
            raise SpecError(
                f"rope must have the number of features ({features}) as its head_dim, got "
                f"{rope.head_dim}"
            )
        self.rope, self.causal, self.feature_map = rope, causal, feature_map
        heads_dim = self.num_heads * self.head_dim
        self.q_proj = nn.Linear(embed_dim, heads_dim, qkv_bias, device, dtype)
        self.k_proj = nn.Linear(embed_dim, heads_dim, qkv_bias, device, dtype)
        self.v_proj = nn.Linear(embed_dim, heads_dim, qkv_bias, device, dtype)
        self.o_proj = nn.Linear(heads_dim, embed_dim, o_bias, device, dtype)

    def forward(
        self, x: Tensor, positions: Any = None, *, state: LinearState | None = None
    ) -> Tensor:
        """The attention output ``[..., seq, embed_dim]`` of every token.

        Args:
            x: ``[..., seq, embed_dim]``.
            positions: As for `phasor.torch.rotate`. If None, they continue after the tokens in the
                state, or start at 0. Required for a Rope of several axes; ignored by a layer
                without Rope.
            state: As for `linear_attention`.
        """
        if positions is None and self.rope is not None:
            check_counts_tokens(self.rope)
            past = 0 if state is None else state.tokens
            positions = torch.arange(past, past + x.shape[-2], device=x.device)
        # [..., seq, embed_dim] -> [..., seq, num_heads, head_dim]
        q, k, v = (
            proj(x).unflatten(-1, (self.num_heads, self.head_dim))
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        options: dict[str, Any] = {"causal": self.causal, "feature_map": self.feature_map}
        y = linear_attention(q, k, v, positions, self.rope, state=state, **options)
        # [..., seq, num_heads, head_dim] -> [..., seq, embed_dim]
        return self.o_proj(y.flatten(-2))

    def extra_repr(self) -> str:
        return (
            f"num_heads={self.num_heads}, causal={self.causal}, "
            f"feature_map={self.feature_map!r}, rope={self.rope}"
        )


def causal_sum(q: Tensor, k: Tensor, v: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """``q_m · (S + Σ_{n ≤ m} k_n v_nᵀ)`` for every token ``m``, without an N×N matrix.

    ``q`` and ``k`` are ``[..., heads, seq, features]``, ``v`` and the result ``[..., heads, seq,
    values]``, for fewer than `CHUNK` tokens or a multiple of it. ``before`` is ``S``, the sum of
    ``k_n v_nᵀ`` over earlier tokens, ``[..., heads, features, values]``; the second result is the
    sum that includes these tokens.

    >>> one = torch.ones(1, 3, 1)
    >>> y, _ = causal_sum(one, one, torch.tensor([[[1.0], [10.0], [100.0]]]), torch.zeros(1, 1, 1))
    >>> y.flatten().tolist()
    [1.0, 11.0, 111.0]
    """
    seq = q.shape[-2]
    if is_exporting():
        # The same operations for every length, with zeros after the last token; at least two
        # chunks, because torch.export would specialize on a size of one.
        chunks = torch.arange(seq // CHUNK + 2, device=q.device)
        tokens = chunks[:, None] * CHUNK + torch.arange(CHUNK, device=q.device)
        padding = (tokens >= seq)[..., None]
        q, k, v = (x[..., tokens.clamp(max=seq - 1), :].masked_fill(padding, 0) for x in (q, k, v))
        sums = k.mT @ v
        ends = before.unsqueeze(-3) + sums.cumsum(-3)  # the sum up to each chunk's end
        starts, after = ends - sums, ends[..., -1, :, :]
    else:
        chunks = (seq // CHUNK, CHUNK) if seq >= CHUNK else (1, seq)
        # [..., heads, seq, width] -> [..., heads, chunks, CHUNK or seq, width]
        q, k, v = (cast(Tensor, cast(Any, x).unflatten(-2, chunks)) for x in (q, k, v))
        *parts, after = accumulate((k.mT @ v).unbind(-3), initial=before)
        starts = torch.stack(parts, -3)
    scores = (q @ k.mT).tril()  # [..., heads, chunks, CHUNK, CHUNK]
    y = (scores @ v + q @ starts).flatten(-3, -2)
    if is_exporting():
        # torch.export would specialize on a slice that is the whole tensor
        y = y[..., torch.arange(seq, device=q.device), :]
    return y, after


@dataclass(frozen=True, slots=True)
class _Blocks:
    """The blocks of tokens in a sum, and the options for each."""

    maps: tuple[FeatureMap, FeatureMap] | None  # None if queries and keys are already features
    rope: Rope | None
    causal: bool
    sizes: list[int]  # tokens of each block

    def split(self, positions: Tensor, *xs: Tensor) -> list[tuple[Tensor, ...]]:
        """For every block its positions and its slices of ``xs``, as views."""
        axis = -2 if self.rope is not None and self.rope.axes.n_axes > 1 else -1
        if positions.dim() < -axis or positions.shape[axis] == 1:
            block_positions = [positions] * len(self.sizes)  # all tokens have the same position
        else:
            block_positions = cast(Any, positions).split(self.sizes, axis)
        parts = (cast(Any, x).split(self.sizes, -3) for x in xs)
        return list(zip(block_positions, *parts, strict=True))

    def attend(
        self, positions: Tensor, q: Tensor, k: Tensor, v: Tensor, values: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The output of a block, and the sums of a `LinearState` that include it."""
        # [..., seq, heads, width] -> [..., heads, seq, width]
        heads = (x.transpose(-3, -2).to(values.dtype) for x in (q, k, v))
        # products with a contiguous copy are faster
        features_q, features_k, v_heads = (x.contiguous() if self.causal else x for x in heads)
        if self.maps is not None:
            features_q, features_k = self.maps[0](features_q), self.maps[1](features_k)
        rotated_q, rotated_k = features_q, features_k
        if self.rope is not None:
            rotated_q, rotated_k = rotate_qk(
                features_q, features_k, positions, self.rope, gain=1.0, heads_first=True
            )
        if self.causal:
            numerator, values = causal_sum(rotated_q, rotated_k, v_heads, values)
            key_sums = features_k.cumsum(-2) + weights.unsqueeze(-2)
            weights = weights + features_k.sum(-2)
        else:
            numerator = rotated_q @ (rotated_k.mT @ v_heads)
            key_sums = features_k.sum(-2, keepdim=True)
        denominator = (features_q * key_sums).sum(-1, keepdim=True)
        # [..., heads, seq, values] -> [..., seq, heads, values]
        return (numerator / denominator).transpose(-3, -2).to(v.dtype), values, weights


def _attend(
    blocks: _Blocks, positions: Tensor, q: Tensor, k: Tensor, v: Tensor, *sums: Tensor
) -> tuple[Tensor, ...]:
    """The output of all blocks, and the sums that include them."""
    outputs: list[Tensor] = []
    for block in blocks.split(positions, q, k, v):
        y, *new_sums = blocks.attend(*block, *sums)
        outputs.append(y)
        sums = tuple(new_sums)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -3), *sums


class _AttendAndRecompute(torch.autograd.Function):
    """`_attend` that saves its inputs and the sums between blocks; backward recomputes the rest."""

    @staticmethod
    def forward(
        ctx: Any, blocks: _Blocks, positions: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        q, k, v, *sums = inputs
        y, sums_before = v.new_empty(v.shape), list[Tensor]()
        for *block, y_part in blocks.split(positions, q, k, v, y):
            sums_before += sums
            output, *sums = blocks.attend(*block, *sums)
            y_part.copy_(output)
        ctx.blocks = blocks
        ctx.save_for_backward(positions, q, k, v, *sums_before)
        return y, *sums

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        blocks = cast(_Blocks, ctx.blocks)
        positions, q, k, v, *sums_before = cast(tuple[Tensor, ...], ctx.saved_tensors)
        if torch.is_grad_enabled() or in_transform():
            # a second derivative, or a transform of this derivative, needs plain operations
            with outside_autocast(q.device):
                attend = partial(_attend, blocks, positions)
                _, pull_back = cast(Any, torch.func.vjp)(attend, q, k, v, *sums_before[:2])
                return None, None, *pull_back(grads)
        with outside_autocast(q.device), torch.enable_grad():
            grad_y, *grad_sums = grads
            # made from grad_y, which stands for many gradients with is_grads_batched
            grad_qkv = [grad_y.new_empty(x.shape, dtype=x.dtype) for x in (q, k, v)]
            parts = blocks.split(positions, q, k, v, grad_y, *grad_qkv)
            for i, (block_positions, *xs) in reversed(list(enumerate(parts))):
                saved = (*xs[:3], *sums_before[2 * i : 2 * i + 2])
                inputs = [x.detach().requires_grad_() for x in saved]
                outputs = blocks.attend(block_positions, *inputs)
                *block_grads, grad_values, grad_weights = torch.autograd.grad(
                    outputs, inputs, (xs[3], *grad_sums)
                )
                for grad_part, grad in zip(xs[4:], block_grads, strict=True):
                    grad_part.copy_(grad)
                grad_sums = [grad_values, grad_weights]
        return None, None, *grad_qkv, *grad_sums


def _check_tensors(q: Any, k: Any, v: Any) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        ARRAYS.check_kind(name, x)
        if not x.is_floating_point() or x.dim() < 3:
            raise TensorError(
                f"{name} must be a floating tensor [..., seq, heads, head_dim], "
                f"got {x.dtype} {list(x.shape)}"
            )
        if (x.dtype, x.device, x.shape[:-1]) != (q.dtype, q.device, q.shape[:-1]):
            raise TensorError(
                f"{name} must have the dtype, device, tokens and heads of q ({q.dtype}, {q.device},"
                f" {list(q.shape[:-1])}), got {x.dtype}, {x.device}, {list(x.shape[:-1])}; "
                f"{name}.repeat_interleave(groups, -2) repeats keys that several queries share"
            )


def _initial_sums(
    state: LinearState | None, k: Tensor, v: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The sums ``[..., heads, features, values]`` and ``[..., heads, features]`` to start from."""
    shape = (*k.shape[:-3], k.shape[-2], k.shape[-1], v.shape[-1])
    if state is None or state.values is None or state.weights is None:
        zeros = v.new_zeros(shape, dtype=dtype)
        return zeros, v.new_zeros(shape[:-1], dtype=dtype)
    if (state.values.shape, state.values.dtype) != (shape, dtype):
        raise TensorError(
            f"state must hold values {list(shape)} in {dtype} for these tensors, got "
            f"{list(state.values.shape)} in {state.values.dtype}; start again with LinearState()"
        )
    return state.values, state.weights


def _block_sizes(sums: Tensor, seq: int, causal: bool) -> list[int]:
    """Number of tokens in each block: whole chunks, then the remaining tokens."""
    if not causal or is_exporting() or seq <= CHUNK:
        return [seq]
    # elements per token in the widest tensor of a block
    elements = sums[..., 0, 0].numel() * max(*sums.shape[-2:], CHUNK)
    block = CHUNK * max(1, min(BLOCK, BLOCK_ELEMENTS // max(1, CHUNK * elements)))
    chunked = seq - seq % CHUNK
    sizes = [min(block, chunked - start) for start in range(0, chunked, block)]
    return sizes if chunked == seq else [*sizes, seq - chunked]
