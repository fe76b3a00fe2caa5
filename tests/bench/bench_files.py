"""The files of ``bench/``, which are scripts and no package, tiny cases and a contender by hand."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).parents[2]
_NAMES = (
    *("cases", "timing", "device", "measure", "contenders", "targets"),
    *("report", "rotation", "run", "linear_attention", "layers"),
)


def _imported() -> SimpleNamespace:
    """The files as modules, under names that no other test can meet."""
    sys.path.insert(0, str(ROOT / "bench"))
    try:
        return SimpleNamespace(**{name: importlib.import_module(name) for name in _NAMES})
    finally:
        sys.path.remove(str(ROOT / "bench"))
        for name in _NAMES:
            sys.modules.pop(name, None)


BENCH: Any = _imported()
COPY, MULTIPLY = BENCH.measure.COPY, BENCH.measure.MULTIPLY
TINY = BENCH.cases.Case(
    name="tiny, prefill 5", group="tiny", dtype="float32", seq=5, batch=2, q_heads=3, k_heads=1,
    head_dim=8,
)  # fmt: skip
SHAPES = {
    "prefill": TINY,
    "bfloat16": replace(TINY, dtype="bfloat16"),
    "heads first": replace(TINY, heads_first=True),
    "partial": replace(TINY, rotary_dim=4),
    "several axes": replace(TINY, sections=(2, 1, 1)),
    "rows cut": replace(TINY, rows=(24, 20)),
    "decode": replace(TINY, seq=1, batch=6),
    "backward": replace(TINY, backward=True),
    "far": replace(TINY, first=10**6),
}
every_shape = pytest.mark.parametrize("case", SHAPES.values(), ids=SHAPES)


def by_hand(case: Any, positions: Tensor) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The half pairing of one axis from plain cosines, in float64."""
    width = case.head_dim
    inv_freq = case.base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = positions.double()[..., None, None] * inv_freq
    cos, sin = angles.cos(), angles.sin()

    def turned(x: Tensor) -> Tensor:
        a, b = x.double().chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)

    return lambda q, k: (turned(q), turned(k))


def spoilt(spoil: Callable[[Tensor], Tensor]) -> Any:
    """A contender that is `by_hand` with something wrong in its query."""

    def build(case: Any, rope: Any, positions: Tensor) -> Any:
        right = by_hand(case, positions)

        def rotation(q: Tensor, k: Tensor) -> Sequence[Tensor]:
            new_q, new_k = right(q, k)
            return spoil(new_q), new_k

        return rotation

    return contender("by hand", build)


def contender(name: str, build: Any, **options: Any) -> Any:
    """A contender of the half pairing."""
    return BENCH.measure.Contender(name=name, pairing="half", build=build, **options)


def admitted(case: Any, *contenders: Any) -> Any:
    """What the gate says of them."""
    return BENCH.measure.admit(case, contenders)[0]


def result(name: str, ratios: dict[str, float], **of_case: Any) -> Any:
    """A result whose copy took a second each round, by calls; twice that by replays."""
    seconds = {key: [ratio] * 5 for key, ratio in ({COPY: 1.0} | ratios).items()}
    replays = {key: [2 * t for t in times] for key, times in seconds.items()}
    case = replace(TINY, name=name, batch=1, group=name.partition(",")[0], **of_case)
    times = BENCH.timing.Times
    return BENCH.measure.Measured(case=case, seconds=times(seconds), replays=times(replays))


def page(measured: Sequence[Any], device: str = "cpu", whole: bool = True) -> str:
    """The page of results made up for a test."""
    about = {
        "machine": "M", "python": "3", "date": "today", "commit": "abc", "whole": whole,
        "versions": {"torch": "2"}, "failed": {},
    }  # fmt: skip
    plain = {m.case.label: asdict(m) for m in measured}
    found = json.loads(json.dumps(plain))
    return BENCH.report.markdown(about, BENCH.rotation.sections(found, device))
