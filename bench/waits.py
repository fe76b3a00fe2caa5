"""How long a person waits: ``python bench/waits.py`` prints seconds, each the median of five.

Scans over a million distances, and the identification of a function with heads 128 wide.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import numpy as np

from phasor import Rope
from phasor.identification import identify
from phasor.numpy import rotate
from phasor.papers import cosine, decay, expected_linear_sum, negative_distances

ROPE = Rope(head_dim=128, pairing="half", base=500_000.0)
FAR = np.arange(10**6)
WAITS: dict[str, Callable[[], object]] = {
    "decay, 1e6 distances": lambda: decay(ROPE, FAR),
    "cosine, 1e6 distances": lambda: cosine(ROPE, FAR, "aligned"),
    "negative distances, to 1e6": lambda: negative_distances(ROPE, 10**6),
    "sum of linear weights, 1e6 keys": lambda: expected_linear_sum(ROPE, 10**6),
    "identify, a head of 128": lambda: identify(
        lambda x, positions: rotate(x, positions, ROPE), 128
    ),
}


def seconds(call: Callable[[], object]) -> float:
    """Of one call."""
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


for name, call in WAITS.items():
    print(f"{name:32} {median(seconds(call) for _ in range(5)):.2f} s")
