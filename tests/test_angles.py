"""Cosine and sine of any position against 90 digits, within the bounds that are promised."""

from __future__ import annotations

from typing import Any

import mpmath
import numpy as np
import pytest
from hypothesis import given

from phasor import PositionError, Rope
from phasor.angles import (
    COS_SIN_ERROR,
    COS_SIN_ERROR_FLOAT32,
    FLOAT32,
    FLOAT64,
    REST_ERROR,
    REST_ERROR_FLOAT32,
    cos_sin,
    turn_limbs,
    turn_words,
)
from phasor.scaling import LAWS

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


def assert_exact(rope: Rope, positions: list[Any]) -> None:
    """`cos_sin` is within its promised error of the truth, in float64 and in float32."""
    expected = oracle.rows(rope, positions)
    fastest = float(max(oracle.frequencies(rope)))
    has_rest = any(isinstance(p, float) for p in positions)
    for dtype, error, rest_error in (
        (np.float64, COS_SIN_ERROR, REST_ERROR),
        (np.float32, COS_SIN_ERROR_FLOAT32, REST_ERROR_FLOAT32),
    ):
        for made, true in zip(cos_sin(positions, rope, dtype), expected, strict=True):
            assert made.dtype == dtype
            assert np.abs(made - true).max() <= error + has_rest * fastest * rest_error


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
def test_any_rope_is_as_good_at_any_float(placed: tuple[Rope, Any]) -> None:
    """But for half a unit of the rest, times the frequency."""
    rope, position = placed
    assert_exact(rope, [position])


@pytest.mark.parametrize("direction", [1, -1])
def test_pairs_may_make_many_turns_a_position(direction: Any) -> None:
    """Up to 1e15 radians, at integers, and at floats whose rest is a whole number of units."""
    fast = (1e15, 123_456_789.125, 2 * np.pi, 7.0, 1e-20)
    rope = Rope(head_dim=10, pairing="half", explicit_inv_freq=fast, direction=direction)
    assert_exact(rope, positions_of_all_sizes(13))
    floats = [0.5, -0.5, 1.5, -2.25, 2.0**40 + 0.125, 1000.0 + 2.0**-31, 2.0**62, -(2.0**62)]
    for dtype, error in ((np.float64, COS_SIN_ERROR), (np.float32, COS_SIN_ERROR_FLOAT32)):
        for made, true in zip(cos_sin(floats, rope, dtype), oracle.rows(rope, floats), strict=True):
            assert np.abs(made - true).max() <= error


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_floats_of_every_size_have_an_angle(kind: Any) -> None:
    """Below any unit, beside a tie, and next to the end of int64."""
    ends = [np.nextafter(kind(2.0**63), kind(0)), np.nextafter(kind(0.5), kind(0)), kind(1e-30)]
    floats = [float(end) for end in ends] + [0.5, 1.5, 2.5, 8_388_607.5]
    assert_exact(LLAMA, floats + [-p for p in floats])


def test_the_edges_between_quarters_are_no_exception() -> None:
    """Odd eighths of a turn, from just below and just above, all the way round."""
    eighth = np.pi / 4
    rope = Rope(
        head_dim=6,
        pairing="half",
        explicit_inv_freq=(np.nextafter(eighth, 0.0), eighth, np.nextafter(eighth, 1.0)),
    )
    assert_exact(rope, [*range(-17, 18), 2**40 + 1, -(2**40) - 3, *ENDS])


def test_a_bit_depends_on_the_position_alone() -> None:
    """Whoever its neighbours are, and however many."""
    places = positions_of_all_sizes(21, each=3)
    for dtype in (np.float64, np.float32):
        together = np.stack(cos_sin(places, LLAMA, dtype), -1)
        for place, row in zip(places, together, strict=True):
            np.testing.assert_array_equal(np.stack(cos_sin(place, LLAMA, dtype), -1), row)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_the_origin_is_exactly_the_identity(dtype: Any) -> None:
    """Of every pair, and pairs that do not turn are so everywhere."""
    still = Rope(head_dim=4, pairing="half", explicit_inv_freq=(1.0, 0.0))
    assert np.stack(cos_sin(0, LLAMA, dtype)).tolist() == [[1.0] * 64, [0.0] * 64]
    assert np.stack(cos_sin(2**62, still, dtype))[:, 1].tolist() == [1.0, 0.0]


