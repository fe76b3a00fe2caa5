"""The fifth question: whether both members of a pair, all heads, queries and keys turn alike."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import NamedTuple

import numpy as np

from phasor.identification.probes import Probe
from phasor.identification.report import Changes, Finding, make_finding
from phasor.identification.spectrum import Complex, Floats
from phasor.identification.turns import Sample, angle_errors, arrangement_of, rows_of
from phasor.pairings import PAIRINGS, by_pairing
from phasor.rope import Rope


class Signs(NamedTuple):
    """Which of the four products of a pair with cos and sin are added, and which subtracted.

    ``y0 = x0 cos + a x1 sin`` and ``y1 = b x1 cos + c x0 sin``; of a rotation by a positive angle
    ``a`` is -1, ``b`` and ``c`` are 1.
    """

    name: str  # of the finding; empty of a rotation
    in_first: int  # a
    of_cos: int  # b
    in_second: int  # c

    def finding(self, which: str) -> Changes:
        """The finding about such pairs; none for a rotation."""
        how = "subtract" if self.in_first < 0 else "add"
        return (make_finding(self.name, how=how, which=which),) if self.name else ()


#: The signs in use: right ones first, then one that is wrong.
SIGNS = (
    Signs("", -1, 1, 1),
    Signs("one-sign", -1, 1, -1),
    Signs("one-sign", 1, 1, 1),
    Signs("reflection", 1, -1, 1),
    Signs("reflection", -1, -1, -1),
)


def compare_members(probe: Probe, factors: Complex) -> list[Finding]:
    """The mistake, if the two members of a pair do not turn by the same angle."""
    # ``factors`` are at small positions with equal coordinates, and then at others
    arrangement, tolerance = probe.arrangement, 32 * probe.rounding
    size = np.maximum(np.maximum(np.abs(factors.real), np.abs(factors.imag)).max(axis=0), 1e-30)
    skew = (np.abs(factors[0] - factors[1]) / size).max(axis=0)  # [2, P, pairs] to [pairs]
    if not (skew > tolerance).any():
        return []

    def are_equal(a: Complex, b: Complex) -> bool:
        return bool(a.shape == b.shape and np.abs(a - b).max() <= tolerance * np.abs(a).max())

    pairs = arrangement.num_pairs
    if arrangement.is_named:
        # what each coordinate is multiplied by, which a row of cos and sin holds: [P, rotary_dim]
        rows = np.empty((factors.shape[1], 2 * pairs), dtype=np.complex128)
        rows[:, arrangement.written - arrangement.layout.rotary_start] = factors.swapaxes(0, 1)
        # if rows for the other pairing were used, its pairs have equal multipliers
        name, *members = by_pairing(
            arrangement.layout.pairing,
            half=("interleaved-rows-on-halves", rows[:, ::2], rows[:, 1::2]),
            interleaved=("half-rows-on-interleaved", rows[:, :pairs], rows[:, pairs:]),
        )
        if are_equal(*members):
            return [make_finding(name)]
    worst = int(np.argmax(skew))
    coordinates = tuple(arrangement.read[:, worst].tolist())
    which, skewed = f"Coordinates {coordinates} are", skew > tolerance
    if (count := int(skewed.sum())) > 1:
        which = f"{count} of {pairs} pairs, such as coordinates {coordinates}, are"
    by_first, by_second = factors[..., skewed]
    for signs in SIGNS[1:]:
        # by the first member exp(i angle) or its conjugate, and the same by the second
        turned = by_first.real - 1j * signs.in_first * by_first.imag
        expected = signs.of_cos * turned.real + 1j * signs.in_second * turned.imag
        is_counted = np.sign(turned.imag).sum() >= 0  # most pairs turn counter-clockwise
        if is_counted and are_equal(by_second, expected):
            return [*signs.finding(which)]
    names = "members-differ", "members-on-different-axes"
    follow_axes = probe.caller.n_axes > 1 and are_equal(factors[0, :6], factors[1, :6])
    return [make_finding(names[follow_axes], count=count, coordinates=coordinates)]


def compare_queries_and_keys(
    queries: Complex, keys: Complex, tolerance: float
) -> tuple[float | None, Finding]:
    """How keys are turned otherwise than queries, and their factor if that is all.

    Both are what pairs are multiplied by, ``[P, num_pairs]``, and may be off by the tolerance.
    """
    sizes = [float(np.median(np.abs(z))) for z in (queries, keys)]
    ratio = sizes[1] / sizes[0]
    if np.abs(keys - ratio * queries).max() <= tolerance * max(1.0, ratio):
        return sizes[1], make_finding("factor-on-one-side", queries=sizes[0], keys=sizes[1])
    if np.abs(keys - np.conj(queries)).max() <= tolerance:
        return None, make_finding("keys-turn-backwards")
    worst = int(np.argmax(np.abs(queries - keys).max(axis=0)))
    return None, make_finding("queries-and-keys-differ", pair=worst)


def find_mixed_members(rope: Rope, sample: Sample) -> Changes:
    """Members of a pair with cos and sin of different pairs, or with the same sign of sin."""
    if sample.is_table:
        return ()
    kept, rows = sample.is_kept(), rope.attention_factor * rows_of(rope, sample.positions)
    unsure = angle_errors(sample.positions, rope.inv_freq)
    readings = {one: arrangement_of(replace(rope, pairing=one, pairing_out=None)).read
                for one in PAIRINGS}  # fmt: skip
    for (pairing, members), (other, read) in product(readings.items(), repeat=2):
        pair_of = np.empty(rope.head_dim, np.intp)
        pair_of[read] = np.arange(rope.num_pairs)
        rows_name = f"{other}-rows-on-{'halves' if pairing == 'half' else pairing}"
        for signs in SIGNS:
            if pairing == other and not signs.name:
                continue
            fits = kept.copy()
            ways = ((1, signs.in_first), (signs.of_cos, signs.in_second))
            for (of_cos, of_sin), to, beside in zip(ways, members, members[::-1], strict=True):
                one, x, by = rows[:, None, pair_of[to]], sample.x[..., to], sample.x[..., beside]
                products = np.abs(x * one.real) + np.abs(by * one.imag)
                slack = np.hypot(x, by) * (unsure[:, None, pair_of[to]] + 2.0**-22)
                y = sample.y[..., to]
                off = np.abs(y - of_cos * x * one.real - of_sin * by * one.imag)
                fits[..., to] = off <= sample.bounds(products, y) + slack
            if fits.all():
                names = () if pairing == other else (make_finding(rows_name),)
                which = f"{rope.num_pairs} of {rope.num_pairs} pairs are"
                return *names, *signs.finding(which)
    return ()


def name_norms(sizes: Floats, tolerance: float) -> Finding:
    """That lengths of pairs ``[T, num_pairs]`` are multiplied by more than one factor."""
    how = "The length of a vector changes with its position, as in xPos"
    if float(np.ptp(sizes, axis=0).max()) <= tolerance:
        between = f"from {sizes.min():.6g} to {sizes.max():.6g}"
        how = f"Pairs are multiplied by different factors, {between}"
    return make_finding("norm-varies", how=how)
