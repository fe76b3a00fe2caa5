"""Rotations with one planted defect each, written in plain NumPy: every defect is named."""

from __future__ import annotations

import numpy as np
import pytest

from phasor import Yarn
from phasor.conventions import identify
from phasor.errors import TensorError

WIDTH = 32
PAIRS = WIDTH // 2
BASE = 10_000.0
STEPS = BASE ** (-np.arange(PAIRS) / PAIRS)


def bfloat16(values):
    """The nearest number with eight significant bits, ties to even."""
    mantissa, exponent = np.frexp(np.asarray(values, dtype=np.float64))
    return np.ldexp(np.rint(mantissa * 256) / 256, exponent)


def by_rows(x, cos, sin):
    """Halves turned by full-width rows, as most models write it."""
    first, second = np.split(x, 2, axis=-1)
    return (x * cos + np.concatenate([-second, first], -1) * sin).astype(x.dtype)


def halves(x, angles, gain=1.0):
    """The rotation of halves by angles ``[b, s, pairs]``."""
    both = np.concatenate([angles, angles], -1)[:, :, None]
    return by_rows(x, gain * np.cos(both), gain * np.sin(both))


def plain(x, positions, steps=STEPS, gain=1.0):
    """The rotation without a defect."""
    return halves(x, positions[..., None] * steps, gain)


def partly(x, positions, steps):
    """The first half of a head turned."""
    width = 2 * len(steps)
    return np.concatenate([plain(x[..., :width], positions, steps), x[..., width:]], -1)


def from_table(rows, missing):
    """Positions looked up in a table; ``missing`` says what replaces a position beyond."""

    def turned(x, positions):
        return plain(x, missing(positions, rows))

    return turned


def identity_beyond(x, positions):
    """Cos 1 and sin 0 beyond the table, as a masked load gives."""
    return np.where((positions < 1000)[..., None, None], plain(x, positions), x)


def zeros_beyond(x, positions):
    """Nothing is written beyond the table."""
    return np.where((positions < 1000)[..., None, None], plain(x, positions), 0 * x)


def nan_beyond(x, positions):
    """NaN beyond the table."""
    return np.where((positions < 1000)[..., None, None], plain(x, positions), np.nan * x)


def raising(x, positions):
    """A table indexed as Python indexes."""
    table = np.arange(1000)[..., None] * STEPS
    return halves(x, table[positions])


def garbage(x, positions):
    """Rows of something else beyond the table."""
    return plain(x, np.where(positions < 1000, positions, (positions * 7919 + 3) % 977))


def overwriting(x, positions):
    """In place, and returned."""
    x[...] = plain(x, positions)
    return x


def float32_angles(x, positions):
    """Positions times frequencies in float32."""
    angles = positions[..., None].astype(np.float32) * STEPS.astype(np.float32)
    return halves(x, angles)


def rows_in_wrong_order(x, positions):
    """Each angle twice in a row, on halves."""
    both = np.repeat(positions[..., None] * STEPS, 2, axis=-1)[:, :, None]
    return by_rows(x, np.cos(both), np.sin(both))


def half_rows_on_interleaved(x, positions):
    """All angles and all again, on neighbours."""
    angles = positions[..., None] * STEPS
    both = np.concatenate([angles, angles], -1)[:, :, None]
    swapped = np.stack([-x[..., 1::2], x[..., ::2]], -1).reshape(x.shape)
    return (x * np.cos(both) + swapped * np.sin(both)).astype(x.dtype)


def reflecting(x, positions):
    """One sign of four is wrong."""
    angles = (positions[..., None] * STEPS)[:, :, None]
    first, second = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos + second * sin, first * sin - second * cos], -1)


def growing(x, positions):
    """The length depends on the position."""
    return plain(x, positions) * (1.001 ** positions[..., None, None])


def inverted_ramp(x, positions):
    """Fast pairs divided, slow ones kept."""
    keep = 1 - np.clip((np.arange(PAIRS) - 3) / 8, 0, 1)
    return plain(x, positions, keep * STEPS / 8 + (1 - keep) * STEPS)


class Remembering:
    """The longest call so far picks the frequencies, for ever."""

    def __init__(self):
        self.longest = 0

    def __call__(self, x, positions):
        """Turn."""
        self.longest = max(self.longest, positions.max() + 1)
        factor = max(self.longest / 512, 1.0)
        base = BASE * factor ** (PAIRS / (PAIRS - 1))
        return plain(x, positions, base ** (-np.arange(PAIRS) / PAIRS))


