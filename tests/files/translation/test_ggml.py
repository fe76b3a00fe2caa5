"""What GGUF files and llama.cpp's flags say besides angles, and what they refuse by name."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

import phasor
from phasor import LayerRopes, Rope
from phasor.axes import Axes, OneAxis, Sectioned
from phasor.files.dialects.gguf import _tables, architecture_facts
from phasor.files.translation import TranslationError, translate
from phasor.layers import one_layer
from phasor.scaling import Linear, LongRope, Yarn

from ... import oracle
from ..refusals import refused
from .described_ggml import deepseek_softmax, ggml_rope, llama_rope

PLAIN = Rope(head_dim=64, pairing="half")


def without_arch(settings: object) -> dict[str, object]:
    """Settings by their keys without the architecture's prefix."""
    assert isinstance(settings, dict)
    return {key.removeprefix("{arch}."): value for key, value in settings.items()}


@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-r1", "kimi-k2", "mistral-small-4-119b"])
def test_the_log_multiplier_scales_the_softmax_as_the_model_does(name: str) -> None:
    """DeepSeek's architecture reads it; its own factor is told nowhere else."""
    (part,) = translate(phasor.preset(name), "gguf").parts
    (rope,) = part.ropes.values()
    assert deepseek_softmax(without_arch(part.settings)) == pytest.approx(rope.softmax_factor)
    assert any("deepseek2" in note for note in part.notes)


def test_a_softmax_factor_that_no_key_says_is_a_note() -> None:
    """Cos and sin have a factor too: the multiplier would change it."""
    law = Yarn(factor=4.0, original_max_positions=4096, mscale=1.0, mscale_all_dim=0.5)
    (part,) = translate(replace(PLAIN, scaling=law), "gguf", context=4096).parts
    assert not any("multiplier" in key for key in part.settings)
    assert any(note.startswith("Multiply the softmax scale") for note in part.notes)


@pytest.mark.parametrize("axes", [OneAxis(), Sectioned((8, 12, 12))])
def test_the_log_multiplier_is_for_interleaved_pairs_of_one_axis(axes: Axes) -> None:
    """No architecture that turns other pairs reads it: the user has to scale the softmax."""
    law = Yarn(factor=40.0, original_max_positions=4096, mscale_all_dim=1.0)
    rope = replace(PLAIN, axes=axes, scaling=law)
    (part,) = translate(rope, "gguf", context=8192).parts
    keys = without_arch(part.settings)
    assert "rope.scaling.yarn_log_multiplier" not in keys
    # cos and sin are left alone, where llama.cpp would multiply them
    assert keys["rope.scaling.attn_factor"] == pytest.approx(1 / (0.1 * math.log(40) + 1))
    assert f"Multiply the softmax scale by {rope.softmax_factor!r} as well" in " ".join(part.notes)
    assert not any("deepseek2" in note for note in part.notes)
    if isinstance(axes, OneAxis):
        (part,) = translate(replace(rope, pairing="interleaved"), "gguf", context=8192).parts
        assert "rope.scaling.yarn_log_multiplier" in without_arch(part.settings)


def test_betas_of_ones_own_are_flags_too() -> None:
    """Most architectures do not read the keys."""
    law = Yarn(factor=4.0, original_max_positions=4096, beta_fast=16.0, beta_slow=2.0)
    rope = replace(PLAIN, scaling=law)
    (part,) = translate(rope, "gguf", context=4096).parts
    assert any("--yarn-beta-fast 16 --yarn-beta-slow 2" in note for note in part.notes)
    (part,) = translate(rope, "llama.cpp", context=4096).parts
    assert part.settings["--yarn-beta-fast"] == 16.0
    assert part.settings["--yarn-beta-slow"] == 2.0


def test_the_long_list_is_for_a_context_of_whole_blocks() -> None:
    """llama.cpp makes 4096 tokens of 4000."""
    (part,) = translate(phasor.preset("phi-3.5-mini"), "gguf").parts
    assert any("rounds up to a multiple of 256) of more than 4096" in note for note in part.notes)


