"""The table of who can express what, for presets whose place in it is known."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import PackageNotFoundError

import pytest
from tools.doc_tables import DOCS, ENGINES, cell, made, map_table

import phasor
from phasor.files.translation import TARGETS

from .programs import PROGRAMS


@pytest.mark.parametrize(
    ("name", "target", "symbols", "reason"),
    [
        ("llama-3.1-8b", "mlx", "✓", ""),
        ("llama-3.1-8b", "flash-attn", "○", ""),
        ("llama-3.1-8b", "rotary-embedding-torch", "✓ ↔", ""),
        ("phi-4-mini", "mlx", "✓ =", ""),
        ("phi-4-mini", "transformers", "✓", ""),
        ("internlm2.5-7b", "rotary-embedding-torch", "✓ ↔ =", ""),
        ("flux.1-dev", "mlx", "✗", "it cannot express positions of n axes (Axial)"),
        ("gpt-oss-20b", "torchtune", "✗", "it cannot express the law Yarn"),
    ],
)
def test_a_cell(name: str, target: str, symbols: str, reason: str) -> None:
    """How it is proved, whether weights are reordered, whether a rule is one law; or why not."""
    found = cell(phasor.preset(name), target)
    assert (found.symbols, found.reason) == (symbols, reason)


@pytest.mark.slow
def test_every_preset_is_in_one_row_and_every_target_has_a_column() -> None:
    """Rows are numbered as the lists of their presets below, of those with more than one."""
    lines = list(map_table())
    header, _, *rest = lines
    assert header.split("|")[2:-1] == [f" `{name}` " for name in sorted(TARGETS)]
    rows = [line for line in rest if line.startswith("| ")]
    listed = lines[lines.index("The presets of each row:") + 2 :]
    lists = {line.partition(". ")[0]: line.partition(". ")[2].split(", ") for line in listed}
    names: list[str] = []
    for row in rows:
        number, first, *more = row.removeprefix("| ").partition(" |")[0].split(" ")
        these = lists.pop(number.rstrip("."), [first])
        assert these[0] == first
        assert len(these) - 1 == (int(more[0]) if more else 0)
        assert row.count("|") == len(TARGETS) + 2
        names += these
    assert lists == {}
    assert sorted(name.strip("`") for name in names) == sorted(phasor.preset_names())


def test_every_number_of_a_reason_is_explained() -> None:
    """In the list below the table, in order."""
    text = (DOCS / "translate.md").read_text("utf-8").partition("<!-- map -->")[2]
    table, _, reasons = text.partition("Reasons:")
    reasons = reasons.partition("The presets")[0]
    used = {cell.partition("<")[0] for cell in table.split("<sup>")[1:]}
    assert used == {line.partition(".")[0] for line in reasons.splitlines() if line}


def test_a_program_that_was_run_once_turned_all_that_it_was_given() -> None:
    """As its line says, which ``python -m tools.engines --keep`` wrote."""
    assert [name for name in sorted(TARGETS) if TARGETS[name].checked == "engine"] == [*ENGINES]
    for run in ENGINES.values():
        for right, given, asked in (run["presets"], run["random"]):
            assert 0 < right == given <= asked


def test_a_tick_comes_only_from_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tool stops at a program that is not installed, or turns otherwise."""
    absent = replace(TARGETS["mlx"], package="no-such-package")
    for target, error in ((absent, PackageNotFoundError), (TARGETS["mlx"], AssertionError)):
        monkeypatch.setattr("tools.doc_tables.TARGETS", {"mlx": target})
        monkeypatch.setitem(PROGRAMS, "mlx", lambda job: job.x)
        with pytest.raises(error):
            list(made())
