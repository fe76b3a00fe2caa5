"""Which frequencies a trained head uses, and whether it looks at a place or at a content."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from phasor._checks import whole
from phasor.errors import TensorError
from phasor.numpy import pair_indices
from phasor.rope import Rope


def pair_norms(x: ArrayLike, rope: Rope) -> NDArray[np.float64]:
    """How long each pair of a query or key is, on average over tokens: frequency usage.

    The mean of ``sqrt(x0**2 + x1**2)``. A pair adds at most the product of its query's norm and
    its key's to a score, ``|q_k . k_k| <= |q_k| |k_k|``, so a frequency whose pairs are short is
    not used (Round and Round We Go 2410.06205, section 4). A rotation keeps every norm, so ``x``
    may be taken before it, or after it where the Rope keeps its pairing.

    Args:
        x: ``[..., seq, heads, head_dim]``, the queries or the keys of a layer.
        rope: Says which coordinates are a pair.

    Returns:
        float64 ``[heads, num_pairs]``: pairs in the order of `phasor.frequencies.inv_freq`.

    Raises:
        TensorError: If ``x`` is not real, has fewer than three dimensions, holds no token, or does
            not end in ``head_dim``.

    >>> rope = Rope(head_dim=4, pairing="interleaved")
    >>> pair_norms([[[3.0, 4.0, 0.0, 0.0]], [[0.0, 1.0, 2.0, 0.0]]], rope)
    array([[3., 1.]])
    """
    vectors = _real("x", x)
    if vectors.ndim < 3 or vectors.shape[-1] != rope.head_dim or 0 in vectors.shape:
        raise TensorError(
            f"x must be [..., seq, heads, head_dim] with a token at least and head_dim "
            f"{rope.head_dim}, got shape {list(vectors.shape)}"
        )
    first, second = pair_indices(rope, rope.pairing)
    norms = np.hypot(vectors[..., first], vectors[..., second])
    return norms.mean(tuple(range(norms.ndim - 2)))


def positional_score(attention: ArrayLike, offset: int) -> NDArray[np.float64]:
    """The weight a head puts on the key ``offset`` places from the query, on average.

    The mean of ``attention[..., i, i + offset]`` over the queries that have that key: 1 for the
    ideal diagonal head at offset 0 and the ideal previous-token head at -1 (Round and Round We
    Go 2410.06205, section 5 and Theorem 5.3).

    Args:
        attention: Weights after the softmax, ``[..., heads, seq, seq]``, queries before keys.
        offset: Key position minus query position.

    Returns:
        float64 ``[heads]``.

    Raises:
        TensorError: If ``attention`` is not of that form.
        SpecError: If ``offset`` is not a whole number, or no query has that key.

    >>> positional_score([[[1.0, 0.0], [0.75, 0.25]]], -1)
    array([0.75])
    """
    weights = _attention(attention)
    seq = weights.shape[-1]
    offset = whole("offset", offset, least=1 - seq, most=seq - 1)
    return _mean_weight(weights, np.eye(seq, k=offset, dtype=np.bool_))


def semantic_score(attention: ArrayLike, wanted: ArrayLike) -> NDArray[np.float64]:
    """The weight a head puts on the keys that a query's content asks for, on average.

    The mean over queries of the total of ``attention`` where ``wanted`` is true, wherever those
    keys stand; queries that want none are left out. With ``tokens[:, None] == tokens`` less its
    diagonal it measures a head that looks for the same token, with ``tokens == apostrophe``
    broadcast over queries the paper's apostrophe head. (Round and Round We Go 2410.06205 names
    semantic heads in section 6 and gives them no number; this is the one its Theorem 6.1 bounds.)

    Args:
        attention: Weights after the softmax, ``[..., heads, seq, seq]``, queries before keys.
        wanted: Bool ``[..., seq, seq]``, broadcast over the leading dimensions, without heads.

    Returns:
        float64 ``[heads]``. Compare it with the share of keys that are wanted, which is what a head
        that looks nowhere in particular gets.

    Raises:
        TensorError: If the shapes or dtypes do not fit, or no query wants a key.

    >>> tokens = np.array([7, 5, 7])
    >>> same = (tokens[:, None] == tokens) & ~np.eye(3, dtype=bool)
    >>> semantic_score([[[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.75, 0.0, 0.25]]], np.tril(same))
    array([0.75])
    """
    weights = _attention(attention)
    marked = np.asarray(wanted)
    queries = weights.shape[:-3] + weights.shape[-2:]
    try:
        fits = np.broadcast_shapes(marked.shape, queries) == queries
    except ValueError:
        fits = False
    if marked.dtype != np.bool_ or marked.ndim < 2 or not fits:
        raise TensorError(
            f"wanted must be bool and broadcast to {list(queries)}, the shape of attention without "
            f"its heads, got {marked.dtype} {list(marked.shape)}"
        )
    if not marked.any():
        raise TensorError("wanted must mark a key for some query, got no True at all")
    return _mean_weight(weights, marked)


def _mean_weight(weights: NDArray[np.float64], marked: NDArray[np.bool_]) -> NDArray[np.float64]:
    """The mean, over the queries that have a marked key, of the weight on those keys."""
    marked = np.broadcast_to(marked, weights.shape[:-3] + weights.shape[-2:])
    # a query without a marked key adds nothing to the sum
    on_marked = np.where(marked[..., None, :, :], weights, 0.0).sum((-2, -1))
    asking = np.count_nonzero(marked.any(-1))
    return on_marked.reshape(-1, weights.shape[-3]).sum(0) / asking


def _attention(attention: ArrayLike) -> NDArray[np.float64]:
    weights = _real("attention", attention)
    if weights.ndim < 3 or weights.shape[-1] != weights.shape[-2] or 0 in weights.shape:
        raise TensorError(
            "attention must be [..., heads, seq, seq] with one token at least, "
            f"got shape {list(weights.shape)}; a cached query sees more keys than queries: "
            "give the attention of a whole sequence"
        )
    return weights


def _real(name: str, value: Any) -> NDArray[np.float64]:
    array = np.asarray(value)
    if array.dtype.kind not in "iuf":
        raise TensorError(f"{name} must hold real numbers, got {array.dtype}")
    return array.astype(np.float64)
