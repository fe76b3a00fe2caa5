"""Random ropes in exact float64: every one is named right or not at all, and none is accused."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from phasor import Rope
from phasor.identification import identify

from .. import oracle
from .foreign_ropes import Hidden, hidden, turning

FEW = range(100)
ALL = range(2000)
# a name's frequencies may be this far from those read, relatively, and the real ones' float64 too
ARITHMETIC = 3e-14
ROUNDING = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11}


def judged(one: Hidden) -> str:
    """``named``, ``unsure`` or ``still``; an assertion fails where the answer is wrong."""
    rope = one.rope
    found = identify(one.function, rope.head_dim, dtype=one.dtype)
    assert found.names() == ({"direction"} if found.direction < 0 else set())
    if found.rope is None:
        # the slowest arithmetic there is sees no turn by position 8
        assert found.why_no_rope == "nothing turns at the positions tried"
        assert one.inv_freq.max() * 8 < 2.0**-25
        return "still"
    steps = np.array([float(f) for f in oracle.frequencies(found.rope)])
    read = np.array([pair.uncertainty for pair in found.pairs])
    # an interleaved pair at an end that does not move is not seen, and moves slower than this
    pairs = max(len(steps), len(one.inv_freq), len(read))
    unseen = 2.0**-24 / 8 if one.dtype == "float16" else 0.0
    steps, truth = (np.pad(f, (0, pairs - len(f))) for f in (steps, one.inv_freq))
    read = np.pad(read, (0, pairs - len(read)), constant_values=unseen)
    # what was read is off by its uncertainty at most, and the name from what was read by as much
    room = 2 * read + ARITHMETIC * truth
    direction = found.direction * rope.direction
    assert np.all(np.abs(direction * steps - truth) <= room), (rope, found.rope)
    x = np.random.default_rng(0).integers(-7, 8, (1, 4, 1, rope.head_dim)).astype(np.float64)
    at = np.array([[0, 1, 7, 100]])
    apart = np.abs(turning(found.rope)(x, at) - turning(rope)(x, at))
    assert apart.max() <= 2 * np.abs(x).max() * 100 * (room.max() + 2.0**-52)
    return "named" if found.known_law else "unsure"


@pytest.mark.slow
def test_random_ropes_are_named_right_or_not_at_all() -> None:
    """Any base from 1.5 to 1e9, width, law and dtype; what is a plain power is named."""
    for seed in FEW:
        one = hidden(seed)
        said = judged(one)
        assert said == "named" or one.rope.scaling is not None or one.rope.num_pairs == 1


@pytest.mark.slow
def test_two_thousand_random_ropes_are_named_right_or_not_at_all() -> None:
    """As above; and most laws have a name."""
    said = Counter(judged(hidden(seed)) for seed in ALL)
    assert said["named"] > 0.7 * len(ALL)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("pairs", [2, 16, 64])
@pytest.mark.parametrize(
    "base", [48539.05124743721, 724502.9238664565, 23.434714205632883, 10_000.0, 16.0]
)
def test_a_base_is_named_with_the_digits_that_were_measured(
    base: float, pairs: int, dtype: str
) -> None:
    """All that float64 has, or what float32 cosines tell; a round base stays round."""
    rope = Rope(head_dim=2 * pairs, pairing="half", base=base)
    found = identify(turning(rope), 2 * pairs, dtype=dtype)
    assert (found.law, found.names(), found.rope.inv_freq_dtype) == (None, set(), "exact")  # pyright: ignore[reportOptionalMemberAccess]
    # whichever pair tells the base best: its frequency is base**(-k/pairs)
    k = np.arange(1, pairs)
    read = np.array([pair.uncertainty for pair in found.pairs])[1:] * base ** (k / pairs)
    best = ((2 * read + ARITHMETIC) * pairs / k).min()
    assert found.base == pytest.approx(base, rel=best, abs=0)
    assert best < (1e-12 if dtype == "float64" else 1e-7)
    if base in (10_000.0, 16.0):
        assert found.base == base


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("base", [48539.05124743721, 10_000.0])
def test_frequencies_that_are_float32_numbers_are_said_to_be(base: float, dtype: str) -> None:
    """Which float64 gives by chance once in sixteen million times."""
    rope = Rope(head_dim=64, pairing="half", base=base, inv_freq_dtype="float32")
    found = identify(turning(rope), 64, dtype=dtype)
    assert found.names() == {"frequencies-in-float32"}
    assert found.base == pytest.approx(base, rel=2.0**-23, abs=0)
    assert found.rope.inv_freq_dtype == "float32"  # pyright: ignore[reportOptionalMemberAccess]


def test_powers_of_two_are_no_evidence_of_float32() -> None:
    """Every frequency of base 16 and four pairs is a float32 number, and exact."""
    rope = Rope(head_dim=8, pairing="half", base=16.0)
    found = identify(turning(rope), 8, dtype="float64")
    assert (found.names(), found.base) == (set(), 16.0)


def test_one_frequency_names_no_base() -> None:
    """It is a power of any, and a law's of any factor."""
    rope = Rope(head_dim=2, pairing="half", base=500.0)
    found = identify(turning(rope), 2, dtype="float64")
    assert (found.known_law, found.base) == (False, None)
    assert found.rope.explicit_inv_freq == (1.0,)  # pyright: ignore[reportOptionalMemberAccess]
    assert "fits any base" in str(found)


@pytest.mark.parametrize("base", [100.0, 707.1067811865476])
def test_a_width_of_exponents_is_accused_only_of_a_base_nobody_chose(base: float) -> None:
    """100 over half a head is 10000 over the whole, and may have been meant."""
    rope = Rope(head_dim=64, pairing="half", rotary_dim=32, base=base)
    found = identify(turning(rope), 64)
    assert found.names() == (set() if base == 100 else {"exponent-width"})
