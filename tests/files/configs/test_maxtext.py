"""Configurations of MaxText: its models' own, and what decides in them.

Those of models that are presets have the ropes of these, whose numbers are from other files; by
which pairs each class of MaxText rotates, its code says.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from phasor import preset
from phasor.files.reading import load
from phasor.files.texts import parse_yaml
from phasor.scaling import Linear, Proportional

from ...each import each
from ..refusals import refused

#: By preset: the keys of its file in MaxText's ``configs/models``, with its name, and the pairs.
MODELS: dict[str, dict[str, Any]] = parse_yaml(
    b"""
llama-2-7b:
  {model_name: llama2-7b, decoder_block: llama2, base_num_decoder_layers: 32, pairs: half}
llama-3.1-8b:
  {model_name: llama3.1-8b, decoder_block: llama2, base_num_decoder_layers: 32,
   rope_max_timescale: 500_000, pairs: interleaved}
llama-4-maverick:
  {decoder_block: llama4, base_num_decoder_layers: 48, rope_max_timescale: 500000,
   rope_type: llama3.1, rope_use_scale: false, nope_layer_interval: 4, temperature_tuning: true,
   pairs: interleaved}
gemma-2-9b:
  {model_name: gemma2-9b, decoder_block: gemma2, base_num_decoder_layers: 21, head_dim: 256,
   pairs: half}
gemma-3-12b:
  {model_name: gemma3-12b, decoder_block: gemma3, base_num_decoder_layers: 48, head_dim: 256,
   local_rope_max_timescale: 10_000, rope_max_timescale: 1_000_000,
   rope_linear_scaling_factor: 8.0, pairs: half}
gemma-4-31b:
  {model_name: gemma4-31b, decoder_block: gemma4, base_num_decoder_layers: 60, head_dim: 256,
   global_head_dim: 512, local_rope_max_timescale: 10000, global_rope_max_timescale: 1000000,
   rope_max_timescale: 1000000, global_rope_proportion: 0.25, local_rope_proportion: 1.0,
   pairs: half}
gemma-4-e2b:
  {model_name: gemma4-e2b, decoder_block: gemma4_small, base_num_decoder_layers: 35,
   head_dim: 256, global_head_dim: 512, local_rope_max_timescale: 10000,
   global_rope_max_timescale: 1000000, pairs: half}
gpt-oss-20b:
  {decoder_block: gpt_oss, base_num_decoder_layers: 24, head_dim: 64, rope_type: yarn,
   rope_max_timescale: 150_000, max_position_embeddings: 131072, rope_factor: 32, beta_fast: 32,
   beta_slow: 1, original_max_position_embeddings: 4096, rope_interleave: false,
   rope_truncate: false, rope_attention_scaling: true, pairs: half}
deepseek-v3:
  {decoder_block: deepseek, attention_type: mla, base_num_decoder_layers: 61,
   qk_rope_head_dim: 64, mscale: 1.0, rope_type: yarn, rope_max_timescale: 10_000,
   max_position_embeddings: 163840, original_max_position_embeddings: 4096, rope_factor: 40,
   beta_fast: 32, rope_interleave: true, rope_truncate: true, pairs: interleaved}
qwen3-next-80b-a3b:
  {decoder_block: qwen3_next, base_num_decoder_layers: 48, head_dim: 256,
   inhomogeneous_layer_cycle_interval: 4, rope_max_timescale: 10000000,
   partial_rotary_factor: 0.25, pairs: half}
qwen3.5-35b-a3b:
  {decoder_block: qwen3_5, base_num_decoder_layers: 40, head_dim: 256,
   inhomogeneous_layer_cycle_interval: 4, rope_max_timescale: 10000000,
   partial_rotary_factor: 0.25, use_mrope: true, mrope_section: [11, 11, 10], pairs: half}
qwen3-vl-4b:
  {decoder_block: qwen3, base_num_decoder_layers: 36, rope_max_timescale: 5000000,
   use_mrope: true, mrope_section: [24, 20, 20], pairs: half}
