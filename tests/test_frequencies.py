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
    NTKOld,
    Proportional,
    Resonance,
    Yarn,
    YarnPaper,
)

from . import oracle, strategies

EXTENDED: dict[str, Any] = {"factor": 8.0, "original_max_positions": 8192}


BY_LENGTH = DynamicNTK(factor=1.0, original_max_positions=8192)
EIGHTFOLD = DynamicNTK(**EXTENDED)

# head_dim 128, original context 8192, factor 8; pairs 0, 1, 16, 32, 48, 63
COLUMNS = (0, 1, 16, 32, 48, 63)
SCALINGS: dict[str, Any] = {
    "default": None,
    "linear": Linear(factor=8.0),
    "ntk": NTK(factor=8.0),
    "su-old": NTKOld(factor=8.0),
    "su-fixed": NTKFixed(factor=8.0),
    "su-mixed": NTKMixed(factor=8.0, exponent=0.625),
    "dynamic-1-at-16384": BY_LENGTH.at(16384),
    "dynamic-8-at-16384": EIGHTFOLD.at(16384),
    "dynamic-8-at-65536": EIGHTFOLD.at(65536),
    "yarn": Yarn(**EXTENDED),
    "yarn-untruncated": Yarn(truncate=False, **EXTENDED),
    "yarn-paper": YarnPaper(**EXTENDED),
    "llama3": Llama3(**EXTENDED),
    "cope": Cope(num_pairs=20),
    "p-rope-0.75": Proportional(fraction=0.75),
    "proportional-0.25": Proportional(fraction=0.25),
    "hope": Hope(original_max_positions=8192),
    "resonance": Resonance(),
}
PRINTED = {
    10_000.0: """
        default            1           8.659643234e-1 1.0e-1 1.0e-2 1.0e-3 1.154781985e-4
        linear             1.25e-1 1.082455404e-1 1.25e-2 1.25e-3 1.25e-4 1.443477481e-5
        ntk      1 8.378480019e-1 5.897172244e-2 3.477664048e-3 2.050838390e-4 1.443477481e-5
        su-old   1 8.382802205e-1 5.946035575e-2 3.535533906e-3 2.102241038e-4 1.491148150e-5
        su-fixed 9.680308967e-1 8.114811536e-1 5.755946150e-2 3.422506057e-3 2.035034277e-4
            1.443477481e-5
        su-mixed 8.567960095e-1 6.823117556e-1 4.033056577e-2 2.529574805e-3 1.720838304e-4
            1.443477481e-5
        dynamic-1-at-16384 1 8.564889141e-1 8.385866371e-2 7.032275479e-3 5.897172244e-4
            5.773909923e-5
        dynamic-8-at-16384 1 8.362830481e-1 5.723381508e-2 3.275709589e-3 1.874813569e-4
            1.283091094e-5
        dynamic-8-at-65536 1 8.121363897e-1 3.581488234e-2 1.282705797e-3 4.593995719e-5
            2.025933306e-6
        yarn       1 8.659643234e-1 1.0e-1 7.550000000e-3 1.950000000e-4 1.443477481e-5
        yarn-untruncated 1 8.659643234e-1 1.0e-1 7.733133441e-3 1.919759275e-4 1.443477481e-5
        yarn-paper 1 8.659643234e-1 1.0e-1 4.647814942e-3 1.335749236e-4 1.443477481e-5
        llama3     1 8.659643234e-1 1.0e-1 1.0e-2 2.136075440e-4 1.443477481e-5
        cope       1 8.659643234e-1 1.0e-1 1.0e-2 8.945702547e-4 0
        p-rope-0.75       1 8.659643234e-1 1.0e-1 1.0e-2 0 0
        proportional-0.25 1 8.659643234e-1 0 0 0 0
        hope              1 8.659643234e-1 1.0e-1 1.0e-2 1.0e-3 0
        resonance 1.047197551 8.975979010e-1 9.973310011e-2 1.000507215e-2 1.000029493e-3
            1.154785022e-4
    """,
    500_000.0: """
        default  1 8.146172339e-1 3.760603093e-2 1.414213562e-3 5.318295897e-5 2.455140791e-6
        linear   1.25e-1 1.018271542e-1 4.700753866e-3 1.767766953e-4 6.647869871e-6 3.068925989e-7
        ntk      1 7.881680611e-1 2.217692418e-2 4.918159662e-4 1.090696539e-5 3.068925989e-7
        su-old   1 7.885746514e-1 2.236067977e-2 5.0e-4 1.118033989e-5 3.170276898e-7
        su-fixed 9.680308967e-1 7.633646269e-1 2.164582889e-2 4.840154484e-4 1.082291445e-5
            3.068925989e-7
        su-mixed 8.567960095e-1 6.418542889e-1 1.516672504e-2 3.577358996e-4 9.151927293e-6
            3.068925989e-7
        dynamic-1-at-16384 1 8.057036661e-1 3.153591501e-2 9.945139356e-4 3.136290695e-5
            1.227570396e-6
        dynamic-8-at-16384 1 7.866959007e-1 2.152336620e-2 4.632552927e-4 9.970813311e-6
            2.727934212e-7
        dynamic-8-at-65536 1 7.639810111e-1 1.346855573e-2 1.814019934e-4 2.443222858e-6
            4.307264546e-8
        yarn       1 8.146172339e-1 3.760603093e-2 3.951479071e-4 6.647869871e-6 3.068925989e-7
        yarn-untruncated 1 8.146172339e-1 3.760603093e-2 3.952386471e-4 6.647869871e-6
            3.068925989e-7
        yarn-paper 1 8.146172339e-1 3.760603093e-2 2.104608371e-4 6.647869871e-6 3.068925989e-7
        llama3     1 8.146172339e-1 3.760603093e-2 5.248461610e-4 6.647869871e-6 3.068925989e-7
        cope       1 8.146172339e-1 3.760603093e-2 1.414213562e-3 4.757589315e-5 0
        p-rope-0.75 1 8.146172339e-1 3.760603093e-2 1.414213562e-3 0 0
        hope        1 8.146172339e-1 3.760603093e-2 1.414213562e-3 0 0
        resonance 1.047197551 7.853981634e-1 3.762386411e-2 1.414176301e-3 5.318288267e-5
            2.455140328e-6
    """,
}


