"""A longer context for one of several kinds of layers: the blocks of all of them are written."""

import copy
import functools
import importlib
import inspect
import json
import warnings
from dataclasses import replace

import numpy as np
import pytest
import transformers

from phasor import Rope, load, preset, preset_names
from phasor.charts import report
from phasor.cli.extend import print_plan
from phasor.errors import ConfigError, PhasorWarning
from phasor.extending import plan_extension
from phasor.files.dialects.blocks import config_keys, rope_parameters
from phasor.scaling import DynamicNTK

from ..files.configs.config_files import sized

PLAIN = Rope(head_dim=128, pairing="half", base=500_000.0)


def small(model_type, **more):
    """A config that says its size and its context."""
    return sized(model_type, **({"max_position_embeddings": 8192} | more))


def test_one_kind_of_several_is_extended_in_its_own_block():
    """Gemma 3's global layers: the block stands beside that of the sliding ones."""
    kinds = {"sliding_attention": 10_000.0, "full_attention": 1_000_000.0}
    blocks = {kind: {"rope_type": "default", "rope_theta": base} for kind, base in kinds.items()}
    config = small("gemma3_text", head_dim=128, rope_parameters=blocks, layer_types=[*kinds] * 2)
    planned = plan_extension(load(config), 32768, kind="full_attention")
    assert (planned.kinds, planned.labels) == (("full_attention",), ("full_attention",))
    for way in planned.options.values():
        again = load(config | way.config)
        assert again.kinds["full_attention"] == way.config_rope
        assert again.kinds["sliding_attention"] == load(config).kinds["sliding_attention"]


ALTERNATING = ["sliding_attention", "full_attention"]
COMPRESSED = ["sliding_attention", "compressed_sparse_attention"]
HEAVY = ["heavily_compressed_attention"]
BLOCK = {"rope_type": "default", "rope_theta": 500_000.0}
# what the files of these model types say beside their ropes; the rest is the type's own default
SEVERAL = {
    "deepseek-v4-flash": {"model_type": "deepseek_v4", "layer_types": COMPRESSED, "head_dim": 512},
    "gemma-3-12b": {"model_type": "gemma3_text"},
    "gemma-3-1b": {"model_type": "gemma3_text"},
    "gemma-3-27b": {"model_type": "gemma3_text", "head_dim": 128},
    "gemma-3-4b": {"model_type": "gemma3_text"},
    "gemma-3n-e4b": {"model_type": "gemma3n_text"},
    "gemma-4-26b-a4b": {"model_type": "gemma4_text"},
    "gemma-4-31b": {"model_type": "gemma4_text"},
    "gemma-4-e2b": {"model_type": "gemma4_text"},
    "mimo-v2-flash": {"model_type": "mimo_v2_flash"},
    "modernbert-base": {"model_type": "modernbert", "hidden_size": 512},
    "olmo-3-32b": {"model_type": "olmo3"},
    "olmo-3-7b": {"model_type": "olmo3"},
}


def minimal(name):
    """The least that the file of a preset says, and its labels in the order of its layers."""
    keys = {"layer_types": ALTERNATING, "num_hidden_layers": 2}
    keys |= {"hidden_size": 1024, "num_attention_heads": 8} | SEVERAL[name]
    return keys, ["main", "compress"] if keys["layer_types"] is COMPRESSED else ALTERNATING


# one preset of each model type, whose sizes change nothing in a block
_TYPES = {keys["model_type"]: name for name, keys in SEVERAL.items()}
KINDS_OF_SEVERAL = [(name, kind) for name in _TYPES.values() for kind in preset(name).kinds]


@functools.cache
def longer(name, kind):
    """The ways of one kind of layer of a preset to four times its context."""
    ropes = preset(name)
    context = ropes.context or 8192
    return plan_extension(ropes, 4 * context, kind=kind, context=context)


