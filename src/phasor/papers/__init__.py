"""What a Rope does, measured: arrays out, for figures and reports."""

from phasor.papers.bounds import (
    PhaseBounds,
    critical_base,
    critical_bases,
    critical_dimension,
    extrapolation_limit,
    feasible_bases,
    negative_distances,
    phase_bounds,
)
from phasor.papers.coverage import Coverage, coverage
from phasor.papers.decay import (
    KINDS,
    ExpectedScores,
    Kind,
    abel_bound,
    cosine,
    decay,
    expected_scores,
    moved,
)
from phasor.papers.extension import Extension, Recommendation, extensions, recommend
from phasor.papers.interpolation import (
    extrapolation_ratio,
    interpolation_bound,
    interpolation_error,
    printed_interpolation_bound,
)
from phasor.papers.linear import expected_linear_sum, linear_weights
from phasor.papers.precision import RECIPES, Recipe, angle_errors
from phasor.papers.smooth import smooth_kernel
from phasor.papers.usage import pair_norms, positional_score, semantic_score

__all__ = [
    "KINDS",
    "RECIPES",
    "Coverage",
    "ExpectedScores",
    "Extension",
    "Kind",
    "PhaseBounds",
    "Recipe",
    "Recommendation",
    "abel_bound",
    "angle_errors",
    "cosine",
    "coverage",
    "critical_base",
    "critical_bases",
    "critical_dimension",
    "decay",
    "expected_linear_sum",
    "expected_scores",
    "extensions",
    "extrapolation_limit",
    "extrapolation_ratio",
    "feasible_bases",
    "interpolation_bound",
    "interpolation_error",
    "linear_weights",
    "moved",
    "negative_distances",
    "pair_norms",
    "phase_bounds",
    "positional_score",
    "printed_interpolation_bound",
    "recommend",
    "semantic_score",
    "smooth_kernel",
]
