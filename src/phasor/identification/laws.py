"""The base and law behind measured frequencies. Parameters are solved for, not searched.

A *scan* proposes bases and laws for one form of spectrum. The law of each proposal is then computed
and compared with all pairs; the proposal whose parameters have the fewest digits is the likeliest.
`SCANS` lists the scan for each law.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import fields, replace
from decimal import Decimal
from itertools import product
from typing import Any, Literal, NamedTuple

import numpy as np

from phasor import scaling
from phasor._reals import in_reals
from phasor.errors import SpecError
from phasor.identification.ramps import Ramp, make_ramp
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
from phasor.rope import Rope, real_inv_freq
from phasor.scaling import Law

#: Bases that models are trained with; any other base may be one of these that a law has stretched.
USUAL_BASES = (1e4, 5e5, 1e6, 1e5, 1.5e5, 1.6e5, 5e6, 1e7, 2e6, 8e6)


#: The relative error of frequencies that a program computed in float64.
FLOAT64_SLACK = 1e-14


# a frequency measured as 0 is evidence of a stopped pair only if its uncertainty is below this
_MAX_ZERO_UNCERTAINTY = 1e-9


# a mistake counts as likelier than a law whose parameters have this many more digits
_MISTAKE_DIGITS = 6


# exponents that published mixed NTK laws use
_MIXED_EXPONENTS = (0.625, 0.75, 0.5, 1.5, 2.0)


# numbers of turns at which the YaRN ramps of published models begin and end
_BETAS = ((32.0, 1.0), (1.0, 1.0), (64.0, 1.0), (16.0, 1.0), (32.0, 2.0), (128.0, 1.0))


_RAMP_FACTORS = (2.0, 4.0, 8.0, 16.0, 32.0, 40.0, 64.0, 128.0)


# a ramp's end was rounded to a whole index if it is this close to one, in pairs
_END_ROUNDING = 1e-3


class Explanation(NamedTuple):
    """A base and a law that explain the measured frequencies."""

    base: float
    law: Law | None  # None for plain powers of the base
    mistake: Finding | None  # a mistake that explains them with far fewer digits than any law
    digits: int  # the digits of all parameters together: the fewer, the likelier

    def __str__(self) -> str:
        law = "" if self.law is None else f" with {law_text(self.law)}"
        return f"base {self.base:.15g}{law}"

    @property
    def gives_frequencies(self) -> bool:
        """Whether a Rope with this base and law has these frequencies."""
        # only mistakes that no law describes have others; these are checked when they are proposed
        return self.mistake is None or self.mistake.name not in ("ramp-inverted", "law-twice")


Form = Literal["powers", "stopped", "scaled"]


# a scan that finds no base proposes None
Proposals = Iterator[Explanation | None]


Scan = Callable[[Frequencies], Proposals]


def pad_to_rope(values: Floats, rope: Rope) -> Floats:
    """Values of the measured pairs, and 0 for the other pairs of the Rope."""
    return np.pad(values, (0, rope.num_pairs - len(values)))


def find_explanations(
    rope: Rope, f: Floats, uncertainty: Floats, slack: float
) -> list[Explanation]:
    """Explanations of all frequencies ``f`` for the slice and axes of ``rope``, likeliest first.

    ``f`` must not be negative. ``slack`` is the relative error allowed in a law's frequencies.
    """
    f, uncertainty = pad_to_rope(f, rope), pad_to_rope(uncertainty, rope)
    tolerance = uncertainty + slack * f
    # proposals come from the widest spectrum and are checked against all spectra
    spectra = rope.axes.spectra(len(f))
    widest = int(np.argmax(spectra))
    pairs = slice(sum(spectra[:widest]), sum(spectra[: widest + 1]))
    confirmed: list[Explanation] = []
    for proposal in make_proposals(f[pairs], tolerance[pairs], rope.head_dim):
        if proposal is None or not 1 < proposal.base < 1e30 or proposal in confirmed:
            continue
        with suppress(SpecError):  # the law does not fit this spectrum
            lawful = replace(rope, base=proposal.base, scaling=proposal.law).inv_freq
            # rounded logarithms gave the base, hence the slack
            fits = np.all(np.abs(lawful - f) <= tolerance + FLOAT64_SLACK * f)
            if fits or not proposal.gives_frequencies:
                confirmed.append(proposal)
    fewest = min((p.digits for p in confirmed if p.mistake is None), default=1000)
    likely = [p for p in confirmed if p.mistake is None or p.digits + _MISTAKE_DIGITS <= fewest]
    return sorted(likely, key=lambda p: p.digits)


def make_proposals(f: Floats, tolerance: Floats, head_dim: int) -> Proposals:
    """Bases and laws that may give the frequencies of one whole spectrum."""
    relative_errors = tolerance / np.maximum(f, 1e-300)
    turning = int(np.count_nonzero(f))
    # a single frequency is a power of any base, and no law stops a pair between pairs that turn
    if turning == 0 or len(f) == 1 or relative_errors[0] >= 0.5 or not f[:turning].all():
        return
    measured = Frequencies(f, relative_errors, head_dim)
    base = measured.find_bases().simplest() if measured.begin_with_one else None
    form: Form = "scaled" if base is None else "powers"
    # a pair too slow to be told from 0 is no evidence of a law
    if np.any((f == 0) & (tolerance > _MAX_ZERO_UNCERTAINTY)):
        if base is None:
            return
    elif turning < len(f):
        form = "stopped"
    if form == "powers":
        yield propose(base)
    for scanned_form, scan in (*dict.fromkeys(SCANS.values()), *_MISTAKES):
        if scanned_form == form:
            yield from scan(measured)


def propose(base: float | None, law: Law | None = None) -> Explanation | None:
    """The explanation by a base and a law, where each parameter counts its digits and one more."""
    if base is None:
        return None
    values = {} if law is None else changed_parameters(law)
    digits = sum(1 + count_digits(v) for v in values.values() if type(v) in (int, float))
    return Explanation(base, law, None, count_digits(base) + (law is not None) + digits)


def _propose_mistake(
    mistake: Finding, base: float, law: Law | None, *numbers: float
) -> Explanation:
    """The explanation by a mistake; ``numbers`` are the parameters of the mistake."""
    return Explanation(base, law, mistake, 1 + sum(map(count_digits, numbers)))


def changed_parameters(law: Law) -> dict[str, Any]:
    """A law's parameters that are not at their defaults."""
    values = {field: getattr(law, field.name) for field in fields(law)}
    return {field.name: value for field, value in values.items() if value != field.default}


