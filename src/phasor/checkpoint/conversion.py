"""What a conversion makes: the files of the result, and what each of their tensors is made of."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from phasor.checkpoint.files import CHUNK, Rows
from phasor.checkpoint.model import Part
from phasor.checkpoint.rows import Reorder
from phasor.pairings import Pairing
from phasor.rope import Rope

Program = Literal["transformers", "meta"]
PROGRAMS: tuple[Program, ...] = ("transformers", "meta")
_SHOWN = 12  # kinds of names in a message


class Piece(NamedTuple):
    """Consecutive rows of a tensor of the source.

    Attributes:
        rows: The tensor.
        first: The first of the rows.
        num_rows: How many they are.
        order: Row ``i`` of each ``len(order)`` rows of the result comes from row ``order[i]`` of
            these rows; None where rows stay.
    """

    rows: Rows
    first: int
    num_rows: int
    order: NDArray[np.intp] | None = None


@dataclass(frozen=True, slots=True)
class ResultTensor:
    """One tensor of the result, and the pieces of the source that it is made of.

    Attributes:
        pieces: The pieces, in the order of the result.
        axis: The axis on which they are joined; on axis 1 their rows have no new order.
    """

    pieces: tuple[Piece, ...]
    axis: int = 0

    @property
    def size(self) -> int:
        """Bytes of the tensor."""
        return sum(piece.num_rows * piece.rows.row_bytes for piece in self.pieces)

    def steps(self, piece: Piece) -> Iterator[tuple[int, int]]:
        """First row and number of rows of each chunk of a piece, periods of the order never cut."""
        period = 1 if piece.order is None else len(piece.order)
        # the rows of all pieces may be in memory at once
        step = period * max(1, CHUNK // (len(self.pieces) * piece.rows.row_bytes * period))
        for first in range(0, piece.num_rows, step):
            yield piece.first + first, min(step, piece.num_rows - first)

    def chunks(self) -> Iterator[NDArray[np.uint8]]:
        """The bytes of the result in order, a few megabytes at a time."""
        if self.axis == 1:
            for step in self.steps(self.pieces[0]):
                # a row of the result is the pieces' rows side by side
                yield np.concatenate([piece.rows.read(*step) for piece in self.pieces], axis=1)
            return
        for piece in self.pieces:
            for step in self.steps(piece):
                rows = piece.rows.read(*step)
                if piece.order is None:
                    yield rows
                else:
                    yield from _reorder_rows(rows, piece.order)


def _reorder_rows(rows: NDArray[np.uint8], order: NDArray[np.intp]) -> Iterator[NDArray[np.uint8]]:
    """Rows in their new order; a period may be a whole tensor, of which no copy is made at once."""
    row_bytes = rows.shape[1]
    # [rows, row_bytes] -> [periods, period], whose items are rows
    items = rows.view(np.dtype((np.void, row_bytes))).reshape(-1, len(order))
    step = len(order) if len(items) > 1 else max(1, CHUNK // row_bytes)
    for first in range(0, len(order), step):
        yield np.take(items, order[first : first + step], axis=1).view(np.uint8)


@dataclass(frozen=True, slots=True)
class ResultFile:
    """One safetensors file of the result.

    Attributes:
        header: The bytes of its header, with the length before it.
        tensors: Its tensors by name, in the order of their bytes.
    """

    header: bytes
    tensors: Mapping[str, ResultTensor]

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return len(self.header) + sum(tensor.size for tensor in self.tensors.values())


@dataclass(frozen=True, slots=True)
class Change:
    """One tensor that changes.

    Attributes:
        part: What the tensor is.
        rope: The rope of its layer.
        reorder: The new order of its bytes.
    """

    part: Part
    rope: Rope
    reorder: Reorder


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversionPlan:
    """The description of a conversion, for `write` and `verify`.

    Attributes:
        path: The source, a folder or a file; the result is the same.
        program: Whose files the result has; None where only the pairing changes.
        ranks: How many files of ranks are joined.
        source: The pairing of the source's rows.
        target: The pairing of the result's rows.
        files: The safetensors files of the result, by name.
        other_files: The other files of the result, by name: an index or a config.
        changes: The tensors that change, by name.
        alike: Names that look like queries or keys of tensors that do not change, with counts;
            numbers in names are written as ``*``.
        notes: What to know when using the result, a sentence each.
    """

    path: Path
    program: Program | None = None
    ranks: int = 1
    source: Pairing
    target: Pairing
    files: Mapping[str, ResultFile]
    other_files: Mapping[str, bytes]
    changes: Mapping[str, Change]
    alike: Mapping[str, int] = field(default_factory=dict[str, int])
    notes: tuple[str, ...]

    @property
    def size(self) -> int:
        """Bytes of the safetensors files."""
        return sum(file.size for file in self.files.values())

    def location(self, name: str, result: Path) -> Path:
        """Where the file ``name`` of the result at ``result`` is."""
        return result / name if self.path.is_dir() else result

    def lines(self) -> list[str]:
        """What changes and what stays, by kinds of names, and what to know of it, a line each."""
        every = sum(len(file.tensors) for file in self.files.values())
        pairings = f"{self.source} to {self.target}"
        if self.program is not None:
            ranks = "" if self.ranks == 1 else f" of {self.ranks} ranks"
            what = f"{every} tensors{ranks} for {self.program}, {len(self.changes)} from {pairings}"
            return [f"{self.path}: {what}", *self.notes]
        found = [f"{self.path}: {pairings}, {len(self.changes)} of {every} tensors change"]
        roles = {name: change.part.role for name, change in self.changes.items()}
        for role in dict.fromkeys(roles.values()):
            kinds = count_kinds(name for name in roles if roles[name] == role)
            found += [f"  {kind}  {count} x {role}" for kind, count in kinds.items()]
        if self.alike:
            found.append("Named alike and left as they are:")
            found += [f"  {kind}  {count}" for kind, count in self.alike.items()]
        return [*found, *self.notes]

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
    some = [f"{kind} ({count})" for kind, count in list(kinds.items())[:_SHOWN]]
    more = len(kinds) - len(some)
    return ", ".join(some) + (f" and {more} more" if more else "")
