"""A base and a law for each axis, for frequencies that no common base and law explain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from phasor.errors import SpecError
from phasor.identification.laws import (
    FLOAT64_SLACK,
    Explanation,
    Proposals,
    make_proposals,
    pad_to_rope,
    propose,
    scan_stretched_base,
)
from phasor.identification.spectrum import Floats, Frequencies, simplest_near
from phasor.rope import Rope, plain_axes, with_frequencies
from phasor.scaling import NTK, Linear

# fewer frequencies than this fit a base of many digits by themselves
_FEWEST_PAIRS = 3


class LawsByAxis(NamedTuple):
    """A base and a law for each axis."""

    explanations: tuple[Explanation, ...]  # one for each axis
    digits: int  # of all parameters; axes that are alike count once

    def apply_to(self, rope: Rope) -> Rope:
        """The rope with these bases and laws."""
        bases = tuple(explanation.base for explanation in self.explanations)
        laws = tuple(explanation.law for explanation in self.explanations)
        axes = replace(cast(Any, plain_axes(rope.axes)), base=bases, scaling=laws)
        return replace(with_frequencies(rope), base=None, axes=axes)


class _Ladder(NamedTuple):
    """The measured frequencies of one axis, and their places in the spectrum of its base."""

    inv_freq: Floats
    tolerance: Floats
    steps: NDArray[np.intp]
    length: int  # how many frequencies the spectrum has

    @property
    def relative_errors(self) -> Floats:
        return self.tolerance / np.maximum(self.inv_freq, 1e-300)

    @property
    def measured(self) -> Frequencies:
        return Frequencies(
            self.inv_freq, self.relative_errors, 2 * self.length,
            indices=self.steps, num_pairs=self.length,
        )  # fmt: skip

    def fits(self, explanation: Explanation) -> bool:
        with suppress(SpecError):  # a law may need more pairs
            axis = Rope(
                head_dim=2 * self.length,
                pairing="half",
                base=explanation.base,
                scaling=explanation.law,
            )
            error = np.abs(axis.inv_freq[self.steps] - self.inv_freq)
            return bool(np.all(error <= self.tolerance + FLOAT64_SLACK * self.inv_freq))
        return False


def find_laws_by_axis(
    rope: Rope, f: Floats, uncertainty: Floats, slack: float, bases: Sequence[float] = ()
) -> list[LawsByAxis]:
    """The bases and laws with the fewest digits that explain frequencies ``f``, axis by axis.

    The list is empty if an axis has no explanation. Frequencies must not be negative; ``slack`` is
    the relative error allowed in those of a law. With ``bases`` no other bases are tried.
    """
    if not hasattr(rope.axes, "sections"):
        return []
    f, uncertainty = pad_to_rope(f, rope), pad_to_rope(uncertainty, rope)
    ladders: list[_Ladder] = []
    for axis in range(rope.axes.n_axes):
        length, steps = rope.axes.ladder(axis, rope.num_pairs)
        pairs = np.array([*steps], np.intp)
        tolerance = uncertainty[pairs] + slack * f[pairs]
        ladders.append(_Ladder(f[pairs], tolerance, np.array([*steps.values()], np.intp), length))
    separate = [_explain_axis(ladder, bases) for ladder in ladders]
    explanations = [*dict.fromkeys(candidate for candidate in separate if candidate is not None)]
    bases_of_all = [*dict.fromkeys(candidate.base for candidate in explanations)]
    chosen: list[Explanation] = []
    for ladder, explanation in zip(ladders, separate, strict=True):
        # an axis with few pairs, or none, may have the base and law of another axis
        candidates = (
            candidate
            for candidate in (*explanations, *_divided(ladder, bases_of_all))
            if ladder.fits(candidate)
        )
        fewest = min((explanation, *candidates), key=_digits, default=None)
        if fewest is None:
            return []
        chosen.append(fewest)
    return [LawsByAxis((*chosen,), sum(candidate.digits for candidate in dict.fromkeys(chosen)))]


def _digits(explanation: Explanation | None) -> float:
    return 1e6 if explanation is None else explanation.digits


def _explain_axis(ladder: _Ladder, bases: Sequence[float]) -> Explanation | None:
    """The base and law of one axis with the fewest digits."""
    if np.count_nonzero(ladder.inv_freq) < _FEWEST_PAIRS:
        return None
    if bases:
        plain = (propose(base) for base in bases)
        proposals = chain(plain, _raised(ladder, bases), _divided(ladder, bases))
    elif len(ladder.steps) == ladder.length:
        proposals = make_proposals(ladder.inv_freq, ladder.tolerance, 2 * ladder.length)
    else:
        proposals = _propose_powers(ladder)
    likely = (
        proposal
        for proposal in proposals
        if proposal is not None
        and proposal.mistake is None
        and 1 < proposal.base < 1e30
        and ladder.fits(proposal)
    )
    return min(likely, key=_digits, default=None)


def _propose_powers(ladder: _Ladder) -> Proposals:
    """The powers of a base, or of a base that NTK-aware scaling raised, at some of the steps."""
    if ladder.inv_freq.all():
        yield propose(ladder.measured.find_bases().simplest())
        yield from scan_stretched_base(ladder.measured)


def _raised(ladder: _Ladder, bases: Sequence[float]) -> Proposals:
    """The powers of known bases, raised by NTK-aware scaling."""
    if ladder.inv_freq.all() and ladder.length > 1:
        raised = ladder.measured.find_bases()
        for base in bases:
            stretches = raised.times(1 / base)
            factor = stretches.power((ladder.length - 1) / ladder.length).simplest()
            if stretches and factor is not None:
                yield propose(base, NTK(factor=factor))


def _divided(ladder: _Ladder, bases: Sequence[float]) -> Iterator[Explanation]:
    """The powers of known bases, divided by a number."""
    turning = ladder.inv_freq > 0
    for base in bases if turning.any() else ():
        plain = base ** (-ladder.steps[turning] / ladder.length)
        ratio = float(np.median(plain / ladder.inv_freq[turning]))
        factor = simplest_near(ratio, float(ladder.relative_errors[turning].min()) + FLOAT64_SLACK)
        if factor is not None and factor > 0:
            divided = propose(base, Linear(factor=factor))
            yield from [] if divided is None else [divided]
