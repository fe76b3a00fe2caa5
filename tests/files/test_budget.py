"""Small files that stand for a great deal: each is read or refused within 1 GB and 10 s of work."""

from __future__ import annotations

import json
import resource
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.processes

READ = """
import sys, phasor, warnings
from phasor import verify, preset, PhasorError
warnings.simplefilter("ignore")
try:
    path = sys.argv[1]
    if path.endswith(("npz", "safetensors")):
        verify(preset("llama-3.1-8b"), path)
    else:
        phasor.load(path)
except PhasorError as error:
    print(str(error)[:300])
"""


def gguf(path: Path, pairs: list[bytes], tensors: tuple[bytes, ...] = ()) -> Path:
    """A header with these keys and tensors."""
    counts = struct.pack("<IIQQ", 0x46554747, 3, len(tensors), len(pairs))
    path.write_bytes(counts + b"".join(pairs) + b"".join(tensors))
    return path


def text(word: bytes) -> bytes:
    """A string of GGUF."""
    return struct.pack("<Q", len(word)) + word


def array(kind: int, count: int, data: bytes) -> bytes:
    """A key whose value is an array."""
    return text(b"x") + struct.pack("<IIQ", 9, kind, count) + data


def written(name: str, content: str | bytes) -> Callable[[Path], Path]:
    """A file with that content."""
    data = content.encode() if isinstance(content, str) else content

    def write(folder: Path) -> Path:
        (folder / name).write_bytes(data)
        return folder / name

    return write


def zeros(folder: Path) -> Path:
    """Thirty compressed arrays of 400 MB."""
    path, block = folder / "a.npz", bytes(1 << 20)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for layer in range(30):
            with archive.open(f"layers.{layer}.q.npy", "w", force_zip64=True) as member:
                header = {"descr": "<f4", "fortran_order": False, "shape": (400 << 18,)}
                np.lib.format.write_array_header_1_0(member, header)
                for _ in range(400 if layer < 2 else 1):
                    member.write(block)
    return path


def lying_array(folder: Path) -> Path:
    """A compressed array whose header announces 4 TB."""
    path = folder / "a.npz"
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("q.npy", "w") as member,
    ):
        header = {"descr": "<f4", "fortran_order": False, "shape": (1 << 40,)}
        np.lib.format.write_array_header_1_0(member, header)
    return path


def sparse_frequencies(folder: Path) -> Path:
    """A tensor of 2**30 numbers in a file of holes."""
    entry = text(b"rope_freqs.weight") + struct.pack("<IQIQ", 1, 1 << 30, 0, 0)
    architecture = text(b"general.architecture") + struct.pack("<I", 8) + text(b"llama")
    path = gguf(folder / "a.gguf", [architecture], (entry,))
    with path.open("r+b") as stream:
        stream.truncate((4 << 30) + 4096)
    return path


SCRIPT = "torchrun p.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 "
BOMBS: dict[str, Callable[[Path], Path]] = {
    "a list multiplied": written(
        "a.sh", f"{SCRIPT} --no-rope-freq [{','.join('0' * 8000)}]*9999\n"
    ),
    "a list multiplied twice": written("a.sh", f"{SCRIPT} --no-rope-freq ([0,0]*9999)*9999\n"),
    "a variable 200,000 times": written("a.sh", f"A={'x' * 100_000}\n{SCRIPT}{'$A ' * 200_000}\n"),
    "a variable in a sum": written("a.sh", f"A={'1' * 100_000}\n{SCRIPT}$(({'$A+' * 200_000}1))\n"),
    "brackets": written("a.sh", SCRIPT + "(" * 1_000_000),
    "brackets before a digit": written("a.sh", SCRIPT + "([" * 500_000 + "1"),
    "empty lines": written("a", "\n" * 1_000_000 + "hello world"),
    "comments": written("a", "#\n \t\n" * 200_000 + "hello world"),
    "lists of JSON": written("a.json", "[" + "[]," * 4_000_000 + "0]"),
    "objects of JSON": written("a.json", '{"a":[' + '{"a":0},' * 1_900_000 + "0]}"),
    "numbers of YAML": written("a.yaml", "a: [" + "1," * 120_000 + "1]"),
    "aliases of YAML": written(
        "a.yaml",
        "a0: &a0 [1,1,1,1,1,1,1,1,1]\n"
        + "".join(f"a{i + 1}: &a{i + 1} [{','.join([f'*a{i}'] * 9)}]\n" for i in range(12)),
    ),
    "arrays of an npz": zeros,
    "an array that is not there": lying_array,
    "strings of a GGUF": lambda folder: gguf(
        folder / "a.gguf", [array(8, 6_000_000, bytes(48_000_000))]
    ),
    "bytes of a GGUF": lambda folder: gguf(
        folder / "a.gguf", [array(0, 60_000_000, bytes(60_000_000))]
    ),
    "arrays of a GGUF": lambda folder: gguf(
        folder / "a.gguf", [array(9, 4_000_000, bytes(48_000_000))]
    ),
    "frequencies of a GGUF": sparse_frequencies,
    "names of tensors": written(
        "a.safetensors",
        (lambda header: struct.pack("<Q", len(header)) + header)(
            json.dumps(
                {
                    "layers.1." * 100_000 + "!": {
                        "dtype": "F32", "shape": [0], "data_offsets": [0, 0],
                    }
                }
            ).encode()
        ),
    ),
}  # fmt: skip


def limit() -> None:
    """1 GB and 10 s of the processor, for the process that reads."""
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    resource.setrlimit(resource.RLIMIT_CPU, (10, 10))


@pytest.mark.parametrize("bomb", BOMBS)
def test_no_file_takes_more_than_it_holds(bomb: str, tmp_path: Path) -> None:
    """Each reader, in a process of its own with a limit."""
    done = subprocess.run(
        [sys.executable, "-c", READ, BOMBS[bomb](tmp_path)],
        capture_output=True,
        text=True,
        preexec_fn=limit,
        env={"OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": ":".join(sys.path)},
    )
    assert done.returncode == 0, done.stderr[-500:]
    assert "memory" not in done.stdout
