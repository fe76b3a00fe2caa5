"""`write` streams a planned conversion, whole or not at all; `verify` compares both sides."""

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

from phasor.checkpoint.files import (
    CHUNK,
    Advance,
    Checkpoint,
    Entry,
    Header,
    exactly,
    no_progress,
    open_checkpoint,
    read_header,
)
from phasor.checkpoint.planning import Change, ConversionPlan
from phasor.checkpoint.rows import Reorder
from phasor.errors import CheckpointError, VerificationError
from phasor.numpy import score
from phasor.rope import Rope

_DISTANCES = np.array([0, 1, -7, 1000])


def verify(
    plan: ConversionPlan, target: str | os.PathLike[str], *, advance: Advance = no_progress
) -> None:
    """Check that ``target`` is the conversion that ``plan`` describes; return if it is.

    Both sides are read from the disk: the header and every tensor that does not change must be the
    same bytes, every other must hold the source's rows, each in its place. Then random queries and
    keys in every order of rows that was used must score before as they do after.

    Args:
        plan: From `plan`.
        target: What `write` made of it.
        advance: Called with the number of bytes compared since the last call.

    Raises:
        VerificationError: Naming the first tensor that is otherwise.
        CheckpointError: If ``target`` cannot be read.
    """
    there = Path(target)
    if there.is_dir() != plan.checkpoint.is_folder:
        raise CheckpointError(
            f"{there} must be a {'folder' if plan.checkpoint.is_folder else 'file'}, as "
            f"{plan.checkpoint.path} is"
        )
    open_checkpoint(there)
    for name in plan.checkpoint.files:
        old, new = plan.checkpoint.location(name), there / name if there.is_dir() else there
        try:
            _compare_files(plan, name, (old, new), advance)
        except OSError as error:
            raise CheckpointError(f"{new} cannot be compared: {error}") from None
    if plan.checkpoint.index is not None:
        index = plan.checkpoint.index
        if (there / index).read_bytes() != (plan.checkpoint.path / index).read_bytes():
            raise VerificationError(f"{there / index} must be that of the source, and is not")
    compare_scores(plan)


def _compare_files(
    plan: ConversionPlan, name: str, paths: tuple[Path, Path], advance: Advance
) -> None:
    old, new = paths
    header = plan.checkpoint.files[name]
    read_header(new)
    with old.open("rb") as before, new.open("rb") as after:
        if exactly(before, header.begin) != exactly(after, header.begin):
            raise VerificationError(f"{new} must have the header of {old}, and has another")
        advance(header.begin)
        for tensor, entry in header.tensors.items():
            change = plan.changes.get(tensor)
            if not _same(before, after, entry, None if change is None else change.reorder):
                raise VerificationError(f"{new}: {tensor!r} is not what the conversion makes of it")
            advance(entry.end - entry.begin)


