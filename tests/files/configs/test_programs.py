"""Files of programs that train or serve models, by what their own code makes of them.

``published/programs.jsonl`` has files with what the programs computed; here are the laws by their
formulas, the defaults, and what is refused.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import numpy as np
import pytest

from phasor import ConfigError
from phasor.files.reading import load
from phasor.scaling import Linear, Llama3, Yarn

from ...each import each
from ..refusals import refused
from .program_files import LITGPT, LITGPT_YARN, LLAMA3, MEGATRON, without

TRTLLM = {
    "architecture": "LlamaForCausalLM",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_size": 512,
    "position_embedding_type": "rope_gpt_neox",
    "max_position_embeddings": 8192,
}
BRIDGE = {
    "_target_": "megatron.bridge.models.gemma.gemma3_provider.Gemma3ModelProvider4B",
    "num_layers": 8,
    "hidden_size": 2560,
    "num_attention_heads": 8,
    "kv_channels": 256,
    "position_embedding_type": "rope",
    "rotary_base": [10000, 1000000],
    "rope_scaling_factor": 8.0,
    "interleaved_attn_pattern": [5, 1],
    "no_rope_freq": None,
    "seq_length": 131072,
}
LLAMA3_KERAS: dict[str, Any] = {
    "class_name": "Llama3Backbone",
    "registered_name": "keras_hub>Llama3Backbone",
    "config": {
        "num_layers": 2,
        "num_query_heads": 4,
        "hidden_dim": 512,
        "num_key_value_heads": 2,
        "rope_max_wavelength": 500000,
        "rope_frequency_adjustment_factor": 8.0,
        "rope_low_freq_factor": 1.0,
        "rope_high_freq_factor": 4.0,
        "rope_pretraining_sequence_length": 8192,
    },
}


@each(
    "words",
    [{"model_type": "mynew"}, {"architectures": ["My"]}, {"auto_map": {"AutoConfig": "x.My"}}],
)
def test_a_config_of_transformers_is_no_programs_file(words: dict[str, Any]) -> None:
    """Its type is unknown, and so is how it rotates, whatever words its code shares with theirs."""
    meta = {"dim": 512, "n_layers": 4, "n_heads": 4, "multiple_of": 256}
    deepseek = {"n_layers": 4, "qk_rope_head_dim": 64, "inter_dim": 512}
    for config in (LITGPT, TRTLLM, MEGATRON, LLAMA3_KERAS, meta, deepseek):
        for file in (config | words, {"language_model": config} | words):
            with pytest.raises(ConfigError) as caught:
                load(file)
            assert caught.value.reason in ("no_model", "no_model_type", "model_type")
    with refused("no_model", key="model_type"):
        load({"language_model": MEGATRON | words})


def test_megatrons_enumeration_is_no_type_of_transformers() -> None:
    """A saved namespace has it among the arguments."""
    assert load(MEGATRON | {"model_type": "ModelType.encoder_or_decoder"}) == load(MEGATRON)


LATENT = {"qk_rope_head_dim": 64}
TUNED: dict[str, Any] = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 512}
TRTLLM_YARN = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096}


def keras(**more: Any) -> dict[str, Any]:
    """The backbone above with other keys."""
    return LLAMA3_KERAS | {"config": LLAMA3_KERAS["config"] | more}


def torchtune(component: str, **more: Any) -> dict[str, Any]:
    """A recipe with this model."""
    return {"model": {"_component_": component} | more, "seed": 1}


def test_tensorrt_reads_neither_truncate_nor_an_attention_factor() -> None:
    """Of YaRN; both are noted, as what it does is another rotation than the file asks for."""
    yarn = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4096}
    ignored = {"truncate": False, "attention_factor": 3.0}
    ropes = load(TRTLLM | {"rotary_scaling": yarn | ignored})
    assert ropes.ropes == load(TRTLLM | {"rotary_scaling": yarn}).ropes
    for key in ignored:
        assert any(f"rotary_scaling.{key}" in note for note in ropes.notes)


def test_a_factor_of_one_is_no_law() -> None:
    """As KerasHub writes it for models without one, and as the other programs would read it."""
    sizes = {"num_layers": 2, "num_query_heads": 4, "hidden_dim": 512, "rope_scaling_factor": 1.0}
    mistral = LLAMA3_KERAS | {"class_name": "MistralBackbone", "config": sizes}
    linear = {"rotary_scaling": {"type": "linear", "factor": 1.0}}
    for config in (mistral, TRTLLM | linear, LITGPT | {"rope_adjustments": {"factor": 1.0}}):
        (rope,) = load(config).ropes
        assert rope.scaling is None


@each("scaling", [{"type": "none"}, {"rope_type": "none"}, {"type": "none", "factor": 1.0}])
def test_tensorrts_none_is_no_law(scaling: dict[str, Any]) -> None:
    """It is the first word of its enumeration of laws."""
    assert load(TRTLLM | {"rotary_scaling": scaling}).ropes == load(TRTLLM).ropes


@pytest.mark.filterwarnings("ignore::phasor.PhasorWarning")
def test_heads_that_a_program_assumes_are_those_of_the_model() -> None:
    """As their width is counted by them."""
    ropes = load(without(LITGPT, "n_head"))
    assert (ropes.num_heads, ropes.ropes[0].head_dim) == (32, 16)


def test_an_absent_type_is_the_programs_default_and_said() -> None:
    """Learned positions, whatever base stands beside it."""
    for config in (TRTLLM | {"rotary_base": 1e4}, MEGATRON):
        ropes = load(without(config, "position_embedding_type"))
        assert not any(ropes)
        assert any("no position_embedding_type; learned_absolute" in note for note in ropes.notes)


def test_tensorrts_nemotron_nas_rotates_without_a_word() -> None:
    """Its class alone takes rope_gpt_neox for an absent type."""
    says = {"architecture": "DeciLMForCausalLM", "rotary_base": 1e4}
    ropes = load(without(TRTLLM, "position_embedding_type") | says)
    assert ropes.ropes == load(TRTLLM).ropes
    assert any("no position_embedding_type; rope_gpt_neox" in note for note in ropes.notes)


@each("key", ["sliding_window_pattern", "_sliding_window_pattern"])
def test_tensorrts_releases_call_the_pattern_of_local_layers_by_two_names(key: str) -> None:
    """As the files of Gemma 3 do, from which they have it."""
    gemma = {"architecture": "Gemma3ForCausalLM", "rope_local_base_freq": 1e4, "rotary_base": 1e6}
    ropes = load(TRTLLM | gemma | {"num_hidden_layers": 4, key: 3})
    assert [rope and rope.base for rope in ropes] == [1e4, 1e4, 1e6, 1e4]


def test_tensorrts_local_layers_are_among_those_with_attention() -> None:
    """Layers that a list gives something else do not rotate, whatever the pattern says."""
    two = {"rope_local_base_freq": 1e4, "rotary_base": 1e6, "sliding_window_pattern": 2}
    words = {"num_hidden_layers": 4, "layer_types": ["recurrent", "attention"]}
    assert [rope and rope.base for rope in load(TRTLLM | two | words)] == [None, 1e6] * 2


def test_tensorrts_mamba_has_no_positions_at_all() -> None:
    """Its file says the learned ones that the program assumes, and its class has none."""
    says = {"architecture": "MambaForCausalLM", "position_embedding_type": "learned_absolute"}
    ropes = load(TRTLLM | says)
    assert not any(ropes)
    assert "recurrent" in ropes.notes[-1]
    assert "learned" not in ropes.notes[-1]


def test_tensorrts_drafter_is_another_model() -> None:
    """The rope of EAGLE's head stands beside that of the model."""
    drafter = {"eagle_net_config": TRTLLM | {"rotary_base": 7e4}}
    assert load(TRTLLM | drafter | {"architecture": "EagleForCausalLM"}).ropes == load(TRTLLM).ropes


