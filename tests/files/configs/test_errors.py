"""What `load` refuses, and that every refusal names the key and the way out."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from phasor.files.reading import load

from ...each import each
from ..refusals import refused
from .config_files import small

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 64,
    "long_factor": [2.0] * 64,
    "original_max_position_embeddings": 2048,
}


def scaled(block: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A llama with this rope_scaling, some keys replaced (None removes)."""
    changed = {k: v for k, v in (block | more).items() if v is not None}
    return small(rope_scaling=changed)


# (config, why it is refused)
WRONG: dict[str, tuple[Any, str]] = {
    "no such law": (scaled({"rope_type": "magic"}), "value: rope_scaling.rope_type"),
    "a law that is no string": (scaled({"type": 3}), "value: rope_scaling.type"),
    "two laws": (
        scaled({"type": "linear", "rope_type": "yarn", "factor": 2.0}),
        "two_values: rope_scaling.rope_type",
    ),
    "an attn_factor that engines disagree on": (
        scaled(YARN, attn_factor=2),
        "unread: rope_scaling.attn_factor",
    ),
    "no factor": (scaled(LLAMA3, factor=None), "no_value: rope_scaling.factor"),
    "no original length": (
        scaled(LLAMA3, original_max_position_embeddings=None),
        "no_value: rope_scaling.original_max_position_embeddings",
    ),
    "a factor that cannot be derived": (
        scaled(YARN, factor=None, original_max_position_embeddings=None),
        "no_factor: rope_scaling.factor",
    ),
    "a negative factor": (scaled(YARN, factor=-4.0), ": rope_scaling.factor"),
    "a factor of zero": (scaled(YARN, factor=0), ": rope_scaling.factor"),
    "a NaN": (scaled(YARN, factor=math.nan), ": rope_scaling.factor"),
    "an infinity": (small(rope_theta=math.inf), ": rope_theta"),
    "a number too large for a float": (small(rope_theta=10**400), ": rope_theta"),
    "a number in a string": (small(rope_theta="500000"), ": rope_theta"),
    "a bool for a number": (scaled(YARN, factor=True), ": rope_scaling.factor"),
    "a bool for a count": (small(num_hidden_layers=True), ": num_hidden_layers"),
    "a fraction for a count": (small(num_hidden_layers=2.5), ": num_hidden_layers"),
    "no layers": (small(num_hidden_layers=0), ": num_hidden_layers"),
    "too many layers": (small(num_hidden_layers=10**9), ": num_hidden_layers"),
    "a string for a flag": (scaled(YARN, truncate="no"), "value: rope_scaling.truncate"),
    "a base of one": (small(rope_theta=1.0), ": rope_theta"),
    "a list for a block": (small(rope_scaling=[1]), "value: rope_scaling"),
    "crossed betas": (
        scaled(YARN, beta_fast=1, beta_slow=32),
        "unusable: rope_scaling.beta_fast",
    ),
    "crossed llama3 factors": (
        scaled(LLAMA3, low_freq_factor=5.0),
        "unusable: rope_scaling.high_freq_factor",
    ),
    "a dynamic factor below one": (
        scaled({"type": "dynamic", "factor": 0.5}),
        "unusable: rope_scaling.factor",
    ),
    "a dynamic length beside the context": (
        scaled({"type": "dynamic", "factor": 2.0}, original_max_position_embeddings=4096),
        "two_values: max_position_embeddings",
    ),
    "one mscale alone": (scaled(YARN, mscale=0.7), "one_mscale: rope_scaling.mscale"),
    "the other mscale alone": (scaled(YARN, mscale_all_dim=1.0), "one_mscale: mscale_all_dim"),
    "too few long factors": (
        scaled(LONG, long_factor=[1.0] * 63),
        "per_pair: rope_scaling.long_factor",
    ),
    "a null among factors": (
        scaled(LONG, short_factor=[1.0] * 63 + [None]),
        "null: rope_scaling.short_factor.63",
    ),
    "a negative among factors": (
        scaled(LONG, short_factor=[-1.0] * 64),
        "value: rope_scaling.long_factor",
    ),
    "factors that are no list": (
        scaled(LONG, short_factor=1.0),
        "value: rope_scaling.short_factor",
    ),
    "two attention factors": (
        scaled(LONG, attention_factor=1.2, short_mscale=1.3),
        "two_values: rope_scaling.attention_factor",
    ),
    "two bases": (
        small(rope_parameters={"rope_theta": 10000.0}),
        "two_values: rope_parameters.rope_theta",
    ),
    "two blocks": (
        small(rope_scaling=YARN, rope_parameters=YARN | {"factor": 8.0}),
        "blocks_differ: rope_parameters.factor",
    ),
    "two original lengths": (
        scaled(YARN) | {"original_max_position_embeddings": 4096},
        "two_values: original_max_position_embeddings",
    ),
    "two widths": (
        small("minimax_m2", partial_rotary_factor=0.25, rotary_dim=64),
        "two_values: partial_rotary_factor",
    ),
    "a part of a head that turns whole": (
        small(partial_rotary_factor=0.5),
        "whole_heads: partial_rotary_factor",
    ),
    "a fraction above one": (small("phi", partial_rotary_factor=1.5), ": partial_rotary_factor"),
    "an odd rotated part": (small("minimax_m2", rotary_dim=63), "odd_width: rotary_dim"),
    "a rotated part wider than the head": (
        small("minimax_m2", rotary_dim=256),
        "odd_width: rotary_dim",
    ),
    "an odd head": (small(head_dim=127), "odd_width: 127"),
    "a head too wide": (small(head_dim=10**12), ": head_dim"),
    "heads that do not divide": (small(num_attention_heads=5), "head_width: 512 / 5"),
    "no way to a head width": (small(hidden_size=None), "no_head_dim: head_dim"),
    "sections that do not add up": (
        small("qwen2_vl_text", rope_scaling={"type": "mrope", "mrope_section": [16, 24, 23]}),
        "sections: rope_scaling.mrope_section",
    ),
    "sections of too many axes": (
        small("qwen2_vl_text", rope_scaling={"type": "mrope", "mrope_section": [16] * 4}),
        "value: rope_scaling.mrope_section",
    ),
    "sections for a text model": (
        small(rope_scaling={"mrope_section": [16, 24, 24]}),
        "unread: rope_scaling.mrope_section",
    ),
    "a flag against the class": (
        small("qwen3_vl_text", rope_scaling={"mrope_interleaved": False}),
        "unread: rope_scaling.mrope_interleaved",
    ),
    "interleaved pairs asked of halves": (
        small("nomic_bert", rotary_emb_interleaved=True),
        "unread: rotary_emb_interleaved",
    ),
    "a rope key nobody reads": (small(rope_zoom=2.0), "unread: rope_zoom"),
    "a key of another model": (small(rope_local_base_freq=1e4), "unread: rope_local_base_freq"),
    "layer types of another length": (
        small("gemma3_text", layer_types=["full_attention"]),
        "kinds: layer_types",
    ),
    "a layer type that is no string": (small(layer_types=[1, 2, 3, 4]), "value: layer_types.0"),
    "a kind without a block": (
        small(
            layer_types=["full_attention"] * 4,
            rope_parameters={"sliding_attention": {"rope_type": "default"}},
        ),
        "kind_absent: rope_parameters.full_attention",
    ),
    "a stray beside blocks": (
        small(
            layer_types=["full_attention"] * 4,
            rope_parameters={"full_attention": {"rope_type": "default"}, "factor": 2.0},
        ),
        "outside_kinds: rope_parameters.factor",
    ),
    "a base that no block has": (
        small(
            layer_types=["full_attention"] * 4,
            rope_parameters={"full_attention": {"rope_theta": 1e4}},
        ),
        "base_of_no_kind: rope_theta",
    ),
    "another base than that of the block that the class assumes": (
        small("apertus", head_dim=64),
        "class_block: rope_theta",
    ),
    "switches of another length": (
        small("smollm3", no_rope_layers=[1, 0]),
        "value: no_rope_layers",
    ),
    "switches that are not 0 or 1": (
        small("smollm3", no_rope_layers=[2] * 4),
        "value: no_rope_layers",
    ),
    "letters that mean nothing": (
        small("exaone4", sliding_window=1, sliding_window_pattern="LXL"),
        "value: sliding_window_pattern",
    ),
    "codes that mean nothing": (
        small("deepseek_v4", compress_ratios=[7] * 4),
        "value: compress_ratios",
    ),
    "two language models": (
        {"model_type": "llava", "text_config": small(), "llm_config": small()},
        "two_language_models: text_config",
    ),
    "an outer base that differs": (
        {"model_type": "llava", "text_config": small(), "rope_theta": 1e4},
        "inner_differs: text_config.rope_theta",
    ),
    "a text_config that is no object": (
        {"model_type": "llava", "text_config": 3},
        "value: text_config",
    ),
    "an error inside a larger model": (
        {"model_type": "llava", "text_config": small(rope_theta=-1)},
        ": text_config.rope_theta",
    ),
    "an unknown model type": (small("foo"), "model_type: model_type"),
    "no model type": (small(model_type=None), "no_model_type: model_type"),
    "an empty object": ({}, "no_model: model_type"),
    "a key that is no string": ({1: 2}, "keys: 1"),
    "a number": (3, "source: 3"),
    "nothing": (None, "source: None"),
    "bytes": (b"config.json", "source: b'config.json'"),
}


