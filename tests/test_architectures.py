"""What phasor says about the architectures of transformers, against what they do."""

from __future__ import annotations

import cmath
import json
import math
import random
import socket
from dataclasses import replace

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from phasor import (
    BackendError,
    ConfigError,
    Linear,
    Llama3,
    LongRope,
    Proportional,
    Rope,
    TensorError,
    Yarn,
)
from phasor.cli._architectures import is_architecture
from phasor.cli._identify import identify
from phasor.configs import load
from phasor.torch import architectures
from phasor.torch.architectures import (
    architecture,
    model_types,
    not_built,
    tiny_config,
    tiny_inputs,
    tiny_model,
    verdicts,
)
from phasor.torch.architectures._compared import compared
from phasor.torch.architectures._recording import Recorded, record
from phasor.torch.architectures._tiny import NOT_BUILT, kept_layers, tiny
from phasor.torch.architectures.verdicts import verdict

# by hand from the class's code: pairing read, pairing written, slice, head width, base, axes
EVERYDAY = {
    "llama": ("half", "half", (0, 128), 128, 10_000, 1),
    "gptj": ("interleaved", "interleaved", (0, 64), 256, 10_000, 1),
    "phi": ("half", "half", (0, 32), 64, 10_000, 1),
    "deepseek_v3": ("interleaved", "half", (0, 64), 64, 10_000, 1),
    "gpt_oss": ("half", "half", (0, 64), 64, 150_000, 1),
    "qwen2_vl_text": ("half", "half", (0, 128), 128, 1_000_000, 3),
}


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """No test may open a connection."""

    def refused(*_):
        raise AssertionError("a connection was asked for")

    monkeypatch.setattr(socket.socket, "connect", refused)


@pytest.mark.parametrize("model_type", EVERYDAY)
def test_what_is_said_of_an_architecture_is_so(model_type):
    """The facts read off its code, and every recorded query and key."""
    pairing, pairing_out, (start, stop), head_dim, base, axes = EVERYDAY[model_type]
    found = verdict(model_type)
    assert found.right, (found.wrong, [kind.wrong for kind in found.kinds])
    for kind in found.kinds:
        rope = kind.loaded
        assert (rope.pairing, rope.output_pairing) == (pairing, pairing_out)
        assert (rope.rotary_start, rope.rotary_start + rope.rotary_dim) == (start, stop)
        assert (rope.head_dim, rope.base, rope.axes.n_axes) == (head_dim, base, axes)
        assert (kind.found.base, kind.found.pairing) == (base, pairing)
        assert 0 < kind.loaded_error < 1
        assert 0 < kind.found_error < 1


LAWS = {
    "linear": ({"rope_type": "linear", "factor": 4.0}, Linear(factor=4.0)),
    "yarn": (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048},
        Yarn(factor=4.0, original_max_positions=2048),
    ),
    "llama3": (
        {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 1024,
         "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        Llama3(factor=8.0, original_max_positions=1024),
    ),
    "dynamic": ({"rope_type": "dynamic", "factor": 4.0}, None),
}  # fmt: skip


@pytest.mark.parametrize("law", LAWS)
def test_a_law_of_the_config_is_in_the_vectors(law):
    """Read and found; a rule that has not begun is plain."""
    block, expected = LAWS[law]
    config = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
              "max_position_embeddings": 8192, "rope_parameters": block | {"rope_theta": 5e5},
    }  # fmt: skip
    found = verdict("llama", config)
    assert found.right, (found.wrong, found.kinds[0].wrong)
    assert found.kinds[0].found.law == expected


def test_kinds_of_layers_have_their_own_ropes():
    """Gemma 4's wide heads turn a quarter, its narrow ones all."""
    narrow, wide = verdict("gemma4_text").kinds
    assert (narrow.kind, narrow.found.base, narrow.found.law) == ("sliding_attention", 10_000, None)
    assert (wide.loaded.head_dim, wide.found.law) == (512, Proportional(fraction=0.25))
    assert wide.found.base == 1_000_000


