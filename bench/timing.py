"""Calls timed in turn, and what is said of many times."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

Call = Callable[[], object]
#: Seconds of one call, of a number of calls made in a row.
Timer = Callable[[Call, int], float]


class Spread(NamedTuple):
    """Quartiles of a measurement."""

    low: float
    median: float
    high: float

    def __str__(self) -> str:
        """The median, and half the distance of the others as a part of it."""
        percent = 50 * (self.high - self.low) / self.median
        return f"{self.median:.{2 if self.median < 10 else 0}f} ±{percent:.0f}%"


def spread(values: Sequence[float]) -> Spread:
    """The quartiles of at least two values, ends included."""
    return Spread(*statistics.quantiles(values, n=4, method="inclusive"))


class Times(dict[str, list[float]]):
    """Seconds of one call by its name, for each of a number of rounds."""

    def median(self, name: str) -> float:
        """Seconds of the median round."""
        return spread(self[name]).median

    def ratio(self, name: str, to: str) -> Spread:
        """Quartiles, over the rounds, of one call's time divided by another's."""
        return spread([a / b for a, b in zip(self[name], self[to], strict=True)])


def by_clock(call: Call, repeats: int) -> float:
    """The timer of calls that have done their work when they return."""
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def interleave(
    calls: Mapping[str, Call],
    *,
    seconds: float,
    warm: bool = False,
    rounds: tuple[int, int] = (5, 200),
    timed: Timer = by_clock,
) -> Times:
    """Times of ``calls``, by name, to a nanosecond, which is finer than the clock.

    Every call has its turn in every round, in an order drawn anew; it goes on for roughly as many
    seconds as are given, but for the fewest and most of ``rounds``. A call shorter than 0.1 ms is
    repeated within its turn. Where the calls are ``warm`` each is made once more before its turn,
    untimed, so that it finds its own tensors in the cache and not those of its predecessor.
    """
    once: dict[str, float] = {}
    for name, call in calls.items():
        call()
        once[name] = timed(call, 1)
        if once[name] < 1e-3:
            once[name] = min(once[name], *(timed(call, 1) for _ in range(10)))
    repeats = {name: max(1, min(1000, int(1e-4 / max(t, 1e-9)))) for name, t in once.items()}
    spent = sum(t * (repeats[name] + warm) for name, t in once.items())
    samples = Times({name: [] for name in calls})
    draw = random.Random(0)
    gc.collect()
    gc.disable()
    try:
        for _ in range(max(rounds[0], min(rounds[1], int(seconds / max(spent, 1e-9))))):
            for name in draw.sample(list(calls), len(calls)):
                if warm:
                    calls[name]()
                samples[name].append(round(timed(calls[name], repeats[name]), 9))
    finally:
        gc.enable()
    return samples
