"""Which law explains these frequencies? Parameters are inverted, not searched for.

Every proposal is checked against all pairs with the law itself; the one said in the fewest
digits comes first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from phasor.errors import SpecError
from phasor.identification.intervals import Floats, Interval, around, digits, log_base
from phasor.identification.ramp_laws import inverted_ramp, ramp_laws
from phasor.scaling import (
    NTK,
    Cope,
    Hope,
    Law,
    Linear,
    NTKFixed,
    NTKMixed,
    NTKOld,
    Proportional,
    Resonance,
)

# bases that models are trained with; a stretched base is seen as a stretch of one of these
_USUAL_BASES = (1e4, 5e5, 1e6, 1e5, 5e6, 1e7, 1.5e5, 1.6e5)
# a pair whose frequency may be this large was not seen to stand still
_UNSEEN = 1e-9
# a slip is likelier than a law that takes this many digits more
_SLIP_DIGITS = 6
# the exponents of a mixed NTK law that are in use
_MIXED = (0.625, 0.75, 0.5, 1.5, 2.0)


@dataclass(frozen=True, kw_only=True)
class Slip:
    """A mistake with a name.

    Attributes:
        name: Its name.
        says: What happened.
        digits: How much there is to say.
    """

    name: str
    says: str
    digits: int


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """A base and a law that give the frequencies found.

    Attributes:
        base: The base.
        law: The law, None for plain powers of the base.
        slip: The known mistake that gives them in far fewer digits than any law does.
        digits: How much there is to say; the least is the likeliest.
    """

    base: float
    law: Law | None
    slip: Slip | None
    digits: int


#: The slip that no law can say.
RAMP_INVERTED = "ramp-inverted"
Check = Callable[[float, Law | None], bool]


def explanations(
    inv_freq: Floats, room: Floats, *, head_dim: int, check: Check
) -> list[Explanation]:
    """All proposals that ``check`` confirms, shortest first.

    Args:
        inv_freq: The frequencies of one whole spectrum, none negative.
        room: How far from a law's each may be.
        head_dim: Width of the head, which a wrong exponent may run over.
        check: Whether a base and a law give all frequencies of the function.
    """
    relative = room / np.maximum(inv_freq, 1e-300)
    found: list[Explanation] = []
    for base, law, slip in _proposals(inv_freq, room, relative, head_dim):
        # an inverted ramp is no law's, and brings its own check
        own = slip is not None and slip.name == RAMP_INVERTED
        if not 1 < base < 1e30 or not (own or _confirmed(check, base, law)):
            continue
        values = [] if law is None else list(vars_of(law).values())
        length = digits(base) + (law is not None)
        length += sum(1 + digits(v) for v in values if type(v) in (int, float))
        length = length if slip is None else slip.digits
        one = Explanation(base=base, law=law, slip=slip, digits=length)
        if one not in found:
            found.append(one)
    lawful = min((one.digits for one in found if one.slip is None), default=1000)
    likely = [one for one in found if one.slip is None or one.digits + _SLIP_DIGITS <= lawful]
    return sorted(likely, key=lambda one: one.digits)


def vars_of(law: Law) -> dict[str, Any]:
    """A law's parameters that are not at their defaults."""
    given = {field.name: getattr(law, field.name) for field in fields(law)}
    return {field.name: given[field.name] for field in fields(law)
            if given[field.name] != field.default}  # fmt: skip


def spoken(law: Law) -> str:
    """The law with what is not at its default."""
    listed = ", ".join(f"{name}={value!r}" for name, value in vars_of(law).items())
    return f"{type(law).__name__}({listed})"


def _confirmed(check: Check, base: float, law: Law | None) -> bool:
    try:
        return check(base, law)
    except SpecError:  # the law does not fit this spectrum
        return False


Proposal = tuple[float, Law | None, Slip | None]


def _proposals(f: Floats, room: Floats, relative: Floats, head_dim: int) -> Iterator[Proposal]:
    pairs = len(f)
    turning = int(np.count_nonzero(f))
    # one frequency is a power of any base
    if turning == 0 or pairs == 1 or relative[0] >= 0.5:
        return
    if not f[:turning].all():  # gaps in the middle are no law's
        return
    plain = log_base(f, relative, pairs, np.arange(pairs, dtype=np.float64))
    are_powers = abs(f[0] - 1) <= relative[0] and bool(plain)
    if np.any((f == 0) & (room > _UNSEEN)):  # too slow to be told from rest: says nothing
        if are_powers:
            yield from _powers(plain.exp(), pairs, head_dim)
        return
    if turning < pairs:
        yield from _stopped(f, relative, turning)
        return
    if are_powers:
        yield from _powers(plain.exp(), pairs, head_dim)
        return
    yield from _slowed(f, relative)
    for base, law in ramp_laws(f, relative):
        yield base, law, None
    for base, factor in inverted_ramp(f, relative):
        yield base, None, Slip(
            name=RAMP_INVERTED,
            says=f"YaRN's ramp runs the wrong way: fast pairs are divided by {factor:.15g} and "
            "slow ones kept, where it should be the other way round",
            digits=digits(base) + digits(factor) + 1,
        )  # fmt: skip


