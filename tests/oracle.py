"""What is true, computed the slow way: mpmath to 90 digits, formulas written from the papers.

The one oracle of all tests. Nothing here is shared with the package: of ``phasor`` only the fields
of a `Rope` and the published errors are read, and laws and axes are recognised by the name of their
class. `cos_sin` is exact, `exact_rows` has it for many tokens, `turned` is one complex
multiplication for each pair, and `excess` says how far a tensor of any framework, handed over as
float64, is from that. Attention's and linear attention's references are functions of these.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any

import mpmath
import numpy as np
from mpmath import mpf

from phasor.angles import COS_SIN_ERROR, COS_SIN_ERROR_FLOAT32, REST_ERROR, REST_ERROR_FLOAT32

Reals = list[mpf]

DIGITS = 90
#: Between 1 and the next number, and the smallest normal number, of dtypes that are rotated.
EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}
SMALLEST_NORMAL = {"bfloat16": 2.0**-126, "float16": 2.0**-14}
GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "golden.json").read_text("utf-8"))


def _plain(pairs: int, base: mpf) -> Reals:
    return [base ** (-mpf(2 * k) / (2 * pairs)) for k in range(pairs)]


def _clip(value: mpf) -> mpf:
    return mpf(min(max(value, mpf(0)), mpf(1)))


def _by_turns(law: Any, plain: Reals, many: float, few: float) -> Reals:
    """Kept from ``many`` turns over the original context, divided below ``few``."""
    scaled = []
    for f in plain:
        count = law.original_max_positions * f / (2 * mpmath.pi)
        if many == few:
            keep = mpf(1 if count >= many else 0)
        else:
            keep = _clip((count - few) / (mpf(many) - few))
        scaled.append(keep * f + (1 - keep) * f / mpf(law.factor))
    return scaled


def index_of_turns(pairs: int, base: mpf, context: int, turns: float) -> mpf:
    """The real-valued index of the pair that makes ``turns`` turns over ``context``."""
    return 2 * pairs * mpmath.log(context / (2 * mpmath.pi * turns)) / (2 * mpmath.log(base))


def _slowness(pairs: int, base: mpf, context: int, betas: Any, truncate: bool) -> Reals:
    """The ramp in indices of the YaRN authors' code: 0 is a kept pair, 1 a divided one."""
    low, high = (index_of_turns(pairs, base, context, beta) for beta in betas)
    if truncate:
        low, high = mpmath.floor(low), mpmath.ceil(high)
    low, high = max(low, mpf(0)), min(high, mpf(2 * pairs - 1))
    if low == high:
        high += mpf("0.001")
    return [_clip((k - low) / (high - low)) for k in range(pairs)]


def _yarn(law: Any, plain: Reals, base: mpf) -> Reals:
    betas = law.beta_fast, law.beta_slow
    slow = _slowness(len(plain), base, law.original_max_positions, betas, law.truncate)
    return [f * (1 - s) + f / mpf(law.factor) * s for f, s in zip(plain, slow, strict=True)]


def _part_ntk(law: Any, plain: Reals, base: mpf) -> Reals:
    pairs, length = len(plain), law.original_max_positions
    ntk = _ntk(law, plain, base)
    inner = _slowness(pairs, base, length, (1.25, 0.75), True)
    outer = _slowness(pairs, base, length, (16, 2), True)
    mixed = [
        n * (1 - s) + f / mpf(law.factor) * s for n, f, s in zip(ntk, plain, inner, strict=True)
    ]
    return [f * (1 - s) + m * s for f, m, s in zip(plain, mixed, outer, strict=True)]


def _ntk(law: Any, plain: Reals, base: mpf) -> Reals:
    width = 2 * len(plain)
    return _plain(len(plain), base * mpf(law.factor) ** (mpf(width) / (width - 2)))


def _mixed(law: Any, plain: Reals, base: mpf) -> Reals:
    n, power = len(plain), mpf(law.exponent)
    a = mpmath.log(law.factor) / mpf(n) ** power
    return [f * mpmath.exp(-a * mpf(k) ** power) for k, f in enumerate(plain, start=1)]


def _cope(law: Any, plain: Reals, base: mpf) -> Reals:
    fade, first = law.num_pairs, len(plain) - law.num_pairs
    soft = law.clip == "soft"

    def weight(j: int) -> mpf:
        if j < 0:
            return mpf(1)
        return (1 + mpmath.cos(mpmath.pi * j / (fade - 1))) / 2 if soft else mpf(0)

    # cos(pi) is -1 to 90 digits only; the last pair stands still
    return [
        mpf(0) if soft and k - first == fade - 1 else f * weight(k - first)
        for k, f in enumerate(plain)
    ]


