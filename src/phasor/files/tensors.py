"""Safetensors and GGUF files: their headers, streamed data, and folders with index and shards."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from phasor._checks import short_repr
from phasor.errors import CheckpointError, install_hint
from phasor.files import refusal
from phasor.files.gguf_header import read_gguf_tensors
from phasor.files.texts import parse_json, refuse_stand_in

#: The dtypes of plain weights: safetensors' name, torch's.
FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_GGUF = b"GGUF"
_FOREIGN_FORMATS = {
    b"PK\x03\x04": "a PyTorch pickle in a zip",
    b"\x80\x02": "a pickle",
    b"\x80\x04": "a pickle",
}


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a tensor: ``read(first, count)`` returns some of them as ``uint8[count, width]``.

    The width counts bytes, or bits if a row is not whole bytes: then ``read`` returns a byte for
    each bit, lowest first. With an ``order``, row ``i`` of each ``len(order)`` rows of the result
    is row ``order[i]`` of these.
    """

    dtype: str
    shape: tuple[int, ...]  # of the tensor
    num_rows: int
    width: int
    read: Callable[[int, int], NDArray[np.uint8]]
    order: NDArray[np.intp] | None = None
    is_bits: bool = False

    @property
    def size(self) -> int:
        """Bytes of all rows."""
        return self.num_rows * self.width // (8 if self.is_bits else 1)


#: The size, times and inode of a file, which change if it is written or replaced.
Version = tuple[int, ...]


