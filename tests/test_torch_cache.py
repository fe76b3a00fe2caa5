"""Rotated keys that are moved, undone or retuned are the keys that would have been rotated so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mpmath import mp, mpf
from torch import Tensor

from phasor import (
    NTK,
    Alternating,
    Axial,
    DynamicNTK,
    Interleaved,
    Linear,
    LongRope,
    PhasorError,
    PositionError,
    Rope,
    Sectioned,
    SpecError,
    TensorError,
)
from phasor.frequencies import real_inv_freq
from phasor.torch import cache, rotate
from phasor.torch.cache import retune_, shift_, undo_
from phasor.torch.splice import evict, insert

from .strategies import EVERY_LAW
from .torch_oracle import (
    DTYPES,
    ROW_ERROR_64,
    axis_of_pair,
    excess_by,
    float64,
    implementations,
    normal,
    pair_places,
    row_error,
    run_on,
    turn,
)

LONG = LongRope(
    short_factors=(1.0, 1.5, 1.0, 3.0),
    long_factors=(1.0, 4.5, 8.0, 33.0),
    original_max_positions=16,
    factor=4.0,
    short_attention_factor=1.1,
    long_attention_factor=1.4,
)
# of every layout one, for 8 coordinates
LAYOUTS: dict[str, Rope] = {
    "half": Rope(head_dim=8, pairing="half"),
    "interleaved": Rope(head_dim=8, pairing="interleaved"),
    "written in another pairing": Rope(head_dim=8, pairing="interleaved", pairing_out="half"),
    "a slice": Rope(head_dim=8, pairing="half", rotary_dim=4, rotary_start=3),
    "clockwise": Rope(head_dim=8, pairing="half", direction=-1),
    "sectioned": Rope(head_dim=8, pairing="half", axes=Sectioned((2, 1, 1))),
    "axial": Rope(head_dim=8, pairing="half", axes=Axial((1, 3))),
    "interleaved sections": Rope(head_dim=8, pairing="half", axes=Interleaved((2, 1, 1))),
    "alternating": Rope(head_dim=8, pairing="half", axes=Alternating((2, 1, 1))),
}


def turns(rope: Rope, positions: Any) -> np.ndarray:
    """``exp(i angle)`` of every pair, complex128; frequencies are data here, of any law."""
    places = np.array(torch.as_tensor(positions).tolist(), dtype=object)
    if rope.axes.n_axes == 1:
        places = places[..., None]
    with mp.workdps(60):
        steps = [mpf(str(f)) for f in real_inv_freq(rope)]
    made = np.empty((*places.shape[:-1], len(steps)), dtype=complex)
    for token in np.ndindex(*places.shape[:-1]):
        for pair, axis in enumerate(axis_of_pair(rope)):
            made[token][pair] = turn(places[token][axis], steps[pair], rope.direction)
    return made


def assert_turned(
    actual: Tensor,
    stored: Tensor,
    rows: np.ndarray,
    rope: Rope,
    *,
    error: float,
    gain: float = 1.0,
) -> None:
    """``actual`` is ``stored`` times ``rows``, rounded once, in the pairing that keys lie in."""
    pairing = (rope.output_pairing, rope.output_pairing)
    worst = excess_by(actual, stored, rows, pairing, rope.rotary_start, gain=gain, error=error)
    assert worst <= 1, f"{stored.dtype}: {worst:.3g} times the bound"


def places(rope: Rope, *tokens: int, seed: int = 0) -> Tensor:
    """Positions from -40 to 40, with an axis of coordinates where the Rope has several."""
    generator = torch.Generator().manual_seed(seed)
    axes = () if rope.axes.n_axes == 1 else (rope.axes.n_axes,)
    return torch.randint(-40, 41, (*tokens, *axes), generator=generator)


# --- shift_


@pytest.mark.parametrize("implementation", implementations())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_token_moves_by_its_own_delta(
    name: str, dtype: torch.dtype, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Along every axis, with one rounding."""
    run_on(implementation, monkeypatch)
    rope, stored = LAYOUTS[name], normal(2, 5, 3, 8, dtype=dtype)
    delta, keys = places(rope, 2, 5), stored.clone()
    assert shift_(keys, delta, rope) is keys
    assert_turned(keys, stored, turns(rope, delta), rope, error=row_error(dtype, delta))


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
    assert bool(((moved - fresh).abs() <= 4 * (ROW_ERROR_64 + 4 * 2**-52) * size).all())


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
    assert_turned(keys, stored, turns(rope, delta), rope, error=ROW_ERROR_64)


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
        return ROW_ERROR_64 + 5**0.5 * 2**-53
    inner = row_error(torch.float32, 5) + 5**0.5 * 2**-24
    rounding = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    return rounding + inner * (1 + rounding)