def dynamic(x, positions):
    """Dynamic NTK by the length of this call alone."""
    factor = 4.0 * max(positions.max() + 1, 512) / 512 - 3.0
    base = BASE * factor ** (PAIRS / (PAIRS - 1))
    return plain(x, positions, base ** (-np.arange(PAIRS) / PAIRS))


def on_queries(q, k, positions):
    """The softmax factor of a law folded into the queries."""
    return plain(q, positions, gain=1.87), plain(k, positions)


def keys_backwards(q, k, positions):
    """Keys turned the other way."""
    return plain(q, positions), plain(k, -positions)


def keys_of_another_base(q, k, positions):
    """Keys with frequencies of their own."""
    return plain(q, positions), plain(k, positions, STEPS**1.1)


def bent(x, positions):
    """A soft clip, as attention logits have; vectors do not."""
    return np.tanh(plain(x, positions))


DEFECTS = {
    "positions-in-bfloat16": lambda x, p: plain(x, bfloat16(p)),
    "positions-in-float16": lambda x, p: plain(x, p.astype(np.float16).astype(float)),
    "table-in-bfloat16": lambda x, p: by_rows(
        x, *(bfloat16(f(np.tile(p[..., None] * STEPS, 2)[:, :, None])) for f in (np.cos, np.sin))
    ),
    "table-in-float16": lambda x, p: by_rows(
        x,
        *(
            f(np.tile(p[..., None] * STEPS, 2)[:, :, None]).astype(np.float16)
            for f in (np.cos, np.sin)
        ),
    ),
    "frequencies-in-bfloat16": lambda x, p: plain(x, p, bfloat16(STEPS)),
    "frequencies-in-float16": lambda x, p: plain(x, p, STEPS.astype(np.float16).astype(float)),
    "frequencies-in-float32": lambda x, p: plain(x, p, STEPS.astype(np.float32).astype(float)),
    "angles-in-float32": float32_angles,
    "table-end-identity": identity_beyond,
    "table-end-zeros": zeros_beyond,
    "table-end-nan": nan_beyond,
    "table-end-raises": raising,
    "table-end-garbage": garbage,
    "positions-clamped": from_table(1000, lambda p, rows: np.minimum(p, rows - 1)),
    "positions-wrapped": from_table(1000, lambda p, rows: p % rows),
    "negative-wraps": raising,
    "negative-unsigned": lambda x, p: plain(x, np.abs(p)),
    "negative-clamped": lambda x, p: plain(x, np.maximum(p, 0)),
    "ramp-inverted": inverted_ramp,
    "sign-reversed": lambda x, p: plain(x, -p),
    "interleaved-rows-on-halves": rows_in_wrong_order,
    "half-rows-on-interleaved": half_rows_on_interleaved,
    "reflection": reflecting,
    "position-offset": lambda x, p: plain(x, p + 1),
    "depends-on-length": dynamic,
    "remembers": Remembering(),
    "inputs-written": overwriting,
    "index-from-one": lambda x, p: plain(x, p, BASE ** (-(np.arange(PAIRS) + 1) / PAIRS)),
    "exponent-width": lambda x, p: partly(x, p, 5e5 ** (-np.arange(PAIRS // 2) / PAIRS)),
    "stretch-on-frequencies": lambda x, p: plain(x, p, STEPS / 8 ** (PAIRS / (PAIRS - 1))),
    "factor-on-one-side": on_queries,
    "keys-turn-backwards": keys_backwards,
    "queries-and-keys-differ": keys_of_another_base,
    "norm-varies": growing,
}
# what is true beside the defect, and would be wrong to hide
BESIDE = {
    "negative-wraps": {"table-end-raises"},
    "table-end-raises": {"negative-wraps"},
    "remembers": {"depends-on-length"},
    "positions-wrapped": {"negative-wraps"},
    "positions-in-float16": {"table-end-nan"},  # beyond 65504 they are infinite
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_is_named(name):
    """That one and no other."""
    found = identify(DEFECTS[name], WIDTH)
    assert found.names() == {name} | BESIDE.get(name, set())


def test_the_rotation_without_a_defect_has_none():
    """Nothing is found where nothing is wrong."""
    found = identify(plain, WIDTH)
    assert found.names() == set()
    assert (found.base, found.law, found.known_law) == (BASE, None, True)


@pytest.mark.parametrize(
    ("reflected", "says"),
    [(PAIRS, f"{PAIRS} of {PAIRS} pairs, such as coordinates"), (1, "Coordinates (0, ")],
)
def test_a_reflection_is_given_no_factor_and_no_angle(reflected, says):
    """It keeps the length of vectors, so nothing is multiplied, and nothing turns either."""

    def mirrored(x, positions):
        y = plain(x, positions)
        y[..., :reflected] *= -1
        return y

    found = identify(mirrored, WIDTH)
    assert (found.rope, found.attention_factor) == (None, None)
    assert says in found.explain()
    assert "multiplied" not in found.explain()
    assert "per position" not in found.explain()


@pytest.mark.parametrize(("value", "name"), [(np.nan, "NaN"), (np.inf, "infinity")])
def test_what_gives_no_numbers_is_refused_with_that_reason(value, name):
    """One error and no warning, which here would be an error too."""
    with pytest.raises(TensorError, match=f"it gives {name}"):
        identify(lambda x, p: plain(x, p) + value, WIDTH)


def test_what_is_not_linear_is_not_taken_for_a_rotation():
    """And gets no Rope."""
    found = identify(bent, WIDTH)
    assert (found.linear, found.rope) == (False, None)
    assert "not linear" in found.explain()


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("table-end-identity", 1000),
        ("table-end-raises", 1000),
        ("positions-clamped", 1000),
        ("positions-wrapped", 1000),
        ("table-end-garbage", 1000),
    ],
)
def test_the_end_of_a_table_is_found_exactly(name, end):
    """The first position that is not turned as it should be."""
    found = identify(DEFECTS[name], WIDTH)
    assert found.table_end == end
    assert f"Up to position {end - 1} it turns; from {end} on" in found.explain()


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
    found = identify(lambda x, p: plain(x, p + offset), WIDTH)
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
            return plain(x, p, steps, gain=1.3465735902799727)

        laws[truncate] = identify(turned, 2 * pairs).law
    assert laws == {
        truncate: Yarn(factor=32.0, original_max_positions=4096, truncate=truncate)
        for truncate in (False, True)
    }


def test_the_length_that_switches_frequencies_is_exact():
    """Two lists of divisors, the long one from 601 tokens on: an off-by-one is seen."""

    def switching(x, positions):
        return plain(x, positions, STEPS / (3.0 if positions.max() + 1 > 600 else 1.0))

    assert "one reaches 600." in identify(switching, WIDTH).explain()


def test_dropped_frequencies_padded_with_the_wrong_number():
    """Sin 1 beside cos 1 (as FoPE's authors had it) stretches what should stand still."""

    def padded(x, positions):
        angles = (positions[..., None] * STEPS)[:, :, None]
        cos, sin = np.cos(angles), np.sin(angles)
        cos[..., 12:], sin[..., 12:] = 1, 1
        return by_rows(x, np.tile(cos, 2), np.tile(sin, 2))

    found = identify(padded, WIDTH)
    assert found.names() == {"norm-varies"}
    assert "from 1 to 1.41421" in found.explain()


def test_a_factor_on_queries_alone_is_measured_on_both():
    """Both factors are in the report."""
    found = identify(on_queries, WIDTH)
    assert (found.attention_factor, found.key_factor) == (1.87, 1.0)


def test_a_function_that_only_writes_is_read():
    """Kernels in place return nothing."""

    def kernel(x, positions):
        x[...] = plain(x, positions)

    found = identify(kernel, WIDTH)
    assert (found.base, found.names()) == (BASE, {"inputs-written"})


def test_members_on_different_axes_are_named():
    """Rows repeated and then cut by sections of pairs: equal coordinates hide it."""

    def turned(x, positions):
        # [b, s, axes] to full-width angles; the cut goes round after half of them
        both = np.concatenate([STEPS, STEPS])
        axis = np.arange(WIDTH) * 3 // WIDTH
        angles = (positions[..., axis] * both)[:, :, None]
        return by_rows(x, np.cos(angles), np.sin(angles))

    found = identify(turned, WIDTH, n_axes=3)
    assert found.names() == {"members-on-different-axes"}
    assert found.rope is None


def test_a_cache_without_the_base_in_its_key_shows_the_first_base():
    """What the second module says it is, it is not."""
    cache = {}

    def made(base):
        def turned(x, positions):
            rows = cache.setdefault(WIDTH, base ** (-np.arange(PAIRS) / PAIRS))
            return plain(x, positions, rows)

        return turned

    assert identify(made(10_000.0), WIDTH).base == 10_000
    assert identify(made(500_000.0), WIDTH).base == 10_000
