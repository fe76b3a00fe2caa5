"""A linear map read as blocks: which coordinates turn together, and where they are written."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phasor.numpy import pair_indices
from phasor.pairings import PAIRINGS, Pairing, slices
from phasor.rope import Rope


@dataclass(frozen=True, kw_only=True)
class Block:
    """Coordinates that are mixed with each other and with no other.

    Attributes:
        read: The coordinates read.
        written: The coordinates written.
    """

    read: tuple[int, ...]
    written: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """Where pairs stand: pair ``k`` is ``read[:, k]`` before and ``written[:, k]`` after.

    Attributes:
        pairing: The pairing that is read, None if it is neither.
        pairing_out: The pairing that is written, None if it is neither.
        rotary_start: Where the rotated slice begins.
        rotary_dim: How wide it is.
        read: ``[2, pairs]``.
        written: ``[2, pairs]``.
    """

    pairing: Pairing | None
    pairing_out: Pairing | None
    rotary_start: int
    rotary_dim: int
    read: NDArray[np.intp]
    written: NDArray[np.intp]

    @property
    def num_pairs(self) -> int:
        """How many pairs there are, those that stand still included."""
        return self.read.shape[1]

    def blocks(self, maps: NDArray[np.float64]) -> NDArray[np.float64]:
        """The 2x2 block of every pair: ``[..., d, d]`` to ``[..., pairs, 2, 2]``."""
        rows = self.written.T[:, :, None]
        return maps[..., rows, self.read.T[:, None, :]]


def find_blocks(maps: NDArray[np.float64], rounding: float) -> list[Block]:
    """The finest partition of coordinates that no map ``[P, out, in]`` crosses.

    A coordinate that is zeroed everywhere is read by a block that writes nothing.
    """
    mixed = np.abs(maps).max(axis=0)
    live = mixed > 0
    # products with zero are exact; only a method that mixes more than pairs leaves crumbs
    if live.sum(axis=0).max() > 2:
        live = mixed > 16 * rounding * mixed.max()
    left = set(range(maps.shape[2]))
    found: list[Block] = []
    while left:
        read, written = {min(left)}, set[int]()
        while True:
            more = {int(i) for j in read for i in np.flatnonzero(live[:, j])}
            wider = {int(j) for i in more for j in np.flatnonzero(live[i])} | read
            if more == written and wider == read:
                break
            read, written = wider, more
        left -= read
        found.append(Block(read=tuple(sorted(read)), written=tuple(sorted(written))))
    return found


def arrange(blocks: list[Block], head_dim: int) -> Arrangement | None:
    """The narrowest pairing and slice that put every block where it is; None if a block is wider.

    Where no pairing does, the pairs are those seen, in the order of their first coordinates.
    """
    if any(len(block.read) > 2 or len(block.read) != len(block.written) for block in blocks):
        return None
    pairs = [block for block in blocks if len(block.read) == 2]
    moved = [b for b in blocks if len(b.read) == 1 and b.read != b.written]
    if not pairs:
        return None
    lowest = min(block.read[0] for block in pairs + moved)
    highest = max(max(block.read + block.written) for block in pairs + moved)
    for one in every_arrangement(lowest, highest, head_dim, pairs[0]):
        if _fits(pairs, moved, one.read, one.written, head_dim):
            return one
    return Arrangement(
        pairing=None,
        pairing_out=None,
        rotary_start=lowest,
        rotary_dim=2 * len(pairs),
        read=np.array([block.read for block in pairs]).T,
        written=np.array([block.written for block in pairs]).T,
    )


def every_arrangement(
    lowest: int, highest: int, head_dim: int, pair: Block | None = None
) -> Iterator[Arrangement]:
    """The arrangements that reach from ``lowest`` to ``highest``, the narrowest first.

    Args:
        lowest: A coordinate that turns; the slice begins here or before.
        highest: The last coordinate that turns; the slice ends here or after.
        head_dim: Width of the head.
        pair: If given, only slices in which this is as wide as a pair.
    """
    # the first pair is the fastest; where it stands still, the slice most likely begins at 0
    for start in dict.fromkeys([lowest, 0, *range(lowest - 1, 0, -1)]):
        for width in range(2, head_dim - start + 1, 2):
            if start + width <= highest:
                continue
            for pairing, out in itertools.product(PAIRINGS, PAIRINGS):
                if pair is None or (_step(pairing, width), _step(out, width)) == (
                    pair.read[1] - pair.read[0],
                    pair.written[1] - pair.written[0],
                ):
                    yield _arranged(start, width, pairing, out, head_dim)


def _step(pairing: Pairing, width: int) -> int:
    """How far apart the two coordinates of a pair are."""
    first, second = slices(pairing, width // 2)
    return second.start - first.start


def _arranged(start: int, width: int, pairing: Pairing, out: Pairing, head_dim: int) -> Arrangement:
    rope = Rope(
        head_dim=head_dim, pairing=pairing, pairing_out=out, rotary_start=start, rotary_dim=width
    )
    return Arrangement(
        pairing=pairing,
        pairing_out=rope.output_pairing,
        rotary_start=start,
        rotary_dim=width,
        read=np.stack(pair_indices(rope, pairing)),
        written=np.stack(pair_indices(rope, rope.output_pairing)),
    )


def _fits(
    pairs: list[Block],
    moved: list[Block],
    read: NDArray[np.intp],
    written: NDArray[np.intp],
    head_dim: int,
) -> bool:
    goes = np.arange(head_dim)
    goes[read] = written
    partner = np.arange(head_dim)
    partner[read] = read[::-1]
    return all(
        partner[a] == b and sorted((goes[a], goes[b])) == list(block.written)
        for block in pairs
        for a, b in [block.read]
    ) and all(goes[block.read[0]] == block.written[0] for block in moved)


@dataclass(frozen=True, kw_only=True)
class Turns:
    """2x2 blocks read as rotations.

    Attributes:
        z: ``gain * exp(i angle)`` of every pair, ``[P, pairs]``.
        skew: How far each block is from a rotation times a number, relative to it, ``[pairs]``.
        rows: ``exp(i angle)`` as the first and as the second written row says, ``[2, P, pairs]``.
        reflected: Whether a pair's block turns over, ``[pairs]``.
    """

    z: NDArray[np.complex128]
    skew: NDArray[np.float64]
    rows: NDArray[np.complex128]
    reflected: NDArray[np.bool_]


def read_turns(blocks: NDArray[np.float64]) -> Turns:
    """What rotations the blocks ``[P, pairs, 2, 2]`` are nearest to."""
    a, b, c, d = blocks[..., 0, 0], blocks[..., 0, 1], blocks[..., 1, 0], blocks[..., 1, 1]
    first, second = a - 1j * b, d + 1j * c
    z = (first + second) / 2
    size = np.maximum(np.abs(blocks).max(axis=(2, 3)), 1e-30)
    return Turns(
        z=z,
        skew=(np.abs(first - second) / size).max(axis=0),
        rows=np.stack((first, second)),
        reflected=((np.abs(a + d) + np.abs(b - c)) / size).max(axis=0) < 1e-3,
    )
