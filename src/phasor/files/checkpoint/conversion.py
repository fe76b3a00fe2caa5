"""The plan of a conversion; `write` streams what it describes to disk, `verify` compares that."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from phasor.errors import CheckpointError
from phasor.files import refusal
from phasor.files.checkpoint.files import (
    CHUNK,
    Advance,
    Entry,
    Rows,
    no_progress,
    open_checkpoint,
    read_header,
    rows_of,
)
from phasor.files.checkpoint.model import Projection
from phasor.files.checkpoint.rows import Reorder
from phasor.files.configs.texts import parse_json
from phasor.numpy import score
from phasor.pairings import Pairing
from phasor.rope import Rope

Program = Literal["transformers", "meta"]
PROGRAMS: tuple[Program, ...] = ("transformers", "meta")
_MAX_LISTED_KINDS = 12  # of names in a message
_DISTANCES = np.array([0, 1, -7, 1000])


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
    # a model has thousands of names, of a dozen kinds
    listed = [f"{kind} ({count})" for kind, count in list(kinds.items())[:_MAX_LISTED_KINDS]]
    num_unlisted = len(kinds) - len(listed)
    return ", ".join(listed) + (f" and {num_unlisted} more" if num_unlisted else "")


def verify(
    plan: ConversionPlan, target: str | os.PathLike[str], *, advance: Advance = no_progress
) -> None:
    """Check that ``target`` is the conversion that ``plan_conversion`` describes; return if it is.

    Both sides are read from disk. Headers must be the plan's and unchanged tensors the source's,
    byte for byte; every other tensor must hold the source's rows in the planned order. For every
    row order in use, random queries and keys must have equal scores before and after.

    Between programs, the config must hold what the plan says (keys may be added), and each rank's
    part of every tensor must be in its place.

    Args:
        plan: From `plan_conversion`.
        target: What `write` made of it.
        advance: Called with the number of bytes compared since the last call.

    Raises:
        VerificationError: Naming the first tensor that differs from the plan.
    """
    result = Path(target)
    if result.is_dir() != plan.path.is_dir():
        kind = "folder" if plan.path.is_dir() else "file"
        raise refusal("other_kind", path=result, kind=kind, source=plan.path)
    # an index must hang together with its shards; other programs have none
    if plan.program is None:
        open_checkpoint(result)
    try:
        for name, data in plan.other_files.items():
            _compare_other_file(plan, result / name, data)
        for name, file in plan.files.items():
            source = plan.location(name, plan.path) if plan.program is None else "the plan"
            _compare_file(file, plan.location(name, result), source, advance)
    except OSError as error:
        raise refusal("not_compared", path=result, error=error) from None
    compare_scores(plan)


def _compare_other_file(plan: ConversionPlan, path: Path, data: bytes) -> None:
    """Compare an index or a config."""
    # small files, so they are compared whole
    written_data = path.read_bytes()
    if plan.program is None:
        if written_data != data:
            raise refusal("other_index", path=path)
        return
    config = parse_json(written_data, str(path), CheckpointError)
    for key, value in json.loads(data).items():
        # keys may be added, and the ids of tokens, which are None, filled in
        if value is not None and config.get(key) != value:
            values = {"value": value, "got": config.get(key)}
            raise refusal("other_value", path=path, key=key, **values)


def _compare_file(file: ResultFile, path: Path, source: Path | str, advance: Advance) -> None:
    header = read_header(path)
    if header.data != file.header:
        raise refusal("other_header", path=path, source=source)
    advance(len(file.header))
    for name, tensor in file.tensors.items():
        if not _is_in_place(path, header.tensors[name], tensor):
            raise refusal("other_rows", path=path, name=name)
        advance(tensor.size)


def _is_in_place(path: Path, entry: Entry, tensor: ResultTensor) -> bool:
    """Whether every row of every piece is where the plan puts it."""
    row_widths = [piece.rows.row_bytes for piece in tensor.pieces]
    # a row of the result is as wide as those of all pieces that stand side by side
    result = rows_of(path, entry, sum(row_widths) if tensor.axis == 1 else row_widths[0])
    row = column = 0
    for piece, width in zip(tensor.pieces, row_widths, strict=True):
        for first, count in tensor.chunk_ranges(piece):
            source_rows, start = piece.rows.read(first, count), row + first - piece.first
            # a few rows at a time: `source_rows` may be a whole tensor, as large as memory allows
            step = max(1, CHUNK // max(result.row_bytes, 64))
            for offset in range(0, count, step):
                result_rows = result.read(start + offset, min(step, count - offset))
                origins: slice | NDArray[np.intp] = slice(offset, offset + len(result_rows))
                if piece.order is not None:
                    indices = np.arange(offset, offset + len(result_rows))
                    period = len(piece.order)
                    origins = indices - indices % period + piece.order[indices % period]
                written = result_rows[:, column : column + width]
                if not np.array_equal(written, source_rows[origins]):
                    return False
        if tensor.axis == 1:
            column += width
        else:
            row += piece.num_rows
    return True


def compare_scores(plan: ConversionPlan) -> None:
    """Check with random vectors that every row order in the plan keeps the scores of its heads."""
    checked_orders: set[bytes] = set()
    for name, change in plan.changes.items():
        # layers of one kind have one order, so it is tried once for all of them
        key = repr(change.reorder.layout).encode() + change.reorder.order.tobytes()
        if key not in checked_orders and not _scores_agree(plan, change):
            raise refusal("other_scores", name=name)
        checked_orders.add(key)


def _scores_agree(plan: ConversionPlan, change: Change) -> bool:
    # the row order must keep scores for any frequencies, so the default ones suffice
    ropes = [
        Rope(
            head_dim=change.rope.head_dim,
            pairing=pairing,
            rotary_dim=change.rope.rotary_dim,
            rotary_start=change.rope.rotary_start,
        )
        for pairing in (plan.source, plan.target)
    ]
    layout, width = change.reorder.layout, change.rope.head_dim
    # [query | key, one period of rows]
    source_items = np.random.default_rng(0).standard_normal((2, layout.width))
    # the rows of the result are these, where the plan puts them
    result_items = source_items[:, change.reorder.order]
    rotated = np.zeros(layout.width, dtype=bool)
    for start in layout.heads:
        head = slice(start, start + width)
        rotated[head] = True
        before, after = (
            score(x[0, head], x[1, head], _DISTANCES, rope)
            for x, rope in zip((source_items, result_items), ropes, strict=True)
        )
        # both sum the same products, in different orders
        largest = np.abs(source_items[:, head]).max(0)
        bound = width * np.finfo(float).eps * largest @ largest
        if np.abs(before - after).max() > bound:
            return False
    # what does not turn must not have moved
    return bool(np.array_equal(source_items[:, ~rotated], result_items[:, ~rotated]))


def write(
    plan: ConversionPlan,
    target: str | os.PathLike[str],
    *,
    verified: bool = False,
    advance: Advance = no_progress,
) -> None:
    """The converted checkpoint, written to ``target``.

    A file becomes a file; a folder becomes a folder with the weights and their index and nothing
    else. Headers and unconverted tensors are copied byte for byte. Memory use is one period of a
    tensor: one head, or a whole projection where heads are not repeated. Between programs the
    result is a folder with the config and one file of weights. The source is only read.
    The result is renamed to ``target`` once all of it is on disk; an interrupted run leaves at
    most a hidden ``.partial`` folder beside it.

    Args:
        plan: From `plan_conversion`.
        target: A path that does not exist yet.
        verified: Run `verify` before the result is renamed to ``target``.
        advance: Called with the number of bytes written, and then compared, since the last call.

    Raises:
        CheckpointError: If ``target`` exists, the disk is full or fails, or the source changes
            meanwhile.
        VerificationError: If ``verified`` and the result differs from the plan.
    """
    final = Path(target)
    _refuse_existing(final)
    if not final.parent.is_dir():
        raise refusal("no_parent", path=final.parent)
    with _explain_os_errors(final), _partial_path(final, is_folder=plan.path.is_dir()) as partial:
        for name, file in plan.files.items():
            _write_file(file, plan.location(name, partial), advance)
        for name, data in plan.other_files.items():
            (partial / name).write_bytes(data)
            _flush_to_disk(partial / name)
        if verified:
            # before the rename: a result that fails never has its final name
            verify(plan, partial, advance=advance)
        _refuse_existing(final)
        partial.rename(final)
        # the new name is part of the folder
        _flush_to_disk(final.parent)


def _write_file(file: ResultFile, path: Path, advance: Advance) -> None:
    with path.open("xb") as stream:
        stream.write(file.header)
        advance(len(file.header))
        for tensor in file.tensors.values():
            for chunk in tensor.chunks():
                stream.write(chunk.data)
                advance(chunk.nbytes)
        stream.flush()
        os.fsync(stream.fileno())


@contextmanager
def _partial_path(final: Path, *, is_folder: bool) -> Generator[Path]:
    """A temporary path beside ``final``, deleted afterwards unless it was renamed."""
    folder = Path(tempfile.mkdtemp(prefix=f".{final.name}.", suffix=".partial", dir=final.parent))
    try:
        # mkdtemp's folder is readable by its owner only; files inside get the usual permissions
        path = folder / "partial"
        if is_folder:
            path.mkdir()
        yield path
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _explain_os_errors(final: Path) -> Generator[None]:
    """Turn an OSError into a CheckpointError that says that nothing was written."""
    try:
        yield
    except OSError as error:
        hint = "; free some space" if error.errno == errno.ENOSPC else ""
        raise refusal("not_written", path=final, error=f"{error.strerror or error}{hint}") from None


def _refuse_existing(final: Path) -> None:
    if final.exists() or final.is_symlink():
        raise refusal("exists", path=final)


def _flush_to_disk(path: Path) -> None:
    """Flush a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
