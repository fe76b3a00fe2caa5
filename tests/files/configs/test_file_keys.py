"""Files that phasor writes or prints keys for, read by older programs as by phasor."""

from __future__ import annotations

import ast
import copy
import inspect
import json
import textwrap
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from phasor import ConfigError, LayerRopes, PhasorWarning, Rope, load, preset
from phasor.axes import Sectioned
from phasor.cli.extend import print_plan
from phasor.extending import plan_extension
from phasor.files.configs.facts import table
from phasor.files.dialects.model_files import BLOCK_ALONE, keys_for_file
from phasor.files.translation import translate
from phasor.layers import one_layer
from phasor.scaling import Llama3, LongRope, Proportional, Yarn

from ...cli.running import run_phasor
from .older_readers import mlx_lm, transformers_4

SIZES = {"num_hidden_layers": 6, "hidden_size": 512, "num_attention_heads": 4,
         "max_position_embeddings": 32768, "num_key_value_heads": 4, "head_dim": 128}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16384}
LONG = {"type": "longrope", "short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
TWO_BASES = {"rope_theta": 5e6, "rope_local_base_freq": 2e4, "head_dim": 128}
LINEAR = {"rope_type": "linear", "factor": 8.0}
#: By name, a file of each style.
FILES = {
    "transformers 4": {"model_type": "llama", "rope_theta": 5e6, "rope_scaling": None},
    "transformers 4, with a law": {"model_type": "qwen2", "rope_theta": 5e6, "rope_scaling": YARN},
    "transformers 4, an older word": {
        "model_type": "llama", "rope_theta": 5e6, "rope_scaling": {"type": "linear", "factor": 2.0}
    },
    "the base of the class": {"model_type": "llama"},
    "a part of a head": {"model_type": "phi", "rope_theta": 5e6, "partial_rotary_factor": 0.25},
    "the part of the class": {"model_type": "phi", "rope_theta": 5e6},
    "other names": {"model_type": "gpt_neox", "rotary_emb_base": 5e6, "rotary_pct": 0.5},
    "lists": {
        "model_type": "phi3", "rope_theta": 5e6, "rope_scaling": LONG,
        "original_max_position_embeddings": 4096,
    },
    "two bases": {"model_type": "gemma3_text", **TWO_BASES, "rope_scaling": LINEAR},
    "two bases, no law": {
        "model_type": "modernbert", "global_rope_theta": 3e5, "local_rope_theta": 2e4
    },
    "a law for one kind": {"model_type": "olmo3", "rope_theta": 5e5, "rope_scaling": YARN},
    "transformers 5": {
        "model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 5e6}
    },
    "transformers 5, a part of a head": {
        "model_type": "phi",
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.25
        },
    },
    "transformers 5, two bases": {
        "model_type": "gemma3_text",
        "rope_parameters": {
            "full_attention": {"rope_theta": 5e6, **LINEAR},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        },
    },
}  # fmt: skip
OLD = [name for name in FILES if not name.startswith("transformers 5")]
MLX_LM = ("llama", "qwen2", "gemma3_text", "olmo3")
LAWS = ("unchanged", "linear", "ntk", "dynamic_ntk", "yarn", "llama3")
FLOAT32 = 2.0**-23


def model_of(name: str) -> tuple[dict[str, Any], LayerRopes]:
    """The file, and the model that it describes."""
    file = copy.deepcopy(SIZES | FILES[name])
    if "longrope" in str(file):
        file["max_position_embeddings"] = 131072
    return file, load(file)


def with_keys(file: dict[str, Any], keys: dict[str, Any]) -> dict[str, Any]:
    """The file after the keys were pasted over it."""
    return {key: value for key, value in {**file, **keys}.items() if value is not None}


