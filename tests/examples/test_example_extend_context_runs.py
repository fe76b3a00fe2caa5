"""The example of a longer context as it runs: its restart, and what it is said to have found."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner

from .example_extend_context import EXAMPLE, ROOT, imported, short, sources

RESULTS = ROOT / "examples" / "results" / "extend_context.json"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The example's modules."""
    yield from imported(monkeypatch)


@pytest.fixture
def micro(example: Any) -> Any:
    """Settings that take a second."""
    return short(example)


def test_a_state_of_another_run_is_refused(example: Any, tmp_path: Path) -> None:
    """It names what differs and the way out."""
    path = tmp_path / "state"
    example.run.Run(path, {"seed": 0, "text": "a"}).save()
    with pytest.raises(click.ClickException, match="other seed; start that one again"):
        example.run.Run(path, {"seed": 1, "text": "a"})


def test_a_write_that_fails_leaves_the_old_file(example: Any, tmp_path: Path) -> None:
    """And nothing beside it."""
    path = tmp_path / "state"
    path.write_text("old")

    def broken(temporary: Path) -> None:
        temporary.write_text("half of it")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        example.run.replace(path, broken)
    assert [each.name for each in tmp_path.iterdir()] == ["state"]
    assert path.read_text() == "old"


def test_a_quick_run_does_not_replace_the_committed_results(example: Any) -> None:
    """It has to be told where else to write."""
    said = CliRunner().invoke(example.program.main, ["--quick"])
    assert said.exit_code == 2
    assert "--quick needs --output" in said.output


def everything(example: Any, settings: Any, text: Any, run: Any) -> dict[str, Any]:
    """Findings of a run in this process."""
    with ExitStack() as stack:
        pool = stack.enter_context(
            ThreadPoolExecutor(2, initializer=torch.set_num_threads, initargs=(1,))
        )
        bar = stack.enter_context(example.program._bar())
        example.program.Experiment(settings, 0, text, run, pool, bar).everything()
    return example.findings.findings(settings, run)


@pytest.mark.parametrize("saves", [2, 9, 15, 30])
def test_a_run_that_was_stopped_after_a_save_goes_on_to_the_same_findings(
    example: Any, micro: Any, tmp_path: Path, saves: int
) -> None:
    """In the first training, between measurements, and in a fine-tuning."""
    text = example.corpus.corpus(sources(tmp_path, 20, 200), length=64, windows=5)
    made_of = example.program.ingredients(micro, 0, text)
    whole = everything(example, micro, text, example.run.Run(tmp_path / "whole", made_of))

    class Stopped(example.run.Run):
        left = saves

        def save(self) -> None:
            super().save()
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        everything(example, micro, text, Stopped(tmp_path / "stopped", made_of))
    again = everything(example, micro, text, example.run.Run(tmp_path / "stopped", made_of))
    assert again == whole


def command(output: Path, seed: int = 0) -> dict[str, Any]:
    """How a user starts the script."""
    return {
        "args": [sys.executable, EXAMPLE, "--quick", "--output", output, "--seed", str(seed)],
        "env": os.environ | {"PYTHONPATH": str(ROOT / "src")},
    }


def finished(output: Path, seed: int = 0) -> dict[str, Any]:
    """The results of the script, but for the time that they took."""
    done = subprocess.run(
        **command(output, seed), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    assert done.returncode == 0, done.stdout.decode()
    results = json.loads((output / "extend_context.json").read_text("utf-8"))
    assert results.pop("cpu_seconds") >= 0
    return results


def killed(output: Path) -> None:
    """Start the script, and end it without notice once it has written its state anew."""
    state = output / "state"

    def written() -> int:
        return state.stat().st_mtime_ns if state.exists() else 0

    before = written()
    running = subprocess.Popen(
        **command(output), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while running.poll() is None and written() == before:
        time.sleep(0.01)
    running.kill()
    assert running.wait() == -signal.SIGKILL


@pytest.mark.processes
def test_the_script_killed_twice_writes_the_results_of_one_that_was_not(tmp_path: Path) -> None:
    """SIGKILL at whatever point after a state was written."""
    whole = finished(tmp_path / "whole")
    killed(tmp_path / "killed")
    killed(tmp_path / "killed")
    assert finished(tmp_path / "killed") == whole
    left = {path.name for path in (tmp_path / "killed").iterdir()}
    assert left >= {"extend_context.json", "extend_context.md", "extend_context.png"}
    assert "state" not in left


@pytest.mark.processes
def test_another_seed_is_another_run(tmp_path: Path) -> None:
    """Other weights and batches, the same windows."""
    one, two = finished(tmp_path / "0"), finished(tmp_path / "1", seed=1)
    assert one["measured"] != two["measured"]
    assert one["text"] == two["text"]


def test_the_committed_results_are_those_of_the_settings_and_the_tables(example: Any) -> None:
    """Neither may change without the other."""
    results = json.loads(RESULTS.read_text("utf-8"))
    assert results["settings"] == example.settings.FULL.as_plain()
    known = example.ways.ways(example.settings.FULL)
    assert {name: way.rope.to_dict() for name, way in known.items()} == {
        name: way["rope"] for name, way in results["ways"].items()
    }
    assert RESULTS.with_suffix(".md").read_text("utf-8") == example.tables.markdown(results)


def test_the_committed_verdicts_follow_from_the_committed_means(example: Any) -> None:
    """The differences are those of the table, up to the rounding of both."""
    results = json.loads(RESULTS.read_text("utf-8"))
    for claim in results["claims"]:
        (stage, better), (other_stage, worse) = claim["better"], claim["worse"]
        low = results["measured"][stage][better]["bits"][1:]
        high = results["measured"][other_stage][worse]["bits"][1:]
        for at, difference in enumerate(claim["difference"]):
            assert low[at] - high[at] == pytest.approx(difference, abs=2e-4)
            judged = example.losses.verdict(difference, claim["error"][at])
            assert claim["verdict"][at] == judged
