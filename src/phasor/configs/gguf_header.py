"""The header of a GGUF file, read with the gguf package after its lengths were checked.

A file is the magic ``GGUF``, a version, the numbers of tensors and of keys; each key with a type
and a value; each tensor's name, shape, type and offset; and their data (ggml's ``docs/gguf.md``).
The package believes each number, and fills the memory with what a damaged one announces.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, BinaryIO

from phasor.errors import ConfigError, install_hint

# bytes of a value by its type
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9
_LONGEST = 64 * 2**20  # several times the longest vocabularies, which are most of a header


def read_gguf_header(path: Path) -> dict[str, Any]:
    """Metadata of a GGUF file by key, and its tensors about the rope as lists; no weights.

    Raises:
        ConfigError: If the file is damaged, or the gguf package is absent.
    """
    try:
        from gguf import GGUFReader
    except ImportError:
        raise ConfigError(
            f"{path} is a binary GGUF file, which is read with the gguf package: "
            f"{install_hint('gguf')}"
        ) from None
    try:
        with path.open("rb") as file:
            _check_lengths(file, min(path.stat().st_size, _LONGEST))
        # the reader maps the file into memory, so it reads no weights from the disk
        reader = GGUFReader(path)
        header = {
            name: field.contents()
            for name, field in reader.fields.items()
            if not name.startswith("tokenizer.")  # a vocabulary takes longer than all other fields
        }
        tensors = [tensor for tensor in reader.tensors if tensor.name.startswith("rope_")]
        return header | {tensor.name: tensor.data.astype(float).tolist() for tensor in tensors}
    except struct.error:
        what = "its header announces more than there is"
    except Exception as error:  # the reader's errors on damaged bytes have no common base class
        what = str(error)
    raise ConfigError(f"{path} is a damaged GGUF file: {what}; download or convert it again")


def _check_lengths(file: BinaryIO, size: int) -> None:
    """Check that no string, list or count of the header ends beyond ``size``.

    Raises:
        struct.error: If one is.
        ValueError: If a value has a type that there is not, or the version is unknown.
    """

    def take(codes: str) -> tuple[int, ...]:
        return struct.unpack(f"<{codes}", file.read(struct.calcsize(f"<{codes}")))

    def skip(length: int) -> None:
        if length > size - file.tell():
            raise struct.error
        file.seek(length, 1)

    def skip_values(kind: int, count: int = 1) -> None:
        if kind in _SIZES:
            skip(_SIZES[kind] * count)
            return
        for _ in range(count):
            if kind == _STRING:
                skip(*take("Q"))
            elif kind == _ARRAY:
                skip_values(*take("IQ"))
            else:
                raise ValueError(f"it names the type {kind} for a value, which there is not")

    _, version, num_tensors, num_keys = take("IIQQ")
    if version not in (2, 3):
        raise ValueError(f"its version is {version}, and llama.cpp reads 2 and 3")
    for _ in range(num_keys):
        skip_values(_STRING)
        skip_values(*take("I"))
    for _ in range(num_tensors):
        skip_values(_STRING)
        skip(8 * take("I")[0] + 12)
