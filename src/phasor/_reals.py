"""Decimal arithmetic with 60 digits, in which frequencies are computed.

A position may be 2**63, so an angle correct to 1e-15 needs a frequency with at least 34 digits.
``decimal`` has exp, ln and powers at any precision; this file adds pi, the cosine and the sine.
"""

from __future__ import annotations

import decimal
from collections.abc import Callable
from decimal import Decimal
from functools import wraps
from typing import TypeVar

import numpy as np

PRECISION = 60
# 80 decimals, 20 more than PRECISION
PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899")

_T = TypeVar("_T", bound=Callable[..., object])


def in_reals(function: _T) -> _T:
    """Decorate ``function`` to compute its Decimals with ``PRECISION`` digits."""

    @wraps(function)
    def wrapped(*args: object, **kwargs: object) -> object:
        with decimal.localcontext(decimal.Context(prec=PRECISION)):
            return function(*args, **kwargs)

    return wrapped  # pyright: ignore[reportReturnType] - the wrapper keeps the signature


def powers(base: Decimal, exponent: Decimal, count: int) -> tuple[Decimal, ...]:
    """``base ** (exponent * k)`` for ``k`` from 0 to ``count - 1``, one multiplication each.

    >>> [int(power) for power in powers(Decimal(9), Decimal("0.5"), 4)]
    [1, 3, 9, 27]
    """
    with decimal.localcontext() as context:
        context.prec += (
            5  # extra digits, so that thousands of multiplications leave the others correct
        )
        step, power, products = base**exponent, Decimal(1), list[Decimal]()
        for _ in range(count):
            products.append(power)
            power *= step
    return tuple(+power for power in products)  # the unary plus rounds


@in_reals
def cos_sin_of_turns(turns: Decimal) -> tuple[Decimal, Decimal]:
    """Cosine and sine of ``2 pi turns``, by their power series."""
    # whole quarter turns are taken off: at most an eighth is left, where 25 terms give 60 digits
    quarters = (turns * 4).to_integral_value()
    angle = (turns - quarters / 4) * 2 * PI
    cos = sin = Decimal(0)
    term, order = Decimal(1), 0
    while abs(term) > Decimal(10) ** -(PRECISION + 5) * abs(angle or 1):
        if order % 2 == 0:
            cos += term if order % 4 == 0 else -term
        else:
            sin += term if order % 4 == 1 else -term
        order += 1
        term *= angle / order
    quarter = int(quarters) % 4
    return ((cos, sin), (-sin, cos), (-cos, -sin), (sin, -cos))[quarter]


@in_reals
def nearest_float32(value: Decimal) -> np.float32:
    """The float32 closest to ``value``, rounded once (float64 on the way would round twice)."""
    guess = np.float32(float(value))
    below, above = (np.nextafter(guess, np.float32(end)) for end in (-np.inf, np.inf))
    candidates = [x for x in (below, guess, above) if np.isfinite(x)]
    # an exact tie goes to the even significand, as IEEE 754 rounds
    return min(
        candidates, key=lambda x: (abs(Decimal(float(x)) - value), int(x.view(np.int32)) & 1)
    )
