"""What phasor says about the architectures of transformers, against what they do."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from tools import verdicts
from tools.rotations import RotationSignature, rope_error
from tools.tiny_models import installed_model_types, model_class, tiny_config
from tools.verdicts import main, verdict

from phasor import ConfigError, Rope
from phasor.files.reading import load
from phasor.scaling import Linear, Llama3, LongRope, Proportional, Yarn

from ..offline import refuse_connections
from ..sampling import SHARES

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
    refuse_connections(monkeypatch)


@pytest.fixture
def misread(monkeypatch):
    """A function that has configs read as if ropes were changed, in all models or in some."""

    def misread(change, wanted=lambda ropes: True):
        load = verdicts.load

        def load_changed(config):
            ropes = load(config)
            changed = {kind: change(rope) for kind, rope in ropes.kinds.items()}
            return replace(ropes, kinds=changed) if wanted(ropes) else ropes

        monkeypatch.setattr(verdicts, "load", load_changed)

    return misread


@pytest.mark.parametrize("model_type", EVERYDAY)
def test_what_is_said_of_an_architecture_is_so(model_type):
    """The facts read off its code, and every call of its rotation."""
    pairing, pairing_out, (start, stop), head_dim, base, axes = EVERYDAY[model_type]
    found = verdict(model_type)
    assert found.right, (found.wrong, [kind.wrong for kind in found.kinds])
    for kind in found.kinds:
        rope = kind.loaded
        assert (rope.pairing, rope.output_pairing) == (pairing, pairing_out)
        assert (rope.rotary_start, rope.rotary_start + rope.rotary_dim) == (start, stop)
        assert (rope.head_dim, rope.base, rope.axes.n_axes) == (head_dim, base, axes)
        assert (kind.found.base, kind.found.pairing) == (base, pairing)
        assert 0 < kind.error < 1


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
    "dynamic": (
        {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 8192}, None
    ),
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
    assert any("half pairs, 64 turned" in one for one in found.other_rotations)


def identification_differs(found, rope):
    """What `identify` says otherwise than a rope with a static law."""
    if found.rope is None:
        return found.why_no_rope
    # a slice that the model cuts out is identified alone
    same = ("pairing", "output_pairing", "direction", "rotary_dim")
    wrong = [name for name in same if getattr(found.rope, name) != getattr(rope, name)]
    for k, (one, exact) in enumerate(zip(found.rope.inv_freq, rope.inv_freq, strict=False)):
        # powers of a base from float32 cosines, and what the rope itself rounds
        if abs(one - exact) > found.pairs[k].uncertainty + exact * 2.0**-23 * (1 + k):
            wrong.append(f"pair {k}: {one} for {exact}")
    if abs(found.attention_factor - rope.attention_factor) > 32 * 2.0**-24 * rope.attention_factor:
        wrong.append(f"factor {found.attention_factor} for {rope.attention_factor}")
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("share", range(SHARES))
def test_every_architecture_is_described_rightly(share):
    """The whole table, and there is much in it; `identify` finds the same in what the code does."""
    assert len(installed_model_types()) >= 150
    table = {name: verdict(name) for name in installed_model_types()[share::SHARES]}
    assert {name: one.wrong or one.kinds for name, one in table.items() if not one.right} == {}
    differences = {
        (name, kind.kind, length): wrong
        for name, one in table.items()
        for kind in one.kinds
        for found, length in ((kind.found, 1), (kind.beyond, one.farthest + 1))
        if found is not None
        if (wrong := identification_differs(found, kind.loaded.at(length)))
    }
    assert differences == {}


@pytest.mark.slow
def test_a_saved_config_says_what_the_whole_one_does():
    """Also where transformers leaves out what its class takes for granted."""
    for name in installed_model_types():
        config = tiny_config(name)
        whole, saved = (load(json.loads(config.to_json_string(use_diff=d))) for d in (False, True))
        assert (saved.layer_kinds, dict(saved.kinds)) == (whole.layer_kinds, dict(whole.kinds)), (
            name
        )


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
def test_a_config_that_is_misread_is_found_out(misread, change, says):
    """By the smallest change of each fact."""
    misread(change)
    found = verdict("llama")
    assert not found.right
    assert says in str(found.kinds[0].wrong)
    assert found.kinds[0].found.base == 10_000


def test_a_model_that_turns_otherwise_is_found_out(monkeypatch):
    """Its function is exchanged for one that turns backwards, which is seen in what it does."""
    module = __import__(model_class("llama").__module__, fromlist=["x"])
    turn = module.apply_rotary_pos_emb

    def apply_rotary_pos_emb(q, k, cos, sin):
        return turn(q, k, cos, -sin)

    monkeypatch.setattr(module, "apply_rotary_pos_emb", apply_rotary_pos_emb)
    found = verdict("llama")
    assert found.kinds[0].error > 1000
    assert found.kinds[0].found.rope.direction == -1


def test_a_rotation_that_writes_its_arguments_is_recorded_as_it_began(monkeypatch):
    """What went in is kept before the call."""
    module = __import__(model_class("llama").__module__, fromlist=["x"])
    turn = module.apply_rotary_pos_emb

    def apply_rotary_pos_emb(q, k, cos, sin):
        turned = turn(q, k, cos, sin)
        return q.copy_(turned[0]), k.copy_(turned[1])

    monkeypatch.setattr(module, "apply_rotary_pos_emb", apply_rotary_pos_emb)
    assert verdict("llama").right


PLAIN = RotationSignature("half", "half", 1, "start", "twice", heads_first=True)


@pytest.mark.parametrize(("relative", "right"), [(0.0, True), (2e-7, True), (3e-5, False)])
def test_the_error_is_measured_in_roundings(relative, right):
    """A frequency off by a rounding or two is float32's; by hundreds it is another frequency."""
    rope = Rope(head_dim=8, pairing="half", base=10_000.0)
    positions = np.array([0, 100, 9000])
    rows = torch.zeros(2, 1, 3, 8, dtype=torch.float64)
    for token, pair in np.ndindex(3, 4):
        angle = float(positions[token]) * 10_000.0 ** (-pair / 4) * (1 + relative)
        for column in (pair, pair + 4):
            rows[0, 0, token, column] = math.cos(angle)
            rows[1, 0, token, column] = math.sin(angle)
    error = rope_error(rope, PLAIN, tuple(rows), positions[None])
    assert (error <= 1) == right


