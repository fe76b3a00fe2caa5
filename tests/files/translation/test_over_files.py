"""Keys that are printed for a model's own file, pasted over it: nothing of the old rope is left."""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import phasor
from phasor import LayerRopes, PhasorError, PhasorWarning, Rope
from phasor.files.configs.facts import table
from phasor.files.reading import load
from phasor.files.translation import translate
from phasor.scaling import Linear, Llama3, Yarn

from ...cli.running import run_phasor
from ...each import each
from ..configs.published_configs import cases
from ..configs.test_published import REFUSED
from ..refusals import refused
from . import described

LAWS = {
    "as it is": lambda rope: rope.at(8192),
    "none": lambda rope: replace(rope, scaling=None),
    "linear": lambda rope: replace(rope, scaling=Linear(factor=4.0)),
    "yarn": lambda rope: replace(rope, scaling=Yarn(factor=4.0, original_max_positions=4096)),
    "llama3": lambda rope: replace(rope, scaling=Llama3(factor=8.0, original_max_positions=8192)),
}
ENGINES = ("sglang", "transformers", "vllm")
#: Types whose own code reads its law from other keys than a block, whatever transformers does.
OTHER_CODE = {"internlm", "stripedhyena"}
MARKS = {"attn_layer_idxs", "model_config", "rope_ntk_alpha"}
LLAMA = {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 1,
         "max_position_embeddings": 8192}  # fmt: skip
FULL_BLOCK = {
    "type": "yarn", "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4096,
    "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.5, "mscale": 0.5,
    "mscale_all_dim": 0.5, "truncate": False, "attn_factor": 1, "extrapolation_factor": 1,
}  # fmt: skip
#: Files with a number at every place where one can stand.
FULL = {
    "old": LLAMA | {"rope_theta": 5e5, "rope_scaling": FULL_BLOCK},
    "new": LLAMA | {"rope_theta": 5e5, "rope_parameters": FULL_BLOCK | {"rope_theta": 5e5}},
    "parts": LLAMA
    | {"model_type": "phi", "partial_rotary_factor": 0.5, "rope_theta": 5e5}
    | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "lists": LLAMA
    | {"model_type": "phi3", "rope_theta": 5e5, "original_max_position_embeddings": 4096}
    | {
        "rope_scaling": {
            "type": "longrope", "short_factor": [1.0] * 32, "long_factor": [2.0] * 32,
            "short_mscale": 1.1, "long_mscale": 1.2,
        }
    },
    "neox": LLAMA | {"model_type": "gpt_neox", "rotary_emb_base": 5e5, "rotary_pct": 0.5},
}  # fmt: skip


def merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The new keys inside the old ones, object by object, as engines override a config."""
    values = dict(old)
    for key, value in new.items():
        both = isinstance(value, Mapping) and isinstance(values.get(key), Mapping)
        values[key] = merged(values[key], value) if both else value
    return values


def pasted(file: dict[str, Any], ropes: LayerRopes, target: str) -> Iterator[dict[str, Any]]:
    """The file with the printed keys: instead of its own, and inside them."""
    (part,) = translate(ropes, target, context=8192).parts
    keys = json.loads(json.dumps(dict(part.settings.get("override", part.settings))))
    if "get_rope" in keys:
        return
    if target == "transformers":  # which are printed without the way to them
        for name in reversed(ropes.in_config.path.split(".") if ropes.in_config.path else ()):
            keys = {name: keys}
    yield merged(file, keys)
    if not ropes.in_config.path:
        yield {**file, **keys}


def changed(ropes: LayerRopes, law: str) -> LayerRopes:
    """The model with another law."""
    kinds = {kind: rope and LAWS[law](rope) for kind, rope in ropes.kinds.items()}
    return replace(ropes, kinds=kinds)


def assert_turns_alike(one: Rope | None, other: Rope | None) -> None:
    """At 8192 tokens, to the rounding of a divisor for each pair."""
    assert (one is None) == (other is None)
    if one is not None and other is not None:
        one, other = one.at(8192), other.at(8192)
        assert np.allclose(one.inv_freq, other.inv_freq, rtol=1e-6, atol=0)
        assert one.attention_factor == pytest.approx(other.attention_factor)
        assert one.axes == other.axes


def assert_nothing_is_left(file: dict[str, Any], law: str, target: str) -> None:
    """The file with the keys describes the model that was translated, in every layer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PhasorWarning)
        ropes = load(file)
        if not ropes.in_config.values or not ropes.ropes:
            return
        try:
            model = changed(ropes, law)
            files = list(pasted(file, model, target))
        except PhasorError:  # a law that these pairs cannot have, or the program not
            return
        for keys in files:
            if target == "sglang" and '"mscale_all_dim": 0.0' in json.dumps(keys):
                continue  # sglang takes 0 for no factor, and phasor refuses it
            again = load(keys)
            for kind, rope in model.kinds.items():
                assert_turns_alike(again.kinds[kind], rope)


