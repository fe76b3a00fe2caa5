"""Safetensors files: headers read, data streamed, folders with an index and shards."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BufferedReader
from itertools import accumulate
from operator import mul
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, NoReturn, cast

import numpy as np
from numpy.typing import NDArray

from phasor._checks import first_repeated, short_repr
from phasor.errors import CheckpointError

_HEADER_LIMIT = 100_000_000  # bytes, set by the format
_LARGEST_SIZE = 2**63 - 1
_BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "BOOL": 8, "U8": 8, "I8": 8,
    "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
#: The dtypes of plain weights: safetensors' name, torch's.
FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_FOREIGN_FORMATS = {
    b"PK\x03\x04": "a PyTorch pickle in a zip",
    b"\x80\x02": "a pickle",
    b"\x80\x04": "a pickle",
    b"GGUF": "a GGUF file",
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file.

    Attributes:
        dtype: As the format spells it, such as ``BF16``.
        shape: Its shape.
        begin: Its first byte, counted from the start of the file.
        end: The byte after its last.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def bits(self) -> int:
        """Bits of one element."""
        return _BITS[self.dtype]

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a file.

    Attributes:
        path: The file.
        data: Its bytes, after those of its length; the first tensor's bytes follow.
        tensors: The tensors by name, in the order of their bytes.
    """

    path: Path
    data: bytes
    tensors: Mapping[str, Entry]


def read_header(path: Path) -> Header:
    """The header of a safetensors file.

    Raises:
        CheckpointError: If it is no safetensors file, is truncated, or its header is wrong: its
            length, a name that occurs twice, a dtype or shape that does not fit its bytes, or
            bytes that belong to no tensor or to two.
    """
    try:
        with open_file(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            prefix = stream.read(8)
            length = int.from_bytes(prefix, "little")
            _refuse_foreign(path, prefix + stream.peek(1)[:1])
            if len(prefix) < 8 or not 2 <= length <= min(_HEADER_LIMIT, size - 8):
                raise CheckpointError(
                    f"{path} must begin with the length of its header, got {length} in a file of "
                    f"{size} bytes; it is truncated or no safetensors file"
                )
            text = stream.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    if not text.startswith(b"{"):
        raise CheckpointError(
            f"{path}: the header must begin with '{{', got {short_repr(text[:8])}"
        )
    header = parse_json(text, str(path))
    return Header(path, prefix + text, _read_entries(path, header, 8 + length, size))


def open_file(path: Path) -> BufferedReader:
    """``path`` opened for reading; pipes and devices are refused, as reading them may block.

    Raises:
        CheckpointError: If ``path`` is no file.
        OSError: If it cannot be opened.
    """
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path} must be a file, and is a folder, a pipe or a device")
    return path.open("rb")


def parse_json(data: bytes, where: str) -> dict[str, Any]:
    """A JSON object in which no name occurs twice.

    Raises:
        CheckpointError: If it is anything else.
    """

    def make_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if (name := first_repeated(pairs)) is not None:
            raise CheckpointError(f"{where}: the name {short_repr(name)} stands twice; keep one")
        return dict(pairs)

    def refuse(literal: str) -> NoReturn:
        raise CheckpointError(f"{where}: {literal} is no JSON")

    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=make_dict, parse_constant=refuse)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: must be JSON, and is not: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} must hold a JSON object, got {short_repr(value)}")
    return cast(dict[str, Any], value)


def _refuse_foreign(path: Path, start: bytes) -> None:
    """Name the format of a file that is no safetensors file."""
    for magic, format_name in _FOREIGN_FORMATS.items():
        # read as a length, these letters may be a valid header size: then a brace follows
        if start.startswith(magic) and start[8:] != b"{":
            raise CheckpointError(
                f"{path} must be a safetensors file, got {format_name}; write its tensors with the "
                "safetensors library first"
            )


def _read_entries(path: Path, header: dict[str, Any], begin: int, size: int) -> Mapping[str, Entry]:
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in cast(dict[str, Any], metadata).values()
    ):
        raise CheckpointError(f"{path}: __metadata__ must map strings to strings")
    entries = {name: _read_entry(path, name, values, begin) for name, values in header.items()}
    sorted_entries = sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end))
    end = begin
    for name, entry in sorted_entries:
        if entry.begin != end:
            kind = (
                "overlaps the tensor before it" if entry.begin < end else "leaves bytes before it"
            )
            raise CheckpointError(
                f"{path}: {short_repr(name)} must begin at byte {end - begin} of the data, "
                f"got {entry.begin - begin}, which {kind}"
            )
        end = entry.end
    if end != size:
        reason = "it is truncated" if size < end else "bytes at its end belong to no tensor"
        raise CheckpointError(f"{path} must be {end} bytes long, got {size}; {reason}")
    return MappingProxyType(dict(sorted_entries))


def _read_entry(path: Path, name: str, values: object, begin: int) -> Entry:
    def refuse(problem: str) -> NoReturn:
        raise CheckpointError(f"{path}: {short_repr(name)} {problem}, got {short_repr(values)}")

    if not isinstance(values, dict):
        refuse("must be described by an object")
    block = cast(dict[str, Any], values)
    if block.keys() != {"dtype", "shape", "data_offsets"}:
        refuse("must have dtype, shape and data_offsets and nothing else")
    dtype, shape, offsets = block["dtype"], block["shape"], block["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        refuse(f"must have a dtype of {', '.join(_BITS)}")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        refuse("must have whole numbers from 0 to 2**63 - 1 as shape and as two data_offsets")
    # multiplied one by one: the product of a long hostile list could take minutes
    if any(count > _LARGEST_SIZE for count in accumulate(shape, mul)):
        refuse("must have at most 2**63 - 1 elements")
    bits = math.prod(shape) * _BITS[dtype]
    if bits % 8 or offsets[1] - offsets[0] != bits // 8:
        refuse(f"must have data_offsets that span its {bits / 8:g} bytes")
    return Entry(dtype, tuple(shape), begin + offsets[0], begin + offsets[1])


def _are_sizes(values: object) -> bool:
    # `type`, because a bool is an int in Python and not in JSON
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value <= _LARGEST_SIZE for value in cast(list[object], values)
    )


