"""What a refusal advises: it names what the file holds, and leads to a right reading."""

from __future__ import annotations

import re
import tomllib
from importlib import resources
from typing import Any

import numpy as np
import pytest
from tools.sources import has_source

from phasor import ConfigError, PhasorWarning, Rope
from phasor.files.configs.unread_keys import meanings
from phasor.files.reading import load
from phasor.scaling import Llama3

from .config_files import sized, small

PARAMS = {"dim": 1024, "n_layers": 28, "n_heads": 16, "n_kv_heads": 8, "head_dim": 128}
PARAMS |= {"hidden_dim": 3072, "rope_theta": 1e6, "use_scaled_rope": False}


def refused(config: dict[str, Any], **options: Any) -> str:
    """Why a config is refused."""
    with pytest.raises(ConfigError) as caught:
        load(config, **options)
    return str(caught.value)


#: Keys that no table has, by what their names ask for.
ASKING = {
    "use_neox_rope": "which coordinates turn together",
    "rope_style": "which coordinates turn together",
    "rope_gptj": "which coordinates turn together",
    "rotary_dims": "how much of a head turns",
    "rope_fraction": "how much of a head turns",
    "rope_theta_local": "the base",
    "rope_wavelength": "the base",
    "rope_yarn": "a law",
    "rope_scaling_short_factor": "a law",
    "rotary_ntk": "a law",
    "rope_every": "which layers turn",
    "rope_axes": "several axes",
}


@pytest.mark.parametrize("key", ASKING)
@pytest.mark.parametrize("config", [small(), PARAMS], ids=["transformers", "params.json"])
def test_a_key_that_asks_for_another_rotation_is_not_called_unknown(
    config: dict[str, Any], key: str
) -> None:
    """Its name tells what it asks for; reading past it is warned of, and is not advised."""
    error = refused(config | {key: 8})
    assert f"{key} (got 8) is, by its name, about {ASKING[key]}" in error
    assert "not a key" not in error
    assert "strict=False" not in error
    with pytest.warns(PhasorWarning, match=key):
        assert load(config | {key: 8}, strict=False) == load(config)


def test_executorch_says_its_pairing_in_a_key_that_params_json_has_not() -> None:
    """Halves, and then a part of each head may turn; without that key pairs are interleaved."""
    (half,) = load(PARAMS | {"use_hf_rope": True}).ropes
    assert half == Rope(head_dim=128, pairing="half", base=1e6)
    assert load(PARAMS | {"use_hf_rope": False}) == load(PARAMS)
    (part,) = load(PARAMS | {"use_hf_rope": True, "partial_rotary_factor": 0.75}).ropes
    assert part == Rope(head_dim=128, pairing="half", base=1e6, rotary_dim=96)
    assert "rotates only part of each head" in refused(PARAMS | {"partial_rotary_factor": 0.75})
    scaled = {"use_hf_rope": True, "use_scaled_rope": True, "rope_scaling_factor": 8.0}
    assert "use_hf_rope must be false with a law" in refused(PARAMS | scaled)


def test_torchchat_has_names_of_its_own_for_what_params_json_says() -> None:
    """With a law in a block without a type, whose numbers must all be there."""
    config = {k: v for k, v in PARAMS.items() if k not in ("rope_theta", "use_scaled_rope")}
    law = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    law |= {"original_max_position_embeddings": 8192}
    (rope,) = load(config | {"rope_base": 5e5, "block_size": 2048, "rope_scaling": law}).ropes
    scaling = Llama3(factor=32.0, original_max_positions=8192)
    assert rope == Rope(head_dim=128, pairing="interleaved", base=5e5, scaling=scaling)
    for key in law:
        short = {name: number for name, number in law.items() if name != key}
        error = refused(config | {"block_size": 2048, "rope_scaling": short})
        assert f"rope_scaling.{key} is absent" in error
    ropes = load(config | {"n_local_heads": 8})
    assert ropes.ropes[0].base == 1e4
    assert any("10000 is what torchchat assumes" in note for note in ropes.notes)


def test_a_law_that_is_read_past_is_warned_of() -> None:
    """The scaling of Llama 3.2 beside Meta's keys."""
    law = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    with pytest.warns(PhasorWarning, match="rope_scaling"):
        load(PARAMS | {"rope_scaling": law}, strict=False)


def test_a_base_of_another_program_is_named_where_the_base_is_absent() -> None:
    """With the name that params.json has for it, the file is read."""
    config = {k: v for k, v in PARAMS.items() if k not in ("rope_theta", "use_scaled_rope")}
    assert "rope_freq_base says 10000000" in refused(config | {"rope_freq_base": 10_000_000})
    (rope,) = load(config | {"rope_freq_base": 10_000_000, "rope_theta": 10_000_000}).ropes
    assert rope == Rope(head_dim=128, pairing="interleaved", base=1e7)


