"""params.json, DeepSeek's inference configs and GGUF metadata."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from phasor import preset
from phasor.files.reading import load
from phasor.scaling import Linear, Llama3, LongRope, PerPair, Yarn

from ..refusals import refused
from .config_files import CONFIGS, gguf, plain


def test_mistral_files_are_interleaved() -> None:
    """Mistral's own layout; apply_scale false leaves cos and sin alone."""
    ropes = load(CONFIGS / "mistral_params.json")
    rope = ropes[0]
    assert rope is not None
    assert (rope.pairing, rope.base, rope.head_dim, len(ropes)) == ("interleaved", 1e6, 128, 40)
    assert rope.scaling == Yarn(factor=16.0, original_max_positions=16384, attention_factor=1.0)
    assert (ropes.context, ropes.num_heads, ropes.num_kv_heads) == (262144, 32, 8)


def test_a_directory_is_read_through_its_params(tmp_path: Path) -> None:
    """A directory with a params.json alone is that file."""
    (tmp_path / "params.json").write_text(json.dumps(plain("mistral_params")), "utf-8")
    assert load(tmp_path)[0] == load(plain("mistral_params"))[0]


def test_apply_scale_brings_yarns_temperature() -> None:
    """With apply_scale the factor on cos and sin is 0.1 ln s + 1."""
    config = plain("mistral_params")
    config["yarn"]["apply_scale"] = True
    assert load(config).ropes[0].attention_factor == pytest.approx(0.1 * math.log(16) + 1)


# original/params.json of meta-llama/Llama-3.1-8B
LLAMA = {
    "dim": 4096,
    "n_layers": 32,
    "n_heads": 32,
    "n_kv_heads": 8,
    "vocab_size": 128256,
    "ffn_dim_multiplier": 1.3,
    "multiple_of": 1024,
    "norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "use_scaled_rope": True,
}
RELEASES: dict[str, tuple[dict[str, Any], float]] = {
    "llama-3.1-8b-meta": ({}, 8),
    "llama-3.1-70b": ({"dim": 8192, "n_layers": 80, "n_heads": 64}, 8),
    "llama-3.3-70b": ({"dim": 8192, "n_layers": 80, "n_heads": 64}, 8),
    "llama-3.1-405b": ({"dim": 16384, "n_layers": 126, "n_heads": 128}, 8),
    "llama-3.2-1b": ({"dim": 2048, "n_layers": 16}, 32),
    "llama-3.2-3b": ({"dim": 3072, "n_layers": 28, "n_heads": 24}, 32),
}


@pytest.mark.parametrize("name", RELEASES)
def test_metas_scaling_is_that_of_the_release(name: str) -> None:
    """The same ropes as the preset from the Hub's config, in interleaved pairs; a note says why."""
    sizes, factor = RELEASES[name]
    ropes, published = load(LLAMA | sizes), preset(name)
    assert len(ropes) == len(published)
    assert ropes[0] == dataclasses.replace(published.ropes[0], pairing="interleaved")
    assert f"has {factor:g}." in ropes.notes[0]
    assert ("8 as a constant" in ropes.notes[-1]) == (factor != 8)


def test_metas_scaling_is_what_the_file_says() -> None:
    """With the key that newer code of Meta reads, for a model of any size."""
    meta_keys = {"dim": 512, "rope_scaling_factor": 32, "rope_high_freq_factor": 2}
    ropes = load(LLAMA | meta_keys)
    assert ropes[0] is not None
    assert ropes[0].scaling == Llama3(
        factor=32.0, original_max_positions=8192, high_freq_factor=2.0
    )
    assert ropes.notes == ()


def test_llama_4_fills_in_its_own_numbers() -> None:
    """Factor 16 and a step at one turn; every fourth layer has no rotation."""
    sizes = {"dim": 5120, "n_layers": 48, "n_heads": 40, "nope_layer_interval": 4}
    ropes, scout = load(LLAMA | sizes), preset("llama-4-scout")
    assert ropes.ropes == scout.ropes
    assert [rope is None for rope in ropes] == [rope is None for rope in scout]


def test_deepseek_defaults_are_noted() -> None:
    """DeepSeek's file for the full model holds no rope keys; its code's defaults are used."""
    config = {
        "dim": 7168,
        "inter_dim": 18432,
        "n_layers": 61,
        "n_heads": 128,
        "qk_rope_head_dim": 64,
    }
    filled = load(config)
    assert filled[0] == load(plain("deepseek_inference"))[0]
    assert any("rope_theta" in note and "10000" in note for note in filled.notes)