def test_limbs_are_the_turns_in_fixed_point() -> None:
    """192 bits, 128 of them after the point; two's complement for the other direction."""
    fast = (1e15, 3.0, 1e-30)
    for direction in (1, -1):
        rope = Rope(head_dim=6, pairing="half", explicit_inv_freq=fast, direction=direction)
        for limbs, frequency in zip(turn_limbs(rope), oracle.frequencies(rope), strict=True):
            number = sum(int(limb) << (32 * place) for place, limb in enumerate(limbs[::-1]))
            with mpmath.workdps(oracle.DIGITS):
                turns = direction * frequency / (2 * mpmath.pi)
                assert number == int(mpmath.nint(turns * 2**128)) % 2**192


def test_a_ropes_constants_are_shared_small_and_read_only() -> None:
    """At most 64 bytes a pair, so that a Rope for every length costs what a Rope costs."""
    for constants in (turn_limbs(LLAMA), turn_words(LLAMA)):
        assert constants.nbytes <= 64 * LLAMA.num_pairs
        with pytest.raises(ValueError, match="read-only"):
            constants[0, 0] = 0
    assert turn_limbs(Rope(head_dim=128, pairing="half", base=5e5)) is turn_limbs(LLAMA)


@pytest.mark.parametrize(
    ("made", "count", "dtype", "cos_error", "sin_error"),
    [(FLOAT32, 4, np.float32, 9.2e-9, 2.4e-8), (FLOAT64, 7, np.float64, 1.9e-17, 2.7e-17)],
    ids=["float32", "float64"],
)
def test_the_coefficients_are_those_of_the_interpolation(
    made: Any, count: int, dtype: Any, cos_error: float, sin_error: float
) -> None:
    """At Chebyshev nodes, solved in 60 digits and rounded; off by what their comment says."""
    with mpmath.workdps(60):
        quarter = mpmath.pi / 4

        def of_cos(y: Any) -> Any:
            return (mpmath.cos(quarter * mpmath.sqrt(y)) - 1) / y

        def of_sin(y: Any) -> Any:
            return mpmath.sin(quarter * mpmath.sqrt(y)) / mpmath.sqrt(y)

        angles = [mpmath.pi * (2 * i + 1) / (2 * count) for i in range(count)]
        nodes = [(1 + mpmath.cos(angle)) / 2 for angle in angles]
        powers = mpmath.matrix([[y**k for k in range(count)] for y in nodes])
        samples = [mpmath.mpf(i) / 200 for i in range(1, 201)]
        for coefficients, function, scale, error in (
            (made.cos, of_cos, lambda y: y, cos_error),
            (made.sin, of_sin, mpmath.sqrt, sin_error),
        ):
            solved = mpmath.lu_solve(powers, mpmath.matrix([function(y) for y in nodes]))
            assert coefficients == tuple(float(dtype(float(value))) for value in solved)
            polynomial = [mpmath.mpf(value) for value in coefficients[::-1]]
            off = [abs(mpmath.polyval(polynomial, y) - function(y)) * scale(y) for y in samples]
            assert max(off) <= error


@pytest.mark.parametrize("base", [10_000, 500_000])
def test_the_golden_cosines_and_sines_come_out(base: int) -> None:
    """Stored to 20 digits for six pairs, from position 1 to the last int64."""
    pairs = [0, 1, 16, 32, 48, 63]
    rope = Rope(head_dim=128, pairing="half", base=float(base))
    table = oracle.GOLDEN[f"cos/sin exact theta k=0,1,16,32,48,63 base={base}"]
    cos, sin = cos_sin([int(position) for position in table], rope)
    for got, name in ((cos, "cos"), (sin, "sin")):
        expected = [[float(text) for text in row[name]] for row in table.values()]
        np.testing.assert_allclose(got[:, pairs], expected, rtol=0, atol=1e-15)


