"""Linear attention with RoPE: RoFormer 2104.09864, eq. 17 to 19, in three forms that agree.

Over all tokens, over the tokens so far in chunks, and token by token with a state of fixed size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from phasor._checks import whole
from phasor.errors import SpecError, TensorError
from phasor.rope import Rope
from phasor.torch._arguments import check_counts_tokens, check_rope, tokens_first
from phasor.torch._internals import outside_autocast
from phasor.torch.functional import rotate_qk
from phasor.torch.papers.feature_maps import FeatureMaps, checked_feature_maps, number_of_features

# Tokens in a chunk of a causal sum. Work for one token is CHUNK * (features + values) within its
# chunk and features * values with the state before it. Of 32, 64 and 128, measured for heads of 64
# on one and two threads of a processor, the first two take the same time to a tenth and 128 up to
# a third more, forward and backward.
CHUNK = 64


@dataclass(slots=True)
class LinearState:
    """The sums over the tokens so far that causal linear attention continues from.

    ``heads * (features * values + features)`` numbers per sequence, float32 or float64, however
    many tokens there were. A new state is empty; `linear_attention` and `RotaryLinearAttention`
    replace its tensors by sums that include the tokens they were given, and never write the old
    ones. Outside ``torch.no_grad`` the tensors keep the graph that made them.

    Attributes:
        values: ``Σ R(n) ϕ(k_n) v_nᵀ``, ``[..., heads, features, values]``.
        weights: ``Σ ϕ(k_n)``, ``[..., heads, features]``.
        tokens: How many tokens the sums include.

    >>> state = LinearState()
    >>> rope = Rope(head_dim=4, pairing="half")
    >>> q, k, v = torch.randn(3, 100, 2, 4, dtype=torch.float64)
    >>> for p in range(100):
    ...     now = slice(p, p + 1)
    ...     last = linear_attention(q[now], k[now], v[now], p, rope, causal=True, state=state)
    >>> whole = linear_attention(q, k, v, torch.arange(100), rope, causal=True)
    >>> torch.allclose(last, whole[-1:], atol=1e-13)
    True
    >>> state.values.numel() + state.weights.numel()
    40
    """

    values: Tensor | None = None
    weights: Tensor | None = None
    tokens: int = 0


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

    ``Σ_n (R(m) φ(q_m) · R(n) ϕ(k_n)) v_n / Σ_n φ(q_m) · ϕ(k_n)``
    (RoFormer 2104.09864, eq. 19): the numerator is rotated and the denominator is not, so weights
    may be negative and their sum shrinks with distance; `phasor.papers.linear_weights` computes
    them. The sums run over all tokens, or with ``causal`` over those that do not come later *in the
    tensor*; positions only rotate, and may be any. Sequences that are packed into one would see
    each other, and there is no mask for padding: of a causal sum, padding at the end changes only
    its own output.

    Arithmetic is float32 (float64 for float64 tensors) from the feature map on, under autocast
    too, with one rounding at the end. The causal sum goes through the tokens in chunks, forward
    and backward, and keeps features and values for the backward pass, never an N×N matrix.
    Differentiable any number of times. ``rope.attention_factor`` would multiply the result as a
    whole and is not applied.

    Args:
        q: ``[..., seq, heads, head_dim]``: float64, float32, bfloat16 or float16, any strides.
        k: The same shape. Keys that several heads share are repeated for each:
            ``k.repeat_interleave(groups, -2)``.
        v: ``[..., seq, heads, value_dim]``, as many tokens and heads.
        positions: As for `phasor.torch.rotate`; ignored where ``rope`` is None.
        rope: Rotates the features: its ``head_dim`` is how many the feature map makes, which may be
            more than the ``head_dim`` of ``q``. None for eq. 18, without positions.
        causal: Whether a token sees only itself and those before it.
        feature_map: ``"elu"``: ``φ(x) = ϕ(x) = elu(x) + 1`` (Katharopoulos et al. 2020,
            2006.16236). ``"softmax"``: ``φ`` the softmax over the features, ``ϕ`` the exponential,
            as RoFormer reads Shen et al.; float32 overflows where a key exceeds 88. ``"shen"``:
            ``ϕ`` the softmax over the tokens instead, as Shen et al. (1812.01243) write it, for
            sums over all tokens. `PositiveRandomFeatures` (FAVOR+), which estimate the softmax. A
            callable makes features ``[..., seq, heads, features]`` of queries and keys alike, a
            pair of callables of queries and of keys; with a Rope there are ``rope.head_dim`` of
            them. Features should be positive: a token whose denominator is 0 comes out as NaN.
        state: What to continue from, with ``causal``; it is updated to include these tokens.
        heads_first: Whether ``q``, ``k``, ``v`` and the result are ``[..., heads, seq, head_dim]``;
            ``positions`` and what a feature map is called with keep their shapes.

    Returns:
        ``[..., seq, heads, value_dim]`` of the dtype of ``v``, contiguous; with ``heads_first`` a
        transposed view of that.

    Raises:
        TensorError: If the tensors, the features or the state do not fit each other.
        PositionError: As for `phasor.torch.rotate`.
        SpecError: If the feature map does not exist, or looks at later tokens with ``causal``; if
            ``state`` is given without ``causal``.

    >>> rope = Rope(head_dim=64, pairing="half")
    >>> q, k, v = torch.randn(3, 2, 500, 8, 64)
    >>> linear_attention(q, k, v, torch.arange(500), rope, causal=True).shape
    torch.Size([2, 500, 8, 64])
    """
    map_query, map_key = checked_feature_maps(feature_map, causal)
    if state is not None and not causal:
        raise SpecError("state must be None with causal=False, for such a sum has no order")
    q, k, v = tokens_first([q, k, v], heads_first, ("q", "k", "v"))
    _check_tensors(q, k, v)
    if state is not None and not isinstance(cast(object, state), LinearState):
        raise TensorError(f"state must be a LinearState, got {type(state).__name__}")
    with outside_autocast(q.device):
        dtype = torch.float64 if v.dtype == torch.float64 else torch.float32
        features_q, features_k = map_query(q.to(dtype)), map_key(k.to(dtype))
        _check_features(features_q, q, rope, None)
        _check_features(features_k, k, rope, features_q.shape[-1])
        rotated_q, rotated_k = features_q, features_k
        if rope is not None:
            rotated_q, rotated_k = rotate_qk(features_q, features_k, positions, rope)
        # [..., seq, heads, features] -> [..., heads, seq, features], views
        features_q, features_k, rotated_q, rotated_k, values = (
            x.transpose(-3, -2) for x in (features_q, features_k, rotated_q, rotated_k, v.to(dtype))
        )
        # numerator [..., heads, seq, values], denominator [..., heads, seq, 1]
        if causal:
            ones = values.new_ones(()).expand(*values.shape[:-1], 1)
            numerator = causal_sum(rotated_q, rotated_k, values)
            denominator = causal_sum(features_q, features_k, ones)
        else:
            numerator = rotated_q @ (rotated_k.mT @ values)
            denominator = features_q @ features_k.sum(-2).unsqueeze(-1)
        if state is not None:
            value_sums, weight_sums = _sums_of(state, rotated_k, values)
            numerator = numerator + rotated_q @ value_sums
            denominator = denominator + features_q @ weight_sums.unsqueeze(-1)
            state.values = value_sums + rotated_k.mT @ values
            state.weights = weight_sums + features_k.sum(-2)
            state.tokens += q.shape[-3]
        # [..., heads, seq, values] -> [..., seq, heads, values]
        y = (numerator / denominator).transpose(-3, -2).to(v.dtype).contiguous()
        return tokens_first([y], heads_first)[0]


