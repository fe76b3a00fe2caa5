"""One rule for keys that a class does not read: neutral, noted or refused, key by key."""

from __future__ import annotations

from typing import Any

import pytest

from phasor import ConfigError, PhasorWarning
from phasor.files.configs.unread_keys import meanings
from phasor.files.reading import load

from ...each import each
from ..refusals import refused
from .config_files import small

#: Of a key beside those of a model type, by hand: what passes in silence and what does not.
KEYS: dict[str, tuple[str, list[Any], list[Any]]] = {
    "rope_interleaved": ("llama", [False, None], [True]),
    "rope_interleave": ("deepseek_v2", [True], [False]),
    "rope_is_neox_style": ("llama", [True], [False]),
    "is_neox_style": ("cohere", [False], [True]),
    "rope_traditional": ("cohere", [True], [False]),
    "rope_type": ("llama", ["default"], ["yarn"]),
    "rotary_emb_interleaved": ("nomic_bert", [False], [True]),
    "rotary_interleaved": ("llama", [False], [True]),
    "original_rope": ("cohere", [True], [False]),
    "use_hf_rope": ("llama", [True], [False]),
    "alibi": ("llama", [False, None], [True]),
    "use_alibi": ("llama", [False], [True]),
    "apply_rotary": ("llama", [True], [False]),
    "rope": ("llama", [True], [False]),
    "rotary": ("llama", [True], [False]),
    "use_pos_enc": ("lfm2", [True], [False]),
    "use_rope": ("llama", [True], [False]),
    "use_rotary": ("llama", [True], [False]),
    "use_rotary_emb": ("llama", [True], [False]),
    "use_rotary_embeddings": ("llama", [True], [False]),
    "use_rotary_pos_emb": ("llama", [True], [False]),
    "pos_emb": ("llama", ["rope"], ["alibi"]),
    "position_embedding": ("llama", ["rope"], ["sinusoidal"]),
    "position_embedding_type": ("llama", ["rope", "rotary", "absolute"], ["alibi", "nope"]),
    "use_mrope": ("qwen2", [False], [True]),
    "rope_2d": ("llama", [False], [True]),
    "rope_3d": ("llama", [False], [True]),
    "use_2d_rope": ("llama", [False], [True]),
    "use_3d_rope": ("llama", [False], [True]),
    "position_encoding_2d": ("llama", [False], [True]),
    "position_embedding_xdrope": ("llama", [False, None], [True]),
    "mrope_interleaved": ("qwen3_vl_text", [True], [False]),
    "mrope_section": ("llama", [None], [[16, 24, 24]]),
    "xdrope_section": ("llama", [None], [[16, 16, 16, 16]]),
    "rotary_emb_base": ("llama", [500000.0, 500000], [10000]),
    "rotary_embedding_base": ("llama", [500000.0], [10000]),
    "rope_embedding_base": ("llama", [500000.0], [10000]),
    "rope_freq_base": ("llama", [500000.0], [10000]),
    "rope_base": ("llama", [500000.0], [10000]),
    "rotary_base": ("llama", [500000.0], [10000]),
    "rope_theta": ("gpt_neox", [10000], [500000.0]),
    "rotary_pct": ("llama", [1.0], [0.25]),
    "rope_pct": ("stablelm", [0.25], [0.5]),
    "rope_percent": ("nemotron", [0.5], [0.25]),
    "rotary_percent": ("llama", [1.0], [0.25]),
    "rotary_emb_fraction": ("nomic_bert", [1.0], [0.5]),
    "partial_rotary_factor": ("gpt_neox", [0.25], [0.5]),
    "rotary_dim": ("llama", [128], [64]),
    "rotary_emb_dim": ("llama", [128], [64]),
    "attn_rotary_emb": ("bamba", [64], [128]),
    "attn_factor": ("llama", [1.0], [2.0]),
    "extrapolation_factor": ("llama", [1.0], [2.0]),
    "rope_condense_ratio": ("llama", [1, 1.0, None], [8]),
    "local_rope_theta": ("llama", [500000.0], [10000]),
    "rope_local_base_freq": ("llama", [500000.0], [10000]),
    "rope_local_theta": ("llama", [500000.0], [10000]),
    "rope_position_scale": ("phi3small", [1.0], [2.0]),
    "rope_scale": ("llama", [1.0], [4.0]),
    "rope_scaling_factor": ("llama", [1.0], [4.0]),
    "rotary_scaling_factor": ("llama", [1, None], [2]),
    "rotary_seq_len_interpolation_factor": ("llama", [None], [4]),
    "rotary_emb_scale_base": ("nomic_bert", [False, 0, None], [512]),
    "use_dynamic_ntk": ("llama", [False], [True]),
    "use_scaled_rope": ("llama", [False], [True]),
    "inference_rope_scaling": ("minimind", [False], [True]),
    "use_fope": ("llama", [False], [True]),
    "rope_zoom": ("llama", [False, None, 1.0], [True, 2.0, "x"]),
}
#: Keys that are about something else, with a value that they have in files.
NOTED: dict[str, Any] = {
    "alibi_bias_max": 8.0,
    "dual_chunk_attention_config": {"chunk_size": 262144},
    "flash_rotary": True,
    "indexer_rope_interleave": False,
    "llama_4_scaling_beta": 0.1,
    "logn": True,
    "memory_attention_rope_dropout": 0.1,
    "memory_attention_rope_feat_sizes": [64, 64],
    "memory_attention_rope_k_sizes": [16, 16],
    "offset_alibi": 100,
    "qk_norm_before_rope": True,
    "rope_axes_dim": [256, 256],
    "rope_full_precision": True,
    "rope_max_length": 4096,
    "rope_max_seq_len": 1024,
    "rope_temporal_skip_len": 8,
    "rotary_value": True,
    "use_flash_rotary": True,
    "use_fused_rope": True,
    "use_logn_attn": True,
}
_SIZES: dict[str, dict[str, Any]] = {
    "gpt_neox": {"rope_theta": None},
    "phi3small": {"rope_theta": None, "rope_embedding_base": 1e6},
    "deepseek_v2": {"qk_rope_head_dim": 64},
    "bamba": {"attn_layer_indices": [0]},
    "lfm2": {"full_attn_idxs": [0]},
}


