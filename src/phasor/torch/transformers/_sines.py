"""Models that keep a table of sines: GPT-J and CodeGen in attention, Llama 4 for its pictures.

The first look positions up in it and split what they find into sines and cosines. What stands in
for the table finds carriers instead, however far the positions reach. The second has a row for
each patch of its one size of picture, and positions are what explains the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phasor.axes import Axial
from phasor.errors import TensorError
from phasor.rope import Rope
from phasor.torch.transformers._carriers import Carrier, Ids, Turns, carried
from phasor.torch.transformers._forms import measured
from phasor.torch.transformers._fresh import Fresh, base_of, built, halved, held

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
        self._table: Tensor = maker(*table.shape)
        self.held = {TABLE: self._table}
        self.single, self.axes, self.ids, self.form = False, 1, Ids(), None
        self.most = len(self._table) - 1

    def __call__(self, grid: NDArray[np.int64]) -> Any:
        sin, cos = self._table[torch.as_tensor(grid[0])].chunk(2, -1)
        return cos, sin


class FreshGrid(Fresh):
    """What a module says that answers with one table of complex rows, whatever it is given.

    Args:
        cls: The class, built from a config alone.
        config: Its config.
    """

    def __init__(self, cls: Any, config: Any) -> None:
        made = built(cls, config)
        answers = [made(torch.zeros(shape)) for shape in ((1, 1, 1), (2, 7, 3))]
        if not torch.equal(*answers) or not answers[0].is_complex():
            raise TypeError("what it answers is no table of complex rows")
        self._table = answers[0].flatten(0, -2)
        self._config = config
        self.held = held(made)
        self.single, self.axes, self.ids, self.form = True, 2, Ids(last=True), None

    def identified(self, functions: Sequence[Any]) -> Rope | None:
        """Height and width with a spectrum each, if whole positions explain every row."""
        base, pairs = base_of(self._config), self._table.shape[-1]
        for function in functions:
            form = measured(function, self.ids.batched)
            if form is None or form.width != "complex" or base is None or pairs % 2:
                continue
            rope = Rope(
                head_dim=2 * pairs, pairing=form.pairing, pairing_out=form.pairing_out, base=base,
                direction=1 if form.direction > 0 else -1, axes=Axial((pairs // 2, pairs // 2)),
            )  # fmt: skip
            cos, sin = halved(self._table, form)
            # the slowest pair of each axis is the last to come round
            slow = [pairs // 2 - 1, pairs - 1]
            places = np.arctan2(sin, cos)[:, slow] / rope.inv_freq[slow]
            grid = places.round().astype(np.int64).T
            if self.explains(self._table, rope, grid, function):
                self.ids = self.ids._replace(fixed=tuple((int(y), int(x)) for y, x in grid.T))
                return rope
        return None


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
