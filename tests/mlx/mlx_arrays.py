"""Random arrays of MLX, and whether they are rotated as mpmath says."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from phasor import Rope

from ..oracle import excess

DTYPES = (mx.float32, mx.bfloat16, mx.float16)


def normal(*shape: int, dtype: mx.Dtype = mx.float32, seed: int = 0) -> mx.array:
    """Normal numbers, the same every time."""
    return mx.array(np.random.default_rng(seed).standard_normal(shape), dtype)


def float64(x: mx.array) -> np.ndarray:
    """The same numbers, for NumPy."""
    return np.array(x.astype(mx.float32), np.float64)


def assert_rotated(y: mx.array, x: mx.array, positions: Any, rope: Rope, **options: Any) -> None:
    """``y`` is ``x`` rotated, within what docs/precision.md derives."""
    assert y.dtype == x.dtype
    name = str(x.dtype).rpartition(".")[2]
    assert excess(float64(y), float64(x), name, positions, rope, **options) <= 1
