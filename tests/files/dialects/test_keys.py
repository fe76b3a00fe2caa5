"""A key that one program alone has stands in one file: a module, with the table of its name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import phasor

SRC = Path(phasor.__file__).parent

#: What is said to a user who has a key in the file of another program.
HINTS = {"files/configs/files", "files/configs/keys"}
#: By the dialect. What plans checkpoints reads a few of their configs' other keys.
KEYS = {
    "deepseek": ["rope_head_dim", "original_seq_len"],
    "diffusers": ["_class_name", "axes_dims_rope", "rope_axes_dim", "axes_dim_rope"],
    "gguf": [
        "rope.dimension_count",
        "rope.dimension_sections",
        "rope.freq_base",
        "rope.freq_base_swa",
        "rope.scaling.attn_factor",
        "rope.scaling.yarn_log_multiplier",
        "rope_factors_long.weight",
        "rope_freqs.weight",
    ],
    "kerashub": ["rope_max_wavelength", "rope_frequency_adjustment_factor"],
    "litgpt": ["rope_adjustments", "rope_condense_ratio", "rope_indices"],
    "maxtext": [
        "compressed_rope_max_timescale",
        "global_rope_proportion",
        "local_rope_max_timescale",
        "rope_linear_scaling_factor",
        "rope_max_timescale",
        "rope_use_scale",
    ],
    "megatron": [
        "--rotary-percent",
        "no_rope_freq",
        "qk_pos_emb_head_dim",
        "rotary_seq_len_interpolation_factor",
        "yarn_rotary_scaling_factor",
    ],
    "params_json": ["apply_scale", "moe_args"],
    "serving": ["freq_allocation"],
    "tensorrt_llm": ["longrope_scaling_short_factors", "rotary_scaling"],
    "torchtune": ["_component_", "skip_rope_interval"],
    "vllm": ["mixed_b"],
}


def stating(key: str) -> Iterator[str]:
    """The files of the package that have the key as a literal, by their names without an ending."""
    literal = re.compile(rf"[\"'{{}}. ]{re.escape(key)}[\"' ]|^{re.escape(key)} =", re.MULTILINE)
    for file in sorted(SRC.rglob("*")):
        if file.suffix in (".py", ".toml") and literal.search(file.read_text("utf-8")):
            yield str(file.relative_to(SRC).with_suffix(""))


@pytest.mark.parametrize("dialect", KEYS)
def test_a_key_of_one_program_stands_in_its_dialect_alone(dialect: str) -> None:
    """What reads it and what writes it are the same file."""
    for key in KEYS[dialect]:
        assert {*stating(key)} - HINTS == {f"files/dialects/{dialect}"}, key
