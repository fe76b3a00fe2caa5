"""What tests of the GPU's benchmark share: its files, a tiny case and a result made up for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from phasor.bench import COPY, Case, Measured

MODULES = (
    *("cases", "contenders", "facts", "foreign", "program", "report", "targets"),
    *("gpu_cases", "gpu_device", "gpu_measure", "gpu_foreign", "gpu_contenders", "gpu_facts"),
    *("gpu_targets", "gpu_report", "gpu"),
)
TINY = Case(name="tiny, prefill 5", dtype="float32", seq=5, q_heads=3, k_heads=1, head_dim=8)


def result(name: str, ratios: dict[str, float], **of_case: Any) -> Measured:
    """A result whose copy took a second each round, by calls; twice that by replays."""
    case = replace(TINY, name=name, **of_case)
    times = {key: [ratio] * 5 for key, ratio in ratios.items()}
    seconds = {COPY: [1.0] * 5} | times
    return Measured(case=case, seconds=seconds, replays={k: [2 * t for t in ts] for k, ts in
                                                         seconds.items()})  # fmt: skip
