"""Several processes under torchrun compute, and train to, what one does."""

from __future__ import annotations

import json
import math
import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import phasor

HERE = Path(__file__).parent
EXAMPLE = HERE.parents[2] / "examples" / "train_parallel.py"
WORKER = HERE / "distributed_worker.py"
# a stopped machine is not a failure
LIMIT = 1200


def run(*program: str) -> str:
    """What a Python program on threads of its own prints."""
    source = str(Path(phasor.__file__).parents[1])
    with subprocess.Popen(
        [sys.executable, *program],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": source},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as running:
        try:
            printed, said = running.communicate(timeout=LIMIT)
        except BaseException:
            # with the processes that it forked; torchrun passes it on, unlike being killed
            os.killpg(running.pid, signal.SIGTERM)
            running.communicate(timeout=LIMIT)
            raise
    assert running.returncode == 0, said
    return printed


def torchrun(processes: int, script: Path, *arguments: str) -> str:
    """What a script prints under torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc-per-node", str(processes), str(HERE / "forked.py")]
    return run(*launcher, str(script), *arguments)


def losses(printed: str) -> list[float]:
    """What the example printed, step by step."""
    return [float(found) for found in re.findall(r"loss ([\d.]+)", printed)]


STEPS = 8
#: All steps, each off by what sums of a thousand float64 gather (see `rounding`), of losses that
#: begin with that of a guess; and what is printed is rounded to nine digits.
ALL_STEPS = STEPS * 32 * 2**-53 * math.log(256)
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


def test_two_processes_rotate_attend_and_train_as_one(tmp_path: Path) -> None:
    """Values, gradients and collectives; DTensors through the operator, sharded in heads and in
    tokens, have the losses of one process and the traffic of a model without a rotation.
    """
    measured_at = tmp_path / "measured.json"
    torchrun(2, WORKER, str(measured_at), str(STEPS))
    measured = json.loads(measured_at.read_text())
    assert_measured(measured)
    for name in ("heads", "tokens"):
        assert measured[name]["error"] <= ALL_STEPS
        assert measured[name]["collectives"] == measured[name]["without"] != {}


def test_four_processes_rotate_and_attend_as_one(tmp_path: Path) -> None:
    """As two do."""
    measured_at = tmp_path / "measured.json"
    run(str(HERE / "forked.py"), json.dumps([[4, [str(WORKER), str(measured_at)]]]))
    assert_measured(json.loads(measured_at.read_text()))


def test_the_example_trains_on_one_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loss falls from that of a guess."""
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--steps", str(STEPS)])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = losses(capsys.readouterr().out)
    assert len(printed) == STEPS
    assert printed[0] == pytest.approx(np.log(256), abs=0.5)
    assert printed[-1] < printed[0] - 0.5


# fully sharded, heads without and with the tokens between them, and the sequence
WAYS = [(2, "--tensor 2"), (4, ""), (4, "--context 2 --tensor 2 --sequence")]
ALONE = (0, "")
MIXED = [(1, "--bf16"), (4, "--bf16 --context 2")]


@cache
def trained(processes: int, options: str) -> list[float]:
    """Losses of the example on so many processes, 0 without torchrun."""
    program = [str(EXAMPLE), "--steps", str(STEPS), *options.split()]
    (printed,) = json.loads(run(str(HERE / "forked.py"), json.dumps([(processes, program)])))
    return losses(printed)


def test_the_example_trains_under_torchrun() -> None:
    """As its page says; the other runs here are forked, which gives the same."""
    printed = losses(torchrun(2, EXAMPLE, "--steps", str(STEPS)))
    assert furthest(printed, trained(*ALONE)) <= PRINTED + ALL_STEPS


@pytest.mark.parametrize(
    ("processes", "options"), WAYS, ids=lambda value: str(value) or "fully sharded"
)
def test_every_way_of_sharing_out_gives_the_losses_of_one_process(
    processes: int, options: str
) -> None:
    """In float64, with weights made on the meta device."""
    assert len(trained(*ALONE)) == STEPS
    assert furthest(trained(processes, options), trained(*ALONE)) <= PRINTED + ALL_STEPS


def test_mixed_precision_on_several_processes_is_that_on_one() -> None:
    """Against torchrun on one process: half a unit of bfloat16, which gradients are rounded to."""
    single, shared = (trained(*case) for case in MIXED)
    assert 1e-5 < furthest(single, trained(*ALONE)) < 0.05
    assert furthest(shared, single) <= 2**-9 * max(single)
