"""`identify`, `identify_samples`, `identify_rows`: which rotation is behind what can be measured.

Of a function, of recorded vectors, and of tables of cos and sin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from phasor._checks import choice, whole
from phasor.errors import PositionError, TensorError
from phasor.identification.blocks import (
    Arrangement,
    arrange,
    arrangement_of,
    every_arrangement,
    find_blocks,
    read_rows,
)
from phasor.identification.calling import Caller, RefusedError, find_caller
from phasor.identification.explaining import Drivers, explain
from phasor.identification.mistakes import (
    PRECISION_POSITIONS,
    Probe,
    call_with_growing_lengths,
    coarse_table,
    compare_members,
    compare_queries_and_keys,
    with_limits,
    with_precision,
    with_rule,
)
from phasor.identification.report import Finding, Identification, make_finding
from phasor.identification.spectrum import (
    ROUNDING,
    Complex,
    Floats,
    Spectrum,
    exact_turns,
    find_spectrum,
    on_every_axis,
    powers_of_two,
    rounded_angles,
)
from phasor.numpy import matrix
from phasor.rope import Rope

_SMALL = (0, 1, 2, 3, 5, 8)
Group = tuple[Floats, Floats]
_SAMPLES_USED = 8  # of one position: enough to tell pairings apart
_POSITIONS_USED = 24  # to tell pairings apart
_FLOAT32_ANGLES = 2.0**-21  # a power by way of logarithms, a division, and the product


def identify(
    function: Callable[..., Any],
    head_dim: int,
    *,
    table: Callable[..., Any] | None = None,
    takes: str | None = None,
    layout: str | None = None,
    arrays: str | None = None,
    dtype: str = "float32",
    n_axes: int = 1,
    longest: int = 1 << 20,
) -> Identification:
    """Which rotation ``function`` does: pairing, slice, sign, frequencies, law, limits, mistakes.

    Unit vectors go in at chosen positions, and what comes out is read as a linear map, block by
    block. Frequencies are found from the lowest positions first and refined at growing ones.

    Args:
        function: Rotates: ``(x, positions)``, ``(q, k, positions)``, ``(q, k, cos, sin)`` or
            ``(x)`` alone; a function, a method or a module. Not changed, only called.
        head_dim: Width of one head.
        table: Makes ``cos, sin`` (or whatever rows ``function`` takes) from positions, or from
            ``(x, positions)``.
        takes: The arguments in order, where they cannot be guessed: words of ``x``, ``q``, ``k``,
            ``positions``, ``offset`` (one whole number per call), ``cos``, ``sin``, ``rows``; one
            is passed by keyword as ``name=word``.
        layout: The order of the vectors' dimensions, such as ``"bhsd"``; tried in turn unless
            given.
        arrays: ``"numpy"``, ``"torch"`` or ``"jax"``; NumPy's, then torch's, unless given.
        dtype: Of the vectors: ``"float64"``, ``"float32"``, ``"float16"`` or ``"bfloat16"``.
        n_axes: Coordinates of a position.
        longest: The highest position to look at.

    Returns:
        The report; ``report.rope`` is the Rope that does the same, ``str(report)`` a text.

    Raises:
        TensorError: If no way of calling ``function`` works.
        SpecError: For an argument out of bounds.
        BackendError: If the library named by ``arrays`` is not installed, or lacks the dtype.

    >>> from phasor import Rope
    >>> from phasor.numpy import rotate
    >>> rope = Rope(head_dim=8, pairing="interleaved", base=500.0)
    >>> found = identify(lambda x, p: rotate(x, p, rope), 8, dtype="float64")
    >>> found.rope == rope, found.base, found.known_law
    (True, 500.0, True)
    """
    whole("head_dim", head_dim, least=2)
    whole("n_axes", n_axes, least=1)
    whole("longest", longest, least=64)
    caller = find_caller(
        function, head_dim, table=table, takes=takes, layout=layout, arrays=arrays, dtype=dtype,
        n_axes=n_axes,
    )  # fmt: skip
    called = f"{caller.arrays.name} arrays {caller.layout} in {dtype} as ({caller.takes})"
    try:
        report = _measure(caller, min(longest, caller.longest // 2))
        return replace(report, called=called)
    except RefusedError as error:
        raise TensorError(
            f"function must turn positions 0 to {max(_SMALL)}, whenever it is asked to, and says "
            f"of some of them: {error}"
        ) from error


def _measure(caller: Caller, longest: int) -> Identification:
    """The map at small positions, read as pairs, and then the pairs at growing ones."""
    maps = _maps(caller)
    rounding, findings = coarse_table(maps, caller.rounding, caller.out_dtype)
    linear = _is_linear(caller, maps[0], rounding)
    if caller.changed_inputs:
        findings.append(make_finding("inputs-written"))
    nothing = Identification(
        head_dim=caller.head_dim, called=None, linear=linear, findings=tuple(findings)
    )
    if not linear:
        return replace(nothing, why_no_rope="it is not linear in its vectors")
    blocks = find_blocks(np.concatenate(list(maps)), rounding)
    arrangement = arrange(blocks, caller.head_dim)
    if arrangement is not None:
        return _measure_pairs(Probe(caller, arrangement, rounding), longest, maps, findings)
    wide = next((list(block.read) for block in blocks if len(block.read) > 2), None)
    if wide is None:
        return replace(nothing, why_no_rope="nothing turns at the positions tried")
    why = f"it mixes {len(wide)} coordinates with each other: {wide[:8]}"
    return replace(nothing, why_no_rope=why)


def _maps(caller: Caller) -> Floats:
    """The linear maps ``[outputs, P, out, in]`` at small positions.

    The first are at `_SMALL`, equal on all axes; with several axes, others follow that are not.
    """
    n = caller.n_axes
    positions = np.array(_SMALL)
    if n > 1:
        alone = [_on_axis(axis, n, _SMALL[1:]) for axis in range(n)]
        positions = np.concatenate([np.repeat(positions[:, None], n, axis=1), *alone])
    turned = caller.turn(np.eye(caller.head_dim), positions)
    if not np.isfinite(turned).all():
        raise RefusedError("it gives numbers that are not finite")
    return np.swapaxes(turned, 2, 3)  # vectors in are columns


def _on_axis(axis: int, n_axes: int, coordinates: Sequence[int]) -> NDArray[np.int64]:
    """Positions ``[P, n_axes]`` with a coordinate on one axis and 0 on the others."""
    return np.outer(coordinates, np.arange(n_axes) == axis)


def _is_linear(caller: Caller, maps: Floats, rounding: float) -> bool:
    rng = np.random.default_rng(1)
    # whole numbers, which every dtype holds exactly
    vectors = rng.integers(-7, 8, (3, caller.head_dim)).astype(np.float64)
    vectors[2] = 0
    expected = vectors @ maps[_SMALL.index(5)].T
    room = 64 * rounding * np.abs(vectors).max() * max(np.abs(maps).max(), 1)
    return bool(np.abs(caller.turn(vectors, [5])[0, 0] - expected).max() <= room)


def _measure_pairs(
    probe: Probe, longest: int, maps: Floats, findings: list[Finding]
) -> Identification:
    arrangement, rounding = probe.arrangement, probe.rounding
    lengths = call_with_growing_lengths(probe, longest)
    z = lengths.answers[lengths.agreed]
    spectrum = find_spectrum(powers_of_two(lengths.agreed), z, rounded_angles(z, rounding))
    rows = read_rows(arrangement.blocks(maps[0]))
    members = compare_members(probe, rows)
    key_factor, keys = compare_queries_and_keys(probe, maps)
    findings = [*findings, *members, *keys]
    if lengths.remembers is not None:
        findings.append(make_finding("remembers", top=lengths.remembers))
    sizes, drivers = np.abs(rows.mean(axis=0)), _drivers_by_axis(probe, spectrum)
    report = explain(
        arrangement, spectrum, drivers, sizes, rounding=rounding, is_rotation=not members
    )
    report = replace(report, findings=(*findings, *report.findings), key_factor=key_factor)
    if lengths.changes_at is not None:
        report = with_rule(report, lengths, rounding)
    elif report.is_rotation:
        report = with_limits(report, probe, spectrum, longest)
    report = _with_error(maps[0], report)
    end = min(longest, lengths.changes_at or longest, report.table_end or longest)
    return with_precision(report, spectrum, probe, end)


def _drivers_by_axis(probe: Probe, spectrum: Spectrum) -> Drivers:
    """The axes that turn each pair, tried one axis at a time as far as the spectrum reached."""
    n_axes = probe.caller.n_axes
    if n_axes == 1:
        return spectrum.inv_freq[None] != 0
    places = powers_of_two(max(spectrum.reach, 1))
    z = np.array([probe(_on_axis(axis, n_axes, places)) for axis in range(n_axes)])
    return np.abs(z - z[:, :1]).max(axis=1) > 8 * probe.rounding  # the first is at position 0


def _with_error(maps: Floats, report: Identification) -> Identification:
    """The report with how far its Rope is from the maps ``[P, out, in]``."""
    rope = report.rope
    if rope is None:
        return report
    factors = np.ones(report.head_dim)
    factors[rope.rotary_start :][: rope.rotary_dim] = report.attention_factor or 1.0
    at = np.array(_SMALL) + report.position_offset
    exact = np.array([factors * matrix(on_every_axis(p, rope), rope) for p in at])
    return replace(report, error=float(np.abs(maps[: len(at)] - exact).max()))


def identify_rows(z: Complex, dtype: str, layout: Rope) -> Identification:
    """Which rotation a table of cosines and sines is of: row ``p`` is position ``p``.

    Args:
        z: ``cos + i sin`` of each pair, finite, ``[positions, num_pairs]``, two rows or more.
        dtype: What they are numbers of.
        layout: Where the pairs are; its frequencies are not looked at.

    Returns:
        The report; ``error`` is the largest difference between an entry and the Rope's, as a
        complex number. Where no Rope has these rows, ``why_no_rope`` says why.
    """
    rounding, findings = coarse_table(np.stack((z.real, z.imag)), ROUNDING[dtype], dtype)
    places = powers_of_two(len(z) - 1)
    spectrum = find_spectrum(places, z[places], rounded_angles(z[places], rounding))
    drivers = np.ones((1, z.shape[1]), dtype=bool)
    report = explain(arrangement_of(layout), spectrum, drivers, np.abs(z), rounding=rounding)
    report = replace(report, findings=(*findings, *report.findings), table_end=len(z))
    beyond = next((p for p in places if p > spectrum.reach), None)
    if beyond is not None:
        why = f"rows 0 to {spectrum.reach} do, row {beyond} does not"
        why = f"rows must turn at fixed frequencies, and {why}"
        return replace(report, rope=None, why_no_rope=why)
    if report.rope is None:
        return report
    gain, offset = report.attention_factor or 1.0, report.position_offset
    rows = np.arange(len(z))
    error = np.abs(z - gain * exact_turns(report.rope, rows, offset)[:, : z.shape[1]]).max(axis=1)
    # angles may be float32 products of float32 frequencies, each a few roundings off
    fastest = max(abs(pair.inv_freq) for pair in report.pairs)
    room = gain * (16 * rounding + (rows + abs(offset)) * fastest * 2.0**-20)
    wrong = np.flatnonzero(error > room)
    if len(wrong):
        why = (
            f"row {wrong[0]} is {error[wrong[0]]:.2g} off what the others say, more than rounding "
            "explains"
        )
        return replace(report, rope=None, why_no_rope=why)
    near = [(p, float(error[p - 12 : p].max() / gain)) for p in PRECISION_POSITIONS if p <= len(z)]
    return replace(report, error=float(error.max()), precision=tuple(near))


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
        The report, without what only calls can tell (written inputs, table end, other lengths).

    Raises:
        TensorError: If the shapes do not fit.
        PositionError: If the positions are too few, too far apart or not whole.
        SpecError: If the dtype is none of those that `identify` takes.

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
    equal, unequal, n_axes = _group_samples(before, after, positions)
    head_dim = next(iter(equal.values()))[0].shape[1]
    arrangement = _find_arrangement(list(equal.values())[:_POSITIONS_USED], head_dim, rounding)
    if arrangement is None:
        why = "no pairing of coordinates explains the samples as turns, up to a factor, of pairs"
        return Identification(head_dim=head_dim, called=None, linear=True, why_no_rope=why)
    places = [*_doubling_positions(list(equal))]
    z = np.array([_turn(equal[p], arrangement)[0] for p in places])
    # few programs make angles of more digits than float32's, and at these positions that shows
    angle_rounding = 2.0**-52 if dtype == "float64" else _FLOAT32_ANGLES
    spectrum = find_spectrum(places, z, np.full(z.shape, rounding), angle_rounding)
    drivers = _drivers_of_samples(unequal, n_axes, arrangement, spectrum, rounding)
    report = explain(arrangement, spectrum, drivers, np.abs(z), rounding=rounding)
    beyond = next((p for p in places if p > spectrum.reach), None)
    if beyond is None:
        return report
    part = make_finding("samples-part", reach=spectrum.reach, beyond=beyond)
    return replace(report, findings=(*report.findings, part))


def _group_samples(
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
        here = np.flatnonzero((at == p).all(axis=1))[:_SAMPLES_USED]
        if len(here) > 1 and np.ptp(p) == 0:
            equal[int(p[0])] = x[here], y[here]
        elif len(here) > 1:
            unequal[tuple(p.tolist())] = x[here], y[here]
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


def _turn(group: Group, arrangement: Arrangement) -> tuple[Complex, float]:
    """The complex factor of each pair that fits best, and the relative residue."""
    (first, second), (to_first, to_second) = arrangement.read, arrangement.written
    u = group[0][:, first] + 1j * group[0][:, second]
    v = group[1][:, to_first] + 1j * group[1][:, to_second]
    z = (np.conj(u) * v).sum(axis=0) / np.maximum((np.abs(u) ** 2).sum(axis=0), 1e-300)
    residue = np.abs(v - z * u).max() / max(float(np.abs(v).max()), 1e-300)
    return z, float(residue)


def _find_arrangement(
    groups: Sequence[Group], head_dim: int, rounding: float
) -> Arrangement | None:
    """The narrowest arrangement that leaves no residue, and lets the others pass."""
    moved = np.zeros(head_dim, dtype=bool)
    for x, y in groups:
        moved |= (np.abs(x - y) > rounding * np.abs(x)).any(axis=0)
    turning = np.flatnonzero(moved)
    if len(turning) == 0:
        return None
    for one in every_arrangement(int(turning[0]), int(turning[-1]), head_dim):
        if all(_turn(group, one)[1] <= 8 * rounding for group in groups):
            return one
    return None


def _doubling_positions(positions: list[int]) -> Iterator[int]:
    """Positions from the first two neighbours on, with gaps that at most double."""
    start = next(p for p in positions if p + 1 in positions)
    gap = 1
    yield from (start, start + 1)
    while wider := [p for p in positions if start + gap < p <= start + 2 * gap]:
        gap = wider[-1] - start
        yield start + gap


def _drivers_of_samples(
    groups: Mapping[tuple[int, ...], Group],
    n_axes: int,
    arrangement: Arrangement,
    spectrum: Spectrum,
    rounding: float,
) -> Drivers:
    """The axis that explains each pair's turns at unequal coordinates; none where all would do."""
    fits = np.ones((n_axes, arrangement.num_pairs), dtype=bool)
    for coordinates, group in groups.items():
        z = _turn(group, arrangement)[0]
        turned = z / np.maximum(np.abs(z), 1e-300)
        at = np.array(coordinates, dtype=np.float64)
        # an angle may have been rounded in the dtype of the vectors
        room = rounding * (8 + np.abs(at[:, None] * spectrum.inv_freq))
        room += at[:, None] * spectrum.uncertainty + spectrum.phase_uncertainty
        fits &= np.abs(spectrum.at(at) - turned) <= room
    # where no axis explains a pair's turns, several turn it
    return np.where(fits.sum(axis=0) == 1, fits, ~fits.any(axis=0))
