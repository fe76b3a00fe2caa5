"""Heads that look at a position: their weights, what they score, and what none can do."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasor import LayerRopes, Rope, SpecError, preset
from phasor.numpy import rotate, score
from phasor.papers.heads import (
    _compute_gaps,
    attention_map,
    attention_weight,
    positional_head,
    required_alpha,
    semantic_head,
)
from phasor.scaling import DynamicNTK, Proportional, Resonance

from .. import oracle, strategies
from ..oracle import exact_gap
from ..ropes import head as plain

OFFSETS = [-5, -1, 0, 1, 7, 100, 4000]


@pytest.mark.slow
def test_every_one_of_8192_tokens_is_picked_exactly() -> None:
    """Random content, causal attention: each row's largest share is the wanted token's, 0.99."""
    rope, tokens, offset = plain(64), 8192, 1
    alpha = required_alpha(rope, tokens, 0.99, offset=offset)
    head = positional_head(rope, offset, alpha=alpha, width=16, constant=5)
    x = np.random.default_rng(0).standard_normal((tokens, 16))
    x[:, 5] = 1.0
    place = np.arange(tokens)
    q = rotate((x @ head.query.T)[:, None], place, rope)[:, 0] / math.sqrt(64)
    k = rotate((x @ head.key.T)[:, None], place, rope)[:, 0]
    for rows in np.split(place, 8):
        logits = q[rows] @ k.T
        logits[place > rows[:, None]] = -np.inf
        with_token = rows >= offset
        picked = logits.argmax(1)
        np.testing.assert_array_equal(picked[with_token], rows[with_token] - offset)
        shares = 1 / np.exp(logits - logits.max(1, keepdims=True)).sum(1)
        assert shares[with_token].min() >= 0.99 - 1e-9
    assert abs(shares[-1] - attention_weight(rope, alpha, tokens, offset=offset)) < 1e-9


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("vector", ["ones", "gaussian"])
def test_a_head_may_look_at_any_distance(vector: str, offset: int) -> None:
    """Proposition 3.1: of 8192 tokens either way, the one ``offset`` back scores highest."""
    rope = plain(64)
    head = positional_head(rope, offset, alpha=2.0, width=1)
    query, key = head.query[:, 0], head.key[:, 0]
    if vector == "gaussian":
        key = np.random.default_rng(0).standard_normal(64)
        query = rotate(key, -offset, rope)
    distances = np.arange(-8192, 8193)
    scores = score(query, key, distances, rope)
    assert distances[scores.argmax()] == -offset
    best = np.sort(scores)[-2:]
    assert best[1] - best[0] > 1e-3 * best[1]


@given(strategies.resolved_ropes(), *[st.integers(-(2**40), 2**40)] * 3)
def test_any_head_scores_the_distance_alone(
    rope: Rope, offset: int, position: int, beside: int
) -> None:
    """``alpha C(r)`` for the token ``r`` beside the wanted one, and ``alpha C(0)`` for that."""
    head = positional_head(rope, offset, alpha=3.0, width=3, constant=2)
    full = 3.0 * rope.num_pairs
    for r in (0, 1, beside):
        places = [position, position - offset + r]
        at = places if rope.axes.n_axes == 1 else [[place] * rope.axes.n_axes for place in places]
        query = oracle.turned(head.query[:, 2], at[0], rope)
        key = oracle.turned(head.key[:, 2], at[1], rope)
        expected = full - 3.0 * float(exact_gap(rope, r))
        assert abs(math.fsum(query * key) - expected) <= 8e-15 * full
    assert not head.query[:, :2].any()
    assert not head.key[:, :2].any()


def test_the_previous_token_head_is_the_one_on_paper() -> None:
    """``R(-1) (1, 0, ...) = (cos 1, -sin 1, ...)``, the first coordinate of each pair is 1."""
    rope = Rope(head_dim=4, pairing="interleaved", base=100.0)
    head = positional_head(rope, 1, alpha=1.0, width=1)
    expected = [math.cos(1), -math.sin(1), math.cos(0.1), -math.sin(0.1)]
    np.testing.assert_allclose(head.query[:, 0], expected, rtol=0, atol=1e-15)
    assert head.key[:, 0].tolist() == [1, 0, 1, 0]


def test_the_query_itself_is_a_rival() -> None:
    """Of two tokens the second sees itself beside the first; of three, one more as near."""
    rope = plain(64)
    behind = math.exp(-10 * float(exact_gap(rope, 1)) / 8)
    for context, rivals in ((2, 1), (3, 2)):
        expected = 1 / (1 + rivals * behind)
        assert abs(attention_weight(rope, 10.0, context) - expected) < 1e-14


def three_shares(rope: Rope, seed: int) -> list[float]:
    """What the last of the tokens ``[bos, x, x]`` pays to each, in a head of random weights."""
    draw = np.random.default_rng(seed)
    query, key = draw.standard_normal((2, 8, 5)) / 2
    bos, x = draw.standard_normal((2, 5))
    q = rotate(query @ x, 2, rope)
    keys = [rotate(key @ token, n, rope) for n, token in enumerate((bos, x, x))]
    shares = [math.exp(math.fsum(q * k)) for k in keys]
    return [share / math.fsum(shares) for share in shares]


@pytest.mark.parametrize("seed", range(20))
def test_without_positions_no_head_finds_the_previous_token(seed: int) -> None:
    """Proposition 5.2: two equal tokens get equal attention, to the last bit, and below a half."""
    _, previous, itself = three_shares(plain(8, scaling=Proportional(fraction=0.0)), seed)
    assert previous == itself
    assert previous < 0.5
    _, previous, itself = three_shares(plain(8), seed)
    assert previous != itself


@pytest.mark.parametrize("alpha", [1.0, 1e2, 1e4])
@pytest.mark.parametrize(("margin", "swap"), [(0.4, 6), (0.4595, 44), (0.45969, 710)])
def test_exchanging_two_tokens_changes_what_a_head_means(
    margin: float, swap: int, alpha: float
) -> None:
    """Theorem 6.1 for d = 2: a token that should lose wins from a near return, however sharp.

    The head prefers the target to the other token by ``margin`` wherever both stand at one
    distance. Target just before the query, the other ``swap`` before it: the other wins.
    """
    rope = plain(2)
    query, target = np.array([alpha, 0.0]), np.array([1.0, 0.0])
    other = (1 - margin) * target
    before = -np.arange(2, 1001)
    other_wins = score(query, other, before, rope) > score(query, target, -1, rope)
    assert -before[other_wins.argmax()] == swap
    assert score(query, target, -swap, rope) > score(query, other, -1, rope)


@pytest.mark.parametrize(
    "rope",
    [
        plain(8, scaling=Proportional(fraction=0.0)),
        Rope(head_dim=4, pairing="half", explicit_inv_freq=(0.0, 0.0)),
    ],
    ids=["p=0", "NoPE"],
)
def test_pairs_that_stand_still_reach_nothing(rope: Rope) -> None:
    """Each of 49 tokens gets a 49th, exactly; and the error says why."""
    assert attention_weight(rope, 1e6, 49) == 1 / 49
    assert required_alpha(rope, 49, 1 / 49) == 0
    assert not _compute_gaps(rope, 48).any()
    with pytest.raises(SpecError, match=r"within reach.*0\.5: no pair turns.*49 tokens.*NoPE"):
        required_alpha(rope, 49, 0.5)


def test_a_common_period_is_the_end_of_a_head() -> None:
    """Wavelengths of 6 and 63 tokens (base 100) meet again after 126, and not before."""
    rope = plain(4, 100.0, scaling=Resonance())
    gaps = _compute_gaps(rope, 126)
    assert gaps[125] == 0
    assert gaps[:125].min() > 1e-3
    alpha = required_alpha(rope, 126, 0.99, offset=0)
    assert attention_weight(rope, alpha, 126, offset=0) >= 0.99
    with pytest.raises(SpecError, match=r"0\.99: at distance 126 every pair.*less than 1/2"):
        required_alpha(rope, 127, 0.99, offset=0)
    with pytest.raises(SpecError, match="less than 1/3"):
        required_alpha(rope, 253, 0.34, offset=0)


def test_equals_leave_less_than_their_share_in_reach() -> None:
    """Of two equal keys, each may come near to one half and not to it."""
    rope = plain(2, scaling=Resonance())  # a wavelength of 6
    assert attention_weight(rope, required_alpha(rope, 9, 0.49), 9) >= 0.49
    assert required_alpha(rope, 9, math.nextafter(0.5, 0)) < math.inf
    with pytest.raises(SpecError, match="less than 1/2"):
        required_alpha(rope, 9, 0.5)


def test_frequencies_rounded_to_float32_have_no_common_period() -> None:
    """They miss by their rounding, and the alpha that it takes is found."""
    rope = plain(2, scaling=Resonance(), inv_freq_dtype="float32")
    gaps = _compute_gaps(rope, 7)
    assert gaps.argmin() + 1 == 6
    expected = float(exact_gap(rope, 6))
    assert abs(gaps[5] / expected - 1) <= 2e-15 / math.sqrt(2 * expected) + 1e-15
    assert attention_weight(rope, required_alpha(rope, 9, 0.99), 9) >= 0.99


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope": None}, "rope must be a phasor.Rope, got None"),
        ({"rope": preset("llama-3.1-8b")}, r"of 32 layers: take ropes\[0\], or ropes"),
        ({"rope": 64}, "rope must be a phasor.Rope, got 64$"),
        ({"context": 1}, "context must be a whole number >= 2, got 1"),
        ({"context": 8.0}, "context must be a whole number >= 2, got 8.0"),
        ({"offset": 8}, "offset must be a whole number from 0 to 7, got 8"),
        ({"offset": -1}, "offset must be a whole number from 0 to 7, got -1"),
        ({"weight": 0.0}, "weight must be a finite number > 0 and <= 1, got 0.0"),
        ({"weight": 1.5}, "weight must be a finite number > 0 and <= 1, got 1.5"),
        ({"weight": 1}, "weight must be below 1, which a softmax never reaches, got 1"),
        ({"weight": "0.9"}, "weight must be a finite number > 0 and <= 1, got '0.9'"),
    ],
    ids=str,
)
def test_a_question_that_means_nothing_is_refused(change: Any, message: str) -> None:
    """By `required_alpha`, naming the argument; the others share its checks."""
    question: dict[str, Any] = {"rope": plain(8), "context": 8, "weight": 0.9}
    with pytest.raises(SpecError, match=message):
        required_alpha(**question | change)


@pytest.mark.parametrize("rope", [None, preset("llama-3.1-8b"), 64], ids=["None", "model", "64"])
def test_a_map_is_of_the_rope_of_one_layer(rope: Any) -> None:
    """As the alpha is."""
    with pytest.raises(SpecError, match="rope must be a"):
        attention_map(rope, 1, alpha=1.0, tokens=4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope": None}, "rope must be a phasor.Rope, got None"),
        ({"offset": 0.5}, "offset must be a whole number from .*, got 0.5"),
        ({"alpha": -1.0}, "alpha must be a finite number >= 0, got -1.0"),
        ({"alpha": math.inf}, "alpha must be a finite number >= 0, got inf"),
        ({"width": 0}, "width must be a whole number from 1 to 1048576, got 0"),
        ({"constant": 3}, "constant must be a whole number from 0 to 2, got 3"),
    ],
    ids=str,
)
def test_a_head_that_means_nothing_is_refused(change: Any, message: str) -> None:
    """By `positional_head`, naming the argument."""
    head: dict[str, Any] = {"rope": plain(8), "offset": 1, "alpha": 1.0, "width": 3}
    with pytest.raises(SpecError, match=message):
        positional_head(**head | change)


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("base", [100.0, 10_000.0])
def test_a_head_for_content_finds_its_token_until_the_pairs_have_turned(
    pairing: Any, base: float
) -> None:
    """Theorem 6.1: ``alpha sum cos`` of the slowest pairs; a token that is not meant scores 0."""
    rope = Rope(head_dim=16, pairing=pairing, base=base)
    head = semantic_head(rope, 2, alpha=3.0, width=4, query=3, key=1)
    distances = [0, 1, 17, 1000]
    scores = score(head.query[:, 3], head.key[:, 1], distances, rope)
    slow = [base ** (-2 * pair / 16) for pair in (6, 7)]
    wanted = [3 * sum(math.cos(r * frequency) for frequency in slow) for r in distances]
    np.testing.assert_allclose(scores, wanted, atol=1e-12)
    assert not score(head.query[:, 3], head.key[:, 0], distances, rope).any()
    assert not head.query[:, :3].any()
    assert not head.key[:, [0, 2, 3]].any()


def test_a_head_for_content_on_one_pair_fails_after_a_quarter_of_its_turn() -> None:
    """Whatever its sharpness; and never where the pair stands still."""
    rope = plain(64)
    quarter = math.pi / 2 / rope.inv_freq[-1]
    head = semantic_head(rope, 1, alpha=1e6, width=2)
    near, far = math.floor(quarter), math.ceil(quarter)
    scores = score(head.query[:, 0], head.key[:, 1], [near, far], rope)
    assert scores[0] > 0 > scores[1]
    still = plain(64, scaling=Proportional(fraction=0.75))
    head = semantic_head(still, 1, alpha=1.0, width=2)
    assert score(head.query[:, 0], head.key[:, 1], [0, far, 10**9], still).tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pairs": 0}, "pairs must be a whole number from 1 to 4, got 0"),
        ({"pairs": 5}, "pairs must be a whole number from 1 to 4, got 5"),
        ({"alpha": math.nan}, "alpha must be a finite number >= 0"),
        ({"width": 1}, "width must be a whole number from 2"),
        ({"query": 3}, "query must be a whole number from 0 to 2, got 3"),
        ({"key": -1}, "key must be a whole number from 0 to 2, got -1"),
        ({"rope": plain(8, scaling=DynamicNTK(factor=2.0, original_max_positions=64))}, "rope.at"),
    ],
    ids=str,
)
def test_a_head_for_no_content_is_refused(change: Any, message: str) -> None:
    """By `semantic_head`, naming the argument."""
    head: dict[str, Any] = {"rope": plain(8), "pairs": 1, "alpha": 1.0, "width": 3}
    with pytest.raises(SpecError, match=message):
        semantic_head(**head | change)


@pytest.mark.parametrize("alpha", [-0.1, math.nan, True], ids=str)
def test_a_weight_needs_an_alpha_that_is_one(alpha: Any) -> None:
    """A finite number, not negative."""
    with pytest.raises(SpecError, match="alpha must be a finite number >= 0"):
        attention_weight(plain(8), alpha, 8)


def test_a_rule_has_to_pick_its_law_first() -> None:
    """Weights, gaps and alphas depend on it."""
    rope = plain(8, scaling=DynamicNTK(factor=2.0, original_max_positions=64))
    with pytest.raises(SpecError, match=r"use rope\.at"):
        positional_head(rope, 1, alpha=1.0, width=1)
    with pytest.raises(SpecError, match=r"use rope\.at"):
        required_alpha(rope, 8, 0.9)
    assert required_alpha(rope.at(128), 8, 0.9) > 0


def test_layer_ropes_answer_layer_by_layer() -> None:
    """Layers of one kind need one alpha."""
    ropes = preset("gemma-3-4b")
    assert isinstance(ropes, LayerRopes)
    found = {required_alpha(rope, 1024, 0.9) for rope in ropes if rope is not None}
    assert len(found) == 2
