"""Attention heads that look at a fixed offset whatever the tokens are, and their weights.

`semantic_head` instead looks for a token at any distance, until the rotation hides it.

Let every token have a 1 in one coordinate of its input, as the bias of a projection provides
(`phasor.torch.papers.PositionalHead`). With ``W_k x = e``, where ``e`` has a 1 in the first
coordinate of every pair, and ``W_q = alpha R(-offset) W_k``, the score of the query at ``m`` and
the key at ``n`` is

    (R(m) W_q x)^T (R(n) W_k x) = alpha C(n - m + offset),    C(r) = sum_k cos(r inv_freq[k])

which is largest at ``n = m - offset``. So ``offset`` counts tokens back: 1 is the previous token,
0 the token itself, and a negative offset looks ahead.

Under a causal mask the query sees positions 0 to m, its own included. So the previous token
competes with the tokens before it and with the query's own token. Its two neighbours, the query's
own token and the token two back, both score ``alpha C(1)``.

The construction is Wendler's ("Notes on rotary positional embeddings", 2025), the theorems are
Barbero et al.'s ("Round and Round We Go", 2410.06205): proposition 3.1 for any offset, theorem 5.3
for the weight that grows with the norm. It needs a bounded context: ``C`` comes arbitrarily close
to ``C(0)``, so no ``alpha`` is enough for every context (theorem 6.1).

Scores here do not include ``rope.logit_factor``. In a model that multiplies logits by it, ``alpha``
acts as ``alpha * rope.logit_factor`` does here.
"""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from phasor._checks import number, short_repr, whole
from phasor.angles import real_turns
from phasor.errors import SpecError
from phasor.extending.cosines import cosine_sums
from phasor.layers import check_rope
from phasor.numpy import every_axis_of, phasors, rotate
from phasor.pairings import slices
from phasor.rope import Rope

_WIDEST = 1 << 20
_CHUNK = 4096  # number of distances whose phasors are computed at once
_SMALL_GAP = 1e-3  # share of C(0); smaller gaps have lost digits that sharp heads need
_TURN_TOLERANCE = Fraction(1, 10**45)  # frequencies are real numbers to 60 digits


class HeadWeights(NamedTuple):
    """The query and key projections of a head, ``[head_dim, width]`` each: ``q = query @ x``."""

    query: NDArray[np.float64]
    key: NDArray[np.float64]


def positional_head(
    rope: Rope, offset: int, *, alpha: float, width: int, constant: int = 0
) -> HeadWeights:
    """``W_q = alpha R(-offset) W_k`` and ``W_k x = e``: a head that looks ``offset`` tokens back.

    Coordinates that do not turn have weight 0, because they score every token the same.

    Args:
        rope: The rope of queries and keys. With several axes an offset is along every axis, as in
            text.
        offset: Tokens back from the query: 1 the previous token, 0 itself, -1 the next.
        alpha: Sharpness, 0 or more; `required_alpha` computes it.
        width: Width of the input.
        constant: The input coordinate that is 1 in every token.

    Returns:
        `HeadWeights`, float64.

    >>> rope = Rope(head_dim=4, pairing="interleaved")
    >>> head = positional_head(rope, 1, alpha=2.0, width=3)
    >>> head.key[:, 0], head.query[:2, 0].round(4)  # the query is 2 cos(-1), 2 sin(-1)
    (array([1., 0., 1., 0.]), array([ 1.0806, -1.6829]))
    """
    check_rope("rope", rope)
    offset = whole("offset", offset, least=-(2**63) + 1, most=2**63 - 1)
    alpha = number("alpha", alpha, least=0)
    width = whole("width", width, least=1, most=_WIDEST)
    constant = whole("constant", constant, least=0, most=width - 1)
    # a layer's projections have the pairing that the rotation reads, not the one it writes
    same_pairing = dataclasses.replace(rope, pairing_out=None)
    first, _ = slices(rope.pairing, rope.num_pairs, rope.rotary_start)
    head = HeadWeights(np.zeros((rope.head_dim, width)), np.zeros((rope.head_dim, width)))
    head.key[first, constant] = 1.0
    turned = rotate(head.key[:, constant], every_axis_of(rope, -offset), same_pairing, gain=1.0)
    head.query[:, constant] = alpha * turned
    return head


