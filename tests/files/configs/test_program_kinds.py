"""Classes of KerasHub and Megatron-Bridge whose layers differ, or with numbers in their code.

What is expected is written out from the programs' own code, layer by layer.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from phasor import LayerRopes, Rope
from phasor.axes import Axial
from phasor.files.reading import load

from ...each import each
from ..refusals import refused

LOCAL, WIDE = "sliding_attention", "full_attention"
GEMMA_3: dict[str, Any] = {
    "_target_": "megatron.bridge.models.gemma.gemma3_provider.Gemma3ModelProvider",
    "num_layers": 8,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "kv_channels": 64,
    "position_embedding_type": "rope",
    "rotary_base": [10000, 1000000],
    "interleaved_attn_pattern": [5, 1],
    "seq_length": 4096,
}
GEMMA_4 = GEMMA_3 | {
    "_target_": "megatron.bridge.models.gemma.gemma4_provider.Gemma4ModelProvider",
    "global_head_dim": 128,
    "global_rotary_percent": 0.25,
}
DENSE: dict[str, Any] = {
    **{key: value for key, value in GEMMA_3.items() if key != "interleaved_attn_pattern"},
    "_target_": "megatron.bridge.models.gemma.gemma4_provider.Gemma4DenseProvider",
    "rotary_base": 10000,
    "window_size": [511, 0],
    "window_attn_skip_freq": 4,
    "global_kv_channels": 128,
    "sliding_window_rope_base": 10000.0,
    "full_attention_rope_base": 1000000.0,
    "full_attention_rope_partial_factor": 0.25,
}
MIMO = GEMMA_3 | {
    "_target_": "megatron.bridge.models.mimo_v2_flash.provider.MiMoV2FlashModelProvider",
    "kv_channels": 192,
    "rotary_percent": 0.334,
    "hybrid_attention_pattern": [0, 1, 1, 1, 1, 0, 1, 1],
}
SIZES = {"num_layers": 4, "num_query_heads": 4, "num_key_value_heads": 2, "hidden_dim": 64}
DECODER = {f"decoder_{key}": size for key, size in SIZES.items() if "heads" not in key}


def bridge(config: dict[str, Any], **more: Any) -> LayerRopes:
    """The ropes of a file of Megatron-Bridge with other keys."""
    return load({"model": config | more})


def keras(name: str, **config: Any) -> LayerRopes:
    """The ropes of a file of KerasHub."""
    registered = f"keras_hub>{name}"
    return load({"class_name": name, "config": config, "registered_name": registered})


def bases(ropes: LayerRopes) -> list[float | None]:
    """The base of every layer."""
    return [rope and rope.base for rope in ropes]


def first(ropes: LayerRopes) -> Rope:
    """The rope of the first layer."""
    rope = ropes[0]
    assert rope is not None
    return rope


@each(
    "pattern, local",
    [
        ([5, 1], [1, 1, 1, 1, 1, 0, 1, 1]),
        ([2, 2], [1, 1, 0, 0, 1, 1, 0, 0]),
        ([3, 0], [1] * 8),
        ([0, 1], [0] * 8),
        ([1, 1, 1], [1, 0] * 4),
        ([LOCAL] * 2 + [WIDE] * 6, [1, 1] + [0] * 6),
    ],
)
def test_gemmas_of_megatron_bridge_have_local_and_global_layers_in_turn(
    pattern: list[Any], local: list[int]
) -> None:
    """As many as the two counts say, whatever follows them, or by a word for each layer."""
    wanted = [1e4 if is_local else 1e6 for is_local in local]
    for config in (GEMMA_3, GEMMA_4):
        assert bases(bridge(config, interleaved_attn_pattern=pattern)) == wanted


def test_gemma_4_of_megatron_bridge_turns_the_fastest_pairs_of_its_global_layers() -> None:
    """A quarter of those of a wider head, whose exponents count to its end; all are divided."""
    for factor in (1.0, 2.0):
        kinds = bridge(GEMMA_4, seq_len_interpolation_factor=factor).kinds
        wide, local = kinds["full_attention"], kinds["sliding_attention"]
        assert wide is not None
        assert local is not None
        exponents = np.arange(64) / 64
        turning = np.where(np.arange(64) < 16, 1e6**-exponents / factor, 0)
        np.testing.assert_allclose(wide.inv_freq, turning, rtol=1e-12)
        np.testing.assert_allclose(local.inv_freq, 1e4 ** -(np.arange(32) / 32) / factor)


@each(
    "more, local",
    [
        ({}, [1, 1, 1, 0] * 2),
        ({"window_attn_skip_freq": None}, [1] * 8),
        ({"window_size": None}, [0] * 8),
        ({"window_attn_skip_freq": [True, False] * 4}, [1, 0] * 4),
        ({"window_attn_skip_freq": [LOCAL, WIDE] * 4}, [1, 0] * 4),
    ],
)
def test_dense_gemma_4_of_megatron_bridge_has_a_window_in_local_layers(
    more: dict[str, Any], local: list[int]
) -> None:
    """All but every n-th, or by a list; none without a window. No factor divides its positions."""
    ropes = bridge(DENSE, seq_len_interpolation_factor=2.0, **more)
    assert bases(ropes) == [1e4 if is_local else 1e6 for is_local in local]
    assert [rope.head_dim for rope in ropes if rope] == [64 if one else 128 for one in local]
    assert {rope.inv_freq[0] for rope in ropes if rope} == {1.0}


def test_mimo_v2_flash_of_megatron_bridge_turns_a_part_of_its_heads() -> None:
    """With a base for local layers, which its code says where the file has one alone."""
    wanted = [1e6, 1e4, 1e4, 1e4, 1e4, 1e6, 1e4, 1e4]
    for base in ([10000, 1000000], 1000000):
        ropes = bridge(MIMO, rotary_base=base)
        assert bases(ropes) == wanted
        assert {rope.rotary_dim for rope in ropes if rope} == {64}


def test_an_error_about_a_base_of_mimo_v2_flash_names_the_key_of_the_file() -> None:
    """Not a place in a list that nobody wrote."""
    for base in ("1e6", 0.5, None):
        with refused("no_value" if base is None else ": model.rotary_base"):
            bridge(MIMO, rotary_base=base)


@each(
    "target, says",
    [
        ("diffusion.models.flux.flux_provider.FluxProvider", "a language model's class"),
        ("diffusion.models.wan.wan_provider.WanModelProvider", "a language model's class"),
        ("diffusion.nemotron.NemotronLabsDiffusionModelProvider", "file; pass its hf_config"),
    ],
)
def test_a_class_that_turns_by_what_its_file_does_not_say_is_refused(
    target: str, says: str
) -> None:
    """Two diffusion models, which have no type of positions, and one whose type is none."""
    config = GEMMA_3 | {"_target_": f"megatron.bridge.{target}"}
    for word in ("none", None):
        with refused(f"value: {says}", key="model._target_"):
            bridge(config, position_embedding_type=word)


@each("key", ["position_embedding_type", "rotary_base"])
def test_a_file_of_megatron_bridge_says_what_its_classes_differ_in(key: str) -> None:
    """Megatron's own defaults are not those of every class."""
    config = GEMMA_3 | {"_target_": "megatron.bridge.models.x.XProvider", "rotary_base": 5e5}
    assert bases(bridge(config)) == [5e5] * 8
    with refused("no_value", key=f"model.{key}"):
        bridge(config, **{key: None})


