"""Mistakes of a rotation's positions, rows and signs, by complex numbers in float64 alone."""

import numpy as np
import pytest
from tests.verify.programs import names, rounded, stored

from phasor import PhasorError, Rope, identify, verify
from phasor.axes import Sectioned
from phasor.scaling import Linear, Yarn

WIDTH, PAIRS = 64, 32
ROPE = Rope(head_dim=WIDTH, pairing="half", base=10_000.0)
SPEEDS = 10_000.0 ** (-np.arange(PAIRS) / PAIRS)
COUNT = np.arange(48)


def heads(*shape, dtype="float32"):
    """Vectors ``[..., 2, 64]``."""
    return rounded(np.random.default_rng(7).standard_normal((*shape, 2, WIDTH)), dtype)


def turned(x, rows):
    """Halves turned by rows ``[..., 32]``."""
    z = (x[..., :PAIRS] + 1j * x[..., PAIRS:]) * rows[..., None, :]
    return np.concatenate([z.real, z.imag], -1)


def rows_at(positions):
    """``exp(i p f)``."""
    return np.exp(1j * np.asarray(positions)[..., None] * SPEEDS)


def judged(rope, positions, x, y, dtype="float32"):
    """The verdict on one side."""
    (side,) = verify(
        rope, {"positions": positions, "q": stored(x, dtype), "q_rotated": stored(y, dtype)}
    ).sides
    return [change.name for change in side.changes], str(side)


DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


@DTYPES
def test_cos_and_sin_that_are_exchanged_are_named(dtype):
    """In vectors and in tables; frequencies are right."""
    x, rows = heads(48, dtype=dtype), rows_at(COUNT)
    found, _ = judged(ROPE, COUNT, x, turned(x, 1j * rows.conj()), dtype)
    assert found == ["swapped"]
    assert names(verify(ROPE, {"cos": rows.imag, "sin": rows.real})) == ["swapped"]
    assert not verify(ROPE, {"cos": rows.real, "sin": rows.imag})


def members(x, repeat, pairing, signs=(-1, 1)):
    """``x cos + other sin`` with rows that are repeated so, by members paired so."""
    rows = repeat(rows_at(COUNT))[:, None]
    first, second = slice(PAIRS), slice(PAIRS, None)
    if pairing == "interleaved":
        first, second = slice(0, None, 2), slice(1, None, 2)
    y = x * rows.real
    y[..., first] += signs[0] * x[..., second] * rows.imag[..., first]
    y[..., second] += signs[1] * x[..., first] * rows.imag[..., second]
    return y


def twice(rows):
    """All, then all again."""
    return np.concatenate([rows, rows], -1)


def each_twice(rows):
    """Every one beside itself."""
    return np.repeat(rows, 2, -1)


MIXED = {
    "half, rows of neighbours": (each_twice, "half", (-1, 1), ["interleaved-rows-on-halves"]),
    "neighbours, rows of halves": (twice, "interleaved", (-1, 1), ["half-rows-on-interleaved"]),
    "both subtract": (twice, "half", (-1, -1), ["one-sign"]),
    "both add": (twice, "half", (1, 1), ["one-sign"]),
}


@DTYPES
@pytest.mark.parametrize("case", MIXED)
def test_members_of_a_pair_that_are_no_rotation_are_named(case, dtype):
    """Though position 0 is right, it is not said that later tokens alone are wrong."""
    repeat, pairing, signs, expected = MIXED[case]
    x = heads(48, dtype=dtype)
    found, text = judged(ROPE, COUNT, x, members(x, repeat, pairing, signs), dtype)
    assert found == expected, text
    assert not judged(ROPE, COUNT, x, members(x, twice, "half"), dtype)[0]


def test_what_is_right_at_position_0_alone_is_no_rotation():
    """As every other mixture of coordinates is."""
    x = heads(48)
    y = turned(x, rows_at(COUNT))
    y[..., 5] = x[..., 5] * np.cosh(0.01 * COUNT)[:, None]
    assert judged(ROPE, COUNT, x, y)[0] == ["no-rotation"]


def test_tokens_that_are_rotated_twice_are_named():
    """As keys of a cached prefix that are rotated when they are read."""
    x = heads(48)
    at = np.where(COUNT < 20, 2 * COUNT, COUNT)
    assert judged(ROPE, COUNT, x, turned(x, rows_at(at)))[0] == ["tokens", "twice"]


@DTYPES
@pytest.mark.parametrize("by", [2048, 777, -1000])
def test_an_offset_of_any_size_is_an_offset(by, dtype):
    """And no other frequencies."""
    x = heads(48, dtype=dtype)
    found, text = judged(ROPE, COUNT, x, turned(x, rows_at(COUNT + by)), dtype)
    assert found == ["offset"], text
    assert f"Positions are off by {by:+d}." in text


@DTYPES
def test_offsets_of_the_rows_of_a_batch_are_named_by_row(dtype):
    """As padding makes them that is counted."""
    x, pads = heads(3, 48, dtype=dtype), np.array([[0], [30], [14]])
    positions = np.broadcast_to(COUNT, (3, 48))
    found, text = judged(ROPE, positions, x, turned(x, rows_at(positions + pads)), dtype)
    assert found == ["offset"], text
    assert "Positions are off by +30 in row 1, +14 in row 2 of the batch." in text


GRID = np.array([(20 + t, 20 + i, 20 + j) for t in range(3) for i in range(5) for j in range(6)])
FRAMES, TEXT = GRID * [2, 1, 1] - [20, 0, 0], GRID - [0, 20, 20]
PLACES = {
    "frames that are two apart": (FRAMES, "Positions on axis 0 differ: token 30 (position 21)"
                                          " is turned as 22."),
    "planes without the text before": (TEXT, "Positions are off by -20 on axis 1."),
    "rows of the planes are the last": (GRID[:, [2, 2, 2]], "every pair is turned by coordinate 2"),
}  # fmt: skip


