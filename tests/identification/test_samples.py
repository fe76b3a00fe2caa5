"""Recorded vectors tell which rotation turned them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given

from phasor import PositionError, Rope, TensorError
from phasor.axes import Alternating, InterleavedSections, Sectioned
from phasor.identification import identify_samples
from phasor.numpy import matrix, rotate
from phasor.scaling import Llama3

from .. import oracle, strategies


def recorded(rope, positions, heads=3, seed=0):
    """Random vectors of a few heads at every position, before and after."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((len(positions), heads, rope.head_dim))
    y = rotate(x, np.asarray(positions), rope)
    width = rope.head_dim
    return x.reshape(-1, width), y.reshape(-1, width), np.repeat(positions, heads, axis=0)


@given(strategies.resolved_ropes())
def test_a_random_rope_is_found_again(rope):
    """From 512 tokens of three heads, as a model's first pass gives."""
    assume(rope.axes.n_axes == 1)
    steps = [float(f) for f in oracle.frequencies(rope)]
    assume(max(steps) > 1e-6 and all(f == 0 or f > 1e-10 for f in steps))
    found = identify_samples(*recorded(rope, np.arange(512)), dtype="float64")
    assert found.rope is not None, found.why_no_rope
    # an angle is read to about 2**-46 at position 511, or the law is off by float32's rounding
    np.testing.assert_allclose(
        matrix(511, found.rope, gain=1.0),
        matrix(511, rope, gain=1.0),
        rtol=0,
        atol=511 * 1e-6 * max(steps),
    )


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_rounded_samples_still_tell_the_law(dtype):
    """Llama 3.1's, from what a model in that dtype would record."""
    import torch

    law = Llama3(factor=8.0, original_max_positions=8192)
    rope = Rope(head_dim=128, pairing="half", base=500_000.0, scaling=law)
    before, after, positions = recorded(rope, np.arange(4096), heads=8)
    kind = getattr(torch, dtype)
    before = torch.from_numpy(before).to(kind).double().numpy()
    after = np.concatenate([rotate(before.reshape(-1, 8, 128), np.arange(4096), rope)])
    after = torch.from_numpy(after).to(kind).double().numpy().reshape(-1, 128)
    found = identify_samples(before, after, positions, dtype=dtype)
    assert found.pairing == "half"
    truth = [float(f) for f in oracle.frequencies(rope)]
    assert all(
        abs(pair.inv_freq - f) <= 4 * pair.uncertainty
        for pair, f in zip(found.pairs, truth, strict=True)
    )
    # in bfloat16 the slowest pairs hardly differ from pairs that stand still
    expected = (500_000, law) if dtype == "float32" else (None, None)
    assert (found.base, found.law) == expected
    assert ("hardly differ from pairs that stand still" in str(found)) == (dtype == "bfloat16")


def test_positions_that_start_late_are_enough():
    """A cached sequence goes on from where it was."""
    rope = Rope(head_dim=16, pairing="interleaved", base=500.0)
    found = identify_samples(*recorded(rope, np.arange(1000, 1300)), dtype="float64")
    assert found.rope == rope


def test_a_change_among_the_samples_is_said():
    """From a position on, something else turned them."""
    rope = Rope(head_dim=16, pairing="half", base=500.0)
    before, after, positions = recorded(rope, np.arange(512))
    after[positions >= 300] = before[positions >= 300]
    found = identify_samples(before, after, positions, dtype="float64")
    assert "samples-disagree" in found.names()


def test_vectors_mixed_by_more_than_pairs_have_no_rope():
    """A random orthogonal map is no rotation of pairs."""
    rng = np.random.default_rng(3)
    q, _ = np.linalg.qr(rng.standard_normal((8, 8)))
    x = rng.standard_normal((60, 8))
    found = identify_samples(x, x @ q, np.repeat(np.arange(20), 3), dtype="float64")
    assert found.rope is None
    assert "no pairing" in str(found)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (lambda b, a, p: (b, a[:-1], p), TensorError, "before and after"),
        (lambda b, a, p: (b, a, p.astype(float)), PositionError, "whole numbers"),
        (lambda b, a, p: (b, a, 2 * p), PositionError, "one apart"),
        (lambda b, a, p: (b[::3], a[::3], p[::3]), PositionError, "two samples"),
    ],
    ids=["shapes", "float positions", "gaps", "one head"],
)
def test_samples_that_cannot_tell_are_refused(change, error, says):
    """With what is missing."""
    rope = Rope(head_dim=8, pairing="half", base=500.0)
    with pytest.raises(error, match=says):
        identify_samples(*change(*recorded(rope, np.arange(16))))


AXES = {
    "sectioned": Sectioned((3, 2, 3)),
    "interleaved": InterleavedSections((4, 2, 2)),
    "alternating": Alternating((2, 3, 3)),
}


def along_axes(axes):
    """Equal coordinates, then every axis alone, as `identify_samples` wants them."""
    steps = np.array([0, 1, 2, 3, 4, 6, 9, 13, 19, 28, 42, 63])
    alone = [np.where(np.arange(axes) == axis, steps[1:, None], 0) for axis in range(axes)]
    return np.concatenate([np.repeat(steps[:, None], axes, axis=1), *alone])


@pytest.mark.parametrize("axes", AXES.values(), ids=AXES)
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_the_axis_of_every_pair_is_found(axes, pairing):
    """From tokens whose coordinates differ."""
    rope = Rope(head_dim=16, pairing=pairing, base=100.0, axes=axes)
    found = identify_samples(*recorded(rope, along_axes(3)), dtype="float64")
    assert [pair.axis for pair in found.pairs] == list(axes.axis_of_pair(8))
    assert (found.rope, found.why_no_rope) == (rope, None)


def test_members_on_different_axes_are_no_rope():
    """A pair whose members follow different axes turns at equal coordinates only."""
    rope = Rope(head_dim=16, pairing="half", base=100.0)
    places = along_axes(2)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((len(places), 3, 16))
    y = np.empty_like(x)
    for token, (time, height) in enumerate(places):
        turned = [rotate(x[token], int(p), rope) for p in (time, height)]
        y[token, :, :8], y[token, :, 8:] = turned[0][:, :8], turned[1][:, 8:]
    at = np.repeat(places, 3, axis=0)
    found = identify_samples(x.reshape(-1, 16), y.reshape(-1, 16), at, dtype="float64")
    assert found.rope is None


def test_axes_with_equal_coordinates_everywhere_are_refused():
    """They could be one axis."""
    rope = Rope(head_dim=8, pairing="half", base=500.0)
    before, after, positions = recorded(rope, np.arange(16))
    with pytest.raises(PositionError, match="tell the axes apart"):
        identify_samples(before, after, np.stack([positions, positions], axis=1))
