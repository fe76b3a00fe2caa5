"""`write`: the converted files, streamed, under their own names only when they are whole."""

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

from phasor.checkpoint.files import CHUNK, Advance, Checkpoint, exactly, no_progress
from phasor.checkpoint.format import Entry, Header
from phasor.checkpoint.orders import Reorder
from phasor.checkpoint.planning import Plan
from phasor.checkpoint.verifying import verify
from phasor.errors import CheckpointError


def write(
    plan: Plan,
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


def _convert(plan: Plan, source: Path, target: Path, header: Header, advance: Advance) -> None:
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
