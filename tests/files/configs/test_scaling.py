"""Scaling laws in Hugging Face configs, against published numbers."""

from __future__ import annotations

import math

import pytest

from phasor.errors import PhasorWarning
from phasor.files.reading import load
from phasor.scaling import NTK, DynamicNTK, Linear, Yarn

from .config_files import CONFIGS, plain, small

# mathematics of the laws, computed elsewhere with mpmath: d = 128, base 500000, L = 8192, s = 8
PUBLISHED = {
    "linear": ({"type": "linear", "factor": 8.0}, 1.018271542e-1, 1.767766953e-4, 3.068925989e-7),
    "yarn": (
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192},
        8.146172339e-1,
        3.951479071e-4,
        3.068925989e-7,
    ),
    "yarn without rounding": (
        {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "truncate": False,
        },
        8.146172339e-1,
        3.952386471e-4,
        3.068925989e-7,
    ),
    "llama3": (
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        8.146172339e-1,
        5.248461610e-4,
        3.068925989e-7,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_scaled_frequencies_are_the_published_ones(name: str, key: str) -> None:
    """Both spellings of a rope block give the law's reference frequencies."""
    block, *expected = PUBLISHED[name]
    (rope,) = load(small(**{key: block})).ropes
    assert rope.inv_freq[[1, 32, 63]] == pytest.approx(expected, rel=1e-9)


def test_dynamic_scaling_is_a_rule_over_the_context() -> None:
    """Dynamic NTK takes max_position_embeddings as its original length."""
    with pytest.warns(PhasorWarning, match="the context, 8192, is used as"):
        (rope,) = load(small(rope_scaling={"type": "dynamic", "factor": 8.0})).ropes
    assert rope.scaling == DynamicNTK(factor=8.0, original_max_positions=8192)
    assert rope.at(16384).inv_freq[32] == pytest.approx(4.632552927e-4, rel=1e-9)


# factors on cos and sin, and on the softmax scale, as derived from the published formulas
TEMPERATURES = {
    "GPT-OSS": ("gpt_oss", {}, 1.346574, 1.0),
    "DeepSeek-V3": ("deepseek_v3", {}, 1.0, 1.873854),
    "DeepSeek-V2": ("deepseek_v3", {"mscale": 0.707, "mscale_all_dim": 0.707}, 1.0, 1.589626),
    "Kimi-K2": ("deepseek_v3", {"factor": 32, "beta_fast": 1}, 1.0, 1.813260),
    "Kimi-K2-0905": ("deepseek_v3", {"factor": 64, "beta_fast": 1}, 1.0, 2.004740),
}


@pytest.mark.parametrize("name", TEMPERATURES)
def test_temperature_of_published_models(name: str) -> None:
    """YaRN's temperature lies on cos and sin or on the softmax scale, as each model has it."""
    fixture, changes, attention, softmax = TEMPERATURES[name]
    config = plain(fixture)
    config["rope_scaling"] |= changes
    if changes:
        law = config["rope_scaling"]
        config["max_position_embeddings"] = law["factor"] * law["original_max_position_embeddings"]
    ropes = load(config)
    assert ropes.ropes[0].attention_factor == pytest.approx(attention, rel=1e-6)
    assert ropes.softmax_factor == pytest.approx(softmax, rel=1e-6)


def test_both_mscales_cancel_where_the_softmax_is_left_alone() -> None:
    """A class without DeepSeek's softmax factor takes only the quotient, on cos and sin."""
    block = {
        "rope_type": "yarn",
        "factor": math.exp(10),
        "mscale": 3.0,
        "mscale_all_dim": 1.0,
    }
    with pytest.warns(PhasorWarning, match="the context, 8192, is used as"):
        ropes = load(small(rope_scaling=block))
    assert ropes.ropes[0].attention_factor == pytest.approx((1 + 3) / (1 + 1))
    assert ropes.softmax_factor == 1


def test_gpt_oss_ramp_is_not_rounded() -> None:
    """Pair 17 lies on the slope from 8.0928 to 17.3980 only because truncate is false."""
    (rope,) = load(plain("gpt_oss")).ropes
    base = 150000.0 ** (-17 / 32)
    keep = 1 - (17 - 8.0927791) / (17.398025 - 8.0927791)
    assert rope.inv_freq[17] == pytest.approx(base * (keep + (1 - keep) / 32), rel=1e-6)


def test_a_missing_yarn_factor_is_the_ratio_of_contexts() -> None:
    """Factor is max_position_embeddings over the original length where it is absent."""
    block = {"rope_type": "yarn", "original_max_position_embeddings": 2048}
    assert load(small(rope_scaling=block)).ropes[0].scaling == Yarn(
        factor=4.0, original_max_positions=2048
    )


def test_a_missing_original_length_is_the_context() -> None:
    """Transformers' fallback: YaRN without an original length takes max_position_embeddings."""
    block = {"rope_type": "yarn", "factor": 4.0}
    with pytest.warns(PhasorWarning, match="the context, 8192, is used as"):
        (rope,) = load(small(rope_scaling=block)).ropes
    assert rope.scaling == Yarn(factor=4.0, original_max_positions=8192)


def test_phi_3_longrope_with_its_lengths_at_top_level() -> None:
    """`su` is LongRoPE; 131072 over 4096 gives the published factor 1.190238."""
    (rope,) = load(plain("phi_3")).ropes
    short, long = rope.at(4096), rope.at(4097)
    assert short.attention_factor == pytest.approx(1.190238, rel=1e-6)
    plain_step = 10000.0 ** (-3 / 8)
    assert short.inv_freq[3] == pytest.approx(plain_step)
    assert long.inv_freq[3] == pytest.approx(plain_step / 4)


def test_phi_moe_states_its_factors() -> None:
    """short_mscale and long_mscale are the factors on cos and sin."""
    block = plain("phi_3")["rope_scaling"] | {"short_mscale": 1.25, "long_mscale": 1.5}
    (rope,) = load(plain("phi_3") | {"rope_scaling": block}).ropes
    assert (rope.at(1).attention_factor, rope.at(9999).attention_factor) == (1.25, 1.5)


def test_gemma_3_scales_its_global_layers_only() -> None:
    """An old Gemma 3 file: five local layers with base 10000, then a global one, linear by 8."""
    ropes = load(CONFIGS / "gemma_3_v4.json")
    assert ropes.layer_kinds[:6] == ("sliding_attention",) * 5 + ("full_attention",)
    local, whole = ropes.kinds["sliding_attention"], ropes.kinds["full_attention"]
    assert local is not None
    assert whole is not None
    assert (local.base, local.scaling, local.head_dim) == (1e4, None, 256)
    assert (whole.base, whole.scaling, whole.head_dim) == (1e6, Linear(factor=8.0), 256)
    assert any("rope_local_base_freq" in note for note in ropes.notes)


def test_hunyuan_alpha_is_a_constant_law() -> None:
    """`dynamic` with `alpha` raises the base once and for all lengths."""
    block = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "mscale": 1.0}
    (rope,) = load(small("hunyuan_v1_dense", rope_scaling=block)).ropes
    assert rope.scaling == NTK(factor=1000.0)


def test_deepseek_v4_stretches_compressed_layers_only() -> None:
    """Layers without a compressor keep the plain base; no layer has a factor on cos and sin."""
    block = {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536}
    ropes = load(small("deepseek_v4", compress_ratios=[0, 4, 128, 0, 0], rope_scaling=block))
    bases = [rope.base for rope in ropes if rope is not None]
    assert bases == [500000.0, 160000.0, 160000.0, 500000.0]
    assert {rope.attention_factor for rope in ropes.ropes} == {1.0}
    assert [rope.scaling is None for rope in ropes if rope is not None] == [
        True,
        False,
        False,
        True,
    ]
