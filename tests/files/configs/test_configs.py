"""Hugging Face configs, by sums done by hand: widths, bases, pairings, axes and layers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phasor.axes import Alternating, InterleavedSections, OneAxis, Sectioned
from phasor.files.reading import load, model_types
from phasor.scaling import Llama3

from .config_files import CONFIGS, plain, small


def test_a_llama_file_says_everything() -> None:
    """Llama 3.1's file: pairing from the class, the rest from the file."""
    ropes = load(CONFIGS / "llama_3_1_v4.json")
    assert (ropes.name, len(ropes)) == ("llama", 32)
    assert (ropes.context, ropes.num_heads, ropes.num_kv_heads) == (131072, 32, 8)
    assert set(ropes.layer_kinds) == {"rope"}
    rope = ropes[0]
    assert rope is not None
    assert (rope.head_dim, rope.pairing, rope.output_pairing) == (128, "half", "half")
    assert (rope.base, rope.axes) == (500000.0, OneAxis())
    assert rope.scaling == Llama3(factor=8.0, original_max_positions=8192)
    assert ropes.notes == ()


def test_a_directory_is_read_through_its_config(tmp_path: Path) -> None:
    """A directory with a config.json is that config.json."""
    (tmp_path / "config.json").write_text(json.dumps(small()), "utf-8")
    assert load(tmp_path)[0] == load(str(tmp_path / "config.json"))[0] == load(small())[0]


def test_the_name_is_the_files_own() -> None:
    """The config's _name_or_path names the model where it is given."""
    assert load(small(_name_or_path="someone/some-model")).name == "someone/some-model"


def test_gemma_4_has_a_block_per_kind_of_layer() -> None:
    """Nested blocks: 64 of 256 pairs of a 512-wide head turn in the full layers."""
    ropes = load(CONFIGS / "gemma_4_v5.json")
    local, _, whole = ropes
    assert local is not None
    assert whole is not None
    assert (local.head_dim, local.base, local.scaling) == (256, 1e4, None)
    steps = whole.inv_freq
    assert (whole.head_dim, whole.rotary_dim, len(steps)) == (512, 512, 256)
    assert steps[63] == pytest.approx(1e6 ** (-126 / 512))
    assert not steps[64:].any()


def test_a_null_block_is_a_kind_without_rope() -> None:
    """A layer type whose block is null has no position embedding."""
    kinds = ["full_attention", "sliding_attention"] * 2
    blocks = {"full_attention": None, "sliding_attention": {"rope_type": "default"}}
    ropes = load(small(layer_types=kinds, rope_parameters=blocks))
    assert [rope is None for rope in ropes] == [True, False, True, False]


# (config, which of the layers rotate)
WITHOUT_ROPE = {
    "Cohere 2, by its default pattern": (small("cohere2"), "1110"),
    "Cohere 2, by an interval": (small("cohere2", sliding_window_pattern=2), "1010"),
    "EXAONE 4 with a window": (small("exaone4", sliding_window=4096), "1110"),
    "EXAONE 4 with letters": (
        small("exaone4", sliding_window=4096, sliding_window_pattern="LG"),
        "1010",
    ),
    "EXAONE 4 without a window": (small("exaone4", sliding_window=None), "1111"),
    "Llama 4": (small("llama4_text"), "1110"),
    "SmolLM 3, by a list": (small("smollm3", no_rope_layers=[0, 1, 1, 0]), "0110"),
    "SmolLM 3, by an interval": (small("smollm3", no_rope_layer_interval=2), "1010"),
    "Qwen3-Next": (small("qwen3_next"), "0001"),
    "Qwen3.5, by its list": (
        small("qwen3_5_text", layer_types=["full_attention"] + ["linear_attention"] * 3),
        "1000",
    ),
    "LFM2, by indices": (small("lfm2", full_attn_idxs=[2]), "0010"),
    "RecurrentGemma, by its cycle": (small("recurrent_gemma"), "0010"),
    "Falcon with ALiBi": (small("falcon", alibi=True), "0000"),
    "ESM with learned positions": (small("esm"), "0000"),
    "ESM with rope": (small("esm", position_embedding_type="rotary"), "1111"),
}


