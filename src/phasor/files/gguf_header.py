"""The header of a GGUF file, read with the gguf package after a check of its lengths."""

from __future__ import annotations

import math
import struct
from collections.abc import Generator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from phasor.errors import CheckpointError, ConfigError, PhasorError, install_hint
from phasor.files import refusal
from phasor.files.budget import MOST_ELEMENTS
from phasor.rope import WIDEST

if TYPE_CHECKING:
    from gguf import GGUFReader

# bytes of a value by its type (ggml's docs/gguf.md); strings and arrays state their length
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9
_MOST_DIMS = 4  # the most dimensions of a tensor
_LONGEST = 64 * 2**20  # several times a header with the longest vocabulary


class GGUFTensor(NamedTuple):
    """A tensor of a GGUF file: its quantisation, its shape in PyTorch's order, and its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_gguf_header(path: Path) -> dict[str, Any]:
    """Metadata of a GGUF file by key, and its tensors about the rope as lists; no weights."""
    with _open_gguf(path, ConfigError) as reader:
        # a vocabulary takes longer than all other fields
        fields = {k: v for k, v in reader.fields.items() if not k.startswith("tokenizer.")}
        tensors = [tensor for tensor in reader.tensors if tensor.name.startswith("rope_")]
        lists = {tensor.name: tensor.data.astype(float).tolist() for tensor in tensors}
        return {key: field.contents() for key, field in fields.items()} | lists


def read_gguf_tensors(path: Path) -> list[GGUFTensor]:
    """The tensors of a GGUF file in the order of their data."""
    with _open_gguf(path, CheckpointError) as reader:
        split = reader.fields.get("split.count")
        if split is not None and split.contents() > 1:
            raise refusal("gguf_split", path=path)
        tensors = [
            GGUFTensor(
                tensor.name,
                tensor.tensor_type.name,
                # GGUF has the number of rows last
                tuple(map(int, reversed(tensor.shape))),
                int(tensor.data_offset),
                int(tensor.data_offset + tensor.n_bytes),
            )
            for tensor in reader.tensors
        ]
        tensors.sort(key=lambda tensor: tensor.begin)
        for first, second in pairwise(tensors):
            if second.begin < first.end:
                raise ValueError(f"{first.name} and {second.name} overlap")
    return tensors


@contextmanager
def _open_gguf(path: Path, as_type: type[PhasorError]) -> Generator[GGUFReader]:
    """A reader of the file, after a check of its header; its errors are raised as ``as_type``."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise refusal("gguf_package", as_type, path=path, hint=install_hint("gguf")) from None
    try:
        with path.open("rb") as file:
            _check_lengths(file, min(path.stat().st_size, _LONGEST), str(path))
        yield GGUFReader(path)  # maps the file into memory, so it reads no weights from the disk
    except PhasorError:
        raise
    except Exception as error:  # the reader's errors on damaged bytes have no common base class
        is_short = isinstance(error, struct.error)
        problem = "its header announces more data than the file has" if is_short else str(error)
        problem = problem or type(error).__name__
        raise refusal("gguf_damaged", as_type, path=path, what=problem) from None


def _check_lengths(file: BinaryIO, size: int, origin: str) -> None:
    """Raise an error if a part of the header ends beyond ``size``, or its arrays hold too much.

    Without the check, gguf would fill the memory for false lengths, with an object per element.
    """
    elements = 0

    def take(codes: str) -> tuple[int, ...]:
        return struct.unpack(f"<{codes}", file.read(struct.calcsize(f"<{codes}")))

    def skip(length: int) -> None:
        if length > size - file.tell():
            raise struct.error
        file.seek(length, 1)

    def add(count: int) -> None:
        nonlocal elements
        elements += count
        if elements > MOST_ELEMENTS:
            raise refusal("too_many", origin=origin, most=MOST_ELEMENTS)

    def skip_values(kind: int, count: int = 1) -> None:
        if kind in _SIZES:
            skip(_SIZES[kind] * count)
            add(count)
            return
        for _ in range(count):
            add(1)
            if kind == _STRING:
                skip(*take("Q"))
            elif kind == _ARRAY:
                skip_values(*take("IQ"))
            else:
                raise ValueError(f"it names the type {kind} for a value, and there is no such type")

    _, version, num_tensors, num_keys = take("IIQQ")
    if version not in (2, 3):
        raise ValueError(f"its version is {version}, and llama.cpp reads 2 and 3")
    for _ in range(num_keys):
        skip_values(_STRING)
        skip_values(*take("I"))
    for _ in range(num_tensors):
        (length,) = take("Q")
        is_about_rope = file.read(min(length, 5)) == b"rope_"
        skip(max(0, length - 5))
        (num_dims,) = take("I")
        if num_dims > _MOST_DIMS:
            raise struct.error
        if is_about_rope and math.prod(take(f"{num_dims}Q")) > WIDEST:
            raise ValueError(f"a tensor about the rope has more than {WIDEST} numbers")
        skip(12 if is_about_rope else 8 * num_dims + 12)
