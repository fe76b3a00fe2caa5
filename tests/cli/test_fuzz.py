"""Every command over files and arguments that mean harm: how it ends and what it lets through."""

from __future__ import annotations

import json
import os
import struct
import unicodedata
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from ..each import each
from ..files.checkpoint.checkpoints import (
    header_of,
    in_file,
    llama,
    llama_tensors,
    save,
    save_folder,
)
from .running import run_phasor

# every control character, what turns the direction of writing, half a surrogate pair, rich's markup
HARM = (
    "".join(map(chr, (*range(32), *range(127, 160))))
    + "\x1b]0;title\x07\x1b[2J\x1b[31m\u202eabc\u2066\u200f\u2028\u2029\ufeff\ud800"
    + "[bold red]red[/] [link=https://x.test]link[/link] [/wrong] :smile: \nphasor: fine"
)
# what of it a shell hands over: no zero byte, and half a pair only for a byte that is no UTF-8
TYPED = HARM.replace("\0", "").replace("\ud800", "\udcff")
DIGITS = "9" * 4400
DEEP = "[" * 100_000
GOOD = llama(max_position_embeddings=64)


def as_text(**changes: Any) -> bytes:
    """A config with something changed."""
    return json.dumps(GOOD | changes).encode()


CONFIGS: dict[str, bytes] = {
    "good": as_text(),
    "a name": as_text(_name_or_path=HARM),
    "a model type": as_text(model_type=HARM),
    "a model type of lists": as_text(model_type=[[HARM]]),
    "a key": as_text(**{f"rope_{HARM}": 1}),
    "a key of the scaling": as_text(rope_scaling={"type": "linear", "factor": 2.0, HARM: 3}),
    "a scaling type": as_text(rope_scaling={"rope_type": HARM, "factor": 2.0}),
    "a kind of layer": as_text(model_type="gemma3_text", layer_types=[HARM, HARM]),
    "a block of kinds": as_text(rope_parameters={HARM: {"rope_type": HARM}}),
    "a config in a config": as_text(text_config=HARM),
    "an escape in a number": as_text(rope_theta=HARM),
    "an architecture of GGUF": json.dumps({"general.architecture": HARM}).encode(),
    "a name in GGUF": json.dumps({
        "general.architecture": "llama", "general.name": HARM, "llama.block_count": 2,
        "llama.embedding_length": 32, "llama.attention.head_count": 4,
        "llama.context_length": 64, f"llama.rope.{HARM}": 1,
    }).encode(),
    "a wide head": as_text(head_dim=4096),
    "many layers": as_text(num_hidden_layers=10**9),
    "a long context": as_text(max_position_embeddings=2**62),
    "a number of many digits": as_text().replace(b"100.0", DIGITS.encode()),
    "a number beyond floats": as_text().replace(b"100.0", b"1e999"),
    "no number": as_text().replace(b"100.0", b"NaN"),
    "twice": b'{"\\u001b[2J": 1, "\\u001b[2J": 2}',
    "depth": DEEP.encode(),
    "nothing": b"",
    "a list": b"[]",
    "null": b"null",
    "no text": bytes(range(256)),
    "a byte-order mark": b"\xef\xbb\xbf" + as_text(),
    "UTF-16": as_text().decode().encode("utf-16"),
    "GGUF itself": b"GGUF" + bytes(99),
    "half an escape": b'{"model_type": "\\u00"}',
}  # fmt: skip


def tensors_named(*names: str) -> bytes:
    """A checkpoint whose tensors have these names, a byte each."""
    tensors = {name: ("U8", [1], b"\0") for name in names}
    return in_file(header_of(tensors), b"\0" * len(tensors))


def tensor_of(**said: Any) -> bytes:
    """A checkpoint with one tensor that says these things about itself."""
    entry = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]} | said
    return in_file({"model.layers.0.self_attn.q_proj.weight": entry}, b"\0")


