"""The blocks of a config: one for all layers or one for each kind, as transformers reads them."""

from __future__ import annotations

import copy
import importlib
import inspect
import math
from typing import Any

import numpy as np
import pytest
import transformers
from huggingface_hub.errors import StrictDataclassFieldValidationError

from phasor import ConfigError
from phasor.files.configs.facts import read_table, table
from phasor.files.reading import load
from phasor.scaling import Linear

from ..refusals import refused
from .config_files import sized, small
from .transformers_frequencies import frequencies, quiet

KINDS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]


COMPRESSED = ["sliding_attention", "compressed_sparse_attention"] * 2
NESTED_TYPES = sorted(name for name, facts in table().huggingface.items() if facts.nested)
# frequencies by kind of layer too, but one block does for all
FLAT_TYPES = ("deepseek_v4", "dots3_note_text")


def one_block(factor: float) -> dict[str, Any]:
    """A block for all layers."""
    return {"rope_type": "linear", "factor": factor, "rope_theta": 12345.0}


def transformers_frequencies(model_type: str, block: Any) -> list[float]:
    """The slowest frequency of each kind of layer, of transformers' own class."""
    config = transformers.CONFIG_MAPPING[model_type](rope_parameters=block).get_text_config()
    name = type(config).__module__.replace("configuration_", "modeling_")
    (turning,) = (
        one
        for one in vars(importlib.import_module(name)).values()
        if getattr(one, "__module__", None) == name
        and one.__name__.endswith("RotaryEmbedding")
        and "layer_type" in inspect.signature(one.forward).parameters
    )
    buffers = dict(turning(config).named_buffers())
    own = (found for name, found in buffers.items() if not name.endswith("original_inv_freq"))
    return [found[-1].item() for found in own]


def transformers_heeds(model_type: str) -> bool:
    """Whether its class turns by one block for all layers."""
    try:
        two, four = (transformers_frequencies(model_type, one_block(by)) for by in (2.0, 4.0))
    except (KeyError, StrictDataclassFieldValidationError):
        return False
    return two != four


def phasor_heeds(model_type: str) -> bool:
    """Whether `load` takes one block for all layers."""
    keys = {"layer_types": KINDS, "max_position_embeddings": 64, "qk_rope_head_dim": 64}
    if model_type == "deepseek_v4":
        keys |= {"layer_types": COMPRESSED, "head_dim": 512}
    try:
        ropes = load(sized(model_type, rope_parameters=one_block(4.0), **keys)).ropes
    except ConfigError as error:
        if "rope_parameters must hold a block for each kind" in str(error):
            return False
        raise
    return Linear(factor=4.0) in [rope.scaling for rope in ropes]


@pytest.mark.transformers
@pytest.mark.parametrize("model_type", [*NESTED_TYPES, *FLAT_TYPES])
def test_one_block_for_all_layers_is_read_where_transformers_reads_it(model_type):
    """Classes that keep a block for each kind of layer ignore it, or cannot be built of it."""
    heeded = transformers_heeds(model_type)
    assert heeded == (model_type in FLAT_TYPES)
    assert phasor_heeds(model_type) == heeded


@pytest.mark.transformers
def test_the_base_in_an_old_block_is_that_of_the_kinds_it_scales():
    """As the class of each type that has several blocks makes them of the old one."""
    compared = 0
    for name in sorted({*NESTED_TYPES} & {*transformers.CONFIG_MAPPING}):
        with quiet():
            try:
                config = transformers.CONFIG_MAPPING[name](rope_scaling=one_block(4.0))
            except StrictDataclassFieldValidationError:
                continue
        blocks = config.rope_parameters if config.get_text_config() is config else {}
        by_kind = [block for block in blocks.values() if isinstance(block, dict)]
        if len(by_kind) < 2:  # a base of one kind alone, or a flat block that no layer finds
            continue
        theirs = {(block["rope_theta"], block.get("factor")) for block in by_kind}
        keys = {"layer_types": KINDS, "max_position_embeddings": 64}
        ropes = load(sized(name, rope_scaling=one_block(4.0), **keys)).ropes
        assert {(rope.base, getattr(rope.scaling, "factor", None)) for rope in ropes} == theirs
        compared += 1
    assert compared >= 6


