"""The GPU's benchmark where there is no GPU: its cases, its gate, its bytes, its turns, its page.

A device is played by the CPU with a clock of its own. No test looks at a time.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
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
from phasor.bench import COPY, EPSILON, MULTIPLY, Case, Contender, Measured

ROOT = Path(__file__).parent.parent
MODULES = (
    *("cases", "contenders", "facts", "foreign", "program", "report", "targets"),
    *("gpu_cases", "gpu_device", "gpu_measure", "gpu_foreign", "gpu_contenders", "gpu_facts"),
    *("gpu_targets", "gpu_report", "gpu"),
)
TINY = Case(name="tiny, prefill 5", dtype="float32", seq=5, q_heads=3, k_heads=1, head_dim=8)


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The files of ``bench/``, imported as ``gpu.py`` does and forgotten again."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    yield {name: __import__(name) for name in MODULES}
    for name in MODULES:
        sys.modules.pop(name, None)


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


def normed_by_hand(weights_times: float = 1.0) -> Contender:
    """A norm and the half pairing from plain cosines, in float64."""

    def build(case: Case, positions: Tensor) -> Any:
        width = case.head_dim
        inv_freq = case.base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        angles = positions.double()[..., None, None] * inv_freq
        cos, sin = angles.cos(), angles.sin()

        def turned(x: Tensor, weight: Tensor) -> Tensor:
            wide = x.double()
            size = (wide.square().mean(-1, keepdim=True) + EPSILON).sqrt()
            a, b = (wide / size * weight * weights_times).chunk(2, dim=-1)
            return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)

        return lambda q, k, q_weight, k_weight: (turned(q, q_weight), turned(k, k_weight))

    return Contender(name="by hand", pairing="half", build=build, norm=True)


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


def test_phasor_passes_the_gate_in_every_case(modules: dict[str, Any]) -> None:
    """On few tokens of each, whatever the model and its work."""
    of_gpu = modules["gpu_contenders"]
    for case in modules["gpu_cases"].CASES:
        small = replace(modules["gpu_cases"].small(case), q_heads=2, k_heads=1)
        ours = [c for c in of_gpu.everyone(small) if c.name.startswith("phasor")]
        there = [c for c in ours if "compiled" not in c.name]
        found, calls = bench.admitted(small, there)
        assert found.refused == []
        assert set(found.left_out.values()) <= {"a gradient needs a new output"}
        assert set(calls) == {COPY, MULTIPLY, *found.errors}


def test_contenders_have_their_own_names(modules: dict[str, Any]) -> None:
    """And those that are not installed say so instead of failing."""
    cases = [modules["gpu_cases"].small(case) for case in modules["gpu_cases"].CASES]
    for case in cases:
        keys = [one.key for one in modules["gpu_contenders"].everyone(case)]
        assert len(set(keys)) == len(keys)

    def absent(case: Case, positions: Tensor) -> Any:
        raise ImportError("No module named 'somewhere'", name="somewhere")

    one = modules["gpu_contenders"]._other("somebody", "half", absent)
    assert bench.admitted(TINY, [one])[0].left_out == {
        "somebody, half": "not installed (somewhere)"
    }


def test_a_foreign_interface_that_changed_is_left_out_with_what_it_raised(
    modules: dict[str, Any],
) -> None:
    """Also where it raises only when it is called; phasor's own failures are not forgiven."""

    def build(case: Case, positions: Tensor) -> Any:
        def rotation(q: Tensor, k: Tensor) -> Any:
            raise TypeError("no such argument\nand a long story")

        return rotation

    other = modules["gpu_contenders"]._other("somebody", "half", build)
    assert bench.admitted(TINY, [other])[0].left_out == {
        "somebody, half": "TypeError: no such argument"
    }
    own = Contender(name="phasor, broken", pairing="half", build=build)
    with pytest.raises(TypeError, match="no such argument"):
        bench.admitted(TINY, [own])


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_gate_lets_a_right_norm_through_and_no_other(dtype: Any, backward: bool) -> None:
    """Weights that are a twentieth too large are refused, and so is none of the norm."""
    case = replace(TINY, dtype=dtype, norm=True, backward=backward, head_dim=16, seq=40)
    right = bench.admitted(case, [normed_by_hand()])[0]
    assert right.refused == []
    assert right.errors["by hand, half"] < (2e-2 if dtype == "bfloat16" else 1e-5)
    assert bench.admitted(case, [normed_by_hand(1.05)])[0].refused == ["by hand, half"]
    apart = replace(bench.ours()[1], norm=True)

    def alone(case: Case, positions: Tensor) -> Any:
        rotation = bench.ours()[1].build(case, positions)
        return lambda q, k, *_: rotation(q, k)

    found = bench.admitted(replace(case, backward=False), [replace(apart, build=alone)])[0]
    assert found.refused == [apart.key]


