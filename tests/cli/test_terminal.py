"""What a terminal of 80 columns shows: no word broken, no line too long, no help cut short."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from phasor.cli import COMMANDS

from ..files.checkpoint.checkpoints import save, tensor
from ..files.configs.config_files import small
from ..offline import refuse_connections
from ..verify.programs import save_recording
from .running import run_phasor

FUNCTIONS = """
import numpy as np
from phasor import Rope
from phasor.numpy import rotate
def turned(x, positions):
    return rotate(x, positions, Rope(head_dim=64, pairing="half"))
def late(x, positions):
    return rotate(x, positions + 1, Rope(head_dim=64, pairing="half"))
"""
# what each command is given; what it prints for machines or as code may be as long as it is
GIVEN = {
    "show": [
        ["deepseek-v4-flash"],
        ["llama-3.1-8b", "--pairs"],
        ["phi-3.5-mini"],
        ["qwen3.5-35b-a3b"],
    ],
    "diff": [
        ["llama-3-8b", "llama-3.1-8b"],
        ["gemma-3-4b", "llama-4-scout"],
        ["qwen3-8b", "qwen3-8b"],
        ["somebodys:turned", "somebodys:late", "--head-dim", "64"],
    ],
    "identify": [["somebodys:late", "--head-dim", "64"]],
    "verify": [["llama-3.1-8b", "recording.npz"], ["llama-3.1-8b", "late.npz"]],
    "convert": [["meta.safetensors", "--to", "half", "--head-dim", "64", "--dry-run"]],
    "translate": [[], ["llama-3-8b", "--to", "transformers"]],
    "extend": [
        ["qwen3-8b", "--to", "128k"],
        ["llama-3-8b", "--to", "1M", "--law", "yarn"],
        ["gpt-j-6b", "--to", "8k", "--law", "linear"],
        ["config.json", "--to", "128k", "--law", "dynamic_ntk"],
        ["gemma-3-4b", "--to", "1M", "--kind", "full", "--law", "linear"],
    ],
    "report": [
        ["no-such-model-of-anybodys", "-o", "page.html"],
        ["qwen3-8b", "-o", "no/page.html"],
    ],
    "presets": [[], ["gemma"], ["no", "such", "name"]],
    "demo": [[]],
}
#: The command that draws a bar on stdout, so it is run into a file, which is given whole lines.
WITH_BAR = "demo"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A function, a config and a checkpoint in the folder."""
    refuse_connections(monkeypatch)
    (tmp_path / "somebodys.py").write_text(FUNCTIONS, "utf-8")
    (tmp_path / "config.json").write_text(json.dumps(small()), "utf-8")
    zeros = np.zeros((128, 4), np.float32)
    save_recording(tmp_path / "recording.npz")
    save_recording(tmp_path / "late.npz", late=3)
    tensors = {f"layers.0.attention.w{c}.weight": tensor(zeros) for c in "qkv"}
    save(tmp_path / "meta.safetensors", tensors)
    monkeypatch.chdir(tmp_path)


def shown(columns, *arguments):
    """What a terminal of that width shows, or the error, without colours."""
    colour = {} if arguments[0] == WITH_BAR else {"FORCE_COLOR": "1"}
    done = run_phasor(*arguments, COLUMNS=str(columns), TERM="xterm", **colour)
    assert done.returncode in (0, 1, 2)
    # spinners and bars are on stderr
    said = done.stderr if done.returncode == 2 else done.stdout
    return re.sub("\x1b\\[[0-9;]*m", "", said)


def words(text):
    """The words in it, without the lines of tables."""
    return sorted(word for word in text.split() if set(word) != {"─"})


def test_every_command_is_given_something():
    """So that a new one is looked at."""
    assert tuple(GIVEN) == COMMANDS


@pytest.mark.transformers
@pytest.mark.parametrize(
    "given", [[name, *some] for name in GIVEN for some in GIVEN[name]], ids=" ".join
)
def test_no_word_is_broken_and_no_line_is_too_long(given):
    """The words are those that a wide terminal shows, and only code is longer than the line."""
    narrow, wide = shown(80, *given), shown(2000, *given)
    assert words(narrow) == words(wide)
    assert "…" not in narrow
    for line in [] if given[0] == WITH_BAR else narrow.splitlines():
        assert len(line.rstrip()) <= 80 or " " not in line.strip(), line


@pytest.mark.parametrize(
    ("given", "listed"),
    [
        (["qwen2-vl-7b", "--to", "llama.cpp"], "[16, 24, 24, 0]"),
        (["qwen2-vl-7b", "--to", "gguf"], "[16, 24, 24, 0]"),
        (["qwen2-vl-7b", "--to", "sglang"], '"mrope_section": [16, 24, 24]'),
        (["llama-3.1-8b", "--to", "gguf"], ", 8.0, 8.0, 8.0]"),
    ],
)
def test_a_list_of_numbers_is_not_broken(given, listed):
    """It may be copied, from code, from a command or from a sentence."""
    assert listed in shown(40, "translate", *given)


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_ends_where_its_sentences_do(name):
    """Nothing is cut short with dots, and no bound of 19 digits is shown."""
    done = run_phasor(*filter(None, [name]), "--help")
    _, *lines = done.stdout.splitlines()
    assert not [line for line in lines if "..." in line or len(line) > 80]
    assert "9223372036854775807" not in done.stdout
    if name == "":
        commands = done.stdout.split("Commands:\n")[1].split("\n\n")[0]
        assert all(line.endswith(".") for line in commands.splitlines())


@pytest.mark.parametrize(("text", "tokens"), [("4096", 4096), ("128k", 1 << 17), ("1M", 1 << 20)])
@pytest.mark.parametrize("command", [["show", "--context"], ["report", "--to"], ["extend", "--to"]])
def test_tokens_are_counted_with_letters_too(command, text, tokens):
    """They are 1024 and 1024 times that, whatever their case."""
    from phasor.cli.options import TokenCount

    for spelling in (text, text.lower(), text.upper()):
        assert TokenCount().convert(spelling, None, None) == tokens
    refused = run_phasor(command[0], "llama-3-8b", command[1], "12q")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "128k (131072)" in refused.stderr