def test_floats_that_are_whole_are_the_integers() -> None:
    """To the last bit, in float64 and float32."""
    whole = np.array([0, 1, -1, 7, 2**20 + 1, -(2**24)])
    for dtype in (np.float32, np.float64):
        for got, expected in zip(
            cos_sin(whole.astype(dtype), LLAMA), cos_sin(whole, LLAMA), strict=True
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
    cos, sin = cos_sin(positions, LLAMA)
    assert cos.shape == sin.shape == (*shape, 64)
    assert cos.dtype == sin.dtype == np.float64
    flat = [p.item() for p in np.asarray(positions).reshape(-1)]
    for row, position in zip(cos.reshape(-1, 64), flat, strict=True):
        np.testing.assert_allclose(row, cos_sin(position, LLAMA)[0], rtol=0, atol=COS_SIN_ERROR)


def test_long_sequences_are_no_different() -> None:
    """Work is cut into pieces of 1024 tokens here, and no seam shows."""
    places = np.arange(2**40, 2**40 + 2500)
    cos, sin = cos_sin(places, LLAMA)
    for row in (0, 1023, 1024, 2047, 2048, 2499):
        expected = oracle.rows(LLAMA, [int(places[row])])
        np.testing.assert_allclose(cos[row], expected[0][0], rtol=0, atol=COS_SIN_ERROR)
        np.testing.assert_allclose(sin[row], expected[1][0], rtol=0, atol=COS_SIN_ERROR)


WANTED = "positions must be integers, float32 or float64, got "
FLOAT16 = "float16: float16 cannot tell 2048 from 2049"
OBJECT = "object: some are not integers or floats of at most 64 bits"
MASK = "bool: this is a mask; phasor.positions.padded turns a mask into positions"
OTHER = ": a position is a real number that fits in int64 or float64"


@pytest.mark.parametrize(
    ("positions", "text"),
    [
        pytest.param([True, False], WANTED + MASK, id="bool"),
        pytest.param(np.float16(3), WANTED + FLOAT16, id="float16"),
        pytest.param([2**64], WANTED + OBJECT, id="beyond-uint64"),
        pytest.param([None], WANTED + OBJECT, id="object"),
        pytest.param(None, WANTED + OBJECT, id="none"),
        pytest.param("7", WANTED + "<U1" + OTHER, id="text"),
        pytest.param(1j, WANTED + "complex128" + OTHER, id="complex"),
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
        cos_sin(positions, LLAMA)
    assert str(caught.value) == text


def test_ragged_positions_are_refused() -> None:
    """NumPy's own words follow the name of the argument."""
    with pytest.raises(PositionError, match=r"^positions must be an array of numbers: setting an"):
        cos_sin([[1], [1, 2]], LLAMA)


def test_the_turns_for_float32_are_within_half_a_unit_above_and_three_halves_below() -> None:
    """Units of 2**-32 turns; both ends are nearly reached, at the ends of int64."""
    rope = Rope(head_dim=256, pairing="half", base=10_000.0)
    frequencies = oracle.frequencies(rope)
    below: list[float] = []
    with mpmath.workdps(90):
        for limbs, frequency in zip(turn_limbs(rope).tolist(), frequencies, strict=True):
            first, second = limbs[2] << 32 | limbs[3], limbs[4]
            for position in ENDS:
                turns = (position * first + (position >> 32) * second) % 2**64
                true = position * frequency / (2 * mpmath.pi) * 2**64
                apart = (true - turns) % 2**64
                apart -= 2**64 * (apart > 2**63)
                below.append(float(apart / 2**32))
    assert -0.5 <= min(below) < -0.25
    assert 1.25 < max(below) <= 1.5
