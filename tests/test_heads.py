"""Heads that look at a position: their weights, what they guarantee, and what none can do."""

from __future__ import annotations

import math
from typing import Any

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phasor import DynamicNTK, LayerRopes, Proportional, Resonance, Rope, SpecError, preset
from phasor.heads import attention_weight, positional_head, required_alpha, strongest_rival
from phasor.rotate import rotate, score

from . import oracle, strategies

# computed apart, with plain NumPy sums, and printed to six digits: d, base, last position n, and
# the attention on n - 1 for each alpha, logits over sqrt(d)
ALPHAS = [1, 2, 5, 10, 20, 50, 100]
WEIGHTS: dict[tuple[int, float, int], list[float]] = {
    (64, 1e4, 16): [0.137799, 0.241880, 0.462119, 0.654992, 0.882264, 0.997709, 0.999997],
    (64, 1e4, 1024): [0.014465, 0.109655, 0.459732, 0.654990, 0.882264, 0.997709, 0.999997],
    (64, 1e4, 8192): [0.004272, 0.072831, 0.459674, 0.654990, 0.882264, 0.997709, 0.999997],
    (128, 1e4, 16): [0.173828, 0.305882, 0.519764, 0.727900, 0.935635, 0.999561, 1.000000],
    (128, 1e4, 1024): [0.037604, 0.252031, 0.519700, 0.727900, 0.935635, 0.999561, 1.000000],
    (128, 1e4, 8192): [0.016384, 0.239438, 0.519700, 0.727900, 0.935635, 0.999561, 1.000000],
    (128, 5e5, 16): [0.134936, 0.234501, 0.445783, 0.629979, 0.858760, 0.996147, 0.999993],
    (128, 5e5, 8192): [0.004305, 0.073942, 0.443768, 0.629978, 0.858760, 0.996147, 0.999993],
}
RAW_WEIGHTS: dict[tuple[int, float, int], list[float]] = {
    (128, 1e4, 8192): [0.770062, 0.957688, 0.999855, 1.000000],
    (128, 5e5, 8192): [0.669204, 0.894162, 0.998301, 0.999999],
    (64, 1e4, 8192): [0.586629, 0.813132, 0.991187, 0.999960],
}
GAPS_AT_ONE = {
    (2, 1e4): 0.459698, (4, 1e4): 0.459748, (4, 5e5): 0.459699, (8, 1e4): 0.464744,
    (8, 5e5): 0.460406, (16, 1e4): 0.514834, (16, 5e5): 0.479177, (32, 1e4): 0.686351,
    (32, 5e5): 0.578368, (64, 1e4): 1.083168, (64, 5e5): 0.843244, (128, 1e4): 1.906316,
    (128, 5e5): 1.413810, (256, 1e4): 3.567659, (256, 5e5): 2.576241,
}  # fmt: skip
# d, base, farthest distance: where the smallest gap is, and what
SMALLEST = {
    (2, 1e4, 8192): (710, 0.000000), (4, 1e4, 8192): (1885, 0.000986),
    (4, 5e5, 8192): (44, 0.002092), (8, 1e4, 8192): (6283, 0.017294),
    (8, 5e5, 8192): (4348, 0.047208), (4, 1e4, 131072): (84823, 0.000001),
    (4, 5e5, 131072): (128843, 0.000003), (8, 1e4, 131072): (100531, 0.000622),
    (8, 5e5, 131072): (119965, 0.018175),
}  # fmt: skip
# d, base, last position: the alpha that gives 0.99, logits over sqrt(d)
SHARP = {
    (64, 1e4, 8192): 39.058, (64, 5e5, 8192): 50.171, (128, 1e4, 8192): 31.385,
    (128, 5e5, 8192): 42.318, (256, 1e4, 8192): 23.716, (256, 5e5, 8192): 32.843,
    (16, 1e4, 8192): 41.087, (16, 5e5, 8192): 45.523, (16, 5e5, 128): 44.875,
}  # fmt: skip
PRINTED = 0.5e-6 * (1 + 1e-9)
OFFSETS = [-5, -1, 0, 1, 7, 100, 4000]
MODELS = {
    "llama-3.1-8b": ("rope", 131_072),
    "gpt-neox-20b": ("rope", 2048),
    "nanochat-d32": ("rope", 2048),
    "deepseek-v3": ("rope", 163_840),
    "qwen2-vl-7b": ("rope", 32_768),
    "phi-4-mini": ("rope", 131_072),
    "gemma-4-26b-a4b": ("full", 8192),
}


