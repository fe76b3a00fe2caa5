"""What programs with a reading of their own are told, and what they cannot be told."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

import phasor
from phasor import LayerRopes, Rope
from phasor.files.translation import translate
from phasor.scaling import NTK, DynamicNTK, Linear, PerPair, Yarn

from ..refusals import refused
from .test_refusals import refusal

ROPE = Rope(head_dim=64, pairing="half", base=500_000.0)
YARN = Yarn(factor=4.0, original_max_positions=4096)


def block(rope: Rope, target: str, context: int = 16_384) -> dict[str, float]:
    """The block of a config."""
    return translate(rope, target, context=context).parts[0].settings["rope_parameters"]


def test_mlx_lm_is_told_yarns_factor_by_its_two_scales() -> None:
    """It reads no attention_factor."""
    for gain, all_dim in ((1.0, 0.0), (1.25, 0.0), (0.8, 0.5), (None, 1.0)):
        law = replace(YARN, attention_factor=gain, mscale_all_dim=all_dim)
        rope = replace(ROPE, scaling=law)
        said = block(rope, "mlx-lm")
        one, other = (0.1 * said[name] * math.log(4) + 1 for name in ("mscale", "mscale_all_dim"))
        assert one / other == pytest.approx(rope.attention_factor, rel=1e-15)


def test_gpt_oss_is_refused_for_mlx_lm_as_far_off_as_its_rounded_ramp() -> None:
    """Any other model of half pairs is given the ramp as a list of divisors."""
    error = refusal(phasor.preset("gpt-oss-20b"), "mlx-lm")
    assert "gpt-oss's class passes no max_position_embeddings to a list of divisors" in str(error)
    assert "off by up to 28.9 radians at position 131071" in str(error)
    rope = replace(ROPE, scaling=replace(YARN, truncate=False))
    assert block(rope, "mlx-lm")["rope_type"] == "longrope"
    assert block(rope, "exllamav3")["rope_type"] == "yarn"


def test_two_lists_are_refused_for_mlx_lm_as_far_off_as_the_short_one_is_from_the_long() -> None:
    """At the last position of the short list; at one length there is one list."""
    model = phasor.preset("phi-3.5-mini")
    error = refusal(model, "mlx-lm")
    short, long = (model[0].at(length) for length in (4096, 4097))
    assert error.nearest == long
    assert error.radians == pytest.approx(4095 * abs(short.inv_freq - long.inv_freq).max())
    assert translate(model, "mlx-lm", seq_len=4096).parts


@pytest.mark.parametrize("target", ["exllamav3", "mlx-lm"])
def test_a_factor_on_cos_and_sin_comes_from_two_lengths(target: str) -> None:
    """Of a list of divisors; below 1 it cannot."""
    law = PerPair(factors=tuple(range(1, 33)), attention_factor=1.25)
    said = block(replace(ROPE, scaling=law), target)
    ratio = math.log(16_384) / math.log(said["original_max_position_embeddings"])
    assert math.sqrt(ratio) == pytest.approx(1.25, rel=1e-14)
    with refused("gain"):
        translate(replace(ROPE, scaling=replace(law, attention_factor=0.5)), target, context=64)


def test_exllamav3_computes_yarns_factor_of_two_lengths() -> None:
    """Where their ratio is no such factor, the length before the extension is not given."""
    for factor, length, original in ((4.0, 16_384, 4096), (2.3, 4096, None)):
        rope = replace(ROPE, scaling=replace(YARN, factor=factor))
        settings = translate(rope, "exllamav3", context=999).parts[0].settings
        said = settings["rope_parameters"]
        assert settings["max_position_embeddings"] == length
        assert said.get("original_max_position_embeddings") == original
        assert said["factor"] == factor
        assert said["attention_factor"] == rope.attention_factor


def test_clockwise_pairs_have_negative_divisors() -> None:
    """In both programs."""
    for target in ("exllamav3", "mlx-lm"):
        said = block(replace(ROPE, direction=-1), target)
        assert said["long_factor"] == said["short_factor"] == [-1.0] * 32


def test_dynamic_ntk_of_clockwise_pairs_is_refused_for_mlx_lm_at_all_lengths() -> None:
    """Its code makes that law of a base; at one length it is a list of divisors."""
    rope = replace(ROPE, direction=-1, scaling=DynamicNTK(factor=2.0, original_max_positions=64))
    with refused("rule and clockwise"):
        translate(rope, "mlx-lm", context=128)
    assert max(block(rope.at(128), "mlx-lm")["long_factor"]) < 0


def test_mlx_lm_has_one_key_for_the_pairs_of_all_layers() -> None:
    """A model that has both is refused."""
    kinds = {"full": ROPE, "sliding": replace(ROPE, pairing="interleaved")}
    ropes = LayerRopes(name="toy", layer_kinds=tuple(kinds), kinds=kinds)
    assert refusal(ropes, "mlx-lm").reason == "ropes"


def test_litgpt_is_given_betas_that_turn_its_ramp_round() -> None:
    """The floor of the first and the ceiling of the second are the ends, in the other order."""
    rope = replace(ROPE, scaling=YARN)
    (part,) = translate(rope, "litgpt").parts
    said = part.settings["rope_adjustments"]
    first, second = (
        32 * math.log(4096 / (2 * math.pi * said[name])) / math.log(500_000)
        for name in ("beta_fast", "beta_slow")
    )
    begin, end = (32 * math.log(4096 / (2 * math.pi * b)) / math.log(500_000) for b in (32, 1))
    assert (math.floor(first), math.ceil(second)) == (math.ceil(end), math.floor(begin))
    assert any("beta_fast: 32 and beta_slow: 1." in note for note in part.notes)


def test_maxtext_is_given_a_base_as_a_quotient_of_whole_numbers() -> None:
    """It takes no other; the common divisor is taken back by the factor."""
    for base in (500_000.0, 999_999.442):
        said = translate(replace(ROPE, base=base), "maxtext").parts[0].settings
        least, most = said["rope_min_timescale"], said["rope_max_timescale"]
        assert isinstance(most, int)
        assert most / least == pytest.approx(base, rel=2**-40)
        assert said["rope_linear_scaling_factor"] * least == 1


def test_megatrons_latent_attention_turns_all_its_layers_and_nothing_is_learned_besides() -> None:
    """It reads no list of layers, and learned embeddings are added unless the type is said."""
    rope = phasor.preset("deepseek-v2-lite").ropes[0]
    kinds = {"rope": rope, "nope": None}
    mixed = LayerRopes(name="toy", layer_kinds=tuple(kinds), kinds=kinds, num_kv_heads=1)
    (part,) = translate(mixed, "megatron").parts
    assert part.settings["--position-embedding-type"] == "rope"
    assert "--no-rope-freq" not in part.settings
    assert any("rotates in all its layers" in note for note in part.notes)
    (part,) = translate(replace(mixed, num_kv_heads=2), "megatron").parts
    assert part.settings["--no-rope-freq"] == "[0,1]"


def test_maxtext_turns_the_end_of_heads_in_the_block_of_deepseek_4() -> None:
    """By two bases without a law: with the model's YaRN in compressed layers it is refused."""
    model = phasor.preset("deepseek-v4-flash")
    with refused("law"):
        translate(model, "maxtext")
    kinds = {kind: rope and replace(rope, scaling=None) for kind, rope in model.kinds.items()}
    (part,) = translate(replace(model, kinds=kinds), "maxtext").parts
    assert part.settings == {
        "rope_type": "default",
        "rope_max_timescale": 10_000,
        "compressed_rope_max_timescale": 160_000,
    }
    assert "deepseek4, with head_dim 512 and qk_rope_head_dim 64" in part.notes[0]


