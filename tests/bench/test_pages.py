"""The files of the CPU's benchmark: its cases, contenders and targets, and the page it writes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from phasor import bench
from phasor.bench import COPY, MULTIPLY, TOLERANCE, Case, Measured

from .bench_cases import TINY, measured_alone
from .bench_files import files_of_bench

modules = files_of_bench("cases", "contenders", "foreign", "linear_attention", "report", "targets")


def test_every_case_of_the_benchmark_is_well_formed(modules: dict[str, Any]) -> None:
    """Names tell them apart, every one has its Rope in both pairings, and all stand below 2**15."""
    cases = modules["cases"].CASES
    names = [(case.name, case.dtype) for case in cases]
    assert len(set(names)) == len(names)
    assert {dtype for _, dtype in names} == {"bfloat16", "float32"}
    for case in cases:
        small = replace(case, batch=min(case.batch, 2), seq=min(case.seq, 3))
        verbs = [one for one in bench.ours() if one.name == "phasor, new output"]
        assert len(bench.measure(small, verbs, seconds=0.0).seconds) == 4
        assert 0 <= int(case.positions().min()) <= int(case.positions().max()) < 2**15
    assert {case.seq for case in cases if case.name.startswith("prefill")} == {64, 512, 4096, 32768}
    assert {case.batch for case in cases if case.seq == 1} == {1, 8, 32, 128}
    assert set(modules["cases"].QUICK) < set(cases)


def test_contenders_have_their_own_names(modules: dict[str, Any]) -> None:
    """Those that are not installed are left out and say so."""
    everyone = modules["contenders"].everyone()
    keys = [one.key for one in everyone]
    assert len(set(keys)) == len(keys)
    meta = next(one for one in everyone if one.name.startswith("Meta"))
    assert measured_alone(TINY, meta).refused == []

    def absent(case: Case, positions: Tensor) -> Any:
        raise ImportError("No module named 'somewhere'", name="somewhere")

    one = modules["contenders"].adapted("somebody", "half", absent)
    assert measured_alone(TINY, one).left_out == {"somebody, half": "not installed (somewhere)"}


def result(name: str, ratios: dict[str, float], **of_case: Any) -> Measured:
    """A result whose copy took a second each round."""
    case = replace(TINY, name=name, **of_case)
    times = {key: [ratio] * 5 for key, ratio in ratios.items()}
    return Measured(case=case, seconds={COPY: [1.0] * 5, MULTIPLY: [0.6] * 5} | times)


def test_a_target_that_is_missed_is_named(modules: dict[str, Any]) -> None:
    """With the case and the number; one that is held says so, one without numbers too."""
    found = [
        result("prefill 64", {"phasor, in place, half": 0.9, "phasor, in place, interleaved": 1.3},
               seq=64, dtype="bfloat16"),
        result("prefill 512", {"phasor, in place, half": 0.7}, seq=512, dtype="bfloat16"),
    ]  # fmt: skip
    rows = {row[0]: row[1:] for row in modules["targets"].target_rows(found)}
    assert rows["prefill of 64 tokens, bfloat16, in place / copy"] == (
        "≤ 1", "0.90 to 1.30",
        "**short** in 1 of 2: prefill 64, bfloat16, in place, interleaved: 1.30",
    )  # fmt: skip
    assert rows["prefill of 512 tokens, bfloat16, in place / copy"][1:] == ("0.70", "held")
    assert rows["MLA, in place / strided copy"][1:] == ("", "not measured")


def test_targets_against_others_compare_one_pairing(modules: dict[str, Any]) -> None:
    """The fastest of the other pairing is no rival."""
    found = result(
        "prefill 64",
        {"phasor, new output, half": 2.0, "x, half": 1.0, "y, interleaved": 0.1},
    )
    rows = {row[0]: row[1:] for row in modules["targets"].target_rows([found])}
    assert rows["new output / each contender, every case"][1:] == (
        "2.00", "**short** in 1 of 1: prefill 64, float32, x, half: 2.00"
    )  # fmt: skip


def test_the_page_says_what_was_measured(modules: dict[str, Any]) -> None:
    """Ratios, the fastest in bold, the wrong with their error, the unable with their reason."""
    one = result("prefill 5", {"phasor, in place, half": 0.5, "x, half": 2.0})
    one.refused.append("y, half")
    one.errors["y, half"] = 0.25
    one.left_out["z, half"] = "it cannot"
    text = modules["report"].markdown(
        {
            "cases": [json.loads(json.dumps(one.as_plain()))],
            "system_memory": [],
            "peaks": {"x, half": 3 * 2**20},
            "inputs": 2**20,
            "tables": [{"recipe": "r", "length": 9, "bytes": 2**21, "seconds": [], "median": 0.5}],
            "far": {"x, half": {"position 1e+05": 8e-3}},
            "date": "today",
            "commit": "abc",
            "threads": 2,
            "quick": True,
            "versions": {"torch": "2"},
            "machine": {
                "processor": "P", "processors": 2, "path": "avx2", "system": "S",
                "python": "3", "allocator": "A.", "load": 0.1,
            },
        }
    )  # fmt: skip
    for line in (
        "| phasor, in place, half | **0.50 ±0%** |",
        "| x, half | 2.00 ±0% |",
        "| y, half | *wrong:* 2e-01 |",
        "* z, half: it cannot (1 of 1 cases)",
        "| x, half | 3.00 | 3 MB |",
        "| r | 9 | 500 ms | 2 MB |",
        "| x, half | 8e-03 |",
        "This was a quick run",
    ):
        assert line in text


def test_columns_of_both_dtypes_say_which_is_which(modules: dict[str, Any]) -> None:
    """The table of the system's allocator has one case in bfloat16 and in float32."""
    both = [result("prefill 5", {"x, half": 2.0}, dtype=dtype) for dtype in TOLERANCE]
    titles = [modules["report"]._ratios(group).splitlines()[0] for group in (both, both[:1])]
    assert titles == ["|  | prefill 5, float32 | prefill 5, bfloat16 |", "|  | prefill 5 |"]


def test_an_odd_call_of_a_short_length_does_not_show(
    modules: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However slow calls are, short lengths have 15; of long ones a few will do."""
    timed = modules["linear_attention"]
    calls: dict[int, list[float]] = {seq: [] for seq in (256, 1024, 2048)}

    def called(attention: Any, inputs: tuple[Tensor, ...], *, training: bool) -> None:
        (seq,) = inputs[0].shape
        odd = len(calls[seq]) in range(1, 8)
        calls[seq].append(100.0 if odd else 1.0)

    monkeypatch.setattr(timed, "LENGTHS", tuple(calls))
    monkeypatch.setattr(timed, "ATTENTIONS", {"linear": None})
    monkeypatch.setattr(timed, "drawn", lambda seq, *, training: (torch.empty(seq),))
    monkeypatch.setattr(timed, "call", called)
    monkeypatch.setattr(timed.time, "perf_counter", lambda: sum(map(sum, calls.values())))
    medians = timed.seconds(training=False)["linear"]
    assert {seq: len(taken) - 1 for seq, taken in calls.items()} == {256: 15, 1024: 15, 2048: 3}
    assert medians[256] == medians[1024] == 1.0
