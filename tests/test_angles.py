"""Cosine and sine of any position against 90 digits; digit tables against their bounds."""

from __future__ import annotations

from typing import Any

import mpmath
import numpy as np
import pytest
from hypothesis import given

from phasor import PositionError, Rope, SpecError
from phasor.angles import (
    COS_SIN_ERROR,
    DIGIT_BITS,
    DIGITS,
    POSITION_LIMIT,
    ROW_ERROR_20,
    ROW_ERROR_40,
    ROWS,
    cos_sin,
    digit_tables,
    rows,
)
from phasor.axes import InterleavedSections
from phasor.scaling import LAWS, DynamicNTK

from . import oracle, strategies

LLAMA = Rope(head_dim=128, pairing="half", base=500_000.0)
ENDS = [-(2**63), -(2**63) + 1, 2**63 - 1]
# just below these powers of two, accuracy is lost by the usual recipes one after the other
BANDS = [1 << 10, 1 << 12, 1 << 15, 1 << 17, 1 << 20, 1 << 24, 1 << 27, 1 << 31, 1 << 40]
BANDS += [1 << 53, 1 << 62]


def positions_of_all_sizes(seed: int, each: int = 1) -> list[int]:
    """Positions near the start of every band, both ways, and both ends of int64."""
    rng = np.random.default_rng(seed)
    drawn = [int(p) for band in BANDS for p in rng.integers(band - band // 8, band + 1, each)]
    return [0, 1, -1, *drawn, *(-p for p in drawn), *ENDS]


def assert_exact(rope: Rope, positions: list[Any], atol: float = COS_SIN_ERROR) -> None:
    """`cos_sin` is within its promised error of the truth."""
    expected_cos, expected_sin = oracle.rows(rope, positions)
    cos, sin = cos_sin(rope, positions)
    np.testing.assert_allclose(cos, expected_cos, rtol=0, atol=atol)
    np.testing.assert_allclose(sin, expected_sin, rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", ["exact", "float32"])
@pytest.mark.parametrize(("name", "law"), strategies.EVERY_LAW.items(), ids=strategies.EVERY_LAW)
def test_every_law_is_exact_at_every_int64(name: str, law: Any, dtype: Any) -> None:
    """Within 1e-15 of 90 digits, of the real frequencies or of their float32 rationals."""
    rope = Rope(head_dim=64, pairing="half", base=5e5, scaling=law, inv_freq_dtype=dtype)
    assert_exact(rope, positions_of_all_sizes(seed=len(name)))


def test_every_law_of_the_registry_is_among_them() -> None:
    """A new law cannot be left out."""
    assert set(strategies.EVERY_LAW) == {"plain", *LAWS}


@pytest.mark.parametrize("base", [10_000.0, 500_000.0])
def test_a_whole_head_is_exact_in_every_band(base: float) -> None:
    """Four random positions a band, 64 pairs each."""
    assert COS_SIN_ERROR == 1e-15
    assert_exact(Rope(head_dim=128, pairing="half", base=base), positions_of_all_sizes(7, each=4))


@given(strategies.placed_ropes())
def test_any_rope_is_exact_at_any_int64(placed: tuple[Rope, Any]) -> None:
    """Every layout, direction, width and explicit frequency up to 8."""
    rope, position = placed
    assert_exact(rope, [position])


@given(strategies.placed_ropes(strategies.FLOAT_POSITIONS))
def test_any_rope_is_good_to_float64_at_any_float(placed: tuple[Rope, Any]) -> None:
    """A rest of at most half a position adds at most 4 roundings of its angle, |8/2|."""
    rope, position = placed
    fastest = float(max(oracle.frequencies(rope)))
    assert_exact(rope, [position], atol=COS_SIN_ERROR + 4 * 2**-53 * max(1.0, fastest / 2))


@pytest.mark.parametrize("base", [10_000, 500_000])
def test_the_golden_cosines_and_sines_come_out(base: int) -> None:
    """Stored to 20 digits for six pairs, from position 1 to the last int64."""
    pairs = [0, 1, 16, 32, 48, 63]
    rope = Rope(head_dim=128, pairing="half", base=float(base))
    table = oracle.GOLDEN[f"cos/sin exact theta k=0,1,16,32,48,63 base={base}"]
    cos, sin = cos_sin(rope, [int(position) for position in table])
    for got, name in ((cos, "cos"), (sin, "sin")):
        expected = [[float(text) for text in row[name]] for row in table.values()]
        np.testing.assert_allclose(got[:, pairs], expected, rtol=0, atol=1e-15)


def test_floats_that_are_whole_are_the_integers() -> None:
    """To the last bit, in float64 and float32."""
    whole = np.array([0, 1, -1, 7, 2**20 + 1, -(2**24)])
    for dtype in (np.float32, np.float64):
        for got, expected in zip(
            cos_sin(LLAMA, whole.astype(dtype)), cos_sin(LLAMA, whole), strict=True
        ):
            np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    ("positions", "shape"),
    [
        pytest.param(7, (), id="int"),
        pytest.param(0.5, (), id="float"),
        pytest.param(np.int32(7), (), id="numpy-scalar"),
        pytest.param([], (0,), id="empty-list"),
        pytest.param(np.empty((2, 0), np.float32), (2, 0), id="empty-array"),
        pytest.param([[1, 2, 3]], (1, 3), id="nested-list"),
        pytest.param(range(3), (3,), id="range"),
        pytest.param(np.arange(24, dtype=np.uint8).reshape(2, 3, 4), (2, 3, 4), id="uint8"),
        pytest.param(np.arange(12)[::-3], (4,), id="strided"),
        pytest.param(np.uint64(2**63 - 1), (), id="largest-uint64"),
    ],
)
def test_positions_come_in_any_shape_and_integer_type(positions: Any, shape: Any) -> None:
    """The result has one more axis, and every token is its own."""
    cos, sin = cos_sin(LLAMA, positions)
    assert cos.shape == sin.shape == (*shape, 64)
    assert cos.dtype == sin.dtype == np.float64
    flat = [p.item() for p in np.asarray(positions).reshape(-1)]
    for row, position in zip(cos.reshape(-1, 64), flat, strict=True):
        np.testing.assert_allclose(row, cos_sin(LLAMA, position)[0], rtol=0, atol=COS_SIN_ERROR)


def test_long_sequences_are_no_different() -> None:
    """Work is cut into pieces of 1024 tokens here, and no seam shows."""
    places = np.arange(2**40, 2**40 + 2500)
    cos, sin = cos_sin(LLAMA, places)
    for row in (0, 1023, 1024, 2047, 2048, 2499):
        expected = oracle.rows(LLAMA, [int(places[row])])
        np.testing.assert_allclose(cos[row], expected[0][0], rtol=0, atol=COS_SIN_ERROR)
        np.testing.assert_allclose(sin[row], expected[1][0], rtol=0, atol=COS_SIN_ERROR)


WANTED = "positions must be integers or float32/float64, got "
FLOAT16 = (
    "float16 (a float16 cannot tell 2048 from 2049, and more digits than float64 are not used)"
)
OBJECT = "object (they do not fit 64 bits, or the rows differ in length)"
MASK = "bool (bools are masks; phasor.positions.padded makes positions of one)"


@pytest.mark.parametrize(
    ("positions", "text"),
    [
        pytest.param([True, False], WANTED + MASK, id="bool"),
        pytest.param(np.float16(3), WANTED + FLOAT16, id="float16"),
        pytest.param([2**64], WANTED + OBJECT, id="beyond-uint64"),
        pytest.param([None], WANTED + OBJECT, id="object"),
        pytest.param("7", WANTED + "<U1", id="text"),
        pytest.param(1j, WANTED + "complex128", id="complex"),
        pytest.param([0.0, np.nan], "positions must be finite and below 2**63, got nan", id="nan"),
        pytest.param(-np.inf, "positions must be finite and below 2**63, got -inf", id="inf"),
        pytest.param(
            2.0**63,
            "positions must be finite and below 2**63, got 9.223372036854776e+18",
            id="float-2**63",
        ),
        pytest.param(
            np.array([1, 2**63], np.uint64),
            "positions must be below 2**63, got 9223372036854775808",
            id="uint64",
        ),
    ],
)
def test_what_is_no_position_is_refused(positions: Any, text: str) -> None:
    """With the way out where there is one."""
    with pytest.raises(PositionError) as caught:
        cos_sin(LLAMA, positions)
    assert str(caught.value) == text


def test_ragged_positions_are_refused() -> None:
    """NumPy's own words follow the name of the argument."""
    with pytest.raises(PositionError, match=r"^positions must be an array of numbers: setting an"):
        cos_sin(LLAMA, [[1], [1, 2]])


@pytest.mark.parametrize("ask", [cos_sin, lambda r, p: rows(r, p, np.float32)])
def test_a_rule_has_no_angles(ask: Any) -> None:
    """Its frequencies depend on a length that nobody said."""
    rule = DynamicNTK(factor=2.0, original_max_positions=64)
    with pytest.raises(SpecError, match=r"use rope\.at\(seq_len\)$"):
        ask(Rope(head_dim=8, pairing="half", scaling=rule), 1)


def truth32(rope: Rope, position: int) -> np.ndarray:
    """The correctly rounded float32 row, rounded with integers from 90 digits."""
    both = oracle.cos_sin(rope, position)
    return np.array([[oracle.float32(c), oracle.float32(s)] for c, s in zip(*both, strict=True)])


def test_every_entry_of_a_small_table_is_correctly_rounded() -> None:
    """All 4096 digit rotations of two pairs."""
    rope = Rope(head_dim=4, pairing="half", base=500_000.0, direction=-1)
    tables = digit_tables(rope, np.float32)
    assert tables.dtype == np.float32
    for digit in range(4):
        for value in range(1024):
            expected = truth32(rope, value * 1024**digit)
            np.testing.assert_array_equal(tables[digit, value], expected)


@pytest.mark.parametrize("name", ["plain", "yarn", "llama3", "proportional", "resonance"])
def test_sampled_entries_of_large_tables_are_correctly_rounded(name: str) -> None:
    """Forty digit rotations of 32 pairs each."""
    rope = Rope(head_dim=64, pairing="half", scaling=strategies.EVERY_LAW[name])
    tables = digit_tables(rope, np.float32)
    rng = np.random.default_rng(3)
    for digit, value in zip(rng.integers(0, 4, 40), rng.integers(0, 1024, 40), strict=True):
        expected = truth32(rope, int(value) * 1024 ** int(digit))
        np.testing.assert_array_equal(tables[digit, value], expected)


@pytest.mark.parametrize(("digit", "direction"), [(0, 1), (0, -1), (2, 1)])
def test_entries_beside_a_rounding_boundary_are_rounded_right(digit: int, direction: Any) -> None:
    """Frequencies whose sine or cosine lies within 1e-16 of the middle of two float32.

    Rounding the float64 value, which is often the tie itself, gets many of them wrong.
    """
    rng = np.random.default_rng(11)
    middles = rng.uniform(0.3, 0.9, 32).astype(np.float32).astype(np.float64)
    middles += np.spacing(middles.astype(np.float32)) / 2.0
    place = 1024**digit
    with mpmath.workdps(40):
        angles = [mpmath.asin(m) for m in middles[:16]] + [mpmath.acos(m) for m in middles[16:]]
    rope = Rope(
        head_dim=64,
        pairing="half",
        direction=direction,
        explicit_inv_freq=tuple(float(angle) / place for angle in angles),
    )
    expected = truth32(rope, place)
    twice_rounded = np.stack(oracle.rows(rope, [place]), axis=-1)[0].astype(np.float32)
    assert (twice_rounded != expected).sum() >= 5
    np.testing.assert_array_equal(digit_tables(rope, np.float32)[digit, 1], expected)


def test_entries_of_pairs_that_hardly_turn_are_correctly_rounded() -> None:
    """Their sines are tiny and still have all 24 bits."""
    slow = tuple(3.0 * 10.0**-exponent for exponent in (9, 15, 24))
    rope = Rope(head_dim=6, pairing="half", explicit_inv_freq=slow)
    for digit, value in ((0, 1), (0, 3), (1, 5), (2, 77), (3, 7), (3, 511), (3, 1023)):
        expected = truth32(rope, value * 1024**digit)
        np.testing.assert_array_equal(digit_tables(rope, np.float32)[digit, value], expected)


def test_float64_tables_are_the_exact_rotations() -> None:
    """Within the error of `cos_sin`, for kernels that work in float64."""
    tables = digit_tables(LLAMA, np.float64)
    assert tables.dtype == np.float64
    for digit, value in ((0, 1), (0, 1023), (1, 700), (2, 31), (3, 1), (3, 1023)):
        cos, sin = oracle.rows(LLAMA, [value * 1024**digit])
        np.testing.assert_allclose(tables[digit, value, :, 0], cos[0], rtol=0, atol=COS_SIN_ERROR)
        np.testing.assert_allclose(tables[digit, value, :, 1], sin[0], rtol=0, atol=COS_SIN_ERROR)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_digit_of_zero_is_exactly_the_identity(dtype: Any) -> None:
    """So that small positions are as good as their own digits."""
    for digit in range(DIGITS):
        np.testing.assert_array_equal(digit_tables(LLAMA, dtype)[digit, 0], [[1, 0]] * 64)


def test_tables_are_shared_and_hence_read_only() -> None:
    """No caller can spoil the next caller's rotation."""
    tables = digit_tables(LLAMA, np.float32)
    with pytest.raises(ValueError, match="read-only"):
        tables[0, 0, 0, 0] = 2
    assert digit_tables(Rope(head_dim=128, pairing="half", base=5e5), np.float32) is tables
    assert tables.shape == (DIGITS, ROWS, 64, 2)
    assert (DIGIT_BITS, DIGITS, ROWS, POSITION_LIMIT) == (10, 4, 1024, 2**40)


@pytest.mark.parametrize(
    ("limit", "bound"), [(2**20, ROW_ERROR_20), (POSITION_LIMIT, ROW_ERROR_40)], ids=["20", "40"]
)
def test_float32_rows_are_within_their_bound(limit: int, bound: float) -> None:
    """As complex numbers, and the bound is not a generous one."""
    rng = np.random.default_rng(5)
    places = np.concatenate((rng.integers(-limit + 1, limit, 20_000), [limit - 1, 1 - limit]))
    made = rows(LLAMA, places, np.float32).astype(np.float64)
    cos, sin = cos_sin(LLAMA, places)
    error = np.hypot(made[..., 0] - cos, made[..., 1] - sin)
    assert error.max() <= bound
    assert error.max() > bound / 3


def test_the_bounds_of_rows_are_their_derivation() -> None:
    """Entries off by half an ulp in both parts, products by sqrt(5) units (Brent et al. 2007)."""
    unit = 2.0**-24
    entry, product = 2**0.5 * unit / 2, 5**0.5 * unit
    assert pytest.approx(2 * entry + 1 * product, rel=1e-14) == ROW_ERROR_20
    assert pytest.approx(4 * entry + 3 * product, rel=1e-14) == ROW_ERROR_40


def test_float64_rows_are_as_good_as_their_products() -> None:
    """Four entries within sqrt(2) of `cos_sin`'s error, three products of float64."""
    places = np.random.default_rng(6).integers(1 - POSITION_LIMIT, POSITION_LIMIT, 200)
    made = rows(LLAMA, places, np.float64)
    bound = 4 * 2**0.5 * COS_SIN_ERROR + 3 * 5**0.5 * 2**-53
    cos, sin = oracle.rows(LLAMA, places.tolist())
    assert np.hypot(made[..., 0] - cos, made[..., 1] - sin).max() <= bound


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_negative_position_is_the_conjugate(dtype: Any) -> None:
    """Bit for bit, on both sides of the limit."""
    places = np.array([1, 1023, 2**20 + 5, POSITION_LIMIT - 1, POSITION_LIMIT, 2**62])
    there, back = rows(LLAMA, places, dtype), rows(LLAMA, -places, dtype)
    np.testing.assert_array_equal(back, there * np.array([1, -1], dtype))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rows_without_digits_are_the_exact_ones_rounded(dtype: Any) -> None:
    """Beyond 2**40, and at floats."""
    for places in ([POSITION_LIMIT, -POSITION_LIMIT, 2**62, *ENDS], [0.5, -3.25, 1e9 + 0.5]):
        exact = np.stack(cos_sin(LLAMA, places), axis=-1).astype(dtype)
        np.testing.assert_array_equal(rows(LLAMA, places, dtype), exact)


def test_positions_of_one_digit_have_correctly_rounded_rows() -> None:
    """Nothing is multiplied but ones."""
    for place in (1, 77, 1023, 77 * 1024, 1023 * 1024**3):
        np.testing.assert_array_equal(rows(LLAMA, place, np.float32), truth32(LLAMA, place))


def test_rows_of_several_axes_follow_each_pairs_axis() -> None:
    """Time, height and width within and beyond the digits at once."""
    rope = Rope(head_dim=16, pairing="half", axes=InterleavedSections((3, 3, 2)))
    places = [[5, -(2**21), 2**41], [0, 1, -(2**63)]]
    expected = np.stack(oracle.rows(rope, places), axis=-1)
    error = rows(rope, places, np.float32) - expected
    assert np.hypot(error[..., 0], error[..., 1]).max() <= ROW_ERROR_40
