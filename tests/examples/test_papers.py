"""The experiments from the papers: their parts against plain loops, and each of them in small."""

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
NAMES = (
    *("previous_token", "convergence", "linear_attention", "frequency_usage"),
    *("longer_context", "decay", "elementwise", "live_model"),
)


@pytest.fixture(scope="module", autouse=True)
def _importable() -> Iterator[None]:
    """``examples`` is a folder of the repository; one thread, as the experiments have it."""
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        yield
    torch.set_num_threads(threads)


def module(name: str) -> ModuleType:
    """A module of the experiments."""
    return importlib.import_module(f"examples.papers.{name}")


def quick(name: str, output: Path, seeds: int = 1) -> dict[str, Any]:
    """What an experiment measured in small."""
    module("__main__").main([name, "--quick", "--seeds", str(seeds), "--output", str(output)])
    assert (output / "quick" / f"{name}.svg").read_text("utf-8").startswith("<svg")
    return json.loads((output / "quick" / f"{name}.json").read_text("utf-8"))["measured"]


def test_every_file_is_a_few_pages_of_code() -> None:
    """Under 250 lines each."""
    for file in (ROOT / "examples" / "papers").glob("*.py"):
        assert file.read_text("utf-8").count("\n") < 250, file.name


@pytest.mark.parametrize("name", NAMES)
def test_a_page_says_what_its_results_say(name: str) -> None:
    """Tables and picture are those that ``python -m examples.papers pages`` writes."""
    main = module("__main__")
    page = main.PAGES / f"{name.replace('_', '-')}.md"
    results = main.HERE / "results"
    everything, text = main.measured(name, results), page.read_text("utf-8")
    assert (results / f"{name}.md").read_text("utf-8") == everything
    assert main.MEASURED.search(text)
    assert main.fill(text, name, everything) == text
    picture = (results / f"{name}.svg").read_text("utf-8")
    assert page.with_suffix(".svg").read_text("utf-8") == picture


def test_the_index_has_every_experiment() -> None:
    """With a line and a link, in the navigation too."""
    index = (ROOT / "docs" / "papers" / "index.md").read_text("utf-8")
    navigation = (ROOT / "mkdocs.yml").read_text("utf-8")
    assert module("__main__").NAMES == NAMES
    for name in NAMES:
        page = f"{name.replace('_', '-')}.md"
        assert f"]({page})" in index
        assert f"papers/{page}" in navigation


def test_a_previous_token_head_is_learned_with_rope_and_a_constant(tmp_path: Path) -> None:
    """And without either it is not."""
    found = quick("previous_token", tmp_path)
    weight = {
        name: found[f"{name}/seed 0"]["weight"] for name in module("previous_token").CONTENDERS
    }
    assert weight["RoPE and a constant"] > 0.8
    assert weight["RoPE, no constant"] < 0.5
    assert weight["constant, no RoPE"] < 0.5


def test_masked_training_runs_for_every_contender(tmp_path: Path) -> None:
    """Its models are those that usage is read from, with half of the pairs holding a share."""
    losses = quick("convergence", tmp_path)
    assert {key.split("/")[0] for key in losses} == set(module("convergence").CONTENDERS)
    assert all(found["loss"] < 8 for found in losses.values())  # bits: better than no training
    usage = quick("frequency_usage", tmp_path)
    for kind in ("causal", "masked"):
        shares = np.array(usage[f"{kind}/heads 0"]["usage"])
        np.testing.assert_allclose(shares.sum(1), 1, atol=1e-3)  # saved with five digits


def test_linear_attention_streams_and_its_rotated_denominator_fails(tmp_path: Path) -> None:
    """A state gives the quadratic sum; and training runs with every denominator."""
    found = quick("linear_attention", tmp_path)
    assert found["streaming"] < 1e-12
    assert all(math.isfinite(x["loss"]) for key, x in found.items() if "/seed" in key)


