"""The scaling laws: how a longer context is reached by slowing some pairs down.

A *law* (`Law`) is a pure function of frequencies; a *rule* (`Rule`) picks a law from the length of
the sequence. Each is a small frozen class. ``LAWS`` is the only registry; its keys are the names
used in JSON and on the command line.
"""

from __future__ import annotations

from phasor.scaling.laws import (
    NTK,
    Cope,
    Hope,
    Law,
    Linear,
    Llama3,
    NTKFixed,
    NTKMixed,
    NTKOld,
    PartNTK,
    PerPair,
    Proportional,
    Resonance,
    Temperature,
    Yarn,
    YarnPaper,
    yarn_multiplier,
)
from phasor.scaling.rules import DynamicNTK, LongRope, Rule, SteppedNTK

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