def printed_rows() -> list[Any]:
    """One case for every row of the tables."""
    cases = []
    for base, text in PRINTED.items():
        words = iter(text.split())
        for name in words:
            digits = [next(words) for _ in COLUMNS]
            cases.append(pytest.param(base, SCALINGS[name], digits, id=f"{base:g}-{name}"))
    return cases


@pytest.mark.parametrize(("base", "scaling", "digits"), printed_rows())
def test_every_printed_digit_of_the_tables_is_right(
    base: float, scaling: Any, digits: list[str]
) -> None:
    """Ten significant digits, correctly rounded."""
    real = real_inv_freq(Rope(head_dim=128, pairing="half", base=base, scaling=scaling))
    assert [Decimal(f"{real[k]:.9e}") for k in COLUMNS] == [Decimal(text) for text in digits]


@pytest.mark.parametrize(
    ("base", "second"), [(10_000.0, "5.623413252e-1"), (500_000.0, "4.403666027e-1")]
)
def test_a_partial_rotation_has_the_spectrum_of_its_own_width(base: float, second: str) -> None:
    """Exponents run over the 32 rotated coordinates, not over the head's 128."""
    real = real_inv_freq(Rope(head_dim=128, pairing="half", base=base, rotary_dim=32))
    assert len(real) == 16
    assert [f"{f:.9e}" for f in real[:2]] == ["1.000000000e+0", second]


GOLDEN_SCALINGS = {
    "default": "default",
    "linear": "linear",
    "ntk_aware": "ntk",
    "ntk_fixed": "su-fixed",
    "ntk_mixed_0.625": "su-mixed",
    "yarn_code_truncate": "yarn",
    "yarn_code_notruncate": "yarn-untruncated",
    "yarn_paper": "yarn-paper",
    "llama3_8_1_4_8192": "llama3",
    "prope_0.75": "p-rope-0.75",
    "proportional_0.25": "proportional-0.25",
    "cope_20": "cope",
    "hope_L8192": "hope",
    "resonance": "resonance",
}


@pytest.mark.parametrize("base", [10_000, 500_000])
@pytest.mark.parametrize(("row", "name"), GOLDEN_SCALINGS.items(), ids=GOLDEN_SCALINGS)
def test_all_twenty_golden_digits_of_all_pairs_are_right(base: int, row: str, name: str) -> None:
    """The stored values of all 64 pairs, correctly rounded at their 20th digit."""
    table = oracle.GOLDEN[f"inv_freq d=128 L=8192 s=8 base={base}"]
    rope = Rope(head_dim=128, pairing="half", base=base, scaling=SCALINGS[name])
    got = [Decimal(f"{f:.19e}") for f in real_inv_freq(rope)]
    assert got == [Decimal(text) for text in table[row]]


@pytest.mark.parametrize("base", [10_000, 500_000])
def test_every_golden_row_is_checked(base: int) -> None:
    """No stored law is left out."""
    assert set(oracle.GOLDEN[f"inv_freq d=128 L=8192 s=8 base={base}"]) == set(GOLDEN_SCALINGS)


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


def test_explicit_frequencies_are_taken_as_they_are() -> None:
    """The floats are exact, and no base or law touches them."""
    given_freq = (0.1, 0.0, 3.0)
    rope = Rope(head_dim=6, pairing="half", explicit_inv_freq=given_freq)
    assert real_inv_freq(rope) == tuple(Decimal(f) for f in given_freq)


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
        ask(Rope(head_dim=128, pairing="half", scaling=EIGHTFOLD))


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
