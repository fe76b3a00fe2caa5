"""What a target cannot express: the reason, the nearest that it can, and how far off that is."""

from __future__ import annotations

from dataclasses import replace

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import phasor
from phasor import LayerRopes, Rope
from phasor.axes import Axial, OneAxis, Sectioned
from phasor.errors import SpecError
from phasor.files.translation import TARGETS, TranslationError, translate
from phasor.scaling import DynamicNTK, Linear, Llama3, PerPair, Yarn

from ... import oracle
from ...strategies import resolved_ropes
from ..refusals import refused

YARN = Rope(head_dim=64, pairing="half", scaling=Yarn(factor=4.0, original_max_positions=4096))


def refusal(rope: Rope | LayerRopes, target: str, context: int | None = None) -> TranslationError:
    """Why a target cannot express this."""
    with pytest.raises(TranslationError) as caught:
        translate(rope, target, context=context)
    return caught.value


def radians_apart(a: Rope, b: Rope, context: int) -> mpmath.mpf:
    """The largest difference of a pair's angle at the last position, of 90 digits."""
    both = zip(oracle.frequencies(a), oracle.frequencies(b), strict=True)
    return max(abs(a.direction * f - b.direction * g) for f, g in both) * (context - 1)


def assert_nearest_is_true(rope: Rope, error: TranslationError, target: str, context: int) -> None:
    """The target performs it, and it is as far off as the error says; or there is none."""
    assert (error.nearest is None) == (error.radians is None)
    if error.nearest is None or error.radians is None:
        assert "; the nearest" not in str(error)
        return
    assert error.radians == pytest.approx(float(radians_apart(rope, error.nearest, context)))
    (part,) = translate(error.nearest, target, context=context).parts
    (performed,) = part.ropes.values()
    # a program that computes in float32 may be said to perform a rope of that
    fastest = max(oracle.frequencies(error.nearest))
    assert radians_apart(error.nearest, performed, context) <= 2.0**-23 * fastest * context


@pytest.mark.parametrize("target", sorted(TARGETS))
@pytest.mark.slow
def test_the_nearest_to_a_preset_is_what_the_target_can_and_as_far_off_as_said(target: str) -> None:
    """For every preset with one kind of rope that it refuses."""
    for name in phasor.preset_names():
        ropes = phasor.preset(name)
        if len(ropes.ropes) == 1 and not ropes.in_config.ignores_scaling:
            try:
                translate(ropes, target, context=4096, seq_len=4096)
            except TranslationError as error:
                assert_nearest_is_true(ropes.ropes[0].at(4096), error, target, 4096)


@given(resolved_ropes(), st.sampled_from(sorted(TARGETS)), st.integers(2, 2**20))
@settings(max_examples=60)
def test_the_nearest_to_any_rope_is_what_the_target_can_and_as_far_off_as_said(
    rope: Rope, target: str, context: int
) -> None:
    """Of every law, axes and pairing."""
    try:
        translate(rope, target, context=context)
    except TranslationError as error:
        assert_nearest_is_true(rope, error, target, context)


def test_no_base_is_nearer_than_the_nearest() -> None:
    """Among a thousand of them, with the positions divided so that the fastest pair is right."""
    error = refusal(YARN, "torchtune", 8192)
    wanted = np.array(oracle.frequencies(YARN), dtype=float)
    exponents = -np.arange(32) / 32
    for base in np.geomspace(1.5, 1e12, 1000):
        apart = 8191 * np.abs(wanted - wanted.max() * base**exponents).max()
        assert error.radians is not None
        assert error.radians <= apart * (1 + 1e-9)


def test_a_law_is_refused_with_the_nearest_and_how_far_off_that_is() -> None:
    """The sentence names the target, the law, the distance, the position and what differs."""
    error = refusal(YARN, "torchtune", 8192)
    assert error.nearest is not None
    assert error.nearest.scaling is None
    assert str(error) == (
        "torchtune cannot express the law Yarn; the nearest that it can is off by up to "
        f"{error.radians:.3g} radians at position 8191: base={error.nearest.base!r}, scaling=None"
    )


def test_sections_of_one_spectrum_are_exact_for_text() -> None:
    """Without them a token with equal coordinates turns by the same angles."""
    sections = Sectioned((16, 8, 8))
    error = refusal(Rope(head_dim=64, pairing="half", axes=sections), "mlx", 4096)
    assert error.nearest == Rope(head_dim=64, pairing="half")
    assert error.radians == 0
    assert "exact where a token's coordinates are equal, as in text: axes=OneAxis()" in str(error)


def test_another_factor_on_cos_and_sin_is_not_exact() -> None:
    """Also of the same angles."""
    error = refusal(replace(YARN, scaling=Yarn(factor=1.0, original_max_positions=4096,
                                               attention_factor=2.0)), "meta", 4096)  # fmt: skip
    assert error.radians == 0
    assert str(error).endswith("is off by up to 0 radians at position 4095: scaling=None")


