"""The example that takes a small model to a longer context: its arithmetic and its order."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from .example_extend_context import imported, short, sources
from .live_models import difference
from .rounding import rounding


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The example's modules."""
    yield from imported(monkeypatch)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Two workers."""
    with ThreadPoolExecutor(2) as workers:
        yield workers


@pytest.fixture
def micro(example: Any) -> Any:
    """Settings that take a second."""
    return short(example)


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
    loss, _ = example.training.gradient(pool, model, batch)
    logits = model(batch[:, :-1]).transpose(1, 2)
    whole = nn.functional.cross_entropy(logits, batch[:, 1:])
    whole.backward()
    # a mean of 64 numbers
    assert loss == pytest.approx(whole.item() / math.log(2), rel=64 * 2**-24)

    def gradients(model: nn.Module) -> Tensor:
        parts = example.training.gradient(pool, model, batch)[1]
        return torch.cat([part.flatten() for part in parts])

    together = torch.cat([weight.grad.flatten() for weight in model.parameters()])
    assert difference(together, gradients(model)) <= rounding(model, gradients)


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
    with torch.no_grad():
        room = rounding(plain, lambda model: model(x)[:, :cut])
    assert difference(one[:, :cut], two[:, :cut]) <= room
    assert float((one[:, -1] - two[:, -1]).abs().max()) > 1e-4
