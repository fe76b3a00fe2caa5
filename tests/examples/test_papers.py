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
    *("translation", "long_documents", "longer_context", "decay", "elementwise", "live_model"),
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
        name: found[f"{name}/rate 0.03/seed 0"]["weight"]
        for name in module("previous_token").CONTENDERS
    }
    assert weight["RoPE and a constant"] > 0.8
    assert weight["RoPE, no constant"] < 0.5
    assert weight["constant, no RoPE"] < 0.5


def test_masked_training_runs_for_every_contender(tmp_path: Path) -> None:
    """What is relative reads the same wherever it begins."""
    losses = quick("convergence", tmp_path)
    assert {key.split("/")[0] for key in losses} == set(module("convergence").CONTENDERS)
    assert all(found["loss"] < 8 for found in losses.values())  # bits: better than no training
    for name in module("convergence").CONTENDERS:
        found = losses[f"{name}/rate 0.01/seed 0"]
        relative = name not in ("sinusoidal", "learned")
        assert (found["moved"] == pytest.approx([found["loss"]], rel=2e-5)) == relative


def test_usage_is_a_share_of_every_pair(tmp_path: Path) -> None:
    """Of each head."""
    usage = quick("frequency_usage", tmp_path)
    shares = np.array(usage["p = 1/rate 0.01/seed 0"]["heads"]["usage"])
    np.testing.assert_allclose(shares.sum(1), 1, atol=1e-3)  # saved with five digits


def test_linear_attention_is_trained_with_every_denominator_and_feature(tmp_path: Path) -> None:
    """The rotated one may be negative, and yet no loss is infinite."""
    found = quick("linear_attention", tmp_path)
    assert {key.split("/")[0] for key in found} > set(module("linear_attention").CONTENDERS)
    assert all(math.isfinite(x["loss"]) for key, x in found.items() if "/seed" in key)


