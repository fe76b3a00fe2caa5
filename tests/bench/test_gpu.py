"""The GPU's benchmark where there is no GPU: its cases, its turns, its files, its page.

A device is played by the CPU with a clock of its own. No test looks at a time.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

from phasor import bench
from phasor.bench import COPY, MULTIPLY, Case, Contender

from .bench_files import files_of_bench
from .gpu_bench import MODULES, TINY, result

modules = files_of_bench(*MODULES)


class Player:
    """A device on the CPU, where every call takes a second and a replay takes one for each."""

    where = torch.device("cpu")

    def __init__(self, cache: int = 2**30) -> None:
        self.cache = cache
        self.now = 0.0
        self.captured: list[int] = []

    def timer(self, *, warm: bool) -> bench.Timer:
        del warm

        def timed(call: bench.Call, repeats: int) -> float:
            before = self.now
            for _ in range(repeats):
                call()
                self.now += 1.0
            return (self.now - before) / repeats

        return timed

    def host_timer(self) -> bench.Timer:
        return self.timer(warm=True)

    def capturer(self) -> Callable[[bench.Call, int], bench.Call]:
        return self.captures

    def captures(self, call: bench.Call, times: int) -> bench.Call:
        self.captured.append(times)
        return call

    def forget(self) -> None:
        pass


def test_without_a_gpu_the_command_says_what_it_needs(
    modules: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And leaves with 2, before anything is measured."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = CliRunner().invoke(modules["gpu"].main, [])
    assert done.exit_code == 2
    assert "needs a CUDA device" in done.stderr
    assert "make bench measures" in done.stderr


def test_every_model_does_every_work_in_both_dtypes(modules: dict[str, Any]) -> None:
    """As the data says: seven models, three prefills, a training step and three decodes."""
    cases = modules["gpu_cases"].CASES
    model_of, work_of = modules["gpu_cases"].model_of, modules["gpu_cases"].work_of
    assert len({(case.name, case.dtype) for case in cases}) == len(cases) == 7 * 7 * 2
    assert {model_of(case) for case in cases} == {
        *("Llama-3-8B", "Llama-3-70B", "Qwen3-30B", "GPT-J", "DeepSeek MLA", "Gemma-3"),
        "Qwen3-VL",
    }
    assert {(work_of(c), c.seq, c.batch) for c in cases} == {
        *((f"prefill {n}", n, 1) for n in (4096, 32768, 131072)),
        ("training 8192", 8192, 1),
        *((f"decode {n}", 1, n) for n in (1, 64, 512)),
    }
    shapes = {model_of(c): (c.q_heads, c.k_heads, c.head_dim, c.rotary_dim) for c in cases}
    assert shapes["Llama-3-70B"] == (64, 8, 128, None)
    assert shapes["DeepSeek MLA"] == (128, 1, 64, None)
    assert shapes["GPT-J"] == (16, 16, 256, 64)
    assert shapes["Gemma-3"][2] == 256
    assert set(modules["gpu_cases"].QUICK) < set(cases)


def test_packed_texts_begin_anew(modules: dict[str, Any]) -> None:
    """Positions count up within each text, and the texts fill the sequence."""
    case = next(c for c in modules["gpu_cases"].CASES if c.documents)
    places = case.positions().tolist()
    assert sum(case.documents) == case.seq == len(places)
    assert [i for i, p in enumerate(places) if p == 0][:3] == [0, 3001, 3001 + 1095]
    assert all(b in (0, a + 1) for a, b in pairwise(places))


def test_calls_and_replays_are_timed_and_told_apart(modules: dict[str, Any]) -> None:
    """What is warm is captured twenty times over and divided; what is cold is captured once."""
    for cache, times in ((2**30, 20), (1, 1)):
        player = Player(cache)
        found = modules["gpu_measure"].measure_on(player, TINY, bench.ours()[:2], seconds=0.0)
        assert set(player.captured) == {times}
        assert {t for ts in found.seconds.values() for t in ts} == {1.0}
        assert {t for ts in found.replays.values() for t in ts} == {1.0 / times}
        assert set(found.seconds) == set(found.replays)
        assert found.replayed().seconds == found.replays


def test_what_cannot_be_captured_is_named_and_still_timed(modules: dict[str, Any]) -> None:
    """Its calls are there, its replays are not, and the reason is."""

    class Refuses(Player):
        def captures(self, call: bench.Call, times: int) -> bench.Call:
            if len(self.captured) == 2:
                self.captured.append(0)
                raise RuntimeError("operation not permitted\nwhen stream is capturing")
            return super().captures(call, times)

    found = modules["gpu_measure"].measure_on(Refuses(), TINY, bench.ours()[:2], seconds=0.0)
    key = bench.ours()[0].key
    assert found.left_out == {f"{key}, as a graph": "operation not permitted"}
    assert key in found.seconds
    assert key not in found.replays


def test_references_stand_beside_the_contenders(modules: dict[str, Any]) -> None:
    """An empty kernel is timed like everybody and asked for with the case's positions."""
    asked: list[tuple[Case, Tensor]] = []

    def references(case: Case, positions: Tensor) -> dict[str, bench.Call]:
        asked.append((case, positions))
        return {"empty kernel": lambda: None}

    found = modules["gpu_measure"].measure_on(
        Player(), TINY, [], seconds=0.0, references=references
    )
    assert set(found.seconds) == set(found.replays) == {"empty kernel", COPY, MULTIPLY}
    assert asked[0][0] == TINY
    assert torch.equal(asked[0][1], TINY.positions())


