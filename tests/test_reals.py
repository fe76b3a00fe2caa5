"""Decimals carry 60 digits, and one rounding leads from them to float32."""

from __future__ import annotations

import decimal
from decimal import Decimal

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasor._reals import PI, PRECISION, cos_sin_of_turns, in_reals, nearest_float32

from . import oracle

LARGEST = float(np.finfo(np.float32).max) / 2
# as every caller has it: compared in 60 digits
nearest = in_reals(nearest_float32)


@mpmath.workdps(100)
def exactly(value: Decimal) -> mpmath.mpf:
    """A Decimal as an mpf, through its digits."""
    return mpmath.mpf(str(value))


@mpmath.workdps(100)
def test_pi_has_eighty_decimals() -> None:
    """Twenty more than any result keeps, none of them rounded."""
    assert mpmath.nstr(mpmath.pi, 95).startswith(str(PI))
    assert len(str(PI)) == len("3.") + 80


@pytest.mark.parametrize(
    "turns",
    [
        *("0", "1e-300", "0.1", "0.125", "0.25", "-0.25", "0.375", "1/3", "0.5", "-0.61", "0.75"),
        *("17.9", "1234567890123456789.125", "-98765432109876543210.3"),
    ],
)
@mpmath.workdps(100)
def test_cosine_and_sine_are_good_to_55_digits(turns: str) -> None:
    """Any number of turns, either way, also on the quarters where one of the two is zero."""
    value = Decimal(1) / 3 if turns == "1/3" else Decimal(turns)
    cos, sin = cos_sin_of_turns(value)
    angle = 2 * mpmath.pi * exactly(value)
    bound = mpmath.mpf(10) ** -(PRECISION - 5)
    assert abs(exactly(cos) - mpmath.cos(angle)) < bound
    assert abs(exactly(sin) - mpmath.sin(angle)) < bound


@mpmath.workdps(400)
def test_a_tiny_sine_keeps_its_digits() -> None:
    """The error is relative, so that a sine of 1e-300 still rounds to the right float."""
    _, sin = cos_sin_of_turns(Decimal("1e-300"))
    exact = mpmath.sin(2 * mpmath.pi * mpmath.mpf("1e-300"))
    assert abs(exactly(sin) / exact - 1) < mpmath.mpf(10) ** -55


def test_quarters_of_a_turn_are_exact() -> None:
    """No digit of pi is in the cosine of a quarter turn."""
    quarters = [cos_sin_of_turns(Decimal(n) / 4) for n in range(-1, 4)]
    assert quarters == [(0, -1), (1, 0), (0, 1), (-1, 0), (0, -1)]


def test_the_precision_holds_inside_and_ends_outside() -> None:
    """A caller's own decimal context is neither used nor changed."""
    with decimal.localcontext(decimal.Context(prec=7)):
        inside = in_reals(lambda: Decimal(1) / 3)()
        outside = Decimal(1) / 3
    assert len(inside.as_tuple().digits) == PRECISION
    assert len(outside.as_tuple().digits) == 7


@given(st.floats(-LARGEST, LARGEST), st.integers(-(10**9), 10**9))
def test_the_nearest_float32_is_the_nearest(value: float, nudge: int) -> None:
    """Against rounding with integers, for reals that are no float64 themselves."""
    real = Decimal(value) * (1 + Decimal(nudge) * Decimal(10) ** -30)
    real = max(min(real, Decimal(LARGEST)), -Decimal(LARGEST))
    assert float(nearest(real)) == oracle.float32(exactly(real))


@pytest.mark.parametrize(
    ("tie", "even"),
    [
        (1 + 2.0**-24, 1.0),
        (1 + 3 * 2.0**-24, 1 + 2.0**-22),
        (-1 - 2.0**-24, -1.0),
        (1.5 * 2.0**-149, 2.0**-148),
        (0.5 * 2.0**-149, 0.0),
    ],
)
def test_a_tie_goes_to_the_even_float32(tie: float, even: float) -> None:
    """As IEEE 754 rounds, also among subnormal numbers."""
    assert float(nearest(Decimal(tie))) == even


@pytest.mark.parametrize(("side", "expected"), [(1, 1 + 2.0**-23), (-1, 1.0)])
def test_a_real_beside_a_tie_is_not_rounded_twice(side: int, expected: float) -> None:
    """1 + 2**-24 +- 1e-40 is a tie in float64 and none in the reals."""
    with decimal.localcontext(decimal.Context(prec=60)):
        beside = 1 + Decimal(2) ** -24 + side * Decimal(10) ** -40
    assert float(beside) == 1 + 2.0**-24
    assert float(nearest(beside)) == expected