@pytest.mark.parametrize("case", PLACES)
def test_positions_of_one_axis_are_named(case):
    """Not as frequencies of its pairs."""
    at, expected = PLACES[case]
    axes = np.repeat([0, 1, 2], (8, 12, 12))
    rope, x = Rope(head_dim=WIDTH, pairing="half", axes=Sectioned((8, 12, 12))), heads(len(GRID))
    y = turned(x, np.exp(1j * at[:, axes] * SPEEDS))
    found, text = judged(rope, GRID, x, y)
    assert "frequencies" not in found
    assert expected in text
    assert not judged(rope, GRID, x, turned(x, np.exp(1j * GRID[:, axes] * SPEEDS)))[0]


def test_nothing_that_changes_nothing_is_a_cause():
    """Positions up to 2,048 are what they are in float16, and two wrong signs are none."""
    x, positions = heads(300, dtype="bfloat16"), np.arange(300)
    rope = Rope(head_dim=WIDTH, pairing="half", base=500_000.0)
    for base in (499_712.0, 499_000.0):
        y = turned(x, np.exp(1j * positions[:, None] * base ** (-np.arange(PAIRS) / PAIRS)))
        found, text = judged(rope, positions, x, y, "bfloat16")
        assert not {"direction", "positions-in-float16"} & {*found}, text


EMPTY = {
    "no tokens": {"positions": COUNT[:0], "q": heads(0), "q_rotated": heads(0)},
    "no heads": {"positions": COUNT, "q": heads(48)[:, :0], "q_rotated": heads(48)[:, :0]},
    "no rows": {"cos": np.ones((0, PAIRS)), "sin": np.ones((0, PAIRS))},
    "a table of an odd width": {"cos_sin_cache": np.ones((5, 33))},
    "a layer of many digits": {f"layers.{'9' * 5000}.q": heads(48)},
}


@pytest.mark.parametrize("case", EMPTY)
def test_what_holds_nothing_is_refused(case):
    """And says what it is to hold."""
    with pytest.raises(PhasorError):
        verify(ROPE, EMPTY[case])


def test_causes_of_one_name_that_fit_alike_are_all_listed():
    """As sections whose pairs are too slow for bfloat16."""
    x = heads(len(GRID), dtype="bfloat16")
    rope = Rope(head_dim=WIDTH, pairing="half", base=1e6, axes=Sectioned((8, 12, 12)))
    speeds, axes = 1e6 ** (-np.arange(PAIRS) / PAIRS), np.repeat([0, 1, 2], (12, 12, 8))
    found, text = judged(rope, GRID, x, turned(x, np.exp(1j * GRID[:, axes] * speeds)), "bfloat16")
    assert found == ["axes"]
    assert "sections=(12, 12, 8)) instead" in text


@pytest.mark.parametrize(("over", "dtype"), [(62, "float32"), (128, "bfloat16")])
def test_exponents_of_another_width_are_said_beside_the_base(over, dtype):
    """Which is a number that nobody wrote."""
    x, speeds = heads(300, dtype=dtype), 10_000.0 ** (-2 * np.arange(PAIRS) / over)
    y = turned(x, np.exp(1j * np.arange(300)[:, None] * speeds))
    found, text = judged(ROPE, np.arange(300), x, y, dtype)
    assert found == ["exponent-width"]
    assert f"The exponents run over {over}, not over the 64 coordinates" in text


@pytest.mark.parametrize("by", [500, 2048])
def test_angles_of_an_offset_in_float32_are_no_tables_end(by):
    """They are rounded as those of the far positions that they belong to."""

    def late(x, positions):
        angles = np.float32(np.asarray(positions) + by)[..., None] * np.float32(SPEEDS)
        return np.float32(turned(np.asarray(x, np.float64), np.exp(1j * np.float64(angles))))

    found = identify(late, head_dim=WIDTH)
    assert found.position_offset == by
    assert not [name for name in found.names() if name.startswith(("table-end", "negative"))]


def test_any_two_differences_of_a_rope_are_tried():
    """Where nothing can be measured, since no two positions are one apart."""
    rope = Rope(
        head_dim=WIDTH, pairing="half", base=10_000.0, axes=Sectioned((8, 12, 12)),
        scaling=Linear(factor=4.0),
    )  # fmt: skip
    at = 3 * GRID
    axes = np.repeat([0, 1, 2], (12, 12, 8))  # sections of another order
    x = heads(len(GRID))
    found, text = judged(rope, at, x, turned(x, np.exp(1j * at[:, axes] * SPEEDS)))
    assert found == ["law-missing", "axes"], text


def test_all_that_cannot_be_told_apart_is_listed():
    """On the screen as much as a reader takes in, with the number of what is left out."""
    rope = Rope(
        head_dim=WIDTH, pairing="half", base=1e6,
        scaling=Yarn(factor=2.0, original_max_positions=128_000),
    )  # fmt: skip
    x, speeds = heads(48, dtype="bfloat16"), 1e6 ** (-np.arange(PAIRS) / PAIRS)
    y = turned(x, np.exp(1j * COUNT[:, None] * speeds))
    (side,) = verify(
        rope,
        {"positions": COUNT, "q": stored(x, "bfloat16"), "q_rotated": stored(y, "bfloat16")},
    ).sides
    assert len(side.undecided) > 6
    assert f"{len(side.undecided) - 6} more, which --json lists" in str(side)
    assert side.as_plain()["undecided"] == list(side.undecided)
