"""The plan of a conversion; `write` streams the result to disk, `verify` checks it."""

from __future__ import annotations

import errno
import json
import os
import re
import tempfile
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from phasor.errors import CheckpointError
from phasor.files import refusal
from phasor.files.checkpoint.rows import Change
from phasor.files.tensors import (
    CHUNK,
    Advance,
    Entry,
    Rows,
    no_progress,
    open_checkpoint,
    read_header,
)
from phasor.files.texts import parse_json
from phasor.numpy import score
from phasor.pairings import Pairing
from phasor.rope import Rope

Program = Literal["transformers", "meta"]
PROGRAMS: tuple[Program, ...] = ("transformers", "meta")
_MAX_LISTED_KINDS = 12  # limit on the names in a message
_DISTANCES = np.array([0, 1, -7, 1000])


@dataclass(frozen=True, slots=True)
class ResultTensor:
    """One tensor of the result: rows of the source, which are joined on ``axis``."""

    pieces: tuple[Rows, ...]
    axis: int = 0

    @property
    def size(self) -> int:
        """Bytes of the tensor."""
        return sum(piece.size for piece in self.pieces)

    def chunk_ranges(self, piece: Rows) -> Iterator[tuple[int, int]]:
        """First row and number of rows of each chunk of a piece; no chunk cuts a period."""
        period = 1 if piece.order is None else len(piece.order)
        # the chunks of all pieces may be in memory at once
        step = period * max(1, CHUNK // (len(self.pieces) * piece.width * period))
        for first in range(0, piece.num_rows, step):
            yield first, min(step, piece.num_rows - first)

    def chunks(self) -> Iterator[NDArray[np.uint8]]:
        """The bytes of the result in order, a few megabytes at a time."""
        if self.axis == 1:
            for step in self.chunk_ranges(self.pieces[0]):
                # a row of the result is the pieces' rows side by side
                yield np.concatenate([piece.read(*step) for piece in self.pieces], axis=1)
            return
        for piece in self.pieces:
            for step in self.chunk_ranges(piece):
                rows = piece.read(*step)
                for part in [rows] if piece.order is None else _reorder_rows(rows, piece.order):
                    yield np.packbits(part, bitorder="little") if piece.is_bits else part


def _reorder_rows(rows: NDArray[np.uint8], order: NDArray[np.intp]) -> Iterator[NDArray[np.uint8]]:
    """Rows in their new order, a few at a time, because a period may be a whole tensor."""
    width = rows.shape[1]
    # [rows, width] -> [periods, period], whose items are rows
    items = rows.view(np.dtype((np.void, width))).reshape(-1, len(order))
    # a multiple of 8 rows, so that rows of a few bits are whole bytes together
    step = len(order) if len(items) > 1 else 8 * max(1, CHUNK // (8 * width))
    for first in range(0, len(order), step):
        yield np.take(items, order[first : first + step], axis=1).view(np.uint8)


@dataclass(frozen=True, slots=True)
class ResultFile:
    """One safetensors file of the result: the bytes before its data, and the tensors in order."""

    header: bytes
    tensors: Mapping[str, ResultTensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversionPlan:
    """The description of a conversion, for `write` and `verify`."""

    path: Path  # the source, a folder or a file; the result is the same, or for a program a folder
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
        tensors = (tensor for file in self.files.values() for tensor in file.tensors.values())
        headers = (file.header for file in self.files.values())
        return sum(map(len, headers)) + sum(tensor.size for tensor in tensors)

    @property
    def is_folder(self) -> bool:
        """Whether the result is a folder."""
        return self.program is not None or self.path.is_dir()

    def location(self, name: str, result: Path) -> Path:
        """The path of the file ``name`` of the result at ``result``."""
        return result / name if self.is_folder else result

    def lines(self) -> list[str]:
        """A line for each kind of tensor that changes or stays, and for each note."""
        num_tensors = sum(len(file.tensors) for file in self.files.values())
        pairings = f"{self.source} to {self.target}"
        if self.program is not None:
            ranks = "" if self.ranks == 1 else f" of {self.ranks} ranks"
            summary = f"{num_tensors} tensors{ranks} for {self.program}"
            moved = f", {len(self.changes)} from {pairings}" if self.changes else ""
            return [f"{self.path}: {summary}{moved}", *self.notes]
        lines = [f"{self.path}: {pairings}, {len(self.changes)} of {num_tensors} tensors change"]
        roles = {name: change.part.role for name, change in self.changes.items()}
        for role in dict.fromkeys(roles.values()):
            kinds = count_kinds(name for name in roles if roles[name] == role)
            lines += [f"  {kind}  {count} x {role}" for kind, count in kinds.items()]
        if self.unchanged_lookalikes:
            lines.append("Similar names, not converted:")
            lines += [f"  {kind}  {count}" for kind, count in self.unchanged_lookalikes.items()]
        return [*lines, *self.notes]

    def __repr__(self) -> str:
        return f"ConversionPlan({self.lines()[0]!r})"

    def __str__(self) -> str:
        return "\n".join(self.lines())


def count_kinds(names: Iterable[str]) -> dict[str, int]:
    """Names with their numbers replaced by ``*``, and the number of tensors of each."""
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
    """Check that ``target`` is the result of the planned conversion; an error if it is not.

    Both sides are read from disk. Headers must equal the plan's and unchanged tensors the source's,
    byte for byte; every other tensor must hold the source's rows in the planned order. For every
    row order in use, random queries and keys must have equal scores before and after.

    Between programs, the config must hold the planned values (keys may be added), and each rank's
    part of every tensor must be in its place.

    Args:
        plan: From `plan_conversion`.
        target: The result of `write`.
        advance: Called with the number of bytes compared since the last call.

    Raises:
        VerificationError: Naming the first tensor that differs from the plan.
    """
    result = Path(target)
    if result.is_dir() != plan.is_folder:
        kind = "folder" if plan.is_folder else "file"
        raise refusal("other_kind", path=result, kind=kind)
    # an index must match its shards; results for other programs have no index
    if plan.program is None:
        open_checkpoint(result)
    try:
        for name, data in plan.other_files.items():
            _compare_other_file(plan, result / name, data)
        for name, file in plan.files.items():
            path, source = plan.location(name, result), "the plan"
            if plan.program is None:  # these have the headers of the source
                source = plan.location(name, plan.path)
                if read_header(source).data != file.header:
                    raise refusal("changed", path=source)
            header = read_header(path)
            if header.data != file.header:
                raise refusal("other_header", path=path, source=source)
            advance(len(file.header))
            for tensor_name, tensor in file.tensors.items():
                if not _is_in_place(header.tensors[tensor_name], tensor):
                    raise refusal("other_rows", path=path, name=tensor_name)
                advance(tensor.size)
    except OSError as error:
        raise refusal("not_compared", path=result, error=error) from None
    compare_scores(plan)


def _compare_other_file(plan: ConversionPlan, path: Path, data: bytes) -> None:
    """Compare an index, which is the source's, or a config."""
    written_data = path.read_bytes()
    if plan.program is None:
        if written_data != data:
            raise refusal("other_index", path=path)
        return
    config = parse_json(written_data, str(path), CheckpointError)
    for key, value in json.loads(data).items():
        # keys may be added, and the ids of tokens, which are None, filled in
        if value is not None and config.get(key) != value:
            raise refusal("other_value", path=path, key=key, value=value, got=config.get(key))


def _is_in_place(entry: Entry, tensor: ResultTensor) -> bool:
    """Whether every row is at the place that the plan gives it."""
    widths = [piece.width for piece in tensor.pieces]
    begin = column = 0
    for piece, width in zip(tensor.pieces, widths, strict=True):
        if piece.is_bits:
            result = entry.items(width)
        else:
            # a row of the result is as wide as all pieces side by side
            result = entry.rows(sum(widths) if tensor.axis == 1 else width, begin)
        # a few rows at a time, because a piece may be a whole tensor, as large as memory allows
        step = 8 * max(1, CHUNK // (8 * max(result.width, 64)))
        for first, count in tensor.chunk_ranges(piece):
            source_rows = piece.read(first, count)
            for start in range(0, count, step):
                end = min(start + step, count)
                origins: slice | NDArray[np.intp] = slice(start, end)
                if piece.order is not None:
                    place = np.arange(start, end) % len(piece.order)
                    origins = np.arange(start, end) - place + piece.order[place]
                written = result.read(first + start, end - start)
                if not np.array_equal(written[:, column : column + width], source_rows[origins]):
                    return False
        if tensor.axis == 1:
            column += width
        else:
            begin += piece.size
    return True


def compare_scores(plan: ConversionPlan) -> None:
    """Check with random vectors that every row order in the plan keeps the scores of its heads."""
    checked_orders: set[tuple[object, ...]] = set()
    for name, change in plan.changes.items():
        # layers of one kind have the same order, so one check covers all of them
        key = change.heads, change.order.tobytes()
        if key not in checked_orders and not _scores_agree(plan, change):
            raise refusal("other_scores", name=name)
        checked_orders.add(key)


def _scores_agree(plan: ConversionPlan, change: Change) -> bool:
    rope = change.rope
    # the row order must keep scores for any frequencies, so the default ones suffice
    ropes = [
        Rope(
            head_dim=rope.head_dim,
            pairing=pairing,
            rotary_dim=rope.rotary_dim,
            rotary_start=rope.rotary_start,
        )
        for pairing in (plan.source, plan.target)
    ]
    width = rope.head_dim
    # [query | key, one period of rows]
    source_items = np.random.default_rng(0).standard_normal((2, len(change.order)))
    # the rows of the result are the source's rows in the plan's order
    result_items = source_items[:, change.order]
    rotated = np.zeros(len(change.order), dtype=bool)
    for start in change.heads:
        head = slice(start, start + width)
        rotated[head] = True
        before, after = (
            score(x[0, head], x[1, head], _DISTANCES, rope)
            for x, rope in zip((source_items, result_items), ropes, strict=True)
        )
        # both are sums of the same products in different orders
        largest = np.abs(source_items[:, head]).max(0)
        bound = width * np.finfo(float).eps * largest @ largest
        if np.abs(before - after).max() > bound:
            return False
    # rows that are not rotated must not have moved
    return bool(np.array_equal(source_items[:, ~rotated], result_items[:, ~rotated]))


def write(
    plan: ConversionPlan,
    target: str | os.PathLike[str],
    *,
    verified: bool = False,
    advance: Advance = no_progress,
) -> None:
    """Write the converted checkpoint to ``target``.

    A file becomes a file; a folder becomes a folder with only the weights and their index. Headers
    and unconverted tensors are copied byte for byte. Memory use is one period of a tensor: one
    head, or a whole projection if heads are not repeated. Between programs the result is a folder
    with the config and one file of weights. The source is only read. The result is renamed to
    ``target`` once all of it is on disk; an interrupted run leaves at most a hidden ``.partial``
    folder next to it.

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
    with _partial_path(final, is_folder=plan.is_folder) as partial:
        for name, file in plan.files.items():
            _write_file(file, plan.location(name, partial), advance)
        for name, data in plan.other_files.items():
            (partial / name).write_bytes(data)
        for name in (*plan.files, *plan.other_files):
            _flush_to_disk(plan.location(name, partial))
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


@contextmanager
def _partial_path(final: Path, *, is_folder: bool) -> Generator[Path]:
    """A temporary path next to ``final``, deleted afterwards unless it was renamed."""
    names = {"prefix": f".{final.name}.", "suffix": ".partial", "dir": str(final.parent)}
    try:
        with tempfile.TemporaryDirectory(**names, ignore_cleanup_errors=True) as folder:
            # the folder is readable by its owner only; files inside get the usual permissions
            path = Path(folder) / "partial"
            if is_folder:
                path.mkdir()
            yield path
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