def test_the_t5_of_megatron_bridge_has_its_base_in_the_code() -> None:
    """No field of the class says it."""
    config = {key: value for key, value in GEMMA_3.items() if key != "rotary_base"}
    t5 = {"_target_": "megatron.bridge.models.t5_provider.T5ModelProvider"}
    assert bases(bridge(config, **t5)) == [1e4] * 8


@each("key", ["rotary_base_per_layer", "rotary_percents"])
def test_a_number_for_each_layer_is_refused(key: str) -> None:
    """Step 3.5 says them, and no Megatron-Core that is known reads them."""
    with refused("value", key=f"model.{key}"):
        bridge(GEMMA_3, **{key: [1.0] * 8})


def test_attention_beside_a_recurrence_turns() -> None:
    """Falcon H1's layers are both, where the file does not say which are."""
    falcon = {"_target_": "megatron.bridge.models.falcon_h1.FalconH1ModelProvider"}
    falcon |= {"rotary_base": 10**11, "num_layers": 4}
    ropes = bridge(GEMMA_3, **falcon, hybrid_override_pattern="PM*P")
    assert bases(ropes) == [1e11, None, 1e11, 1e11]
    assert bases(bridge(GEMMA_3, **falcon, falconh1_ratio=1.0)) == [1e11] * 4
    with refused("value", key="model.falconh1_ratio"):
        bridge(GEMMA_3, **falcon, falconh1_ratio=0.5)


