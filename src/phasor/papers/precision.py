"""Errors of the common ways to compute cos and sin."""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from phasor._checks import choice
from phasor.angles import as_positions, cos_sin
from phasor.rope import Rope, real_terms

Recipe = Literal["float32 angle", "float64 angle", "float32 rows", "complex64", "bfloat16 table"]
RECIPES: tuple[Recipe, ...] = get_args(Recipe)


def angle_errors(rope: Rope, positions: ArrayLike, recipe: Recipe) -> NDArray[np.float64]:
    """The largest error of a recipe for cos and sin over all pairs, at each position.

    The reference is `phasor.angles.cos_sin`, which is correct to 1e-15 at every int64 position.

    Args:
        rope: The rope.
        positions: Integers ``[...]``; ``[..., n_axes]`` for several axes.
        recipe: ``"float32 angle"``, the most common, multiplies a float32 position by a float32
            frequency and takes the cosine in float32; ``"float64 angle"`` does all of it in
            float64; ``"complex64"`` passes the float32 angle to a complex exponential, as in Meta's
            Llama, and is no better; ``"bfloat16 table"`` stores the most common recipe in bfloat16,
            whose eight bits cost ``2**-9`` in cos and sin from the first positions on; ``"float32
            rows"`` are computed by phasor's kernels.

    Returns:
        float64 ``[...]``: the largest distance of ``(cos, sin)`` from the true unit vector.

    >>> rope = Rope(head_dim=128, pairing="half")
    >>> bool(angle_errors(rope, 131071, "float32 angle") > 1e-3)
    True
    >>> bool(angle_errors(rope, 131071, "float32 rows") < 1.8e-7)
    True
    """
    choice("recipe", recipe, RECIPES)
    integers = as_positions(positions)
    exact_cos, exact_sin = cos_sin(integers, rope)
    cos, sin = _compute_cos_sin(recipe, rope, integers)
    return np.hypot(cos - exact_cos, sin - exact_sin).max(-1)


def _compute_cos_sin(
    recipe: Recipe, rope: Rope, positions: NDArray[Any]
) -> tuple[NDArray[np.floating[Any]], NDArray[np.floating[Any]]]:
    """Cos and sin by the recipe, ``[..., num_pairs]`` each."""
    if recipe == "float32 rows":
        return cos_sin(positions, rope, np.float32)
    dtype: Any = np.float64 if recipe == "float64 angle" else np.float32
    coordinates = positions[..., None] if rope.axes.n_axes == 1 else positions
    terms = rope.direction * np.array(real_terms(rope), np.float64)
    # [..., n_axes] -> [..., terms, num_pairs]: several terms with Mixed axes
    pair_coordinates = coordinates[..., np.atleast_2d(rope.axes.indices(rope.num_pairs))]
    angle = (pair_coordinates.astype(dtype) * terms.astype(dtype)).sum(-2)
    if recipe == "complex64":
        unit: NDArray[np.complex64] = np.exp(np.complex64(1j) * angle)
        return unit.real, unit.imag
    cos, sin = np.cos(angle), np.sin(angle)
    if recipe == "bfloat16 table":
        return _round_to_bfloat16(cos), _round_to_bfloat16(sin)
    return cos, sin


def _round_to_bfloat16(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Finite float32 rounded to bfloat16, the upper half of its bits; ties go to the even number.

    Adding just under half a unit, and one more if the upper half is odd, carries into the upper
    half exactly when the number must be rounded up.
    """
    bits = x.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded & np.uint32(0xFFFF0000)).view(np.float32)
