"""phasor for PyTorch: one differentiable operator, its verbs, and what is built on them."""

from phasor.torch import positions as positions
from phasor.torch._linear_attention import LinearState, RotaryLinearAttention, linear_attention
from phasor.torch.attention import RotaryAttention
from phasor.torch.by_rows import rotate_by, rotate_by_
from phasor.torch.cache import retune_, shift_, undo_
from phasor.torch.cached_keys import CachedKeys
from phasor.torch.functional import chosen_backend, rotate, rotate_, rotate_qk, rotate_qk_
from phasor.torch.key_cache import KeyCache
from phasor.torch.papers.heads import PositionalHead
from phasor.torch.splice import evict, insert

__all__ = [
    "CachedKeys",
    "KeyCache",
    "LinearState",
    "PositionalHead",
    "RotaryAttention",
    "RotaryLinearAttention",
    "chosen_backend",
    "evict",
    "insert",
    "linear_attention",
    "retune_",
    "rotate",
    "rotate_",
    "rotate_by",
    "rotate_by_",
    "rotate_qk",
    "rotate_qk_",
    "shift_",
    "undo_",
]
