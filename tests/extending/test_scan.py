"""Sums over pairs at distances in a row, against 90-digit angles added one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasor import LayerRopes, PositionError, Rope, SpecError, angles
from phasor.extending import plan_extension
from phasor.extending.cosines import cosine_sums
from phasor.numpy import phasors
from phasor.papers import cosine, decay, feasible_bases
from phasor.papers.heads import required_alpha
from phasor.scaling import DynamicNTK

from .. import oracle, strategies


def summed(rope: Rope, distance: int) -> float:
    """``sum_k cos(r inv_freq_k)`` with every digit."""
    at = distance if rope.axes.n_axes == 1 else [distance] * rope.axes.n_axes
    cos, _ = oracle.cos_sin(rope, at)
    with mpmath.workdps(oracle.DIGITS):
        return float(mpmath.fsum(cos))


def allowed(rope: Rope) -> float:
    """The bound of the docstring, and one rounding of the oracle's answer."""
    return (4e-15 + rope.num_pairs * 4 * 2**-53 + 2**-52) * rope.num_pairs


@given(strategies.resolved_ropes(), st.integers(-(2**62), 2**62))
def test_any_rope_is_summed_as_the_oracle_sums(rope: Rope, start: int) -> None:
    """Every layout, law and direction, wherever the scan starts."""
    for r, value in enumerate(cosine_sums(rope, 3, start)):
        assert abs(value - summed(rope, start + r)) <= allowed(rope)


@pytest.mark.parametrize("start", [0, -70_000, 2**40])
@pytest.mark.parametrize("count", [1, 1023, 1024, 1025, 70_000])
def test_blocks_join_without_a_seam(count: int, start: int) -> None:
    """The ends of the scan and both sides of every kind of seam."""
    rope = Rope(head_dim=128, pairing="half", base=500_000.0)
    found = cosine_sums(rope, count, start)
    assert found.shape == (count,)
    for r in {0, 1, 1023, 1024, 1025, 65_535, 65_536, count - 1} & set(range(count)):
        assert abs(found[r] - summed(rope, start + r)) <= allowed(rope)


HEAD = Rope(head_dim=8, pairing="half")
FAR = 1 << 20
SLOW = LayerRopes(
    name="slow",
    layer_kinds=("rope",),
    kinds={"rope": Rope(head_dim=8, pairing="half", base=1e9)},
    context=FAR // 8,
)
SCANS: dict[str, Callable[[], object]] = {
    "decay": lambda: decay(HEAD, np.arange(FAR)),
    "cosine": lambda: cosine(HEAD, np.arange(FAR), "aligned"),
    "feasible base": lambda: feasible_bases(replace(HEAD, rotary_dim=4), FAR, [1e12]),
    "six laws' change of sign": lambda: plan_extension(SLOW, FAR // 6),
    "required alpha": lambda: required_alpha(HEAD, FAR, 0.9),
}


@pytest.mark.parametrize("scan", SCANS.values(), ids=SCANS)
@pytest.mark.slow
def test_a_million_distances_are_products_of_few_cosines(
    scan: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Starts of blocks, and the rests within one: a fiftieth of the distances at most."""
    asked: list[int] = []

    def counted(positions: Any, rope: Rope) -> Any:
        asked.append(np.size(positions))
        return angles.cos_sin(positions, rope)

    for module in ("numpy", "papers.distances", "papers.heads"):
        monkeypatch.setattr(f"phasor.{module}.cos_sin", counted, raising=False)
    scan()
    assert 0 < sum(asked) <= FAR / 50


def test_phasors_are_the_terms_of_the_sum() -> None:
    """At distances that are not in a row, clockwise where the rope is."""
    rope = Rope(head_dim=4, pairing="half", base=100.0, direction=-1)
    expected = [[np.exp(-1j * r), np.exp(-0.1j * r)] for r in (5, -2)]
    np.testing.assert_allclose(phasors(rope, np.array([5, -2])), expected, rtol=0, atol=1e-15)


def test_no_distance_is_no_sum() -> None:
    """An empty scan is empty."""
    assert cosine_sums(Rope(head_dim=4, pairing="half"), 0).shape == (0,)


def test_a_distance_beyond_int64_is_refused() -> None:
    """As positions are."""
    with pytest.raises(PositionError, match="positions must"):
        cosine_sums(Rope(head_dim=4, pairing="half"), 2048, start=2**63 - 1024)


def test_a_rule_has_to_pick_its_law_first() -> None:
    """The frequencies are not known before."""
    rule = DynamicNTK(factor=2.0, original_max_positions=64)
    with pytest.raises(SpecError, match=r"use rope\.at"):
        cosine_sums(Rope(head_dim=8, pairing="half", scaling=rule), 4)