def test_two_factors_of_longrope_are_refused() -> None:
    """A file has one key for both lists."""
    law = LongRope(
        short_factors=(1.0,) * 32,
        long_factors=(2.0,) * 32,
        original_max_positions=4096,
        factor=2.0,
        short_attention_factor=1.0,
        long_attention_factor=1.2,
    )
    with refused("law"):
        translate(replace(PLAIN, scaling=law), "gguf", context=8192)


def test_both_lists_of_clockwise_pairs_are_negative() -> None:
    """What divides positions, as a file has no other word for the direction."""
    lists = {"short_factors": (1.0,) * 32, "long_factors": (2.0,) * 32}
    law = LongRope(**lists, original_max_positions=4096, factor=2.0)
    rope = replace(PLAIN, scaling=law, direction=-1)
    settings = translate(rope, "gguf", context=8192).parts[0].settings
    for name, divisor in (("short", 1.0), ("long", 2.0)):
        assert settings[f"rope_factors_{name}.weight"].tolist() == [-divisor] * 32


@pytest.mark.parametrize("name", ["qwen2-vl-7b", "glm-4.1v-9b", "qwen3.5-35b-a3b"])
def test_each_axis_turns_its_pairs(name: str) -> None:
    """Coordinates of an image differ, and the type of rotation deals them out."""
    (part,) = translate(phasor.preset(name), "gguf", context=4096).parts
    (rope,) = part.ropes.values()
    mode = next(mode for mode in ("IMROPE", "MROPE") if any(mode in note for note in part.notes))
    to = llama_rope(without_arch(part.settings), {}, mode=mode, n_ctx=4096)
    at = (3, 11, 29)
    x = np.random.default_rng(0).standard_normal((1, rope.head_dim)).astype(np.float32)
    turned = ggml_rope(x, [(*at, 1000)], to)[0]
    cos, sin = oracle.cos_sin(rope, at[: rope.axes.n_axes])
    for k in range(rope.num_pairs):
        i, j = oracle.pair_of(rope, k, "half")
        wanted = complex(x[0, i], x[0, j]) * complex(cos[k], sin[k])
        # an angle of at most 29 radians by a divisor rounded to float32, of numbers below 4
        assert abs(complex(turned[i], turned[j]) - wanted) <= 4 * 29 * 2**-24


def test_a_tensor_for_several_axes_is_refused() -> None:
    """Of the architectures that turn by sections, none loads one."""
    with refused("axes and base: no tensor of frequencies"):
        translate(phasor.preset("pixtral-vision"), "gguf", context=4096)


@pytest.mark.parametrize("kinds", [("full", "sliding"), ("full_attention", "sliding_attention")])
def test_a_law_in_sliding_layers_alone_is_refused(kinds: tuple[str, str]) -> None:
    """The scaling keys are for the full ones; base and width of sliding layers have keys."""
    scaled = replace(PLAIN, scaling=Linear(factor=2.0))
    full, sliding = kinds

    def model(first: Rope, second: Rope) -> LayerRopes:
        return LayerRopes(name="two", layer_kinds=kinds, kinds={full: first, sliding: second})

    (part,) = translate(model(scaled, PLAIN), "gguf", context=4096).parts
    assert part.settings["{arch}.rope.scaling.factor"] == 2.0
    with refused("ropes") as caught:
        translate(model(PLAIN, scaled), "gguf", context=4096)
    assert caught.value.nearest == PLAIN
    assert caught.value.radians == 4095 / 2


