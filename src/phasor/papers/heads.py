"""Attention heads that look at a position, whatever the tokens say; and what they guarantee.

Let every token carry a 1 in one coordinate of its input, as a projection with a bias has it (that
of `phasor.torch.papers.PositionalHead`). With ``W_k x = e``, where ``e`` has a 1
in the first coordinate of every pair, and ``W_q = alpha R(-offset) W_k``, the score of the query
at ``m`` and the key at ``n`` is

    (R(m) W_q x)^T (R(n) W_k x) = alpha C(n - m + offset),    C(r) = sum_k cos(r inv_freq[k])

which is largest at ``n = m - offset``. So ``offset`` counts tokens back: 1 is the previous token,
0 the token itself, and a negative offset looks ahead.

Under a causal mask the query sees positions 0 to m, itself included. The rivals of the previous
token are therefore the tokens before it and the query's own token, which is as near as the token
two back and scores the same, ``alpha C(1)``.

The construction is Wendler's ("Notes on rotary positional embeddings", 2025), the theorems are
Barbero et al.'s ("Round and Round We Go", 2410.06205): proposition 3.1 for any offset, theorem 5.3
for the weight that grows with the norm. That weight is for a bounded context: ``C`` comes as near
to ``C(0)`` as one likes, and over every context no ``alpha`` is enough (theorem 6.1).

Scores here are those of the rotation alone. A model that multiplies them by
``rope.logit_factor`` gets what ``alpha * rope.logit_factor`` gets here.
"""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from phasor._checks import number, short_repr, whole
from phasor.errors import SpecError
from phasor.frequencies import real_turns
from phasor.numpy import rotate
from phasor.pairings import slices
from phasor.papers.distances import cosine_sums, phasors
from phasor.rope import Rope

_WIDEST = 1 << 20
_CHUNK = 4096  # distances worked on at once where every pair is looked at
_SMALL = 1e-3  # of C(0): a gap below has lost digits that sharp heads need
_SAME = Fraction(1, 10**45)  # frequencies are real numbers to 60 digits


class HeadWeights(NamedTuple):
    """The two projections of a head, ``[head_dim, width]`` each: ``q = query @ x``."""

    query: NDArray[np.float64]
    key: NDArray[np.float64]


def positional_head(
    rope: Rope, offset: int, *, alpha: float, width: int, constant: int = 0
) -> HeadWeights:
    """``W_q = alpha R(-offset) W_k`` and ``W_k x = e``: a head that looks ``offset`` tokens back.

    Coordinates that do not turn get no weight: they score every token the same.

    Args:
        rope: What rotates queries and keys. Where it has several axes, an offset is along every
            one, as in text.
        offset: Tokens back from the query: 1 the previous token, 0 itself, -1 the next.
        alpha: Sharpness, 0 or more: `required_alpha` finds it.
        width: Width of the input.
        constant: The input coordinate that is 1 in every token.

    Returns:
        `HeadWeights`, float64.

    Raises:
        SpecError: For an argument that is not what it must be, or a rule that has not picked its
            law.

    >>> rope = Rope(head_dim=4, pairing="interleaved")
    >>> head = positional_head(rope, 1, alpha=2.0, width=3)
    >>> head.key[:, 0], head.query[:2, 0].round(4)  # the query is 2 cos(-1), 2 sin(-1)
    (array([1., 0., 1., 0.]), array([ 1.0806, -1.6829]))
    """
    _check_rope(rope)
    back = whole("offset", offset, least=-(2**63) + 1, most=2**63 - 1)
    sharpness = number("alpha", alpha, least=0)
    columns = whole("width", width, least=1, most=_WIDEST)
    column = whole("constant", constant, least=0, most=columns - 1)
    # what a layer projects is in the pairing that it rotates from, also where it writes another
    plain = dataclasses.replace(rope, pairing_out=None)
    first, _ = slices(rope.pairing, rope.num_pairs, rope.rotary_start)
    head = HeadWeights(np.zeros((rope.head_dim, columns)), np.zeros((rope.head_dim, columns)))
    head.key[first, column] = 1.0
    n_axes = rope.axes.n_axes
    turned = rotate(head.key[:, column], -back if n_axes == 1 else [-back] * n_axes, plain)
    head.query[:, column] = sharpness * turned
    return head


