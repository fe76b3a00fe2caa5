"""Which rotation a program does, and the positions where two rotations part.

`identify` asks a function, `identify_samples` recorded vectors, `from_cache` tables of cos and sin.
`diff` compares two Ropes, two models layer by layer, or functions.
"""

from __future__ import annotations

from phasor.identification.differences import diff
from phasor.identification.measuring import identify, identify_samples
from phasor.identification.report import Identification
from phasor.identification.tables import from_cache

__all__ = ["Identification", "diff", "from_cache", "identify", "identify_samples"]
