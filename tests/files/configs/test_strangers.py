"""Files of kinds that nobody thought of: read as they mean it, or refused with what they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from phasor import ConfigError, PhasorWarning
from phasor.files.reading import load

from ..refusals import refused
from .config_files import small

YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}


def gain(**more: Any) -> float:
    """What the law of a block multiplies cos and sin by."""
    (rope,) = load(small(rope_scaling=YARN | more)).ropes
    return rope.attention_factor


@pytest.mark.parametrize("value", [1.0, False, 0.5, "x"])
def test_a_misspelt_key_of_a_block_is_noted_whatever_its_value(value: Any) -> None:
    """The factor that it was meant to set is another number, so its reader must hear of it."""
    config = small(rope_scaling=YARN | {"attn_facter": value})
    assert any("rope_scaling.attn_facter" in note for note in load(config).notes)
    assert gain(attention_factor=1.0) == 1.0
    assert gain(attn_facter=value) == gain() != 1.0


def test_a_factor_in_place_of_a_block_is_refused_or_noted() -> None:
    """True names no law; of a factor 1 says that nothing is scaled; false is an absent block."""
    with refused("value", key="rope_scaling", got=True):
        load(small(rope_scaling=True))
    with refused("value", key="rope_scaling", got=2.0):
        load(small(rope_scaling=2.0))
    with refused("value", key="rope_parameters", got=1):
        load(small(rope_parameters=1))
    for one in (1, 1.0):
        ropes = load(small(rope_scaling=one))
        assert ropes == load(small())
        assert any("rope_scaling" in note for note in ropes.notes)
    assert load(small(rope_scaling=False)).notes == load(small()).notes


UNTYPED = {
    "a factor": ({"factor": 2.0}, ("linear", "dynamic", "yarn", "llama3", "longrope")),
    "a factor of one": ({"factor": 1.0}, ("linear", "dynamic")),
    "a null for the type": ({"type": None, "factor": 2.0}, ("linear",)),
    "an empty type": ({"rope_type": "", "factor": 2.0}, ("rope_type",)),
    "the ends of Llama 3": ({"factor": 8.0, "low_freq_factor": 1.0}, ("llama3",)),
    "the ends of YaRN": ({"factor": 8.0, "beta_fast": 32}, ("yarn",)),
    "lists": ({"short_factor": [1.0] * 64, "long_factor": [2.0] * 64}, ("longrope",)),
}


@pytest.mark.parametrize("name", UNTYPED)
def test_a_law_without_a_name_is_refused_with_the_names_it_may_have(name: str) -> None:
    """Transformers runs it unscaled, and so does strict=False, with a note and a warning."""
    block, names = UNTYPED[name]
    with pytest.raises(ConfigError) as caught:
        load(small(rope_scaling=block))
    assert all(name in str(caught.value) for name in names)
    if block.get("rope_type") is None:
        with pytest.warns(PhasorWarning, match="belongs to a law"):
            ropes = load(small(rope_scaling=block), strict=False)
        assert ropes == load(small())
        assert any("rope_scaling.factor" in n or "short_factor" in n for n in ropes.notes)


def test_blocks_of_plain_frequencies_need_no_name() -> None:
    """Transformers 5 writes them so."""
    block = {"rope_theta": 500000.0, "partial_rotary_factor": 1.0}
    assert load(small(rope_theta=None, rope_parameters=block)) == load(small())


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "mistral"])
def test_mlx_says_in_its_file_that_pairs_are_interleaved(model_type: str) -> None:
    """Its code reads the key, and transformers' class does not: the file is MLX's."""
    ropes = load(small(model_type, rope_traditional=True))
    assert [rope.pairing for rope in ropes.ropes] == ["interleaved"]
    assert any("rope_traditional" in note for note in ropes.notes)
    assert load(small(model_type, rope_traditional=False)) == load(small(model_type))


@pytest.mark.parametrize("more", [{}, {"num_hidden_layers": 2, "num_attention_heads": 4}])
def test_two_widths_of_one_model_are_refused(more: dict[str, int]) -> None:
    """Meta's key and transformers' in one file: neither is known to be the right one."""
    metas = {"model_type": "llama", "dim": 1024, "n_layers": 2, "n_heads": 4}
    with refused("two_values", first_name="dim", first=1024, name="hidden_size", value=512):
        load(metas | more | {"hidden_size": 512})
    ropes = load(metas | more | {"hidden_size": 1024})
    assert [rope.pairing for rope in ropes.ropes] == ["half"]


def test_a_text_config_that_names_its_type_may_leave_out_the_sizes_of_its_class() -> None:
    """As LLaVA 1.5's does; objects beside it describe other models or no model."""
    config = {
        "model_type": "llava",
        "text_config": {
            "model_type": "llama",
            "vocab_size": 32064,
            "quantization_config": {"a": 1},
        },
        "vision_config": {"model_type": "clip_vision_model", "hidden_size": 1024},
        "norm_stats": {"robot": {"action": {"mean": [0.5]}}},
    }
    with pytest.warns(PhasorWarning, match="does not say its size"):
        assert len(load(config)) == 32
    with refused("size_elsewhere: norm_stats.hidden_size"):
        load(config | {"norm_stats": {"hidden_size": 2048}})
    with refused("size_elsewhere: text_config.arch"):
        load({"model_type": "llava", "text_config": {"model_type": "llama", "arch": {"x": 1}}})


