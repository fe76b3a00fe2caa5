"""Measured errors of angle recipes, against the published ones."""

import numpy as np
import pytest

from phasor import Rope, SpecError
from phasor.analysis import RECIPES, angle_errors
from phasor.angles import ROW_ERROR_20, ROW_ERROR_40
from phasor.figures import precision_figure, wavelength_figure

ROPE = Rope(head_dim=128, pairing="half", base=10_000.0)


@pytest.mark.parametrize(
    ("low", "high", "published"),
    [(1000, 1100, 5.2e-5), (32768, 33768, 1.4e-3), (131072, 132072, 6.2e-3)],
)
def test_float32_angles_lose_what_is_published(low, high, published):
    """The usual recipe is off by the published amounts, to a factor of two for other draws."""
    worst = angle_errors(ROPE, np.arange(low, high), "float32 angle").max()
    assert published / 2 < worst < published * 2


@pytest.mark.parametrize(("bits", "bound"), [(20, ROW_ERROR_20), (40, ROW_ERROR_40)])
def test_digit_rows_stay_within_their_bound(bits, bound):
    """Products of float32 digits never pass the derived bound."""
    positions = np.random.default_rng(0).integers(-(2**bits) + 1, 2**bits, 5000)
    assert angle_errors(ROPE, positions, "float32 rows").max() <= bound


def test_float64_rows_are_sixteen_digits_anywhere():
    """Four float64 digits and three products are within 3 * sqrt(5) + 4 * 8 roundings."""
    positions = np.random.default_rng(0).integers(-(2**40) + 1, 2**40, 5000)
    assert angle_errors(ROPE, positions, "float64 rows").max() <= 39 * 2.0**-53


def test_an_unknown_recipe_is_refused():
    """The error lists the recipes."""
    with pytest.raises(SpecError, match="recipe must be one of 'float32 angle'"):
        angle_errors(ROPE, 1, "float16 angle")


def test_the_precision_figure_draws_the_errors_it_names():
    """Each curve holds the maximum over the draws of its recipe."""
    figure = precision_figure(ROPE, bits=12, draws=8)
    lines = figure.axes[0].lines
    assert len(lines) == len(RECIPES)
    draw = np.random.default_rng(0)
    octaves = [draw.integers(2**b, 2 ** (b + 1), 8) for b in range(12)]
    usual = [angle_errors(ROPE, octave, "float32 angle").max() for octave in octaves]
    np.testing.assert_array_equal(lines[0].get_ydata(), usual)


def test_the_wavelength_figure_draws_wavelengths():
    """Curves are 2 pi base**(2k/d), and the context is a line."""
    figure = wavelength_figure({"plain": ROPE}, context=8192)
    curve, context = figure.axes[0].lines
    expected = [2 * np.pi * 10_000.0 ** (k / 64) for k in range(64)]
    np.testing.assert_allclose(curve.get_ydata(), expected, rtol=1e-14)
    assert list(context.get_ydata()) == [8192, 8192]
