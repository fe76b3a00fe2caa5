"""Contenders, turns, devices and whole runs of the benchmark."""

from __future__ import annotations

import ast
import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench.rehearse_gpu import commands
from torch import Tensor

from phasor.errors import DISTRIBUTION
from phasor.torch._operator import cpu
from phasor.torch._operator.triton import load_kernels

from .bench_files import BENCH, ROOT, SHAPES, TINY, admitted, contender, every_shape, result, spoilt

CASES = BENCH.cases.CASES
COPY, MULTIPLY = BENCH.measure.COPY, BENCH.measure.MULTIPLY
ours = BENCH.contenders.ours


# contenders


@every_shape
def test_phasor_passes_the_gate(case: Any) -> None:
    """In every form and pairing; and results survive JSON."""
    found = BENCH.measure.measure(case, [*ours(), spoilt(lambda x: x)][: 6 + case.backward],
                                  seconds=0.0)  # fmt: skip
    assert found.refused == []
    expected = {one.key for one in ours() if not (case.backward and one.in_place)}
    assert expected | {COPY, MULTIPLY} == set(found.seconds) - {"by hand, half"}
    plain = json.loads(json.dumps(asdict(found)))
    assert BENCH.measure.Measured.from_plain(plain) == found


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_phasor_passes_the_gate_on_few_tokens_of_every_case(device: str) -> None:
    """Whatever the model and its work; probes as well."""
    for case in CASES[device]:
        small = BENCH.cases.few(case)
        everyone = BENCH.contenders.everyone(small, device)
        there = [one for one in everyone if one.name.startswith("phasor")]
        there = [one for one in there if "compiled" not in one.name]
        found = admitted(small, *there)
        assert found.refused == []
        assert set(found.left_out.values()) <= {"a gradient needs a new output"}


def test_who_is_absent_or_has_changed_is_left_out_with_the_reason() -> None:
    """Also where it raises only when it is called; phasor's own failures are not forgiven."""

    def absent(case: Any, rope: Any, positions: Tensor) -> Any:
        raise ImportError("No module named 'somewhere'", name="somewhere")

    def changed(case: Any, rope: Any, positions: Tensor) -> Any:
        def rotation(q: Tensor, k: Tensor) -> Any:
            raise TypeError("no such argument\nand a long story")

        return rotation

    found = admitted(TINY, contender("absent", absent), contender("changed", changed))
    assert found.left_out == {
        "absent, half": "not installed (somewhere)",
        "changed, half": "TypeError: no such argument",
    }
    assert found.errors == {}
    with pytest.raises(TypeError, match="no such argument"):
        admitted(TINY, contender("phasor, broken", changed))


@pytest.mark.parametrize("case", [TINY, SHAPES["decode"]], ids=["prefill", "decode"])
@pytest.mark.slow
def test_the_other_packages_that_are_installed_rotate_alike(case: Any) -> None:
    """Through the interfaces they publish; nobody fails in a way that is not told."""
    everyone = [c for c in BENCH.contenders.everyone(case, "cpu") if "compiled" not in c.name]
    found = admitted(case, *everyone)
    assert found.refused == []
    assert "Meta, complex, interleaved" in found.errors
    assert not [reason for reason in found.left_out.values() if "Error" in reason]


# turns


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_everyone_has_one_turn_in_every_round(warm: bool, monkeypatch: Any) -> None:
    """In an order that changes from round to round, each warmed up right before if at all."""
    now = 0.0
    calls: list[str] = []

    def call(name: str, cost: float) -> Callable[[], None]:
        def run() -> None:
            nonlocal now
            now += cost
            calls.append(name)

        return run

    monkeypatch.setattr(BENCH.timing.time, "perf_counter", lambda: now)
    costs = {"a": 0.5, "b": 0.25, "c": 1.0}
    samples = BENCH.timing.interleave(
        {name: call(name, cost) for name, cost in costs.items()},
        seconds=0.0, warm=warm, rounds=(6, 6),
    )  # fmt: skip
    assert samples == {name: [cost] * 6 for name, cost in costs.items()}
    timed = calls[2 * len(costs) :]  # after one call to warm up and one to look at
    if warm:
        assert timed[::2] == timed[1::2]
        timed = timed[::2]
    rounds = [timed[i : i + 3] for i in range(0, len(timed), 3)]
    assert [sorted(order) for order in rounds] == [["a", "b", "c"]] * 6
    assert len({tuple(order) for order in rounds}) > 1


