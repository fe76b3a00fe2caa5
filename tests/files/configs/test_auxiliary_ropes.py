"""Rotations beside attention: what configs say of them, and what models of transformers turn."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import numpy as np
import pytest

from phasor import LayerRopes, Rope, diff, load, preset
from phasor.angles import cos_sin
from phasor.describe import as_plain
from phasor.layers import NamedRope

from ...each import each
from ..refusals import refused

SIZES: dict[str, Any] = {"num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 64}
V4 = {
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "compress_ratios": [0, 4, 128, 4, 0],
    "num_nextn_predict_layers": 1,
}
KINDS = ["full_attention", "minimax_m3_sparse"] * 2
QWEN4 = {"indexer_head_dim": 128, "partial_rotary_factor": 0.25}
# the layers, and these of the rope
FIELDS = ("head_dim", "rotary_dim", "rotary_start", "pairing", "base")
SAID: dict[str, tuple[dict[str, Any], dict[str, tuple[Any, ...]]]] = {
    "deepseek_v32": ({}, {"indexer": ([0, 1, 2, 3], 128, 64, 0, "half", 1e4)}),
    "axk2": ({"index_head_dim": 96}, {"indexer": ([0, 1, 2, 3], 96, 32, 0, "half", 1e4)}),
    "glm_moe_dsa": (
        {"indexer_types": ["full", "shared", "full", "shared"], "num_nextn_predict_layers": 2},
        {
            "indexer": ([0, 2], 128, 64, 0, "interleaved", 1e4),
            "mtp": ([4, 5], 64, 64, 0, "interleaved", 1e4),
        },
    ),
    "hy_v4": ({}, {"indexer": ([0, 1], 128, 64, 64, "half", 1e4)}),
    "minimax_m3_vl_text": (
        {"layer_types": KINDS, "rope_theta": 5e6, "partial_rotary_factor": 0.5},
        {"indexer": ([1, 3], 128, 64, 0, "half", 5e6)},
    ),
    "qwen4_exp_text": (
        {"layer_types": ["linear_attention", "indexed_attention"] * 2} | QWEN4,
        {"indexer": ([1, 3], 128, 64, 0, "half", 1e4)},
    ),
    "deepseek_v4": (
        V4,
        {
            "compressor": ([1, 2, 3], 512, 64, 448, "interleaved", 1.6e5),
            "indexer": ([1, 3], 128, 64, 64, "interleaved", 1.6e5),
            "mtp": ([4], 512, 64, 448, "interleaved", 1e4),
        },
    ),
    "llama": ({"num_nextn_predict_layers": 1}, {"mtp": ([4], 16, 16, 0, "half", 1e4)}),
    "cohere2": ({}, {}),
}


@each("model_type", SAID)
def test_a_config_says_what_turns_beside_attention(model_type: str) -> None:
    """The layers that have it, and a rope of its own."""
    changes, expected = SAID[model_type]
    ropes = load({"model_type": model_type, **SIZES, **changes}, strict=False)
    found = {
        name: ([*layers], *(getattr(rope, field) for field in FIELDS))
        for name, rope, layers in ropes.auxiliary_ropes
    }
    assert found == expected


def test_schedules_of_shared_indexers_are_those_of_the_class() -> None:
    """A pattern in letters, or every so many layers from an offset."""
    from transformers import GlmMoeDsaConfig

    schedules: list[dict[str, Any]] = [
        {"index_topk_pattern": "FSFS"},
        {"index_topk_freq": 4, "index_skip_topk_offset": 3, "num_hidden_layers": 12},
        {"index_topk_freq": 2, "num_hidden_layers": 7},
        {"index_topk_freq": 3, "index_skip_topk_offset": 0, "num_hidden_layers": 7},
        {"index_topk_freq": 0},
        {"index_topk_pattern": ["full", "shared", "shared", "full"]},
    ]
    for keys in schedules:
        types = GlmMoeDsaConfig(**(SIZES | keys)).indexer_types
        (indexer,) = load({"model_type": "glm_moe_dsa", **SIZES, **keys}).auxiliary_ropes
        assert [*indexer.layers] == [i for i, word in enumerate(types) if word == "full"]


SLIDING = ["full_attention", "sliding_attention"] * 2
DOTS = {"n_routed_experts": 4, "rope_theta": 1e6, "num_key_value_heads": 4, "pad_token_id": 0}
SPARSE = {"sparse_attention_freq": [0, 1, 1, 0], "sparse_index_dim": 96}
#: As files were released, which the classes read otherwise than those that they write.
RELEASED: list[tuple[str, dict[str, Any]]] = [
    ("minimax_m3_vl_text", {"sparse_attention_config": SPARSE, "partial_rotary_factor": 0.5}),
    ("minimax_m3_vl_text", {"sparse_attention_config": {"sparse_attention_freq": [0] * 4}}),
    ("dots3_note_text", {"layer_types": SLIDING, **DOTS}),
    ("dots3_note_text", {"layer_types": SLIDING, "swa_rope_theta": 2e4, **DOTS}),
    ("dots3_note_text", {"layer_types": SLIDING, "use_dsa": False, **DOTS}),
    ("qwen4_exp_text", {"full_attention_interval": 2} | QWEN4),
    ("qwen4_exp_text", QWEN4),
]


@pytest.mark.transformers
@pytest.mark.parametrize(("model_type", "keys"), RELEASED)
def test_files_as_they_were_released_are_read_as_their_class_reads_them(
    model_type: str, keys: dict[str, Any]
) -> None:
    """Which layers have an indexer, and the base of each layer."""
    import torch
    from transformers import AutoConfig, AutoModel

    qsa = ("indexer_n_heads", "indexer_budget", "indexer_compress_ratio")
    more = {"indexer_kv_heads": 1, **dict.fromkeys(qsa, 2)} if keys.items() >= QWEN4.items() else {}
    config = AutoConfig.for_model(model_type, **copy.deepcopy(SIZES | more | keys))
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    ropes = load({"model_type": model_type, **SIZES, **more, **keys}, strict=False)
    for i, layer in enumerate(model.layers):
        indexer = getattr(getattr(layer, "self_attn", None), "indexer", None)
        rope = ropes.auxiliary_rope("indexer", i)
        assert (rope is None) == (indexer is None)
        assert rope is None or rope.head_dim == config.to_dict().get("index_head_dim", 128)
        block = config.rope_parameters.get(config.layer_types[i], config.rope_parameters)
        assert ropes[i] is None or ropes[i].base == block["rope_theta"]


LAYERS = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
LLAMA3 = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 32.0}
#: Of layers that predict further tokens; lists of the first go on with these.
FURTHER: dict[str, dict[str, Any]] = {
    "step3p5": {
        "head_dim": 16,
        "layer_types": [*LAYERS, "sliding_attention", "full_attention"],
        "rope_theta": [5e6, 1e4, 1e4, 5e6, 1e4, 5e6],
        "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5, 1.0, 0.5],
        "rope_scaling": LLAMA3 | {"original_max_position_embeddings": 256},
        "num_nextn_predict_layers": 2,
    },
    "step3p5 of one base": {
        "head_dim": 16,
        "layer_types": [*LAYERS, "full_attention"],
        "rope_theta": 1e5,
        "rope_scaling": LLAMA3 | {"original_max_position_embeddings": 256},
        "num_nextn_predict_layers": 1,
    },
    "step3p5 with blocks": {
        "head_dim": 16,
        "layer_types": [*LAYERS, "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 5e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        "num_nextn_predict_layers": 1,
    },
    "mellum": {"head_dim": 16, "layer_types": LAYERS, "num_mtp_layers": 1},
}


@pytest.mark.transformers
@each("name", FURTHER)
def test_layers_that_predict_further_tokens_turn_as_their_class_says(name: str) -> None:
    """Where layers differ, and the file has a list for all of them, or none."""
    from transformers import AutoConfig

    model_type, keys = name.split()[0], SIZES | FURTHER[name]
    config = AutoConfig.for_model(model_type, **copy.deepcopy(keys))
    ropes = load({"model_type": model_type, **keys}, strict=False)
    further = config.get_mtp_config().layer_types
    found = [*ropes, *(ropes.auxiliary_rope("mtp", 4 + i) for i in range(len(further)))]
    for rope, kind in zip(found, [*config.layer_types, *further], strict=True):
        block = config.rope_parameters[kind]
        assert (rope.base, rope.rotary_dim) == (
            block["rope_theta"],
            16 * block.get("partial_rotary_factor", 1.0),
        )
        assert (rope.scaling is None) == (block["rope_type"] == "default")


@each("name, numbers", [
    ("rope_theta", [1e4] * 3), ("rope_theta", [1e4] * 3 + [2e4]), ("partial_rotary_factors", [1.0]),
])  # fmt: skip
def test_lists_by_layer_that_no_kinds_explain_are_refused(name: str, numbers: list[float]) -> None:
    """Of another length, or with two numbers for one kind."""
    keys = SIZES | {"layer_types": LAYERS, name: numbers}
    with refused("value", key=name):
        load({"model_type": "step3p5", "head_dim": 16, **keys})


def test_a_list_that_is_no_schedule_is_refused() -> None:
    """Too short, or of other words."""
    for types in (["full"], ["full", "none", "full", "full"]):
        with refused("value", key="indexer_types"):
            load({"model_type": "glm_moe_dsa", **SIZES, "indexer_types": types})
    with refused("value", key="index_topk_pattern", got="FFFX"):
        load({"model_type": "glm_moe_dsa", **SIZES, "index_topk_pattern": "FFFX"})


def test_where_layers_differ_the_file_says_what_follows_them() -> None:
    """Without that there is no entry for layers of multi-token prediction."""
    kinds = ["full_attention", "sliding_attention"] * 2
    keys = {"model_type": "gemma3_text", **SIZES, "layer_types": kinds, "head_dim": 16}
    keys["num_nextn_predict_layers"] = 1
    assert load(keys).auxiliary_ropes == ()
    (mtp,) = load(keys | {"mtp_layer_types": ["sliding_attention"]}).auxiliary_ropes
    assert (mtp.layers, mtp.rope.base) == ((4,), 10_000.0)


def test_deepseeks_own_files_say_the_same() -> None:
    """Those of its inference code, of V3.2 and of V4, each of four layers or fewer."""
    v32 = {"dim": 64, "inter_dim": 64, "n_layers": 2, "n_heads": 4, "qk_rope_head_dim": 64}
    assert load(v32).auxiliary_ropes == ()
    (indexer,) = load(v32 | {"index_head_dim": 128}).auxiliary_ropes
    assert indexer.layers == (0, 1)
    assert [getattr(indexer.rope, field) for field in FIELDS] == [128, 64, 0, "half", 1e4]
    v4: dict[str, Any] = {
        "dim": 64,
        "n_layers": 4,
        "n_heads": 4,
        "head_dim": 512,
        "rope_head_dim": 64,
        "compress_ratios": [0, 4, 128, 4],
        "compress_rope_theta": 160000,
        "original_seq_len": 65536,
        "rope_factor": 16,
        "max_seq_len": 1048576,
    }
    found = {name: layers for name, _, layers in load(v4).auxiliary_ropes}
    assert found == {"compressor": (1, 2, 3), "indexer": (1, 3)}


def test_presets_say_the_same_as_the_models_configs() -> None:
    """And `diff` sees an indexer that only one of two models has."""
    known, old = preset("deepseek-v3.2"), preset("deepseek-v3")
    assert known.auxiliary_rope("indexer", 60).pairing == "half"
    assert known.auxiliary_rope("indexer", 61) is known.auxiliary_rope("compressor", 0) is None
    found = diff(old, known)
    assert [(one.kinds, one.has_rope) for one in found.layers if one] == [
        (("indexer", "indexer"), (False, True))
    ]
    assert not diff(known, known)
    other = [one for one in diff(known, preset("glm-5.1")).layers if one.kinds[0] == "indexer"]
    assert other[0].difference.fields["pairing"] == ("half", "interleaved")


def test_entries_are_kept_wherever_ropes_go() -> None:
    """In copies, in pickles, in JSON and in words."""
    rope = Rope(head_dim=8, pairing="half")
    auxiliary_ropes = (NamedRope("indexer", Rope(head_dim=16, pairing="interleaved"), (1,)),)
    ropes = LayerRopes(
        name="a", layer_kinds=("x", "x"), kinds={"x": rope}, auxiliary_ropes=auxiliary_ropes
    )
    assert copy.copy(ropes) == pickle.loads(pickle.dumps(ropes)) == ropes
    assert ropes != LayerRopes(name="a", layer_kinds=("x", "x"), kinds={"x": rope})
    assert "indexer, outside attention (1 layers): interleaved pairs, 16 coordinates" in str(ropes)
    (plain,) = json.loads(json.dumps(as_plain(ropes, None, 64)))["auxiliary_ropes"]
    assert (plain["name"], plain["layers"], plain["rope"]["head_dim"]) == ("indexer", [1], 16)


@pytest.mark.slow
@pytest.mark.transformers
@pytest.mark.parametrize(
    "model_type", ["deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4", "dots3_note_text", "deepseek_v4"]
)
def test_recorded_queries_and_keys_are_turned_as_the_entries_say(model_type: str) -> None:
    """Inside a tiny model of the class; the compressor's entries stand at its windows' starts."""
    import torch
    from tools.tiny_models import tiny_model
    from tools.verdicts import record_calls

    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}
    kinds = ["sliding_attention", *rates]
    changes: dict[str, Any] = {}
    if model_type == "deepseek_v4":
        changes = {"compress_rates": rates, "layer_types": kinds, "num_hidden_layers": 3}
    model = tiny_model(model_type, changes)
    ropes = load(json.loads(model.config.to_json_string(use_diff=False)))
    calls = record_calls(model, {"input_ids": torch.arange(3, 67)[None]})
    seen = set()
    for call in (call for call in calls if call.place is None):
        rate = 1 if call.tokens == 64 else 64 // call.tokens
        positions = np.arange(call.tokens) * rate
        cos, sin = (row.reshape(call.tokens, -1).double().numpy() for row in call.rows)
        # what cannot be told from so few positions is seen in the logits of a converted model
        found = call.identify(positions[None]).rope if rate == 1 else None
        if found is not None and found.direction < 0:
            continue  # attention's output is turned back
        fitting = set()
        for name, rope, layers in ropes.auxiliary_ropes:
            same = found is None or (found.pairing, found.num_pairs) == (
                rope.pairing,
                rope.num_pairs,
            )
            exact = [side[:, : rope.num_pairs] for side in cos_sin(positions, rope)]
            close = all(
                np.allclose(side[:, : rope.num_pairs], its, rtol=0, atol=2.0**-17)
                for side, its in zip((cos, sin), exact, strict=True)
            )
            if call.layer in layers and call.width in (rope.head_dim, rope.rotary_dim):
                fitting |= {name} if same and close else set()
        assert fitting, (call.layer, found)
        seen |= {(name, call.layer) for name in fitting}
    assert seen >= {
        (name, i) for name, _, layers in ropes.auxiliary_ropes if name != "mtp" for i in layers
    }
