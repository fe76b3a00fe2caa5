"""Re-orderings of a tensor's bytes: the order of its rows, or of the numbers in its heads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phasor.numpy import change_pairing
from phasor.pairings import Pairing
from phasor.rope import Rope


@dataclass(frozen=True, slots=True)
class Layout:
    """Where heads lie in a tensor: in consecutive periods, with what follows them left alone.

    Attributes:
        width: Items of a period; an item is a row, or a number.
        heads: Where in a period each head that is rotated begins.
        periods: How many periods there are.
    """

    width: int
    heads: tuple[int, ...]
    periods: int


@dataclass(frozen=True, slots=True, eq=False)
class Reorder:
    """The same change of order in every period of a tensor.

    Attributes:
        layout: Where the heads are.
        order: Item ``i`` of a period comes from item ``order[i]`` of the source's.
        item_bytes: Bytes of an item.
    """

    layout: Layout
    order: NDArray[np.intp]
    item_bytes: int

    @property
    def period_bytes(self) -> int:
        """Bytes of a period."""
        return self.layout.width * self.item_bytes

    def moves_only_inside(self, block: int) -> bool:
        """Whether every item stays in its block of so many, counted from the tensor's start."""
        width = self.layout.width
        return all(
            np.array_equal((first + self.order) // block, (first + np.arange(width)) // block)
            for first in range(0, self.layout.periods * width, width)
        )


def period_order(rope: Rope, source: Pairing, target: Pairing, layout: Layout) -> NDArray[np.intp]:
    """The order that re-pairs every head of a period.

    >>> rope = Rope(head_dim=4, pairing="half")
    >>> period_order(rope, "interleaved", "half", Layout(width=6, heads=(2,), periods=1))
    array([0, 1, 2, 4, 3, 5])
    """
    head = change_pairing(
        np.arange(rope.head_dim),
        source,
        target,
        rotary_dim=rope.rotary_dim,
        rotary_start=rope.rotary_start,
    )
    order = np.arange(layout.width)
    for start in layout.heads:
        order[start : start + rope.head_dim] = start + head
    return order
