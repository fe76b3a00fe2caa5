"""The base and law that give measured frequencies. Parameters are solved for, not searched.

A *scan* proposes bases and laws for one form of spectrum. Every proposal is then checked against
all pairs with the law itself, and the one with the fewest digits is the likeliest. `SCANS` lists
the scan of each law.
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
from phasor.identification.spectrum import (
    Floats,
    Frequencies,
    Interval,
    count_digits,
    interval_around,
    log_base,
    simplest_near,
)
from phasor.scaling import Law

# bases that models are trained with; any other base may be one of these, stretched
_USUAL_BASES = (1e4, 5e5, 1e6, 1e5, 5e6, 1e7, 1.5e5, 1.6e5)
# a frequency measured as 0 is evidence of a stopped pair only if its uncertainty is below this
_MAX_ZERO_UNCERTAINTY = 1e-9
# a mistake is likelier than a law that needs this many digits more
_MISTAKE_DIGITS = 6
# exponents of mixed NTK laws in use
_MIXED_EXPONENTS = (0.625, 0.75, 0.5, 1.5, 2.0)
# turns at which the YaRN ramps of published models begin and end
_BETAS = ((32.0, 1.0), (1.0, 1.0), (64.0, 1.0), (16.0, 1.0), (32.0, 2.0), (128.0, 1.0))
_RAMP_FACTORS = (2.0, 4.0, 8.0, 16.0, 32.0, 40.0, 64.0, 128.0)
# a ramp's end was rounded to a whole index if it is this close to it, in pairs
_END_ROUNDING = 1e-3
# error of the share of a frequency that a ramp keeps
_SHARE_ROUNDING = 1e-4


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """A base and a law that give the frequencies found."""

    base: float
    law: Law | None  # None for plain powers of the base
    mistake: Finding | None = None  # gives them with far fewer digits than any law
    digits: int  # of all parameters: the fewer, the likelier

    @property
    def gives_frequencies(self) -> bool:
        """Whether a Rope with this base and law has these frequencies.

        All have, but for one mistake that no law describes. It is checked when it is proposed.
        """
        return self.mistake is None or self.mistake.name != "ramp-inverted"


Form = Literal["powers", "stopped", "scaled"]
# None if a scan finds no base
Proposals = Iterator[Explanation | None]
Scan = Callable[[Frequencies], Proposals]
Check = Callable[[float, Law | None], bool]


def find_explanations(
    inv_freq: Floats, tolerance: Floats, *, head_dim: int, check: Check
) -> list[Explanation]:
    """All proposals that ``check`` confirms for a whole spectrum, the likeliest first.

    None of the frequencies ``[num_pairs]`` is negative; a law's may be off by ``tolerance``.
    """
    confirmed: list[Explanation] = []
    for proposal in _make_proposals(inv_freq, tolerance, head_dim):
        if proposal is None or not 1 < proposal.base < 1e30 or proposal in confirmed:
            continue
        try:
            if not proposal.gives_frequencies or check(proposal.base, proposal.law):
                confirmed.append(proposal)
        except SpecError:  # the law does not fit this spectrum
            continue
    lawful = min((p.digits for p in confirmed if p.mistake is None), default=1000)
    likely = [p for p in confirmed if p.mistake is None or p.digits + _MISTAKE_DIGITS <= lawful]
    return sorted(likely, key=lambda p: p.digits)


def _make_proposals(f: Floats, tolerance: Floats, head_dim: int) -> Proposals:
    relative_errors = tolerance / np.maximum(f, 1e-300)
    turning = int(np.count_nonzero(f))
    # one frequency is a power of any base, and no law stops a pair between pairs that turn
    if turning == 0 or len(f) == 1 or relative_errors[0] >= 0.5 or not f[:turning].all():
        return
    measured = Frequencies(f, relative_errors, head_dim)
    base = measured.bases_of().simplest() if measured.begin_with_one else None
    form: Form = "scaled" if base is None else "powers"
    # a pair too slow to be told from 0 is no evidence of a law
    if np.any((f == 0) & (tolerance > _MAX_ZERO_UNCERTAINTY)):
        if base is None:
            return
    elif turning < len(f):
        form = "stopped"
    if form == "powers":
        yield _propose(base)
    for scanned_form, scan in (*dict.fromkeys(SCANS.values()), *_MISTAKES):
        if scanned_form == form:
            yield from scan(measured)


def _propose(
    base: float | None, law: Law | None = None, mistake: Finding | None = None, *numbers: float
) -> Explanation | None:
    """The explanation, counting the digits of its base and law, or of a mistake's ``numbers``."""
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
    values = {field: getattr(law, field.name) for field in fields(law)}
    return {field.name: value for field, value in values.items() if value != field.default}