class RotaryLinearAttention(nn.Module):
    """`linear_attention` between projections, as `RotaryAttention` is softmax attention.

    The module holds the Rope and its weights.

    Args:
        rope: What rotates the features of queries and keys, so its ``head_dim`` is their number;
            None for a layer without positions (eq. 18).
        embed_dim: Width of the input and the output.
        num_heads: Heads of queries, keys and values.
        head_dim: Width of a head, before the feature map. Needed where ``rope`` is None or the map
            makes more features than that; else the Rope's.
        causal: Whether a token sees nothing after itself.
        feature_map: As for `linear_attention`.
        qkv_bias: Whether ``q_proj``, ``k_proj`` and ``v_proj`` have biases.
        o_bias: Whether ``o_proj`` has one.
        device: Where the weights are; torch's default if None.
        dtype: Of the weights; torch's default if None.

    Attributes:
        q_proj: ``nn.Linear``, ``embed_dim`` to ``num_heads * head_dim``.
        k_proj: The same shape.
        v_proj: The same shape.
        o_proj: ``nn.Linear``, ``num_heads * head_dim`` to ``embed_dim``.

    Raises:
        SpecError: If a size is not a positive whole number, or the feature map does not fit: the
            named ones make as many features as a head is wide.

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
        if rope is not None:
            check_rope(rope)
            head_dim = rope.head_dim if head_dim is None else head_dim
        elif head_dim is None:
            raise SpecError("head_dim must be given where rope is None")
        embed_dim = whole("embed_dim", embed_dim, least=1)
        self.num_heads = whole("num_heads", num_heads, least=1)
        self.head_dim = whole("head_dim", head_dim, least=1)
        checked_feature_maps(feature_map, causal)
        features = number_of_features(feature_map, self.head_dim)
        if rope is not None and features not in (None, rope.head_dim):
            raise SpecError(
                f"rope must have as many coordinates as the features that it rotates ({features}), "
                f"got head_dim {rope.head_dim}"
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
        """The attention output of every token.

        Args:
            x: ``[..., seq, embed_dim]``.
            positions: As for `phasor.torch.rotate`. If None, 0, 1, 2, ..., counted on from the
                tokens in the state. A Rope of several axes needs them; a layer without Rope ignores
                them.
            state: As for `linear_attention`.

        Returns:
            ``[..., seq, embed_dim]``.

        Raises:
            PositionError: If the Rope has several axes and positions are missing, or do not fit.
            TensorError: As for `linear_attention`.
            SpecError: If a state is given to attention that is not causal.
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


