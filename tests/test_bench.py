"""The benchmark's harness on tiny shapes: its gate, its turns, its numbers, its files.

No test looks at a time.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from phasor import bench
from phasor.bench import COPY, MULTIPLY, TOLERANCE, Case, Contender, Measured, UnableError

ROOT = Path(__file__).parent.parent
TINY = Case(name="tiny", dtype="float32", seq=5, batch=2, q_heads=3, k_heads=1, head_dim=8)
SHAPES = {
    "prefill": TINY,
    "bfloat16": replace(TINY, dtype="bfloat16"),
    "heads first": replace(TINY, heads_first=True),
    "partial": replace(TINY, rotary_dim=4),
    "several axes": replace(TINY, sections=(2, 1, 1)),
    "rows cut": replace(TINY, rows=(24, 20)),
    "decode": replace(TINY, seq=1, batch=6),
    "backward": replace(TINY, backward=True),
    "far": replace(TINY, first=10**6),
}
MODULES = ("cases", "contenders", "foreign", "linear_attention", "report", "targets")


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The files of ``bench/``, imported as ``run.py`` does and forgotten again."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    yield {name: __import__(name) for name in MODULES}
    for name in MODULES:
        sys.modules.pop(name, None)


def by_hand(case: Case, positions: Tensor) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The half pairing of one axis from plain cosines, in float64."""
    width = case.head_dim
    inv_freq = case.base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = positions.double()[..., None, None] * inv_freq
    cos, sin = angles.cos(), angles.sin()

    def turned(x: Tensor) -> Tensor:
        a, b = x.double().chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)

    return lambda q, k: (turned(q), turned(k))


def spoilt(spoil: Callable[[Tensor], Tensor]) -> Contender:
    """`by_hand` with something wrong in its query."""

    def build(case: Case, positions: Tensor) -> Any:
        right = by_hand(case, positions)

        def rotation(q: Tensor, k: Tensor) -> Sequence[Tensor]:
            new_q, new_k = right(q, k)
            return spoil(new_q), new_k

        return rotation

    return Contender(name="by hand", pairing="half", build=build)


def off_at(token: int, by: float) -> Callable[[Tensor], Tensor]:
    """Turn one pair of one token a little further."""

    def spoil(x: Tensor) -> Tensor:
        y = x.clone()
        a, b = x[0, token, 0, 0], x[0, token, 0, 4]
        y[0, token, 0, 0], y[0, token, 0, 4] = a - by * b, b + by * a
        return y

    return spoil


def measured_alone(case: Case, contender: Contender) -> Measured:
    """What comes of a case with one contender."""
    return bench.measure(case, [contender], seconds=0.0)


def test_the_gate_lets_a_right_contender_through() -> None:
    """A rotation by hand is timed, and its error is that of float32."""
    found = measured_alone(TINY, spoilt(lambda x: x))
    assert found.refused == []
    assert 0 < found.errors["by hand, half"] < 1e-6
    assert "by hand, half" in found.seconds


@pytest.mark.parametrize(
    "spoil",
    [
        lambda x: x.flip(-1),
        lambda x: 1.01 * x,
        lambda x: x.float() * torch.nan,
        lambda x: x.bfloat16(),
        lambda x: x[:, :-1],
        off_at(0, 0.01),
        off_at(4, 0.01),
    ],
    ids=["flipped", "longer", "nan", "other dtype", "other shape", "first token", "last token"],
)
def test_the_gate_refuses_a_wrong_contender(spoil: Callable[[Tensor], Tensor]) -> None:
    """It is named with its error and never timed."""
    found = measured_alone(TINY, spoilt(spoil))
    assert found.refused == ["by hand, half"]
    assert found.errors["by hand, half"] > TOLERANCE["float32"]
    assert set(found.seconds) == {COPY, MULTIPLY}


