"""A causal attention head that looks a fixed number of tokens back, as a module."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from phasor._checks import whole
from phasor.errors import SpecError, TensorError
from phasor.papers.heads import positional_head
from phasor.rope import Rope
from phasor.torch.functional import rotate_qk


class PositionalHead(nn.Module):
    """A causal head with the queries and keys of `phasor.papers.heads.positional_head`.

    They are the biases of two projections with weights 0, so they do not depend on the tokens, and
    a norm before the head changes nothing. The output for a token is the average of the tokens it
    attends to, which for a sharp head is the token ``offset`` back. A query with fewer earlier
    tokens attends to the token whose angle is closest.

    Only the biases are rounded to 16 bits: rotation and scores are float32. If `required_alpha`
    asks for 0.999 over 512 tokens, with base 10 000 or 500 000, the head reaches at least 0.99898
    in float32, 0.99896 in float16 and 0.99874 in bfloat16, for heads of 8 to 256 coordinates. With
    4 coordinates bfloat16 reaches 0.9971; with 2 no bound holds, and the alpha of 274 400 is beyond
    float16.

    Args:
        rope: The rope of queries and keys.
        offset: Tokens back, 0 or more: 1 is the previous token, 0 the token itself.
        alpha: Sharpness, from `phasor.papers.heads.required_alpha`; logits are divided by
            ``sqrt(rope.head_dim)`` in both.
        embed_dim: Width of the input.
        device: Device of the parameters.
        dtype: Dtype of the parameters; torch's default if None.

    Attributes:
        q_proj: ``nn.Linear`` from ``embed_dim`` to ``head_dim``.
        k_proj: The same. Both have ordinary parameters, so training can start from them.

    >>> from phasor import Rope
    >>> from phasor.papers.heads import required_alpha
    >>> rope = Rope(head_dim=64, pairing="half")
    >>> alpha = required_alpha(rope, 512, 0.999)
    >>> head = PositionalHead(rope, 1, alpha=alpha, embed_dim=8)
    >>> x = torch.randn(2, 512, 8)
    >>> seen = head(x, torch.arange(512))
    >>> bool(torch.allclose(seen[:, 1:], x[:, :-1], atol=0.02))
    True
    """

    def __init__(
        self,
        rope: Rope,
        offset: int,
        *,
        alpha: float,
        embed_dim: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        whole("offset", offset, least=0)  # a causal query sees no later tokens
        embed_dim = whole("embed_dim", embed_dim, least=1)
        # for tokens with a single coordinate of 1, so that its weights are the biases
        head = positional_head(rope, offset, alpha=alpha, width=1)
        self.rope, self.offset = rope, offset
        self.q_proj = _constant_projection(head.query[:, 0], embed_dim, device, dtype)
        self.k_proj = _constant_projection(head.key[:, 0], embed_dim, device, dtype)

    def forward(self, x: Tensor, positions: Any) -> Tensor:
        """The average ``[..., seq, embed_dim]`` of the tokens that each token attends to.

        Args:
            x: ``[..., seq, embed_dim]``, in the dtype of the parameters.
            positions: As for `phasor.torch.rotate`: ``[..., seq]``, or ``[..., seq, n_axes]``.
                The causal mask follows the order of the tokens in ``x``.
        """
        if x.dim() < 2 or x.shape[-1] != self.k_proj.in_features:
            raise TensorError(
                f"x must end in [seq, embed_dim] with embed_dim {self.k_proj.in_features}, "
                f"got shape {list(x.shape)}"
            )
        # scores of a sharp head are so large that 16 bits would round away their differences
        dtype = torch.promote_types(x.dtype, torch.float32)
        # [..., seq, embed_dim] -> [..., seq, 1, head_dim]
        q, k = (proj(x).unsqueeze(-2).to(dtype) for proj in (self.q_proj, self.k_proj))
        q, k = rotate_qk(q, k, positions, self.rope, gain=1.0)
        # [..., seq, 1, head_dim] -> [..., seq, head_dim]; the values are the tokens themselves
        y = functional.scaled_dot_product_attention(
            q.squeeze(-2), k.squeeze(-2), x.to(dtype), is_causal=True
        )
        return y.to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.rope}, offset={self.offset}"


def _constant_projection(
    vector: NDArray[np.float64],
    embed_dim: int,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> nn.Linear:
    """A projection whose output is ``vector`` for every token."""
    projection = nn.Linear(embed_dim, len(vector), device=device, dtype=dtype)
    with torch.no_grad():
        projection.weight.zero_()
        bias = torch.from_numpy(vector).to(projection.bias.dtype)
        if not bias.isfinite().all():
            raise SpecError(
                f"alpha must give biases that {bias.dtype} can hold, got a coordinate of "
                f"{np.abs(vector).max():.4g}; use a wider head, or another dtype"
            )
        projection.bias.copy_(bias)
    return projection
