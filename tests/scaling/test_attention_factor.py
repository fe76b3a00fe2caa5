"""Factors that laws put on cos and sin or on the softmax: published ones and stated ones."""

from __future__ import annotations

import pytest

from phasor import Rope
from phasor.scaling import LongRope, PerPair, Yarn, YarnPaper

MSCALES = """
    2  1.06931471805599 1.14343396625  1.04083299973307 1.03774904332554
    4  1.13862943611199 1.29647699278  1.08012344973464 1.07417231105915
    8  1.20794415416798 1.45912907959  1.11803398874989 1.10940039245046
    16 1.27725887222398 1.63139022667  1.15470053837925 1.14354374979373
    32 1.34657359027997 1.81326043404  1.19023807142381 1.17669681082910
    40 1.36888794541139 1.87385420709  1.20145495458934 1.18717272720616
"""


@pytest.mark.parametrize("row", MSCALES.strip().splitlines(), ids=lambda row: row.split()[0])
def test_attention_factors_are_those_of_the_table(row: str) -> None:
    """YaRN's factor on cos and sin, its square on the logits, LongRoPE's for two lengths."""
    factor, once, squared, long4k, long8k = row.split()
    for law in (Yarn, YarnPaper):
        scaling = law(factor=float(factor), original_max_positions=8192)
        rope = Rope(head_dim=128, pairing="half", scaling=scaling)
        assert f"{rope.attention_factor:.14f}" == once
        assert f"{rope.logit_factor:.11f}" == squared
        assert rope.softmax_factor == 1.0
    for length, expected in ((4096, long4k), (8192, long8k)):
        ones = (1.0,) * 64
        rule = LongRope(
            short_factors=ones,
            long_factors=ones,
            original_max_positions=length,
            factor=float(factor),
        )
        for seq_len in (length, length + 1):
            assert f"{rule.at(seq_len).temperature().attention_factor:.14f}" == expected


@pytest.mark.parametrize(
    ("mscale", "all_dim", "table", "softmax"),
    [
        pytest.param(1.0, 1.0, "1.000000000", "1.87385420709", id="deepseek-v3"),
        pytest.param(0.707, 0.707, "1.000000000", "1.58962616512", id="deepseek-v2"),
        pytest.param(1.0, 0.0, "1.368887945", "1.00000000000", id="the-papers"),
    ],
)
def test_deepseeks_factor_moves_to_the_softmax(
    mscale: float, all_dim: float, table: str, softmax: str
) -> None:
    """Factor 40: equal coefficients cancel on cos and sin and stay in the softmax scale."""
    temperature = Yarn(
        factor=40.0, original_max_positions=4096, mscale=mscale, mscale_all_dim=all_dim
    ).temperature()
    assert f"{temperature.attention_factor:.9f}" == table
    assert f"{temperature.softmax_factor:.11f}" == softmax


def test_shortening_has_no_temperature() -> None:
    """A factor of at most 1 leaves the logits alone."""
    assert Yarn(factor=0.5, original_max_positions=64).temperature() == (1.0, 1.0)
    rule = LongRope(
        short_factors=(1.0,), long_factors=(2.0,), original_max_positions=64, factor=1.0
    )
    assert rule.at(1).attention_factor == 1.0


def test_a_stated_attention_factor_wins() -> None:
    """Models that publish the number mean it."""
    law = Yarn(factor=40.0, original_max_positions=4096, attention_factor=1.25)
    assert law.temperature().attention_factor == 1.25
    rule = LongRope(
        short_factors=(1.0,),
        long_factors=(2.0,),
        original_max_positions=4096,
        factor=32.0,
        short_attention_factor=1.1,
        long_attention_factor=1.3,
    )
    assert rule.at(4096) == PerPair(factors=(1.0,), attention_factor=1.1)
    assert rule.at(4097) == PerPair(factors=(2.0,), attention_factor=1.3)
