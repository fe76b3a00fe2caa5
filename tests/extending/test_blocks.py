"""The block that a rope is in a config: what it says, and what it cannot say."""

import math

import pytest

from phasor import Rope, load, preset
from phasor.axes import Alternating, InterleavedSections, Sectioned
from phasor.errors import ConfigError
from phasor.extending import plan_extension
from phasor.files.dialects.blocks import rope_parameters
from phasor.scaling import NTK, Cope, Linear, Llama3, LongRope, Proportional, Yarn

#: What a block says of every YaRN here.
YARN = {
    "rope_type": "yarn",
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 4096,
}


@pytest.mark.parametrize(
    ("law", "block"),
    [
        (None, {"rope_type": "default"}),
        (Linear(factor=4.0), {"rope_type": "linear", "factor": 4.0}),
        (
            Llama3(factor=8.0, original_max_positions=8192),
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        ),
        (Proportional(fraction=0.25), {"rope_type": "proportional", "partial_rotary_factor": 0.25}),
        (
            Yarn(factor=32.0, original_max_positions=4096, truncate=False),
            YARN | {"factor": 32.0, "truncate": False},
        ),
        (
            Yarn(factor=40.0, original_max_positions=4096, mscale_all_dim=1.0),
            YARN | {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0},
        ),
        (
            LongRope(
                short_factors=(1.0,) * 64,
                long_factors=(2.0,) * 64,
                original_max_positions=4096,
                factor=32.0,
                long_attention_factor=1.25,
            ),
            {
                "rope_type": "longrope",
                "factor": 32.0,
                "short_factor": [1.0] * 64,
                "long_factor": [2.0] * 64,
                "original_max_position_embeddings": 4096,
                "long_mscale": 1.25,
            },
        ),
    ],
    ids=["plain", "linear", "llama3", "proportional", "yarn", "deepseek's yarn", "longrope"],
)
def test_a_block_says_what_transformers_writes(law, block):
    """The keys of transformers 5, and the base in every block."""
    rope = Rope(head_dim=128, pairing="half", base=500_000.0, scaling=law)
    assert rope_parameters(rope, 4096) == block | {"rope_theta": 500_000.0}


@pytest.mark.parametrize(
    ("axes", "said"),
    [
        (Sectioned((16, 24, 24)), {"mrope_section": [16, 24, 24]}),
        (
            InterleavedSections((24, 20, 20)),
            {"mrope_section": [24, 20, 20], "mrope_interleaved": True},
        ),
        (Alternating((20, 22, 22)), {"mrope_section": [22, 22, 20]}),
    ],
    ids=["sectioned", "interleaved", "alternating"],
)
def test_a_block_says_the_sections(axes, said):
    """In the order of the model's own file: ERNIE puts time last."""
    block = rope_parameters(Rope(head_dim=128, pairing="half", axes=axes), 4096)
    assert {key: block[key] for key in said} == said


@pytest.mark.parametrize("width", range(2, 130, 8))
def test_a_part_of_a_head_survives_the_fraction(width):
    """The reader multiplies and cuts; no width loses a coordinate to a rounding."""
    for turning in range(2, width, 2):
        rope = Rope(head_dim=width, pairing="half", rotary_dim=turning)
        assert int(width * rope_parameters(rope, 2048)["partial_rotary_factor"]) == turning


@pytest.mark.parametrize(
    ("rope", "said"),
    [
        (Rope(head_dim=4, pairing="half", explicit_inv_freq=(1.0, 0.5)), "explicit"),
        (Rope(head_dim=4, pairing="half", inv_freq_dtype="float32"), "rounded"),
        (Rope(head_dim=64, pairing="half", scaling=Cope()), "no rope_type stands for"),
        (Rope(head_dim=64, pairing="half", scaling=NTK(factor=2.0)), "no rope_type stands for"),
        (
            Rope(
                head_dim=64, rotary_dim=32, pairing="half", scaling=Proportional(fraction=0.5)
            ),
            "cannot express",
        ),
        (preset("flux.1-dev")[0], "Axial"),
    ],
    ids=["explicit", "float32", "cope", "ntk", "fraction of a part", "axial"],
)  # fmt: skip
def test_what_a_config_cannot_say_is_refused(rope, said):
    """Nothing near is written in its place."""
    with pytest.raises(ConfigError, match=said):
        rope_parameters(rope, 4096)


def test_a_scale_that_is_read_beside_another_alone_is_said_as_a_factor():
    """Where YaRN's law has no mscale_all_dim."""
    law = Yarn(factor=8.0, original_max_positions=64, mscale=0.5)
    block = rope_parameters(Rope(head_dim=64, pairing="half", scaling=law), 4096)
    assert "mscale" not in block
    assert block["attention_factor"] == pytest.approx(1 + 0.05 * math.log(8))


@pytest.mark.transformers
def test_the_block_of_a_longer_context_keeps_what_queries_are_multiplied_by():
    """Ministral's class reads it there, and fails without it."""
    import torch
    from transformers import Ministral3Config
    from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale

    model = preset("ministral-3-8b")
    chosen = plan_extension(model, to=800_000).options["yarn"]
    block = Ministral3Config(**chosen.config).rope_parameters
    numbers = [block[key] for key in ("llama_4_scaling_beta", "original_max_position_embeddings")]
    places = torch.arange(0, 800_000, 1013)
    right = get_llama_4_attn_scale(places[None], *numbers)[0, 0, :, 0].double().numpy()
    assert abs(model.query_factor(0)(places.numpy()) - right).max() < 2.0**-22


def test_a_law_that_takes_the_length_of_that_factor_is_refused():
    """One key has both."""
    keys = {"rope_theta": 1e4, "llama_4_scaling_beta": 0.3, "original_max_position_embeddings": 50}
    model = load(
        {
            "model_type": "ministral3",
            "num_hidden_layers": 2,
            "hidden_size": 64,
            "num_attention_heads": 2,
            "max_position_embeddings": 200,
            "rope_parameters": {"rope_type": "default", **keys},
        }
    )
    options = plan_extension(model, to=800).options
    assert "here 200, and the length from which queries" in options["yarn"].refused
    block = options["linear"].config["rope_parameters"]
    assert (block["llama_4_scaling_beta"], block["original_max_position_embeddings"]) == (0.3, 50)