LAWS: dict[str, Callable[[Any, Reals, mpf], Reals]] = {
    "Linear": lambda law, plain, base: [f / mpf(law.factor) for f in plain],
    "NTK": _ntk,
    "NTKOld": lambda law, plain, base: _plain(len(plain), base * mpf(law.factor)),
    "NTKFixed": lambda law, plain, base: [
        f / (mpf(law.factor) ** (mpf(2) / (2 * len(plain)))) ** (k + 1) for k, f in enumerate(plain)
    ],
    "NTKMixed": _mixed,
    "PartNTK": _part_ntk,
    "Yarn": _yarn,
    "YarnPaper": lambda law, plain, base: _by_turns(law, plain, law.beta_fast, law.beta_slow),
    "Llama3": lambda law, plain, base: _by_turns(
        law, plain, law.high_freq_factor, law.low_freq_factor
    ),
    "Proportional": lambda law, plain, base: [
        f / mpf(law.factor) if k < int(law.fraction * 2 * len(plain)) // 2 else mpf(0)
        for k, f in enumerate(plain)
    ],
    "Hope": lambda law, plain, base: [
        f if 2 * mpmath.pi / f <= law.original_max_positions else mpf(0) for f in plain
    ],
    "Cope": _cope,
    "Resonance": lambda law, plain, base: [
        2 * mpmath.pi / mpmath.nint(2 * mpmath.pi / f) for f in plain
    ],
    "PerPair": lambda law, plain, base: [
        f / mpf(s) for f, s in zip(plain, law.factors, strict=True)
    ],
}


def axis_of_pair(axes: Any, pairs: int) -> list[int]:
    """Which coordinate drives each pair, dealt out one pair at a time."""
    kind = type(axes).__name__
    if kind == "OneAxis":
        return [0] * pairs
    left = list(axes.sections)
    if kind in ("Sectioned", "Axial"):
        return [axis for axis, count in enumerate(left) for _ in range(count)]
    if kind == "Alternating":
        return [1 + k % 2 if k < 2 * left[1] else 0 for k in range(pairs)]
    assert kind == "InterleavedSections", f"tests/oracle.py axis_of_pair needs {kind}"
    # each axis takes its turn while it has pairs left, the first takes the others'
    dealt = []
    for k in range(pairs):
        axis = k % len(left)
        axis = axis if left[axis] > 0 else 0
        left[axis] -= 1
        dealt.append(axis)
    return dealt


@mpmath.workdps(DIGITS)
def float32(value: mpf) -> float:
    """The nearest float32, ties to even, found with integers."""
    if value == 0:
        return 0.0
    unit = mpf(2) ** max(int(mpmath.floor(mpmath.log(abs(value), 2))) - 23, -149)
    return float(mpmath.nint(value / unit) * unit)


def _spectrum(base: mpf, law: Any, pairs: int) -> Reals:
    if pairs == 0 or law is None:
        return _plain(pairs, base)
    return LAWS[type(law).__name__](law, _plain(pairs, base), base)


@lru_cache(maxsize=256)
@mpmath.workdps(DIGITS)
def frequencies(rope: Any) -> Reals:
    """Radians per position of every pair of a rope whose rule, if any, has picked its law."""
    if type(rope.axes).__name__ == "Mixed":
        # of the step along which it turns fastest
        found = [mpmath.sqrt(sum(f * f for f in own)) for own in zip(*terms(rope), strict=True)]
    elif rope.explicit_inv_freq is not None:
        found = [mpf(f) for f in rope.explicit_inv_freq]
    else:
        pairs, n_axes = rope.rotary_dim // 2, rope.axes.n_axes
        bases = getattr(rope.axes, "base", None) or [rope.base] * n_axes
        laws = getattr(rope.axes, "scaling", None) or [rope.scaling] * n_axes
        dealt, restarts = axis_of_pair(rope.axes, pairs), type(rope.axes).__name__ == "Axial"
        spectra = [
            _spectrum(mpf(base), law, dealt.count(axis) if restarts else pairs)
            for axis, (base, law) in enumerate(zip(bases, laws, strict=True))
        ]
        # an axis's own spectrum is counted from its first pair, a shared one from the head's
        steps = [dealt[:k].count(axis) if restarts else k for k, axis in enumerate(dealt)]
        found = [spectra[axis][step] for axis, step in zip(dealt, steps, strict=True)]
    return [mpf(float32(f)) for f in found] if rope.inv_freq_dtype == "float32" else found