def beside(model_type: str, key: str, value: Any) -> dict[str, Any]:
    """A small config of this type with one key more."""
    return small(model_type) | _SIZES.get(model_type, {}) | {key: value}


def test_every_key_of_the_table_has_its_case_here() -> None:
    """And what has none there is told by its name."""
    cases = KEYS.keys() | NOTED.keys() | {"rope_scaling"}
    assert meanings().keys() == cases - {"rope_zoom"}


@each("block", [{"type": "linear", "factor": 2.0}, {"factor": 2.0}, 2.0])
def test_a_law_inside_an_object_that_nothing_reads_is_refused(block: Any) -> None:
    """As a base there is: the file may mean the model by it."""
    config = small() | {"decoder_options": {"rope_scaling": block}}
    with refused("unread", key="decoder_options.rope_scaling"):
        load(config)
    with pytest.warns(PhasorWarning, match="decoder_options.rope_scaling"):
        assert "decoder_options.rope_scaling" in load(config, strict=False).notes[0]


@each("key", KEYS)
def test_what_the_class_does_anyway_passes_in_silence(key: str) -> None:
    """Nothing is noted either."""
    model_type, neutral, _ = KEYS[key]
    plain = load(small(model_type) | _SIZES.get(model_type, {}))
    for value in neutral:
        ropes = load(beside(model_type, key, value))
        assert ropes == plain
        assert ropes.notes == plain.notes


@each("key", KEYS)
def test_what_asks_for_something_else_is_refused_and_can_be_left_aside(key: str) -> None:
    """With strict=False it is read as the class does, with a note and a warning of the key."""
    model_type, _, asking = KEYS[key]
    plain = load(small(model_type) | _SIZES.get(model_type, {}))
    for value in asking:
        with refused("unread", key=key):
            load(beside(model_type, key, value))
        with pytest.warns(PhasorWarning, match=key):
            lenient = load(beside(model_type, key, value), strict=False)
        assert lenient == plain
        (note,) = set(lenient.notes) - set(plain.notes)
        assert key in note


