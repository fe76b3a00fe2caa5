"""Do two descriptions agree? If not, where do they part?"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from phasor._checks import number, whole
from phasor.angles import cos_sin
from phasor.rope import Rope, real_inv_freq


@dataclass(frozen=True, kw_only=True)
class Parting:
    """Where the angles of one pair part.

    Attributes:
        pair: Index of the pair.
        position: The first position at which they are more than the tolerance apart.
        error: How far apart the two unit vectors are there.
        inv_freq: The pair's frequency in the first and in the second description.
    """

    pair: int
    position: int
    error: float
    inv_freq: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How two Ropes differ within a context.

    Attributes:
        fields: Layout fields that differ, with both values: these part at once.
        earliest: The pair that parts at the lowest position, if any does.
        first_pair: The lowest pair that parts anywhere in the context.
        pairs: How many pairs part within the context.
        attention_factors: Both attention factors, if they differ.
        softmax_factors: Both softmax factors, if they differ.
        logit_factors: Both logit factors, if they differ.
    """

    fields: dict[str, tuple[object, object]]
    earliest: Parting | None = None
    first_pair: Parting | None = None
    pairs: int = 0
    attention_factors: tuple[float, float] | None = None
    softmax_factors: tuple[float, float] | None = None
    logit_factors: tuple[float, float] | None = None

    def __bool__(self) -> bool:
        return bool(self.fields or self.earliest or self.attention_factors or self.softmax_factors)


def diff(a: Rope, b: Rope, *, context: int = 1 << 20, tolerance: float = 1e-6) -> Difference:
    """How ``a`` and ``b`` differ; false if they agree at every position within the context.

    Two pairs part at the first position where ``exp(i p f_a)`` and ``exp(i p f_b)`` are more than
    ``tolerance`` apart, which is found from the frequencies' real difference, not by search.

    Args:
        a: With a static law.
        b: With a static law.
        context: Positions 0 to ``context - 1`` count.
        tolerance: How far two unit vectors, or two factors relatively, may be apart; below 2.

    Raises:
        SpecError: If a scaling is an unresolved rule, or an argument is out of bounds.

    >>> from phasor.scaling import Linear, NTK
    >>> a = Rope(head_dim=64, pairing="half", scaling=Linear(factor=2.0))
    >>> b = Rope(head_dim=64, pairing="half", scaling=NTK(factor=2.0))
    >>> found = diff(a, b)
    >>> found.first_pair.pair, found.first_pair.position, found.pairs
    (0, 1, 31)
    """
    whole("context", context, least=1)
    number("tolerance", tolerance, above=0, most=2)
    layouts = zip(_layout(a).items(), _layout(b).values(), strict=True)
    fields = {name: (one, two) for (name, one), two in layouts if one != two}
    partings: list[Parting] = []
    if a.num_pairs == b.num_pairs:
        if a.axes.n_axes == b.axes.n_axes and _driven(a) == _driven(b):
            fields.pop("axes", None)  # sections may be said in several ways
        partings = _partings(a, b, context, tolerance)
    return Difference(
        fields=fields,
        earliest=min(partings, key=lambda parting: parting.position, default=None),
        first_pair=partings[0] if partings else None,
        pairs=len(partings),
        attention_factors=_apart(a.attention_factor, b.attention_factor, tolerance),
        softmax_factors=_apart(a.softmax_factor, b.softmax_factor, tolerance),
        logit_factors=_apart(a.logit_factor, b.logit_factor, tolerance),
    )


def _layout(rope: Rope) -> dict[str, object]:
    return {
        "head_dim": rope.head_dim,
        "pairing": rope.pairing,
        "rotary_dim": rope.rotary_dim,
        "rotary_start": rope.rotary_start,
        "direction": rope.direction,
        "pairing_out": rope.output_pairing,
        "axes": rope.axes,
    }


def _driven(rope: Rope) -> tuple[tuple[int, ...], ...]:
    return rope.axes.axis_of_pair(rope.num_pairs), rope.axes.spectra(rope.num_pairs)


def _apart(a: float, b: float, tolerance: float) -> tuple[float, float] | None:
    return (a, b) if abs(a - b) > tolerance * max(abs(a), abs(b)) else None


def _partings(a: Rope, b: Rope, context: int, tolerance: float) -> list[Parting]:
    # |exp(ix) - exp(iy)| = 2 |sin((x - y) / 2)| passes the tolerance at this angle
    apart = 2 * math.asin(tolerance / 2)
    found: list[Parting] = []
    for pair, (fa, fb) in enumerate(zip(real_inv_freq(a), real_inv_freq(b), strict=True)):
        # whole positions cannot tell frequencies that differ by whole turns
        gap = abs(math.remainder(float(fa - fb), 2 * math.pi))
        if gap * (context - 1) <= apart:
            continue
        position = math.floor(apart / gap) + 1
        if position < context:
            error = _distance(a, b, pair, position)
            found.append(
                Parting(pair=pair, position=position, error=error, inv_freq=(float(fa), float(fb)))
            )
    return found


def _distance(a: Rope, b: Rope, pair: int, position: int) -> float:
    """How far apart two Ropes put one pair at one position on every axis."""

    def unit(rope: Rope) -> tuple[float, float]:
        cos, sin = cos_sin(
            rope, np.full(rope.axes.n_axes, position) if rope.axes.n_axes > 1 else position
        )
        return float(cos[pair]), float(rope.direction * sin[pair])

    return math.dist(unit(a), unit(b))