def test_a_base_that_two_versions_of_a_class_give_to_other_layers_is_noted() -> None:
    """Olmo 3's class takes the key away with the first kind, and has its own for the second."""
    bases = transformers.CONFIG_MAPPING["olmo3"](rope_theta=2e4).rope_parameters
    assert {kind: block["rope_theta"] for kind, block in bases.items()} == {
        "full_attention": 2e4,
        "sliding_attention": 5e5,
    }
    for base, noted in ((2e4, True), (2e4 / 3, True), (5e5, False), (500_000, False)):
        ropes = load(sized("olmo3", rope_theta=base))
        assert {rope.base for rope in ropes} == {base}
        assert any("transformers 4" in note for note in ropes.notes) == noted


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_a_plain_type_beside_the_blocks_of_single_kinds_says_nothing(key):
    """ZAYA's published file has one, which its class removes; any other would be lost."""
    blocks = {
        kind: {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": 0.5}
        for kind, base in (("hybrid", 5e6), ("hybrid_sliding", 1e4))
    }
    keys = sized("zaya", layer_types=[*blocks] * 2, sliding_window=64)
    ropes = load(keys | {"rope_parameters": {key: "default"} | blocks})
    assert [rope.base for rope in ropes] == [5e6, 1e4] * 2
    with refused(f"outside_kinds: {key}"):
        load(keys | {"rope_parameters": {key: "yarn"} | blocks})


@pytest.mark.transformers
def test_the_base_of_deepseeks_plain_layers_stands_beside_a_block_for_all():
    """As its class reads it: the block's own is for none."""
    keys = sized("deepseek_v4", layer_types=COMPRESSED, qk_rope_head_dim=64, rope_theta=2e4)
    ropes = load(keys | {"head_dim": 512, "rope_parameters": one_block(4.0)})
    frequencies = transformers_frequencies("deepseek_v4", one_block(4.0))
    assert [rope.base for rope in ropes.ropes] == [2e4, 1.6e5]
    assert frequencies == pytest.approx([1e4 ** (-31 / 32), 1.6e5 ** (-31 / 32) / 4])


@pytest.mark.parametrize("absent", ["main", "compress"])
@pytest.mark.parametrize("null", [False, True], ids=["absent", "null"])
def test_one_of_deepseeks_two_blocks_alone_is_refused(absent, null):
    """Its class ignores it, even where no layer reads the other."""
    blocks = {label: {"rope_type": "default", "rope_theta": 2e4} for label in ("main", "compress")}
    code = 128 if absent == "main" else 0
    keys = sized("deepseek_v4", head_dim=512, qk_rope_head_dim=64, compress_ratios=[code] * 4)
    assert load(keys | {"rope_parameters": blocks})[0].base == 2e4
    alone = {label: block for label, block in blocks.items() if label != absent}
    rope_parameters = alone | ({absent: None} if null else {})
    with refused(f"kind_no_object: {absent}"):
        load(keys | {"rope_parameters": rope_parameters})
    of_transformers = transformers.CONFIG_MAPPING["deepseek_v4"](
        rope_parameters=copy.deepcopy(rope_parameters)
    )
    assert of_transformers.rope_parameters[next(iter(alone))]["rope_theta"] != 2e4


def test_the_base_of_a_kind_that_no_layer_is_of_may_stand_in_the_file():
    """DeepSeek V4 without plain sliding layers says their base all the same."""
    keys = sized("deepseek_v4", head_dim=512, qk_rope_head_dim=64, compress_ratios=[128, 4] * 2)
    ropes = load(keys | {"rope_theta": 2e4, "compress_rope_theta": 1.6e5})
    assert [rope.base for rope in ropes] == [1.6e5] * 4
    assert ropes.in_config.unused_blocks["main"].base == 2e4


@pytest.mark.transformers
def test_only_one_block_for_all_layers_lacks_deepseeks_yarn_factor():
    """Its class puts a factor of 1 into that one, and leaves blocks of single kinds alone."""
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RotaryEmbedding

    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    plain = {"rope_type": "default", "rope_theta": 1e4}
    keys = sized("deepseek_v4", layer_types=COMPRESSED, qk_rope_head_dim=64, head_dim=512)
    for block, factor in ((yarn, 1.0), ({"main": plain, "compress": yarn}, 0.1 * math.log(4) + 1)):
        config = transformers.CONFIG_MAPPING["deepseek_v4"](rope_parameters=copy.deepcopy(block))
        of_transformers = DeepseekV4RotaryEmbedding(config).compress_attention_scaling
        ropes = load(keys | {"rope_parameters": block, "rope_theta": 1e4})
        assert ropes[1].attention_factor == pytest.approx(factor) == of_transformers


# clvp's encoder is no model of its own that could be built
OF_TRANSFORMERS = read_table("class_sizes.toml").keys() - {"clvp_encoder"}
FIXED = sorted(n for n, one in table().huggingface.items() if one.fixed and n in OF_TRANSFORMERS)
LAW = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}