@each("value", [2, [0, 1, 0, 1], "[0,1,0,1]", "0 1 0 1"])
def test_megatron_says_which_layers_do_not_rotate(value: Any) -> None:
    """Every so many, or in a list; as a value, or as the text of one."""
    ropes = load(MEGATRON | {"no_rope_freq": value})
    assert ropes.layer_kinds == ("rope", "nope", "rope", "nope")


def test_megatron_has_as_many_keys_as_queries_unless_they_are_grouped() -> None:
    """A saved namespace has one group, whether they are grouped or not."""
    for grouped, heads in ((False, None), (True, 1)):
        keys = {"num_query_groups": 1, "group_query_attention": grouped}
        assert load(MEGATRON | keys).num_kv_heads == heads


def test_megatron_reads_the_flags_of_the_type_in_use_alone() -> None:
    """YaRN of usual attention turns whole heads; nothing else reads its numbers."""
    yarn = {"yarn_beta_fast": 16.0, "rotary_scaling_factor": 4.0, "rotary_percent": 0.5}
    (rope,) = load(MEGATRON | yarn).ropes
    assert (rope.scaling, rope.rotary_dim) == (None, 64)
    (rope,) = load(MEGATRON | yarn | {"position_embedding_type": "yarn"}).ropes
    assert rope.rotary_dim == 128
    assert rope.scaling == Yarn(
        factor=4.0, original_max_positions=4096, beta_fast=16.0, attention_factor=gain(4)
    )


