"""Which program can perform which model's rotation: the answers, and the table made of them."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import PackageNotFoundError

import pytest
from tools.doc_tables import ENGINES, REFUSED, SHOWN, generated_tables, map_table

import phasor
from phasor.cli.translate import answer
from phasor.files.translation import TARGETS

from .programs import PROGRAMS


@pytest.mark.parametrize(
    ("name", "target", "says"),
    [
        ("llama-3.1-8b", "mlx", "yes"),
        ("llama-3.1-8b", "rotary-embedding-torch", "yes, after reordering the weights"),
        ("phi-4-mini", "mlx", "yes, at one length (--seq-len 131072)"),
        ("phi-4-mini", "transformers", "yes"),
        (
            "internlm2.5-7b",
            "rotary-embedding-torch",
            "yes, at one length (--seq-len 32768), after reordering the weights",
        ),
        ("flux.1-dev", "mlx", "no"),
        ("gpt-oss-20b", "torchtune", "no"),
    ],
)
def test_an_answer(name: str, target: str, says: str) -> None:
    """Whether weights are reordered, and whether a rule is one law."""
    assert answer(phasor.preset(name), target).as_text() == says


def test_a_no_has_a_reason() -> None:
    """Without the program's name, which stands before it."""
    assert answer(phasor.preset("flux.1-dev"), "mlx").reason == "positions of 3 axes (Axial)"
    refused = answer(phasor.preset("gpt-oss-20b"), "torchtune")
    assert (refused.reason, round(refused.radians or 0)) == ("the law Yarn", 557)


def test_the_short_map_has_a_row_for_every_target_and_a_column_for_every_model() -> None:
    """A sign where the answer is no plain yes."""
    header, _, *rows = map_table()
    assert header.split("|")[2:-1] == [f" `{name}` " for name in SHOWN]
    assert [row.split("|")[1].strip(" `") for row in rows] == sorted(TARGETS)
    for row in rows:
        target, *cells = (cell.strip(" `") for cell in row.split("|")[1:-1])
        for name, cell in zip(SHOWN, cells, strict=True):
            found = answer(phasor.preset(name), target)
            assert (REFUSED in cell) == (not found.can)
            assert (cell == "") == (found.as_text() == "yes")


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
            list(generated_tables())