def test_deepseek_scales_only_beyond_its_original_length() -> None:
    """Their code leaves everything alone up to original_seq_len."""
    (rope,) = load(plain("deepseek_inference") | {"max_seq_len": 4096}).ropes
    assert rope.scaling is None


# DeepSeek-V4-Flash's inference/config.json, four layers of it
DEEPSEEK_V4 = {
    "dim": 4096,
    "moe_inter_dim": 2048,
    "n_layers": 4,
    "n_heads": 64,
    "head_dim": 512,
    "rope_head_dim": 64,
    "compress_ratios": [0, 0, 4, 128, 0],
    "compress_rope_theta": 160000,
    "original_seq_len": 65536,
    "rope_factor": 16,
    "max_seq_len": 1048576,
}


def test_deepseek_v4_turns_compressed_layers_by_a_base_and_a_law_of_their_own() -> None:
    """The end of each head; its other layers turn plainly, as the preset of transformers' file."""
    ropes, published = load(DEEPSEEK_V4), preset("deepseek-v4-flash")
    sliding, compressed = published[0], published[2]
    assert list(ropes) == [sliding, sliding, compressed, compressed]
    assert (ropes.context, ropes.num_heads, ropes.num_kv_heads) == (1048576, 64, 1)
    assert set(ropes.in_config.labels.values()) == {"main", "compress"}
    assert any("rope_theta" in note and "10000" in note for note in ropes.notes)


def test_metas_first_files_have_the_base_that_is_fixed_in_its_code() -> None:
    """Llama 1 and 2; multiple_of tells them from Mistral's."""
    (rope,) = load({k: v for k, v in LLAMA.items() if "rope" not in k}).ropes
    assert (rope.pairing, rope.base, rope.head_dim) == ("interleaved", 10000.0, 128)


# Meta's three sizes beside what tells another program's file
SIZES = {"dim": 1024, "n_layers": 28, "n_heads": 16}
FOREIGN: dict[str, dict[str, Any]] = {
    "nothing else": {"rope_theta": 1e4, "norm_eps": 1e-5},
    "falcon-perception": {"ffn_dim": 3072, "norm_eps": 1e-5, "perception_heads": True},
    "falcon-perception, with a hidden_dim": {"hidden_dim": 3072, "coord_dec_dim": 8192},
    "Lumina-Next": {"multiple_of": 256, "in_channels": 4, "patch_size": 2},
    "transformers' names": {"hidden_dim": 3072, "num_hidden_layers": 28},
}


@pytest.mark.parametrize("name", FOREIGN)
def test_three_sizes_are_no_params_json(name: str) -> None:
    """Without a key of Meta's or Mistral's own, or beside those of another program."""
    with refused("no_model", key="model_type"):
        load(SIZES | FOREIGN[name])


MLX = {"model_type": "llama", "norm_eps": 1e-5} | SIZES


def test_a_hidden_size_beside_dim_must_be_the_same() -> None:
    """Where it is, transformers' keys count, and so do its halves."""
    with refused("two_values", first_name="dim", first=1024, name="hidden_size", value=4096):
        load(MLX | {"hidden_size": 4096})
    assert load(MLX).ropes[0].pairing == "interleaved"
    assert load(MLX | {"hidden_size": 1024}).ropes[0].pairing == "half"


def test_other_types_read_the_same_three_keys_as_their_own() -> None:
    """MiniMind's first files and DistilBERT's have them."""
    assert load(MLX | {"model_type": "minimind"}).ropes[0].base == 1e6
    assert load(MLX | {"model_type": "distilbert", "hidden_dim": 3072}).ropes == ()


def test_gguf_widths() -> None:
    """key_length is the head, rope.dimension_count its rotated part."""
    metadata = gguf("stablelm", attention__key_length=80, rope__dimension_count=20)
    (rope,) = load(metadata).ropes
    assert (rope.head_dim, rope.rotary_dim) == (80, 20)


def test_gguf_without_a_base_takes_llama_cpps_and_says_so() -> None:
    """10000 is llama.cpp's default, noted as such."""
    ropes = load({k: v for k, v in gguf().items() if k != "llama.rope.freq_base"})
    assert ropes.ropes[0].base == 10000.0
    assert any("llama.rope.freq_base" in note for note in ropes.notes)


