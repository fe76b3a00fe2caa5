"""The small transformer of the experiments."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from phasor import Rope
from phasor.torch import rotate_qk

from .study import Row


class Attention(nn.Module):
    """Softmax attention with a rope, with a bias on the scores (ALiBi), or with neither.

    ``head_dim`` is ``width // heads`` unless given; ``bias`` is called with the number of tokens
    for what is added to the scores, ``[heads, seq, seq]``.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        head_dim: int | None = None,
        rope: Rope | None = None,
        bias: Callable[[int], Tensor] | None = None,
        causal: bool = True,
    ) -> None:
        super().__init__()
        self.heads, self.rope, self.bias, self.causal = heads, rope, bias, causal
        self.first = 0  # the position of the first token
        inner = width if head_dim is None else heads * head_dim
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(width, inner, bias=False) for _ in range(3)
        )
        self.o_proj = nn.Linear(inner, width, bias=False)

    def queries_and_keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Both ``[batch, seq, heads, head_dim]``, rotated where there is a rope."""
        # [batch, seq, width] -> [batch, seq, heads, head_dim]
        q, k = (part(x).unflatten(-1, (self.heads, -1)) for part in (self.q_proj, self.k_proj))
        if self.rope is None:
            return q, k
        positions, gain = self.first + torch.arange(x.shape[1]), self.rope.attention_factor
        return rotate_qk(q, k, positions, self.rope, gain=gain)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.queries_and_keys(x)
        v = self.v_proj(x).unflatten(-1, (self.heads, -1))
        # [batch, seq, heads, head_dim] -> [batch, heads, seq, head_dim]
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        bias = None if self.bias is None else self.bias(x.shape[1])
        out = nnf.scaled_dot_product_attention(q, k, v, bias, is_causal=self.causal)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    @torch.no_grad()
    def weights(self, x: Tensor) -> Tensor:
        """The attention weights ``[batch, heads, seq, seq]``."""
        q, k = (part.transpose(1, 2) for part in self.queries_and_keys(x))
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if self.causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(later, -torch.inf)
        return scores.softmax(-1)


class Block(nn.Module):
    """Attention, then a feed-forward layer, each on normed input and added to it."""

    def __init__(self, width: int, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention
        self.attention_norm, self.feed_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor, **given: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), **given)
        return x + self.feed(self.feed_norm(x))


class Transformer(nn.Module):
    """Tokens ``[batch, seq]`` to logits ``[batch, seq, vocabulary]``.

    ``attention`` makes that of one layer; ``absolute`` maps the number of tokens to vectors
    ``[seq, width]`` that are added to the embeddings.
    """

    def __init__(
        self,
        vocabulary: int,
        width: int,
        layers: int,
        attention: Callable[[], nn.Module],
        absolute: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.absolute = absolute
        self.blocks = nn.ModuleList(Block(width, attention()) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.logits = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.logits.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.absolute is not None:
            x = x + self.absolute(tokens.shape[1])
        for block in self.blocks:
            x = block(x)
        return self.logits(self.norm(x))


def rotary(made: Row, vocabulary: int, rope: Rope) -> Transformer:
    """A causal transformer of the sizes in ``made`` that rotates with this rope in all layers."""
    width, heads = made["width"], made["heads"]
    layer = partial(Attention, width, heads, head_dim=rope.head_dim, rope=rope)
    return Transformer(vocabulary, width, made["layers"], layer)


def attention_inputs(model: Transformer, tokens: Tensor) -> list[tuple[Attention, Tensor]]:
    """Every layer's attention with the normed tokens ``[batch, seq, width]`` that go into it."""
    found: list[tuple[Attention, Tensor]] = []
    hooks = [
        block.attention.register_forward_hook(lambda layer, args, _: found.append((layer, args[0])))
        for block in model.blocks
    ]
    with torch.no_grad():
        model(tokens)
    for hook in hooks:
        hook.remove()
    return found