def plain(head_dim: int, base: float = 1e4, **fields: Any) -> Rope:
    """A rope of the tables."""
    return Rope(head_dim=head_dim, pairing="half", base=base, **fields)


def model(name: str) -> Rope:
    """The rope of a model's layers, for its whole context."""
    kind, context = MODELS[name]
    rope = preset(name).kinds[kind]
    assert rope is not None
    return rope.at(context)


def exact_gap(rope: Rope, distance: int) -> mpmath.mpf:
    """``C(0) - C(r)`` with 90 digits, one pair after the other."""
    at = distance if rope.axes.n_axes == 1 else [distance] * rope.axes.n_axes
    cosines, _ = oracle.cos_sin(rope, at)
    with mpmath.workdps(oracle.DIGITS):
        return mpmath.fsum(1 - c for c in cosines)


def exact_weight(rope: Rope, alpha: float, context: int, offset: int, scaled: bool) -> float:
    """The softmax of every key that the last query sees, key after key."""
    wanted = context - 1 - offset
    with mpmath.workdps(oracle.DIGITS):
        sharp = mpmath.mpf(alpha) / (mpmath.sqrt(rope.head_dim) if scaled else 1)
        seen = range(context)
        return float(
            1 / mpmath.fsum(mpmath.exp(-sharp * exact_gap(rope, n - wanted)) for n in seen)
        )


def slack(rope: Rope, alpha: float) -> float:
    """Relative error of a weight: alpha times the bound of `phasor._scan.kernel`, and roundings."""
    pairs = rope.num_pairs
    return alpha * pairs * (4e-15 + pairs * 4 * 2**-53) + 1e-14


@pytest.mark.parametrize(("case", "printed"), WEIGHTS.items(), ids=str)
def test_attention_is_the_tabled_one(case: Any, printed: list[float]) -> None:
    """Keys 0 to n, the query at n, the previous token wanted, logits over sqrt(d)."""
    d, base, n = case
    found = [attention_weight(plain(d, base), alpha, n + 1) for alpha in ALPHAS]
    np.testing.assert_allclose(found, printed, rtol=0, atol=PRINTED)


@pytest.mark.parametrize(("case", "printed"), RAW_WEIGHTS.items(), ids=str)
def test_attention_on_raw_products_is_the_tabled_one(case: Any, printed: list[float]) -> None:
    """The same without the scale, which is far sharper."""
    d, base, n = case
    found = [attention_weight(plain(d, base), a, n + 1, scaled=False) for a in ALPHAS[:4]]
    np.testing.assert_allclose(found, printed, rtol=0, atol=PRINTED)


@pytest.mark.parametrize(("case", "printed"), GAPS_AT_ONE.items(), ids=str)
def test_the_gap_of_a_neighbour_is_the_tabled_one(case: Any, printed: float) -> None:
    """A context of two tokens has one rival."""
    rival = strongest_rival(plain(*case), 2)
    assert rival.distance == 1
    assert abs(rival.gap - printed) <= PRINTED


@pytest.mark.parametrize(("case", "printed"), SMALLEST.items(), ids=str)
def test_the_smallest_gap_is_where_the_table_has_it(case: Any, printed: Any) -> None:
    """Narrow heads come near to where they started within a context."""
    d, base, farthest = case
    rival = strongest_rival(plain(d, base), farthest + 1, offset=0)
    assert rival.distance == printed[0]
    assert abs(rival.gap - printed[1]) <= PRINTED


