"""`identify`: which rotation does this function do?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from phasor._checks import whole
from phasor.errors import TensorError
from phasor.identification.arrays import ROUNDING
from phasor.identification.axes import drivers, unequal_positions
from phasor.identification.calling import Caller, RefusedError, find_caller
from phasor.identification.limits import Climb, climb, find_limits
from phasor.identification.match import Evidence, conclude
from phasor.identification.reading import Arrangement, arrange, find_blocks, read_turns
from phasor.identification.report import Finding, Identification
from phasor.identification.rules import find_rule
from phasor.identification.slips import member_findings, precision_findings, query_key_findings
from phasor.identification.spectrum import find_spectrum, rounded_angles
from phasor.numpy import matrix

_SMALL = (0, 1, 2, 3, 5, 8)
Floats = NDArray[np.float64]


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
    """Which rotation ``function`` does: pairing, slice, sign, frequencies, law, limits, slips.

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
        The report; ``report.rope`` is the Rope that does the same, ``report.explain()`` a note.

    Raises:
        TensorError: If no way of calling ``function`` works.
        SpecError: For an argument out of bounds.
        BackendError: If the arrays asked for are not installed.

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
    called = f"{caller.arrays} arrays {caller.layout} in {dtype} as ({caller.takes})"
    try:
        return replace(_look(caller, min(longest, caller.longest // 2)), called=called)
    except RefusedError as error:
        raise TensorError(
            f"function must turn positions 0 to {max(_SMALL)}, whenever it is asked to, and says "
            f"of some of them: {error}"
        ) from error


def _look(caller: Caller, longest: int) -> Identification:
    head_dim = caller.head_dim
    maps = _maps(caller)
    rounding, coarse = table_dtype(maps, caller.rounding, caller.out_dtype)
    findings = [] if coarse is None else [coarse]
    written = Finding(
        name="inputs-written", says="It writes its inputs: keep a copy of what goes in."
    )
    blank = Identification(head_dim=head_dim, called=None, linear=True)
    if not _is_linear(caller, maps[0], rounding):
        return replace(
            blank,
            linear=False,
            findings=tuple([written] if caller.wrote else []),
            why_no_rope="it is not linear in its vectors",
        )
    blocks = find_blocks(np.concatenate(list(maps)), rounding)
    arrangement = arrange(blocks, head_dim)
    findings += [written] if caller.wrote else []
    if arrangement is None:
        wide = [block.read for block in blocks if len(block.read) > 2]
        why = (
            f"it mixes {len(wide[0])} coordinates with each other: {list(wide[0][:8])}"
            if wide
            else "nothing turns at the positions tried"
        )
        return replace(blank, findings=tuple(findings), why_no_rope=why)
    return _turning(caller, longest, maps, arrangement, rounding, findings)


def _maps(caller: Caller) -> Floats:
    """The linear maps ``[outputs, P, out, in]`` at small positions."""
    eye = np.eye(caller.head_dim)
    positions: Sequence[Any] = _SMALL
    if caller.n_axes > 1:
        positions = [(p,) * caller.n_axes for p in _SMALL] + unequal_positions(caller.n_axes)
    maps = np.swapaxes(caller.turn(eye, positions), 2, 3)
    if not np.isfinite(maps).all():
        raise RefusedError("it gives numbers that are not finite")
    return maps


def _is_linear(caller: Caller, maps: Floats, rounding: float) -> bool:
    rng = np.random.default_rng(1)
    # whole numbers, which every dtype holds exactly
    vectors = rng.integers(-7, 8, (3, caller.head_dim)).astype(np.float64)
    vectors[2] = 0
    at: list[Any] = [5 if caller.n_axes == 1 else (5,) * caller.n_axes]
    expected = vectors @ maps[_SMALL.index(5)].T
    room = 64 * rounding * np.abs(vectors).max() * max(np.abs(maps).max(), 1)
    return bool(np.abs(caller.turn(vectors, at)[0, 0] - expected).max() <= room)


def table_dtype(maps: Floats, rounding: float, dtype: str) -> tuple[float, Finding | None]:
    """The rounding that the values show, and the coarse dtype behind it if it is not theirs."""
    values = np.unique(np.abs(maps[(maps != 0) & (np.abs(maps) != 1)]))
    if len(values) < 16:
        return rounding, None
    kept: dict[str, Callable[[Floats], Floats]] = {
        "bfloat16": _as_bfloat16,
        "float16": lambda v: v.astype(np.float16).astype(np.float64),
        "float32": lambda v: v.astype(np.float32).astype(np.float64),
    }
    for name, rounded in kept.items():
        if ROUNDING[name] > rounding and np.array_equal(rounded(values), values):
            return ROUNDING[name], Finding(
                name=f"table-in-{name}",
                says=f"Cos and sin are held in {name}: every value of the {dtype} result is a "
                f"{name} number, so they are off by up to {ROUNDING[name] / 2:.1e}.",
            )
    return rounding, None


def _as_bfloat16(values: Floats) -> Floats:
    bits = values.astype(np.float32).view(np.uint32)
    return (bits & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)


@dataclass(frozen=True)
class _Prober:
    """One vector per call shows the turn of every pair."""

    caller: Caller
    arrangement: Arrangement
    output: int = 0

    def __call__(self, positions: Sequence[int]) -> NDArray[np.complex128]:
        n = self.caller.n_axes
        return self.at(list(positions) if n == 1 else [(p,) * n for p in positions])

    def at(self, positions: Sequence[Any]) -> NDArray[np.complex128]:
        """At positions with a coordinate for every axis."""
        vector = np.zeros((1, self.caller.head_dim))
        vector[0, self.arrangement.read[0]] = 1
        turned = self.caller.turn(vector, positions)[self.output, :, 0]
        first, second = self.arrangement.written
        z = np.empty((len(turned), len(first)), dtype=np.complex128)
        z.real, z.imag = turned[:, first], turned[:, second]
        return z


def _turning(
    caller: Caller,
    longest: int,
    maps: Floats,
    arrangement: Arrangement,
    rounding: float,
    findings: list[Finding],
) -> Identification:
    probe = _Prober(caller, arrangement)
    climbed = climb(probe, longest, rounding)
    turns = read_turns(arrangement.blocks(maps[0]))
    places = sorted(climbed.seen)
    z = np.array([climbed.seen[p] for p in places])
    spectrum = find_spectrum(places, z, rounded_angles(z, rounding))
    sizes = np.abs(turns.z)
    gain = float(np.median(sizes[: len(_SMALL)]))
    members = member_findings(turns, arrangement, rounding, caller.n_axes)
    findings += members
    findings += query_key_findings(maps, arrangement, rounding)
    if climbed.remembers is not None:
        findings.append(
            Finding(
                name="remembers",
                says="The result depends on earlier calls, or on chance: positions up to "
                f"{climbed.remembers} are turned otherwise when they are asked for again.",
            )
        )
    keys = None
    if any(finding.name == "factor-on-one-side" for finding in findings):
        keys = float(np.median(np.abs(read_turns(arrangement.blocks(maps[1])).z)))
    evidence = Evidence(
        head_dim=caller.head_dim,
        n_axes=caller.n_axes,
        arrangement=arrangement,
        spectrum=spectrum,
        drivers=drivers(probe.at, caller.n_axes, spectrum, rounding),
        gain=gain,
        sizes=sizes,
        rounding=rounding,
        is_rotation=not members,
    )
    report = conclude(evidence)
    report = replace(report, findings=(*findings, *report.findings), key_factor=keys)
    if climbed.changes_at is not None:
        report = _with_rule(report, climbed, rounding)
    elif report.is_rotation:
        limits = find_limits(probe, spectrum, gain=gain or 1.0, rounding=rounding, longest=longest)
        report = replace(
            report,
            table_end=limits.table_end,
            beyond=limits.beyond,
            negative=limits.negative,
            findings=(*report.findings, *limits.findings),
        )
    report = _with_error(caller, maps, report)
    top = min(longest, climbed.changes_at or longest, report.table_end or longest)
    return precision_findings(report, evidence, probe, top)


def _with_rule(report: Identification, climbed: Climb, rounding: float) -> Identification:
    changes = cast(int, climbed.changes_at)
    says = f"The result depends on the length of the call: it changes when one reaches {changes}."
    rule, sentence = find_rule(report, climbed, rounding) or (None, "")
    found = Finding(name="depends-on-length", says=f"{says} {sentence}".rstrip())
    return replace(report, rule=rule, findings=(*report.findings, found))


def _with_error(caller: Caller, maps: Floats, report: Identification) -> Identification:
    """How far the Rope is from the maps read."""
    if report.rope is None:
        return report
    rope, gain = report.rope, report.attention_factor or 1.0
    inside = np.ones(caller.head_dim)
    inside[rope.rotary_start : rope.rotary_start + rope.rotary_dim] = gain
    worst = 0.0
    for i, p in enumerate(_SMALL):
        at = p + report.position_offset
        place: ArrayLike = at if rope.axes.n_axes == 1 else [at] * rope.axes.n_axes
        worst = max(worst, float(np.abs(maps[0, i] - inside * matrix(place, rope)).max()))
    return replace(report, error=worst)
