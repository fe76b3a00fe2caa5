"""Which rotation a program does, and the positions where two rotations part.

`identify` asks a function, `identify_samples` recorded vectors. `diff` compares two Ropes, two
models layer by layer, or functions.
"""

from __future__ import annotations

from phasor.identification.differences import diff
from phasor.identification.measuring import identify, identify_samples
from phasor.identification.report import Identification

__all__ = ["Identification", "diff", "identify", "identify_samples"]