def test_what_only_all_properties_together_lack_is_named() -> None:
    """Two of the three MaxText cannot express either, and each alone it can."""
    end = Rope(head_dim=4, pairing="half", base=1.5, rotary_dim=2, rotary_start=2)
    error = refusal(replace(end, scaling=Linear(factor=1.5)), "maxtext", 64)
    assert error.reason == "start and law and base"


def test_maxtext_has_plain_whole_heads_in_the_sliding_layers_of_gemma_4() -> None:
    """Its keys for them are a base alone, of a whole number."""
    model = phasor.preset("gemma-4-31b")
    local = model.kinds["sliding"]
    assert local is not None
    assert translate(model, "maxtext").parts[0].settings["local_rope_max_timescale"] == 10_000
    for change in ({"scaling": Linear(factor=4.0)}, {"rotary_dim": 64}, {"base": 10_000.5}):
        kinds = {**model.kinds, "sliding": replace(local, **change)}
        assert refusal(replace(model, kinds=kinds), "maxtext").reason == "ropes"


def test_maxtext_divides_no_positions_in_the_sliding_layers_of_gemma_3() -> None:
    """So a base there has to be a whole number, whatever that of the others is."""
    full = replace(ROPE, scaling=NTK(factor=2.0))  # raises the base to no whole number
    kinds: dict[str, Rope | None] = {"full": full, "sliding": replace(ROPE, base=10_000.5)}
    ropes = LayerRopes(name="gemma-3", layer_kinds=tuple(kinds), kinds=kinds)
    assert refusal(ropes, "maxtext").reason == "ropes"
    alike = replace(ropes, name="toy", kinds={**kinds, "sliding": replace(full, base=10_000.5)})
    assert translate(alike, "maxtext").parts[0].settings["rope_linear_scaling_factor"] == 2.0**-30
