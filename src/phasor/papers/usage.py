"""Measures of trained heads: frequency usage, attention to a position, and vector norms."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from phasor._checks import whole
from phasor.errors import TensorError
from phasor.numpy import pair_indices, real_array
from phasor.rope import Rope


def pair_norms(x: ArrayLike, rope: Rope) -> NDArray[np.float64]:
    """Mean norm of each pair of a query or key over tokens: frequency usage.

    The mean of ``sqrt(x0**2 + x1**2)``. A pair adds at most the product of its query's norm and its
    key's to a score, ``|q_k . k_k| <= |q_k| |k_k|``, so a head does not use a frequency whose pairs
    are short (Round and Round We Go 2410.06205, section 4). A rotation keeps every norm, so ``x``
    may be recorded before it, or after it if the Rope does not change the pairing.

    Args:
        x: ``[..., seq, heads, head_dim]``, the queries or the keys of a layer.
        rope: Defines the coordinates of each pair.

    Returns:
        float64 ``[heads, num_pairs]``: pairs in the order of `Rope.inv_freq`.

    >>> rope = Rope(head_dim=4, pairing="interleaved")
    >>> pair_norms([[[3.0, 4.0, 0.0, 0.0]], [[0.0, 1.0, 2.0, 0.0]]], rope)
    array([[3., 1.]])
    """
    vectors = real_array("x", x).astype(np.float64)
    if vectors.ndim < 3 or vectors.shape[-1] != rope.head_dim or 0 in vectors.shape:
        raise TensorError(
            f"x must be [..., seq, heads, head_dim] with at least one token and head_dim "
            f"{rope.head_dim}, got shape {list(vectors.shape)}"
        )
    first, second = pair_indices(rope, rope.pairing)
    norms = np.hypot(vectors[..., first], vectors[..., second])
    return norms.mean(tuple(range(norms.ndim - 2)))


def positional_score(attention: ArrayLike, offset: int) -> NDArray[np.float64]:
    """The mean weight that a head gives the key at ``offset`` from the query.

    The mean of ``attention[..., i, i + offset]`` over the queries for which that key exists: 1 for
    the ideal diagonal head at offset 0 and the ideal previous-token head at -1 (Round and Round We
    Go 2410.06205, section 5 and Theorem 5.3).

    Args:
        attention: Weights after the softmax, ``[..., heads, seq, seq]``, queries before keys.
        offset: Key position minus query position.

    Returns:
        float64 ``[heads]``.

    >>> positional_score([[[1.0, 0.0], [0.75, 0.25]]], -1)
    array([0.75])
    """
    weights = _check_attention(attention)
    seq = weights.shape[-1]
    offset = whole("offset", offset, least=1 - seq, most=seq - 1)
    diagonals = np.diagonal(weights, offset, -2, -1)  # [..., heads, seq - abs(offset)]
    return diagonals.mean(-1, dtype=np.float64).reshape(-1, weights.shape[-3]).mean(0)


def sink_score(attention: ArrayLike) -> NDArray[np.float64]:
    """The mean weight that a head gives the first key: how strong an attention sink it is.

    The mean of ``attention[..., i, 0]`` over all queries but the first, which under a causal mask
    sees nothing else. Many heads of trained models give most of their weight to the first token,
    whatever it is (attention sinks, Xiao et al. 2309.17453, section 3.1; alpha of the first token
    in Gu et al. 2410.10781, whose mean includes the first query).

    Args:
        attention: Weights after the softmax, ``[..., heads, seq, seq]``, queries before keys, with
            two tokens or more.

    Returns:
        float64 ``[heads]``.

    >>> sink_score([[[1.0, 0.0, 0.0], [0.75, 0.25, 0.0], [0.25, 0.5, 0.25]]])
    array([0.5])
    """
    weights = _check_attention(attention)
    if weights.shape[-1] < 2:
        raise TensorError("attention must have a query after the first, got a single token")
    sinks = weights[..., 1:, 0]  # [..., heads, seq - 1]
    return sinks.mean(-1, dtype=np.float64).reshape(-1, weights.shape[-3]).mean(0)


def token_norms(x: ArrayLike) -> NDArray[np.float64]:
    """Mean norm of the vector at each position, over sequences.

    For values, weight times this norm bounds what a position adds to the output of a head: a head
    can add nothing by attending to a position with a short value (Guo et al. 2410.13835). For
    queries and keys it bounds scores, as `pair_norms` does pair by pair.

    Args:
        x: ``[..., seq, heads, head_dim]``: queries, keys or values of a layer.

    Returns:
        float64 ``[heads, seq]``.

    >>> token_norms([[[3.0, 4.0]], [[0.0, 1.0]]])
    array([[5., 1.]])
    """
    vectors = real_array("x", x).astype(np.float64)
    if vectors.ndim < 3 or 0 in vectors.shape:
        raise TensorError(
            "x must be [..., seq, heads, head_dim] with at least one token, got shape "
            f"{list(vectors.shape)}"
        )
    norms = np.linalg.norm(vectors, axis=-1)  # [..., seq, heads]
    return norms.reshape(-1, *norms.shape[-2:]).mean(0).T


def _check_attention(attention: ArrayLike) -> NDArray[Any]:
    """Check maps without converting them: large ones become float64 only where they are read."""
    weights = real_array("attention", attention)
    if weights.ndim < 3 or weights.shape[-1] != weights.shape[-2] or 0 in weights.shape:
        raise TensorError(
            "attention must be [..., heads, seq, seq] with at least one token, got shape "
            f"{list(weights.shape)}; with a cache there are more keys than queries: pass the "
            "attention of a whole sequence"
        )
    return weights
