"""The options that say how a config file is read, in every command that reads one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import phasor

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


def test_a_refusal_with_json_is_one_object(tmp_path: Path) -> None:
    """With the warnings that came before it, and nothing on stderr; the status stays."""
    path = saved(tmp_path, small(rope_zoom=2.0, rope_theta=-1.0))
    for words, says in (
        (["show", "nothing"], "name must be one of"),
        (["show", path, "--no-strict"], "rope_theta"),
        (["translate", "qwen3-8b", "--to", "torchtune", "--nope"], "No such option"),
        (["nope"], "No such command"),
    ):
        done = run_phasor(*words, "--json")
        refused = json.loads(done.stdout)
        assert (done.returncode, done.stderr) == (2, "")
        assert says in refused["error"]
    assert refused.keys() == {"error", "warnings"}


@pytest.mark.parametrize(
    "address",
    [
        "https://huggingface.co/Qwen/Qwen3-8B",
        "https://huggingface.co/Qwen/Qwen3-8B/blob/main/config.json?download=true",
        "https://huggingface.co/Qwen/Qwen3-8B/resolve/main/config.json",
        "https://huggingface.co/Qwen/Qwen3-8B/tree/main",
        "hf.co/Qwen/Qwen3-8B/",
    ],
)
def test_an_address_of_the_hub_is_the_repository(address: str) -> None:
    """As a browser shows it."""
    assert run_phasor("show", address).stdout == run_phasor("show", "Qwen/Qwen3-8B").stdout


def test_an_address_that_is_no_preset_gets_the_command_with_its_id() -> None:
    """Nothing is downloaded; another site's is downloaded by hand."""
    done = run_phasor("show", "https://huggingface.co/owner/model/blob/main/config.json")
    assert done.returncode == 2
    assert "`hf download owner/model config.json`" in done.stderr
    assert (
        "phasor downloads nothing" in run_phasor("show", "https://example.org/config.json").stderr
    )


def test_a_preset_given_to_load_is_pointed_to() -> None:
    """The command line takes both, Python has a function for each."""
    with pytest.raises(phasor.errors.ConfigError, match=r"is phasor\.preset\('llama-3-8b'\)"):
        phasor.load("Llama 3 8B")


def test_files_that_stand_for_others_are_named(tmp_path: Path) -> None:
    """A pointer of git-lfs under any name, and what begins in no way as GGUF."""
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    for name in ("model.gguf", "config.json", "model.safetensors"):
        (tmp_path / name).write_text(pointer)
    for words in (
        ["show", tmp_path / "model.gguf"],
        ["show", tmp_path / "config.json"],
        ["verify", "llama-3-8b", tmp_path / "model.safetensors"],
    ):
        assert "is a git-lfs pointer instead" in run_phasor(*words).stderr
    (tmp_path / "cut.gguf").write_bytes(bytes(range(1, 100)))
    assert "does not begin as a GGUF file" in run_phasor("show", tmp_path / "cut.gguf").stderr
