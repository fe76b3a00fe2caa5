"""``phasor convert``: what it says, what it writes, and how it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phasor.cli import run

from ..files.checkpoint.checkpoints import (
    Tensors,
    llama,
    llama_tensors,
    load,
    save,
    save_folder,
    tensor,
)
from ..files.checkpoint.metas_llama import PARAMS, random_weights, save_meta
from .running import run_phasor

ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # interleaved rows from halves, of a head of 8


def convert(*arguments: Any) -> subprocess.CompletedProcess[str]:
    """``phasor convert`` with these arguments."""
    return run_phasor("convert", *arguments)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small Llama's folder."""
    return save_folder(tmp_path / "a", llama(), llama_tensors())


def test_a_folder_is_converted_and_verified(tmp_path: Path, folder: Path) -> None:
    """It says what changed and what the config does not know, and back again gives every byte."""
    done = convert(folder, tmp_path / "b", "--to", "interleaved", "--verify")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"{folder}: half to interleaved, 8 of 15 tensors change",
        "  model.layers.*.self_attn.q_proj.weight  2 x query",
        "  model.layers.*.self_attn.q_proj.bias  2 x query",
        "  model.layers.*.self_attn.k_proj.weight  2 x key",
        "  model.layers.*.self_attn.k_proj.bias  2 x key",
        "The result is in interleaved pairing.",
        "A config.json with model_type llama means half pairing and cannot state another: run "
        "the result with code that rotates interleaved pairs.",
        "Verified: both sides agree, byte for byte and in their scores.",
        f"Written to {tmp_path / 'b'}. Other files than weights were not copied.",
    ]
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["model.safetensors"]
    back = ("--to", "half", "--from", "interleaved", "--config", folder)
    done = convert(tmp_path / "b", tmp_path / "c", *back)
    assert "That is what the config describes." in done.stdout
    assert (tmp_path / "c/model.safetensors").read_bytes() == (
        folder / "model.safetensors"
    ).read_bytes()


def test_a_key_that_is_read_past_is_warned_of(folder: Path) -> None:
    """As in the other commands; what is assumed beside it is not."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"rope_yarn": 8}), "utf-8")
    done = convert(folder, "--to", "interleaved", "--dry-run", "--no-strict")
    assert done.returncode == 0, done.stderr
    (warning,) = done.stderr.splitlines()
    assert warning.startswith("phasor: warning: Left aside: rope_yarn (got 8)")


def test_a_dry_run_writes_nothing(tmp_path: Path, folder: Path) -> None:
    """With or without a name for the result."""
    for out in ([], [tmp_path / "b"]):
        done = convert(folder, *out, "--to", "interleaved", "--dry-run")
        assert done.returncode == 0
        assert "8 of 15 tensors change" in done.stdout
        assert done.stdout.endswith("Nothing was written.\n")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_single_file_becomes_a_single_file(tmp_path: Path, folder: Path) -> None:
    """With the config that lies beside it."""
    out = tmp_path / "b.safetensors"
    assert convert(folder / "model.safetensors", out, "--to", "interleaved").returncode == 0
    name = "model.layers.0.self_attn.q_proj.bias"
    before = load(folder / "model.safetensors")[name].reshape(4, 8)
    assert np.array_equal(load(out)[name].reshape(4, 8), before[:, ORDER])


def test_a_lora_is_converted_by_the_width_of_its_heads(tmp_path: Path) -> None:
    """No config: the outer matrices move, the inner ones stay."""
    rng = np.random.default_rng(0)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    adapter: Tensors = {
        name.format("A"): tensor(rng.standard_normal((2, 16))),
        name.format("B"): tensor(rng.standard_normal((16, 2))),
    }
    file = save(tmp_path / "adapter_model.safetensors", adapter)
    out = tmp_path / "b.safetensors"
    done = convert(file, out, "--to", "interleaved", "--head-dim", 8, "--verify")
    assert done.returncode == 0, done.stderr
    before, after = load(file), load(out)
    assert np.array_equal(before[name.format("A")], after[name.format("A")])
    rows = before[name.format("B")].reshape(2, 8, 2)
    assert np.array_equal(after[name.format("B")].reshape(2, 8, 2), rows[:, ORDER])


@pytest.mark.parametrize(
    ("option", "shape", "order"),
    [
        ("--query", (8, 2), ORDER),
        ("--key", (8, 2), ORDER),
        ("--vectors", (8,), ORDER),
        ("--qkv-blocks", (24, 2), [*ORDER, *(8 + i for i in ORDER), *range(16, 24)]),
        ("--qkv-groups", (24, 2), [*ORDER, *(8 + i for i in ORDER), *range(16, 24)]),
    ],
)
def test_patterns_choose_the_tensors(
    tmp_path: Path, option: str, shape: tuple[int, ...], order: list[int]
) -> None:
    """They stand instead of the names that phasor knows."""
    numbers = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    tensors = {"layers.0.mine": tensor(numbers), "layers.0.mine.too": tensor(numbers)}
    file = save(tmp_path / "a.safetensors", tensors)
    (tmp_path / "config.json").write_text(
        json.dumps(llama(num_attention_heads=1, num_key_value_heads=1, head_dim=8))
    )
    out = tmp_path / "b.safetensors"
    done = convert(file, out, "--to", "interleaved", option, r"layers\.\d+\.mine", "--verify")
    assert done.returncode == 0, done.stderr
    found = load(out)
    assert np.array_equal(found["layers.0.mine"], numbers[order])
    assert np.array_equal(found["layers.0.mine.too"], numbers)


def test_a_slice_of_the_head_is_said_with_numbers(tmp_path: Path) -> None:
    """The head's width, how much of it turns, and where that begins."""
    numbers = np.arange(7, dtype=np.float32)
    file = save(tmp_path / "a.safetensors", {"keys": tensor(numbers)})
    slice_of_head = ("--head-dim", 7, "--rotary-dim", 4, "--rotary-start", 2)
    out = tmp_path / "b.safetensors"
    done = convert(file, out, "--to", "half", *slice_of_head, "--vectors", "keys")
    assert done.returncode == 0, done.stderr
    assert load(out)["keys"].tolist() == [0, 1, 2, 4, 3, 5, 6]


