"""Checkpoints whose files or folders are damaged: an error that names them, and no harm done."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasor import PhasorError
from phasor.files.checkpoint import CheckpointError, plan_conversion
from phasor.files.checkpoint.files import read_header

from .checkpoints import contents, in_file, llama, two_shards

ONE = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
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
    "a negative shape": (
        in_file({"a": ONE | {"shape": [-2, -2]}}, b"1234"),
        "whole numbers from 0",
    ),
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
        plan_conversion(file, "interleaved", model=llama())
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
        plan_conversion(folder, "interleaved")
    assert contents(tmp_path) == before


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
