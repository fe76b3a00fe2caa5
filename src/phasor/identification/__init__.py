"""Which rotation a program does, where two rotations part, and what a longer context does to one.

`identify` asks a function, `identify_samples` recorded vectors, `from_cache` tables of cos and sin.
`verify` says whether recorded vectors or tables rotate as a rope says, and what differs.
`diff` compares two Ropes, two models layer by layer, or functions. `plan_extension` puts the laws
for a longer context side by side, `coverage` says which phases one adds.
"""

from __future__ import annotations

from phasor.identification.differences import diff
from phasor.identification.extending.phases import Coverage, coverage
from phasor.identification.extending.planning import ExtensionOption, ExtensionPlan, plan_extension
from phasor.identification.measuring import from_cache, identify, identify_samples
from phasor.identification.report import Identification
from phasor.identification.verifying import Verification, verify

__all__ = [
    "Coverage",
    "ExtensionOption",
    "ExtensionPlan",
    "Identification",
    "Verification",
    "coverage",
    "diff",
    "from_cache",
    "identify",
    "identify_samples",
    "plan_extension",
    "verify",
]