def attention_weight(rope: Rope, alpha: float, context: int, *, offset: int = 1) -> float:
    """The attention that the last query of a causal context pays to the token ``offset`` back.

    ``1 / sum_n exp(-alpha * (C(0) - C(n - m + offset)) / sqrt(head_dim))`` over all
    ``context`` tokens: logits are divided by ``sqrt(rope.head_dim)``, and any other factor on them
    multiplies ``alpha``. Queries before the last see fewer rivals and pay more, so this is the
    least over the context of every query that has a token so far back.

    Args:
        rope: What rotates queries and keys.
        alpha: As given to `positional_head`.
        context: Tokens seen by the last query, itself included; at least 2.
        offset: Tokens back from the query, 0 to ``context - 1``.

    Raises:
        SpecError: For an argument that is not what it must be, or a rule that has not picked its
            law.

    >>> rope = Rope(head_dim=64, pairing="half")
    >>> round(attention_weight(rope, 10.0, 8193), 6)
    0.65499
    """
    sharpness = number("alpha", alpha, least=0)
    return _weight(sharpness, _logit_gaps(rope, context, offset))


def attention_map(rope: Rope, offset: int, *, alpha: float, tokens: int) -> NDArray[np.float64]:
    """Causal attention ``[query, key]`` of the head that `positional_head` makes.

    Softmax of ``alpha C(n - m + offset) / sqrt(head_dim)`` over the keys ``n <= m``; not a number
    where the key is later than the query. With several axes, tokens stand at the same place on all.

    Args:
        rope: What rotates queries and keys.
        offset: Tokens back from the query that are looked at.
        alpha: As given to `positional_head`.
        tokens: Length of the sequence.

    Raises:
        SpecError: For an argument that is not what it must be, or a rule that has not picked its
            law.

    >>> rope = Rope(head_dim=64, pairing="half")
    >>> weights = attention_map(rope, 1, alpha=10.0, tokens=17)
    >>> print(weights.shape, weights[16, 15].round(6))
    (17, 17) 0.654992
    """
    _check_rope(rope)
    size = whole("tokens", tokens, least=1)
    back = whole("offset", offset, least=0, most=size - 1)
    scale = number("alpha", alpha, least=0) / math.sqrt(rope.head_dim)
    # C(n - m + offset) for n - m from 1 - size to 0, so that of n - m is at n - m - 1 from the end
    scores = scale * cosine_sums(rope, size, start=back - size + 1)
    query, key = np.indices((size, size))
    logits = np.where(key > query, -np.inf, scores[np.minimum(key - query, 0) - 1])
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return np.where(key > query, np.nan, weights / weights.sum(-1, keepdims=True))


def required_alpha(rope: Rope, context: int, weight: float, *, offset: int = 1) -> float:
    """The least ``alpha`` with which `attention_weight` is ``weight`` or more over ``context``.

    Found by Newton's method on the logarithm of all rivals' weight, which is convex in ``alpha``;
    where the two neighbours are the only rivals that matter it is
    ``sqrt(head_dim) * log(2 * weight / (1 - weight)) / (C(0) - C(1))``. What is returned passes:
    `attention_weight` with it is at least ``weight``, rounding included.

    Args:
        rope: What rotates queries and keys.
        context: Tokens seen by the last query, itself included; at least 2.
        weight: The wanted attention, between 0 and 1.
        offset: Tokens back from the query, 0 to ``context - 1``.

    Raises:
        SpecError: For an argument that is not what it must be, a rule that has not picked its
            law, or where no ``alpha`` can do it: no pair turns, or all are back where they were
            at a distance within the context.

    >>> rope = Rope(head_dim=128, pairing="half", base=500_000.0)
    >>> round(required_alpha(rope, 8192, 0.99), 3)
    42.318
    """
    wanted = number("weight", weight, above=0, most=1)
    if wanted == 1:
        raise SpecError("weight must be below 1, which a softmax never reaches, got 1; try 0.999")
    gaps = _logit_gaps(rope, context, offset)
    others, ties = (1 - wanted) / wanted, int((gaps == 0).sum())
    if wanted <= _weight(0.0, gaps):
        return 0.0
    if others <= ties or wanted > 1 / (1 + ties):
        raise SpecError(_why_not(rope, wanted, ties, len(gaps)))
    alpha = _root(others, gaps)
    margin = 2.0**-52 * (alpha + 1 / float(gaps.max()))
    while _weight(alpha, gaps) < wanted:  # the root is off by a few roundings
        alpha, margin = alpha + margin, 2 * margin
    return alpha