def test_a_llama_goes_to_transformers_and_back(tmp_path: Path) -> None:
    """Each way verified, with what the result needs; the weights are the same bytes at the end."""
    weights = random_weights(PARAMS)
    meta = save_meta(tmp_path / "meta", PARAMS, weights, 2)
    done = convert(meta, tmp_path / "hf", "--for", "transformers", "--verify")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"{meta}: 21 tensors of 2 ranks for transformers, 4 from interleaved to half",
        "rope_parameters: for transformers 5. rope_theta and rope_scaling: the same for "
        "transformers 4 and the classes of mlx-lm that know these keys.",
        "Add the tokenizer's bos and eos ids.",
        "The tokenizer is not converted.",
        "Verified: both sides agree, byte for byte and in their scores.",
        f"Written to {tmp_path / 'hf'}: config.json and model.safetensors.",
    ]
    done = convert(tmp_path / "hf", tmp_path / "back", "--for", "meta", "--verify")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].endswith("params.json and consolidated.safetensors.")
    found = load(tmp_path / "back/consolidated.safetensors")
    assert all(found[name].tobytes() == weights[name].numpy().tobytes() for name in weights)
    done = convert(meta, "--for", "transformers", "--dry-run")
    assert done.stdout.endswith("The tokenizer is not converted.\nNothing was written.\n")