""",
    "models.yml",
)
LATENT = {"decoder_block": "deepseek", "attention_type": "mla"}
#: With a plain rotation of heads that are as wide as MaxText assumes.
PLAIN: dict[str, Any] = {
    "model_name": "default",
    "base_num_decoder_layers": 2,
    "rope_max_timescale": 500_000,
}


@each("name", MODELS)
def test_a_models_own_file_has_the_ropes_of_its_preset(name: str) -> None:
    """Layer by layer: which rotate, by which frequencies, axes and factors."""
    config = {key: value for key, value in MODELS[name].items() if key != "pairs"}
    ropes, model = load(config), preset(name)
    assert [rope is None for rope in ropes] == [rope is None for rope in model]
    for rope, known in zip(ropes, model, strict=True):
        if rope is None or known is None:
            continue
        assert np.allclose(rope.inv_freq, known.inv_freq, rtol=1e-14, atol=0)
        assert (rope.pairing, rope.axes) == (MODELS[name]["pairs"], known.axes)
        assert (rope.head_dim, rope.rotary_dim) == (known.head_dim, known.rotary_dim)
        assert math.isclose(rope.attention_factor, known.attention_factor)
        assert math.isclose(rope.softmax_factor, known.softmax_factor)
    assert ropes.query_factors == model.query_factors


def test_the_end_of_heads_turns_in_the_block_of_deepseek_4() -> None:
    """Layers that compress have a base of their own."""
    sizes = {"decoder_block": "deepseek4", "head_dim": 512, "qk_rope_head_dim": 64}
    layers = {"base_num_decoder_layers": 4, "compress_ratios": [0, 0, 4, 128]}
    ropes = load({**sizes, **layers, "rope_max_timescale": 10_000})
    assert [rope and rope.base for rope in ropes] == [1e4, 1e4, 1.6e5, 1.6e5]
    assert {(rope.rotary_start, rope.rotary_dim, rope.pairing) for rope in ropes.ropes} == {
        (448, 64, "interleaved")
    }
    with refused("value", key="compress_ratios"):
        load({**sizes, **layers, "rope_max_timescale": 10_000, "compress_ratios": [0]})


def test_a_file_without_the_models_name_is_refused_where_that_decides() -> None:
    """By it MaxText tells Llama 3.1's interleaved pairs and law from Llama 3's halves."""
    config = {key: value for key, value in PLAIN.items() if key != "model_name"}
    for block in ("llama2", "gemma3", "gemma4", "gemma4_small"):
        with refused("no_model_name", key="model_name"):
            load({**config, "decoder_block": block})
    assert load({**config, "decoder_block": "mistral"}).ropes[0].base == 5e5
    assert load({**config, "rope_type": "llama3.1"}).ropes[0].pairing == "interleaved"


def test_what_is_assumed_is_noted() -> None:
    """As of the base and the width of heads, which ``base.yml`` has."""
    notes = " ".join(load({"model_name": "default", "base_num_decoder_layers": 2}).notes)
    for key, value in {
        "decoder_block": "llama2",
        "head_dim": 128,
        "rope_max_timescale": 10000,
    }.items():
        assert f"The file has no {key}; {value} is what MaxText assumes." in notes


def test_the_least_time_scale_divides_positions() -> None:
    """And with it the base is the quotient of both."""
    (rope,) = load({**PLAIN, "rope_min_timescale": 4, "rope_linear_scaling_factor": 0.5}).ropes
    assert (rope.base, rope.scaling) == (125_000.0, Linear(factor=2.0))


def test_the_models_name_decides_about_local_layers() -> None:
    """Gemma 3's are not divided, and in Gemma 4's a part of the pairs stands still."""
    config = {**PLAIN, "base_num_decoder_layers": 6, "rope_linear_scaling_factor": 8.0}
    for name, law in (("gemma3-4b", None), ("default", Linear(factor=8.0))):
        local = load({**config, "decoder_block": "gemma3", "model_name": name})[0]
        assert local is not None
        assert local.scaling == law
    config = {**PLAIN, "base_num_decoder_layers": 6, "decoder_block": "gemma4"}
    for name, law in (("gemma4-31b", Proportional(fraction=0.25)), ("default", None)):
        rope = load({**config, "model_name": name})[5]
        assert rope is not None
        assert (rope.scaling, rope.rotary_dim) == (law, 128 if law else 32)


def test_latent_attention_scales_its_softmax_without_yarn_too() -> None:
    """By the numbers of YaRN, which MaxText assumes as DeepSeek's."""
    ropes = load({**LATENT, "base_num_decoder_layers": 2, "rope_max_timescale": 10_000})
    assert ropes.ropes[0].softmax_factor == 1
    factor = (0.1 * math.log(40) + 1) ** 2
    (said,) = [note for note in ropes.notes if "softmax" in note]
    assert float(said.split()[6]) == pytest.approx(factor, rel=1e-15)


@each("key, value", [
    ("partial_rotary_factor", 0.5), ("use_mrope", True), ("local_rope_max_timescale", 10_000),
    ("nope_layer_interval", 4), ("temperature_tuning", True), ("global_parameter_scale", 2),
])  # fmt: skip
def test_a_key_that_another_class_reads_is_refused(key: str, value: Any) -> None:
    """At another value than that which changes nothing; if asked, it is noted."""
    with refused("value: as MaxText does not read it", key=key):
        load({**PLAIN, key: value})
    assert any(
        f"does not read {key}" in note for note in load({**PLAIN, key: value}, strict=False).notes
    )


def test_blocks_without_a_rotation_have_none() -> None:
    """GPT-3's adds learned embeddings."""
    ropes = load({**PLAIN, "decoder_block": "gpt3"})
    assert {*ropes} == {None}
    assert any("learned absolute position embeddings" in note for note in ropes.notes)
