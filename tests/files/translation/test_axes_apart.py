"""A base or a law for each axis: programs with lists of frequencies take it, others refuse it."""

from __future__ import annotations

import numpy as np
import pytest

from phasor import Rope, translate
from phasor.axes import Axial, Sectioned
from phasor.extending.laws import extended_ropes
from phasor.files.translation import TranslationError
from phasor.scaling import NTK

TWICE = NTK(factor=2.0)
M_ROPE = Rope(
    head_dim=128,
    pairing="half",
    base=1e6,
    axes=Sectioned((16, 24, 24), scaling=(None, TWICE, TWICE)),
)
FLUX = Rope(
    head_dim=128, pairing="interleaved", axes=Axial((8, 28, 28), scaling=(None, TWICE, TWICE))
)


def test_a_config_of_transformers_lists_the_frequencies() -> None:
    """LongRoPE's list has a divisor for each pair, whichever axis turns it."""
    (part,) = translate(M_ROPE, "transformers", context=4096).parts
    block = part.settings["rope_scaling"]
    assert block["mrope_section"] == [16, 24, 24]
    base, divisors = part.settings["rope_theta"], np.array(block["long_factor"])
    f = base ** (-np.arange(64) / 64) / divisors
    raised = 1e6 * 2 ** (128 / 126)
    expected = [(1e6 if k < 16 else raised) ** (-k / 64) for k in range(64)]
    np.testing.assert_allclose(f, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("rope", "target", "reason"),
    [
        (FLUX, "transformers", "transformers cannot express positions of 3 axes (Axial)"),
        (
            M_ROPE,
            "llama.cpp",
            "llama.cpp cannot express frequencies without a base (each axis has its own base or "
            "law); the nearest that it can is off by up to 16.2 radians",
        ),
    ],
)
def test_a_program_without_such_a_list_refuses(rope: Rope, target: str, reason: str) -> None:
    """With the reason, and not with the frequencies of one axis."""
    with pytest.raises(TranslationError) as caught:
        translate(rope, target, context=4096)
    assert str(caught.value).startswith(reason)


def test_tables_of_kernels_are_those_of_the_rope() -> None:
    """The code makes them from the rope itself."""
    (part,) = translate(FLUX, "flash-attn", context=4096).parts
    assert list(part.ropes.values()) == [FLUX]


def test_an_extension_divides_frequencies_of_laws_by_axis_and_scales_bases() -> None:
    """As those of a law without a factor; on bases alone every law goes."""
    (linear,) = (rope for name, rope in extended_ropes(FLUX, 64, 128).items() if name == "linear")
    np.testing.assert_allclose(linear.inv_freq, FLUX.inv_freq / 2, rtol=1e-15, atol=0)
    of_bases = Rope(head_dim=64, pairing="half", axes=Axial((16, 16), base=(100.0, 1e4)))
    ntk = extended_ropes(of_bases, 64, 128)["ntk"]
    raised = 1e4 * 2 ** (32 / 30)
    np.testing.assert_allclose(
        ntk.inv_freq[16:], raised ** (-np.arange(16) / 16), rtol=4e-15, atol=0
    )