def law_text(law: Law) -> str:
    """The law with the parameters that are not at their defaults."""
    listed = ", ".join(f"{name}={value!r}" for name, value in changed_parameters(law).items())
    return f"{type(law).__name__}({listed})"


# Laws that stretch the base: the frequencies are powers of one base, and the first is 1.


def _scan_stretched_base(measured: Frequencies) -> Proposals:
    bases = measured.bases_of()
    short, exponent = bases.simplest(), measured.num_pairs / (measured.num_pairs - 1)
    if short is None or count_digits(short) <= 2:
        return
    spread = (bases.high - bases.low) / short + 1e-12
    for usual in _USUAL_BASES:
        if usual >= bases.low:
            continue
        for law, factor in (
            (scaling.NTK, (short / usual) ** (1 / exponent)),
            (scaling.NTKOld, short / usual),
        ):
            stretch = simplest_near(factor, spread)
            if stretch is not None and count_digits(stretch) <= 3:
                yield _propose(usual, law(factor=stretch))


def _find_exponent_width(measured: Frequencies) -> Proposals:
    bases, pairs = measured.bases_of(), measured.num_pairs
    short = bases.simplest()
    for width in {measured.head_dim, pairs, 4 * pairs} - {2 * pairs}:
        intended = bases.power(width / (2 * pairs)).simplest()
        if short and intended in _USUAL_BASES and short not in _USUAL_BASES:
            mistake = make_finding(
                "exponent-width", width=width, rotary_dim=2 * pairs, intended=intended
            )
            yield _propose(short, None, mistake, intended)


# Laws that change every pair: the first frequency is not 1.


def _fit_divided(
    measured: Frequencies, exponent: float = 1.0, divisor: Callable[[float], Any] = float
) -> tuple[float | None, float]:
    """The base and the factor of divided powers, those with the fewest digits.

    The first power is divided by ``factor ** (1 / exponent)``, all of them by ``divisor(factor)``.
    """
    turning = slice(measured.num_turning)
    fits = [
        (count_digits(base) + count_digits(factor), base, factor)
        for factor in measured.factor.power(exponent).decimals()
        if (base := measured.bases_of(turning, divisor(factor)).simplest()) is not None
    ]
    return min(fits)[1:] if fits else (None, 1.0)


def _scan_divided(measured: Frequencies) -> Proposals:
    base, factor = _fit_divided(measured)
    yield _propose(base, scaling.Linear(factor=factor))


def _find_stretched_frequencies(measured: Frequencies) -> Proposals:
    (base, factor), pairs = _fit_divided(measured), measured.num_pairs
    stretch = measured.factor.power((pairs - 1) / pairs).simplest()
    if base is not None and stretch is not None:
        mistake = make_finding("stretch-on-frequencies", factor=stretch)
        yield _propose(base, scaling.Linear(factor=factor), mistake, base, stretch)


def _find_indices_from_one(measured: Frequencies) -> Proposals:
    pairs = measured.num_pairs
    base = measured.bases_of(shift=1).simplest()
    if base is not None:
        mistake = make_finding("index-from-one", base=base, rotary_dim=2 * pairs)
        yield _propose(base, scaling.Linear(factor=base ** (1 / pairs)), mistake, base)


