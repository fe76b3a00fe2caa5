"""`verify`: both sides of a conversion, read again and compared, and the scores they give."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

import numpy as np

from phasor.checkpoint.files import CHUNK, Advance, exactly, no_progress, open_checkpoint
from phasor.checkpoint.format import Entry, read_header
from phasor.checkpoint.orders import Reorder
from phasor.checkpoint.planning import Change, Plan
from phasor.errors import CheckpointError, VerificationError
from phasor.numpy import score
from phasor.rope import Rope

_DISTANCES = np.array([0, 1, -7, 1000])


def verify(plan: Plan, target: str | os.PathLike[str], *, advance: Advance = no_progress) -> None:
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


def _compare_files(plan: Plan, name: str, paths: tuple[Path, Path], advance: Advance) -> None:
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


def compare_scores(plan: Plan) -> None:
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


def _scores_agree(plan: Plan, change: Change) -> bool:
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
