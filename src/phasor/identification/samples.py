"""Which rotation turned recorded vectors, without an expected rope."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from phasor._checks import choice
from phasor.errors import PositionError, TensorError
from phasor.identification.explaining import explain
from phasor.identification.layout import arrangements_from_changes
from phasor.identification.report import Identification, add_findings, make_finding
from phasor.identification.spectrum import ROUNDING, Spectrum, doubling, find_spectrum
from phasor.identification.turns import Sample, least_squares, measure_turns, turns_of_pairs

# enough samples of one position, and enough positions, to tell pairings apart
_SAMPLES_PER_POSITION = 8


_ARRANGEMENT_POSITIONS = 24


def identify_samples(
    before: ArrayLike, after: ArrayLike, positions: ArrayLike, *, dtype: str = "float32"
) -> Identification:
    """Which rotation turned ``before`` into ``after``, vectors recorded from a running model.

    With two vectors or more at a position, each pair's turn there is overdetermined, and only the
    right pairing leaves no residue; the turns then give the frequencies as in `identify`.

    Args:
        before: ``[N, head_dim]``: any vectors, of any heads.
        after: ``[N, head_dim]``: the same after the rotation.
        positions: ``[N]`` whole numbers. Two of them must be one apart, and each gap may be at most
            twice the gap before it; give two vectors or more at each position. ``[N, n_axes]`` for
            several axes: this holds for positions with equal coordinates, and positions with
            unequal coordinates show which axis drives which pair.
        dtype: The dtype in which the vectors were computed.

    Returns:
        The report, without the findings that need calls (written inputs, table end, lengths).

    Raises:
        PositionError: If the positions are too few, too far apart or not whole.

    >>> from phasor import Rope
    >>> from phasor.numpy import rotate
    >>> rope = Rope(head_dim=8, pairing="half", base=100.0)
    >>> x = np.random.default_rng(0).standard_normal((64, 3, 8))  # tokens, heads
    >>> y = rotate(x, np.arange(64), rope)
    >>> at = np.arange(64).repeat(3)
    >>> identify_samples(x.reshape(-1, 8), y.reshape(-1, 8), at, dtype="float64").rope == rope
    True
    """
    # a coordinate is a sum of two products, and the turn is solved for: a few roundings
    rounding = 8 * ROUNDING[choice("dtype", dtype, ROUNDING)]
    equal, unequal = _group_samples(before, after, positions, dtype)
    first_samples = equal.select(np.arange(len(equal.positions)) < _ARRANGEMENT_POSITIONS)
    fitting = (
        arrangement
        for arrangement in arrangements_from_changes(first_samples)
        if measure_turns(first_samples, arrangement, common_gain=False) is not None
    )
    arrangement = next(fitting, None)
    if arrangement is None:
        reason = "no pairing of coordinates explains the samples as turns, up to a factor, of pairs"
        return Identification(head_dim=equal.x.shape[-1], why_no_rope=reason)
    # [P], and turns [P, pairs] at distances that double
    places = equal.positions[:, 0]
    indices = doubling(places)
    rows_read: list[int] = places[indices].tolist()
    z = least_squares(*equal.pairs(arrangement))[indices]
    spectrum = find_spectrum(rows_read, z, np.full(z.shape, rounding))
    axis_turns = None
    if equal.positions.shape[1] > 1:
        axis_z = least_squares(*unequal.pairs(arrangement))
        errors = 2 * rounding * np.abs(axis_z)
        axis_turns = turns_of_pairs(arrangement, axis_z, errors, unequal.positions)
    report = explain(arrangement, spectrum, np.abs(z), axis_turns, rounding=rounding)
    if (unused := first_unused(rows_read, spectrum)) is None:
        return report
    last = spectrum.last_position
    return add_findings(report, make_finding("samples-disagree", last_position=last, unused=unused))


def first_unused(positions: Sequence[int], spectrum: Spectrum) -> int | None:
    """The first position whose angles do not fit the frequencies."""
    return next((p for p in positions if p > spectrum.last_position), None)


def _group_samples(
    before: ArrayLike, after: ArrayLike, positions: ArrayLike, dtype: str
) -> tuple[Sample, Sample]:
    """The samples of a position as its heads: positions with equal coordinates, and the rest."""
    x, y = (np.asarray(vectors, dtype=np.float64) for vectors in (before, after))
    places = np.asarray(positions)
    if x.ndim != 2 or x.shape != y.shape:
        shapes = f"{list(x.shape)} and {list(y.shape)}"
        raise TensorError(f"before and after must both be [samples, head_dim], got {shapes}")
    fit = places.ndim in (1, 2) and places.shape[:1] == x.shape[:1]
    if not fit or places.dtype.kind not in "iu":
        raise PositionError(
            f"positions must be whole numbers [{len(x)}], one per sample, or one per axis of each, "
            f"got {places.dtype} {list(places.shape)}"
        )
    # positions with two samples or more, each with as many samples as all of them have
    places, group, counts = np.unique(
        places.reshape(len(x), -1), axis=0, return_inverse=True, return_counts=True
    )
    has_two, starts = counts > 1, np.cumsum(counts) - counts
    ranks: NDArray[np.int64] = np.arange(int(counts[has_two].min(initial=_SAMPLES_PER_POSITION)))
    index = np.argsort(group.ravel(), kind="stable")[starts[has_two, None] + ranks]  # [P, heads]
    sample = Sample(x[index], y[index], places[has_two], dtype)
    is_equal: NDArray[np.bool_] = (sample.positions == sample.positions[:, :1]).all(axis=1)
    if 1 not in np.diff(sample.positions[is_equal, 0]):
        raise PositionError(
            "positions must hold two that are one apart, with two samples or more at each (of "
            f"different heads, or batches); got {is_equal.sum()} with two samples"
        )
    if places.shape[1] > 1 and is_equal.all():
        raise PositionError(
            f"positions have {places.shape[1]} axes and equal coordinates everywhere, which does "
            "not tell the axes apart; give one column, or some with unequal coordinates"
        )
    return sample.select(is_equal), sample.select(~is_equal)
