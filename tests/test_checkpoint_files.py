"""Files that are damaged, disks that are full, runs that are killed: an error, and no harm done."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasor import PhasorError, Rope
from phasor.checkpoint import CheckpointError, Patterns, plan, write
from phasor.checkpoint._format import read_header

from .checkpoints import in_file, llama, llama_tensors, save, save_folder, tensor

ONE = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "length of its header, got 0 in a file of 0 bytes"),
    "seven bytes": (b"\x02\0\0\0\0\0\0", "length of its header"),
    "a header beyond the end": (b"\xff\0\0\0\0\0\0\0{}", "got 255 in a file of 10 bytes"),
    "a header of 2**63": (b"\0\0\0\0\0\0\0\x80{}", "length of its header"),
    "no object": (in_file("[]", b""), "must begin with '{'"),
    "no JSON": (in_file("{'a': 1}", b""), "must be JSON"),
    "no UTF-8": (b"\x04\0\0\0\0\0\0\0{\xff\xff}", "must be JSON"),
    "a header that is cut": (in_file('{"a": ', b""), "must be JSON"),
    "deep nesting": (in_file('{"a":' * 10**5, b""), "must be JSON"),
    "NaN": (in_file('{"a": NaN}', b""), "NaN is no JSON"),
    "a name twice": (
        in_file(f'{{"a": {json.dumps(ONE)}, "a": {json.dumps(ONE)}}}', b"1234"),
        "'a' stands twice",
    ),
    "truncated data": (in_file({"a": ONE}, b"123"), "4 bytes|truncated"),
    "data at the end": (in_file({"a": ONE}, b"12345"), "belong to no tensor"),
    "a hole": (in_file({"a": ONE | {"data_offsets": [1, 5]}}, b"12345"), "leaves bytes before it"),
    "an overlap": (
        in_file({"a": ONE, "b": ONE | {"data_offsets": [2, 6]}}, b"123456"),
        "overlaps the tensor before it",
    ),
    "a wrong shape": (in_file({"a": ONE | {"shape": [5]}}, b"1234"), "span its 5 bytes"),
    "a negative shape": (in_file({"a": ONE | {"shape": [-2, -2]}}, b"1234"), "whole numbers >= 0"),
    "a shape of bools": (in_file({"a": ONE | {"shape": [True, 4]}}, b"1234"), "whole numbers"),
    "offsets in reverse": (in_file({"a": ONE | {"data_offsets": [4, 0]}}, b"1234"), "span its 4"),
    "an unknown dtype": (in_file({"a": ONE | {"dtype": "F7"}}, b"1234"), "a dtype of F4"),
    "half a byte": (
        in_file({"a": {"dtype": "F4", "shape": [3], "data_offsets": [0, 1]}}, b"1"),
        "span its 1.5 bytes",
    ),
    "a missing key": (in_file({"a": {"dtype": "U8", "shape": [4]}}, b"1234"), "and nothing else"),
    "a tensor that is a list": (in_file({"a": [1]}, b""), "described by an object"),
    "metadata of numbers": (in_file({"__metadata__": {"a": 1}}, b""), "strings to strings"),
    "a pickle in a zip": (b"PK\x03\x04" + bytes(range(1, 60)), "a PyTorch pickle"),
    "an old pickle": (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j", "a pickle"),
    "a GGUF file": (b"GGUF\x03\0\0\0" + b"\0" * 60, "a GGUF file"),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_damaged_file_is_refused_with_its_name(tmp_path: Path, kind: str) -> None:
    """Before anything is written; the file stays as it is."""
    data, said = FILES[kind]
    file = tmp_path / "a.safetensors"
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=said) as caught:
        plan(file, "interleaved", model=llama())
    assert str(file) in str(caught.value)
    assert contents(tmp_path) == {"a.safetensors": data}


# of two tensors of one name the library takes the last without a word
@pytest.mark.parametrize("kind", sorted(FILES.keys() - {"a name twice"}))
def test_what_is_refused_the_library_refuses_as_well(tmp_path: Path, kind: str) -> None:
    """No file that the format's own library opens is called damaged."""
    import safetensors as library

    file = tmp_path / "a.safetensors"
    file.write_bytes(FILES[kind][0])
    with pytest.raises(library.SafetensorError), library.safe_open(file, "np"):
        pass