@pytest.mark.parametrize("spoilt", [math.nan, math.inf])
def test_what_is_no_number_is_never_right(spoilt):
    """One of them among right ones, in the cosines or in the sines."""
    rope = Rope(head_dim=4, pairing="half")
    for which, column in ((0, 0), (1, 1)):
        rows = torch.zeros(2, 1, 2, 4)
        rows[0] = 1
        assert rope_error(rope, PLAIN, tuple(rows), np.array([[0, 0]])) == 0
        rows[which, 0, 1, column] = spoilt
        assert rope_error(rope, PLAIN, tuple(rows), np.array([[0, 0]])) == math.inf


def test_a_config_read_otherwise_before_the_cut_is_found_out(misread):
    """The tiny model's config is read rightly, the one given is not."""
    whole = tiny_config("llama").to_dict() | {"num_hidden_layers": 5}
    assert verdict("llama", whole).right
    misread(lambda rope: replace(rope, base=7.0), lambda ropes: len(ropes) == 5)
    found = verdict("llama", whole)
    assert not found.right
    assert "before they are cut" in str(found.wrong)


LONGROPE = {
    "num_hidden_layers": 32, "hidden_size": 3072, "num_attention_heads": 32,
    "num_key_value_heads": 32, "max_position_embeddings": 131072, "rope_theta": 1e4,
    "original_max_position_embeddings": 4096,
    "rope_scaling": {
        "type": "longrope", "short_factor": [1.0] * 48,
        "long_factor": [1 + 1.25 * k for k in range(48)],
    },
}  # fmt: skip


def test_a_rule_and_its_factor_are_compared_within_and_beyond_its_context():
    """LongRoPE's two lists, of which only the long one is no law, and its factor on cos and sin."""
    found = verdict("phi3", LONGROPE)
    assert found.right, (found.wrong, found.kinds[0].wrong)
    (kind,) = found.kinds
    assert isinstance(kind.loaded.scaling, LongRope)
    assert found.farthest > 4096
    # sqrt(1 + ln(32) / ln(4096)), the paper's
    expected = math.sqrt(1 + math.log(32) / math.log(4096))
    for one, divisors in (
        (kind.found, [1.0] * 48),
        (kind.beyond, [1 + 1.25 * k for k in range(48)]),
    ):
        assert one.attention_factor == pytest.approx(expected, rel=2e-6)
        for k, (pair, divisor) in enumerate(zip(one.pairs, divisors, strict=True)):
            right = 10_000 ** (-k / 48) / divisor
            # in float32 an exponent, its power, a product and a quotient are rounded
            rounding = 2.0**-24 * (math.log(10_000) * k / 48 + 3) * right
            assert abs(pair.inv_freq - right) <= pair.uncertainty + rounding
    assert kind.found.base == 10_000
    assert kind.beyond.law is None