def test_a_kind_without_rope_is_seen_to_turn_nothing():
    """Cohere 2's full attention."""
    sliding, full = verdict("cohere2").kinds
    assert sliding.found is not None
    assert (full.kind, full.loaded, full.found) == ("full_attention", None, None)


def test_what_turns_beside_attention_is_told_apart():
    """DeepSeek V3.2's indexer turns halves, its attention interleaved pairs."""
    found = verdict("deepseek_v32")
    assert found.right
    assert any("half pairs, 64 turned" in one for one in found.beside)


@pytest.mark.slow
def test_every_architecture_is_described_rightly():
    """The whole table, and there is much in it."""
    table = {name: verdict(name) for name in model_types()}
    assert len(table) >= 150
    assert {name: one.wrong or one.kinds for name, one in table.items() if not one.right} == {}


@pytest.mark.slow
def test_a_saved_config_says_what_the_whole_one_does():
    """Also where transformers leaves out what its class takes for granted."""
    for name in model_types():
        config = tiny_config(name)
        whole, saved = (load(json.loads(config.to_json_string(use_diff=d))) for d in (False, True))
        assert (saved.layer_kinds, dict(saved.kinds)) == (whole.layer_kinds, dict(whole.kinds)), (
            name
        )


def test_what_is_recorded_is_what_the_model_computes():
    """Llama's, by complex products of angles from the paper; every layer, queries and keys."""
    model = tiny_model("llama")
    positions = [0, 1, 5, 40, 41]
    recorded = record(model, tiny_inputs(model, positions))
    assert [(one.layer, one.argument) for one in recorded] == [
        (layer, name) for layer in (0, 1) for name in ("q", "k")
    ]
    for one in recorded:
        assert one.before.shape == (2, 5, 4, 128)
        assert (one.slice_start, one.head_dim) == (0, 128)
        for row, token, head, pair in np.ndindex(2, 5, 4, 64):
            x = one.before[row, token, head]
            turn = cmath.exp(1j * positions[token] * 10_000 ** (-pair / 64))
            y = complex(x[pair], x[pair + 64]) * turn
            got = one.after[row, token, head]
            assert abs(complex(got[pair], got[pair + 64]) - y) <= 1e-5 * abs(y)


def test_as_many_tokens_as_heads_are_refused():
    """Which is which would be a guess."""
    model = tiny_model("llama")
    with pytest.raises(TensorError, match="another number of tokens"):
        record(model, tiny_inputs(model, range(4)))


def test_a_slice_is_found_in_the_heads_it_was_cut_from():
    """Phi turns 32 of 64 coordinates and puts them first; MLA's stand behind 128 others."""
    for model_type, place in (("phi", (0, 64)), ("deepseek_v3", (128, 192))):
        model = tiny_model(model_type)
        first = record(model, tiny_inputs(model, range(5)))[0]
        assert (first.slice_start, first.head_dim) == place


def test_recording_leaves_the_code_as_it_was():
    """Its functions and the model's hooks."""
    model = tiny_model("llama")
    code = __import__(type(model).__module__, fromlist=["x"])
    before = code.apply_rotary_pos_emb, code.eager_attention_forward
    record(model, tiny_inputs(model, range(3)))
    assert (code.apply_rotary_pos_emb, code.eager_attention_forward) == before
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda rope: replace(rope, base=rope.base * 1.001), "off by"),
        (lambda rope: replace(rope, pairing="interleaved"), "off by"),
        (lambda rope: replace(rope, direction=-1), "off by"),
        (lambda rope: replace(rope, rotary_dim=64), "off by"),
        (lambda rope: replace(rope, head_dim=256, rotary_dim=128, rotary_start=64), "slice from"),
        (lambda rope: replace(rope, head_dim=256), "heads of 256"),
        (lambda rope: None, "states no rope"),
    ],
    ids=["base", "pairing", "direction", "width", "slice", "heads", "none"],
)
def test_a_config_that_is_misread_is_found_out(monkeypatch, change, says):
    """By the smallest change of each fact."""
    load = verdicts.load

    def misread(config):
        ropes = load(config)
        return replace(ropes, kinds={kind: change(one) for kind, one in ropes.kinds.items()})

    monkeypatch.setattr(verdicts, "load", misread)
    found = verdict("llama")
    assert not found.right
    assert says in str(found.kinds[0].wrong)
    assert found.kinds[0].found_error < 1


