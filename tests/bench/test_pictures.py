"""The pictures of the page of benchmarks show what was measured."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CASES = json.loads((ROOT / "bench/results/cpu.json").read_text("utf-8"))["cases"]
DRAWN = {
    "phasor, in place": "phasor, in place, half",
    "transformers": "transformers, half",
    "torchtune": "torchtune, interleaved",
}


@pytest.mark.parametrize("case", ["prefill 4096, bfloat16", "decode 32, bfloat16"])
def test_a_time_is_the_median_of_its_ratios_to_a_copy(case: str) -> None:
    """As its label has it; pictures are drawn anew by ``python -m docs.draw bench``."""
    picture = (ROOT / "docs/images/benchmarks-time.svg").read_text("utf-8")
    labels = re.findall(r"<text[^>]*>([^<]+)</text>", picture)
    seconds = CASES[case]["seconds"]
    for name, key in DRAWN.items():
        assert name in labels
        ratios = [a / b for a, b in zip(seconds[key], seconds["copy_"], strict=True)]
        assert any(float(one) == round(statistics.median(ratios), 2)
                   for one in labels if re.fullmatch(r"[\d.]+", one))  # fmt: skip
