"""Where each format of quantised weights stores the outputs of a projection.

An output is a row of the weight before it was quantised, and a head is a run of outputs. Groups
that share a scale run along the inputs in all of these formats, so outputs can be re-ordered and
every number keeps its scale.

Sources: the packing code of AutoAWQ 0.2 (``modules/linear/gemm.py``), GPTQModel
(``nn_modules/qlinear``), compressed-tensors (``pack_quantized/helpers.py``) and bitsandbytes
(``Linear8bitLt._save_to_state_dict``), and mlx's ``quantize``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from phasor.files import refusal
from phasor.files.tensors import Entry, Rows


@dataclass(frozen=True, slots=True)
class Storage:
    """The axis that has the outputs; an element may hold several of them, packed lowest bits first.

    ``slots`` is the order of the outputs within an element, if it is not the natural one.
    """

    axis: Literal[0, -1]
    slots: tuple[int, ...] = ()

    def item_bits(self, entry: Entry, outputs: int) -> int:
        """Bits for one output; 0 if the axis cannot hold so many outputs."""
        bits, remainder = divmod(entry.shape[self.axis] * entry.bits, outputs)
        # a float element holds a single number
        if entry.dtype[0] not in "IU" and bits != entry.bits:
            return 0
        # along the first axis, an item that spans two elements is in two rows
        straddles = self.axis == 0 and entry.bits % (bits or 1)
        is_packed_in_slots = not self.slots or len(self.slots) * bits == entry.bits
        fits = bits in (1, 2, 3, 4, 8) or bits % 8 == 0
        return bits if fits and not remainder and not straddles and is_packed_in_slots else 0

    def item_of_output(self, entry: Entry, outputs: int) -> NDArray[np.intp]:
        """The index of the item, or items, of each output: [outputs] or [outputs, groups].

        >>> from pathlib import Path
        >>> words = Entry(Path(), "I32", (2, 1), 0, 8, ())  # [inputs, outputs / 8]
        >>> Storage(-1, AWQ_SLOTS).item_of_output(words, 8)  # output 1 is the fifth from below
        array([0, 4, 1, 5, 2, 6, 3, 7])
        """
        items = np.arange(outputs)
        if self.axis == -1:
            # [elements, slots]: the output of each item
            outputs_of_items = items.reshape(-1, len(self.slots) or 1)[:, self.slots or (0,)]
            return np.argsort(outputs_of_items.ravel())
        elements = entry.shape[0]
        # [elements, groups, outputs in an element] -> [outputs, groups]
        items = np.arange(outputs * entry.count // elements).reshape(
            elements, -1, outputs // elements
        )
        return items.swapaxes(1, 2).reshape(outputs, -1)


def move_outputs(
    entry: Entry, storage: Storage, outputs: int, order: NDArray[np.intp], periods: int
) -> tuple[Rows, ...]:
    """A tensor whose outputs are re-ordered in each period; those after all periods stay."""
    num_moved = periods * len(order)
    if storage.axis == 0 and entry.shape[0] == outputs:
        row_bytes = entry.size // outputs
        moved = replace(entry.rows(row_bytes), num_rows=num_moved, order=order)
        return moved, entry.rows(row_bytes, num_moved * row_bytes)
    sources = np.arange(outputs)
    sources[:num_moved] = (len(order) * np.arange(periods)[:, None] + order).ravel()
    item_of_output = storage.item_of_output(entry, outputs)
    order_of_items = np.empty(item_of_output.size, np.intp)
    order_of_items[item_of_output] = item_of_output[sources]
    return (replace(entry.items(storage.item_bits(entry, outputs)), order=order_of_items),)


ROWS, COLUMNS = Storage(0), Storage(-1)
AWQ_SLOTS = (0, 2, 4, 6, 1, 3, 5, 7)
_AWQ_COLUMNS = Storage(-1, AWQ_SLOTS)


@dataclass(frozen=True, slots=True)
class Format:
    """A format of quantised weights.

    ``tensors`` are the tensors of a module, by the last part of their names; None for one without
    outputs. ``weight`` names one whose shape gives their number.
    """

    name: str
    weight: str
    tensors: Mapping[str, Storage | None]


_GPTQ = Format(
    "GPTQ", "qweight", {"qweight": COLUMNS, "qzeros": COLUMNS, "scales": COLUMNS, "g_idx": None}
)
# only the order of columns in an element differs
_AWQ = Format("AWQ", "scales", {"qweight": _AWQ_COLUMNS, "qzeros": _AWQ_COLUMNS, "scales": COLUMNS})
_MLX = Format("MLX", "weight", {"weight": ROWS, "scales": ROWS, "biases": ROWS})
_COMPRESSED = Format(
    "compressed-tensors",
    "weight_packed",
    {
        "weight_packed": ROWS,
        "weight_scale": ROWS,
        "weight_zero_point": ROWS,
        "weight_shape": None,
        "weight_g_idx": None,
        "weight_global_scale": None,
        "input_global_scale": None,
    },
)
_COMPRESSED_BYTES = Format(
    "compressed-tensors",
    "weight",
    {"weight": ROWS, "weight_scale": ROWS, "weight_zero_point": ROWS},
)
_BITSANDBYTES = Format(
    "bitsandbytes, 8-bit", "weight", {"weight": ROWS, "SCB": ROWS, "weight_format": None}
)
#: Layouts of bitsandbytes' 8-bit weights that are not rows, by the number in ``weight_format``.
_TILED = {1: "col32", 2: "col_turing", 3: "col_ampere"}
_FOUR_BIT = re.compile(r"(?P<weight>.*\bweight)\.(?:absmax|quant_map|nested_\w+|quant_state\.\w+)")


def find_format(name: str, entries: Mapping[str, Entry]) -> Format | None:
    """The format of the module to which a tensor belongs; None if it is not quantised."""
    module = name.rpartition(".")[0]

    def get(suffix: str) -> Entry | None:
        return entries.get(f"{module}.{suffix}")

    is_four_bit = _FOUR_BIT.fullmatch(name)
    if is_four_bit or get("weight.absmax") is not None:
        raise refusal("four_bit", name=is_four_bit["weight"] if is_four_bit else name)
    if (qweight := get("qweight")) is not None:
        return _find_packed(name, qweight, get("scales"))
    if get("weight_packed") is not None:
        return _COMPRESSED
    if (weight := get("weight")) is None:
        return None
    if get("scales") is not None and weight.dtype == "U32":
        return _MLX
    if get("SCB") is not None:
        number = get("weight_format")
        layout = 0 if number is None else int(number.rows(1).read(0, 1)[0, 0])
        if layout:
            raise refusal("tiled", name=f"{module}.weight", layout=_TILED.get(layout, layout))
        return _BITSANDBYTES
    return None if get("weight_zero_point") is None else _COMPRESSED_BYTES


def _find_packed(name: str, qweight: Entry, scales: Entry | None) -> Format:
    """GPTQ or AWQ, told apart by shapes because their tensors have the same names."""
    if scales is not None and len(qweight.shape) == len(scales.shape) == 2:
        outputs = scales.shape[-1]
        if qweight.shape[-1] == outputs:
            return _GPTQ
        if qweight.shape[-1] * len(AWQ_SLOTS) == outputs:
            return _AWQ
    got = {"qweight": list(qweight.shape), "scales": None if scales is None else list(scales.shape)}
    raise refusal("packed", name=name, **got)


def check_companions(changed: Iterable[str], entries: Mapping[str, Entry]) -> None:
    """Refuse to move a tensor of a quantised weight without its companions, as patterns might."""
    names = set(changed)
    for name in names:
        if (storage_format := find_format(name, entries)) is None:
            continue
        module, _, suffix = name.rpartition(".")
        if suffix not in storage_format.tensors:
            continue
        for ending, storage in storage_format.tensors.items():
            companion = f"{module}.{ending}"
            if storage is not None and companion in entries and companion not in names:
                raise refusal(
                    "companion", name=name, format=storage_format.name, companion=companion
                )