def test_a_longer_context_is_read_with_every_law(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every length, from weights that are trained once for each base."""
    experiment, trained = module("longer_context"), list[str]()
    fit = experiment.fit

    def counted(*given: Any, **named: Any) -> Any:
        trained.append(named["label"])
        return fit(*given, **named)

    monkeypatch.setattr(experiment, "fit", counted)
    found = quick("longer_context", tmp_path)
    assert len(trained) == len(experiment.BASES) * (1 + len(experiment.LAWS))
    for base in experiment.BASES:
        before = [found[f"{base}, {law}/seed 0"]["as trained"] for law in ("unchanged", "linear")]
        assert before[0]["bits"] != before[1]["bits"]  # the law reached the model
        assert len(before[0]["retrieval"]) == 3


def test_decay_is_that_of_the_papers(tmp_path: Path) -> None:
    """RoFormer's curve at 0, 8 and 256, from a sum of complex numbers; a head that turns away."""
    found = quick("decay", tmp_path)
    curve = found["base 10 000/bound"]
    for distance in (0, 8, 256):
        turned = np.exp(1j * distance * 10_000.0 ** (-np.arange(64) / 64))
        assert curve[distance] == pytest.approx(abs(np.cumsum(turned)).mean(), rel=1e-4)
    assert (
        max(found["base 10 000/semantic"][2:]) < 0.01 < 0.99 < min(found["p = 0.75/semantic"][:4])
    )
    assert found["p = 0.75/semantic"][4] == pytest.approx(0.99, rel=1e-4)


def test_the_matrix_holds_what_grows_with_the_square_of_the_width(tmp_path: Path) -> None:
    """A head four times as wide: 16 times the memory, and 4 times for rows."""
    found = quick("elementwise", tmp_path)["rotations/seed 0"]
    first, second = found["matrix, eq. 15"]["kilobytes"]
    assert second == 16 * first
    first, second = found["element by element, eq. 34"]["kilobytes"]
    assert second == 4 * first


def test_a_run_that_was_stopped_goes_on_with_the_same_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one of which a model was trained and not yet read."""
    experiment = module("longer_context")
    whole = quick("longer_context", tmp_path / "whole")
    real, calls = experiment._read, 0

    def stops(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 6:
            raise KeyboardInterrupt
        return real(*given)

    monkeypatch.setattr(experiment, "_read", stops)
    with pytest.raises(KeyboardInterrupt):
        quick("longer_context", tmp_path / "parts")
    monkeypatch.setattr(experiment, "_read", real)
    assert quick("longer_context", tmp_path / "parts") == whole

    def no_training(*_given: Any, **_named: Any) -> None:
        raise AssertionError("everything has been measured")

    monkeypatch.setattr(experiment, "fit", no_training)
    assert quick("longer_context", tmp_path / "whole") == whole


def test_other_settings_begin_anew(tmp_path: Path) -> None:
    """Numbers of one size are no numbers of another."""
    study = module("study").Study("x", {"width": 1}, tmp_path, range(1))
    assert study.measure("a", lambda: 1.0) == 1.0
    assert module("study").Study("x", {"width": 1}, tmp_path, range(1)).measured == {"a": 1.0}
    assert module("study").Study("x", {"width": 2}, tmp_path, range(1)).measured == {}


def test_other_seeds_are_other_runs(tmp_path: Path) -> None:
    """What they measured is kept beside the first."""
    seeds = ["--quick", "--seeds", "1", "--output", str(tmp_path)]
    module("__main__").main(["elementwise", *seeds])
    module("__main__").main(["elementwise", *seeds, "--first-seed", "7"])
    saved = json.loads((tmp_path / "quick" / "elementwise.json").read_text("utf-8"))
    assert set(saved["measured"]) == {"rotations/seed 0", "rotations/seed 7"}
    assert (saved["seeds"], saved["first_seed"]) == (1, 7)


def test_a_table_marks_whom_the_seeds_do_not_part() -> None:
    """Means nearer than both spreads together, with the letters of the others."""
    table = module("pictures").contest(
        ["", "loss"],
        {"one": ([], [[1.0, 3.0]]), "two": ([], [[3.0, 5.0]]), "three": ([], [[9.0, 9.0]])},
        digits=1,
    )
    assert table.splitlines()[2:] == [
        "| a: one | 2.0 ± 1.4 ≈ b |",
        "| b: two | 4.0 ± 1.4 ≈ a |",
        "| c: three | 9.0 ± 0.0 |",
    ]


def test_the_searched_rate_is_the_best_one_on_a_seed_of_its_own(tmp_path: Path) -> None:
    """A loss that is no number loses."""
    study = module("study").Study("x", {"rates": [1.0, 2.0, 3.0]}, tmp_path, range(2))
    seeds: list[tuple[float, int]] = []

    def run(_key: str, rate: float, seed: int) -> dict[str, float]:
        seeds.append((rate, seed))
        return {"loss": math.nan if rate == 1 else -rate, "rate": rate}

    study.compare("it", run)
    search = module("study").SEARCH_SEED
    assert seeds == [(1.0, search), (2.0, search), (3.0, search), (3.0, 0), (3.0, 1)]
    assert study.rate("it") == "3"


def test_all_contenders_read_the_same_bytes() -> None:
    """What is drawn depends on the seed alone, and nothing held out is among it."""
    text = module("training").Text.load()
    assert torch.equal(text.batch([1, 2], 3, 50), text.batch([1, 2], 3, 50))
    assert not torch.equal(text.batch([1, 2], 3, 50), text.batch([1, 3], 3, 50))
    row = bytes(text.test(1, 200)[0].tolist())
    assert row in text.held_out.tobytes()
    assert row not in text.train.tobytes()


@pytest.mark.parametrize("causal", [True, False])
def test_attention_returns_what_its_weights_say(causal: bool) -> None:
    """The weights that heads are found by are those that the model computes with."""
    rope = module("convergence").rope({"head_dim": 8})
    torch.manual_seed(0)
    attention = module("models").Attention(16, 2, rope=rope, causal=causal).double()
    x = torch.randn(3, 7, 16, dtype=torch.float64)
    values = attention.v_proj(x).unflatten(-1, (2, 8))
    out = torch.einsum("bhmn,bnhd->bmhd", attention.weights(x), values)
    torch.testing.assert_close(attention.o_proj(out.flatten(2)), attention(x))


def test_position_embeddings_of_the_contenders() -> None:
    """Sines and cosines, and ALiBi's slopes, number by number."""
    convergence = module("convergence")
    rows, bias = convergence.Sinusoidal(8)(5), convergence.alibi(4, 6)
    for position in range(5):
        for pair in range(4):
            angle = position / 10_000 ** (2 * pair / 8)
            assert rows[position, pair] == pytest.approx(math.sin(angle), abs=1e-6)
            assert rows[position, 4 + pair] == pytest.approx(math.cos(angle), abs=1e-6)
    for head in range(4):
        for m in range(6):
            for n in range(6):
                assert bias[head, m, n] == -(2.0 ** (-2 * (head + 1))) * abs(m - n)


def test_eq_19_and_its_rotated_denominator_by_loops() -> None:
    """A rotation of complex numbers, sum by sum."""
    experiment = module("linear_attention")
    rope = module("convergence").rope({"head_dim": 4})
    q, k, v = torch.randn(3, 1, 5, 1, 4, dtype=torch.float64)
    phi = [np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))) for x in (q.numpy(), k.numpy())]
    pairs = [x[0, :, 0, :2] + 1j * x[0, :, 0, 2:] for x in phi]
    inv_freq = np.array([1.0, 0.01])
    for below_too in (False, True):
        out, _ = experiment.quadratic(q, k, v, rope, below_too=below_too)
        for m in range(5):
            turned = [
                (pairs[0][m] * pairs[1][n].conj() * np.exp(1j * (m - n) * inv_freq)).real.sum()
                for n in range(m + 1)
            ]
            plain = [phi[0][0, m, 0] @ phi[1][0, n, 0] for n in range(m + 1)]
            weights = np.array(turned) / sum(turned if below_too else plain)
            wanted = weights @ v[0, : m + 1, 0].numpy()
            np.testing.assert_allclose(out[0, m, 0].numpy(), wanted, atol=1e-13)
