"""Odd files become canonical ones, which nothing changes, and errors name what the file says."""

from __future__ import annotations

import ast
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

import phasor.files
from phasor import ConfigError
from phasor.axes import InterleavedSections
from phasor.files.configs.source import JsonObject
from phasor.files.reading import load

from ..refusals import refused

ROOM = sorted(Path(phasor.files.__file__).parent.rglob("*.py"))
MOST_FIELDS = 30
SIZES = {"num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8}
INTERNLM = {"model_type": "internlm", **SIZES, "rotary": {"base": 10000, "type": "dynamic"}}
STRIPEDHYENA = {
    "model_type": "stripedhyena",
    **SIZES,
    "attn_layer_idxs": [1, 3],
    "rotary_emb_base": 500000,
    "use_interpolated_rotary_pos_emb": True,
    "rotary_emb_scaling_factor": 4.0,
}
CHATGLM = {"model_type": "chatglm", "num_layers": 4, "kv_channels": 64, "rope_ratio": 50}

#: A file, a change to it, and what the error says of the key that the file has.
NAMED_BY_THE_FILE: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a base": (CHATGLM, {"rope_ratio": -1}, "rope_ratio must be a finite number > 0, got -1"),
    "a base twice": (
        CHATGLM,
        {"rope_theta": 7.0},
        "rope_theta is 7.0 and rope_ratio is 500000",
    ),
    "a base too small": (CHATGLM, {"rope_ratio": 1e-5}, "rope_ratio must be a finite number > 1"),
    "a base in an object": (
        INTERNLM,
        {"rotary": {"base": 0, "type": "origin"}},
        "rotary.base must",
    ),
    "a law": (
        INTERNLM,
        {"rotary": {"base": 10000, "type": "spiral"}},
        "rotary.type must be one of",
    ),
    "a factor": (
        INTERNLM,
        {"rotary": {"base": 10000, "type": "dynamic", "scaling_factor": "x"}},
        "rotary.scaling_factor must",
    ),
    "a divisor": (
        STRIPEDHYENA,
        {"rotary_emb_scaling_factor": 0},
        "rotary_emb_scaling_factor must be a finite number > 0",
    ),
    "two divisors": (
        STRIPEDHYENA,
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        "rotary_emb_scaling_factor and rope_scaling both scale",
    ),
}


def assigned_values() -> list[str]:
    """Each place of the room where the values of an object are assigned."""
    found: list[str] = []
    for file in ROOM:
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            targets = node.targets if isinstance(node, ast.Assign) else []
            targets += [node.target] if isinstance(node, (ast.AugAssign, ast.AnnAssign)) else []
            names = [target.attr for target in targets if isinstance(target, ast.Attribute)]
            found += [f"{file.name}: {ast.unparse(node)}"] * ("values" in names)
    return found


@pytest.mark.parametrize("name", NAMED_BY_THE_FILE)
def test_an_error_names_the_key_that_the_file_has(name: str) -> None:
    """Although what is read has the words of transformers 5."""
    file, change, says = NAMED_BY_THE_FILE[name]
    with pytest.raises(ConfigError) as error:
        load(file | change)
    assert str(error.value).startswith(says)


def test_a_rewritten_file_has_the_ropes_of_its_class() -> None:
    """The base in units of 10,000, divided positions, and a dynamic law with a factor of 1."""
    bases = [load(file)[1] for file in (CHATGLM, STRIPEDHYENA)]
    assert [rope and rope.base for rope in bases] == [500_000.0, 500_000.0]
    assert repr(bases[1] and bases[1].scaling) == "Linear(factor=4.0)"
    (rope,) = load({**INTERNLM, "max_position_embeddings": 2048}).ropes
    assert repr(rope.scaling) == "DynamicNTK(factor=1.0, original_max_positions=2048)"


GPT_OSS = {
    "model_type": "gpt_oss",
    **SIZES,
    "rope_theta": 150000,
    "initial_context_length": 4096,
    "rope_scaling_factor": 32.0,
    "rope_ntk_alpha": 1,
    "rope_ntk_beta": 32,
}


def test_gpt_oss_in_openais_own_words_is_that_of_transformers() -> None:
    """With a type or without; numbers of both kinds, or too few of one, are refused."""
    own = ("initial_context_length", "rope_scaling_factor", "rope_ntk_alpha", "rope_ntk_beta")
    plain = {key: value for key, value in GPT_OSS.items() if key not in own}
    block = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
    block |= {"truncate": False, "original_max_position_embeddings": 4096}
    known = load(plain | {"rope_scaling": block})
    assert load(GPT_OSS).kinds == known.kinds
    untyped = {key: value for key, value in GPT_OSS.items() if key != "model_type"}
    assert load(untyped).kinds == known.kinds
    with refused("two_scalings", first="rope_scaling_factor", second="rope_scaling"):
        load(GPT_OSS | {"rope_scaling": block})
    for key in own:
        with refused("no_value", key=key):
            load({name: value for name, value in GPT_OSS.items() if name != key})
    with refused("unusable", key="rope_ntk_beta"):
        load(GPT_OSS | {"rope_ntk_beta": 0.5})


def test_qwen_3_tts_says_in_its_block_that_its_sections_alternate() -> None:
    """Those of its class do; of others it is refused by the key that the file has."""
    block = {"rope_type": "default", "mrope_section": [12, 10, 10]}
    talker = {"model_type": "qwen3_tts_talker", **SIZES, "rope_theta": 1e6}
    file = {"model_type": "qwen3_tts", "talker_config": talker}
    ropes = load(file | {"talker_config": talker | {"rope_scaling": block | {"interleaved": True}}})
    assert ropes.ropes[0].axes == InterleavedSections((12, 10, 10))
    with refused("unread", key="talker_config.rope_scaling.interleaved"):
        load(file | {"talker_config": talker | {"rope_scaling": block | {"interleaved": False}}})


def test_a_divisor_may_stand_in_a_block_too() -> None:
    """Where it is the same, as in a file that was written anew."""
    for block in ({"rope_type": "linear", "factor": 4.0}, {"type": "linear", "factor": 4.0}):
        for key in ("rope_scaling", "rope_parameters"):
            assert load(STRIPEDHYENA | {key: block}) == load(STRIPEDHYENA)


def test_what_a_file_says_is_never_changed() -> None:
    """No code assigns values but where an object is made, and these are read-only."""
    assert assigned_values() == ["source.py: self.values: Final = MappingProxyType(values)"]
    assert isinstance(JsonObject({"key": 1}).values, MappingProxyType)


def test_a_class_has_few_fields() -> None:
    """A fact of one family of model types is a function for it instead."""
    fields = {
        node.name: sum(isinstance(line, ast.AnnAssign) for line in node.body)
        for file in ROOM
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.ClassDef)
    }
    assert fields["Architecture"] > 20
    assert max(fields.values()) <= MOST_FIELDS
