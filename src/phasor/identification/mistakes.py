"""Mistakes that are seen in the map itself: members of a pair, queries and keys, lost digits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from phasor.angles import cos_sin
from phasor.identification.blocks import Arrangement, Turns, read_turns
from phasor.identification.calling import ROUNDING
from phasor.identification.report import Finding, Identification
from phasor.identification.spectrum import Complex, Floats, Spectrum, rounded_angles
from phasor.pairings import by_pairing
from phasor.rope import Rope

#: Positions near which errors are measured.
PRECISION_POSITIONS = (1 << 10, 1 << 12, 1 << 15, 1 << 17, 1 << 20)
_ON_HALVES = Finding(
    "interleaved-rows-on-halves",
    "Rows of cos and sin for interleaved pairs (each angle twice in a row) are used "
    "on halves: the two members of a pair turn by different angles.",
)
_ON_INTERLEAVED = Finding(
    "half-rows-on-interleaved",
    "Rows of cos and sin for halves (all angles, then all again) are used on "
    "interleaved pairs: the two members of a pair turn by different angles.",
)


def coarse_table(values: Floats, rounding: float, dtype: str) -> tuple[float, list[Finding]]:
    """The rounding that cosines and sines show, and the coarser dtype that they are numbers of.

    Args:
        values: Cosines and sines, any shape.
        rounding: The largest relative error of rounding to ``dtype``.
        dtype: Of the values as they came.
    """
    different = np.unique(np.abs(values[(values != 0) & (np.abs(values) != 1)]))
    if len(different) < 16:
        return rounding, []
    # float32's bits but for the last 16, which bfloat16 lacks
    bits = different.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    rounded = {
        "bfloat16": bits.view(np.float32),
        "float16": different.astype(np.float16),
        "float32": different.astype(np.float32),
    }
    for name, kept in rounded.items():
        if ROUNDING[name] > rounding and np.array_equal(kept.astype(np.float64), different):
            says = (
                f"Cos and sin are held in {name}: every value of the {dtype} result is a {name} "
                f"number, so they are off by up to {ROUNDING[name] / 2:.1e}."
            )
            return ROUNDING[name], [Finding(f"table-in-{name}", says)]
    return rounding, []


def compare_members(
    turns: Turns, arrangement: Arrangement, rounding: float, n_axes: int
) -> list[Finding]:
    """What is wrong where the two members of a pair do not turn by the same angle.

    Args:
        turns: At small positions with equal coordinates; with several axes, at others behind them.
        arrangement: Where pairs are.
        rounding: Relative rounding error of the turns.
        n_axes: Coordinates of a position.
    """
    if turns.skew.max() <= 32 * rounding:
        return []
    pairs = arrangement.num_pairs
    local = arrangement.written - arrangement.rotary_start
    if arrangement.pairing and local.min() >= 0 and local.max() < arrangement.rotary_dim:
        # the rows of cos and sin that each coordinate is multiplied with
        row = np.empty((turns.rows.shape[1], arrangement.rotary_dim), dtype=np.complex128)
        row[:, local[0]], row[:, local[1]] = turns.rows
        halves = row[:, :pairs], row[:, pairs:]
        neighbours = row[:, ::2], row[:, 1::2]
        if _equal(*by_pairing(arrangement.pairing, half=neighbours, interleaved=halves), rounding):
            return [by_pairing(arrangement.pairing, half=_ON_HALVES, interleaved=_ON_INTERLEAVED)]
    worst = int(np.argmax(turns.skew))
    at = tuple(int(i) for i in arrangement.read[:, worst])
    if turns.reflected[worst]:
        count = int(turns.reflected.sum())
        some = f"{count} of {pairs} pairs, such as coordinates {at},"
        which = some if count > 1 else f"Coordinates {at}"
        says = f"{which} are reflected, not turned: one sign is wrong."
        return [Finding("reflection", says)]
    bad = int((turns.skew > 32 * rounding).sum())
    what = f"The two members of {bad} pairs turn by different angles, such as coordinates {at}"
    if n_axes > 1 and _equal(turns.rows[0, :6], turns.rows[1, :6], rounding):
        says = (
            f"{what}: they follow different axes. Equal coordinates hide it, so text is right and "
            "images are not."
        )
        return [Finding("members-on-different-axes", says)]
    return [Finding("members-differ", f"{what}.")]


def _equal(a: Complex, b: Complex, rounding: float) -> bool:
    return bool(a.shape == b.shape and np.abs(a - b).max() <= 32 * rounding * np.abs(a).max())


def compare_queries_and_keys(
    maps: Floats, arrangement: Arrangement, rounding: float
) -> tuple[float | None, list[Finding]]:
    """The factor on keys where it differs, and how keys are turned otherwise than queries.

    Args:
        maps: ``[outputs, P, out, in]``; keys' are the second.
        arrangement: Where pairs are.
        rounding: Relative rounding error of the maps.
    """
    room = 32 * rounding
    if len(maps) < 2 or np.abs(maps[0] - maps[1]).max() <= room * max(1.0, np.abs(maps).max()):
        return None, []
    q, k = (read_turns(arrangement.blocks(one)).z for one in maps[:2])
    sizes = np.median(np.abs(q)), np.median(np.abs(k))
    ratio = sizes[1] / sizes[0]
    if np.abs(k - ratio * q).max() <= room * max(1.0, ratio):
        says = (
            f"Queries are multiplied by {sizes[0]:.7g} and keys by {sizes[1]:.7g}: a softmax "
            "factor is folded into one of them."
        )
        return float(sizes[1]), [Finding("factor-on-one-side", says)]
    if np.abs(k - np.conj(q)).max() <= room:
        says = "Keys turn against queries: scores depend on the sum of positions."
        return None, [Finding("keys-turn-backwards", says)]
    worst = int(np.argmax(np.abs(q - k).max(axis=0)))
    says = (
        f"Queries and keys are turned differently, pair {worst} the most: scores do not depend on "
        "distance alone."
    )
    return None, [Finding("queries-and-keys-differ", says)]


def exact_turns(rope: Rope, positions: NDArray[np.int64], offset: float) -> Complex:
    """``exp(i angle)`` at positions plus an offset, on every axis: ``[P, pairs]``.

    A Rope that is wider than what was measured has more pairs there, which do not turn.
    """
    at = positions + int(offset) if offset.is_integer() else positions + offset
    n = rope.axes.n_axes
    cos, sin = cos_sin(rope, at if n == 1 else np.stack([at] * n, axis=-1))
    return cos + 1j * sin


def with_precision(
    report: Identification,
    spectrum: Spectrum,
    probe: Callable[[Sequence[int]], Complex],
    *,
    rounding: float,
    end: int,
) -> Identification:
    """The report with errors at growing positions below ``end``, and whether angles are float32."""
    if report.rope is None or not report.attention_factor:
        return report
    found: list[tuple[int, float]] = []
    rope = report.rope
    drifts, like_float32 = False, True
    for near in PRECISION_POSITIONS:
        if near + 12 >= end:
            break
        # at powers of two, where frequencies are read, the rounding of an angle is not seen
        at = near - np.array([1, 2, 5, 9, 11])
        z = probe(at.tolist()) / report.attention_factor
        exact = exact_turns(rope, at, report.position_offset)[:, : z.shape[1]]
        found.append((near, float(np.abs(z - exact).max())))
        drift = np.abs(np.angle(z * np.conj(spectrum.at(at.astype(np.float64)))))
        angles = at[:, None] * np.abs(spectrum.inv_freq)
        known = at[:, None] * spectrum.uncertainty + spectrum.phase_uncertainty
        room = 2 * (known + rounded_angles(z, rounding) + 2.0**-51 * angles)
        drifts |= bool(np.any(drift > room))
        like_float32 &= bool(np.all(drift <= room + 2.0**-20 * angles))
    report = replace(report, precision=tuple(found))
    rounded = any(name.startswith("positions-in") for name in report.names())
    if not (drifts and like_float32) or rounded:
        return report
    near, error = found[-1]
    threshold = next((p for p, e in found if e > 1e-4), near)
    about = f" (above 1e-4 from about {threshold})" if error > 1e-4 else ""
    says = (
        "Angles are computed in float32: the error grows with the position, and is "
        f"{error:.1e} near {near}{about}."
    )
    # an angle that is a float32 number makes its frequency look like one
    others = [one for one in report.findings if one.name != "frequencies-in-float32"]
    finding = Finding("angles-in-float32", says)
    return replace(report, findings=(*others, finding))
