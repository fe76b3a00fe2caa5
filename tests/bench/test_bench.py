"""The benchmark's harness on tiny shapes: its turns, its numbers, its files.

No test looks at a time.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from phasor import bench
from phasor.bench import COPY, Case, Measured

from .bench_cases import SHAPES, TINY, spoilt


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