def test_what_stands_in_place_of_a_rotation_is_what_the_file_says() -> None:
    """BERT's class has learned positions, Jina's BERT has ALiBi."""
    for word, instead in (("alibi", "ALiBi"), ("relative_key", "Shaw"), ("absolute", "learned")):
        ropes = load({"model_type": "bert", "position_embedding_type": word})
        assert not any(ropes)
        assert instead in ropes.notes[-1]


def test_architectures_tell_the_type_of_a_file_without_one() -> None:
    """The classes of transformers are called as their types are."""
    config = {key: value for key, value in small("minicpm3").items() if key != "model_type"}
    config |= {"architectures": ["MiniCPM3ForCausalLM"], "qk_rope_head_dim": 32}
    ropes = load(config)
    assert ropes == load(config | {"model_type": "minicpm3"})
    assert any("architectures" in note for note in ropes.notes)


FOREIGN: dict[str, tuple[dict[str, Any], str]] = {
    "an adapter": (
        {"peft_type": "LORA", "base_model_name_or_path": "a/b", "r": 8},
        "foreign_file: a/b",
    ),
    "an exported graph": (
        {"model": {"type": "qwen2", "decoder": {"filename": "m.onnx", "hidden_size": 8}}},
        "foreign_file: ONNX graph",
    ),
    "a policy": ({"type": "pi0", "n_action_steps": 50}, "foreign_file: LeRobot policy (pi0)"),
    "an old chat config": (
        {"model_lib": "a", "conv_template": "b"},
        "foreign_file: older chat config of MLC",
    ),
    "two towers": (
        {"vision_cfg": {"layers": 2}, "text_cfg": {"width": 2}},
        "foreign_file: open_clip",
    ),
    "two towers in a file of the Hub": (
        {"model_cfg": {"vision_cfg": {"layers": 2}, "text_cfg": {"hf_model_name": "a/b"}}},
        "foreign_file: open_clip_config.json",
    ),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_file_that_holds_no_model_says_what_it_is(name: str) -> None:
    """And which file has what is looked for."""
    config, says = FOREIGN[name]
    with refused(says) as caught:
        load(config)
    assert "like=" not in str(caught.value)


FILES = {
    "config.yaml": (b"a: 1\n", "no_model: model_type"),
    "model.safetensors": (b"\x10\0\0\0\0\0\0\0{}", "other_file: holds weights"),
    "pytorch_model.bin": (b"PK\x03\x04", "other_file: holds weights"),
    "a.gguf": (b"GGUF\x03", "gguf_damaged: its header announces more data than the file has"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_format_says_what_it_is(name: str, tmp_path: Path) -> None:
    """Not what its first byte does to a parser."""
    data, says = FILES[name]
    (tmp_path / name).write_bytes(data)
    with refused(says):
        load(tmp_path / name)


def test_a_folder_says_what_it_holds_instead(tmp_path: Path) -> None:
    """The chat config of MLC, a GGUF file, or an adapter and its model."""
    with refused("no_config_file", found=""):
        load(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    (tmp_path / "mlc-chat-config.json").write_text("{}")
    with refused("no_config_file: mlc-chat-config.json, model.gguf"):
        load(tmp_path)
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "owner/model"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
    with refused("foreign_file: owner/model"):
        load(tmp_path)


def test_lists_of_negative_divisors_turn_the_other_way() -> None:
    """As programs divide by whatever they are given; one sign for all of them."""
    lists = {"rope_type": "longrope", "factor": 1.0, "original_max_position_embeddings": 8192}
    lists |= {"short_factor": [-1.0] * 64, "long_factor": [-2.0] * 64}
    (rope,) = load(small(rope_scaling=lists)).ropes
    (mirrored,) = load(
        small(rope_scaling=lists | {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64})
    ).ropes
    assert (rope.direction, mirrored.direction) == (-1, 1)
    assert rope.scaling == mirrored.scaling
    for key in ("short_factor", "long_factor"):
        for other in ([1.0] * 64, [-1.0] * 63 + [1.0], [-1.0] * 63 + [0.0]):
            with pytest.raises(ConfigError) as caught:
                load(small(rope_scaling=lists | {key: other}))
            names = ("rope_scaling.short_factor", "rope_scaling.long_factor")
            assert str(caught.value).startswith(names)


@pytest.mark.parametrize("fraction", [float("nan"), float("inf"), 1e308, -0.5, 1.5])
def test_a_fraction_that_is_none_is_refused_under_another_name_too(fraction: float) -> None:
    """A key that the class does not read may hold any number."""
    with refused("unread", key="rotary_pct"):
        load(small(rotary_pct=fraction))
