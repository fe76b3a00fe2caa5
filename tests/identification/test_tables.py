"""Caches of ONNX files become the Rope they are of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from phasor import Rope
from phasor.errors import ConfigError, SpecError, TensorError
from phasor.identification import from_cache
from phasor.scaling import Cope, Linear, Llama3, NTKFixed, Proportional, Yarn

from ..oracle import frequencies

ROPES = {
    "plain": Rope(head_dim=64, pairing="half", base=500_000.0),
    "interleaved": Rope(head_dim=32, pairing="interleaved"),
    "clockwise": Rope(head_dim=64, pairing="half", direction=-1),
    "part": Rope(head_dim=96, rotary_dim=32, rotary_start=16, pairing="half", base=1e6),
    "linear": Rope(head_dim=64, pairing="half", scaling=Linear(factor=8.0)),
    "ntk": Rope(head_dim=64, pairing="half", scaling=NTKFixed(factor=2.0)),
    "llama 3": Rope(
        head_dim=128,
        pairing="half",
        base=500_000.0,
        scaling=Llama3(
            factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192
        ),
    ),
    "yarn": Rope(
        head_dim=128,
        pairing="half",
        base=1e6,
        scaling=Yarn(factor=4.0, original_max_positions=32768, attention_factor=1.0),
    ),
    "some stand still": Rope(
        head_dim=64, pairing="half", base=1e6, scaling=Proportional(fraction=0.25)
    ),
    "faded": Rope(head_dim=64, pairing="half", base=1e6, scaling=Cope(num_pairs=8)),
}


def tables(rope: Rope, length: int, dtype: Any = np.float32) -> tuple[np.ndarray, np.ndarray]:
    """Cos and sin by the papers' formulas: below 2**13, float64 angles are off by 2**-40."""
    steps = np.array([float(f) for f in frequencies(rope)])
    angles = rope.direction * np.arange(length)[:, None] * steps
    return np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)


def layout(rope: Rope) -> dict[str, Any]:
    """What tables do not say."""
    return {
        "pairing": rope.pairing,
        "head_dim": rope.head_dim,
        "rotary_start": rope.rotary_start,
    }


@pytest.mark.parametrize("name", ROPES)
def test_a_cache_becomes_the_rope_it_is_of(name: str) -> None:
    """Base, law and direction; the error is the table's rounding."""
    rope = ROPES[name]
    found, report = from_cache(*tables(rope, 4096), **layout(rope))
    assert found == rope
    assert report.rope == rope
    assert report.error is not None
    # two entries are rounded, by half a unit of 2**-24 each
    assert 0 < report.error <= 2**0.5 * 2**-25 + 2**-38
    assert report.table_end == 4096


@pytest.mark.parametrize(
    "double",
    [
        pytest.param(lambda table: np.concatenate((table, table), axis=1), id="all, then again"),
        pytest.param(lambda table: np.repeat(table, 2, axis=1), id="each twice in a row"),
    ],
)
def test_a_cache_that_says_everything_twice_is_half_as_wide(double: Any) -> None:
    """As models keep it."""
    rope = ROPES["llama 3"]
    cos, sin = (double(table) for table in tables(rope, 512))
    assert from_cache(cos, sin, pairing="half")[0] == rope


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_a_cache_of_any_dtype_is_read(dtype: Any) -> None:
    """The base is found through 11 bits as through 53, and the error says how many there were."""
    rope = ROPES["plain"]
    found, report = from_cache(*tables(rope, 2048, dtype), pairing="half")
    assert found == rope
    assert report.error is not None
    assert report.error <= 2**0.5 * np.finfo(dtype).eps / 4 + 2**-40


def test_a_coarse_cache_in_a_fine_dtype_is_told() -> None:
    """float16 numbers kept as float32."""
    cos, sin = (np.float32(table) for table in tables(ROPES["plain"], 2048, np.float16))
    found, report = from_cache(cos, sin, pairing="half")
    assert found == ROPES["plain"]
    assert "table-in-float16" in report.names()