def causal_sum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """``Σ_{n ≤ m} (q_m · k_n) v_n`` for every token ``m``, without an N×N matrix.

    Linear in each of its three arguments, so each derivative is the same sum of other arguments,
    or the same sum from the other end. One function is then its own backward pass, any number of
    times, and saves nothing but its inputs.

    Args:
        q: ``[..., heads, seq, features]``, any strides.
        k: The same shape.
        v: ``[..., heads, seq, values]``, the same leading dimensions.

    Returns:
        ``[..., heads, seq, values]``, a view of a contiguous ``[..., seq, heads, values]``.

    >>> one = torch.ones(1, 3, 1)
    >>> causal_sum(one, one, torch.tensor([[[1.0], [10.0], [100.0]]])).flatten().tolist()
    [1.0, 11.0, 111.0]
    """
    return cast(Tensor, _CausalSum.apply(q, k, v, False))


class _CausalSum(torch.autograd.Function):
    """The sum over ``n ≤ m``, or with ``last_first`` the one over ``n ≥ m``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, last_first: bool) -> Tensor:
        # each [..., heads, CHUNK, features or values]
        chunks = list(zip(*(cast(Any, x).split(CHUNK, -2) for x in (q, k, v)), strict=True))
        # the sum of k_n v_nᵀ over the chunks before, [..., heads, features, values]
        state = q.new_zeros(*q.shape[:-2], q.shape[-1], v.shape[-1])
        sums: list[Tensor] = []
        for q_chunk, k_chunk, v_chunk in reversed(chunks) if last_first else chunks:
            scores = q_chunk @ k_chunk.mT  # [..., heads, CHUNK, CHUNK]
            scores = scores.triu() if last_first else scores.tril()
            # [..., heads, CHUNK, values] -> [..., CHUNK, heads, values]
            sums.append((scores @ v_chunk + q_chunk @ state).transpose(-3, -2))
            state = state + k_chunk.mT @ v_chunk
        if last_first:
            sums.reverse()
        # [..., seq, heads, values] -> [..., heads, seq, values], a view
        return torch.cat(sums, -3).transpose(-3, -2)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.last_first = inputs
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        if grad is None:
            return None, None, None, None
        q, k, v = ctx.saved_tensors
        same_end, other_end = ctx.last_first, not ctx.last_first
        # the sums that are the gradients of q, k and v
        sums = (grad, v, k, same_end), (v, grad, q, other_end), (k, q, grad, other_end)
        needed = zip(sums, ctx.needs_input_grad[:3], strict=True)
        made = [cast(Tensor, _CausalSum.apply(*of)) if needs else None for of, needs in needed]
        return (*made, None)


def _check_features(features: Any, x: Tensor, rope: Rope | None, width: int | None) -> None:
    """Refuse features that ``rope`` does not rotate, or not of ``width`` where that is given."""
    if rope is not None:
        check_rope(rope)
        width = rope.head_dim
    fits = isinstance(features, Tensor) and features.shape[:-1] == x.shape[:-1]
    if not fits or width not in (None, features.shape[-1]):
        of_whom = "the number of features" if rope is None else "rope.head_dim"
        shape = list(features.shape) if isinstance(features, Tensor) else type(features).__name__
        wanted = [*x.shape[:-1], "features" if width is None else width]
        raise TensorError(
            f"feature_map must make features {wanted}, the last of them {of_whom}, of a "
            f"tensor {list(x.shape)}, got {shape}"
        )


def _check_tensors(q: Any, k: Any, v: Any) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() < 3:
            came = f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise TensorError(
                f"{name} must be a floating tensor [..., seq, heads, head_dim], got {came}"
            )
        if (x.dtype, x.device) != (q.dtype, q.device):
            raise TensorError(
                f"{name} must have the dtype and device of q ({q.dtype}, {q.device}), "
                f"got {x.dtype}, {x.device}"
            )
        if x.shape[:-1] != q.shape[:-1]:
            raise TensorError(
                f"{name} must share the tokens and heads of q {list(q.shape[:-1])}, got "
                f"{list(x.shape[:-1])}; {name}.repeat_interleave(groups, -2) repeats heads that "
                "several queries share"
            )


def _sums_of(state: LinearState, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The two sums of ``state``, zeros where it is empty."""
    shape = (*k.shape[:-2], k.shape[-1], v.shape[-1])
    if state.values is None or state.weights is None:
        return v.new_zeros(shape), v.new_zeros(shape[:-1])
    if (state.values.shape, state.values.dtype) != (shape, v.dtype):
        raise TensorError(
            f"state must hold values {list(shape)} in {v.dtype} for these tensors, got "
            f"{list(state.values.shape)} in {state.values.dtype}; LinearState() starts anew"
        )
    return state.values, state.weights
