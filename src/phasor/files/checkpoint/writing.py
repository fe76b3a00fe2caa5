"""`write` streams a planned conversion to disk; `verify` compares the result with the source."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from phasor._checks import short_repr
from phasor.errors import CheckpointError, VerificationError
from phasor.files.checkpoint.conversion import Change, ConversionPlan, ResultFile, ResultTensor
from phasor.files.checkpoint.files import (
    CHUNK,
    Advance,
    Entry,
    no_progress,
    open_checkpoint,
    read_header,
    rows_of,
)
from phasor.files.configs.source import parse_json
from phasor.numpy import score
from phasor.rope import Rope

_DISTANCES = np.array([0, 1, -7, 1000])


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
        raise CheckpointError(
            f"{result} must be a {'folder' if plan.path.is_dir() else 'file'}, as {plan.path} is"
        )
    if plan.program is None:
        open_checkpoint(result)
    try:
        for name, data in plan.other_files.items():
            _compare_other_file(plan, result / name, data)
        for name, file in plan.files.items():
            source = plan.location(name, plan.path) if plan.program is None else "the plan"
            _compare_file(file, plan.location(name, result), source, advance)
    except OSError as error:
        raise CheckpointError(f"{result} cannot be compared: {error}") from None
    compare_scores(plan)


def _compare_other_file(plan: ConversionPlan, path: Path, data: bytes) -> None:
    """Compare an index or a config."""
    written_data = path.read_bytes()
    if plan.program is None:
        if written_data != data:
            raise VerificationError(f"{path} must be that of the source, and is not")
        return
    config = parse_json(written_data, str(path), CheckpointError)
    for key, value in json.loads(data).items():
        # keys may be added, and the ids of tokens, which are None, filled in
        if value is not None and config.get(key) != value:
            raise VerificationError(
                f"{path}: {key} must be {short_repr(value)}, got {short_repr(config.get(key))}"
            )


def _compare_file(file: ResultFile, path: Path, source: Path | str, advance: Advance) -> None:
    header = read_header(path)
    if header.data != file.header:
        raise VerificationError(f"{path} must have the header of {source}, and has another")
    advance(len(file.header))
    for name, tensor in file.tensors.items():
        if not _is_in_place(path, header.tensors[name], tensor):
            raise VerificationError(f"{path}: {name!r} is not what the conversion makes of it")
        advance(tensor.size)


def _is_in_place(path: Path, entry: Entry, tensor: ResultTensor) -> bool:
    """Whether every row of every piece is where the plan puts it."""
    row_widths = [piece.rows.row_bytes for piece in tensor.pieces]
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
        key = repr(change.reorder.layout).encode() + change.reorder.order.tobytes()
        if key not in checked_orders and not _scores_agree(plan, change):
            raise VerificationError(f"the new order of {name!r} changes its scores")
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
    source_items = np.random.default_rng(0).standard_normal((2, layout.width))
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
        raise CheckpointError(f"{final.parent} is not a folder; make it first")
    with _explain_os_errors(final), _partial_path(final, is_folder=plan.path.is_dir()) as partial:
        for name, file in plan.files.items():
            _write_file(file, plan.location(name, partial), advance)
        for name, data in plan.other_files.items():
            (partial / name).write_bytes(data)
            _flush_to_disk(partial / name)
        if verified:
            verify(plan, partial, advance=advance)
        _refuse_existing(final)
        partial.rename(final)
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
        reason = error.strerror or str(error)
        hint = "; free some space" if error.errno == errno.ENOSPC else ""
        raise CheckpointError(
            f"{final} was not written: {reason}{hint}. The source is as it was"
        ) from None


def _refuse_existing(final: Path) -> None:
    if final.exists() or final.is_symlink():
        raise CheckpointError(f"{final} exists and is not overwritten; give another name")


def _flush_to_disk(path: Path) -> None:
    """Flush a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