@pytest.mark.parametrize("base", [1e4, 5e5])
@pytest.mark.parametrize("d", [16, 32, 64, 128, 256])
def test_wide_heads_have_their_neighbours_for_rivals(d: int, base: float) -> None:
    """Up to 131072 tokens nothing comes nearer than the tokens beside the wanted one."""
    assert strongest_rival(plain(d, base), 131_073, offset=0).distance == 1


@pytest.mark.parametrize(("case", "printed"), SHARP.items(), ids=str)
def test_the_alpha_for_99_percent_is_the_tabled_one(case: Any, printed: float) -> None:
    """To the three decimals that were printed."""
    d, base, n = case
    assert abs(required_alpha(plain(d, base), n + 1, 0.99) - printed) <= 0.0005 * (1 + 1e-9)


@pytest.mark.parametrize("base", [1e4, 5e5])
@pytest.mark.parametrize("d", [32, 64, 128, 256])
def test_alpha_follows_the_law_of_two_rivals(d: int, base: float) -> None:
    """``sqrt(d) ln(198) / (C(0) - C(1))`` to 1e-4 for every head of 32 and more."""
    with mpmath.workdps(30):
        law = float(mpmath.sqrt(d) * mpmath.log(198) / exact_gap(plain(d, base), 1))
    assert abs(required_alpha(plain(d, base), 8193, 0.99) / law - 1) < 1e-4


@pytest.mark.parametrize("farthest", [7, 50, 1000, 10**6])
def test_one_pair_returns_at_the_convergents_of_two_pi(farthest: int) -> None:
    """The nearest return of an angle is a convergent of its turns, to all digits of the gap."""
    with mpmath.workdps(60):
        rest, near, last = 2 * mpmath.pi, (1, 0), (0, 1)
        while True:
            whole = int(mpmath.floor(rest))
            near, last = (whole * near[0] + last[0], whole * near[1] + last[1]), near
            if near[0] > farthest:
                break
            rest = 1 / (rest - whole)
        expected = 1 - mpmath.cos(last[0])
        rival = strongest_rival(plain(2), farthest + 1, offset=0)
        assert rival.distance == last[0]
        off = abs(rival.gap - expected) / expected
    assert off <= 2e-15 / math.sqrt(2 * rival.gap) + 1e-15


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("offset", [0, 1, 7, 24])
@pytest.mark.parametrize("law", strategies.EVERY_LAW.values(), ids=strategies.EVERY_LAW)
def test_every_law_gives_the_exact_weight(law: Any, offset: int, scaled: bool) -> None:
    """Rivals on both sides, on one, and at the first token of the context."""
    rope = plain(64, scaling=law)
    found = attention_weight(rope, 3.0, 25, offset=offset, scaled=scaled)
    expected = exact_weight(rope, 3.0, 25, offset, scaled)
    assert abs(found / expected - 1) <= slack(rope, 3.0)


@given(strategies.resolved_ropes(), st.integers(2, 12), st.data())
@settings(max_examples=80)
def test_any_rope_gives_the_exact_weight(rope: Rope, context: int, data: st.DataObject) -> None:
    """Partial, clockwise, on several axes, with pairs that stand still."""
    offset = data.draw(st.integers(0, context - 1))
    alpha = data.draw(st.floats(0, 50))
    found = attention_weight(rope, alpha, context, offset=offset)
    expected = exact_weight(rope, alpha, context, offset, scaled=True)
    assert abs(found / expected - 1) <= slack(rope, alpha)


@pytest.mark.parametrize("name", MODELS)
def test_a_models_own_rotation_pays_the_attention_promised(name: str) -> None:
    """From the weights through the model's rotation to a softmax written as loops."""
    rope, context, alpha = model(name), 20, 4.0
    for offset in (0, 1, 5):
        head = positional_head(rope, offset, alpha=alpha, width=1)
        at = [p if rope.axes.n_axes == 1 else [p] * rope.axes.n_axes for p in range(context)]
        query = oracle.turned(head.query[:, 0], at[-1], rope)
        keys = [oracle.turned(head.key[:, 0], place, rope) for place in at]
        logits = [math.fsum(query * key) / math.sqrt(rope.head_dim) for key in keys]
        shares = [math.exp(logit - max(logits)) for logit in logits]
        share = shares[context - 1 - offset] / math.fsum(shares)
        promised = attention_weight(rope, alpha, context, offset=offset)
        assert abs(share / promised - 1) <= 2 * slack(rope, alpha)


