"""Which base and law give these frequencies? Parameters are solved for, not searched.

A *scan* proposes bases and laws for one form of spectrum. Every proposal is then checked against
all pairs with the law itself, and the one with the fewest digits is the likeliest. `SCANS` says
which scan recognises which law.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from itertools import product
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from phasor import scaling
from phasor.errors import SpecError
from phasor.identification.report import Finding, make_finding
from phasor.identification.spectrum import Floats, Interval, around, count_digits, log_base
from phasor.scaling import Law

# bases that models are trained with; a stretched base is seen as a stretch of one of these
_USUAL_BASES = (1e4, 5e5, 1e6, 1e5, 5e6, 1e7, 1.5e5, 1.6e5)
# a measured frequency of 0 is evidence of a stopped pair only if it is not less certain than this
_UNSEEN = 1e-9
# a mistake is likelier than a law that takes this many digits more
_MISTAKE_DIGITS = 6
# the exponents of a mixed NTK law that are in use
_MIXED_EXPONENTS = (0.625, 0.75, 0.5, 1.5, 2.0)
# turns at which the YaRN ramps of published models begin and end
_BETAS = ((32.0, 1.0), (1.0, 1.0), (64.0, 1.0), (16.0, 1.0), (32.0, 2.0), (128.0, 1.0))
_RAMP_FACTORS = (2.0, 4.0, 8.0, 16.0, 32.0, 40.0, 64.0, 128.0)
# in pairs: a ramp's end that is this close to a whole index was rounded to it
_END_ROUNDING = 1e-3
# relative error of a share that a ramp keeps
_SHARE_ROUNDING = 1e-4


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """A base and a law that give the frequencies found.

    Attributes:
        base: The base.
        law: The law, None for plain powers of the base.
        mistake: The known mistake that gives them in far fewer digits than any law does.
        digits: How many digits it takes; the least is the likeliest.
    """

    base: float
    law: Law | None
    mistake: Finding | None = None
    digits: int

    @property
    def gives_frequencies(self) -> bool:
        """Whether a Rope with this base and law has these frequencies.

        Not after the one mistake that no law says, which is checked where it is proposed.
        """
        return self.mistake is None or self.mistake.name != "ramp-inverted"


class Frequencies:
    """The frequencies of one whole spectrum as they were measured.

    Attributes:
        inv_freq: The frequencies, none negative and the first not 0, ``[num_pairs]``.
        relative: How far off each may be, relatively.
        head_dim: Width of the head, which a wrong exponent may run over.
        num_turning: How many are not 0.
        factor: What the first, which is 1 without a law, is divided by.
    """

    def __init__(self, inv_freq: Floats, relative: Floats, head_dim: int) -> None:
        self.inv_freq, self.relative, self.head_dim = inv_freq, relative, head_dim
        self.num_pairs, self.num_turning = len(inv_freq), int(np.count_nonzero(inv_freq))
        self.indices = np.arange(len(inv_freq), dtype=np.float64)
        self.factor = around(1 / float(inv_freq[0]), float(relative[0]))

    def base_of(self, part: slice, times: Floats | float = 1.0, shift: int = 0) -> Interval:
        """The bases of which part of the frequencies, times something, are powers."""
        f, relative, indices = self.inv_freq * times, self.relative, self.indices + shift
        logs = log_base(f[part], relative[part], self.num_pairs, indices[part])
        return logs.exp() if logs else Interval(1.0, 0.0)

    def base_of_most(self, *, slow: bool = False) -> tuple[float, int] | None:
        """The base of as many pairs as have one, counted from the first or the last; how many."""
        found = None
        for count in range(2, self.num_pairs):
            bases = self.base_of(slice(-count, None) if slow else slice(count))
            base = bases.simplest()
            if base is None:
                break
            if bases.high / bases.low < 1.1:
                found = base, count
        return found


Form = Literal["powers", "stopped", "scaled"]
# None where a scan finds no base
Proposals = Iterator[Explanation | None]
Scan = Callable[[Frequencies], Proposals]


def explanations(
    inv_freq: Floats, room: Floats, *, head_dim: int, check: Callable[[float, Law | None], bool]
) -> list[Explanation]:
    """All proposals that ``check`` confirms, the likeliest first.

    Args:
        inv_freq: The frequencies of one whole spectrum, none negative, ``[num_pairs]``.
        room: How far from a law's each may be.
        head_dim: Width of the head.
        check: Whether a base and a law give all frequencies of the function.
    """
    found: list[Explanation] = []
    for one in _proposals(inv_freq, room, head_dim):
        if one is None or not 1 < one.base < 1e30 or one in found:
            continue
        try:
            if not one.gives_frequencies or check(one.base, one.law):
                found.append(one)
        except SpecError:  # the law does not fit this spectrum
            continue
    lawful = min((one.digits for one in found if one.mistake is None), default=1000)
    likely = [one for one in found if one.mistake is None or one.digits + _MISTAKE_DIGITS <= lawful]
    return sorted(likely, key=lambda one: one.digits)


def _proposals(f: Floats, room: Floats, head_dim: int) -> Proposals:
    relative = room / np.maximum(f, 1e-300)
    turning = int(np.count_nonzero(f))
    # one frequency is a power of any base, and no law has gaps between pairs that turn
    if turning == 0 or len(f) == 1 or relative[0] >= 0.5 or not f[:turning].all():
        return
    measured = Frequencies(f, relative, head_dim)
    base = measured.base_of(slice(None)).simplest() if abs(f[0] - 1) <= relative[0] else None
    form: Form = "scaled" if base is None else "powers"
    if np.any((f == 0) & (room > _UNSEEN)):  # too slow to be told from 0: no evidence of a law
        if base is None:
            return
    elif turning < len(f):
        form = "stopped"
    if form == "powers":
        yield _propose(base)
    scans = dict.fromkeys(one for one in SCANS.values() if not isinstance(one, str))
    for needs, scan in (*scans, *_MISTAKES):
        if needs == form:
            yield from scan(measured)


def _propose(
    base: float | None, law: Law | None = None, mistake: Finding | None = None, *numbers: float
) -> Explanation | None:
    """The explanation with its digits: of a base and a law, or of the numbers in a mistake."""
    if base is None:
        return None
    digits = 1 + sum(map(count_digits, numbers))
    if mistake is None:
        values = [] if law is None else list(changed_parameters(law).values())
        digits = count_digits(base) + (law is not None)
        digits += sum(1 + count_digits(v) for v in values if type(v) in (int, float))
    return Explanation(base=base, law=law, mistake=mistake, digits=digits)


def changed_parameters(law: Law) -> dict[str, Any]:
    """A law's parameters that are not at their defaults."""
    given = {field: getattr(law, field.name) for field in fields(law)}
    return {field.name: value for field, value in given.items() if value != field.default}