@pytest.mark.parametrize("key", NOTED)
def test_what_is_about_something_else_is_noted(key: str) -> None:
    """Whatever its value."""
    ropes = load(beside("llama", key, NOTED[key]))
    assert ropes == load(small())
    (note,) = ropes.notes
    assert key in note


def test_what_glm_5_says_of_its_indexer_passes_in_silence() -> None:
    """Every file of it has the key, with what its class does."""
    config = small("glm_moe_dsa", qk_rope_head_dim=64)
    assert load(config | {"indexer_rope_interleave": True}).notes == load(config).notes


def test_a_key_that_one_kind_of_layers_answers_asks_for_nothing_else() -> None:
    """Files of Laguna and Gemma 4 have such a key beside blocks by kind, and classes ignore it."""
    kinds = {"layer_types": ["full_attention", "sliding_attention"] * 2}
    full = {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}
    local = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
    blocks = {"rope_parameters": {"full_attention": full, "sliding_attention": local}}
    laguna = small("laguna", head_dim=64, rope_theta=None, **kinds, **blocks)
    for fraction in (0.5, 1.0):
        assert load(laguna | {"partial_rotary_factor": fraction}) == load(laguna)
    with refused("unread", key="partial_rotary_factor"):
        load(laguna | {"partial_rotary_factor": 0.25})


def test_the_rule_holds_for_diffusers_too() -> None:
    """Flux's code turns by 10000 whatever its file says."""
    config = {"_class_name": "FluxTransformer2DModel", "num_layers": 19, "num_single_layers": 38}
    plain = load(config)
    assert load(config | {"rope_theta": 10000}) == plain
    with refused("unread", key="rope_theta"):
        load(config | {"rope_theta": 256.0})
    with pytest.warns(PhasorWarning, match="rope_theta"):
        assert load(config | {"rope_theta": 256.0}, strict=False) == plain
    cogview = {"_class_name": "CogView4Transformer2DModel", "num_layers": 28}
    assert load(cogview | {"rope_axes_dim": [256, 256]}).ropes == load(cogview).ropes


@pytest.mark.parametrize("key", ["rope_condense_ratio", "rope_scaling_factor"])
def test_a_key_that_divides_positions_may_say_what_the_law_says(key: str) -> None:
    """LongChat's 8 beside a linear law of 8 is one fact; beside 4, or alone, it is refused."""
    linear = {"rope_scaling": {"type": "linear", "factor": 8.0}}
    assert load(small(**linear, **{key: 8})) == load(small(**linear))
    for other in ({}, {"rope_scaling": {"type": "linear", "factor": 4.0}}):
        with refused("unread", key=key):
            load(small(**other, **{key: 8}))


def test_three_axes_may_be_asked_for_where_there_are_three() -> None:
    """ERNIE 4.5 VL's files say it twice; two axes it has not."""
    ernie = small("ernie4_5_moe_vl", rope_scaling={"mrope_section": [22, 22, 20]})
    assert load(ernie | {"rope_3d": True, "use_3d_rope": True}) == load(ernie)
    with refused("unread", key="use_2d_rope"):
        load(ernie | {"use_2d_rope": True})


def test_all_strays_of_a_file_are_in_one_error() -> None:
    """At its top, in its block, and each with what is known about it."""
    block = {"type": "linear", "factor": 2.0, "mrope_section": [16, 24, 24]}
    with pytest.raises(ConfigError) as caught:
        load(small(rope_scaling=block, alibi=True, rope_interleaved=True))
    for said in (
        r"rope_scaling.mrope_section (got [16, 24, 24]) gives sections",
        r"alibi (got True) asks for ALiBi",
        r"rope_interleaved (got True) sets which coordinates turn together",
    ):
        assert said in str(caught.value)


UNUSED = {
    "a name": ({"type": "linear", "factor": 2.0}, {"name": "pi"}),
    "finetuned": ({"type": "linear", "factor": 2.0}, {"finetuned": True}),
    "the original context of a linear law": (
        {"type": "linear", "factor": 2.0},
        {"original_max_position_embeddings": 4096},
    ),
    "the factor of no law": ({"rope_type": "default"}, {"factor": 8.0}),
    "the betas of no law": ({"rope_type": "default"}, {"beta_fast": 32}),
}


