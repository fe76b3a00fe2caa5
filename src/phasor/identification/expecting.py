"""How a function differs from what was expected; if nothing was, everything that was found."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from phasor.identification.calling import Caller
from phasor.identification.functions import Measurement
from phasor.identification.laws import MISTAKES
from phasor.identification.recorded import find_causes
from phasor.identification.report import (
    NAMES,
    Changes,
    Finding,
    Identification,
    in_order,
    is_rounding,
)
from phasor.identification.spectrum import rounded
from phasor.rope import Rope

# findings about a function's turns alone, which are no difference where the rope turns so too
_COMPARED = {
    *MISTAKES, "axis-scaled", "beyond-half-a-turn", "direction", "offset",
    "frequencies-in-bfloat16", "frequencies-in-float16",
}  # fmt: skip
# names that say that something differs, but not how
_VAGUE = {"angles", "frequencies", "no-rotation", "tokens"}
# names of what changes the recorded turns little or not at all, and so explains none of them
_ELSEWHERE = {
    "inputs-written", "angles-in-float32", "frequencies-in-float32",
    *NAMES["calls"], *NAMES["the end of a table"], *NAMES["negative positions"],
}  # fmt: skip


class Reference(NamedTuple):
    """The reference for a function: a Rope, or the findings about another function."""

    rope: Rope
    offset: float = 0.0  # of its positions
    gain: float = 1.0  # by which it multiplies further, apart from the rope's factor
    findings: Changes = ()

    @classmethod
    def of(cls, report: Identification) -> Reference | None:
        """What a function does, if that is a Rope."""
        if report.rope is None:
            return None
        gain = (report.attention_factor or 1.0) / report.rope.attention_factor
        return cls(report.rope, report.position_offset, gain, report.findings)


def find_differences(
    caller: Caller, measured: Measurement, expected: Reference | None = None, near: int = 0
) -> Changes:
    """How a function differs from what is expected of it, the most important first.

    If nothing is expected, these are all findings about the function. Otherwise findings that the
    reference shares are left out, and the differences are added that a recording of the function
    shows below ``near``, up to the position where it stops to be one rotation.
    """
    report, end = measured
    if expected is None:
        return in_order(report.findings)
    recorded: Changes = ()
    if "remembers" not in report.names():
        last = min(end, near) - 1
        recorded = find_causes(
            expected.rope, caller, last, offset=expected.offset, gain=expected.gain
        )
    findings = {
        finding.name: finding
        for finding in report.findings
        if not _has(expected, recorded, finding)
    }
    superseded = superseded_by(findings)
    superseded |= {finding.name for finding in expected.findings if is_rounding(finding)}
    changes = {finding.name: finding for finding in recorded if finding.name not in superseded}
    return in_order((findings | changes).values())


def superseded_by(names: Collection[str]) -> set[str]:
    """Names of differences in a recording that these findings explain better."""
    superseded = set(_VAGUE) if {*names} - _ELSEWHERE else set[str]()
    if "factor-on-one-side" in names:
        superseded.add("factor")
    return superseded


def _has(reference: Reference, recorded: Changes, finding: Finding) -> bool:
    """Whether what was found of a function alone is no difference from the reference."""
    if is_among(finding, reference.findings):
        return True
    if finding.name == "frequencies-in-float32":
        f = reference.rope.inv_freq
        return np.array_equal(rounded(f, "float32"), f)
    # a recording compares frequencies; and what cannot be told is none
    compared = {change.name for change in recorded}
    return finding.name in _COMPARED - compared


def is_among(finding: Finding, findings: Sequence[Finding]) -> bool:
    """Whether another function has it too; of roundings the measured errors differ a little."""
    return finding in findings or (
        is_rounding(finding) and any(other.name == finding.name for other in findings)
    )