def law_text(law: Law) -> str:
    """The law with the parameters that are not at their defaults."""
    listed = ", ".join(f"{name}={value!r}" for name, value in changed_parameters(law).items())
    return f"{type(law).__name__}({listed})"


# Laws that stretch the base: the frequencies are powers of one base, and the first is 1.


def _scan_stretched_base(measured: Frequencies) -> Proposals:
    bases = measured.base_of(slice(None))
    short, last = bases.simplest(), measured.num_pairs / (measured.num_pairs - 1)
    if short is None or count_digits(short) <= 2:
        return
    spread = (bases.high - bases.low) / short + 1e-12
    for usual in _USUAL_BASES:
        if usual >= bases.low:
            continue
        for law, factor in (
            (scaling.NTK, (short / usual) ** (1 / last)),
            (scaling.NTKOld, short / usual),
        ):
            stretch = around(factor, spread).simplest()
            if stretch is not None and count_digits(stretch) <= 3:
                yield _propose(usual, law(factor=stretch))


def _find_exponent_width(measured: Frequencies) -> Proposals:
    bases, pairs = measured.base_of(slice(None)), measured.num_pairs
    short = bases.simplest()
    for width in {measured.head_dim, pairs, 4 * pairs} - {2 * pairs}:
        meant = bases.power(width / (2 * pairs)).simplest()
        if short and meant in _USUAL_BASES and short not in _USUAL_BASES:
            mistake = make_finding("exponent-width", width=width, rotary_dim=2 * pairs, meant=meant)
            yield _propose(short, None, mistake, meant)


# Laws that change every pair: the first frequency is not 1.


def _fit_divided(
    measured: Frequencies, exponent: float = 1.0, divisor: Callable[[float], Any] = float
) -> tuple[float | None, float]:
    """The base and the factor of powers that are divided, the first by a root of the factor."""
    turning = slice(measured.num_turning)
    for factor in measured.factor.power(exponent).decimals():
        base = measured.base_of(turning, divisor(factor)).simplest()
        if base is not None:
            return base, factor
    return None, 1.0