def assert_read_alike(file: dict[str, Any], ropes: LayerRopes) -> None:
    """Older programs and phasor make of the file what is wanted."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PhasorWarning)
        read = load(file)
    for layer, kind in enumerate(ropes.layer_kinds):
        rope = ropes.kinds[kind]
        assert rope is not None
        assert read.kinds[kind].scaling == rope.scaling
        static = rope.at(file["max_position_embeddings"])
        inv_freq, gain = transformers_4(file, kind)
        np.testing.assert_allclose(inv_freq, static.inv_freq, rtol=1e-12)
        assert gain == pytest.approx(static.attention_factor, rel=1e-12)
        if file["model_type"] not in MLX_LM or layer not in (0, 5):
            continue
        turned, gain = mlx_lm(file, layer)
        # an angle of float32 of which sin and cos are rounded once more
        np.testing.assert_allclose(turned, static.inv_freq, rtol=8 * FLOAT32, atol=8 * FLOAT32)
        assert gain == pytest.approx(static.attention_factor, rel=8 * FLOAT32)


@pytest.mark.parametrize("name", FILES)
def test_an_extended_file_is_read_alike_by_older_programs(name: str) -> None:
    """By every law that its keys can say."""
    file, ropes = model_of(name)
    kind = "full_attention" if ropes.has_blocks_by_kind else None
    planned = plan_extension(ropes, 131072 * 2, kind=kind)
    for law in planned.options:
        way = planned.option(law)
        if name == "two bases, no law" and law not in ("unchanged", "ntk"):
            assert "transformers 5 alone" in way.file_keys.readers
            continue
        if " But " in way.file_keys.readers:  # a factor that does not follow from the lengths
            assert law in ("unchanged", "per_pair")
            continue
        kinds = {**ropes.kinds, **dict.fromkeys(planned.kinds, way.config_rope)}
        assert_read_alike(planned.config_with(file, law), replace(ropes, kinds=kinds))
        assert "transformers 4" in way.file_keys.readers


@pytest.mark.parametrize("name", OLD)
def test_a_file_of_transformers_4_stays_one(name: str) -> None:
    """Extended, and with the printed keys of `translate`."""
    file, ropes = model_of(name)
    kind = "full_attention" if ropes.has_blocks_by_kind else None
    planned = plan_extension(ropes, 262144, kind=kind)
    law = [*planned.options][-1] if ropes.ropes[-1].scaling else "ntk"
    changed = planned.config_with(file, law)
    assert "rope_parameters" not in changed
    (part,) = translate(ropes, "transformers").parts
    assert "rope_parameters" not in part.settings
    assert any("transformers 4 and 5" in note for note in part.notes)


@pytest.mark.parametrize("name", FILES)
def test_translated_keys_are_read_alike_by_older_programs(name: str) -> None:
    """Pasted over the model's own file."""
    file, ropes = model_of(name)
    (part,) = translate(ropes, "transformers").parts
    assert_read_alike(with_keys(file, part.settings), ropes)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen2.5-7b-instruct", "qwen3-8b-yarn", "phi-2"])
def test_keys_for_a_preset_are_read_alike_by_older_programs(name: str) -> None:
    """No file says a style, so both are printed."""
    ropes = preset(name)
    (part,) = translate(ropes, "transformers").parts
    assert {"rope_theta", "rope_parameters"} <= part.settings.keys()
    rope = ropes[0]
    sizes = SIZES | {"head_dim": rope.head_dim, "hidden_size": 4 * rope.head_dim}
    file = sizes | {"model_type": "phi" if rope.rotary_dim < rope.head_dim else "llama"}
    assert_read_alike(file | part.settings, replace(ropes, layer_kinds=("rope",) * 6))
    if "rope_scaling" in part.settings:
        assert "rope_theta" not in part.settings["rope_scaling"], "transformers 4 warns of it"


@pytest.mark.transformers
@pytest.mark.parametrize("name", FILES)
def test_transformers_5_reads_the_same(name: str) -> None:
    """Its own class of the model, from the extended file and from the printed keys."""
    from transformers import CONFIG_MAPPING
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    file, ropes = model_of(name)
    kind = "full_attention" if ropes.has_blocks_by_kind else None
    planned = plan_extension(ropes, 262144, kind=kind)
    for law in planned.options:
        way = planned.option(law)
        changed = planned.config_with(file, law)
        config = CONFIG_MAPPING[file["model_type"]](**copy.deepcopy(changed))
        block = config.rope_parameters
        if kind:
            sliding = block["sliding_attention"]
            assert sliding["rope_theta"] == ropes.kinds["sliding_attention"].base
            assert sliding["rope_type"] == "default"
            block = block["full_attention"]
        assert block["rope_theta"] == way.config_rope.base
        if block["rope_type"] in ("default", "dynamic") or kind:
            continue
        static = way.config_rope.at(way.coverage.to)
        compute = ROPE_INIT_FUNCTIONS[block["rope_type"]]
        inv_freq, gain = compute(config, "cpu", seq_len=way.coverage.to)
        np.testing.assert_allclose(inv_freq.double(), static.inv_freq, rtol=32 * FLOAT32)
        assert gain == pytest.approx(static.attention_factor, rel=1e-12)


def test_yarn_beyond_its_factor_is_not_said_to_be_for_transformers_4() -> None:
    """It would take another factor from the lengths."""
    rope = Rope(head_dim=64, pairing="half", scaling=Yarn(factor=2.0, original_max_positions=4096))
    ropes = LayerRopes(name="mine", layer_kinds=("rope",), kinds={"rope": rope}, context=4096)
    assert "But" not in keys_for_file(ropes, 4096, 8192).readers
    assert keys_for_file(ropes, 4096, 6000).keys["max_position_embeddings"] == 8192
    assert "from the lengths, 16384 / 4096" in keys_for_file(ropes, 4096, 16384).readers


