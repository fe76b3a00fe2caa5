"""Softmax attention on ``scaled_dot_product_attention``, without a mask as large as the scores.

Where torch's own kernels know the mask (full, causal), they do it. Every other mask is a boolean
one for a few hundred queries at a time, so that what is held is proportional to the sequence.
FlexAttention would do without: but uncompiled it writes all scores down, and compiled it has no
backward pass on a CPU.
"""

from __future__ import annotations

import torch
import torch.nn.functional as nnf
from torch import Tensor

from phasor.rope import Rope

#: Queries that share one mask.
CHUNK = 512


def logit_factors(rope: Rope | None, head_dim: int) -> tuple[float, float]:
    """The gain on cos and sin, and the factor on the scores of a head.

    Together they are ``head_dim**-0.5 * rope.logit_factor`` for a fully rotated head; the gain
    leaves coordinates alone that do not turn, as the models that have it do.

    Raises:
        SpecError: If ``rope.scaling`` is a rule.
    """
    if rope is None:
        return 1.0, head_dim**-0.5
    return rope.attention_factor, head_dim**-0.5 * rope.softmax_factor


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    factor: float,
    *,
    causal: bool,
    window: int | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Attention of tokens among themselves.

    Args:
        q: ``[batch, seq, query_heads, head_dim]``.
        k: ``[batch, seq, key_heads, head_dim]``.
        v: As ``k``.
        factor: On the scores.
        causal: Whether a query sees nothing after itself.
        window: Tokens that a causal query sees, itself included; None for all.
        mask: ``[batch, seq]`` bools, false for padding, which nothing sees but itself: a softmax
            over nothing would be NaN.

    Returns:
        ``[batch, seq, query_heads, head_dim]``.
    """
    length = q.shape[1]
    if mask is None and (window is None or length <= window):
        return _attended(q, k, v, factor, causal=causal)
    places = torch.arange(length, device=q.device)
    done: list[Tensor] = []
    # a compiler that does not know the length makes one graph for as many chunks, not for a length
    for chunk in range(-(-length // CHUNK)):
        start, stop = chunk * CHUNK, min((chunk + 1) * CHUNK, length)
        first = 0 if window is None else max(0, start - window + 1)
        last = stop if causal else length
        own, others = places[start:stop, None], places[first:last]
        seen = visible(own, others, window) if causal else torch.ones_like(own == others)
        if mask is not None:
            seen = (seen & mask[:, None, first:last]) | (own == others)
        keys, values = k[:, first:last], v[:, first:last]
        done.append(_attended(q[:, start:stop], keys, values, factor, seen=seen))
    return torch.cat(done, dim=1) if done else q


def attend_cached(
    q: Tensor, k: Tensor, v: Tensor, factor: float, places: Tensor, window: int | None
) -> Tensor:
    """Causal attention of new tokens to a cache that holds them already.

    Args:
        q: ``[batch, seq, query_heads, head_dim]``.
        k: ``[batch, used, key_heads, head_dim]``, in the order of places.
        v: As ``k``.
        factor: On the scores.
        places: Where in the cache each query's own key is, ``[batch, seq]``.
        window: As for `attend`.
    """
    others = torch.arange(k.shape[1], device=q.device)
    done: list[Tensor] = []
    for start in range(0, q.shape[1], CHUNK):
        some, own = q[:, start : start + CHUNK], places[:, start : start + CHUNK, None]
        done.append(_attended(some, k, v, factor, seen=visible(own, others, window)))
    return torch.cat(done, dim=1) if done else q


def visible(own: Tensor, others: Tensor, window: int | None) -> Tensor:
    """Whether a causal query in place ``own`` sees the key in each place of ``others``."""
    seen = others <= own
    return seen if window is None else seen & (others > own - window)


def _attended(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    factor: float,
    *,
    causal: bool = False,
    seen: Tensor | None = None,
) -> Tensor:
    done = nnf.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=None if seen is None else seen.unsqueeze(-3),
        is_causal=causal,
        scale=factor,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return done.transpose(1, 2)
