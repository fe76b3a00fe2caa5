"""Ropes, positions and a watch on memory that several test files of torch take."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from phasor import Rope
from phasor.axes import Sectioned

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
THREE = Rope(head_dim=8, pairing="half", axes=Sectioned((2, 1, 1)))
PLACES = torch.tensor([3, 70_001, -5, 2**33])


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
