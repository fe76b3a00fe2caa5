"""What a file says that queries are multiplied by, as its class reads it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from phasor import ConfigError, QueryFactor, load, preset

from ...each import each
from .config_files import gguf, small

BETA = {"llama_4_scaling_beta": 0.3, "original_max_position_embeddings": 50, "rope_theta": 1e4}
YARN = {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0, **BETA}
LLAMA4 = small("llama4_text")
LATENT = {"qk_rope_head_dim": 64, "qk_nope_head_dim": 64}
PARAMS = {"dim": 512, "n_layers": 4, "n_heads": 4, "rope_theta": 5e5, "multiple_of": 256}
STEPS_OF_LLAMA4 = QueryFactor(strength=0.1, length=8192, first=1)
STEPPED = QueryFactor(strength=0.5, length=64, first=1)
SCALED = {"attention__temperature_scale": 0.2}

#: A file, and the factor of each of its layers; None for 1.
FILES: dict[str, tuple[dict[str, Any], list[QueryFactor | None]]] = {
    "Llama 4's class default": (LLAMA4, [None, None, None, STEPS_OF_LLAMA4]),
    "other numbers, inside a larger config": (
        {"model_type": "llama4",
         "text_config": LLAMA4 | {"floor_scale": 64, "attn_scale": 0.5,
                                  "no_rope_layers": [0, 1, 1, 0]}},
        [STEPPED, None, None, STEPPED],
    ),
    "a whole number for a switch": (
        LLAMA4 | {"attn_temperature_tuning": 4}, [None, None, None, STEPS_OF_LLAMA4],
    ),
    "off": (LLAMA4 | {"attn_temperature_tuning": False}, [None] * 4),
    "null is the class default": (
        LLAMA4 | {"attn_temperature_tuning": None, "attn_scale": None},
        [None, None, None, STEPS_OF_LLAMA4],
    ),
    "Ministral": (
        small("ministral3", rope_theta=None, rope_parameters=YARN),
        [QueryFactor(strength=0.3, length=50)] * 4,
    ),
    "Ministral without a law": (
        small("ministral3", rope_theta=None, rope_parameters={"rope_type": "default", **BETA}),
        [QueryFactor(strength=0.3, length=50)] * 4,
    ),
    "Ministral without a block, of another context": (small("ministral3", rope_theta=None), [
        QueryFactor(strength=0.1, length=16384)] * 4),
    "Mistral 4 in a larger config": (
        {"model_type": "mistral3",
         "text_config": small("mistral4", rope_theta=None, rope_parameters=YARN, **LATENT)},
        [QueryFactor(strength=0.3, length=50)] * 4,
    ),
    "a class that reads no such key": (
        small(rope_theta=None, rope_parameters={"rope_type": "default", **BETA}), [None] * 4,
    ),
    "Qwen": (
        small("qwen", rope_theta=None, max_position_embeddings=None, seq_length=300,
              use_logn_attn=True, use_dynamic_ntk=False),
        [QueryFactor(strength=1 / math.log(300), length=300, first=1, form="log")] * 4,
    ),
    "Inkling by a list": (
        {"model_type": "inkling_text", "num_hidden_layers": 3, "local_layer_ids": [0, 2],
         "log_scaling_n_floor": 40},
        [None, QueryFactor(strength=0.1, length=40, first=1, form="log"), None],
    ),
    "Mistral's params.json": (
        PARAMS | {"llama_4_scaling": {"original_max_position_embeddings": 70, "beta": 0.2}},
        [QueryFactor(strength=0.2, length=70)] * 4,
    ),
    "Meta's params.json": (
        PARAMS | {"nope_layer_interval": 2, "attn_temperature_tuning": True, "floor_scale": 90.0},
        [None, QueryFactor(strength=0.1, length=90, first=1)] * 2,
    ),
    "Meta's code has it off": (PARAMS | {"nope_layer_interval": 2}, [None] * 4),
    "llama.cpp's constants": (gguf("llama4"), [None, None, None, STEPS_OF_LLAMA4]),
    "a GGUF file of Ministral": (
        gguf("mistral3", **SCALED, rope__scaling__original_context_length=77),
        [QueryFactor(strength=0.2, length=77)] * 4,
    ),
    "a GGUF file of Mistral Large": (
        gguf("deepseek2", **SCALED, attention__temperature_length=88, rope__dimension_count=64),
        [QueryFactor(strength=0.2, length=88)] * 4,
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.* is used, which extends .* although:phasor.PhasorWarning")
@each("name", FILES)
def test_every_layer_has_the_factor_of_its_file(name: str) -> None:
    """Also those that do not rotate, and 1 where the class has none."""
    file, factors = FILES[name]
    ropes = load(file)
    assert [ropes.query_factor(i) for i in range(len(ropes))] == [
        factor or QueryFactor() for factor in factors
    ]


def test_a_key_that_is_read_is_no_note() -> None:
    """And one that its class does not read still is."""
    read = load(small("ministral3", rope_theta=None, rope_parameters=YARN))
    assert not any("llama_4_scaling_beta" in note for note in read.notes)
    other = load(FILES["a class that reads no such key"][0])
    assert any("llama_4_scaling_beta (got 0.3) scales queries" in note for note in other.notes)


def test_a_length_whose_logarithm_divides_has_one() -> None:
    """Of 1 it is 0; without the key the class has 8192."""
    file = small("qwen", rope_theta=None, max_position_embeddings=None)
    assert load(file).query_factor(0).length == 8192
    with pytest.raises(ConfigError, match=r"seq_length must be .* from 2 .* got 1"):
        load(file | {"seq_length": 1})


@each("key, value", [("attn_scale", "much"), ("floor_scale", 0), ("floor_scale", 2.5)])
def test_a_number_that_is_none_is_named(key: str, value: object) -> None:
    """With what came in its place."""
    with pytest.raises(ConfigError, match=rf"{key} must be .*got {value!r}"):
        load(LLAMA4 | {key: value})


def test_presets_have_what_their_releases_say() -> None:
    """The notes that said it are gone."""
    assert preset("llama-4-scout").query_factors == {"nope": STEPS_OF_LLAMA4}
    assert preset("ministral-3-3b").query_factor(9) == QueryFactor(strength=0.1, length=16384)
    small4 = preset("mistral-small-4-119b")
    assert small4.query_factor(9) == QueryFactor(strength=0.1, length=8192)
    assert not any("Queries" in note for note in small4.notes)
    path = Path(__file__).with_name("mistral_params.json")
    assert load(json.loads(path.read_text("utf-8"))).query_factor(0).length == 16384
