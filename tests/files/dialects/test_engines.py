"""What vLLM and sglang do with a block: what their code lacks is the reason of a refusal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from phasor import Rope
from phasor.axes import Alternating, InterleavedSections, Sectioned
from phasor.files.translation import translate
from phasor.scaling import Linear, LongRope, PerPair, Proportional, Yarn

from ..translation.test_refusals import refusal

PLAIN = Rope(head_dim=64, pairing="half", base=500_000.0)
PAIRS = replace(PLAIN, pairing="interleaved")
THREE, ERNIES = replace(PLAIN, axes=Sectioned((16, 8, 8))), Alternating((8, 4, 4))
YARN = Yarn(factor=4.0, original_max_positions=64)
ENDS = "its table of YaRN ends at position 256"
NO_LISTS = "it has no lists of divisors for interleaved pairs"
NO_SECTIONS = "its factory has no code for sections with this law"
LISTS = LongRope(
    short_factors=(1.0,) * 32,
    long_factors=(2.0,) * 32,
    original_max_positions=64,
    factor=1.0,
    short_attention_factor=1.0,
    long_attention_factor=1.0,
)


@pytest.mark.parametrize(
    ("target", "rope", "reason"),
    [
        ("vllm", replace(PAIRS, scaling=YARN), ENDS),
        ("vllm", replace(PAIRS, scaling=PerPair(factors=(3.0,) * 31 + (4.0,))), NO_LISTS),
        ("sglang", replace(PAIRS, scaling=PerPair(factors=(3.0,) * 31 + (4.0,))), NO_LISTS),
        ("vllm", replace(PAIRS, scaling=Linear(factor=0.5)), "table of a linear law ends at"),
        ("vllm", replace(THREE, scaling=Linear(factor=2.0)), NO_SECTIONS),
        ("sglang", replace(THREE, scaling=Linear(factor=2.0)), NO_SECTIONS),
        (
            "vllm",
            replace(PLAIN, scaling=YARN, axes=InterleavedSections((16, 8, 8))),
            "make YaRN's ramp of four times the length there",
        ),
        ("sglang", replace(PLAIN, scaling=LISTS), "one list by the positions of a whole batch"),
        ("vllm", replace(PLAIN, axes=Sectioned((16, 16))), "positions of 2 axes"),
        ("sglang", replace(PLAIN, rotary_dim=32, axes=ERNIES), "class turns whole heads"),
        ("vllm", replace(THREE, axes=Alternating((16, 8, 8)), scaling=YARN), "class reads no law"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_fault(target: str, rope: Rope, reason: str) -> None:
    """Of a server for 1024 tokens."""
    assert reason in str(refusal(rope, target, 1024))


@pytest.mark.parametrize(
    ("target", "rope", "keys"),
    [
        # halves have lists, which do not end
        ("vllm", replace(PLAIN, scaling=YARN), {"rope_type": "longrope"}),
        ("vllm", replace(PLAIN, scaling=Linear(factor=0.5)), {"rope_type": "longrope"}),
        ("sglang", replace(PLAIN, scaling=YARN), {"rope_type": "yarn", "mscale": 1.0}),
        # factors that two scales cannot give, as a factor of 1 has no logarithm
        (
            "sglang",
            replace(PLAIN, scaling=replace(YARN, factor=1.0, attention_factor=1.5)),
            {"rope_type": "yarn", "attn_factor": 1.5},
        ),
        # pairs that stand still are divided by a number that float32 has
        (
            "vllm",
            replace(PLAIN, scaling=Proportional(fraction=0.5, factor=2.0)),
            {"rope_type": "longrope", "short_factor": [2.0] * 16 + [1e30] * 16},
        ),
    ],
)
def test_other_words_are_taken_where_a_fault_is_of_the_first(
    target: str, rope: Rope, keys: dict[str, Any]
) -> None:
    """By the same reader."""
    (part,) = translate(rope, target, context=1024).parts
    assert keys.items() <= part.settings["override"]["rope_parameters"].items()