@pytest.mark.parametrize("name", WITHOUT_ROPE)
def test_layers_without_rope(name: str) -> None:
    """Which layers rotate is read from lists, intervals, patterns and switches."""
    config, expected = WITHOUT_ROPE[name]
    assert "".join("0" if rope is None else "1" for rope in load(config)) == expected


PAIRINGS = {
    "llama": ("half", "half", 1),
    "gptj": ("interleaved", "interleaved", 1),
    "glm4": ("interleaved", "interleaved", 1),
    "glm4_moe": ("half", "half", 1),
    "cohere": ("interleaved", "interleaved", 1),
    "ernie4_5": ("interleaved", "interleaved", 1),
    "helium": ("interleaved", "interleaved", 1),
    "roformer": ("interleaved", "interleaved", 1),
    "deepseek_v2": ("interleaved", "interleaved", 1),
    "deepseek_v3": ("interleaved", "half", 1),
    "kimi_k2": ("interleaved", "half", 1),
    "nanochat": ("half", "half", -1),
}


#: Classes that make their table of sines from 10000, whatever the config says.
ONE_BASE = ("gptj", "codegen", "roformer")


@pytest.mark.parametrize("model_type", PAIRINGS)
def test_pairing_is_the_class_own(model_type: str) -> None:
    """Pairings as measured with unit vectors on each class's own rotation."""
    base = 10_000.0 if model_type in ONE_BASE else 500_000.0
    rope = load(small(model_type, rope_theta=base))[0]
    assert rope is not None
    assert (rope.pairing, rope.output_pairing, rope.direction) == PAIRINGS[model_type]


def test_rope_interleave_false_means_halves() -> None:
    """DeepSeek-V3's switch for reordered weights."""
    rope = load(small("deepseek_v3", rope_interleave=False))[0]
    assert rope is not None
    assert (rope.pairing, rope.output_pairing) == ("half", "half")


# (config, head_dim, rotary_dim, rotary_start)
WIDTHS = {
    "the fraction at top level": (small("phi", partial_rotary_factor=0.5), 128, 64, 0),
    "the fraction in the block": (
        small("phi", rope_parameters={"partial_rotary_factor": 0.25}),
        128,
        32,
        0,
    ),
    "GPT-NeoX's rotary_pct": (small("gpt_neox", rope_theta=None, rotary_pct=0.5), 128, 64, 0),
    "GPT-NeoX's class default": (small("gpt_neox", rope_theta=None), 128, 32, 0),
    "GPT-J's class default": (small("gptj", n_embd=512, rope_theta=10_000.0), 128, 64, 0),
    "MiniMax-M2's rotary_dim": (small("minimax_m2", rotary_dim=64), 128, 64, 0),
    "MiMo's odd fraction": (small("mimo_v2_flash", head_dim=192), 192, 64, 0),
    "a null head_dim": (small("gemma", head_dim=None), 128, 128, 0),
    "an absent head_dim with a class default": (small("gemma"), 256, 256, 0),
    "Moonshine's class default": (
        {"model_type": "moonshine", "decoder_num_hidden_layers": 1, "head_dim": 36},
        36,
        32,
        0,
    ),
    "latent attention": (small("deepseek_v3", qk_rope_head_dim=32), 32, 32, 0),
    "DeepSeek-V4 at the end of the head": (
        small("deepseek_v4", compress_ratios=[0, 4, 128, 4]),
        512,
        64,
        448,
    ),
}


@pytest.mark.parametrize("name", WIDTHS)
def test_widths(name: str) -> None:
    """Head and rotated widths from each of the keys that state them."""
    config, head_dim, rotary_dim, start = WIDTHS[name]
    rope = load(config)[0]
    assert rope is not None
    assert (rope.head_dim, rope.rotary_dim, rope.rotary_start) == (head_dim, rotary_dim, start)


