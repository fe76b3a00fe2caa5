"""What fused functions share: which implementation they run, and numbers of 8 bits."""

from __future__ import annotations

import torch
from torch import Tensor

from phasor.errors import BackendError
from phasor.torch.backends import triton as triton_backend

#: The one format of 8 bits, and its largest finite number.
FLOAT8 = torch.float8_e4m3fn
LARGEST = 448.0
_NAMES = ("auto", "triton", "eager")


def resolve(backend: str, x: Tensor, *, besides: str = "") -> str:
    """The name of the implementation for ``x``.

    Args:
        backend: ``"auto"``, or a name, which is never replaced by another.
        x: What it is for.
        besides: Why Triton cannot do it, apart from where ``x`` is.

    Raises:
        BackendError: If the named one does not exist or cannot.
    """
    if backend not in _NAMES:
        known = ", ".join(repr(name) for name in _NAMES)
        raise BackendError(f"backend must be one of {known} here, got {backend!r}")
    if backend == "eager":
        return backend
    refusal = besides or triton_backend.refusal(x)
    if refusal and backend == "triton":
        raise BackendError(f"backend='triton' cannot do this: {refusal}; use 'auto' or 'eager'")
    return "eager" if refusal else "triton"


def inverse_unit(unit: float) -> float:
    """The float32 that numbers are multiplied by on their way into 8 bits."""
    return float(torch.tensor(1.0 / unit, dtype=torch.float32))
