"""Sums over pairs at many distances in a row: what decay curves and heads' gaps are made of."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from phasor.angles import cos_sin
from phasor.rope import Rope

_BLOCK = 1024  # distances that share one exactly computed start
_STARTS = 64  # blocks multiplied at once: a megabyte of answers


def kernel(
    rope: Rope, count: int, weights: NDArray[Any] | None = None, start: int = 0
) -> NDArray[np.complex128]:
    """``sum_k weights[k] * exp(1j * direction * r * inv_freq[k])`` for distances ``r`` in a row.

    The sum over pairs that turns a query and a key into their score (Su et al. 2104.09864,
    eq. 35); with weights of 1 its real part is ``C(r) = sum_k cos(r * inv_freq[k])``. A distance
    is the start of its block plus a rest, and ``R(a + b) = R(a) R(b)``: only the starts and the
    rests of one block need cosines, and a matrix product does the others.

    Each of the two factors is within ``sqrt(2) * COS_SIN_ERROR``, at any int64 distance, and a
    complex sum of n products within ``sqrt(2) * (n + 2)`` roundings (Higham 2002, section 3.6),
    so the answer is within ``(4e-15 + num_pairs * 4 * 2**-53) * sum(abs(weights))``.

    Args:
        rope: What rotates. Where it has several axes, ``r`` is along every one, as in text.
        count: How many distances.
        weights: Real or complex ``[num_pairs]``; ones unless given.
        start: The first distance; they are ``start, start + 1, ..., start + count - 1``.

    Returns:
        complex128 ``[count]``.

    Raises:
        PositionError: If a distance does not fit int64.
        SpecError: If ``rope.scaling`` is a rule that has not picked its law.

    >>> print(kernel(Rope(head_dim=4, pairing="half", base=100.0), 3).real.round(4))
    [2.     1.5353 0.5639]
    """
    inside = phasors(rope, np.arange(min(count, _BLOCK))).T.copy()
    if weights is not None:
        inside *= weights[:, None]
    blocks = [start + offset for offset in range(0, count, _BLOCK)]
    found = np.empty((len(blocks), inside.shape[1]), dtype=np.complex128)
    for first in range(0, len(blocks), _STARTS):
        rows = slice(first, first + _STARTS)
        np.matmul(phasors(rope, np.array(blocks[rows])), inside, out=found[rows])
    return found.reshape(-1)[:count]


def phasors(rope: Rope, distances: NDArray[np.int64]) -> NDArray[np.complex128]:
    """``exp(1j * direction * r * inv_freq[k])`` at any ``distances`` ``[P]``, along every axis.

    Returns:
        complex128 ``[P, num_pairs]``, both parts within `phasor.angles.COS_SIN_ERROR`.

    >>> print(phasors(Rope(head_dim=2, pairing="half"), np.array([1])).round(4))
    [[0.5403+0.8415j]]
    """
    n_axes = rope.axes.n_axes
    moved = distances if n_axes == 1 else np.repeat(distances[:, None], n_axes, axis=1)
    cos, sin = cos_sin(rope, moved)
    return cos + 1j * sin
