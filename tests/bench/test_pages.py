"""What the benchmark says of its numbers: targets and pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from .bench_files import BENCH, COPY, MULTIPLY, TINY, page, result

targets = BENCH.targets


def rows_of(device: str, *measured: Any) -> dict[str, tuple[str, ...]]:
    """Limit, range and verdict of the targets, by what they say."""
    return {one.what: tuple(one.row(measured).values()) for one in targets.TARGETS[device]}


on_a_cpu, on_a_gpu = partial(rows_of, "cpu"), partial(rows_of, "cuda")


def test_a_target_that_is_missed_is_named() -> None:
    """With the case and the number; one that is held says so, one without numbers too."""
    rows = on_a_cpu(
        result("prefill 64", {"phasor, in place, half": 0.9, "phasor, in place, interleaved": 1.3,
                              "in-place multiply": 1.0},
               seq=64, dtype="bfloat16"),
        result("prefill 512", {"phasor, in place, half": 0.7}, seq=512, dtype="bfloat16"),
    )  # fmt: skip
    assert rows["prefill of 64 tokens, bfloat16, in place / multiply"] == (
        "≤ 1", "0.90 to 1.30",
        "**short** in 1 of 2: prefill 64, bfloat16, in place, interleaved: 1.30",
    )  # fmt: skip
    assert rows["prefill of 512 tokens, bfloat16, in place / copy"][1:] == ("0.70", "held")
    assert rows["MLA, in place / strided copy"][1:] == ("", "not measured")
    assert len(rows) == 17


def test_the_systems_allocator_has_a_target_of_its_own() -> None:
    """New outputs in float32, against onnxruntime in the same pairing."""
    times = {"phasor, new output, half": 1.1, "onnxruntime, half": 1.0, "x, half": 0.1}
    rows = on_a_cpu(result("prefill 4096", times, asks="malloc"))
    assert rows["new output, float32, malloc as it comes / onnxruntime"] == (
        "≤ 1", "1.10", "**short** in 1 of 1: malloc, prefill 4096, float32, new output, half: 1.10",
    )  # fmt: skip
    assert rows["new output / each contender, every case"][2] == "not measured"


def test_targets_against_others_compare_one_pairing() -> None:
    """The fastest of the other pairing is no rival."""
    found = result("prefill 64", {"phasor, new output, half": 2.0, "x, half": 1.0,
                                  "y, interleaved": 0.1})  # fmt: skip
    assert on_a_cpu(found)["new output / each contender, every case"][1:] == (
        "2.00", "**short** in 1 of 1: prefill 64, float32, x, half: 2.00"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("of_case", "key", "bytes_moved"),
    [
        ({}, "copy_", 2 * 5 * 4 * 8 * 4),
        ({}, "phasor, in place, half", 2 * 5 * 4 * 8 * 4),
        ({"dtype": "bfloat16"}, "phasor, new output, half", 2 * 5 * 4 * 8 * 2),
        ({"rotary_dim": 4}, "phasor, in place, half", 2 * 5 * 4 * 4 * 4),
        ({"rotary_dim": 4}, "in-place multiply", 2 * 5 * 4 * 4 * 4),
        ({"rotary_dim": 4}, "phasor, new output, half", 2 * 5 * 4 * 8 * 4),
        ({"backward": True}, "phasor, new output, half", 4 * 5 * 4 * 8 * 4),
        ({"batch": 3}, "copy_", 2 * 3 * 5 * 4 * 8 * 4),
    ],
)
def test_bytes_are_counted_as_they_have_to_be_moved(
    of_case: dict[str, Any], key: str, bytes_moved: int
) -> None:
    """Read once and written once: five tokens of four heads of eight."""
    assert targets.moved(replace(TINY, **{"batch": 1} | of_case), key) == bytes_moved


def test_bandwidth_targets_compare_with_a_copy_of_the_same_bytes() -> None:
    """A quarter of the head in 0.27 of the time is 93 % of the bandwidth: not enough in place."""
    found = result("GPT-J, prefill 4096",
                   {"phasor, in place, half": 0.27, "phasor, new output, half": 1.08},
                   head_dim=16, rotary_dim=4)  # fmt: skip
    rows = on_a_gpu(found)
    in_place = rows["prefill and training, in place / a copy of its bytes (95 % of the bandwidth)"]
    assert in_place[1:] == (
        "1.08", "**short** in 1 of 1: GPT-J, prefill 4096, float32, in place, half: 1.08"
    )  # fmt: skip
    assert rows["prefill and training, new output / a copy of its bytes (92 %)"][2] == "held"


def test_rivals_do_the_same_work_in_the_same_pairing() -> None:
    """In place against in place; in training all are."""
    found = [
        result("a, prefill 5", {
            "phasor, in place, half": 2.0, "phasor, new output, half": 3.0, "phasor, x, half": 0.1,
            "Liger, in place, half": 1.0, "transformers, half": 4.0, "x, interleaved": 0.1,
        }),
        result("a, training 5", {"phasor, new output, half": 3.0, "Liger, in place, half": 2.0},
               backward=True),
    ]  # fmt: skip
    rows = on_a_gpu(*found)
    assert rows["prefill and training, in place / each contender in place"][1:] == (
        "2.00", "**short** in 1 of 1: a, prefill 5, float32, Liger, in place, half: 2.00"
    )  # fmt: skip
    name = "prefill and training, new output / each contender with new outputs"
    assert rows[name][1] == "0.75 to 1.50"


def test_decode_is_judged_by_its_replays() -> None:
    """Against the empty kernel, one token a sequence."""
    found = result("a, decode 5", {"phasor, in place, half": 0.6, "empty kernel": 0.5}, seq=1)
    found.seconds["phasor, in place, half"] = [50.0] * 5  # a slow host does not count
    assert on_a_gpu(found)["decode as a graph, in place / an empty kernel"][1:] == (
        "1.20", "**short** in 1 of 1: a, decode 5, float32, in place, half: 1.20"
    )  # fmt: skip


def test_the_other_promises_have_their_rows() -> None:
    """Launch, constants and exactness."""
    host = result("decode 1", {"phasor, in place, half": 13e-6}, asks="host")
    errors = {"phasor, in place, half": targets.FAR_BOUND / 2, "x, half": 1.0}
    rows = on_a_gpu(
        host,
        *(replace(result("near", {}, asks="errors", dtype=dtype),
                  errors={key: n * error for key, error in errors.items()})
          for dtype, n in (("float32", 1), ("bfloat16", 99))),
    )  # fmt: skip
    assert rows["one call of the host, query and key, µs"][1] == "13.00"
    assert rows["constants of phasor, bytes a pair"][1:] == ("24.00", "held")
    assert rows["error far out / its bound, float32"][1:] == ("0.50", "held")
    assert len(rows) == 8


def test_the_page_says_what_was_measured() -> None:
    """Ratios, the fastest in bold, the wrong with their error, the unable with their reason."""
    one = result("prefill 5", {"phasor, in place, half": 0.5, "x, half": 2.0})
    one = replace(one, case=replace(one.case, group="Prefill"), replays={})
    one.refused.append("y, half")
    one.errors["y, half"] = 0.25
    one.left_out["z, half"] = "it cannot"
    far = replace(one, case=replace(one.case, name="far", asks="errors"), errors={"x, half": 8e-3})
    malloc = replace(one, case=replace(one.case, asks="malloc"))
    text = page([one, far, malloc], whole=False)
    for line in (
        "Measured today at commit abc, on M, Python 3; torch 2.",
        "### Prefill, float32",
        "| phasor, in place, half | **0.50 ±0%** |",
        "| x, half | 2.00 ±0% |",
        "| y, half | *wrong:* 2e-01 |",
        "| `copy_`, µs | 1e+06 |",
        "* z, half: it cannot (3 of 3 cases)",
        "### New outputs from the system's allocator",
        "### Exactness far out",
        "| x, half | 8.0e-03 |",
        "This was a run of some of the cases",
    ):
        assert line in text


def test_the_page_of_a_gpu_has_bandwidths_and_graphs() -> None:
    """GB a second beside each ratio, a second table of replays, and the host's microseconds."""
    one = result("A, prefill 5", {"phasor, in place, half": 0.5})
    text = page([one, replace(one, case=replace(one.case, asks="host"))], device="cuda")
    for line in ("### A, float32", "|  | prefill 5 |", "Calls:", "Graphs:",
                 "| phasor, in place, half | **0.50 ±0%, 0** |", "### The host's part",
                 "| phasor, in place, half | 500000.0 |"):  # fmt: skip
        assert line in text


