"""Theoretical bounds: critical dimensions, feasible bases, errors of interpolated positions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from phasor._checks import number, numbers, whole
from phasor.angles import checked_positions
from phasor.errors import SpecError
from phasor.frequencies import turns, wavelengths
from phasor.numpy import score
from phasor.papers.distances import decay, kernel, one_axis, pair_products
from phasor.rope import Rope

_PART = 1 << 16  # distances computed at a time
_EDGE = 1 + 1e-6  # ratio within which the edge of a feasible interval is found


def critical_dimension(rope: Rope, context: float) -> int:
    """Rotated coordinates whose pairs make more than a full turn within a context.

    ``2 ceil((rotary_dim / 2) log_base(context / 2 pi))`` for a rope without a law (Liu et al.
    2310.05209), counted here as twice the pairs that make more than one turn, so that
    laws and explicit frequencies have one too. Pairs beyond have seen only a part of their
    circle in training, and meet new angles in a longer context. Half of it is the index of the
    first such pair (LongRoPE2 2502.20082).

    Args:
        rope: What rotates.
        context: Length of the training context.

    Returns:
        An even number from 0 to ``rotary_dim``.

    Raises:
        SpecError: If ``context`` is not a positive number, or ``rope.scaling`` is a rule that has
            not picked its law.

    >>> critical_dimension(Rope(head_dim=128, pairing="half"), 4096)
    92
    >>> critical_dimension(Rope(head_dim=128, pairing="half", base=500_000.0), 8192) // 2
    35
    """
    return 2 * int((turns(rope, context) > 1).sum())


def extrapolation_limit(rope: Rope, context: float, tuned: Rope) -> float:
    """How long a context ``tuned`` bears after training with ``rope``.

    The wavelength, in ``tuned``, of the first pair that did not come round in training:
    ``2 pi tuned.base ** (critical / rotary_dim)`` with the `critical_dimension` of ``rope``
    (Liu et al. 2310.05209). Up to there no pair that training left without a whole
    turn makes one.

    Args:
        rope: What the model was trained with.
        context: Length of the training context.
        tuned: What it is tuned or run with; as many pairs.

    Returns:
        A length in tokens; infinite if training showed every pair its whole circle.

    Raises:
        SpecError: If the ropes differ in pairs, or as `critical_dimension`.

    >>> trained = Rope(head_dim=128, pairing="half")
    >>> tuned = Rope(head_dim=128, pairing="half", base=1_000_000.0)
    >>> print(round(extrapolation_limit(trained, 4096, tuned)))
    129027
    """
    if tuned.num_pairs != rope.num_pairs:
        raise SpecError(
            f"tuned must have as many pairs as rope ({rope.num_pairs}), got {tuned.num_pairs}"
        )
    first_new = critical_dimension(rope, context) // 2
    return math.inf if first_new == rope.num_pairs else float(wavelengths(tuned)[first_new])


def critical_bases(context: float) -> tuple[float, float, float]:
    """Bases below which every pair makes a quarter, half and whole turn within a context.

    ``2 context / pi``, ``context / pi`` and ``context / (2 pi)`` (Liu et al. 2310.05209). These
    take the slowest pair to turn by ``1 / base``; it turns by ``base ** (2 / rotary_dim - 1)``,
    so the power ``rotary_dim / (rotary_dim - 2)`` of each is the exact one.

    Raises:
        SpecError: If ``context`` is not a positive number.

    >>> [round(base) for base in critical_bases(4096)]
    [2608, 1304, 652]
    """
    whole_turn = number("context", context, above=0) / (2 * math.pi)
    return 4 * whole_turn, 2 * whole_turn, whole_turn


def critical_base(base: float, context: float, tuned_context: float) -> float:
    """Base from which tuning on a longer context does better than the base of training.

    ``base ** log(tuned_context / 2 pi, context / 2 pi)``: with it, the pairs that come round in
    the tuned context are those that came round in training (Liu et al. 2310.05209).

    Args:
        base: Base of training.
        context: Length of the training context, above ``2 pi``.
        tuned_context: Length of the context in tuning, above ``2 pi``.

    Raises:
        SpecError: If a number is not in its range.

    >>> print(round(critical_base(10_000.0, 4096, 16_384)))
    71738
    """
    turn = 2 * math.pi
    longer = math.log(number("tuned_context", tuned_context, above=turn) / turn)
    shorter = math.log(number("context", context, above=turn) / turn)
    return number("base", base, above=1) ** (longer / shorter)


def negative_distances(rope: Rope, context: int) -> NDArray[np.int64]:
    """Distances at which a key like the query is expected to score less than any other key.

    All ``r`` from 0 to ``context`` with ``trace R(r) < 0``. Where the whole head turns half the
    trace is ``C(r) = sum_k cos(r * inv_freq[k])``, and the expected advantage of a similar key is
    ``2 sigma**2 C(r)`` (Men et al. 2405.14591, theorem 1). The header of their table 4 prints
    "≥ 0" over what are counts of ``C(r) < 0``. A head of which at most half is rotated has no
    such distance: coordinates that stay count ``1`` each.

    Args:
        rope: What rotates; with several axes, the distance is along every one, as in text.
        context: The last distance.

    Returns:
        int64, ascending; empty if there is none.

    Raises:
        SpecError: If ``context`` is not a whole number >= 0, or ``rope.scaling`` is a rule that
            has not picked its law.

    >>> negative_distances(Rope(head_dim=128, pairing="half"), 4096)[:3]
    array([1707, 1969, 1970])
    """
    whole("context", context, least=0)
    return np.concatenate(list(_negative_parts(rope, context)))


def feasible_bases(
    rope: Rope,
    context: int,
    bases: Iterable[float],
    progress: Callable[[int, int], object] | None = None,
) -> NDArray[np.float64]:
    """Intervals of bases whose ropes have no `negative_distances` up to a context.

    Men et al. (2405.14591) call the least such base the lower bound of the context.
    The feasible bases are no interval: at 65536 tokens and width 128, 2.1e6 is feasible, and 2 %
    and 5 % above it are not. Their table 2 is not made of infima either (1.6e4 at 2048 tokens,
    where 11590 is feasible, and 3.1e5 at 16384, where 2.341e5 is), and several of its entries fail
    as printed: two digits are too few. What every larger base in ``bases`` satisfies too is the
    start of the last interval: twice the first at 2048 tokens, nearly five times at 8192.

    Edges between neighbours in ``bases`` are found to a millionth; what begins and ends
    between two neighbours goes unseen: the first interval at 4096 tokens is 0.08 % wide. One base
    takes a few milliseconds up to 65536 tokens.

    Args:
        rope: What rotates, but for its base; a law stays.
        context: The last distance.
        bases: Ascending.
        progress: Called after each base with how many are done, and of how many.

    Returns:
        float64 ``[n, 2]``: the first and the last feasible base of each interval, ascending. The
        first number is the least feasible base; ``[-1, 0]`` is the safe one if the last number
        is the last of ``bases``.

    Raises:
        SpecError: If the bases do not ascend, the rope has explicit frequencies, or as
            `negative_distances`.

    >>> rope = Rope(head_dim=128, pairing="half")
    >>> feasible_bases(rope, 1024, np.geomspace(4250, 4350, 8)).round()
    array([[4293., 4330.]])
    """
    whole("context", context, least=0)
    if rope.explicit_inv_freq is not None:
        raise SpecError("rope must have a base to be swept, got explicit inv_freq")
    tried = numbers("bases", bases, above=1)
    if any(left >= right for left, right in itertools.pairwise(tried)):
        raise SpecError("bases must ascend, got a base that is not above the one before it")

    def feasible(base: float) -> bool:
        return not any(map(len, _negative_parts(replace(rope, base=base), context)))

    edges: list[float] = []
    inside = False
    for index, base in enumerate(tried):
        if feasible(base) != inside:
            inside = not inside
            edges.append(base if index == 0 else _edge(feasible, tried[index - 1], base))
        if progress is not None:
            progress(index + 1, len(tried))
    if inside:
        edges.append(tried[-1])
    return np.array(edges).reshape(-1, 2)


def _negative_parts(rope: Rope, context: int) -> Iterable[NDArray[np.int64]]:
    """The distances with a negative trace, computed in parts."""
    still = (rope.head_dim - rope.rotary_dim) / 2
    for start in range(0, context + 1, _PART):
        count = min(_PART, context + 1 - start)
        yield start + np.flatnonzero(kernel(rope, count, start=start).real + still < 0)


def _edge(feasible: Callable[[float], bool], left: float, right: float) -> float:
    """The feasible side of the edge between a feasible and an infeasible base."""
    good, bad = (left, right) if feasible(left) else (right, left)
    while max(good, bad) > _EDGE * min(good, bad):
        middle = math.sqrt(good * bad)
        good, bad = (middle, bad) if feasible(middle) else (good, middle)
    return good


def interpolation_error(
    q: ArrayLike, k: ArrayLike, distance: ArrayLike, rope: Rope
) -> NDArray[np.float64]:
    """How far the score at a distance is from the line through the whole distances around it.

    ``|score(r) - (1 - w) score(floor(r)) - w score(floor(r) + 1)|`` with ``w = r - floor(r)``:
    the quantity of Position Interpolation's theorem (Chen et al. 2306.15595, theorem 2.1).

    Args:
        q: ``[..., head_dim]``, before rotation.
        k: ``[..., head_dim]``, before rotation.
        distance: Broadcast against the leading dimensions.
        rope: What rotates, along one axis.

    Returns:
        float64, the broadcast shape.

    Raises:
        TensorError: If ``q`` or ``k`` does not end in ``head_dim`` or is not real.
        PositionError: If the distances are not numbers.
        SpecError: If the rope has several axes, or a rule that has not picked its law.

    >>> ones = np.ones(128)
    >>> print(interpolation_error(ones, ones, 0.5, Rope(head_dim=128, pairing="half")).round(4))
    0.9186
    """
    one_axis(rope)
    low, rest = _between(distance)
    line = (1 - rest) * score(q, k, low, rope) + rest * score(q, k, low + 1, rope)
    return np.abs(score(q, k, low + rest, rope) - line)


def interpolation_bound(
    q: ArrayLike, k: ArrayLike, distance: ArrayLike, rope: Rope
) -> NDArray[np.float64]:
    """An upper bound on `interpolation_error`, correct where the published one is not.

    ``max_k |h[k]| * sum_k inv_freq[k]**2 * w (1 - w) / 2`` with ``h[k]`` the product of a query's
    pair and the conjugate of a key's and ``w = r - floor(r)``: the second derivative of the score
    is at most that sum. Without a law the sum is
    ``(1 - base**-2) / (1 - base ** (-4 / rotary_dim))``, and the bound half way is
    ``rotary_dim max|h| / 256.108`` at width 128 and base 10000.

    Shapes and errors are those of `interpolation_error`.

    >>> ones = np.ones(128)
    >>> bound = interpolation_bound(ones, ones, 0.5, Rope(head_dim=128, pairing="half"))
    >>> print((256 / bound).round(3))
    256.108
    """
    one_axis(rope)
    _, rest = _between(distance)
    return _largest(q, k, rope) * (rope.inv_freq**2).sum() * rest * (1 - rest) / 2


def printed_interpolation_bound(
    q: ArrayLike, k: ArrayLike, distance: ArrayLike, rope: Rope
) -> NDArray[np.float64]:
    """The bound as Position Interpolation prints it; it does not hold. Use `interpolation_bound`.

    ``rotary_dim max_k |h[k]| w (1 - w) / (8 ln(base))`` (Chen et al. 2306.15595, theorem 2.1),
    half way ``rotary_dim max|h| / 294.73`` at base 10000. The proof takes
    ``c**x <= 1 + x ln(c)``, which is the wrong way round for a convex function: with
    ``q = k = (1, 1, ...)`` of width 128 the error at 0.5 is 1.0575 times the bound.

    Shapes and errors are those of `interpolation_error`; and a SpecError for a rope with a law or
    explicit frequencies, of which the theorem does not speak.

    >>> ones, rope = np.ones(128), Rope(head_dim=128, pairing="half")
    >>> printed = printed_interpolation_bound(ones, ones, 0.5, rope)
    >>> error = interpolation_error(ones, ones, 0.5, rope)
    >>> print((256 / printed).round(2), (error / printed).round(4))
    294.73 1.0575
    """
    one_axis(rope)
    if rope.base is None or rope.scaling is not None:
        raise SpecError(
            "rope must have plain frequencies, of which the theorem speaks, "
            f"got {'explicit inv_freq' if rope.base is None else rope.scaling}; "
            "interpolation_bound takes any"
        )
    _, rest = _between(distance)
    steepness = rope.rotary_dim / (8 * math.log(rope.base))
    return _largest(q, k, rope) * steepness * rest * (1 - rest)


def extrapolation_ratio(rope: Rope, distances: ArrayLike) -> NDArray[np.float64]:
    """How many times the bound at a distance exceeds the `interpolation_bound` half way.

    ``2 B(r) / (sum_k inv_freq[k]**2 / 8)`` with ``B(r) = sum_j |S_j(r)|``, which is ``n`` times
    `decay` (Chen et al. 2306.15595). "At least 600 times" stands there for
    ``2 * 294.73``, with the printed bound and ``B(r) >= rotary_dim``. With the correct bound it
    is ``512 B(r) / rotary_dim`` at width 128 and base 10000, and ``B(r) >= rotary_dim`` ends at
    4861: 571 times up to 4096, 309 times up to 65536. It compares bounds, not errors.

    Args:
        rope: What rotates, along one axis.
        distances: Integers or floats ``[...]``.

    Returns:
        float64 ``[...]``.

    Raises:
        PositionError: If the distances are not numbers.
        SpecError: If the rope has several axes, a rule that has not picked its law, or only pairs
            that stand still.

    >>> rope = Rope(head_dim=128, pairing="half")
    >>> print(extrapolation_ratio(rope, np.arange(4097)).min().round(1))
    571.6
    """
    one_axis(rope)
    steepness = (rope.inv_freq**2).sum()
    if steepness == 0:
        raise SpecError("rope must have a pair that turns, got inv_freq of zeros")
    return 16 * rope.num_pairs * decay(rope, distances) / steepness


def _between(distance: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The distance rounded down, and the fraction."""
    checked = checked_positions(distance).astype(np.float64)
    low = np.floor(checked)
    return low, checked - low


def _largest(q: ArrayLike, k: ArrayLike, rope: Rope) -> NDArray[np.float64]:
    return np.abs(pair_products(q, k, rope)[0]).max(-1)
