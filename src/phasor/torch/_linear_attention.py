"""RoPE with linear attention: RoFormer 2104.09864, eq. 17 to 19, in three forms that agree.

Over all tokens, over the tokens so far in chunks, and token by token with a state of fixed size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from phasor._checks import whole
from phasor.errors import PositionError, SpecError, TensorError
from phasor.rope import Rope
from phasor.torch._arguments import check_rope
from phasor.torch._causal_sum import causal_sum
from phasor.torch._feature_maps import FeatureMaps, check_features, feature_maps
from phasor.torch._internals import outside_autocast
from phasor.torch.functional import rotate_qk


@dataclass(slots=True)
class LinearState:
    """What linear attention remembers of the tokens so far: its size does not follow their number.

    ``heads * (features * values + features)`` numbers per sequence, float32 or float64. A new
    state is empty; `linear_attention` and `RotaryLinearAttention` replace its tensors by sums
    that include the tokens they were given, and never write the old ones. Outside
    ``torch.no_grad`` the tensors keep the graph that made them.

    Attributes:
        values: ``Σ R(n) ϕ(k_n) v_nᵀ``, ``[..., heads, features, values]``.
        weights: ``Σ ϕ(k_n)``, ``[..., heads, features]``.
        tokens: How many they are.

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
    rope: Rope,
    *,
    causal: bool,
    feature_map: FeatureMaps = "elu",
    state: LinearState | None = None,
) -> Tensor:
    """Attention in time and memory linear in the number of tokens, with rotated features.

    ``Σ_n (R(m) φ(q_m) · R(n) ϕ(k_n)) v_n / Σ_n φ(q_m) · ϕ(k_n)``
    (RoFormer 2104.09864, eq. 19): the numerator is rotated and the denominator is not, so weights
    may be negative and their sum shrinks with distance; `phasor.papers.linear_weights` shows
    them. The sums run over all tokens, or with ``causal`` over those that do not come later *in the
    tensor*; positions only rotate, and may be any. Sequences that are packed into one would see
    each other, and there is no mask for padding: of a causal sum, padding at the end changes only
    itself.

    Arithmetic is float32 (float64 for float64 tensors) from the feature map on, under autocast
    too, with one rounding at the end. The causal sum goes through the tokens in chunks, forward
    and backward, and keeps features and values for the backward pass, never a matrix of N×N.
    Differentiable any number of times. ``rope.attention_factor`` would multiply the result as a
    whole and is not applied.

    Args:
        q: ``[..., seq, heads, width]``: float64, float32, bfloat16 or float16, any strides.
        k: The same shape. Keys that several heads share are given to each:
            ``k.repeat_interleave(groups, -2)``.
        v: ``[..., seq, heads, values]``, as many tokens and heads.
        positions: As for `phasor.torch.rotate`.
        rope: Rotates the features: its ``head_dim`` is how many the feature map makes.
        causal: Whether a token sees only itself and those before it.
        feature_map: ``"elu"``: ``φ(x) = ϕ(x) = elu(x) + 1`` (Katharopoulos et al. 2020,
            2006.16236). ``"softmax"``: ``φ`` the softmax over the features, ``ϕ`` the exponential,
            as RoFormer reads Shen et al.; float32 overflows where a key exceeds 88. ``"shen"``:
            ``ϕ`` the softmax over the tokens instead, as Shen et al. (1812.01243) write it, for
            sums over all tokens. A callable makes features ``[..., seq, heads, rope.head_dim]`` of
            queries and keys alike, a pair of callables of queries and of keys. Features should be
            positive: a token whose denominator is 0 comes out as NaN.
        state: What to continue from, with ``causal``; it takes these tokens in.

    Returns:
        ``[..., seq, heads, values]`` of the dtype of ``v``, contiguous.

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
    map_query, map_key = feature_maps(feature_map, causal)
    if state is not None and not causal:
        raise SpecError("state must be None with causal=False, for such a sum has no order")
    _check_tensors(q, k, v)
    if state is not None and not isinstance(cast(object, state), LinearState):
        raise TensorError(f"state must be a LinearState, got {type(state).__name__}")
    with outside_autocast(q.device):
        exact = torch.float64 if v.dtype == torch.float64 else torch.float32
        plain_q, plain_k = map_query(q.to(exact)), map_key(k.to(exact))
        check_features(plain_q, q, rope)
        check_features(plain_k, k, rope)
        turned_q, turned_k = rotate_qk(plain_q, plain_k, positions, rope)
        # [..., heads, seq, features], views
        plain_q, plain_k, turned_q, turned_k, values = (
            x.transpose(-3, -2) for x in (plain_q, plain_k, turned_q, turned_k, v.to(exact))
        )
        if causal:
            ones = values.new_ones(()).expand(*values.shape[:-1], 1)
            above = causal_sum(turned_q, turned_k, values)
            below = causal_sum(plain_q, plain_k, ones)
        else:
            above = turned_q @ (turned_k.mT @ values)
            below = plain_q @ plain_k.sum(-2).unsqueeze(-1)
        if state is not None:
            kept, weights = _kept(state, turned_k, values)
            above = above + turned_q @ kept
            below = below + plain_q @ weights.unsqueeze(-1)
            state.values = kept + turned_k.mT @ values
            state.weights = weights + plain_k.sum(-2)
            state.tokens += q.shape[-3]
        return (above / below).transpose(-3, -2).to(v.dtype).contiguous()


class RotaryLinearAttention(nn.Module):
    """`linear_attention` between linear maps, as `RotaryAttention` is softmax attention.

    The module holds the Rope and its weights. Heads are as wide as the Rope, and the feature map
    keeps that width.

    Args:
        width: Of the tokens that come and go.
        heads: Heads of queries, keys and values.
        rope: What rotates the features of queries and keys.
        causal: Whether a token sees nothing after itself.
        feature_map: As for `linear_attention`.
        input_bias: Whether the maps to queries, keys and values have biases.
        output_bias: Whether the map back has one.
        device: Where the weights live; torch's default if None.
        dtype: Of the weights; torch's default if None.

    Raises:
        SpecError: If a size is not a positive whole number, or the feature map does not fit.

    >>> rope = Rope(head_dim=16, pairing="half")
    >>> attention = RotaryLinearAttention(64, 4, rope)
    >>> x, state = torch.randn(2, 30, 64), LinearState()
    >>> with torch.no_grad():
    ...     prompt = attention(x[:, :29], state=state)
    ...     token = attention(x[:, 29:], state=state)
    ...     torch.allclose(token, attention(x)[:, 29:], atol=1e-5)
    True
    """

    def __init__(
        self,
        width: int,
        heads: int,
        rope: Rope,
        *,
        causal: bool = True,
        feature_map: FeatureMaps = "elu",
        input_bias: bool = False,
        output_bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        width = whole("width", width, least=1)
        self.heads = whole("heads", heads, least=1)
        check_rope(rope)
        feature_maps(feature_map, causal)
        self.rope, self.causal, self.feature_map = rope, causal, feature_map
        held = self.heads * rope.head_dim
        self.query = nn.Linear(width, held, input_bias, device, dtype)
        self.key = nn.Linear(width, held, input_bias, device, dtype)
        self.value = nn.Linear(width, held, input_bias, device, dtype)
        self.output = nn.Linear(held, width, output_bias, device, dtype)

    def forward(
        self, x: Tensor, positions: Any = None, *, state: LinearState | None = None
    ) -> Tensor:
        """What every token has gathered.

        Args:
            x: ``[..., seq, width]``.
            positions: Where tokens stand, as for `phasor.torch.rotate`. If None, 0, 1, 2, ...,
                tokens that the state has taken in counted. A Rope of several axes needs them.
            state: As for `linear_attention`.

        Returns:
            ``[..., seq, width]``.

        Raises:
            PositionError: If the Rope has several axes and positions are missing, or do not fit.
            TensorError: As for `linear_attention`.
            SpecError: If a state meets attention that is not causal.
        """
        if positions is None:
            if self.rope.axes.n_axes > 1:
                raise PositionError(
                    f"positions must be given for {type(self.rope.axes).__name__} axes, got None; "
                    "phasor.positions and phasor.positions make them"
                )
            past = 0 if state is None else state.tokens
            positions = torch.arange(past, past + x.shape[-2], device=x.device)
        shape = (self.heads, self.rope.head_dim)
        projected = (made(x) for made in (self.query, self.key, self.value))
        q, k, v = (y.unflatten(-1, shape) for y in projected)
        gathered = linear_attention(
            *(q, k, v, positions, self.rope),
            causal=self.causal,
            feature_map=self.feature_map,
            state=state,
        )
        return self.output(gathered.flatten(-2))

    def extra_repr(self) -> str:
        return (
            f"heads={self.heads}, causal={self.causal}, feature_map={self.feature_map!r}, "
            f"rope={self.rope}"
        )


def _check_tensors(q: Any, k: Any, v: Any) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() < 3:
            what = f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise TensorError(
                f"{name} must be a floating tensor [..., seq, heads, width], got {what}"
            )
        if (x.dtype, x.device) != (q.dtype, q.device):
            raise TensorError(
                f"{name} must have the dtype and device of q ({q.dtype}, {q.device}), "
                f"got {x.dtype}, {x.device}"
            )
    for name, x in (("k", k), ("v", v)):
        if x.shape[:-1] != q.shape[:-1]:
            raise TensorError(
                f"{name} must share the tokens and heads of q {list(q.shape[:-1])}, got "
                f"{list(x.shape[:-1])}; {name}.repeat_interleave(groups, -2) gives heads in "
                "groups one each"
            )


def _kept(state: LinearState, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The two sums of ``state``, zeros where it is empty."""
    wanted = (*k.shape[:-2], k.shape[-1], v.shape[-1])
    if state.values is None or state.weights is None:
        return v.new_zeros(wanted), v.new_zeros(wanted[:-1])
    if (state.values.shape, state.values.dtype) != (wanted, v.dtype):
        raise TensorError(
            f"state must hold values {list(wanted)} in {v.dtype} for these tensors, got "
            f"{list(state.values.shape)} in {state.values.dtype}; LinearState() starts anew"
        )
    return state.values, state.weights