LINGUA = {"distributed": {"fsdp_type": "full_shard"}, "model": {"dim": 1024, "n_layers": 8}}
#: Files of programs that train, with what their error names.
TRAINING: dict[str, tuple[dict[str, Any], str]] = {
    "axolotl": (
        {"base_model": "tiiuae/Falcon-H1", "model_type": "AutoModelForCausalLM"},
        "pass the config.json of tiiuae/Falcon-H1",
    ),
    "LLaMA-Factory": ({"model_name_or_path": "Qwen/Qwen3-8B"}, "config.json of Qwen/Qwen3-8B"),
    "Levanter": ({"model": {"type": "llama", "seq_len": 4096, "hidden_dim": 4096}}, "Levanter"),
    "nanotron": ({"model": {"model_config": {"is_llama_config": True}}}, "nanotron"),
    "OLMo": ({"model": {"d_model": 256, "n_heads": 8, "block_type": "sequential"}}, "OLMo"),
    "GPT-NeoX": ({"pos_emb": "rotary", "num_layers": 2, "hidden_size": 64}, "GPT-NeoX"),
    "Lingua": (LINGUA, "Lingua"),
    "Lingua's Hawk": (LINGUA | {"model_type": "hawk"}, "Lingua"),
    "GPT-NeoX's Mamba": ({"attention_config": [[["mamba"], 2]], "num_layers": 2}, "GPT-NeoX"),
    "nanotron's Mamba": ({"model": {"model_config": {"is_mamba_config": True}}}, "nanotron"),
    "Cerebras": ({"trainer": {"init": {"model": {"name": "gpt2"}}}}, "Cerebras"),
    "none that is known": ({"lm_model": "transformer_lm", "dim": 64}, "next to the weights"),
    "nothing": ({}, "next to the weights"),
}


@pytest.mark.parametrize("name", TRAINING)
def test_a_file_of_a_training_run_is_not_told_to_add_a_model_type(name: str) -> None:
    """As it has no keys that a type could read; what it is, is told."""
    config, named = TRAINING[name]
    error = refused(config)
    assert named in error
    assert "add" not in error


def test_a_file_with_sizes_is_told_to_add_its_type() -> None:
    """And with it is read."""
    config = {key: value for key, value in small("qwen2").items() if key != "model_type"}
    assert "add the value from" in refused(config)
    assert load(config | {"model_type": "qwen2"}) == load(small("qwen2"))


def test_another_type_is_proposed_beside_code_of_its_own_on_a_condition() -> None:
    """Published files with other classes have an auto_map nearly always."""
    code = {"architectures": ["Phi3ForCausalLM"], "auto_map": {"AutoConfig": "x.Y"}}
    error = refused(small("phi4", **code))
    assert "load(..., like='phi3')" in error
    assert "if its own code (auto_map) rotates as that does" in error
    assert load(small("phi4", **code), like="phi3").ropes == load(small("phi3")).ropes


@pytest.mark.parametrize("key", ["inner_config", "inner_config.text_config"])
def test_a_config_inside_is_named_at_any_depth(key: str) -> None:
    """Models for retrieval have their language model in an object of its own."""
    inner: dict[str, Any] = small("qwen2")
    for name in reversed(key.split(".")):
        inner = {name: inner}
    config = {"model_type": "colqwen2", "embedding_dim": 128} | inner
    assert f"load(..., part={key!r}), on the command line --part {key}" in refused(config)
    assert load(config, part=key) == load(small("qwen2"))


def test_what_a_class_assumes_is_not_said_to_stand_in_the_file() -> None:
    """Its block counts in a file without one, so a base beside it has no effect."""
    config = sized("apertus", rope_theta=10_000.0)
    error = refused(config)
    assert "rope_theta is 10000.0, but without rope_parameters the class uses its own" in error
    block = {"rope_type": "default", "rope_theta": 10_000.0}
    (rope,) = load(config | {"rope_parameters": block}).ropes
    assert rope == Rope(head_dim=128, pairing="half", base=10_000.0)
    layers = {"layer_types": ["full_attention"] * 4}
    assert "which its class assumes" in refused(sized("gemma4_text", rope_theta=5e5) | layers)


@pytest.mark.transformers
@pytest.mark.parametrize("model_type", ["openai_privacy_filter", "gpt_oss"])
def test_a_class_whose_block_has_no_base_takes_that_of_the_file(model_type: str) -> None:
    """Its law is assumed, the base is not."""
    from transformers import CONFIG_MAPPING

    config = sized(model_type, head_dim=128, rope_theta=20_000.0)
    theirs = CONFIG_MAPPING[model_type].from_dict(config).rope_parameters
    for rope in load(config).ropes:
        assert rope.base == theirs["rope_theta"] == 20_000.0
        assert rope.scaling is not None
        assert rope.scaling.factor == theirs["factor"]


