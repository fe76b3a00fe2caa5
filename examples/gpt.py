"""A GPT with grouped queries: trained on packed documents, compiled, and read from a KV cache.

    python examples/gpt.py [--steps 200] [--compile]

It learns the paragraphs of this file. Copy `Attention`, `Block` and `GPT` into a model of your own.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from phasor import Rope
from phasor.torch import Rotation
from phasor.torch.positions import packed, sequence_indices, span

EMBED_DIM, NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 64, 2, 4, 2, 16
ROPE = Rope(head_dim=HEAD_DIM, pairing="half", base=10_000.0)
BATCH, LENGTH = 4, 256  # tokens of a row, several documents end to end

#: Rotated keys and values of a layer, each [batch, kv_heads, seq, head_dim].
Cache = dict[int, tuple[Tensor, Tensor]]


class Attention(nn.Module):
    """Grouped-query attention; queries and keys are rotated after the projection."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.q_proj = nn.Linear(EMBED_DIM, NUM_HEADS * HEAD_DIM, bias=False)
        self.kv_proj = nn.Linear(EMBED_DIM, 2 * NUM_KV_HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(NUM_HEADS * HEAD_DIM, EMBED_DIM, bias=False)

    def forward(self, x: Tensor, rotation: Rotation, mask: Tensor, cache: Cache | None) -> Tensor:
        batch, seq, _ = x.shape
        # [batch, seq, embed_dim] -> [batch, heads, seq, head_dim]
        q = self.q_proj(x).view(batch, seq, NUM_HEADS, HEAD_DIM).transpose(1, 2)
        kv = self.kv_proj(x).view(batch, seq, 2, NUM_KV_HEADS, HEAD_DIM)
        k, v = kv.permute(2, 0, 3, 1, 4)
        q, k = rotation(q, k, heads_first=True)
        if cache is not None:
            if self.layer in cache:
                old_k, old_v = cache[self.layer]
                k, v = torch.cat((old_k, k), 2), torch.cat((old_v, v), 2)
            cache[self.layer] = k, v
        y = nnf.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a feed-forward layer, each added to what came in."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.attention_norm, self.feed_norm = nn.RMSNorm(EMBED_DIM), nn.RMSNorm(EMBED_DIM)
        self.attention = Attention(layer)
        self.up = nn.Linear(EMBED_DIM, 4 * EMBED_DIM, bias=False)
        self.down = nn.Linear(4 * EMBED_DIM, EMBED_DIM, bias=False)

    def forward(self, x: Tensor, rotation: Rotation, mask: Tensor, cache: Cache | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation, mask, cache)
        return x + self.down(nnf.gelu(self.up(self.feed_norm(x))))


class GPT(nn.Module):
    """Bytes in, logits of the next byte out; it holds no table of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, EMBED_DIM)
        self.blocks = nn.ModuleList(Block(layer) for layer in range(NUM_LAYERS))
        self.norm = nn.RMSNorm(EMBED_DIM)
        self.head = nn.Linear(EMBED_DIM, 256, bias=False)

    def forward(
        self, tokens: Tensor, positions: Tensor, mask: Tensor, cache: Cache | None = None
    ) -> Tensor:
        rotation = Rotation.at(positions, ROPE)  # once for all layers
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, rotation, mask, cache)
        return self.head(self.norm(x))


def packed_rows(text: bytes, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Without end: tokens and positions ``[batch, seq]``, and a mask ``[batch, 1, seq, seq]``."""
    documents = [torch.tensor(list(one)) for one in text.split(b"\n\n") if one.strip()]
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    while True:
        rows: list[tuple[Tensor, Tensor, Tensor]] = []
        for _ in range(BATCH):
            order = torch.randperm(len(documents), generator=generator).tolist()
            lengths = torch.tensor([0] + [len(documents[i]) for i in order])
            cu_seqlens = lengths.cumsum(0).clamp(max=LENGTH).unique()  # the last is cut
            document = sequence_indices(cu_seqlens, LENGTH)
            same = document[:, None] == document  # no document sees another
            tokens = torch.cat([documents[i] for i in order])[:LENGTH]
            rows.append((tokens, packed(cu_seqlens, LENGTH), (same & causal)[None]))
        yield tuple(torch.stack(one) for one in zip(*rows, strict=True))


@torch.no_grad()
def generate(model: nn.Module, prompt: bytes, new_tokens: int) -> bytes:
    """The most probable continuation: the prompt in one call, then a call for each token."""
    tokens = torch.tensor([list(prompt)])
    cache: Cache = {}
    for _ in range(new_tokens):
        seen = cache[0][0].shape[2] if cache else 0
        new = tokens[:, seen:]
        positions = span(new.shape[1], start=seen)
        mask = positions[:, None] >= span(tokens.shape[1])
        logits = model(new, positions, mask, cache)
        tokens = torch.cat((tokens, logits[:, -1:].argmax(-1)), 1)
    return bytes(tokens[0].tolist())


def main() -> None:
    """Train, and let it write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--compile", action="store_true", help="train with torch.compile")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = GPT()
    trained = torch.compile(model, fullgraph=True) if options.compile else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rows = packed_rows(Path(__file__).read_bytes(), torch.Generator().manual_seed(0))
    for step in range(options.steps):
        tokens, positions, mask = next(rows)
        logits = trained(tokens, positions, mask)[:, :-1]
        starts = positions[:, 1:] == 0  # the first byte of a document follows from nothing
        following = tokens[:, 1:].masked_fill(starts, -100)
        loss = nnf.cross_entropy(logits.flatten(0, 1), following.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == options.steps - 1:
            print(f"step {step:3} loss {loss.item():.3f}")
    print(generate(model, b"class ", 60).decode("utf-8", "replace"))


if __name__ == "__main__":
    main()