@pytest.mark.parametrize("weight", [0.3, 0.99, 1 - 2**-53])
@pytest.mark.parametrize("name", MODELS)
def test_the_alpha_of_a_model_is_enough_and_no_more(name: str, weight: float) -> None:
    """Over the whole context; less by 1e-9 of it is too little, where weights can show it."""
    rope, context = model(name), MODELS[name][1]
    alpha = required_alpha(rope, context, weight)
    assert attention_weight(rope, alpha, context) >= weight
    if weight < 0.999:
        assert attention_weight(rope, alpha * (1 - 1e-9), context) < weight


@given(st.integers(2, 400), st.integers(0, 3), st.floats(1e-9, 1, exclude_max=True), st.booleans())
@settings(max_examples=100)
def test_the_alpha_returned_always_passes(
    context: int, offset: int, weight: float, scaled: bool
) -> None:
    """Rounding included, from next to nothing to next to one; uniform attention needs none."""
    rope, offset = plain(8), min(offset, context - 1)
    alpha = required_alpha(rope, context, weight, offset=offset, scaled=scaled)
    assert attention_weight(rope, alpha, context, offset=offset, scaled=scaled) >= weight
    assert (alpha == 0) == (weight <= 1 / context)


def test_a_longer_context_needs_a_sharper_head() -> None:
    """Without end: for one pair the smallest gap, and with it alpha, has no bound (theorem 6.1)."""
    found = [required_alpha(plain(2), context, 0.9) for context in (10, 100, 1000, 10**6)]
    assert found == sorted(found)
    assert found[-1] > 1e9 * found[0]


@pytest.mark.parametrize("offset", [0, 1, 100])
def test_every_one_of_8192_tokens_is_picked_exactly(offset: int) -> None:
    """Random content, causal attention: each row's largest share is the wanted token's, 0.99."""
    rope, tokens = plain(64), 8192
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
@settings(max_examples=80)
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
        Rope(head_dim=4, pairing="half", inv_freq=(0.0, 0.0)),
    ],
    ids=["p=0", "NoPE"],
)
def test_pairs_that_stand_still_reach_nothing(rope: Rope) -> None:
    """Each of 49 tokens gets a 49th, exactly; and the error says why."""
    assert attention_weight(rope, 1e6, 49) == 1 / 49
    assert required_alpha(rope, 49, 1 / 49) == 0
    assert strongest_rival(rope, 49).gap == 0
    with pytest.raises(SpecError, match=r"within reach.*0\.5: no pair turns.*49 tokens.*NoPE"):
        required_alpha(rope, 49, 0.5)


def test_a_common_period_is_the_end_of_a_head() -> None:
    """Wavelengths of 6 and 63 tokens (base 100) meet again after 126, and not before."""
    rope = plain(4, 100.0, scaling=Resonance())
    assert strongest_rival(rope, 127, offset=0) == (126, 0.0)
    assert strongest_rival(rope, 126, offset=0).gap > 1e-3
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
    rival = strongest_rival(rope, 9)
    assert rival.distance == 6
    expected = float(exact_gap(rope, 6))
    assert abs(rival.gap / expected - 1) <= 2e-15 / math.sqrt(2 * expected) + 1e-15
    assert attention_weight(rope, required_alpha(rope, 9, 0.99), 9) >= 0.99


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope": None}, "rope must be a phasor.Rope, got None; no weights tell positions apart"),
        ({"rope": preset("llama-3.1-8b")}, r"got LayerRopes.*pass the Rope of one layer, ropes\[i"),
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
