"""Arrays of JAX for its tests, which import it inside: other rooms' tests need not."""

from __future__ import annotations

from typing import Any

import numpy as np

from phasor import Rope

from .. import oracle


def normal(*shape: int, dtype: str = "float32", seed: int = 0) -> Any:
    """Standard normal numbers."""
    import jax.numpy as jnp

    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def float64(x: Any) -> np.ndarray:
    """The numbers of ``x``, which float64 holds whatever their dtype was."""
    return np.asarray(x).astype(np.float64)


def assert_rotated(y: Any, x: Any, positions: Any, rope: Rope, **options: Any) -> None:
    """``y`` is ``x`` rotated by ``rope``, to within the bound everywhere."""
    assert y.dtype == x.dtype
    values = float64(y), float64(x), y.dtype.name
    worst = oracle.excess(*values, positions, rope, **options)
    assert worst <= 1, f"{x.dtype}: {worst:.3g} times the bound"