def test_the_gate_checks_the_gradient_of_a_norm() -> None:
    """A right forward pass whose gradient forgets the mean is wrong."""

    class Forgets(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x / (x.square().mean(-1, keepdim=True) + EPSILON).sqrt()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return grad / (x.square().mean(-1, keepdim=True) + EPSILON).sqrt()

    def build(case: Case, positions: Tensor) -> Any:
        rotation = bench.ours()[1].build(case, positions)
        return lambda q, k, q_weight, k_weight: rotation(
            Forgets.apply(q) * q_weight, Forgets.apply(k) * k_weight
        )

    case = replace(TINY, norm=True, backward=True)
    one = Contender(name="forgets", pairing="half", build=build, norm=True)
    assert bench.admitted(replace(case, backward=False), [one])[0].refused == []
    assert bench.admitted(case, [one])[0].refused == ["forgets, half"]


def test_the_gate_forgives_float32_angles_that_stand_far_out() -> None:
    """At position 2**17 a right float32 angle is off by 2**-6, and that much more is allowed."""
    near, far = replace(TINY, first=0), replace(TINY, first=2**17 - 5)
    one = bench.ours()[1]
    assert bench.tolerance(near, one) == bench.TOLERANCE["float32"]
    grown = bench.tolerance(far, one) - bench.TOLERANCE["float32"]
    assert grown == pytest.approx((2**17 - 1 - 2**15) * 2**-23)


def test_who_writes_its_arguments_spoils_them_for_nobody() -> None:
    """A contender that trains in place works on copies, of the gradients too."""

    class InPlace(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, turn: Callable[[Tensor, bool], Tensor]) -> Tensor:
            ctx.turn = turn
            x.data.copy_(turn(x, False))
            return x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            grad.copy_(ctx.turn(grad, True))
            return grad, None

    def build(case: Case, positions: Tensor) -> Any:
        def turn(x: Tensor, inverse: bool) -> Tensor:
            from phasor.torch import rotate

            return rotate(x.detach(), positions, case.rope("half"), inverse=inverse)

        return lambda q, k: (InPlace.apply(q, turn), InPlace.apply(k, turn))

    case = replace(TINY, backward=True)
    writer = Contender(
        name="writer", pairing="half", build=build, in_place=True, trains_in_place=True
    )
    found, calls = bench.admitted(case, [writer, bench.ours()[1]])
    assert found.refused == []
    calls["writer, half"]()
    again, _ = bench.admitted(case, [writer, bench.ours()[1]])
    assert again.errors == found.errors


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
        ({"norm": True}, "phasor, fused norm, half", 2 * 5 * 4 * 8 * 4),
        ({"norm": True, "backward": True}, "phasor, fused norm, half", 5 * 5 * 4 * 8 * 4),
        ({"norm": True, "backward": True}, "phasor, norm then rotate, half", 5 * 5 * 4 * 8 * 4),
        ({"norm": True, "backward": True}, "transformers Qwen3, half", 5 * 5 * 4 * 8 * 4),
        ({"norm": True, "backward": True}, "phasor, new output, half", 4 * 5 * 4 * 8 * 4),
        ({"rows": (24, 20)}, "phasor, in place, half", 2 * 5 * 4 * 8 * 4),
        ({"batch": 3}, "copy_", 2 * 3 * 5 * 4 * 8 * 4),
    ],
)
def test_bytes_are_counted_as_they_have_to_be_moved(
    modules: dict[str, Any], of_case: dict[str, Any], key: str, bytes_moved: int
) -> None:
    """Read once and written once: five tokens of four heads of eight."""
    assert modules["gpu_measure"].moved(replace(TINY, **of_case), key) == bytes_moved


def test_bandwidth_is_bytes_over_the_median_time(modules: dict[str, Any]) -> None:
    """Half of the bytes in half of the time is the copy's bandwidth."""
    key = "phasor, in place, half"
    m = Measured(
        case=replace(TINY, rotary_dim=4), seconds={COPY: [2.0, 2.0, 2.0], key: [1.0, 1.0, 9.0]}
    )
    assert modules["gpu_measure"].speed(m, key) == 2 * 5 * 4 * 4 * 4
    assert modules["gpu_measure"].speed(m, COPY) == 2 * 5 * 4 * 8 * 4 / 2
    assert modules["gpu_measure"].excess(m, key) == 1.0


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