def test_gguf_linear_scaling_by_either_key() -> None:
    """The factor has an old name, and linear is the type of a file without one."""
    for key in ("rope__scaling__factor", "rope__scale_linear"):
        assert load(gguf(**{key: 4.0})).ropes[0].scaling == Linear(factor=4.0)


def test_gguf_takes_llama_3_divisors_as_a_list() -> None:
    """The tensor rope_freqs.weight may come along; without it a note says what is unknown."""
    divisors = [1.0] * 32 + [8.0] * 32
    scaled = load(gguf() | {"rope_freqs.weight": divisors})
    assert scaled.ropes[0].scaling == PerPair(factors=tuple(divisors))
    assert any("rope_freqs.weight" in note for note in load(gguf()).notes)
    assert scaled.notes == ()


LISTS = {"rope_factors_short.weight": [3.0] * 64, "rope_factors_long.weight": [2.0] * 64}


def test_negative_lists_of_gguf_turn_pairs_clockwise() -> None:
    """It divides positions by them."""
    lists = {name: [-number for number in numbers] for name, numbers in LISTS.items()}
    (rope,) = load(gguf("phi3") | lists).ropes
    assert (rope.direction, rope.scaling) == (-1, load(gguf("phi3") | LISTS).ropes[0].scaling)


@pytest.mark.parametrize("named", [None, "none", "linear", "longrope"])
def test_gguf_divides_by_its_tensors_whatever_the_type_says(named: str | None) -> None:
    """As llama.cpp does; Phi-3's converter names no type and writes the rest like this."""
    keys = {"rope__scaling__original_context_length": 4096, "rope__scaling__attn_factor": 1.19}
    ropes = load(gguf("phi3", **keys, rope__scaling__type=named) | LISTS)
    assert ropes.notes == ()
    assert ropes[0] is not None
    assert ropes[0].scaling == LongRope(
        short_factors=(3.0,) * 64,
        long_factors=(2.0,) * 64,
        original_max_positions=4096,
        factor=2.0,
        short_attention_factor=1.19,
        long_attention_factor=1.19,
    )


def test_gguf_may_state_an_original_context_that_nothing_reads() -> None:
    """Phi-3's converter writes it for the models of 4096 tokens, too."""
    ropes = load(gguf("phi3", context_length=4096, rope__scaling__original_context_length=4096))
    assert ropes.ropes[0].scaling is None
    (note,) = ropes.notes
    assert "rope_factors_long.weight" in note


def test_gguf_log_multiplier_where_the_softmax_is_left_alone() -> None:
    """Mistral 3: mscale 1 over mscale_all_dim 1 is a factor of 1 on cos and sin."""
    keys = {
        "rope__scaling__type": "yarn",
        "rope__scaling__factor": 16.0,
        "rope__scaling__original_context_length": 16384,
        "rope__scaling__yarn_log_multiplier": 1.0,
    }
    ropes = load(gguf("mistral3", **keys))
    assert ropes.ropes[0].attention_factor == 1.0
    assert ropes.softmax_factor == 1.0


# which of four layers rotate
GGUF_LAYERS = {
    "qwen3next": (gguf("qwen3next"), "0001"),
    "LFM2, whose other layers have no key heads": (
        gguf("lfm2", attention__head_count_kv=[0, 2, 0, 2]),
        "0101",
    ),
    "EXAONE 4 without a window": (gguf("exaone4"), "1111"),
    "EXAONE 4 with a window": (gguf("exaone4", attention__sliding_window=4096), "1110"),
}


@pytest.mark.parametrize("name", GGUF_LAYERS)
def test_gguf_layers_without_rope(name: str) -> None:
    """Patterns of the architecture, and layers that are no attention at all."""
    metadata, expected = GGUF_LAYERS[name]
    assert "".join("0" if rope is None else "1" for rope in load(metadata)) == expected


