"""A program that is exported once runs at every length, around each constant of the code too."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phasor import Rope
from phasor.torch import RotaryAttention, RotaryEmbedding, RotaryLinearAttention
from phasor.torch import export as bridge
from phasor.torch.papers import ReRope, SelfExtend, relative_attention

from ...rounding import rounding
from ..live.live_models import difference
from ..torch_arrays import normal
from .onnx_engines import by_onnxruntime

ROPE = Rope(head_dim=8, pairing="half", base=500_000.0)
# the chunks of linear attention are 64 tokens, those of queries under a mask 512
LENGTHS = (2, 3, 9, 63, 64, 65, 100, 127, 128, 129, 511, 512, 513, 700, 1025)
TRACED = (9, 600)


class OfTokens(nn.Module):
    """A layer or a function of tokens ``[batch, seq, 16]``, and perhaps of which are no padding."""

    def __init__(self, function: Callable[..., Tensor], masked: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        # what `rounding` moves, where the function has no weights
        self.project = nn.Linear(16, 16)
        self.function, self.masked = function, masked

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """What the function says."""
        x = self.project(x)
        return self.function(x, attention_mask=mask) if self.masked else self.function(x)


def embed(x: Tensor) -> Tensor:
    """Queries and keys by a module that counts positions."""
    q, k = RotaryEmbedding(ROPE, heads_first=False)(
        x.unflatten(-1, (2, 8)), x.unflatten(-1, (2, 8)), offset=3
    )
    return (q + k).flatten(-2)


def relative(distance: Any) -> OfTokens:
    """Attention with clipped or grouped distances."""

    def attend(x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (2, 8))
        return relative_attention(heads, heads, heads, ROPE, distance).flatten(-2)

    return OfTokens(attend)


MODULES: dict[str, Callable[[], OfTokens]] = {
    "embedding": lambda: OfTokens(embed),
    "causal": lambda: OfTokens(RotaryAttention(ROPE, 16, 2)),
    "every token": lambda: OfTokens(RotaryAttention(ROPE, 16, 2, causal=False), masked=True),
    "window": lambda: OfTokens(RotaryAttention(ROPE, 16, 2, window=3)),
    "wide window": lambda: OfTokens(RotaryAttention(ROPE, 16, 2, window=512)),
    "mask": lambda: OfTokens(RotaryAttention(ROPE, 16, 2, 1), masked=True),
    "window and mask": lambda: OfTokens(RotaryAttention(ROPE, 16, 2, window=65), masked=True),
    "linear": lambda: OfTokens(RotaryLinearAttention(ROPE, 16, 2)),
    "linear, every token": lambda: OfTokens(RotaryLinearAttention(ROPE, 16, 2, causal=False)),
    "ReRoPE": lambda: relative(ReRope(width=4)),
    "Self-Extend": lambda: relative(SelfExtend(width=64, group=2)),
}


def given(length: int) -> tuple[Tensor, Tensor]:
    """Tokens, and a mask with padding at both ends; the first and last row are whole."""
    mask = torch.ones(3, length, dtype=torch.bool)
    mask[1, : length // 3] = mask[1, length - length // 4 :] = False
    return normal(3, length, 16, seed=length), mask


def shapes(length: Any) -> tuple[dict[int, Any], dict[int, Any]]:
    """The length of both changes."""
    return {1: length}, {1: length}


@cache
def made(name: str) -> OfTokens:
    """The module of a name."""
    return MODULES[name]().eval()


@cache
def expected(name: str, length: int) -> tuple[Tensor, float]:
    """What it says of so many tokens, and how far a rounding takes that."""
    module, (x, mask) = made(name), given(length)
    with torch.no_grad():
        return module(x, mask), rounding(module, lambda twin: twin(x, mask))


def check(name: str, run: Callable[..., Any]) -> None:
    """What runs says what the module says, at every length, to a rounding."""
    for length in LENGTHS:
        wanted, room = expected(name, length)
        with torch.no_grad():
            found = torch.as_tensor(run(*given(length)))
        assert found.shape == wanted.shape
        assert difference(wanted, found) <= room, length


@pytest.mark.parametrize("traced", TRACED)
@pytest.mark.parametrize("name", MODULES)
def test_a_program_of_bounded_length_runs_at_every_length(name: str, traced: int) -> None:
    """The bounds are given, so torch refuses a program that is good for some of them only."""
    length = torch.export.Dim("length", min=2, max=4096)
    with torch.no_grad():
        program = torch.export.export(made(name), given(traced), dynamic_shapes=shapes(length))
    check(name, program.module())


@pytest.mark.parametrize("traced", TRACED)
@pytest.mark.parametrize("name", MODULES)
def test_an_onnx_file_runs_at_every_length(name: str, traced: int) -> None:
    """It has no guards: what is wrong there is wrong without a word."""
    length = torch.export.Dim.DYNAMIC
    program = bridge.export(made(name), given(traced), dynamic_shapes=shapes(length))
    run, n_inputs = by_onnxruntime(program), len(program.model_proto.graph.input)
    check(name, lambda *given: run(*(one.numpy() for one in given[:n_inputs]))[0])
