"""Rotations as other programs compute them, and what they then store."""

import mpmath
import numpy as np
from tests import oracle

from phasor import Rope, preset

DTYPES = ("float64", "float32", "float16", "bfloat16")


def rounded(x, dtype):
    """The nearest numbers of a dtype, in float64."""
    if dtype != "bfloat16":
        return np.asarray(x, dtype).astype(np.float64)
    bits = np.float32(x).view(np.uint32)
    bits = bits + 0x7FFF + ((bits >> 16) & 1) & np.uint32(0xFFFF0000)
    return bits.view(np.float32).astype(np.float64)


def stored(x, dtype):
    """The array that a file holds; NumPy has two bytes for bfloat16."""
    if dtype == "bfloat16":
        return (np.float32(x).view(np.uint32) >> 16).astype(np.uint16).view("V2")
    return np.asarray(x, dtype)


def rotate(
    x, positions, rope, dtype, *, stepwise=False, float32_angles=False, rows=None, gain=None
):
    """``x`` ``[T, heads, dim]`` turned: rounded at the end or at every step, by rows of a dtype."""
    gain = rope.attention_factor if gain is None else gain
    pairs = rope.num_pairs
    places = np.asarray(positions)
    if places.ndim > 1:
        places = places[:, oracle.axis_of_pair(rope.axes, pairs)]
    else:
        places = places[:, None]
    frequencies = np.array([float(f) for f in oracle.frequencies(rope)])
    if float32_angles:
        angles = np.float64(np.float32(places) * np.float32(frequencies))
    else:
        exact = np.array([np.longdouble(mpmath.nstr(f, 25)) for f in oracle.frequencies(rope)])
        turn = 2 * np.longdouble("3.14159265358979323846264338327950288")
        angles = np.float64(np.fmod(places * exact, turn))
    cos, sin = gain * np.cos(angles), gain * np.sin(rope.direction * angles)
    if rows is not None:
        cos, sin = rounded(cos, rows), rounded(sin, rows)

    def step(values):
        return rounded(values, dtype) if stepwise else values

    cos, sin, y = step(cos)[:, None], step(sin)[:, None], x.copy()
    for k in range(pairs):
        first, second = oracle.pair_of(rope, k, rope.pairing)
        to_first, to_second = oracle.pair_of(rope, k, rope.pairing_out or rope.pairing)
        c, s, x0, x1 = cos[..., k], sin[..., k], x[..., first], x[..., second]
        y[..., to_first] = step(step(x0 * c) - step(x1 * s))
        y[..., to_second] = step(step(x0 * s) + step(x1 * c))
    return rounded(y, dtype)


def save_recording(path, model="llama-3.1-8b", late=0):
    """A file of what a program records that rotates as the model's first layer, or ``late``."""
    positions = np.arange(24)
    x = np.random.default_rng(0).standard_normal((24, 2, 128)).astype(np.float32)
    y = rotate(x.astype(np.float64), positions + late, preset(model)[0], "float32")
    np.savez(path, positions=positions, q=x, q_rotated=y.astype(np.float32))


ROPE = Rope(head_dim=64, pairing="half", base=10_000.0)
OTHER = Rope(head_dim=64, pairing="interleaved", base=10_000.0)
TOKENS, HEADS = 24, 3


def vectors(rope=ROPE, positions=None, heads=HEADS, dtype="float32"):
    """Vectors before and after."""
    positions = np.arange(TOKENS) if positions is None else positions
    x = np.random.default_rng(0).standard_normal((len(positions), heads, rope.head_dim))
    x = np.asarray(x, np.float32).astype(np.float64)
    return x, rotate(x, positions, rope, dtype)


def recording(rope=ROPE, dtype="float32", **more):
    """The arrays of a recording."""
    x, y = vectors(rope, dtype=dtype)
    return {
        "positions": np.arange(TOKENS),
        "q": stored(x, dtype),
        "q_rotated": stored(y, dtype),
        **more,
    }


def names(found):
    """The names of what differs."""
    return [change.name for side in found.sides for change in side.changes]


def turn_as(rope, offset=0):
    """A function that rotates as the rope does, at positions that are off."""

    def function(x, positions):
        heads = np.asarray(x, np.float64)
        places = (int(position) + offset for position in positions)
        pairs = zip(heads, places, strict=True)
        return np.float32(np.stack([oracle.turned(head, place, rope) for head, place in pairs]))

    return function