def test_a_rope_with_two_faults_gets_a_nearest_without_either() -> None:
    """Sections and a law that torchtune lacks: both are left out."""
    rope = replace(YARN, axes=Sectioned((16, 8, 8)))
    error = refusal(rope, "torchtune", 4096)
    assert error.nearest is not None
    assert (error.nearest.axes, error.nearest.scaling) == (OneAxis(), None)


def test_spectra_of_their_own_have_nothing_near() -> None:
    """No rope of one axis turns as they do."""
    error = refusal(Rope(head_dim=64, pairing="half", axes=Axial((16, 16))), "mlx", 4096)
    assert str(error) == (
        "mlx cannot express positions of 2 axes (Axial), and nothing that it can is near"
    )


def test_a_rule_has_to_pick_its_law() -> None:
    """The error names both ways; either works, and the law's length is not the context."""
    rule = DynamicNTK(factor=2.0, original_max_positions=2048)
    rope = Rope(head_dim=64, pairing="half", scaling=rule)
    message = str(refusal(rope, "mlx", 8192))
    assert "translate rope.at(seq_len), or give --seq-len TOKENS" in message
    given_at = translate(rope, "mlx", context=8192, seq_len=4096)
    (performed,) = given_at.parts[0].ropes.values()
    assert performed == rope.at(4096)
    resolved = translate(rope.at(4096), "mlx", context=8192)
    assert resolved.as_plain() == given_at.as_plain()


def test_a_rule_with_another_fault_gets_a_nearest_with_the_rule() -> None:
    """Sections cost nothing in text; the distance is that of the law at the context."""
    rule = DynamicNTK(factor=4.0, original_max_positions=8)
    rope = Rope(head_dim=22, pairing="half", scaling=rule, axes=Sectioned((3, 8)))
    with refused("axes") as caught:
        translate(rope, "mlx-lm", context=64)
    assert caught.value.nearest == replace(rope, axes=OneAxis())


def test_layers_without_rotation_have_nothing_to_give() -> None:
    """A model whose every layer goes without."""
    ropes = LayerRopes(name="flat", layer_kinds=("nope",), kinds={"nope": None}, context=64)
    assert str(refusal(ropes, "mlx")) == (
        "mlx cannot express the rotation of flat: no layer has one; give mlx none"
    )


@pytest.mark.parametrize(
    ("target", "context", "message"),
    [
        ("flash-attn", None, "context must be given"),
        ("mxl", 4096, "target must be"),
        ("mlx", 1, "context must be a whole number >= 2, got 1"),
        ("mlx", "8k", "context must be"),
    ],
)
def test_what_is_no_target_or_context_is_refused(target: str, context: int, message: str) -> None:
    """By the argument's name, with what it must be."""
    with pytest.raises(SpecError, match=message):
        translate(Rope(head_dim=64, pairing="half"), target, context=context)


@pytest.mark.parametrize("start", [0, 64])
def test_flash_attn_takes_heads_up_to_its_bound(start: int) -> None:
    """Counted from the first rotated coordinate on; wider ones are refused in its words."""
    for width in (256, 264):
        rope = Rope(head_dim=start + width, rotary_start=start, rotary_dim=64, pairing="half")
        if width <= 256:
            translate(rope, "flash-attn", context=64)
            continue
        message = str(refusal(rope, "flash-attn", 64))
        assert "heads of 264 coordinates: its kernel says 'Only support headdim <= 256'" in message
        assert message.endswith("rotate with flashinfer, liger or phasor.torch.rotate")


def test_gemma_4_has_heads_that_flash_attn_refuses() -> None:
    """512 coordinates in its full layers; no context is asked for what is refused at any."""
    for context in (64, None):
        model = replace(phasor.preset("gemma-4-31b"), context=None)
        assert "heads of 512" in str(refusal(model, "flash-attn", context))


@pytest.mark.parametrize("target", ["exllamav3", "mlx-lm", "sglang", "vllm"])
def test_the_nearest_to_a_slice_begins_where_the_slice_does(target: str) -> None:
    """Blocks describe the slice alone, and ropes where in a head it lies."""
    law = PerPair(factors=tuple(np.linspace(1, 9, 32)), attention_factor=0.5)
    rope = Rope(head_dim=96, rotary_start=32, rotary_dim=64, pairing="interleaved", scaling=law)
    nearest = refusal(rope, target, 64).nearest
    assert nearest is not None
    assert (nearest.head_dim, nearest.rotary_start, nearest.rotary_dim) == (96, 32, 64)


@pytest.mark.parametrize(
    "law",
    [Linear(factor=4.0), Linear(factor=0.5), Llama3(factor=8.0, original_max_positions=8192)],
    ids=repr,
)
def test_torchtune_turns_a_law_in_its_own_pairing_only(law: Linear | Llama3) -> None:
    """Its class for Llama's law is for interleaved pairs, the plain one is there for both."""
    plain = Rope(head_dim=64, pairing="half")
    (part,) = translate(plain, "torchtune", context=64).parts
    assert part.ropes["rope"].pairing == "half"
    (part,) = translate(replace(plain, scaling=law), "torchtune", context=64).parts
    assert part.ropes["rope"].pairing == "interleaved"
    assert "phasor convert FOLDER OUT --to interleaved" in part.notes[0]