@mpmath.workdps(DIGITS)
def terms(rope: Any) -> list[Reals]:
    """For each axis, the radians by which one step along it turns each pair."""
    if type(rope.axes).__name__ == "Mixed":
        is_exact = rope.inv_freq_dtype == "exact"
        return [
            [mpf(f) if is_exact else mpf(float32(mpf(f))) for f in row]
            for row in rope.axes.inv_freq
        ]
    axes, own = axis_of_pair(rope.axes, rope.rotary_dim // 2), frequencies(rope)
    return [
        [f if axis == turning else mpf(0) for axis, f in zip(axes, own, strict=True)]
        for turning in range(rope.axes.n_axes)
    ]


@mpmath.workdps(DIGITS)
def cos_sin(rope: Any, position: float | Sequence[float]) -> tuple[Reals, Reals]:
    """Cosine and sine of every pair at one position, to 60 digits and more."""
    at = list(position) if isinstance(position, Sequence) else [position]
    cosines, sines = [], []
    for steps in zip(*terms(rope), strict=True):
        exact = [Fraction(p) for p in at]  # a float stands for the rational it is
        places = (mpf(p.numerator) / p.denominator for p in exact)
        angle = sum(f * p for f, p in zip(steps, places, strict=True))
        cos, sin = mpmath.cos_sin(angle)
        cosines.append(cos)
        sines.append(rope.direction * sin)
    return cosines, sines


def rows(rope: Any, positions: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    """`cos_sin` of many positions, each entry rounded to float64."""
    both = [cos_sin(rope, position) for position in positions]
    cosines = np.array([[float(value) for value in one] for one, _ in both])
    sines = np.array([[float(value) for value in one] for _, one in both])
    return cosines, sines


def cosines(rope: Any, distance: int) -> float:
    """C(r), from real numbers."""
    return float(mpmath.fsum(cos_sin(rope, distance)[0]))


def exact_gap(rope: Any, distance: int) -> mpf:
    """``C(0) - C(r)`` with 90 digits, one pair after the other."""
    at = distance if rope.axes.n_axes == 1 else [distance] * rope.axes.n_axes
    with mpmath.workdps(DIGITS):
        return mpmath.fsum(1 - c for c in cos_sin(rope, at)[0])


def pair_places(pairing: str, start: int, pairs: int) -> tuple[list[int], list[int]]:
    """Coordinates of the first and of the second of every pair."""
    if pairing == "half":
        return [start + k for k in range(pairs)], [start + pairs + k for k in range(pairs)]
    assert pairing == "interleaved", f"tests/oracle.py pair_places needs {pairing}"
    return [start + 2 * k for k in range(pairs)], [start + 2 * k + 1 for k in range(pairs)]


def pair_of(rope: Any, k: int, pairing: str) -> tuple[int, int]:
    """The two coordinates of a head that are pair ``k``."""
    first, second = pair_places(pairing, rope.rotary_start, rope.rotary_dim // 2)
    return first[k], second[k]


@lru_cache(maxsize=1 << 16)
def _row(rope: Any, position: Any) -> np.ndarray:
    """``exp(i angle)`` of every pair at one position, rounded to complex128."""
    both = zip(*cos_sin(rope, position), strict=True)
    return np.array([complex(float(cos), float(sin)) for cos, sin in both])


def exact_rows(rope: Any, positions: Any) -> np.ndarray:
    """``exp(i angle)`` of every pair at every token, complex128 ``[..., seq, num_pairs]``."""
    exact = positions.tolist() if hasattr(positions, "tolist") else positions
    places = np.array(exact, dtype=object).reshape(np.shape(positions))
    has_axes = rope.axes.n_axes > 1
    tokens = places.shape[:-1] if has_axes else places.shape
    places = places.reshape(-1, rope.axes.n_axes) if has_axes else places.reshape(-1)
    made = [_row(rope, tuple(one) if has_axes else one) for one in places]
    return np.array(made, complex).reshape(*tokens, rope.rotary_dim // 2)


def turned_by(x: np.ndarray, rows: np.ndarray, rope: Any) -> np.ndarray:
    """Vectors ``[..., head_dim]``, by a complex128 multiplication of each pair by its row."""
    first, second = pair_places(rope.pairing, rope.rotary_start, rope.rotary_dim // 2)
    z = (x[..., first] + 1j * x[..., second]) * rows
    y = np.array(x, dtype=np.float64)
    first, second = pair_places(rope.output_pairing, rope.rotary_start, rope.rotary_dim // 2)
    y[..., first], y[..., second] = z.real, z.imag
    return y


def turned(x: np.ndarray, position: Any, rope: Any) -> np.ndarray:
    """One head's vector at one position."""
    at = tuple(position) if isinstance(position, Sequence) else position
    return turned_by(np.asarray(x, np.float64), _row(rope, at), rope)


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


def excess(
    actual: np.ndarray,
    x: np.ndarray,
    dtype: str,
    positions: Any,
    rope: Any,
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
        error=row_error(dtype, positions, float(max(frequencies(rope)))),
    )
