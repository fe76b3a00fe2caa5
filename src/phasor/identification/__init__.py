"""Which rotation is this, and where do two of them part?

`identify` asks a function, `identify_samples` recorded vectors. `diff` compares two Ropes,
`diff_measured` functions too, `compare` two models layer by layer.
"""

from __future__ import annotations

from phasor.identification.calling import Caller, measured
from phasor.identification.differences import (
    Comparison,
    Difference,
    MeasuredParting,
    Meeting,
    Parting,
    compare,
    diff,
    diff_measured,
)
from phasor.identification.measuring import identify, identify_samples
from phasor.identification.report import Finding, Identification, PairFound

__all__ = [
    "Caller",
    "Comparison",
    "Difference",
    "Finding",
    "Identification",
    "MeasuredParting",
    "Meeting",
    "PairFound",
    "Parting",
    "compare",
    "diff",
    "diff_measured",
    "identify",
    "identify_samples",
    "measured",
]