@pytest.mark.parametrize(
    ("cost", "seconds", "rounds", "calls"),
    [(1.0, 0.0, 5, 7), (1.0, 8.0, 8, 10), (1.0, 100.0, 20, 22), (1e-6, 0.0, 5, 500)],
)
def test_rounds_follow_the_time_and_short_calls_are_repeated(
    cost: float, seconds: float, rounds: int, calls: int, monkeypatch: Any
) -> None:
    """As many rounds as fit, within the bounds; a microsecond is timed a hundred times at once."""
    now, count = 0.0, 0

    def call() -> None:
        nonlocal now, count
        now += cost
        count += 1

    monkeypatch.setattr(BENCH.timing.time, "perf_counter", lambda: now)
    samples = BENCH.timing.interleave({"one": call}, seconds=seconds, rounds=(5, 20))
    assert samples["one"] == pytest.approx([cost] * rounds)
    assert calls <= count <= 1.1 * calls


def test_a_spread_is_quartiles_and_prints_itself_short() -> None:
    """Of nine numbers the third, the fifth and the seventh; half their distance in per cent."""
    assert BENCH.timing.spread([9, 1, 8, 2, 7, 3, 6, 4, 5]) == (3, 5, 7)
    assert str(BENCH.timing.Spread(0.9, 1.0, 1.2)) == "1.00 ±15%"
    assert str(BENCH.timing.Spread(40.0, 40.4, 40.8)) == "40 ±1%"


def test_a_ratio_is_taken_round_by_round() -> None:
    """A machine that slows down for everybody does not move it."""
    copies = [1.0, 1.0, 10.0, 100.0, 1.0]
    times = [3 * t for t in copies]
    found = BENCH.timing.Times({"x": times, COPY: copies})
    assert found.ratio("x", COPY) == (3, 3, 3)
    times[0] = 30.0  # now the medians are 30 and 1, but four rounds of five still say 3
    assert found.ratio("x", COPY).median == 3


# devices and runs


class Player(BENCH.device.Cpu):
    """A GPU on the CPU, where every call takes a second and a replay takes one for each."""

    name, kind = "gpu-player", "cuda"

    def __init__(self, warm_bytes: int = 2**30) -> None:
        self.warm_bytes = warm_bytes
        self.captured: list[int] = []

    def time(self, call: Any, repeats: int, *, warm: bool) -> float:
        return [call() for _ in range(repeats)] and 1.0

    def capturer(self) -> Any:
        return self.captures

    def captures(self, call: Any, times: int) -> Any:
        self.captured.append(times)
        return call

    def references(self, case: Any, positions: Tensor) -> Mapping[str, Any]:
        return {"empty kernel": lambda: None} if case.seq == 1 else {}


def test_calls_and_replays_are_timed_and_told_apart() -> None:
    """What is warm is captured twenty times over and divided; what is cold is captured once."""
    for warm_bytes, times in ((2**30, 20), (1, 1)):
        player = Player(warm_bytes)
        found = BENCH.measure.measure(SHAPES["decode"], ours()[:2], seconds=0.0, device=player)
        assert set(player.captured) == {times}
        assert {t for ts in found.seconds.values() for t in ts} == {1.0}
        assert {t for ts in found.replays.values() for t in ts} == {1.0 / times}
        assert set(found.seconds) == set(found.replays) > {"empty kernel", COPY, MULTIPLY}
        assert found.replayed().seconds == found.replays


