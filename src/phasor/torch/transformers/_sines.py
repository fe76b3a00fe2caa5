"""Models that keep a table of sines in every attention module: GPT-J and CodeGen.

They look positions up in it and split what they find into sines and cosines. What stands in for
the table finds carriers instead, however far the positions reach.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phasor.errors import TensorError
from phasor.torch.transformers._carriers import Carrier, Turns, carried
from phasor.torch.transformers._fresh import Fresh

#: Where such a module keeps its table.
TABLE = "embed_positions"
_MAKER = "create_sinusoidal_positions"


class FreshTable(Fresh):
    """What a new table of sines and cosines says, behind the interface of `Fresh`.

    Args:
        cls: The class of attention that keeps the table.
        table: The table it has.
    """

    def __init__(self, cls: Any, table: Tensor) -> None:
        maker = cls.forward.__globals__[_MAKER]
        with torch.device("cpu"), torch.no_grad():
            self._table: Tensor = maker(*table.shape)
        self.held = {TABLE: self._table}
        self.single, self.axes = False, 1
        self.most = len(self._table) - 1

    def __call__(self, grid: NDArray[np.int64]) -> Any:
        sin, cos = self._table[torch.as_tensor(grid)].chunk(2, -1)
        return cos, sin


class CarrierTable:
    """Stands for the table of one attention module, and for what was found in it.

    Args:
        turns: How the layer turns.
        device: Where the table is.
        carrier: What was found, if something was looked up.
    """

    def __init__(self, turns: Turns, device: torch.device, carrier: Carrier | None = None) -> None:
        self.turns, self.device, self.carrier = turns, device, carrier
        self.shape = (2,)

    def repeat(self, *sizes: int) -> CarrierTable:
        """The same table for every row of the batch."""
        del sizes
        return self

    def to(self, *args: Any) -> CarrierTable:
        """Positions are not cast."""
        del args
        return self

    def __getitem__(self, position_ids: Tensor) -> CarrierTable:
        found = carried(self.turns, position_ids, torch.float32)
        return CarrierTable(self.turns, self.device, found)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.gather:
            return args[0][args[2][..., 0]]
        if func is torch.split and args[0].carrier is not None:
            return args[0].carrier, args[0].carrier
        raise TensorError(f"a table of a patched model holds positions, not sines, for {func}")


def holds_table(module: Any) -> bool:
    """Whether an attention module keeps a table of sines."""
    cls = cast(Any, type(module))
    return TABLE in module._buffers and _MAKER in getattr(cls.forward, "__globals__", {})
