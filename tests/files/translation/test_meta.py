"""Which of Meta's two programs reads the keys of a params.json, and what neither does."""

from __future__ import annotations

import pytest

import phasor
from phasor import Rope
from phasor.files.translation import translate
from phasor.scaling import Llama3

from ..refusals import refused


@pytest.mark.parametrize(
    ("name", "old"),
    [
        ("llama-3-8b", True),
        ("llama-3.1-8b-meta", True),
        ("llama-3.2-1b", False),
        ("llama-4-scout", False),
        ("smollm3-3b", False),
    ],
)
def test_a_note_says_when_the_code_of_llama_3_does_not_do(name: str, old: bool) -> None:
    """It has the factors 8 and 4 in it, and rotates in every layer."""
    (part,) = translate(phasor.preset(name), "meta").parts
    assert any("llama_models.llama4" in note for note in part.notes) != old


@pytest.mark.parametrize(
    "law",
    [
        Llama3(factor=8.0, original_max_positions=4096),
        Llama3(factor=8.0, original_max_positions=8192, low_freq_factor=2.0),
        Llama3(factor=8.0, original_max_positions=8192, low_freq_factor=0.25, high_freq_factor=0.5),
    ],
)
def test_other_constants_than_the_codes_are_refused(law: Llama3) -> None:
    """Where the ramp begins and ends is no key."""
    rope = Rope(head_dim=128, pairing="interleaved", base=500_000.0, scaling=law)
    with refused("law") as caught:
        translate(rope, "meta", context=32768)
    assert caught.value.nearest is not None
    assert caught.value.nearest.scaling is None
