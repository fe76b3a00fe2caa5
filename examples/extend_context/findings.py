"""What was found, as JSON values: means over positions, and each published order's verdict."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from losses import mean_and_error, verdict
from run import Run
from settings import Settings
from torch import Tensor
from ways import STAGES, claims, ways


def findings(settings: Settings, run: Run) -> dict[str, Any]:
    """Curves, means over ranges of positions, and each published order with its verdict."""
    known, ranges = ways(settings), _ranges(settings)
    by_range = {key: _by_range(bits, settings, ranges) for key, bits in run.found.items()}
    measured: dict[str, Any] = {stage: {} for stage in STAGES}
    for key, bits in run.found.items():
        stage, name = key.split("/")
        measured[stage][name] = {
            **_numbers("bits", by_range[key]),
            **_numbers("above_window", by_range[key] - by_range[f"{stage}/window"]),
            **_numbers("curve", bits),
            **_numbers("curve_above_window", bits - run.found[f"{stage}/window"]),
        }
    return {
        "unit": "bits per byte",
        "ranges": ranges,
        "bin": settings.bin,
        "ways": {
            name: {"title": way.title, "rope": way.rope.to_dict(), "tuned_as": way.tuned_as}
            for name, way in known.items()
        },
        "measured": measured,
        "claims": [
            {
                "better": list(claim.better),
                "worse": list(claim.worse),
                "source": claim.source,
                **_judged(by_range["/".join(claim.better)], by_range["/".join(claim.worse)]),
            }
            for claim in claims()
        ],
        "growth": {
            key: _numbers("second_half_above_trained", bits[:, 2:] - bits[:, :1])
            for key, bits in by_range.items()
        },
        "rule_against_law": _same_law(run.found, settings),
        "last_training_bits": {name: round(loss, 4) for name, loss in run.final.items()},
    }


def _ranges(settings: Settings) -> list[list[int]]:
    """Positions seen in training, as many beyond, and the second half of the longer context."""
    ends = (0, settings.context, 2 * settings.context, settings.target)
    return [list(pair) for pair in pairwise(ends)]


def _by_range(bits: Tensor, settings: Settings, ranges: list[list[int]]) -> Tensor:
    """``[windows, bins]`` to ``[windows, ranges]``."""
    size = settings.bin
    parts = [bits[:, first // size : last // size].mean(1) for first, last in ranges]
    return torch.stack(parts, dim=1)


def _numbers(name: str, values: Tensor) -> dict[str, list[float]]:
    mean, error = mean_and_error(values)
    return {name: _rounded(mean), f"{name}_error": _rounded(error)}


def _judged(better: Tensor, worse: Tensor) -> dict[str, Any]:
    """The order beyond the trained context, window by window: both read the same bytes."""
    mean, error = mean_and_error((better - worse)[:, 1:])
    pairs = zip(mean.tolist(), error.tolist(), strict=True)
    return {
        "difference": _rounded(mean),
        "error": _rounded(error),
        "verdict": [verdict(*pair) for pair in pairs],
    }


def _same_law(found: dict[str, Tensor], settings: Settings) -> dict[str, float]:
    """How far dynamic NTK is from what it should equal: no law at first, its NTK law at last."""
    dynamic = found["zero-shot/dynamic_ntk"]
    first = settings.context // settings.bin
    plain, law = found["zero-shot/none"], found["zero-shot/ntk"]
    return {
        "within_context": float((dynamic - plain)[:, :first].abs().max()),
        "at_target": float((dynamic - law)[:, -1].abs().max()),
    }


def _rounded(values: Tensor) -> list[float]:
    return [round(value, 4) for value in values.tolist()]
