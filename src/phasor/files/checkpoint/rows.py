"""The new row order of a tensor, from its role, its shape and its layer's rope."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from phasor.files import refusal
from phasor.files.checkpoint.model import VALUE_OF, CheckpointModel, Projection
from phasor.files.checkpoint.storage import (
    COLUMNS,
    ROWS,
    Format,
    Storage,
    find_format,
    move_outputs,
)
from phasor.files.tensors import Entry, Rows
from phasor.numpy import change_pairing
from phasor.pairings import Pairing
from phasor.rope import Rope


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """A tensor that changes: output ``i`` of each period comes from its output ``order[i]``.

    Outputs are rows of a weight, or numbers of a vector. Heads of its layer's ``rope`` begin at
    ``heads`` in each of the ``periods``; the rest stays.
    """

    part: Projection
    rope: Rope
    heads: tuple[int, ...]
    order: NDArray[np.intp]
    periods: int
    outputs: int
    storage: Storage = ROWS

    def pieces(self, entry: Entry) -> tuple[Rows, ...]:
        """The pieces of the source that make the tensor of the result."""
        return move_outputs(entry, self.storage, self.outputs, self.order, self.periods)

    def stays_in_blocks(self, block: int) -> bool:
        """Whether each output stays in its block of ``block``, counted from the start."""
        width = len(self.order)
        # after as many periods as a block has items, the pattern repeats
        return all(
            np.array_equal((first + self.order) // block, (first + np.arange(width)) // block)
            for first in range(0, min(self.periods, block) * width, width)
        )


def order_of_heads(
    rope: Rope, source: Pairing, target: Pairing, heads: tuple[int, ...] = (0,), width: int = 0
) -> NDArray[np.intp]:
    """The permutation of a period, by default one head, that changes the pairing of heads.

    >>> rope = Rope(head_dim=4, pairing="half")
    >>> order_of_heads(rope, "interleaved", "half", heads=(2,), width=6)
    array([0, 1, 2, 4, 3, 5])
    """
    slice_of_head = {"rotary_dim": rope.rotary_dim, "rotary_start": rope.rotary_start}
    head = change_pairing(np.arange(rope.head_dim), source, target, **slice_of_head)
    order = np.arange(width or rope.head_dim)
    for start in heads:
        order[start : start + rope.head_dim] = start + head
    return order


# suffixes of tensors whose first axis is the projection's output
_ROW_SUFFIX = re.compile(
    r"(?:(?:linear|base_layer)\.)?(?:weight|bias)|lora_(?:B|up)(?:\.\w+)*|"
    r"lora_magnitude_vector(?:\.\w+)*|weight\.lora_b"
)
_WEIGHTS = ("weight", "qweight", "weight_packed")
_INNER_SUFFIX = re.compile(r"lora_(?:A|down)(?:\.\w+)*|weight\.lora_a")
_SCALE_SUFFIX = re.compile(r"(?:weight_)?scale(?:_inv)?")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A tensor of a layer with a rope, by its name: whether it changes, and how."""

    model: CheckpointModel
    source: Pairing
    target: Pairing
    entries: Mapping[str, Entry]  # of all tensors
    name: str
    part: Projection
    rope: Rope

    @property
    def entry(self) -> Entry:
        """The tensor's place in its file, and its shape."""
        return self.entries[self.name]

    def change(self) -> Change | None:
        """The new order of the tensor; None if it does not change, as LoRA's inner matrices.

        A shape without whole heads, or unknown content, is refused.
        """
        name, part = self.name, self.part
        if part.module:
            value = "" if part.auxiliary else VALUE_OF.get(part.module)
            if value and part.suffix in _WEIGHTS and not self._has_weight(value):
                raise refusal("shared_values", name=name, value=value)
            if _INNER_SUFFIX.fullmatch(part.suffix):
                return None
        elif re.search(r"\blora_(A|down)\b", name):
            raise refusal("lora", name=name)
        quantised = find_format(name, self.entries)
        module, _, suffix = name.rpartition(".")
        if quantised is not None and suffix in quantised.tensors:
            return self._change_quantised(quantised, module, suffix)
        if part.module and not _ROW_SUFFIX.fullmatch(part.suffix):
            return self._change_scales()
        return self._change_items()

    def _has_weight(self, module: str) -> bool:
        """Whether ``module`` beside this one has a weight, quantised or not."""
        place = self.name.removesuffix(f"{self.part.module}.{self.part.suffix}")
        return any(f"{place}{module}.{suffix}" in self.entries for suffix in _WEIGHTS)

    def _change_quantised(self, quantised: Format, module: str, suffix: str) -> Change | None:
        """The change of a tensor that belongs to a quantised weight."""
        storage, entry = quantised.tensors[suffix], self.entry
        if storage is None:
            return None
        if self.part.role == "vectors":
            self._refuse(f"only projections are converted in the format of {quantised.name}")
        weight = self.entries[f"{module}.{quantised.weight}"]
        outputs = weight.shape[(quantised.tensors[quantised.weight] or ROWS).axis]
        is_divided = entry.shape and outputs and storage.item_bits(entry, outputs)
        if not is_divided and entry.count == 1:
            return None  # a single number for all outputs
        if not is_divided:
            self._refuse(
                f"it must hold {outputs} outputs, like {quantised.weight} of {quantised.name}"
            )
        heads, width, periods = self._find_period(outputs)
        order = order_of_heads(self.rope, self.source, self.target, heads, width)
        return Change(self.part, self.rope, heads, order, periods, outputs, storage)

    def _change_items(self) -> Change:
        """The new order of rows, or of the numbers of vectors."""
        entry, rope = self.entry, self.rope
        rows, width = entry.shape[0] if entry.shape else 0, rope.head_dim
        if self.part.role == "vectors":
            if self.model.latent and not self.part.auxiliary:
                self._refuse("a QK-norm in a model with latent attention is not known")
            if not entry.shape or entry.shape[-1] % width or entry.bits % 8:
                self._refuse(f"its last axis must hold whole heads of head_dim {width}")
            # [..., heads * width]
            heads, outputs, storage = (0,), entry.shape[-1], COLUMNS
            periods = outputs // width
        else:
            if rows * entry.count == 0 or entry.size % rows:
                self._refuse("it must have rows of whole bytes")
            heads, width, periods = self._find_period(rows)
            # [rows, inputs] of a weight, [rows] of a bias: both move as whole rows
            outputs, storage = rows, ROWS
        order = order_of_heads(rope, self.source, self.target, heads, width)
        return Change(self.part, rope, heads, order, periods, outputs, storage)

    def _find_period(self, rows: int) -> tuple[tuple[int, ...], int, int]:
        """Where heads begin in a period, the width of a period and the number of periods."""
        is_latent = self.model.latent and not self.part.auxiliary
        return (self._find_latent_heads if is_latent else self._find_heads)(rows)

    def _find_latent_heads(self, rows: int) -> tuple[tuple[int, ...], int, int]:
        """The period of latent attention: heads are ``[not rotated | rotated]``, and one key."""
        width, role = self.rope.head_dim, self.part.role
        if role == "latent key":
            if rows <= width:
                self._refuse(f"it must have more rows than the {width} of the key")
            return (rows - width,), rows, 1
        if role != "query":
            self._refuse("it is not known from models with latent attention")
        heads, unrotated = self._known_query_heads(), self.model.unrotated
        period = rows // heads
        # [not rotated | rotated | rows of a gate]
        start = unrotated if self.model.gated else period - width
        fits = rows % heads == 0 and unrotated in (None, start)
        if start is None or not (fits and 0 <= start <= period - width):
            before = "" if unrotated is None else f", {unrotated} more before these"
            self._refuse(f"it must hold {heads} heads of {width} rows or more{before}")
        return (start,), period, heads

    def _find_heads(self, rows: int) -> tuple[tuple[int, ...], int, int]:
        """The period of projections with whole heads."""
        model, part, width = self.model, self.part, self.rope.head_dim
        count, leftover_rows = divmod(rows, width)
        if leftover_rows:
            self._refuse(f"its rows must be whole heads of head_dim {width}")
        if part.role == "latent key":
            self._refuse("the config describes no latent attention")
        # an indexer may have any number of heads
        is_counted = part.module and not part.auxiliary and not model.varied
        heads = model.num_heads if is_counted else None
        if part.role == "query" and heads is not None and count != heads:
            if model.gated and count == 2 * heads:
                return (0,), 2 * width, heads
            self._refuse(f"it must hold {heads} heads of head_dim {width}")
        if part.role == "key" and heads is not None and (count == 0 or heads % count):
            self._refuse(f"its heads must divide the {heads} query heads")
        if part.role in ("query", "key", "shared"):
            return (0,), width, count
        arrangement = model.fused if part.role == "fused" else part.role
        if arrangement is None:
            entry = self.entry
            raise refusal("qkv", name=self.name, dtype=entry.dtype, shape=list(entry.shape))
        queries = self._known_query_heads()
        # [queries | keys | values], as many values as keys
        keys, remainder = divmod(count - queries, 2)
        if keys < 1 or remainder or queries % keys:
            self._refuse(f"with {queries} query heads it must hold as many keys as values")
        if arrangement == "blocks":
            return (0,), width, queries + keys
        rotated = queries // keys + 1  # the queries of a group and their key; its value follows
        return tuple(i * width for i in range(rotated)), (rotated + 1) * width, keys

    def _known_query_heads(self) -> int:
        if self.model.num_heads is None:
            raise refusal("num_heads", name=self.name)
        return self.model.num_heads

    def _change_scales(self) -> Change | None:
        """The new order of a scale or zero point of a quantised weight."""
        entry = self.entry
        if entry.count == 1:
            return None
        weight = self.name.removesuffix(self.part.suffix) + "weight"
        problem = "what it holds is not known, so its rows might be left behind"
        if _SCALE_SUFFIX.fullmatch(self.part.suffix) and weight in self.entries:
            # a scale of one row moves with the row; a scale of a block stays if all its rows stay
            rows, block = self.entries[weight].shape[0], self.model.block_rows
            if entry.shape[0] == rows and self.part.role != "vectors":
                return self._change_items()
            if block and entry.shape[0] == -(-rows // block):
                # in vectors, columns move in blocks of the same width
                if replace(self, name=weight)._change_items().stays_in_blocks(block):
                    return None
                problem = (
                    f"rows would move out of their blocks of {block}, which have one scale each"
                )
        return self._refuse(f"{problem}; convert the checkpoint before it is quantised")

    def _refuse(self, problem: str) -> NoReturn:
        got = {"dtype": self.entry.dtype, "shape": list(self.entry.shape)}
        raise refusal("rows", name=self.name, problem=problem, **got)
