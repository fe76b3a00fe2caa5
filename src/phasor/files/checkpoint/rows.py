"""The new row order of a tensor, from its role, its shape and its layer's rope."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from phasor.files import refusal
from phasor.files.checkpoint.files import Entry
from phasor.files.checkpoint.model import VALUE_OF, CheckpointModel, Projection
from phasor.numpy import change_pairing
from phasor.pairings import Pairing
from phasor.rope import Rope


@dataclass(frozen=True, slots=True)
class HeadRows:
    """Where heads begin in a period of ``width`` rows, or numbers of a vector; the rest stays."""

    width: int
    heads: tuple[int, ...]
    periods: int


@dataclass(frozen=True, slots=True, eq=False)
class Reorder:
    """Item ``i`` of each period comes from item ``order[i]`` of it; items have ``item_bytes``."""

    layout: HeadRows
    order: NDArray[np.intp]
    item_bytes: int

    def stays_in_blocks(self, block: int) -> bool:
        """Whether each item stays in its block of ``block`` items, counted from the start."""
        width = self.layout.width
        # after as many periods as a block has items, all begins again
        return all(
            np.array_equal((first + self.order) // block, (first + np.arange(width)) // block)
            for first in range(0, min(self.layout.periods, block) * width, width)
        )


def reorder_heads(
    rope: Rope, source: Pairing, target: Pairing, layout: HeadRows, item_bytes: int
) -> Reorder:
    """The permutation of a period that changes the pairing of each head.

    >>> rope = Rope(head_dim=4, pairing="half")
    >>> layout = HeadRows(width=6, heads=(2,), periods=1)
    >>> reorder_heads(rope, "interleaved", "half", layout, item_bytes=2).order
    array([0, 1, 2, 4, 3, 5])
    """
    head = change_pairing(
        np.arange(rope.head_dim),
        source,
        target,
        rotary_dim=rope.rotary_dim,
        rotary_start=rope.rotary_start,
    )
    order = np.arange(layout.width)
    for start in layout.heads:
        order[start : start + rope.head_dim] = start + head
    return Reorder(layout, order, item_bytes)


# suffixes of tensors whose first axis is the projection's output
_ROW_SUFFIX = re.compile(
    r"(?:(?:linear|base_layer)\.)?(?:weight|bias)|lora_(?:B|up)(?:\.\w+)*|"
    r"lora_magnitude_vector(?:\.\w+)*"
)
_INNER_SUFFIX = re.compile(r"lora_(?:A|down)(?:\.\w+)*")
_SCALE_SUFFIX = re.compile(r"(?:weight_)?scale(?:_inv)?")


@dataclass(frozen=True, slots=True)
class Context:
    """The arguments that are the same for all tensors of a conversion."""

    model: CheckpointModel
    source: Pairing
    target: Pairing
    entries: Mapping[str, Entry]


def reorder(context: Context, name: str, part: Projection, rope: Rope) -> Reorder | None:
    """The new order of a tensor; None if it does not change, such as LoRA's inner matrices.

    A shape that is not of whole heads, or content that is not known, is refused.
    """
    if part.module:
        if not part.beside:
            _refuse_shared_values(context, name, part)
        if _INNER_SUFFIX.fullmatch(part.suffix):
            return None
        if not _ROW_SUFFIX.fullmatch(part.suffix):
            return _reorder_scales(context, name, part, rope)
    elif re.search(r"\blora_(A|down)\b", name):
        raise refusal("lora", name=name)
    if part.role == "vectors":
        return _reorder_vectors(context, name, part, rope)
    return _reorder_rows(context, name, part, rope)


def _reorder_vectors(context: Context, name: str, part: Projection, rope: Rope) -> Reorder:
    entry = context.entries[name]
    if context.model.latent and not part.beside:
        _refuse(name, entry, "a QK-norm in a model with latent attention is not known")
    width = rope.head_dim
    if not entry.shape or entry.shape[-1] % width or entry.bits % 8:
        _refuse(name, entry, f"its last axis must hold whole heads of head_dim {width}")
    # [..., heads * width]: a period is a head, whatever is before it
    layout = HeadRows(width, (0,), entry.count // width)
    return reorder_heads(rope, context.source, context.target, layout, entry.bits // 8)


def _reorder_rows(context: Context, name: str, part: Projection, rope: Rope) -> Reorder:
    entry = context.entries[name]
    rows = entry.shape[0] if entry.shape else 0
    if rows * entry.count == 0 or (entry.count // rows * entry.bits) % 8:
        _refuse(name, entry, "it must have rows of whole bytes")
    is_latent = context.model.latent and not part.beside
    find_layout = _find_latent_layout if is_latent else _find_layout
    layout = find_layout(context, name, part, rope.head_dim, rows)
    # [rows, inputs] of a weight, [rows] of a bias: both move as whole rows
    row_bytes = (entry.end - entry.begin) // rows
    return reorder_heads(rope, context.source, context.target, layout, row_bytes)


def _find_latent_layout(
    context: Context, name: str, part: Projection, width: int, rows: int
) -> HeadRows:
    """Heads are ``[not rotated | rotated]``; the one rotated key comes after the latent vector."""
    entry = context.entries[name]
    if part.role == "latent key":
        if rows <= width:
            _refuse(name, entry, f"it must have more rows than the {width} of the key")
        return HeadRows(rows, (rows - width,), 1)
    if part.role != "query":
        _refuse(name, entry, "it is not known from models with latent attention")
    heads = _known_query_heads(context.model, name)
    if rows % heads or rows // heads < width:
        _refuse(name, entry, f"it must hold {heads} heads of {width} rows or more")
    return HeadRows(rows // heads, (rows // heads - width,), heads)


def _find_layout(context: Context, name: str, part: Projection, width: int, rows: int) -> HeadRows:
    model, entry = context.model, context.entries[name]
    count, leftover_rows = divmod(rows, width)
    if leftover_rows:
        _refuse(name, entry, f"its rows must be whole heads of head_dim {width}")
    if part.role == "latent key":
        _refuse(name, entry, "the config describes no latent attention")
    # an indexer has as many heads as it has
    is_counted = part.module and not part.beside and not model.projections.varied
    heads = model.num_heads if is_counted else None
    if part.role == "query" and heads is not None and count != heads:
        if model.projections.gated and count == 2 * heads:
            return HeadRows(2 * width, (0,), heads)
        _refuse(name, entry, f"it must hold {heads} heads of head_dim {width}")
    if part.role == "key" and heads is not None and (count == 0 or heads % count):
        _refuse(name, entry, f"its heads must divide the {heads} query heads")
    if part.role in ("query", "key", "shared"):
        return HeadRows(width, (0,), count)
    arrangement = model.projections.fused if part.role == "fused" else part.role
    if arrangement is None:
        raise refusal("qkv", name=name, dtype=entry.dtype, shape=list(entry.shape))
    queries = _known_query_heads(model, name)
    # [queries | keys | values], as many values as keys
    keys, remainder = divmod(count - queries, 2)
    if keys < 1 or remainder or queries % keys:
        _refuse(name, entry, f"beside {queries} query heads it must hold as many keys as values")
    if arrangement == "blocks":
        return HeadRows(width, (0,), queries + keys)
    rotated = queries // keys + 1  # the queries of a group and their key; its value follows
    return HeadRows((rotated + 1) * width, tuple(i * width for i in range(rotated)), keys)


def _known_query_heads(model: CheckpointModel, name: str) -> int:
    if model.num_heads is None:
        raise refusal("num_heads", name=name)
    return model.num_heads


def _reorder_scales(context: Context, name: str, part: Projection, rope: Rope) -> Reorder | None:
    """The new order of a scale or zero point beside a quantised weight."""
    entry = context.entries[name]
    if entry.count == 1:
        return None
    weight = name.removesuffix(part.suffix) + "weight"
    problem = "what it holds is not known, so its rows might be left behind"
    if _SCALE_SUFFIX.fullmatch(part.suffix) and weight in context.entries:
        # a scale for each row moves with it, one for a block of rows stays if they do
        is_vectors = part.role == "vectors"
        rows, block = context.entries[weight].shape[0], context.model.block_rows
        if entry.shape[0] == rows and not is_vectors:
            return _reorder_rows(context, name, part, rope)
        if block and entry.shape[0] == -(-rows // block):
            # of vectors it is the columns that move, in blocks as wide
            move = _reorder_vectors if is_vectors else _reorder_rows
            if move(context, weight, part, rope).stays_in_blocks(block):
                return None
            problem = f"rows would leave its blocks of {block}, which have one scale each"
    return _refuse(name, entry, f"{problem}; convert the checkpoint before it is quantised")


def _refuse_shared_values(context: Context, name: str, part: Projection) -> None:
    value = VALUE_OF.get(part.module)
    if value is None or part.suffix != "weight":
        return
    if f"{name.removesuffix(f'{part.module}.weight')}{value}.weight" not in context.entries:
        raise refusal("shared_values", name=name, value=value)


def _refuse(name: str, entry: Entry, problem: str) -> NoReturn:
    shape = list(entry.shape)
    raise refusal("rows", name=name, problem=problem, dtype=entry.dtype, shape=shape)
