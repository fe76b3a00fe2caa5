"""The rotation in each form the papers write it, against one complex multiplication a pair."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasor import PositionError, Rope, SpecError, TensorError
from phasor.angles import COS_SIN_ERROR
from phasor.axes import Axial
from phasor.numpy import blocks, change_pairing, matrix, pair_indices, rotate, rotate_complex, score
from phasor.scaling import Yarn

from . import oracle, strategies

PAIRINGS = ["half", "interleaved"]
PLACES = [0, 1, -3, 131_071, 2**40 + 7, 2**62, -(2**63)]


def draws(seed: int, *shape: int) -> np.ndarray:
    """Gaussian numbers of a test's own seed."""
    return np.random.default_rng(seed).standard_normal(shape)


def assert_near(got: Any, expected: Any, size: Any) -> None:
    """Apart by at most 1e-15 of ``size``, the norm of what was turned."""
    assert np.shape(got) == np.shape(expected)
    assert np.all(np.abs(np.asarray(got) - np.asarray(expected)) <= 1e-15 * np.asarray(size))


@pytest.mark.parametrize(
    ("pairing", "expected"),
    [
        ("half", [math.cos(1), math.cos(0.1), math.sin(1), math.sin(0.1)]),
        ("interleaved", [math.cos(1), math.sin(1), math.cos(0.1), math.sin(0.1)]),
    ],
)
def test_pairings_turn_different_coordinates_together(pairing: Any, expected: list[float]) -> None:
    """The first of each pair is 1; base 100 makes the second pair ten times slower."""
    rope = Rope(head_dim=4, pairing=pairing, base=100.0)
    x = [1.0, 1.0, 0.0, 0.0] if pairing == "half" else [1.0, 0.0, 1.0, 0.0]
    np.testing.assert_allclose(rotate(x, 1, rope), expected, rtol=0, atol=2e-16)


@pytest.mark.parametrize(
    ("pairing", "first", "second"),
    [("half", [2, 3, 4], [5, 6, 7]), ("interleaved", [2, 4, 6], [3, 5, 7])],
)
def test_pairs_lie_within_the_rotated_slice(
    pairing: Any, first: list[int], second: list[int]
) -> None:
    """Six rotated coordinates that begin at the third."""
    rope = Rope(head_dim=10, pairing="half", rotary_dim=6, rotary_start=2)
    assert [index.tolist() for index in pair_indices(rope, pairing)] == [first, second]


@given(strategies.placed_ropes(), st.integers(0, 2**32))
def test_any_rope_turns_as_the_oracle_does(placed: tuple[Rope, Any], seed: int) -> None:
    """Every pairing, output pairing, slice, direction, layout and law, at any int64."""
    rope, position = placed
    x = draws(seed, rope.head_dim)
    if rope.axes.n_axes > 1:
        got = rotate(x[None, None], [position], rope, gain=1.0)[0, 0]
    else:
        got = rotate(x, position, rope, gain=1.0)
    assert_near(got, oracle.turned(x, position, rope), np.linalg.norm(x))


@pytest.mark.parametrize("inverse", [False, True])
def test_the_attention_factor_is_on_rotated_coordinates_alone(inverse: bool) -> None:
    """And undone with the rotation; 0.1 ln 4 + 1 is YaRN's for a factor of 4."""
    law = Yarn(factor=4.0, original_max_positions=4096)
    rope = Rope(head_dim=6, pairing="half", rotary_dim=4, rotary_start=1, scaling=law)
    x = draws(0, 6)
    plain = rotate(x, 777, rope, gain=1.0, inverse=inverse)
    factor = (1 + 0.1 * math.log(4)) ** (-1 if inverse else 1)
    expected = plain * np.array([1, factor, factor, factor, factor, 1])
    np.testing.assert_allclose(rotate(x, 777, rope, inverse=inverse), expected, rtol=1e-15)
    np.testing.assert_allclose(rotate(rotate(x, 777, rope), 777, rope, inverse=True), x, rtol=1e-14)


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("law", strategies.EVERY_LAW.values(), ids=strategies.EVERY_LAW)
def test_all_forms_are_one_map(law: Any, pairing: Any) -> None:
    """Element-wise, complex, as a matrix, as blocks, and as a score against unit vectors."""
    rope = Rope(head_dim=66, pairing=pairing, rotary_dim=64, rotary_start=1, scaling=law)
    x = draws(0, 66)
    size = np.linalg.norm(x)
    first, second = pair_indices(rope, pairing)
    for place in PLACES:
        y = rotate(x, place, rope)
        assert_near(rotate_complex(x, place, rope), y, size)
        assert_near(matrix(place, rope) @ x, y, size)
        turned_once = score(np.eye(66), x, place, rope, gain=rope.attention_factor**0.5)
        assert_near(turned_once, y, size)
        turned = blocks(place, rope) @ np.stack((x[first], x[second]), -1)[..., None]
        assert_near(turned[..., 0], np.stack((y[first], y[second]), -1), size)