# (config, base of its first rope)
BASES = {
    "rope_theta at top level": (small(), 500000.0),
    "rope_theta in the block": (small(rope_theta=None, rope_parameters={"rope_theta": 7e4}), 7e4),
    "rotary_emb_base": (small("gpt_neox", rope_theta=None, rotary_emb_base=3e4), 3e4),
    "rope_ratio": (small("chatglm", rope_theta=None, rope_ratio=500), 5e6),
    "class default": (small("seed_oss", rope_theta=None), 1e4),
    "ModernBERT's global base": (
        small("modernbert", rope_theta=None, global_rope_theta=2e5, local_rope_theta=3e4),
        2e5,
    ),
}


@pytest.mark.parametrize("name", BASES)
def test_bases(name: str) -> None:
    """The base from each of the keys that state it."""
    config, base = BASES[name]
    rope = load(config)[0]
    assert rope is not None
    assert rope.base == base


def test_a_class_default_is_noted() -> None:
    """What the file did not say is said in the notes."""
    (note,) = load(small(rope_theta=None)).notes
    assert "rope_theta" in note
    assert "10000" in note


AXES = {
    "Qwen2-VL": (plain("qwen2_vl"), Sectioned((16, 24, 24))),
    "Qwen3-VL": (small("qwen3_vl_text"), InterleavedSections((24, 20, 20))),
    "Qwen3-VL, time with fewer than it gets": (
        small("qwen3_vl_text", rope_scaling={"mrope_section": [16, 24, 24]}),
        InterleavedSections((16, 24, 24)),
    ),
    "Qwen3-VL, pairs left over": (
        small("qwen3_vl_text", rope_scaling={"mrope_section": [16, 16, 16]}),
        InterleavedSections((16, 16, 16)),
    ),
    "ERNIE-4.5-VL": (small("ernie4_5_vl_moe_text"), Alternating((20, 22, 22))),
    "HunyuanOCR": (
        small(
            "hunyuan_vl", rope_scaling={"type": "xdrope", "alpha": 1e3, "xdrope_section": [16] * 4}
        ),
        Sectioned((16,) * 4),
    ),
}


@pytest.mark.parametrize("name", AXES)
def test_axes(name: str) -> None:
    """Multimodal layouts: the class says how, the file says how many pairs."""
    config, expected = AXES[name]
    assert load(config).ropes[0].axes == expected


def test_a_language_model_inside_a_larger_one() -> None:
    """The inner model type decides; an outer block that says the same is welcome."""
    inner = small("llama", rope_scaling={"type": "linear", "factor": 2.0})
    outer = {"model_type": "llava", "text_config": inner, "rope_theta": 500000.0}
    assert load(outer)[0] == load(inner)[0]


def test_a_larger_model_need_not_be_known_itself() -> None:
    """A model type inside text_config is enough."""
    assert load({"model_type": "anything", "text_config": small("mistral")})[0] is not None


def test_harmless_keys_are_passed_over() -> None:
    """What changes nothing is no error: finetuned, an attn_factor of 1, a null."""
    block = {"type": "linear", "factor": 2.0}
    with_neutral_keys = block | {"finetuned": True, "attn_factor": 1, "mscale": None}
    assert load(small(rope_scaling=with_neutral_keys))[0] == load(small(rope_scaling=block))[0]


def test_every_listed_model_type_has_its_facts() -> None:
    """The table is readable from end to end, sorted and large."""
    names = model_types()
    assert list(names) == sorted(set(names))
    assert len(names) >= 100


def test_two_spellings_of_the_same_model_are_equal() -> None:
    """DeepSeek-V3 from its own inference config and from GGUF: one embedding, one softmax."""
    own, gguf = load(plain("deepseek_inference")), load(plain("deepseek2_gguf"))
    assert own[0] == gguf[0]
    assert own.softmax_factor == load(plain("deepseek_v3")).softmax_factor
