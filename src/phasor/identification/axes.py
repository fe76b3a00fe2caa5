"""Which axis of a position drives which pair, and which layout that is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phasor.axes import AXES, Axes, OneAxis
from phasor.errors import SpecError
from phasor.identification.spectrum import Spectrum

_STEPS = (1, 2, 3, 5, 8)


def unequal_positions(n_axes: int) -> list[tuple[int, ...]]:
    """Small positions that are not the same on all axes."""
    return [tuple(p if a == axis else 0 for a in range(n_axes)) for axis in range(n_axes)
            for p in _STEPS]  # fmt: skip


def drivers(
    probe: Callable[[Sequence[Any]], NDArray[np.complex128]],
    n_axes: int,
    spectrum: Spectrum,
    rounding: float,
) -> tuple[tuple[int, ...], ...]:
    """The axes that turn each pair, tried one axis at a time as far as the spectrum reached."""
    pairs = len(spectrum.inv_freq)
    if n_axes == 1:
        return tuple((0,) if f else () for f in spectrum.inv_freq)
    far = [1 << j for j in range(max(spectrum.reach, 1).bit_length())]
    found: list[list[int]] = [[] for _ in range(pairs)]
    still = probe([(0,) * n_axes])[0]
    for axis in range(n_axes):
        places = [tuple(p if a == axis else 0 for a in range(n_axes)) for p in far]
        turned = np.abs(probe(places) - still).max(axis=0) > 8 * rounding
        for pair in np.flatnonzero(turned):
            found[pair].append(axis)
    return tuple(tuple(axes) for axes in found)


def layouts(drivers: Sequence[tuple[int, ...]], n_axes: int) -> list[Axes]:
    """The layouts in which every pair that turns follows the axis it was seen to follow."""
    if n_axes == 1:
        return [OneAxis()]
    pairs = len(drivers)
    counts = [sum(axes == (axis,) for axes in drivers) for axis in range(n_axes)]
    free = pairs - sum(counts)
    found: list[Axes] = []
    for name in ("sectioned", "axial", "interleaved", "alternating"):
        for more in _shares(free, n_axes):
            sections = tuple(n + extra for n, extra in zip(counts, more, strict=True))
            try:
                layout = AXES[name](sections)  # pyright: ignore[reportCallIssue] - not OneAxis
                follows = layout.axis_of_pair(pairs)
            except SpecError:
                continue
            # sections that are dealt out in turn may name other counts than they give
            true = all(follows.count(axis) == n for axis, n in enumerate(sections))
            if (
                layout not in found
                and true
                and all(axes in ((), (axis,)) for axes, axis in zip(drivers, follows, strict=True))
            ):
                found.append(layout)
    return found


def _shares(count: int, n_axes: int) -> list[tuple[int, ...]]:
    """The ways to deal ``count`` pairs that stand still, and so may belong to any axis."""
    if n_axes == 1:
        return [(count,)]
    return [(n, *rest) for n in range(count + 1) for rest in _shares(count - n, n_axes - 1)]