def law_text(law: Law) -> str:
    """The law with the parameters that are not at their defaults."""
    listed = ", ".join(f"{name}={value!r}" for name, value in changed_parameters(law).items())
    return f"{type(law).__name__}({listed})"


def scan_stretched_base(measured: Frequencies) -> Proposals:
    """A usual base that NTK-aware scaling has raised."""
    bases, pairs = measured.find_bases(), measured.num_pairs
    short = bases.simplest()
    if short is None or count_digits(short) <= 2:
        return
    spread = (bases.high - bases.low) / short + 1e-12
    exponents = (scaling.NTK, 1 / (pairs / (pairs - 1))), (scaling.NTKOld, 1.0)
    for usual, (law, exponent) in product(USUAL_BASES, exponents):
        stretch = simplest_near((short / usual) ** exponent, spread)
        if usual < bases.low and stretch is not None and count_digits(stretch) <= 3:
            yield propose(usual, law(factor=stretch))


def _find_exponent_width(measured: Frequencies) -> Proposals:
    bases, pairs = measured.find_bases(), measured.num_pairs
    short = bases.simplest()
    for width in {measured.head_dim, pairs, 4 * pairs} - {2 * pairs}:
        intended = bases.power(width / (2 * pairs)).simplest()
        if short and intended in USUAL_BASES and short not in USUAL_BASES:
            mistake = make_finding(
                "exponent-width", width=width, rotary_dim=2 * pairs, intended=intended
            )
            yield _propose_mistake(mistake, short, None, intended)


def _fit_divided(
    measured: Frequencies, exponent: float = 1.0, divisor: Callable[[float], Any] = float
) -> tuple[float | None, float]:
    """The base and the factor with the fewest digits that give powers divided by a factor."""
    # ``factor ** (1 / exponent)`` divides the first frequency, ``divisor(factor)`` all of them
    turning = slice(measured.num_turning)
    fits = [
        (count_digits(base) + count_digits(factor), base, factor)
        for factor in measured.factor.power(exponent).decimals()
        if (base := measured.find_bases(turning, divisor(factor)).simplest()) is not None
    ]
    return min(fits)[1:] if fits else (None, 1.0)


def _scan_divided(measured: Frequencies) -> Proposals:
    base, factor = _fit_divided(measured)
    yield propose(base, scaling.Linear(factor=factor))


