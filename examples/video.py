"""A block of a video transformer: three axes, time, row and column, as in DiTs for video.

    python examples/video.py [--compile]

The axes share the pairs of a head: 8 turn with the frame, 12 with the row, 12 with the column.
Clips of other lengths and sizes need no table and no resizing: only their positions change.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from phasor import Rope
from phasor.axes import Axial
from phasor.torch import Rotation
from phasor.torch.positions import grid

ROPE = Rope(head_dim=64, pairing="interleaved", base=10_000.0, axes=Axial((8, 12, 12)))


def clip_positions(frames: int, rows: int, columns: int, *, speed: float = 1.0) -> Tensor:
    """Time, row and column of each patch, ``[frames * rows * columns, 3]``, frame by frame.

    ``speed`` is how many trained frames lie between two of these, as for another frame rate.
    """
    return grid(frames, rows, columns) * torch.tensor([speed, 1.0, 1.0], dtype=torch.float64)


class VideoBlock(nn.Module):
    """Attention over all patches of all frames, and a feed-forward layer, modulated by the time."""

    def __init__(self, embed_dim: int = 256, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(embed_dim, elementwise_affine=False)
        self.feed_norm = nn.LayerNorm(embed_dim, elementwise_affine=False)
        self.qkv_proj = nn.Linear(embed_dim, 3 * num_heads * ROPE.head_dim)
        self.o_proj = nn.Linear(num_heads * ROPE.head_dim, embed_dim)
        self.q_norm, self.k_norm = nn.RMSNorm(ROPE.head_dim), nn.RMSNorm(ROPE.head_dim)
        self.up = nn.Linear(embed_dim, 4 * embed_dim)
        self.down = nn.Linear(4 * embed_dim, embed_dim)
        self.modulation = nn.Linear(embed_dim, 6 * embed_dim)  # of the diffusion step

    def attention(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Attention of ``x`` ``[batch, seq, embed_dim]`` to itself."""
        batch, seq, _ = x.shape
        # [batch, seq, embed_dim] -> 3 of [batch, heads, seq, head_dim]
        qkv = self.qkv_proj(x).view(batch, seq, 3, self.num_heads, ROPE.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        q, k = rotation(self.q_norm(q), self.k_norm(k), heads_first=True)
        y = nnf.scaled_dot_product_attention(q, k, v)
        return self.o_proj(y.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, rotation: Rotation, step: Tensor) -> Tensor:
        """``x`` is ``[batch, seq, embed_dim]``, the embedded step ``[batch, embed_dim]``."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(step)[:, None].chunk(6, -1)
        moved = self.attention_norm(x) * (1 + scale1) + shift1
        x = x + gate1 * self.attention(moved, rotation)
        moved = self.feed_norm(x) * (1 + scale2) + shift2
        return x + gate2 * self.down(nnf.gelu(self.up(moved)))


def main() -> None:
    """Run clips of several lengths and sizes through one block."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compile", action="store_true", help="with torch.compile")
    options = parser.parse_args()
    torch.manual_seed(0)
    block = VideoBlock()
    run = torch.compile(block, fullgraph=True) if options.compile else block
    step = torch.randn(1, 256)
    for frames, rows, columns in ((4, 6, 8), (8, 6, 8), (4, 12, 16)):
        positions = clip_positions(frames, rows, columns)
        rotation = Rotation.at(positions, ROPE)  # once for all blocks and diffusion steps
        clip = torch.randn(1, len(positions), 256)
        out = run(clip, rotation, step)
        print(f"{frames} frames of {rows} x {columns} patches: {list(out.shape)}")


if __name__ == "__main__":
    main()