def test_a_hybrid_of_megatron_turns_halves_alone() -> None:
    """Its embedding has the angles of halves, whichever pairs they would be applied to."""
    sizes = {"num_layers": 2, "hidden_size": 512, "num_attention_heads": 8}
    config = sizes | {"position_embedding_type": "rope", "hybrid_override_pattern": "M*"}
    assert bases(load(config)) == [None, 1e4]
    with refused("value", key="rotary_interleaved"):
        load(config | {"rotary_interleaved": True})


def test_moonshine_of_kerashub_pads_its_heads() -> None:
    """An even part of the padded width turns, in pairs beside each other."""
    sizes = {"hidden_dim": 72, "decoder_num_layers": 2, "decoder_num_heads": 2}
    rope = first(keras("MoonshineBackbone", **sizes, pad_head_dim_to_multiple_of=8))
    assert (rope.head_dim, rope.rotary_dim, rope.pairing) == (40, 24, "interleaved")
    rope = first(keras("MoonshineBackbone", **sizes, partial_rotary_factor=0.48))
    assert (rope.head_dim, rope.rotary_dim) == (36, 16)


def test_esm_of_kerashub_rotates_unless_it_says_absolute() -> None:
    """ESM-1 has learned positions."""
    sizes = {"num_layers": 2, "num_heads": 4, "hidden_dim": 64}
    assert bases(keras("ESMBackbone", **sizes, max_wavelength=500)) == [500, 500]
    ropes = keras("ESMBackbone", **sizes, position_embedding_type="absolute")
    assert bases(ropes) == [None, None]
    assert "learned absolute" in ropes.notes[-1]


def test_gemma_4_of_kerashub_has_wider_heads_in_every_sixth_layer() -> None:
    """Or in those of a list; its numbers have keys for each kind."""
    numbers = {"global_head_dim": 32, "global_rope_partial_rotary_factor": 0.5}
    numbers |= {"global_rope_scaling_factor": 8.0, "local_rope_wavelength": 500.0}
    config = SIZES | {"num_layers": 7, "head_dim": 16} | numbers
    assert bases(keras("Gemma4Backbone", **config)) == [500.0] * 5 + [1e6, 500.0]
    listed = keras("Gemma4Backbone", **config, layer_types=[WIDE] + [LOCAL] * 7)
    assert bases(listed) == [1e6] + [500.0] * 6
    turning = np.where(np.arange(16) < 8, 1e6 ** -(np.arange(16) / 16) / 8, 0)
    np.testing.assert_allclose(first(listed).inv_freq, turning, rtol=1e-12)


def test_gemma_3n_of_kerashub_divides_all_positions() -> None:
    """By one factor; only sliding layers have another base."""
    config = SIZES | {"head_dim": 16, "num_hidden_layers": 2, "rope_theta": 1e6}
    ropes = keras("Gemma3nBackbone", **config, layer_types=[LOCAL, WIDE], rope_scaling=4.0)
    assert bases(ropes) == [1e4, 1e6]
    assert [rope.inv_freq[0] for rope in ropes if rope] == [0.25, 0.25]


