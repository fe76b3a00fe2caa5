"""phasor for PyTorch: one differentiable operator, its verbs, and the modules around it.

Cached keys are in `phasor.torch.kv_cache`, what the papers build of rotations in
`phasor.torch.papers`.
"""

from phasor.torch import positions as positions
from phasor.torch.attention import RotaryAttention
from phasor.torch.functional import (
    chosen_backend,
    cos_sin,
    rotate,
    rotate_,
    rotate_by,
    rotate_by_,
    rotate_qk,
    rotate_qk_,
)
from phasor.torch.module import RotaryEmbedding
from phasor.torch.papers.linear import RotaryLinearAttention
from phasor.torch.program_tables import cos_sin_cache

__all__ = [
    "RotaryAttention",
    "RotaryEmbedding",
    "RotaryLinearAttention",
    "chosen_backend",
    "cos_sin",
    "cos_sin_cache",
    "rotate",
    "rotate_",
    "rotate_by",
    "rotate_by_",
    "rotate_qk",
    "rotate_qk_",
]
