"""Theoretical bounds: critical dimensions, feasible bases, errors of interpolated positions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from phasor._checks import number, numbers, whole
from phasor.angles import as_positions, turns
from phasor.errors import SpecError
from phasor.extending.cosines import find_first_negative
from phasor.numpy import pair_products
from phasor.rope import Rope

_EDGE_RATIO = 1 + 1e-6  # ratio of the two bases between which the edge of a feasible interval lies


def critical_dimension(rope: Rope, context: float) -> int:
    """Rotated coordinates whose pairs make more than a full turn within a context.

    ``2 ceil((rotary_dim / 2) log_base(context / 2 pi))`` for a rope without a law (Liu et al.
    2310.05209). Counted here as twice the pairs that make more than one turn within the training
    ``context``, which also covers laws and explicit frequencies. Later pairs have seen only part of
    their circle, and meet new angles in a longer context. Half of the result is the index of the
    first such pair (LongRoPE2 2502.20082).

    >>> critical_dimension(Rope(head_dim=128, pairing="half"), 4096)
    92
    >>> critical_dimension(Rope(head_dim=128, pairing="half", base=500_000.0), 8192) // 2
    35
    """
    return 2 * int((turns(rope, context) > 1).sum())


def critical_base(base: float, context: float, tuned_context: float) -> float:
    """The base above which fine-tuning on a longer context beats the training base.

    ``base ** log(tuned_context / 2 pi, context / 2 pi)``, for contexts above ``2 pi`` tokens: with
    it, the pairs that complete a turn in the fine-tuned context are those that did in training (Liu
    et al. 2310.05209).

    >>> print(round(critical_base(10_000.0, 4096, 16_384)))
    71738
    """
    turn = 2 * math.pi
    longer = math.log(number("tuned_context", tuned_context, above=turn) / turn)
    shorter = math.log(number("context", context, above=turn) / turn)
    return number("base", base, above=1) ** (longer / shorter)


def feasible_bases(rope: Rope, context: int, bases: Iterable[float]) -> NDArray[np.float64]:
    """Intervals of bases with which a key equal to the query outscores a random key.

    That is, ``cosine(rope, r, "aligned") >= 0`` at every distance from 0 to ``context``; if at most
    half of a head is rotated, every base satisfies this. Men et al. (2405.14591) call the smallest
    such base the lower bound of the context. Feasible bases do not form one interval: at 65536
    tokens and width 128, 2.1e6 is feasible, but 2 % and 5 % above it are not. Several entries of
    their table 2 fail as printed, because two digits are too few, and others are not infima.

    Edges between neighbours in ``bases`` are found to a millionth. An interval that lies between
    two neighbours is missed: the first interval at 4096 tokens is 0.08 % wide. One base takes a few
    milliseconds up to 65536 tokens.

    Args:
        rope: The rope; its base is replaced, its law is kept.
        context: The last distance.
        bases: Ascending.

    Returns:
        float64 ``[n, 2]``: the first and last feasible base of each interval, ascending. The first
        number is the smallest feasible base. If the last interval ends at ``bases[-1]``,
        every one of ``bases`` from its start on is feasible.

    >>> rope = Rope(head_dim=128, pairing="half")
    >>> feasible_bases(rope, 1024, np.geomspace(4250, 4350, 8)).round()
    array([[4293., 4330.]])
    """
    whole("context", context, least=0)
    if rope.explicit_inv_freq is not None:
        raise SpecError("rope must have a base, got explicit inv_freq")
    candidates = numbers("bases", bases, above=1)
    if any(left >= right for left, right in itertools.pairwise(candidates)):
        raise SpecError("bases must ascend, got a base that is not above the one before it")

    unrotated_pairs = (rope.head_dim - rope.rotary_dim) / 2

    def is_feasible(base: float) -> bool:
        return find_first_negative(replace(rope, base=base), context + 1, unrotated_pairs) is None

    edges: list[float] = []
    is_feasible_here = False
    for index, base in enumerate(candidates):
        if is_feasible(base) != is_feasible_here:
            is_feasible_here = not is_feasible_here
            edges.append(_find_edge(is_feasible, candidates[index - 1], base) if index else base)
    if is_feasible_here:
        edges.append(candidates[-1])
    return np.array(edges).reshape(-1, 2)


def _find_edge(is_feasible: Callable[[float], bool], left: float, right: float) -> float:
    """The last feasible base before an infeasible one, by bisection between ``left`` and ``right``.

    Exactly one of the two is feasible.
    """
    good, bad = (left, right) if is_feasible(left) else (right, left)
    while max(good, bad) > _EDGE_RATIO * min(good, bad):
        middle = math.sqrt(good * bad)
        good, bad = (middle, bad) if is_feasible(middle) else (good, middle)
    return good


def interpolation_bound(
    q: ArrayLike, k: ArrayLike, distance: ArrayLike, rope: Rope
) -> NDArray[np.float64]:
    """An upper bound on the error of linearly interpolated scores; the published one is wrong.

    Position Interpolation (Chen et al. 2306.15595, theorem 2.1) compares the score at a distance
    ``r`` with the line through the scores at the two integer distances around it, ``|score(r) - (1
    - w) score(floor(r)) - w score(floor(r) + 1)|`` with ``w = r - floor(r)``. The difference is at
    most ``max_k |h[k]| * sum_k inv_freq[k]**2 * w (1 - w) / 2``, where ``h[k]`` is the product of a
    query's pair and the conjugate of a key's: the second derivative of the score is at most ``max_k
    |h[k]|`` times that sum. Without a law the sum is ``(1 - base**-2) / (1 - base ** (-4 /
    rotary_dim))``, and at ``w = 0.5`` the bound is ``rotary_dim max|h| / 256.108`` for width 128
    and base 10000.

    The theorem prints ``rotary_dim max|h| w (1 - w) / (8 ln(base))``, at ``w = 0.5`` a divisor of
    294.73, which does not hold. Its proof uses ``c**x <= 1 + x ln(c)``, but for a convex function
    the inequality points the other way: with ``q = k = (1, 1, ...)`` of width 128 the error at 0.5
    is 1.0575 times as large.

    Args:
        q: ``[..., head_dim]``, before rotation.
        k: ``[..., head_dim]``, before rotation.
        distance: Broadcast against the leading dimensions.
        rope: The rope, with one axis.

    Returns:
        float64, the broadcast shape.

    >>> from phasor.numpy import score
    >>> ones, rope = np.ones(128), Rope(head_dim=128, pairing="half")
    >>> bound = interpolation_bound(ones, ones, 0.5, rope)
    >>> at_0, half_way, at_1 = score(ones, ones, [0, 0.5, 1], rope)
    >>> error = half_way - (at_0 + at_1) / 2
    >>> print((256 / bound).round(3), (error / (256 / 294.73)).round(4))
    256.108 1.0575
    """
    if rope.axes.n_axes != 1:
        raise SpecError(
            f"rope must have one axis, got {type(rope.axes).__name__} axes; use a rope for each "
            f"axis"
        )
    largest = np.abs(pair_products(q, k, rope)[0]).max(-1)
    fraction = as_positions(distance).astype(np.float64) % 1
    return largest * (rope.inv_freq**2).sum() * fraction * (1 - fraction) / 2
