"""The laws that reach a longer context compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from phasor import Rope, SpecError
from phasor.extending import ExtensionOption, plan_extension
from phasor.scaling import NTK, Law, Linear, Llama3, PerPair, Proportional, Resonance, Yarn

from .. import oracle
from ..ropes import LLAMA_2

LLAMA_3 = Rope(head_dim=128, pairing="half", base=500_000.0)


def extensions(rope: Rope, context: int, to: int, **options: Any) -> Mapping[str, ExtensionOption]:
    """By name the laws for one rope."""
    return plan_extension(rope, to, context=context, **options).options


def first_negative(rope: Rope, to: int) -> int | None:
    """The first distance with a negative sum of float64 cosines, each angle by itself."""
    frequencies = np.array([float(f) for f in oracle.frequencies(rope)])
    total = np.zeros(to)
    for f in frequencies:
        total += np.cos(np.arange(to) * f)
    below = np.flatnonzero(total < 0)
    return int(below[0]) if len(below) else None


@pytest.mark.parametrize(
    ("rope", "context", "to"),
    [
        pytest.param(LLAMA_2, 4096, 32768, id="Llama 2 by 8"),
        pytest.param(LLAMA_3, 8192, 131072, id="Llama 3 by 16", marks=pytest.mark.slow),
    ],
)
def test_each_law_turns_its_sign_where_a_plain_sum_does(rope, context, to):
    """Also where the distance lies beyond the first block that is looked at."""
    for way in extensions(rope, context, to).values():
        assert way.sign_change == first_negative(way.rope, to), way.name


def test_each_law_of_a_plain_rope_is_compared():
    """Their parameters are those that reach the wanted context."""
    ways = extensions(LLAMA_2, 4096, 32768, factors=[1.0 + 0.1 * k for k in range(64)])
    assert {name: way.rope.scaling for name, way in ways.items()} == {
        "unchanged": None,
        "linear": Linear(factor=8.0),
        "ntk": NTK(factor=8.0),
        "dynamic_ntk": NTK(factor=57.0),  # 8 * 8 - 7
        "yarn": Yarn(factor=8.0, original_max_positions=4096),
        "llama3": Llama3(factor=8.0, original_max_positions=4096),
        "longrope": PerPair(
            factors=tuple(1.0 + 0.1 * k for k in range(64)),
            attention_factor=1.118033988749895,  # published for s = 8, L = 4096
        ),
    }


def test_resolution_is_the_fastest_pair_s_share_of_its_angle():
    """Interpolation crowds neighbours, laws that keep the fastest pair do not."""
    ways = extensions(LLAMA_2, 4096, 32768, factors=[1.25] + [8.0] * 63)
    expected = {"unchanged": 1, "linear": 1 / 8, "ntk": 1, "yarn": 1, "longrope": 1 / 1.25}
    found = {name: ways[name].resolution for name in expected}
    assert found == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize(
    "rope",
    [
        Rope(head_dim=8, pairing="half", scaling=Proportional(fraction=0.0)),
        Rope(head_dim=8, pairing="half", base=None, explicit_inv_freq=(0.0,) * 4),
    ],
    ids=["p=0", "explicit"],
)
def test_a_rope_without_a_pair_that_turns_has_no_angle_to_lose(rope: Rope):
    """It keeps the whole of nothing, and meets no new phase."""
    ways = extensions(rope, 64, 128)
    assert {way.resolution for way in ways.values()} == {1.0}
    assert {way.pairs_with_new_phases for way in ways.values()} == {0}


def test_attention_factors_are_the_laws_own():
    """YaRN's and LongRoPE's published factors; 1 for the others."""
    ways = extensions(LLAMA_2, 4096, 32 * 4096, factors=[2.0] * 64)
    factors = {name: way.rope.attention_factor for name, way in ways.items()}
    assert factors.pop("yarn") == pytest.approx(1.34657359027997, rel=1e-14)
    assert factors.pop("longrope") == pytest.approx(1.19023807142381, rel=1e-14)
    assert set(factors.values()) == {1.0}


@pytest.mark.parametrize(("name", "turned"), [("unchanged", 32768), ("linear", 4096)])
def test_slowest_turns_are_those_of_the_slowest_pair(name, turned):
    """Over the wanted context, of a published wavelength of 54410.1 tokens, divided or not."""
    way = extensions(LLAMA_2, 4096, 32768)[name]
    assert way.slowest_turns == pytest.approx(turned / 54410.1, rel=1e-6)


@pytest.mark.parametrize(
    ("law", "expected"),
    [
        (
            Llama3(factor=8.0, original_max_positions=8192),
            Llama3(factor=32.0, original_max_positions=8192),
        ),
        (Linear(factor=2.0), Linear(factor=8.0)),
        (PerPair(factors=(2.0,) * 64), PerPair(factors=(8.0,) * 64)),
    ],
    ids=["llama3", "linear", "per_pair"],
)
def test_a_rope_with_a_law_is_stretched_by_the_same_law(law: Law, expected: Law):
    """Laws do not compose, so its factor grows."""
    rope = dataclasses.replace(LLAMA_3, scaling=law)
    ways = extensions(rope, 131072, 4 * 131072)
    unchanged, longer = ways.values()
    assert (unchanged.rope.scaling, longer.rope.scaling) == (law, expected)
    assert longer.pairs_with_new_phases == 0


@pytest.mark.parametrize(
    "rope",
    [
        Rope(head_dim=4, pairing="half", explicit_inv_freq=(1.0, 0.01)),
        Rope(head_dim=4, pairing="half", base=1e4, scaling=Resonance()),
    ],
    ids=["explicit", "law without a factor"],
)
def test_frequencies_that_no_law_can_stretch_are_divided(rope):
    """Which is interpolation."""
    way = extensions(rope, 64, 256)["linear"]
    expected = [float(f) / 4 for f in oracle.frequencies(rope)]
    np.testing.assert_allclose(way.rope.explicit_inv_freq, expected, rtol=1e-15)


def test_a_single_pair_has_no_ntk_law():
    """The laws that need two pairs are left out."""
    ways = extensions(Rope(head_dim=2, pairing="half"), 64, 128)
    assert list(ways) == ["unchanged", "linear", "yarn", "llama3"]


@pytest.mark.parametrize(
    ("rope", "lengths", "factors", "message"),
    [
        (LLAMA_2, (4096, 4096), None, "to must be above the context of 4096 tokens"),
        (LLAMA_2, (1, 4096), None, "context must be a whole number >= 2"),
        (LLAMA_2, (4096, 8192), [1.0], r"one number per pair \(64\), got 1"),
        (
            dataclasses.replace(LLAMA_2, scaling=Linear(factor=2.0)),
            (4096, 8192),
            [1.0] * 64,
            "factors divide unscaled frequencies",
        ),
    ],
    ids=["not longer", "one token", "too few factors", "factors over a law"],
)
def test_laws_that_do_not_fit_are_refused(rope, lengths, factors, message):
    """The error names what is wrong."""
    with pytest.raises(SpecError, match=message):
        extensions(rope, *lengths, factors=factors)


@pytest.mark.parametrize(
    ("law", "values", "expected"),
    [
        ("linear", {"factor": 4.0}, Linear(factor=4.0)),
        (
            "yarn",
            {"beta_fast": 16.0, "truncate": False},
            Yarn(factor=8.0, original_max_positions=4096, beta_fast=16.0, truncate=False),
        ),
        ("dynamic_ntk", {"factor": 2.0}, NTK(factor=15.0)),
    ],
)
def test_parameters_replace_those_of_one_law(law, values, expected):
    """At 8 times the length dynamic NTK of factor f is NTK of factor 8 f - (f - 1)."""
    ways = extensions(LLAMA_2, 4096, 32768, parameters={law: values})
    assert ways[law].rope.scaling == expected
    plain = extensions(LLAMA_2, 4096, 32768)
    assert all(ways[name].rope == plain[name].rope for name in plain if name != law)


@pytest.mark.parametrize(
    ("law", "values", "message"),
    [
        ("yarm", {"factor": 2.0}, "law must be one of unchanged, linear, .*, got 'yarm'"),
        ("longrope", {"factor": 2.0}, "longrope needs factors"),
        ("yarn", {"beta": 2.0}, "a parameter of yarn must be one of .*'beta_fast'"),
        ("yarn", {"beta_fast": -1.0}, "beta_fast"),
        ("unchanged", {"factor": 2.0}, "unchanged has no parameters"),
    ],
)
def test_parameters_that_do_not_fit_are_refused(law, values, message):
    """The error names the parameters that there are."""
    with pytest.raises(SpecError, match=message):
        extensions(LLAMA_2, 4096, 8192, parameters={law: values})
