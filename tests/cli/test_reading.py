"""The options that say how a config file is read, in every command that reads one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from phasor.cli import main

from ..files.configs.config_files import small


def ran(*arguments: object) -> tuple[int, str]:
    """Exit status, and everything printed or raised."""
    result = CliRunner().invoke(main, [str(one) for one in arguments])
    return result.exit_code, f"{result.output}{result.exception}"


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
def test_a_stray_is_left_aside_when_asked(name: str, tmp_path: Path) -> None:
    """And the error says how."""
    path = saved(tmp_path, small(rope_zoom=2.0))
    words = [path if word == "FILE" else word for word in COMMANDS[name]]
    status, said = ran(*words)
    assert status != 0
    assert "--no-strict" in said
    assert ran(*words, "--no-strict")[0] == 0


@pytest.mark.parametrize("name", COMMANDS)
def test_an_unknown_type_is_read_as_a_known_one(name: str, tmp_path: Path) -> None:
    """The error names the option."""
    path = saved(tmp_path, small("mymodel", architectures=["LlamaForCausalLM"]))
    words = [path if word == "FILE" else word for word in COMMANDS[name]]
    status, said = ran(*words)
    assert status != 0
    assert "--like llama" in said
    assert ran(*words, "--like", "llama")[0] == 0


def test_a_part_is_shown_by_its_key(tmp_path: Path) -> None:
    """A vision tower beside its language model."""
    tower = {"model_type": "pixtral", "head_dim": 64, "num_hidden_layers": 24}
    path = saved(tmp_path, small("mistral3", text_config=small("mistral"), vision_config=tower))
    assert "pixtral: 24 layers" in ran("show", path, "--part", "vision_config")[1]
