"""The example that takes a small model to a longer context: its arithmetic, its order, its restart.

What it found is compared with the code that is said to have found it.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "extend_context"
RESULTS = ROOT / "examples" / "results" / "extend_context.json"
MODULES = [path.stem for path in sorted(EXAMPLE.glob("*.py")) if path.stem != "__main__"]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The example's modules, imported as the script does and forgotten again."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    for name in MODULES:  # a script elsewhere may have a module of that name
        monkeypatch.delitem(sys.modules, name, raising=False)
    threads = torch.get_num_threads()
    yield SimpleNamespace(**{name: __import__(name) for name in MODULES})
    torch.set_num_threads(threads)  # its workers have one each
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Two workers."""
    with ThreadPoolExecutor(2) as workers:
        yield workers


@pytest.fixture
def micro(example: Any) -> Any:
    """Settings that take a second."""
    return replace(
        example.settings.QUICK,
        width=16,
        heads=1,
        hidden=16,
        first=example.settings.Training(length=16, steps=5, batch=4, rate=1e-2, warmup=1),
        longer=example.settings.Training(length=64, steps=3, batch=2, rate=1e-3, warmup=1),
        windows=5,
        scored=2,
        bin=8,
        save_every=2,
    )


def sources(folder: Path, count: int, length: int) -> Path:
    """A folder of Python files of printable bytes, no two alike."""
    drawn = random.Random(5)
    for index in range(count):
        content = bytes(drawn.choices(range(32, 127), k=length + index))
        (folder / f"m{index:02d}.py").write_bytes(content)
    return folder


class Told(nn.Module):
    """Logits that were drawn beforehand, whatever the bytes."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, x: Tensor) -> Tensor:
        return self.logits[: x.shape[0], : x.shape[1]]


class Rising(nn.Module):
    """``length + place / 100`` nats for byte 0 at every place: 255 others share the rest."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def forward(self, x: Tensor) -> Tensor:
        nats = self.length + torch.arange(x.shape[1], dtype=torch.float64) / 100
        logits = torch.zeros(*x.shape, 256, dtype=torch.float64)
        logits[..., 0] = -((nats.exp() - 1) / 255).log()
        return logits


def test_bits_are_the_logarithm_of_what_the_model_gives_the_next_byte(example: Any) -> None:
    """Against a softmax in plain loops."""
    drawn = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 7, 256, generator=drawn, dtype=torch.float64) * 3
    rows = torch.randint(256, (3, 8), generator=drawn)
    found = example.losses.bits(Told(logits), rows)
    for row in range(3):
        for place in range(7):
            chances = [math.exp(value) for value in logits[row, place].tolist()]
            chance = chances[rows[row, place + 1]] / sum(chances)
            assert float(found[row, place]) == pytest.approx(-math.log2(chance), rel=1e-12)