def version_of(stream: BufferedReader) -> Version:
    """The version of an open file."""
    status = os.fstat(stream.fileno())
    # a copy may keep the time of its contents, but not the time of its inode
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a file: its bytes ``begin`` to ``end``, and its dtype as the format spells it."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    version: Version
    padding: int = 0  # bytes after it, up to the next tensor

    @property
    def size(self) -> int:
        """Bytes of the tensor."""
        return self.end - self.begin

    @property
    def bits(self) -> int:
        """Bits of one element."""
        # computed from the bytes, because dtypes below 8 bits have no size in bytes
        return 8 * self.size // self.count if self.count else 8

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def rows(self, row_bytes: int, begin: int = 0) -> Rows:
        """The bytes from ``begin`` on as rows."""

        def read(first: int, count: int) -> NDArray[np.uint8]:
            size = count * row_bytes
            # opened for each read, because a checkpoint may have more files than may be open
            with self.path.open("rb") as stream:
                if version_of(stream) != self.version:
                    raise refusal("changed", path=self.path)
                stream.seek(self.begin + begin + first * row_bytes)
                data = stream.read(size)
            if len(data) != size:
                raise refusal("changed", path=self.path)
            return np.frombuffer(data, np.uint8).reshape(count, row_bytes)

        num_rows = (self.size - begin) // row_bytes
        return Rows(self.dtype, self.shape, num_rows, row_bytes, read)

    def items(self, bits: int) -> Rows:
        """Items of ``bits`` bits each, as rows."""
        if bits % 8 == 0:
            return self.rows(bits // 8)
        stored_bytes = self.rows(1)

        def read(first: int, count: int) -> NDArray[np.uint8]:
            # first and count are multiples of a period of whole bytes
            stored = stored_bytes.read(first * bits // 8, count * bits // 8)
            return np.unpackbits(stored.ravel(), bitorder="little").reshape(count, bits)

        return Rows(self.dtype, self.shape, 8 * self.size // bits, bits, read, is_bits=True)


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a file: the bytes before its data, and the tensors in their data's order."""

    data: bytes
    tensors: Mapping[str, Entry]


def read_header(path: Path) -> Header:
    """The header of a safetensors or GGUF file, checked by the package of its format."""
    try:
        with open_file(path):
            return _read_gguf(path) if is_gguf_file(path) else _read_safetensors(path)
    except OSError as error:
        raise refusal("unreadable", path=path, error=error.strerror or error) from None


def is_gguf_file(path: Path) -> bool:
    """Whether a file begins like a GGUF file."""
    if not path.is_file():
        return False
    with path.open("rb") as stream:
        # a safetensors file begins with the length of its header, which is never so large
        return stream.read(4) == _GGUF


def _read_gguf(path: Path) -> Header:
    """The header of a GGUF file; the padding after a tensor counts as part of the tensor."""
    tensors = read_gguf_tensors(path)
    with path.open("rb") as stream:
        version = version_of(stream)
        end_of_file = version[0]
        next_begins = [*(tensor.begin for tensor in tensors), end_of_file]
        data = stream.read(next_begins[0])
    entries = {
        tensor.name: Entry(
            path, tensor.dtype, tensor.shape, tensor.begin, tensor.end, version, after - tensor.end
        )
        for tensor, after in zip(tensors, next_begins[1:], strict=True)
    }
    return Header(data, entries)


def _read_safetensors(path: Path) -> Header:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise refusal("no_safetensors", path=path, install=install_hint("checkpoint")) from None
    try:
        with open_file(path) as stream:
            version = version_of(stream)
            # [8 bytes: length of the header | header, JSON | data]
            prefix = stream.read(8)
            start = prefix + stream.peek(1)[:1]
            for magic, format_name in _FOREIGN_FORMATS.items():
                # these bytes may also be a valid header length, and then a brace follows
                if start.startswith(magic) and start[8:] != b"{":
                    raise refusal("foreign", path=path, format=format_name)
            refuse_stand_in(prefix + stream.peek(64)[:64], str(path), CheckpointError)
            with safe_open(path, "np"):  # maps the file into memory, and reads the header
                text = stream.read(int.from_bytes(prefix, "little"))
    except OSError as error:
        raise refusal("unreadable", path=path, error=error.strerror or error) from None
    except SafetensorError as error:
        raise refusal("damaged", path=path, error=error) from None
    header = parse_json(text, str(path), CheckpointError)
    # free text
    header.pop("__metadata__", None)
    data = 8 + len(text)
    tensors: dict[str, Entry] = {}
    # in the order of their data, in which a result is written
    for name, values in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        if values.keys() != {"dtype", "shape", "data_offsets"}:
            raise refusal("entry", path=path, name=name, values=values)
        begin, end = (data + offset for offset in values["data_offsets"])
        tensors[name] = Entry(path, values["dtype"], tuple(values["shape"]), begin, end, version)
    return Header(prefix + text, tensors)


def open_file(path: Path) -> BufferedReader:
    """``path`` opened for reading; pipes and devices are refused, as reading them may block."""
    if path.exists() and not path.is_file():
        raise refusal("no_file", path=path)
    return path.open("rb")


def read_floats(entry: Entry) -> NDArray[np.float64]:
    """A small tensor as float64; NaNs if its dtype is not in `FLOATS`."""
    if entry.dtype not in FLOATS:
        return np.full(entry.shape, np.nan)
    data = entry.rows(entry.size).read(0, 1)[0]
    if entry.dtype == "BF16":  # the upper half of a float32
        data = (data.view("<u2").astype("<u4") << 16).view(np.uint8)
    numbers = data.view({"F64": "<f8", "F16": "<f2"}.get(entry.dtype, "<f4"))
    return numbers.astype(np.float64).reshape(entry.shape)


_INDEX = ".safetensors.index.json"
_INDEX_LIMIT = 100_000_000
CHUNK = 8 * 2**20  # bytes read at a time
Advance = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Safetensors files that belong together, by their path in a folder, and the index if any."""

    path: Path
    files: Mapping[str, Header]
    index: str | None

    @property
    def is_gguf(self) -> bool:
        """Whether it is a GGUF file, which contains its config."""
        return any(header.data.startswith(_GGUF) for header in self.files.values())


def open_checkpoint(source: Path) -> Checkpoint:
    """The checkpoint at ``source``: a file, a folder with one, or one with an index and shards."""
    if not source.exists():
        raise refusal("absent", path=source)
    if not source.is_dir():
        if source.name.endswith(_INDEX):
            raise refusal("is_index", path=source)
        return Checkpoint(source, {source.name: read_header(source)}, None)
    indexes = sorted(path.name for path in source.glob(f"*{_INDEX}"))
    # such as two precisions: nothing tells which one to use
    if len(indexes) > 1:
        raise refusal("indexes", path=source, names=", ".join(indexes))
    if indexes:
        return _open_sharded(source, indexes[0])
    names = sorted(path.name for path in source.glob("*.safetensors"))
    if len(names) == 1:
        return Checkpoint(source, {names[0]: read_header(source / names[0])}, None)
    if names:
        raise refusal("no_index", path=source, count=len(names), names=", ".join(names))
    suffixes = (".bin", ".pt", ".pth", ".gguf")
    other_names = sorted(file.name for file in source.iterdir() if file.suffix in suffixes)
    alternatives = f", only {short_repr(', '.join(other_names))}" if other_names else ""
    hint = "write the tensors with the safetensors library first"
    if other_names and other_names[0].endswith(".gguf"):
        hint = "pass the GGUF file"
    if other_names and other_names[0].startswith("consolidated."):
        hint = "convert Meta's files: --for transformers, in Python "
        hint += "plan_conversion(folder, 'transformers')"
    raise refusal("no_weights", path=source, others=alternatives, hint=hint)


def _open_sharded(folder: Path, index: str) -> Checkpoint:
    indexed_shards = _read_weight_map(folder / index)
    headers: dict[str, Header] = {}
    shards_by_name: dict[str, str] = {}
    for shard in sorted(set(indexed_shards.values())):
        if not (folder / shard).is_file():
            raise refusal("shard_missing", index=folder / index, shard=shard)
        headers[shard] = read_header(folder / shard)
        for name in headers[shard].tensors:
            if name in shards_by_name:
                raise refusal("twice", name=name, first=shards_by_name[name], second=shard)
            shards_by_name[name] = shard
    for name, shard in indexed_shards.items():
        if shards_by_name.get(name) != shard:
            raise refusal("not_in_shard", index=folder / index, name=name, shard=shard)
    return Checkpoint(folder, headers, index)


def _read_weight_map(path: Path) -> dict[str, str]:
    try:
        with open_file(path) as stream:
            data = stream.read(_INDEX_LIMIT + 1)
    except OSError as error:
        raise refusal("unreadable", path=path, error=error.strerror or error) from None
    if len(data) > _INDEX_LIMIT:
        raise refusal("index_size", path=path)
    weight_map = parse_json(data, str(path), CheckpointError).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise refusal("weight_map", path=path, weight_map=cast(object, weight_map))
    for shard in cast(dict[str, Any], weight_map).values():
        # a name that contains a folder could lead out of the checkpoint
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise refusal("outside", path=path, shard=shard)
    return cast(dict[str, str], weight_map)


def no_progress(count: int) -> None:
    """The default `Advance`: reports nothing."""
