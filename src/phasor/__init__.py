"""phasor: rotary position embeddings, exact and in every convention."""

from phasor.axes import Alternating, Axial, Interleaved, OneAxis, Sectioned
from phasor.configs import load
from phasor.conventions import diff, identify
from phasor.errors import (
    BackendError,
    CheckpointError,
    ConfigError,
    PhasorError,
    PhasorWarning,
    PositionError,
    SpecError,
    TensorError,
    VerificationError,
)
from phasor.layers import LayerRopes
from phasor.presets import preset, preset_names
from phasor.scaling import (
    NTK,
    Cope,
    DynamicNTK,
    Hope,
    Linear,
    Llama3,
    LongRope,
    NTKFixed,
    NTKMixed,
    NTKOld,
    PartNTK,
    PerPair,
    Proportional,
    Resonance,
    Yarn,
    YarnPaper,
)
from phasor.spec import Rope

__all__ = [
    "NTK",
    "Alternating",
    "Axial",
    "BackendError",
    "CheckpointError",
    "ConfigError",
    "Cope",
    "DynamicNTK",
    "Hope",
    "Interleaved",
    "LayerRopes",
    "Linear",
    "Llama3",
    "LongRope",
    "NTKFixed",
    "NTKMixed",
    "NTKOld",
    "OneAxis",
    "PartNTK",
    "PerPair",
    "PhasorError",
    "PhasorWarning",
    "PositionError",
    "Proportional",
    "Resonance",
    "Rope",
    "Sectioned",
    "SpecError",
    "TensorError",
    "VerificationError",
    "Yarn",
    "YarnPaper",
    "diff",
    "identify",
    "load",
    "preset",
    "preset_names",
]
