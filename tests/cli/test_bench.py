"""`phasor bench`: a table of what passed the gate, and no ratios for a wrong rotation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from phasor import VerificationError
from phasor.cli import benchmark

SMALL = benchmark.Case("tiny", torch.float32, 5, 2)


def test_phasor_bench_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    """On a tiny case, with every form in both pairings."""
    benchmark.run([SMALL], seconds=0.0)
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("tiny", "half", "interleaved", "float32"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "spoil", [torch.neg, lambda x: 1.05 * x, lambda x: x * torch.nan, lambda x: x.double()]
)
def test_phasor_bench_fails_where_phasor_is_wrong(
    monkeypatch: pytest.MonkeyPatch, dtype: Any, spoil: Any
) -> None:
    """It prints no ratios for a wrong rotation."""
    right = benchmark.ROTATIONS["new output"]

    def wrong(*arguments: Any) -> Any:
        q, k = right(*arguments)
        return q, spoil(k)

    monkeypatch.setitem(benchmark.ROTATIONS, "new output", wrong)
    with pytest.raises(VerificationError, match="new output, half in tiny"):
        benchmark.run([replace(SMALL, dtype=dtype)], seconds=0.0)
