"""Which cases of a test are tried where there is no time for all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import combinations

GOLDEN = (5**0.5 - 1) / 2
#: Tests of all there is have an eighth of it each, `names[share::SHARES]`.
SHARES = 8


def sample(cases: Sequence[Sequence[Hashable]], size: int) -> set[int]:
    """Indices of ``size`` cases, each a value for every parameter.

    Every value of a parameter comes before any comes twice, then every pair of values, and all
    about equally often. Neighbours are the most alike: of cases that are as good as one another,
    the first is far from those just before it.

    >>> size_and_side = [(size, side) for size in (1, 2, 3) for side in "ab"]
    >>> [size_and_side[index] for index in sorted(sample(size_and_side, 3))]
    [(1, 'a'), (2, 'a'), (3, 'b')]
    """
    # 1 and True are equal, and two values
    named = [[(place, type(value), value) for place, value in enumerate(case)] for case in cases]
    waiting = sorted(range(len(cases)), key=lambda index: index * GOLDEN % 1)
    chosen: set[int] = set()
    uses: Counter[Hashable] = Counter()

    def gain(index: int) -> tuple[int, int, int]:
        values = named[index]
        new_values = sum(value not in uses for value in values)
        new_pairs = sum(pair not in uses for pair in combinations(values, 2))
        return new_values, new_pairs, -sum(uses[value] for value in values)

    while waiting and len(chosen) < size:
        best = max(waiting, key=gain)  # the first of them
        waiting.remove(best)
        chosen.add(best)
        uses.update(named[best])
        uses.update(combinations(named[best], 2))
    return chosen