CHECKPOINTS: dict[str, bytes] = {
    "tensors": tensors_named(HARM, f"model.layers.0.self_attn.q_proj.{HARM}"),
    "a layer": tensors_named(f"model.layers.{DIGITS}.self_attn.q_proj.weight"),
    "a layer in other digits": tensors_named("model.layers.\u0663.self_attn.q_proj.weight"),
    "a type": tensor_of(dtype=HARM),
    "a shape that is large": tensor_of(shape=[2**62] * 1000),
    "a shape of many digits": tensor_of(shape=[10**4000, 10**4000]),
    "offsets of many digits": tensor_of(data_offsets=[10**4299 * 9, 10**4299 * 9 + 1]),
    "offsets that no file has": tensor_of(data_offsets=[2**63 - 2, 2**63 - 1]),
    "a description": tensor_of(**{HARM: 1}),
    "metadata": in_file({"__metadata__": {HARM: 1}}, b""),
    "a header of gigabytes": struct.pack("<Q", 5 << 30) + b"{}",
    "a header beyond all": b"\xff" * 8 + b"{}",
    "a header that is deep": in_file(DEEP, b""),
    "a header that says a thing twice": in_file('{"\\u001b[2J": 1, "\\u001b[2J": 2}', b""),
    "a header of many digits": in_file(f'{{"a": {DIGITS}}}', b""),
    "a pickle": b"PK\x03\x04" + bytes(60),
    "no header": b"",
}


KINDS_OF_HARM = ("Cc", "Cf", "Cs", "Zl", "Zp")


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command runs in a folder of its own."""
    monkeypatch.chdir(tmp_path)


def check(done: CompletedProcess[str], *allowed: int) -> None:
    """It ended as it may, said why in one line where it refused, and nothing obeyed a file."""
    assert done.returncode in (allowed or (0, 1, 2))
    came_through = set(done.stdout + done.stderr) - {"\n"}
    assert {c for c in came_through if unicodedata.category(c) in KINDS_OF_HARM} == set()
    if done.returncode == 2 and "--json" in done.args:
        assert json.loads(done.stdout).keys() == {"error", "warnings"}
        assert done.stderr == ""
    elif done.returncode == 2:
        assert done.stdout == ""
        assert done.stderr.startswith("phasor: ")
        assert done.stderr.count("\n") == 1


WIDE = "a wide head"  # takes longer than all the others
READERS = {
    "show": ["show", "{}", "--pairs"],
    "show as JSON": ["show", "{}", "--json"],
    "show at a length": ["show", "{}", "--seq-len", "9", "--context", "7"],
    "diff": ["diff", "{}", "llama-3-8b"],
    "diff with itself": ["diff", "{0}", "{0}", "--json"],
    "diff with a function": ["diff", "{}", "no_such_module:f"],
    "extend": ["extend", "{}", "--to", "128"],
    "extend as JSON": ["extend", "{}", "--to", "128", "--json"],
    "convert": ["convert", "good.safetensors", "--dry-run", "--to", "half", "--config", "{}"],
}


@each("command", READERS)
@pytest.mark.parametrize(
    "kind", [*sorted(CONFIGS.keys() - {WIDE}), pytest.param(WIDE, marks=pytest.mark.slow)]
)
def test_no_config_does_harm(kind: str, command: str) -> None:
    """Read by every command, from a folder with the most harmful of names."""
    folder = Path(TYPED.replace("/", "")[:60])
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes(CONFIGS[kind])
    save(Path("good.safetensors"), llama_tensors())
    check(run_phasor(*(word.format(folder / "config.json") for word in READERS[command])))


@pytest.mark.parametrize("kind", ["good", "a name", "a kind of layer", "a long context"])
@pytest.mark.report
def test_no_config_does_harm_in_a_report(kind: str) -> None:
    """Nor does a page that is written as UTF-8."""
    Path("config.json").write_bytes(CONFIGS[kind])
    check(run_phasor("report", "config.json", "-o", "page.html"))


@pytest.mark.parametrize("more", [["--head-dim", "8"], ["--head-dim", "8", "--query", ".*"], []])
@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_no_checkpoint_does_harm(kind: str, more: list[str]) -> None:
    """By its tensors' names, its numbers, or its header."""
    Path("model.safetensors").write_bytes(CHECKPOINTS[kind])
    Path("config.json").write_bytes(as_text())
    check(run_phasor("convert", "model.safetensors", "out", "--to", "half", *more), 2)
    assert not Path("out").exists()


INDEXES = [
    *({HARM: "a"}, {"a": HARM}, {"a": "\ud800"}, {"a": "\0"}, {"a": "pipe.safetensors"}),
    *({"a": [HARM]}, HARM),
]


