"""What rotary attention must give, and how far off it may be: dense, one row at a time, float64.

Of an attention layer only its weights are read; who sees whom and where tokens stand is said by
the test. The bound follows the computation: every value carries the largest error that any order
of summation, in the given precision, can have left in it. Products of two errors are left out;
they are below a hundredth of the rest in every case here, which `SECOND_ORDER` pays for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from phasor import QueryFactor, Rope
from phasor.torch.attention import RotaryAttention

from ..oracle import exact_rows, pair_places
from .torch_arrays import float64, normal, row_error

SECOND_ORDER = 1.01
# torch's kernels on CPUs take an exponential that is good to 20 units in the last place
EXP_UNITS = 40
Carried = tuple[np.ndarray, np.ndarray]


WIDTH, HEADS = 12, 4
HALF = Rope(head_dim=8, pairing="half", base=100.0)
MIXED = Rope(head_dim=8, rotary_dim=4, rotary_start=2, pairing="interleaved", direction=-1)
STEPS = QueryFactor(strength=0.7, length=3, first=1)
LOG = QueryFactor(strength=0.7, length=3, form="log")


def causal(i: int, j: int) -> bool:
    """Nothing after the query is seen."""
    return j <= i


def last(n: int) -> Callable[[int, int], bool]:
    """The query's own token and the ``n - 1`` before it are seen."""
    return lambda i, j: i - n < j <= i


def everything(_i: int, _j: int) -> bool:
    """All is seen."""
    return True


# name: arguments, and who sees whom
LAYERS: dict[str, tuple[dict[str, Any], Any]] = {
    "causal": ({}, causal),
    "full": ({"causal": False}, everything),
    "window": ({"window": 4}, last(4)),
    "window of one": ({"window": 1}, last(1)),
    "window wider than the sequence": ({"window": 99}, causal),
    "grouped": ({"num_kv_heads": 2}, causal),
    "one key head, window": ({"num_kv_heads": 1, "window": 3}, last(3)),
    "normed": ({"qk_norm": True, "num_kv_heads": 2}, causal),
    "biased": ({"qkv_bias": True, "o_bias": True}, causal),
    "without positions": ({"rope": None, "head_dim": 6, "window": 5}, last(5)),
    "dropout, which is for training": ({"dropout": 0.5}, causal),
    "a part of the head": ({"rope": MIXED, "qk_norm": True, "norm_eps": 1e-2}, causal),
    "queries by position": ({"query_factor": STEPS, "num_kv_heads": 2}, causal),
    "queries by position, nothing turned": (
        {"rope": None, "head_dim": 6, "query_factor": LOG, "window": 5},
        last(5),
    ),
}


def layer(dtype: torch.dtype = torch.float64, **options: Any) -> RotaryAttention:
    """A layer with weights of every size, norms' weights among them; not in training."""
    made = RotaryAttention(**{"rope": HALF, "embed_dim": WIDTH, "num_heads": HEADS} | options)
    made = made.to(dtype)
    with torch.no_grad():
        for seed, (name, weight) in enumerate(made.named_parameters()):
            spread = normal(*weight.shape, dtype=dtype, seed=seed)
            weight.copy_(1 + spread / 4 if "norm" in name else spread * weight.shape[-1] ** -0.5)
    return made.eval()


def gamma(operations: int, unit: float) -> float:
    """Relative error of so many roundings in a row (Higham, Accuracy and Stability, 3.1)."""
    return operations * unit / (1 - operations * unit)


def linear(given: Carried, layer: nn.Linear, unit: float) -> Carried:
    """``W x + b`` and its error: that of ``x``, and the sum's in any order."""
    x, off = given
    weight = float64(layer.weight)
    bias = np.zeros(len(weight)) if layer.bias is None else float64(layer.bias)
    size = np.abs(x) @ np.abs(weight).T + np.abs(bias)
    return x @ weight.T + bias, off @ np.abs(weight).T + gamma(x.shape[-1] + 1, unit) * size


def normed(given: Carried, norm: nn.RMSNorm | None, unit: float) -> Carried:
    """``x / sqrt(mean x² + epsilon) w``."""
    if norm is None:
        return given
    x, off = given
    mean = np.mean(x * x, axis=-1, keepdims=True) + norm.eps
    weight = float64(norm.weight)
    y = x / np.sqrt(mean) * weight
    of_mean = np.mean(np.abs(x) * off, axis=-1, keepdims=True) / mean
    return y, off / np.sqrt(mean) * np.abs(weight) + np.abs(y) * (
        of_mean + gamma(x.shape[-1] + 6, unit)
    )


