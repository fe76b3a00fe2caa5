"""How far a score at a distance between two whole ones can be from the line through them."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from phasor.angles import checked_positions
from phasor.errors import SpecError
from phasor.numpy import score
from phasor.papers.decay import decay, one_axis, pair_products
from phasor.rope import Rope


def interpolation_error(
    q: ArrayLike, k: ArrayLike, distance: ArrayLike, rope: Rope
) -> NDArray[np.float64]:
    """How far the score at a distance is from the line through the whole distances around it.

    ``|score(r) - (1 - w) score(floor(r)) - w score(floor(r) + 1)|`` with ``w = r - floor(r)``:
    the quantity of Position Interpolation's theorem (Chen et al. 2306.15595, theorem 2.1).

    Args:
        q: ``[..., head_dim]``, before rotation.
        k: ``[..., head_dim]``, before rotation.
        distance: Broadcast against the leading dimensions.
        rope: What rotates, along one axis.

    Returns:
        float64, the broadcast shape.

    Raises:
        TensorError: If ``q`` or ``k`` does not end in ``head_dim`` or is not real.
        PositionError: If the distances are not numbers.
        SpecError: If the rope has several axes, or a rule that has not picked its law.

    >>> ones = np.ones(128)
    >>> print(interpolation_error(ones, ones, 0.5, Rope(head_dim=128, pairing="half")).round(4))
    0.9186
    """
    one_axis(rope)
    low, rest = _between(distance)
    line = (1 - rest) * score(q, k, low, rope) + rest * score(q, k, low + 1, rope)
    return np.abs(score(q, k, low + rest, rope) - line)


def interpolation_bound(
    q: ArrayLike, k: ArrayLike, distance: ArrayLike, rope: Rope
) -> NDArray[np.float64]:
    """An upper bound on `interpolation_error`, correct where the published one is not.

    ``max_k |h[k]| * sum_k inv_freq[k]**2 * w (1 - w) / 2`` with ``h[k]`` the product of a query's
    pair and the conjugate of a key's and ``w = r - floor(r)``: the second derivative of the score
    is at most that sum. Without a law the sum is
    ``(1 - base**-2) / (1 - base ** (-4 / rotary_dim))``, and the bound half way is
    ``rotary_dim max|h| / 256.108`` at width 128 and base 10000.

    Shapes and errors are those of `interpolation_error`.

    >>> ones = np.ones(128)
    >>> bound = interpolation_bound(ones, ones, 0.5, Rope(head_dim=128, pairing="half"))
    >>> print((256 / bound).round(3))
    256.108
    """
    one_axis(rope)
    _, rest = _between(distance)
    return _largest(q, k, rope) * (rope.inv_freq**2).sum() * rest * (1 - rest) / 2


def printed_interpolation_bound(
    q: ArrayLike, k: ArrayLike, distance: ArrayLike, rope: Rope
) -> NDArray[np.float64]:
    """The bound as Position Interpolation prints it; it does not hold. Use `interpolation_bound`.

    ``rotary_dim max_k |h[k]| w (1 - w) / (8 ln(base))`` (Chen et al. 2306.15595, theorem 2.1),
    half way ``rotary_dim max|h| / 294.73`` at base 10000. The proof takes
    ``c**x <= 1 + x ln(c)``, which is the wrong way round for a convex function: with
    ``q = k = (1, 1, ...)`` of width 128 the error at 0.5 is 1.0575 times the bound.

    Shapes and errors are those of `interpolation_error`; and a SpecError for a rope with a law or
    explicit frequencies, of which the theorem does not speak.

    >>> ones, rope = np.ones(128), Rope(head_dim=128, pairing="half")
    >>> printed = printed_interpolation_bound(ones, ones, 0.5, rope)
    >>> error = interpolation_error(ones, ones, 0.5, rope)
    >>> print((256 / printed).round(2), (error / printed).round(4))
    294.73 1.0575
    """
    one_axis(rope)
    if rope.base is None or rope.scaling is not None:
        raise SpecError(
            "rope must have plain frequencies, of which the theorem speaks, "
            f"got {'explicit inv_freq' if rope.base is None else rope.scaling}; "
            "interpolation_bound takes any"
        )
    _, rest = _between(distance)
    steepness = rope.rotary_dim / (8 * math.log(rope.base))
    return _largest(q, k, rope) * steepness * rest * (1 - rest)


def extrapolation_ratio(rope: Rope, distances: ArrayLike) -> NDArray[np.float64]:
    """How many times the bound at a distance exceeds the `interpolation_bound` half way.

    ``2 B(r) / (sum_k inv_freq[k]**2 / 8)`` with ``B(r) = sum_j |S_j(r)|``, which is ``n`` times
    `decay` (Chen et al. 2306.15595). "At least 600 times" stands there for
    ``2 * 294.73``, with the printed bound and ``B(r) >= rotary_dim``. With the correct bound it
    is ``512 B(r) / rotary_dim`` at width 128 and base 10000, and ``B(r) >= rotary_dim`` ends at
    4861: 571 times up to 4096, 309 times up to 65536. It compares bounds, not errors.

    Args:
        rope: What rotates, along one axis.
        distances: Integers or floats ``[...]``.

    Returns:
        float64 ``[...]``.

    Raises:
        PositionError: If the distances are not numbers.
        SpecError: If the rope has several axes, a rule that has not picked its law, or only pairs
            that stand still.

    >>> rope = Rope(head_dim=128, pairing="half")
    >>> print(extrapolation_ratio(rope, np.arange(4097)).min().round(1))
    571.6
    """
    one_axis(rope)
    steepness = (rope.inv_freq**2).sum()
    if steepness == 0:
        raise SpecError("rope must have a pair that turns, got inv_freq of zeros")
    return 16 * rope.num_pairs * decay(rope, distances) / steepness


def _between(distance: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The whole distance below, and what is left."""
    given = checked_positions(distance).astype(np.float64)
    low = np.floor(given)
    return low, given - low


def _largest(q: ArrayLike, k: ArrayLike, rope: Rope) -> NDArray[np.float64]:
    return np.abs(pair_products(q, k, rope)[0]).max(-1)