def result(name: str, ratios: dict[str, float], **of_case: Any) -> Measured:
    """A result whose copy took a second each round, by calls; twice that by replays."""
    case = replace(TINY, name=name, **of_case)
    times = {key: [ratio] * 5 for key, ratio in ratios.items()}
    seconds = {COPY: [1.0] * 5} | times
    return Measured(case=case, seconds=seconds, replays={k: [2 * t for t in ts] for k, ts in
                                                         seconds.items()})  # fmt: skip


def verdicts(modules: dict[str, Any], measured: Sequence[Measured], **others: Any) -> Any:
    """Rows of the targets, by what they say."""
    given = {"launches": [], "far": {}, "tables": []} | others
    rows = modules["gpu_targets"].rows(measured, **given)
    return {row[0]: row[1:] for row in rows}


def test_bandwidth_targets_compare_with_a_copy_of_the_same_bytes(modules: dict[str, Any]) -> None:
    """A quarter of the head in 0.27 of the time is 93 % of the bandwidth: not enough in place."""
    found = result(
        "GPT-J, prefill 4096",
        {"phasor, in place, half": 0.27, "phasor, new output, half": 1.08},
        head_dim=16, rotary_dim=4,
    )  # fmt: skip
    rows = verdicts(modules, [found])
    in_place = rows["prefill and training, in place / a copy of its bytes (95 % of the bandwidth)"]
    assert in_place[1:] == (
        "1.08", "**short** in 1 of 1: GPT-J, prefill 4096, float32, in place, half: 1.08"
    )  # fmt: skip
    assert rows["prefill and training, new output / a copy of its bytes (92 %)"][2] == "held"


def test_rivals_do_the_same_work_in_the_same_pairing(modules: dict[str, Any]) -> None:
    """In place against in place; a norm is no rival; in training all are."""
    found = [
        result("a, prefill 5", {
            "phasor, in place, half": 2.0, "phasor, new output, half": 3.0, "phasor, x, half": 0.1,
            "Liger, in place, half": 1.0, "transformers, half": 4.0, "x, interleaved": 0.1,
            "transformers Qwen3, half": 0.1,
        }),
        result("a, training 5", {"phasor, new output, half": 3.0, "Liger, in place, half": 2.0},
               backward=True),
    ]  # fmt: skip
    rows = verdicts(modules, found)
    assert rows["prefill and training, in place / the fastest contender"][1:] == (
        "2.00", "**short** in 1 of 1: a, prefill 5, float32, in place, half: 2.00"
    )  # fmt: skip
    assert rows["prefill and training, new output / the fastest contender"][1] == "0.75 to 1.50"


def test_decode_is_judged_by_its_replays(modules: dict[str, Any]) -> None:
    """Against the empty kernel, one token a sequence."""
    found = result("a, decode 5", {"phasor, in place, half": 0.6, "empty kernel": 0.5}, seq=1)
    found.seconds["phasor, in place, half"] = [50.0] * 5  # a slow host does not count
    rows = verdicts(modules, [found])
    label = "decode as a graph, in place / an empty kernel"
    assert rows[label][1:] == (
        "1.20", "**short** in 1 of 1: a, decode 5, float32, in place, half: 1.20"
    )  # fmt: skip


def test_the_other_promises_have_their_rows(modules: dict[str, Any]) -> None:
    """Norm, launch, tables and exactness."""
    fused, alone = "phasor, fused norm, half", "phasor, new output, half"
    bound = modules["gpu_targets"].FAR_BOUND
    rows = verdicts(
        modules,
        [
            result("a, prefill 5", {fused: 1.04, alone: 1.0}, norm=True),
            result("a, training 5", {fused: 1.30, alone: 1.0}, norm=True, backward=True),
        ],
        launches=[Measured(case=TINY, seconds={"phasor, in place, half": [13e-6] * 5})],
        far={"phasor, in place, half": {"1M, float32": bound / 2, "1M, bfloat16": 1.0}},
        tables=[{"recipe": "phasor", "length": 10**6, "bytes": 2**21},
                {"recipe": "other", "length": 10**6, "bytes": 2**30}],
    )  # fmt: skip
    assert rows["norm and rotation in one / rotation alone"][1:] == ("1.04", "held")
    training = "training, norm and rotation in one / rotation alone (five passes to four)"
    assert rows[training][1:] == ("1.30", "held")
    assert rows["one call of the host, query and key, µs"][1] == "13.00"
    assert rows["tables of phasor / 2 MB"][1:] == ("1.00", "held")
    assert rows["error far out / its bound, float32"][1:] == ("0.50", "held")


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
