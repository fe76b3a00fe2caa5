"""The plan of a conversion: the files of the result, and the pieces of each of their tensors."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from phasor.files.checkpoint.files import CHUNK, Rows
from phasor.files.checkpoint.model import Projection
from phasor.files.checkpoint.rows import Reorder
from phasor.pairings import Pairing
from phasor.rope import Rope

Program = Literal["transformers", "meta"]
PROGRAMS: tuple[Program, ...] = ("transformers", "meta")
_MAX_LISTED_KINDS = 12  # of names in a message


class Piece(NamedTuple):
    """``num_rows`` rows of a tensor of the source from row ``first`` on.

    With an ``order``, row ``i`` of each ``len(order)`` rows of the result is row ``order[i]`` here.
    """

    rows: Rows
    first: int
    num_rows: int
    order: NDArray[np.intp] | None = None


@dataclass(frozen=True, slots=True)
class ResultTensor:
    """One tensor of the result: pieces of the source, which are joined on ``axis``."""

    pieces: tuple[Piece, ...]
    axis: int = 0

    @property
    def size(self) -> int:
        """Bytes of the tensor."""
        return sum(piece.num_rows * piece.rows.row_bytes for piece in self.pieces)

    def chunk_ranges(self, piece: Piece) -> Iterator[tuple[int, int]]:
        """First row and number of rows of each chunk of a piece; no chunk cuts a period."""
        period = 1 if piece.order is None else len(piece.order)
        # the chunks of all pieces may be in memory at once
        step = period * max(1, CHUNK // (len(self.pieces) * piece.rows.row_bytes * period))
        for first in range(0, piece.num_rows, step):
            yield piece.first + first, min(step, piece.num_rows - first)

    def chunks(self) -> Iterator[NDArray[np.uint8]]:
        """The bytes of the result in order, a few megabytes at a time."""
        if self.axis == 1:
            for step in self.chunk_ranges(self.pieces[0]):
                # a row of the result is the pieces' rows side by side
                yield np.concatenate([piece.rows.read(*step) for piece in self.pieces], axis=1)
            return
        for piece in self.pieces:
            for step in self.chunk_ranges(piece):
                rows = piece.rows.read(*step)
                if piece.order is None:
                    yield rows
                else:
                    yield from _reorder_rows(rows, piece.order)


def _reorder_rows(rows: NDArray[np.uint8], order: NDArray[np.intp]) -> Iterator[NDArray[np.uint8]]:
    """Rows in their new order, in parts, because a period may be a whole tensor."""
    row_bytes = rows.shape[1]
    # [rows, row_bytes] -> [periods, period], whose items are rows
    items = rows.view(np.dtype((np.void, row_bytes))).reshape(-1, len(order))
    step = len(order) if len(items) > 1 else max(1, CHUNK // row_bytes)
    for first in range(0, len(order), step):
        yield np.take(items, order[first : first + step], axis=1).view(np.uint8)


@dataclass(frozen=True, slots=True)
class ResultFile:
    """One safetensors file of the result: the bytes before its data, and the tensors in order."""

    header: bytes
    tensors: Mapping[str, ResultTensor]

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return len(self.header) + sum(tensor.size for tensor in self.tensors.values())


@dataclass(frozen=True, slots=True)
class Change:
    """A tensor that changes: what it is, the rope of its layer, the new order of its bytes."""

    part: Projection
    rope: Rope
    reorder: Reorder


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversionPlan:
    """The description of a conversion, for `write` and `verify`."""

    path: Path  # the source, a folder or a file; the result is the same
    program: Program | None = None  # reads the result; None if only the pairing changes
    ranks: int = 1  # how many files are joined
    source: Pairing  # pairing of the source's rows
    target: Pairing  # pairing of the result's rows
    files: Mapping[str, ResultFile]  # safetensors files of the result, by name
    other_files: Mapping[str, bytes]  # by name: an index or a config
    changes: Mapping[str, Change]  # by the tensor's name
    # names that look like queries or keys, with ``*`` for numbers, and how many tensors have each
    unchanged_lookalikes: Mapping[str, int] = field(default_factory=dict[str, int])
    notes: tuple[str, ...]  # sentences on using the result

    @property
    def size(self) -> int:
        """Bytes of the safetensors files."""
        return sum(file.size for file in self.files.values())

    def location(self, name: str, result: Path) -> Path:
        """The path of the file ``name`` of the result at ``result``."""
        return result / name if self.path.is_dir() else result

    def lines(self) -> list[str]:
        """What changes and what stays, by kinds of names, and the notes, a line each."""
        num_tensors = sum(len(file.tensors) for file in self.files.values())
        pairings = f"{self.source} to {self.target}"
        if self.program is not None:
            ranks = "" if self.ranks == 1 else f" of {self.ranks} ranks"
            summary = f"{num_tensors} tensors{ranks} for {self.program}"
            return [f"{self.path}: {summary}, {len(self.changes)} from {pairings}", *self.notes]
        lines = [f"{self.path}: {pairings}, {len(self.changes)} of {num_tensors} tensors change"]
        roles = {name: change.part.role for name, change in self.changes.items()}
        for role in dict.fromkeys(roles.values()):
            kinds = count_kinds(name for name in roles if roles[name] == role)
            lines += [f"  {kind}  {count} x {role}" for kind, count in kinds.items()]
        if self.unchanged_lookalikes:
            lines.append("Named alike and left as they are:")
            lines += [f"  {kind}  {count}" for kind, count in self.unchanged_lookalikes.items()]
        return [*lines, *self.notes]

    def __repr__(self) -> str:
        return f"ConversionPlan({self.lines()[0]!r})"

    def __str__(self) -> str:
        return "\n".join(self.lines())


def count_kinds(names: Iterable[str]) -> dict[str, int]:
    """Names with their numbers as ``*``, and how many tensors have each."""
    return dict(Counter(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names))


def list_kinds(names: Iterable[str]) -> str:
    """Kinds of names with their counts, for messages."""
    kinds = count_kinds(names)
    listed = [f"{kind} ({count})" for kind, count in list(kinds.items())[:_MAX_LISTED_KINDS]]
    num_unlisted = len(kinds) - len(listed)
    return ", ".join(listed) + (f" and {num_unlisted} more" if num_unlisted else "")
