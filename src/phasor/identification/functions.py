"""Which rotation a function performs: calls give evidence, turns are measured, a report is filled.

`REPORTED` lists the steps that fill the report, in order. `expecting` then compares it with the
expected rotation, if there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from phasor.identification.calling import Caller, RefusedError
from phasor.identification.explaining import explain
from phasor.identification.layout import arrange_blocks, find_blocks, measure_noise
from phasor.identification.lengths import add_rule, call_with_growing_lengths
from phasor.identification.members import compare_members, compare_queries_and_keys
from phasor.identification.positions import add_limits
from phasor.identification.probes import Lengths, Measured, Probe
from phasor.identification.recorded import find_causes
from phasor.identification.report import (
    Finding,
    Identification,
    add_findings,
    make_finding,
)
from phasor.identification.roundings import (
    ANGLES_ROUNDED,
    COARSE,
    add_precision,
    add_steps,
    find_near_base,
    find_table_dtype,
)
from phasor.identification.spectrum import Floats, Spectrum, find_spectrum, powers_of_two
from phasor.identification.turns import Turns
from phasor.numpy import every_axis_of, rotate

SMALL_POSITIONS = (0, 1, 2, 3, 5, 8)
# frequencies that hold up to this position are not an accident of the first few positions
_REGULAR = 16


class Measurement(NamedTuple):
    """The report about a function, without regard to any expected rotation."""

    report: Identification
    end: int  # the first position that is turned by another rotation, or not at all


def measure(caller: Caller, max_position: int) -> Measurement:
    """Measure the map at small positions, find its pairs, and measure them at growing positions."""
    max_position = min(max_position, caller.max_position // 2)
    maps = _measure_maps(caller)
    rounding, findings = find_table_dtype(maps, caller.rounding, caller.out_dtype)
    linear, size = _is_linear(caller, maps[0], rounding), float(np.abs(maps).max())
    if caller.changed_inputs:
        findings.append(make_finding("inputs-written"))
    if (count := caller.joined_heads) > 1:
        width_text = f"{caller.head_dim} ({count} that turn as one)"
        findings.append(
            make_finding("head-width", found=width_text, expected=caller.head_dim // count)
        )
    blocks = find_blocks(np.concatenate(list(maps)), rounding) if linear else []
    if linear and (arrangement := arrange_blocks(blocks, caller.head_dim)) is not None:
        noise = measure_noise(arrangement, maps, rounding)
        if noise > 2 * rounding * size:  # more than one ulp
            numbers = {"dtype": caller.out_dtype, "error": noise, "once": rounding * size}
            findings.append(make_finding("noise", **numbers))
            rounding = noise
        probe = Probe(caller, arrangement, rounding, noise)
        measured = _measure_turns(probe, maps, max_position, findings)
        for add_to_report in REPORTED:
            add_to_report(measured)
        return Measurement(measured.report, measured.end)
    mixed = next((list(block.read) for block in blocks if len(block.read) > 2), None)
    reason = "nothing turns at the positions tried" if linear else "it is not linear in its vectors"
    if mixed is not None:
        reason = f"it mixes {len(mixed)} coordinates with each other: {mixed[:8]}"
    report = Identification(head_dim=caller.head_dim, linear=linear, why_no_rope=reason)
    return Measurement(add_findings(report, *findings), max_position + 1)


def _measure_maps(caller: Caller) -> Floats:
    """The linear maps ``[outputs, P, out, in]`` at small positions, equal on all axes first."""
    n = caller.n_axes
    positions = np.array(SMALL_POSITIONS)
    if n > 1:  # then the same positions on one axis at a time
        on_axes = (np.outer(positions[1:], axis) for axis in np.eye(n, dtype=int))
        positions = np.concatenate([np.repeat(positions[:, None], n, axis=1), *on_axes])
    results = caller.turn(np.eye(caller.head_dim), positions)
    if not np.isfinite(results).all():
        raise RefusedError("it gives numbers that are not finite")
    return np.swapaxes(results, 2, 3)  # the columns belong to the unit vectors that went in


def _is_linear(caller: Caller, maps: Floats, rounding: float) -> bool:
    # vectors of whole numbers, because every dtype holds them exactly
    vectors = np.random.default_rng(1).integers(-7, 8, (3, caller.head_dim)).astype(np.float64)
    vectors[2] = 0
    predicted = vectors @ maps[SMALL_POSITIONS.index(5)].T
    tolerance = 64 * rounding * np.abs(vectors).max() * max(np.abs(maps).max(), 1)
    return bool(np.abs(caller.turn(vectors, [5])[0, 0] - predicted).max() <= tolerance)


def _measure_turns(
    probe: Probe, maps: Floats, max_position: int, findings: list[Finding]
) -> Measured:
    """How the pairs turn at growing positions; the report contains the findings about the maps."""
    lengths = call_with_growing_lengths(probe, max_position)
    start, spectrum = _find_regular_spectrum(probe, lengths)
    report = Identification(head_dim=probe.caller.head_dim, findings=(*findings,))
    return Measured(probe, maps, lengths, spectrum, report, max_position, start)


def _find_regular_spectrum(probe: Probe, lengths: Lengths) -> tuple[int, Spectrum]:
    """The first position from which all positions turn at the same frequencies, and these."""
    top = lengths.longest_consistent
    z = lengths.answers[top]
    from_0 = find_spectrum(powers_of_two(top), z, probe.angle_errors(z))
    # a position that an offset makes negative may read the end of a table, or be clamped to 0
    for start in SMALL_POSITIONS[1:] if from_0.last_position < min(_REGULAR, top) else ():
        positions = [start + p for p in powers_of_two(top // 2)]
        z = probe(positions)
        spectrum = find_spectrum(positions, z, probe.angle_errors(z))
        if spectrum.last_position > _REGULAR:
            return start, spectrum
    return 0, from_0


def _compare_sides(probe: Probe, maps: Floats) -> tuple[float | None, list[Finding]]:
    """How keys are turned differently from queries, by the maps ``[outputs, P, out, in]``."""
    tolerance = 32 * probe.rounding
    if len(maps) < 2 or np.abs(maps[0] - maps[1]).max() <= tolerance * max(1.0, np.abs(maps).max()):
        return None, []
    queries, keys = (probe.arrangement.factors(side).mean(axis=0) for side in maps[:2])
    key_factor, finding = compare_queries_and_keys(queries, keys, tolerance)
    return key_factor, [finding]


def _add_rope(measured: Measured) -> None:
    """Add how members, queries and keys turn, and the Rope with its offset and frequencies."""
    probe, maps, spectrum = measured.probe, measured.maps, measured.spectrum
    factors = probe.arrangement.factors(maps[0])
    members = compare_members(probe, factors)
    key_factor, keys = _compare_sides(probe, maps)
    measured.add(*members, *keys)
    if (top := measured.lengths.irreproducible_at) is not None:
        measured.add(make_finding("remembers", top=top))
    report = explain(
        probe.arrangement, spectrum, np.abs(factors.mean(axis=0)), _turns_of_axes(probe, spectrum),
        rounding=probe.rounding, is_rotation=not members,
    )  # fmt: skip
    findings = (*measured.report.findings, *report.findings)
    measured.report = replace(report, findings=findings, key_factor=key_factor)


def _add_rounded_angles(measured: Measured) -> None:
    """Report rounded angles rather than rounded frequencies, if they explain more.

    The angle at position 1 is the frequency itself, so rounded angles also look like rounded
    frequencies.
    """
    report = measured.report
    dtype = next((name for name in COARSE if f"frequencies-in-{name}" in report.names()), None)
    if report.rope is None or dtype is None:
        return
    base = find_near_base(report.rope.inv_freq, dtype)
    rope = replace(report.rope, base=base, explicit_inv_freq=None)
    top = min(measured.max_position, 1 << 12)
    causes = () if base is None else find_causes(rope, measured.probe.caller, top)
    changes = [cause for cause in causes if cause.name != "factor"]  # already in the report
    if [change.name for change in changes] != [f"angles-in-{dtype}"]:
        return
    remaining = (
        finding for finding in report.findings if finding.name != f"frequencies-in-{dtype}"
    )
    findings = *remaining, *changes
    measured.add(rope=rope, base=base, known_law=True, findings=findings)


def _add_rule_or_limits(measured: Measured) -> None:
    """Add the rule that picks frequencies by the length of a call, or the end of a table."""
    if measured.lengths.changes_at is not None:
        add_rule(measured)
    elif measured.report.is_rotation and not measured.report.names() & ANGLES_ROUNDED:
        # where lengths matter, only few positions turn as predicted
        add_limits(measured)


def _turns_of_axes(probe: Probe, spectrum: Spectrum) -> Turns | None:
    """The turns by each axis alone, up to the spectrum's last position; None for a single axis."""
    n_axes = probe.caller.n_axes
    if n_axes == 1:
        return None
    positions = powers_of_two(max(spectrum.last_position, 1))
    return probe.turns(
        np.concatenate([np.outer(positions, axis) for axis in np.eye(n_axes, dtype=int)])
    )