def _scan_divided(measured: Frequencies) -> Proposals:
    base, factor = _fit_divided(measured)
    yield _propose(base, scaling.Linear(factor=factor))


def _find_stretched_frequencies(measured: Frequencies) -> Proposals:
    (base, factor), pairs = _fit_divided(measured), measured.num_pairs
    meant = measured.factor.power((pairs - 1) / pairs).simplest()
    if base is not None and meant is not None:
        mistake = make_finding("stretch-on-frequencies", factor=meant)
        yield _propose(base, scaling.Linear(factor=factor), mistake, base, meant)


def _find_indices_from_one(measured: Frequencies) -> Proposals:
    pairs = measured.num_pairs
    base = measured.base_of(slice(None), shift=1).simplest()
    if base is not None:
        mistake = make_finding("index-from-one", base=base, rotary_dim=2 * pairs)
        yield _propose(base, scaling.Linear(factor=base ** (1 / pairs)), mistake, base)


def _scan_ntk_fixed(measured: Frequencies) -> Proposals:
    pairs, roots = measured.num_pairs, (measured.indices + 1) / measured.num_pairs
    base, factor = _fit_divided(measured, pairs, lambda factor: factor**roots)
    yield _propose(base, scaling.NTKFixed(factor=factor))


def _scan_ntk_mixed(measured: Frequencies) -> Proposals:
    """The logarithm of a frequency is linear in the index and in a power of the index."""
    pairs, indices, weights = measured.num_pairs, measured.indices, 1 / measured.relative
    if pairs < 4:
        return
    for exponent in _MIXED_EXPONENTS:
        columns = np.stack((-indices / pairs, -((indices + 1) ** exponent)), axis=1)
        logs = np.log(measured.inv_freq) * weights
        (log_b, a), *_ = np.linalg.lstsq(columns * weights[:, None], logs)
        if 0 < log_b < 60 and abs(a) * pairs**exponent < 60:
            factor = around(math.exp(a * pairs**exponent), 1e-4).simplest()
            if factor is not None and factor != 1:
                law = scaling.NTKMixed(factor=factor, exponent=exponent)
                yield _propose(around(math.exp(log_b), 1e-4).simplest(), law)


def _scan_whole_wavelengths(measured: Frequencies) -> Proposals:
    lengths = 2 * np.pi / measured.inv_freq
    if np.all(np.abs(lengths - np.rint(lengths)) <= 2 * measured.relative * lengths):
        # rounding a wavelength hides half a position either way
        logs = log_base(measured.inv_freq, 0.51 / lengths, measured.num_pairs, measured.indices)
        yield _propose(logs.exp().simplest(), scaling.Resonance())


# Laws that stop the last pairs.


def _scan_stopped(measured: Frequencies) -> Proposals:
    pairs, turning = measured.num_pairs, measured.num_turning
    base, factor = _fit_divided(measured)
    if turning < 2 or base is None:  # one frequency is a power of any base
        return
    exact = turning / pairs
    within = Interval(exact, (turning + 1) / pairs * (1 - 1e-12))
    fraction = exact if count_digits(exact) <= 4 else within.simplest()
    if fraction is not None:
        yield _propose(base, scaling.Proportional(fraction=fraction, factor=factor))
    slowest = base ** (-np.array([turning - 1, turning]) / pairs)
    length = Interval(*(2 * np.pi / slowest)).power_of_two()
    if factor == 1 and length is not None:
        yield _propose(base, scaling.Hope(original_max_positions=length))


def _scan_faded(measured: Frequencies) -> Proposals:
    most = measured.base_of_most()
    if measured.num_turning == measured.num_pairs - 1 and most is not None:
        base, kept = most
        # the first of the faded pairs is multiplied by 1
        yield _propose(base, scaling.Cope(num_pairs=measured.num_pairs - kept + 1))


# Laws that keep the fast pairs, divide the slow ones, and have a ramp between.


