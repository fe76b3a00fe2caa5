"""Lengths and factors of a file that do not fit together: both are said, as a warning too."""

from __future__ import annotations

from typing import Any

import pytest

from phasor import PhasorWarning, load

FILE = {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 512, "num_attention_heads": 4}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LISTS = {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
ORIGINAL = "original_max_position_embeddings"
#: By name: the context, the block, and numbers that are said.
DOUBTFUL: dict[str, tuple[int, dict[str, Any], tuple[str, ...]]] = {
    "YaRN's factor and the lengths": (
        40960, {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 32768}, ("4", "32768", "40960")
    ),
    "LongRoPE's factor and the lengths": (
        131072,
        {"rope_type": "longrope", "factor": 4.0, ORIGINAL: 4096, **LISTS},
        ("4", "4096", "131072"),
    ),
    "Llama 3 before more than there is": (
        8192, {**LLAMA3, ORIGINAL: 131072}, ("131072", "8192")
    ),
    "YaRN without a length": (
        131072, {"rope_type": "yarn", "factor": 4.0}, ("131072", "524288")
    ),
    "dynamic NTK without a length": (
        131072, {"type": "dynamic", "factor": 4.0}, ("131072", "524288")
    ),
    "two factors": (
        131072,
        {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 32768, "scaling_factor": 8.0},
        ("4.0", "8.0"),
    ),
    "two factors of linear": (
        131072, {"type": "linear", "factor": 4.0, "scale": 2.0}, ("4.0", "2.0")
    ),
}  # fmt: skip
CLEAR: dict[str, tuple[int, dict[str, Any]]] = {
    "YaRN": (131072, {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 32768}),
    "Llama 3": (131072, {**LLAMA3, ORIGINAL: 8192}),
    "LongRoPE by its lengths": (131072, {"rope_type": "longrope", ORIGINAL: 4096, **LISTS}),
    "LongRoPE with its own attention factor": (
        131072,
        {"rope_type": "longrope", "factor": 4.0, ORIGINAL: 4096, "attention_factor": 1.2, **LISTS},
    ),
    "dynamic NTK": (131072, {"type": "dynamic", "factor": 4.0, ORIGINAL: 131072}),
    "the same factor twice": (131072, {"type": "linear", "factor": 4.0, "scaling_factor": 4.0}),
}


def file_with(context: int, block: dict[str, Any]) -> dict[str, Any]:
    """A Llama of this context with the block."""
    return FILE | {"max_position_embeddings": context, "rope_theta": 5e5, "rope_scaling": block}


@pytest.mark.parametrize("name", DOUBTFUL)
def test_numbers_that_contradict_each_other_are_named(name: str) -> None:
    """Once, with both of them, in a note and a warning."""
    context, block, numbers = DOUBTFUL[name]
    with pytest.warns(PhasorWarning) as warned:
        ropes = load(file_with(context, block))
    (note,) = {str(one.message) for one in warned}
    assert note in ropes.notes
    assert all(number in note for number in numbers), note


@pytest.mark.parametrize("name", CLEAR)
def test_numbers_that_fit_are_read_without_a_word(name: str) -> None:
    """Warnings are errors here."""
    notes = load(file_with(*CLEAR[name])).notes
    assert not any("counts" in note or "context" in note for note in notes)