def test_the_parts_of_a_small_call_are_shares_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """What no part takes is left for Python's own calls; every part is called."""
    took = {"call": 10.0, COPY: 5.0, MULTIPLY: 20.0, "extension": 4.0, "one thread": 5.0,
            "no tokens": 1.0}  # fmt: skip

    def interleave(calls: Mapping[str, Callable[[], object]], **_: Any) -> dict[str, list[float]]:
        for call in calls.values():
            call()
        return BENCH.timing.Times({name: [took.get(name, 0.5)] * 5 for name in calls})

    monkeypatch.setattr(BENCH.rotation, "interleave", interleave)
    threads = torch.get_num_threads()
    shares = BENCH.rotation.shares(BENCH.rotation.time_parts(TINY, 1.0))
    assert torch.get_num_threads() == threads
    assert [*shares.values()] == [
        *("2.00", "0.50", "30%", "40%", "10%", "5%", "5%", "5%", "5%", "40%")
    ]


def test_columns_of_both_dtypes_say_which_is_which() -> None:
    """The table of the system's allocator has one case in bfloat16 and in float32."""
    both = [result("prefill 5", {"x, half": 2.0}, dtype=t) for t in ("float32", "bfloat16")]
    both = [replace(one, case=replace(one.case, group="Prefill")) for one in both]
    titles = [[*BENCH.rotation.grid(group, "cpu")["x, half"]] for group in (both, both[:1])]
    assert titles == [["prefill 5, float32", "prefill 5, bfloat16"], ["prefill 5"]]
