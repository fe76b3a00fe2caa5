"""phasor: rotary position embeddings, exact and in every convention."""

from phasor.configs import load
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
from phasor.identification import diff, identify
from phasor.layers import LayerRopes
from phasor.presets import preset, preset_names
from phasor.rope import Rope

__all__ = [
    "BackendError",
    "CheckpointError",
    "ConfigError",
    "LayerRopes",
    "PhasorError",
    "PhasorWarning",
    "PositionError",
    "Rope",
    "SpecError",
    "TensorError",
    "VerificationError",
    "diff",
    "identify",
    "load",
    "preset",
    "preset_names",
]
