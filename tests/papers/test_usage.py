"""Frequency usage and attention scores, against loops over tokens, heads and pairs."""

from __future__ import annotations

import math

import numpy as np
import pytest

from phasor import Rope, SpecError, TensorError
from phasor.numpy import rotate
from phasor.papers import pair_norms, positional_score, sink_score, token_norms

from .. import oracle

ROPES = {
    "half": Rope(head_dim=8, pairing="half"),
    "interleaved": Rope(head_dim=8, pairing="interleaved"),
    "slice": Rope(head_dim=8, pairing="half", rotary_dim=4, rotary_start=2),
    "other way out": Rope(head_dim=8, pairing="interleaved", pairing_out="half"),
}


def softmaxed(*shape: int) -> np.ndarray:
    """Causal attention weights of random logits."""
    logits = np.random.default_rng(0).standard_normal(shape)
    weights = np.tril(np.exp(logits))
    return weights / weights.sum(-1, keepdims=True)


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
@pytest.mark.parametrize("lead", [(), (3,), (2, 3)], ids=str)
def test_pair_norms_are_means_over_tokens(rope, lead):
    """Each head and pair, by Pythagoras one token at a time."""
    x = np.random.default_rng(0).standard_normal((*lead, 5, 2, 8))
    found = pair_norms(x, rope)
    tokens = x.reshape(-1, 2, 8)
    for head in range(2):
        for k in range(rope.num_pairs):
            i, j = oracle.pair_of(rope, k, rope.pairing)
            mean = sum(math.hypot(t[head, i], t[head, j]) for t in tokens) / len(tokens)
            assert found[head, k] == pytest.approx(mean, rel=1e-14)
    assert found.shape == (2, rope.num_pairs)


@pytest.mark.parametrize("name", ["half", "interleaved", "slice"])
def test_pair_norms_do_not_see_the_rotation(name):
    """Taken before or after it they are the same, to the rotation's rounding."""
    x = np.random.default_rng(0).standard_normal((5, 2, 8))
    turned = rotate(x, np.arange(5) * 1000, ROPES[name])
    norms = pair_norms(x, ROPES[name])
    np.testing.assert_allclose(pair_norms(turned, ROPES[name]), norms, rtol=1e-14)


def test_a_pair_adds_no_more_to_a_score_than_its_norms():
    """|<q_k, k_k>| <= |q_k| |k_k|, which is why the norms measure usage."""
    draw = np.random.default_rng(0)
    q, k = draw.standard_normal((2, 1, 1, 2))
    rope = Rope(head_dim=2, pairing="half")
    bound = pair_norms(q[None], rope) * pair_norms(k[None], rope)
    scores = [float((rotate(q[0], p, rope) * k[0]).sum()) for p in range(500)]
    assert 0.999 * bound.item() < max(map(abs, scores)) <= bound.item() * (1 + 1e-15)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.zeros((5, 8)), r"\[..., seq, heads, head_dim\]"),
        (np.zeros((5, 2, 6)), r"head_dim 8, got shape \[5, 2, 6\]"),
        (np.zeros((0, 2, 8)), "at least one token"),
        (np.zeros((5, 2, 8), dtype=complex), "x must hold real numbers, got complex128"),
    ],
    ids=["no heads", "other width", "no token", "complex"],
)
def test_pair_norms_refuse(x, message):
    """The error says what was expected."""
    with pytest.raises(TensorError, match=message):
        pair_norms(x, ROPES["half"])


@pytest.mark.parametrize("offset", [0, -1, -3, 2])
def test_positional_score_is_the_mean_weight_at_the_offset(offset):
    """Over queries, and every sequence, that have a key there."""
    weights = softmaxed(2, 3, 6, 6) + 0.1
    for head in range(3):
        hits = [
            weights[batch, head, i, i + offset]
            for batch in range(2)
            for i in range(6)
            if 0 <= i + offset < 6
        ]
        found = positional_score(weights, offset)[head]
        assert found == pytest.approx(sum(hits) / len(hits), rel=1e-14)


