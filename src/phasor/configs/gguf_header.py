"""The header of a GGUF file: its metadata, and the tensors about the rope; no weights are read.

A file is the magic ``GGUF``, a version, the numbers of tensors and of keys; each key with a type
and a value; each tensor's name, shape, type and offset; and, aligned, their data (ggml's
``docs/gguf.md``).
"""

from __future__ import annotations

import struct
from math import prod
from pathlib import Path
from typing import Any

from phasor.errors import ConfigError
from phasor.rope import WIDEST

_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9
_FLOAT32 = 0  # of a tensor
_LONGEST = 64 * 2**20  # several times the longest vocabularies, which are most of a header


def read_gguf_header(path: Path) -> dict[str, Any]:
    """The metadata by key, without lists of strings, and the tensors that begin with ``rope_``.

    Raises:
        ConfigError: If the file is damaged, or of a version that llama.cpp does not read.
    """
    try:
        return _read(path)
    except (struct.error, KeyError):
        what = "its header asks for more bytes than it has, or for a type that there is not"
    except ValueError as error:
        what = str(error)
    raise ConfigError(f"{path} is a damaged GGUF file: {what}; download or convert it again")


def _read(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    with path.open("rb") as file:
        header = _Header(file.read(min(size, _LONGEST)))
        _, version, num_tensors, num_keys = header.take("IIQQ")
        if version not in (2, 3):
            raise ValueError(f"its version is {version}, and llama.cpp reads 2 and 3")
        values = {header.text(): header.value() for _ in range(num_keys)}
        tensors = [header.tensor() for _ in range(num_tensors)]
        alignment = values.get("general.alignment", 32)
        if len(values) != num_keys or not isinstance(alignment, int) or alignment < 1:
            raise ValueError("a key stands twice, or general.alignment is no whole number above 0")
        start = -(-header.at // alignment) * alignment
        for name, count, offset in tensors:
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
        """A type and a value of it."""
        (kind,) = self.take("I")
        if kind != _ARRAY:
            return self.text() if kind == _STRING else self.take(_SCALARS[kind])[0]
        kind, count = self.take("IQ")
        if kind != _STRING:
            return self.take(f"{count}{_SCALARS[kind]}")
        if 8 * count > len(self._data):
            raise struct.error
        for _ in range(count):
            self.text()
        return None

    def tensor(self) -> tuple[str, int, int]:
        """A name, how many numbers a tensor about the rope has, and the offset of its data."""
        name = self.text()
        *shape, kind, offset = self.take(f"{self.take('I')[0]}QIQ")
        count = prod(shape) if name.startswith("rope_") else 0
        if count > (WIDEST if kind == _FLOAT32 else 0):
            raise ValueError(f"{name} must be at most {WIDEST} numbers in float32")
        return name, count, offset
