"""Laws that keep fast pairs and divide slow ones, read backwards from the frequencies."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from phasor.identification.intervals import Floats, Interval, around, log_base
from phasor.scaling import Law, Llama3, PartNTK, Yarn, YarnPaper

# turns at which a YaRN ramp begins and ends, in the models there are
_BETAS = ((32.0, 1.0), (1.0, 1.0), (64.0, 1.0), (16.0, 1.0), (32.0, 2.0), (128.0, 1.0))
_FACTORS = (2.0, 4.0, 8.0, 16.0, 32.0, 40.0, 64.0, 128.0)
_BOUND = 1e-3  # of an index: a ramp's end that is this close to a whole one was rounded to it


def ramp_laws(f: Floats, relative: Floats) -> Iterator[tuple[float, Law]]:
    """Bases and laws that keep the first pairs and divide the last."""
    base = _kept_base(f, relative)
    if base is None:
        return
    for factor, keep in _keeps(f, relative, base):
        yield from ((base, law) for law in _by_index(keep, base, factor))
        yield from ((base, law) for law in _by_turns(keep, base, factor))
        yield from (
            (base, PartNTK(factor=factor, original_max_positions=1 << power))
            for power in range(9, 18)
            if _plausible_part(keep, base, 1 << power)
        )


def _kept_base(f: Floats, relative: Floats) -> float | None:
    """The base of the fast pairs that a law has left alone."""
    pairs = len(f)
    index = np.arange(pairs, dtype=np.float64)
    if abs(f[0] - 1) > relative[0]:
        return None
    base = None
    for kept in range(2, pairs + 1):
        logs = log_base(f[:kept], relative[:kept], pairs, index[:kept])
        if not logs:
            break
        if logs.high - logs.low < 0.01:
            base = logs.exp().simplest()
    return base


def _keeps(f: Floats, relative: Floats, base: float) -> Iterator[tuple[float, Floats]]:
    """Factors, and how much of each pair is kept if that is the factor."""
    pairs = len(f)
    left = f * base ** (np.arange(pairs) / pairs)
    last = around(1 / left[-1], 2 * relative[-1] + 1e-12)
    level = abs(left[-1] / left[-2] - 1) <= relative[-1] + relative[-2]
    plateau = last.simplest()
    factors = (plateau,) if level and plateau is not None else _FACTORS
    for factor in factors:
        if factor != 1:
            yield factor, (left - 1 / factor) / (1 - 1 / factor)


def _ramp(keep: Floats) -> NDArray[np.intp]:
    """The pairs that are neither kept nor divided."""
    return np.flatnonzero((keep > 1e-4) & (keep < 1 - 1e-4))


def _ends(keep: Floats) -> Iterator[tuple[float, float]]:
    """Indices at which a ramp linear in the index is 1 and 0."""
    inside = _ramp(keep)
    if len(inside) >= 2:
        first, last = int(inside[0]), int(inside[-1])
        slope = (keep[first] - keep[last]) / (last - first)
        low, high = (
            first - (1 - keep[first]) / max(slope, 1e-9),
            last + keep[last] / max(slope, 1e-9),
        )
        if low > -1 and high < 4 * len(keep):
            yield float(low), float(high)
        return
    low = int(np.flatnonzero(keep > 1 - 1e-4)[-1])
    yield from ((float(a), float(low + b)) for a in (low, low - 1) for b in (1, 2) if a >= 0)


def _by_index(keep: Floats, base: float, factor: float) -> Iterator[Law]:
    for low, high in _ends(keep):
        whole = all(abs(end - round(end)) < _BOUND for end in (low, high))
        yield from _yarns(low, high, base, factor, len(keep), truncate=False)
        if whole:
            yield from _yarns(round(low), round(high), base, factor, len(keep), truncate=True)


def _yarns(
    low: float, high: float, base: float, factor: float, pairs: int, *, truncate: bool
) -> Iterator[Law]:
    """The ramp's ends say context / turns; a context for every usual choice of turns."""

    def context(first: float, last: float) -> Interval:
        # the context over which a pair at this real-valued index makes one turn
        return Interval(*(2 * math.pi * base ** (end / pairs) for end in (first, last)))

    if truncate:
        at_low = Interval(0.0, context(0, 1).high) if low == 0 else context(low, low + 1)
        at_high = context(high - 1, high)
    else:
        at_low, at_high = context(low - _BOUND, low + _BOUND), context(high - _BOUND, high + _BOUND)
    for fast, slow in _BETAS:
        both = Interval(at_low.low * fast, at_low.high * fast) & Interval(
            at_high.low * slow, at_high.high * slow
        )
        length = both.power_of_two() or both.simplest()
        if length is not None and length >= 1 and length == int(length):
            yield Yarn(
                factor=factor, original_max_positions=int(length), beta_fast=fast, beta_slow=slow,
                truncate=truncate,
            )  # fmt: skip
    length = at_high.power_of_two()
    if length is not None and at_low.low > 0:
        fast_turns = Interval(length / at_low.high, length / at_low.low).simplest()
        if fast_turns is not None and fast_turns >= 1:
            yield Yarn(
                factor=factor, original_max_positions=length, beta_fast=fast_turns,
                truncate=truncate,
            )  # fmt: skip