@pytest.mark.parametrize("weight_map", INDEXES, ids=ascii)
def test_no_index_does_harm(weight_map: object) -> None:
    """By what it names."""
    folder = save_folder(Path("a"), GOOD)
    os.mkfifo(folder / "pipe.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    check(run_phasor("convert", "a", "out", "--to", "interleaved"), 2)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="makes pipes")
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "x.safetensors.index.json"])
@pytest.mark.parametrize("command", [["show"], ["convert", "--to", "half", "--dry-run"],
                                     ["diff", "llama-3-8b"]], ids=" ".join)  # fmt: skip
def test_a_pipe_or_device_is_not_waited_for(command: list[str], name: str) -> None:
    """Where a file is wanted, given itself or lying in a folder."""
    os.mkfifo(name)
    for source in (name, ".", "/dev/zero", "/dev/null", "/dev/stdin"):
        check(run_phasor(*command, source), 2)


ARGUMENTS = [
    [TYPED],
    [f"--{TYPED}"],
    ["show", TYPED],
    ["show", "a" * 9999],
    ["show", "llama-3-8b", TYPED],
    ["show", "llama-3-8b", "--seq-len", TYPED],
    ["show", "llama-3-8b", "--seq-len", DIGITS],
    ["show", "llama-3-8b", "--context", DIGITS[:4000]],
    ["diff", "llama-3-8b", TYPED],
    ["diff", "-", "-"],
    ["diff", "llama-3-8b", "llama-3.1-8b", "--tolerance", "nan"],
    ["diff", "llama-3-8b", "llama-3.1-8b", "--context", DIGITS[:4000]],
    ["diff", "llama-3-8b", "a:b", "--kind", TYPED],
    ["extend", "llama-3-8b", "--to", DIGITS[:4000]],
    ["extend", "llama-3-8b", "--to", str(2**40)],
    ["extend", "llama-3-8b", "--to", "16384", "--law", TYPED],
    ["extend", "llama-3-8b", "--to", "16384", "--kind", TYPED],
    ["report", "llama-3-8b", "-o", f"{TYPED}.html"],
    ["report", "llama-3-8b", "-o", "/dev/full"],
    ["report", "llama-3-8b", "-o", "none/x.html"],
    ["report", "llama-3-8b", "-o", "x.html", "--to", str(2**62)],
    ["identify", TYPED],
    ["identify", TYPED, "--head-dim", "8"],
    ["identify", "no_module:f", "--head-dim", "8"],
    ["identify", "numpy:sin", "--head-dim", "1000000000"],
    ["identify", "numpy:sin", "--head-dim", "8", "--takes", TYPED],
    ["identify", "numpy:sin", "--head-dim", "8", "--dims", TYPED],
    ["identify", "numpy:sin", "--head-dim", "8", "--dtype", TYPED],
    ["identify", "numpy:sin", "--head-dim", "8", "--table", TYPED],
    ["identify", "json:dumps", "--head-dim", "8"],
    ["convert", TYPED, "out", "--to", "half"],
    ["convert", ".", TYPED, "--to", TYPED],
    ["convert", ".", "out", "--to", "half", "--head-dim", DIGITS],
    ["convert", ".", "out", "--to", "half", "--head-dim", "8", "--query", TYPED],
    ["convert", ".", "out", "--to", "half", "--head-dim", "8", "--query", "a{99999999999999}"],
    ["convert", ".", "out", "--to", "half", "--head-dim", "8", "--query", "(" * 9999],
    ["convert", ".", "out", "--to", "half", "--config", TYPED],
]


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=lambda words: ascii(" ".join(words))[:60])
def test_no_argument_does_harm(arguments: list[str]) -> None:
    """Refused in one line, or understood."""
    done = run_phasor(*arguments)
    understood = arguments[:2] == ["show", "llama-3-8b"] or arguments[-1] == DIGITS[:4000]
    check(done, *((0, 1, 2) if understood else (2,)))


@pytest.mark.parametrize("command", ["show", "extend", "diff"])
def test_an_ascii_terminal_is_no_error(command: str) -> None:
    """What it lacks is written as an escape."""
    Path("config.json").write_text(json.dumps(GOOD | {"_name_or_path": "모델 µ ─"}), "utf-8")
    more = {"show": [], "extend": ["--to", "128"], "diff": ["config.json"]}[command]
    done = run_phasor(command, "config.json", *more, encoding="ascii")
    assert done.returncode == 0
    assert done.stdout.startswith("\\ubaa8\\ub378 \\xb5 \\u2500")
