"""How far the common ways of making cos and sin are off."""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from phasor._checks import choice
from phasor.angles import checked_positions, cos_sin, rows
from phasor.rope import Rope

Recipe = Literal[
    "float32 angle",
    "float64 angle",
    "float32 rows",
    "float64 rows",
    "complex64",
    "bfloat16 table",
]
RECIPES: tuple[Recipe, ...] = get_args(Recipe)


def angle_errors(rope: Rope, positions: ArrayLike, recipe: Recipe) -> NDArray[np.float64]:
    """How far a way of making cos and sin is off, over all pairs, at each position.

    The truth is `phasor.angles.cos_sin`, which is right to 1e-15 at every int64 position.

    Args:
        rope: A Rope of one axis.
        positions: Integers ``[...]``.
        recipe: ``"float32 angle"`` multiplies a float32 position by a float32 frequency and takes
            the cosine in float32, the commonest recipe; ``"float64 angle"`` does that in float64
            and keeps it; ``"complex64"`` takes the float32 angle into a complex exponential, as
            Meta's Llama does, and is no better; ``"bfloat16 table"`` stores the commonest recipe
            in bfloat16, whose eight bits cost ``2**-9`` in cos and in sin from the first
            positions on; ``"float32 rows"`` and ``"float64 rows"`` are products of phasor's
            digit tables.

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
    made_cos, made_sin = _made(rope, given, recipe)
    return np.hypot(made_cos - cos, made_sin - sin).max(-1)


def _made(
    rope: Rope, given: NDArray[Any], recipe: Recipe
) -> tuple[NDArray[np.floating[Any]], NDArray[np.floating[Any]]]:
    """Cos and sin by the recipe, ``[..., num_pairs]`` each."""
    if recipe == "float32 rows" or recipe == "float64 rows":
        made = rows(rope, given, np.float32 if recipe == "float32 rows" else np.float64)
        return made[..., 0], made[..., 1]
    kind: Any = np.float64 if recipe == "float64 angle" else np.float32
    angle = given[..., None].astype(kind) * (rope.direction * rope.inv_freq).astype(kind)
    if recipe == "complex64":
        turned: NDArray[np.complex64] = np.exp(np.complex64(1j) * angle)
        return turned.real, turned.imag
    cos, sin = np.cos(angle), np.sin(angle)
    if recipe == "bfloat16 table":
        return _nearest_bfloat16(cos), _nearest_bfloat16(sin)
    return cos, sin


def _nearest_bfloat16(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Finite float32 rounded to the nearest bfloat16, its upper half; a tie goes to the even one.

    Adding just under half of a unit, and one more where the unit is odd, carries exactly when
    rounding goes up.
    """
    bits = x.view(np.uint32)
    carried = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (carried & np.uint32(0xFFFF0000)).view(np.float32)
