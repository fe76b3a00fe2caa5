"""Tiny models of the architectures of transformers, and what is recorded while they run."""

from __future__ import annotations

import cmath

import numpy as np
import pytest
import torch
from tools.rotations import half_rows
from tools.tiny_models import (
    choose_layers,
    model_class,
    not_built,
    small_values,
    special_cases,
    tiny_config,
    tiny_model,
)
from tools.verdicts import record_calls, verdict

from phasor import ConfigError
from phasor.scaling import Llama3

from ..offline import refuse_connections


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """No test may open a connection."""
    refuse_connections(monkeypatch)


def tokens_at(positions):
    """Arguments for a forward pass of one sequence."""
    ids = torch.tensor([list(positions)])
    return {"input_ids": 3 + ids % 7, "position_ids": ids}


def test_what_is_recorded_is_what_the_model_computes():
    """Llama's cosines, by the angles of the paper; every layer, queries and keys."""
    model = tiny_model("llama")
    positions = [0, 1, 5, 40, 41]
    calls = record_calls(model, tokens_at(positions))
    assert [(call.layer, call.arguments) for call in calls] == [(0, ("q", "k")), (1, ("q", "k"))]
    for call in calls:
        assert (call.width, call.place) == (128, (0, 128))
        cos, sin = half_rows(call.rows, call.signature)
        assert cos.shape == sin.shape == (5, 64)
        for token, pair in np.ndindex(5, 64):
            turn = cmath.exp(1j * positions[token] * 10_000 ** (-pair / 64))
            # an angle of at most 41 has lost 17 roundings of float32, and its cosine one
            assert abs(complex(cos[token, pair], sin[token, pair]) - turn) <= 41 * 18 * 2.0**-24


def test_a_slice_is_found_in_the_heads_it_was_cut_from():
    """Phi turns 32 of 64 coordinates and puts them first; MLA's stand behind 128 others."""
    for model_type, place in (("phi", (0, 64)), ("deepseek_v3", (128, 192))):
        model = tiny_model(model_type)
        first = record_calls(model, tokens_at(range(5)))[0]
        assert first.place == place


def test_recording_leaves_the_code_as_it_was():
    """Its functions and the model's hooks."""
    model = tiny_model("llama")
    code = __import__(type(model).__module__, fromlist=["x"])
    before = code.apply_rotary_pos_emb, code.eager_attention_forward
    record_calls(model, tokens_at(range(3)))
    assert (code.apply_rotary_pos_emb, code.eager_attention_forward) == before
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_tiny_model_is_small_repeatable_and_leaves_the_generator_alone():
    """float32, evaluating, with the weights of its seed."""
    state = torch.get_rng_state()
    first, again, other = (tiny_model("llama", seed=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    weights = [next(iter(one.parameters())) for one in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert weights[0].dtype == torch.float32
    assert not first.training
    assert sum(p.numel() for p in first.parameters()) < 3_000_000


def test_a_tiny_model_keeps_the_rotation_of_a_given_config():
    """Llama 3.1's law, and none of its size."""
    law = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 8192, "rope_theta": 500000.0}  # fmt: skip
    small = tiny_config("llama", {
        "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
        "num_hidden_layers": 32, "rope_parameters": law, "max_position_embeddings": 131072,
    })  # fmt: skip
    assert (small.num_hidden_layers, small.num_attention_heads, small.head_dim) == (2, 4, 128)
    assert small.rope_parameters == law
    said = verdict("llama", small.to_dict())
    found = said.kinds[0].found
    assert said.right
    assert found.law == Llama3(factor=8.0, original_max_positions=8192)


def test_one_layer_of_every_kind_is_kept():
    """The first of each, two at least, with what the file says of single layers."""
    config = {
        "num_hidden_layers": 6,
        "hidden_size": 256,
        "num_attention_heads": 8,
        "layer_types": ["a", "a", "b", "a", "a", "b"],
        "sizes": [1, 2, 3, 4, 5, 6],
        "per_layer_config": {"02": {"head_dim": 512}, "05": {"head_dim": 512}},
    }
    assert choose_layers(config) == [0, 2]
    assert choose_layers({"num_hidden_layers": 6}) == [0, 1]
    cut = small_values(config)
    assert (cut["layer_types"], cut["sizes"], cut["num_hidden_layers"]) == (["a", "b"], [1, 3], 2)
    assert cut["per_layer_config"] == {"01": {"head_dim": 512}}


def test_a_class_and_its_model_type_name_one_architecture():
    """As does the base model's class."""
    names = ("llama", "LlamaForCausalLM", "LlamaModel")
    assert {model_class(name).__name__ for name in names} == {"LlamaForCausalLM"}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nemotron_h", "not rotated"),
        ("JambaForCausalLM", "not rotated"),
        ("bert", "takes tokens and rotates"),
        ("no such thing", "takes tokens and rotates"),
    ],
)
def test_what_is_no_architecture_is_refused(name, says):
    """With the reason, or the way to the table."""
    with pytest.raises(ConfigError, match=says):
        model_class(name)


def test_reasons_are_given_for_what_is_installed():
    """Each of a type that transformers has, and of none that is built."""
    stated = [name for names in special_cases()["not_built"].values() for name in names]
    assert sorted(stated) == list(not_built())
    assert all(not_built().values())


def test_a_model_that_counts_its_own_positions_is_given_none():
    """RoFormer takes none, and its tokens are numbered from 0."""
    found = verdict("roformer")
    assert found.right
    assert (found.tokens, found.farthest) == (256, 255)


def test_a_config_that_makes_no_model_is_refused():
    """In the words of its class."""
    with pytest.raises(ConfigError, match="LlamaForCausalLM can be built"):
        tiny_model("llama", {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}})