def gain(factor: float) -> float:
    """YaRN's factor on cos and sin where nothing else is said."""
    return 0.1 * math.log(factor) + 1


def test_gemma_3_of_megatron_bridge_has_a_base_for_local_and_one_for_global_layers() -> None:
    """Every sixth layer is global, and its frequencies alone are divided; heads turn whole."""
    ropes = load(BRIDGE | {"rotary_percent": 0.5, "use_rope_scaling": True})
    sliding = ["sliding_attention"]
    assert ropes.layer_kinds == (*sliding * 5, "full_attention", *sliding * 2)
    local, wide = ropes.kinds["sliding_attention"], ropes.kinds["full_attention"]
    assert local is not None
    assert wide is not None
    assert (local.base, local.rotary_dim, local.scaling) == (1e4, 256, None)
    assert (wide.base, wide.rotary_dim, wide.scaling) == (1e6, 256, Linear(factor=8.0))
    interpolated = load(BRIDGE | {"seq_len_interpolation_factor": 2.0}).ropes
    assert [rope.scaling for rope in interpolated] == [Linear(factor=2.0), Linear(factor=16.0)]


@each(
    "builder, base, head_dim, pairing",
    [
        ("llama2.llama2_7b", 1e4, 128, "interleaved"),
        ("gemma.qlora_gemma_2b", 1e4, 256, "interleaved"),
        ("code_llama2.code_llama2_7b", 1e6, 128, "interleaved"),
        ("code_llama2.lora_code_llama2_7b", 1e4, 128, "interleaved"),
        ("qwen3.qwen3_8b_instruct", 1e6, 128, "half"),
        ("phi4.lora_phi4_14b", 1e4, 128, "half"),
        ("smol.smollm2_1_7b", 1.3e5, 64, "interleaved"),
    ],
)
def test_torchtunes_builders_have_their_numbers_in_code(
    builder: str, base: float, head_dim: int, pairing: str
) -> None:
    """With LoRA or without, which drops the base of Code Llama."""
    rope = load(torchtune(f"torchtune.models.{builder}"))[0]
    assert rope is not None
    assert (rope.base, rope.head_dim, rope.pairing) == (base, head_dim, pairing)


def test_torchtunes_functions_with_arguments_take_those_of_the_file() -> None:
    """And assume the others."""
    numbers = {"rope_base": 300000, "scale_factor": 16, "max_seq_len": 4096}
    ropes = load(torchtune("torchtune.models.llama3_1.llama3_1", **TUNED, **numbers))
    (rope,) = ropes.ropes
    assert (len(ropes), ropes.context, rope.base, rope.head_dim) == (2, 4096, 3e5, 128)
    assert rope.scaling == Llama3(factor=16.0, original_max_positions=8192)
    (plain,) = load(torchtune("torchtune.models.llama3_1.llama3_1", **TUNED)).ropes
    assert (plain.base, plain.scaling) == (5e5, Llama3(factor=8.0, original_max_positions=8192))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning:megatron", "ignore::DeprecationWarning:megatron")
def test_megatrons_yarn_rounds_its_ramp_unless_a_flag_says_otherwise() -> None:
    """As the class that performs it does by itself, and the arguments without a flag."""
    import torch
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
        YarnRotaryEmbedding,
        _yarn_find_correction_range,
    )

    assert (
        inspect.signature(YarnRotaryEmbedding).parameters["correction_range_round_to_int"].default
    )
    yarn = {"position_embedding_type": "yarn", "rotary_scaling_factor": 4.0}
    plain = 10_000.0 ** -(torch.arange(64, dtype=torch.float64) / 64)
    for said, rounds in ((None, True), (True, True), (False, False)):
        (rope,) = load(MEGATRON | yarn | {"yarn_correction_range_round_to_int": said}).ropes
        low, high = _yarn_find_correction_range(32.0, 1.0, 128, 10_000.0, 4096, rounds)
        kept = 1 - ((torch.arange(64) - low) / (high - low)).clamp(0, 1)
        assert np.allclose(rope.inv_freq, plain * kept + plain / 4 * (1 - kept), rtol=1e-6, atol=0)