def semantic_head(
    rope: Rope, pairs: int, *, alpha: float, width: int, query: int = 0, key: int = 1
) -> HeadWeights:
    """A head that looks for a token by its content, with the slowest pairs.

    A query with input 1 in coordinate ``query`` gives a key with input 1 in coordinate ``key`` the
    score ``alpha sum_k cos(r inv_freq[k])`` at distance ``r``, summed over the ``pairs`` slowest
    pairs, and other keys 0. If all of these pairs turn, no ``alpha`` works at every distance (Round
    and Round We Go 2410.06205, theorem 6.1): once the slowest and the others have made a quarter of
    a turn, the token scores no more than any other. Pairs that do not turn, such as the slowest of
    p-RoPE, find it at any distance.

    Args:
        rope: The rope of queries and keys.
        pairs: Number of slowest pairs to use, 1 or more.
        alpha: Sharpness, 0 or more. Logits are divided by ``sqrt(rope.head_dim)``.
        width: Width of the input, 2 or more.
        query: The input coordinate of tokens that look.
        key: The input coordinate of tokens to look for.

    Returns:
        `HeadWeights`, float64.

    >>> from phasor.numpy import score
    >>> rope = Rope(head_dim=128, pairing="half")
    >>> head = semantic_head(rope, 1, alpha=1.0, width=2)
    >>> score(head.query[:, 0], head.key[:, 1], [0, 10_000, 20_000], rope).round(4)
    array([ 1.    ,  0.4041, -0.6734])
    """
    check_rope("rope", rope)
    pairs = whole("pairs", pairs, least=1, most=rope.num_pairs)
    alpha = number("alpha", alpha, least=0)
    width = whole("width", width, least=2, most=_WIDEST)
    query = whole("query", query, least=0, most=width - 1)
    key = whole("key", key, least=0, most=width - 1)
    first, _ = slices(rope.pairing, rope.num_pairs, rope.rotary_start)
    slowest = np.argsort(np.abs(rope.inv_freq), kind="stable")[:pairs]
    head = HeadWeights(np.zeros((rope.head_dim, width)), np.zeros((rope.head_dim, width)))
    coordinates = np.arange(rope.head_dim)[first][slowest]
    head.key[coordinates, key] = 1.0
    head.query[coordinates, query] = alpha
    return head


def attention_weight(rope: Rope, alpha: float, context: int, *, offset: int = 1) -> float:
    """The attention of the last query in a causal context to the token ``offset`` back.

    ``1 / sum_n exp(-alpha * (C(0) - C(n - m + offset)) / sqrt(head_dim))`` over all ``context``
    tokens: logits are divided by ``sqrt(rope.head_dim)``, and any other factor on them multiplies
    ``alpha``. Earlier queries see fewer other keys, so their weight is at least as large.

    Args:
        rope: The rope of queries and keys.
        alpha: As given to `positional_head`.
        context: Tokens seen by the last query, itself included; at least 2.
        offset: Tokens back from the query, 0 to ``context - 1``.

    >>> rope = Rope(head_dim=64, pairing="half")
    >>> round(attention_weight(rope, 10.0, 8193), 6)
    0.65499
    """
    alpha = number("alpha", alpha, least=0)
    return _compute_weight(alpha, _logit_gaps(rope, context, offset))


def attention_map(rope: Rope, offset: int, *, alpha: float, tokens: int) -> NDArray[np.float64]:
    """Causal attention ``[query, key]`` of the head that `positional_head` makes.

    Softmax of ``alpha C(n - m + offset) / sqrt(head_dim)`` over the keys ``n <= m``; NaN where the
    key is later than the query. With several axes, tokens have the same position on all of them.

    >>> rope = Rope(head_dim=64, pairing="half")
    >>> weights = attention_map(rope, 1, alpha=10.0, tokens=17)
    >>> print(weights.shape, weights[16, 15].round(6))
    (17, 17) 0.654992
    """
    check_rope("rope", rope)
    tokens = whole("tokens", tokens, least=1)
    offset = whole("offset", offset, least=0, most=tokens - 1)
    sharpness = number("alpha", alpha, least=0) / math.sqrt(rope.head_dim)
    # C(n - m + offset) for n - m from 1 - tokens to 0, at index n - m - 1
    scores = sharpness * cosine_sums(rope, tokens, start=offset - tokens + 1)
    query, key = np.indices((tokens, tokens))
    logits = np.where(key > query, -np.inf, scores[np.minimum(key - query, 0) - 1])
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return np.where(key > query, np.nan, weights / weights.sum(-1, keepdims=True))