def test_every_preset_of_several_kinds_has_the_labels_of_its_blocks():
    """So that none is left out below."""
    several = {name for name in preset_names() if len(preset(name).ropes) > 1}
    assert several == set(SEVERAL)
    for name in several:
        assert preset(name).in_config.labels.keys() == preset(name).kinds.keys()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), KINDS_OF_SEVERAL)
def test_the_blocks_of_several_kinds_read_back_as_theirs(name, kind):
    """By phasor: the kind asked for as planned, the others as they were, for every law."""
    (keys, labels), ropes, planned = minimal(name), preset(name), longer(name, kind)
    for way in planned.options.values():
        assert way.config is not None, way.refused
        written = keys | json.loads(json.dumps(way.config))
        with warnings.catch_warnings():
            # a kind that was lengthened before now ends before the context does, and load says so
            warnings.filterwarnings(
                "ignore", ".* extends .*, although the context is", PhasorWarning
            )
            again = dict(zip(labels, load(written), strict=True))
        for one, rope in ropes.kinds.items():
            assert again[ropes.in_config.labels[one]] == (way.config_rope if one == kind else rope)


@pytest.mark.transformers
@pytest.mark.parametrize(("name", "kind"), KINDS_OF_SEVERAL)
def test_the_blocks_of_several_kinds_are_transformers_too(name, kind):
    """Its own class turns each kind of layer by them, at the context of the training."""
    (keys, _), ropes, planned = minimal(name), preset(name), longer(name, kind)
    for way in planned.options.values():
        config = transformers.CONFIG_MAPPING[keys["model_type"]](**copy.deepcopy(keys | way.config))
        module = importlib.import_module(
            type(config).__module__.replace("configuration_", "modeling_")
        )
        (turning,) = (
            found
            for found in vars(module).values()
            if getattr(found, "__module__", None) == module.__name__
            and found.__name__.endswith("RotaryEmbedding")
            and "layer_type" in inspect.signature(found.forward).parameters
        )
        found = turning(config)
        for one, rope in ropes.kinds.items():
            wanted = (way.config_rope if one == kind else rope).at(planned.context)
            label = ropes.in_config.labels[one]
            of_transformers = getattr(found, f"{label}_inv_freq").double().numpy()
            assert np.allclose(wanted.inv_freq, of_transformers, rtol=1e-5, atol=0)
            factor = getattr(found, f"{label}_attention_scaling")
            assert factor == pytest.approx(wanted.attention_factor, rel=1e-12)


def test_kinds_that_read_one_block_are_extended_together_or_not_at_all():
    """DeepSeek V4's two sorts of compressed layers; Molmo 2's block has no room for one kind."""
    kinds = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
    keys = small("deepseek_v4", layer_types=kinds, num_hidden_layers=3, head_dim=512)
    planned = plan_extension(load(keys), 16384, kind=kinds[2])
    assert planned.kinds == tuple(kinds[1:])
    assert planned.labels == ("compress",)
    again = load(keys | planned.option("yarn").config)
    assert again[1] == again[2] == planned.option("yarn").config_rope
    assert again[0] == load(keys)[0]
    law = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4}
    keys = small("molmo2_text", rope_parameters=law, rope_scaling_layers=[0, 2])
    way = plan_extension(load(keys), 16384, kind="scaled").option("linear")
    assert way.config is None
    assert "kinds scaled and unscaled share one block" in way.refused


CODES = {"main": 0, "compress": 128}


@pytest.mark.parametrize("label", CODES)
def test_a_block_that_no_layer_reads_is_written_where_transformers_insists_on_it(label):
    """DeepSeek V4's class drops one of its two blocks if the other is absent."""
    more = {"rope_theta": 1e4, "compress_rope_theta": 1.6e5, "qk_rope_head_dim": 64}
    keys = small("deepseek_v4", head_dim=512, compress_ratios=[CODES[label]] * 4, **more)
    planned = plan_extension(load(keys), 32768, kind=load(keys).layer_kinds[0])
    for way in planned.options.values():
        changed = planned.config_with(keys, way.name)
        assert load(changed)[0] == way.config_rope
        of_transformers = transformers.CONFIG_MAPPING["deepseek_v4"](**copy.deepcopy(changed))
        law = rope_parameters(way.config_rope, 32768)["rope_type"]
        assert of_transformers.rope_parameters[label]["rope_type"] == law
        other = next(one for one in CODES if one != label)
        wanted = load(keys).in_config.unused_blocks[other]
        assert wanted.base == (1e4 if other == "main" else 1.6e5)
        assert of_transformers.rope_parameters[other]["rope_theta"] == wanted.base