@dataclass(frozen=True, slots=True)
class Rows:
    """A tensor as rows of bytes, which are read a few at a time.

    Attributes:
        dtype: As safetensors spells it.
        shape: Its shape.
        row_bytes: Bytes of a row.
        read: ``read(first, count)`` gives ``count`` rows as ``uint8[count, row_bytes]``.
    """

    dtype: str
    shape: tuple[int, ...]
    row_bytes: int
    read: Callable[[int, int], NDArray[np.uint8]]


def rows_of(path: Path, entry: Entry, row_bytes: int) -> Rows:
    """A tensor of a safetensors file."""

    def read(first: int, count: int) -> NDArray[np.uint8]:
        with path.open("rb") as stream:
            stream.seek(entry.begin + first * row_bytes)
            data = read_exactly(stream, count * row_bytes)
        return np.frombuffer(data, np.uint8).reshape(count, row_bytes)

    return Rows(entry.dtype, entry.shape, row_bytes, read)


_INDEX = ".safetensors.index.json"
_INDEX_LIMIT = 100_000_000
CHUNK = 8 * 2**20  # bytes read at a time
Advance = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Safetensors files that belong together.

    Attributes:
        path: The folder, or the one file.
        files: The header of each file, by its path below the folder.
        index: Name of the index, None where there is none.
    """

    path: Path
    files: Mapping[str, Header]
    index: str | None


def open_checkpoint(source: Path) -> Checkpoint:
    """The checkpoint at ``source``: a safetensors file, or a folder that holds one.

    A folder holds either one index and the shards that it names, or one safetensors file.

    Raises:
        CheckpointError: If there is none, or more than one, or a file is missing or damaged.
    """
    if not source.exists():
        raise CheckpointError(f"{source} does not exist; give a safetensors file or its folder")
    if not source.is_dir():
        if source.name.endswith(_INDEX):
            raise CheckpointError(f"{source} is an index; give the folder it lies in")
        return Checkpoint(source, MappingProxyType({source.name: read_header(source)}), None)
    indexes = sorted(path.name for path in source.glob(f"*{_INDEX}"))
    if len(indexes) > 1:
        raise CheckpointError(f"{source} holds several indexes ({', '.join(indexes)}); keep one")
    if indexes:
        return _open_sharded(source, indexes[0])
    names = sorted(path.name for path in source.glob("*.safetensors"))
    if len(names) == 1:
        headers = {names[0]: read_header(source / names[0])}
        return Checkpoint(source, MappingProxyType(headers), None)
    if names:
        raise CheckpointError(
            f"{source} holds {len(names)} safetensors files and no index that ties them together "
            f"({short_repr(', '.join(names))}); give one file, or add the index"
        )
    other_files = sorted(
        path.name for ending in ("bin", "pt", "pth") for path in source.glob(f"*.{ending}")
    )
    alternatives = f", only {short_repr(', '.join(other_files))}" if other_files else ""
    hint = (
        "convert Meta's files: --for transformers, in Python "
        "plan_conversion(folder, 'transformers')"
        if other_files and other_files[0].startswith("consolidated.")
        else "write the tensors with the safetensors library first"
    )
    raise CheckpointError(f"{source} holds no safetensors file{alternatives}; {hint}")


def _open_sharded(folder: Path, index: str) -> Checkpoint:
    shard_of = _read_weight_map(folder / index)
    headers: dict[str, Header] = {}
    for shard in sorted(set(shard_of.values())):
        if not (folder / shard).is_file():
            raise CheckpointError(f"{folder / index} names {short_repr(shard)}, which is missing")
        headers[shard] = read_header(folder / shard)
    shard_with: dict[str, str] = {}
    for shard, header in headers.items():
        for name in header.tensors:
            if name in shard_with:
                raise CheckpointError(
                    f"{short_repr(name)} stands in {shard_with[name]} and in {shard}; keep one"
                )
            shard_with[name] = shard
    for name, shard in shard_of.items():
        if shard_with.get(name) != shard:
            raise CheckpointError(
                f"{folder / index} says that {short_repr(name)} is in {shard}, "
                "which does not hold it"
            )
    return Checkpoint(folder, MappingProxyType(headers), index)


def _read_weight_map(path: Path) -> dict[str, str]:
    try:
        with open_file(path) as stream:
            data = stream.read(_INDEX_LIMIT + 1)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    if len(data) > _INDEX_LIMIT:
        raise CheckpointError(f"{path} is larger than any index")
    weight_map = parse_json(data, str(path)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{path} must hold a weight_map of tensors, got {short_repr(cast(object, weight_map))}"
        )
    for shard in cast(dict[str, Any], weight_map).values():
        # a name with a folder in it could lead out of the checkpoint
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(
                f"{path}: weight_map must name files beside the index, got {short_repr(shard)}"
            )
    return cast(dict[str, str], weight_map)


def no_progress(count: int) -> None:
    """The default `Advance`: reports nothing."""


def read_exactly(stream: BinaryIO, count: int) -> bytes:
    """The next ``count`` bytes.

    Raises:
        CheckpointError: If the file is shorter than its header says.
    """
    data = stream.read(count)
    if len(data) != count:
        raise CheckpointError(f"{stream.name} became shorter while it was read")
    return data
