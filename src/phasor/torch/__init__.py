"""phasor for PyTorch: rotations, functions that apply them, and modules built on them.

Functions for cached keys are in `phasor.torch.kv_cache`, methods of papers in
`phasor.torch.papers`.
"""

from phasor.errors import missing

try:
    from phasor.torch import positions as positions
except ModuleNotFoundError as error:
    raise missing("torch", error) from None

from phasor.torch.attention import RotaryAttention
from phasor.torch.functional import (
    chosen_backend,
    rotate,
    rotate_,
    rotate_qk,
    rotate_qk_,
)
from phasor.torch.learned import LearnedRotaryEmbedding
from phasor.torch.module import RotaryEmbedding
from phasor.torch.papers.linear import RotaryLinearAttention
from phasor.torch.program_tables import cos_sin_cache
from phasor.torch.rotation import Rotation

__all__ = [
    "LearnedRotaryEmbedding",
    "RotaryAttention",
    "RotaryEmbedding",
    "RotaryLinearAttention",
    "Rotation",
    "chosen_backend",
    "cos_sin_cache",
    "rotate",
    "rotate_",
    "rotate_qk",
    "rotate_qk_",
]