WRONG = {
    "an unknown architecture": (
        gguf("mamba3"),
        "value: general.architecture",
    ),
    "an unknown rope key": (gguf(rope__scaling__shape="round"), "unread: llama.rope.scaling.shape"),
    "an unknown scaling type": (gguf(rope__scaling__type="wide"), "value: llama.rope.scaling.type"),
    "two factors": (
        gguf(rope__scaling__factor=4.0, rope__scale_linear=2.0),
        "two_values: llama.rope.scaling.factor",
    ),
    "an odd rotated part": (gguf(rope__dimension_count=63), "value: llama.rope.dimension_count"),
    "sections that leave pairs to a fourth coordinate": (
        gguf("qwen3vl", rope__dimension_sections=[16, 24, 24, 0]),
        "value: qwen3vl.rope.dimension_sections",
    ),
    "sections that do not fit": (
        gguf("qwen2vl", rope__dimension_sections=[16, 24, 23, 0]),
        "unusable: qwen2vl.rope.dimension_sections",
    ),
    "too few divisors": (
        gguf() | {"rope_freqs.weight": [1.0] * 63},
        "per_pair: rope_freqs.weight",
    ),
    "too few long factors": (
        gguf() | LISTS | {"rope_factors_long.weight": [1.0] * 3},
        "per_pair: rope_factors_long.weight",
    ),
    "lists of two directions": (
        gguf() | LISTS | {"rope_factors_short.weight": [-1.0] * 64},
        "value: rope_factors_long.weight",
    ),
    "one list of two": (
        gguf() | {"rope_factors_long.weight": [1.0] * 64},
        "gguf_lists: rope_factors_short.weight",
    ),
    "a longrope without lists": (
        gguf("phi3", rope__scaling__type="longrope", rope__scaling__factor=4.0),
        "gguf_lists: rope_factors_short.weight",
    ),
    "lists beside yarn": (
        gguf(rope__scaling__type="yarn", rope__scaling__factor=4.0) | LISTS,
        "two_scalings: rope_factors_short.weight",
    ),
    "lists beside a factor": (
        gguf(rope__scaling__factor=4.0) | LISTS,
        "two_scalings: rope_factors_short.weight",
    ),
    "lists beside divisors": (
        gguf() | LISTS | {"rope_freqs.weight": [1.0] * 64},
        "two_scalings: rope_factors_short.weight",
    ),
    "a longrope with divisors": (
        gguf(rope__scaling__type="longrope") | {"rope_freqs.weight": [1.0] * 64},
        "two_scalings: llama.rope.scaling.type",
    ),
    "an attention factor without lists": (
        gguf("phi3", rope__scaling__attn_factor=1.19),
        "value: phi3.rope.scaling.attn_factor",
    ),
    "params without rope_theta": (
        {k: v for k, v in plain("mistral_params").items() if k != "rope_theta"},
        "params_base: rope_theta",
    ),
    "params with Meta's scaling beside yarn": (
        plain("mistral_params") | {"use_scaled_rope": True, "rope_scaling_factor": 8},
        "value: use_scaled_rope",
    ),
    "params with Meta's scaling and sizes of no release": (
        LLAMA | {"n_layers": 33},
        "params_factor: use_scaled_rope",
    ),
    "params with a factor that nothing reads": (
        LLAMA | {"use_scaled_rope": False, "rope_scaling_factor": 8},
        "unread: rope_scaling_factor",
    ),
    "params with bands in the wrong order": (
        LLAMA | {"rope_high_freq_factor": 0.5},
        "unusable: rope_high_freq_factor",
    ),
    "params with an unknown key": (plain("mistral_params") | {"rope_zoom": 2}, "unread: rope_zoom"),
    "DeepSeek with an unknown key": (
        plain("deepseek_inference") | {"rope_zoom": 2},
        "unread: rope_zoom",
    ),
    "DeepSeek V4 without its second base": (
        {k: v for k, v in DEEPSEEK_V4.items() if k != "compress_rope_theta"},
        "no_value: compress_rope_theta",
    ),
    "DeepSeek V4 with a rotated part wider than the head": (
        DEEPSEEK_V4 | {"head_dim": 32},
        ": head_dim",
    ),
    "DeepSeek V4 with an unknown ratio": (
        DEEPSEEK_V4 | {"compress_ratios": [0, 0, 4, 5]},
        "value: compress_ratios",
    ),
    "DeepSeek with crossed betas": (
        plain("deepseek_inference") | {"beta_fast": 1, "beta_slow": 2},
        "unusable: beta_fast",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_damaged_files_name_the_key(name: str) -> None:
    """Every refusal names the key as the file has it."""
    config, message = WRONG[name]
    with refused(message):
        load(config)
