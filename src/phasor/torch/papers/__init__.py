"""Methods of papers on rotary embeddings, for PyTorch: modules, attention, measurements.

The layer for `linear_attention` is `phasor.torch.RotaryLinearAttention`.
"""

from phasor.torch.papers.feature_maps import PositiveRandomFeatures
from phasor.torch.papers.heads import PositionalHead
from phasor.torch.papers.linear import LinearState, linear_attention
from phasor.torch.papers.relative import DualChunk, ReRope, SelfExtend, relative_attention
from phasor.torch.papers.rotations import wrapped_cumsum, xpos
from phasor.torch.papers.usage import LayerUsage, PairNorms, watch_usage

__all__ = [
    "DualChunk",
    "LayerUsage",
    "LinearState",
    "PairNorms",
    "PositionalHead",
    "PositiveRandomFeatures",
    "ReRope",
    "SelfExtend",
    "linear_attention",
    "relative_attention",
    "watch_usage",
    "wrapped_cumsum",
    "xpos",
]
