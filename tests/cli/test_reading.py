"""The options that say how a config file is read, in every command that reads one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ..files.configs.config_files import small
from .running import run_phasor


def ran(*arguments: object) -> tuple[int, str]:
    """Exit status, and everything printed."""
    done = run_phasor(*arguments)
    return done.returncode, done.stdout + done.stderr


def saved(folder: Path, config: object) -> Path:
    """A config file."""
    path = folder / "config.json"
    path.write_text(json.dumps(config), "utf-8")
    return path


COMMANDS = {
    "show": ["show", "FILE"],
    "diff": ["diff", "FILE", "FILE"],
    "extend": ["extend", "FILE", "--to", "16384"],
}


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize(
    ("config", "way_out"),
    [
        (small(rope_zoom=2.0), "--no-strict"),
        (small("mymodel", architectures=["LlamaForCausalLM"]), "--like llama"),
    ],
    ids=["a stray key", "an unknown type"],
)
def test_what_cannot_be_read_names_the_option_that_reads_it(
    name: str, config: object, way_out: str, tmp_path: Path
) -> None:
    """In every command; and with it the file is read."""
    path = saved(tmp_path, config)
    words = [path if word == "FILE" else word for word in COMMANDS[name]]
    status, said = ran(*words)
    assert status != 0
    assert way_out in said
    assert ran(*words, *way_out.split())[0] == 0


def test_a_part_is_shown_by_its_key(tmp_path: Path) -> None:
    """A vision tower beside its language model."""
    tower = {"model_type": "pixtral", "head_dim": 64, "num_hidden_layers": 24}
    path = saved(tmp_path, small("mistral3", text_config=small("mistral"), vision_config=tower))
    assert "pixtral: 24 layers" in ran("show", path, "--part", "vision_config")[1]


@pytest.mark.parametrize("command", ["show", "diff", "translate"])
def test_a_warning_is_a_line_on_stderr(command: str, tmp_path: Path) -> None:
    """It names no code, and what is printed for other programs stays as it is."""
    path = saved(tmp_path, small(rope_zoom=2.0))
    words = {"show": [path], "diff": [path, path], "translate": [path, "--to", "vllm"]}[command]
    done = run_phasor(command, *words, "--no-strict", "--json")
    assert done.stderr.startswith("phasor: warning: Left aside: rope_zoom (got 2.0)")
    assert done.stderr.count("\n") == done.stderr.count("phasor: warning: ")
    json.loads(done.stdout)
