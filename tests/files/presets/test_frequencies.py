"""Frequencies and factors of published models, against the survey and sums done apart."""

from __future__ import annotations

import math

import numpy as np
import pytest
from mpmath import mp, mpf

from phasor.files.presets import preset

# six decimals are printed in the survey, so half a unit of the last one
PRINTED = 5e-7


def plain(base: float, pairs: int) -> np.ndarray:
    """``base ** (-k / pairs)`` by mpmath, rounded once."""
    with mp.workdps(40):
        return np.array([float(mpf(base) ** (-mpf(k) / pairs)) for k in range(pairs)])


def close(ours: np.ndarray, theirs: np.ndarray) -> bool:
    """Whether two spectra agree to a few units in the last place of float64."""
    return bool(np.all(np.abs(ours - theirs) <= 4 * np.finfo(float).eps * np.abs(theirs)))


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        ("gpt-oss-20b", 1.346574),
        ("olmo-3-7b", 1.207944),
        ("phi-3.5-mini", 1.190238),
        ("phi-4-mini", 1.190238),
        ("deepseek-v2", 1.0),
        ("deepseek-v3", 1.0),
        ("deepseek-v4-flash", 1.0),
        ("kimi-k2", 1.0),
        ("ministral-3-8b", 1.0),
        ("mistral-small-4-119b", 1.0),
        ("llama-3.1-8b", 1.0),
    ],
)
def test_cos_and_sin_are_multiplied_by_the_published_factor(name: str, factor: float) -> None:
    """The factor on cos and sin of the last layer, past the original context."""
    rope = preset(name)[-1]
    assert rope is not None
    assert abs(rope.at(100_000).attention_factor - factor) < PRINTED


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        ("deepseek-v2", 1.589626),
        ("deepseek-v2-lite", 1.589626),
        ("deepseek-v3", 1.873854),
        ("deepseek-r1", 1.873854),
        ("deepseek-v3.2", 1.873854),
        ("kimi-k2", 1.813260),
        ("kimi-k2-0905", 2.004740),
        ("ministral-3-8b", 1.0),
        ("gpt-oss-120b", 1.0),
        ("deepseek-v4-flash", 1.0),
    ],
)
def test_the_softmax_scale_is_multiplied_by_the_published_factor(name: str, factor: float) -> None:
    """DeepSeek's mscale_all_dim, squared, and nothing for models that put it elsewhere."""
    assert abs(preset(name).softmax_factor - factor) < PRINTED


def test_gpt_oss_ramps_between_its_two_real_valued_indices() -> None:
    """Without truncation the ramp leads from pair 8.0927791 to pair 17.398025."""
    rope = preset("gpt-oss-20b")[0]
    assert rope is not None
    whole, low, high = plain(150_000.0, 32), 8.0927791, 17.398025
    kept = (rope.inv_freq / whole - 1 / 32) / (1 - 1 / 32)
    expected = np.array([1 - min(max((k - low) / (high - low), 0.0), 1.0) for k in range(32)])
    # the ends are printed to 8 digits and divided by a ramp nine pairs long
    np.testing.assert_allclose(kept, expected, atol=1e-7)


def test_kimi_steps_where_others_ramp() -> None:
    """Both ends of its ramp are one turn, pair 19.16 of 32, rounded outwards to 19 and 20."""
    (rope,) = preset("kimi-k2").ropes
    ratio = plain(50_000.0, 32) / rope.inv_freq
    assert close(ratio, np.where(np.arange(32) < 20, 1.0, 32.0))


@pytest.mark.parametrize(("name", "factor"), [("llama-3.1-8b", 8), ("llama-3.2-3b", 32)])
def test_llama_3_keeps_29_pairs_and_divides_29(name: str, factor: int) -> None:
    """Of 64 pairs, 0 to 28 are untouched and 35 to 63 are divided."""
    rope = preset(name)[0]
    assert rope is not None
    ratio = plain(500_000.0, 64) / rope.inv_freq
    assert close(ratio[:29], np.ones(29))
    assert close(ratio[35:], np.full(29, float(factor)))
    assert np.all((ratio[29:35] > 1) & (ratio[29:35] < factor))


def test_llama_4_scout_divides_in_one_step() -> None:
    """Both ends of its ramp are one turn in 8192 positions, so no pair lies between."""
    rope = preset("llama-4-scout")[0]
    assert rope is not None
    whole = plain(500_000.0, 64)
    expected = np.where(8192 * whole >= 2 * math.pi, whole, whole / 16)
    assert close(rope.inv_freq, expected)


@pytest.mark.parametrize(("name", "factor"), [("gemma-3-1b", 1), ("gemma-3-4b", 8)])
def test_gemma_3_has_a_base_for_each_kind_of_layer(name: str, factor: int) -> None:
    """Local layers turn by 10000, full ones by a million, interpolated in all but the smallest."""
    kinds = preset(name).kinds
    sliding, full = kinds["sliding"], kinds["full"]
    assert sliding is not None
    assert full is not None
    assert close(sliding.inv_freq, plain(1e4, 128))
    assert close(full.inv_freq, plain(1e6, 128) / factor)


def test_gemma_4_turns_a_quarter_of_its_widest_heads() -> None:
    """Full layers turn 64 of 256 pairs, with exponents over all 512 coordinates."""
    full = preset("gemma-4-31b").kinds["full"]
    assert full is not None
    turning = full.inv_freq
    assert turning.shape == (256,)
    assert close(turning[:64], plain(1e6, 256)[:64])
    assert not turning[64:].any()


def test_pixtral_s_image_axes_take_turns_on_one_spectrum() -> None:
    """Rows have the even members of the spectrum and columns the odd ones."""
    (rope,) = preset("pixtral-vision").ropes
    whole = plain(1e4, 32)
    assert close(rope.inv_freq, np.concatenate([whole[0::2], whole[1::2]]))


def test_hunyuan_s_alpha_is_the_base_that_its_next_model_states() -> None:
    """10000 raised by a constant alpha of 1000 is the 11158840 of HY-V3, to its digits."""
    (alpha,), (stated,) = preset("hunyuan-7b").ropes, preset("hy-v3").ropes
    # the stated base is rounded to a whole number, 4e-8 of it; frequencies move no more than that
    np.testing.assert_allclose(alpha.inv_freq, stated.inv_freq, rtol=1e-7)