def test_a_model_that_turns_otherwise_is_found_out(monkeypatch):
    """Its function is exchanged for one that turns backwards; both statements part."""
    module = __import__(architecture("llama").module, fromlist=["x"])
    turn = module.apply_rotary_pos_emb

    def apply_rotary_pos_emb(q, k, cos, sin):
        return turn(q, k, cos, -sin)

    monkeypatch.setattr(module, "apply_rotary_pos_emb", apply_rotary_pos_emb)
    found = verdict("llama")
    assert found.kinds[0].loaded_error > 1000
    assert found.kinds[0].found.rope.direction == -1
    assert found.kinds[0].found_error < 1


def test_a_rotation_that_writes_its_arguments_is_recorded_as_it_began(monkeypatch):
    """What went in is kept before the call."""
    module = __import__(architecture("llama").module, fromlist=["x"])
    turn = module.apply_rotary_pos_emb

    def apply_rotary_pos_emb(q, k, cos, sin):
        turned = turn(q, k, cos, sin)
        return q.copy_(turned[0]), k.copy_(turned[1])

    monkeypatch.setattr(module, "apply_rotary_pos_emb", apply_rotary_pos_emb)
    assert verdict("llama").right


@pytest.mark.parametrize(("relative", "right"), [(0.0, True), (2e-7, True), (3e-5, False)])
def test_the_share_is_measured_in_roundings(relative, right):
    """A frequency off by a rounding or two is float32's; by hundreds it is another frequency."""
    rope = Rope(head_dim=8, pairing="half", base=10_000.0)
    rng = np.random.default_rng(0)
    before = rng.standard_normal((1, 3, 2, 8))
    positions = np.array([0, 100, 9000])
    after = np.empty_like(before)
    for token, pair in np.ndindex(3, 4):
        angle = float(positions[token]) * 10_000.0 ** (-pair / 4) * (1 + relative)
        x0, x1 = before[0, token, :, pair], before[0, token, :, pair + 4]
        after[0, token, :, pair] = x0 * math.cos(angle) - x1 * math.sin(angle)
        after[0, token, :, pair + 4] = x0 * math.sin(angle) + x1 * math.cos(angle)
    one = Recorded(layer=0, function="f", argument="q", call=0, before=before, after=after)
    share, why = compared(rope, [one], positions)
    assert (share <= 1, not why) == (right, right)


@pytest.mark.parametrize("spoilt", [math.nan, math.inf])
def test_what_is_no_number_is_never_right(spoilt):
    """One of them among right ones."""
    rope = Rope(head_dim=8, pairing="half", rotary_dim=4)
    before = np.ones((1, 2, 1, 8))
    for coordinate in (1, 6):
        after = before.copy()
        after[0, 0, 0, coordinate] = spoilt
        one = Recorded(layer=0, function="f", argument="q", call=0, before=before, after=after)
        assert compared(rope, [one], np.array([0, 0]))[0] == math.inf


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


def test_a_config_read_otherwise_before_the_cut_is_found_out(monkeypatch):
    """The tiny model's config is read rightly, the one given is not."""
    load = verdicts.load
    whole = tiny_config("llama").to_dict() | {"num_hidden_layers": 5}

    def misread(config):
        ropes = load(config)
        wrong = {kind: replace(one, base=7.0) for kind, one in ropes.kinds.items()}
        return replace(ropes, kinds=wrong) if len(ropes) == 5 else ropes

    assert verdict("llama", whole).right
    monkeypatch.setattr(verdicts, "load", misread)
    found = verdict("llama", whole)
    assert not found.right
    assert "before they are cut" in str(found.wrong)