def test_blocks_take_positions_of_any_shape() -> None:
    """One 2x2 rotation for every pair of every position."""
    rope = Rope(head_dim=6, pairing="half")
    many = blocks([[0, 1], [2, 3]], rope)
    assert many.shape == (2, 2, 3, 2, 2)
    for place in range(4):
        np.testing.assert_array_equal(many[place // 2, place % 2], blocks(place, rope))


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_the_other_direction_is_the_inverse(pairing: Any) -> None:
    """Direction -1 at p is direction 1 at -p, to the errors of their cosines and sines."""
    there = Rope(head_dim=16, pairing=pairing)
    back = Rope(head_dim=16, pairing=pairing, direction=-1)
    x = draws(1, 16)
    for place in (1, 5, 2**40, 0.25):
        off = np.abs(rotate(x, place, back) - rotate(x, -place, there))
        assert off.max() <= 4 * COS_SIN_ERROR * np.abs(x).max()


@pytest.mark.parametrize(("pairing", "out"), [PAIRINGS, PAIRINGS[::-1]])
def test_the_result_may_have_another_pairing(pairing: Any, out: Any) -> None:
    """DeepSeek reads interleaved pairs and writes halves: the plain result, re-ordered."""
    slice_ = {"rotary_dim": 12, "rotary_start": 3}
    plain = Rope(head_dim=16, pairing=pairing, **slice_)
    other = Rope(head_dim=16, pairing=pairing, pairing_out=out, **slice_)
    x = draws(2, 5, 1, 16)
    expected = change_pairing(rotate(x, range(5), plain), pairing, out, **slice_)
    np.testing.assert_array_equal(rotate(x, range(5), other), expected)
    sizes = np.linalg.norm(x, axis=-1, keepdims=True)
    assert_near(rotate_complex(x, range(5), other), expected, sizes)
    assert_near(matrix(4, other) @ x[4, 0], expected[4, 0], np.linalg.norm(x[4]))
    assert score(x[0, 0], x[1, 0], 7, other) == score(x[0, 0], x[1, 0], 7, plain)


@given(strategies.placed_ropes(), st.integers(0, 2**32))
def test_the_inverse_undoes_any_rotation(placed: tuple[Rope, Any], seed: int) -> None:
    """Also where the result has another pairing."""
    rope, position = placed
    x = draws(seed, 1, 1, rope.head_dim)
    places = [position]
    again = rotate(rotate(x, places, rope), places, rope, inverse=True)
    assert_near(again, x, 2 * np.linalg.norm(x))  # two rotations, two errors


@pytest.mark.parametrize("turn", [rotate, rotate_complex])
@pytest.mark.parametrize("start", [0, 2, 6])
def test_coordinates_outside_the_slice_pass_bit_for_bit(turn: Any, start: int) -> None:
    """Before and after it, and the slice itself is a head of its own."""
    rope = Rope(head_dim=16, pairing="half", rotary_dim=10, rotary_start=start)
    x = draws(3, 4, 2, 16)
    y = turn(x, range(4), rope)
    inside = slice(start, start + 10)
    outside = [i for i in range(16) if not start <= i < start + 10]
    assert y[..., outside].tobytes() == x[..., outside].tobytes()
    alone = turn(x[..., inside], range(4), Rope(head_dim=10, pairing="half"))
    np.testing.assert_array_equal(y[..., inside], alone)


@pytest.mark.parametrize(
    ("shape", "places"),
    [
        pytest.param((5, 3, 8), [3, 1, 4, 1, 5], id="seq"),
        pytest.param((2, 5, 3, 8), [3, 1, 4, 1, 5], id="one-row-for-the-batch"),
        pytest.param((2, 5, 3, 8), [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]], id="batch"),
        pytest.param((2, 5, 3, 8), [[7], [-7]], id="one-position-a-sequence"),
        pytest.param((2, 5, 3, 8), 9, id="scalar"),
    ],
)
def test_every_token_of_every_head_turns_by_its_own_position(shape: Any, places: Any) -> None:
    """Against a plain loop over tokens and heads."""
    rope = Rope(head_dim=8, pairing="interleaved")
    x = draws(4, *shape)
    before = x.copy()
    y = rotate(x, places, rope)
    token_places = np.broadcast_to(places, shape[:-2])
    for index in np.ndindex(*shape[:-1]):
        expected = oracle.turned(x[index], int(token_places[index[:-1]]), rope)
        assert_near(y[index], expected, np.linalg.norm(x[index]))
    np.testing.assert_array_equal(x, before)


@pytest.mark.parametrize("x", [[1, 2, 3, 4], np.float16([1, 2, 3, 4]), np.uint8([1, 2, 3, 4])])
def test_anything_real_is_turned_in_float64(x: Any) -> None:
    """Lists and narrow dtypes alike, without their rounding."""
    rope = Rope(head_dim=4, pairing="half")
    y = rotate(x, 0.5, rope)
    assert y.dtype == np.float64
    np.testing.assert_array_equal(y, rotate([1.0, 2.0, 3.0, 4.0], 0.5, rope))


def test_a_score_broadcasts_and_counts_the_still_coordinates() -> None:
    """Queries against keys at every distance, the unrotated tail included."""
    rope = Rope(head_dim=10, pairing="half", rotary_dim=6, rotary_start=2)
    q, k = draws(6, 4, 1, 10), draws(7, 1, 5, 10)
    distance = np.arange(5) - np.arange(4)[:, None]
    got = score(q, k, distance, rope)
    for m, n in np.ndindex(4, 5):
        expected = oracle.turned(q[m, 0], m, rope) @ oracle.turned(k[0, n], n, rope)
        size = np.linalg.norm(q[m]) * np.linalg.norm(k[0, n])
        assert abs(got[m, n] - expected) <= 1e-15 * size


LEADING = r"positions must be a scalar or broadcast to the leading dimensions \[.*\] of x "


@pytest.mark.parametrize("turn", [rotate, rotate_complex])
@pytest.mark.parametrize(
    ("shape", "places"),
    [((5, 1, 8), [1, 2]), ((8,), [1]), ((2, 8), [1, 2]), ((5, 1, 8), [[0] * 5] * 2)],
    ids=str,
)
def test_positions_that_do_not_fit_are_refused(turn: Any, shape: Any, places: Any) -> None:
    """Heads are not tokens, and tokens are not made up."""
    with pytest.raises(PositionError, match=LEADING):
        turn(np.zeros(shape), places, Rope(head_dim=8, pairing="half"))


@pytest.mark.parametrize("name", ["x", "q", "k"])
@pytest.mark.parametrize(
    ("vector", "text"),
    [
        (np.zeros(6), "must end in head_dim (8), got shape [6]"),
        (3.0, "must end in head_dim (8), got shape []"),
        (np.zeros(8, complex), "must hold real numbers, got complex128"),
        (np.zeros(8, bool), "must hold real numbers, got bool"),
        (["a"] * 8, "must hold real numbers, got <U1"),
    ],
    ids=["width", "scalar", "complex", "bool", "text"],
)
def test_what_cannot_be_turned_is_refused(name: str, vector: Any, text: str) -> None:
    """With the name of the argument."""
    rope, good = Rope(head_dim=8, pairing="half"), np.zeros(8)
    calls = {
        "x": lambda: rotate(vector, 0, rope),
        "q": lambda: score(vector, good, 0, rope),
        "k": lambda: score(good, vector, 0, rope),
    }
    with pytest.raises(TensorError) as caught:
        calls[name]()
    assert str(caught.value) == f"{name} {text}"


def test_a_matrix_is_of_one_position() -> None:
    """Blocks are for many."""
    with pytest.raises(PositionError) as caught:
        matrix([1, 2], Rope(head_dim=8, pairing="half"))
    assert str(caught.value) == (
        "position must be a single position, got shape [2]; for several positions use "
        "phasor.numpy.blocks"
    )


def test_a_matrix_on_several_axes_is_of_a_coordinate_on_each() -> None:
    """With the way to give the same on all of them."""
    with pytest.raises(PositionError, match="one coordinate per axis"):
        matrix(0, Rope(head_dim=8, pairing="half", axes=Axial((2, 2))))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "aceg bdfh"),
        ({"head_dim": 4}, "ac bd eg fh"),
        ({"head_dim": 4, "rotary_dim": 2}, "ab cd ef gh"),
        ({"rotary_dim": 6}, "ace bdf gh"),
        ({"rotary_dim": 4, "rotary_start": 2}, "ab ce df gh"),
        ({"rotary_start": 4}, "abcd eg fh"),
    ],
    ids=str,
)
def test_interleaved_coordinates_become_halves(options: Any, expected: str) -> None:
    """The first of each pair, then the second, within every head's rotated slice."""
    letters = np.array(list("abcdefgh"))
    halves = change_pairing(letters, "interleaved", "half", **options)
    assert "".join(halves) == expected.replace(" ", "")
    back = change_pairing(halves, "half", "interleaved", **options)
    np.testing.assert_array_equal(back, letters)
    np.testing.assert_array_equal(change_pairing(letters, "half", "half", **options), letters)


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_changed_projections_give_the_same_scores(heads: int) -> None:
    """Weights [out, in] of grouped heads, partly rotated: only the convention has changed."""
    slice_: dict[str, Any] = {"rotary_dim": 6, "rotary_start": 1}
    before = Rope(head_dim=8, pairing="interleaved", **slice_)
    after = Rope(head_dim=8, pairing="half", **slice_)
    tokens, wq, wk = draws(8, 5, 12), draws(9, 4 * 8, 12), draws(10, heads * 8, 12)

    def scores(wq: np.ndarray, wk: np.ndarray, rope: Rope) -> np.ndarray:
        q = rotate((tokens @ wq.T).reshape(5, 4, 8), range(5), rope)
        k = rotate((tokens @ wk.T).reshape(5, heads, 8), range(5), rope)
        return np.einsum("mhd,nhd->hmn", q, np.repeat(k, 4 // heads, axis=1))

    def changed(weight: np.ndarray) -> np.ndarray:
        return change_pairing(weight, "interleaved", "half", head_dim=8, axis=0, **slice_)

    reference = scores(wq, wk, before)
    np.testing.assert_allclose(scores(changed(wq), changed(wk), after), reference, atol=1e-12)
    assert np.abs(scores(wq, wk, after) - reference).max() > 0.1  # the mistake it prevents
    undone = change_pairing(changed(wq), "half", "interleaved", head_dim=8, axis=0, **slice_)
    assert undone.tobytes() == wq.tobytes()


@pytest.mark.parametrize(
    ("arguments", "options", "kind", "text"),
    [
        (("half", "neox"), {}, SpecError, "target must be 'half' or 'interleaved'"),
        (("neox", "half"), {}, SpecError, "must be 'half' or 'interleaved', got 'neox'"),
        (PAIRINGS, {"axis": 1}, TensorError, "axis must be one of the 1 axes of x, got 1"),
        (PAIRINGS, {"head_dim": 5}, SpecError, "rotary_dim must be even, got 5"),
        (PAIRINGS, {"head_dim": 1}, SpecError, "head_dim must be a whole number >= 2, got 1"),
        (PAIRINGS, {"rotary_dim": 10}, SpecError, "rotary_start + rotary_dim must be at most"),
        (PAIRINGS, {"rotary_start": -2}, SpecError, "rotary_start must be a whole number >= 0"),
        (
            PAIRINGS,
            {"head_dim": 6},
            TensorError,
            "axis -1 of x must hold whole heads of head_dim 6, got length 8",
        ),
    ],
    ids=str,
)
def test_a_change_of_pairing_that_means_nothing_is_refused(
    arguments: Any, options: Any, kind: Any, text: str
) -> None:
    """Pairings, slices and shapes alike."""
    with pytest.raises(kind) as caught:
        change_pairing(np.zeros(8), *arguments, **options)
    assert text in str(caught.value)