def test_a_rope_outside_the_language_model_may_be_of_something_else() -> None:
    """Music Flamingo turns audio by it; transformers saves both, and reads both."""
    outer = {"rope_type": "default", "rope_theta": 1200.0, "partial_rotary_factor": 0.2}
    config = {
        "model_type": "musicflamingo",
        "rope_parameters": outer,
        "text_config": small("qwen2"),
    }
    ropes = load(config)
    assert ropes == load(small("qwen2"))
    assert ropes.notes == ("rope_parameters outside text_config turns audio by its time.",)


@pytest.mark.parametrize("length", [2048, 4096, 8192])
@pytest.mark.parametrize("trained", [None, 1024])
def test_the_factor_of_nomic_is_that_of_dynamic_ntk(length: int, trained: int | None) -> None:
    """By its own code (nomic-ai/contrastors, DynamicNTKRotaryEmbedding)."""
    sizes = {"n_embd": 768, "n_head": 12, "n_layer": 2, "n_positions": 8192}
    config = {
        "model_type": "nomic_bert",
        "rotary_emb_base": 1000,
        "rotary_scaling_factor": 2,
    } | sizes
    config |= {"max_trained_positions": trained}
    (rope,) = load(config).ropes
    base, factor, trained = 1000.0, 2, trained or 2048
    if length > trained:
        base *= ((factor * length / trained) - (factor - 1)) ** (64 / 62)
    np.testing.assert_allclose(rope.at(length).inv_freq, base ** (-np.arange(0, 64, 2) / 64), 1e-14)
    for absent in (0, None):
        assert load(config | {"rotary_scaling_factor": absent}).ropes[0].scaling is None


def test_attn_factor_says_what_each_program_does_with_it() -> None:
    """DeepSeek-R1-0528-Qwen3-8B has it; without it the file is read as transformers reads both."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = sized("qwen3", max_position_embeddings=131072, rope_theta=1e6)
    error = refused(config | {"rope_scaling": yarn | {"attn_factor": 0.8782488562869419}})
    assert "transformers ignores it" in error
    assert "rope.scaling.attn_factor does in llama.cpp" in error
    (rope,) = load(config | {"rope_scaling": yarn}).ropes
    assert rope.attention_factor == pytest.approx(1.1386294361119891)


#: Words for a program, or for whose a name is, in a sentence.
_PROGRAM = re.compile(
    r"\b(transformers|vLLM|llama\.cpp|\w+'s? (own |first |old )*(code|name))\b|code of|MiniMind"
)


def test_what_is_said_of_another_program_has_its_source() -> None:
    """Repository, version and file, beside the sentence."""
    said = {key: meaning for key, meaning in meanings().items() if _PROGRAM.search(meaning.says)}
    assert len(said) >= 20
    assert [key for key, meaning in said.items() if meaning.source is None] == []


#: The tables whose sentences are about programs, and what those are in them.
SENTENCES = {
    "huggingface.toml": r'(note|refused) = "[^"]*\b(code|llm-foundry)\b',
}


@pytest.mark.parametrize("table", SENTENCES)
def test_a_sentence_about_code_has_its_source_above_it(table: str) -> None:
    """Above its line, its table or all; what transformers' classes do other tests hold to them."""
    text = resources.files("phasor.files.configs").joinpath(table).read_text("utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#   ")]
    said = [i for i, line in enumerate(lines) if re.search(SENTENCES[table], line)]
    assert len(said) >= 3
    assert [lines[i] for i in said if not has_source(lines, i)] == []


def test_a_dialect_says_above_all_where_its_program_was_read() -> None:
    """Every table of a program's own."""
    tables = resources.files("phasor.files.dialects").iterdir()
    texts = {file.name: file.read_text("utf-8") for file in tables if file.name.endswith(".toml")}
    assert texts
    assert [name for name, text in texts.items() if not has_source(text.splitlines(), 0)] == []


def test_what_presets_say_of_a_program_is_in_their_source() -> None:
    """A release's own file, or the program that is named."""
    presets = tomllib.loads(
        resources.files("phasor.files").joinpath("presets.toml").read_text("utf-8")
    )
    for name, preset in presets.items():
        for sentence in (*preset.get("notes", ()), *preset.get("uncertain", ())):
            for program in re.findall(r"transformers|MaxText|chatglm", sentence):
                assert program in preset["source"], name