def rotated(
    given: Carried, rope: Rope | None, positions: Sequence[Any], unit: float, dtype: torch.dtype
) -> Carried:
    """Every head turned to its token's position; the operator's own bound on top."""
    if rope is None:
        return given
    x, off = given[0].copy(), given[1].copy()
    row = exact_rows(rope, np.asarray(positions))[:, None]
    first, second = pair_places(rope.pairing, rope.rotary_start, rope.rotary_dim // 2)
    z = given[0][..., first] + 1j * given[0][..., second]
    dx, dy = given[1][..., first], given[1][..., second]
    cos, sin = np.abs(row.real), np.abs(row.imag)
    ax, ay = np.abs(z.real), np.abs(z.imag)
    ways = ((first, z * row, cos, sin), (second, -1j * z * row, sin, cos))
    for places, right, of_x, of_y in ways:
        x[..., places] = right.real
        off[..., places] = (
            dx * of_x
            + dy * of_y
            + 4 * unit * (ax * of_x + ay * of_y)
            + row_error(dtype, positions) * (ax + ay)
        )
    return x, off


def multiplied(
    given: Carried, factor: QueryFactor | None, positions: Sequence[Any], unit: float
) -> Carried:
    """Each query times the number of its position; a logarithm is good to a few units."""
    if factor is None:
        return given
    numbers = []
    for p in positions:
        u = (int(p) + factor.first) / factor.length
        grown = max(1.0, {"steps": 1 + math.floor(u), "log": u}[factor.form])
        numbers.append(1 + factor.strength * math.log(grown))
    row = np.array(numbers)[:, None, None]
    return given[0] * row, given[1] * row + np.abs(given[0]) * row * gamma(10, unit)


def gathered(
    q: Carried, k: Carried, v: Carried, sees: np.ndarray, factor: float, unit: float
) -> Carried:
    """Softmax attention of one head, exactly and with all that rounding can do to it."""
    scores = factor * q[0] @ k[0].T
    aq, ak = np.abs(q[0]), np.abs(k[0])
    size = gamma(q[0].shape[-1] + 6, unit) * aq @ ak.T
    score_off = factor * (q[1] @ ak.T + aq @ k[1].T + size)
    scores = np.where(sees, scores, -np.inf)
    below = scores - scores.max(axis=-1, keepdims=True)
    weights = np.exp(below)
    weights /= weights.sum(axis=-1, keepdims=True)
    score_off = np.where(sees, score_off, 0)
    depth = np.where(sees, -below, 0).max(axis=-1, keepdims=True)
    # the exponent's error, its normaliser's, the rounding of both, and sums in blocks
    relative = score_off + (weights * score_off).sum(axis=-1, keepdims=True)
    relative = relative + gamma(3 * len(k[0]) + 2 * EXP_UNITS, unit) + 2 * unit * depth
    return weights @ v[0], (weights * relative) @ np.abs(v[0]) + weights @ v[1]


def attention(
    layer: Any,
    x: Tensor,
    positions: Sequence[Any],
    sees: Callable[[int, int], bool],
    keys_of: tuple[Tensor, Sequence[Any]] | None = None,
    *,
    dtype: torch.dtype,
) -> Carried:
    """What ``layer`` must give for one row ``[seq, width]``, and how far off it may be.

    Keys and values are those of ``keys_of``, its row and positions, or of the same tokens.
    """
    unit = torch.finfo(dtype).eps / 2
    seq, heads, group = len(x), layer.num_heads, layer.num_heads // layer.num_kv_heads
    y, key_positions = (x, positions) if keys_of is None else keys_of

    def projected(row: Tensor, map_: nn.Linear, norm: nn.RMSNorm | None = None) -> Carried:
        start = (float64(row), np.zeros(row.shape))
        value, off = (
            one.reshape(len(row), -1, layer.head_dim) for one in linear(start, map_, unit)
        )
        return normed((value, off), norm, unit)

    queries = projected(x, layer.q_proj, layer.q_norm)
    queries = multiplied(queries, layer.query_factor, positions, unit)
    q = rotated(queries, layer.rope, positions, unit, dtype)
    k = rotated(projected(y, layer.k_proj, layer.k_norm), layer.rope, key_positions, unit, dtype)
    v = projected(y, layer.v_proj)
    seen = np.array([[sees(i, j) for j in range(len(y))] for i in range(seq)])
    per_head = [
        gathered(
            (q[0][:, h], q[1][:, h]),
            (k[0][:, h // group], k[1][:, h // group]),
            (v[0][:, h // group], v[1][:, h // group]),
            seen,
            layer.head_dim**-0.5,
            unit,
        )
        for h in range(heads)
    ]
    value, off = (np.concatenate(parts, axis=-1) for parts in zip(*per_head, strict=True))
    right, bound = linear((value, off), layer.o_proj, unit)
    if dtype == torch.float64:
        bound = 2 * bound  # the oracle itself is float64
    return right, SECOND_ORDER * bound


def assert_attends(
    actual: Tensor,
    layer: Any,
    x: Tensor,
    sees: Callable[[int, int], bool],
    positions: Sequence[Any] | None = None,
    keys_of: tuple[Tensor, Sequence[Any]] | None = None,
) -> None:
    """``actual`` is what ``layer`` must give for the row ``x``, to within the bound everywhere."""
    places = range(len(x)) if positions is None else positions
    right, bound = attention(layer, x, list(places), sees, keys_of, dtype=actual.dtype)
    assert actual.shape == x.shape
    off = np.abs(float64(actual) - right)
    assert np.isfinite(off).all()
    assert (off <= bound).all(), f"{(off / bound).max():.3g} times the bound"
