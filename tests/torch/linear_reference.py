"""What linear attention must give: RoFormer's eq. 19, token by token in NumPy.

Turns are the oracle's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phasor import Rope

from ..oracle import exact_rows, turned_by
from .torch_arrays import float64, normal

HALF = Rope(head_dim=8, pairing="half", base=100.0)
Maps = tuple[Callable[[np.ndarray], np.ndarray], Callable[[np.ndarray], np.ndarray]]


def elu_plus_one(x: np.ndarray) -> np.ndarray:
    """``elu(x) + 1``, by its two cases."""
    return np.array([y + 1 if y > 0 else math.exp(y) for y in x.flat]).reshape(x.shape)


def shares(x: np.ndarray, axis: int) -> np.ndarray:
    """The softmax."""
    return np.exp(x) / np.exp(x).sum(axis, keepdims=True)


# of [seq, heads, width]
RIGHT_MAPS: dict[str, Maps] = {
    "elu": (elu_plus_one, elu_plus_one),
    "softmax": (lambda x: shares(x, -1), np.exp),
    "shen": (lambda x: shares(x, -1), lambda x: shares(x, 0)),
}


def turned(x: np.ndarray, positions: Any, rope: Rope | None) -> np.ndarray:
    """``x`` ``[seq, heads, head_dim]``, rotated as complex numbers; as it is without a rope."""
    return x if rope is None else turned_by(x, exact_rows(rope, positions)[:, None], rope)


def right(
    qkv: tuple[Tensor, Tensor, Tensor],
    positions: Any,
    rope: Rope | None,
    *,
    causal: bool,
    feature_map: str | Maps = "elu",
) -> np.ndarray:
    """Eq. 19 of one sequence ``[seq, heads, width]``, a sum for every token and head."""
    q, k, v = map(float64, qkv)
    map_query, map_key = RIGHT_MAPS[feature_map] if isinstance(feature_map, str) else feature_map
    q, k = map_query(q), map_key(k)
    turned_q, turned_k = turned(q, positions, rope), turned(k, positions, rope)
    out = np.zeros((*q.shape[:2], v.shape[-1]))
    for m in range(len(q)):
        for head in range(q.shape[1]):
            above, below = np.zeros(v.shape[-1]), 0.0
            for n in range(m + 1 if causal else len(q)):
                above = above + (turned_q[m, head] @ turned_k[n, head]) * v[n, head]
                below += q[m, head] @ k[n, head]
            out[m, head] = above / below
    return out


def three(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """A query, a key and a value of standard normal numbers."""
    return tuple(normal(*shape, seed=3 * seed + place, dtype=dtype) for place in range(3))


def off(actual: Tensor, value: np.ndarray) -> float:
    """Largest difference."""
    return float(np.abs(float64(actual) - value).max())