def _scan_ntk_fixed(measured: Frequencies) -> Proposals:
    pairs, roots = measured.num_pairs, (measured.indices + 1) / measured.num_pairs
    base, factor = _fit_divided(measured, pairs, lambda factor: factor**roots)
    yield _propose(base, scaling.NTKFixed(factor=factor))


def _scan_ntk_mixed(measured: Frequencies) -> Proposals:
    """The logarithm of a frequency is linear in the index and in a power of the index."""
    pairs, indices, weights = measured.num_pairs, measured.indices, 1 / measured.relative_errors
    if pairs < 4:
        return
    for exponent in _MIXED_EXPONENTS:
        columns = np.stack((-indices / pairs, -((indices + 1) ** exponent)), axis=1)
        logs = np.log(measured.inv_freq) * weights
        (log_b, a), *_ = np.linalg.lstsq(columns * weights[:, None], logs)
        if 0 < log_b < 60 and abs(a) * pairs**exponent < 60:
            factor = simplest_near(math.exp(a * pairs**exponent), 1e-4)
            if factor is not None and factor != 1:
                law = scaling.NTKMixed(factor=factor, exponent=exponent)
                yield _propose(simplest_near(math.exp(log_b), 1e-4), law)


def _scan_whole_wavelengths(measured: Frequencies) -> Proposals:
    lengths = 2 * np.pi / measured.inv_freq
    if np.all(np.abs(lengths - np.rint(lengths)) <= 2 * measured.relative_errors * lengths):
        # a rounded wavelength is off by up to half a position
        logs = log_base(measured.inv_freq, 0.51 / lengths, measured.num_pairs, measured.indices)
        yield _propose(logs.exp().simplest(), scaling.Resonance())


# Laws that stop the last pairs.


def _scan_stopped(measured: Frequencies) -> Proposals:
    pairs, turning = measured.num_pairs, measured.num_turning
    base, factor = _fit_divided(measured)
    if turning < 2 or base is None:  # one frequency is a power of any base
        return
    exact = turning / pairs
    fractions = Interval(exact, (turning + 1) / pairs * (1 - 1e-12))
    fraction = exact if count_digits(exact) <= 4 else fractions.simplest()
    if fraction is not None:
        yield _propose(base, scaling.Proportional(fraction=fraction, factor=factor))
    slowest = base ** (-np.array([turning - 1, turning]) / pairs)
    length = Interval(*(2 * np.pi / slowest)).power_of_two()
    if factor == 1 and length is not None:
        yield _propose(base, scaling.Hope(original_max_positions=length))


def _scan_faded(measured: Frequencies) -> Proposals:
    run = measured.base_of_longest_run()
    if measured.num_turning == measured.num_pairs - 1 and run is not None:
        base, run_length = run
        # the first of the faded pairs is multiplied by 1
        yield _propose(base, scaling.Cope(num_pairs=measured.num_pairs - run_length + 1))


# Laws that keep the fast pairs, divide the slow ones by a factor, and have a ramp between them.


def _find_kept_shares(measured: Frequencies) -> Iterator[tuple[float, float, Floats]]:
    """The base, a possible factor, and the share of each frequency that is then kept.

    A share is 1 for a pair that is kept and 0 for a pair that is divided by the whole factor.
    """
    run = measured.base_of_longest_run() if measured.begin_with_one else None
    if run is None:
        return
    base, _ = run
    remaining = measured.inv_freq * base ** (measured.indices / measured.num_pairs)
    *_, before_last, last = measured.relative_errors
    # if the last two are divided by the same number, it is the whole factor
    plateau = simplest_near(1 / remaining[-1], 2 * last + 1e-12)
    is_level = abs(remaining[-1] / remaining[-2] - 1) <= last + before_last
    for factor in (plateau,) if is_level and plateau is not None else _RAMP_FACTORS:
        if factor != 1:
            yield base, factor, _shares_of(remaining, factor, measured)


