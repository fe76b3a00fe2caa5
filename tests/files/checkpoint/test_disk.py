"""Targets that exist, disks that are full, runs that are killed, and how much memory one takes."""

from __future__ import annotations

import errno
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from phasor.files.checkpoint import plan_conversion, verify, write

from ..refusals import refused
from .checkpoints import contents, in_file, llama, llama_tensors, save_folder, two_shards


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    """Not a file, not an empty folder, not a link to nowhere, not the source."""
    folder = save_folder(tmp_path / "a", llama(), llama_tensors())
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    before = contents(tmp_path)

    def never(count: int) -> None:
        pytest.fail(f"{count} bytes were written")

    for name in ("file", "folder", "link", "a"):
        with refused("exists"):
            write(plan_conversion(folder, "interleaved"), tmp_path / name, advance=never)
    with refused("no_parent"):
        write(plan_conversion(folder, "interleaved"), tmp_path / "none/b")
    assert contents(tmp_path) == before


@pytest.mark.parametrize("kind", [errno.ENOSPC, errno.EIO], ids=["full", "broken"])
@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_full_disk_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int, kind: int
) -> None:
    """The error says so, the source is whole, and no file is left."""
    folder = two_shards(tmp_path)
    before = contents(tmp_path)
    conversion = plan_conversion(folder, "interleaved")
    calls = 0

    def full(count: int) -> None:
        nonlocal calls
        calls += 1
        if calls > after:
            raise OSError(kind, os.strerror(kind))

    with refused(f"not_written: {os.strerror(kind)}"):
        write(conversion, tmp_path / "b", advance=full)
    assert contents(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.skipif(sys.platform != "linux", reason="a limit of the file size by the kernel")
@pytest.mark.processes
def test_a_real_limit_of_the_disk_is_an_error(tmp_path: Path) -> None:
    """The kernel refuses to write more, in a process of its own."""
    folder = save_folder(tmp_path / "a", llama(), llama_tensors())
    program = (
        "import resource, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))\n"
        "from phasor.files.checkpoint import plan_conversion, write, CheckpointError\n"
        "try: write(plan_conversion(sys.argv[1], 'interleaved'), sys.argv[2])\n"
        "except CheckpointError as error: sys.exit(str(error))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder), str(tmp_path / "b")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "File too large" in done.stderr
    assert done.returncode == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_source_that_shrinks_meanwhile_is_an_error(tmp_path: Path) -> None:
    """What the header promised is not there any more."""
    folder = save_folder(tmp_path / "a", llama(), llama_tensors())
    conversion = plan_conversion(folder, "interleaved")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with refused("changed"):
        write(conversion, tmp_path / "b")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_an_interrupted_run_cleans_up(tmp_path: Path) -> None:
    """Ctrl-C passes through and leaves no file."""
    folder = two_shards(tmp_path)

    def interrupt(count: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(plan_conversion(folder, "interleaved"), tmp_path / "b", advance=interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


KILLED = """
import sys, time
from phasor.files.checkpoint import plan_conversion, write
print("ready", flush=True)
def slowly(count):
    time.sleep(0.002)
write(plan_conversion(sys.argv[1], "interleaved"), sys.argv[2], advance=slowly)
"""


@pytest.mark.processes
def test_a_killed_run_never_leaves_half_a_result(tmp_path: Path) -> None:
    """Killed at random moments: the target is absent or whole, and the source untouched."""
    folder = two_shards(tmp_path)
    source = contents(folder)
    write(plan_conversion(folder, "interleaved"), tmp_path / "whole")
    wanted = contents(tmp_path / "whole")
    rng = random.Random(0)
    ends = []
    for i in range(8):
        target = tmp_path / f"b{i}"
        run = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(folder), str(target)], stdout=subprocess.PIPE
        )
        assert run.stdout is not None
        run.stdout.readline()
        time.sleep(rng.uniform(0, 0.08))
        run.send_signal(signal.SIGKILL)
        run.wait()
        run.stdout.close()
        ends.append(target.exists())
        assert contents(folder) == source
        if target.exists():
            assert contents(target) == wanted
    assert not all(ends)
    leftovers = [p.name for p in tmp_path.iterdir() if p.name not in ("a", "whole")]
    assert all(re.fullmatch(r"b\d|\.b\d\..*\.partial", name) for name in leftovers)


MEMORY = """
import sys
from phasor import Rope
from phasor.files.checkpoint import Patterns, plan_conversion, write
import numpy
def most():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if "VmHWM" in line)
start = most()
rope = Rope(head_dim=int(sys.argv[3]), pairing="half")
names = Patterns(query=("Q",))
conversion = plan_conversion(sys.argv[1], "interleaved", model=rope, patterns=names)
write(conversion, sys.argv[2], verified=True)
print(most() - start)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("heads", [1, 64])
@pytest.mark.processes
def test_memory_stays_below_one_and_a_half_tensors(tmp_path: Path, heads: int) -> None:
    """Even where a projection is one head wide and has to be held whole."""
    size = 64 * 2**20
    header = {
        "Q": {"dtype": "BF16", "shape": [8192, size // 16384], "data_offsets": [0, size]},
        "rest": {"dtype": "BF16", "shape": [size // 2], "data_offsets": [size, 2 * size]},
    }
    file = tmp_path / "a.safetensors"
    file.write_bytes(in_file(header, b""))
    os.truncate(file, file.stat().st_size + 2 * size)
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(file), str(tmp_path / "b"), str(8192 // heads)],
        capture_output=True,
        text=True,
        check=True,
    )
    least, most = (1.0, 1.5) if heads == 1 else (0.0, 0.75)
    assert least * size < int(done.stdout) < most * size
    assert (tmp_path / "b").stat().st_size == file.stat().st_size


@pytest.mark.parametrize("verified", [False, True])
@pytest.mark.parametrize("how", ["replaced", "rewritten"])
def test_a_source_with_other_contents_of_the_same_size_is_an_error(
    tmp_path: Path, verified: bool, how: str
) -> None:
    """The time of its contents is that of before, as a copy may keep it."""
    folder = save_folder(tmp_path / "a", llama(), llama_tensors())
    conversion = plan_conversion(folder, "interleaved")
    path = folder / "model.safetensors"
    before = path.stat()
    other = save_folder(tmp_path / "other", llama(), llama_tensors(seed=1))
    if how == "replaced":
        (other / path.name).replace(path)
    else:
        path.write_bytes((other / path.name).read_bytes())
    assert path.stat().st_size == before.st_size
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with refused("changed"):
        write(conversion, tmp_path / "b", verified=verified)
    assert not (tmp_path / "b").exists()


def test_a_source_replaced_before_the_comparison_is_an_error(tmp_path: Path) -> None:
    """The result was right when it was written."""
    folder = save_folder(tmp_path / "a", llama(), llama_tensors())
    conversion = plan_conversion(folder, "interleaved")
    write(conversion, tmp_path / "b")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes())
    with refused("changed"):
        verify(conversion, tmp_path / "b")


def test_the_header_of_the_source_is_read_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors in another order are noticed where the file system's clock is too coarse."""
    monkeypatch.setattr("phasor.files.tensors.version_of", lambda stream: ())
    folder = save_folder(tmp_path / "a", llama(), llama_tensors())
    conversion = plan_conversion(folder, "interleaved")
    write(conversion, tmp_path / "b")
    path = folder / "model.safetensors"
    data = path.read_bytes()
    size = 8 + int.from_bytes(data[:8], "little")
    first, second = b"model.layers.0.self_attn.q_proj", b"model.layers.1.self_attn.q_proj"
    header = data[:size].replace(first, b"-").replace(second, first).replace(b"-", second)
    path.write_bytes(header + data[size:])
    with refused("changed"):
        verify(conversion, tmp_path / "b")
