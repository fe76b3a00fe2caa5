"""Rotated keys that are moved, undone, cut or joined are the keys freshly rotated to there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from phasor import PhasorError, Rope
from phasor.angles import COS_SIN_ERROR
from phasor.torch import rotate, rotate_
from phasor.torch.kv_cache import evict, insert, retune_, shift_

from ...each import each
from ...oracle import exact_rows, pair_places
from ...strategies import EVERY_LAW
from ..torch_arrays import DTYPES, excess_by, float64, implementations, normal, row_error, run_on
from .turned_keys import HALF, LAYOUTS, assert_turned, places


@pytest.mark.parametrize("implementation", implementations())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each("name", LAYOUTS)
def test_every_token_moves_by_its_own_delta(
    name: str, dtype: torch.dtype, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Along every axis, with one rounding."""
    run_on(implementation, monkeypatch)
    rope, stored = LAYOUTS[name], normal(2, 5, 3, 8, dtype=dtype)
    delta, keys = places(rope, 2, 5), stored.clone()
    assert shift_(keys, delta, rope) is keys
    assert_turned(keys, stored, exact_rows(rope, delta), rope, error=row_error(dtype, delta))


@pytest.mark.parametrize("name", EVERY_LAW)
def test_shifted_keys_are_fresh_keys(name: str) -> None:
    """Under every law: R(d) R(p) k is R(p + d) k, each side off by the error of its rows."""
    rope = Rope(head_dim=64, pairing="half", scaling=EVERY_LAW[name])
    raw, at = normal(7, 2, 64, dtype=torch.float64), torch.arange(7) * 1000
    delta = torch.tensor([5, -3, 0, 700, -9000, 2, 1])
    fresh = rotate(raw, at + delta, rope)
    moved = shift_(rotate(raw, at, rope), delta, rope)
    size = (raw[..., :32].abs() + raw[..., 32:].abs()).repeat(1, 1, 2)
    # three rotations; a rotated pair is sqrt(2) wider along an axis than the one before, at most
    assert bool(((moved - fresh).abs() <= 4 * (COS_SIN_ERROR + 4 * 2**-52) * size).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_token_that_stays_keeps_its_bits(dtype: torch.dtype) -> None:
    """Its neighbours do not."""
    rope, stored = LAYOUTS["half"], normal(4, 2, 8, dtype=dtype)
    keys = shift_(stored.clone(), torch.tensor([0, 1, 0, -1]), rope)
    assert torch.equal(keys[::2], stored[::2])
    assert (keys[1::2] != stored[1::2]).any(-1).all()


def test_keys_move_across_zero_and_by_more_than_digits_hold() -> None:
    """Any int64 is a delta."""
    rope, stored = LAYOUTS["half"], normal(3, 2, 8, dtype=torch.float64)
    delta = torch.tensor([2**62 + 1, -(2**63), 2**40])
    keys = shift_(stored.clone(), delta, rope)
    assert_turned(keys, stored, exact_rows(rope, delta), rope, error=COS_SIN_ERROR)


def test_a_view_is_shifted_where_it_lies() -> None:
    """As of a cache [batch, heads, seq, width] that is not full; the rest stays as it was."""
    rope, whole = LAYOUTS["half"], normal(2, 3, 9, 8, dtype=torch.float64)
    held = whole.clone()
    shift_(held[:, :, 2:6].transpose(1, 2), 3, rope)
    expected = rotate(whole.transpose(1, 2), 3, rope).transpose(1, 2)
    assert torch.equal(held[:, :, 2:6], expected[:, :, 2:6])
    assert torch.equal(held[:, :, :2], whole[:, :, :2])
    assert torch.equal(held[:, :, 6:], whole[:, :, 6:])


def step_error(dtype: torch.dtype) -> float:
    """Error of one shift by less than 2**20, in units of a pair's length: the page's ``s``."""
    if dtype == torch.float64:
        return COS_SIN_ERROR + 5**0.5 * 2**-53
    inner = row_error(torch.float32, 5) + 5**0.5 * 2**-24
    rounding = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    return rounding + inner * (1 + rounding)


def relative_errors(keys: Tensor, stored: Tensor, rope: Rope, moved: int) -> np.ndarray:
    """Distance of every pair from where it should be, in units of its length."""
    first, second = pair_places(rope.output_pairing, 0, rope.num_pairs)
    came, was = (float64(x)[..., first] + 1j * float64(x)[..., second] for x in (keys, stored))
    return np.abs(came - was * exact_rows(rope, moved)) / np.abs(was)


@given(
    st.lists(st.integers(-(2**19), 2**19), min_size=1, max_size=12),
    st.sampled_from(DTYPES),
    st.sampled_from(["half", "interleaved"]),
)
def test_shifts_add_up(deltas: list[int], dtype: torch.dtype, pairing: Any) -> None:
    """In any number of steps, each of which rounds once."""
    rope, stored = Rope(head_dim=16, pairing=pairing), normal(3, 2, 16, dtype=dtype)
    keys = stored.clone()
    for delta in deltas:
        shift_(keys, delta, rope)
    bound = (1 + step_error(dtype)) ** len(deltas) - 1
    # no pair is shorter than a hundredth, beside which float16's smallest step is nothing
    below = len(deltas) * 2**-24 * 100 if dtype == torch.float16 else 0.0
    assert relative_errors(keys, stored, rope, sum(deltas)).max() <= bound + below


def test_a_thousand_shifts_in_float32_stay_below_the_bound() -> None:
    """A thousand times the error of one, which is still four digits."""
    rope, stored = Rope(head_dim=64, pairing="half"), normal(8, 2, 64)
    keys = stored.clone()
    for _ in range(1000):
        shift_(keys, -1, rope)
    worst = relative_errors(keys, stored, rope, -1000).max()
    assert worst <= (1 + step_error(torch.float32)) ** 1000 - 1 < 4e-4


@pytest.mark.parametrize("steps", [1, 10, 100])
def test_long_shifts_in_bfloat16_are_a_random_walk(steps: int) -> None:
    """The root mean square error of n uneven ones is 2**-7 sqrt(0.541 n / 12) of the length."""
    rope = Rope(head_dim=64, pairing="half", base=100.0)  # the slowest pair turns 1/87 a position
    generator = torch.Generator().manual_seed(1)
    # lengths spread evenly over binades, as the derivation wants them
    spread = 2 ** (8 * torch.rand(200, 8, 1, generator=generator))
    stored = (normal(200, 8, 64) * spread).bfloat16()
    keys, deltas = stored.clone(), torch.randint(100, 1000, (steps,), generator=generator)
    for delta in deltas.tolist():
        shift_(keys, -delta, rope)
    errors = relative_errors(keys, stored, rope, -int(deltas.sum()))
    predicted = 2**-7 * (0.541 * steps / 12) ** 0.5
    # tokens share their deltas, so a walk of 100 steps is one sample of each pair's
    assert np.sqrt((errors**2).mean()) == pytest.approx(predicted, rel=0.05)


def test_bfloat16_keys_do_not_turn_by_less_than_they_can_show() -> None:
    """A pair (x, x) is stuck below 2**-9 radians a step, however many there are."""
    rope = Rope(head_dim=4, pairing="half", explicit_inv_freq=(2**-9.1, 2**-7))
    stored = torch.full((1, 1, 4), 1.7).bfloat16()
    keys = stored.clone()
    for _ in range(1000):
        shift_(keys, -1, rope)
    stuck, moving = keys[..., [0, 2]], keys[..., [1, 3]]
    assert torch.equal(stuck, stored[..., [0, 2]])
    assert not torch.equal(moving, stored[..., [1, 3]])


@each("gain", [1.0, 1.4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each("name", LAYOUTS)
def test_undone_keys_are_the_keys_before(name: str, dtype: torch.dtype, gain: float) -> None:
    """In the pairing that they were read in, without the gain."""
    rope, stored = LAYOUTS[name], normal(2, 5, 3, 8, dtype=dtype)
    at, keys = places(rope, 2, 5), stored.clone()
    rotate_(keys, at, rope, inverse=True, gain=gain)
    pairing = (rope.output_pairing, rope.pairing)
    rows = exact_rows(rope, at).conj()
    error = row_error(dtype, at)
    worst = excess_by(keys, stored, rows, pairing, rope.rotary_start, gain=1 / gain, error=error)
    assert worst <= 1


def test_gradients_flow_through_a_shift() -> None:
    """A rotation in place is differentiable, as its verb is."""
    raw = normal(3, 2, 8, dtype=torch.float64).requires_grad_()
    keys = shift_(raw * 2, 5, HALF)
    keys.backward(torch.ones_like(keys))
    assert raw.grad is not None
    back = 2 * rotate(torch.ones(3, 2, 8, dtype=torch.float64), -5, HALF)
    assert torch.allclose(raw.grad, back, atol=1e-14)


def assert_fresh(keys: Tensor, raw: Tensor, at: Any, rope: Rope) -> None:
    """Float64 keys are ``raw`` rotated to ``at``, up to two rotations."""
    at = torch.as_tensor(at).expand(*raw.shape[:-2], *([] if rope.axes.n_axes == 1 else [-1]))
    error = 8 * (COS_SIN_ERROR + 4 * 2**-52)
    pairing = (rope.pairing, rope.output_pairing)
    worst = excess_by(keys, raw, exact_rows(rope, at), pairing, rope.rotary_start, error=error)
    assert worst <= 1


@pytest.mark.parametrize("name", ["half", "written in another pairing", "a slice", "clockwise"])
@pytest.mark.parametrize(("start", "stop"), [(0, 3), (2, 5), (5, 9), (4, 4), (0, 9)])
def test_later_keys_close_the_gap(name: str, start: int, stop: int) -> None:
    """Keys are those of the tokens that stay, numbered anew; values are their own."""
    rope = LAYOUTS[name]
    raw, v = normal(2, 9, 3, 8, dtype=torch.float64), normal(2, 9, 3, 5, seed=1)
    given_keys = rotate(raw, torch.arange(9), rope)
    before = given_keys.clone(), v.clone()
    keys, values = evict(given_keys, v, start, stop, rope)
    stay = [i for i in range(9) if not start <= i < stop]
    assert_fresh(keys, raw[:, stay], torch.arange(len(stay)), rope)
    assert torch.equal(values, v[:, stay])
    assert torch.equal(given_keys, before[0])
    assert torch.equal(v, before[1])


@pytest.mark.parametrize("at", [0, 2, 6])
def test_later_keys_make_room(at: int) -> None:
    """What is put in was encoded from position 0; at the end, two caches are merged."""
    rope = LAYOUTS["written in another pairing"]
    raw, v = normal(2, 9, 3, 8, dtype=torch.float64), normal(2, 9, 3, 5, seed=1)
    old, new = [*range(at), *range(at + 3, 9)], list(range(at, at + 3))
    keys, values = insert(
        rotate(raw[:, old], torch.arange(6), rope), v[:, old], at,
        rotate(raw[:, new], torch.arange(3), rope), v[:, new], rope,
    )  # fmt: skip
    assert_fresh(keys, raw, torch.arange(9), rope)
    assert torch.equal(values, v)


def test_several_axes_close_the_gap_that_is_named() -> None:
    """An image of 2 x 2 cells took two positions, not four."""
    rope = LAYOUTS["sectioned"]
    raw = normal(8, 2, 8, dtype=torch.float64)
    image = [[2, 2, 2], [2, 2, 3], [2, 3, 2], [2, 3, 3]]
    at = torch.tensor([[0] * 3, [1] * 3, *image, [4] * 3, [5] * 3])
    keys, _ = evict(rotate(raw, at, rope), raw, 2, 6, rope, gap=[2, 2, 2])
    assert_fresh(keys, raw[[0, 1, 6, 7]], [[i] * 3 for i in range(4)], rope)


def test_several_axes_make_the_room_that_is_named() -> None:
    """The image again, put back."""
    rope = LAYOUTS["sectioned"]
    raw = normal(6, 2, 8, dtype=torch.float64)
    image = torch.tensor([[0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 1, 1]])
    text, middle = torch.tensor([[0] * 3, [1] * 3]), raw[1:5]
    held = rotate(raw[[0, 5]], text, rope)
    seen = rotate(middle, image, rope)
    keys, _ = insert(
        held, raw[[0, 5]], 1, seen, middle, rope, offset=(1, 1, 1), gap=(2, 2, 2)
    )  # fmt: skip
    assert_fresh(keys, raw, torch.cat([text[:1], image + 1, text[1:] + 2]), rope)


def test_keys_that_nothing_rotates_are_cut_alone() -> None:
    """Of a layer without positions."""
    raw = normal(5, 2, 8)
    keys, values = evict(raw, raw, 1, 3, None)
    assert torch.equal(keys, raw[[0, 3, 4]])
    again, _ = insert(keys, values, 1, raw[1:3], raw[1:3], None)
    assert torch.equal(again, raw)


HEADS_FIRST: dict[str, Any] = {
    "shift_": lambda k, v, **how: shift_(k, torch.arange(9), HALF, **how),
    "retune_": lambda k, v, **how: retune_(
        k, torch.arange(9), HALF, replace(HALF, base=7.0), **how
    ),
    "evict": lambda k, v, **how: evict(k, v, 2, 5, HALF, **how),
    "insert": lambda k, v, **how: insert(k, v, 4, k.clone(), v.clone(), HALF, **how),
}


@pytest.mark.parametrize("verb", HEADS_FIRST)
def test_heads_first_is_the_same_call_on_transposed_tensors(verb: str) -> None:
    """Bit for bit; what is written in place is the tensor that was given."""
    k, v = normal(2, 9, 3, 8), normal(2, 9, 3, 5, seed=1)
    given = [x.transpose(1, 2).contiguous() for x in (k, v)]
    expected = HEADS_FIRST[verb](k, v)
    found = HEADS_FIRST[verb](*given, heads_first=True)
    if verb.endswith("_"):
        assert found is given[0]
        expected, found = [expected], [found]
    assert [x.transpose(1, 2).shape for x in found] == [x.shape for x in expected]
    assert all(torch.equal(x.transpose(1, 2), y) for x, y in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("keys", "heads_first", "message"),
    [
        (torch.zeros(9, 8), True, r"keys must be \[..., heads, seq, head_dim\]"),
        ([1.0], True, "keys must be a dense torch.Tensor, got list"),
        (torch.zeros(9, 3, 8), 1, "heads_first must be True or False, got 1"),
    ],
    ids=["two dimensions", "a list", "a number"],
)
def test_what_cannot_have_heads_first_is_refused(keys: Any, heads_first: Any, message: str) -> None:
    """In words."""
    with pytest.raises(PhasorError, match=message):
        shift_(keys, 1, HALF, heads_first=heads_first)
