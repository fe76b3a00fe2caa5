"""Frequencies against published and 20-digit values, law by law."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import mpmath
import numpy as np
import pytest
from hypothesis import given

from phasor import Rope
from phasor.angles import turns, wavelengths
from phasor.errors import SpecError
from phasor.rope import real_inv_freq
from phasor.scaling import (
    NTK,
    Cope,
    DynamicNTK,
    Hope,
    Linear,
    Llama3,
    NTKFixed,
    NTKMixed,
    Proportional,
    Resonance,
    Yarn,
    YarnPaper,
)

from . import oracle, strategies

EXTENDED: dict[str, Any] = {"factor": 8.0, "original_max_positions": 8192}

# by the name of its golden row: head_dim 128, original context 8192, factor 8
GOLDEN: dict[str, Any] = {
    "default": None,
    "linear": Linear(factor=8.0),
    "ntk_aware": NTK(factor=8.0),
    "ntk_fixed": NTKFixed(factor=8.0),
    "ntk_mixed_0.625": NTKMixed(factor=8.0, exponent=0.625),
    "yarn_code_truncate": Yarn(**EXTENDED),
    "yarn_code_notruncate": Yarn(truncate=False, **EXTENDED),
    "yarn_paper": YarnPaper(**EXTENDED),
    "llama3_8_1_4_8192": Llama3(**EXTENDED),
    "prope_0.75": Proportional(fraction=0.75),
    "proportional_0.25": Proportional(fraction=0.25),
    "cope_20": Cope(num_pairs=20),
    "hope_L8192": Hope(original_max_positions=8192),
    "resonance": Resonance(),
}


@pytest.mark.parametrize("base", [10_000, 500_000])
@pytest.mark.parametrize("row", GOLDEN)
def test_all_twenty_golden_digits_of_all_pairs_are_right(base: int, row: str) -> None:
    """The stored values of all 64 pairs, correctly rounded at their 20th digit."""
    table = oracle.GOLDEN[f"inv_freq d=128 L=8192 s=8 base={base}"]
    rope = Rope(head_dim=128, pairing="half", base=base, scaling=GOLDEN[row])
    got = [Decimal(f"{f:.19e}") for f in real_inv_freq(rope)]
    assert got == [Decimal(text) for text in table[row]]


@pytest.mark.parametrize("base", [10_000, 500_000])
def test_every_golden_row_is_checked(base: int) -> None:
    """No stored law is left out."""
    assert set(oracle.GOLDEN[f"inv_freq d=128 L=8192 s=8 base={base}"]) == set(GOLDEN)


@given(strategies.resolved_ropes())
def test_frequencies_are_the_oracles_to_50_digits(rope: Rope) -> None:
    """Every law, layout and width, against formulas written apart from the package's."""
    with mpmath.workdps(70):
        for got, expected in zip(real_inv_freq(rope), oracle.frequencies(rope), strict=True):
            assert abs(mpmath.mpf(str(got)) - expected) <= mpmath.mpf(10) ** -50 * abs(expected)


@given(strategies.resolved_ropes())
def test_the_float64_frequencies_are_correctly_rounded(rope: Rope) -> None:
    """float() of an exact real rounds to nearest, so no ulp is lost."""
    assert rope.inv_freq.tolist() == [float(f) for f in oracle.frequencies(rope)]
    assert rope.inv_freq.dtype == np.float64


@pytest.mark.parametrize("base", [10_000.0, 500_000.0])
def test_float32_frequencies_are_the_exact_ones_rounded_once(base: float) -> None:
    """As exact rationals, so that the angles can be exact about them."""
    plain = Rope(head_dim=128, pairing="half", base=base)
    rounded = Rope(head_dim=128, pairing="half", base=base, inv_freq_dtype="float32")
    expected = [oracle.float32(f) for f in oracle.frequencies(plain)]
    assert [float(f) for f in real_inv_freq(rounded)] == expected
    assert rounded.inv_freq.tolist() == expected
    assert np.any(rounded.inv_freq != plain.inv_freq)


@pytest.mark.parametrize(
    ("head_dim", "base", "slowest", "per_token", "wavelength"),
    [
        pytest.param(64, 1e4, "1.333521e-04", "2.122365e-05", "47117.2", id="64-1e4"),
        pytest.param(128, 1e4, "1.154782e-04", "1.837893e-05", "54410.1", id="128-1e4"),
        pytest.param(256, 1e4, "1.074608e-04", "1.710291e-05", "58469.6", id="gemma"),
        pytest.param(128, 5e5, "2.455141e-06", "3.907478e-07", "2559195.5", id="llama3"),
        pytest.param(128, 1e6, "1.240938e-06", "1.975014e-07", "5063255.8", id="128-1e6"),
    ],
)
def test_the_slowest_pair_is_as_slow_as_published(
    head_dim: int, base: float, slowest: str, per_token: str, wavelength: str
) -> None:
    """Radians and turns per token, and tokens per turn (Round and Round, corrected)."""
    rope = Rope(head_dim=head_dim, pairing="half", base=base)
    assert f"{rope.inv_freq[-1]:.6e}" == slowest
    assert f"{turns(rope, 1)[-1]:.6e}" == per_token
    assert f"{wavelengths(rope)[-1]:.1f}" == wavelength


def test_turns_and_wavelengths_are_two_sides_of_one_number() -> None:
    """2.189 turns over 128 000 tokens at width 256; infinite wavelengths stand still."""
    assert f"{turns(Rope(head_dim=256, pairing='half'), 128_000)[-1]:.3f}" == "2.189"
    assert f"{turns(Rope(head_dim=128, pairing='half'), 131_072)[-1]:.3f}" == "2.409"
    stopped = Rope(head_dim=4, pairing="half", scaling=Proportional(fraction=0.5))
    assert wavelengths(stopped).tolist() == [2 * math.pi, math.inf]
    assert turns(stopped, 100).tolist() == [50 / math.pi, 0.0]


@pytest.mark.parametrize("context", [0, -1.0, math.inf, "8192", True], ids=repr)
def test_turns_want_a_positive_context(context: Any) -> None:
    """The text says which argument."""
    with pytest.raises(SpecError) as caught:
        turns(Rope(head_dim=4, pairing="half"), context)
    assert str(caught.value) == f"context must be a finite number > 0, got {context!r}"


@pytest.mark.parametrize(
    "ask", [lambda r: r.inv_freq, real_inv_freq, wavelengths, lambda r: turns(r, 10)]
)
def test_a_rule_has_no_frequencies_until_it_picks_its_law(ask: Any) -> None:
    """Nothing is chosen behind the caller's back."""
    with pytest.raises(SpecError, match=r"rule DynamicNTK, .* use rope\.at\(seq_len\)$"):
        ask(Rope(head_dim=128, pairing="half", scaling=DynamicNTK(**EXTENDED)))


@pytest.mark.parametrize(
    "rope",
    [
        Rope(head_dim=4, pairing="half", explicit_inv_freq=(1e70, 1.0)),
        Rope(head_dim=4, pairing="half", scaling=Linear(factor=1e-70)),
    ],
    ids=["given", "scaled"],
)
def test_frequencies_beyond_reason_are_refused(rope: Rope) -> None:
    """No digits would be left after the point for the fraction of a turn."""
    with pytest.raises(SpecError, match=r"frequencies must be at most 1e\+15 radians per position"):
        real_inv_freq(rope)