def test_an_attention_factor_in_a_cache_is_told() -> None:
    """YaRN's tables, multiplied as models multiply them: 0.1 ln(factor) + 1."""
    factor = 0.1 * np.log(4) + 1
    cos, sin = (factor * table for table in tables(ROPES["yarn"], 4096, np.float64))
    found, report = from_cache(np.float32(cos), np.float32(sin), pairing="half")
    assert found.attention_factor == pytest.approx(factor, abs=1e-6)
    assert report.attention_factor == pytest.approx(factor, abs=1e-6)
    assert report.error is not None
    assert report.error <= 1e-6


@pytest.mark.slow
def test_angles_in_float32_are_an_error_that_grows_and_their_frequencies_are_told() -> None:
    """What models keep: frequencies and angles rounded to float32; many rows show the former."""
    steps = (500_000.0 ** (-np.arange(0, 64, 2) / 64)).astype(np.float32)
    angles = np.arange(1 << 17, dtype=np.float32)[:, None] * steps
    found, report = from_cache(np.cos(angles), np.sin(angles), pairing="half")
    assert found == replace(ROPES["plain"], inv_freq_dtype="float32")
    errors = [error for _, error in report.precision]
    assert errors == sorted(errors)
    # at 2**17 an angle is off by half a unit of 2**-7 at most, and a rounded frequency's share
    assert 2**-12 < errors[-1] <= 2**-8 + 2**17 * 2**-24
    assert report.error is not None
    assert report.error >= errors[-1]


def test_frequencies_of_no_law_become_a_rope_that_lists_them() -> None:
    """Random ones, to the precision that 4096 rows give."""
    steps = np.sort(np.random.default_rng(0).uniform(1e-3, 2, 16))[::-1]
    angles = np.arange(4096)[:, None] * steps
    found, report = from_cache(np.cos(angles), np.sin(angles), pairing="interleaved")
    assert not report.known_law
    assert found.explicit_inv_freq is not None
    np.testing.assert_allclose(found.explicit_inv_freq, steps, rtol=0, atol=2**-50)
    assert report.error is not None
    assert report.error <= 4096 * 2**-50


def test_a_cache_that_begins_later_says_where() -> None:
    """Row 0 is position 7."""
    cos, sin = (table[7:] for table in tables(ROPES["plain"], 2048))
    found, report = from_cache(cos, sin, pairing="half")
    assert (found, report.position_offset) == (ROPES["plain"], 7)


def spoilt(kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Tables that no Rope has."""
    cos, sin = tables(ROPES["plain"], 2048)
    if kind == "switch":
        slower = tables(ROPES["linear"], 2048)
        cos[1500:], sin[1500:] = slower[0][1500:], slower[1][1500:]
    elif kind == "row":
        cos[1000], sin[1000] = cos[999], sin[999]
    elif kind == "entry":
        cos[1000, 3] += 1e-3
    elif kind == "nan":
        sin[5, 5] = np.nan
    elif kind == "random":
        cos, sin = np.random.default_rng(0).random((2, 50, 4))
    elif kind == "sizes":
        cos[:, 3] *= 2
        sin[:, 3] *= 2
    return cos, sin


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("switch", "row 15"),
        ("row", "row 1000 is"),
        ("entry", "does not keep the length"),
        ("sizes", "does not keep the length"),
        ("random", "must turn at fixed frequencies"),
        ("nan", "must be finite"),
    ],
)
def test_a_cache_of_no_rope_is_refused_with_the_reason(kind: str, text: str) -> None:
    """One wrong row among thousands is found."""
    with pytest.raises(ConfigError) as caught:
        from_cache(*spoilt(kind), pairing="half")
    assert text in str(caught.value)


def test_tables_that_are_none_are_refused() -> None:
    """Shapes, dtypes, and a layout that does not fit."""
    cos, sin = tables(ROPES["plain"], 16)
    for given in ((cos[0], sin[0]), (cos[:1], sin[:1]), (cos, sin[:8])):
        with pytest.raises(TensorError, match="two rows or more"):
            from_cache(*given, pairing="half")
    with pytest.raises(TensorError, match="got int64"):
        from_cache(cos.astype(np.int64), sin.astype(np.int64), pairing="half")
    with pytest.raises(SpecError, match="head_dim"):
        from_cache(cos, sin, pairing="half", head_dim=32)