def test_ideal_positional_heads_score_one():
    """The diagonal and the previous-token head of Round and Round We Go; the first token's row,
    which has no previous token, does not count.
    """
    diagonal, previous = np.eye(7), np.eye(7, k=-1)
    previous[0, 0] = 1
    heads = np.stack((diagonal, previous))
    assert positional_score(heads, 0).tolist() == [1.0, 1 / 7]
    assert positional_score(heads, -1).tolist() == [0.0, 1.0]


@pytest.mark.parametrize("offset", [6, -6, 0.5, True])
def test_positional_score_refuses_an_offset_without_a_key(offset):
    """Six tokens have offsets from -5 to 5."""
    with pytest.raises(SpecError, match="offset must be a whole number from -5 to 5"):
        positional_score(softmaxed(1, 6, 6), offset)


@pytest.mark.parametrize("lead", [(), (2,), (2, 2)], ids=str)
def test_sink_score_is_the_mean_weight_on_the_first_key(lead):
    """Over all queries but the first, which sees nothing else, and every sequence."""
    weights = softmaxed(*lead, 3, 6, 6)
    found = sink_score(weights)
    assert found.shape == (3,)
    for head in range(3):
        hits = [one[head, i, 0] for one in weights.reshape(-1, 3, 6, 6) for i in range(1, 6)]
        assert found[head] == pytest.approx(sum(hits) / len(hits), rel=1e-14)


def test_an_ideal_sink_scores_one_and_a_diagonal_head_nothing():
    """The first query of either attends to itself, and does not count."""
    sink = np.zeros((7, 7))
    sink[:, 0] = 1
    assert sink_score(np.stack((sink, np.eye(7)))).tolist() == [1.0, 0.0]


def test_sink_score_refuses_a_single_token():
    """It has no query that could look elsewhere."""
    with pytest.raises(TensorError, match="a query after the first"):
        sink_score(np.ones((3, 1, 1)))


@pytest.mark.parametrize("lead", [(), (3,), (2, 3)], ids=str)
def test_token_norms_are_means_over_sequences(lead):
    """Each head and position by Pythagoras; scaling one token's vector scales its norm alone."""
    x = np.random.default_rng(0).standard_normal((*lead, 5, 2, 6))
    found = token_norms(x)
    assert found.shape == (2, 5)
    rows = x.reshape(-1, 5, 2, 6)
    for head in range(2):
        for place in range(5):
            lengths = [math.sqrt(sum(c * c for c in row[place, head])) for row in rows]
            assert found[head, place] == pytest.approx(sum(lengths) / len(lengths), rel=1e-14)
    x[..., 3, 1, :] *= 10
    ratio = token_norms(x) / found
    assert ratio[1, 3] == pytest.approx(10)
    assert np.delete(ratio.ravel(), 8).tolist() == [1.0] * 9


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.zeros((5, 8)), r"\[..., seq, heads, head_dim\].*got shape \[5, 8\]"),
        (np.zeros((0, 2, 8)), "at least one token"),
        (np.array([[["a"]]]), "x must hold real numbers"),
    ],
    ids=["no heads", "no token", "letters"],
)
def test_token_norms_refuse(x, message):
    """The error says what was expected."""
    with pytest.raises(TensorError, match=message):
        token_norms(x)


@pytest.mark.parametrize("score", [lambda x: positional_score(x, 0), sink_score])
@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (np.ones((6, 6)), r"\[..., heads, seq, seq\]"),
        (np.ones((3, 1, 6)), "with a cache there are more keys than queries"),
        (np.ones((0, 6, 6)), "attention must be"),
    ],
    ids=["no heads", "cached", "empty"],
)
def test_scores_refuse_what_is_not_attention(weights, message, score):
    """The error says what was expected."""
    with pytest.raises(TensorError, match=message):
        score(weights)