def _kept_shares(measured: Frequencies) -> Iterator[tuple[float, float, Floats]]:
    """The base, factors, and how much of each pair is kept if that is the factor."""
    f, relative = measured.inv_freq, measured.relative
    most = measured.base_of_most() if abs(f[0] - 1) <= relative[0] else None
    if most is None:
        return
    base, _ = most
    left = f * base ** (measured.indices / measured.num_pairs)
    # where the last two are divided alike, they are divided by the whole factor
    plateau = around(1 / left[-1], 2 * relative[-1] + 1e-12).simplest()
    level = abs(left[-1] / left[-2] - 1) <= relative[-1] + relative[-2]
    for factor in (plateau,) if level and plateau is not None else _RAMP_FACTORS:
        if factor != 1:
            yield base, factor, (left - 1 / factor) / (1 - 1 / factor)


def _on_ramp(shares: Floats) -> NDArray[np.intp]:
    """The pairs that are neither kept nor divided by the whole factor."""
    return np.flatnonzero((shares > _SHARE_ROUNDING) & (shares < 1 - _SHARE_ROUNDING))


def _last_kept(shares: Floats) -> int:
    return int(np.flatnonzero(shares > 1 - _SHARE_ROUNDING)[-1])


def _slope(shares: Floats, inside: NDArray[np.intp], along: Floats) -> float:
    """How fast a ramp falls along something, between the first and the last pair on it."""
    first, last = inside[0], inside[-1]
    return float((shares[first] - shares[last]) / (along[last] - along[first]))


def _ramp_ends(shares: Floats) -> Iterator[tuple[bool, tuple[float, float], tuple[float, float]]]:
    """Where a ramp linear in the index may begin and end: rounded to pairs or not, and bounds."""
    inside = _on_ramp(shares)
    if len(inside) < 2:
        low = _last_kept(shares)
        ends = [(float(a), float(low + b)) for a in (low, low - 1) for b in (1, 2) if a >= 0]
    else:
        first, last = int(inside[0]), int(inside[-1])
        slope = max(_slope(shares, inside, np.arange(float(len(shares)))), 1e-9)
        ends = [(first - (1 - shares[first]) / slope, last + shares[last] / slope)]
    for low, high in ends:
        if low > -1 and high < 4 * len(shares):
            near = _END_ROUNDING
            yield False, (low - near, low + near), (high - near, high + near)
            if all(abs(end - round(end)) < near for end in (low, high)):
                # the low end was rounded down, and not below 0, and the high end up
                low, high = round(low), round(high)
                yield True, (low or -math.inf, low + 1), (high - 1, high)


def _scan_yarn(measured: Frequencies) -> Proposals:
    """A ramp linear in the index; its ends tell the context divided by turns."""
    for base, factor, shares in _kept_shares(measured):
        for truncate, *bounds in _ramp_ends(shares):
            # contexts over which pairs at these real-valued indices make one turn
            low, high = (
                Interval(*(2 * math.pi * base ** (end / measured.num_pairs) for end in ends))
                for ends in bounds
            )
            found: list[tuple[float | None, float | None, float]] = []
            for fast, slow in _BETAS:
                both = low.times(fast) & high.times(slow)
                found.append((both.power_of_two() or both.simplest(), fast, slow))
            length = high.power_of_two()
            if length is not None and low.low > 0:
                turns = Interval(length / low.high, length / low.low).simplest()
                found.append((length, turns, 1.0))
            for context, fast, slow in found:
                if context and fast and context >= 1 and fast >= 1 and context == int(context):
                    law = scaling.Yarn(
                        factor=factor, original_max_positions=int(context), beta_fast=fast,
                        beta_slow=slow, truncate=truncate,
                    )  # fmt: skip
                    yield _propose(base, law)


def _scan_ramps_over_frequency(measured: Frequencies) -> Proposals:
    """A ramp linear in the frequency itself: Llama 3's, and the one that YaRN's paper prints."""
    for base, factor, shares in _kept_shares(measured):
        plain = base ** (-measured.indices / measured.num_pairs)
        inside = _on_ramp(shares)
        if len(inside) == 0:  # a step, or a ramp between two pairs
            wavelengths = 2 * np.pi / plain[_last_kept(shares) :]
            one = Interval(*wavelengths[:2]).power_of_two() if len(wavelengths) > 1 else None
            contexts, high_turns = [] if one is None else [one], (1.0, 4.0)
        elif len(inside) == 1:  # one pair tells one number: the usual turns are assumed
            slow = float(plain[inside[0]] / (1 + 3 * shares[inside[0]]))
            contexts, high_turns = _round_contexts(2 * np.pi / slow), (4.0,)
        else:
            slope, last = _slope(shares, inside, -plain), inside[-1]
            slow = float(plain[last] - shares[last] / slope) if slope > 0 else 0.0
            if slow <= 0:
                continue
            ratio = around(1 + 1 / slope / slow, 1e-3).simplest() or 1.0
            contexts, high_turns = _round_contexts(2 * np.pi / slow), (ratio,)
            paper = around(2 * np.pi / slow, 1e-3).power_of_two()
            if paper is not None:
                extends = scaling.YarnPaper(
                    factor=factor, original_max_positions=paper, beta_fast=ratio
                )
                yield _propose(base, extends)
        for length, high in product(contexts, high_turns):
            law = scaling.Llama3(
                factor=factor, original_max_positions=length, low_freq_factor=1.0,
                high_freq_factor=high,
            )  # fmt: skip
            yield _propose(base, law)


