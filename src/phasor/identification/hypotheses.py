"""Rotations, other than the expected one, that may have turned tokens."""

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


class ExpectedRope(NamedTuple):
    """The expected rope of one kind of layers."""

    rope: Rope
    unresolved: Rope | None = None  # the rope before its rule chose a law
    other_kinds: Sequence[tuple[str, Rope]] = ()  # the other kinds of layers with their ropes
    length: int | None = None  # the length for which the rule chose the law


class Hypothesis(NamedTuple):
    """A rotation of some tokens, and how it differs from the expected one."""

    changes: Changes
    rope: Rope
    places: Positions  # the positions that turn the tokens
    rows: Complex  # exp(i angle) for every token, [T, num_pairs]


def suppose(rope: Rope, places: Positions, *changes: Finding) -> Hypothesis:
    """The hypothesis that the rope turns tokens as if they were at these positions."""
    if rope.axes.n_axes == 1 and places.ndim > 1:
        places = places[:, 0]
    return Hypothesis(changes, rope, places, rows_of(rope, places))


def is_idle(hypothesis: Hypothesis, expected: Rope, places: Positions) -> bool:
    """Whether the hypothesis names changes but turns these tokens as the expected rope does."""
    if not hypothesis.changes or hypothesis.rope.attention_factor != expected.attention_factor:
        return False
    return turn_alike(hypothesis.rows, rows_of(expected, places))


def turn_alike(rows: Complex, other_rows: Complex) -> bool:
    """Whether two sets of rows of cos and sin are equal up to float64 rounding."""
    return np.allclose(rows, other_rows, 0, 1e-9)


# how a rope differs from the expected one, and the rope
Change = tuple[Changes, Rope]


def is_vague(changes: Changes) -> bool:
    """Whether the changes state a difference but not its cause."""
    return any(change.name in ("frequencies", "angles", "tokens") for change in changes)
