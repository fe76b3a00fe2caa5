"""The command that says what an architecture of transformers does."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from phasor import ConfigError, Rope
from phasor.cli.architectures import is_architecture
from phasor.cli.identify import identify
from phasor.scaling import Yarn
from phasor.torch.hf import architectures, verdicts
from phasor.torch.hf.architectures import not_built

from ..offline import refuse_connections


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """No test may open a connection."""
    refuse_connections(monkeypatch)


def run(*arguments):
    """The command's exit code and what it printed."""
    done = CliRunner().invoke(identify, arguments)
    return done.exit_code, done.output


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "llama"])
def test_the_command_says_it_in_words(name):
    """By class and by model type."""
    code, said = run(f"transformers:{name}")
    assert code == 0
    assert "All 128 coordinates of a head turn" in said
    assert said.count("reproduces every query and key") == 1
    assert said.rstrip().endswith("right")


def test_the_command_takes_a_config_and_speaks_json(tmp_path):
    """Also one that lies inside a larger model's; nothing else goes to stdout."""
    law = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6,
           "original_max_position_embeddings": 4096}  # fmt: skip
    inner = {"model_type": "qwen2", "rope_parameters": law, "max_position_embeddings": 16384,
             "num_hidden_layers": 28, "hidden_size": 3584, "num_attention_heads": 28,
             "num_key_value_heads": 4, "intermediate_size": 18944}  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "outer", "text_config": inner}), "utf-8")
    code, said = run("transformers:qwen2", "--config", str(path), "--json")
    plain = json.loads(said)
    assert (code, plain["right"]) == (0, True)
    loaded = Rope.from_dict(plain["kinds"][0]["loaded"])
    assert loaded.scaling == Yarn(factor=4.0, original_max_positions=4096)
    assert Rope.from_dict(plain["kinds"][0]["found"]["rope"]).scaling == loaded.scaling
    with pytest.raises(ConfigError, match="describes a 'qwen2', not 'llama'"):
        CliRunner().invoke(
            identify, ["transformers:llama", "--config", str(path)], catch_exceptions=False
        )


def test_longrope_is_named_as_the_rule_it_is(tmp_path):
    """With what it does up to the original context, and beyond."""
    config = {"model_type": "phi3", "num_hidden_layers": 2, "hidden_size": 64,
              "num_attention_heads": 4, "num_key_value_heads": 4, "rope_theta": 1e4,
              "max_position_embeddings": 4096, "original_max_position_embeddings": 512,
              "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8,
                               "long_factor": [2.0 + k for k in range(8)]}}  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config), "utf-8")
    code, said = run("transformers:phi3", "--config", str(path))
    assert code == 0
    assert "The rule LongRope picks the law from the length." in said
    assert "Beyond 512 tokens: Pairs 0-7 divided by 2 to 9." in said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "FUNCTION, or --list"),
        (["--list", "a.b:c"], "FUNCTION, or --list"),
        (["transformers:llama", "--head-dim", "64"], "--head-dim is for functions"),
        (["--list", "--axes", "3"], "--axes is for functions"),
        (["a.b:c", "--head-dim", "64", "--config", "."], "--config goes with transformers"),
        (["a.b:c"], "--head-dim"),
    ],
)
def test_options_that_do_not_belong_together_are_refused(arguments, says):
    """Rather than ignored."""
    code, said = run(*arguments)
    assert (code, says in said) == (2, True)


def test_functions_of_transformers_are_functions():
    """The prefix is a whole word."""
    assert is_architecture("transformers:LlamaForCausalLM")
    assert not is_architecture("transformers.models.llama.modeling_llama:apply_rotary_pos_emb")


def test_the_table_shows_every_architecture_and_fails_for_one(monkeypatch):
    """A line for each kind of layer, the reasons, the count; exit code 1 if one is wrong."""
    monkeypatch.setattr(architectures, "installed_model_types", lambda: ("cohere2", "llama"))
    code, said = run("--list")
    assert code == 0
    assert "cohere2 (Cohere2ForCausalLM), 1 sliding_attention: interleaved, 0:128 of 128" in said
    assert "llama (LlamaForCausalLM), 2 rope: half, 0:128 of 128, base 10000, error 0." in said
    assert "cohere2 (Cohere2ForCausalLM), 1 full_attention: nothing turned" in said
    assert "jamba: its tokens are not rotated" in said
    assert f"2 architectures: 2 right, 0 wrong; {len(not_built())} not built." in said
    load = verdicts.load

    def misread(config):
        ropes = load(config)
        wrong = replace(ropes["rope" == "nope"], base=7.0)
        return replace(ropes, kinds=dict.fromkeys(ropes.kinds, wrong))

    monkeypatch.setattr(verdicts, "load", misread)
    code, said = run("--list")
    assert code == 1
    assert "0 right, 2 wrong" in said
    assert "full_attention: phasor.load states a rope, and nothing was turned" in said


def test_what_cannot_be_built_is_listed_with_its_reason(monkeypatch):
    """And is no error."""
    monkeypatch.setattr(architectures, "installed_model_types", lambda: ("llama",))

    def refuse(name):
        raise ConfigError(f"no tiny {name}")

    monkeypatch.setattr(verdicts, "verdict", refuse)
    code, said = run("--list", "--json")
    first = json.loads(said)[0]
    assert (code, first["not_built"], first["right"]) == (0, "no tiny llama", False)