def _by_turns(keep: Floats, base: float, factor: float) -> Iterator[Law]:
    """A ramp linear in the frequency itself: Llama 3's, and the one YaRN's paper prints."""
    pairs = len(keep)
    plain = base ** (-np.arange(pairs) / pairs)
    inside = _ramp(keep)
    if len(inside) == 0:
        step = int(np.flatnonzero(keep > 1 - 1e-4)[-1])
        if step + 1 < pairs:
            length = Interval(2 * np.pi / plain[step], 2 * np.pi / plain[step + 1]).power_of_two()
            if length is not None:
                yield _llama3(factor, length, 1.0, 1.0)
                yield _llama3(factor, length, 1.0, 4.0)
        return
    if len(inside) == 1:
        k = int(inside[0])
        yield from _rounded(factor, 2 * np.pi * (1 + 3 * keep[k]) / plain[k], 1.0, 4.0)
        return
    first, last = int(inside[0]), int(inside[-1])
    slope = (keep[first] - keep[last]) / (plain[first] - plain[last])
    if slope <= 0:
        return
    slow = plain[last] - keep[last] / slope
    if slow <= 0:
        return
    fast = slow + 1 / slope
    ratio = around(float(fast / slow), 1e-3).simplest() or 1.0
    yield from _rounded(factor, 2 * np.pi / slow, 1.0, ratio)
    paper = around(2 * np.pi / slow, 1e-3).power_of_two()
    if paper is not None:
        yield YarnPaper(factor=factor, original_max_positions=paper, beta_fast=ratio)


def _rounded(factor: float, length: float, low: float, high: float) -> Iterator[Law]:
    near = around(length, 1e-3)
    for whole in {near.power_of_two(), round(near.simplest() or 0), round(length)}:
        if whole is not None and whole >= 1:
            yield _llama3(factor, whole, low, high)


def _llama3(factor: float, length: int, low: float, high: float) -> Law:
    return Llama3(
        factor=factor, original_max_positions=length, low_freq_factor=low, high_freq_factor=high
    )


def _plausible_part(keep: Floats, base: float, length: int) -> bool:
    """Whether the first pair that is not kept is where 16 turns put it."""
    changed = np.flatnonzero(keep < 1 - 1e-4)
    pairs = len(keep)
    index = pairs * math.log(length / (32 * math.pi)) / math.log(base)
    return len(changed) > 0 and abs(int(changed[0]) - index) <= 2


def inverted_ramp(f: Floats, relative: Floats) -> Iterator[tuple[float, float]]:
    """The base and factor of a YaRN ramp that divides the fast pairs and keeps the slow ones."""
    pairs = len(f)
    index = np.arange(pairs, dtype=np.float64)
    factor = around(1 / f[0], 2 * relative[0] + 1e-12).simplest()
    if factor is None or factor <= 1 or pairs < 4:
        return
    base = None
    for kept in range(2, pairs):
        logs = log_base(f[-kept:], relative[-kept:], pairs, index[-kept:])
        if not logs:
            break
        base = logs.exp().simplest() or base
    if base is None:
        return
    left = (f * base ** (index / pairs) - 1 / factor) / (1 - 1 / factor)
    inside = _ramp(left)
    # a base, a factor and two ends are four numbers that four pairs would always have
    if len(inside) < 2 or pairs < 8:
        return
    first, last = int(inside[0]), int(inside[-1])
    slope = (left[last] - left[first]) / (last - first)
    ramp = np.clip(left[first] + slope * (index - first), 0, 1)
    exact = base ** (-index / pairs) * (ramp + (1 - ramp) / factor)
    if slope > 0 and ramp[-1] == 1 and np.all(np.abs(exact - f) <= (2 * relative + 1e-9) * f):
        yield base, factor