def test_what_transformers_4_does_not_read_is_for_transformers_5_alone() -> None:
    """Without a file too: a law of version 5, and two lists with a factor each."""
    lists = {"short_factors": (1.0,) * 32, "long_factors": (2.0,) * 32}
    lists |= {"original_max_positions": 4096, "factor": 2.0}
    two_factors = {"short_attention_factor": 1.1, "long_attention_factor": 1.2}
    for law, older in (
        (Proportional(fraction=0.5), False),
        (LongRope(**lists), True),
        (LongRope(**lists, **two_factors), False),
    ):
        rope = Rope(head_dim=64, pairing="half", scaling=law)
        written = keys_for_file(one_layer(rope), 8192, 8192)
        assert ("transformers 5 alone" in written.readers) != older
        assert ("rope_scaling" in written.keys) == older


def test_a_law_for_one_kind_that_no_older_key_is_for_is_for_transformers_5_alone() -> None:
    """Gemma 3's rope_scaling is for the full layers."""
    file, ropes = model_of("two bases")
    planned = plan_extension(ropes, 262144, kind="sliding_attention")
    changed = planned.config_with(file, "linear")
    assert load(changed)[0] == planned.option("linear").config_rope
    assert "rope_scaling" not in changed
    assert "transformers 5 alone" in planned.option("linear").file_keys.readers


def test_who_reads_the_keys_is_printed(tmp_path, capsys) -> None:
    """On the terminal, in the JSON, of a written file and on the page."""
    file, ropes = model_of("transformers 4")
    print_plan(plan_extension(ropes, 131072), "yarn")
    assert "rope_theta and rope_scaling: for transformers 4 and 5" in capsys.readouterr().out
    (tmp_path / "config.json").write_text(json.dumps(file))
    arguments = ["extend", tmp_path, "--to", "128k", "--law", "yarn"]
    plain = json.loads(run_phasor(*arguments, "--json").stdout)
    assert plain["readers"].startswith("rope_theta and rope_scaling")
    written = run_phasor(*arguments, "--write", tmp_path / "longer").stdout
    assert "for transformers 4 and 5" in " ".join(written.split())
    law = Llama3(factor=8.0, original_max_positions=8192)
    (part,) = translate(
        Rope(head_dim=64, pairing="half", scaling=law), "transformers", context=131072
    ).parts
    assert any(note.startswith("rope_parameters: for transformers 5.") for note in part.notes)


def test_only_what_the_file_has_is_removed() -> None:
    """A file of transformers 4 without a law has no rope_scaling to lose."""
    file = SIZES | {"model_type": "llama", "rope_theta": 1e4}
    ropes = load(file)
    assert keys_for_file(ropes, 32768, 32768).to_remove == ()


def test_a_class_that_reads_its_block_alone_is_said_to() -> None:
    """MiMo V2's: a base outside the block would be left to the class."""
    bases = {"rope_theta": 5e6, "swa_rope_theta": 2e4}
    ropes = load(SIZES | {"model_type": "mimo_v2_flash", "head_dim": 192, **bases})
    written = keys_for_file(ropes, 32768, 32768)
    assert "whose class of this type ignores rope_theta" in written.readers
    assert written.keys["rope_parameters"]["sliding_attention"]["rope_theta"] == 2e4
    assert "rope_scaling" not in written.keys


def test_a_rope_that_the_class_of_the_file_does_not_make_is_refused() -> None:
    """Llama's class turns pairs by one axis, whatever the block says."""
    ropes = load(SIZES | {"model_type": "llama", "rope_theta": 1e4})
    sectioned = replace(ropes.ropes[0], axes=Sectioned((16, 24, 24)))
    with pytest.raises(ConfigError) as error:
        keys_for_file(replace(ropes, kinds={"rope": sectioned}), 32768, 32768)
    assert error.value.reason == "file_cannot"


@pytest.mark.programs
def test_the_types_of_new_blocks_alone_are_those_of_transformers() -> None:
    """Whose classes convert nothing that stands beside the block."""
    from transformers import CONFIG_MAPPING

    def converts_nothing(config_class: Any) -> bool:
        source = inspect.getsource(config_class.convert_rope_params_to_dict)
        (method,) = ast.parse(textwrap.dedent(source)).body
        assert isinstance(method, ast.FunctionDef)
        return len(method.body) == 1 and isinstance(method.body[0], ast.Return)

    found = {name for name in CONFIG_MAPPING if converts_nothing(CONFIG_MAPPING[name])}
    assert found & table().huggingface.keys() == BLOCK_ALONE
