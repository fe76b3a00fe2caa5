"""`write` streams a planned conversion to disk; `verify` compares the result with the source."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np

from phasor._checks import short_repr
from phasor.checkpoint.files import (
    CHUNK,
    Advance,
    Checkpoint,
    Entry,
    Header,
    Rows,
    no_progress,
    open_checkpoint,
    parse_json,
    read_exactly,
    read_header,
    rows_of,
)
from phasor.checkpoint.planning import Change, ConversionPlan
from phasor.checkpoint.programs import JoinedTensor, ProgramPlan
from phasor.checkpoint.rows import Reorder
from phasor.errors import CheckpointError, VerificationError
from phasor.numpy import score
from phasor.rope import Rope

_DISTANCES = np.array([0, 1, -7, 1000])


def verify(
    plan: ConversionPlan | ProgramPlan,
    target: str | os.PathLike[str],
    *,
    advance: Advance = no_progress,
) -> None:
    """Check that ``target`` is the conversion that ``plan`` describes; return if it is.

    Both sides are read from disk. Headers and unchanged tensors must be equal byte for byte; every
    other tensor must hold the source's rows in the planned order. For every row order in use,
    random queries and keys must have equal scores before and after.

    Between programs, the header must be the plan's, the config must hold what the plan says (keys
    may be added), and each rank's part of every tensor must be in its place.

    Args:
        plan: From `plan` or `plan_for`.
        target: What `write` made of it.
        advance: Called with the number of bytes compared since the last call.

    Raises:
        VerificationError: Naming the first tensor that differs from the plan.
        CheckpointError: If ``target`` cannot be read.
    """
    result = Path(target)
    if isinstance(plan, ProgramPlan):
        try:
            _compare_program(plan, result, advance)
        except OSError as error:
            raise CheckpointError(f"{result} cannot be compared: {error}") from None
        compare_scores(plan)
        return
    if result.is_dir() != plan.checkpoint.is_folder:
        raise CheckpointError(
            f"{result} must be a {'folder' if plan.checkpoint.is_folder else 'file'}, as "
            f"{plan.checkpoint.path} is"
        )
    open_checkpoint(result)
    for name in plan.checkpoint.files:
        old, new = plan.checkpoint.location(name), result / name if result.is_dir() else result
        try:
            _compare_files(plan, name, (old, new), advance)
        except OSError as error:
            raise CheckpointError(f"{new} cannot be compared: {error}") from None
    if plan.checkpoint.index is not None:
        index = plan.checkpoint.index
        if (result / index).read_bytes() != (plan.checkpoint.path / index).read_bytes():
            raise VerificationError(f"{result / index} must be that of the source, and is not")
    compare_scores(plan)


def _compare_files(
    plan: ConversionPlan, name: str, paths: tuple[Path, Path], advance: Advance
) -> None:
    old, new = paths
    header = plan.checkpoint.files[name]
    read_header(new)
    with old.open("rb") as before, new.open("rb") as after:
        if read_exactly(before, header.begin) != read_exactly(after, header.begin):
            raise VerificationError(f"{new} must have the header of {old}, and has another")
        advance(header.begin)
        for tensor, entry in header.tensors.items():
            change = plan.changes.get(tensor)
            if not _holds_reordered(
                before, after, entry, None if change is None else change.reorder
            ):
                raise VerificationError(f"{new}: {tensor!r} is not what the conversion makes of it")
            advance(entry.end - entry.begin)


def _holds_reordered(
    before: BinaryIO, after: BinaryIO, entry: Entry, reorder: Reorder | None
) -> bool:
    """Whether the next tensor of ``after`` is that of ``before``, reordered; None: unchanged."""
    remaining = entry.end - entry.begin
    if reorder is not None:
        period = reorder.period_bytes
        for _ in range(reorder.layout.periods):
            rows = np.frombuffer(read_exactly(before, period), np.uint8)
            rows = rows.reshape(reorder.layout.width, -1)
            step = max(1, CHUNK // reorder.item_bytes)
            for first in range(0, len(rows), step):
                origins = reorder.order[first : first + step]
                if rows[origins].tobytes() != read_exactly(
                    after, len(origins) * reorder.item_bytes
                ):
                    return False
        remaining -= period * reorder.layout.periods
    while remaining:
        count = min(remaining, CHUNK)
        if read_exactly(before, count) != read_exactly(after, count):
            return False
        remaining -= count
    return True


def _compare_program(plan: ProgramPlan, folder: Path, advance: Advance) -> None:
    config, weights = folder / plan.config_file, folder / plan.weights_file
    found = parse_json(config.read_bytes(), str(config))
    for key, value in plan.config.items():
        # keys may be added, and the ids of tokens, which are None, filled in
        if value is not None and found.get(key) != value:
            raise VerificationError(
                f"{config}: {key} must be {short_repr(value)}, got {short_repr(found.get(key))}"
            )
    header = read_header(weights)
    with weights.open("rb") as stream:
        if read_exactly(stream, header.begin) != plan.header:
            raise VerificationError(f"{weights} must have the header of the plan, and has another")
    advance(header.begin)
    for name, tensor in plan.tensors.items():
        if not _holds_ranks(rows_of(weights, header.tensors[name]), tensor):
            raise VerificationError(f"{weights}: {name!r} is not what the ranks make of it")
        advance(tensor.size)


def _holds_ranks(result: Rows, tensor: JoinedTensor) -> bool:
    """Whether every row of every rank is where the plan puts it."""
    first_row = first_column = 0
    for rank in tensor.ranks:
        columns = slice(first_column, first_column + rank.row_bytes)
        for first, count in tensor.steps(rank):
            rows = result.read(first_row + first, count)[:, columns]
            if tensor.reorder is not None:
                # from the result's order back to the source's
                order = tensor.reorder.order
                heads = rows.reshape(-1, len(order), rank.row_bytes)
                rows = heads[:, np.argsort(order)].reshape(rows.shape)
            if not np.array_equal(rows, rank.read(first, count)):
                return False
        if tensor.axis == 0:
            first_row += rank.shape[0]
        else:
            first_column += rank.row_bytes
    return True


def compare_scores(plan: ConversionPlan | ProgramPlan) -> None:
    """Check with random vectors that every row order in the plan keeps the scores of its heads.

    Raises:
        VerificationError: Naming a tensor whose order does not.
    """
    seen: set[bytes] = set()
    for name, change in plan.changes.items():
        key = repr(change.reorder.layout).encode() + change.reorder.order.tobytes()
        if key not in seen and not _scores_agree(plan, change):
            raise VerificationError(f"the new order of {name!r} changes its scores")
        seen.add(key)


def _scores_agree(plan: ConversionPlan | ProgramPlan, change: Change) -> bool:
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
    old = np.random.default_rng(0).standard_normal((2, layout.width))
    new = old[:, change.reorder.order]
    rotated = np.zeros(layout.width, dtype=bool)
    for start in layout.heads:
        head = slice(start, start + width)
        rotated[head] = True
        before, after = (
            score(x[0, head], x[1, head], _DISTANCES, rope)
            for x, rope in zip((old, new), ropes, strict=True)
        )
        # both sum the same products, in different orders
        bound = (
            width * np.finfo(float).eps * np.abs(old[:, head]).max(0) @ np.abs(old[:, head]).max(0)
        )
        if np.abs(before - after).max() > bound:
            return False
    return bool(np.array_equal(old[:, ~rotated], new[:, ~rotated]))


def write(
    plan: ConversionPlan | ProgramPlan,
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
        plan: From `plan` or `plan_for`.
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
    is_folder = isinstance(plan, ProgramPlan) or plan.checkpoint.is_folder
    with _disk_errors(final), _partial(final, is_folder=is_folder) as partial:
        if isinstance(plan, ProgramPlan):
            _write_program(plan, partial, advance)
        else:
            _write_files(plan, partial, advance)
        if verified:
            verify(plan, partial, advance=advance)
        _refuse_existing(final)
        partial.rename(final)
        _sync(final.parent)


def _write_program(plan: ProgramPlan, folder: Path, advance: Advance) -> None:
    with (folder / plan.weights_file).open("xb") as new:
        header = plan.header
        new.write(header)
        advance(len(header))
        for tensor in plan.tensors.values():
            for chunk in tensor.chunks():
                new.write(np.ascontiguousarray(chunk).data)
                advance(chunk.size)
        new.flush()
        os.fsync(new.fileno())
    (folder / plan.config_file).write_bytes(plan.config_text.encode())
    _sync(folder / plan.config_file)


def _write_files(plan: ConversionPlan, partial: Path, advance: Advance) -> None:
    checkpoint = plan.checkpoint
    for name, header in checkpoint.files.items():
        to = partial / name if checkpoint.is_folder else partial
        _convert(plan, checkpoint.location(name), to, header, advance)
    if checkpoint.index is not None:
        _copy_index(checkpoint, partial)


def _convert(
    plan: ConversionPlan, source: Path, target: Path, header: Header, advance: Advance
) -> None:
    with source.open("rb") as old, target.open("xb") as new:
        _copy(old, new, header.begin, advance)
        for name, entry in header.tensors.items():
            change = plan.changes.get(name)
            if change is None:
                _copy(old, new, entry.end - entry.begin, advance)
            else:
                _reorder(old, new, entry, change.reorder, advance)
        new.flush()
        os.fsync(new.fileno())


def _copy(old: BinaryIO, new: BinaryIO, count: int, advance: Advance) -> None:
    """Copy the next ``count`` bytes of ``old``."""
    while count:
        data = read_exactly(old, min(count, CHUNK))
        new.write(data)
        advance(len(data))
        count -= len(data)


def _reorder(
    old: BinaryIO, new: BinaryIO, entry: Entry, reorder: Reorder, advance: Advance
) -> None:
    remaining = reorder.layout.periods
    while remaining:
        periods = min(remaining, max(1, CHUNK // reorder.period_bytes))
        data = read_exactly(old, periods * reorder.period_bytes)
        _write_reordered(new, data, reorder)
        advance(len(data))
        remaining -= periods
    _copy(
        old, new, entry.end - entry.begin - reorder.layout.periods * reorder.period_bytes, advance
    )


def _write_reordered(new: BinaryIO, data: bytes, reorder: Reorder) -> None:
    """Write periods in their new order, in slices of items, as a period may be a whole tensor."""
    items = np.frombuffer(data, np.dtype((np.void, reorder.item_bytes)))
    items = items.reshape(-1, len(reorder.order))
    step = max(1, CHUNK // reorder.item_bytes // len(items))
    if step >= len(reorder.order):
        new.write(np.take(items, reorder.order, axis=1).data)
        return
    for period in items:
        for first in range(0, len(reorder.order), step):
            new.write(np.take(period, reorder.order[first : first + step]).data)


def _copy_index(checkpoint: Checkpoint, folder: Path) -> None:
    assert checkpoint.index is not None
    copy = folder / checkpoint.index
    shutil.copyfile(checkpoint.path / checkpoint.index, copy)
    _sync(copy)


@contextmanager
def _partial(final: Path, *, is_folder: bool) -> Generator[Path]:
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
def _disk_errors(final: Path) -> Generator[None]:
    """Turn an OSError into a CheckpointError that says that nothing was written."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        way_out = "; free some space" if error.errno == errno.ENOSPC else ""
        raise CheckpointError(
            f"{final} was not written: {reason}{way_out}. The source is as it was"
        ) from None


def _refuse_existing(final: Path) -> None:
    if final.exists() or final.is_symlink():
        raise CheckpointError(f"{final} exists and is not overwritten; give another name")


def _sync(path: Path) -> None:
    """Flush a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