@each("key", ["text_config", "rope_theta", "rope_x", "x"])
def test_a_dictionary_that_contains_itself_is_refused(key: str) -> None:
    """Under whatever key, as an object, inside a list or deeper."""
    inside = small()
    for value in (inside, [inside], {"x": inside}):
        inside[key] = value
        with refused("endless"):
            load(inside)


@each("name", WRONG)
def test_damaged_configs_name_the_key(name: str) -> None:
    """Each kind of damage is a ConfigError that names the key and what came."""
    source, message = WRONG[name]
    with refused(message) as caught:
        load(source)
    assert caught.value.__cause__ is None


SIZED = b'{"model_type": "llama", "num_hidden_layers": 1, "head_dim": 64, "rope_theta": %s}'
# (content of the file, why it is refused)
FILES: dict[str, tuple[bytes, str]] = {
    "no JSON": (b"model_type = llama", "not_parsed: JSON"),
    "an empty file": (b"", "empty"),
    "half a file": (b'{"model_type": "llama"', "cut_short: JSON"),
    "a file cut in a word": (b'{"model_type": "lla', "cut_short: JSON"),
    "a git-lfs pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a",
        "lfs_pointer",
    ),
    "a web page": (b"<!doctype html>\n<html>", "web_page"),
    "a list": (b"[1, 2]", "no_object: a JSON object"),
    "not UTF-8": (b'{"model_type": "\xff"}', "not_utf8"),
    "UTF-16": ('{"model_type": "llama"}'.encode("utf-16"), "utf16"),
    "a duplicate key": (b'{"rope_theta": 1, "rope_theta": 2}', "key_twice: rope_theta"),
    "a duplicate key inside": (b'{"a": {"b": 1, "b": 2}}', "key_twice: b"),
    "NaN": (SIZED % b"NaN", ": rope_theta"),
    "-Infinity": (SIZED % b"-Infinity", ": rope_theta"),
    "a float that overflows": (SIZED % b"1e999", ": rope_theta"),
    "a number of too many digits": (b'{"a": ' + b"9" * 5000 + b"}", "not_parsed: JSON"),
    "too deep": (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "too_deep"),
    "a damaged GGUF file": (b"GGUF\x03\x00\x00\x00", "gguf_damaged: damaged"),
    "larger than 16 MiB": (b'{"a": "' + b"x" * 2**24 + b'"}', "too_large: 16"),
}