def _find_stretched_frequencies(measured: Frequencies) -> Proposals:
    (base, factor), pairs = _fit_divided(measured), measured.num_pairs
    stretch = measured.factor.power((pairs - 1) / pairs).simplest()
    if base is not None and stretch is not None:
        mistake = make_finding("stretch-on-frequencies", factor=stretch)
        yield _propose_mistake(mistake, base, scaling.Linear(factor=factor), base, stretch)


def _find_indices_from_one(measured: Frequencies) -> Proposals:
    pairs = measured.num_pairs
    base = measured.find_bases(shift=1).simplest()
    if base is not None:
        mistake = make_finding("index-from-one", base=base, rotary_dim=2 * pairs)
        yield _propose_mistake(mistake, base, scaling.Linear(factor=base ** (1 / pairs)), base)


def _scan_ntk_fixed(measured: Frequencies) -> Proposals:
    pairs, roots = measured.num_pairs, (measured.indices + 1) / measured.num_pairs
    base, factor = _fit_divided(measured, pairs, lambda factor: factor**roots)
    yield propose(base, scaling.NTKFixed(factor=factor))


def _scan_ntk_mixed(measured: Frequencies) -> Proposals:
    """The logarithm of a frequency is linear in the index and in a power of the index."""
    pairs, indices, weights = measured.num_pairs, measured.indices, 1 / measured.relative_errors
    if pairs < 4:
        return
    for exponent in _MIXED_EXPONENTS:
        columns = np.stack((-indices / pairs, -((indices + 1) ** exponent)), axis=1)
        logs = np.log(measured.inv_freq) * weights
        (log_b, a), *_ = np.linalg.lstsq(columns * weights[:, None], logs, rcond=None)
        if 0 < log_b < 60 and abs(a) * pairs**exponent < 60:
            factor = simplest_near(math.exp(a * pairs**exponent), 1e-4)
            if factor is not None and factor != 1:
                law = scaling.NTKMixed(factor=factor, exponent=exponent)
                yield propose(simplest_near(math.exp(log_b), 1e-4), law)


def _scan_whole_wavelengths(measured: Frequencies) -> Proposals:
    lengths = 2 * np.pi / measured.inv_freq
    if np.all(np.abs(lengths - np.rint(lengths)) <= 2 * measured.relative_errors * lengths):
        # rounding moves a wavelength by up to half a position
        logs = log_base(measured.inv_freq, 0.51 / lengths, measured.num_pairs, measured.indices)
        yield propose(logs.exp().simplest(), scaling.Resonance())


def _scan_stopped(measured: Frequencies) -> Proposals:
    pairs, turning = measured.num_pairs, measured.num_turning
    base, factor = _fit_divided(measured)
    if turning < 2 or base is None:  # a single frequency is a power of any base
        return
    exact = turning / pairs
    fractions = Interval(exact, (turning + 1) / pairs * (1 - 1e-12))
    fraction = exact if count_digits(exact) <= 4 else fractions.simplest()
    if fraction is not None:
        yield propose(base, scaling.Proportional(fraction=fraction, factor=factor))
    slowest = base ** (-np.array([turning - 1, turning]) / pairs)
    length = Interval(*(2 * np.pi / slowest)).power_of_two()
    if factor == 1 and length is not None:
        yield propose(base, scaling.Hope(original_max_positions=length))


def _scan_faded(measured: Frequencies) -> Proposals:
    run = measured.base_of_longest_run()
    if measured.num_turning == measured.num_pairs - 1 and run is not None:
        base, run_length = run
        # the fade multiplies the first of its pairs by 1
        yield propose(base, scaling.Cope(num_pairs=measured.num_pairs - run_length + 1))


def _scan_ramps(measured: Frequencies) -> Proposals:
    run = measured.base_of_longest_run() if measured.begin_with_one else None
    if run is None:
        return
    base, _ = run
    powers = base ** (measured.indices[-2:] / measured.num_pairs)
    before_last, last = measured.inv_freq[-2:] * powers
    errors = measured.relative_errors[-2:]
    # if the same number divides the last two pairs, it is the whole factor
    plateau = simplest_near(1 / last, 2 * errors[1] + 1e-12)
    is_level = abs(last / before_last - 1) <= errors.sum()
    for factor in (plateau,) if is_level and plateau is not None else _RAMP_FACTORS:
        if factor != 1:
            ramp = make_ramp(measured, base, factor)
            for law in (*_fit_yarn(ramp), *_fit_turns(ramp), *_fit_part_ntk(ramp)):
                yield propose(base, law)


