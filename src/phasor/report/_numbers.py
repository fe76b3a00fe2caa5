"""The numbers behind each chart of a report, as rows of JSON values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phasor.axes import OneAxis
from phasor.errors import SpecError
from phasor.extending import ExtensionPlan
from phasor.papers import RECIPES, angle_errors, cosine, decay
from phasor.papers.heads import attention_weight, required_alpha
from phasor.rope import Rope

Row = Mapping[str, Any]

WEIGHTS = (0.5, 0.9, 0.99)
_POINTS = 240  # of a curve over distances
_LONGEST_HEAD = 1 << 20  # a head's weight looks at every distance
_DRAWS = 32  # positions of an octave
_EXACT = 2.0**-54  # an exact result has no logarithm


def coverage_rows(planned: ExtensionPlan) -> list[Row]:
    """Each pair under each law: radians per token, and its first distance with a new phase."""
    return [
        {
            "law": name,
            "pair": pair,
            "inv_freq": step,
            "first_new": None if math.isinf(first) else first,
            "turned": bool(turned),
        }
        for name, way in planned.ways.items()
        for pair, (step, first, turned) in enumerate(
            zip(
                way.extension.rope.inv_freq.tolist(),
                way.extension.coverage.first_new.tolist(),
                way.extension.coverage.trained_turns >= 1,
                strict=True,
            )
        )
    ]


def slowing_rows(planned: ExtensionPlan) -> list[Row]:
    """What each law divides the trained frequency of each pair by; pairs that turn only."""
    before = planned.ways["unchanged"].extension.rope.inv_freq
    return [
        {"law": name, "pair": pair, "divided_by": float(old / new)}
        for name, way in planned.ways.items()
        for pair, (old, new) in enumerate(zip(before, way.extension.rope.inv_freq, strict=True))
        if old and new
    ]


def cosine_rows(planned: ExtensionPlan) -> list[Row]:
    """``C(r) / n`` against distance under each law."""
    distances = _distances(planned.to)
    return [
        {"law": name, "distance": int(distance), "cosine": float(value)}
        for name, way in planned.ways.items()
        for distance, value in zip(
            distances,
            cosine(way.extension.rope, _along(way.extension.rope, distances), "aligned"),
            strict=True,
        )
    ]


def decay_rows(planned: ExtensionPlan) -> list[Row]:
    """RoFormer's curve for the trained rope."""
    rope = planned.ways["unchanged"].extension.rope
    distances = _distances(planned.to)
    return [
        {"distance": int(distance), "decay": float(value)}
        for distance, value in zip(distances, decay(rope, _along(rope, distances)), strict=True)
    ]


@dataclass(frozen=True, kw_only=True)
class HeadRows:
    """What a previous-token head needs and keeps.

    Attributes:
        alpha: The alpha of `phasor.papers.heads.required_alpha` for 0.99 over the trained context.
        needed: Alpha against context, for each of `WEIGHTS`, with the trained rope.
        kept: Weight against context with ``alpha``, under each law.
    """

    alpha: float
    needed: list[Row]
    kept: list[Row]


def head_rows(planned: ExtensionPlan) -> HeadRows | str:
    """The rows of a previous-token head; or why there is none."""
    trained = planned.ways["unchanged"].extension.rope
    contexts = [1 << bit for bit in range(2, min(planned.to, _LONGEST_HEAD).bit_length())]
    try:
        alpha = required_alpha(trained, min(planned.context, _LONGEST_HEAD), WEIGHTS[-1])
        needed: list[Row] = [
            {
                "weight": f"{weight:g}",
                "context": context,
                "alpha": required_alpha(trained, context, weight),
            }
            for weight in WEIGHTS
            for context in contexts
        ]
    except SpecError as error:
        return str(error)
    kept: list[Row] = []
    for name, way in planned.ways.items():
        rope = way.extension.rope
        # a law's temperature sharpens what the projections were trained to
        sharpened = alpha * rope.logit_factor / trained.logit_factor
        kept += [
            {
                "law": name,
                "context": context,
                "weight": attention_weight(rope, sharpened, context),
            }
            for context in contexts
        ]
    return HeadRows(alpha=alpha, needed=needed, kept=kept)


def precision_rows(planned: ExtensionPlan) -> list[Row]:
    """The largest error of cos and sin in each octave of positions, for each recipe."""
    rope = _one_axis(planned.ways["unchanged"].extension.rope)
    draw = np.random.default_rng(0)
    octaves = [
        draw.integers(2**bit, 2 ** (bit + 1), _DRAWS) for bit in range(planned.to.bit_length())
    ]
    return [
        {
            "recipe": recipe,
            "position": 2**bit,
            "error": max(float(angle_errors(rope, positions, recipe).max()), _EXACT),
        }
        for recipe in RECIPES
        for bit, positions in enumerate(octaves)
    ]


def _distances(to: int) -> NDArray[np.int64]:
    """Whole distances from 1 on, evenly in their logarithm."""
    return np.unique(np.geomspace(1, to - 1, _POINTS).astype(np.int64))


def _along(rope: Rope, distances: NDArray[np.int64]) -> NDArray[np.int64]:
    """Distances as this rope takes them: along every axis, as in text."""
    n_axes = rope.axes.n_axes
    return distances if n_axes == 1 else np.repeat(distances[:, None], n_axes, axis=1)


def _one_axis(rope: Rope) -> Rope:
    """The same frequencies on one axis, for positions that are equal along all."""
    if rope.axes.n_axes == 1:
        return rope
    given = tuple(rope.inv_freq.tolist())
    return replace(
        rope,
        axes=OneAxis(),
        base=None,
        scaling=None,
        explicit_inv_freq=given,
        inv_freq_dtype="exact",
    )
