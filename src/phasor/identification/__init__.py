"""Which rotation does this function do, and do two agree?"""

from __future__ import annotations

from phasor.identification.difference import Difference, Parting, diff
from phasor.identification.measuring import identify
from phasor.identification.report import Finding, Identification, PairFound
from phasor.identification.samples import identify_samples
from phasor.identification.tensors import Measured, MeasuredParting, diff_measured, measured

__all__ = [
    "Difference",
    "Finding",
    "Identification",
    "Measured",
    "MeasuredParting",
    "PairFound",
    "Parting",
    "diff",
    "diff_measured",
    "identify",
    "identify_samples",
    "measured",
]
