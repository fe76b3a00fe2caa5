"""Wavelengths of the pairs, and the turns they make within a context."""

from __future__ import annotations

from decimal import Decimal
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from phasor._checks import number
from phasor._reals import PI, in_reals
from phasor.rope import Rope, real_inv_freq


@lru_cache(maxsize=256)
@in_reals
def real_turns(rope: Rope) -> tuple[Decimal, ...]:
    """Turns per position of each pair, with 60 digits."""
    return tuple(f / (2 * PI) for f in real_inv_freq(rope))


def wavelengths(rope: Rope) -> NDArray[np.float64]:
    """Positions per full turn of every pair, ``2 pi / inv_freq``; infinite where a frequency is 0.

    >>> wavelengths(Rope(head_dim=4, pairing="half", base=100.0)).round(3)
    array([ 6.283, 62.832])
    """
    return np.array([float(1 / t) if t else np.inf for t in real_turns(rope)])


def turns(rope: Rope, context: float) -> NDArray[np.float64]:
    """Full turns of every pair over ``context`` positions, ``context * inv_freq / 2 pi``.

    Below 1 a pair completes no turn, so a longer context shows the model new angles.

    Raises:
        SpecError: If ``context`` is not a positive number.

    >>> turns(Rope(head_dim=4, pairing="half", base=100.0), 128).round(3)
    array([20.372,  2.037])
    """
    length = Decimal(number("context", context, above=0))
    return np.array([float(length * t) for t in real_turns(rope)])
