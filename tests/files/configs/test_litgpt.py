"""Files of litgpt: its laws by their formulas, its betas, and the defaults of its class."""

from __future__ import annotations

import math
from contextlib import suppress

import numpy as np
import pytest

from phasor import ConfigError, PhasorWarning
from phasor.files.reading import load
from phasor.scaling import Linear, Llama3

from ...each import each
from .program_files import LITGPT, LITGPT_YARN, LLAMA3


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
    assert any("the reverse of YaRN's ramp" in note for note in ropes.notes)
    gains = {"mscale": 1.0}, {"mscale_all_dim": 1.0}, {"mscale": 1.0, "mscale_all_dim": 1.0}
    one = 0.1 * math.log(8) + 1
    for keys, gain in zip(gains, (one, one, 1), strict=True):
        (rope,) = load(LITGPT | {"rope_adjustments": yarn | keys}).ropes
        assert math.isclose(rope.attention_factor, gain)


@each("beta", [5e-324, 1e308])
def test_a_beta_at_the_end_of_the_floats_is_read_or_refused(beta: float) -> None:
    """A ramp from the one end of the spectrum to the other, or an error about the block."""
    for key in ("beta_fast", "beta_slow"):
        with suppress(ConfigError):
            ropes = load(LITGPT | {"rope_adjustments": LITGPT_YARN | {key: beta}})
            assert np.isfinite(ropes.ropes[0].inv_freq).all()


def test_betas_in_the_other_order_make_litgpts_ramp_that_of_yarn() -> None:
    """Kept up to the end of the slow beta, divided from the begin of the fast one on."""
    yarn = {"factor": 8.0, "beta_fast": 1.0, "beta_slow": 32.0, "original_max_seq_len": 4096}
    (rope,) = load(LITGPT | {"rope_adjustments": yarn | {"mscale_all_dim": 1.0}}).ropes
    indices = np.array([math.log(4096 / (2 * math.pi * b), 500000.0) * 64 for b in (32, 1)])
    begin, end = math.ceil(indices[0]), math.floor(indices[1])
    ramp = np.clip((np.arange(64) - end) / (begin - end), 0, 1)
    plain = 500000.0 ** -(np.arange(64) / 64)
    assert np.allclose(rope.inv_freq, plain * ((1 - ramp) / 8 + ramp), rtol=1e-12)
    one = 0.1 * math.log(8) + 1
    assert math.isclose(rope.attention_factor, one)
    assert math.isclose(rope.softmax_factor, one**2)


def test_a_ramp_that_begins_beyond_the_coordinates_is_litgpts() -> None:
    """YaRN's would end at the last of them."""
    yarn = {"factor": 4.0, "beta_fast": 1.0, "beta_slow": 100.0, "original_max_seq_len": 4096}
    (rope,) = load(LITGPT | {"rope_base": 10, "rope_adjustments": yarn}).ropes
    low, high = (math.log(4096 / (2 * math.pi * beta), 10) * 64 for beta in (1, 100))
    low, high = math.floor(low), math.ceil(high)
    assert low > 127
    ramp = np.clip((np.arange(64) - low) / (high - low), 0, 1)
    wanted = 10.0 ** -(np.arange(64) / 64) * ((1 - ramp) / 4 + ramp)
    assert np.allclose(rope.inv_freq, wanted, rtol=1e-12)


def test_litgpts_local_layers_have_a_base_of_their_own_and_no_law() -> None:
    """The list may be longer than the layers, and without it all are local."""
    config = LITGPT | {"rope_local_base_freq": 10000, "rope_adjustments": {"factor": 8.0}}
    ropes = load(config | {"rope_indices": [1, 0, 1, 1, 0, 0]})
    assert ropes.layer_kinds == ("sliding_attention", "full_attention", *["sliding_attention"] * 2)
    local, wide = ropes.kinds["sliding_attention"], ropes.kinds["full_attention"]
    assert local is not None
    assert wide is not None
    assert (local.base, local.scaling) == (10000, None)
    assert (wide.base, wide.scaling) == (500000, Linear(factor=8.0))
    assert set(load(config).layer_kinds) == {"sliding_attention"}


def test_litgpts_defaults_are_those_of_its_class() -> None:
    """A quarter of a head, as in Pythia, whose files it read first."""
    with pytest.warns(PhasorWarning, match="n_embd; 4096 is what litgpt assumes") as caught:
        ropes = load({"norm_class_name": "LayerNorm", "n_layer": 2, "n_head": 32})
    assert [warning.filename for warning in caught] == [__file__]  # that of the caller
    (rope,) = ropes.ropes
    assert (rope.head_dim, rope.rotary_dim, rope.base, rope.pairing) == (128, 32, 10000, "half")