def _add_error(measured: Measured) -> None:
    """Add the largest difference between the Rope and the maps at small positions."""
    rope, report, maps = measured.report.rope, measured.report, measured.maps[0]
    if rope is None:
        return
    # columns are rotated unit vectors; the factor applies to the columns of the slice
    factors = np.ones(report.head_dim)
    factors[rope.rotary_start :][: rope.rotary_dim] = report.attention_factor or 1.0
    regular = np.array(SMALL_POSITIONS) >= measured.start
    positions = np.array(SMALL_POSITIONS)[regular] + report.position_offset
    # each token has one head per unit vector: [P, in, out]
    vectors = np.repeat(np.eye(report.head_dim)[None], len(positions), axis=0)
    turned = factors[:, None] * rotate(vectors, every_axis_of(rope, positions), rope, gain=1.0)
    exact = turned.swapaxes(1, 2)
    measured.add(error=float(np.abs(maps[: len(regular)][regular] - exact).max()))


#: The steps that fill the report once the turns are known. The order matters: later steps need the
#: rope, its offset and its factor, and precision is measured up to the end of a table.
REPORTED: tuple[Callable[[Measured], None], ...] = (
    _add_rope,
    _add_rounded_angles,
    _add_rule_or_limits,
    _add_error,
    add_steps,
    add_precision,
)
