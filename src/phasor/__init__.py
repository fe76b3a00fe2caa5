"""phasor: rotary position embeddings, exact at every position."""

import sys
from importlib import import_module
from typing import TYPE_CHECKING

from phasor.errors import (
    DISTRIBUTION,
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

__all__ = [
    "BackendError",
    "CheckpointError",
    "ConfigError",
    "LayerRopes",
    "PhasorError",
    "PhasorWarning",
    "PositionError",
    "QueryFactor",
    "Rope",
    "SpecError",
    "TensorError",
    "VerificationError",
    "diff",
    "identify",
    "load",
    "preset",
    "preset_names",
    "translate",
    "verify",
]

# imported at first use: together they take longer to import than NumPy
if TYPE_CHECKING:
    from phasor.files.presets import preset, preset_names
    from phasor.files.reading import load
    from phasor.files.translation import translate
    from phasor.identification import diff, identify, verify
    from phasor.layers import LayerRopes, QueryFactor
    from phasor.rope import Rope
else:
    _MODULES = {
        "LayerRopes": "phasor.layers",
        "QueryFactor": "phasor.layers",
        "Rope": "phasor.rope",
        "diff": "phasor.identification",
        "identify": "phasor.identification",
        "load": "phasor.files.reading",
        "preset": "phasor.files.presets",
        "preset_names": "phasor.files.presets",
        "translate": "phasor.files.translation",
        "verify": "phasor.identification",
    }

    # where to find names that users may look for here
    _HINTS = {
        "rotate": "for PyTorch use phasor.torch.rotate, for NumPy phasor.numpy.rotate",
        **{
            name: f"it is phasor.{place}.{name}: from phasor.{place} import {name}"
            for place, names in {
                "torch": (
                    *("rotate_", "rotate_qk", "rotate_qk_", "Rotation", "RotaryEmbedding"),
                    *("RotaryAttention", "RotaryLinearAttention", "cos_sin_cache"),
                ),
                "angles": ("cos_sin",),
                "scaling": ("DynamicNTK", "Linear", "Llama3", "LongRope", "NTK", "Yarn"),
                "axes": ("Axial", "InterleavedSections", "Mixed", "Sectioned"),
            }.items()
            for name in names
        },
    }

    def __getattr__(name: str) -> object:
        if name == "__version__":
            return import_module("importlib.metadata").version(DISTRIBUTION)
        if name in ("torch", "jax", "mlx"):
            return import_module(f"phasor.{name}")
        if name not in _MODULES:
            hint = f"; {_HINTS[name]}" if name in _HINTS else ""
            # Python replaces the message of an AttributeError in `from phasor import name`
            is_import = sys._getframe(1).f_code.co_name == "_handle_fromlist"
            error = ImportError if is_import and hint else AttributeError
            raise error(f"module 'phasor' has no attribute {name!r}{hint}")
        globals()[name] = value = getattr(import_module(_MODULES[name]), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