@pytest.mark.parametrize("scored", [1, 2, 5, 9])
def test_bits_by_position_do_not_depend_on_the_windows_of_a_pass(
    example: Any, pool: ThreadPoolExecutor, scored: int
) -> None:
    """Windows come back in their order, however they were cut."""
    windows = torch.arange(5 * 4).reshape(5, 4) % 256

    class Own(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.one_hot(x, 256).double() * (1 + x[..., None] / 10)

    whole = example.losses.bits(Own(), windows)
    assert torch.equal(example.losses.bits_by_position(pool, Own(), windows, scored), whole)


def test_under_a_rule_each_byte_is_scored_by_the_law_of_what_was_read(
    example: Any, pool: ThreadPoolExecutor
) -> None:
    """The first ``context`` by the shortest length, each further step by the next one."""
    windows = torch.zeros(3, 33, dtype=torch.int64)
    found = example.losses.bits_under_a_rule(
        pool, lambda length: Rising(length), windows, 2, context=8, steps=2
    )
    assert found.shape == (3, 32)
    for place in range(32):
        read = place + 1
        length = max(8, 4 * math.ceil(read / 4))
        for bits in found[:, place].tolist():
            assert bits == pytest.approx((length + place / 100) / math.log(2), rel=1e-9)


def test_means_and_their_errors_are_those_of_plain_loops(example: Any) -> None:
    """Bins of neighbouring positions, then the mean over windows and s / sqrt(n)."""
    values = torch.randn(6, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    bins = example.losses.binned(values, 4)
    mean, error = example.losses.mean_and_error(bins)
    for column in range(3):
        each = [sum(values[row, 4 * column + i].item() for i in range(4)) / 4 for row in range(6)]
        middle = sum(each) / 6
        spread = math.sqrt(sum((one - middle) ** 2 for one in each) / 5)
        assert float(mean[column]) == pytest.approx(middle, rel=1e-12)
        assert float(error[column]) == pytest.approx(spread / math.sqrt(6), rel=1e-12)


@pytest.mark.parametrize(
    ("difference", "error", "said"),
    [
        (-0.21, 0.1, "holds"),
        (-0.19, 0.1, "within the error"),
        (0.19, 0.1, "within the error"),
        (0.21, 0.1, "reversed"),
        (0.0, 0.0, "within the error"),
    ],
)
def test_a_verdict_needs_two_standard_errors(
    example: Any, difference: float, error: float, said: str
) -> None:
    """In either direction."""
    assert example.losses.verdict(difference, error) == said


def test_held_out_windows_come_from_files_that_are_not_trained_on(
    example: Any, tmp_path: Path
) -> None:
    """Every third long file gives the window in its middle, and nothing else."""
    folder = sources(tmp_path, 9, 100)
    text = example.corpus.corpus(folder, length=20, windows=10)
    names = sorted(folder.iterdir())
    held = [path.read_bytes() for path in names[2::3]]
    trained = [path.read_bytes() for path in names if path not in names[2::3]]
    assert [part.tobytes() for part in text.training] == trained
    assert text.windows.shape == (3, 21)
    for window, content in zip(text.windows.tolist(), held, strict=True):
        start = (len(content) - 21) // 2
        assert window == list(content[start : start + 21])


def test_the_hash_sees_a_byte_and_a_name(example: Any, tmp_path: Path) -> None:
    """Two corpora with one hash are one corpus."""
    folder = sources(tmp_path, 6, 50)
    seen = {example.corpus.corpus(folder, length=10, windows=2).sha256}
    (folder / "m00.py").rename(folder / "m00a.py")
    seen.add(example.corpus.corpus(folder, length=10, windows=2).sha256)
    (folder / "m00a.py").write_bytes(b"#" + (folder / "m00a.py").read_bytes()[1:] + b"\n")
    seen.add(example.corpus.corpus(folder, length=10, windows=2).sha256)
    assert len(seen) == 3


def test_a_batch_is_cut_from_single_training_files(example: Any, tmp_path: Path) -> None:
    """Every row stands in one file as it is, and other steps draw other rows."""
    text = example.corpus.corpus(sources(tmp_path, 6, 60), length=20, windows=2)
    contents = [part.tobytes() for part in text.training]
    batches = [text.batch(3, 20, step, 8, 20) for step in range(5)]
    for row in torch.cat(batches).tolist():
        assert any(bytes(row) in content for content in contents)
    assert torch.equal(text.batch(3, 20, 2, 8, 20), batches[2])
    assert not torch.equal(batches[0], batches[1])


def test_too_little_text_is_refused(example: Any, tmp_path: Path) -> None:
    """With the folder and what it lacks."""
    with pytest.raises(ValueError, match="at least 3 Python files longer than 100 bytes, got 0"):
        example.corpus.corpus(sources(tmp_path, 5, 50), length=100, windows=2)


def test_gradients_in_parts_are_those_of_the_whole_batch(
    example: Any, pool: ThreadPoolExecutor, micro: Any
) -> None:
    """Means of equal parts; float32 sums in another order."""
    rope = example.ways.ways(micro)["none"].rope
    model = example.model.fresh(micro, rope, 0)
    batch = torch.randint(256, (4, 17), generator=torch.Generator().manual_seed(2))
    loss, parts = example.training.gradient(pool, model, batch)
    logits = model(batch[:, :-1]).transpose(1, 2)
    whole = nn.functional.cross_entropy(logits, batch[:, 1:])
    whole.backward()
    assert loss == pytest.approx(whole.item() / math.log(2), rel=1e-6)
    for part, weight in zip(parts, model.parameters(), strict=True):
        torch.testing.assert_close(part, weight.grad, rtol=1e-4, atol=1e-6)


def test_the_rate_rises_in_a_line_and_falls_to_a_tenth(example: Any) -> None:
    """Half of a cosine: the middle is half way between."""
    plan = example.settings.Training(length=8, steps=110, batch=1, rate=2.0, warmup=10)
    rates = [example.training.rate(plan, step) for step in (0, 9, 10, 60, 110)]
    assert rates == pytest.approx([0.2, 2.0, 2.0, 1.1, 0.2])


def test_the_dynamic_rule_is_the_ntk_law_at_the_longer_length(example: Any, micro: Any) -> None:
    """So that one training serves both."""
    known = example.ways.ways(micro)
    assert known["dynamic_ntk"].rope.at(micro.target) == known["ntk"].rope
    assert known["dynamic_ntk"].tuned_as == "ntk"


@pytest.mark.parametrize("name", ["rerope", "window"])
def test_attention_that_is_cut_is_the_plain_one_up_to_the_cut(
    example: Any, micro: Any, name: str
) -> None:
    """The same weights give the same logits for a sequence as short as that, and others beyond."""
    way = example.ways.ways(micro)[name]
    cut = way.window or way.distance.width
    plain = example.model.fresh(micro, way.rope, 0)
    other = example.model.ByteModel(micro, way.rope, window=way.window, distance=way.distance)
    other.load_state_dict(plain.state_dict())
    x = torch.randint(256, (2, cut + 8), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        one, two = plain(x), other(x)
    torch.testing.assert_close(one[:, :cut], two[:, :cut], rtol=1e-4, atol=1e-5)
    assert float((one[:, -1] - two[:, -1]).abs().max()) > 1e-4


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


@pytest.mark.slow
def test_the_script_killed_twice_writes_the_results_of_one_that_was_not(tmp_path: Path) -> None:
    """SIGKILL at whatever point after a state was written."""
    whole = finished(tmp_path / "whole")
    killed(tmp_path / "killed")
    killed(tmp_path / "killed")
    assert finished(tmp_path / "killed") == whole
    left = {path.name for path in (tmp_path / "killed").iterdir()}
    assert left >= {"extend_context.json", "extend_context.md", "extend_context.png"}
    assert "state" not in left


@pytest.mark.slow
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