BAD: dict[str, tuple[list[str], str]] = {
    "no target pairing": (["a", "b"], "Use either --to or --for."),
    "no such program": (["a", "b", "--for", "vllm"], "vllm"),
    "a program and a pairing": (
        ["a", "b", "--for", "meta", "--to", "half"],
        "Use either --to or --for.",
    ),
    "a program and a width": (
        ["a", "b", "--for", "meta", "--head-dim", "64"],
        "no other argument goes with the program meta",
    ),
    "a program and another reading": (
        ["a", "b", "--for", "meta", "--no-strict"],
        "no other argument goes with the program meta",
    ),
    "not what Meta's code computes": (["a", "b", "--for", "meta"], "these tensors are missing"),
    "Meta's files without a program": (["pth", "b", "--to", "half"], "--for transformers"),
    "Meta's files without params.json": (["pth", "b", "--for", "transformers"], "params.json is"),
    "no such pairing": (["a", "b", "--to", "halves"], "halves"),
    "no result": (["a", "--to", "interleaved"], "Missing argument 'OUT'"),
    "no source": (["none", "b", "--to", "half"], "none does not exist"),
    "already there": (["a", "b", "--to", "half"], "half pairing already"),
    "the result exists": (["a", "a", "--to", "interleaved"], "exists and is not overwritten"),
    "an odd head": (["a", "b", "--to", "half", "--head-dim", "7"], "rotary_dim must be even"),
    "two descriptions": (
        ["a", "b", "--to", "half", "--head-dim", "8", "--config", "a"],
        "--head-dim replaces --config",
    ),
    "a part of nothing": (["a", "b", "--to", "half", "--rotary-dim", "4"], "need --head-dim"),
    "nothing to verify": (
        ["a", "b", "--to", "interleaved", "--dry-run", "--verify"],
        "nothing to read after --dry-run",
    ),
    "no match": (["a", "b", "--to", "interleaved", "--query", "wq"], "matches none of model.embed"),
    "a pickle": (["pickle.bin", "b", "--to", "half", "--head-dim", "8"], "PyTorch pickle"),
    "a truncated file": (
        ["cut.safetensors", "b", "--to", "half", "--head-dim", "8"],
        "is truncated, damaged or not a safetensors file",
    ),
    "another config": (["a", "b", "--to", "half", "--config", "none"], "none is not a file"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path: Path, folder: Path, kind: str) -> None:
    """Nothing on stdout, no traceback, no file more than before."""
    (tmp_path / "pickle.bin").write_bytes(b"PK\x03\x04" + bytes(60))
    whole = (folder / "model.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[:-1])
    (tmp_path / "pth").mkdir()
    (tmp_path / "pth/consolidated.00.pth").touch()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    arguments, said = BAD[kind]
    files = {"a", "b", "none", "pth", "pickle.bin", "cut.safetensors"}
    done = convert(*(tmp_path / word if word in files else word for word in arguments))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("phasor: ")
    assert done.stderr.count("\n") == 1
    assert said in done.stderr
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_conversion_that_fails_its_check_is_a_failed_check(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Status 1, and no result; input that cannot be read is 2."""
    monkeypatch.setattr("phasor.files.checkpoint.conversion._scores_agree", lambda *_: False)
    words = ["convert", str(folder), str(tmp_path / "b"), "--to", "interleaved", "--verify"]
    monkeypatch.setattr(sys, "argv", ["phasor", *words])
    with pytest.raises(SystemExit) as leaving:
        run()
    assert leaving.value.code == 1
    assert "changes its scores" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


@pytest.mark.processes
def test_the_command_needs_no_torch(tmp_path: Path, folder: Path) -> None:
    """Beside NumPy the package that checks headers is enough."""
    program = (
        "import sys, phasor.cli as cli\n"
        "try:\n    cli.run()\nexcept SystemExit:\n    pass\n"
        "print('torch' in sys.modules)"
    )
    arguments = ["convert", str(folder), str(tmp_path / "b"), "--to", "interleaved", "--verify"]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True
    )
    assert "Verified" in done.stdout
    assert done.stdout.splitlines()[-1] == "False"


def test_no_progress_bar_goes_into_a_pipe(tmp_path: Path, folder: Path) -> None:
    """It is for terminals."""
    assert convert(folder, tmp_path / "b", "--to", "interleaved").stderr == ""


@pytest.mark.skipif(sys.platform != "linux", reason="opens a pseudo-terminal")
@pytest.mark.processes
def test_a_terminal_sees_progress(tmp_path: Path, folder: Path) -> None:
    """A bar on stderr that ends at the size of the files."""
    import pty

    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "phasor", "convert", folder, tmp_path / "b", "--to", "interleaved"],
        stdout=subprocess.DEVNULL,
        stderr=theirs,
        env={**os.environ, "COLUMNS": "80", "TERM": "xterm"},
    ) as run:
        assert run.wait() == 0
    os.close(theirs)
    shown = os.read(ours, 65536).decode()
    os.close(ours)
    size = (folder / "model.safetensors").stat().st_size / 1000
    assert f"{size:.1f}/{size:.1f} kB" in shown
