"""Random ropes as functions that somebody else wrote: exact float64, one complex product a pair.

Nothing is shared with the package: frequencies come from `oracle`, positions are multiplied with
them in float64, and vectors are turned as complex numbers. What comes out is rounded to the dtype
of what went in, or left in float64, as NumPy's promotion does it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from phasor import Rope
from phasor.scaling import (
    NTK,
    Cope,
    Hope,
    Linear,
    Llama3,
    NTKFixed,
    NTKMixed,
    NTKOld,
    PartNTK,
    PerPair,
    Proportional,
    Resonance,
    Yarn,
    YarnPaper,
)

from .. import oracle


@dataclass(frozen=True, kw_only=True)
class Hidden:
    """A rope, and the function that `identify` is shown in its place.

    Attributes:
        rope: What the function does.
        inv_freq: Its frequencies, rounded to float64.
        function: The function.
        dtype: Of the vectors it is asked about.
    """

    rope: Rope
    inv_freq: np.ndarray
    function: Callable[[np.ndarray, np.ndarray], np.ndarray]
    dtype: str


def turning(rope: Rope, *, keeps_dtype: bool = True) -> Callable[[Any, Any], Any]:
    """The function ``(x [batch, seq, heads, head_dim], positions)`` that turns as ``rope`` says."""
    inv_freq = np.array([float(f) for f in oracle.frequencies(rope)])
    pairs = range(len(inv_freq))
    i, j = np.array([oracle.pair_of(rope, k, rope.pairing) for k in pairs]).T
    to_i, to_j = np.array([oracle.pair_of(rope, k, rope.output_pairing) for k in pairs]).T

    def turned(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        spin = np.exp(1j * rope.direction * (positions[..., None] * inv_freq))[..., None, :]
        z = (x[..., i].astype(np.float64) + 1j * x[..., j].astype(np.float64)) * spin
        y = x.astype(np.float64)
        y[..., to_i], y[..., to_j] = z.real, z.imag
        return y.astype(x.dtype) if keeps_dtype else y

    return turned


def _number(rng: np.random.Generator, low: float, high: float) -> float:
    """Between the two, evenly in its logarithm; a few digits in half of all cases."""
    value = float(np.exp(rng.uniform(np.log(low), np.log(high))))
    if rng.random() < 0.5:
        value = float(f"{value:.{rng.integers(0, 4)}e}")
    return min(max(value, low), high)


def _law(rng: np.random.Generator, pairs: int) -> Any:
    factor, length = _number(rng, 1, 64), int(2 ** rng.uniform(9, 18))
    if rng.random() < 0.5:
        length = 1 << (length.bit_length() - 1)
    extends = {"factor": factor, "original_max_positions": length}
    slow = _number(rng, 0.5, 4)
    betas = {"beta_slow": slow, "beta_fast": slow + _number(rng, 1, 64)}
    usual = rng.random() < 0.5
    more = {} if usual else betas
    laws = [
        Linear(factor=factor),
        NTKOld(factor=factor),
        NTKFixed(factor=factor),
        NTKMixed(factor=factor, exponent=0.625 if usual else float(rng.uniform(0, 2))),
        Yarn(truncate=bool(rng.integers(2)), attention_factor=1.0, **extends, **more),
        YarnPaper(attention_factor=1.0, **extends, **more),
        Llama3(**extends) if usual else Llama3(
            low_freq_factor=float(rng.uniform(0.5, 2)),
            high_freq_factor=float(rng.uniform(2.1, 8)), **extends),
        Proportional(fraction=float(rng.integers(1, 9)) / 8, factor=factor),
        Hope(original_max_positions=length),
        Resonance(),
        PerPair(factors=tuple(rng.uniform(1, 60, pairs).tolist()), attention_factor=1.0),
    ]  # fmt: skip
    if pairs >= 2:
        laws += [
            NTK(factor=factor),
            PartNTK(**extends),
            Cope(num_pairs=int(rng.integers(2, pairs + 1))),
        ]
    return laws[rng.integers(len(laws))]


def hidden(seed: int) -> Hidden:
    """The rope of that number: base from 1.5 to 1e9, any width, law and dtype."""
    rng = np.random.default_rng((seed, 0x70BE))
    head_dim = int(rng.choice([2, 4, 6, 8, 16, 32, 48, 64, 80, 96, 128, 192, 256]))
    rotary_dim = head_dim if rng.random() < 0.6 else 2 * int(rng.integers(1, head_dim // 2 + 1))
    ways = ("half", "interleaved")
    pairing = ways[rng.integers(2)]
    rope = Rope(
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        rotary_start=0 if rng.random() < 0.8 else int(rng.integers(head_dim - rotary_dim + 1)),
        pairing=pairing,
        pairing_out=pairing if rng.random() < 0.9 else ways[rng.integers(2)],
        direction=1 if rng.random() < 0.9 else -1,
        base=_number(rng, 1.5, 1e9),
        scaling=None if rng.random() < 0.4 else _law(rng, rotary_dim // 2),
    )
    return Hidden(
        rope=rope,
        inv_freq=np.array([float(f) for f in oracle.frequencies(rope)]),
        function=turning(rope, keeps_dtype=bool(rng.integers(2))),
        dtype=str(rng.choice(["float64", "float32", "float16"])),
    )