def _same(before: BinaryIO, after: BinaryIO, entry: Entry, reorder: Reorder | None) -> bool:
    left = entry.end - entry.begin
    if reorder is not None:
        period = reorder.period_bytes
        for _ in range(reorder.layout.periods):
            rows = np.frombuffer(exactly(before, period), np.uint8)
            rows = rows.reshape(reorder.layout.width, -1)
            step = max(1, CHUNK // reorder.item_bytes)
            for first in range(0, len(rows), step):
                origins = reorder.order[first : first + step]
                found = exactly(after, len(origins) * reorder.item_bytes)
                if rows[origins].tobytes() != found:
                    return False
        left -= period * reorder.layout.periods
    while left:
        count = min(left, CHUNK)
        if exactly(before, count) != exactly(after, count):
            return False
        left -= count
    return True


def compare_scores(plan: ConversionPlan) -> None:
    """Check with random vectors that every order of rows keeps the scores of its heads.

    Raises:
        VerificationError: Naming a tensor whose order does not.
    """
    seen: set[bytes] = set()
    for name, change in plan.changes.items():
        key = repr(change.reorder.layout).encode() + change.reorder.order.tobytes()
        if key not in seen and not _scores_agree(plan, change):
            raise VerificationError(f"the new order of {name!r} changes its scores")
        seen.add(key)


def _scores_agree(plan: ConversionPlan, change: Change) -> bool:
    # the order has to keep scores whatever the frequencies are, so the simplest will do
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
    turned = np.zeros(layout.width, dtype=bool)
    for start in layout.heads:
        head = slice(start, start + width)
        turned[head] = True
        before, after = (
            score(x[0, head], x[1, head], _DISTANCES, rope)
            for x, rope in zip((old, new), ropes, strict=True)
        )
        # the same products are summed in another order
        bound = (
            width * np.finfo(float).eps * np.abs(old[:, head]).max(0) @ np.abs(old[:, head]).max(0)
        )
        if np.abs(before - after).max() > bound:
            return False
    return bool(np.array_equal(old[:, ~turned], new[:, ~turned]))


def write(
    plan: ConversionPlan,
    target: str | os.PathLike[str],
    *,
    verified: bool = False,
    advance: Advance = no_progress,
) -> None:
    """The converted checkpoint, written to ``target``.

    A file becomes a file, a folder a folder that holds the weights and their index and nothing
    else. Headers and all other tensors keep every byte. Memory stays at one tensor's period: a
    head, or the whole of a projection that is one head wide. The source is only read. Nothing
    carries the name ``target`` before all of it is on the disk; an interrupted run leaves at most
    a hidden ``.partial`` beside it.

    Args:
        plan: From `plan`.
        target: A path where nothing is yet.
        verified: Compare both sides before the result gets its name, as `verify` does.
        advance: Called with the number of bytes written, and then compared, since the last call.

    Raises:
        CheckpointError: If ``target`` exists, the disk is full or fails, or the source changes
            meanwhile.
        VerificationError: If the two sides do not compare.
    """
    final = Path(target)
    _refuse_existing(final)
    if not final.parent.is_dir():
        raise CheckpointError(f"{final.parent} is not a folder; make it first")
    checkpoint = plan.checkpoint
    with _failures(final), _partial(final, is_folder=checkpoint.is_folder) as partial:
        for name, header in checkpoint.files.items():
            to = partial / name if checkpoint.is_folder else partial
            _convert(plan, checkpoint.location(name), to, header, advance)
        if checkpoint.index is not None:
            _copy_index(checkpoint, partial)
        if verified:
            verify(plan, partial, advance=advance)
        _refuse_existing(final)
        partial.rename(final)
        _sync(final.parent)


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
    """Copy ``count`` bytes from where ``old`` stands."""
    while count:
        data = exactly(old, min(count, CHUNK))
        new.write(data)
        advance(len(data))
        count -= len(data)


def _reorder(
    old: BinaryIO, new: BinaryIO, entry: Entry, reorder: Reorder, advance: Advance
) -> None:
    left = reorder.layout.periods
    while left:
        periods = min(left, max(1, CHUNK // reorder.period_bytes))
        data = exactly(old, periods * reorder.period_bytes)
        _write_reordered(new, data, reorder)
        advance(len(data))
        left -= periods
    _copy(
        old, new, entry.end - entry.begin - reorder.layout.periods * reorder.period_bytes, advance
    )


def _write_reordered(new: BinaryIO, data: bytes, reorder: Reorder) -> None:
    """Periods in their new order, a slice of items at a time: a period may be a whole tensor."""
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
    copied = folder / checkpoint.index
    shutil.copyfile(checkpoint.path / checkpoint.index, copied)
    _sync(copied)


@contextmanager
def _partial(final: Path, *, is_folder: bool) -> Generator[Path]:
    """A place beside ``final`` that is gone afterwards unless it was renamed."""
    made = Path(tempfile.mkdtemp(prefix=f".{final.name}.", suffix=".partial", dir=final.parent))
    try:
        # made is for its owner alone; what is made inside has the usual permissions
        place = made / "partial"
        if is_folder:
            place.mkdir()
        yield place
    finally:
        shutil.rmtree(made, ignore_errors=True)


@contextmanager
def _failures(final: Path) -> Generator[None]:
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
    """What the file or folder holds is on the disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
