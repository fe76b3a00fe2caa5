"""Laws and rules: their published constants, their limits, their refusals."""

from __future__ import annotations

import math
from dataclasses import replace
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from phasor import Rope
from phasor.angles import wavelengths
from phasor.errors import SpecError
from phasor.rope import real_inv_freq
from phasor.scaling import (
    LAWS,
    NTK,
    Cope,
    DynamicNTK,
    Hope,
    Law,
    Linear,
    Llama3,
    LongRope,
    NTKFixed,
    NTKMixed,
    NTKOld,
    PartNTK,
    PerPair,
    Proportional,
    Rule,
    SteppedNTK,
    Yarn,
    YarnPaper,
)
from phasor.scaling.laws import scale_alike

from .. import oracle

S8: dict[str, Any] = {"factor": 8.0, "original_max_positions": 8192}


def scaled(law: Law | Rule | None, base: float = 1e4, head_dim: int = 128) -> tuple[Decimal, ...]:
    """The frequencies of one head under ``law``."""
    return real_inv_freq(Rope(head_dim=head_dim, pairing="half", base=base, scaling=law))


def ramp_ends(law: Yarn, base: float, head_dim: int, inside: tuple[int, int]) -> list[float]:
    """Where an index ramp begins and ends, read off two pairs that lie inside it."""
    plain, got = scaled(None, base, head_dim), scaled(law, base, head_dim)
    slow = 1 / Decimal(law.factor)
    a, b = ((1 - got[k] / plain[k]) / (1 - slow) for k in inside)
    slope = (b - a) / (inside[1] - inside[0])
    return [float(inside[0] - a / slope), float(inside[0] + (1 - a) / slope)]


@pytest.mark.parametrize(
    ("law", "base", "head_dim", "inside", "ends"),
    [
        pytest.param(
            Yarn(factor=32.0, original_max_positions=4096, truncate=False),
            *(150_000.0, 64, (9, 17), [8.0927791, 17.398025]),
            id="gpt-oss",
        ),
        pytest.param(Yarn(**S8), 1e4, 128, (26, 49), [25, 50], id="1e4-truncated"),
        pytest.param(Yarn(**S8), 5e5, 128, (19, 34), [18, 35], id="5e5-truncated"),
        pytest.param(
            Yarn(truncate=False, **S8), 1e4, 128, (26, 49), [25.7609615513, 49.8433612044], id="1e4"
        ),
        pytest.param(
            Yarn(truncate=False, **S8), 5e5, 128, (19, 34), [18.0811350343, 34.9841190015], id="5e5"
        ),
    ],
)
def test_yarns_ramp_begins_and_ends_where_it_is_published(
    law: Yarn, base: float, head_dim: int, inside: tuple[int, int], ends: list[float]
) -> None:
    """To the digits printed (half a unit of the last of gpt-oss's eight)."""
    np.testing.assert_allclose(ramp_ends(law, base, head_dim, inside), ends, rtol=0, atol=5e-7)


@pytest.mark.parametrize(("base", "pair", "percent"), [(1e4, 40, 55.1), (5e5, 28, 55.7)])
def test_yarns_paper_and_code_differ_by_more_than_half(
    base: float, pair: int, percent: float
) -> None:
    """The paper's ramp is linear in turns, the checkpoints' in the index of the pair."""
    code, paper = scaled(Yarn(**S8), base), scaled(YarnPaper(**S8), base)
    apart = [float(abs(p - c) / c) for p, c in zip(paper, code, strict=True)]
    assert int(np.argmax(apart)) == pair
    assert round(100 * max(apart), 1) == percent


def test_llama_3_keeps_41_pairs_and_divides_14() -> None:
    """At base 10000 pairs 0..40 are untouched, 50..63 are divided by 8."""
    law = Llama3(**S8, low_freq_factor=1.0, high_freq_factor=4.0)
    ratios = [got / plain for got, plain in zip(scaled(law), scaled(None), strict=True)]
    assert [k for k, ratio in enumerate(ratios) if ratio == 1] == list(range(41))
    assert [k for k, ratio in enumerate(ratios) if ratio == Decimal("0.125")] == list(range(50, 64))


def test_llama_3_with_equal_ends_is_a_step() -> None:
    """Llama 4 Scout: a pair is kept if and only if its wavelength is at most 8192."""
    law = Llama3(factor=16.0, original_max_positions=8192, low_freq_factor=1, high_freq_factor=1)
    rope = Rope(head_dim=128, pairing="half", base=5e5)
    kept = wavelengths(rope) <= 8192
    expected = rope.inv_freq / np.where(kept, 1, 16)
    assert 0 < kept.sum() < 64
    np.testing.assert_array_equal([float(f) for f in scaled(law, 5e5)], expected)


def test_hard_cope_stops_what_soft_cope_fades() -> None:
    """The first of the faded pairs keeps its frequency when soft; the last stops either way."""
    soft, hard, plain = scaled(Cope(num_pairs=20)), scaled(Cope(clip="hard")), scaled(None)
    assert hard == plain[:44] + (0,) * 20
    assert soft[:45] == plain[:45]
    assert soft[-1] == 0
    assert all(0 < s < p for s, p in zip(soft[45:63], plain[45:63], strict=True))


