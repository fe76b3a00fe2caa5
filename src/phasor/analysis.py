"""What a Rope does, measured: arrays out, for figures and reports."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from phasor._checks import choice
from phasor.angles import checked_positions, cos_sin, rows
from phasor.frequencies import inv_freq
from phasor.spec import Rope

Recipe = Literal["float32 angle", "float64 angle", "float32 rows", "float64 rows"]
RECIPES: tuple[Recipe, ...] = ("float32 angle", "float64 angle", "float32 rows", "float64 rows")


def angle_errors(rope: Rope, positions: ArrayLike, recipe: Recipe) -> NDArray[np.float64]:
    """How far a way of making cos and sin is off, over all pairs, at each position.

    The truth is `phasor.angles.cos_sin`, which is right to 1e-15 at every int64 position.

    Args:
        rope: A Rope of one axis.
        positions: Integers ``[...]``.
        recipe: ``"float32 angle"`` multiplies a float32 position by a float32 frequency and takes
            the cosine in float32, the commonest recipe; ``"float64 angle"`` does that in float64
            and keeps it; ``"float32 rows"`` and ``"float64 rows"`` are products of phasor's digit
            tables.

    Returns:
        float64 ``[...]``: the largest distance of ``(cos, sin)`` from the true unit vector.

    Raises:
        PositionError: If the positions are not numbers.
        SpecError: If the recipe does not exist.

    >>> rope = Rope(head_dim=128, pairing="half")
    >>> bool(angle_errors(rope, 131071, "float32 angle") > 1e-3)
    True
    >>> bool(angle_errors(rope, 131071, "float32 rows") < 2.2e-7)
    True
    """
    choice("recipe", recipe, RECIPES)
    given = checked_positions(positions)
    cos, sin = cos_sin(rope, given)
    if recipe == "float32 rows" or recipe == "float64 rows":
        made = rows(rope, given, np.float32 if recipe == "float32 rows" else np.float64)
        made_cos, made_sin = made[..., 0], made[..., 1]
    else:
        kind: Any = np.float32 if recipe == "float32 angle" else np.float64
        angle = given[..., None].astype(kind) * (rope.direction * inv_freq(rope)).astype(kind)
        made_cos, made_sin = np.cos(angle), np.sin(angle)
    return np.hypot(made_cos - cos, made_sin - sin).max(-1)
