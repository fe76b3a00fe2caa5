"""The Rope of several axes that an embedding of pictures makes cosines by.

Each of its pairs follows one coordinate. Their frequencies are powers of one base, but which
power a pair has, and which axis, differs from tower to tower: both are read off the cosines at
single steps along single axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from phasor.axes import Axes, Axial, InterleavedSections, Sectioned
from phasor.errors import SpecError
from phasor.rope import Rope
from phasor.torch.transformers._carriers import Form

Rows = tuple[NDArray[np.float64], NDArray[np.float64]]
# exponents are whole numbers; float32 cosines give them to 1e-4
_WHOLE = 0.01
# one and the same real number, by two ways in float64
_SAME = 1e-14


def axial_rope(
    rows: Callable[[NDArray[np.int64]], Rows], axes: int, form: Form, base: float | None
) -> tuple[Rope, tuple[int, ...]] | None:
    """The Rope, and which coordinate each of its axes is where they are given in another order.

    Args:
        rows: Cosines and sines ``[seq, num_pairs]`` at positions ``[axes, seq]``.
        axes: How many coordinates a position has.
        form: The geometry of the function that rotates by them.
        base: What the frequencies are powers of.
    """
    cos, sin = rows(np.eye(axes, dtype=np.int64))
    steps = np.arctan2(sin, cos)  # [axis, pair]: a step along that axis turns the pair by this
    pairs = steps.shape[1]
    axis_of_pair = np.argmax(np.abs(steps), 0)
    turns = steps.max(0)
    if base is None or base <= 1 or np.count_nonzero(steps) > pairs or turns.min() <= 0:
        return None
    exponents = -np.log(turns) / math.log(base) * pairs
    powers = exponents.round()
    if np.abs(exponents - powers).max() > _WHOLE:
        return None
    counts = tuple(int(n) for n in np.bincount(axis_of_pair, minlength=axes))
    for order in permutations(range(axes)):
        wanted = tuple(order.index(int(axis)) for axis in axis_of_pair)
        for kind in (Axial, Sectioned, InterleavedSections):
            layout = kind(tuple(counts[axis] for axis in order))
            if _laid_out(layout, pairs) == wanted:
                plain = _rope(form, pairs, layout, base, None)
                exact = tuple(base ** (-power / pairs) for power in powers)
                if not np.allclose(plain.inv_freq, exact, rtol=_SAME, atol=0):
                    if kind is Axial:
                        continue
                    plain = _rope(form, pairs, layout, None, exact)
                return plain, () if order == tuple(range(axes)) else order
    return None


def _laid_out(layout: Axes, pairs: int) -> tuple[int, ...] | None:
    try:
        return layout.axis_of_pair(pairs)
    except SpecError:
        return None


def _rope(
    form: Form, pairs: int, axes: Axes, base: float | None, exact: tuple[float, ...] | None
) -> Rope:
    return Rope(
        head_dim=2 * pairs,
        pairing=form.pairing,
        pairing_out=form.pairing_out,
        direction=1 if form.direction > 0 else -1,
        base=base,
        axes=axes,
        explicit_inv_freq=exact,
    )
