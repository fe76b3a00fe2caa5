"""`identify_samples`: which rotation turned these recorded vectors?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from phasor._checks import choice
from phasor.errors import PositionError, TensorError
from phasor.identification.arrays import ROUNDING
from phasor.identification.match import Evidence, conclude
from phasor.identification.reading import Arrangement, every_arrangement
from phasor.identification.report import Finding, Identification
from phasor.identification.spectrum import Spectrum, find_spectrum

Floats = NDArray[np.float64]
Group = tuple[Floats, Floats]
_FEW = 8  # samples of one position are enough to tell pairings apart
_ANGLES = 2.0**-21  # float32: a power by way of logarithms, a division, and the product
_TOGETHER = 24  # positions looked at to tell them apart


def identify_samples(
    before: ArrayLike, after: ArrayLike, positions: ArrayLike, *, dtype: str = "float32"
) -> Identification:
    """Which rotation turned ``before`` into ``after``, vectors recorded from a running model.

    With two vectors or more at a position, each pair's turn there is overdetermined, and only the
    right pairing leaves no residue; the turns then give the frequencies as in `identify`.

    Args:
        before: ``[N, head_dim]``: any vectors, of any heads.
        after: ``[N, head_dim]``: the same after the rotation.
        positions: ``[N]`` whole numbers. Two of them must be one apart, and gaps must grow by no
            more than a factor of two to be of use; each position wants two vectors or more.
            ``[N, n_axes]`` for several axes: the above holds for those with equal coordinates, and
            those with unequal ones tell which axis drives which pair.
        dtype: What the vectors were computed in.

    Returns:
        The report, without what only calls can tell (purity, table end, other lengths).

    Raises:
        TensorError: If the shapes do not fit.
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
    rounding = ROUNDING[choice("dtype", dtype, ROUNDING)]
    equal, unequal, n_axes = _grouped(before, after, positions)
    head_dim = next(iter(equal.values()))[0].shape[1]
    # two products are added and the whole is solved for: a few roundings
    rounding *= 8
    blank = Identification(head_dim=head_dim, called=None, linear=True)
    arrangement = _fitting(list(equal.values())[:_TOGETHER], head_dim, rounding)
    if arrangement is None:
        why = "no pairing of coordinates explains the samples as turns, up to a factor, of pairs"
        return replace(blank, why_no_rope=why)
    places = _reachable(list(equal))
    z = np.array([_turn(equal[p], arrangement)[0] for p in places])
    # few programs make angles of more digits than float32's, and at these positions that shows
    angle_rounding = 2.0**-52 if dtype == "float64" else _ANGLES
    spectrum = find_spectrum(places, z, np.full(z.shape, rounding), angle_rounding)
    evidence = Evidence(
        head_dim=head_dim,
        n_axes=n_axes,
        arrangement=arrangement,
        spectrum=spectrum,
        drivers=_drivers(unequal, n_axes, arrangement, spectrum, rounding),
        gain=float(np.median(np.abs(z))),
        sizes=np.abs(z),
        rounding=rounding,
        is_rotation=True,
    )
    report = conclude(evidence)
    if spectrum.reach < places[-1]:
        beyond = next(p for p in places if p > spectrum.reach)
        says = f"Up to position {spectrum.reach} the samples turn alike; {beyond} does not."
        found = Finding(name="samples-part", says=says)
        report = replace(report, findings=(*report.findings, found))
    return report


def _drivers(
    groups: Mapping[tuple[int, ...], Group],
    n_axes: int,
    arrangement: Arrangement,
    spectrum: Spectrum,
    rounding: float,
) -> tuple[tuple[int, ...], ...]:
    """The axis that explains each pair's turns at unequal coordinates; none where all would do."""
    if n_axes == 1:
        return tuple((0,) for _ in range(arrangement.num_pairs))
    fits = np.ones((n_axes, arrangement.num_pairs), dtype=bool)
    for coordinates, group in groups.items():
        z = _turn(group, arrangement)[0]
        turned = z / np.maximum(np.abs(z), 1e-300)
        at = np.array(coordinates, dtype=np.float64)
        angles = np.abs(at[:, None] * spectrum.inv_freq)
        # an angle may have been rounded in the dtype of the vectors
        room = rounding * (8 + angles) + at[:, None] * spectrum.uncertainty
        room += spectrum.phase_uncertainty
        fits &= np.abs(spectrum.at(at) - turned) <= room
    alone = fits.sum(axis=0) == 1
    everywhere = tuple(range(n_axes))
    return tuple(
        (int(np.argmax(fits[:, k])),) if alone[k] else () if fits[:, k].any() else everywhere
        for k in range(arrangement.num_pairs)
    )


