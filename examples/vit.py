"""A vision transformer with rotary positions on two axes, and a class token beside the grid.

    python examples/vit.py [--steps 120] [--compile]

It learns which of the four quarters of a small image is bright, and is then read at twice the
resolution. Copy `Attention` and `ViT` into a model of your own.
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

EMBED_DIM, NUM_LAYERS, NUM_HEADS, HEAD_DIM, PATCH = 64, 2, 4, 16, 4
# 4 pairs turn with the row, 4 with the column; few rows want a small base
ROPE = Rope(head_dim=HEAD_DIM, pairing="interleaved", base=100.0, axes=Axial((4, 4)))
TRAINED = 8  # patches on a side


def patch_positions(side: int) -> Tensor:
    """Row and column of the class token and of each patch, ``[1 + side * side, 2]``.

    A finer grid covers the trained one: its positions are fractions.
    """
    patches = grid(side, side).double() * (TRAINED / side)
    class_token = torch.full((1, 2), -1.0, dtype=torch.float64)  # apart from every patch
    return torch.cat((class_token, patches))


class Attention(nn.Module):
    """Attention in which every patch sees every other."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = nn.Linear(EMBED_DIM, 3 * NUM_HEADS * HEAD_DIM)
        self.o_proj = nn.Linear(NUM_HEADS * HEAD_DIM, EMBED_DIM)

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        batch, seq, _ = x.shape
        # [batch, seq, embed_dim] -> 3 of [batch, heads, seq, head_dim]
        qkv = self.qkv_proj(x).view(batch, seq, 3, NUM_HEADS, HEAD_DIM)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        q, k = rotation(q, k, heads_first=True)
        y = nnf.scaled_dot_product_attention(q, k, v)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a feed-forward layer, each added to what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.feed_norm = nn.LayerNorm(EMBED_DIM), nn.LayerNorm(EMBED_DIM)
        self.attention = Attention()
        self.up, self.down = nn.Linear(EMBED_DIM, 128), nn.Linear(128, EMBED_DIM)

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.down(nnf.gelu(self.up(self.feed_norm(x))))


class ViT(nn.Module):
    """Images ``[batch, 1, height, width]`` in, logits of four classes out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Conv2d(1, EMBED_DIM, PATCH, PATCH)
        self.class_token = nn.Parameter(torch.zeros(1, 1, EMBED_DIM))
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_LAYERS))
        self.norm = nn.LayerNorm(EMBED_DIM)
        self.head = nn.Linear(EMBED_DIM, 4)

    def forward(self, images: Tensor, positions: Tensor) -> Tensor:
        # [batch, embed_dim, rows, columns] -> [batch, rows * columns, embed_dim], row by row
        patches = self.embedding(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.class_token.expand(len(images), 1, -1), patches), 1)
        rotation = Rotation.at(positions, ROPE)  # once for all layers
        for block in self.blocks:
            x = block(x, rotation)
        return self.head(self.norm(x[:, 0]))


def bright_quarters(count: int, side: int) -> tuple[Tensor, Tensor]:
    """Noisy images of ``side`` patches on a side, and the number of the bright quarter of each."""
    pixels, half = side * PATCH, side * PATCH // 2
    labels = torch.randint(4, (count,))
    images = torch.randn(count, 1, pixels, pixels)
    for image, label in zip(images, labels.tolist(), strict=True):
        top, left = label // 2 * half, label % 2 * half
        image[:, top : top + half, left : left + half] += 0.5
    return images, labels


def main() -> None:
    """Train, and read images of two sizes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--compile", action="store_true", help="train with torch.compile")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = ViT()
    trained = torch.compile(model, fullgraph=True) if options.compile else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    positions = patch_positions(TRAINED)
    for step in range(options.steps):
        images, labels = bright_quarters(32, TRAINED)
        loss = nnf.cross_entropy(trained(images, positions), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 40 == 0 or step == options.steps - 1:
            print(f"step {step:3} loss {loss.item():.3f}")
    for side in (TRAINED, 2 * TRAINED):
        images, labels = bright_quarters(64, side)
        with torch.no_grad():
            right = model(images, patch_positions(side)).argmax(-1) == labels
        print(f"{side} x {side} patches: {right.float().mean():.0%} right")


if __name__ == "__main__":
    main()