def _root(others: float, gaps: NDArray[np.float64]) -> float:
    """Where ``sum(exp(-alpha * gaps))`` comes down to ``others``, from below."""
    alpha = 0.0
    while True:
        terms = np.exp(-alpha * gaps)
        total = float(terms.sum())
        # a convex function lies above its tangent, so no step goes too far
        step = total * math.log(total / others) / float(terms @ gaps)
        if step <= 2.0**-50 * alpha:
            return alpha
        alpha += step


def _weight(alpha: float, gaps: NDArray[np.float64]) -> float:
    return 1 / (1 + float(np.exp(-alpha * gaps).sum()))


def _logit_gaps(rope: Rope, context: int, offset: int) -> NDArray[np.float64]:
    """How far behind every rival's logit is, for an alpha of 1."""
    tokens = whole("context", context, least=2)
    # rivals after the wanted token, and before it
    later = whole("offset", offset, least=0, most=tokens - 1)
    earlier = tokens - 1 - later
    gaps = _gaps(rope, max(later, earlier))
    return np.concatenate((gaps[:later], gaps[:earlier])) / math.sqrt(rope.head_dim)


def _gaps(rope: Rope, most: int) -> NDArray[np.float64]:
    """``C(0) - C(r)`` for ``r`` from 1 to ``most``, with a small relative error."""
    _check_rope(rope)
    gaps = rope.num_pairs - cosine_sums(rope, most, start=1)
    small = np.flatnonzero(gaps < min(_SMALL * rope.num_pairs, 0.5))
    for begin in range(0, len(small), _CHUNK):
        some = small[begin : begin + _CHUNK]
        turned = phasors(rope, some + 1)
        # 1 - cos keeps the digits of a small angle so; the sum is small, and every angle with it
        gaps[some] = (turned.imag**2 / (1 + turned.real)).sum(-1)
    period = _period(rope, most)
    if period is not None:
        gaps[period - 1 :: period] = 0.0
    return gaps


def _period(rope: Rope, most: int) -> int | None:
    """The least whole distance up to ``most`` that turns no pair, by 45 digits of the turns."""
    period = 1
    for turn in map(Fraction, real_turns(rope)):
        nearest = turn.limit_denominator(most)
        if abs(turn - nearest) > _SAME:
            return None
        period = math.lcm(period, nearest.denominator)
    return period if period <= most else None


def _why_not(rope: Rope, weight: float, ties: int, rivals: int) -> str:
    said = f"weight must be within reach of an alpha, got {short_repr(weight)}: "
    if ties == rivals:
        return (
            f"{said}no pair turns between any two of these {rivals + 1} tokens, so they score "
            "the same (a head without position embedding, NoPE); give a Rope whose pairs turn"
        )
    return (
        f"{said}at distance {_period(rope, rivals)} every pair is back where it was, and the "
        f"wanted token gets less than 1/{1 + ties} beside its equals; give a shorter context, or "
        "a scaling whose wavelengths have no common period"
    )


def _check_rope(rope: Any) -> None:
    if not isinstance(rope, Rope):
        way_out = {
            "LayerRopes": "; pass the Rope of one layer, ropes[i]",
            "NoneType": "; no weights tell positions apart in a layer without one",
        }.get(type(rope).__name__, "")
        raise SpecError(f"rope must be a phasor.Rope, got {short_repr(rope)}{way_out}")
