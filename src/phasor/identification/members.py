"""The fifth question: do both members of a pair, all heads, and queries and keys turn alike?"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import NamedTuple

import numpy as np

from phasor.identification.probes import Probe
from phasor.identification.report import Changes, Finding, make_finding
from phasor.identification.spectrum import Complex, Floats
from phasor.identification.turns import Sample, angle_errors, arrangement_of, rows_of
from phasor.pairings import PAIRINGS, Pairing, by_pairing
from phasor.rope import Rope


class Signs(NamedTuple):
    """The signs of the products of a pair with cos and sin.

    ``y0 = x0 cos + a x1 sin`` and ``y1 = b x1 cos + c x0 sin``; a rotation by a positive angle has
    ``a = -1``, ``b = 1`` and ``c = 1``.
    """

    name: str  # the name of the finding; empty for a rotation
    first_sin: int  # a
    second_cos: int  # b
    second_sin: int  # c


#: The signs that programs use: those of rotations first, then those with one wrong sign.
SIGNS = (
    Signs("", -1, 1, 1),
    Signs("one-sign", -1, 1, -1),
    Signs("one-sign", 1, 1, 1),
    Signs("reflection", 1, -1, 1),
    Signs("reflection", -1, -1, -1),
)


class Mixing(NamedTuple):
    """One way in which a program fails to turn both members of a pair by one angle."""

    pairing: Pairing  # which coordinates are added to each other
    row_pairing: Pairing  # which coordinates have the same cos and sin
    signs: Signs

    def changes(self, listed: str) -> Changes:
        """The findings about pairs that are mixed in this way."""
        signs, changes = self.signs, list[Finding]()
        if self.row_pairing != self.pairing:
            pairs = by_pairing(self.pairing, half="halves", interleaved="interleaved")
            changes.append(make_finding(f"{self.row_pairing}-rows-on-{pairs}"))
        if signs.name:
            how = "subtract" if signs.first_sin < 0 else "add"
            changes.append(make_finding(signs.name, how=how, which=listed))
        return (*changes,)


#: All such ways, in the order in which they are tried.
MIXINGS = [
    Mixing(pairing, row_pairing, signs)
    for pairing, row_pairing, signs in product(PAIRINGS, PAIRINGS, SIGNS)
    if pairing != row_pairing or signs.name
]


def compare_members(probe: Probe, factors: Complex) -> Changes:
    """The mistake that turns the members of a pair by different angles; empty if there is none.

    ``factors`` ``[2, P, num_pairs]`` multiply the two members at small positions, first with equal
    coordinates and then with unequal ones.
    """
    arrangement, tolerance = probe.arrangement, 32 * probe.rounding
    size = np.maximum(np.maximum(np.abs(factors.real), np.abs(factors.imag)).max(axis=0), 1e-30)
    skew = (np.abs(factors[0] - factors[1]) / size).max(axis=0)  # [2, P, pairs] to [pairs]
    is_skewed = skew > tolerance
    if not is_skewed.any():
        return ()

    def are_equal(a: Complex, b: Complex) -> bool:
        return bool(a.shape == b.shape and np.abs(a - b).max() <= tolerance * np.abs(a).max())

    pairs, worst = arrangement.num_pairs, int(np.argmax(skew))
    coordinates = tuple(arrangement.read[:, worst].tolist())
    listed, count = f"Coordinates {coordinates} are", int(is_skewed.sum())
    if count > 1:
        listed = f"{count} of {pairs} pairs, such as coordinates {coordinates}, are"
    layout, (first_factors, second_factors) = arrangement.layout, factors
    for mixing in MIXINGS:
        if mixing.pairing != layout.pairing:
            continue
        signs, shares_rows = mixing.signs, mixing.row_pairing == mixing.pairing
        # the rows of cos and sin that must have multiplied each member, if these are the signs
        first = first_factors.real - 1j * signs.first_sin * first_factors.imag
        second = (
            signs.second_cos * second_factors.real + 1j * signs.second_sin * second_factors.imag
        )
        if shares_rows:
            first, second = first[:, is_skewed], second[:, is_skewed]
        # most pairs turn in one direction, counter-clockwise if a sign is wrong
        directions = [float(np.sign(member.imag).sum()) for member in (first, second)]
        if directions[0] * directions[1] < 0 or (signs.name and directions[0] < 0):
            continue
        if not shares_rows:
            if not arrangement.is_named:
                continue
            rows = np.empty((len(first), 2 * pairs), dtype=np.complex128)  # one per coordinate
            rows[:, arrangement.written - layout.rotary_start] = np.stack((first, second), axis=1)
            first, second = by_pairing(
                mixing.row_pairing,
                half=(rows[:, :pairs], rows[:, pairs:]),
                interleaved=(rows[:, ::2], rows[:, 1::2]),
            )
        if are_equal(first, second):
            return mixing.changes(listed)
    names = "members-differ", "members-on-different-axes"
    follow_axes = probe.caller.n_axes > 1 and are_equal(factors[0, :6], factors[1, :6])
    return (make_finding(names[follow_axes], count=count, coordinates=coordinates),)


def compare_queries_and_keys(
    queries: Complex, keys: Complex, tolerance: float
) -> tuple[float | None, Finding]:
    """How keys are turned differently from queries, and their factor if nothing else differs.

    Both arguments are the factors on pairs, ``[P, num_pairs]``, with an error up to ``tolerance``.
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
    """Findings about members that use cos and sin of different pairs, or the same sign for sin."""
    if sample.is_table:
        return ()
    is_kept, rows = sample.is_kept(), rope.attention_factor * rows_of(rope, sample.positions)
    unsure = angle_errors(sample.positions, rope.inv_freq)
    members_by_pairing = {
        pairing: arrangement_of(replace(rope, pairing=pairing, pairing_out=None)).read
        for pairing in PAIRINGS
    }
    for mixing in MIXINGS:
        signs, members = mixing.signs, members_by_pairing[mixing.pairing]
        row_by_coordinate = np.empty(rope.head_dim, np.intp)
        row_by_coordinate[members_by_pairing[mixing.row_pairing]] = np.arange(rope.num_pairs)
        fits = is_kept.copy()
        ways = ((1, signs.first_sin), (signs.second_cos, signs.second_sin))
        for (cos_sign, sin_sign), member, partner in zip(ways, members, members[::-1], strict=True):
            row = rows[:, None, row_by_coordinate[member]]
            x, partner_x, y = sample.x[..., member], sample.x[..., partner], sample.y[..., member]
            products = np.abs(x * row.real) + np.abs(partner_x * row.imag)
            slack = np.hypot(x, partner_x) * (unsure[:, None, row_by_coordinate[member]] + 2.0**-22)
            errors = np.abs(y - cos_sign * x * row.real - sin_sign * partner_x * row.imag)
            fits[..., member] = errors <= sample.bounds(products, y) + slack
        if fits.all():
            return mixing.changes(f"{rope.num_pairs} of {rope.num_pairs} pairs are")
    return ()


def name_norms(sizes: Floats, tolerance: float) -> Finding:
    """The finding that the lengths of pairs, ``[T, num_pairs]``, change by several factors."""
    text = "The length of a vector changes with its position, as in xPos"
    if float(np.ptp(sizes, axis=0).max()) <= tolerance:
        span = f"from {sizes.min():.6g} to {sizes.max():.6g}"
        text = f"Pairs are multiplied by different factors, {span}"
    return make_finding("norm-varies", how=text)
