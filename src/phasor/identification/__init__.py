"""Which rotation a program performs, and where two rotations differ.

`identify` asks a function, `identify_samples` recorded vectors, `from_cache` tables of cos and sin.
`verify` compares recorded vectors or tables with a rope.
`diff` compares two Ropes, two models layer by layer, or functions.
"""

from __future__ import annotations

from phasor.identification.comparing import diff
from phasor.identification.identifying import identify
from phasor.identification.report import Identification, Verification
from phasor.identification.samples import identify_samples
from phasor.identification.tables import from_cache
from phasor.identification.verifying import verify

__all__ = [
    "Identification",
    "Verification",
    "diff",
    "from_cache",
    "identify",
    "identify_samples",
    "verify",
]
