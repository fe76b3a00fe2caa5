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
from phasor.torch.transformers._fresh import asked, halved, held, unbatched, undisturbed
from phasor.torch.transformers._live import Embedding, Live, is_lost
from phasor.torch.transformers._methods import original
from phasor.torch.transformers._parts import check_model, read_parts
from phasor.torch.transformers._sines import TABLE, holds_table

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
    check_model(model)
    lives = read_parts(model, part, "check")
    like = next((p for p in model.parameters() if p.is_floating_point() and not p.is_meta), None)
    hidden = torch.empty(0) if like is None else like
    with undisturbed():
        found = [
            _checked(one, kind, live, hidden)
            for live in lives
            for one in live.embeddings
            for kind in one.ropes
        ]
    return Checked(modules=tuple(found))


def _checked(one: Embedding, kind: str | None, live: Live, hidden: Tensor) -> CheckedModule:
    context = live.layers.context if isinstance(live.layers, LayerRopes) else None
    grid = _grid(one, context or _CONTEXT)
    law = replace(one.ropes[kind].at(int(grid.max()) + 1), direction=1)
    values = held(one.member.module)
    mine = [name for name in one.held if name in values and name.startswith(kind or "")]
    lost = [name for name in mine if is_lost(values[name], one.held[name])]
    if original(one.member.module) is not None:
        rows, dtype, lost = _ours(law, grid), torch.float32, []
    elif lost:
        nothing = np.full((grid.shape[1], law.num_pairs), np.nan)
        rows, dtype = (nothing, nothing), hidden.dtype
    else:
        answer = _theirs(one, kind, grid, hidden)
        rows, dtype = halved(answer, one.form), _rows_dtype(answer)
    gain = law.attention_factor
    exact = cos_sin(law, grid.T if law.axes.n_axes > 1 else grid[0])
    error = np.max([np.abs(a - gain * b).max(-1) for a, b in zip(rows, exact, strict=True)], 0)
    rounding = torch.finfo(dtype).eps / 2 * gain
    beyond = np.flatnonzero(~(error <= rounding))
    return CheckedModule(
        path=one.member.path,
        class_name=one.member.cls.__name__,
        kind=kind,
        context=int(grid.max()) + 1,
        error=float(error.max()),
        dtype=dtype,
        rounding=rounding,
        beyond=int(grid[:, beyond[0]].max()) if len(beyond) else None,
        lost=lost[0] if lost else "",
    )


def _grid(one: Embedding, context: int) -> NDArray[np.int64]:
    """Positions ``[axes, seq]``, the same on every axis."""
    if one.ids.fixed:
        return np.array(one.ids.fixed).T
    if holds_table(one.member.module):
        context = len(one.held[TABLE])
    count = min(context, _MOST_POSITIONS)
    places = np.unique(np.linspace(0, context - 1, count).round().astype(np.int64))
    axes = next(iter(one.ropes.values())).axes.n_axes
    return np.tile(places, (axes, 1))


def _theirs(one: Embedding, kind: str | None, grid: NDArray[np.int64], hidden: Tensor) -> Any:
    """Rows of the live module, which some write down what they were called with."""
    module = one.member.module
    if holds_table(module):
        sin, cos = module.get_buffer(TABLE)[torch.as_tensor(grid[0])].chunk(2, -1)
        return cos, sin
    like = hidden.new_zeros(1, grid.shape[1], 1)
    if one.ids.fixed:
        return copy.deepcopy(module)(like).flatten(0, -2)
    return unbatched(asked(copy.deepcopy(module), grid, one.ids, kind, like), one.ids)


def _ours(law: Rope, grid: NDArray[np.int64]) -> tuple[NDArray[np.float64], ...]:
    """Rows of phasor's operator, off the pairs (1, 0) that it turns."""
    pairs = law.num_pairs
    plain = replace(law, head_dim=2 * pairs, rotary_start=0, pairing="half", pairing_out=None)
    ones = np.repeat([1.0, 0.0], pairs) * np.ones((grid.shape[1], 1, 1))
    places = torch.as_tensor(grid.T if law.axes.n_axes > 1 else grid[0])
    turned = rotate(
        torch.as_tensor(ones, dtype=torch.float32), places, plain, gain=law.attention_factor
    )
    cos, sin = turned[:, 0].double().numpy().reshape(-1, 2, pairs).swapaxes(0, 1)
    return cos, sin


def _rows_dtype(answer: Any) -> torch.dtype:
    rows = answer if isinstance(answer, Tensor) else answer[0]
    return rows.real.dtype
