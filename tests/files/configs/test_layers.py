"""What a config says of single layers: widths of their heads, bases of their ropes, scaling."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from phasor.files.checkpoint.model import describe
from phasor.files.configs.facts import table
from phasor.files.configs.model_class import language_models
from phasor.files.configs.source import JsonObject
from phasor.files.reading import load
from phasor.scaling import Linear

from ...each import each
from ..refusals import refused
from .config_files import sized

KINDS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
GEMMA = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1e6,
    },
}


def gemma4(apart: Any, **more: Any) -> dict[str, Any]:
    """A Gemma 4 that transformers 5.23 saved: head widths stand at single layers."""
    keys = {"layer_types": KINDS, "rope_parameters": GEMMA, "head_dim": 256}
    return sized("gemma4_text", **keys, per_layer_config=apart, **more)


@pytest.mark.parametrize(
    ("apart", "widths"),
    [
        ({"01": {"head_dim": 384}, "03": {"head_dim": 384}}, (256, 384)),
        ({"1": {"head_dim": 384}, "3": {"head_dim": 384}}, (256, 384)),
        ({1: {"head_dim": 384}, 3: {"head_dim": 384}}, (256, 384)),
        ({"01": {"num_key_value_heads": 1}}, (256, 256)),
        ({"00": {"head_dim": 128}, "02": {"head_dim": 128}}, (128, 256)),
        ({}, (256, 256)),
        (None, (256, 512)),
    ],
    ids=["full", "plain numbers", "integers", "other keys", "sliding", "empty", "null"],
)
def test_single_layers_may_have_wider_heads(apart, widths):
    """The file's word at a layer counts, and its head_dim elsewhere; else the class default."""
    ropes = load(gemma4(apart))
    found = [ropes.kinds[kind].head_dim for kind in KINDS[:2]]
    assert tuple(found) == widths


@pytest.mark.parametrize(
    ("apart", "more", "says"),
    [
        ({"01": {"head_dim": 384}}, {}, "layer_widths: full_attention"),
        ({"04": {"head_dim": 384}}, {}, "value: per_layer_config"),
        ({"first": {}}, {}, "value: per_layer_config"),
        ({"01": {"rope_theta": 1e5}}, {}, "value: per_layer_config.01.rope_theta"),
        ({"01": {"head_dim": "wide"}}, {}, ": per_layer_config.01.head_dim"),
        (
            {"01": {"head_dim": 384}, "03": {"head_dim": 384}},
            {"global_head_dim": 512},
            "two_values: global_head_dim",
        ),
    ],
    ids=["one of two", "no such layer", "no number", "a base", "no width", "another width"],
)
def test_what_single_layers_may_not_say_is_refused(apart, more, says):
    """With the key."""
    with refused(says):
        load(gemma4(apart, **more))


def test_a_list_of_bases_says_which_layers_turn():
    """0 is none; the mask's kinds of layers play no part."""
    ropes = load(
        sized(
            "muse_spark_text", rope_theta=5e5, layer_rope_theta=[5e5, 0, 5e5, 0], layer_types=KINDS
        )
    )
    assert ropes.layer_kinds == ("rope", "nope", "rope", "nope")
    assert (ropes[0].base, ropes[1]) == (5e5, None)


@pytest.mark.parametrize(
    ("bases", "says"),
    [
        (None, "no_value: layer_rope_theta"),
        ([1e4, 0, 0], "value: layer_rope_theta"),
        ([1e4, 2e4, 0, 0], "value: layer_rope_theta"),
        ([2e4, 0, 0, 0], "two_values: rope_theta"),
    ],
    ids=["absent", "short", "two bases", "not the file's"],
)
def test_bases_that_say_something_else_are_refused(bases, says):
    """A list is as long as the model, and of one base."""
    with refused(says):
        load(sized("granite_swa", rope_theta=1e4, layer_rope_theta=bases))


@pytest.mark.parametrize(
    ("listed", "kinds"),
    [([0, 2], ("scaled", "unscaled") * 2), (None, ("scaled",) * 4)],
    ids=["listed", "absent"],
)
def test_a_list_of_layers_says_which_are_scaled(listed, kinds):
    """Molmo 2's; without one, all are."""
    law = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    ropes = load(sized("molmo2_text", rope_parameters=law, rope_scaling_layers=listed))
    assert ropes.layer_kinds == kinds
    assert ropes.kinds["scaled"].scaling == Linear(factor=8.0)
    assert "unscaled" not in ropes.kinds or ropes.kinds["unscaled"].scaling is None


