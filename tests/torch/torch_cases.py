"""Ropes, positions, a watch on memory and a bound that several test files of torch take."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from phasor import Rope
from phasor.angles import COS_SIN_ERROR_FLOAT32
from phasor.torch import Rotation

HALF = Rope(head_dim=8, pairing="half")
HALF_16 = Rope(head_dim=16, pairing="half")
PART = Rope(head_dim=8, pairing="interleaved", rotary_dim=4, rotary_start=2)
MIXED = Rope(
    head_dim=8,
    rotary_dim=4,
    rotary_start=2,
    pairing="interleaved",
    pairing_out="half",
    direction=-1,
)
PLACES = torch.tensor([3, 70_001, -5, 2**33])


def memory_layouts(x: Tensor) -> dict[str, Tensor]:
    """The same values ``[2, 7, 3, 20]`` laid out in different ways."""
    batch, seq, heads, width = x.shape
    offset = x.new_zeros(x.numel() + 3)[3:].view(x.shape)
    wide = x.new_zeros(batch, seq, heads, width + 5)[..., 2:-3]
    spread = x.new_zeros(batch, seq, heads, 2 * width)[..., ::2]
    steps = x.new_zeros(batch, 3 * seq, heads, width)[:, 1::3]
    return {
        "as it is": x.clone(),
        "heads first": x.transpose(1, 2).contiguous().transpose(1, 2),
        "batch last": x.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2),
        "misaligned": offset.copy_(x),
        "inside wider heads": wide.copy_(x),
        "every second item": spread.copy_(x),
        "every third token": steps.copy_(x),
    }


class Largest(TorchDispatchMode):
    """Remembers how many elements the largest tensor had that any operation made."""

    elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.itemsize)
        return made


def rows_of(places: Tensor) -> tuple[Tensor, Tensor]:
    """Rows that no position makes, of numbers that every compiler makes alike."""
    steps = torch.tensor([1.0, 0.5, 0.25])
    return places[:, None] * steps, places[:, None] - steps


def turn(
    x: Tensor,
    cos: Any,
    sin: Any,
    *,
    heads_first: bool = False,
    backend: str = "auto",
    **layout: Any,
) -> Tensor:
    """``x`` turned by a Rotation of cos and sin of one's own."""
    return Rotation(cos, sin, **layout)(x, heads_first=heads_first, backend=backend)


def turn_(
    x: Tensor,
    cos: Any,
    sin: Any,
    *,
    heads_first: bool = False,
    backend: str = "auto",
    **layout: Any,
) -> Tensor:
    """The same in place."""
    return Rotation(cos, sin, **layout).rotate_(x, heads_first=heads_first, backend=backend)


def agree(found: Tensor, expected: Tensor, rotations: int = 1, size: float | None = None) -> bool:
    """Whether two results of so many rotations in a row can both be right.

    Each rotation is off by `bound`; a pair's two numbers add up to at most twice its largest one,
    and rotations keep lengths.

    Args:
        found: One.
        expected: The other.
        rotations: How many were made, at most.
        size: The largest number that is rotated; of ``expected`` unless given.
    """
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    size = float(expected.abs().max()) if size is None else size
    limit = 2 * (2 * torch.finfo(torch.float32).eps + COS_SIN_ERROR_FLOAT32)
    if found.dtype in (torch.bfloat16, torch.float16):
        limit += torch.finfo(found.dtype).eps
    return bool((found - expected).abs().max() <= 2 * rotations * limit * size)