def test_qwen_3_5_of_kerashub_turns_in_every_fourth_layer() -> None:
    """A quarter of a head, whose pairs three axes take in turn."""
    ropes = keras("Qwen3_5Backbone", **SIZES, head_dim=64, mrope_section=[4, 2, 2])
    assert bases(ropes) == [None] * 3 + [1e4]
    rope = ropes[3]
    assert rope is not None
    assert rope.rotary_dim == 16
    assert [*rope.axes.axis_of_pair(8)] == [0, 1, 2, 0, 1, 2, 0, 0]


def test_the_decoders_of_t5gemma_are_read() -> None:
    """Of the second one, full layers have a base in the code and a factor."""
    config = DECODER | {"decoder_head_dim": 16, "decoder_num_attention_heads": 4}
    config |= {"decoder_layer_types": [LOCAL, WIDE] * 2, "rope_max_wavelength": 500.0}
    assert bases(keras("T5GemmaBackbone", **config)) == [500.0] * 4
    ropes = keras("T5Gemma2Backbone", **config, global_rope_scaling_factor=8.0)
    assert bases(ropes) == [500.0, 1e6] * 2
    assert [rope.inv_freq[0] for rope in ropes if rope] == [1, 1 / 8] * 2


def test_dinov3_of_kerashub_turns_by_rows_and_columns() -> None:
    """Half of the pairs each, from the same base."""
    sizes = {"num_layers": 2, "num_heads": 4, "hidden_dim": 64}
    rope = first(keras("DINOV3Backbone", **sizes))
    assert (rope.base, rope.axes) == (100, Axial((4, 4)))


def test_flux_of_kerashub_turns_by_axes_of_several_widths() -> None:
    """Each with a spectrum of its own, in pairs beside each other."""
    sizes = {"depth": 2, "depth_single_blocks": 4, "num_heads": 2, "hidden_size": 64}
    ropes = keras("FluxBackbone", **sizes, axes_dim=[8, 12, 12], theta=10000)
    rope = first(ropes)
    assert (len(ropes), rope.pairing, rope.axes) == (2, "interleaved", Axial((4, 6, 6)))


@each(
    "name", ["WhisperBackbone", "ViTBackbone", "DebertaV3Backbone", "XLNetBackbone", "FNetBackbone"]
)
def test_models_of_kerashub_without_a_rotation_say_what_they_have_instead(name: str) -> None:
    """In a note."""
    ropes = keras(name, num_layers=2, num_heads=4, hidden_dim=64)
    assert bases(ropes) == [None, None]
    assert "instead:" in ropes.notes[-1]


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a base under another class's key": (
        "LlamaBackbone",
        SIZES | {"rope_theta": 5e5},
        "unread: config.rope_theta",
    ),
    "a part of a head that no cos and sin fit": (
        "SmolLM3Backbone",
        SIZES | {"rope_theta": 5e5, "rope_layer_enabled_list": [], "partial_rotary_factor": 0.5},
        "unread: config.partial_rotary_factor",
    ),
    "a base that the class has no default for": (
        "SmolLM3Backbone",
        SIZES,
        "no_value: config.rope_theta",
    ),
    "a word that is no kind": (
        "Qwen3_5Backbone",
        SIZES | {"layer_types": [WIDE, "attention"] * 2},
        "value: config.layer_types",
    ),
    "too few words": (
        "Gemma4Backbone",
        SIZES | {"layer_types": [WIDE]},
        "value: config.layer_types",
    ),
    "widths of axes left out": (
        "FluxBackbone",
        {"depth": 2, "num_heads": 2, "hidden_size": 64, "theta": 10000},
        "no_value: config.axes_dim",
    ),
    "words left out": (
        "T5Gemma2Backbone",
        DECODER | {"decoder_head_dim": 16},
        "no_value: config.decoder_layer_types",
    ),
}


@each("name", REFUSED)
def test_what_a_class_would_not_take_is_refused(name: str) -> None:
    """By its key."""
    backbone, config, says = REFUSED[name]
    with refused(says):
        keras(backbone, **config)