def test_the_gate_refuses_the_other_pairing() -> None:
    """The commonest mistake of all."""
    wrong = replace(spoilt(lambda x: x), pairing="interleaved")
    assert measured_alone(TINY, wrong).refused == ["by hand, interleaved"]


def test_the_gate_measures_a_small_error_as_it_is() -> None:
    """A pair turned by a thousandth is off by a thousandth of its length."""
    found = measured_alone(TINY, spoilt(off_at(2, 1e-3)))
    assert found.errors["by hand, half"] == pytest.approx(1e-3, rel=1e-3)


def test_the_gate_sees_what_lies_outside_the_rotated_slice() -> None:
    """A coordinate that must not change did."""
    case = SHAPES["partial"]
    x = case.tensors()[0]
    y, places = x.clone(), torch.zeros(5, dtype=torch.int64)
    assert bench.error(x, y, places, case.rope("half"), inverse=False) == 0
    y[0, 0, 0, 7] += 1
    assert bench.error(x, y, places, case.rope("half"), inverse=False) == float("inf")


def test_the_gate_checks_gradients() -> None:
    """A right forward pass with a wrong backward pass is wrong."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return 2 * grad

    case = SHAPES["backward"]
    assert measured_alone(case, spoilt(lambda x: x)).refused == []
    assert measured_alone(case, spoilt(Twice.apply)).refused == ["by hand, half"]


def test_a_contender_that_is_unable_is_left_out_with_its_reason() -> None:
    """And with nothing else."""

    def build(case: Case, positions: Tensor) -> Any:
        raise UnableError("no such shape")

    found = measured_alone(TINY, Contender(name="none", pairing="half", build=build))
    assert found.left_out == {"none, half": "no such shape"}
    assert set(found.seconds) == {COPY, MULTIPLY}
    assert found.errors == {}


@pytest.mark.parametrize("case", SHAPES.values(), ids=SHAPES)
def test_phasor_passes_the_gate(case: Case) -> None:
    """In every form and pairing, on every kind of case."""
    found = bench.measure(case, bench.ours(), seconds=0.0)
    assert found.refused == []
    expected = {one.key for one in bench.ours() if not (case.backward and one.in_place)}
    assert expected | {COPY, MULTIPLY} == set(found.seconds)


def test_backward_keeps_the_positions_alone() -> None:
    """Five positions of eight bytes; plain arithmetic keeps more."""
    case = SHAPES["backward"]
    saved = bench.measure(case, [*bench.ours(), spoilt(lambda x: x)], seconds=0.0).saved
    assert saved["phasor, new output, half"] == 5 * 8
    assert saved["by hand, half"] > 5 * 8


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_everyone_has_one_turn_in_every_round(warm: bool) -> None:
    """In an order that changes from round to round, each warmed up right before if at all."""
    now = 0.0
    calls: list[str] = []

    def call(name: str, cost: float) -> Callable[[], None]:
        def run() -> None:
            nonlocal now
            now += cost
            calls.append(name)

        return run

    costs = {"a": 0.5, "b": 0.25, "c": 1.0}
    samples = bench.interleave(
        {name: call(name, cost) for name, cost in costs.items()},
        seconds=0.0, warm=warm, rounds=(6, 6), timed=bench.by_clock(lambda: now),
    )  # fmt: skip
    assert samples == {name: [cost] * 6 for name, cost in costs.items()}
    timed = calls[2 * len(costs) :]  # after one call to warm up and one to look at
    if warm:
        assert timed[::2] == timed[1::2]
        timed = timed[::2]
    rounds = [timed[i : i + 3] for i in range(0, len(timed), 3)]
    assert [sorted(order) for order in rounds] == [["a", "b", "c"]] * 6
    assert len({tuple(order) for order in rounds}) > 1


def test_a_short_call_is_repeated_and_divided() -> None:
    """A microsecond is timed a hundred times at once."""
    now, count = 0.0, 0

    def call() -> None:
        nonlocal now, count
        now += 1e-6
        count += 1

    samples = bench.interleave(
        {"short": call}, seconds=0.0, warm=False, rounds=(2, 2), timed=bench.by_clock(lambda: now)
    )
    assert samples["short"] == pytest.approx([1e-6, 1e-6])
    assert 150 < count < 250


@pytest.mark.parametrize(("seconds", "rounds"), [(0.0, 5), (8.0, 8), (100.0, 20)])
def test_rounds_follow_the_time_there_is(seconds: float, rounds: int) -> None:
    """As many as fit, within the bounds."""
    now = 0.0

    def call() -> None:
        nonlocal now
        now += 1.0

    samples = bench.interleave(
        {"one": call},
        seconds=seconds,
        warm=False,
        rounds=(5, 20),
        timed=bench.by_clock(lambda: now),
    )
    assert len(samples["one"]) == rounds


def test_spread_is_the_quartiles() -> None:
    """Of nine numbers the third, the fifth and the seventh."""
    assert bench.spread([9, 1, 8, 2, 7, 3, 6, 4, 5]) == (3, 5, 7)


def test_a_ratio_is_taken_round_by_round() -> None:
    """A machine that slows down for everybody does not move it."""
    copies = [1.0, 1.0, 10.0, 100.0, 1.0]
    times = [3 * t for t in copies]
    found = Measured(case=TINY, seconds={"x": times, COPY: copies})
    assert found.ratio("x") == (3, 3, 3)
    times[0] = 30.0  # now the medians are 30 and 1, but four rounds of five still say 3
    assert statistics.median(times) / statistics.median(copies) == 30
    assert found.ratio("x").median == 3


def test_a_spread_prints_itself_short() -> None:
    """Median, and half the distance of the quartiles in per cent."""
    assert str(bench.Spread(0.9, 1.0, 1.2)) == "1.00 ±15%"
    assert str(bench.Spread(40.0, 40.4, 40.8)) == "40 ±1%"


@pytest.mark.parametrize("case", SHAPES.values(), ids=SHAPES)
def test_results_survive_json(case: Case) -> None:
    """What is read back is equal, tuples included; times keep their nanoseconds."""
    found = bench.measure(case, bench.ours()[:2], seconds=0.0)
    again = Measured.from_plain(json.loads(json.dumps(found.as_plain())))
    assert again.case == case
    assert again.as_plain() == found.as_plain()
    assert again.seconds[COPY] == pytest.approx(found.seconds[COPY], abs=1e-9)


@pytest.mark.parametrize("case", SHAPES.values(), ids=SHAPES)
def test_a_case_makes_what_it_says(case: Case) -> None:
    """Shapes, dtypes, memory, positions, and the same numbers again."""
    q, k = case.tensors()
    assert q.shape == (case.batch, case.seq, case.q_heads, case.head_dim)
    assert k.shape == (case.batch, case.seq, case.k_heads, case.head_dim)
    assert str(q.dtype) == f"torch.{case.dtype}"
    if case.seq > 1:
        assert q.transpose(1, 2).is_contiguous() == case.heads_first
    assert torch.equal(q, case.tensors()[0])
    assert not torch.equal(q, case.tensors(seed=1)[0])
    if case.rows:
        assert (q.stride(2), k.stride(1)) == case.rows
    phasor_takes_them = bench.measure(case, bench.ours()[1:2], seconds=0.0)
    assert phasor_takes_them.left_out == {}


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


def test_phasor_bench_prints_a_table_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a tiny case."""
    picture = tmp_path / "bench.png"
    bench.run(picture, cases=[TINY], seconds=0.0)
    printed = capsys.readouterr().out
    assert "tiny" in printed
    assert "interleaved" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_phasor_bench_fails_where_phasor_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """It prints no ratios for a wrong rotation."""
    monkeypatch.setattr(bench, "ours", lambda: [spoilt(lambda x: -x)])
    with pytest.raises(RuntimeError, match="by hand, half in tiny"):
        bench.run(cases=[TINY], seconds=0.0)
