"""The weights of linear attention when only its numerator is rotated."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from phasor.errors import TensorError
from phasor.numpy import rotate
from phasor.rope import Rope


def linear_weights(query: ArrayLike, keys: ArrayLike, rope: Rope) -> NDArray[np.float64]:
    """Weights of all tokens for the last query, in linear attention with a rotated numerator.

    ``w_n = (R(N-1) φ(q) · R(n) φ(k_n)) / Σ_j φ(q) · φ(k_j)`` with ``φ(x) = elu(x) + 1``
    (RoFormer 2104.09864, eq. 19). They are not a distribution: some are negative, and they do not
    sum to 1. The mean sum over independent random keys is
    ``cosine(rope, np.arange(N), "aligned").mean()``: where features have the same distribution in
    all coordinates, their mean is a vector of equal entries, and rotated to many positions these
    cancel. That is exact in the limit of large ``N``; the sum for a single query differs by a few
    hundredths.

    Args:
        query: ``[head_dim]``, before the feature map; it stands at position ``N - 1``.
        keys: ``[N, head_dim]``, at positions 0 to ``N - 1``.
        rope: What rotates.

    Returns:
        float64 ``[N]``.

    >>> rope = Rope(head_dim=64, pairing="half")
    >>> draw = np.random.default_rng(0)
    >>> weights = linear_weights(draw.standard_normal(64), draw.standard_normal((4096, 64)), rope)
    >>> bool(weights.min() < 0 and weights.sum() < 0.3)
    True
    >>> from phasor.papers import cosine
    >>> print(cosine(rope, np.arange(4096), "aligned").mean().round(3))
    0.125
    """
    q, k = np.asarray(query, np.float64), np.asarray(keys, np.float64)
    if q.shape != (rope.head_dim,) or k.ndim != 2 or k.shape[1] != rope.head_dim or not len(k):
        raise TensorError(
            f"query must be [head_dim] and keys [N, head_dim] with head_dim {rope.head_dim} and N "
            f"from 1 on, got shapes {list(q.shape)} and {list(k.shape)}"
        )
    features_q, features_k = _elu_plus_one(q), _elu_plus_one(k)
    rotated_q = rotate(features_q, len(k) - 1, rope)
    rotated_k = rotate(features_k[:, None], np.arange(len(k)), rope)[:, 0]
    return (rotated_k @ rotated_q) / (features_k @ features_q).sum()


def _elu_plus_one(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.exp(np.minimum(x, 0)) + np.maximum(x, 0)