@pytest.mark.parametrize(
    ("context", "kept"),
    [(1, [True] * 4), (149, [True, False, False, False]), (2**20, [False] * 4)],
    ids=["ends-before-it-begins", "ends-beyond-the-last-pair", "begins-after-it-ends"],
)
def test_yarns_clamps_are_those_of_the_checkpoints(context: int, kept: list[bool]) -> None:
    """A ramp may end at d - 1, not d/2 - 1; ends that cross decide for all pairs alike."""
    law = Yarn(factor=2.0, original_max_positions=context)
    rope = Rope(head_dim=8, pairing="half", base=10.0, scaling=law)
    expected = [float(f) for f in oracle.frequencies(rope)]
    np.testing.assert_array_equal(rope.inv_freq, expected)
    plain = 10.0 ** (-np.arange(4) / 4)
    assert (np.abs(rope.inv_freq / plain - 1) < 1e-12).tolist() == kept


@pytest.mark.parametrize(
    ("factor", "length", "grown"),
    [(8.0, 1, 1.0), (8.0, 8192, 1.0), (8.0, 16384, 9.0), (8.0, 65536, 57.0), (1.0, 16384, 2.0)],
)
def test_dynamic_ntk_grows_with_the_sequence(factor: float, length: int, grown: float) -> None:
    """Factor * l / L - (factor - 1), and 1 within the original context."""
    rule = DynamicNTK(factor=factor, original_max_positions=8192)
    assert rule.at(length) == NTK(factor=grown)


def refusals() -> list[Any]:
    """Every law's arguments out of bounds, and the message."""
    above = "must be a finite number > 0, got"
    least = "original_max_positions must be a whole number >="
    ext = {"factor": 2.0, "original_max_positions": 64}
    long: dict[str, Any] = {**ext, "short_factors": (1.0,), "long_factors": (2.0,)}
    table: list[tuple[Any, dict[str, Any], str]] = [
        (law, {"factor": 0.0}, f"factor {above} 0.0")
        for law in (Linear, NTK, NTKOld, NTKFixed, NTKMixed)
    ]
    for law in (Yarn, YarnPaper, Llama3, PartNTK):
        table.append((law, {**ext, "factor": math.nan}, f"factor {above} nan"))
        table.append((law, {**ext, "original_max_positions": 0}, f"{least} 1, got 0"))
    for law in (Yarn, YarnPaper):
        crossed = "beta_fast must be at least beta_slow (1), got 0.5"
        table.append((law, {**ext, "beta_fast": 0.5}, crossed))
        table.append((law, {**ext, "beta_slow": 0}, f"beta_slow {above} 0"))
        message = "mscale must be a finite number >= 0 and <= 1e+09, got -1"
        table.append((law, {**ext, "mscale": -1}, message))
        table.append((law, {**ext, "attention_factor": 0}, f"attention_factor {above} 0"))
    crossed = "high_freq_factor must be at least low_freq_factor (1), got 0.5"
    few = "long_factors must be as many as short_factors (1), got 2"
    table += [
        (Yarn, {**ext, "truncate": 1}, "truncate must be one of True, False, got 1"),
        (Llama3, {**ext, "high_freq_factor": 0.5}, crossed),
        (Llama3, {**ext, "low_freq_factor": -1}, f"low_freq_factor {above} -1"),
        (
            Proportional,
            {"fraction": 1.5},
            "fraction must be a finite number >= 0 and <= 1, got 1.5",
        ),
        (Proportional, {"fraction": 1, "factor": 0}, f"factor {above} 0"),
        (Hope, {"original_max_positions": 1.5}, f"{least} 1, got 1.5"),
        (Cope, {"num_pairs": 1}, "num_pairs must be a whole number >= 2, got 1"),
        (Cope, {"clip": "firm"}, "clip must be one of 'soft', 'hard', got 'firm'"),
        (NTKMixed, {"factor": 2, "exponent": -1}, "exponent must be a finite number >= 0, got -1"),
        (PerPair, {"factors": ()}, "factors must hold at least one number, got none"),
        (PerPair, {"factors": (1, 0)}, f"factors[1] {above} 0"),
        (PerPair, {"factors": (1,), "attention_factor": 0}, f"attention_factor {above} 0"),
        (DynamicNTK, {**ext, "factor": 0.5}, "factor must be a finite number >= 1, got 0.5"),
        (LongRope, {**long, "long_factors": (1, 2)}, few),
        (LongRope, {**long, "short_factors": (0,)}, f"short_factors[0] {above} 0"),
        (LongRope, {**long, "long_attention_factor": 0}, f"long_attention_factor {above} 0"),
        (LongRope, {**long, "original_max_positions": 1}, f"{least} 2, got 1"),
    ]
    return [pytest.param(*row, id=f"{row[0].__name__}-{row[2].split()[0]}") for row in table]


