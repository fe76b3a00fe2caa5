"""Many recordings at random: equal ones raise no alarm, and differences are named."""

from dataclasses import replace

import numpy as np
import pytest
from tests.verify.programs import DTYPES, rotate, rounded, stored

from phasor import Rope, verify
from phasor.scaling import Linear, Llama3, Yarn

TINY = {"float64": 1e-305, "float32": 1e-37, "bfloat16": 1e-37, "float16": 1e-5}
LAWS = (
    *(None, None, Llama3(factor=8.0, original_max_positions=8192), Linear(factor=8.0)),
    *(Yarn(factor=factor, original_max_positions=4096) for factor in (4.0, 32.0)),
)
EVERY_DAY, IN_FULL = 4, 100


def some_rope(rng):
    """A rope as models have them."""
    head_dim = int(rng.choice([32, 64, 80, 96, 128, 256]))
    rotary_dim = int(rng.choice([head_dim, head_dim, head_dim // 2, head_dim // 4])) // 2 * 2
    return Rope(
        head_dim=head_dim, pairing=str(rng.choice(["half", "interleaved"])),
        base=float(rng.choice([1e4, 5e5, 1e6])), rotary_dim=rotary_dim,
        rotary_start=int(rng.choice([0, head_dim - rotary_dim])),
        scaling=LAWS[rng.integers(len(LAWS))],
    )  # fmt: skip


def some_positions(rng, tokens):
    """Positions as programs have them: from 0 or not, packed, padded, decoded, with gaps."""
    start = int(rng.integers(1, tokens))
    kinds = (
        lambda: np.arange(tokens) + int(rng.choice([0, 0, 5, 1000, 100_000])),
        lambda: np.concatenate([np.arange(start), np.arange(tokens - start)]),  # packed
        lambda: np.maximum(np.arange(tokens) - start, 0),  # padded on the left
        lambda: np.full(tokens, int(rng.integers(30_000))),  # decoding a batch
        lambda: np.sort(rng.integers(0, 32_768, tokens)),  # gaps
        lambda: np.arange(tokens) * 0.5,
    )
    return kinds[rng.choice(len(kinds), p=[0.4, 0.15, 0.1, 0.1, 0.15, 0.1])]()


def some_vectors(rng, tokens, width, dtype):
    """Vectors with nothing odd, large channels, zeros, or the smallest numbers."""
    x = rng.standard_normal((tokens, int(rng.choice([1, 2, 4])), width))
    match rng.integers(4):
        case 0:
            x[..., rng.integers(0, width, 3)] *= 100
        case 1:
            x[rng.random(tokens) < 0.2] = 0
        case 2:
            x *= TINY[dtype]
    return rounded(x, dtype)


def recorded(positions, x, y, dtype):
    """The arrays of a recording."""
    return {"positions": positions, "q": stored(x, dtype), "q_rotated": stored(y, dtype)}


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_rotates_as_the_rope_says_raises_no_alarm(dtype):
    """A few recordings, every day."""
    raises_no_alarm(dtype, EVERY_DAY)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_none_of_many_that_rotate_as_the_rope_says_raises_an_alarm(dtype):
    """As above."""
    raises_no_alarm(dtype, IN_FULL)


def raises_no_alarm(dtype, count):
    """Verify so many recordings of right rotations."""
    rng = np.random.default_rng(count)
    for _ in range(count):
        rope, tokens = some_rope(rng), int(rng.choice([16, 17, 64, 300] + [4096] * (count > 100)))
        positions, x = some_positions(rng, tokens), some_vectors(rng, tokens, rope.head_dim, dtype)
        how = {"stepwise": bool(rng.integers(2)),
               "float32_angles": dtype != "float64" and bool(rng.integers(2))}  # fmt: skip
        y = rotate(x, positions, rope, dtype, **how)
        found = verify(rope, recorded(positions, x, y, dtype))
        assert not found, (rope, positions[:4], how, str(found))


def other_pairing(rng, rope):
    """The other pairing."""
    return replace(rope, pairing="half" if rope.pairing == "interleaved" else "interleaved")


def other_slice(rng, rope):
    """Half of the head, or all of it."""
    whole = rope.rotary_dim == rope.head_dim
    width = rope.rotary_dim // 4 * 2 if whole else rope.head_dim
    return replace(rope, rotary_dim=width, rotary_start=0)


def other_base(rng, rope):
    """A base that is none of the usual ones, or is."""
    return replace(
        rope, base=float(rng.choice([b for b in (1e5, 123_456.0, 2e4) if b != rope.base]))
    )


def other_law(rng, rope):
    """No law, or one."""
    return replace(rope, scaling=None if rope.scaling else Linear(factor=4.0))


ROPES = {
    "pairing": other_pairing, "slice": other_slice, "base": other_base, "law": other_law,
    "direction": lambda rng, rope: replace(rope, direction=-1),
}  # fmt: skip
DIFFERENCES = (*ROPES, "offset", "restart", "factor", "table", "positions")


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_or_two_differences_are_named(dtype):
    """In a few recordings, every day."""
    differences_are_named(dtype, EVERY_DAY)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_or_two_differences_of_many_recordings_are_named(dtype):
    """As above."""
    differences_are_named(dtype, IN_FULL // 5)


def differences_are_named(dtype, count):
    """Verify so many recordings of wrong rotations; all are reported, and most by their names."""
    rng = np.random.default_rng(count)
    named = 0
    for _ in range(count):
        rope, tokens = some_rope(rng), int(rng.choice([64, 300, 1024]))
        chosen = {str(name) for name in rng.choice(DIFFERENCES, 1 + rng.integers(2), replace=False)}
        if dtype in ("float16", "bfloat16"):
            chosen = chosen - {"table"} or {"offset"}  # their own rounding hides that
        positions, wrong = np.arange(tokens) + 1000, rope
        at = positions
        for name in chosen & ROPES.keys():
            wrong = ROPES[name](rng, wrong)
        if "offset" in chosen:
            at = at + int(rng.choice([-1, 1, 2]))
        if "restart" in chosen:
            cut = int(rng.integers(10, tokens - 10))
            at = np.concatenate([at[:cut], at[: tokens - cut]])
        if "positions" in chosen:
            at = rounded(at, "bfloat16")
        factor = wrong.attention_factor
        gain = (1.0 if factor != 1 else 1.25) if "factor" in chosen else factor
        x = rounded(rng.standard_normal((tokens, 2, rope.head_dim)), dtype)
        y = rotate(x, at, wrong, dtype, rows="bfloat16" if "table" in chosen else None, gain=gain)
        found = verify(rope, recorded(positions, x, y, dtype))
        names = {change.name.split("-")[0] for side in found.sides for change in side.changes}
        named += names == chosen
        assert found, (rope, chosen)
    assert named >= 0.9 * count
