"""Files of programs that train or serve models, by what their own code makes of them.

``published/programs.jsonl`` has files with what the programs computed; here are the laws by their
formulas, the defaults, and what is refused.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from phasor import ConfigError, PhasorWarning
from phasor.files.configs import load
from phasor.scaling import Linear, Llama3

from ...each import each

LITGPT = {
    "n_layer": 4,
    "n_head": 4,
    "n_embd": 512,
    "rotary_percentage": 1.0,
    "rope_base": 500000,
    "block_size": 8192,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_seq_len": 8192,
}


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    """The config without some of its keys."""
    return {key: value for key, value in config.items() if key not in keys}


# litgpt


def test_litgpt_tells_a_law_by_its_keys() -> None:
    """A factor alone divides; the ends of a band are Llama 3's; neither is no law."""
    laws = {
        "none": ({}, None),
        "null": (None, None),
        "of the softmax alone": ({"mscale": 1.0}, None),
        "linear": ({"factor": 8.0}, Linear(factor=8.0)),
        "llama3": (LLAMA3, Llama3(factor=8.0, original_max_positions=8192)),
    }
    for adjustments, law in laws.values():
        ropes = load(LITGPT | {"rope_adjustments": adjustments})
        assert [rope.scaling for rope in ropes.ropes] == [law]


def test_litgpt_divides_positions_by_the_condense_ratio_beside_any_law() -> None:
    """Every frequency is that of the file without it, divided."""
    for adjustments in (None, {"factor": 8.0}, LLAMA3):
        config = LITGPT | {"rope_adjustments": adjustments}
        (plain,), (condensed,) = (
            load(config | {"rope_condense_ratio": ratio}).ropes for ratio in (1, 4)
        )
        assert np.allclose(condensed.inv_freq * 4, plain.inv_freq, rtol=1e-15)


def test_litgpts_yarn_has_the_ramp_the_other_way_round() -> None:
    """Fast pairs are divided and slow ones kept, whatever YaRN means: its code does so."""
    yarn = {"factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_seq_len": 4096}
    ropes = load(LITGPT | {"rope_adjustments": yarn})
    (rope,) = ropes.ropes
    plain = 500000.0 ** -(np.arange(64) / 64)
    divisors = plain / rope.inv_freq
    assert math.isclose(divisors[0], 8)
    assert math.isclose(divisors[-1], 1)
    assert rope.attention_factor == 1
    assert any("other way round" in note for note in ropes.notes)
    gains = {"mscale": 1.0}, {"mscale_all_dim": 1.0}, {"mscale": 1.0, "mscale_all_dim": 1.0}
    one = 0.1 * math.log(8) + 1
    for keys, gain in zip(gains, (one, one, 1), strict=True):
        (rope,) = load(LITGPT | {"rope_adjustments": yarn | keys}).ropes
        assert math.isclose(rope.attention_factor, gain)


def test_litgpts_local_layers_have_a_base_of_their_own_and_no_law() -> None:
    """The list may be longer than the layers, and without it all are local."""
    config = LITGPT | {"rope_local_base_freq": 10000, "rope_adjustments": {"factor": 8.0}}
    ropes = load(config | {"rope_indices": [1, 0, 1, 1, 0, 0]})
    assert ropes.layer_kinds == ("local", "global", "local", "local")
    local, wide = ropes.kinds["local"], ropes.kinds["global"]
    assert local is not None
    assert wide is not None
    assert (local.base, local.scaling) == (10000, None)
    assert (wide.base, wide.scaling) == (500000, Linear(factor=8.0))
    assert set(load(config).layer_kinds) == {"local"}


def test_litgpts_defaults_are_those_of_its_class() -> None:
    """A quarter of a head, as in Pythia, whose files it read first."""
    with pytest.warns(PhasorWarning, match="n_embd; 4096 is what litgpt assumes"):
        ropes = load({"norm_class_name": "LayerNorm", "n_layer": 2, "n_head": 32})
    (rope,) = ropes.ropes
    assert (rope.head_dim, rope.rotary_dim, rope.base, rope.pairing) == (128, 32, 10000, "half")


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "litgpt, bands and betas": (
        LITGPT | {"rope_adjustments": LLAMA3 | {"beta_fast": 32}},
        r"rope_adjustments\.low_freq_factor is of Llama 3's law and rope_adjustments\.beta_fast",
    ),
    "litgpt, a band without its other end": (
        LITGPT | {"rope_adjustments": without(LLAMA3, "high_freq_factor")},
        r"rope_adjustments\.high_freq_factor is absent",
    ),
    "litgpt, crossed bands": (
        LITGPT | {"rope_adjustments": LLAMA3 | {"low_freq_factor": 5.0}},
        r"rope_adjustments\.low_freq_factor cannot be used|rope_adjustments\.high_freq_factor",
    ),
    "litgpt, a factor that is text": (
        LITGPT | {"rope_adjustments": {"factor": "8"}},
        r"rope_adjustments\.factor must be",
    ),
    "litgpt, adjustments that are a list": (LITGPT | {"rope_adjustments": [8]}, "rope_adjustments"),
    "litgpt, more than a head": (LITGPT | {"rotary_percentage": 1.5}, "rotary_percentage"),
    "litgpt, odd coordinates": (LITGPT | {"rotary_percentage": 0.26}, "rotary_percentage"),
    "litgpt, heads that do not divide": (LITGPT | {"n_head": 5}, "n_embd / n_head"),
    "litgpt, a base of 1": (LITGPT | {"rope_base": 1}, "rope_base must be"),
    "litgpt, indices without a base": (
        LITGPT | {"rope_indices": [0] * 4},
        "rope_local_base_freq is absent beside rope_indices",
    ),
    "litgpt, too few indices": (
        LITGPT | {"rope_indices": [0], "rope_local_base_freq": 1e4},
        "rope_indices must be",
    ),
    "litgpt, an unknown rope key": (LITGPT | {"rope_zoom": 2}, "rope_zoom"),
    "litgpt, a key of another program": (LITGPT | {"rope_theta": 7.0}, "rope_theta"),
    "litgpt, a slice without a width": (
        LITGPT | {"latent_attention": {"qk_rope_head_dim": "64"}},
        r"latent_attention\.qk_rope_head_dim must be",
    ),
}


@each("name", WRONG)
def test_what_a_program_would_not_run_is_refused_by_its_key(name: str) -> None:
    """Under the name that the file has for it."""
    config, says = WRONG[name]
    with pytest.raises(ConfigError, match=says):
        load(config)