@pytest.mark.parametrize(
    ("model_type", "word"),
    [
        ("cohere2", "full_atention"),
        ("cohere2", "attention"),
        ("exaone4", "full"),
        ("gemma3_text", "sliding"),
        ("flint", "full"),
        ("qwen2", "global"),
    ],
)
def test_an_unknown_word_for_a_kind_of_layer_is_refused(model_type, word):
    """A misspelt kind would lose what sets it apart: its base, or that it does not turn."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention", word]
    keys = sized(model_type, layer_types=kinds, sliding_window=128, head_dim=128)
    with refused("layer_kind", key="layer_types", i=3, word=word):
        load(keys)


def test_the_words_of_transformers_are_known():
    """All that it allows, and the old ones that it renames."""
    renamed = transformers.configuration_utils._LEGACY_LAYER_TYPE_REMAP
    allowed = {*transformers.configuration_utils.ALLOWED_ATTN_LAYER_TYPES, *renamed}
    assert allowed <= set(table().files["layer_words"])


def test_a_type_whose_pattern_is_in_its_files_wants_the_list():
    """Rather than a guess at which layers turn."""
    assert load(sized("flint", layer_types=KINDS)).kinds["full_attention"] is None
    with refused("no_value", key="layer_types"):
        load(sized("flint"))


def test_a_latent_slice_may_be_stated_as_a_fraction_of_head_dim():
    """64 of 256, as dots3 writes it; of neither width it is a contradiction."""
    latent = {"qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "head_dim": 256}
    block = {"rope_type": "default", "rope_theta": 1e4}
    keys = sized("dots3_note_text", layer_types=["sliding_attention"] * 4, **latent)
    quarter = {"sliding_attention": block | {"partial_rotary_factor": 0.25}}
    assert load(keys | {"rope_parameters": quarter})[0].head_dim == 64
    half = {"sliding_attention": block | {"partial_rotary_factor": 0.5}}
    with refused("latent_fraction", width_key="qk_rope_head_dim"):
        load(keys | {"rope_parameters": half})


@pytest.mark.parametrize("key", table().files["language_models"])
def test_a_language_model_is_found_inside_a_larger_one(key):
    """Under each of the names it is given."""
    inner = sized("llama", rope_theta=5e5)
    assert load({"model_type": "outer", key: inner})[0].base == 5e5
    levels = language_models(JsonObject({"model_type": "outer", key: inner}))
    assert [level.path for level in levels] == ["", key]
    assert describe({"model_type": "outer", key: inner}).model_type == "llama"


def test_a_language_model_that_is_no_object_is_refused_by_name(tmp_path):
    """Wherever one is looked for."""
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "llama", "text_config": "x"}', "utf-8")
    for read in (load, describe):
        with refused("value", key="text_config", got="x"):
            read(path)


@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_deepseek_v4_without_ratios_has_the_layers_of_its_class(count):
    """Two of heavy compression, and then one of each in turn."""
    config = sized("deepseek_v4", num_hidden_layers=count, head_dim=64)
    of_class = transformers.CONFIG_MAPPING["deepseek_v4"](num_hidden_layers=count).layer_types
    assert list(load(config).layer_kinds) == of_class


@each("count, first, every", [(3, 0, 4), (9, 3, 2), (5, 5, 3), (7, 1, 4)])
def test_layers_without_a_list_are_those_of_their_class(count: int, first: int, every: int) -> None:
    """Whether the first ones have an interval of their own, or no layer would attend to all."""
    sizes = {"num_hidden_layers": count}
    prefix = {"first_k_dense_replace": first, "prefix_dense_sliding_window_pattern": every}
    for name, more in (("cohere2_moe", prefix), ("olmo_hybrid", {})):
        of_class = transformers.CONFIG_MAPPING[name](**sizes, **more).layer_types
        assert list(load(sized(name, **sizes, **more)).layer_kinds) == of_class


@each("given, found", [([0, 1], "nrrr"), ([1, 0, 1, 0, 0, 0], "rnrn"), ([], "rrrr")])
def test_smollm3_of_keras_hub_rotates_beyond_its_list(given: list[int], found: str) -> None:
    """And its list may be longer than the layers."""
    sizes = {"num_layers": 4, "num_attention_heads": 2, "hidden_dim": 128, "rope_theta": 5e6}
    enabled = {"rope_layer_enabled_list": [bool(one) for one in given]}
    ropes = load({"class_name": "SmolLM3Backbone", "module": "k", "config": sizes | enabled})
    assert [kind[0] for kind in ropes.layer_kinds] == [*found]
