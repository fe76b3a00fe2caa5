"""Which rotation does this function do, and do two agree?"""

from __future__ import annotations

from phasor.conventions._difference import Difference, Parting, diff
from phasor.conventions._identify import identify
from phasor.conventions._measured import Measured, MeasuredParting, diff_measured, measured
from phasor.conventions._report import Finding, Identification, PairFound
from phasor.conventions._samples import identify_samples

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
