"""Formulas of papers about rotary embeddings, as functions from arrays to arrays.

For analysis and figures; no rotation depends on them.
"""

from phasor.papers.bounds import (
    critical_base,
    critical_dimension,
    feasible_bases,
    interpolation_bound,
)
from phasor.papers.distances import KINDS, Kind, abel_bound, cosine, decay, linear_weights
from phasor.papers.heads import (
    attention_map,
    attention_weight,
    positional_head,
    required_alpha,
    semantic_head,
)
from phasor.papers.precision import RECIPES, Recipe, angle_errors
from phasor.papers.usage import pair_norms, positional_score, sink_score, token_norms

__all__ = [
    "KINDS",
    "RECIPES",
    "Kind",
    "Recipe",
    "abel_bound",
    "angle_errors",
    "attention_map",
    "attention_weight",
    "cosine",
    "critical_base",
    "critical_dimension",
    "decay",
    "feasible_bases",
    "interpolation_bound",
    "linear_weights",
    "pair_norms",
    "positional_head",
    "positional_score",
    "required_alpha",
    "semantic_head",
    "sink_score",
    "token_norms",
]