@pytest.mark.parametrize("target", ENGINES)
@each("law", LAWS)
@each("name", FULL)
def test_nothing_is_left_of_a_file_that_says_all(name: str, law: str, target: str) -> None:
    """Whichever law takes the place of its own."""
    assert_nothing_is_left(FULL[name], law, target)


@pytest.mark.programs
@pytest.mark.parametrize("target", ENGINES)
@pytest.mark.parametrize("law", LAWS)
def test_nothing_is_left_of_a_published_file(law: str, target: str) -> None:
    """Of any that is read from a config's block."""
    for name, case in cases().items():
        if name in REFUSED or has_other_code(case["config"]):
            continue
        assert_nothing_is_left(case["config"], law, target)


def has_other_code(config: dict[str, Any]) -> bool:
    """Whether the type's own code reads no block."""
    return config.get("model_type") in OTHER_CODE or not config.keys().isdisjoint(MARKS)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("name", ["old", "new"])
def test_the_engines_take_what_says_nothing(name: str, law: str, engine: str) -> None:
    """Their factories pass some keys on whatever their value is, and compare two words of a law."""
    import torch

    model = changed(load(FULL[name]), law)
    (rope,) = model.ropes
    x = torch.randn(1, 1, 64, dtype=torch.float64)[0]
    cos, sin = phasor.angles.cos_sin(np.array([3]), rope)
    z = torch.complex(x[:, :32], x[:, 32:]) * torch.tensor(rope.attention_factor * (cos + 1j * sin))
    for config in pasted(FULL[name], model, engine):
        block = config["rope_parameters"]
        assert config["rope_scaling"] is None if name == "old" else True
        sizes = {"head_size": 64, "max_position": 8192, "is_neox_style": True}
        if engine == "vllm":
            assert block["rope_type"] == block.get("type", block["rope_type"])
            rotate = described.vllm_get_rope(**sizes, rope_parameters=block)
        else:
            more = {"rotary_dim": 64, "base": config["rope_theta"], "rope_scaling": block}
            rotate = described.sglang_get_rope(**sizes, **more)
        turned = rotate(torch.tensor([3]), x)
        assert torch.allclose(turned, torch.cat((z.real, z.imag), -1), rtol=0, atol=1e-4)


def are_of(found: list[tuple[np.ndarray, float]] | None, ropes: Collection[Rope]) -> bool:
    """Whether a class read frequencies, and they are those of some of the ropes."""
    frequencies = [rope.at(8192).inv_freq for rope in ropes]
    return found is not None and all(
        any(
            len(one) == len(inv_freq) and np.allclose(inv_freq, one, 1e-5, 0) for one in frequencies
        )
        for inv_freq, _ in found
    )


@pytest.mark.programs
@pytest.mark.parametrize("law", LAWS)
def test_classes_of_transformers_read_the_file_as_if_it_had_had_no_rope(law: str) -> None:
    """Those that can be made of the file alone."""
    from ..configs.transformers_frequencies import frequencies

    compared = 0
    for file in (*FULL.values(), *(case["config"] for case in cases().values())):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PhasorWarning)
            try:
                loaded = load(file)
                model = changed(loaded, law)
                configs = list(pasted(file, model, "transformers"))
                (clean, *_) = pasted(*without_rope(file, model), "transformers")
            except PhasorError:
                continue
        # the block of transformers 5 alone: its classes take a rope_scaling for it
        wanted = frequencies({key: clean[key] for key in clean if key != "rope_scaling"})
        # a class that does not take the law, or a file for code of its own
        if not are_of(wanted, model.ropes) or not are_of(frequencies(file), loaded.ropes):
            continue
        assert wanted is not None
        for config in configs:
            compared += 1
            found = frequencies(config)
            assert found is not None, config
            for (inv_freq, gain), (other, other_gain) in zip(found, wanted, strict=True):
                assert np.array_equal(inv_freq, other), config
                assert gain == other_gain, config
    assert compared > 100