def _fit_yarn(ramp: Ramp) -> Iterator[Law]:
    """YaRN's ramp, linear in the index, from the turns of pairs at its ends in the context."""
    for truncate, *ends in _find_index_ends(ramp):
        # the contexts in which pairs at these real-valued indices make one turn
        low, high = (
            Interval(*(2 * math.pi * ramp.base ** (end / len(ramp.plain)) for end in bounds))
            for bounds in ends
        )
        contexts = [(low.times(fast) & high.times(slow), fast, slow) for fast, slow in _BETAS]
        candidates = [(c.power_of_two() or _roundest(c), fast, slow) for c, fast, slow in contexts]
        length = high.power_of_two()
        if length is not None and low.low > 0:
            turns = Interval(length / low.high, length / low.low).simplest()
            candidates.append((length, turns or 0.0, 1.0))
        for context, fast, slow in candidates:
            if context and context == int(context) >= 1 and fast >= 1:
                yield scaling.Yarn(
                    factor=ramp.factor, original_max_positions=int(context), beta_fast=fast,
                    beta_slow=slow, truncate=truncate,
                )  # fmt: skip


def _roundest(lengths: Interval) -> int | None:
    """The length with the largest power of two as a divisor: 40960 rather than 40000."""
    units = (1 << power for power in range(40, -1, -1))
    rounded_up = (unit * math.ceil(max(lengths.low, 1.0) / unit) for unit in units)
    return next((length for length in rounded_up if length <= lengths.high), None)


_Bounds = tuple[float, float]


def _find_index_ends(ramp: Ramp) -> Iterator[tuple[bool, _Bounds, _Bounds]]:
    """Possible ends of a ramp over the index: whether they are rounded, and bounds for each."""
    pairs, fitted = len(ramp.shares), ramp.fit(np.arange(float(len(ramp.shares))))
    last = ramp.last_kept
    whole = [(float(a), float(last + b)) for a in (last, last - 1) for b in (1, 2) if a >= 0]
    for low, high in whole if fitted is None else [fitted]:
        if low > -1 and high < 4 * pairs:
            low_bounds, high_bounds = ((x - _END_ROUNDING, x + _END_ROUNDING) for x in (low, high))
            yield False, low_bounds, high_bounds
            if all(abs(end - round(end)) < _END_ROUNDING for end in (low, high)):
                # YaRN rounds the low end down, but not below 0, and the high end up
                low, high = round(low), round(high)
                yield True, (low or -math.inf, low + 1), (high - 1, high)


def _fit_turns(ramp: Ramp) -> Iterator[Law]:
    """Laws with a ramp linear in the frequency: Llama 3's, and the ramp printed in YaRN's paper."""
    fitted, partial = ramp.fit(-ramp.plain), ramp.partial_pairs
    if fitted is not None:
        fast, slow = (-end for end in fitted)
        if slow <= 0:
            return
        high_turns = (simplest_near(fast / slow, 1e-3) or 1.0,)
        contexts = _find_round_contexts(2 * np.pi / slow)
        original = interval_around(2 * np.pi / slow, 1e-3).power_of_two()
        if original is not None:
            yield scaling.YarnPaper(
                factor=ramp.factor, original_max_positions=original, beta_fast=high_turns[0]
            )
    elif len(partial) == 1:  # one pair determines one number, so the usual turns are assumed
        slow = float(ramp.plain[partial[0]] / (1 + 3 * ramp.shares[partial[0]]))
        contexts, high_turns = _find_round_contexts(2 * np.pi / slow), (4.0,)
    else:  # a step, or a ramp between two pairs
        wavelengths = 2 * np.pi / ramp.plain[ramp.last_kept :]
        context = Interval(*wavelengths[:2]).power_of_two() if len(wavelengths) > 1 else None
        contexts, high_turns = [] if context is None else [context], (1.0, 4.0)
    for length, high in product(contexts, high_turns):
        yield scaling.Llama3(
            factor=ramp.factor, original_max_positions=length, high_freq_factor=high
        )


def _find_round_contexts(length: float) -> list[int]:
    """Lengths near a measured one: a power of two, the one with the fewest digits, the nearest."""
    interval = interval_around(length, 1e-3)
    lengths = (interval.power_of_two(), round(interval.simplest() or 0), round(length))
    return [length for length in dict.fromkeys(lengths) if length is not None and length >= 1]