def _round_contexts(length: float) -> list[int]:
    """Round lengths near one that was measured."""
    near = around(length, 1e-3)
    found = dict.fromkeys([near.power_of_two(), round(near.simplest() or 0), round(length)])
    return [one for one in found if one is not None and one >= 1]


def _scan_part_ntk(measured: Frequencies) -> Proposals:
    for base, factor, shares in _kept_shares(measured):
        changed = np.flatnonzero(shares < 1 - _SHARE_ROUNDING)
        for length in (1 << power for power in range(9, 18)):
            # its ramp begins where a pair turns 16 times over the context
            index = measured.num_pairs * math.log(length / (32 * math.pi)) / math.log(base)
            if len(changed) > 0 and abs(int(changed[0]) - index) <= 2:
                law = scaling.PartNTK(factor=factor, original_max_positions=length)
                yield _propose(base, law)


def _find_inverted_ramp(measured: Frequencies) -> Proposals:
    """A YaRN ramp that divides the fast pairs and keeps the slow ones."""
    f, pairs, indices = measured.inv_freq, measured.num_pairs, measured.indices
    factor = around(1 / f[0], 2 * measured.relative[0] + 1e-12).simplest()
    most = measured.base_of_most(slow=True)
    # a base, a factor and two ends are four numbers that a few pairs would always have
    if factor is None or factor <= 1 or most is None or pairs < 8:
        return
    base, _ = most
    shares = (f * base ** (indices / pairs) - 1 / factor) / (1 - 1 / factor)
    inside = _on_ramp(shares)
    if len(inside) < 2:
        return
    slope = -_slope(shares, inside, indices)
    ramp = np.clip(shares[inside[0]] + slope * (indices - inside[0]), 0, 1)
    exact = base ** (-indices / pairs) * (ramp + (1 - ramp) / factor)
    fits = np.all(np.abs(exact - f) <= (2 * measured.relative + 1e-9) * f)
    if slope > 0 and ramp[-1] == 1 and fits:
        yield _propose(base, None, make_finding("ramp-inverted", factor=factor), base, factor)


#: How the laws of `phasor.scaling.LAWS` are recognised: in spectra of which form, and by which
#: scan; or why by none.
SCANS: dict[str, tuple[Form, Scan] | str] = {
    "linear": ("scaled", _scan_divided),
    "ntk": ("powers", _scan_stretched_base),
    "ntk_old": ("powers", _scan_stretched_base),
    "ntk_fixed": ("scaled", _scan_ntk_fixed),
    "resonance": ("scaled", _scan_whole_wavelengths),
    "ntk_mixed": ("scaled", _scan_ntk_mixed),
    "yarn": ("scaled", _scan_yarn),
    "llama3": ("scaled", _scan_ramps_over_frequency),
    "yarn_paper": ("scaled", _scan_ramps_over_frequency),
    "part_ntk": ("scaled", _scan_part_ntk),
    "proportional": ("stopped", _scan_stopped),
    "hope": ("stopped", _scan_stopped),
    "cope": ("stopped", _scan_faded),
    "per_pair": "a divisor for each pair gives any frequencies: they are listed one by one",
    "dynamic_ntk": "a rule: mistakes.with_rule finds it from calls of several lengths",
    "longrope": "a rule: mistakes.with_rule finds it from calls of several lengths",
    "stepped_ntk": "a rule that is not looked for: its length is reported, and the law below it",
}
_MISTAKES: tuple[tuple[Form, Scan], ...] = (
    ("powers", _find_exponent_width),
    ("scaled", _find_indices_from_one),
    ("scaled", _find_stretched_frequencies),
    ("scaled", _find_inverted_ramp),
)
