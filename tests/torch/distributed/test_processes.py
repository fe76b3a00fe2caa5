"""Several processes under torchrun compute, and train to, what one does."""

from __future__ import annotations

import json
import math
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import phasor

HERE = Path(__file__).parent
EXAMPLE = HERE.parents[2] / "examples" / "train_parallel.py"
# a stopped machine is not a failure
LIMIT = 400


class Launched:
    """torchrun, and what came of it."""

    def __init__(self, processes: int, script: Path, *arguments: str) -> None:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        torchrun += ["--nproc-per-node", str(processes), str(HERE / "run_and_leave.py")]
        source = str(Path(phasor.__file__).parents[1])
        with subprocess.Popen(
            [*torchrun, str(script), *arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": source},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as running:
            try:
                self.printed, said = running.communicate(timeout=LIMIT)
            except BaseException:
                running.terminate()  # which torchrun passes on, unlike being killed
                running.communicate(timeout=LIMIT)
                raise
        assert running.returncode == 0, said


def losses(printed: str) -> list[float]:
    """What the example printed, step by step."""
    return [float(found) for found in re.findall(r"loss ([\d.]+)", printed)]


#: Twenty steps, each off by what sums of a thousand float64 gather (see `rounding`), of losses that
#: begin with that of a guess; and what is printed is rounded to nine digits.
TWENTY_STEPS = 20 * 32 * 2**-53 * math.log(256)
PRINTED = 1e-9


def furthest(some: Sequence[float], others: Sequence[float]) -> float:
    """Largest difference between two runs."""
    assert len(some) == len(others) > 0
    return max(abs(a - b) for a, b in zip(some, others, strict=True))


def assert_measured(measured: dict[str, Any]) -> None:
    """What the worker found on several processes, in float64."""
    operator = measured["operator"]
    assert operator["placements"] == ["(Shard(dim=2),)", "(Replicate(),)", "(Shard(dim=2),)"]
    assert operator["collectives"] == {}
    assert operator["error"] <= 1e-15
    for name in ("zigzag", "contiguous", "window", "full"):
        # sums of some hundred products of numbers of size one
        assert measured[name]["error"] <= 1e-13, name
        once = {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 1}
        assert measured[name]["collectives"] == once
    assert measured["ring"]["same tokens"]
    assert measured["ring"]["error"] <= 1e-13


def test_two_processes_rotate_and_attend_as_one(tmp_path: Path) -> None:
    """Over real collectives: values, gradients, and how many there were."""
    Launched(2, HERE / "distributed_worker.py", str(tmp_path / "measured.json"))
    assert_measured(json.loads((tmp_path / "measured.json").read_text()))


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_dtensors_through_the_operator_train_alike_without_further_collectives(
    tmp_path: Path, processes: int
) -> None:
    """Sharded in heads and in tokens: the losses of one process, the traffic of a model without."""
    Launched(processes, HERE / "distributed_worker.py", str(tmp_path / "measured.json"), "train")
    measured = json.loads((tmp_path / "measured.json").read_text())
    assert_measured(measured)
    for name in ("heads", "tokens"):
        assert measured[name]["error"] <= TWENTY_STEPS
        assert measured[name]["collectives"] == measured[name]["without"] != {}


def test_the_example_trains_on_one_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loss falls from that of a guess."""
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--steps", "8"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = losses(capsys.readouterr().out)
    assert len(printed) == 8
    assert printed[0] == pytest.approx(np.log(256), abs=0.5)
    assert printed[-1] < printed[0] - 0.5


def alone(*options: str) -> list[float]:
    """The example's losses without torchrun."""
    source = str(Path(phasor.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, str(HERE / "run_and_leave.py"), str(EXAMPLE), *options],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": source},
        capture_output=True,
        text=True,
        check=True,
        timeout=LIMIT,
    )
    return losses(done.stdout)


@pytest.fixture(scope="module")
def one_process() -> list[float]:
    """Twenty losses that every way of sharing out has to repeat."""
    return alone()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "options"),
    [
        (2, ""),
        (2, "--tensor 2"),
        (2, "--tensor 2 --sequence"),
        (2, "--context 2"),
        (4, ""),
        (4, "--tensor 4"),
        (4, "--tensor 2 --sequence"),
        (4, "--context 4"),
        (4, "--context 2"),
        (4, "--context 2 --tensor 2 --sequence"),
    ],
    ids=lambda value: str(value) or "fully sharded",
)
def test_every_way_of_sharing_out_gives_the_losses_of_one_process(
    one_process: list[float], processes: int, options: str
) -> None:
    """Twenty steps in float64, with weights made on the meta device."""
    assert len(one_process) == 20
    shared = losses(Launched(processes, EXAMPLE, *options.split()).printed)
    assert furthest(shared, one_process) <= PRINTED + TWENTY_STEPS


@pytest.mark.slow
def test_mixed_precision_on_several_processes_is_that_on_one(one_process: list[float]) -> None:
    """Against torchrun on one process: half a unit of bfloat16, which gradients are rounded to."""
    single = losses(Launched(1, EXAMPLE, "--bf16").printed)
    assert 1e-5 < furthest(single, one_process) < 0.05
    for processes, options in ((2, []), (4, ["--context", "2"])):
        shared = losses(Launched(processes, EXAMPLE, "--bf16", *options).printed)
        assert furthest(shared, single) <= 2**-9 * max(single)
