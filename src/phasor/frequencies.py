"""How fast each pair turns: frequencies, wavelengths, and turns within a context."""

from __future__ import annotations

from decimal import Decimal
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from phasor._checks import number
from phasor._reals import PI, in_reals, nearest_float32, powers
from phasor.errors import SpecError
from phasor.spec import Rope

# of the 60 digits, those after the point have to hold 128 bits of a turn
_FASTEST = Decimal(10) ** 15


@lru_cache(maxsize=256)
@in_reals
def real_inv_freq(rope: Rope) -> tuple[Decimal, ...]:
    """The frequency of every pair as a real number to 60 digits.

    Raises:
        SpecError: If ``rope.scaling`` is a rule, or a law that does not fit this spectrum, or a
            frequency is beyond 1e15.
    """
    law = rope.law()
    if rope.inv_freq is not None:
        scaled = tuple(map(Decimal, rope.inv_freq))
    else:
        base = rope.base or 0.0
        scaled = ()
        for pairs in rope.axes.spectra(rope.num_pairs):
            plain = _plain(base, pairs)
            scaled += plain if law is None else law.apply(plain, Decimal(base))
    if max(scaled) > _FASTEST:
        raise SpecError(
            f"inv_freq must be at most {_FASTEST:.0e} radians per position, got {max(scaled):.3e}; "
            "check inv_freq, or the factors of the scaling law"
        )
    if rope.inv_freq_dtype == "float32":
        return tuple(Decimal(float(nearest_float32(f))) for f in scaled)
    return scaled


@lru_cache(maxsize=64)
@in_reals
def _plain(base: float, pairs: int) -> tuple[Decimal, ...]:
    return powers(Decimal(base), -1 / Decimal(pairs), pairs)


@lru_cache(maxsize=256)
@in_reals
def real_turns(rope: Rope) -> tuple[Decimal, ...]:
    """How much of a turn each pair makes per position, to 60 digits."""
    return tuple(f / (2 * PI) for f in real_inv_freq(rope))


def inv_freq(rope: Rope) -> NDArray[np.float64]:
    """Angular step of every pair, in radians per position: ``base ** (-2k / rotary_dim)``, scaled.

    (Su et al. 2104.09864, section 3.2.2, with ``k`` counted from 0.) Computed in 60-digit
    decimals and rounded once.

    Returns:
        float64 ``[rope.num_pairs]``. Multiply nothing by `Rope.direction`: that is in the angles.

    Raises:
        SpecError: If ``rope.scaling`` is a rule that has not picked its law.

    >>> inv_freq(Rope(head_dim=4, pairing="half", base=100.0))
    array([1. , 0.1])
    """
    return np.array([float(f) for f in real_inv_freq(rope)])


def wavelengths(rope: Rope) -> NDArray[np.float64]:
    """Positions per full turn of every pair, ``2 pi / inv_freq``; infinite where nothing turns.

    >>> wavelengths(Rope(head_dim=4, pairing="half", base=100.0)).round(3)
    array([ 6.283, 62.832])
    """
    return np.array([float(1 / t) if t else np.inf for t in real_turns(rope)])


def turns(rope: Rope, context: float) -> NDArray[np.float64]:
    """Full turns of every pair over ``context`` positions, ``context * inv_freq / 2 pi``.

    Below 1, a pair never comes round within the context: what lies beyond is new to the model.

    Raises:
        SpecError: If ``context`` is not a positive number.

    >>> turns(Rope(head_dim=4, pairing="half", base=100.0), 128).round(3)
    array([20.372,  2.037])
    """
    length = Decimal(number("context", context, above=0))
    return np.array([float(length * t) for t in real_turns(rope)])
