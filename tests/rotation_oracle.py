"""How far a rotated tensor may be off, for tensors of any framework, handed over as float64.

Of ``phasor`` only the fields of a Rope and the published errors of a row are read.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from phasor import Rope
from phasor.angles import COS_SIN_ERROR, COS_SIN_ERROR_FLOAT32, REST_ERROR, REST_ERROR_FLOAT32

from . import oracle

#: Between 1 and the next number, and the smallest normal number, of dtypes that are rotated.
EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}
SMALLEST_NORMAL = {"bfloat16": 2.0**-126, "float16": 2.0**-14}


def pair_places(pairing: str, start: int, pairs: int) -> tuple[list[int], list[int]]:
    """Coordinates of the first and of the second of every pair."""
    if pairing == "half":
        return [start + k for k in range(pairs)], [start + pairs + k for k in range(pairs)]
    assert pairing == "interleaved", f"tests/rotation_oracle.py pair_places needs {pairing}"
    return [start + 2 * k for k in range(pairs)], [start + 2 * k + 1 for k in range(pairs)]


def bound(
    dtype: str, value: np.ndarray, terms: np.ndarray, size: np.ndarray, row_error: float
) -> np.ndarray:
    """How far an output may be from ``value``, element by element.

    Two products, a sum, a rounded row and a gain are at most four half-units of ``terms``; the
    rows are off by ``row_error``; 16-bit outputs are rounded once more.

    Args:
        dtype: Of the output.
        value: What is right.
        terms: ``|x0 cos| + |x1 sin|``, or the other coordinate's two.
        size: ``|x0| + |x1|``.
        row_error: Largest error of cos and sin.
    """
    eps = EPS["float64" if dtype == "float64" else "float32"]
    limit = 2 * eps * terms + row_error * size
    if dtype in SMALLEST_NORMAL:
        limit = limit + EPS[dtype] / 2 * (np.abs(value) + limit)
        limit = limit + SMALLEST_NORMAL[dtype] * EPS[dtype]
    return limit


def row_error(dtype: str, positions: Any, fastest: float = 1.0) -> float:
    """Largest error of cos and sin at those positions, for a fastest frequency."""
    exact = positions.tolist() if hasattr(positions, "tolist") else positions
    fraction = any(isinstance(p, float) for p in np.array(exact, dtype=object).reshape(-1))
    if dtype == "float64":
        return COS_SIN_ERROR + fraction * fastest * REST_ERROR
    return COS_SIN_ERROR_FLOAT32 + fraction * fastest * REST_ERROR_FLOAT32


def excess_by(
    actual: np.ndarray,
    x: np.ndarray,
    dtype: str,
    rows: np.ndarray,
    pairing: tuple[str, str],
    start: int = 0,
    *,
    gain: float = 1.0,
    error: float = 0.0,
) -> float:
    """Largest error of ``actual`` in units of `bound`, given the right complex rows by token.

    Coordinates outside the rotated slice count as infinitely wrong unless they are equal.
    """
    assert actual.shape == x.shape
    pairs = rows.shape[-1]
    rows = gain * rows[..., None, :]
    outside = [i for i in range(x.shape[-1]) if not start <= i < start + 2 * pairs]
    if not np.array_equal(actual[..., outside], x[..., outside]):
        return float("inf")
    first, second = pair_places(pairing[0], start, pairs)
    z = x[..., first] + 1j * x[..., second]
    right = z * rows
    size = abs(gain) * (np.abs(z.real) + np.abs(z.imag))
    cos, sin = np.abs(rows.real), np.abs(rows.imag)
    both = (
        (right.real, np.abs(z.real) * cos + np.abs(z.imag) * sin),
        (right.imag, np.abs(z.real) * sin + np.abs(z.imag) * cos),
    )
    worst = 0.0
    for places, (value, terms) in zip(pair_places(pairing[1], start, pairs), both, strict=True):
        off = np.abs(actual[..., places] - value)
        limit = bound(dtype, value, terms, size, error)
        if not np.isfinite(off).all():
            return float("inf")
        if off.size:
            worst = max(worst, float((off / np.where(off == 0, 1.0, limit)).max()))
    return worst


def exact_rows(rope: Rope, positions: Any) -> np.ndarray:
    """``exp(i angle)`` of every pair at every token, complex128 ``[..., seq, num_pairs]``."""
    exact = positions.tolist() if hasattr(positions, "tolist") else positions
    places = np.array(exact, dtype=object)
    places = places.reshape(-1, rope.axes.n_axes) if rope.axes.n_axes > 1 else places.reshape(-1)
    cos, sin = oracle.rows(rope, [p.tolist() if isinstance(p, np.ndarray) else p for p in places])
    tokens = np.shape(positions)[:-1] if rope.axes.n_axes > 1 else np.shape(positions)
    return (cos + 1j * sin).reshape(*tokens, -1)


def excess(
    actual: np.ndarray,
    x: np.ndarray,
    dtype: str,
    positions: Any,
    rope: Rope,
    *,
    inverse: bool = False,
    gain: float = 1.0,
) -> float:
    """Largest error of ``actual``, as ``x`` rotated by ``rope``, in units of `bound`."""
    rows = exact_rows(rope, positions)
    pairing = (rope.pairing, rope.output_pairing)
    return excess_by(
        actual,
        x,
        dtype,
        rows.conj() if inverse else rows,
        pairing[::-1] if inverse else pairing,
        rope.rotary_start,
        gain=gain,
        error=row_error(dtype, positions, float(max(oracle.frequencies(rope)))),
    )
