"""The header of a GGUF file: its metadata, and the tensors about the rope; no weights are read.

A file is the magic ``GGUF``, a version, the numbers of tensors and of keys; each key with a type
and a value; each tensor's name, shape, type and offset; and, aligned, their data (ggml's
``docs/gguf.md``).
"""

from __future__ import annotations

import os
import struct
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from phasor.configs.layer_kinds import MOST_LAYERS
from phasor.errors import ConfigError
from phasor.rope import WIDEST

_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9
_FLOAT32 = 0  # of a tensor
_LONGEST = 64 * 2**20  # several times the longest vocabularies, which are most of a header


def read_gguf_header(path: Path) -> dict[str, Any]:
    """The metadata by key, and the tensors whose names begin with ``rope_``, as tuples.

    Lists of strings, and of more numbers than models have layers, are None.

    Raises:
        ConfigError: If the file is damaged, or of a version that llama.cpp does not read.
    """
    try:
        with path.open("rb") as file:
            return _read(file)
    except struct.error:
        what = "its header announces more than there is"
    except ValueError as error:
        what = str(error)
    raise ConfigError(f"{path} is a damaged GGUF file: {what}; download or convert it again")


def _read(file: BinaryIO) -> dict[str, Any]:
    header = _Header(file.read(_LONGEST))
    _, version, num_tensors, num_keys = header.take("IIQQ")
    if version not in (2, 3):
        raise ValueError(f"its version is {version}, and llama.cpp reads 2 and 3")
    values = {header.text(): header.value() for _ in range(num_keys)}
    tensors: dict[str, tuple[int, int]] = {}
    for _ in range(num_tensors):
        name = header.text()
        *shape, kind, offset = header.take(f"{header.take('I')[0]}QIQ")
        tensors[name] = offset, prod(shape) if name.startswith("rope_") else 0
        if tensors[name][1] > (WIDEST if kind == _FLOAT32 else 0):
            raise ValueError(f"{name} must be at most {WIDEST} numbers in float32")
    alignment = values.get("general.alignment", 32)
    if len(values) != num_keys or not isinstance(alignment, int) or alignment < 1:
        raise ValueError("a key stands twice, or general.alignment is no whole number above 0")
    start, size = -(-header.at // alignment) * alignment, file.seek(0, os.SEEK_END)
    for name, (offset, count) in tensors.items():
        if start + offset + 4 * count > size:
            raise ValueError(f"it is cut off at byte {size}, before the end of {name}")
        if count:
            file.seek(start + offset)
            values[name] = struct.unpack(f"<{count}f", file.read(4 * count))
    return values


class _Header:
    """A place in a header, from which the next values are read; beyond its end, struct.error."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.at = 0

    def take(self, codes: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{codes}", self._data, self.at)
        self.at += struct.calcsize(f"<{codes}")
        return values

    def text(self) -> str:
        return self.take(f"{self.take('Q')[0]}s")[0].decode("utf-8", "replace")

    def value(self) -> Any:
        """A key's type and value."""
        (kind,) = self.take("I")
        if kind != _ARRAY:
            return self.text() if kind == _STRING else self.take(_code(kind))[0]
        kind, count = self.take("IQ")
        if kind == _STRING:
            for _ in range(count):
                self.text()
            return None
        if count > MOST_LAYERS:
            self.take(f"{count * struct.calcsize(f'<{_code(kind)}')}s")
            return None
        return self.take(f"{count}{_code(kind)}")


def _code(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"it names the type {kind} for a value, which there is not")
    return _SCALARS[kind]
