"""Refusals say which argument, what was expected and what came."""

from __future__ import annotations

import inspect
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from phasor import _checks, errors
from phasor._checks import choice, number, numbers, short_repr, whole
from phasor.errors import PhasorError, PositionError, SpecError


def test_every_error_is_a_value_error_of_one_family() -> None:
    """Catching PhasorError catches them all, and so does catching ValueError."""
    classes = [one for _, one in inspect.getmembers(errors, inspect.isclass)]
    kinds = [kind for kind in classes if not issubclass(kind, Warning)]
    assert {kind.__name__ for kind in kinds} == {
        *("PhasorError", "SpecError", "PositionError", "TensorError", "BackendError"),
        *("ConfigError", "CheckpointError", "VerificationError"),
    }
    assert all(issubclass(kind, PhasorError) for kind in kinds)
    assert issubclass(PhasorError, ValueError)


def test_a_long_value_is_shown_cut() -> None:
    """A message stays one line, whatever was passed."""
    assert short_repr("short") == "'short'"
    text = short_repr(list(range(1000)))
    assert len(text) == 80
    assert text.startswith("[0, 1, 2,")
    assert text.endswith("...")


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)], ids=["int", "int64", "uint8"])
def test_a_whole_number_becomes_an_int(value: Any) -> None:
    """NumPy's integers are integers."""
    assert whole("n", value, least=3) == 3
    assert type(whole("n", value, least=3)) is int


@pytest.mark.parametrize("value", [2, True, 3.0, "3", None, math.nan], ids=repr)
def test_what_is_not_a_whole_number_is_refused(value: Any) -> None:
    """Too small, bools, floats and strings."""
    with pytest.raises(SpecError) as caught:
        whole("n", value, least=3)
    assert str(caught.value) == f"n must be a whole number >= 3, got {value!r}"


def test_the_kind_of_error_is_the_callers() -> None:
    """Positions and specs share the checks and not the class."""
    with pytest.raises(PositionError, match=r"^n must be a whole number >= 0, got -1$"):
        whole("n", -1, least=0, error=PositionError)
    with pytest.raises(PositionError, match=r"^x must be a finite number, got nan$"):
        number("x", math.nan, error=PositionError)


@pytest.mark.parametrize("value", [2, 2.0, np.float32(2), Fraction(2)], ids=lambda v: str(type(v)))
def test_a_number_becomes_a_float(value: Any) -> None:
    """Anything real and finite within the bounds, the closed bounds included."""
    given = number("x", value, above=1, least=2, most=2)
    assert given == 2.0
    assert type(given) is float


@pytest.mark.parametrize(
    ("bounds", "value", "wanted"),
    [
        ({}, math.nan, "a finite number"),
        ({}, -math.inf, "a finite number"),
        ({}, "1", "a finite number"),
        ({}, None, "a finite number"),
        ({}, True, "a finite number"),
        ({}, 1j, "a finite number"),
        ({"above": 1}, 1.0, "a finite number > 1"),
        ({"least": 0}, -0.5, "a finite number >= 0"),
        ({"least": 0, "most": 1}, 1.25, "a finite number >= 0 and <= 1"),
    ],
    ids=repr,
)
def test_what_is_not_such_a_number_is_refused(
    bounds: dict[str, float], value: Any, wanted: str
) -> None:
    """The text says the bounds that there are."""
    with pytest.raises(SpecError) as caught:
        number("x", value, **bounds)
    assert str(caught.value) == f"x must be {wanted}, got {value!r}"


def test_an_int_too_large_for_a_float_is_refused() -> None:
    """It is infinite as a float, and never an OverflowError."""
    with pytest.raises(SpecError, match=r"^x must be a finite number, got 1000"):
        number("x", 10**400)


def test_numbers_become_a_tuple_of_floats() -> None:
    """Lists, tuples, arrays and generators alike."""
    for given in ([1, 2], (1, 2), np.array([1, 2]), iter([1, 2])):
        assert numbers("x", given, above=0) == (1.0, 2.0)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ("12", "x must be a sequence of numbers, got '12'"),
        (b"12", "x must be a sequence of numbers, got b'12'"),
        (7, "x must be a sequence of numbers, got 7"),
        ([], "x must hold at least one number, got none"),
        ([1, 0], "x[1] must be a finite number > 0, got 0"),
        ([1, None], "x[1] must be a finite number > 0, got None"),
        (np.array(7.0), "x must be a sequence of numbers, got array(7.)"),
        (
            [np.array(7.0)],
            "x[0] must be a finite number > 0, got array(7.); call .tolist() on tensors and arrays",
        ),
    ],
    ids=repr,
)
def test_what_are_not_numbers_is_refused(values: Any, text: str) -> None:
    """The message says which of them."""
    with pytest.raises(SpecError) as caught:
        numbers("x", values, above=0)
    assert str(caught.value) == text


@pytest.mark.parametrize("value", ["c", True, 1.0, None], ids=repr)
def test_a_choice_is_of_the_same_type(value: Any) -> None:
    """True and 1.0 equal 1 and are still not it."""
    with pytest.raises(SpecError) as caught:
        choice("x", value, ("a", 1))
    assert str(caught.value) == f"x must be one of 'a', 1, got {value!r}"


def test_a_choice_among_the_options_is_returned() -> None:
    """Any iterable of options will do."""
    assert choice("x", "a", iter(["b", "a"])) == "a"
    assert _checks.choice("x", False, (True, False)) is False
