"""What a mean over pairs tends to as the pairs of a spectrum grow more."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from phasor._checks import number
from phasor.angles import checked_positions


def smooth_kernel(base: float, distances: ArrayLike) -> NDArray[np.complex128]:
    """Mean of ``exp(i r inv_freq)`` over a spectrum of infinitely many pairs.

    The integral of ``exp(i r base**-t)`` over ``t`` from 0 to 1, which is
    ``(Ci(r) - Ci(r / base) + i (Si(r) - Si(r / base))) / ln(base)``: the real part smooths
    ``C(r) / n`` (Su, spaces.ac.cn 10122), the imaginary part the mean sine (RoPE++ 2512.07525,
    whose printed curve lacks the ``1 / ln(base)``). A head of 128 at base 10000 follows it to
    0.02 up to a distance of 33 only: beyond, its fast pairs are too few to cancel, and below
    100000 single distances are off by up to 0.28 in the cosine and 0.35 in the sine.

    Args:
        base: The base of the spectrum.
        distances: Integers or floats ``[...]``.

    Returns:
        complex128 ``[...]``, within 1e-14.

    Raises:
        PositionError: If the distances are not numbers.
        SpecError: If ``base`` is not above 1.

    >>> smooth_kernel(10_000.0, [0, 10, 1000]).round(5)
    array([1.     +0.j     , 0.68239+0.17994j, 0.18769+0.15963j])
    """
    log_base = np.log(number("base", base, above=1))
    r = checked_positions(distances).astype(np.float64)
    size = np.where(r == 0, 1.0, np.abs(r))
    between = _exponential_integral(size) - _exponential_integral(size / base)
    found = np.asarray(between / log_base)
    found[r < 0] = found[r < 0].conj()
    found[r == 0] = 1
    return found


def _exponential_integral(x: NDArray[np.float64]) -> NDArray[np.complex128]:
    """``Ci(x) + i Si(x)`` for ``x > 0`` (Abramowitz & Stegun 5.2.14-16 and 5.1.22)."""
    near = np.minimum(x, 4.0)
    term = np.ones_like(near, dtype=np.complex128)
    series = np.euler_gamma + np.log(near) + 0j
    for n in range(1, 41):
        term = term * (1j * near / n)
        series += term / n
    z = 1j * np.maximum(x, 4.0)
    tail = z + 161
    for n in range(80, 0, -1):
        tail = z + (2 * n - 1) - n * n / tail
    return np.where(x < 4.0, series, 0.5j * np.pi - (np.exp(-z) / tail).conj())
