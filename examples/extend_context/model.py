"""A small model of bytes, whose Rope can be exchanged while its weights stay."""

from __future__ import annotations

import torch
import torch.nn.functional as nnf
from settings import Settings
from torch import Tensor, nn

from phasor import Rope
from phasor.torch import RotaryAttention
from phasor.torch.papers import ReRope, relative_attention

BYTES = 256


class ReRopeAttention(RotaryAttention):
    """The same layer with distances cut at a width (ReRoPE, https://kexue.fm/archives/9708)."""

    def __init__(self, width: int, heads: int, rope: Rope, *, distance: ReRope) -> None:
        super().__init__(rope, width, heads)
        self.turned_by, self.distance = rope, distance

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        split = (*x.shape[:2], self.num_heads, self.head_dim)
        q, k, v = (each(x).view(split) for each in (self.q_proj, self.k_proj, self.v_proj))
        done = relative_attention(q, k, v, self.turned_by, self.distance)
        return self.o_proj(done.flatten(2))


class Block(nn.Module):
    """Attention, then SwiGLU (2002.05202), each on normed input and added to it."""

    def __init__(self, attention: nn.Module, width: int, hidden: int) -> None:
        super().__init__()
        self.attention = attention
        self.before_attention = nn.RMSNorm(width)
        self.before_feed = nn.RMSNorm(width)
        self.gate_and_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before_attention(x))
        gate, up = self.gate_and_up(self.before_feed(x)).chunk(2, -1)
        return x + self.down(nnf.silu(gate) * up)


class ByteModel(nn.Module):
    """Logits of the next byte, ``[batch, seq, 256]``, from bytes ``[batch, seq]``.

    Positions are in the attention alone, and the Rope is no weight: a model with another Rope
    takes the ``state_dict`` as it is.

    Args:
        settings: The sizes.
        rope: Of every layer.
        window: Tokens that one sees, itself included; None for all before.
        distance: For attention by cut distances; None for distances as they are.
    """

    def __init__(
        self,
        settings: Settings,
        rope: Rope,
        *,
        window: int | None = None,
        distance: ReRope | None = None,
    ) -> None:
        super().__init__()
        width, heads = settings.width, settings.heads

        def attention() -> RotaryAttention:
            if distance is not None:
                return ReRopeAttention(width, heads, rope, distance=distance)
            return RotaryAttention(rope, width, heads, window=window)

        self.embedding = nn.Embedding(BYTES, width)
        self.blocks = nn.ModuleList(
            Block(attention(), width, settings.hidden) for _ in range(settings.layers)
        )
        self.last_norm = nn.RMSNorm(width)
        self.logits = nn.Linear(width, BYTES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.logits(self.last_norm(x))


def fresh(settings: Settings, rope: Rope, seed: int) -> ByteModel:
    """A model with its first weights: normal, and smaller where a block adds to its input."""
    model = ByteModel(settings, rope)
    drawn = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            adds = name.endswith(("o_proj.weight", "down.weight"))
            spread = 0.02 if name.startswith(("embedding", "logits")) else weight.shape[1] ** -0.5
            spread /= (2 * settings.layers) ** 0.5 if adds else 1.0
            nn.init.normal_(weight, std=spread, generator=drawn)
    return model