def _shares_of(remaining: Floats, factor: float, measured: Frequencies) -> Floats:
    """How much of each frequency a ramp keeps, from what remains of it; 1 and 0 if they may be."""
    shares = (remaining - 1 / factor) / (1 - 1 / factor)
    errors = _SHARE_ROUNDING + measured.relative_errors * remaining / (1 - 1 / factor)
    ends = np.clip(np.rint(shares), 0, 1)
    return np.where(np.abs(shares - ends) <= errors, ends, shares)


_Bounds = tuple[float, float]


def _pairs_on_ramp(shares: Floats) -> NDArray[np.intp]:
    """The pairs that are neither kept nor divided by the whole factor."""
    return np.flatnonzero((shares > 0) & (shares < 1))


def _last_kept_pair(shares: Floats) -> int:
    return int(np.flatnonzero(shares >= 1)[-1])


def _ramp_slope(shares: Floats, on_ramp: NDArray[np.intp], coordinates: Floats) -> float:
    """How fast a ramp falls over the coordinates, from the first to the last pair on it."""
    first, last = on_ramp[0], on_ramp[-1]
    return float((shares[first] - shares[last]) / (coordinates[last] - coordinates[first]))


def _find_ramp_ends(shares: Floats) -> Iterator[tuple[bool, _Bounds, _Bounds]]:
    """Possible ends of a ramp linear in the index: whether rounded to pairs, and their bounds."""
    on_ramp = _pairs_on_ramp(shares)
    if len(on_ramp) < 2:
        low = _last_kept_pair(shares)
        ends = [(float(a), float(low + b)) for a in (low, low - 1) for b in (1, 2) if a >= 0]
    else:
        first, last = int(on_ramp[0]), int(on_ramp[-1])
        slope = max(_ramp_slope(shares, on_ramp, np.arange(float(len(shares)))), 1e-9)
        ends = [(first - (1 - shares[first]) / slope, last + shares[last] / slope)]
    for low, high in ends:
        if low > -1 and high < 4 * len(shares):
            low_bounds, high_bounds = ((x - _END_ROUNDING, x + _END_ROUNDING) for x in (low, high))
            yield False, low_bounds, high_bounds
            if all(abs(end - round(end)) < _END_ROUNDING for end in (low, high)):
                # the low end was rounded down, and not below 0, and the high end up
                low, high = round(low), round(high)
                yield True, (low or -math.inf, low + 1), (high - 1, high)


def _scan_yarn(measured: Frequencies) -> Proposals:
    """A ramp linear in the index; at its ends, pairs make known turns over the context."""
    for base, factor, shares in _find_kept_shares(measured):
        for truncate, *bounds in _find_ramp_ends(shares):
            # contexts over which pairs at these real-valued indices make one turn
            low, high = (
                Interval(*(2 * math.pi * base ** (end / measured.num_pairs) for end in ends))
                for ends in bounds
            )
            candidates: list[tuple[float | None, float | None, float]] = []
            for fast, slow in _BETAS:
                contexts = low.times(fast) & high.times(slow)
                candidates.append((contexts.power_of_two() or contexts.simplest(), fast, slow))
            length = high.power_of_two()
            if length is not None and low.low > 0:
                turns = Interval(length / low.high, length / low.low).simplest()
                candidates.append((length, turns, 1.0))
            for context, fast, slow in candidates:
                if context and fast and context >= 1 and fast >= 1 and context == int(context):
                    law = scaling.Yarn(
                        factor=factor, original_max_positions=int(context), beta_fast=fast,
                        beta_slow=slow, truncate=truncate,
                    )  # fmt: skip
                    yield _propose(base, law)