def test_a_factor_in_full_layers_alone_has_an_architecture_or_is_refused() -> None:
    """Of the two that scale those alone, one has one base, one gives all layers the factor."""
    law = Yarn(factor=4.0, original_max_positions=4096, attention_factor=1.5)

    def model(base: float, scaling: Yarn) -> LayerRopes:
        ropes = {"full": replace(PLAIN, base=base, scaling=scaling), "sliding": PLAIN}
        return LayerRopes(name="two", layer_kinds=("full", "sliding"), kinds=ropes)

    for base, scaling, reader in (
        (1e4, law, "olmo2"),
        (1e6, replace(law, attention_factor=None), "gemma4"),
    ):
        (part,) = translate(model(base, scaling), "gguf", context=4096).parts
        assert any(f"full layers alone, as {reader} does" in note for note in part.notes)
    with refused("ropes: gemma4 gives a factor on cos and sin"):
        translate(model(1e6, law), "gguf", context=4096)


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("llama-3.1-8b", "llama"),
        ("phi-3.5-mini", "phi3"),
        ("qwen2-vl-7b", "qwen2vl"),
        ("qwen3-8b-yarn", "qwen3"),
        ("deepseek-v3", "deepseek2"),
    ],
)
def test_the_code_writes_the_keys_and_the_tensors(
    name: str, architecture: str, tmp_path: Path
) -> None:
    """Into a file that is read back as the model's rotation, in the pairs of the architecture."""
    ropes = phasor.preset(name)
    (part,) = translate(ropes, "gguf").parts
    (rope,) = part.ropes.values()
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", architecture)
    writer.add_block_count(len(ropes))
    writer.add_head_count(ropes.num_heads or 0)
    writer.add_head_count_kv(ropes.num_kv_heads or 0)
    writer.add_key_length(rope.head_dim)
    writer.add_context_length(ropes.context or 0)
    exec(part.code, {"writer": writer})
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (read,) = phasor.load(tmp_path / "model.gguf").ropes
    for length in (4096, 131_072):
        assert np.allclose(read.at(length).inv_freq, rope.at(length).inv_freq, rtol=2.0**-23)
        assert read.at(length).logit_factor == pytest.approx(rope.at(length).logit_factor)
    assert read.axes == rope.axes


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("llama-3-8b", "and llama rotates interleaved ones: the weights have to be permuted"),
        ("mistral-7b-v0.1", "and llama rotates interleaved ones"),
        ("llama-3.1-8b-meta", "and llama does: the weights need not be permuted"),
        ("qwen3-8b", "and qwen3 does: the weights need not be permuted"),
        ("no model", "If it rotates the other pairs, the weights have to be permuted"),
    ],
)
@pytest.mark.parametrize("target", ["gguf", "llama.cpp"])
def test_it_is_said_whether_weights_have_to_be_permuted(name: str, said: str, target: str) -> None:
    """By what llama.cpp makes of the model's type."""
    ropes = phasor.preset(name) if name in phasor.preset_names() else one_layer(PLAIN)
    plain = {kind: rope and replace(rope, scaling=None) for kind, rope in ropes.kinds.items()}
    (part,) = translate(replace(ropes, kinds=plain), target, context=8192).parts
    assert any(said in note for note in part.notes)


def test_every_architecture_of_a_family_is_one() -> None:
    """Otherwise its pairs would not be known."""
    known = _tables()["converted"]
    assert {*known.values()} - {""} <= {*architecture_facts()}


@pytest.mark.parametrize("name", ["gpt-oss-20b", "gpt-oss-120b"])
@pytest.mark.parametrize(("position", "radians"), [(4096, 0.90), (131_071, 28.9)])
def test_gpt_oss_is_refused_with_the_distance_of_what_its_loader_takes(
    name: str, position: int, radians: float
) -> None:
    """YaRN by its keys, whose ramp ggml rounds to whole pairs; the loader takes no tensor."""
    rope = phasor.preset(name).ropes[0]
    for target in ("gguf", "llama.cpp"):
        with pytest.raises(TranslationError) as caught:
            translate(phasor.preset(name), target, context=position + 1)
        nearest = caught.value.nearest
        assert nearest == replace(rope, scaling=replace(rope.scaling, truncate=True))
        both = zip(oracle.frequencies(rope), oracle.frequencies(nearest), strict=True)
        apart = float(position * max(abs(f - g) for f, g in both))
        assert caught.value.radians == pytest.approx(apart)
        assert f"{apart:.3g} radians at position {position}" in str(caught.value)
        assert apart == pytest.approx(radians, rel=0.005)  # three digits
    assert "rope.scaling.type" in str(translate(nearest, "gguf", context=4096).parts[0].code)


