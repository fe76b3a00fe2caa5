"""Random ropes, rotated by the reference and shown as mere functions, are found again."""

import numpy as np
import pytest
from hypothesis import assume, given

from phasor import Rope
from phasor.axes import AXES, Alternating, Mixed, OneAxis
from phasor.identification import identify, laws
from phasor.numpy import matrix, rotate
from phasor.scaling import Hope, NTKOld

from .. import oracle, strategies

PLACES = (1, 7, 100, 1000)


def placed(rope: Rope, position: int) -> int | list[int]:
    """The position, on the first axis twice as far as on the others."""
    n = rope.axes.n_axes
    return position if n == 1 else [2 * position] + [position] * (n - 1)


@given(strategies.resolved_ropes())
def test_a_random_rope_is_found_again(rope: Rope) -> None:
    """The rope found does what the rope hidden does, at whole positions on unequal axes."""
    steps = [float(f) for f in oracle.frequencies(rope)]
    assume(not isinstance(rope.axes, Mixed))  # whose numbers are no law's
    # as slow as this, nothing is seen to move at any position looked at
    assume(max(steps) > 1e-6 and all(f == 0 or f > 1e-10 for f in steps))
    # where pairs at an end stand still the slice is not seen whole, and then axes have no order
    assume(rope.axes.n_axes == 1 or (steps[0] > 0 and steps[-1] > 0))
    found = identify(
        lambda x, p: rotate(x, p, rope), rope.head_dim, dtype="float64", n_axes=rope.axes.n_axes
    )
    assert found.linear
    assert found.rope is not None, found.why_no_rope
    assert found.table_end is None
    assert found.error < 2e-5
    for position in PLACES:
        at = placed(rope, position)
        hidden, seen = (matrix(at, one, gain=1.0) for one in (rope, found.rope))
        # what is stated for positions up to 8 grows with the position, and no more
        room = position * max(4e-12, found.error) + 1e-12
        np.testing.assert_allclose(seen, hidden, rtol=0, atol=room)


@pytest.mark.parametrize("name", strategies.EVERY_LAW)
def test_every_law_is_reproduced(name: str) -> None:
    """Whatever it is called: several laws may give one spectrum."""
    rope = Rope(head_dim=64, pairing="half", base=10_000.0, scaling=strategies.EVERY_LAW[name])  # pyright: ignore[reportArgumentType]
    found = identify(lambda x, p: rotate(x, p, rope), 64, dtype="float64").rope
    assert found is not None
    # the last of a fading row of pairs may stand still, and then the slice looks narrower
    hidden, seen = (matrix(999, one, gain=1.0) for one in (rope, found))
    np.testing.assert_allclose(seen, hidden, rtol=0, atol=4e-9)


def test_an_odd_base_of_many_pairs_is_not_rounded() -> None:
    """StarCoder 2's, which is 6e-7 from a million: 64 pairs that fit leave no doubt."""
    rope = Rope(head_dim=128, pairing="half", base=999999.4420358813)
    found = identify(lambda x, p: rotate(x, p, rope), 128, dtype="float64")
    assert found.base == pytest.approx(999999.4420358813, rel=1e-9)


def test_a_round_base_of_few_rounded_pairs_is_meant() -> None:
    """Two frequencies in float32 fit 10000.0001 better than 10000, which nobody chose."""
    rope = Rope(head_dim=4, pairing="half", base=30_000.0, inv_freq_dtype="float32")
    found = identify(lambda x, p: rotate(x, p, rope), 4, dtype="float64")
    assert found.base == 30_000


def test_axes_are_named_though_the_slowest_pairs_stand_still() -> None:
    """Height and width in turn over a slice of which less than the whole is seen."""
    rope = Rope(
        head_dim=18,
        pairing="interleaved",
        base=4.0,
        scaling=Hope(original_max_positions=12),
        axes=Alternating((3, 3, 3)),
    )
    found = identify(lambda x, p: rotate(x, p, rope), 18, dtype="float64", n_axes=3)
    assert found.rope is not None
    np.testing.assert_allclose(
        matrix([7, 5, 3], found.rope), matrix([7, 5, 3], rope), rtol=0, atol=1e-11
    )


# a base that is a usual one times a round factor is a round base, and no law is looked for
RECOGNISABLE = strategies.EVERY_LAW | {"ntk_old": NTKOld(factor=1.57)}


@pytest.mark.parametrize("name", laws.SCANS)
def test_the_scan_of_a_law_proposes_it(name: str) -> None:
    """As the law that explains the frequencies, or among the others that do."""
    law = RECOGNISABLE[name]
    rope = Rope(head_dim=64, pairing="half", base=10_000.0, scaling=law)
    found = identify(lambda x, p: rotate(x, p, rope), 64, dtype="float64")
    named = f"{type(found.law).__name__} {' '.join(found.alternatives)}"
    assert type(law).__name__ in named, f"{laws.SCANS[name]} in {laws.__file__}"


@pytest.mark.parametrize("name", [name for name in AXES if name != "mixed"])
def test_axes_are_recognised(name: str) -> None:
    """By its class, with every pair on its axis."""
    axes = OneAxis() if name == "one" else AXES[name]((2, 3, 3))
    rope = Rope(head_dim=16, pairing="half", base=100.0, axes=axes)
    found = identify(lambda x, p: rotate(x, p, rope), 16, dtype="float64", n_axes=axes.n_axes)
    assert found.rope is not None, found.why_no_rope
    assert type(found.rope.axes) is type(axes) is AXES[name]
    assert [pair.axis for pair in found.pairs] == list(axes.axis_of_pair(8))


def test_axes_that_mix_are_no_rope_and_said_to_be() -> None:
    """Their numbers are data, which nothing proposes."""
    axes = Mixed(((1.0, 0.5), (0.25, -0.75)))
    rope = Rope(head_dim=4, pairing="half", base=None, axes=axes)
    found = identify(lambda x, p: rotate(x, p, rope), 4, dtype="float64", n_axes=2)
    assert found.rope is None
    assert "axes.Mixed" in str(found.why_no_rope)