def _scan_ramps_over_frequency(measured: Frequencies) -> Proposals:
    """A ramp linear in the frequency itself: Llama 3's, and the one that YaRN's paper prints."""
    for base, factor, shares in _find_kept_shares(measured):
        plain = base ** (-measured.indices / measured.num_pairs)
        on_ramp = _pairs_on_ramp(shares)
        if len(on_ramp) == 0:  # a step, or a ramp between two pairs
            wavelengths = 2 * np.pi / plain[_last_kept_pair(shares) :]
            context = Interval(*wavelengths[:2]).power_of_two() if len(wavelengths) > 1 else None
            contexts, high_turns = [] if context is None else [context], (1.0, 4.0)
        elif len(on_ramp) == 1:  # one pair gives one number: the usual turns are assumed
            slow = float(plain[on_ramp[0]] / (1 + 3 * shares[on_ramp[0]]))
            contexts, high_turns = _find_round_contexts(2 * np.pi / slow), (4.0,)
        else:
            slope, last = _ramp_slope(shares, on_ramp, -plain), on_ramp[-1]
            slow = float(plain[last] - shares[last] / slope) if slope > 0 else 0.0
            if slow <= 0:
                continue
            ratio = simplest_near(1 + 1 / slope / slow, 1e-3) or 1.0
            contexts, high_turns = _find_round_contexts(2 * np.pi / slow), (ratio,)
            original = interval_around(2 * np.pi / slow, 1e-3).power_of_two()
            if original is not None:
                law = scaling.YarnPaper(
                    factor=factor, original_max_positions=original, beta_fast=ratio
                )
                yield _propose(base, law)
        for length, high in product(contexts, high_turns):
            law = scaling.Llama3(
                factor=factor, original_max_positions=length, low_freq_factor=1.0,
                high_freq_factor=high,
            )  # fmt: skip
            yield _propose(base, law)


def _find_round_contexts(length: float) -> list[int]:
    """Lengths near a measured one: a power of two, the one with fewest digits, the nearest."""
    interval = interval_around(length, 1e-3)
    lengths = dict.fromkeys(
        [interval.power_of_two(), round(interval.simplest() or 0), round(length)]
    )
    return [length for length in lengths if length is not None and length >= 1]


def _scan_part_ntk(measured: Frequencies) -> Proposals:
    for base, factor, shares in _find_kept_shares(measured):
        changed = np.flatnonzero(shares < 1)
        for length in (1 << power for power in range(9, 18)):
            # its ramp begins at the pair that turns 16 times over the context
            index = measured.num_pairs * math.log(length / (32 * math.pi)) / math.log(base)
            if len(changed) > 0 and abs(int(changed[0]) - index) <= 2:
                law = scaling.PartNTK(factor=factor, original_max_positions=length)
                yield _propose(base, law)


def _find_inverted_ramp(measured: Frequencies) -> Proposals:
    """A YaRN ramp that divides the fast pairs and keeps the slow ones."""
    f, pairs, indices = measured.inv_freq, measured.num_pairs, measured.indices
    factor = simplest_near(1 / f[0], 2 * measured.relative_errors[0] + 1e-12)
    run = measured.base_of_longest_run(slow=True)
    # a base, a factor and two ends are four numbers, which fit any few pairs
    if factor is None or factor <= 1 or run is None or pairs < 8:
        return
    base, _ = run
    shares = _shares_of(f * base ** (indices / pairs), factor, measured)
    on_ramp = _pairs_on_ramp(shares)
    if len(on_ramp) < 2:
        return
    slope = -_ramp_slope(shares, on_ramp, indices)
    ramp = np.clip(shares[on_ramp[0]] + slope * (indices - on_ramp[0]), 0, 1)
    exact = base ** (-indices / pairs) * (ramp + (1 - ramp) / factor)
    fits = np.all(np.abs(exact - f) <= (2 * measured.relative_errors + 1e-9) * f)
    if slope > 0 and ramp[-1] == 1 and fits:
        yield _propose(base, None, make_finding("ramp-inverted", factor=factor), base, factor)


#: By law, the form of spectrum and the scan that recognise it. Frequencies of a law without a scan
#: are listed one by one, as those of `PerPair`, which gives any; rules show in calls of several
#: lengths (`mistakes.add_rule`).
SCANS: dict[str, tuple[Form, Scan]] = {
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
}
_MISTAKES: tuple[tuple[Form, Scan], ...] = (
    ("powers", _find_exponent_width),
    ("scaled", _find_indices_from_one),
    ("scaled", _find_stretched_frequencies),
    ("scaled", _find_inverted_ramp),
)