@pytest.mark.parametrize("which", ["short_factors", "long_factors"])
def test_either_list_of_a_rule_that_is_misread_is_found_out(misread, which):
    """The model runs within its original context and beyond."""

    def change(rope):
        factors = tuple(1.001 * one for one in getattr(rope.scaling, which))
        return replace(rope, scaling=replace(rope.scaling, **{which: factors}))

    misread(change)
    assert "off by" in str(verdict("phi3", LONGROPE).kinds[0].wrong)


LAYERS = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
DAMAGED = {
    "a billion layers": ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers must be"),
    "no layers": ("llama", {"num_hidden_layers": 0}, "num_hidden_layers must be"),
    "half a layer": ("llama", {"num_hidden_layers": 2.5}, "num_hidden_layers must be"),
    "a width in words": ("llama", {"hidden_size": "wide"}, "hidden_size"),
    "a block that is a list": ("llama", {"rope_parameters": [1]}, "rope_parameters"),
    "no head": ("llama", {"head_dim": 0}, "head_dim"),
    "a billion heads": ("llama", {"num_attention_heads": 10**9}, "num_attention_heads|hidden_size"),
    "a wide head": ("llama", {"head_dim": 1 << 16}, "even when made small"),
    "a billion positions in a table": ("gptj", {"n_positions": 10**9}, "even when made small"),
    "words in words": ("llama", {"vocab_size": "many"}, "no config of LlamaForCausalLM"),
    "a dtype of nothing": ("llama", {"torch_dtype": "float7"}, "no config of LlamaForCausalLM"),
    "a billion of something": ("llama", {"num_wings": 10**9}, "num_wings must be at most 100000"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_config_is_refused_before_anything_is_built_of_it(monkeypatch, damage):
    """By a ConfigError that names it; nothing larger than a tiny model is ever made."""
    model_type, wrong, says = DAMAGED[damage]
    usual = (
        {"n_layer": 2, "n_embd": 64, "n_head": 4, "rotary_dim": 8}
        if model_type == "gptj"
        else LAYERS
    )

    def forward(*_):
        raise AssertionError("it ran")

    monkeypatch.setattr(verdicts, "record_calls", forward)
    with pytest.raises(ConfigError, match=says):
        verdict(model_type, {**usual, **wrong})


def test_a_class_without_rotation_is_told_from_no_class():
    """Both are refused; one of them is there."""
    with pytest.raises(ConfigError, match="BertModel is there, and its code has none"):
        verdict("BertModel")
    with pytest.raises(ConfigError, match=r"rotates them; `python -m tools\.verdicts`"):
        verdict("NoSuchModel")


def test_any_order_of_questions_has_the_same_answers():
    """Recording one architecture leaves no trace in the next."""
    names = ["llama", "qwen3", "llama", "phi"]
    random.Random(0).shuffle(names)
    said = [(name, verdict(name).kinds[0].error) for name in names]
    assert len(set(said)) == 3


def test_the_table_has_every_architecture_and_fails_for_one(monkeypatch, misread, capsys):
    """A line for each kind of layer, the reasons, the count; status 1 if one is wrong."""
    monkeypatch.setattr(verdicts, "installed_model_types", lambda: ("cohere2", "llama"))
    assert main([]) == 0
    said = capsys.readouterr().out
    assert "cohere2 (Cohere2ForCausalLM), 1 sliding_attention: interleaved, 0:128 of 128" in said
    assert "llama (LlamaForCausalLM), 2 rope: half, 0:128 of 128, base 10000, error 0." in said
    assert "cohere2 (Cohere2ForCausalLM), 1 full_attention: nothing turned" in said
    assert "jamba, not built: its tokens are not rotated" in said
    assert "2 architectures: 2 right, 0 wrong; " in said
    wrong = Rope(head_dim=128, pairing="half", base=7.0)
    misread(lambda rope: wrong)
    assert main([]) == 1
    said = capsys.readouterr().out
    assert "0 right, 2 wrong" in said
    assert "wrong: phasor.load states a rope, and nothing was turned" in said


def test_an_architecture_that_cannot_be_built_is_listed_with_its_reason(capsys):
    """It is no proof, so that a name which was asked for fails."""
    assert main(["NoSuchModel"]) == 1
    said = capsys.readouterr().out
    assert "NoSuchModel, not built: 'NoSuchModel' must be a model type" in said
    assert "0 architectures: 0 right, 0 wrong; 1 not built." in said
