"""A function's rotation, measured by calls: the pairs that turn, and the facts about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from phasor.identification.calling import Caller, RefusedError
from phasor.identification.report import Finding, Identification, add_findings
from phasor.identification.shifts import Shifts
from phasor.identification.spectrum import (
    FACTOR_ROOM,
    Complex,
    Floats,
    Spectrum,
    bound_angle_errors,
)
from phasor.identification.turns import Arrangement, Turns, turns_of_pairs


@dataclass(frozen=True)
class Probe:
    """Measures how far every pair turns, with one vector per position."""

    caller: Caller
    arrangement: Arrangement
    rounding: float  # the relative rounding error of the results
    noise: float = 0.0  # the error of the results that rounding does not explain

    def __call__(self, positions: Sequence[Any] | NDArray[Any]) -> Complex:
        """The turns ``[P, pairs]`` at positions ``[P]``, equal on all axes, or ``[P, n_axes]``."""
        vector = np.zeros((1, self.caller.head_dim))
        vector[0, self.arrangement.read[0]] = 1
        turned = self.caller.turn(vector, positions)[0, :, 0]  # [P, head_dim]
        # view [P, pairs, 2] as complex, because a product would warn of infinities
        return np.ascontiguousarray(turned[:, self.arrangement.written.T]).view(complex)[..., 0]

    def turns(self, positions: NDArray[Any]) -> Turns:
        """The turns at positions ``[P, n_axes]``, with their errors."""
        z = self(positions)
        errors = np.abs(z) * (2 * self.rounding + self.angle_errors(z))
        return turns_of_pairs(self.arrangement, z, errors, positions)

    def angle_errors(self, z: Complex) -> Floats:
        """How far the angles of results may be off."""
        return bound_angle_errors(z, self.rounding, self.noise)

    def differ(self, a: Complex, b: Complex) -> bool:
        """Whether two results differ by more than rounding explains."""
        size = float(np.max(np.abs(b), where=np.isfinite(b), initial=1.0))
        return not np.allclose(a, b, rtol=0, atol=16 * self.rounding * size, equal_nan=True)


class Lengths(NamedTuple):
    """The results of calls of growing lengths."""

    # by the highest position of a call: unit vectors turned to the `powers_of_two` up to it
    answers: dict[int, Complex]
    # the highest position of the longest call that agrees with all shorter ones
    longest_consistent: int
    # the highest position of the shortest call that contradicts shorter ones
    changes_at: int | None
    # the highest position of a call that gave another result when it was repeated
    irreproducible_at: int | None


@dataclass
class Measured:
    """A rotation whose frequencies are known, and its report, which later steps extend."""

    probe: Probe
    maps: Floats  # at small positions, [outputs, P, out, in]
    lengths: Lengths
    spectrum: Spectrum
    report: Identification
    max_position: int
    start: int  # the first position that turns at these frequencies
    refusal: str = ""  # the message of the last refusal

    @property
    def end(self) -> int:
        """The first position that turns by another rotation, or not, or that is not measured."""
        ends = self.lengths.changes_at, self.report.table_end
        return min(end for end in (self.max_position + 1, *ends) if end)

    def add(self, *findings: Finding, **changed_fields: Any) -> None:
        """Add findings to the report, and change other fields."""
        self.report = add_findings(self.report, *findings, **changed_fields)

    def results(self, *positions: int, single_call: bool = False) -> dict[int, Complex]:
        """The function's results divided by its factor, at positions that it does not refuse."""
        results: dict[int, Complex] = {}
        for call in [positions] if single_call else [(position,) for position in positions]:
            try:
                z = self.probe(call) / (self.report.attention_factor or 1.0)
                results.update(zip(call, z, strict=True))
            except RefusedError as error:
                self.refusal = " ".join(str(error).split())[:80]
        return results

    def shifts(self, results: Mapping[int, Complex]) -> Shifts:
        """The shifts of such results relative to the measured frequencies."""
        positions = np.array([*results], np.float64)
        z = np.array([*results.values()]).reshape(len(positions), len(self.spectrum.inv_freq))
        error, offset = 64 * self.probe.rounding + FACTOR_ROOM, self.report.position_offset
        return Shifts.from_spectrum(self.spectrum, positions, z, error, offset)
