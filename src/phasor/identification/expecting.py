"""How a function differs from the expected rotation, or all findings if nothing is expected."""

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

# findings about the turns of a function alone: no difference if the expected rope turns the same
_COMPARED = {
    *MISTAKES, "axis-scaled", "beyond-half-a-turn", "direction", "offset",
    "frequencies-in-bfloat16", "frequencies-in-float16",
}  # fmt: skip
# names of findings that state a difference but not its cause
_VAGUE = {"angles", "frequencies", "no-rotation", "tokens"}
# names of findings that change the recorded turns little or not at all, and so explain none
_ELSEWHERE = {
    "inputs-written", "angles-in-float32", "frequencies-in-float32",
    *NAMES["calls"], *NAMES["the end of a table"], *NAMES["negative positions"],
}  # fmt: skip


class Reference(NamedTuple):
    """The reference for a function: a Rope, or the findings about another function."""

    rope: Rope
    offset: float = 0.0  # added to every position
    gain: float = 1.0  # a factor on the result in addition to the rope's attention factor
    findings: Changes = ()

    @classmethod
    def from_report(cls, report: Identification) -> Reference | None:
        """The reference from a function's report; None if its rotation is no Rope."""
        if report.rope is None:
            return None
        gain = (report.attention_factor or 1.0) / report.rope.attention_factor
        return cls(report.rope, report.position_offset, gain, report.findings)


def find_differences(
    caller: Caller, measured: Measurement, reference: Reference | None = None, max_position: int = 0
) -> Changes:
    """How a function differs from the reference, the most important difference first.

    Without a reference, these are all findings about the function. With one, findings that the
    reference shares are left out, and differences that show in a recording of the function are
    added; the recording ends at ``max_position``, or where the function stops being one rotation.
    """
    report, end = measured
    if reference is None:
        return in_order(report.findings)
    recorded: Changes = ()
    if "remembers" not in report.names():
        last = min(end, max_position) - 1
        recorded = find_causes(
            reference.rope, caller, last, offset=reference.offset, gain=reference.gain
        )
    findings = {
        finding.name: finding
        for finding in report.findings
        if not _holds_for(reference, recorded, finding)
    }
    superseded = superseded_by(findings)
    superseded |= {finding.name for finding in reference.findings if is_rounding(finding)}
    changes = {finding.name: finding for finding in recorded if finding.name not in superseded}
    return in_order((findings | changes).values())


def superseded_by(names: Collection[str]) -> set[str]:
    """The names of vaguer findings that these findings replace, as they explain them better."""
    superseded = set(_VAGUE) if {*names} - _ELSEWHERE else set[str]()
    if "factor-on-one-side" in names:
        superseded.add("factor")
    return superseded


def _holds_for(reference: Reference, recorded: Changes, finding: Finding) -> bool:
    """Whether a finding about the function alone holds for the reference as well."""
    if is_among(finding, reference.findings):
        return True
    if finding.name == "frequencies-in-float32":
        f = reference.rope.inv_freq
        return np.array_equal(rounded(f, "float32"), f)
    # the recording has compared frequencies, and a property that it cannot show is no difference
    compared = {change.name for change in recorded}
    return finding.name in _COMPARED - compared


def is_among(finding: Finding, findings: Sequence[Finding]) -> bool:
    """Whether a finding is among others; roundings match by name, as measured errors vary."""
    return finding in findings or (
        is_rounding(finding) and any(candidate.name == finding.name for candidate in findings)
    )