def test_gpt_oss_without_a_law_has_keys_alone() -> None:
    """It is the tensor that its loader refuses; other architectures take it for the same rope."""
    ropes = phasor.preset("gpt-oss-20b")
    (rope,) = ropes.ropes
    (part,) = translate(replace(ropes, kinds={"rope": replace(rope, scaling=None)}), "gguf").parts
    assert part.settings.keys() == {"{arch}.rope.freq_base", "{arch}.rope.dimension_count"}
    (part,) = translate(rope, "gguf", context=4096).parts
    assert "rope_freqs.weight" in part.settings


@pytest.mark.parametrize(
    ("name", "base", "position", "radians"),
    [
        ("qwen3-vl-4b", 5e6, 131_071, "0.054"),
        ("qwen3-vl-4b", 5e6, 262_143, "0.108"),
        ("qwen3-omni-30b-a3b", 1e6, 65_535, "0.125"),
    ],
)
def test_qwen3_vl_has_keys_and_a_note_on_the_pairs_that_stand_still(
    name: str, base: float, position: int, radians: str
) -> None:
    """Every file of it has them: the rotation deals out 60 of 64 pairs, and two more fall out.

    llama.cpp's converter makes one of Qwen3-Omni too.
    """
    ropes = phasor.preset(name)
    (part,) = translate(ropes, "gguf", context=position + 1).parts
    assert without_arch(part.settings) == {
        "rope.freq_base": base,
        "rope.dimension_count": 128,
        "rope.dimension_sections": [24, 20, 20, 0],
    }
    (note,) = [note for note in part.notes if "stand still" in note]
    assert "pairs 61 and 62 stand still" in note
    exact = float(position * oracle.frequencies(ropes.ropes[0])[61])
    assert f"off by up to {exact:.3g} radians at position {position}." in note
    assert f"{exact:.3g}" == radians
    # as a rope of no known model it is still refused
    with refused("axes: by a fourth coordinate"):
        translate(ropes.ropes[0], "gguf", context=position + 1)


def test_layers_that_compress_by_more_or_less_are_one_kind_of_deepseek_4s_keys() -> None:
    """A file of the model tells them apart, and both have one rope; two ropes have no key."""
    model = phasor.preset("deepseek-v4-flash")
    sliding, compressed = model.kinds["sliding"], model.kinds["compressed"]
    assert compressed is not None
    names = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
    apart = replace(
        model,
        layer_kinds=names,
        kinds=dict(zip(names, (sliding, compressed, compressed), strict=True)),
    )
    (part,), (expected,) = (translate(one, "gguf").parts for one in (apart, model))
    assert (part.settings, part.notes) == (expected.settings, expected.notes)
    other = {**apart.kinds, names[2]: replace(compressed, base=5e5)}
    with refused("ropes"):
        translate(replace(apart, kinds=other), "gguf")


def test_deepseek_4_has_no_factor_on_cos_and_sin_in_compressed_layers() -> None:
    """Its graph takes YaRN's out, whatever the key for it says, and reads no tensor."""
    model = phasor.preset("deepseek-v4-flash")
    compressed = model.kinds["compressed"]
    assert compressed is not None
    yarn = Yarn(factor=16.0, original_max_positions=65536)
    for law in (yarn, replace(yarn, truncate=False, attention_factor=1.0)):
        other = replace(
            model, kinds={**model.kinds, "compressed": replace(compressed, scaling=law)}
        )
        with refused("ropes: deepseek4 reads neither"):
            translate(other, "gguf")
    divided = replace(compressed, scaling=Linear(factor=4.0))
    (part,) = translate(replace(model, kinds={**model.kinds, "compressed": divided}), "gguf").parts
    assert part.settings["{arch}.rope.scaling.factor"] == 4.0
