"""How far the cosines of a live model are from exact."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from phasor.angles import cos_sin
from phasor.layers import LayerRopes
from phasor.rope import Rope
from phasor.torch.functional import rotate
from phasor.torch.hf.embeddings import (
    buffers_and_factors,
    call_embedding,
    each_row,
    half_rows,
    isolated_torch_state,
)
from phasor.torch.hf.methods import original_class
from phasor.torch.hf.modules import TABLE, holds_table
from phasor.torch.hf.reading import (
    Embedding,
    PartRotation,
    is_lost,
    read_parts,
)

# where a config names no context, as those of towers do not
_CONTEXT = 4096
_MOST_POSITIONS = 1 << 16


@dataclass(frozen=True, kw_only=True)
class CheckedModule:
    """The cosines and sines of one module, for one kind of layer; as text, a line.

    Attributes:
        path: The module's name in the model.
        class_name: Its class.
        kind: The kind of layer, where it makes cosines for several.
        context: Positions from 0 that were looked at, at most 65,536 of them, evenly spread.
        error: The largest distance of a cosine or a sine from its exact value; NaN if it has none.
        dtype: What its cosines and sines come in.
        rounding: What rounding to that dtype may cost, half a unit in the last place of the gain.
        beyond: The first of those positions where the distance is more than that, if any.
        lost: What the module holds no numbers in any more, such as ``inv_freq``; "" if nothing.
    """

    path: str
    class_name: str
    kind: str | None
    context: int
    error: float
    dtype: torch.dtype
    rounding: float
    beyond: int | None
    lost: str = ""

    def __str__(self) -> str:
        who = f"{self.path} ({self.class_name})" + (f", {self.kind}" if self.kind else "")
        if self.lost:
            return f"{who}: no cosines, for its {self.lost} is lost; a patched model needs none"
        reach = "never" if self.beyond is None else f"from position {self.beyond}"
        kind = str(self.dtype).removeprefix("torch.")
        return (
            f"{who}: cosines within {self.error:.1e} of exact over {self.context} positions, "
            f"beyond the rounding of {kind} ({self.rounding:.1e}) {reach}"
        )


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What `check` found; as text, a line for each module.

    Attributes:
        modules: Those that make cosines, in the model's order.
    """

    modules: tuple[CheckedModule, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.modules))


def check(model: nn.Module, *, part: str | None = None) -> Checked:
    """How far the cosines that ``model`` turns by, as it is, are from exact.

    Frequencies are rounded by ``model.to(torch.bfloat16)``, lost by ``to_empty``, and multiplied
    by positions in float32: the further a token is from the start, the further its angle is off.
    `patch` mends all three, since a patched model holds no frequencies.

    Args:
        model: A model of transformers, or a part of one, patched or not. It is not changed.
        part: As in `patch`.

    Raises:
        ConfigError: If something in the model rotates in a way that is not understood.

    >>> from transformers import LlamaConfig, LlamaModel
    >>> small = LlamaConfig(num_hidden_layers=1, hidden_size=64, num_attention_heads=2,
    ...     num_key_value_heads=1, intermediate_size=8, vocab_size=16)
    >>> print(check(LlamaModel(small).to(torch.bfloat16)))  # doctest: +ELLIPSIS
    rotary_emb (LlamaRotaryEmbedding): cosines within 3.6e-01 of exact over 2048 positions, ...
    """
    read = read_parts(model, part, "check")
    like = next((p for p in model.parameters() if p.is_floating_point() and not p.is_meta), None)
    hidden = torch.empty(0) if like is None else like
    with isolated_torch_state():
        modules = [
            _check_module(embedding, kind, one, hidden)
            for one in read
            for embedding in one.embeddings
            for kind in embedding.ropes
        ]
    return Checked(modules=tuple(modules))


def _check_module(
    embedding: Embedding, kind: str | None, read: PartRotation, hidden: Tensor
) -> CheckedModule:
    member, form = embedding.member, embedding.form
    context = read.layers.context if isinstance(read.layers, LayerRopes) else None
    grid = _grid(embedding, context or _CONTEXT)
    law = replace(embedding.ropes[kind].at(int(grid.max()) + 1), direction=1)
    live = buffers_and_factors(member.module)
    of_kind = [name for name in embedding.buffers if name in live and name.startswith(kind or "")]
    lost = [name for name in of_kind if is_lost(live[name], embedding.buffers[name])]
    if original_class(member.module) is not None:
        rows, dtype, lost = _operator_rows(law, grid), torch.float32, []
    elif lost:
        nothing = np.full((grid.shape[1], law.num_pairs), np.nan)
        rows, dtype = (nothing, nothing), hidden.dtype
    else:
        answer = _module_rows(embedding, kind, grid, hidden)
        rows, dtype = half_rows(answer, form), each_row(answer)[0].real.dtype
    gain = law.attention_factor
    exact = cos_sin(law, grid.T if law.axes.n_axes > 1 else grid[0])
    error = np.max([np.abs(a - gain * b).max(-1) for a, b in zip(rows, exact, strict=True)], 0)
    rounding = torch.finfo(dtype).eps / 2 * gain
    beyond = np.flatnonzero(~(error <= rounding))
    return CheckedModule(
        path=member.path,
        class_name=member.cls.__name__,
        kind=kind,
        context=int(grid.max()) + 1,
        error=float(error.max()),
        dtype=dtype,
        rounding=rounding,
        beyond=int(grid[:, beyond[0]].max()) if len(beyond) else None,
        lost=lost[0] if lost else "",
    )


def _grid(embedding: Embedding, context: int) -> NDArray[np.int64]:
    """Positions ``[axes, seq]``, the same on every axis."""
    if embedding.layout.fixed:
        return np.array(embedding.layout.fixed).T
    if holds_table(embedding.member.module):
        context = len(embedding.buffers[TABLE])
    count = min(context, _MOST_POSITIONS)
    positions = np.unique(np.linspace(0, context - 1, count).round().astype(np.int64))
    return np.tile(positions, (next(iter(embedding.ropes.values())).axes.n_axes, 1))


def _module_rows(
    embedding: Embedding, kind: str | None, grid: NDArray[np.int64], hidden: Tensor
) -> Any:
    """Rows of the live module."""
    module = embedding.member.module
    if holds_table(module):
        sin, cos = module.get_buffer(TABLE)[torch.as_tensor(grid[0])].chunk(2, -1)
        return cos, sin
    like = hidden.new_zeros(1, grid.shape[1], 1)
    # of a copy, for some write down what they were called with
    if embedding.layout.fixed:
        return copy.deepcopy(module)(like)
    return call_embedding(copy.deepcopy(module), grid, embedding.layout, kind, like)


def _operator_rows(law: Rope, grid: NDArray[np.int64]) -> tuple[NDArray[np.float64], ...]:
    """Rows of phasor's operator, off the pairs (1, 0) that it turns."""
    pairs = law.num_pairs
    plain = replace(law, head_dim=2 * pairs, rotary_start=0, pairing="half", pairing_out=None)
    ones = np.repeat([1.0, 0.0], pairs) * np.ones((grid.shape[1], 1, 1))
    positions = torch.as_tensor(grid.T if law.axes.n_axes > 1 else grid[0])
    rotated = rotate(
        torch.as_tensor(ones, dtype=torch.float32), positions, plain, gain=law.attention_factor
    )
    # [seq, 1, 2 * pairs] -> [2, seq, pairs]
    cos, sin = rotated[:, 0].double().numpy().reshape(-1, 2, pairs).swapaxes(0, 1)
    return cos, sin
