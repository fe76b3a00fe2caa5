"""What phasor raises when it is given something it cannot use.

    ValueError
    └── PhasorError           catch this one to catch them all
        ├── SpecError         a field of a Rope, a scaling law or an axes layout
        ├── PositionError     where tokens stand
        ├── TensorError       shapes, dtypes and memory of what is to be rotated
        ├── BackendError      an implementation that cannot run here
        ├── ConfigError       a file or dictionary written by another program
        └── CheckpointError   a file of weights that is damaged, or cannot be converted

Every message names the argument, says what was expected and what came, and gives the way out.
"""

from __future__ import annotations


class PhasorError(ValueError):
    """Anything phasor refuses."""


class SpecError(PhasorError):
    """A description of a rotary embedding that means nothing."""


class PositionError(PhasorError):
    """Positions that no token can stand at, or that do not fit the tensors."""


class TensorError(PhasorError):
    """A tensor whose shape, dtype or memory does not fit the rotation."""


class BackendError(PhasorError):
    """A backend that was asked for by name and cannot do this work."""


class ConfigError(PhasorError):
    """A foreign configuration that is damaged, contradictory or not understood."""


class CheckpointError(PhasorError):
    """A file of weights that is damaged, not understood or cannot be written."""


class PhasorWarning(UserWarning):
    """A number that phasor had to assume, and what it took."""
