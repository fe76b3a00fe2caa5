"""Which phases an extended context shows for the first time, counted one distance at a time."""

from __future__ import annotations

import dataclasses
from typing import Any

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasor import Rope, SpecError
from phasor.extending import Coverage, coverage
from phasor.scaling import (
    DynamicNTK,
    Linear,
)

from .. import oracle
from ..ropes import LLAMA_2

SMALL = Rope(head_dim=16, pairing="half", base=1000.0)
RULE = DynamicNTK(factor=2.0, original_max_positions=8)


@mpmath.workdps(oracle.DIGITS)
def new_distances(rope: Rope, context: int, extended: Rope, to: int) -> list[list[int]]:
    """For every pair the distances below ``to`` whose phase was not met, by looking at each."""
    turn, tiny = 2 * mpmath.pi, mpmath.mpf(10) ** -25
    found = []
    for f, g in zip(oracle.frequencies(rope), oracle.frequencies(extended), strict=True):
        new = []
        for r in range(to):
            phase = (r * g) % turn
            at_start = phase < tiny or turn - phase < tiny
            # half open: the angle context * f is the first that was not met
            if context * f < turn and not at_start and phase > context * f - tiny:
                new.append(r)
        found.append(new)
    return found


def assert_counts(found: Coverage, new: list[list[int]]) -> None:
    """First and share of the new distances are those of the lists."""
    np.testing.assert_array_equal(found.first_new, [min(some, default=np.inf) for some in new])
    np.testing.assert_array_equal(found.new_share, [len(some) / found.to for some in new])


@given(st.data())
def test_any_frequencies_are_counted_right(data):
    """Pairs that stand still, barely turn, or step over the arc they met."""
    frequency = st.sampled_from([0.0, 1e-9, 0.001, 0.01, 0.05, 0.3, 1.0, 5.5, 6.2]) | st.floats(
        0, 7
    )
    both = st.lists(st.tuples(frequency, frequency), min_size=1, max_size=4)
    before, after = zip(*data.draw(both), strict=True)
    shape: dict[str, Any] = {"head_dim": 2 * len(before), "pairing": "half"}
    rope, extended = Rope(explicit_inv_freq=before, **shape), Rope(explicit_inv_freq=after, **shape)
    context, to = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 60))
    found = coverage(rope, context, extended, to)
    assert_counts(found, new_distances(rope, context, extended, to))


@pytest.mark.parametrize(
    ("head_dim", "base", "context", "pair"),
    [
        pytest.param(128, 10_000.0, 4096, 46, id="Llama 2: dimension 92"),
        pytest.param(128, 10_000.0, 2048, 41, id="Llama 1: dimension 82"),
        pytest.param(96, 10_000.0, 2048, 31, id="Phi-3-mini: dimension 62"),
        pytest.param(128, 500_000.0, 8192, 35, id="Llama 3: dimension 70"),
    ],
)
def test_pairs_that_never_turned_begin_at_the_critical_dimension(head_dim, base, context, pair):
    """2310.05209's published dimensions, in pairs; LongRoPE2 (2502.20082) states 31 and 35 too."""
    rope = Rope(head_dim=head_dim, pairing="half", base=base)
    found = coverage(rope, context, rope, 2 * context)
    assert found.never_turned.tolist() == [k >= pair for k in range(head_dim // 2)]
    assert found.has_new_phases.tolist() == found.never_turned.tolist()


@pytest.mark.parametrize(("base", "part"), [(2608, 0.25), (1304, 0.5), (652, 1.0)])
def test_critical_bases_give_the_slowest_pair_a_quarter_a_half_and_a_whole_turn(base, part):
    """``2T/pi``, ``T/pi`` and ``T/2pi`` of 2310.05209 at T = 4096.

    They are for a last pair of frequency ``1/base``; in 128 dimensions it is ``base**(2/128)`` up.
    """
    rope = Rope(head_dim=128, pairing="half", base=float(base))
    turned = coverage(rope, 4096, rope, 4096).trained_turns[-1]
    assert turned / base ** (2 / 128) == pytest.approx(part, rel=0.5 / base)


def test_turns_in_training_are_counted_over_the_trained_context():
    """Context times frequency over 2 pi of the Rope before, not of the one after."""
    extended = dataclasses.replace(LLAMA_2, scaling=Linear(factor=8.0))
    found = coverage(LLAMA_2, 4096, extended, 32768)
    expected = [4096 * 10_000.0 ** (-k / 64) / (2 * np.pi) for k in range(64)]
    np.testing.assert_allclose(found.trained_turns, expected, rtol=1e-14)
    np.testing.assert_allclose(found.extended_turns, expected, rtol=1e-14)


@pytest.mark.parametrize("context", [4096, 10**9, 2**40])
def test_an_unchanged_pair_is_new_exactly_at_the_context(context):
    """However long: no rounded angle decides."""
    rope = Rope(head_dim=64, pairing="half", base=1e20)
    found = coverage(rope, context, rope, 4 * context)
    slow = found.never_turned
    assert slow.any()
    np.testing.assert_array_equal(found.first_new, np.where(slow, context, np.inf))


@pytest.mark.parametrize("context", [4096, 10**9, 2**40])
def test_interpolation_shows_nothing_new_up_to_its_context(context):
    """One distance later every slow pair does, and at that distance only."""
    rope = Rope(head_dim=64, pairing="half", base=1e20)
    stretched = dataclasses.replace(rope, scaling=Linear(factor=4.0))
    assert not coverage(rope, context, stretched, 4 * context).has_new_phases.any()
    beyond = coverage(rope, context, stretched, 4 * context + 1)
    slow = beyond.never_turned
    np.testing.assert_array_equal(beyond.first_new, np.where(slow, 4 * context, np.inf))
    np.testing.assert_array_equal(beyond.new_share, np.where(slow, 1 / (4 * context + 1), 0.0))


def test_phases_of_a_long_context_are_equally_spread():
    """Weyl: the share of new phases tends to the share of the turn that was not met."""
    found = coverage(LLAMA_2, 4096, LLAMA_2, 10**12)
    slow = found.never_turned
    np.testing.assert_allclose(found.new_share[slow], 1 - found.trained_turns[slow], atol=1e-6)


def test_a_pair_that_stood_still_has_met_the_angle_zero_only():
    """It is new as soon as it turns, and never if it goes on standing."""
    still, turning = (
        Rope(head_dim=4, pairing="half", explicit_inv_freq=f) for f in [(1.0, 0.0), (1.0, 0.5)]
    )
    assert coverage(still, 8, turning, 64).first_new.tolist() == [np.inf, 1.0]
    assert not coverage(still, 8, still, 64).has_new_phases.any()
    assert not coverage(turning, 8, still, 64).has_new_phases.any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((LLAMA_2, 0, LLAMA_2, 8), "context must be a whole number from 1"),
        ((LLAMA_2, 8, LLAMA_2, 8.5), "to must be a whole number from 1"),
        ((LLAMA_2, 8, LLAMA_2, 2**49), "to must be a whole number from 1"),
        ((LLAMA_2, 8, SMALL, 8), r"as many pairs as rope \(64\), got 8"),
        ((LLAMA_2, 8, dataclasses.replace(LLAMA_2, scaling=RULE), 8), r"use rope.at\(seq_len\)"),
    ],
    ids=["no context", "half a token", "too long", "other pairs", "rule"],
)
def test_coverage_refuses(arguments, message):
    """The error names what is wrong."""
    with pytest.raises(SpecError, match=message):
        coverage(*arguments)
