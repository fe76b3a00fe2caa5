"""Layers that share their positions: who is timed, and what the page says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from .bench_files import BENCH, TINY

layers = BENCH.layers
ONE_ROW = replace(TINY, batch=1)


@pytest.mark.parametrize("backward", [False, True])
def test_all_who_are_right_are_timed(monkeypatch: pytest.MonkeyPatch, backward: bool) -> None:
    """Each turns the last layer as float64 does, its gradients too."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    found = layers.time_pass(replace(ONE_ROW, backward=backward), 0.0)
    assert {layers.SHARED, layers.EACH, layers.PLAIN, "Meta, complex"} <= set(found["seconds"])
    assert set(found["seconds"]) == set(found["errors"])


def test_who_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the page says so."""
    usual = layers.ours

    def ours(case: Any, positions: Any) -> dict[str, Any]:
        wrong = {"off by one": usual(case, positions + 1)[layers.SHARED]}
        return usual(case, positions) | wrong

    monkeypatch.setattr(layers, "ours", ours)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    found = layers.time_pass(ONE_ROW, 0.0)
    assert "off by one" not in found["seconds"]
    (section,) = layers.sections({"tiny": found}, "cpu")
    assert section.rows["tiny"]["off by one"] == "*wrong*"


@pytest.mark.parametrize(("shared", "held"), [(1.0, "1, and"), (1.1, "0, and")])
def test_the_page_counts_what_is_held(shared: float, held: str) -> None:
    """Of one case."""
    times = {layers.SHARED: shared, layers.EACH: 1.0, layers.PLAIN: 3.0, layers.TRANSFORMERS: 2.0}
    found = {"seconds": {name: [time] * 5 for name, time in times.items()}, "errors": {}}
    (section,) = layers.sections({"tiny": found}, "cpu")
    assert f"`rotate_qk` in each layer in {held}" in " ".join(section.note.split())
    assert section.rows["tiny"]["without the kernel / transformers"].startswith("1.50")