def _grouped(
    before: ArrayLike, after: ArrayLike, positions: ArrayLike
) -> tuple[dict[int, Group], dict[tuple[int, ...], Group], int]:
    """Samples by position, where its coordinates are equal and where they are not; and the axes."""
    x, y = (np.asarray(one, dtype=np.float64) for one in (before, after))
    at = np.asarray(positions)
    if x.ndim != 2 or x.shape != y.shape:
        raise TensorError(
            "before and after must both be [samples, head_dim], got "
            f"{list(x.shape)} and {list(y.shape)}"
        )
    if at.ndim not in (1, 2) or at.shape[:1] != x.shape[:1] or at.dtype.kind not in "iu":
        raise PositionError(
            f"positions must be whole numbers [{len(x)}], one per sample, or one per axis of each, "
            f"got {at.dtype} {list(at.shape)}"
        )
    at = at.reshape(len(x), -1)
    equal: dict[int, Group] = {}
    unequal: dict[tuple[int, ...], Group] = {}
    for p in np.unique(at, axis=0):
        here = np.flatnonzero((at == p).all(axis=1))[:_FEW]
        if len(here) > 1:
            group = x[here], y[here]
            if (p == p[0]).all():
                equal[int(p[0])] = group
            else:
                unequal[tuple(p.tolist())] = group
    if len(equal) < 2 or 1 not in np.diff(list(equal)):
        raise PositionError(
            "positions must hold two that are one apart, with two samples or more at each (of "
            f"different heads, or batches); got {len(equal)} with two samples"
        )
    if at.shape[1] > 1 and not unequal:
        raise PositionError(
            f"positions have {at.shape[1]} axes and equal coordinates everywhere, which does not "
            "tell the axes apart; give one column, or some with unequal coordinates"
        )
    return equal, unequal, at.shape[1]


def _turn(group: Group, arrangement: Arrangement) -> tuple[NDArray[np.complex128], float]:
    """The complex factor of each pair that fits best, and the relative residue."""
    (first, second), (to_first, to_second) = arrangement.read, arrangement.written
    u = group[0][:, first] + 1j * group[0][:, second]
    v = group[1][:, to_first] + 1j * group[1][:, to_second]
    z = (np.conj(u) * v).sum(axis=0) / np.maximum((np.abs(u) ** 2).sum(axis=0), 1e-300)
    residue = np.abs(v - z * u).max() / max(float(np.abs(v).max()), 1e-300)
    return z, float(residue)


def _fitting(groups: Sequence[Group], head_dim: int, rounding: float) -> Arrangement | None:
    """The narrowest arrangement that leaves no residue, and lets the others pass."""
    moved = np.zeros(head_dim, dtype=bool)
    for x, y in groups:
        moved |= (np.abs(x - y) > rounding * np.abs(x)).any(axis=0)
    if not moved.any():
        return None
    lowest, highest = (int(np.flatnonzero(moved)[i]) for i in (0, -1))
    return next(
        (
            arrangement
            for arrangement in every_arrangement(lowest, highest, head_dim)
            if all(_turn(group, arrangement)[1] <= 8 * rounding for group in groups)
        ),
        None,
    )


def _reachable(positions: list[int]) -> list[int]:
    """Positions from the first two neighbours on, with gaps that at most double."""
    start = next(i for i in range(len(positions)) if positions[i] + 1 in positions)
    anchor = positions[start]
    return [anchor, *_doubling(anchor, positions)]


def _doubling(anchor: int, positions: list[int]) -> Iterator[int]:
    gap = 1
    yield anchor + 1
    while True:
        wider = [p for p in positions if anchor + gap < p <= anchor + 2 * gap]
        if not wider:
            return
        gap = wider[-1] - anchor
        yield anchor + gap
