"""A causal attention head that looks a fixed number of tokens back, as a module."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from phasor._checks import whole
from phasor.errors import TensorError
from phasor.heads import positional_head
from phasor.spec import Rope
from phasor.torch.functional import rotate_qk


class PositionalHead(nn.Module):
    """One causal head whose queries and keys are `phasor.heads.positional_head`.

    It gives every token the average of the tokens it attends to, which for a sharp head is the
    token ``offset`` back. A query with fewer tokens before it than that has no such token and
    attends to what is nearest to it by angle.

    Args:
        rope: What rotates queries and keys.
        offset: Tokens back, 0 or more: 1 the previous token, 0 itself.
        alpha: Sharpness. `phasor.heads.required_alpha` finds it, with ``scaled=True``: logits are
            divided by ``sqrt(rope.head_dim)`` here.
        width: Width of the input.
        constant: The input coordinate that is 1 in every token.
        device: Where the weights are made.
        dtype: Of the weights; torch's default unless given.

    Raises:
        SpecError: For an argument that is not what it must be.

    Attributes:
        query: ``nn.Linear`` from ``width`` to ``head_dim``, without a bias.
        key: The same. Both are ordinary parameters: a trained model can start from them.

    >>> from phasor import Rope
    >>> from phasor.heads import required_alpha
    >>> rope = Rope(head_dim=64, pairing="half")
    >>> alpha = required_alpha(rope, 512, 0.999)
    >>> head = PositionalHead(rope, 1, alpha=alpha, width=8)
    >>> x = torch.randn(2, 512, 8)
    >>> x[..., 0] = 1.0
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
        width: int,
        constant: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        whole("offset", offset, least=0)  # no causal query sees what comes after it
        made = positional_head(rope, offset, alpha=alpha, width=width, constant=constant)
        self.rope, self.offset = rope, offset
        self.query = _linear(made.query, device, dtype)
        self.key = _linear(made.key, device, dtype)

    def forward(self, x: Tensor, positions: Any) -> Tensor:
        """The average of the tokens that each token attends to.

        Args:
            x: ``[..., seq, width]``, with a 1 at the constant coordinate.
            positions: As for `phasor.torch.rotate`: ``[..., seq]``, or ``[..., seq, n_axes]``.
                Tokens are causal in the order they are given.

        Returns:
            ``[..., seq, width]``.

        Raises:
            TensorError: If ``x`` does not end in ``[seq, width]``.
            PositionError: If the positions do not fit ``x``.
        """
        if x.dim() < 2 or x.shape[-1] != self.key.in_features:
            raise TensorError(
                f"x must end in [seq, width] with width {self.key.in_features}, "
                f"got shape {list(x.shape)}"
            )
        q, k = (projection(x).unsqueeze(-2) for projection in (self.query, self.key))
        q, k = rotate_qk(q, k, positions, self.rope)
        return functional.scaled_dot_product_attention(
            q.squeeze(-2), k.squeeze(-2), x, is_causal=True
        )

    def extra_repr(self) -> str:
        return f"{self.rope}, offset={self.offset}"


def _linear(
    weight: NDArray[np.float64], device: torch.device | str | None, dtype: torch.dtype | None
) -> nn.Linear:
    rows, columns = weight.shape
    projection = nn.Linear(columns, rows, bias=False, device=device, dtype=dtype)
    with torch.no_grad():
        projection.weight.copy_(torch.from_numpy(weight))
    return projection