def test_everything_is_measured_written_and_kept(
    modules: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two cases, with one of an earlier run beside them, and a page that shows all three."""
    gpu = modules["gpu"]

    def everyone(case: Case) -> list[Contender]:
        found = modules["gpu_contenders"].everyone(case)
        return [c for c in found if "compiled" not in c.name]

    monkeypatch.setattr(gpu, "everyone", everyone)
    monkeypatch.setattr(gpu, "LAUNCH", replace(TINY, seq=1))
    monkeypatch.setattr(gpu, "CASES", [])
    cases = [replace(TINY, name="A, prefill 5"), replace(TINY, name="A, decode 1", seq=1)]
    huge = replace(TINY, name="A, prefill 6", seq=6)

    def references(case: Case, positions: Tensor) -> dict[str, bench.Call]:
        if case == huge:
            raise torch.OutOfMemoryError("no")
        return {}

    before = result("B, prefill 5", {"phasor, in place, half": 0.5}, dtype="bfloat16").as_plain()
    found = gpu.measured(Player(), [*cases, huge], [before], seconds=0.0, references=references)
    about = {
        "date": "today", "commit": "abc", "versions": {"torch": "2"},
        "machine": {"device": "D", "memory": "8 GB", "cache": "1 MB", "cuda": "13", "driver": "5",
                    "python": "3"},
    }  # fmt: skip
    page = modules["gpu_report"].markdown(json.loads(json.dumps(about | found)))
    for line in (
        "Measured today at commit abc, on D (8 GB, 1 MB of L2 cache",
        "### A, float32",
        "### B, bfloat16",
        "|  | prefill 5 | decode 1 |",
        "| phasor, in place, half | **1.00 ±0%, 0** | **1.00 ±0%, 0** |",
        "| phasor, new output, half | 1.00 ±0%, 0 | 1.00 ±0%, 0 |",
        "### The host's part",
        "| phasor, norm and rotation | 1000000.0 |",
        "| phasor, rotation and cache write | 1000000.0 |",
        "| phasor | 2 MB | 2 MB |",
        "| flash-attention | 244 MB | 2441 MB |",
        "* Liger, in place, half: not installed",
        "Cases that the device has no memory for: A, prefill 6, float32.",
    ):
        assert line in page
    far = found["far"]["phasor, in place, half"]
    assert far["10M, float32"] < modules["gpu_targets"].FAR_BOUND
    # float32 angles, on the other hand, are off by half a radian there
    assert found["far"]["transformers, half"]["10M, float32"] > 0.1


def test_results_of_another_commit_are_not_kept(modules: dict[str, Any], tmp_path: Path) -> None:
    """Numbers of two versions never stand in one table."""
    about = {"machine": {"device": "D"}, "commit": "abc", "versions": {"torch": "2"}}
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps(about | {"cases": [1, 2]}), "utf-8")
    assert modules["gpu"]._kept(path, about) == [1, 2]
    assert modules["gpu"]._kept(path, about | {"commit": "abd"}) == []
    assert modules["gpu"]._kept(path, about | {"versions": {"torch": "3"}}) == []


def test_results_of_an_unknown_commit_are_not_kept(
    modules: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without history, or without git, nobody knows whether two versions are one."""
    monkeypatch.setenv("PATH", str(tmp_path))
    about = {"machine": {"device": "D"}, "commit": modules["program"].commit(), "versions": {}}
    assert about["commit"] == "unknown"
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps(about | {"cases": [1, 2]}), "utf-8")
    assert modules["gpu"]._kept(path, about) == []


