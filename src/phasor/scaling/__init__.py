"""The frequency laws: how a longer context is reached by slowing some pairs down.

A *law* (`Law`) is a pure function of frequencies; a *rule* (`Rule`) picks a law from a length.
Each is a small frozen class, and ``LAWS`` is the whole registry: its keys are the names used in
JSON and on the command line.
"""

from __future__ import annotations

from phasor.scaling._law import Frequencies, Law, Rule, Temperature
from phasor.scaling._ramps import Llama3, PartNTK, Yarn, YarnPaper, yarn_multiplier
from phasor.scaling._rules import DynamicNTK, LongRope, SteppedNTK
from phasor.scaling._selective import Cope, Hope, PerPair, Proportional, Resonance
from phasor.scaling._uniform import NTK, Linear, NTKFixed, NTKMixed, NTKOld

LAWS: dict[str, type[Law] | type[Rule]] = {
    "linear": Linear,
    "ntk": NTK,
    "ntk_old": NTKOld,
    "ntk_fixed": NTKFixed,
    "ntk_mixed": NTKMixed,
    "part_ntk": PartNTK,
    "yarn": Yarn,
    "yarn_paper": YarnPaper,
    "llama3": Llama3,
    "proportional": Proportional,
    "hope": Hope,
    "cope": Cope,
    "resonance": Resonance,
    "per_pair": PerPair,
    "dynamic_ntk": DynamicNTK,
    "stepped_ntk": SteppedNTK,
    "longrope": LongRope,
}

__all__ = [
    "LAWS",
    "NTK",
    "Cope",
    "DynamicNTK",
    "Frequencies",
    "Hope",
    "Law",
    "Linear",
    "Llama3",
    "LongRope",
    "NTKFixed",
    "NTKMixed",
    "NTKOld",
    "PartNTK",
    "PerPair",
    "Proportional",
    "Resonance",
    "Rule",
    "SteppedNTK",
    "Temperature",
    "Yarn",
    "YarnPaper",
    "yarn_multiplier",
]
