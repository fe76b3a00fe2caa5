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
    """One causal head whose queries and keys are those of `phasor.papers.heads.positional_head`.

    They are the biases of two projections whose weights are 0, so they do not depend on the tokens,
    and a norm before the head changes nothing. The output for a token is the average of the tokens
    it attends to, which for a sharp head is the token ``offset`` back. A query with fewer tokens
    before it than that attends to the token whose angle is nearest.

    Only the biases are rounded to 16 bits: rotation and scores are float32. Where `required_alpha`
    asks for 0.999 over 512 tokens, with base 10 000 or 500 000, that leaves at least 0.99898 in
    float32, 0.99896 in float16 and 0.99874 in bfloat16, for heads of 8 to 256 coordinates. With 4
    bfloat16 leaves 0.9971; with 2 no bound holds, and the alpha of 274 400 is beyond float16.

    Args:
        rope: What rotates queries and keys.
        offset: Tokens back, 0 or more: 1 the previous token, 0 itself.
        alpha: Sharpness. `phasor.papers.heads.required_alpha` finds it; logits are divided by
            ``sqrt(rope.head_dim)`` there and here.
        embed_dim: Width of the input.
        device: Where the parameters are made.
        dtype: Of the parameters; torch's default unless given.

    Attributes:
        q_proj: ``nn.Linear`` from ``embed_dim`` to ``head_dim``.
        k_proj: The same. Both have ordinary parameters: a trained model can start from them.

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
        whole("offset", offset, least=0)  # no causal query sees what comes after it
        embed_dim = whole("embed_dim", embed_dim, least=1)
        # for tokens of a single coordinate, which is 1, so that its weights are the biases
        head = positional_head(rope, offset, alpha=alpha, width=1)
        self.rope, self.offset = rope, offset
        self.q_proj = _constant_projection(head.query[:, 0], embed_dim, device, dtype)
        self.k_proj = _constant_projection(head.key[:, 0], embed_dim, device, dtype)

    def forward(self, x: Tensor, positions: Any) -> Tensor:
        """The average ``[..., seq, embed_dim]`` of the tokens that each token attends to.

        Args:
            x: ``[..., seq, embed_dim]``, of the parameters' dtype.
            positions: As for `phasor.torch.rotate`: ``[..., seq]``, or ``[..., seq, n_axes]``.
                Tokens are causal in the order they are given.
        """
        if x.dim() < 2 or x.shape[-1] != self.k_proj.in_features:
            raise TensorError(
                f"x must end in [seq, embed_dim] with embed_dim {self.k_proj.in_features}, "
                f"got shape {list(x.shape)}"
            )
        # a sharp head has large scores: 16 bits would round them by more than their differences
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
                f"{np.abs(vector).max():.4g}; take a wider head, or another dtype"
            )
        projection.bias.copy_(bias)
    return projection
