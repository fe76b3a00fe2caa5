"""`identify`, `diff` and `verify` find in JAX's rotation the Rope that it was given."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from phasor import Rope, diff, identify, verify

ROPE = Rope(head_dim=32, pairing="interleaved", rotary_dim=16, base=500_000.0)
pytestmark = pytest.mark.compile


def turn(x: Any, positions: Any) -> Any:
    """By that Rope."""
    from phasor.jax import rotate

    return rotate(x, positions, ROPE)


def test_identify_names_the_rope() -> None:
    """From calls with arrays of JAX."""
    found = identify(turn, head_dim=32, arrays="jax", dims="bshd")
    assert found.rope == ROPE


def test_diff_finds_nothing() -> None:
    """Up to a million positions."""
    assert diff(turn, ROPE, arrays="jax", dims="bshd") is None


def test_verify_finds_what_was_recorded_right() -> None:
    """And says so of another base that it is not."""
    import jax.numpy as jnp

    places = np.array([0, 1, 7, 100, 5_000, 131_071])
    q = np.random.default_rng(0).standard_normal((len(places), 2, 32)).astype(np.float32)
    rotated = np.asarray(turn(jnp.asarray(q), places))
    recording = {"positions": places, "q": q, "q_rotated": rotated}
    assert not verify(ROPE, recording, dims="shd")
    assert verify(replace(ROPE, base=10_000.0), recording, dims="shd")
