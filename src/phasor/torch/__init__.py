"""phasor for PyTorch: one differentiable operator and the verbs that call it."""

from phasor.torch.functional import (
    chosen_backend,
    rotate,
    rotate_,
    rotate_by,
    rotate_by_,
    rotate_qk,
    rotate_qk_,
)

__all__ = [
    "chosen_backend",
    "rotate",
    "rotate_",
    "rotate_by",
    "rotate_by_",
    "rotate_qk",
    "rotate_qk_",
]
