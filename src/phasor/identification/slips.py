"""Slips that are seen in the map itself: mismatched members, queries and keys, lost digits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from phasor.angles import cos_sin
from phasor.identification.match import Evidence
from phasor.identification.reading import Arrangement, Turns, read_turns
from phasor.identification.report import Finding, Identification
from phasor.identification.spectrum import rounded_angles
from phasor.pairings import by_pairing

Floats = NDArray[np.float64]
_ON_HALVES = Finding(
    name="interleaved-rows-on-halves",
    says="Rows of cos and sin for interleaved pairs (each angle twice in a row) are used "
    "on halves: the two members of a pair turn by different angles.",
)
_ON_INTERLEAVED = Finding(
    name="half-rows-on-interleaved",
    says="Rows of cos and sin for halves (all angles, then all again) are used on "
    "interleaved pairs: the two members of a pair turn by different angles.",
)
_NEAR = (1 << 10, 1 << 12, 1 << 15, 1 << 17, 1 << 20)


def member_findings(
    turns: Turns, arrangement: Arrangement, rounding: float, n_axes: int
) -> list[Finding]:
    """What is wrong where the two members of a pair do not turn by the same angle."""
    if turns.skew.max() <= 32 * rounding:
        return []
    worst = int(np.argmax(turns.skew))
    at = tuple(int(i) for i in arrangement.read[:, worst])
    # the rows of cos and sin that each coordinate is multiplied with
    row = np.empty((turns.rows.shape[1], arrangement.rotary_dim), dtype=np.complex128)
    local = arrangement.written - arrangement.rotary_start
    inside = (local >= 0).all() and (local < arrangement.rotary_dim).all()
    if inside:
        row[:, local[0]], row[:, local[1]] = turns.rows
    pairs = arrangement.num_pairs
    if inside and arrangement.pairing is not None:
        halves = row[:, :pairs], row[:, pairs:]
        neighbours = row[:, ::2], row[:, 1::2]
        others_rows = by_pairing(arrangement.pairing, half=neighbours, interleaved=halves)
        if _equal(*others_rows, rounding):
            return [by_pairing(arrangement.pairing, half=_ON_HALVES, interleaved=_ON_INTERLEAVED)]
    if turns.reflected[worst]:
        count = int(turns.reflected.sum())
        which = f"{count} of {pairs} pairs, such as coordinates {at}," if count > 1 else (
            f"Coordinates {at}"
        )  # fmt: skip
        return [Finding(
            name="reflection", says=f"{which} are reflected, not turned: one sign is wrong.",
        )]  # fmt: skip
    bad = int((turns.skew > 32 * rounding).sum())
    what = f"The two members of {bad} pairs turn by different angles, such as coordinates {at}"
    if n_axes > 1 and _equal(turns.rows[0, :6], turns.rows[1, :6], rounding):
        return [Finding(
            name="members-on-different-axes",
            says=f"{what}: they follow different axes. Equal coordinates hide it, so text is "
            "right and images are not.",
        )]  # fmt: skip
    return [Finding(name="members-differ", says=f"{what}.")]


def _equal(a: NDArray[np.complex128], b: NDArray[np.complex128], rounding: float) -> bool:
    return bool(a.shape == b.shape and np.abs(a - b).max() <= 32 * rounding * np.abs(a).max())


def query_key_findings(maps: Floats, arrangement: Arrangement, rounding: float) -> list[Finding]:
    """How keys are turned otherwise than queries."""
    if len(maps) < 2:
        return []
    q, k = (read_turns(arrangement.blocks(one)).z for one in maps[:2])
    room = 32 * rounding
    if np.abs(maps[0] - maps[1]).max() <= room * max(1.0, np.abs(maps).max()):
        return []
    ratio = np.median(np.abs(k)) / np.median(np.abs(q))
    if np.abs(k - ratio * q).max() <= room * max(1.0, ratio):
        return [Finding(
            name="factor-on-one-side",
            says=f"Queries are multiplied by {np.median(np.abs(q)):.7g} and keys by "
            f"{np.median(np.abs(k)):.7g}: a softmax factor is folded into one of them.",
        )]  # fmt: skip
    if np.abs(k - np.conj(q)).max() <= room:
        return [Finding(
            name="keys-turn-backwards",
            says="Keys turn against queries: scores depend on the sum of positions.",
        )]  # fmt: skip
    worst = int(np.argmax(np.abs(q - k).max(axis=0)))
    return [Finding(
        name="queries-and-keys-differ",
        says=f"Queries and keys are turned differently, pair {worst} the most: scores do not "
        "depend on distance alone.",
    )]  # fmt: skip


def precision_findings(
    report: Identification,
    evidence: Evidence,
    probe: Callable[[Sequence[int]], NDArray[np.complex128]],
    end: int,
) -> Identification:
    """The report with errors at growing positions, and which digits cause them."""
    if report.rope is None or not report.attention_factor:
        return report
    found: list[tuple[int, float]] = []
    rope, spectrum = report.rope, evidence.spectrum
    drifts, like_float32 = False, True
    for near in _NEAR:
        if near + 12 >= end:
            break
        at = near - np.array([1, 2, 5, 9, 11])
        z = probe(at.tolist()) / report.attention_factor
        shifted = at + report.position_offset
        places = shifted if rope.axes.n_axes == 1 else np.stack([shifted] * rope.axes.n_axes, -1)
        whole = places.astype(np.int64)
        cos, sin = cos_sin(rope, whole if np.array_equal(whole, places) else places)
        # a Rope wider than what was seen adds pairs that stand still
        found.append((near, float(np.abs(z - (cos + 1j * sin)[:, : z.shape[1]]).max())))
        # at powers of two, where frequencies are read, the rounding of an angle is not seen
        drift = np.abs(np.angle(z * np.conj(spectrum.at(at.astype(np.float64)))))
        turned = at[:, None] * np.abs(spectrum.inv_freq)
        known = at[:, None] * spectrum.uncertainty + spectrum.phase_uncertainty
        exact = 2 * (known + rounded_angles(z, evidence.rounding) + 2.0**-51 * turned)
        drifts |= bool(np.any(drift > exact))
        like_float32 &= bool(np.all(drift <= exact + 2.0**-20 * turned))
    report = replace(report, precision=tuple(found))
    if not (drifts and like_float32) or "positions-in" in str(report.names()):
        return report
    near, error = found[-1]
    threshold = next((p for p, e in found if e > 1e-4), near)
    finding = Finding(
        name="angles-in-float32",
        says="Angles are computed in float32: the error grows with the position, and is "
        f"{error:.1e} near {near}"
        + (f" (above 1e-4 from about {threshold})." if error > 1e-4 else "."),
    )
    # an angle that is a float32 number makes its frequency look like one
    others = [one for one in report.findings if one.name != "frequencies-in-float32"]
    return replace(report, findings=(*others, finding))
