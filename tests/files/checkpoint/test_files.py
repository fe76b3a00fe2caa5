"""Checkpoints whose files or folders are damaged: an error that names them, and no harm done."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasor import PhasorError
from phasor.files.checkpoint import plan_conversion
from phasor.files.tensors import read_header

from ..refusals import refused
from .checkpoints import contents, in_file, llama, llama_tensors, save, two_shards

ONE = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "empty"),
    "seven bytes": (b"\x02\0\0\0\0\0\0", "damaged: header too small"),
    "a header beyond the end": (b"\xff\0\0\0\0\0\0\0{}", "damaged: invalid header length"),
    "a header of 2**63": (b"\0\0\0\0\0\0\0\x80{}", "damaged: header too large"),
    "no object": (in_file("[]", b""), "damaged: expected struct"),
    "no JSON": (in_file("{'a': 1}", b""), "damaged: key must be a string"),
    "no UTF-8": (b"\x04\0\0\0\0\0\0\0{\xff\xff}", "damaged: invalid UTF-8"),
    "a header that is cut": (in_file('{"a": ', b""), "damaged: EOF while parsing"),
    "deep nesting": (in_file('{"a":' * 10**5, b""), "damaged: recursion limit"),
    "NaN": (in_file('{"a": NaN}', b""), "damaged: invalid JSON"),
    "a name twice": (
        in_file(f'{{"a": {json.dumps(ONE)}, "a": {json.dumps(ONE)}}}', b"1234"),
        "key_twice: a",
    ),
    "truncated data": (in_file({"a": ONE}, b"123"), "damaged"),
    "data at the end": (in_file({"a": ONE}, b"12345"), "damaged: not fully covered"),
    "a hole": (in_file({"a": ONE | {"data_offsets": [1, 5]}}, b"12345"), "damaged: tensor `a`"),
    "an overlap": (
        in_file({"a": ONE, "b": ONE | {"data_offsets": [2, 6]}}, b"123456"),
        "damaged: tensor `b`",
    ),
    "a wrong shape": (in_file({"a": ONE | {"shape": [5]}}, b"1234"), "damaged: invalid shape"),
    "a negative shape": (
        in_file({"a": ONE | {"shape": [-2, -2]}}, b"1234"),
        "damaged: integer `-2`",
    ),
    "a shape of bools": (
        in_file({"a": ONE | {"shape": [True, 4]}}, b"1234"),
        "damaged: boolean `true`",
    ),
    "offsets in reverse": (
        in_file({"a": ONE | {"data_offsets": [4, 0]}}, b"1234"),
        "damaged: invalid offset",
    ),
    "an unknown dtype": (
        in_file({"a": ONE | {"dtype": "F7"}}, b"1234"),
        "damaged: unknown variant `F7`",
    ),
    "half a byte": (
        in_file({"a": {"dtype": "F4", "shape": [3], "data_offsets": [0, 1]}}, b"1"),
        "damaged: byte boundary",
    ),
    "a missing key": (
        in_file({"a": {"dtype": "U8", "shape": [4]}}, b"1234"),
        "damaged: missing field",
    ),
    "a tensor that is a list": (in_file({"a": [1]}, b""), "damaged: expected string or map"),
    "metadata of numbers": (in_file({"__metadata__": {"a": 1}}, b""), "damaged: expected a string"),
    "a pickle in a zip": (b"PK\x03\x04" + bytes(range(1, 60)), "foreign: a PyTorch pickle"),
    "an old pickle": (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j", "foreign: a pickle"),
    "a GGUF file": (b"GGUF\x03\0\0\0" + b"\0" * 8, "gguf_damaged: announces more"),
    "a fourth key": (in_file({"a": ONE | {"x": 1}}, b"1234"), "entry: a"),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_damaged_file_is_refused_with_its_name(tmp_path: Path, kind: str) -> None:
    """Before anything is written; the file stays as it is."""
    data, said = FILES[kind]
    file = tmp_path / "a.safetensors"
    file.write_bytes(data)
    with refused(said) as caught:
        plan_conversion(file, "interleaved", model=llama())
    assert str(file) in str(caught.value)
    assert contents(tmp_path) == {"a.safetensors": data}


# the library takes the last of two tensors of one name, and passes over a key it does not know
@pytest.mark.parametrize("kind", sorted(FILES.keys() - {"a name twice", "a fourth key"}))
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


def test_without_the_library_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file is not read without the check of its header."""
    monkeypatch.setitem(sys.modules, "safetensors", None)
    file = save(tmp_path / "a.safetensors", llama_tensors())
    with refused("no_safetensors"):
        plan_conversion(file, "interleaved", model=llama())


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
    lose_shard: "shard_missing: model-2-of-2.safetensors",
    lead_outside: "outside: folder",
    promise_more: "not_in_shard: model-1-of-2.safetensors",
    forget_map: "weight_map: None",
    hold_twice: "twice: model-1-of-2.safetensors",
    second_index: "indexes: index",
    no_index: "no_index: safetensors",
    only_pickles: "no_weights: , only 'model-1-of-2.bin, model-2-of-2.bin'",
    no_config: "no_config",
}


@pytest.mark.parametrize("spoil", FOLDERS, ids=lambda spoil: spoil.__name__)
def test_a_folder_that_does_not_hang_together_is_refused(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    """With the name of what is missing or too much."""
    folder = two_shards(tmp_path)
    spoil(folder)
    before = contents(tmp_path)
    with refused(FOLDERS[spoil]):
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
