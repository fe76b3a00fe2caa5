"""Functions of programs that do not install here, written from their documentation."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_rotary_emb(
    x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, seqlen_offsets: int
) -> Tensor:
    """flash-attention's: the first ``2 * cos.shape[1]`` of ``x`` ``[batch, seq, heads, head_dim]``.

    Token ``i`` uses row ``i + seqlen_offsets`` of ``cos`` and ``sin`` ``[max, rotary_dim / 2]``,
    which have the dtype of ``x``.
    """
    assert cos.dtype == sin.dtype == x.dtype, "flash-attention refuses other dtypes"
    width = 2 * cos.shape[1]
    rows = slice(seqlen_offsets, seqlen_offsets + x.shape[1])
    c, s = cos[rows, None], sin[rows, None]  # [seq, 1, rotary_dim / 2]
    if interleaved:
        first, second = x[..., 0:width:2], x[..., 1:width:2]
    else:
        first, second = x[..., : width // 2], x[..., width // 2 : width]
    one, two = first * c - second * s, first * s + second * c
    turned = torch.stack((one, two), -1).flatten(-2) if interleaved else torch.cat((one, two), -1)
    return torch.cat((turned, x[..., width:]), -1)
