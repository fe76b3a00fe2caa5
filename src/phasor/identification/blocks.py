"""A linear map read as blocks: which coordinates turn together, and where they are written."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from phasor.numpy import pair_indices
from phasor.pairings import PAIRINGS, Pairing, by_pairing
from phasor.rope import Rope


class Block(NamedTuple):
    """Coordinates that are mixed with each other and with no other: those read, those written."""

    read: tuple[int, ...]
    written: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """Where pairs are: pair ``k`` is ``read[:, k]`` before and ``written[:, k]`` after.

    Attributes:
        head_dim: Width of the head.
        pairing: The pairing that is read, None if it is neither.
        pairing_out: The pairing that is written, None if it is neither.
        rotary_start: Where the rotated slice begins.
        rotary_dim: How wide it is.
        read: Coordinates, ``[2, pairs]``.
        written: Coordinates, ``[2, pairs]``.
    """

    head_dim: int
    pairing: Pairing | None
    pairing_out: Pairing | None
    rotary_start: int
    rotary_dim: int
    read: NDArray[np.intp]
    written: NDArray[np.intp]

    @property
    def num_pairs(self) -> int:
        """How many pairs there are, those that do not turn included."""
        return self.read.shape[1]

    def blocks(self, maps: NDArray[np.float64]) -> NDArray[np.float64]:
        """The 2x2 block of every pair: ``[..., d, d]`` to ``[..., pairs, 2, 2]``."""
        rows = self.written.T[:, :, None]
        return maps[..., rows, self.read.T[:, None, :]]


def arrangement_of(rope: Rope) -> Arrangement:
    """The pairs of a Rope."""
    return Arrangement(
        head_dim=rope.head_dim,
        pairing=rope.pairing,
        pairing_out=rope.output_pairing,
        rotary_start=rope.rotary_start,
        rotary_dim=rope.rotary_dim,
        read=np.stack(pair_indices(rope, rope.pairing)),
        written=np.stack(pair_indices(rope, rope.output_pairing)),
    )


def find_blocks(maps: NDArray[np.float64], rounding: float) -> list[Block]:
    """The finest partition of coordinates that no map ``[P, out, in]`` crosses.

    A coordinate that is zeroed everywhere is read by a block that writes nothing.
    """
    mixed = np.abs(maps).max(axis=0)
    connected = mixed > 0
    # products with zero are exact; only a method that mixes more than pairs leaves rounding errors
    if connected.sum(axis=0).max() > 2:
        connected = mixed > 16 * rounding * mixed.max()
    left = set(range(maps.shape[2]))
    found: list[Block] = []
    while left:
        read, written = {min(left)}, set[int]()
        while True:
            more = {int(i) for j in read for i in np.flatnonzero(connected[:, j])}
            wider = {int(j) for i in more for j in np.flatnonzero(connected[i])} | read
            if more == written and wider == read:
                break
            read, written = wider, more
        left -= read
        found.append(Block(tuple(sorted(read)), tuple(sorted(written))))
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
        if _fits(one, pairs, moved):
            return one
    return Arrangement(
        head_dim=head_dim,
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
        pair: If given, only arrangements whose pairs are as far apart as this one's coordinates.
    """
    # the first pair is the fastest; where it does not turn, the slice most likely begins at 0
    for start in dict.fromkeys([lowest, 0, *range(lowest - 1, 0, -1)]):
        for width in range(2, head_dim - start + 1, 2):
            if start + width <= highest:
                continue
            for pairing, out in itertools.product(PAIRINGS, PAIRINGS):
                apart = [by_pairing(p, half=width // 2, interleaved=1) for p in (pairing, out)]
                if pair is None or apart == [b - a for a, b in pair]:
                    yield arrangement_of(
                        Rope(
                            head_dim=head_dim, pairing=pairing, pairing_out=out,
                            rotary_start=start, rotary_dim=width,
                        )
                    )  # fmt: skip


def _fits(one: Arrangement, pairs: list[Block], moved: list[Block]) -> bool:
    """Whether the arrangement has these pairs, and moves the other coordinates like this."""
    target, partner = np.arange(one.head_dim), np.arange(one.head_dim)
    target[one.read] = one.written
    partner[one.read] = one.read[::-1]
    return all(
        partner[a] == b and sorted((target[a], target[b])) == list(written)
        for (a, b), written in pairs
    ) and all(target[read[0]] == written[0] for read, written in moved)


def read_rows(blocks: NDArray[np.float64]) -> NDArray[np.complex128]:
    """``gain * exp(i angle)`` by the first and by the second row of blocks ``[P, pairs, 2, 2]``.

    ``[2, P, pairs]``; of a rotation both are the same, and else their mean is the nearest one.
    """
    return np.stack(
        (blocks[..., 0, 0] - 1j * blocks[..., 0, 1], blocks[..., 1, 1] + 1j * blocks[..., 1, 0])
    )