def test_what_cannot_be_captured_is_named_and_still_timed() -> None:
    """Its calls are there, its replays are not, and the reason is."""

    class Refuses(Player):
        def captures(self, call: Any, times: int) -> Any:
            if len(self.captured) == 2:
                self.captured.append(0)
                raise RuntimeError("operation not permitted\nwhen stream is capturing")
            return super().captures(call, times)

    found = BENCH.measure.measure(TINY, ours()[:2], seconds=0.0, device=Refuses())
    key = ours()[0].key
    assert found.left_out == {f"{key}, as a graph": "RuntimeError: operation not permitted"}
    assert key in found.seconds
    assert key not in found.replays


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """The command line, which writes to another folder; what it wrote of a page."""
    monkeypatch.setattr(BENCH.run, "RESULTS", tmp_path)
    monkeypatch.setattr(BENCH.run, "Cuda", Player)
    monkeypatch.setattr(BENCH.run, "commit", lambda: "abc")
    modules = {"rotation": BENCH.rotation}
    monkeypatch.setattr(BENCH.run, "import_module", lambda name: modules[name])

    def run(*arguments: str) -> tuple[Any, str]:
        BENCH.run.main(arguments)
        (path,) = tmp_path.glob("*.json")
        return json.loads(path.read_text("utf-8")), path.with_suffix(".md").read_text("utf-8")

    run.modules = modules  # type: ignore[attr-defined]
    return run


