"""A pattern of layers is one value: what is printed in a notation is parsed as the same."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from phasor.files.configs.layer_pattern import LayerPattern, flag_pattern, number_pattern
from phasor.files.configs.source import JsonObject

from ..refusals import refused

#: Every pattern of up to seven layers.
PATTERNS = [
    LayerPattern(marks) for count in range(1, 8) for marks in product((False, True), repeat=count)
]


def test_every_pattern_is_printed_and_parsed_in_each_notation() -> None:
    """By numbers, indices, an interval where there is one, and a cycle as long as the model."""
    for pattern in PATTERNS:
        count = len(pattern.marked)
        assert flag_pattern(JsonObject({}), "key", pattern.numbers, count) == pattern
        assert LayerPattern.from_indices(pattern.indices, count) == pattern
        assert LayerPattern.repeat(pattern.marked, count) == pattern
        if pattern.interval is not None:
            assert LayerPattern.every(pattern.interval, count) == pattern


def test_an_interval_is_found_where_one_marks_the_same_layers() -> None:
    """And nowhere else."""
    for pattern in PATTERNS:
        count = len(pattern.marked)
        fits = [
            number
            for number in range(count + 1)
            if pattern.marked
            == tuple(bool(number) and i % number == 0 for i in range(1, count + 1))
        ]
        assert ([] if pattern.interval is None else [pattern.interval]) == fits


@pytest.mark.parametrize(
    "value", [[0, 0, 0, 1] * 2, "([0]*3+[1])*2", "[0,0,0,1,0,0,0,1]", 4, "4", "0 0 0 1 0 0 0 1"]
)
def test_a_number_a_list_and_the_text_of_one_say_the_same(value: Any) -> None:
    """As programs take them on a command line."""
    pattern = number_pattern(JsonObject({"key": value}), "key", 8)
    assert pattern == LayerPattern.every(4, 8)


@pytest.mark.parametrize("value", [[0, 1], [0, 0, 0, 2] * 2, "[0]*2"])
def test_a_list_for_other_layers_is_refused_by_its_key(value: Any) -> None:
    """Or with another number than 0 and 1."""
    with refused("value", key="key"):
        number_pattern(JsonObject({"key": value}), "key", 8)
