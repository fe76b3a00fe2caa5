"""Every hint of a refusal is followed, and leads to the rope that is written out beside it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from phasor import ConfigError, PhasorWarning, Rope
from phasor.axes import Axial, Sectioned
from phasor.files.dialects.blocks import config_keys, rope_parameters
from phasor.files.dialects.model_files import keys_for_file
from phasor.files.reading import load
from phasor.scaling import DynamicNTK, Linear, Llama3, LongRope, PerPair, Proportional, Yarn

from ..refusals import sentences
from .config_files import gguf, sized, small

_Read = Callable[[Path], tuple[Rope, ...]]


class Hint(NamedTuple):
    """What is refused, words of the hint, and what following it gives."""

    refused: _Read
    advice: str
    followed: _Read
    rope: Rope | tuple[Rope, ...]


def of(config: Any, **options: Any) -> _Read:
    """A reading of a dictionary."""
    return lambda _: load(config, **options).ropes


def past(config: dict[str, Any]) -> _Read:
    """A reading past the keys that nothing reads, which is warned of."""

    def read(_: Path) -> tuple[Rope, ...]:
        with pytest.warns(PhasorWarning, match="Left aside"):
            return load(config, strict=False).ropes

    return read


def in_folder(files: dict[str, Any], opened: str = "") -> _Read:
    """A reading of a folder with these files, or of one of them."""

    def read(folder: Path) -> tuple[Rope, ...]:
        folder = folder / "model"
        folder.mkdir(exist_ok=True)
        for old in folder.iterdir():
            old.unlink()
        for name, content in files.items():
            text = content if isinstance(content, str | bytes) else json.dumps(content)
            (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)
        return load(folder / opened).ropes

    return read


def writing(make: Callable[[], object]) -> _Read:
    """What a rope is written as, which is refused."""

    def write(_: Path) -> tuple[Rope, ...]:
        raise AssertionError(make())

    return write


def as_json(rope: Rope) -> _Read:
    """A rope that is kept as JSON."""
    return lambda _: (Rope.from_json(rope.to_json()),)


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    """A config without some of its keys."""
    return {key: value for key, value in config.items() if key not in keys}


BASE = 500_000.0
PLAIN = Rope(head_dim=128, pairing="half", base=BASE)
INTERLEAVED = replace(PLAIN, pairing="interleaved")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
LINEAR = {"rope_type": "linear", "factor": 2.0}
DEFAULT = {"rope_type": "default", "rope_theta": BASE}
HALVED = replace(PLAIN, scaling=Linear(factor=2.0))
YARNED = replace(PLAIN, scaling=Yarn(factor=4.0, original_max_positions=2048))
KINDS = {"layer_types": ["sliding_attention", "full_attention"] * 2}
BY_KIND = {"sliding_attention": DEFAULT, "full_attention": DEFAULT}
PARAMS = {"dim": 512, "n_layers": 4, "n_heads": 4, "rope_theta": BASE, "multiple_of": 256}
ARGUMENTS = "python train.py --num-layers 4 --hidden-size 512 --num-attention-heads 4"
ARGUMENTS += " --position-embedding-type rope --rotary-base 500000"
LITGPT = {"n_layer": 4, "n_head": 4, "n_embd": 512, "rotary_percentage": 1.0, "rope_base": BASE}
LITGPT |= {"norm_class_name": "RMSNorm"}
BANDS = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
BANDS |= {"original_max_seq_len": 8192}
LLAMA3 = Llama3(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)
LATENT = {"qk_rope_head_dim": 64, "qk_nope_head_dim": 128}
LONG = {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
EXPLICIT = Rope(head_dim=4, pairing="half", explicit_inv_freq=(1.0, 0.5))
STARTS = [
    replace(PLAIN, scaling=DynamicNTK(factor=2.0, original_max_positions=n)) for n in (1024, 2048)
]
QUARTER = replace(PLAIN, rotary_dim=64, scaling=Proportional(fraction=0.5))
SECTIONED = replace(PLAIN, axes=Sectioned((16, 24, 24)))
AXIAL = replace(PLAIN, axes=Axial((32, 32)))
NEW = small("mynew", architectures=["MyNewForCausalLM"])

ENDLESS = small()
ENDLESS["x"] = ENDLESS

FREQS = {"rope_freqs.weight": [2.0] * 64}
YAML = "".join(f"{key}: {value}\n" for key, value in sized("llama").items())
#: A StripedHyena whose positions are divided by 4.
MAXTEXT = {"base_num_decoder_layers": 4, "rope_max_timescale": int(BASE)}
STRIPED = small("stripedhyena", hidden_size=512, num_attention_heads=8, attn_layer_idxs=[1]) | {
    "rope_theta": None,
    "rotary_emb_base": 5e5,
    "use_interpolated_rotary_pos_emb": True,
    "rotary_emb_scaling_factor": 4.0,
}

HINTS: dict[str, Hint] = {
    "source": Hint(of(7), "a dictionary,", of(small()), PLAIN),
    "endless": Hint(
        of(ENDLESS),
        "pass the contents of the config file",
        of(small()),
        PLAIN,
    ),
    "not_file": Hint(
        in_folder({"model.json": small()}, "config.json"),
        "give the path of a config.json",
        in_folder({"model.json": small()}, "model.json"),
        PLAIN,
    ),
    "no_config_file": Hint(
        in_folder({"model.json": small()}),
        "it holds model.json: give the path of a config",
        in_folder({"model.json": small()}, "model.json"),
        PLAIN,
    ),
    "gguf_damaged": Hint(
        in_folder({"a.gguf": b"GGUF" + b"\0" * 9, "config.json": small()}, "a.gguf"),
        "download or convert it again",
        in_folder({"config.json": small()}),
        PLAIN,
    ),
    "two_configs": Hint(
        in_folder({"config.json": small(), "params.json": PARAMS}),
        "weights with different pairings; pass the path of the one that belongs to your weights",
        in_folder({"config.json": small(), "params.json": PARAMS}, "params.json"),
        INTERLEAVED,
    ),
    "lfs_pointer": Hint(
        in_folder({"config.json": "version https://git-lfs.github.com/spec/v1\n"}),
        "`git lfs pull` in its folder",
        in_folder({"config.json": small()}),
        PLAIN,
    ),
    "web_page": Hint(
        in_folder({"config.json": "<!DOCTYPE html><html></html>"}),
        "from an address with /resolve/",
        in_folder({"config.json": small()}),
        PLAIN,
    ),
    "empty": Hint(
        in_folder({"config.json": ""}),
        "download or copy it again",
        in_folder({"config.json": small()}),
        PLAIN,
    ),
    "cut_short": Hint(
        in_folder({"config.json": json.dumps(small())[:-9]}),
        "download or copy it again",
        in_folder({"config.json": small()}),
        PLAIN,
    ),
    "no_gguf": Hint(
        in_folder({"a.gguf": b"\0" * 99, "config.json": small()}, "a.gguf"),
        "download or convert it again",
        in_folder({"config.json": small()}),
        PLAIN,
    ),
    "too_large": Hint(
        in_folder({"config.json": small(), "model.json": " " * (2**24 + 1)}, "model.json"),
        "pass the config.json",
        in_folder({"config.json": small()}, "config.json"),
        PLAIN,
    ),
    "utf16": Hint(
        in_folder({"a.json": json.dumps(small()).encode("utf-16")}, "a.json"),
        "save it as UTF-8",
        in_folder({"a.json": json.dumps(small()).encode("utf-8")}, "a.json"),
        PLAIN,
    ),
    "two_values": Hint(
        of(small(rope_parameters={"rope_theta": 1e4})),
        "remove the wrong one",
        of(small()),
        PLAIN,
    ),
    "no_arguments": Hint(
        in_folder({"run.sh": "python train.py --learning-rate 1"}, "run.sh"),
        "pass the script that has them",
        in_folder({"run.sh": ARGUMENTS}, "run.sh"),
        PLAIN,
    ),
    "documents": Hint(
        in_folder({"a.yaml": f"a: 1\n---\n{json.dumps(small())}\n"}, "a.yaml"),
        "into a separate file",
        in_folder({"a.yaml": f"{json.dumps(small())}\n"}, "a.yaml"),
        PLAIN,
    ),
    "head_width": Hint(of(small(num_attention_heads=5)), "add it", of(small(head_dim=128)), PLAIN),
    "two_language_models": Hint(
        of({"model_type": "llava", "text_config": small("qwen2"), "llm_config": small()}),
        r"choose one: load\(..., part='text_config'\)",
        of({"text_config": small("qwen2"), "llm_config": small()}, part="text_config"),
        PLAIN,
    ),
    "inner_differs": Hint(
        of({"model_type": "llava", "rope_theta": 1e4, "text_config": small()}),
        "remove the outer one",
        of({"model_type": "llava", "text_config": small()}),
        PLAIN,
    ),
    "inner_differs: agreeing": Hint(
        of({"model_type": "llava", "rope_theta": 1e4, "text_config": small()}),
        "or make them agree",
        of({"model_type": "llava", "rope_theta": BASE, "text_config": small()}),
        PLAIN,
    ),
    "part": Hint(
        of({"model_type": "llava", "text_config": small()}, part="text"),
        r"inside the file \(text_config\)",
        of({"model_type": "llava", "text_config": small()}, part="text_config"),
        PLAIN,
    ),
    "like": Hint(
        of(small("x"), like="lama"), "must be a model type", of(small("x"), like="llama"), PLAIN
    ),
    "no_model_type": Hint(
        of(without(small(), "model_type")), "add the value from", of(small()), PLAIN
    ),
    "no_model": Hint(
        of({"lm_model": "transformer_lm", "dim": 64}),
        "next to the weights",
        of(small()),
        PLAIN,
    ),
    "no_model: described": Hint(
        of({"lm_model": "transformer_lm", "dim": 64}),
        r"with phasor.Rope\(...\)",
        lambda _: (Rope(head_dim=128, pairing="half", base=BASE),),
        PLAIN,
    ),
    "model_type": Hint(
        of(NEW), r"name the known type .* load\(..., like=...\)", of(NEW, like="qwen2"), PLAIN
    ),
    "model_type: by its architectures": Hint(
        of(small("phi4", architectures=["Phi3ForCausalLM"])),
        r"load\(..., like='phi3'\)",
        of(small("phi4"), like="phi3"),
        PLAIN,
    ),
    "model_type: inside": Hint(
        of({"model_type": "another_vl", "inner": small()}),
        r"load\(..., part='inner'\)",
        of({"model_type": "another_vl", "inner": small()}, part="inner"),
        PLAIN,
    ),
    "no_size": Hint(
        of(without(small(), "model_type", "num_hidden_layers"), like="llama"),
        "add it",
        of(without(small(), "model_type"), like="llama"),
        PLAIN,
    ),
    "size_elsewhere": Hint(
        of({"model_type": "llama", "rope_theta": BASE, "d_model": 512, "heads": 4}),
        "add num_hidden_layers, hidden_size and num_attention_heads",
        of(small()),
        PLAIN,
    ),
    "size_elsewhere: alone": Hint(
        of({"model_type": "llama", "inner": without(small(), "model_type")}),
        r"load it alone, with its model_type in it: load\(..., part='inner'\)",
        of({"model_type": "llama", "inner": small()}, part="inner"),
        PLAIN,
    ),
    "layer_kind": Hint(
        of(small(layer_types=["window"] * 4)),
        "must be one of .*full_attention",
        of(small(layer_types=["full_attention"] * 4)),
        PLAIN,
    ),
    "two_laws": Hint(
        of(LITGPT | {"rope_adjustments": BANDS | {"beta_fast": 32.0}}),
        "keep one of them",
        of(LITGPT | {"rope_adjustments": BANDS}),
        replace(PLAIN, scaling=LLAMA3),
    ),
    "two_scalings": Hint(
        of(STRIPED | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        "keep one",
        of(STRIPED),
        Rope(head_dim=64, pairing="half", base=5e5, scaling=Linear(factor=4.0)),
    ),
    "no_local_base": Hint(
        of(LITGPT | {"rope_indices": [0, 0, 0, 1]}),
        "need it; add it",
        of(LITGPT | {"rope_indices": [1, 1, 1, 0], "rope_local_base_freq": 1e4}),
        (replace(PLAIN, base=1e4), PLAIN),
    ),
    "no_model_name": Hint(
        of(MAXTEXT),
        "such as llama3.1-8b, or default",
        of(MAXTEXT | {"model_name": "llama3.1-8b"}),
        replace(PLAIN, pairing="interleaved", scaling=LLAMA3),
    ),
    "no_kinds": Hint(
        of(sized("lfm3", head_dim=128, rope_parameters=DEFAULT, **KINDS)),
        "move the keys into the blocks",
        of(sized("lfm3", head_dim=128, rope_parameters=BY_KIND, **KINDS)),
        PLAIN,
    ),
    "outside_kinds": Hint(
        of(sized("lfm3", head_dim=128, rope_parameters=BY_KIND | {"factor": 2.0}, **KINDS)),
        "move it into the blocks that it belongs to",
        of(
            sized(
                "lfm3",
                head_dim=128,
                rope_parameters=BY_KIND | {"full_attention": DEFAULT | LINEAR},
                **KINDS,
            )
        ),
        (PLAIN, HALVED),
    ),
    "kind_no_object": Hint(
        of(small("deepseek_v4", rope_parameters={"main": DEFAULT}, compress_ratios=[0] * 4)),
        "add it, even if no layer reads it",
        of(
            small(
                "deepseek_v4",
                rope_parameters={"main": DEFAULT, "compress": DEFAULT},
                compress_ratios=[0] * 4,
            )
        ),
        Rope(head_dim=512, pairing="interleaved", base=BASE, rotary_dim=64, rotary_start=448),
    ),
    "base_of_no_kind": Hint(
        of(small(rope_theta=1e4, rope_parameters=BY_KIND, **KINDS)),
        "remove it",
        of(sized("llama", rope_parameters=BY_KIND, **KINDS)),
        PLAIN,
    ),
    "class_block": Hint(
        of(sized("apertus", rope_theta=BASE)),
        "add rope_parameters with the law and the base",
        of(sized("apertus", rope_theta=BASE, rope_parameters=DEFAULT)),
        PLAIN,
    ),
    "kind_absent": Hint(
        of(sized("llama", rope_parameters={"full_attention": DEFAULT}, **KINDS)),
        "add it, null if they have no rope",
        of(sized("llama", rope_parameters=BY_KIND, **KINDS)),
        PLAIN,
    ),
    "kind_absent: layer_types": Hint(
        of(sized("llama", rope_parameters={"full_attention": DEFAULT})),
        "or layer_types if the file has none",
        of(
            sized(
                "llama",
                rope_parameters={"full_attention": DEFAULT},
                layer_types=["full_attention"] * 4,
            )
        ),
        PLAIN,
    ),
    "blocks_differ": Hint(
        of(small(rope_parameters=LINEAR, rope_scaling=LINEAR | {"factor": 8.0})),
        "remove one block",
        of(small(rope_parameters=LINEAR)),
        HALVED,
    ),
    "one_mscale": Hint(
        of(small(rope_scaling=YARN | {"mscale": 0.5})),
        "add both",
        of(small(rope_scaling=YARN | {"mscale": 0.5, "mscale_all_dim": 0.5})),
        replace(PLAIN, scaling=replace(YARNED.scaling, attention_factor=1.0)),
    ),
    "one_mscale: attention_factor": Hint(
        of(small(rope_scaling=YARN | {"mscale": 0.5})),
        "or attention_factor",
        of(small(rope_scaling=YARN | {"attention_factor": 1.25})),
        replace(PLAIN, scaling=replace(YARNED.scaling, attention_factor=1.25)),
    ),
    "no_factor": Hint(
        of(small(rope_scaling={"rope_type": "yarn"})),
        "or both original_max_position_embeddings and",
        of(small(rope_scaling={"rope_type": "yarn", "original_max_position_embeddings": 2048})),
        YARNED,
    ),
    "fixed_class": Hint(
        of(small("retnet", num_heads=4)),
        "remove it",
        of(sized("retnet", num_heads=4)),
        replace(PLAIN, base=1e4),
    ),
    "no_head_dim": Hint(
        of(small(hidden_size=None)), "add it", of(small(hidden_size=None, head_dim=128)), PLAIN
    ),
    "no_head_dim: both": Hint(
        of(small(num_attention_heads=None)), "or both hidden_size and", of(small()), PLAIN
    ),
    "layer_widths": Hint(
        of(
            sized(
                "gemma4_text",
                rope_parameters=BY_KIND,
                per_layer_config={"0": {"head_dim": 64}},
                **KINDS,
            )
        ),
        r"describe the rotation of each width with phasor.Rope\(...\)",
        lambda _: tuple(replace(PLAIN, head_dim=n, rotary_dim=n) for n in (64, 256)),
        tuple(Rope(head_dim=width, pairing="half", base=BASE) for width in (64, 256)),
    ),
    "odd_width": Hint(
        of(small("minimax_m2", rotary_dim=63)),
        "an even number of rotated coordinates",
        of(small("minimax_m2", rotary_dim=64)),
        replace(PLAIN, rotary_dim=64),
    ),
    "whole_heads": Hint(
        of(small(partial_rotary_factor=0.5)), "rotates whole heads; remove it", of(small()), PLAIN
    ),
    "latent_fraction": Hint(
        of(small("deepseek_v3", partial_rotary_factor=0.9, **LATENT)),
        "remove the wrong one",
        of(small("deepseek_v3", **LATENT)),
        Rope(head_dim=64, pairing="interleaved", pairing_out="half", base=BASE),
    ),
    "unread": Hint(of(small(rope_zoom=2.0)), "if not, remove it", of(small()), PLAIN),
    "unread: of Laguna, beside its blocks": Hint(
        of(
            sized(
                "laguna", head_dim=128, rope_parameters=BY_KIND, partial_rotary_factor=0.5, **KINDS
            )
        ),
        "if not, remove it",
        of(sized("laguna", head_dim=128, rope_parameters=BY_KIND, **KINDS)),
        PLAIN,
    ),
    "unread: as its program does": Hint(
        of(small(rope_zoom=2.0)),
        r"which ignores it: load\(..., strict=False\)",
        past(small(rope_zoom=2.0)),
        PLAIN,
    ),
    "gguf_fixed": Hint(
        of(gguf("cogvlm")),
        "powers of 10000",
        of(gguf("cogvlm", rope__freq_base=1e4)),
        replace(PLAIN, base=1e4),
    ),
    "gguf_divisors": Hint(
        of(gguf("gemma4", attention__sliding_window_pattern=[True, False] * 2)),
        "add it to the dictionary as a list",
        of(
            gguf("gemma4", attention__sliding_window_pattern=[True, False] * 2)
            | {"rope_freqs.weight": [2.0] * 64}
        ),
        (replace(PLAIN, base=1e4), replace(PLAIN, scaling=PerPair(factors=(2.0,) * 64))),
    ),
    "gguf_lists": Hint(
        of(gguf("phi3") | {"rope_factors_long.weight": LONG["long_factor"]}),
        "add them to the dictionary as lists",
        of(
            gguf("phi3")
            | {
                "rope_factors_long.weight": LONG["long_factor"],
                "rope_factors_short.weight": LONG["short_factor"],
            }
        ),
        replace(
            PLAIN,
            scaling=LongRope(
                short_factors=(1.0,) * 64,
                long_factors=(2.0,) * 64,
                factor=1.0,
                short_attention_factor=1.0,
                long_attention_factor=1.0,
                original_max_positions=8192,
            ),
        ),
    ),
    "no_base": Hint(
        writing(lambda: rope_parameters(EXPLICIT, 8192)),
        r"keep it as JSON instead \(Rope.to_json\)",
        as_json(EXPLICIT),
        EXPLICIT,
    ),
    "dynamic_starts": Hint(
        writing(lambda: config_keys(dict(zip("ab", STARTS, strict=True)), 2048, 4096)),
        "keep them as JSON instead",
        as_json(STARTS[0]),
        STARTS[0],
    ),
    "block_cannot": Hint(
        writing(lambda: rope_parameters(QUARTER, 8192)),
        "keep the rope as JSON instead",
        as_json(QUARTER),
        QUARTER,
    ),
    "file_cannot": Hint(
        writing(lambda: keys_for_file(replace(load(small()), kinds={"rope": SECTIONED}), 8, 8)),
        "keep them as JSON instead",
        as_json(SECTIONED),
        SECTIONED,
    ),
    "axes_cannot": Hint(
        writing(lambda: rope_parameters(AXIAL, 8192)),
        "keep the rope as JSON instead",
        as_json(AXIAL),
        AXIAL,
    ),
    "no_value: LFM2's layers": Hint(
        of(small("lfm2_moe")),
        "layer_types is absent; add the value",
        of(small("lfm2_moe", layer_types=["conv", "full_attention"] * 2)),
        PLAIN,
    ),
    "params_factor": Hint(
        of(PARAMS | {"use_scaled_rope": True}),
        'add "rope_scaling_factor": 8',
        of(PARAMS | {"use_scaled_rope": True, "rope_scaling_factor": 8}),
        replace(INTERLEAVED, scaling=LLAMA3),
    ),
    "params_base": Hint(
        of(without(PARAMS, "rope_theta") | {"use_scaled_rope": False}),
        "rope_theta is absent.*add it",
        of(PARAMS | {"use_scaled_rope": False}),
        INTERLEAVED,
    ),
    "two_scalings: of a GGUF file": Hint(
        of(gguf(rope__scaling__type="linear", rope__scaling__factor=2.0) | FREQS),
        "both scale; keep one",
        of(gguf(rope__scaling__type="linear", rope__scaling__factor=2.0)),
        replace(INTERLEAVED, scaling=Linear(factor=2.0)),
    ),
    "architecture_refused": Hint(
        of(gguf("gptj")),
        "load the model's config.json",
        of(sized("gptj", rotary_dim=64)),
        Rope(head_dim=128, pairing="interleaved", rotary_dim=64),
    ),
    "type_unread": Hint(
        of(small("cohere2_moe", rope_scaling=LINEAR)),
        "put the law into rope_parameters",
        of(small("cohere2_moe", rope_parameters=LINEAR)),
        replace(HALVED, pairing="interleaved"),
    ),
    "foreign_file": Hint(
        of({"peft_type": "LORA", "base_model_name_or_path": "a/b"}),
        "pass the config.json of its base model, a/b",
        of(small()),
        PLAIN,
    ),
    "other_file": Hint(
        in_folder({"a.safetensors": "", "config.json": small()}, "a.safetensors"),
        "pass the config.json next to it",
        in_folder({"a.safetensors": "", "config.json": small()}, "config.json"),
        PLAIN,
    ),
    "key_twice": Hint(
        in_folder({"config.json": '{"rope_theta": 1e4, "rope_theta": 1e5}'}),
        "keep one",
        in_folder({"config.json": small()}),
        PLAIN,
    ),
    "law_of_patches": Hint(
        of(small("sam3_vit_model", rope_parameters=LINEAR | {"rope_theta": BASE})),
        "remove it",
        of(small("sam3_vit_model")),
        replace(AXIAL, pairing="interleaved"),
    ),
    ": rope_theta": Hint(
        in_folder({"a.yaml": f"rope_theta: 1.0e+4\nrope_theta: 5.0e+5\n{YAML}"}, "a.yaml"),
        "keep one",
        in_folder({"a.yaml": f"rope_theta: 5.0e+5\n{YAML}"}, "a.yaml"),
        PLAIN,
    ),
}


@pytest.mark.parametrize("name", HINTS)
def test_a_hint_that_is_followed_leads_to_a_right_reading(name: str, tmp_path: Path) -> None:
    """The refusal is the one that has the hint; what it leads to is written out here."""
    hint = HINTS[name]
    with pytest.raises(ConfigError, match=hint.advice) as caught:
        hint.refused(tmp_path)
    assert caught.value.reason == name.partition(":")[0]
    rope = hint.rope if isinstance(hint.rope, tuple) else (hint.rope,)
    assert hint.followed(tmp_path) == rope


#: Reasons that say only what must be, and those whose hint is followed where what they need is.
WITHOUT_HINT = {"few_coordinates", "law", "no_rope_type", "params", "too_many", "too_much_text"}
WITHOUT_HINT |= {"widths", "value", "null", "unusable", "no_embedding", "per_pair", "sections"}
WITHOUT_HINT |= {"kinds", "source_unreadable", "keys", "not_utf8", "not_parsed", "too_deep"}
WITHOUT_HINT |= {"no_object", "long_yaml", "endless_yaml", "yaml_merge", "yaml_key"}
WITHOUT_HINT |= {"class_refused"}
ELSEWHERE = {
    "gguf_package": "tests/files/configs/test_gguf.py",
    "learned_softmax": "tests/torch/live/test_learned.py",
    "no_yaml": "tests/files/configs/test_yaml.py",
    "query_length": "as_json, above",
}


def test_every_reason_has_its_hint_followed() -> None:
    """A new one is put into the table."""
    followed = {name.partition(":")[0] for name in HINTS} - {""}
    assert followed | WITHOUT_HINT | ELSEWHERE.keys() == sentences(ConfigError).keys()