def test_what_breaks_leaves_what_was_measured(
    command: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    """One case breaks, one is too large, one is cut off; the file has the first and the reasons."""
    breaks = {6: RuntimeError("CUDA error: an illegal memory access\nwas encountered"),
              7: torch.OutOfMemoryError("no"), 8: KeyboardInterrupt()}  # fmt: skip

    def time_case(case: Any, contenders: Any, **options: Any) -> Any:
        if case.seq in breaks:
            raise breaks[case.seq]
        return result(case.name, {"phasor, in place, half": 0.5}, seq=case.seq)

    monkeypatch.setattr(BENCH.rotation, "measure", time_case)
    monkeypatch.setattr(BENCH.rotation, "everyone", lambda case, device: ours()[:1])
    cases = [replace(TINY, name=f"{name}, prefill {n}", seq=n)
             for name, n in (("B", 5), ("A", 5), ("A", 6), ("A", 7), ("A", 8))]  # fmt: skip
    monkeypatch.setitem(BENCH.cases.CASES, "cuda", cases)
    command("--device", "cuda", "--cases", "B*")
    with pytest.raises(KeyboardInterrupt):
        command("--device", "cuda", "--cases", "A*")
    path = tmp_path / "gpu-player.json"
    before = path.read_text("utf-8")
    found = json.loads(before)
    assert [*found["cases"]] == ["B, prefill 5, float32", "A, prefill 5, float32"]
    page = path.with_suffix(".md").read_text("utf-8")
    assert "A, prefill 6, float32 failed: RuntimeError: CUDA error: an illegal" in page
    assert "A, prefill 7, float32 failed: OutOfMemoryError: no" in page
    assert "This was a run of some of the cases" in page
    assert BENCH.run.kept_cases(path, found) == found["cases"]
    for other in ({"commit": "abd"}, {"versions": {"torch": "3"}}):
        assert BENCH.run.kept_cases(path, found | other) == {}
    # a few cases are printed, and what was written before stays
    monkeypatch.setattr(BENCH.rotation, "QUICK", ("B*", "A, prefill 6*"))
    with pytest.raises(SystemExit):
        command("--device", "cuda", "--quick")
    assert "| phasor, in place, half | **0.50 ±0%" in capsys.readouterr().out
    assert path.read_text("utf-8") == before
    with pytest.raises(SystemExit, match="no case matches 'nothing'"):
        command("--cases", "nothing")


@pytest.mark.slow
def test_a_run_on_a_gpu_has_all_its_tables(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls and graphs, the host's part, tables, exactness, and who is absent."""

    def everyone(case: Any, device: str) -> list[Any]:
        found = BENCH.contenders.everyone(case, device)
        return [one for one in found if "compiled" not in one.name]

    monkeypatch.setattr(BENCH.rotation, "everyone", everyone)
    # as where it is not installed, also if another test has imported a part of it
    for name in {"liger_kernel", *(name for name in sys.modules if "liger_kernel" in name)}:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(BENCH.measure, "host_timer", lambda call, repeats: 1.0)
    far = [case for case in CASES["cuda"] if case.label == "errors, near 1e+07, float32"]
    monkeypatch.setitem(BENCH.cases.CASES, "cuda", [
        replace(TINY, name="A, prefill 5", group="A"),
        replace(TINY, name="A, decode 1", group="A", seq=1),
        replace(TINY, seq=1, asks="host"), *far,
    ])  # fmt: skip
    found, page = command("--device", "cuda")
    assert found["whole"]
    for line in (
        "|  | prefill 5 | decode 1 |",
        "| phasor, new output, half | 1.00 ±0%, 0 | 1.00 ±0%, 0 |",
        "| empty kernel | – | 1.00 ±0% |",
        "Graphs:",
        "| phasor, in place, half | 1000000.0 |",
        "* Liger, in place, half: not installed",
        "| constants of phasor, bytes a pair | ≤ 64 | 24.00 | held |",
    ):
        assert line in page
    errors = found["cases"]["errors, near 1e+07, float32"]["errors"]
    assert errors["phasor, in place, half"] < BENCH.targets.FAR_BOUND


@pytest.mark.skipif(not cpu.paths(), reason="what is measured is the kernel")
def test_a_run_on_this_machine_writes_its_page(command: Any, monkeypatch: Any) -> None:
    """One case with phasor's forms alone, under the name of the distribution that was measured."""
    monkeypatch.setattr(BENCH.rotation, "everyone", lambda case, device: ours())
    monkeypatch.setitem(BENCH.cases.CASES, "cpu", [TINY])
    page = command("--cases", "tiny*")[1]
    assert f"{DISTRIBUTION} {version(DISTRIBUTION)}," in page
    assert "| phasor, plain torch, half |" in page.partition("### Targets")[2]


def test_a_kernel_without_work_has_phasors_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """One program for every few heads of a token."""
    triton = pytest.importorskip("triton")
    load_kernels()  # before their decorator is replaced
    kernel = type("Kernel", (), {"__getitem__": lambda self, grid: grid})()
    monkeypatch.setattr(triton, "jit", lambda function: kernel)
    case = replace(TINY, seq=1, batch=64, q_heads=32, k_heads=8, head_dim=128)
    programs = BENCH.device.empty_launch(case, case.positions())[0]
    assert programs % 64 == 0 < programs <= 64 * 40


def test_far_out_errors_are_what_is_measured() -> None:
    """Phasor's are within its bound; a float32 angle's are large."""
    case = next(one for one in CASES["cpu"] if one.label == "errors, near 1e+06, float32")
    meta = next(c for c in BENCH.contenders.everyone(case, "cpu") if "Meta" in c.name)
    errors = admitted(case, ours()[1], meta).errors
    assert errors["phasor, new output, half"] < BENCH.targets.FAR_BOUND
    assert errors["Meta, complex, interleaved"] > 1e-2


def test_contenders_can_be_left_out_by_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """All whose names have it, in every case; nobody else."""
    asked: list[str] = []

    def time_case(case: Any, contenders: Any, **options: Any) -> Any:
        asked.extend(one.name for one in contenders)
        return result(case.name, {})

    monkeypatch.setattr(BENCH.rotation, "measure", time_case)
    everyone = [one.name for one in BENCH.contenders.everyone(TINY, "cuda")]
    monkeypatch.setitem(BENCH.cases.CASES, "cuda", [TINY])
    for step in BENCH.rotation.steps(Player(), 0.0, ["compiled", "Liger"]).values():
        step()
    assert asked == [n for n in everyone if "compiled" not in n and "Liger" not in n]
    assert len(asked) < len(everyone)


def test_where_no_history_is_results_name_the_source(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """So that those of one source stay beside one another, and those of another do not."""
    monkeypatch.setattr(BENCH.run, "ROOT", tmp_path)
    monkeypatch.setenv("PATH", "")  # no git
    source = tmp_path / "bench" / "run.py"
    source.parent.mkdir()
    found: list[str] = []
    for text in ("one", "one", "two"):
        source.write_text(text, "utf-8")
        found.append(BENCH.run.commit())
    assert found[0] == found[1] != found[2]
    assert all(name.startswith("unknown (source ") for name in found)


def test_the_half_hour_with_a_gpu_measures_every_case_once() -> None:
    """By the commands of its page, which are what is rehearsed."""
    page = (ROOT / "bench" / "gpu_session.md").read_text("utf-8")
    patterns = [
        words[words.index("--cases") + 1]
        for words in map(shlex.split, commands(page, "sh"))
        if "bench/run.py" in words
    ]
    labels = [case.label for case in CASES["cuda"]]
    measured = [name for one in patterns for name in BENCH.run.selected(labels, [one])]
    assert sorted(measured) == sorted(labels)


def test_without_a_gpu_the_command_says_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And leaves with 2, before anything is measured."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as done:
        BENCH.run.main(["--device", "cuda"])
    assert done.value.code == 2
    assert "needs a CUDA device" in capsys.readouterr().err


def test_every_page_is_written_in_one_way(command: Any, tmp_path: Path) -> None:
    """Its files have its name, and its module is imported when it is asked for."""
    page = SimpleNamespace(
        steps=lambda device, seconds: {"one": lambda: 1.0, "two": lambda: 2.0},
        sections=lambda found, device: [BENCH.report.Section(name, "Note") for name in found],
    )
    for name in BENCH.run.PAGES[1:]:
        module = ROOT / "bench" / f"{name.replace('-', '_')}.py"
        assert module.exists()
        command.modules[module.stem] = page
        BENCH.run.main([name])
        assert json.loads((tmp_path / f"{name}.json").read_text("utf-8"))["whole"]
        text = (tmp_path / f"{name}.md").read_text("utf-8")
        assert text.startswith("<!-- --8<-- [start:measured] -->\nMeasured 20")
        marks = "<!-- --8<-- [start:{0}] -->\n### {0}\n\nNote\n<!-- --8<-- [end:{0}] -->\n"
        assert text.endswith(f"\n\n{marks.format('one')}\n{marks.format('two')}")
        with pytest.raises(SystemExit):
            BENCH.run.main([name, "--device", "cuda"])


def test_a_function_runs_alone_in_a_process_whose_malloc_gives_memory_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its settings are gone there, the others and this process's are not."""
    monkeypatch.setenv("MALLOC_MMAP_MAX_", "0")
    assert BENCH.device.alone(os.getenv, "MALLOC_MMAP_MAX_") is None
    assert BENCH.device.alone(os.getenv, "PATH") == os.environ["PATH"]
    assert os.environ["MALLOC_MMAP_MAX_"] == "0"
    with pytest.raises(TypeError):
        BENCH.device.alone(os.getenv)


def test_the_harness_needs_phasor_and_torch_alone() -> None:
    """A machine with a GPU may have no more; packages that are compared are imported when asked."""
    allowed = {"phasor", "torch", "numpy", *sys.stdlib_module_names}
    own = {path.stem for path in (ROOT / "bench").glob("*.py")}
    seen = {"run", "rotation"}
    for name in (todo := ["run", "rotation"]):
        for node in ast.parse((ROOT / "bench" / f"{name}.py").read_text("utf-8")).body:
            found = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                found = [node.module]
            for module in (str(one).partition(".")[0] for one in found):
                assert module in allowed | own, (name, module)
                if module in own - seen:
                    seen.add(module)
                    todo.append(module)
    assert {"device", "contenders", "measure", "report"} <= seen


@pytest.mark.skipif(not torch.cuda.is_available(), reason="it takes a GPU")
@pytest.mark.parametrize("warm", [False, True])
def test_a_gpu_times_calls_and_replays(warm: bool) -> None:
    """A copy of 256 MB takes longer than one of 1 MB, and a replay does what it captured."""
    device = BENCH.device.Cuda()
    timed = partial(device.time, warm=warm)
    small, large = (torch.zeros(n, device="cuda") for n in (2**18, 2**26))
    times = [timed(lambda x=x: x.copy_(x.clone()), 3) for x in (small, large)]
    assert 0 < times[0] < times[1]
    capture = device.capturer()
    before = float(small[0])
    capture(lambda: small.add_(1), 5)()
    torch.cuda.synchronize()
    assert float(small[0]) == before + 3 + 5  # three calls warm a capture up
    case = replace(TINY, seq=1, batch=64, q_heads=32, k_heads=8, head_dim=128)
    assert "empty kernel" in device.references(case, case.positions(device.where))


def test_an_odd_call_of_a_short_length_does_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow calls of linear attention are, short lengths have 15 rounds, long ones a few."""
    timed = BENCH.linear_attention
    monkeypatch.setattr(timed, "interleave", lambda calls, rounds, **_: rounds)
    found = {seq: timed.times("Forward", seq, ["linear"], 0.0) for seq in (256, 1024, 2048)}
    assert found == {256: (15, 15), 1024: (15, 15), 2048: (3, 15)}
