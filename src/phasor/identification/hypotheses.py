"""Rotations that tokens may have had instead of the one that was meant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from phasor.identification.report import Changes, Finding
from phasor.identification.spectrum import Complex
from phasor.identification.turns import rows_of
from phasor.rope import Rope

Positions = NDArray[Any]  # [T] or [T, n_axes]


class Meant(NamedTuple):
    """The rope of a kind of layers."""

    rope: Rope
    unresolved: Rope | None = None  # before a rule chose its law
    other_kinds: Sequence[tuple[str, Rope]] = ()  # of layers, with their ropes
    length: int | None = None  # at which the rule chose


class Hypothesis(NamedTuple):
    """A rotation of some tokens, and how it differs from the one that was meant."""

    changes: Changes
    rope: Rope
    places: Positions  # where the tokens are turned as if they stood
    rows: Complex  # exp(i angle) of every token, [T, num_pairs]


def suppose(rope: Rope, places: Positions, *changes: Finding) -> Hypothesis:
    """The hypothesis that the rope turns tokens as if they were at these positions."""
    if rope.axes.n_axes == 1 and places.ndim > 1:
        places = places[:, 0]
    return Hypothesis(changes, rope, places, rows_of(rope, places))


def is_idle(hypothesis: Hypothesis, meant: Rope, places: Positions) -> bool:
    """Whether it names changes, but turns these tokens like the rope that was meant."""
    if not hypothesis.changes or hypothesis.rope.attention_factor != meant.attention_factor:
        return False
    return turn_alike(hypothesis.rows, rows_of(meant, places))


def turn_alike(rows: Complex, others: Complex) -> bool:
    """Whether both rows of cos and sin are equal up to roundings of float64."""
    return np.allclose(rows, others, 0, 1e-9)


# the changes that a rope has, and the rope
Change = tuple[Changes, Rope]


def is_vague(changes: Changes) -> bool:
    """Whether the changes say that something differs, but not why."""
    return any(change.name in ("frequencies", "angles", "tokens") for change in changes)