@pytest.mark.parametrize("name", UNUSED)
def test_keys_of_a_block_that_its_law_does_not_use_are_noted(name: str) -> None:
    """They cannot change the rotation."""
    block, more = UNUSED[name]
    ropes = load(small(rope_scaling=block | more))
    assert ropes == load(small(rope_scaling=block))
    (note,) = ropes.notes
    assert f"rope_scaling.{next(iter(more))}" in note


def test_what_the_class_reads_and_no_rope_says_is_refused_either_way() -> None:
    """The first ChatGLM's two rotations are not left aside."""
    for strict in (True, False):
        with refused("type_unread: two halves of a head"):
            load({"model_type": "chatglm", "position_encoding_2d": True}, strict=strict)


def test_an_unknown_type_can_be_read_as_a_known_one() -> None:
    """And the notes say so."""
    config = small("mymodel")
    ropes = load(config, like="llama")
    assert ropes == load(small())
    assert any("llama" in note and "mymodel" in note for note in ropes.notes)
    with refused("like"):
        load(config, like="lama")


def test_sizes_that_the_class_assumes_are_noted_with_a_warning() -> None:
    """As transformers' LlamaConfig: 32 layers of 4096 with 32 heads."""
    with pytest.warns(PhasorWarning, match="num_hidden_layers 32"):
        ropes = load({"model_type": "llava", "text_config": {"model_type": "llama"}})
    assert (len(ropes), ropes[0].head_dim if ropes[0] else 0) == (32, 128)
    assert any("assumes" in note for note in ropes.notes)


def test_contexts_that_disagree_matter_where_a_law_is_computed_from_them() -> None:
    """Elsewhere the first is taken, with a warning."""
    config = small(seq_length=2048)
    with pytest.warns(PhasorWarning, match="several contexts"):
        assert load(config).context == 8192
    law = {"type": "dynamic", "factor": 2.0}
    with (
        pytest.warns(PhasorWarning),
        refused("two_values", first_name="max_position_embeddings", first=8192, name="seq_length"),
    ):
        load(config | {"rope_scaling": law})


def test_notes_take_no_part_in_equality() -> None:
    """Nor does the name."""
    assert load(small(use_logn_attn=True, _name_or_path="a/b")) == load(small())
    assert load(small()) != load(small(rope_theta=1e4))


NULLS = {
    "gpt-oss rounds nothing": (
        small(
            "gpt_oss",
            rope_scaling={
                "rope_type": "yarn",
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "truncate": None,
            },
        ),
        lambda rope: rope.scaling.truncate is False,
    ),
    "recurrent_gemma turns whole heads": (
        small("recurrent_gemma", partial_rotary_factor=None, block_types=["attention"]),
        lambda rope: rope.rotary_dim == 128,
    ),
    "moonshine turns whole heads": (
        small("moonshine", partial_rotary_factor=None),
        lambda rope: rope.rotary_dim == 128,
    ),
}


@pytest.mark.parametrize("name", NULLS)
def test_an_explicit_null_is_what_the_class_makes_of_it(name: str) -> None:
    """Not an absent key."""
    config, expected = NULLS[name]
    assert all(expected(rope) for rope in load(config).ropes)


def test_a_model_without_rotation_is_answered_with_what_it_has_instead() -> None:
    """None for every layer, and a sentence."""
    for model_type, instead in (
        ("gpt2", "learned"),
        ("bert", "learned"),
        ("clip", "learned"),
        ("whisper", "sinusoidal"),
        ("mpt", "ALiBi"),
        ("t5", "bias"),
        ("jamba", "Mamba"),
        ("kimi_linear", "recurrent"),
    ):
        ropes = load({"model_type": model_type, "num_hidden_layers": 6, "rope_scaling": {}})
        assert len(ropes) == 6 or model_type == "t5"
        assert not any(ropes)
        assert any(instead in note for note in ropes.notes)
    baichuan = {"model_type": "baichuan", "num_hidden_layers": 40, "hidden_size": 5120}
    assert "ALiBi" in load(baichuan).notes[-1]
