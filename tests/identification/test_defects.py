"""What goes with a planted defect is measured."""

from __future__ import annotations

import numpy as np
import pytest

from phasor.errors import TensorError
from phasor.identification import identify
from phasor.scaling import Yarn

from .defects import (
    BASE,
    DEFECTS,
    PAIRS,
    STEPS,
    WIDTH,
    dynamic,
    from_table,
    on_queries,
    rotate,
    rotate_by_rows,
    rotate_nonlinearly,
)


def test_the_rotation_without_a_defect_has_none():
    """Nothing is found where nothing is wrong."""
    found = identify(rotate, WIDTH)
    assert found.names() == set()
    assert (found.base, found.law, found.known_law) == (BASE, None, True)


@pytest.mark.parametrize(
    ("reflected", "says"),
    [(PAIRS, f"{PAIRS} of {PAIRS} pairs, such as coordinates"), (1, "Coordinates (0, ")],
)
def test_a_reflection_is_given_no_factor_and_no_angle(reflected, says):
    """It keeps the length of vectors, so nothing is multiplied, and nothing turns either."""

    def mirrored(x, positions):
        y = rotate(x, positions)
        y[..., :reflected] *= -1
        return y

    found = identify(mirrored, WIDTH)
    assert (found.rope, found.attention_factor) == (None, None)
    assert says in str(found)
    assert "multiplied" not in str(found)
    assert "per position" not in str(found)


@pytest.mark.parametrize(("value", "name"), [(np.nan, "NaN"), (np.inf, "infinity")])
def test_what_gives_no_numbers_is_refused_with_that_reason(value, name):
    """One error and no warning, which here would be an error too."""
    with pytest.raises(TensorError, match=f"it gives {name}"):
        identify(lambda x, p: rotate(x, p) + value, WIDTH)


def test_what_is_not_linear_is_not_taken_for_a_rotation():
    """And gets no Rope."""
    found = identify(rotate_nonlinearly, WIDTH)
    assert (found.linear, found.rope) == (False, None)
    assert "not linear" in str(found)


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("table-end-identity", 1000),
        ("table-end-raises", 1000),
        ("clamped", 1000),
        ("wrapped", 1000),
        ("table-end-garbage", 1000),
    ],
)
def test_the_end_of_a_table_is_found_exactly(name, end):
    """The first position that is not turned as it should be."""
    found = identify(DEFECTS[name], WIDTH)
    assert found.table_end == end
    assert f"Up to position {end - 1} it turns; from {end} on" in str(found)


def test_a_table_of_a_power_of_two_ends_there():
    """Where the search steps, and not one beside it."""
    found = identify(from_table(4096, lambda p, rows: np.minimum(p, rows - 1)), WIDTH)
    assert found.table_end == 4096


def test_the_rule_behind_growing_lengths_is_read():
    """Factor and context of dynamic NTK, from two lengths."""
    rule = identify(dynamic, WIDTH).rule
    assert (rule.factor, rule.original_max_positions) == (4.0, 512)


@pytest.mark.parametrize("offset", [-2, -1, 1, 0.5, 3])
def test_an_offset_is_measured(offset):
    """Half positions too, as centres of image patches have."""
    found = identify(lambda x, p: rotate(x, p + offset), WIDTH)
    assert found.position_offset == offset
    assert found.rope is not None
    assert found.error < 1e-6


def test_a_ramp_without_its_rounding_is_told_from_one_with():
    """gpt-oss's ramp, whose rounded ends turn pair 17 at 1.76 times the rate."""
    pairs, base = 32, 150_000.0
    bare = base ** (-np.arange(pairs) / pairs)
    laws = {}
    for truncate, low, high in ((False, 8.092779115512402, 17.39802450158856), (True, 8, 18)):
        divided = np.clip((np.arange(pairs) - low) / (high - low), 0, 1)
        steps = bare * (1 - divided) + bare / 32 * divided

        def turned(x, p, steps=steps):
            return rotate(x, p, steps, gain=1.3465735902799727)

        laws[truncate] = identify(turned, 2 * pairs).law
    assert laws == {
        truncate: Yarn(factor=32.0, original_max_positions=4096, truncate=truncate)
        for truncate in (False, True)
    }


def test_the_length_that_switches_frequencies_is_exact():
    """Two lists of divisors, the long one from 601 tokens on: an off-by-one is seen."""

    def switching(x, positions):
        return rotate(x, positions, STEPS / (3.0 if positions.max() + 1 > 600 else 1.0))

    assert "one reaches 600." in str(identify(switching, WIDTH))


def test_dropped_frequencies_padded_with_the_wrong_number():
    """Sin 1 beside cos 1 (as FoPE's authors had it) stretches what should stand still."""

    def padded(x, positions):
        angles = (positions[..., None] * STEPS)[:, :, None]
        cos, sin = np.cos(angles), np.sin(angles)
        cos[..., 12:], sin[..., 12:] = 1, 1
        return rotate_by_rows(x, np.tile(cos, 2), np.tile(sin, 2))

    found = identify(padded, WIDTH)
    assert found.names() == {"norm-varies"}
    assert "from 1 to 1.41421" in str(found)


def test_a_factor_on_queries_alone_is_measured_on_both():
    """Both factors are in the report."""
    found = identify(on_queries, WIDTH)
    assert (found.attention_factor, found.key_factor) == (1.87, 1.0)


def test_a_function_that_only_writes_is_read():
    """Kernels in place return nothing."""

    def kernel(x, positions):
        x[...] = rotate(x, positions)

    found = identify(kernel, WIDTH)
    assert (found.base, found.names()) == (BASE, {"inputs-written"})


def test_members_on_different_axes_are_named():
    """Rows repeated and then cut by sections of pairs: equal coordinates hide it."""

    def turned(x, positions):
        # [b, s, axes] to full-width angles; the cut goes round after half of them
        both = np.concatenate([STEPS, STEPS])
        axis = np.arange(WIDTH) * 3 // WIDTH
        angles = (positions[..., axis] * both)[:, :, None]
        return rotate_by_rows(x, np.cos(angles), np.sin(angles))

    found = identify(turned, WIDTH, n_axes=3)
    assert found.names() == {"members-on-different-axes"}
    assert found.rope is None


def test_a_cache_without_the_base_in_its_key_shows_the_first_base():
    """What the second module says it is, it is not."""
    cache = {}

    def made(base):
        def turned(x, positions):
            rows = cache.setdefault(WIDTH, base ** (-np.arange(PAIRS) / PAIRS))
            return rotate(x, positions, rows)

        return turned

    assert identify(made(10_000.0), WIDTH).base == 10_000
    assert identify(made(500_000.0), WIDTH).base == 10_000
