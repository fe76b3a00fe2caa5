"""The header of a GGUF file: its metadata, and the tensors about the rope; no weights are read.

A file is the magic ``GGUF``, a version, the numbers of tensors and of keys; each key with a type
and a value; each tensor's name, shape, type and offset; and, aligned, their data (ggml's
``docs/gguf.md``). Every length is checked against the file before anything is read or kept.
"""

from __future__ import annotations

import mmap
import struct
from math import prod
from pathlib import Path
from typing import Any, NoReturn

from phasor.configs.layer_kinds import MOST_LAYERS
from phasor.errors import ConfigError
from phasor.rope import WIDEST

_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9
_FLOAT32 = 0  # of a tensor
_LONGEST = 64 * 2**20  # several times the longest vocabularies, which are most of a header


def read_gguf_header(path: Path) -> dict[str, Any]:
    """The metadata by key, None for lists that are no config's, and ``rope_`` tensors as lists.

    Raises:
        ConfigError: If the file is damaged, or its version or a tensor is none that llama.cpp
            reads.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _Header(path, data).read()


class _Header:
    """A place in a file's header, from which the next value is read."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._end = min(len(data), _LONGEST)
        self._at = len("GGUF")
        self._order = "<"

    def read(self) -> dict[str, Any]:
        version = self._number("I")
        if version % 2**16 == 0:
            # a file in the other byte order
            self._order = ">"
            version = int.from_bytes(version.to_bytes(4, "little"), "big")
        if version not in (2, 3):
            raise ConfigError(
                f"{self._path} is a GGUF file of version {version}, and llama.cpp reads 2 and 3; "
                "convert the model again with a current llama.cpp"
            )
        num_tensors, num_keys = self._number("Q"), self._number("Q")
        header: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._text()
            if key in header:
                self._refuse(f"the key {key!r} stands twice")
            header[key] = self._value(self._number("I"))
        about_rope: dict[str, tuple[int, int]] = {}
        last = 0
        for _ in range(num_tensors):
            name = self._text()
            count = prod(self._numbers("Q", self._number("I")))
            kind, offset = self._number("I"), self._number("Q")
            last = max(last, offset)
            if name.startswith("rope_"):
                if kind != _FLOAT32 or count > WIDEST:
                    self._refuse(f"{name} must be at most {WIDEST} numbers in float32")
                about_rope[name] = count, offset
                last = max(last, offset + 4 * count)
        alignment = header.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            self._refuse(f"general.alignment must be a whole number above 0, got {alignment!r}")
        start = -(-self._at // alignment) * alignment
        if start + last > len(self._data):
            self._refuse(f"it is cut off at byte {len(self._data)}, before the last of its tensors")
        for name, (count, offset) in about_rope.items():
            floats = struct.unpack_from(f"{self._order}{count}f", self._data, start + offset)
            header[name] = list(floats)
        return header

    def _value(self, kind: int) -> Any:
        """The value of a key; None for a list of strings, or of more numbers than layers."""
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY:
            return self._number(self._code(kind))
        kind, count = self._number("I"), self._number("Q")
        if kind == _STRING:
            for _ in range(count):
                self._skip(self._number("Q"))
            return None
        code = self._code(kind)
        if count > MOST_LAYERS:
            self._skip(count * struct.calcsize(f"={code}"))
            return None
        return list(self._numbers(code, count))

    def _code(self, kind: int) -> str:
        """The letter of `struct` for a type of value."""
        if kind not in _SCALARS:
            self._refuse(f"byte {self._at - 4} of its header names a type that there is not, {kind}")
        return _SCALARS[kind]

    def _text(self) -> str:
        start = self._skip(self._number("Q"))
        return self._data[start : self._at].decode("utf-8", "replace")

    def _number(self, code: str) -> Any:
        return self._numbers(code, 1)[0]

    def _numbers(self, code: str, count: int) -> tuple[Any, ...]:
        # "=" has the sizes that the file has
        start = self._skip(count * struct.calcsize(f"={code}"))
        return struct.unpack_from(f"{self._order}{count}{code}", self._data, start)

    def _skip(self, size: int) -> int:
        """Go behind the next ``size`` bytes, and return where they begin."""
        start, self._at = self._at, self._at + size
        if self._at > self._end:
            self._refuse(
                f"byte {start} announces {size} bytes, and its header cannot go beyond {self._end}"
            )
        return start

    def _refuse(self, what: str) -> NoReturn:
        raise ConfigError(
            f"{self._path} is a damaged GGUF file: {what}; download or convert it again"
        )