@given(st.data())
def test_a_spoilt_header_is_refused_or_read_as_the_library_reads_it(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Whatever stands in it, nothing but a PhasorError comes of it."""
    import safetensors as library

    file = tmp_path_factory.mktemp("spoilt") / "a.safetensors"
    whole = bytearray(in_file({"a": ONE, "b": ONE | {"data_offsets": [4, 8]}}, b"12345678"))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(whole) - 9))
        whole[place] = data.draw(st.sampled_from(b'0123456789{}[]",:abU8F \0\xff'))
    file.write_bytes(whole)
    try:
        found = {name: list(entry.shape) for name, entry in read_header(file).tensors.items()}
    except PhasorError:
        return
    with library.safe_open(file, "np") as opened:
        assert found == {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118


def two_shards(tmp_path: Path) -> Path:
    """A folder with an index and two shards."""
    tensors = llama_tensors()
    names = list(tensors)
    return save_folder(
        tmp_path / "a",
        llama(),
        {n: tensors[n] for n in names[:4]},
        {n: tensors[n] for n in names[4:]},
    )


def change_index(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrite the index of a folder."""
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


def lose_shard(folder: Path) -> None:
    """Delete one."""
    (folder / "model-2-of-2.safetensors").unlink()


def lead_outside(folder: Path) -> None:
    """Name a file in another folder."""
    change_index(folder, lambda i: i["weight_map"].update({"x": "../b.safetensors"}))


def promise_more(folder: Path) -> None:
    """Name a tensor that no shard holds."""
    change_index(folder, lambda i: i["weight_map"].update({"x": "model-1-of-2.safetensors"}))


def forget_map(folder: Path) -> None:
    """Take the map away."""
    change_index(folder, lambda i: i.pop("weight_map"))


def hold_twice(folder: Path) -> None:
    """Let both shards hold the same."""
    one = (folder / "model-1-of-2.safetensors").read_bytes()
    (folder / "model-2-of-2.safetensors").write_bytes(one)


def second_index(folder: Path) -> None:
    """Put another index beside it."""
    (folder / "other.safetensors.index.json").write_text("{}")


def no_index(folder: Path) -> None:
    """Leave shards that nothing ties together."""
    (folder / "model.safetensors.index.json").unlink()


def only_pickles(folder: Path) -> None:
    """Leave PyTorch's own format."""
    no_index(folder)
    for path in folder.glob("*.safetensors"):
        path.rename(path.with_suffix(".bin"))


def no_config(folder: Path) -> None:
    """Take the config away."""
    (folder / "config.json").unlink()


FOLDERS: dict[Callable[[Path], None], str] = {
    lose_shard: "'model-2-of-2.safetensors', which is missing",
    lead_outside: "must name files beside the index",
    promise_more: "'x' is in model-1-of-2.safetensors, which does not hold it",
    forget_map: "must hold a weight_map",
    hold_twice: "stands in model-1-of-2.safetensors and in model-2-of-2.safetensors",
    second_index: "holds several indexes",
    no_index: "holds 2 safetensors files and no index",
    only_pickles: "no safetensors file, only 'model-1-of-2.bin, model-2-of-2.bin'",
    no_config: "holds no config.json",
}


@pytest.mark.parametrize("spoil", FOLDERS, ids=lambda spoil: spoil.__name__)
def test_a_folder_that_does_not_hang_together_is_refused(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    """With the name of what is missing or too much."""
    folder = two_shards(tmp_path)
    spoil(folder)
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match=FOLDERS[spoil]):
        plan(folder, "interleaved")
    assert contents(tmp_path) == before


SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "heads that do not divide": (
        {"head_dim": 12},
        {},
        "rows must be whole heads of head_dim 12, got F64 \\[32, 32\\]",
    ),
    "too few heads": ({"num_attention_heads": 8, "head_dim": 8}, {}, "must hold 8 heads"),
    "keys that do not divide": (
        {"num_key_value_heads": 1},
        {"model.layers.0.self_attn.k_proj.weight": tensor(np.zeros((24, 32)))},
        "its heads must divide the 4 query heads",
    ),
    "latent queries that are too narrow": (
        {"model_type": "deepseek_v3", "qk_rope_head_dim": 8},
        {"model.layers.0.self_attn.q_proj.weight": tensor(np.zeros((16, 32)))},
        "must hold 4 heads of 8 rows or more",
    ),
    "an odd part of a head": ({"head_dim": 7}, {}, "even"),
    "keys that are values": (
        {},
        {"model.layers.0.self_attn.v_proj.weight": None},
        "must have a v_proj beside it",
    ),
    "a packed weight": (
        {},
        {"model.layers.0.self_attn.q_proj.qweight": tensor(np.zeros((4, 32)))},
        "what it holds is not known",
    ),
    "a fused projection of unknown order": (
        {},
        {"model.layers.0.self_attn.qkv_proj.weight": tensor(np.zeros((64, 32)))},
        "in blocks or in groups is not known",
    ),
    "an index over keys": (
        {},
        {"model.layers.0.self_attn.indexer.wk.weight": tensor(np.zeros((8, 32)))},
        "a rotation of its own",
    ),
    "queries without keys": (
        {},
        {name: None for name in llama_tensors() if "k_proj" in name},
        r"queries and keys of model\.layers\.0\.self_attn, got only query",
    ),
    "a layer without its keys": (
        {},
        {"model.layers.1.self_attn.k_proj.weight": None},
        r"queries and keys of model\.layers\.1\.self_attn, got only query",
    ),
    "a layer without its queries": (
        {},
        {"model.layers.0.self_attn.q_proj.weight": None},
        r"queries and keys of model\.layers\.0\.self_attn, got only key",
    ),
    "a layer of biases alone": (
        {},
        {f"model.layers.0.self_attn.{one}_proj.weight": None for one in "qk"},
        r"queries and keys of model\.layers\.0\.self_attn, got neither",
    ),
    "nothing to convert": (
        {},
        {name: None for name in llama_tensors() if "self_attn" in name},
        r"nothing to convert; its tensors are model.embed_tokens.weight \(1\)",
    ),
    "a latent key without latent attention": (
        {},
        {"model.layers.0.self_attn.kv_a_proj_with_mqa.weight": tensor(np.zeros((16, 32)))},
        "no latent attention",
    ),
    "values that are rotated": (
        {"model_type": "roformer", "rotary_value": True},
        {},
        "rotary_value",
    ),
    "four slices": ({"model_type": "codegen", "rotary_dim": 4}, {}, "cut in four slices"),
    "a weight of nothing": (
        {},
        {"model.layers.0.self_attn.q_proj.weight": tensor(np.zeros((32, 0)))},
        "rows of whole bytes",
    ),
    "rows of half a byte more": (
        {},
        {"model.layers.0.self_attn.q_proj.weight": ("F4", [32, 3], bytes(48))},
        "rows of whole bytes",
    ),
    "a scalar for a weight": (
        {},
        {"model.layers.0.self_attn.q_proj.weight": tensor(np.float64(1))},
        "rows of whole bytes",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", SHAPES)
def test_what_cannot_be_converted_is_refused_and_named(tmp_path: Path, kind: str) -> None:
    """Rather than left as it is beside what was converted."""
    config, changes, said = SHAPES[kind]
    tensors = {n: t for n, t in (llama_tensors() | changes).items() if t is not None}
    folder = save_folder(tmp_path / "a", llama() | config, tensors)
    with pytest.raises(PhasorError, match=said):
        plan(folder, "interleaved", source="half")


def test_patterns_that_match_nothing_or_twice_are_refused(tmp_path: Path) -> None:
    """They match whole names, and a tensor is one thing."""
    file = save(tmp_path / "a.safetensors", {"Q.weight": tensor(np.zeros((8, 2)))})
    rope = Rope(head_dim=8, pairing="half")

    def planned(**patterns: tuple[str, ...]) -> None:
        plan(file, "interleaved", model=rope, patterns=Patterns(**patterns))

    with pytest.raises(CheckpointError, match=r"'Q' must match a whole name, and matches none of"):
        planned(query=("Q",))
    with pytest.raises(CheckpointError, match="of one kind, got key, query"):
        planned(query=("Q.*",), key=(".*weight",))
    with pytest.raises(CheckpointError, match=r"query must be a regular expression, got '\('"):
        planned(query=("(",))
    with pytest.raises(CheckpointError, match="without the number of query heads"):
        planned(blocks=("Q.*",))


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
        with pytest.raises(CheckpointError, match="exists and is not overwritten"):
            write(plan(folder, "interleaved"), tmp_path / name, advance=never)
    with pytest.raises(CheckpointError, match="is not a folder; make it first"):
        write(plan(folder, "interleaved"), tmp_path / "none/b")
    assert contents(tmp_path) == before


@pytest.mark.parametrize("kind", [errno.ENOSPC, errno.EIO], ids=["full", "broken"])
@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_full_disk_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int, kind: int
) -> None:
    """The error says so, the source is whole, and no file is left."""
    folder = two_shards(tmp_path)
    before = contents(tmp_path)
    conversion = plan(folder, "interleaved")
    calls = 0

    def full(count: int) -> None:
        nonlocal calls
        calls += 1
        if calls > after:
            raise OSError(kind, os.strerror(kind))

    with pytest.raises(CheckpointError, match=f"{os.strerror(kind)}.*source is as it was"):
        write(conversion, tmp_path / "b", advance=full)
    assert contents(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.skipif(sys.platform != "linux", reason="a limit of the file size by the kernel")
def test_a_real_limit_of_the_disk_is_an_error(tmp_path: Path) -> None:
    """The kernel refuses to write more, in a process of its own."""
    folder = save_folder(tmp_path / "a", llama(), llama_tensors())
    program = (
        "import resource, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))\n"
        "from phasor.checkpoint import plan, write, CheckpointError\n"
        "try: write(plan(sys.argv[1], 'interleaved'), sys.argv[2])\n"
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
    conversion = plan(folder, "interleaved")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="became shorter"):
        write(conversion, tmp_path / "b")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_an_interrupted_run_cleans_up(tmp_path: Path) -> None:
    """Ctrl-C passes through and leaves no file."""
    folder = two_shards(tmp_path)

    def interrupt(count: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(plan(folder, "interleaved"), tmp_path / "b", advance=interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


KILLED = """
import sys, time
from phasor.checkpoint import plan, write
print("ready", flush=True)
def slowly(count):
    time.sleep(0.002)
write(plan(sys.argv[1], "interleaved"), sys.argv[2], advance=slowly)
"""


def test_a_killed_run_never_leaves_half_a_result(tmp_path: Path) -> None:
    """Killed at random moments: the target is absent or whole, and the source untouched."""
    folder = two_shards(tmp_path)
    source = contents(folder)
    write(plan(folder, "interleaved"), tmp_path / "whole")
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
from phasor.checkpoint import Patterns, plan, write
import numpy
def most():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if "VmHWM" in line)
start = most()
rope = Rope(head_dim=int(sys.argv[3]), pairing="half")
names = Patterns(query=("Q",))
write(plan(sys.argv[1], "interleaved", model=rope, patterns=names), sys.argv[2], verified=True)
print(most() - start)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("heads", [1, 64])
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
    assert read_header(tmp_path / "b").size == file.stat().st_size


@pytest.mark.parametrize("magic", [b"\x80\x02\0\0", b"\x80\x04\0\0"])
def test_a_header_as_long_as_a_pickles_first_letters_is_a_header(
    tmp_path: Path, magic: bytes
) -> None:
    """Its length may spell what other formats begin with."""
    length = int.from_bytes(magic, "little")
    text = json.dumps({"a": ONE}).encode()
    file = tmp_path / "a.safetensors"
    file.write_bytes(length.to_bytes(8, "little") + text.ljust(length) + b"1234")
    assert list(read_header(file).tensors) == ["a"]
