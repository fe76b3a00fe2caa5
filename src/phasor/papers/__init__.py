"""Formulas of papers about rotary embeddings, as functions from arrays to arrays.

For analysis and figures; nothing that rotates depends on it.
"""

from phasor.papers.bounds import (
    critical_base,
    critical_bases,
    critical_dimension,
    extrapolation_limit,
    extrapolation_ratio,
    feasible_bases,
    interpolation_bound,
    interpolation_error,
    negative_distances,
    printed_interpolation_bound,
)
from phasor.papers.distances import (
    KINDS,
    Kind,
    abel_bound,
    cosine,
    decay,
    expected_scores,
    smooth_kernel,
    turning_pairs,
)
from phasor.papers.heads import (
    attention_weight,
    positional_head,
    required_alpha,
    strongest_rival,
)
from phasor.papers.linear import expected_linear_sum, linear_weights
from phasor.papers.phases import Coverage, coverage
from phasor.papers.precision import RECIPES, Recipe, angle_errors
from phasor.papers.usage import pair_norms, positional_score

__all__ = [
    "KINDS",
    "RECIPES",
    "Coverage",
    "Kind",
    "Recipe",
    "abel_bound",
    "angle_errors",
    "attention_weight",
    "cosine",
    "coverage",
    "critical_base",
    "critical_bases",
    "critical_dimension",
    "decay",
    "expected_linear_sum",
    "expected_scores",
    "extrapolation_limit",
    "extrapolation_ratio",
    "feasible_bases",
    "interpolation_bound",
    "interpolation_error",
    "linear_weights",
    "negative_distances",
    "pair_norms",
    "positional_head",
    "positional_score",
    "printed_interpolation_bound",
    "required_alpha",
    "smooth_kernel",
    "strongest_rival",
    "turning_pairs",
]
