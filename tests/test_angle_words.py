"""Angles in words of 32 and 64 bits are within the published bounds, at every position."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasor import LayerRopes, Rope, preset, preset_names
from phasor._angle_words import (
    cos_sin_of_words,
    fixed_point_product,
    limbs_of,
    partner_arguments,
    partner_rows,
    words_of,
)
from phasor.angles import axes_of, pair_coordinates
from phasor.scaling import Rule

from . import oracle, strategies
from .oracle import exact_rows, row_error
from .rotation_cases import FLOATS, POSITIONS, POSITIONS_32, ROPES

FLOAT32, FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
FARTHEST = [2**63 - 1, -(2**63), 2**62 + 1, -(2**32) - 1, 2**32, 2**31, -(2**31)]


def rows(
    places: Any, rope: Rope, dtype: np.dtype[Any], gain: float = 1.0, inverse: bool = False
) -> tuple[Any, Any]:
    """Cos and sin in NumPy."""
    words = words_of(pair_coordinates(places, axes_of(rope)), dtype, np)
    return cos_sin_of_words(words, limbs_of(rope, dtype), dtype, np, gain, inverse)


def excess(positions: Any, rope: Rope, dtype: np.dtype[Any]) -> float:
    """The largest error of cos and sin in units of what is allowed."""
    places = np.asarray(positions)
    cos, sin = rows(places, rope, dtype)
    assert cos.dtype == sin.dtype == dtype
    right = exact_rows(rope, positions)
    fastest = float(max(oracle.frequencies(rope)))
    error = np.abs((cos - right.real, sin - right.imag)).max(initial=0.0)
    return float(error) / row_error(dtype.name, positions, fastest)


@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT64], ids=str)
@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_every_frequency_turns_at_its_own_rate(rope: Rope, dtype: np.dtype[Any]) -> None:
    """At integers of 32 and 64 bits, the least among them, and at floats of both."""
    assert excess(np.array(POSITIONS_32, np.int32), rope, dtype) <= 1
    assert excess(np.array([*POSITIONS, *FARTHEST]), rope, dtype) <= 1
    assert excess(np.array(FLOATS), rope, dtype) <= 1
    assert excess(np.array(FLOATS, np.float32), rope, dtype) <= 1


@given(strategies.resolved_ropes(), st.data())
def test_every_rope_is_within_the_bound(rope: Rope, data: st.DataObject) -> None:
    """Of every law, axes, direction and slice, at any position."""
    n_axes = rope.axes.n_axes
    for kind in (strategies.INT64, strategies.FLOAT_POSITIONS):
        row = st.lists(kind, min_size=n_axes, max_size=n_axes) if n_axes > 1 else kind
        positions = np.array(data.draw(st.lists(row, min_size=1, max_size=3)))
        for dtype in (FLOAT32, FLOAT64):
            assert excess(positions, rope, dtype) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_within_the_bound(name: str) -> None:
    """At positions near and far, in both precisions."""
    ropes: LayerRopes = preset(name)
    for rope in {rope for rope in ropes if rope is not None}:
        law = rope.at(131_072) if isinstance(rope.scaling, Rule) else rope
        places = np.array([1, 4095, 131_071, -(2**31), 2**31 - 1, 2**63 - 1, -(2**63)])
        if law.axes.n_axes > 1:
            places = np.stack([np.roll(places, i) for i in range(law.axes.n_axes)], -1)
        for dtype in (FLOAT32, FLOAT64):
            assert excess(places, law, dtype) <= 1


@pytest.mark.parametrize(("word", "half"), [(np.uint32, 16), (np.uint64, 32)])
def test_the_upper_word_of_a_product_is_exact(word: Any, half: int) -> None:
    """At the largest words, and at such that carry from every half."""
    most = 2 ** (2 * half) - 1
    numbers = [most, most - 1, 2**half, 2**half - 1, 2**half + 1, 1, 0, most // 3, most // 7 * 5]
    a, b = np.array(numbers, word)[:, None], np.array(numbers, word)
    found = fixed_point_product(a, word(0), b, np)
    assert found.tolist() == [[(a * b) >> (2 * half) for b in numbers] for a in numbers]


def test_what_has_no_angle_becomes_nan_alone() -> None:
    """NaN, infinities and what int64 does not hold; their neighbours stay right."""
    rope, places = ROPES["64 pairs"], np.array([1.5, np.nan, np.inf, -np.inf, 2.0**63, -(2.0**63)])
    with np.errstate(invalid="ignore"):  # NumPy says that such a float is no integer
        cos, sin = rows(places, rope, FLOAT32)
    assert np.isnan(cos[1:]).all()
    assert np.isnan(sin[1:]).all()
    assert np.isfinite(cos[0]).all()


def test_opposite_positions_have_opposite_sines() -> None:
    """To the bit, in words: the sign is the angle's."""
    places = np.array([1, 5, 70_001, 2**31 - 1])
    both = [
        rows(p, ROPES["64 pairs"], FLOAT32, 1.25, inverse)
        for p, inverse in ((places, False), (-places, True))
    ]
    assert all(map(np.array_equal, *both))


@pytest.mark.parametrize("places", [POSITIONS + FARTHEST, FLOATS], ids=["integers", "floats"])
@pytest.mark.parametrize("axis", [-2, -1])
@pytest.mark.parametrize("inverse", [False, True])
def test_rows_of_partners_turn_either_of_a_pair(places: Any, axis: int, inverse: bool) -> None:
    """A sine is the first's negated and the second's as it is, or the other way round."""
    for rope in (ROPES["64 pairs"], ROPES["llama3"]):
        parts = partner_arguments(np.array(places), rope, 1.0, np)
        options: Any = {"axis": axis, "inverse": inverse, "xp": np}
        cos, sin = partner_rows(*parts, heads_first=False, **options)
        first = partner_rows(*parts, heads_first=True, **options)
        assert all(map(np.array_equal, (row[None, :, 0] for row in (cos, sin)), first))
        right = exact_rows(rope, places)[:, None]
        sines = [right.imag, -right.imag] if inverse else [-right.imag, right.imag]
        error = row_error("float32", places, float(max(oracle.frequencies(rope))))
        assert np.abs(cos - np.stack([right.real] * 2, axis)).max() <= error
        assert np.abs(sin - np.stack(sines, axis)).max() <= error