def test_torchtunes_assumed_numbers_are_noted() -> None:
    """By torchtune's own names for them."""
    notes = load(torchtune("torchtune.models.llama3_1.llama3_1", **TUNED)).notes
    numbers = "model.rope_base 500000, model.scale_factor 8"
    assert f"In torchtune's code of llama3_1, and not in the file: {numbers}." in notes


def test_torchtunes_llama_4_rotates_by_its_interval() -> None:
    """Without one no layer does; Scout's law is Llama 3's with one frequency for both ends."""
    assert {*load(torchtune("torchtune.models.llama4.llama4_decoder", **TUNED))} == {None}
    for name, law in (
        ("scout_17b_16e", Llama3(factor=16.0, original_max_positions=8192, high_freq_factor=1.0)),
        ("maverick_17b_128e", None),
    ):
        ropes = load(torchtune(f"torchtune.models.llama4.llama4_{name}"))
        assert [rope is None for rope in ropes] == [(i + 1) % 4 == 0 for i in range(48)]
        assert ropes.ropes[0].scaling == law


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "litgpt, bands and betas": (
        LITGPT | {"rope_adjustments": LLAMA3 | {"beta_fast": 32}},
        "two_laws: rope_adjustments.low_freq_factor",
    ),
    "litgpt, a band without its other end": (
        LITGPT | {"rope_adjustments": without(LLAMA3, "high_freq_factor")},
        "no_value: rope_adjustments.high_freq_factor",
    ),
    "litgpt, crossed bands": (
        LITGPT | {"rope_adjustments": LLAMA3 | {"low_freq_factor": 5.0}},
        "unusable: rope_adjustments.high_freq_factor",
    ),
    "litgpt, a scale beyond all floats": (
        LITGPT | {"rope_adjustments": LITGPT_YARN | {"mscale_all_dim": 1e300}},
        "unusable: rope_adjustments.mscale_all_dim",
    ),
    "TensorRT-LLM, a scale beyond all floats": (
        TRTLLM | {"rotary_scaling": TRTLLM_YARN | {"mscale_all_dim": 1e300}} | LATENT,
        "unusable: rotary_scaling.mscale_all_dim",
    ),
    "Megatron, a list repeated without end": (
        MEGATRON | {"no_rope_freq": "(([0]*9999)*9999)*9999"},
        "value: no_rope_freq",
    ),
    "litgpt, a factor that is text": (
        LITGPT | {"rope_adjustments": {"factor": "8"}},
        ": rope_adjustments.factor",
    ),
    "litgpt, adjustments that are a list": (
        LITGPT | {"rope_adjustments": [8]},
        "value: rope_adjustments",
    ),
    "litgpt, more than a head": (
        LITGPT | {"rotary_percentage": 1.5},
        ": rotary_percentage",
    ),
    "litgpt, odd coordinates": (
        LITGPT | {"rotary_percentage": 0.26},
        "odd_width: rotary_percentage",
    ),
    "litgpt, heads that do not divide": (LITGPT | {"n_head": 5}, "head_width: n_embd"),
    "litgpt, a base of 1": (LITGPT | {"rope_base": 1}, ": rope_base"),
    "litgpt, indices without a base": (
        LITGPT | {"rope_indices": [0] * 4},
        "no_local_base: rope_local_base_freq",
    ),
    "litgpt, too few indices": (
        LITGPT | {"rope_indices": [0], "rope_local_base_freq": 1e4},
        "value: rope_indices",
    ),
    "litgpt, an unknown rope key": (LITGPT | {"rope_zoom": 2}, "unread: rope_zoom"),
    "litgpt, a key of another program": (LITGPT | {"rope_theta": 7.0}, "unread: rope_theta"),
    "litgpt, a slice without a width": (
        LITGPT | {"latent_attention": {"qk_rope_head_dim": "64"}},
        ": latent_attention.qk_rope_head_dim",
    ),
    "litgpt, a block of transformers": (
        LITGPT | {"rope_scaling": {"type": "linear", "factor": 2.0}},
        "value: rope_scaling",
    ),
    "TensorRT-LLM, a block of transformers": (
        TRTLLM | {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
        "value: rope_parameters",
    ),
    "TensorRT-LLM, a type of its own": (
        TRTLLM | {"position_embedding_type": "chatglm"},
        "value: position_embedding_type",
    ),
    "TensorRT-LLM, a type that is a number": (
        TRTLLM | {"position_embedding_type": 2},
        "value: position_embedding_type",
    ),
    "TensorRT-LLM, an unknown law": (
        TRTLLM | {"rotary_scaling": {"type": "wide"}},
        "value: rotary_scaling.type",
    ),
    "TensorRT-LLM, a law of heads that are too narrow": (
        TRTLLM | {"head_size": 2, "rotary_scaling": {"type": "dynamic", "alpha": 2.0}},
        "few_coordinates: rotary_scaling.type",
    ),
    "TensorRT-LLM, a dynamic law without its alpha": (
        TRTLLM | {"rotary_scaling": {"type": "dynamic", "factor": 2.0}},
        "no_value: rotary_scaling.alpha",
    ),
    "TensorRT-LLM, two laws": (
        TRTLLM | {"rotary_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2}},
        "two_values: rotary_scaling.type",
    ),
    "TensorRT-LLM, a factor of no law": (
        TRTLLM | {"rotary_scaling": {"factor": 2}},
        "value: rotary_scaling.factor",
    ),
    "TensorRT-LLM, a law that is text": (
        TRTLLM | {"rotary_scaling": "linear"},
        "value: rotary_scaling",
    ),
    "TensorRT-LLM, sections left out": (
        TRTLLM | {"position_embedding_type": "mrope"},
        "no_value: rotary_scaling.mrope_section",
    ),
    "TensorRT-LLM, lists left out": (
        TRTLLM | {"position_embedding_type": "long_rope", "original_max_position_embeddings": 4096},
        "no_value: longrope_scaling_short_factors",
    ),
    "TensorRT-LLM, layers of several kinds without their words": (
        TRTLLM | {"layer_configs": [{"attention": {"impl": "no_op"}}] * 2},
        "no_value: layer_types",
    ),
    "TensorRT-LLM, an unknown rope key": (TRTLLM | {"rope_zoom": 2}, "unread: rope_zoom"),
    "TensorRT-LLM, a base that is text": (TRTLLM | {"rotary_base": "1e4"}, ": rotary_base"),
    "TensorRT-LLM, an engine without layers": (
        {"pretrained_config": without(TRTLLM, "num_hidden_layers")},
        "no_value: pretrained_config.num_hidden_layers",
    ),
    "Megatron, an unknown type": (
        MEGATRON | {"position_embedding_type": "spiral"},
        "value: position_embedding_type",
    ),
    "Megatron, YaRN of pairs beside each other": (
        MEGATRON | {"position_embedding_type": "yarn", "rotary_interleaved": True},
        "value: rotary_interleaved",
    ),
    "Megatron, sections that do not fit": (
        MEGATRON | {"position_embedding_type": "mrope", "mrope_section": "16 24 25"},
        "unusable: mrope_section",
    ),
    "Megatron, sections left out": (
        MEGATRON | {"position_embedding_type": "mrope"},
        "no_value: mrope_section",
    ),
    "Megatron, a pattern as code": (
        MEGATRON | {"no_rope_freq": "([0]*3+[1])*n"},
        "value: no_rope_freq",
    ),
    "Megatron, a list for other layers": (
        MEGATRON | {"no_rope_freq": [0, 1]},
        "value: no_rope_freq",
    ),
    "Megatron, two bases": (
        MEGATRON | {"rotary_base": [10000, 1000000]},
        ": rotary_base",
    ),
    "Megatron, a flag that is a text": (
        MEGATRON | {"use_rope_scaling": "yes"},
        "value: use_rope_scaling",
    ),
    "Megatron, an unknown rope key": (MEGATRON | {"rotary_zoom": 2}, "unread: rotary_zoom"),
    "Megatron, an unknown flag": (
        {
            "MODEL_ARGS": {
                "--num-layers": 2,
                "--hidden-size": 64,
                "--rotary-base": 1e4,
                "--num-attention-heads": 1,
                "--position-embedding-type": "rope",
                "--rotary-zoom": 2,
            }
        },
        "unread: MODEL_ARGS.--rotary-zoom",
    ),
    "Megatron-Bridge, a base that is null and crossed betas": (
        {
            "model": MEGATRON
            | {"position_embedding_type": "yarn", "yarn_beta_fast": 1.0, "yarn_beta_slow": 2.0}
        },
        "unusable: model.yarn_beta_fast",
    ),
    "Megatron-Bridge, Gemma 3 with one base": (
        {"model": BRIDGE | {"rotary_base": [10000]}},
        "value: model.rotary_base",
    ),
    "Megatron-Bridge, Gemma 3 with a base of 1": (
        {"model": BRIDGE | {"rotary_base": [1, 10000]}},
        ": model.rotary_base.0",
    ),
    "Megatron-Bridge, Gemma 3 without its pattern": (
        {"model": without(BRIDGE, "interleaved_attn_pattern")},
        "no_value: model.interleaved_attn_pattern",
    ),
    "Megatron-Bridge, Gemma 3 of no layers in turn": (
        {"model": BRIDGE | {"interleaved_attn_pattern": [0, 0]}},
        "value: model.interleaved_attn_pattern",
    ),
    "Megatron-Bridge, Gemma 3 with layers that do not rotate": (
        {"model": BRIDGE | {"no_rope_freq": 4}},
        "value: model.no_rope_freq",
    ),
    "KerasHub, another class": (
        LLAMA3_KERAS | {"class_name": "SpinBackbone"},
        "value: class_name",
    ),
    "KerasHub, a number left out": (
        keras(rope_low_freq_factor=None),
        "no_value: config.rope_low_freq_factor",
    ),
    "KerasHub, divided positions": (
        keras(rope_position_scaling_factor=4.0),
        "value: config.rope_position_scaling_factor",
    ),
    "KerasHub, an unknown rope key": (keras(rope_zoom=2), "unread: config.rope_zoom"),
    "KerasHub, a wavelength that is text": (
        keras(rope_max_wavelength="1e4"),
        ": config.rope_max_wavelength",
    ),
    "KerasHub, a config that is a list": (
        LLAMA3_KERAS | {"config": [1]},
        "value: config",
    ),
    "torchtune, another model": (
        torchtune("torchtune.models.llama9.llama9_1b"),
        "value: model._component_",
    ),
    "torchtune, a model of one's own": (torchtune("mine.llama3_1_8b"), "value: model._component_"),
    "torchtune, a function without its sizes": (
        torchtune("torchtune.models.llama3_1.llama3_1"),
        "no_value: model.num_layers",
    ),
    "torchtune, a width that Gemma's function needs": (
        torchtune("torchtune.models.gemma.gemma", **TUNED),
        "no_value: model.head_dim",
    ),
    "torchtune, an unknown rope key": (
        torchtune("torchtune.models.llama3_1.llama3_1_8b", rope_zoom=2),
        "unread: model.rope_zoom",
    ),
    "torchtune, a base that is in the builder's code": (
        torchtune("torchtune.models.llama3_1.lora_llama3_1_8b", lora_rank=8, rope_base=1e6),
        "value: model.rope_base",
    ),
    "torchtune, a size that is in the builder's code": (
        torchtune("torchtune.models.llama3_2.llama3_2_1b", max_seq_len=8192),
        "value: model.max_seq_len",
    ),
    "torchtune, a fraction that no builder takes": (
        torchtune("torchtune.models.llama3.llama3", **TUNED, partial_rotary_factor=0.5),
        "value: model.partial_rotary_factor",
    ),
    "torchtune, a factor of a law that the builder does not have": (
        torchtune("torchtune.models.llama3.llama3", **TUNED, scale_factor=8),
        "value: model.scale_factor",
    ),
    "torchtune, a width that the builder divides for": (
        torchtune("torchtune.models.llama3.llama3", **TUNED, head_dim=64),
        "value: model.head_dim",
    ),
    "torchtune, a base that Llama 2's LoRA does not take": (
        torchtune("torchtune.models.llama2.lora_llama2", **TUNED, rope_base=1e6),
        "value: model.rope_base",
    ),
    "torchtune, a base that is an interpolation": (
        torchtune("torchtune.models.llama3_1.llama3_1_8b", rope_base="${base}"),
        ": model.rope_base",
    ),
}


@each("name", WRONG)
def test_what_a_program_would_not_run_is_refused_by_its_key(name: str) -> None:
    """Under the name that the file has for it."""
    config, says = WRONG[name]
    with refused(says):
        load(config)