def test_what_breaks_late_leaves_what_was_measured(
    modules: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The second case, and whatever cuts the third off; both files are there, with the reason."""
    gpu = modules["gpu"]

    class Breaks(Player):
        cases = 0

        def forget(self) -> None:
            self.cases += 1
            if self.cases == 2:
                raise RuntimeError("CUDA error: an illegal memory access\nwas encountered")
            if self.cases == 3:
                raise KeyboardInterrupt

    machine = dict.fromkeys(("device", "memory", "cache", "cuda", "driver", "python"), "x")
    about = {"machine": machine, "date": "today", "commit": "abc", "versions": {}}
    cases = [replace(TINY, name=f"A, prefill {n}", seq=n) for n in (5, 6, 7)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "gpu_empty", SimpleNamespace(empty_kernel=lambda c, p: {}))
    monkeypatch.setattr(gpu, "_about", lambda: about)
    monkeypatch.setattr(gpu, "Cuda", Breaks)
    monkeypatch.setattr(gpu, "CASES", cases)
    monkeypatch.setattr(gpu, "RESULTS", tmp_path)
    monkeypatch.setattr(gpu, "everyone", lambda case: bench.ours()[:1])
    assert CliRunner().invoke(gpu.main, ["--seconds", "0"]).exit_code == 1
    found = json.loads((tmp_path / "gpu-x.json").read_text("utf-8"))
    assert [plain["case"]["name"] for plain in found["cases"]] == ["A, prefill 5"]
    assert found["failed"] == {"A, prefill 6, float32": "CUDA error: an illegal memory access"}
    page = (tmp_path / "gpu-x.md").read_text("utf-8")
    assert "A, prefill 6, float32 failed: CUDA error: an illegal memory access" in page
    monkeypatch.setattr(gpu, "CASES", cases[:2])
    done = CliRunner().invoke(gpu.main, ["--seconds", "0"])
    assert done.exit_code == 1
    assert "Failed, as told there: A, prefill 6, float32" in done.stderr


def test_a_device_names_its_file(modules: dict[str, Any]) -> None:
    """In letters, digits and hyphens."""
    assert modules["gpu"]._file_name("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="it takes a GPU")
@pytest.mark.parametrize("warm", [False, True])
def test_a_gpu_times_calls_and_replays(modules: dict[str, Any], warm: bool) -> None:
    """A copy of 256 MB takes longer than one of 1 MB, and a replay does what it captured."""
    device = modules["gpu_device"].Cuda()
    timed = device.timer(warm=warm)
    small, large = (torch.zeros(n, device="cuda") for n in (2**18, 2**26))
    times = [timed(lambda x=x: x.copy_(x.clone()), 3) for x in (small, large)]
    assert 0 < times[0] < times[1]
    capture = device.capturer()
    before = float(small[0])
    capture(lambda: small.add_(1), 5)()
    torch.cuda.synchronize()
    assert float(small[0]) == before + 3 + 5  # three calls warm a capture up
