"""The rotation of a transformers model, read off it and replaced by phasor's, in that model alone.

    patch(model)       every layer rotates by positions, with phasor's operator
    unpatch(model)     the classes that were there before, on the same modules
    from_model(model)  the rope of every layer of a live model, verified
    check(model)       how far its live cosines are from exact

A model of pictures and text has a part for each, named by the key of its config in the config file,
as in ``patch(model, part="text_config")``.

The modules stay the same objects. Those that turn positions into cosines, and those that rotate by
them, become instances of a subclass of their own class: the first answers with the positions
themselves, the second meets those with phasor's operator. Parameters, buffers, hooks, names and
the class of the model are not touched, so that what is saved, wrapped or trained is as before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from phasor._checks import whole
from phasor.angles import cos_sin
from phasor.errors import ConfigError
from phasor.layers import LayerRopes, summarize
from phasor.rope import Rope
from phasor.torch.functional import rotate
from phasor.torch.hf.embeddings import (
    buffers_and_factors,
    each_row,
    half_rows,
    isolated_torch_state,
)
from phasor.torch.hf.methods import ORIGINAL, named_modules, original_class, rotations_of
from phasor.torch.hf.modules import (
    CARRIED_ROPES,
    TABLE,
    Member,
    carrying_class,
    holds_table,
    layer_number,
    rotating_class,
    set_class,
)
from phasor.torch.hf.reading import (
    Embedding,
    PartRotation,
    check_buffers,
    is_lost,
    language_part,
    read_parts,
)

__all__ = [
    "Checked",
    "CheckedModule",
    "Patched",
    "Replaced",
    "check",
    "from_model",
    "patch",
    "unpatch",
]


# positions that are checked where the config has no context, as those of vision towers
_CONTEXT = 4096
_MOST_POSITIONS = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Replaced:
    """One module that rotates with phasor now.

    Attributes:
        path: Its name in the model.
        class_name: Its class.
        layer: The layer it belongs to, where it has a number.
        functions: The functions of transformers that its methods no longer call.
        rope: What it turns by, or None where its layer has no position embedding, or where it is
            not known which of the model's ropes its layer has.
        doubt: Why that is not known; "" where it is.
    """

    path: str
    class_name: str
    layer: int | None
    functions: tuple[str, ...]
    rope: Rope | None
    doubt: str = ""


@dataclass(frozen=True, kw_only=True)
class Patched:
    """What `patch` replaced; as text, one line.

    Attributes:
        model: The name of the model's class.
        embeddings: Paths of the modules that hand out positions in the place of cosines.
        layers: The modules that rotate, part by part, in the model's order.
        already: Whether all of them were patched before, so that nothing has changed.
    """

    model: str
    embeddings: tuple[str, ...]
    layers: tuple[Replaced, ...]
    already: bool = False

    def __repr__(self) -> str:
        return f"Patched({self})"

    def __str__(self) -> str:
        count = len(self.layers)
        modules = f"{count} module{'' if count == 1 else 's'}"
        if self.already:
            return f"{self.model}: phasor rotates in {modules} already; nothing has changed"
        few = ", ".join(self.embeddings[:3]) + (" and others" if self.embeddings[3:] else "")
        return f"{self.model}: phasor rotates in {modules}; positions come from {few}"

    def table(self) -> str:
        """A row for each module that rotates: its layer, what it called, and its rope."""
        rows = [("layer", "module", "was", "turns by")]
        for one in self.layers:
            number = "" if one.layer is None else str(one.layer)
            unknown = "its positions' rope" if one.doubt else "nothing"
            turns = unknown if one.rope is None else summarize(one.rope)
            rows.append((number, f"{one.path} ({one.class_name})", ", ".join(one.functions), turns))
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        return "\n".join(
            "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]])
            for row in rows
        )


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


def patch(
    model: nn.Module,
    *,
    part: str | None = None,
    seq_len: int | None = None,
    verbose: bool = False,
) -> Patched:
    """Let ``model`` rotate with phasor from now on; prints a line and returns what was replaced.

    Only this model changes, and modules that are patched already stay as they are. Rows of cos and
    sin are correct to float32 at every position, the arithmetic is float32 with one rounding at the
    end, and positions travel in the place of ``[batch, seq, head_dim]`` of cosines and sines. The
    law of a rule (dynamic NTK, LongRoPE) is picked by the positions of each call alone, whatever
    was called before.

    Args:
        model: A model of transformers, or a part of one.
        part: Replace only this part of a model that has several, by the key of its config in the
            model's: ``"text_config"``, ``"vision_config"``, ``"thinker_config.text_config"``. All
            of them if None.
        seq_len: Pick the law of a rule once and for all, for sequences of this many tokens. Keys
            that a cache holds then match all later queries; without it they are as transformers
            leaves them, under the law of the call that made them.
        verbose: Print `Patched.table` too, a row for each module.

    Returns:
        What was replaced, layer by layer.

    Raises:
        ConfigError: If the model has no rotary embedding, or something in it, or in the part that
            was asked for, rotates in a way that is not understood, or it is patched already for
            another ``seq_len``. The error says which and what to do, and nothing has been changed.

    >>> from transformers import LlamaConfig, LlamaModel
    >>> small = LlamaConfig(num_hidden_layers=1, hidden_size=64, num_attention_heads=2,
    ...     num_key_value_heads=1, intermediate_size=8, vocab_size=16)
    >>> model = LlamaModel(small)
    >>> patched = patch(model)
    LlamaModel: phasor rotates in 1 module; positions come from rotary_emb
    >>> print(patched.table())  # doctest: +ELLIPSIS
    layer  module ...
    0      layers.0.self_attn (LlamaAttention)  ...  half pairs, 32 coordinates, base 10000
    >>> unpatch(model)
    """
    if seq_len is not None:
        whole("seq_len", seq_len, least=1)
    ropes: list[tuple[nn.Module, Any]] = []
    classes: list[tuple[Member, type]] = []
    # every class is made before the first module changes
    read = read_parts(model, part, "patch")
    for one in read:
        check_buffers(one)
        for embedding in one.embeddings:
            member, fresh = embedding.member, embedding.fresh
            carried = embedding.carried_ropes(seq_len)
            if original_class(member.module) is not None:
                if member.module.__dict__[CARRIED_ROPES] != carried:
                    raise ConfigError(
                        f"seq_len must be as before, and {member.path} was patched for another; "
                        "call unpatch(model) first"
                    )
                continue
            ropes.append((member.module, carried))
            cls = carrying_class(member.cls, bool(fresh.layout.fixed), fresh.single)
            classes.append((member, cls))
        # a module that is both, with a table of its own, gets the second of its classes
        batched = one.embeddings[0].fresh.layout.batched
        for member in one.rotating:
            if original_class(member.module) is None:
                cls = rotating_class(member.cls, batched, holds_table(member.module))
                classes.append((member, cls))
    for module, by_kind in ropes:
        module.__dict__[CARRIED_ROPES] = by_kind
    for member, cls in classes:
        set_class(member.module, cls)
    report = Patched(
        model=type(model).__name__,
        embeddings=tuple(it.member.path for one in read for it in one.embeddings),
        layers=tuple(
            _describe_replaced(member, one.layers, seq_len)
            for one in read
            for member in one.rotating
        ),
        already=not classes,
    )
    print(f"{report}\n{report.table()}" if verbose else report)
    return report


def unpatch(model: nn.Module) -> None:
    """Give every module of ``model`` the class that it had before `patch`.

    Raises:
        ConfigError: If no module of it is patched, or something else changed a patched module's
            class since; undo that first.

    >>> from transformers import LlamaConfig, LlamaModel
    >>> small = LlamaConfig(num_hidden_layers=1, hidden_size=64, num_attention_heads=2,
    ...     num_key_value_heads=1, intermediate_size=8, vocab_size=16)
    >>> model = LlamaModel(small)
    >>> before = type(model.rotary_emb)
    >>> patched = patch(model)  # doctest: +ELLIPSIS
    LlamaModel: phasor rotates in 1 module; ...
    >>> type(model.rotary_emb) is before
    False
    >>> unpatch(model)
    >>> type(model.rotary_emb) is before
    True
    """
    patched: list[tuple[nn.Module, type]] = []
    for path, module in named_modules(model):
        before = original_class(module)
        if before is not None:
            patched.append((module, before))
        elif hasattr(type(module), ORIGINAL):
            raise ConfigError(
                f"{path} has been given another class since it was patched; undo that first"
            )
    if not patched:
        raise ConfigError(f"model must be patched, and no module of {type(model).__name__} is")
    for module, before in patched:
        set_class(module, before)
        module.__dict__.pop(CARRIED_ROPES, None)


def from_model(model: nn.Module, *, part: str | None = None) -> LayerRopes:
    """The rope of every layer of a live model, patched or not.

    They are read from the model's config and verified: the cosines of each embedding module's
    class, and the functions that rotate by them, are called and must turn as the ropes say.

    Args:
        model: A model of transformers, or a part of one.
        part: Which part of a model that has several, as in `patch`; its language model if None.

    Raises:
        ConfigError: If something in that part rotates in a way that is not understood.

    >>> from transformers import LlamaConfig, LlamaModel
    >>> small = LlamaConfig(num_hidden_layers=2, hidden_size=64, num_attention_heads=2,
    ...     num_key_value_heads=1, intermediate_size=8, vocab_size=16)
    >>> ropes = from_model(LlamaModel(small))
    >>> len(ropes), ropes[0].head_dim, ropes[0].pairing, ropes[0].base
    (2, 32, 'half', 10000.0)
    """
    (read,) = read_parts(model, language_part(model) if part is None else part, "from_model")
    check_buffers(read)
    if isinstance(read.layers, str):
        raise ConfigError(f"model must be one whose layers can be told apart: {read.layers}")
    return read.layers


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


# ---- what was replaced ----


def _describe_replaced(member: Member, ropes: LayerRopes | str, seq_len: int | None) -> Replaced:
    layer = layer_number(member)
    doubt, rope = (ropes, None) if isinstance(ropes, str) else ("", None)
    if isinstance(ropes, LayerRopes) and layer is not None and layer < len(ropes):
        rope = ropes[layer]
    return Replaced(
        path=member.path,
        class_name=member.cls.__name__,
        layer=layer,
        functions=tuple(sorted(rotations_of(member.cls))),
        rope=rope if rope is None or seq_len is None else rope.at(seq_len),
        doubt=doubt,
    )


# ---- how far cosines are from exact ----


def _check_module(
    embedding: Embedding, kind: str | None, read: PartRotation, hidden: Tensor
) -> CheckedModule:
    member, fresh = embedding.member, embedding.fresh
    context = read.layers.context if isinstance(read.layers, LayerRopes) else None
    grid = _grid(embedding, context or _CONTEXT)
    law = replace(embedding.ropes[kind].at(int(grid.max()) + 1), direction=1)
    live = buffers_and_factors(member.module)
    of_kind = [name for name in fresh.buffers if name in live and name.startswith(kind or "")]
    lost = [name for name in of_kind if is_lost(live[name], fresh.buffers[name])]
    if original_class(member.module) is not None:
        rows, dtype, lost = _operator_rows(law, grid), torch.float32, []
    elif lost:
        nothing = np.full((grid.shape[1], law.num_pairs), np.nan)
        rows, dtype = (nothing, nothing), hidden.dtype
    else:
        answer = fresh.rows_of(member.module, grid, kind, hidden.new_zeros(1, grid.shape[1], 1))
        assert fresh.form is not None, "a rope was found for it"
        rows, dtype = half_rows(answer, fresh.form), each_row(answer)[0].real.dtype
    gain = law.attention_factor
    exact = cos_sin(law, _positions(law, grid))
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
    if embedding.fresh.layout.fixed:
        return np.array(embedding.fresh.layout.fixed).T
    if holds_table(embedding.member.module):
        context = len(embedding.fresh.buffers[TABLE])
    count = min(context, _MOST_POSITIONS)
    positions = np.unique(np.linspace(0, context - 1, count).round().astype(np.int64))
    return np.tile(positions, (embedding.fresh.n_axes, 1))


def _positions(law: Rope, grid: NDArray[np.int64]) -> NDArray[np.int64]:
    """``[seq]``, or ``[seq, axes]`` of several axes."""
    return grid.T if law.axes.n_axes > 1 else grid[0]


def _operator_rows(law: Rope, grid: NDArray[np.int64]) -> tuple[NDArray[np.float64], ...]:
    """The cosines and sines that phasor's operator makes of the pairs (1, 0)."""
    plain = replace(law, head_dim=law.rotary_dim, rotary_start=0, pairing="half", pairing_out=None)
    ones = torch.tensor([1.0, 0.0]).repeat_interleave(law.num_pairs).repeat(grid.shape[1], 1, 1)
    positions = torch.as_tensor(_positions(law, grid))
    rotated = rotate(ones, positions, plain, gain=law.attention_factor)
    cos, sin = rotated[:, 0].double().chunk(2, -1)
    return cos.numpy(), sin.numpy()
