"""JAX's functions give what complex numbers say, in every layout and precision, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from phasor import Rope

from ..oracle import EPS, exact_rows, row_error
from ..rotation_cases import FLOATS, POSITIONS, POSITIONS_32, ROPES, THREE, layouts
from .jax_arrays import assert_rotated, float64, normal

DTYPES = list(EPS)
FARTHEST = [*POSITIONS, 2**63 - 1, -(2**63)]
MIXED = Rope(
    head_dim=16,
    rotary_dim=8,
    rotary_start=6,
    pairing="interleaved",
    pairing_out="half",
    direction=-1,
)


def test_a_slice_turns_as_complex_numbers_do() -> None:
    """From one pairing to the other, the other way round, with a gain; and back."""
    from phasor.jax import rotate

    x = normal(len(POSITIONS_32), 3, 16)
    y = rotate(x, POSITIONS_32, MIXED, gain=1.25)
    assert_rotated(y, x, POSITIONS_32, MIXED, gain=1.25)
    back = rotate(y, POSITIONS_32, MIXED, inverse=True)
    assert_rotated(back, y, POSITIONS_32, MIXED, inverse=True)
    undone = rotate(y, POSITIONS_32, MIXED, inverse=True, gain=1.25)
    assert_rotated(undone, y, POSITIONS_32, MIXED, inverse=True, gain=1 / 1.25)


def test_query_and_key_may_differ_in_heads_and_dtype() -> None:
    """Heads first as well, by floats with all their 64 bits."""
    from phasor.jax import rotate_qk

    q = normal(4, len(FLOATS), 16)
    k = normal(1, len(FLOATS), 16, dtype="bfloat16")
    rotated = rotate_qk(q, k, FLOATS, ROPES["llama3"], heads_first=True)
    for y, x in zip(rotated, (q, k), strict=True):
        assert_rotated(y.swapaxes(0, 1), x.swapaxes(0, 1), FLOATS, ROPES["llama3"])


def test_several_axes_broadcast_over_a_batch() -> None:
    """A coordinate for each, and one row of positions for all."""
    from phasor.jax import rotate

    x, places = normal(2, 3, 4, 8), np.array([[0, 1, 2], [70_001, -5, 3], [2**31 - 1, 7, -(2**31)]])
    y = rotate(x, places, THREE)
    assert_rotated(y, x, places, THREE)


def test_float64_is_exact_to_the_last_integer() -> None:
    """With 64 bits, where -2**63 has a magnitude too."""
    import jax

    from phasor.jax import rotate

    with jax.enable_x64(True):
        x = normal(len(FARTHEST), 2, 16, dtype="float64")
        assert_rotated(rotate(x, FARTHEST, MIXED), x, FARTHEST, MIXED)


def test_rows_are_those_of_the_rotation() -> None:
    """A Rotation turns as they do; of a head each, cos and sin are its own."""
    import jax
    import jax.numpy as jnp

    from phasor.jax import Rotation

    rope = ROPES["llama3"]
    x = normal(len(POSITIONS_32), 2, 16)
    made = Rotation.at(jnp.asarray(POSITIONS_32), rope)
    cos, sin = map(np.asarray, (made.cos, made.sin))
    right = exact_rows(rope, POSITIONS_32)
    error = row_error("float32", POSITIONS_32)
    assert max(np.abs(cos - right.real).max(), np.abs(sin - right.imag).max()) <= error
    turn = jax.jit(lambda x, *rows: Rotation(*rows, pairing="half")(x, heads_first=True))
    for rows in ((cos, sin), [np.stack([row, row], -2) for row in (cos, sin)]):
        y = turn(jnp.swapaxes(x, 0, 1), *map(jnp.asarray, rows))
        assert_rotated(np.swapaxes(y, 0, 1), np.asarray(x), POSITIONS_32, rope)


def test_a_float_without_an_angle_becomes_nan_alone() -> None:
    """In an array of JAX, which is not read."""
    import jax.numpy as jnp

    from phasor.jax import Rotation

    made = Rotation.at(jnp.array([1.0, jnp.nan, jnp.inf, 2.0**63]), ROPES["one pair"])
    cos, sin = made.cos, made.sin
    assert np.isnan(cos[1:]).all()
    assert np.isnan(sin[1:]).all()
    assert abs(float(cos[0, 0]) - np.cos(1.0)) < 1e-6


@pytest.mark.compile
@pytest.mark.parametrize("rope", layouts().values(), ids=layouts())
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_layout_turns_as_complex_numbers_do(dtype: str, rope: Rope) -> None:
    """Forwards and back, with and without a gain."""
    import jax

    from phasor.jax import rotate

    with jax.enable_x64(dtype == "float64"):
        places = POSITIONS if dtype == "float64" else POSITIONS_32
        x = normal(len(places), 3, 16, dtype=dtype)
        for options in ({}, {"inverse": True, "gain": 1.3465735902799727}):
            undone = options | ({"gain": 1 / 1.3465735902799727} if options else {})
            assert_rotated(rotate(x, places, rope, **options), x, places, rope, **undone)


@pytest.mark.compile
@pytest.mark.parametrize("x64", [False, True], ids=["32 bits", "64 bits"])
@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_every_frequency_turns_at_its_own_rate(rope: Rope, x64: bool) -> None:
    """At integers, and at floats on the host and on the device."""
    import jax
    import jax.numpy as jnp

    from phasor.jax import rotate

    with jax.enable_x64(x64):
        for dtype in ("float32", "float64") if x64 else ("float32",):
            for places in (FARTHEST if x64 else POSITIONS_32, FLOATS):
                x = normal(len(places), 2, rope.head_dim, dtype=dtype)
                assert_rotated(rotate(x, places, rope), x, places, rope)
            x, places = normal(len(FLOATS), 2, rope.head_dim, dtype=dtype), jnp.asarray(FLOATS)
            assert_rotated(rotate(x, places, rope), x, np.asarray(places), rope)


@pytest.mark.compile
@pytest.mark.parametrize("dtype", ["int8", "int16", "uint8", "uint16", "uint32"])
def test_integers_of_every_width_are_taken(dtype: str) -> None:
    """At their least and their largest; an unsigned one has no sign."""
    import jax.numpy as jnp

    from phasor.jax import rotate

    info: Any = np.iinfo(dtype)
    places = jnp.array([info.min, 1, info.max], dtype)
    x = normal(3, 2, 16)
    assert_rotated(rotate(x, places, ROPES["linear"]), x, np.asarray(places), ROPES["linear"])


def test_arrays_are_read_as_float64() -> None:
    """Of bfloat16 too, which NumPy has not."""
    x = normal(3, 2, dtype="bfloat16")
    assert float64(x).dtype == np.float64