@pytest.mark.programs
@pytest.mark.parametrize("target", ["sglang", "vllm"])
@pytest.mark.parametrize("name", ["old", "new"])
def test_a_config_that_is_loaded_already_takes_the_keys(name: str, target: str) -> None:
    """As an engine overrides it: one key after the other, of which rope_scaling sets the block."""
    from transformers import LlamaConfig

    config = LlamaConfig.from_dict(FULL[name])
    (part,) = translate(changed(load(FULL[name]), "linear"), target, context=8192).parts
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        config.update(part.settings["override"])
    assert (config.rope_parameters["rope_type"], config.rope_parameters["factor"]) == ("linear", 4)
    assert config.rope_parameters["attention_factor"] is None


def without_rope(file: dict[str, Any], model: LayerRopes) -> tuple[dict[str, Any], LayerRopes]:
    """The file without the keys that others replace, and the model as read from no file."""
    gone = {"rope_parameters", *table().files["replaced"], *table().files["replaced_by_kind"]}

    def strip(values: dict[str, Any], path: list[str]) -> dict[str, Any]:
        if path:
            return values | {path[0]: strip(values[path[0]], path[1:])}
        return {key: value for key, value in values.items() if key not in gone}

    path = model.in_config.path
    rest = strip(strip(file, []), path.split(".") if path else [])
    return rest, replace(model, in_config=replace(model.in_config, values={}))


def test_the_command_prints_what_says_nothing(tmp_path: Any) -> None:
    """Ready to be pasted over the file."""
    path = tmp_path / "config.json"
    dynamic = {"type": "dynamic", "factor": 2.0, "beta_fast": 3.0}
    path.write_text(json.dumps(LLAMA | {"rope_theta": 1e4, "rope_scaling": dynamic}), "utf-8")
    done = run_phasor("translate", path, "--to", "transformers", "--seq-len", "16384")
    begin, end = done.stdout.index("{"), done.stdout.rindex("}")
    keys = json.loads(done.stdout[begin : end + 1])
    base = keys["rope_theta"]
    assert base > 1e4
    assert keys == {
        "rope_scaling": None,
        "rope_theta": base,
        "max_position_embeddings": 16_384,
    }
    path.write_text(path.read_text().replace("rope_scaling", "rope_parameters"), "utf-8")
    done = run_phasor("translate", path, "--to", "transformers", "--seq-len", "16384")
    keys = json.loads(done.stdout[done.stdout.index("{") : done.stdout.rindex("}") + 1])
    assert keys["rope_parameters"] == {
        "rope_type": "default",
        "rope_theta": base,
        "factor": None,
        "beta_fast": None,
        "type": "default",
    }


def test_a_preset_has_no_file_to_overwrite() -> None:
    """Its keys are the new ones alone."""
    (part,) = translate(phasor.preset("llama-3.1-8b"), "transformers").parts
    assert part.settings.keys() == {
        "max_position_embeddings",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
    }
    with refused("fixed class"):
        translate(phasor.preset("gpt-j-6b"), "transformers")


SIZES = {"num_hidden_layers": 6, "hidden_size": 64, "num_attention_heads": 1, "head_dim": 64,
         "max_position_embeddings": 8192}  # fmt: skip
GEMMA3 = SIZES | {
    "model_type": "gemma3_text", "rope_theta": 1e6, "rope_local_base_freq": 1e4,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}  # fmt: skip
STEP3 = SIZES | {
    "model_type": "step3p5", "rope_theta": [5e6, 1e4, 1e4, 5e6, 1e4, 1e4, 1e4],
    "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5, 1.0, 1.0, 1.0],
    "layer_types": ["full_attention", *["sliding_attention"] * 2] * 2 + ["sliding_attention"],
    "num_nextn_predict_layers": 1,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "yarn_only_types": ["full_attention"],
}  # fmt: skip