def _fit_part_ntk(ramp: Ramp) -> Iterator[Law]:
    divided, pairs = np.flatnonzero(ramp.shares < 1), len(ramp.shares)
    for length in (1 << power for power in range(9, 18)):
        # this ramp begins at the pair that turns 16 times in the context
        index = pairs * math.log(length / (32 * math.pi)) / math.log(ramp.base)
        if len(divided) > 0 and abs(int(divided[0]) - index) <= 2:
            yield scaling.PartNTK(factor=ramp.factor, original_max_positions=length)


def _find_inverted_ramp(measured: Frequencies) -> Proposals:
    """A YaRN ramp that divides the fast pairs and keeps the slow ones."""
    errors = measured.relative_errors
    factor = simplest_near(1 / measured.inv_freq[0], 2 * errors[0] + 1e-12)
    run = measured.base_of_longest_run(slow=True)
    # a base, a factor and two ends are four parameters, which fit any spectrum of few pairs
    if factor is None or factor <= 1 or run is None or measured.num_pairs < 8:
        return
    base, _ = run
    ramp = make_ramp(measured, base, factor)
    fitted = ramp._replace(shares=1 - ramp.shares).fit(measured.indices)
    if fitted is None:
        return
    low, high = fitted
    shares = np.clip((measured.indices - low) / (high - low), 0, 1)
    exact = ramp.plain * (shares + (1 - shares) / factor)
    fits = np.abs(exact / measured.inv_freq - 1) <= 2 * errors + 1e-9
    if shares[-1] == 1 and fits.all():
        mistake = make_finding("ramp-inverted", factor=factor)
        yield _propose_mistake(mistake, base, None, base, factor)


@in_reals
def apply_twice(rope: Rope) -> tuple[float, ...]:
    """The frequencies that result when the law is applied to its own result."""
    law, base = rope.scaling, rope.base
    if not isinstance(law, Law) or base is None or len(rope.axes.spectra(rope.num_pairs)) > 1:
        raise SpecError("only a law of one whole spectrum can be applied twice")
    return tuple(map(float, law.apply(real_inv_freq(rope), Decimal(base))))


def _find_law_twice(measured: Frequencies) -> Proposals:
    """Llama 3's ramp applied twice, which squares the factor."""
    run = measured.base_of_longest_run() if measured.begin_with_one else None
    if run is None or measured.num_pairs < 8:
        return
    base, _ = run
    errors = measured.relative_errors
    plain = base ** (-measured.indices / measured.num_pairs)
    square = simplest_near(float(plain[-1] / measured.inv_freq[-1]), 2 * errors[-1] + 1e-12)
    factor = math.sqrt(square) if square is not None and square > 1 else 1.5
    if factor != int(factor):
        return
    for length in (1 << power for power in range(10, 18)):
        law = scaling.Llama3(factor=factor, original_max_positions=length)
        rope = Rope(head_dim=2 * measured.num_pairs, pairing="half", base=base, scaling=law)
        if np.all(np.abs(apply_twice(rope) / measured.inv_freq - 1) <= 2 * errors + 1e-9):
            mistake = make_finding("law-twice", law=law_text(law))
            yield _propose_mistake(mistake, base, law, base, factor)


#: For each law, the form of its spectrum and the scan that recognizes it. If a law has no scan,
#: such as `PerPair`, which can give any frequencies, the frequencies are reported one by one.
#: `add_rule` recognizes rules from calls of several lengths.
SCANS: dict[str, tuple[Form, Scan]] = {
    "linear": ("scaled", _scan_divided),
    "ntk": ("powers", scan_stretched_base),
    "ntk_old": ("powers", scan_stretched_base),
    "ntk_fixed": ("scaled", _scan_ntk_fixed),
    "resonance": ("scaled", _scan_whole_wavelengths),
    "ntk_mixed": ("scaled", _scan_ntk_mixed),
    "yarn": ("scaled", _scan_ramps),
    "llama3": ("scaled", _scan_ramps),
    "yarn_paper": ("scaled", _scan_ramps),
    "part_ntk": ("scaled", _scan_ramps),
    "proportional": ("stopped", _scan_stopped),
    "hope": ("stopped", _scan_stopped),
    "cope": ("stopped", _scan_faded),
}


#: The findings that are mistakes in the formula of the frequencies.
MISTAKES = {
    "exponent-width",
    "index-from-one",
    "law-twice",
    "ramp-inverted",
    "stretch-on-frequencies",
}
_MISTAKES: tuple[tuple[Form, Scan], ...] = (
    ("powers", _find_exponent_width),
    ("scaled", _find_indices_from_one),
    ("scaled", _find_stretched_frequencies),
    ("scaled", _find_inverted_ramp),
    ("scaled", _find_law_twice),
)