def position_tables(model_type: str, block: Any) -> list[Any]:
    """The tables of sines and cosines of a small model of transformers."""
    from tools.tiny_models import tiny_model

    model = tiny_model(model_type, {"rope_parameters": block, "rope_theta": block["rope_theta"]})
    tensors = [*model.named_buffers(), *model.named_parameters()]
    return [found for name, found in tensors if "embed_positions" in name]


@pytest.mark.parametrize("model_type", FIXED)
@pytest.mark.transformers
def test_a_class_without_laws_makes_the_same_table_whatever_its_config_says(model_type):
    """GPT-J and its heirs never look."""
    tables = position_tables(model_type, PLAIN)
    assert tables
    for block in (LAW, PLAIN | {"rope_theta": 1e6}):
        for one, other in zip(tables, position_tables(model_type, block), strict=True):
            assert one.equal(other)


@pytest.mark.parametrize("model_type", ["codegen", "gptj", "roformer"])
@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"rope_parameters": LAW}, "fixed_class: linear"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "fixed_class: linear"),
        ({"rope_parameters": PLAIN | {"rope_theta": 1e6}}, "fixed_class: 1000000.0"),
        ({"rope_theta": 1e6}, "fixed_class: 1000000.0"),
    ],
    ids=["law", "old law", "base", "base beside"],
)
def test_a_law_that_the_class_ignores_is_refused(model_type, more, says):
    """What says no more than the class does is none."""
    keys = sized(model_type, max_position_embeddings=64)
    assert load(keys | {"rope_parameters": PLAIN}).in_config.ignores_scaling
    with refused(says):
        load(keys | more)


LINEAR = {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    "config",
    [
        small(rope_parameters={}, rope_scaling=LINEAR),
        small(rope_parameters=LINEAR | {"rope_theta": 500000.0}, rope_scaling={}),
        sized("gpt_oss", head_dim=64, max_position_embeddings=8192, rope_parameters={}),
    ],
)
def test_an_empty_block_says_what_it_says_to_transformers(config):
    """Nothing beside the other one; alone, that there is no law, whatever the class assumes."""
    (of_class,) = frequencies(config)
    assert len(load(config).ropes) > 0
    for rope in load(config).ropes:
        np.testing.assert_allclose(rope.inv_freq, of_class[0], rtol=1e-6)


def test_a_base_of_one_of_two_blocks_alone_is_refused():
    """The class reads ``rope_scaling`` and never opens ``rope_parameters``, which has the base."""
    plain = sized("llama", max_position_embeddings=8192, rope_scaling=LINEAR)
    both = plain | {"rope_parameters": LINEAR | {"rope_theta": 500000.0}}
    np.testing.assert_array_equal(frequencies(both)[0][0], frequencies(plain)[0][0])
    with refused("blocks_differ", new="rope_parameters.rope_theta"):
        load(both)
    ((of_class, _),) = frequencies(both | {"rope_theta": 500000.0})
    (rope,) = load(both | {"rope_theta": 500000.0}).ropes
    np.testing.assert_allclose(rope.inv_freq, of_class, rtol=1e-6)


def test_a_fraction_beside_the_blocks_of_kinds_is_refused():
    """DiffusionGemma's class turns a quarter of its local heads by it, and no block says so."""
    blocks = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": 1e6,
            "partial_rotary_factor": 0.25,
        },
    }
    config = sized("diffusion_gemma_text", head_dim=64, layer_types=KINDS, rope_parameters=blocks)
    assert load(config)
    quarter = config | {"partial_rotary_factor": 0.25}
    assert {len(found) for found, _ in frequencies(config)} != {
        len(found) for found, _ in frequencies(quarter)
    }
    with refused("unread", key="partial_rotary_factor"):
        load(quarter)


def test_a_base_that_the_class_does_not_read_is_refused():
    """Cosmos 3 Edge assumes a whole block, its base included, whatever base stands outside."""
    config = sized("cosmos3_edge_text", head_dim=128, max_position_embeddings=8192)
    other = config | {"rope_theta": 5e5}
    ((of_class, _),) = frequencies(config)
    np.testing.assert_array_equal(frequencies(other)[0][0], of_class)
    np.testing.assert_allclose(load(config).ropes[0].inv_freq, of_class, rtol=1e-6)
    with refused("class_block", key="rope_theta"):
        load(other)


@pytest.mark.parametrize("model_type", ["deepseek_ocr2_text", "unlimited_ocr_text"])
def test_a_width_that_the_class_computes_itself_is_none_of_the_files(model_type):
    """Heads of these are the hidden size by their number, whatever head_dim says."""
    config = sized(model_type, head_dim=64)
    ((of_class, _),) = frequencies(config)
    np.testing.assert_allclose(load(config).ropes[0].inv_freq, of_class, rtol=1e-6)