def _powers(base: Interval, pairs: int, head_dim: int) -> Iterator[Proposal]:
    """Plain powers, and what else a base that is no round number may come from."""
    short = base.simplest()
    if short is None:
        return
    yield short, None, None
    for width in {head_dim, pairs, 4 * pairs} - {2 * pairs}:
        meant = base.power(width / (2 * pairs)).simplest()
        if meant in _USUAL_BASES and short not in _USUAL_BASES:
            yield short, None, Slip(
                name="exponent-width",
                says=f"The exponents run over {width}, not over the {2 * pairs} coordinates that "
                f"turn: frequencies are {meant:.15g}^(-2k/{width}). Where pairs were meant to "
                "stand still (p-RoPE) that is right, in a partial rotation it is not",
                digits=digits(meant) + 1,
            )  # fmt: skip
    if digits(short) <= 2:
        return
    last = pairs / (pairs - 1)
    spread = (base.high - base.low) / short + 1e-12
    for usual in _USUAL_BASES:
        if usual >= base.low:
            continue
        for law, factor in ((NTK, (short / usual) ** (1 / last)), (NTKOld, short / usual)):
            stretch = around(factor, spread).simplest()
            if stretch is not None and digits(stretch) <= 3:
                yield usual, law(factor=stretch), None


def _divided(f: Floats, relative: Floats, pairs: int) -> tuple[float, float] | None:
    """The base and the factor of powers that are all divided by one factor."""
    index = np.arange(len(f), dtype=np.float64)
    for factor in around(1 / float(f[0]), float(relative[0])).decimals():
        base = log_base(f * factor, relative, pairs, index).exp().simplest()
        if base is not None:
            return base, factor
    return None


def _slowed(f: Floats, relative: Floats) -> Iterator[Proposal]:
    """Powers of a base whose first frequency is not 1, and other laws that reach every pair."""
    pairs = len(f)
    index = np.arange(pairs, dtype=np.float64)
    shifted = log_base(f, relative, pairs, index + 1).exp().simplest()
    if shifted is not None:
        yield shifted, Linear(factor=shifted ** (1 / pairs)), Slip(
            name="index-from-one",
            says=f"Pairs are counted from 1: frequencies are {shifted:.15g}^(-2(k+1)/{2 * pairs}), "
            "so that every one is one step too slow",
            digits=digits(shifted) + 1,
        )  # fmt: skip
    factor = around(1 / float(f[0]), float(relative[0]))
    divided = _divided(f, relative, pairs)
    if divided is not None:
        base, short = divided
        yield base, Linear(factor=short), None
        meant = factor.power((pairs - 1) / pairs).simplest()
        if meant is not None:
            yield base, Linear(factor=short), Slip(
                name="stretch-on-frequencies",
                says=f"Every frequency is divided by {meant:.15g}^(d/(d-2)), the number by which "
                "NTK-aware scaling multiplies the base",
                digits=digits(base) + digits(meant) + 1,
            )  # fmt: skip
    for stretch in factor.power(pairs).decimals():
        bare = log_base(f * stretch ** ((index + 1) / pairs), relative, pairs, index)
        base = bare.exp().simplest()
        if base is not None:
            yield base, NTKFixed(factor=stretch), None
            break
    lengths = 2 * np.pi / f
    if np.all(np.abs(lengths - np.rint(lengths)) <= 2 * relative * lengths):
        # rounding wavelengths hides the base behind half a position either way
        bare = log_base(f, 0.51 / lengths, pairs, index).exp().simplest()
        if bare is not None:
            yield bare, Resonance(), None
    yield from _mixed(f, relative)


def _mixed(f: Floats, relative: Floats) -> Iterator[Proposal]:
    """Log f is linear in the index and in a power of it."""
    pairs = len(f)
    if pairs < 4:
        return
    index = np.arange(pairs)
    for exponent in _MIXED:
        columns = np.stack((-index / pairs, -((index + 1.0) ** exponent)), axis=1)
        weights = 1 / relative
        (log_b, a), *_ = np.linalg.lstsq(columns * weights[:, None], np.log(f) * weights)
        if not (0 < log_b < 60 and abs(a) * pairs**exponent < 60):
            continue
        base = around(math.exp(log_b), 1e-4).simplest()
        factor = around(math.exp(a * pairs**exponent), 1e-4).simplest()
        if base is not None and factor is not None and factor != 1:
            yield base, NTKMixed(factor=factor, exponent=exponent), None


def _stopped(f: Floats, relative: Floats, turning: int) -> Iterator[Proposal]:
    """The last pairs stand still."""
    pairs = len(f)
    index = np.arange(pairs, dtype=np.float64)
    divided = _divided(f[:turning], relative[:turning], pairs) if turning > 1 else None
    if divided is not None:
        base, factor = divided
        exact = turning / pairs
        within = Interval(exact, (turning + 1) / pairs * (1 - 1e-12))
        share = exact if digits(exact) <= 4 else within.simplest()
        if share is not None:
            yield base, Proportional(fraction=share, factor=factor), None
        if factor == 1:
            slowest = base ** (-np.array([turning - 1, turning]) / pairs)
            length = Interval(*(2 * np.pi / slowest)).power_of_two()
            if length is not None:
                yield base, Hope(original_max_positions=length), None
    if turning != pairs - 1:
        return
    for faded in range(2, pairs):  # the first of the faded is multiplied by 1
        kept = pairs - faded + 1
        bare = log_base(f[:kept], relative[:kept], pairs, index[:kept]).exp()
        short = bare.simplest()
        if kept > 1 and short is not None and bare.high / bare.low < 1.1:
            yield short, Cope(num_pairs=faded), None
            return  # whoever fades earlier changes a pair that has just been seen to be kept
