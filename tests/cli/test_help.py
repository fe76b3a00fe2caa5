"""What somebody reads who does not know a command yet, or has typed one wrong."""

from __future__ import annotations

import re
import shlex

import pytest

from phasor.cli import COMMANDS
from phasor.extending.laws import EVIDENCE
from phasor.files.presets import preset_names

from ..files.checkpoint.checkpoints import llama, llama_tensors, save_folder
from ..offline import refuse_connections
from ..verify.programs import save_recording
from .running import run_phasor

FUNCTION = """
from phasor import Rope
from phasor.numpy import rotate as rotate_by_phasor
def rotate(x, positions):
    return rotate_by_phasor(x, positions, Rope(head_dim=128, pairing="half"))
"""
# what an example needs beside phasor
SLOW = {"report": pytest.mark.report, "demo": pytest.mark.slow}


def example(*command: str) -> list[str]:
    """The words of the example under a command's help, after ``phasor``."""
    (line,) = re.findall(r"^  Example: phasor (.+)$", run_phasor(*command, "--help").stdout, re.M)
    return shlex.split(line)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=SLOW.get(name, ())) for name in ("", *COMMANDS)]
)
def test_the_example_of_every_help_runs(tmp_path, monkeypatch, name):
    """It is of that command, on one line, and ends with what the command is for."""
    refuse_connections(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "model.py").write_text(FUNCTION, "utf-8")
    save_folder(tmp_path / "llama", llama(), llama_tensors())
    save_recording(tmp_path / "recording.npz")
    words = example(*filter(None, [name]))
    assert words[0] == name or not name
    done = run_phasor(*words)
    assert (done.returncode, done.stderr) == (1 if name == "diff" else 0, "")
    assert done.stdout


def misspelt(word: str) -> set[str]:
    """The word without one of its letters, and with two that are next to each other exchanged."""
    shorter = {word[:i] + word[i + 1 :] for i in range(len(word))}
    turned = {word[:i] + word[i + 1] + word[i] + word[i + 2 :] for i in range(len(word) - 1)}
    return (shorter | turned) - {word}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_misspelt_command_suggests_the_one_that_is_meant(name):
    """Whichever letter is missing or out of place."""
    for word in misspelt(name):
        done = run_phasor(word)
        assert (done.returncode, done.stdout) == (2, "")
        assert re.search(rf"No such command '{word}'; did you mean .*'{name}'", done.stderr)


def test_a_command_that_is_near_to_none_leads_to_the_list():
    """And an option in its place is still an option."""
    assert "'qqq'; `phasor --help` lists them all" in run_phasor("qqq").stderr
    refused = run_phasor("--nosuch").stderr
    assert "No such option" in refused
    assert "--nosuch" in refused


@pytest.mark.parametrize(
    "arguments",
    [["extend", "llama-3-8b"], ["show"], ["convert", "a"], ["show", "a", "--nosuch"]],
    ids=" ".join,
)
def test_a_wrong_use_leads_to_the_example(arguments):
    """Of the command that was typed."""
    done = run_phasor(*arguments)
    assert done.returncode == 2
    assert done.stderr.endswith(f"`phasor {arguments[0]} --help` has an example.\n")


@pytest.mark.parametrize(
    "law", [name for name in EVIDENCE if name not in ("unchanged", "longrope")]
)
def test_a_law_is_taken_in_any_capitals_and_suggested_when_misspelt(law):
    """Where its block is printed, and where a parameter is set."""
    model = ["extend", "llama-3-8b", "--to", "16k"]
    printed = run_phasor(*model, "--law", law)
    assert run_phasor(*model, "--law", law.title().replace("_", "-")).stdout == printed.stdout
    refused = run_phasor(*model, "--law", law[:-1] + "q")
    assert re.search(f"; did you mean .*{law}", refused.stderr)
    if law == "yarn":
        assert run_phasor(*model, "--law", "YARN", "--json").returncode == 0
        set_plainly, set_loudly = (
            run_phasor(*model, "--law", spelling, "--set", "beta_fast=16").stdout
            for spelling in ("yarn", "YaRN")
        )
        assert set_plainly == set_loudly != printed.stdout


def test_longrope_says_what_it_needs_in_any_capitals():
    """It is a law, and not one that can be had without a search."""
    for spelling in ("longrope", "LongRoPE"):
        refused = run_phasor("extend", "llama-3-8b", "--to", "16k", "--law", spelling)
        assert "longrope needs factors" in refused.stderr


@pytest.mark.parametrize("name", ["Llama-3-8B", "Llama 3 8B", "LLAMA_3_8B", "llama3-8b"])
def test_a_preset_is_taken_in_any_capitals_and_punctuation(name):
    """As makers of models write it."""
    assert run_phasor("show", name).stdout == run_phasor("show", "llama-3-8b").stdout


def test_numbers_in_a_name_stay_apart():
    """18B is no 1.8B: such a name is refused, and the nearest are named."""
    refused = run_phasor("show", "Llama-3-18B")
    assert refused.returncode == 2
    assert "did you mean 'llama-3-8b'" in refused.stderr
    assert "llama-3.1-8b" in preset_names()


def test_a_context_that_the_model_has_already_is_said():
    """Not as a bound that is one more than it."""
    refused = run_phasor("extend", "llama-3.1-8b", "--to", "100k")
    assert refused.stderr == (
        "phasor: to must be above the context of 131072 tokens, got 102400: "
        "fewer tokens need no other law\n"
    )
    assert "context of 131072 tokens" in run_phasor("extend", "llama-3.1-8b", "--to", "128k").stderr
