"""Which rotation a function does, or a program whose vectors or tables were recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from phasor._checks import choice, whole
from phasor.errors import ConfigError, PositionError, TensorError
from phasor.identification import mistakes, turns
from phasor.identification.calling import Caller, Calling, RefusedError, find_caller
from phasor.identification.explaining import Drivers, explain, find_near_base
from phasor.identification.hypotheses import COARSE
from phasor.identification.report import Finding, Identification, add_findings, make_finding
from phasor.identification.spectrum import (
    ROUNDING,
    Complex,
    Floats,
    Spectrum,
    bound_angle_errors,
    doubling,
    find_spectrum,
    powers_of_two,
)
from phasor.identification.verifying import find_causes
from phasor.numpy import every_axis_of, matrix, phasors
from phasor.pairings import Pairing
from phasor.rope import Rope

_SMALL_POSITIONS = (0, 1, 2, 3, 5, 8)
# enough samples of one position, and enough positions, to tell pairings apart
_SAMPLES_PER_POSITION = 8
_ARRANGEMENT_POSITIONS = 24


def identify(
    function: Callable[..., Any],
    head_dim: int,
    *,
    table: Callable[..., Any] | None = None,
    takes: str | None = None,
    dims: str | None = None,
    arrays: str | None = None,
    dtype: str = "float32",
    n_axes: int = 1,
    max_position: int = 1 << 20,
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
        takes: The arguments in order, if they cannot be guessed: words of ``x``, ``q``, ``k``,
            ``positions``, ``offset`` (one whole number per call), ``cos``, ``sin``, ``rows``; one
            is passed by keyword as ``name=word``.
        dims: The order of the vectors' dimensions, such as ``"bhsd"``; tried in turn unless
            given.
        arrays: ``"numpy"``, ``"torch"`` or ``"jax"``; NumPy's, then torch's, unless given.
        dtype: Of the vectors: ``"float64"``, ``"float32"``, ``"float16"`` or ``"bfloat16"``.
        n_axes: Coordinates of a position.
        max_position: The highest position to look at.

    Returns:
        The report; ``report.rope`` is the Rope that does the same, ``str(report)`` a text.

    Raises:
        TensorError: If no way of calling ``function`` works.

    >>> from phasor import Rope
    >>> from phasor.numpy import rotate
    >>> rope = Rope(head_dim=8, pairing="interleaved", base=500.0)
    >>> found = identify(lambda x, p: rotate(x, p, rope), 8, dtype="float64")
    >>> found.rope == rope, found.base, found.known_law
    (True, 500.0, True)
    """
    whole("head_dim", head_dim, least=2)
    whole("n_axes", n_axes, least=1)
    whole("max_position", max_position, least=64)
    caller = find_caller(function, head_dim, Calling(table, takes, dims, arrays, dtype, n_axes))
    called = f"{caller.arrays.name} arrays {caller.dims} in {dtype} as ({caller.takes})"
    try:
        return replace(_measure(caller, min(max_position, caller.max_position // 2)), called=called)
    except RefusedError as error:
        raise TensorError(
            f"function must turn positions 0 to {max(_SMALL_POSITIONS)}, whenever it is asked to, "
            f"and says of some of them: {error}"
        ) from error


def _measure(caller: Caller, max_position: int) -> Identification:
    """Measure the map at small positions, find its pairs, and measure those at growing ones."""
    maps = _measure_maps(caller)
    rounding, findings = mistakes.find_table_dtype(maps, caller.rounding, caller.out_dtype)
    linear, size = _is_linear(caller, maps[0], rounding), float(np.abs(maps).max())
    if caller.changed_inputs:
        findings.append(make_finding("inputs-written"))
    blocks = turns.find_blocks(np.concatenate(list(maps)), rounding) if linear else []
    if linear and (arrangement := turns.arrange_blocks(blocks, caller.head_dim)) is not None:
        noise = turns.measure_noise(arrangement, maps, rounding)
        if noise > 2 * rounding * size:  # more than an ulp
            said = {"dtype": caller.out_dtype, "error": noise, "once": rounding * size}
            findings.append(make_finding("noise", **said))
            rounding = noise
        probe = mistakes.Probe(caller, arrangement, rounding, noise)
        return _measure_pairs(probe, max_position, maps, findings)
    mixed = next((list(block.read) for block in blocks if len(block.read) > 2), None)
    why = "nothing turns at the positions tried" if linear else "it is not linear in its vectors"
    if mixed is not None:
        why = f"it mixes {len(mixed)} coordinates with each other: {mixed[:8]}"
    report = Identification(head_dim=caller.head_dim, linear=linear, why_no_rope=why)
    return add_findings(report, *findings)


def _measure_maps(caller: Caller) -> Floats:
    """The linear maps ``[outputs, P, out, in]`` at small positions, first equal on all axes."""
    n = caller.n_axes
    positions = np.array(_SMALL_POSITIONS)
    if n > 1:  # the same positions on one axis at a time follow
        on_axes = (np.outer(positions[1:], axis) for axis in np.eye(n, dtype=int))
        positions = np.concatenate([np.repeat(positions[:, None], n, axis=1), *on_axes])
    results = caller.turn(np.eye(caller.head_dim), positions)
    if not np.isfinite(results).all():
        raise RefusedError("it gives numbers that are not finite")
    return np.swapaxes(results, 2, 3)  # vectors in are columns


def _is_linear(caller: Caller, maps: Floats, rounding: float) -> bool:
    # whole numbers, which every dtype holds exactly
    vectors = np.random.default_rng(1).integers(-7, 8, (3, caller.head_dim)).astype(np.float64)
    vectors[2] = 0
    expected = vectors @ maps[_SMALL_POSITIONS.index(5)].T
    tolerance = 64 * rounding * np.abs(vectors).max() * max(np.abs(maps).max(), 1)
    return bool(np.abs(caller.turn(vectors, [5])[0, 0] - expected).max() <= tolerance)


def _measure_pairs(
    probe: mistakes.Probe, max_position: int, maps: Floats, findings: list[Finding]
) -> Identification:
    lengths = mistakes.call_with_growing_lengths(probe, max_position)
    z = lengths.answers[lengths.longest_consistent]
    spectrum = find_spectrum(powers_of_two(lengths.longest_consistent), z, probe.angle_errors(z))
    factors = probe.arrangement.factors(maps[0])
    members = mistakes.compare_members(probe, factors)
    key_factor, keys = mistakes.compare_queries_and_keys(probe, maps)
    findings = [*findings, *members, *keys]
    if lengths.irreproducible_at is not None:
        findings.append(make_finding("remembers", top=lengths.irreproducible_at))
    report = explain(
        probe.arrangement, spectrum, _find_drivers(probe, spectrum), np.abs(factors.mean(axis=0)),
        rounding=probe.rounding, is_rotation=not members,
    )  # fmt: skip
    report = _explain_rounded_angles(probe.caller, report, max_position)
    report = replace(report, findings=(*findings, *report.findings), key_factor=key_factor)
    measured = mistakes.Measured(probe, spectrum, report)
    if lengths.changes_at is not None:
        mistakes.add_rule(measured, lengths)
    elif report.is_rotation and not report.names() & mistakes.ANGLES_ROUNDED:
        # which turn as predicted at few positions
        mistakes.add_limits(measured, max_position)
    _add_error(measured, maps[0])
    mistakes.add_steps(measured)
    ends = max_position, lengths.changes_at, measured.report.table_end
    mistakes.add_precision(measured, min(end for end in ends if end))
    return measured.report


def _explain_rounded_angles(
    caller: Caller, report: Identification, max_position: int
) -> Identification:
    """The report by the angles' dtype, if it explains more than that of the frequencies.

    An angle of one position is the frequency, and is a number of the dtype as well.
    """
    dtype = next((name for name in COARSE if f"frequencies-in-{name}" in report.names()), None)
    if report.rope is None or dtype is None:
        return report
    base = find_near_base(report.rope.inv_freq, dtype)
    rope = replace(report.rope, base=base, explicit_inv_freq=None)
    causes = () if base is None else find_causes(rope, caller, min(max_position, 1 << 12))
    changes = [cause for cause in causes if cause.name != "factor"]  # which is in the report
    if [change.name for change in changes] != [f"angles-in-{dtype}"]:
        return report
    kept = (one for one in report.findings if one.name != f"frequencies-in-{dtype}")
    return replace(report, rope=rope, base=base, known_law=True, findings=(*kept, *changes))


def _find_drivers(probe: mistakes.Probe, spectrum: Spectrum) -> Drivers:
    """The axes that turn each pair, tried one axis at a time up to the spectrum's last position."""
    n_axes = probe.caller.n_axes
    if n_axes == 1:
        return spectrum.inv_freq[None] != 0
    positions = powers_of_two(max(spectrum.last_position, 1))
    z = np.array([probe(np.outer(positions, axis)) for axis in np.eye(n_axes, dtype=int)])
    return np.abs(z - z[:, :1]).max(axis=1) > 8 * probe.rounding  # the first is at position 0


def _add_error(measured: mistakes.Measured, maps: Floats) -> None:
    """Add the error of the Rope against the maps ``[P, out, in]``."""
    rope, report = measured.report.rope, measured.report
    if rope is None:
        return
    # columns are rotated unit vectors, of which those in the slice have the gain
    factors = np.ones(report.head_dim)
    factors[rope.rotary_start :][: rope.rotary_dim] = report.attention_factor or 1.0
    positions = np.array(_SMALL_POSITIONS) + report.position_offset
    exact = np.array([factors * matrix(every_axis_of(rope, p), rope) for p in positions])
    measured.add(error=float(np.abs(maps[: len(positions)] - exact).max()))


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
        dtype: The dtype in which the vectors were computed.

    Returns:
        The report, without what only calls can tell (written inputs, table end, other lengths).

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
    some = equal.of(np.arange(len(equal.positions)) < _ARRANGEMENT_POSITIONS)
    measured = (
        turns.measure_turns(some, one, one_gain=False)
        for one in turns.arrangements_of_changed(some)
    )
    arrangement = next((one.arrangement for one in measured if one is not None), None)
    if arrangement is None:
        why = "no pairing of coordinates explains the samples as turns, up to a factor, of pairs"
        return Identification(head_dim=equal.x.shape[-1], why_no_rope=why)
    # [P], and turns [P, pairs] at distances that double
    places = equal.positions[:, 0]
    indices = doubling(places)
    read: list[int] = places[indices].tolist()
    z = turns.least_squares(*equal.pairs(arrangement))[indices]
    spectrum = find_spectrum(read, z, np.full(z.shape, rounding))
    drivers = _find_drivers_of_samples(unequal, arrangement, spectrum, rounding)
    report = explain(arrangement, spectrum, drivers, np.abs(z), rounding=rounding)
    if (unused := _first_unused(read, spectrum)) is None:
        return report
    last = spectrum.last_position
    return add_findings(report, make_finding("samples-part", last_position=last, unused=unused))


def _first_unused(positions: Sequence[int], spectrum: Spectrum) -> int | None:
    """The first position whose angles do not fit the frequencies."""
    return next((p for p in positions if p > spectrum.last_position), None)


def _group_samples(
    before: ArrayLike, after: ArrayLike, positions: ArrayLike, dtype: str
) -> tuple[turns.Sample, turns.Sample]:
    """Samples of one position as its heads: those of equal coordinates, and the others."""
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
    # of every position that has two, as many as all of them have
    places, group, counts = np.unique(
        places.reshape(len(x), -1), axis=0, return_inverse=True, return_counts=True
    )
    kept, starts = counts > 1, np.cumsum(counts) - counts
    ranks: NDArray[np.int64] = np.arange(int(counts[kept].min(initial=_SAMPLES_PER_POSITION)))
    index = np.argsort(group.ravel(), kind="stable")[starts[kept, None] + ranks]  # [P, heads]
    sample = turns.Sample(x[index], y[index], places[kept], dtype)
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
    return sample.of(is_equal), sample.of(~is_equal)


def _find_drivers_of_samples(
    unequal: turns.Sample, arrangement: turns.Arrangement, spectrum: Spectrum, rounding: float
) -> Drivers:
    """The axis that explains each pair's turns at unequal coordinates; none if all of them do."""
    z = turns.least_squares(*unequal.pairs(arrangement))
    units = z / np.maximum(np.abs(z), 1e-300)
    places: Floats = unequal.positions[..., None].astype(np.float64)  # [P, n_axes, 1]
    # an angle may have been rounded in the dtype of the vectors
    tolerance = rounding * (8 + np.abs(places * spectrum.inv_freq))
    tolerance += places * spectrum.uncertainty + spectrum.phase_uncertainty
    predicted = np.exp(1j * (spectrum.phase + places * spectrum.inv_freq))
    axis_explains = (np.abs(predicted - units[:, None]) <= tolerance).all(axis=0)
    # if no axis alone explains a pair's turns, several turn it
    return np.where(axis_explains.sum(axis=0) == 1, axis_explains, ~axis_explains.any(axis=0))


def from_cache(
    cos: ArrayLike,
    sin: ArrayLike,
    *,
    pairing: Pairing,
    head_dim: int | None = None,
    rotary_start: int = 0,
) -> tuple[Rope, Identification]:
    """The `Rope` behind tables of cos and sin, with what it says about them.

    Frequencies are found from rows at growing distances, explained by a base and a law where one
    does, and then every row is compared with the exact rotation.

    Args:
        cos: ``[max_positions, num_pairs]``: row ``p`` belongs to position ``p``. Tables that say
            everything twice, ``[max_positions, 2 * num_pairs]``, are known by their equal halves
            or equal neighbours.
        sin: The same shape.
        pairing: How they are used; tables do not say.
        head_dim: Width of one head; ``rotary_start + 2 * num_pairs`` unless given.
        rotary_start: Where the rotated slice begins inside the head.

    Returns:
        The Rope, and the report: ``error`` and ``precision`` are how far entries are off the
        Rope's, as complex numbers, ``position_offset`` is the position of row 0.

    Raises:
        ConfigError: If no Rope gives them, saying why.

    >>> from phasor.angles import cos_sin
    >>> from phasor.scaling import Linear
    >>> rope = Rope(head_dim=64, pairing="half", base=500_000.0, scaling=Linear(factor=4.0))
    >>> cos, sin = (np.float32(table) for table in cos_sin(range(4096), rope))
    >>> found, report = from_cache(cos, sin, pairing="half")
    >>> found == rope, report.error < 2**-24
    (True, True)
    """
    z, dtype = _complex_rows(cos, sin)
    width = rotary_start + 2 * z.shape[1] if head_dim is None else head_dim
    pairs = Rope(
        head_dim=width, pairing=pairing, rotary_dim=2 * z.shape[1], rotary_start=rotary_start
    )
    rounding, findings = mistakes.find_table_dtype(
        np.stack((z.real, z.imag)), ROUNDING[dtype], dtype
    )
    read, rows = powers_of_two(len(z) - 1), np.arange(len(z))
    spectrum = find_spectrum(read, z[read], bound_angle_errors(z[read], rounding))
    drivers = np.ones((1, z.shape[1]), dtype=bool)
    report = explain(turns.arrangement_of(pairs), spectrum, drivers, np.abs(z), rounding=rounding)
    if (unused := _first_unused(read, spectrum)) is not None:
        found = f"rows 0 to {spectrum.last_position} do, row {unused} does not"
        raise _no_rope(f"rows must turn at fixed frequencies, and {found}")
    if report.rope is None:
        raise _no_rope(report.why_no_rope)
    gain, offset = report.attention_factor or 1.0, report.position_offset
    error = np.abs(z - gain * phasors(report.rope, rows + offset)[:, : z.shape[1]]).max(axis=1)
    # angles may be float32 products of float32 frequencies, each a few roundings off
    fastest = max(abs(pair.inv_freq) for pair in report.pairs)
    tolerance = gain * (16 * rounding + (rows + abs(offset)) * fastest * 2.0**-20)
    wrong = np.flatnonzero(error > tolerance)
    if len(wrong):
        size = f"{error[wrong[0]]:.2g} off what the others say"
        raise _no_rope(f"row {wrong[0]} is {size}, more than rounding explains")
    near = [p for p in mistakes.PRECISION_POSITIONS if p <= len(z)]
    return report.rope, replace(
        report,
        findings=(*findings, *report.findings),
        table_end=len(z),
        error=float(error.max()),
        precision=tuple((p, float(error[p - 12 : p].max() / gain)) for p in near),
    )


def _no_rope(why: str | None) -> ConfigError:
    return ConfigError(
        f"cos and sin must be a Rope's, and no Rope gives them: {why}; "
        "give the rows before, or a Rotation, which takes the rows as they are"
    )


def _complex_rows(cos: ArrayLike, sin: ArrayLike) -> tuple[Complex, str]:
    tables = np.asarray(cos), np.asarray(sin)
    dtypes = {str(table.dtype) for table in tables}
    shape = tables[0].shape
    if len(shape) != 2 or tables[1].shape != shape or shape[0] < 2 or shape[1] < 1:
        raise TensorError(
            "cos and sin must both be [max_positions, num_pairs] with two rows or more, "
            f"got {list(shape)} and {list(tables[1].shape)}"
        )
    if not dtypes <= set(ROUNDING):
        listed = " and ".join(sorted(dtypes))
        raise TensorError(f"cos and sin must be of {', '.join(ROUNDING)}, got {listed}")
    z = tables[0].astype(np.float64) + 1j * tables[1].astype(np.float64)
    if not np.isfinite(z).all():
        raise ConfigError("cos and sin must be finite, got infinities or NaN; check the file")
    return turns.one_of_pair(z), max(dtypes, key=ROUNDING.__getitem__)