def test_kinds_that_turn_alike_get_their_own_blocks_all_the_same():
    """OLMo 3 reads no other; without a kind all of them are extended, with one that one."""
    keys = small("olmo3", rope_parameters=dict.fromkeys(ALTERNATING, BLOCK))
    keys["layer_types"] = ALTERNATING * 2
    for kind, changed in ((None, ALTERNATING), ("full_attention", ["full_attention"])):
        planned = plan_extension(load(keys), 32768, kind=kind)
        assert planned.kinds == planned.labels == tuple(changed)
        way = planned.option("linear")
        again = load(keys | way.config)
        assert {one for one, rope in again.kinds.items() if rope == way.config_rope} == set(changed)


def test_kinds_without_blocks_of_their_own_are_extended_together():
    """One block is for all of them, whichever is asked for, and all are named."""
    keys = small("qwen2", layer_types=ALTERNATING * 2, rope_theta=1e6)
    planned = plan_extension(load(keys), 32768, kind="full_attention")
    assert (planned.kinds, planned.labels) == (tuple(ALTERNATING), ())
    del keys["rope_theta"]
    again = load(keys | planned.option("yarn").config)
    assert set(again) == {planned.option("yarn").config_rope}


@pytest.mark.parametrize(
    ("keys", "kinds", "blocks"),
    [
        (
            small("deepseek_v4", layer_types=COMPRESSED[1:] * 2 + HEAVY * 2, head_dim=512),
            "compressed_sparse_attention, heavily_compressed_attention layers",
            "'compress' is the block for these layers",
        ),
        (
            small("olmo3", rope_parameters=dict.fromkeys(ALTERNATING, BLOCK)),
            "sliding_attention, full_attention layers",
            "'sliding_attention', 'full_attention' are the blocks for these layers",
        ),
    ],
    ids=["one block", "two blocks"],
)
@pytest.mark.report
def test_all_kinds_that_a_new_block_changes_are_named(keys, kinds, blocks, capsys, monkeypatch):
    """On a terminal, in the JSON and on the page."""
    monkeypatch.setenv("COLUMNS", "200")
    planned = plan_extension(load(keys), 32768)
    print_plan(planned, "linear")
    printed = capsys.readouterr().out
    assert kinds in printed
    assert f"  {blocks}; leave all other blocks unchanged.\n" in printed
    plain = planned.as_plain("linear")
    assert ", ".join(plain["kinds"]) == kinds.removesuffix(" layers")
    page = report(load(keys), to=32768)
    named = ", ".join(f"<code>{label}</code>" for label in plain["labels"])
    several = len(plain["labels"]) > 1
    assert (
        f"only {'blocks' if several else 'block'} {named} {'change' if several else 'changes'}:"
        in page
    )


def test_a_dynamic_kind_keeps_the_context_that_it_starts_from():
    """It stands beside the blocks, so another that starts elsewhere cannot be stated."""
    law = DynamicNTK(factor=4.0, original_max_positions=512)
    dynamic = Rope(head_dim=64, pairing="half", scaling=law)
    keys = config_keys({"a": dynamic, "b": PLAIN, "c": None}, 512, 2048)
    assert keys["max_position_embeddings"] == 512
    assert keys["rope_parameters"]["c"] is None
    other = replace(dynamic, scaling=replace(law, original_max_positions=1024))
    with pytest.raises(ConfigError, match="512 and 1024"):
        config_keys({"a": dynamic, "b": other}, 512, 2048)
