"""The text of a Rope in the operator's arguments, and facts about that Rope.

The operator that computes cos and sin takes a Rope as its canonical JSON text: compilers treat a
string as a constant, it can be exported, and it is a safe cache key.
"""

from __future__ import annotations

import torch

from phasor.axes import Mixed
from phasor.rope import Rope
from phasor.torch._operator.internals import cached_constant


@cached_constant
def read_rope(text: str) -> Rope:
    """The Rope that a text from `Rope.to_json` describes."""
    return Rope.from_json(text)


@cached_constant
def mixes_axes(text: str) -> bool:
    """Whether the axes are `Mixed`; kernels leave such Ropes to plain torch operations."""
    return isinstance(read_rope(text).axes, Mixed)


@cached_constant
def count_axes(text: str) -> int:
    """The number of coordinates of a position for that Rope."""
    return read_rope(text).axes.n_axes


@cached_constant
def count_pairs(text: str) -> int:
    """The number of pairs that turn."""
    return read_rope(text).num_pairs


@cached_constant
def attention_factor(text: str) -> float:
    """The factor on that Rope's cos and sin."""
    return read_rope(text).attention_factor


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which tensors of ``dtype`` are computed: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
