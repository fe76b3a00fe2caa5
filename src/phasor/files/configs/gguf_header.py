"""The header of a GGUF file, read with the gguf package after its lengths were checked."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, BinaryIO

from phasor.errors import ConfigError, install_hint

# bytes of a value by its type (ggml's docs/gguf.md); strings and arrays have lengths of their own
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9
_LONGEST = 64 * 2**20  # several times the longest vocabularies, which are most of a header


def read_gguf_header(path: Path) -> dict[str, Any]:
    """Metadata of a GGUF file by key, and its tensors about the rope as lists; no weights."""
    try:
        from gguf import GGUFReader
    except ImportError:
        what = "is a binary GGUF file, which is read with the gguf package"
        raise ConfigError(f"{path} {what}: {install_hint('gguf')}") from None
    try:
        with path.open("rb") as file:
            _check_lengths(file, min(path.stat().st_size, _LONGEST))
        reader = GGUFReader(path)  # maps the file into memory, so it reads no weights from the disk
        # a vocabulary takes longer than all other fields
        fields = {k: v for k, v in reader.fields.items() if not k.startswith("tokenizer.")}
        tensors = [tensor for tensor in reader.tensors if tensor.name.startswith("rope_")]
        lists = {tensor.name: tensor.data.astype(float).tolist() for tensor in tensors}
        return {key: field.contents() for key, field in fields.items()} | lists
    except Exception as error:  # the reader's errors on damaged bytes have no common base class
        is_short = isinstance(error, struct.error)
        what = "its header announces more than there is" if is_short else str(error)
        what = f"is a damaged GGUF file: {what}; download or convert it again"
        raise ConfigError(f"{path} {what}") from None


def _check_lengths(file: BinaryIO, size: int) -> None:
    """Raise an error if a part of the header ends beyond ``size``; gguf would fill the memory."""

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