def test_a_longer_context_is_read_with_every_law(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every length, from weights that are trained once for each base."""
    experiment, trained = module("longer_context"), list[str]()
    fit = experiment.fit

    def counted(*given: Any, **named: Any) -> Any:
        trained.append(given[4])
        return fit(*given, **named)

    monkeypatch.setattr(experiment, "fit", counted)
    found = quick("longer_context", tmp_path)
    assert len(trained) == len(experiment.BASES) + len(experiment.WAYS)
    ways = [", from 0.01, ".join(way) for way in experiment.WAYS]
    before = [found[f"{way}, as trained/seed 0"]["bits"] for way in ways]
    assert len({str(bits) for bits in before}) == len(before)  # the law reached the model
    assert len(found[f"{ways[0]}, fine-tuned/rate 0.003/seed 0"]["retrieval"]) == 3


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

    def stops(*given: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 6:
            raise KeyboardInterrupt
        return real(*given, **named)

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


def test_contenders_are_told_apart_in_pairs() -> None:
    """Four standard errors of the differences decide, however far each spreads by itself."""
    seeds = {"one": [1.0, 3.0, 8.0], "two": [1.1, 3.1, 8.3], "three": [1.2, 2.9, 8.1]}
    table = module("pictures").contest(
        ["what", "bits"], {name: ([], [values]) for name, values in seeds.items()}, 2
    )
    # the deviations are 3.61; of 0.1, 0.1, 0.3 and 0.2, -0.1, 0.1, 0.12 and 0.15
    assert table.splitlines() == [
        "| what; others: paired difference from a | bits |",
        "| --- | ---: |",
        "| a: one | 4.00 ± 3.61 ≈ bc |",
        "| b: two | +0.17 ± 0.12 ≈ ac |",
        "| c: three | +0.07 ± 0.15 ≈ ab |",
    ]
    seeds["two"][2] = 8.1  # each 0.1 more: no deviation at all
    table = module("pictures").contest(
        ["", "bits"], {name: ([], [values]) for name, values in seeds.items()}, 2
    )
    assert "| a: one | 4.00 ± 3.61 ≈ c |" in table
    assert "| b: two | +0.10 ± 0.00 ≈ c |" in table


def test_a_rate_that_loses_next_to_nothing_is_enough(tmp_path: Path) -> None:
    """The lowest of those, where the best of them would be drawn; else the best."""
    settings = {"rates": [1e-3, 3e-3, 1e-2, 3e-2], "enough": 0.01}
    study = module("study").Study("x", settings, tmp_path, range(1))
    losses = {"drawn": [0.5, 2e-3, 1e-6, 1e-9], "hard": [0.5, 0.4, 0.3, 0.4]}
    for name, found in losses.items():
        by_rate = dict(zip(settings["rates"], found, strict=True))
        study.compare(name, lambda _key, rate, _seed, by=by_rate: {"loss": by[rate]})
    assert (study.rate("drawn"), study.rate("hard")) == (3e-3, 1e-2)


def test_every_rate_runs_with_every_seed_and_an_end_is_widened(tmp_path: Path) -> None:
    """The best mean wins, a loss that is no number loses, and only an inner rate ends it early."""
    study = module("study").Study("x", {"rates": [1e-3, 3e-3, 1e-2, 3e-2]}, tmp_path, range(2))
    runs: list[tuple[float, int]] = []

    def run(wanted: float) -> Any:
        def measured(_key: str, rate: float, seed: int) -> dict[str, float]:
            runs.append((rate, seed))
            far = abs(math.log(rate / wanted)) + (-1) ** seed
            return {"loss": math.nan if rate == 1e-3 else far}

        return measured

    for wanted, tried, told in (
        (1e-2, [1e-3, 3e-3, 1e-2, 3e-2], "0.01"),
        (3e-2, [1e-3, 3e-3, 1e-2, 3e-2, 0.1], "0.03, of 5"),
        (10, [1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3], "0.3, highest of 6"),
    ):
        runs.clear()
        study.compare(str(wanted), run(wanted))
        assert sorted(set(runs)) == [(rate, seed) for rate in tried for seed in range(2)]
        assert study.told_rate(str(wanted)) == told
    assert study.over_seeds("0.01", "loss") == pytest.approx([1, -1])
    runs.clear()
    for wanted in (3e-2, 10):
        study.compare(str(wanted), run(wanted))
    assert runs == []  # all of it is kept, and widened no further


def test_lower_rates_are_those_of_the_same_list(tmp_path: Path) -> None:
    """Below 0.001 come 0.0003 and 0.0001."""
    study = module("study").Study("x", {"rates": [1e-3, 3e-3]}, tmp_path, range(1))
    study.compare("it", lambda _key, rate, _seed: {"loss": rate})
    assert list(study.losses("it")) == [1e-4, 3e-4, 1e-3, 3e-3]
    assert study.told_rate("it") == "0.0001, lowest of 4"


def test_dates_are_said_in_words() -> None:
    """Each in its own, and a sentence is its dates one after another."""
    experiment = module("translation")
    assert experiment.translate(3, 21) == ["twenty", "one", "march"]
    assert experiment.translate(12, 30) == ["thirty", "december"]
    assert experiment.translate(7, 4) == ["four", "july"]
    dates = [(month, day) for month in range(1, 13) for day in range(1, 32)]
    assert len({tuple(experiment.translate(*date)) for date in dates}) == len(dates)
    digits, words = experiment.sentences([0], 5, 3)
    for row, said in zip(digits.tolist(), words.tolist(), strict=True):
        numbers = [10 * a + b for a, b in zip(row[::2], row[1::2], strict=True)]
        pairs = zip(numbers[::2], numbers[1::2], strict=True)
        wanted = [word for date in pairs for word in experiment.translate(*date)]
        told = [experiment.WORDS[number] for number in said]
        assert told == wanted + ["<end>"] * (len(told) - len(wanted))
        assert "<end>" in told


@pytest.mark.parametrize("name", ["RoPE", "sinusoidal"])
def test_a_translator_reads_all_digits_and_no_later_word(name: str, tmp_path: Path) -> None:
    """The next word depends on the last digit, and not on the words after it."""
    experiment = module("translation")
    torch.manual_seed(0)
    model = experiment.Translator(experiment.settings(quick=True), name)
    digits, words = experiment.sentences([0], 2, 2)
    logits, first = model(digits, words), model(digits, words[:, :2])
    torch.testing.assert_close(first, logits[:, :2])
    changed = digits.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 10
    assert (model(changed, words)[:, 0] != logits[:, 0]).any(-1).all()
    found = quick("translation", tmp_path)[f"{name}/rate 0.01/seed 0"]
    assert len(found["exact"]) == len(found["bits"]) == 4


def test_the_evidence_of_a_long_document_is_where_no_training_reached(tmp_path: Path) -> None:
    """The label is the letter after the only mark."""
    experiment = module("long_documents")
    tokens, labels = experiment.documents([0], 50, 20, 40)
    for row, label in zip(tokens.tolist(), labels.tolist(), strict=True):
        assert row[0] == experiment.FIRST
        assert row.count(experiment.MARK) == 1
        mark = row.index(experiment.MARK)
        assert 20 <= mark < 39
        assert row[mark + 1] == label < experiment.LETTERS
    found = quick("long_documents", tmp_path)
    assert len(found["learned/rate 0.01/seed 0"]["accuracy"]) == 2


def test_the_ropes_of_table_2() -> None:
    """A quarter of the pairs stands still, from the slow end or from the fast one."""
    ropes = {name: module("frequency_usage")._rope(32, name) for name in ("p = 0.75", "p = 1")}
    full = 10_000.0 ** (-np.arange(16) / 16)
    np.testing.assert_allclose(ropes["p = 1"].inv_freq, full)
    np.testing.assert_allclose(ropes["p = 0.75"].inv_freq, np.where(np.arange(16) < 12, full, 0))
    turned = module("frequency_usage")._rope(32, "p = 0.75, reversed").inv_freq
    np.testing.assert_allclose(turned, np.where(np.arange(16) < 4, 0, full))
    part = module("frequency_usage")._rope(32, "p = 0.75, partial")
    assert part.rotary_dim == 24
    np.testing.assert_allclose(part.inv_freq[:12], 10_000.0 ** (-np.arange(12) / 12))
    large = module("frequency_usage")._rope(32, "base 500 000").inv_freq
    np.testing.assert_allclose(large, 500_000.0 ** (-np.arange(16) / 16))


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
    plain = {"causal": True, "feature_map": experiment.elu_plus_one}
    for below_too in (False, True):
        out, _ = experiment.rotated_below(q, k, v, rope)
        if not below_too:
            out = experiment.linear_attention(q, k, v, torch.arange(5), rope, **plain)
        for m in range(5):
            turned = [
                (pairs[0][m] * pairs[1][n].conj() * np.exp(1j * (m - n) * inv_freq)).real.sum()
                for n in range(m + 1)
            ]
            plain = [phi[0][0, m, 0] @ phi[1][0, n, 0] for n in range(m + 1)]
            weights = np.array(turned) / sum(turned if below_too else plain)
            wanted = weights @ v[0, : m + 1, 0].numpy()
            np.testing.assert_allclose(out[0, m, 0].numpy(), wanted, atol=1e-13)


def test_a_pairs_advantage_of_the_first_token_by_loops() -> None:
    """Its share of the score with the first key, less its mean share over later keys."""
    q, k = torch.randn(2, 5, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    advantages = torch.zeros(3, 4, dtype=torch.float64)
    for head in range(3):
        for pair in range(4):
            coordinates = [pair, pair + 4]
            for query in range(1, 5):
                shares = [
                    (q[query, head, coordinates] @ k[key, head, coordinates]).item() / math.sqrt(8)
                    for key in range(query + 1)
                ]
                advantage = shares[0] - sum(shares[1:]) / query
                advantages[head, pair] += advantage / 4
    found = module("live_model_scores").first_over_others(q, k, 4)
    torch.testing.assert_close(found, advantages)