def test_a_rule_and_its_factor_are_compared_at_the_length_that_ran():
    """LongRoPE beyond its training: divisors of no law, and a factor on cos and sin."""
    rng = np.random.default_rng(0)
    lists = {"short_factor": [1.0] * 48, "long_factor": sorted(rng.uniform(1, 60, 48).tolist())}
    law = {"type": "longrope", **lists}
    config = {"num_hidden_layers": 32, "hidden_size": 3072, "num_attention_heads": 32,
              "num_key_value_heads": 32, "max_position_embeddings": 131072, "rope_scaling": law,
              "original_max_position_embeddings": 4096, "rope_theta": 1e4}  # fmt: skip
    found = verdict("phi3", config)
    assert found.right, (found.wrong, found.kinds[0].wrong)
    assert isinstance(found.kinds[0].loaded.scaling, LongRope)
    # sqrt(1 + ln(32) / ln(4096)), the paper's
    expected = math.sqrt(1 + math.log(32) / math.log(4096))
    assert found.kinds[0].found.attention_factor == pytest.approx(expected, rel=2e-6)


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
    assert kept_layers(config) == [0, 2]
    assert kept_layers({"num_hidden_layers": 6}) == [0, 1]
    cut = tiny(config)
    assert (cut["layer_types"], cut["sizes"], cut["num_hidden_layers"]) == (["a", "b"], [1, 3], 2)
    assert cut["per_layer_config"] == {"01": {"head_dim": 512}}


def test_a_class_and_its_model_type_name_one_architecture():
    """As does the base model's class."""
    assert architecture("LlamaForCausalLM") == architecture("llama") == architecture("LlamaModel")


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
        architecture(name)


def test_reasons_are_given_for_what_is_installed():
    """Each of a type that transformers has, and of none that is built."""
    assert set(not_built()) == set(NOT_BUILT)
    assert all(NOT_BUILT.values())


def test_positions_that_a_model_counts_itself_are_not_others():
    """RoFormer takes none."""
    model = tiny_model("roformer")
    assert set(tiny_inputs(model, range(4))) == {"input_ids"}
    with pytest.raises(ConfigError, match="counts its own positions"):
        tiny_inputs(model, [0, 2])


def test_a_config_that_makes_no_model_is_refused():
    """In the words of its class."""
    with pytest.raises(ConfigError, match="LlamaForCausalLM can be built"):
        tiny_model("llama", {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}})


def test_without_transformers_the_way_out_is_named(monkeypatch):
    """The command that installs it."""
    monkeypatch.setattr(architectures, "find_spec", lambda name: None)
    with pytest.raises(BackendError, match=r"pip install 'phasor\[transformers\]'"):
        architectures.transformers()


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
    assert said.count("reproduces every query and key") == 2
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
    """A row for each kind of layer, the reasons, the count; exit code 1 if one is wrong."""
    monkeypatch.setattr(architectures, "model_types", lambda: ("cohere2", "llama"))
    code, said = run("--list")
    assert code == 0
    rows = {line.split()[0]: line for line in said.splitlines() if line.strip()}
    assert "interleaved" in rows["cohere2"]
    assert "0:128 of 128" in rows["llama"]
    assert "1 full_attention" in said
    assert "jamba: its tokens are not rotated" in said
    assert f"2 architectures: 2 right, 0 wrong; {len(NOT_BUILT)} not built." in said
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
    monkeypatch.setattr(architectures, "model_types", lambda: ("llama",))

    def refuse(name):
        raise ConfigError(f"no tiny {name}")

    monkeypatch.setattr(verdicts, "verdict", refuse)
    code, said = run("--list", "--json")
    first = json.loads(said)[0]
    assert (code, first["not_built"], first["right"]) == (0, "no tiny llama", False)


def test_any_order_of_questions_has_the_same_answers():
    """Recording one architecture leaves no trace in the next."""
    names = ["llama", "qwen3", "llama", "phi"]
    random.Random(0).shuffle(names)
    said = [(name, verdict(name).kinds[0].loaded_error) for name in names]
    assert len(set(said)) == 3
