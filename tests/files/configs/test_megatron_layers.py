"""Which layers of Megatron's models have attention, and with it a rotation."""

from __future__ import annotations

from typing import Any

from phasor.files.reading import load

from ...each import each
from ..refusals import refused
from .program_files import MEGATRON, without


@each("value", [2, [1, 0, 1, 0], "([1]+[0])*2"])
def test_megatrons_delta_nets_do_not_rotate(value: Any) -> None:
    """Attention stands in every n-th layer, or where a list has a 0."""
    delta_net = {"experimental_attention_variant": "gated_delta_net"}
    ropes = load(MEGATRON | delta_net | {"linear_attention_freq": value})
    assert ropes.layer_kinds == ("linear_attention", "rope") * 2
    assert all(load(MEGATRON | {"linear_attention_freq": value}))


def test_megatrons_hybrids_rotate_in_their_layers_of_attention_alone() -> None:
    """By the letters of a pattern, whose end is another model's; they say the number of layers."""
    ropes = load(MEGATRON | {"hybrid_layer_pattern": "M*|-EG*/MM/MM", "use_rope_scaling": True})
    kinds = ("mamba", "rope", "mlp", "moe", "linear_attention", "rope")
    assert ropes.layer_kinds == kinds
    assert ropes.kinds["rope"] == load(MEGATRON)[0]
    latent = load(MEGATRON | {"hybrid_layer_pattern": "M+"}).kinds["rope"]
    assert latent is not None
    assert (latent.head_dim, latent.output_pairing) == (64, "half")


@each(
    "of_class, sections, axes",
    [
        ("qwen_vl.qwen25_vl_provider.Qwen25VLModelProvider", [16, 24, 24], "TTTT HHHH WWWW"),
        ("qwen_vl.qwen3_vl_provider.Qwen3VLMoEModelProvider", [24, 20, 20], "THWT THWT TTTT"),
        ("qwen_omni.qwen25_omni_provider.Qwen25OmniModelProvider", [24, 20, 20], "THWT THWT TTTT"),
        ("exaone.exaone45.exaone45_provider.Exaone45ModelProvider", [24, 20, 20], "THWT THWT TTTT"),
        ("ernie_vl.ernie45_vl_provider.Ernie45VLModelProvider", [22, 22, 20], "HWHW HWHW TTTT"),
    ],
)
def test_classes_of_megatron_bridge_deal_pairs_out_to_axes_as_their_code_does(
    of_class: str, sections: list[int], axes: str
) -> None:
    """Of the pairs 0 to 3, 30 to 33 and 60 to 63: time, height or width."""
    words = {"_target_": f"megatron.bridge.models.{of_class}", "rotary_interleaved": "HWH" in axes}
    words |= {"position_embedding_type": "mrope", "mrope_section": sections, "kv_channels": 128}
    rope = load(MEGATRON | words)[0]
    assert rope is not None
    letters = "".join("THW"[axis] for axis in rope.axes.axis_of_pair(rope.num_pairs))
    assert " ".join((letters[:4], letters[30:34], letters[60:])) == axes


def test_llama_4_of_megatron_bridge_does_not_turn_every_nth_layer() -> None:
    """By a word of its own; and in which precision the others turn is no other rotation."""
    words = {"nope_layer_interval": 4, "no_rope_freq": None, "apply_rotary_pos_emb_in_fp32": True}
    assert load(MEGATRON | words).layer_kinds == ("rope", "rope", "rope", "nope")


@each("word, width", [("rope", 32), ("yarn", 64)])
def test_latent_attention_turns_a_part_of_its_slice_without_yarn(word: str, width: int) -> None:
    """The embedding of YaRN is not given the fraction there."""
    words = {"multi_latent_attention": True, "qk_pos_emb_head_dim": 64, "rotary_percent": 0.5}
    rope = load(MEGATRON | words | {"rope_type": word})[0]
    assert rope is not None
    assert (rope.head_dim, rope.rotary_dim) == (64, width)


def test_megatrons_sections_are_of_halves() -> None:
    """In its own embedding of several axes, which would cut pairs that stand beside each other."""
    words = {"position_embedding_type": "mrope", "mrope_section": [16, 24, 24], "kv_channels": 128}
    with refused("value", key="rotary_interleaved"):
        load(MEGATRON | words | {"rotary_interleaved": True})


def test_code_that_makes_megatrons_layers_is_noted() -> None:
    """It may leave the rotation out of some."""
    path = "heterogeneous_layers_config_path"
    for words in ({"spec": ["mine.model", "layers"]}, {path: "blocks.json"}):
        (key,) = words
        assert f"The layers are made by {key}; some may not rotate." in load(MEGATRON | words).notes


def test_what_the_code_of_megatron_bridges_classes_does_besides_is_said() -> None:
    """Kimi K3 turns nothing, and Ministral 3 multiplies queries by position."""
    words = {"multi_latent_attention": True, "qk_pos_emb_head_dim": 64}
    of_kimi = "megatron.bridge.models.kimi.kimi_k3_provider.KimiK3ModelProvider"
    assert [*load(MEGATRON | words | {"_target_": of_kimi}).ropes] == []
    assert load(MEGATRON | words).ropes
    of_mistral = "megatron.bridge.models.ministral3.ministral3_provider.Ministral3ModelProvider"
    notes = load(MEGATRON | {"_target_": of_mistral}).notes
    assert any("llama_4_scaling_beta" in note for note in notes)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "Megatron, a file that goes on from another": (
        without(MEGATRON, "position_embedding_type") | {"extends": ["llama3_base.yaml"]},
        "value: extends",
    ),
    "Megatron, another letter of layers": (
        MEGATRON | {"hybrid_override_pattern": "M*P*"},
        "value: hybrid_override_pattern",
    ),
    "Megatron, a share of layers without their order": (
        MEGATRON | {"is_hybrid_model": True, "hybrid_attention_ratio": 0.5},
        "value: hybrid_attention_ratio",
    ),
    "Megatron, delta nets without their order": (
        MEGATRON | {"experimental_attention_variant": "gated_delta_net"},
        "no_value: linear_attention_freq",
    ),
    "Megatron, delta nets in every 0th layer": (
        MEGATRON | {"experimental_attention_variant": "gdn", "linear_attention_freq": 0},
        "value: linear_attention_freq",
    ),
    "Megatron, another variant of attention": (
        MEGATRON | {"experimental_attention_variant": "dsv4_hybrid"},
        "value: experimental_attention_variant",
    ),
}


@each("name", WRONG)
def test_what_the_file_does_not_say_alone_is_refused(name: str) -> None:
    """Under the name that the file has for it."""
    config, says = WRONG[name]
    with refused(says):
        load(config)
