"""The scaling laws: they slow some pairs down so that a model can read a longer context.

A *law* (`Law`) is a pure function of frequencies; a *rule* (`Rule`) picks a law from the length of
the sequence. Each is a small frozen class. ``REGISTRY`` has a line for each; its keys are the names
used in JSON and on the command line.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

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


class Registered(NamedTuple):
    """A law or rule in the registry."""

    example: Law | Rule  # fits a head of 64 coordinates
    # the scaled frequency of pair ``k``; ``f_k`` before scaling, ``d`` the rotated width, ``s`` the
    # factor
    formula: str


_FAR: dict[str, Any] = {"factor": 8.0, "original_max_positions": 8192}
_DIVISORS = tuple(1 + 0.1 * k for k in range(32))
_LISTS = {"short_factors": (1.0,) * 32, "long_factors": _DIVISORS}

#: One line per law or rule, by name; tests take their examples from it, pages their tables.
REGISTRY: Mapping[str, Registered] = {
    "linear": Registered(Linear(factor=8.0), "`f_k / s`"),
    "ntk": Registered(NTK(factor=8.0), "`f_k · s^(−2k/(d−2))`"),
    "ntk_old": Registered(NTKOld(factor=8.0), "`f_k · s^(−2k/d)`"),
    "ntk_fixed": Registered(NTKFixed(factor=8.0), "`f_k · s^(−2(k+1)/d)`"),
    "ntk_mixed": Registered(NTKMixed(factor=8.0), "`f_k · exp(−a (k+1)^0.625)`"),
    "part_ntk": Registered(PartNTK(**_FAR), "two ramps in the index"),
    "yarn": Registered(Yarn(**_FAR), "ramp in the index, from `f_k` to `f_k / s`"),
    "yarn_paper": Registered(YarnPaper(**_FAR), "ramp in the turns, from `f_k` to `f_k / s`"),
    "llama3": Registered(Llama3(**_FAR), "ramp in the turns, from `f_k` to `f_k / s`"),
    "proportional": Registered(Proportional(fraction=0.75), "`f_k`, or 0 for the slowest pairs"),
    "hope": Registered(Hope(original_max_positions=8192), "0 for pairs without a full turn"),
    "cope": Registered(Cope(num_pairs=8), "the slowest pairs fade to 0"),
    "resonance": Registered(Resonance(), "wavelengths rounded to whole numbers"),
    "per_pair": Registered(PerPair(factors=_DIVISORS), "`f_k / factors[k]`"),
    "dynamic_ntk": Registered(DynamicNTK(**_FAR), "`NTK` with a factor that grows with the length"),
    "stepped_ntk": Registered(
        SteppedNTK(original_max_positions=2048), "`NTK` with a factor that grows in steps"
    ),
    "longrope": Registered(LongRope(**_LISTS, **_FAR), "`PerPair` with one of two lists"),
}
LAWS: dict[str, type[Law] | type[Rule]] = {
    name: type(entry.example) for name, entry in REGISTRY.items()
}

__all__ = [
    "LAWS",
    "NTK",
    "REGISTRY",
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