@each("file", [GEMMA3, STEP3])
@each("target", ["exllamav3", "mlx-lm"])
def test_classes_that_read_no_block_for_each_kind_keep_their_law(
    target: str, file: dict[str, Any]
) -> None:
    """They read it outside, for all layers but sliding ones, and bases as the file has them."""
    (config,) = {json.dumps(config): config for config in pasted(file, load(file), target)}.values()
    assert config["rope_scaling"].items() >= file["rope_scaling"].items()
    for key in ("rope_theta", "rope_local_base_freq"):
        assert config.get(key) == file.get(key)
    for again, rope in zip(load(config), load(file), strict=True):
        assert_turns_alike(again, rope)


@each("target", ["exllamav3", "mlx-lm"])
def test_the_length_before_an_extension_stays_a_whole_number(target: str) -> None:
    """Classes of Phi read it outside the block, and exllamav3 loads no file with another there."""
    file = FULL["lists"] | {"max_position_embeddings": 131_072}
    file["rope_scaling"] = {k: v for k, v in file["rope_scaling"].items() if "mscale" not in k}
    model = changed(load(file), "as it is")
    for context, whole in ((131_072, True), (100_000, False)):
        (part,) = translate(model, target, context=context).parts
        outside = part.settings["original_max_position_embeddings"]
        inside = part.settings["rope_parameters"]["original_max_position_embeddings"]
        assert (inside == 4096) == whole
        assert outside == (round(inside) if target == "exllamav3" else inside)


@each("target", ["exllamav3", "mlx-lm", *ENGINES])
def test_other_bases_are_given_where_a_file_leaves_them_to_its_class(target: str) -> None:
    """A class that reads no block for each kind would take its own."""
    model = load({key: GEMMA3[key] for key in (*SIZES, "model_type", "rope_scaling")})
    kinds = {
        kind: rope and replace(rope, base=4 * (rope.base or 0))
        for kind, rope in model.kinds.items()
    }
    (part,) = translate(replace(model, kinds=kinds), target).parts
    keys = part.settings.get("override", part.settings)
    assert (keys["rope_theta"], keys["rope_local_base_freq"]) == (4e6, 4e4)
    if target not in ENGINES:  # also for a preset, which is of no file
        (part,) = translate(phasor.preset("gemma-3-4b"), target).parts
        bases = part.settings["rope_theta"], part.settings["rope_local_base_freq"]
        assert bases == (1e6, 1e4)


@each("target", ["exllamav3", "mlx-lm"])
def test_the_law_outside_the_blocks_is_that_of_a_block(target: str) -> None:
    """Also of a file whose block has keys of another law, which then say nothing."""
    law = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
    local = {"rope_type": "default", "rope_theta": 1e4}
    blocks = {"full_attention": law, "sliding_attention": local}
    file = SIZES | {"model_type": "gemma4_text", "global_head_dim": 64, "rope_parameters": blocks}
    model = load(file)
    full = model.kinds["full_attention"]
    assert full is not None
    linear = replace(full, scaling=Linear(factor=4.0))
    changed_model = replace(model, kinds={**model.kinds, "full_attention": linear})
    (config, *_) = pasted(file, changed_model, target)
    assert config["rope_scaling"] == config["rope_parameters"]["full_attention"]
    assert_turns_alike(load(config).kinds["full_attention"], linear)


@each("target", ["exllamav3", "mlx-lm"])
def test_a_law_of_sliding_layers_needs_a_class_that_reads_their_block(target: str) -> None:
    """One that reads a base for them and no law would turn them without."""
    model = load(GEMMA3)
    for law, other_class in (("as it is", True), ("linear", False)):
        kinds = {**model.kinds, "sliding_attention": LAWS[law](model.kinds["sliding_attention"])}
        (part,) = translate(replace(model, kinds=kinds), target, context=8192).parts
        (note,) = [note for note in part.notes if "must read a block for each kind" in note]
        assert ("rope_scaling for all but sliding layers" in note) == other_class
