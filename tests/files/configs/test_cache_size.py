"""The memory of keys and values, counted by hand from published configs."""

from __future__ import annotations

import re
from typing import Any

import pytest

from phasor import Rope, load, preset
from phasor.files.configs.cache_size import cache_size
from phasor.layers import one_layer

LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "rope_theta": 5e5,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
}  # fmt: skip
GEMMA_3 = {
    "model_type": "gemma3_text", "num_hidden_layers": 34, "head_dim": 256, "hidden_size": 2560,
    "num_attention_heads": 8, "num_key_value_heads": 4, "sliding_window": 1024,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5 + ["sliding_attention"] * 4,
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168, "rope_theta": 1e4,
    "num_attention_heads": 128, "num_key_value_heads": 128, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128, "kv_lora_rank": 512, "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN3_NEXT = {
    "model_type": "qwen3_next", "num_hidden_layers": 4, "head_dim": 256, "hidden_size": 2048,
    "num_attention_heads": 16, "num_key_value_heads": 2, "rope_theta": 1e7,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::phasor.PhasorWarning")
@pytest.mark.parametrize(
    ("config", "tokens", "wanted"),
    [
        pytest.param(LLAMA, 131_072, 131_072 * 32 * 8 * (128 + 128) * 2, id="llama"),
        pytest.param(LLAMA | {"dtype": "float32"}, 10, 10 * 32 * 8 * 256 * 4, id="float32"),
        pytest.param(LLAMA | {"torch_dtype": "float16"}, 10, 10 * 32 * 8 * 256 * 2, id="float16"),
        pytest.param(LLAMA | {"num_key_value_heads": None}, 1, 32 * 32 * 256 * 2, id="all heads"),
        pytest.param(GEMMA_3, 1000, 1000 * 34 * 4 * 512 * 2, id="within the window"),
        pytest.param(
            GEMMA_3, 131_072, (5 * 131_072 + 29 * 1024) * 4 * 512 * 2, id="beyond the window"
        ),
        pytest.param(DEEPSEEK, 163_840, 163_840 * 61 * (512 + 64) * 2, id="latent"),
        pytest.param(QWEN3_NEXT, 262_144, 262_144 * 1 * 2 * 512 * 2, id="states"),
    ],
)
def test_the_bytes_are_those_of_a_hand(config: dict[str, Any], tokens: int, wanted: int) -> None:
    """Layers, tokens that are kept, heads, both widths, and the bytes of a number."""
    size = cache_size(load(config, strict=False), tokens)
    assert size.bytes == (wanted,)
    # the formula, read as arithmetic, gives the same

    text = re.split(",? (?:or less|if no)", size.formula)[0]
    text = re.sub(r"\b(bytes|key heads|\w+ layers|of the \w+ (vector|key))", "", text)
    arithmetic = text.replace(" x ", " * ").replace("tokens", str(tokens))
    assert eval(arithmetic) == wanted


def test_a_length_is_a_number_each() -> None:
    """Before and after, of one formula: a preset's says what it cannot know."""
    size = cache_size(preset("llama-3-8b"), 8192, 131_072)
    assert size.bytes == (2**30, 2**34)
    assert size.formula == (
        "2 bytes x 32 rope layers x tokens x 8 key heads x (128 + 128), "
        "assuming no layer has a sliding window (only a config.json says)"
    )


@pytest.mark.parametrize(
    ("config", "doubt"),
    [
        (LLAMA, ""),
        (LLAMA | {"model_type": "mistral", "sliding_window": 4096}, "the sliding_window of 4096"),
        (LLAMA | {"model_type": "mistral", "sliding_window": None}, ""),
        (
            LLAMA | {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False},
            "",
        ),
    ],
)
def test_a_window_that_no_layer_is_named_for_is_said(config: dict[str, Any], doubt: str) -> None:
    """The number is then the most that it can be."""
    formula = cache_size(load(config, strict=False), 1).formula
    assert (", or less: " in formula) == bool(doubt)
    assert formula.endswith(doubt)


@pytest.mark.parametrize(
    ("ropes", "reason"),
    [
        (preset("deepseek-v3"), "latent attention; give the path of a config.json"),
        (preset("gemma-3-4b"), "tokens that sliding layers keep is unknown; give the path"),
        (preset("gemma-4-31b"), "keys of different sizes"),
        (one_layer(Rope(head_dim=64, pairing="half")), "the number of key heads is unknown"),
        (load({**GEMMA_3, "sliding_window": None}), "sliding_attention layers keep is unknown"),
        (load({**LLAMA, "num_global_key_value_heads": 4}, strict=False), "sizes (num_global_key"),
    ],
    ids=lambda one: str(one)[:24],
)
def test_what_is_not_known_is_not_counted(ropes: Any, reason: str) -> None:
    """With the reason, and the way out where a file would say it."""
    size = cache_size(ropes, 1)
    assert size.bytes is None
    assert reason in size.formula


@pytest.mark.parametrize("value", ["8", -1, 0, 1.5, True, [1], {"a": 1}], ids=repr)
@pytest.mark.parametrize(
    "key", ["kv_lora_rank", "v_head_dim", "num_kv_shared_layers", "sliding_window", "dtype"]
)
def test_a_value_that_is_no_size_changes_nothing(key: str, value: Any) -> None:
    """What a class makes of such a file is not this function's."""
    wanted = cache_size(load(LLAMA), 100).bytes
    found = cache_size(load({**LLAMA, key: value}, strict=False), 100)
    assert found.bytes == wanted