def required_alpha(rope: Rope, context: int, weight: float, *, offset: int = 1) -> float:
    """The smallest ``alpha`` for which `attention_weight` is at least ``weight`` over ``context``.

    Found by Newton's method on the logarithm of the other tokens' weight, which is convex in
    ``alpha``. If only the two neighbours matter, it is ``sqrt(head_dim) * log(2 * weight / (1 -
    weight)) / (C(0) - C(1))``. `attention_weight` with the result is at least ``weight``, rounding
    included.

    Args:
        rope: The rope of queries and keys.
        context: Tokens seen by the last query, itself included; at least 2.
        weight: The required attention, between 0 and 1.
        offset: Tokens back from the query, 0 to ``context - 1``.

    Raises:
        SpecError: If no ``alpha`` reaches the weight: no pair turns, or all pairs return to their
            first angle at some distance within the context.

    >>> rope = Rope(head_dim=128, pairing="half", base=500_000.0)
    >>> round(required_alpha(rope, 8192, 0.99), 3)
    42.318
    """
    weight = number("weight", weight, above=0, most=1)
    if weight == 1:
        raise SpecError("weight must be below 1, which a softmax never reaches, got 1; try 0.999")
    gaps = _logit_gaps(rope, context, offset)
    rivals, ties = (1 - weight) / weight, int((gaps == 0).sum())
    if weight <= _compute_weight(0.0, gaps):
        return 0.0
    if rivals <= ties or weight > 1 / (1 + ties):
        raise SpecError(_explain_unreachable(rope, weight, ties, len(gaps)))
    alpha = _find_alpha(rivals, gaps)
    margin = 2.0**-52 * (alpha + 1 / float(gaps.max()))
    while _compute_weight(alpha, gaps) < weight:  # the root has an error of a few roundings
        alpha, margin = alpha + margin, 2 * margin
    return alpha


def _find_alpha(rivals: float, gaps: NDArray[np.float64]) -> float:
    """The ``alpha`` at which ``sum(exp(-alpha * gaps))`` falls to ``rivals``, from below."""
    alpha = 0.0
    while True:
        terms = np.exp(-alpha * gaps)
        total = float(terms.sum())
        # a convex function lies above its tangent, so no step passes the root
        step = total * math.log(total / rivals) / float(terms @ gaps)
        if step <= 2.0**-50 * alpha:
            return alpha
        alpha += step


def _compute_weight(alpha: float, gaps: NDArray[np.float64]) -> float:
    return 1 / (1 + float(np.exp(-alpha * gaps).sum()))


def _logit_gaps(rope: Rope, context: int, offset: int) -> NDArray[np.float64]:
    """How much smaller the logit of every other token is, for an alpha of 1."""
    context = whole("context", context, least=2)
    # tokens after the wanted one, and before it
    later = whole("offset", offset, least=0, most=context - 1)
    earlier = context - 1 - later
    gaps = _compute_gaps(rope, max(later, earlier))
    return np.concatenate((gaps[:later], gaps[:earlier])) / math.sqrt(rope.head_dim)


def _compute_gaps(rope: Rope, farthest: int) -> NDArray[np.float64]:
    """``C(0) - C(r)`` for ``r`` from 1 to ``farthest``, with a small relative error."""
    check_rope("rope", rope)
    gaps = rope.num_pairs - cosine_sums(rope, farthest, start=1)
    small = np.flatnonzero(gaps < min(_SMALL_GAP * rope.num_pairs, 0.5))
    for begin in range(0, len(small), _CHUNK):
        chunk = small[begin : begin + _CHUNK]
        turned = phasors(rope, chunk + 1)
        # 1 - cos keeps its digits in this form; if the sum is small, every angle is
        gaps[chunk] = (turned.imag**2 / (1 + turned.real)).sum(-1)
    period = _find_period(rope, farthest)
    if period is not None:
        gaps[period - 1 :: period] = 0.0
    return gaps


def _find_period(rope: Rope, longest: int) -> int | None:
    """The smallest distance up to ``longest`` at which all pairs return, to 45 digits of a turn."""
    period = 1
    for turn in map(Fraction, real_turns(rope)):
        nearest = turn.limit_denominator(longest)
        if abs(turn - nearest) > _TURN_TOLERANCE:
            return None
        period = math.lcm(period, nearest.denominator)
    return period if period <= longest else None


def _explain_unreachable(rope: Rope, weight: float, ties: int, rivals: int) -> str:
    prefix = f"weight must be within reach of an alpha, got {short_repr(weight)}: "
    if ties == rivals:
        return (
            f"{prefix}no pair turns between any two of these {rivals + 1} tokens, so they score "
            "the same (a head without position embedding, NoPE); use a Rope whose pairs turn"
        )
    return (
        f"{prefix}at distance {_find_period(rope, rivals)} every pair is back where it was, and "
        f"the wanted token gets less than 1/{1 + ties}, because others score the same; use a "
        "shorter context, or a scaling whose wavelengths have no common period"
    )
