"""The blocks of a linear map: which coordinates turn together, and where they are written."""

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


class MixedCoordinates(NamedTuple):
    """Coordinates that are mixed with each other and with no other: those read, those written."""

    read: tuple[int, ...]
    written: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """The coordinates of pairs: pair ``k`` is ``read[:, k]`` before and ``written[:, k]`` after."""

    head_dim: int
    pairing: Pairing | None  # of ``read``; None if it is neither
    pairing_out: Pairing | None  # of ``written``; None if it is neither
    rotary_start: int
    rotary_dim: int
    read: NDArray[np.intp]  # ``[2, pairs]``
    written: NDArray[np.intp]  # ``[2, pairs]``

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


def find_blocks(maps: NDArray[np.float64], rounding: float) -> list[MixedCoordinates]:
    """The smallest blocks of coordinates that no map ``[P, out, in]`` mixes with each other."""
    mixed = np.abs(maps).max(axis=0)
    connected = mixed > 0
    # products with zero are exact, so only a map that mixes more than pairs has rounding errors
    if connected.sum(axis=0).max() > 2:
        connected = mixed > 16 * rounding * mixed.max()
    # float32, because NumPy multiplies bools slowly; what is set to 0 is in a block that writes
    # nothing
    links = connected.astype(np.float32)
    same_block = (links.T @ links + np.eye(len(links), dtype=np.float32)) > 0  # [in, in]
    while True:
        links = same_block.astype(np.float32)
        reached = (links @ links) > 0
        if np.array_equal(reached, same_block):
            break
        same_block = reached
    firsts = np.flatnonzero(same_block.argmax(axis=1) == np.arange(len(same_block)))
    return [
        MixedCoordinates(
            tuple(np.flatnonzero(same_block[first]).tolist()),
            tuple(np.flatnonzero(connected[:, same_block[first]].any(axis=1)).tolist()),
        )
        for first in firsts
    ]


def arrange_blocks(blocks: list[MixedCoordinates], head_dim: int) -> Arrangement | None:
    """The narrowest arrangement with exactly these blocks; None if a block is wider than a pair."""
    if any(len(block.read) > 2 or len(block.read) != len(block.written) for block in blocks):
        return None
    pairs = [block for block in blocks if len(block.read) == 2]
    moves = [block for block in blocks if len(block.read) == 1 and block.read != block.written]
    if not pairs:
        return None
    lowest = min(block.read[0] for block in pairs + moves)
    highest = max(max(block.read + block.written) for block in pairs + moves)
    for candidate in candidate_arrangements(lowest, highest, head_dim, pairs[0]):
        if _has_blocks(candidate, pairs, moves):
            return candidate
    # of no pairing, in the order of their first coordinates
    read, written = (np.array(coordinates).T for coordinates in zip(*pairs, strict=True))
    return Arrangement(
        head_dim=head_dim, pairing=None, pairing_out=None, rotary_start=lowest,
        rotary_dim=2 * len(pairs), read=read, written=written,
    )  # fmt: skip


def candidate_arrangements(
    lowest: int, highest: int, head_dim: int, pair: MixedCoordinates | None = None
) -> Iterator[Arrangement]:
    """The arrangements whose slice holds ``lowest`` to ``highest``, the narrowest first."""
    # the first pair is the fastest; if it does not turn, the slice most likely begins at 0
    for start in dict.fromkeys([lowest, 0, *range(lowest - 1, 0, -1)]):
        for width in range(2, head_dim - start + 1, 2):
            if start + width <= highest:
                continue
            for pairing, out in itertools.product(PAIRINGS, PAIRINGS):
                # with a ``pair``, only those whose pairs are as far apart as its coordinates
                gaps = [by_pairing(p, half=width // 2, interleaved=1) for p in (pairing, out)]
                if pair is None or gaps == [b - a for a, b in pair]:
                    yield arrangement_of(
                        Rope(
                            head_dim=head_dim, pairing=pairing, pairing_out=out,
                            rotary_start=start, rotary_dim=width,
                        )
                    )  # fmt: skip


def _has_blocks(
    arrangement: Arrangement, pairs: list[MixedCoordinates], moves: list[MixedCoordinates]
) -> bool:
    """Whether the arrangement has these pairs and these coordinates moved alone."""
    # where each coordinate is written, and with which one it turns
    target, partner = np.arange(arrangement.head_dim), np.arange(arrangement.head_dim)
    target[arrangement.read] = arrangement.written
    partner[arrangement.read] = arrangement.read[::-1]
    return all(
        partner[a] == b and sorted((target[a], target[b])) == list(written)
        for (a, b), written in pairs
    ) and all(target[read[0]] == written[0] for read, written in moves)


def pair_factors(blocks: NDArray[np.float64]) -> NDArray[np.complex128]:
    """``gain * exp(i angle)`` from both rows of blocks ``[P, pairs, 2, 2]``: ``[2, P, pairs]``."""
    # of a rotation both are the same, otherwise their mean is the nearest one
    first = blocks[..., 0, 0] - 1j * blocks[..., 0, 1]
    return np.stack((first, blocks[..., 1, 1] + 1j * blocks[..., 1, 0]))
