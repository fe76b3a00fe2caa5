"""The attention that a head gets, its strongest rival, and the alpha that is enough for it."""

from __future__ import annotations

import math
from typing import Any

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasor import Rope, preset
from phasor.papers.heads import _compute_gaps, attention_weight, positional_head, required_alpha

from .. import oracle, strategies
from ..oracle import exact_gap
from ..ropes import head as plain

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
MODELS = {
    "llama-3.1-8b": ("rope", 131_072),
    "gpt-neox-20b": ("rope", 2048),
    "nanochat-d32": ("rope", 2048),
    "deepseek-v3": ("rope", 163_840),
    "qwen2-vl-7b": ("rope", 32_768),
    "phi-4-mini": ("rope", 131_072),
    "gemma-4-26b-a4b": ("full", 8192),
}


def model(name: str) -> Rope:
    """The rope of a model's layers, for its whole context."""
    kind, context = MODELS[name]
    rope = preset(name).kinds[kind]
    assert rope is not None
    return rope.at(context)


def exact_weight(rope: Rope, alpha: float, context: int, offset: int) -> float:
    """The softmax of every key that the last query sees, key after key."""
    wanted = context - 1 - offset
    with mpmath.workdps(oracle.DIGITS):
        sharp = mpmath.mpf(alpha) / mpmath.sqrt(rope.head_dim)
        seen = range(context)
        return float(
            1 / mpmath.fsum(mpmath.exp(-sharp * exact_gap(rope, n - wanted)) for n in seen)
        )


def slack(rope: Rope, alpha: float) -> float:
    """Relative error of a weight: alpha times the bound of `cosine_sums`, and roundings."""
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
    found = [attention_weight(plain(d, base), a * math.sqrt(d), n + 1) for a in ALPHAS[:4]]
    np.testing.assert_allclose(found, printed, rtol=0, atol=PRINTED)


@pytest.mark.parametrize(("case", "printed"), GAPS_AT_ONE.items(), ids=str)
def test_the_gap_of_a_neighbour_is_the_tabled_one(case: Any, printed: float) -> None:
    """A context of two tokens has one rival."""
    (gap,) = _compute_gaps(plain(*case), 1)
    assert abs(gap - printed) <= PRINTED


@pytest.mark.parametrize(("case", "printed"), SMALLEST.items(), ids=str)
def test_the_smallest_gap_is_where_the_table_has_it(case: Any, printed: Any) -> None:
    """Narrow heads come near to where they started within a context."""
    d, base, farthest = case
    gaps = _compute_gaps(plain(d, base), farthest)
    assert gaps.argmin() + 1 == printed[0]
    assert abs(gaps.min() - printed[1]) <= PRINTED


@pytest.mark.parametrize("base", [1e4, 5e5])
@pytest.mark.parametrize("d", [16, 32, 64, 128, 256])
def test_wide_heads_have_their_neighbours_for_rivals(d: int, base: float) -> None:
    """Up to 131072 tokens nothing comes nearer than the tokens beside the wanted one."""
    assert _compute_gaps(plain(d, base), 131_072).argmin() == 0


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
        gaps = _compute_gaps(plain(2), farthest)
        assert gaps.argmin() + 1 == last[0]
        off = abs(gaps.min() - expected) / expected
    assert off <= 2e-15 / math.sqrt(2 * gaps.min()) + 1e-15


@pytest.mark.parametrize(("offset", "alpha"), [(1, 3.0), (24, 24.0)])
@pytest.mark.parametrize("law", strategies.EVERY_LAW.values(), ids=strategies.EVERY_LAW)
def test_every_law_gives_the_exact_weight(law: Any, offset: int, alpha: float) -> None:
    """Rivals on both sides, and on one of the first token of the context."""
    rope = plain(64, scaling=law)
    found = attention_weight(rope, alpha, 25, offset=offset)
    expected = exact_weight(rope, alpha, 25, offset)
    assert abs(found / expected - 1) <= slack(rope, 3.0)  # 24 / sqrt(64) is 3


@given(strategies.resolved_ropes(), st.integers(2, 12), st.data())
def test_any_rope_gives_the_exact_weight(rope: Rope, context: int, data: st.DataObject) -> None:
    """Partial, clockwise, on several axes, with pairs that stand still."""
    offset = data.draw(st.integers(0, context - 1))
    alpha = data.draw(st.floats(0, 50))
    found = attention_weight(rope, alpha, context, offset=offset)
    expected = exact_weight(rope, alpha, context, offset)
    assert abs(found / expected - 1) <= slack(rope, alpha)


@pytest.mark.slow
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


@pytest.mark.parametrize("weight", [0.99, 1 - 2**-53])
@pytest.mark.parametrize("name", MODELS)
def test_the_alpha_of_a_model_is_enough_and_no_more(name: str, weight: float) -> None:
    """Over the whole context; less by 1e-9 of it is too little, where weights can show it."""
    rope, context = model(name), MODELS[name][1]
    alpha = required_alpha(rope, context, weight)
    assert attention_weight(rope, alpha, context) >= weight
    if weight < 0.999:
        assert attention_weight(rope, alpha * (1 - 1e-9), context) < weight


@given(st.integers(2, 400), st.integers(0, 3), st.floats(1e-9, 1, exclude_max=True))
def test_the_alpha_returned_always_passes(context: int, offset: int, weight: float) -> None:
    """Rounding included, from next to nothing to next to one; uniform attention needs none."""
    rope, offset = plain(8), min(offset, context - 1)
    alpha = required_alpha(rope, context, weight, offset=offset)
    assert attention_weight(rope, alpha, context, offset=offset) >= weight
    assert (alpha == 0) == (weight <= 1 / context)


def test_a_longer_context_needs_a_sharper_head() -> None:
    """Without end: for one pair the smallest gap, and with it alpha, has no bound (theorem 6.1)."""
    found = [required_alpha(plain(2), context, 0.9) for context in (10, 100, 1000, 10**6)]
    assert found == sorted(found)
    assert found[-1] > 1e9 * found[0]