def relative_errors(keys: Tensor, stored: Tensor, rope: Rope, moved: int) -> np.ndarray:
    """Distance of every pair from where it should be, in units of its length."""
    first, second = pair_places(rope.output_pairing, 0, rope.num_pairs)
    came, was = (float64(x)[..., first] + 1j * float64(x)[..., second] for x in (keys, stored))
    return np.abs(came - was * turns(rope, moved)) / np.abs(was)


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
    rope = Rope(head_dim=4, pairing="half", inv_freq=(2**-9.1, 2**-7))
    stored = torch.full((1, 1, 4), 1.7).bfloat16()
    keys = stored.clone()
    for _ in range(1000):
        shift_(keys, -1, rope)
    stuck, moving = keys[..., [0, 2]], keys[..., [1, 3]]
    assert torch.equal(stuck, stored[..., [0, 2]])
    assert not torch.equal(moving, stored[..., [1, 3]])


# --- undo_


@pytest.mark.parametrize("gain", [1.0, 1.4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_undone_keys_are_the_keys_before(name: str, dtype: torch.dtype, gain: float) -> None:
    """In the pairing that they were read in, without the gain."""
    rope, stored = LAYOUTS[name], normal(2, 5, 3, 8, dtype=dtype)
    at, keys = places(rope, 2, 5), stored.clone()
    assert undo_(keys, at, rope, gain=gain) is keys
    pairing = (rope.output_pairing, rope.pairing)
    rows = turns(rope, at).conj()
    error = row_error(dtype, at)
    worst = excess_by(keys, stored, rows, pairing, rope.rotary_start, gain=1 / gain, error=error)
    assert worst <= 1


# --- retune_


def assert_retuned(
    keys: Tensor, stored: Tensor, at: Tensor, old: Rope, new: Rope, gain: float = 1.0
) -> None:
    """One rotation by the difference of the angles, one rounding."""
    rows = turns(new, at) * turns(old, at).conj()
    assert_turned(keys, stored, rows, old, error=3 * ROW_ERROR_64, gain=gain)


@pytest.mark.parametrize("name", EVERY_LAW)
def test_keys_of_the_plain_law_become_keys_of_any_other(name: str) -> None:
    """And back."""
    plain = Rope(head_dim=64, pairing="half")
    law = Rope(head_dim=64, pairing="half", scaling=EVERY_LAW[name])
    stored, at = normal(4, 2, 64), torch.tensor([0, 1, 4097, 2**33])
    there = retune_(stored.clone(), at, plain, law)
    assert_retuned(there, stored, at, plain, law)
    assert_retuned(retune_(there.clone(), at, law, plain), there, at, law, plain)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_keys_of_every_layout_are_retuned(name: str, dtype: torch.dtype) -> None:
    """Along every axis, with one rounding; the coordinates that do not turn keep their bits."""
    old = LAYOUTS[name]
    new = replace(old, base=500.0, direction=-old.direction)
    stored, at = normal(2, 5, 3, 8, dtype=dtype), places(old, 2, 5)
    keys = stored.clone()
    assert retune_(keys, at, old, new) is keys
    assert_retuned(keys, stored, at, old, new)


GROWTHS: dict[str, tuple[Any, int, int]] = {
    "LongRoPE from short to long": (LONG, 16, 17),
    "LongRoPE from long to short": (LONG, 17, 16),
    "dynamic NTK by one token": (DynamicNTK(factor=2.0, original_max_positions=16), 40, 41),
    "dynamic NTK out of the original context": (
        DynamicNTK(factor=2.0, original_max_positions=16), 16, 64,
    ),
}  # fmt: skip


@pytest.mark.parametrize("growth", GROWTHS)
def test_a_rule_that_picks_another_law_retunes_keys(growth: str) -> None:
    """To those that the new law would have made, attention factor included."""
    rule, before, after = GROWTHS[growth]
    rope = Rope(head_dim=8, pairing="half", scaling=rule)
    old, new = rope.at(before), rope.at(after)
    raw, at = normal(16, 2, 8, dtype=torch.float64), torch.arange(16)
    keys = rotate(raw, at, old, gain=old.attention_factor)
    retune_(keys, at, old, new, gain=new.attention_factor / old.attention_factor)
    fresh = turns(new, at)
    error = 8 * (ROW_ERROR_64 + 4 * 2**-52)  # of two rotations, and what pairs add by being two
    assert_turned(keys, raw, fresh, new, error=error, gain=new.attention_factor)


def test_the_attention_factor_of_longrope_changes_with_its_list() -> None:
    """So that the test above sees a gain."""
    rope = Rope(head_dim=8, pairing="half", scaling=LONG)
    assert (rope.at(16).attention_factor, rope.at(17).attention_factor) == (1.1, 1.4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_token_at_the_origin_keeps_its_bits(dtype: torch.dtype) -> None:
    """For R'(0) R(0) is the identity."""
    stored = normal(2, 2, 8, dtype=dtype)
    keys = retune_(stored.clone(), torch.arange(2), LAYOUTS["half"], LAYOUTS["clockwise"])
    assert torch.equal(keys[0], stored[0])
    assert not torch.equal(keys[1], stored[1])


AT: dict[str, tuple[str, Callable[[], Any]]] = {
    "one for all": ("half", lambda: torch.tensor(9)),
    "a number": ("half", lambda: 9),
    "every token's": ("half", lambda: torch.arange(14).view(2, 7)),
    "every sequence's own": ("half", lambda: torch.tensor([[3], [50]])),
    "shared by sequences": ("half", lambda: list(range(7))),
    "fractions": ("half", lambda: torch.linspace(-3, 3, 7, dtype=torch.float64)),
    "beyond what digits hold": ("half", lambda: torch.arange(7) + 2**50),
    "axes, one for all": ("sectioned", lambda: torch.tensor([3, 1, 2])),
    "axes, every token's": ("sectioned", lambda: torch.arange(21).view(7, 3)),
}


@pytest.mark.parametrize("rows_at_once", [1, 3 * 8, 1 << 20])
@pytest.mark.parametrize("form", AT)
def test_positions_of_every_form_are_taken(
    form: str, rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a token, three or all of them are worked on at once."""
    monkeypatch.setattr(cache, "_CHUNK", rows_at_once)
    name, given_at = AT[form]
    old, stored = LAYOUTS[name], normal(2, 7, 3, 8, dtype=torch.float64)
    new = replace(old, base=77.0)
    keys = retune_(stored.clone(), given_at(), old, new)
    tail = () if old.axes.n_axes == 1 else (3,)
    at = torch.as_tensor(given_at()).expand(2, 7, *tail)
    assert_retuned(keys, stored, at, old, new)


def test_a_cache_without_tokens_is_retuned_into_itself() -> None:
    """There is nothing to do."""
    old, keys = LAYOUTS["half"], torch.empty(2, 0, 3, 8)
    assert retune_(keys, torch.empty(0, dtype=torch.int64), old, replace(old, base=7.0)) is keys


# --- evict and insert


def assert_fresh(keys: Tensor, raw: Tensor, at: Any, rope: Rope) -> None:
    """Float64 keys are ``raw`` rotated to ``at``, up to two rotations."""
    at = torch.as_tensor(at).expand(*raw.shape[:-2], *([] if rope.axes.n_axes == 1 else [-1]))
    error = 8 * (ROW_ERROR_64 + 4 * 2**-52)
    pairing = (rope.pairing, rope.output_pairing)
    worst = excess_by(keys, raw, turns(rope, at), pairing, rope.rotary_start, error=error)
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


# --- what is refused

K = torch.zeros(2, 5, 3, 8)
HALF, SECTIONED = LAYOUTS["half"], LAYOUTS["sectioned"]
RULE = Rope(head_dim=8, pairing="half", scaling=LONG)
REFUSED: dict[str, tuple[Callable[[], Any], type[PhasorError], str]] = {
    "a delta for other tokens": (
        lambda: shift_(K, torch.arange(4), HALF), PositionError, r"broadcast .* \[2, 5\]"),
    "a delta without axes": (
        lambda: shift_(K, 3, SECTIONED), PositionError, "one coordinate per axis"),
    "a rule to shift with": (lambda: shift_(K, 1, RULE), SpecError, r"rope\.at\(seq_len\)"),
    "no Rope": (lambda: shift_(K, 1, None), SpecError, "phasor.Rope, got NoneType"),
    "keys of another width": (
        lambda: shift_(K[..., :6], 1, HALF), TensorError, r"head_dim \(8\)"),
    "keys that share memory": (
        lambda: shift_(K[:1].expand(2, 5, 3, 8), 1, HALF), TensorError, "share memory"),
    "a gain of nothing": (lambda: undo_(K, 1, HALF, gain=0), SpecError, "gain must be .* > 0"),
    "a rule to undo": (lambda: undo_(K, 1, RULE), SpecError, r"rope\.at\(seq_len\)"),
    "a rule to retune from": (
        lambda: retune_(K, 1, RULE, HALF), SpecError, r"rope\.at\(seq_len\)"),
    "a rule to retune to": (
        lambda: retune_(K, 1, HALF, RULE), SpecError, r"rope\.at\(seq_len\)"),
    "no Rope to retune to": (
        lambda: retune_(K, 1, HALF, 3), SpecError, "new must be a phasor.Rope, got int"),
    "another pairing": (
        lambda: retune_(K, 1, HALF, LAYOUTS["interleaved"]), SpecError,
        r"output_pairing of old \(half\).*got interleaved; undo_"),
    "another slice": (
        lambda: retune_(K, 1, HALF, LAYOUTS["a slice"]), SpecError, r"rotary_dim of old \(8\)"),
    "other axes": (
        lambda: retune_(K, [1, 1, 1], SECTIONED, LAYOUTS["alternating"]), SpecError, "axes of old"),
    "a negative gain": (
        lambda: retune_(K, 1, HALF, HALF, gain=-1), SpecError, "gain must be .* > 0, got -1"),
    "positions of other tokens": (
        lambda: retune_(K, torch.arange(4), HALF, HALF), PositionError, r"broadcast .* \[2, 5\]"),
    "an end beyond the last token": (
        lambda: evict(K, K, 0, 6, HALF), PositionError, "stop must be .* from 0 to 5, got 6"),
    "a range that runs backwards": (
        lambda: evict(K, K, 3, 2, HALF), PositionError, "start must be .* from 0 to 2, got 3"),
    "a negative index": (
        lambda: evict(K, K, -2, 5, HALF), PositionError, "start must be .* got -2"),
    "a gap that is not named": (
        lambda: evict(K, K, 0, 1, SECTIONED), PositionError, "gap must be given .* 3 axes"),
    "a gap of one axis": (
        lambda: evict(K, K, 0, 1, SECTIONED, gap=1), PositionError, r"per axis \(3\), got 1"),
    "a fractional gap": (
        lambda: evict(K, K, 0, 1, HALF, gap=0.5), PositionError, "gap must be a whole number"),
    "values of other tokens": (
        lambda: evict(K, K[:, 1:], 0, 1, HALF), TensorError, "of the same tokens"),
    "a rule to evict with": (
        lambda: evict(K, K, 0, 1, RULE), SpecError, r"rope\.at\(seq_len\)"),
    "a place behind the end": (
        lambda: insert(K, K, 6, K, K, HALF), PositionError, "at must be .* from 0 to 5, got 6"),
    "new keys of another dtype": (
        lambda: insert(K, K, 0, K.half(), K, HALF), TensorError,
        r"new_keys .* torch\.float32 .* torch\.float16"),
    "new values of another width": (
        lambda: insert(K, K, 0, K, K[..., :4], HALF), TensorError,
        r"new_values must be \[2, 5, 3, 8\]"),
    "an offset that is not named": (
        lambda: insert(K, K, 0, K, K, SECTIONED, gap=[1, 1, 1]), PositionError, "offset must be"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_done_is_refused_in_words(case: str) -> None:
    """And nothing is written."""
    call, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        call()
    assert not K.any()


def test_gradients_flow_through_a_shift() -> None:
    """A rotation in place is differentiable, as its verb is."""
    raw = normal(3, 2, 8, dtype=torch.float64).requires_grad_()
    keys = shift_(raw * 2, 5, HALF)
    keys.backward(torch.ones_like(keys))
    assert raw.grad is not None
    back = 2 * rotate(torch.ones(3, 2, 8, dtype=torch.float64), -5, HALF)
    assert torch.allclose(raw.grad, back, atol=1e-14)


def test_laws_of_explicit_frequencies_are_retuned_too() -> None:
    """A Rope may state its frequencies; NTK's and theirs are then one law."""
    ntk = Rope(head_dim=8, pairing="half", scaling=NTK(factor=4.0))
    stated = Rope(head_dim=8, pairing="half", inv_freq=(1.0, 0.5, 0.0, 0.001))
    halved = Rope(head_dim=8, pairing="half", scaling=Linear(factor=2.0))
    stored, at = normal(6, 2, 8, dtype=torch.float64), torch.arange(6)
    step = retune_(stored.clone(), at, ntk, stated)
    assert_retuned(step, stored, at, ntk, stated)
    assert_retuned(retune_(step.clone(), at, stated, halved), step, at, stated, halved)