@pytest.mark.parametrize("name", FILES)
def test_damaged_files_say_what_is_wrong(name: str, tmp_path: Path) -> None:
    """Files that are no JSON object, or a dangerous one, are refused by name."""
    content, message = FILES[name]
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with refused(message):
        load(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """A path that leads nowhere."""
    with refused("not_file"):
        load(tmp_path / "absent.json")


def test_an_impossible_path_is_a_config_error() -> None:
    """A path that no file system can have."""
    with refused("source_unreadable"):
        load("a\0b")


def test_a_directory_without_a_config_is_named(tmp_path: Path) -> None:
    """A directory that holds neither file."""
    with refused("no_config_file"):
        load(tmp_path)


def test_a_directory_with_both_dialects_asks_which(tmp_path: Path) -> None:
    """config.json and params.json describe differently paired weights of one model."""
    for name in ("config.json", "params.json"):
        (tmp_path / name).write_text(json.dumps(small()), "utf-8")
    with refused("two_configs"):
        load(tmp_path)


def test_a_deep_value_is_refused_not_printed() -> None:
    """A value too deep for repr is no reason for another exception."""
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    with refused(": rope_theta"):
        load(small(rope_theta=deep))
    with refused("unread", key="rope_x"):
        load(small(rope_x=deep))