@pytest.mark.parametrize(("law", "arguments", "text"), refusals())
def test_arguments_out_of_bounds_are_refused(law: Any, arguments: Any, text: str) -> None:
    """At construction, with the name, the bounds and the value."""
    with pytest.raises(SpecError) as caught:
        law(**arguments)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("law", "text"),
    [
        (NTK(factor=2.0), "NTK scaling needs at least two pairs (rotary_dim >= 4), got one"),
        (Cope(num_pairs=2), "num_pairs must be at most the number of pairs (1), got 2"),
        (PerPair(factors=(1, 2)), "factors must hold one number per pair (1), got 2"),
        (
            YarnPaper(**S8, beta_fast=1.0, beta_slow=1.0),
            "beta_fast must be above beta_slow for a ramp in turns, both are 1",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_law_that_does_not_fit_the_spectrum_says_so(law: Law, text: str) -> None:
    """When the frequencies are asked for, since only then the width is known."""
    with pytest.raises(SpecError) as caught:
        scaled(law, head_dim=2)
    assert str(caught.value) == text


@pytest.mark.parametrize("rule", [DynamicNTK(**S8)])
@pytest.mark.parametrize("length", [0, -5, 1.5, None], ids=repr)
def test_a_rule_wants_a_length(rule: Rule, length: Any) -> None:
    """Zero tokens pick no law."""
    with pytest.raises(SpecError, match=r"^seq_len must be a whole number >= 1, got "):
        rule.at(length)


RULES: dict[str, Rule] = {
    "dynamic": DynamicNTK(factor=4.0, original_max_positions=64),
    "longrope": LongRope(
        short_factors=(1, 1, 1, 2), long_factors=(1, 2, 3, 4), original_max_positions=64, factor=16
    ),
    "stated": LongRope(
        short_factors=(1, 1, 1, 2), long_factors=(1, 2, 3, 4), original_max_positions=64,
        factor=16, long_attention_factor=1.5,
    ),
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_rule_says_of_arrays_of_lengths_what_it_says_of_each(rule: Rule) -> None:
    """To a few roundings of float64: the power, the product, and the factor that grows."""
    lengths = [1, 3, 64, 65, 100, 1000, 10**7]
    plain = np.array([10_000.0 ** (-k / 4) for k in range(4)])
    found = rule.at_lengths(np.array(lengths, dtype=float), plain, np)
    assert found is not None
    scaled, gains = found
    for length, row, gain in zip(lengths, scaled, np.broadcast_to(gains, 7), strict=True):
        law = Rope(head_dim=8, pairing="half", scaling=rule.at(length))
        assert row == pytest.approx(law.inv_freq, rel=8 * 2**-52)
        assert gain == law.attention_factor


def test_a_rule_of_other_laws_does_not_inherit_the_arithmetic_of_its_parents() -> None:
    """Unless it says how its own laws act on lengths."""

    class Late(DynamicNTK):
        def at(self, seq_len: int) -> NTK:
            return super().at(max(1, seq_len - 10))

    class Later(Late):
        pass

    plain = np.array([1.0, 0.1])
    for kind in (Late, Later):
        assert kind(factor=2.0, original_max_positions=4).at_lengths(np.ones(2), plain, np) is None
    assert DynamicNTK(factor=2.0, original_max_positions=4).at_lengths(np.ones(2), plain, np)


def test_a_length_beyond_floats_is_refused_by_name() -> None:
    """A factor that no float holds is about the length, in few words."""
    with pytest.raises(SpecError, match=r"^seq_len must leave a factor that fits in a float, got "):
        DynamicNTK(**S8).at(10**400)


def test_the_registry_names_every_law_once() -> None:
    """A law that is not in it has no JSON form."""
    assert len(set(LAWS.values())) == len(LAWS)
    assert {kind.__name__ for kind in LAWS.values() if issubclass(kind, Law)} == set(oracle.LAWS)


def test_laws_that_scale_alike_have_the_same_frequencies() -> None:
    """They may differ in each field of their temperature, and in no other."""
    law = Yarn(**S8)
    rope = Rope(head_dim=64, pairing="half", scaling=law)
    changes: list[dict[str, Any]] = [{"beta_slow": 2.0}, {"factor": 4.0}, {"truncate": False}]
    for temperature in ("attention_factor", "mscale", "mscale_all_dim"):
        other = replace(law, **{temperature: 1.5})
        assert scale_alike(law, other)
        assert (replace(rope, scaling=other).inv_freq == rope.inv_freq).all()
        assert not any(scale_alike(law, replace(other, **change)) for change in changes)
    assert scale_alike(None, None)
    assert not scale_alike(law, None)
    assert not scale_alike(law, YarnPaper(**S8))


@pytest.mark.parametrize("length", [1, 2048, 2049, 4096, 4097, 8192, 8193, 100_000])
def test_stepped_ntk_is_the_first_qwens_alpha(length: int) -> None:
    """2 ** ceil(log2(n / L) + 1) - 1, at least 1, as its code computes it in floats."""
    alpha = max(2 ** math.ceil(math.log(length / 2048, 2) + 1) - 1, 1)
    assert SteppedNTK(original_max_positions=2048).at(length) == NTK(factor=float(alpha))
