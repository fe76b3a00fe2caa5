"""What `load` refuses, and that every refusal names the key and the way out."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from phasor import ConfigError
from phasor.files.reading import load

from ...each import each
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


# (config, what the message must say)
WRONG: dict[str, tuple[Any, str]] = {
    "no such law": (scaled({"rope_type": "magic"}), r"rope_scaling\.rope_type must be one of"),
    "a law that is no string": (scaled({"type": 3}), r"rope_scaling\.type must be a string"),
    "two laws": (
        scaled({"type": "linear", "rope_type": "yarn", "factor": 2.0}),
        r"rope_scaling\.rope_type says 'yarn' and rope_scaling\.type says 'linear'",
    ),
    "an attn_factor that engines disagree on": (
        scaled(YARN, attn_factor=2),
        r"rope_scaling\.attn_factor \(got 2\) multiplies cos and sin",
    ),
    "no factor": (scaled(LLAMA3, factor=None), r"rope_scaling\.factor is absent"),
    "no original length": (
        scaled(LLAMA3, original_max_position_embeddings=None),
        r"rope_scaling\.original_max_position_embeddings is absent",
    ),
    "a factor that cannot be derived": (
        scaled(YARN, factor=None, original_max_position_embeddings=None),
        r"rope_scaling\.factor is absent and cannot be derived",
    ),
    "a negative factor": (scaled(YARN, factor=-4.0), r"rope_scaling\.factor .* > 0, got -4\.0"),
    "a factor of zero": (scaled(YARN, factor=0), r"rope_scaling\.factor .* got 0"),
    "a NaN": (scaled(YARN, factor=math.nan), r"rope_scaling\.factor .* finite .* got nan"),
    "an infinity": (small(rope_theta=math.inf), r"rope_theta .* finite .* got inf"),
    "a number too large for a float": (small(rope_theta=10**400), "rope_theta .* finite"),
    "a number in a string": (small(rope_theta="500000"), "rope_theta .* got '500000'"),
    "a bool for a number": (scaled(YARN, factor=True), r"rope_scaling\.factor .* got True"),
    "a bool for a count": (small(num_hidden_layers=True), "num_hidden_layers .* got True"),
    "a fraction for a count": (small(num_hidden_layers=2.5), r"num_hidden_layers .* got 2\.5"),
    "no layers": (small(num_hidden_layers=0), "num_hidden_layers .* got 0"),
    "too many layers": (small(num_hidden_layers=10**9), "num_hidden_layers .* got 1000000000"),
    "a string for a flag": (scaled(YARN, truncate="no"), r"rope_scaling\.truncate .* 'no'"),
    "a base of one": (small(rope_theta=1.0), r"rope_theta .* > 1, got 1\.0"),
    "a list for a block": (small(rope_scaling=[1]), r"rope_scaling must be an object, got \[1\]"),
    "crossed betas": (
        scaled(YARN, beta_fast=1, beta_slow=32),
        r"rope_scaling\.beta_fast cannot be used",
    ),
    "crossed llama3 factors": (
        scaled(LLAMA3, low_freq_factor=5.0),
        r"rope_scaling\.high_freq_factor cannot be used",
    ),
    "a dynamic factor below one": (
        scaled({"type": "dynamic", "factor": 0.5}),
        r"rope_scaling\.factor cannot be used",
    ),
    "a dynamic length beside the context": (
        scaled({"type": "dynamic", "factor": 2.0}, original_max_position_embeddings=4096),
        r"original_max_position_embeddings says 4096 and max_position_embeddings says 8192",
    ),
    "one mscale alone": (scaled(YARN, mscale=0.7), r"rope_scaling\.mscale and .*mscale_all_dim"),
    "the other mscale alone": (scaled(YARN, mscale_all_dim=1.0), r"mscale and .*mscale_all_dim"),
    "too few long factors": (
        scaled(LONG, long_factor=[1.0] * 63),
        r"rope_scaling\.long_factor .* \(64\), got 63",
    ),
    "a null among factors": (
        scaled(LONG, short_factor=[1.0] * 63 + [None]),
        r"rope_scaling\.short_factor\.63",
    ),
    "a negative among factors": (
        scaled(LONG, short_factor=[-1.0] * 64),
        r"rope_scaling\.long_factor must be negative where short_factor is",
    ),
    "factors that are no list": (scaled(LONG, short_factor=1.0), r"rope_scaling\.short_factor"),
    "two attention factors": (
        scaled(LONG, attention_factor=1.2, short_mscale=1.3),
        r"rope_scaling\.attention_factor says 1\.2 and rope_scaling\.short_mscale says 1\.3",
    ),
    "two bases": (
        small(rope_parameters={"rope_theta": 10000.0}),
        r"rope_parameters\.rope_theta says 10000\.0 and rope_theta says 500000\.0",
    ),
    "two blocks": (
        small(rope_scaling=YARN, rope_parameters=YARN | {"factor": 8.0}),
        r"rope_parameters\.factor and rope_scaling\.factor differ",
    ),
    "two original lengths": (
        scaled(YARN) | {"original_max_position_embeddings": 4096},
        r"original_max_position_embeddings says 2048 and original_max_position_embeddings says",
    ),
    "two widths": (
        small("minimax_m2", partial_rotary_factor=0.25, rotary_dim=64),
        r"partial_rotary_factor says 32 and rotary_dim says 64",
    ),
    "a part of a head that turns whole": (small(partial_rotary_factor=0.5), "rotates whole heads"),
    "a fraction above one": (small("phi", partial_rotary_factor=1.5), "partial_rotary_factor"),
    "an odd rotated part": (small("minimax_m2", rotary_dim=63), "rotary_dim must leave an even"),
    "a rotated part wider than the head": (small("minimax_m2", rotary_dim=256), "rotary_dim"),
    "an odd head": (small(head_dim=127), "from 2 to 127, got 127"),
    "a head too wide": (small(head_dim=10**12), "head_dim"),
    "heads that do not divide": (small(num_attention_heads=5), r"512 / 5"),
    "no way to a head width": (small(hidden_size=None), "head_dim is absent"),
    "sections that do not add up": (
        small("qwen2_vl_text", rope_scaling={"type": "mrope", "mrope_section": [16, 24, 23]}),
        r"rope_scaling\.mrope_section must add up to the number of pairs \(64\)",
    ),
    "sections of too many axes": (
        small("qwen2_vl_text", rope_scaling={"type": "mrope", "mrope_section": [16] * 4}),
        r"rope_scaling\.mrope_section must be a list of 3",
    ),
    "sections for a text model": (
        small(rope_scaling={"mrope_section": [16, 24, 24]}),
        r"rope_scaling\.mrope_section .*gives sections",
    ),
    "a flag against the class": (
        small("qwen3_vl_text", rope_scaling={"mrope_interleaved": False}),
        r"rope_scaling\.mrope_interleaved \(got False\) sets how axes share",
    ),
    "interleaved pairs asked of halves": (
        small("nomic_bert", rotary_emb_interleaved=True),
        r"rotary_emb_interleaved \(got True\) sets which coordinates",
    ),
    "a rope key nobody reads": (small(rope_zoom=2.0), "rope_zoom is not a key"),
    "a key of another model": (small(rope_local_base_freq=1e4), "rope_local_base_freq"),
    "layer types of another length": (
        small("gemma3_text", layer_types=["full_attention"]),
        "layer_types must name the kind of each of the 4 layers, got 1",
    ),
    "a layer type that is no string": (small(layer_types=[1, 2, 3, 4]), r"layer_types\.0"),
    "a kind without a block": (
        small(
            layer_types=["full_attention"] * 4,
            rope_parameters={"sliding_attention": {"rope_type": "default"}},
        ),
        r"rope_parameters\.full_attention is absent",
    ),
    "a stray beside blocks": (
        small(
            layer_types=["full_attention"] * 4,
            rope_parameters={"full_attention": {"rope_type": "default"}, "factor": 2.0},
        ),
        r"rope_parameters\.factor is outside",
    ),
    "a base that no block has": (
        small(
            layer_types=["full_attention"] * 4,
            rope_parameters={"full_attention": {"rope_theta": 1e4}},
        ),
        "rope_theta is 500000, but no block",
    ),
    "another base than that of the block that the class assumes": (
        small("apertus", head_dim=64),
        r"rope_theta is 500000\.0, but without .* its own, with rope_theta = 12000000",
    ),
    "switches of another length": (small("smollm3", no_rope_layers=[1, 0]), "no_rope_layers"),
    "switches that are not 0 or 1": (small("smollm3", no_rope_layers=[2] * 4), "no_rope_layers"),
    "letters that mean nothing": (
        small("exaone4", sliding_window=1, sliding_window_pattern="LXL"),
        "sliding_window_pattern",
    ),
    "codes that mean nothing": (small("deepseek_v4", compress_ratios=[7] * 4), "compress_ratios"),
    "two language models": (
        {"model_type": "llava", "text_config": small(), "llm_config": small()},
        "text_config and llm_config",
    ),
    "an outer base that differs": (
        {"model_type": "llava", "text_config": small(), "rope_theta": 1e4},
        r"rope_theta and text_config\.rope_theta differ",
    ),
    "a text_config that is no object": (
        {"model_type": "llava", "text_config": 3},
        "text_config must be an object, got 3",
    ),
    "an error inside a larger model": (
        {"model_type": "llava", "text_config": small(rope_theta=-1)},
        r"text_config\.rope_theta",
    ),
    "an unknown model type": (small("foo"), r"model_type .* got 'foo'; .*Rope"),
    "no model type": (small(model_type=None), "model_type is absent"),
    "an empty object": ({}, "model_type is absent"),
    "a key that is no string": ({1: 2}, "keys must be strings, got 1"),
    "a number": (3, "source must be the path .* got 3"),
    "nothing": (None, "source must be the path"),
    "bytes": (b"config.json", "source must be the path"),
}


@each("key", ["text_config", "rope_theta", "rope_x", "x"])
def test_a_dictionary_that_contains_itself_is_refused(key: str) -> None:
    """Under whatever key, as an object, inside a list or deeper."""
    inside = small()
    for value in (inside, [inside], {"x": inside}):
        inside[key] = value
        with pytest.raises(ConfigError, match=r"source must be .* contains itself"):
            load(inside)


@each("name", WRONG)
def test_damaged_configs_name_the_key(name: str) -> None:
    """Each kind of damage is a ConfigError that names the key and what came."""
    source, message = WRONG[name]
    with pytest.raises(ConfigError, match=message) as caught:
        load(source)
    assert caught.value.__cause__ is None


SIZED = b'{"model_type": "llama", "num_hidden_layers": 1, "head_dim": 64, "rope_theta": %s}'
# (content of the file, what the message must say)
FILES: dict[str, tuple[bytes, str]] = {
    "no JSON": (b"model_type = llama", "must be JSON"),
    "an empty file": (b"", "is empty; download or copy it again"),
    "half a file": (b'{"model_type": "llama"', "must be JSON, but ends in the middle of a value"),
    "a file cut in a word": (b'{"model_type": "lla', "ends in the middle of a value"),
    "a git-lfs pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a",
        "git lfs pull",
    ),
    "a web page": (b"<!doctype html>\n<html>", "is a web page, not the file itself; download it"),
    "a list": (b"[1, 2]", r"must hold a JSON object, got \[1, 2\]"),
    "not UTF-8": (b'{"model_type": "\xff"}', "must be UTF-8"),
    "UTF-16": ('{"model_type": "llama"}'.encode("utf-16"), "is UTF-16, as"),
    "a duplicate key": (b'{"rope_theta": 1, "rope_theta": 2}', "'rope_theta' stands twice"),
    "a duplicate key inside": (b'{"a": {"b": 1, "b": 2}}', "'b' stands twice"),
    "NaN": (SIZED % b"NaN", "rope_theta must be a finite"),
    "-Infinity": (SIZED % b"-Infinity", "must be a finite"),
    "a float that overflows": (SIZED % b"1e999", "a finite"),
    "a number of too many digits": (b'{"a": ' + b"9" * 5000 + b"}", "must be JSON"),
    "too deep": (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
    "a damaged GGUF file": (b"GGUF\x03\x00\x00\x00", "damaged GGUF"),
    "larger than 16 MiB": (b'{"a": "' + b"x" * 2**24 + b'"}', "larger than 16 MiB"),
}


@pytest.mark.parametrize("name", FILES)
def test_damaged_files_say_what_is_wrong(name: str, tmp_path: Path) -> None:
    """Files that are no JSON object, or a dangerous one, are refused by name."""
    content, message = FILES[name]
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """A path that leads nowhere."""
    with pytest.raises(ConfigError, match=r"absent\.json is not a file"):
        load(tmp_path / "absent.json")


def test_an_impossible_path_is_a_config_error() -> None:
    """A path that no file system can have."""
    with pytest.raises(ConfigError, match=r"cannot be read|is not a file"):
        load("a\0b")


def test_a_directory_without_a_config_is_named(tmp_path: Path) -> None:
    """A directory that holds neither file."""
    with pytest.raises(ConfigError, match=r"neither config\.json nor params\.json"):
        load(tmp_path)


def test_a_directory_with_both_dialects_asks_which(tmp_path: Path) -> None:
    """config.json and params.json describe differently paired weights of one model."""
    for name in ("config.json", "params.json"):
        (tmp_path / name).write_text(json.dumps(small()), "utf-8")
    with pytest.raises(ConfigError, match="both"):
        load(tmp_path)


def test_a_deep_value_is_refused_not_printed() -> None:
    """A value too deep for repr is no reason for another exception."""
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ConfigError, match=r"rope_theta .* too deep"):
        load(small(rope_theta=deep))
    with pytest.raises(ConfigError, match=r"rope_x .* too deep"):
        load(small(rope_x=deep))
