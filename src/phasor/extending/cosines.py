"""The sum of all pairs' cosines at each distance, and where it becomes negative."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from phasor.numpy import phasors
from phasor.rope import Rope

_AT_ONCE = 1 << 16  # distances in one matrix product: a megabyte of results
_BATCH = 1 << 16  # distances computed before each check for a negative sum


def cosine_sums(rope: Rope, count: int, start: int = 0) -> NDArray[np.float64]:
    """``C(r) = sum_k cos(r * inv_freq[k])`` for consecutive distances ``r``.

    Float64 ``[count]`` from distance ``start`` on, along every axis, as in text. A distance is the
    start of its block plus an offset, and ``R(a + b) = R(a) R(b)``: cosines are computed for all
    starts and for the offsets in one block, and a matrix product combines them. Each factor is
    within ``sqrt(2) * COS_SIN_ERROR``, at any int64 distance, and a complex sum of n products
    within ``sqrt(2) * (n + 2)`` roundings (Higham 2002, section 3.6), so every result is within
    ``(4e-15 + num_pairs * 4 * 2**-53) * num_pairs`` of the real number.

    >>> print(cosine_sums(Rope(head_dim=4, pairing="half", base=100.0), 3).round(4))
    [2.     1.5353 0.5639]
    """
    block = 1 << (
        count.bit_length() // 2
    )  # equally many offsets and starts need the fewest cosines
    # [num_pairs, offsets in a block], and the starts of the blocks as rows against it
    block_phasors = phasors(rope, np.arange(block)).T.copy()
    blocks = [start + offset for offset in range(0, count, block)]
    products = np.empty((len(blocks), block), dtype=np.complex128)
    for first in range(0, len(blocks), _AT_ONCE // block):
        rows = slice(first, first + _AT_ONCE // block)
        np.matmul(phasors(rope, np.array(blocks[rows])), block_phasors, out=products[rows])
    return products.real.reshape(-1)[:count]


def find_first_negative(rope: Rope, count: int, unrotated_pairs: float = 0.0) -> int | None:
    """The first distance below ``count`` where ``C(r) + unrotated_pairs`` is negative, if any."""
    # ``2 * unrotated_pairs`` coordinates are not rotated, so their products are constant
    for start in range(0, count, _BATCH):
        negative = cosine_sums(rope, min(_BATCH, count - start), start) + unrotated_pairs < 0
        if negative.any():
            return start + int(negative.argmax())
    return None
