"""Phases that occur in training, and those that occur only in a longer context.

Between tokens at distance ``r`` a pair turns by ``r * inv_freq``. Scores depend on that angle
modulo a turn, the phase. In a context of ``L`` tokens a pair that completes a turn shows every
phase; any other pair shows phases from 0 to ``L * inv_freq``. All others are out of distribution.

Counts are exact. The number of distances below ``n`` with a phase of ``a`` turns or more is

    sum over r < n of floor(r t + 1 - a) - floor(r t)

with ``t`` turns per position. Such a sum takes as many steps as Euclid's algorithm, so ten million
positions cost about as much as ten, and no rounded angle decides a boundary.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from decimal import Decimal

import numpy as np
from numpy.typing import NDArray

from phasor._checks import whole
from phasor._reals import in_reals
from phasor.angles import real_turns, turns
from phasor.errors import SpecError
from phasor.rope import Rope

_LONGEST = 1 << 48  # positions
_UNIT = 10**40  # a turn in fixed point
# rounding down loses less than one unit per position, so less than 2**48 units in a phase; a phase
# this close to a boundary counts as on it
_SLACK = 10**15


@dataclass(frozen=True, kw_only=True, eq=False)
class Coverage:
    """For each pair, which phases of a longer context did not occur in training."""

    context: int  # tokens in training
    to: int  # tokens in the longer context
    # float64 [num_pairs] each
    trained_turns: NDArray[np.float64]  # over the trained context
    extended_turns: NDArray[np.float64]  # over the longer one, extended
    first_new: NDArray[np.float64]  # the first distance below ``to`` with a new phase, or infinity
    new_share: NDArray[np.float64]  # share of the distances below ``to`` that have a new phase

    @property
    def never_turned(self) -> NDArray[np.bool_]:
        """Bool ``[num_pairs]``: pairs that completed no turn in training."""
        return self.trained_turns < 1

    @property
    def has_new_phases(self) -> NDArray[np.bool_]:
        """Bool ``[num_pairs]``: pairs with a new phase."""
        return self.new_share > 0

    def __repr__(self) -> str:
        count = f"{self.has_new_phases.sum()} of {len(self.has_new_phases)}"
        return f"Coverage({self.context} to {self.to} tokens: {count} pairs show new phases)"


@in_reals
def coverage(rope: Rope, context: int, extended: Rope, to: int) -> Coverage:
    """The phases that ``extended`` shows over ``to`` positions, but ``rope`` not over ``context``.

    With ``f`` and ``g`` the frequencies of a pair before and after, the phase at distance ``r`` is
    new if ``context * f < 2 pi`` and ``r * g mod 2 pi >= context * f``. Distances are 0 to ``to -
    1``, from a query back to a key. The angle ``context * f`` itself counts as new, so an unchanged
    rope shows its first new phase at distance ``context``, and position interpolation by ``to /
    context`` (Chen et al. 2306.15595) shows none. Pairs that never complete a turn are those beyond
    the critical dimension of Liu et al. (2310.05209, section 3).

    Args:
        rope: The Rope used in training.
        context: Tokens in training.
        extended: The Rope for the longer context; ``rope`` itself for no change.
        to: Tokens in the longer context. With several axes, distances run along every axis.

    >>> import dataclasses
    >>> from phasor.scaling import Linear
    >>> llama2 = Rope(head_dim=128, pairing="half", base=10_000.0)
    >>> unchanged = coverage(llama2, 4096, llama2, 16384)
    >>> print(unchanged.has_new_phases.sum(), unchanged.first_new[63], unchanged.new_share[63])
    18 4096.0 0.75
    >>> stretched = dataclasses.replace(llama2, scaling=Linear(factor=4.0))
    >>> print(coverage(llama2, 4096, stretched, 16384).has_new_phases.sum())
    0
    """
    whole("context", context, least=1, most=_LONGEST)
    whole("to", to, least=1, most=_LONGEST)
    if extended.num_pairs != rope.num_pairs:
        raise SpecError(
            f"extended must have as many pairs as rope ({rope.num_pairs}), "
            f"got {extended.num_pairs}; extend a Rope by its scaling"
        )
    before, after = real_turns(rope), real_turns(extended)
    arcs = [_Arc(context * t, u) for t, u in zip(before, after, strict=True)]
    return Coverage(
        context=context,
        to=to,
        trained_turns=turns(rope, context),
        extended_turns=turns(extended, to),
        first_new=np.array([arc.first_new(to) for arc in arcs]),
        new_share=np.array([arc.count_new_below(to) / to for arc in arcs]),
    )


class _Arc:
    """The phases of one pair in training, and its angle per position in the longer context."""

    def __init__(self, trained_turns: Decimal, turns_per_position: Decimal) -> None:
        # a pair of frequency 0 has the phase 0; a pair that completes a turn has every phase
        self._trained_phase = min(max(int(trained_turns * _UNIT), 2 * _SLACK), _UNIT)
        self._step = int(turns_per_position * _UNIT)

    def count_new_below(self, count: int) -> int:
        """How many distances below ``count`` have a phase that training did not have."""
        reached = _floor_sum(count, _UNIT, self._step, _UNIT + _SLACK - self._trained_phase)
        return reached - _floor_sum(count, _UNIT, self._step, _SLACK)

    def first_new(self, count: int) -> float:
        """The first such distance below ``count``; infinite if there is none."""
        if self.count_new_below(count) == 0:
            return np.inf
        return float(bisect_left(range(1, count), 1, key=self.count_new_below))


def _floor_sum(count: int, unit: int, step: int, start: int) -> int:
    """``sum over r < count of (step * r + start) // unit``, for non-negative numbers."""
    total = 0
    while True:
        # the whole parts of ``step`` and ``start`` have a closed form; the remainder counts grid
        # points
        # below a line, and swapping the axes gives a smaller sum, as in Euclid's algorithm
        total += count * (count - 1) // 2 * (step // unit) + count * (start // unit)
        step, start = step % unit, start % unit
        top = step * count + start
        if top < unit:
            return total
        # points (r, y) with y >= 1 under the line, counted along y
        count, start = top // unit, top % unit
        unit, step = step, unit
