"""Make loaded models of transformers exact, by hooks on their rotary embeddings.

Such a model computes cos and sin in a small module, its rotary embedding, and passes them to every
layer. `patch` reads from the model's config what that module computes, confirms it by calling a new
instance, and hooks the live one: from then on it returns the same cos and sin, from exact angles.
They are plain tensors, so the rest of the model does not change.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from phasor._checks import boolean, whole
from phasor.errors import ConfigError, SpecError
from phasor.layers import LayerRopes
from phasor.rope import Rope, with_frequencies
from phasor.scaling import Rule
from phasor.torch._operator.internals import cached_constant
from phasor.torch._operator.text import read_rope
from phasor.torch._rotary_embeddings import (
    PARAMETERS,
    TABLE,
    Kind,
    Layout,
    RotaryEmbedding,
    buffers_and_factors,
    call,
    distance_from_exact,
    end_of,
    holds_table,
    is_lost,
    isolated_torch_state,
    lay_out,
    lost_buffers,
    named_modules,
    read,
)
from phasor.torch.rotation import Rotation

__all__ = ["Checked", "CheckedModule", "Patched", "check", "from_model", "patch", "unpatch"]

_HOOK = "_phasor_hook"  # the attribute in which a patched module keeps its hook
_MAX_CHECKED = 1 << 16  # positions that `check` compares


@dataclass(frozen=True, kw_only=True)
class Patched:
    """The changes that `patch` made; as text, one line."""

    model: str  # the name of its class
    modules: tuple[str, ...]  # paths of modules whose cos and sin are now exact
    dropped: bool = False  # whether these modules rotate nothing now
    left: tuple[
        str, ...
    ] = ()  # paths of rotary embeddings for images and of unknown types, which are unchanged
    already: bool = False  # whether all were already patched, so that nothing changed

    def __repr__(self) -> str:
        return f"Patched({self})"

    def __str__(self) -> str:
        adjective = "1 and 0" if self.dropped else "exact"
        state = f"were already {adjective}; nothing changed" if self.already else ""
        state = state or f"are {adjective} now"
        left = f"; unchanged: {_listed(self.left)}" if self.left else ""
        return f"{self.model}: cos and sin of {_listed(self.modules)} {state}{left}"


@dataclass(frozen=True, kw_only=True)
class CheckedModule:
    """The result for one module and one kind of layer; as text, a line."""

    path: str
    class_name: str
    kind: str | None  # the kind of layer, if the module computes cos and sin for several
    context: int  # checked positions are below this, evenly spaced, at most 65,536 of them
    error: float  # the largest error of a cosine or sine; NaN if a buffer is lost
    dtype: torch.dtype
    rounding: float  # the error of rounding to that dtype: half a unit of the attention factor
    beyond: int | None  # the first checked position where the error exceeds that, if any
    lost: str = ""  # a buffer whose numbers are lost, such as ``inv_freq``

    def __str__(self) -> str:
        name = f"{self.path} ({self.class_name})" + (f", {self.kind}" if self.kind else "")
        if self.lost:
            return f"{name}: no cosines, because its {self.lost} is lost; patch repairs it"
        excess = "never" if self.beyond is None else f"from position {self.beyond}"
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"{name}: cosines within {self.error:.1e} of exact over {self.context} positions, "
            f"beyond the rounding of {dtype} ({self.rounding:.1e}) {excess}"
        )


@dataclass(frozen=True, kw_only=True)
class Checked:
    """The result of `check`; as text, a line for each module that computes cos and sin."""

    modules: tuple[CheckedModule, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.modules))


def patch(model: nn.Module, *, seq_len: int | None = None, drop_rope: bool = False) -> Patched:
    """Make the cos and sin of ``model`` exact from now on; print and return the changes.

    Angles are exact; cos and sin are correct to float32 at every position, then rounded to the
    dtype of the model. A rule (dynamic NTK, LongRoPE) picks its law by the positions of each call
    alone, whatever was called before. Buffers that lost their frequencies are restored. No other
    model changes.

    Args:
        model: A model of transformers, or a submodule of one.
        seq_len: The length for which rules pick their law, once, so that cached keys match all
            later queries. If None, cached keys keep the law of the call that made them, as in
            transformers.
        drop_rope: Rotate nothing instead: cos is 1 and sin 0, without an attention factor (DroPE,
            2512.12167, which trains briefly afterwards). Keys that were cached before are rotated.

    Raises:
        ConfigError: If nothing rotates, a rotary embedding differs from its config, or the model is
            already patched with another ``seq_len`` or ``drop_rope``. Nothing is changed then.
        SpecError: If both ``seq_len`` and ``drop_rope`` are given.

    >>> from transformers import LlamaConfig, LlamaModel
    >>> with torch.device("meta"):
    ...     model = LlamaModel(LlamaConfig(num_hidden_layers=1))
    >>> patched = patch(model)
    LlamaModel: cos and sin of rotary_emb are exact now
    >>> unpatch(model)
    """
    if seq_len is not None:
        whole("seq_len", seq_len, least=1)
    if boolean("drop_rope", drop_rope) and seq_len is not None:
        raise SpecError("seq_len must be None with drop_rope=True, because no law remains to pick")
    embeddings, unchanged = read(model)
    hooks = [_make_hook(embedding, seq_len, drop_rope) for embedding in embeddings]
    for embedding, hook in zip(embeddings, hooks, strict=True):
        earlier = _find_hook(embedding.module)
        if earlier is not None and earlier.ropes != hook.ropes:
            name = "seq_len" if earlier.is_dropped == hook.is_dropped else "drop_rope"
            raise ConfigError(
                f"{name} must be as before: {embedding.path} was patched with another value; call "
                "unpatch(model) first"
            )
    lost = [lost_buffers(embedding) for embedding in embeddings]
    device = next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))
    is_new = [_find_hook(embedding.module) is None for embedding in embeddings]
    with isolated_torch_state():  # buffers and hooks outlast the caller's modes
        for embedding, hook, buffers in zip(embeddings, hooks, lost, strict=True):
            module = embedding.module
            for name, buffer in buffers.items():
                setattr(module, name, buffer.to(device))
            if _find_hook(module) is None:
                hook.register(module)
    if any(is_new):
        _forget_compiled_code()
    report = Patched(
        model=type(model).__name__,
        modules=tuple(embedding.path for embedding in embeddings),
        dropped=drop_rope,
        left=tuple(unchanged),
        already=not any(is_new),
    )
    print(report)
    return report


def unpatch(model: nn.Module) -> None:
    """Remove what `patch` added to ``model``.

    Raises:
        ConfigError: If no module of the model is patched.

    >>> from transformers import LlamaConfig, LlamaModel
    >>> with torch.device("meta"):
    ...     model = LlamaModel(LlamaConfig(num_hidden_layers=1))
    >>> _ = patch(model)
    LlamaModel: cos and sin of rotary_emb are exact now
    >>> unpatch(model)
    """
    modules = [module for _, module in named_modules(model) if _find_hook(module) is not None]
    if not modules:
        raise ConfigError(f"model must be patched, but no module of {type(model).__name__} is")
    for module in modules:
        hook: ExactCosSin = module.__dict__.pop(_HOOK)
        hook.remove(module)
    _forget_compiled_code()


def from_model(model: nn.Module) -> LayerRopes:
    """The rope of every layer of a live model, patched or not; None where `patch` dropped it.

    They are read from the model's config and confirmed: a new rotary embedding of its class must
    compute their cos and sin, and a rotation function in its file must apply these as the ropes do.

    Args:
        model: A model of transformers, or a submodule of one.

    Raises:
        ConfigError: As for `patch`, or if the model contains several language models.

    >>> from transformers import LlamaConfig, LlamaModel
    >>> with torch.device("meta"):
    ...     ropes = from_model(LlamaModel(LlamaConfig()))
    >>> len(ropes), ropes[0].head_dim, ropes[0].pairing, ropes[0].base
    (32, 128, 'half', 10000.0)
    """
    embeddings, _ = read(model)
    embedding_layers = [_live_layers(embedding) for embedding in embeddings]
    for embedding, layers in zip(embeddings, embedding_layers, strict=True):
        lost_buffers(embedding)
        if layers != embedding_layers[0]:
            raise ConfigError(
                f"model must be a single language model, but {embedding.path} and "
                f"{embeddings[0].path} rotate differently; pass the submodule that you mean"
            )
    return embedding_layers[0]


def check(model: nn.Module) -> Checked:
    """The errors of the cosines that ``model`` uses in its present state.

    ``model.to(torch.bfloat16)`` rounds frequencies, ``to_empty`` loses them, and with float32
    products the error of an angle grows with the position. `patch` repairs all three.

    Args:
        model: A model of transformers, or a part of one, patched or not. It does not change.

    Raises:
        ConfigError: As for `patch`.

    >>> from transformers import LlamaConfig, LlamaModel
    >>> small = LlamaConfig(num_hidden_layers=1, hidden_size=64, num_attention_heads=2,
    ...     num_key_value_heads=1, intermediate_size=8, vocab_size=16)
    >>> print(check(LlamaModel(small).to(torch.bfloat16)))  # doctest: +ELLIPSIS
    rotary_emb (LlamaRotaryEmbedding): cosines within 3.6e-01 of exact over 2048 positions, ...
    """
    embeddings, _ = read(model)
    weights = (p for p in model.parameters() if p.is_floating_point() and not p.is_meta)
    weight = next(weights, torch.empty(0))
    results = [
        _check_module(embedding, kind, weight)
        for embedding in embeddings
        for kind in embedding.ropes
    ]
    return Checked(modules=tuple(results))


# ---- the hook of a patched module ----


class ExactCosSin:
    """A forward hook of a rotary embedding: the same cos and sin, from exact angles."""

    is_dropped = False  # whether no pair turns
    _handle: Any = None  # torch's handle, which removes the hook
    _table: Tensor | None = None  # the original table, replaced by an exact one

    def __init__(
        self, ropes: Mapping[Kind, Rope], layout: Layout, seq_len: int | None = None
    ) -> None:
        if seq_len is not None:
            ropes = {kind: rope.at(seq_len) for kind, rope in ropes.items()}
        # for a clockwise Rope the rotation function turns clockwise; the sine is not negated
        self.ropes = {kind: replace(rope, direction=1) for kind, rope in ropes.items()}
        self.layout: Layout = layout

    def register(self, module: nn.Module) -> None:
        """Hook ``module``, or put an exact table into it; the module keeps this."""
        module.__dict__[_HOOK] = self
        if not holds_table(module):
            self._handle = module.register_forward_hook(self, with_kwargs=True)
            return
        self._table = table = module.get_buffer(TABLE)
        positions = torch.arange(len(table), device=table.device)
        cos, sin = _make_cos_sin(positions, self.ropes[None], torch.float64)
        setattr(module, TABLE, torch.cat((sin, cos), -1).to(table.dtype))

    def remove(self, module: nn.Module) -> None:
        """Undo `register`."""
        if self._table is None:
            self._handle.remove()
        else:
            setattr(module, TABLE, self._table.to(module.get_buffer(TABLE)))

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        arguments = dict(zip(PARAMETERS, args, strict=False)) | kwargs
        rope = self.ropes[arguments.get("layer_type")]
        inexact_cos = output if isinstance(output, Tensor) else output[0]
        device, out_dtype = inexact_cos.device, inexact_cos.dtype
        positions = _positions(arguments["position_ids"].to(device), rope.axes.n_axes)
        is_double = out_dtype in (torch.float64, torch.complex128)
        dtype = torch.float64 if is_double else torch.float32
        cos, sin = _make_cos_sin(positions, rope, dtype)
        if self.layout == "complex":
            return torch.complex(cos, sin)
        return tuple(lay_out(values, self.layout).to(out_dtype) for values in (cos, sin))


def _positions(position_ids: Tensor, n_axes: int) -> Tensor:
    """A model's positions for a Rope: ``[batch, seq]``, or ``[batch, seq, n_axes]``."""
    if n_axes == 1:
        return position_ids
    # [n_axes, batch, seq], or [batch, seq] if all axes have the same coordinate
    axis_positions = position_ids if position_ids.dim() == 3 else position_ids[None]
    token_positions = axis_positions.movedim(0, -1)
    return token_positions.expand(*token_positions.shape[:-1], n_axes)


def _make_cos_sin(positions: Tensor, rope: Rope, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cos and sin ``[..., seq, num_pairs]`` with the attention factor."""
    if isinstance(rope.scaling, Rule):
        return _cos_sin_by_rule(positions, rope, rope.scaling, dtype)
    rotation = Rotation.at(positions, rope, dtype=dtype)
    return rotation.cos, rotation.sin


def _cos_sin_by_rule(
    positions: Tensor, rope: Rope, rule: Rule, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cos and sin under the law for the largest position, which stays on the device."""
    length = (positions.max() + 1).double()
    # numbers, not a tensor: a compiler treats results that it cannot trace as constants
    plain = length.new_tensor(_plain_inv_freq(rope.to_json()))
    law = rule.at_lengths(length, plain, torch)
    assert law is not None, "every rule in a config of transformers implements at_lengths"
    inv_freq, factor = law
    # these frequencies stay on the device, so they are float64 instead of fixed point
    angles = positions.unsqueeze(-1).double() * inv_freq
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


@cached_constant
def _plain_inv_freq(text: str) -> tuple[float, ...]:
    """The frequencies before a rule."""
    return tuple(replace(read_rope(text), scaling=None).inv_freq.tolist())


def _find_hook(module: nn.Module) -> ExactCosSin | None:
    return module.__dict__.get(_HOOK)


def _make_hook(embedding: RotaryEmbedding, seq_len: int | None, drop_rope: bool) -> ExactCosSin:
    ropes = embedding.ropes
    if drop_rope:
        ropes = {kind: _stopped(rope) for kind, rope in ropes.items()}
    hook = ExactCosSin(ropes, embedding.layout, seq_len)
    hook.is_dropped = drop_rope
    return hook


def _stopped(rope: Rope) -> Rope:
    """The rope with pairs that stand still: cos 1 and sin 0 at every position."""
    return with_frequencies(rope, explicit_inv_freq=(0.0,) * rope.num_pairs)


def _live_layers(embedding: RotaryEmbedding) -> LayerRopes:
    """The ropes of a model's config, or None for every layer if they were dropped."""
    hook, layers = _find_hook(embedding.module), embedding.layers
    if hook is None or not hook.is_dropped:
        return layers
    return replace(layers, kinds=dict.fromkeys(layers.kinds), auxiliary_ropes=())


def _forget_compiled_code() -> None:
    """Make compiled code notice that hooks were added or removed: it does not check again."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


@isolated_torch_state()
def _check_module(embedding: RotaryEmbedding, kind: Kind, weight: Tensor) -> CheckedModule:
    """Compare a module's cosines for hidden states in the dtype and on the device of ``weight``."""
    module, fresh, layout = embedding.module, embedding.fresh, embedding.layout
    context = min(embedding.layers.context or 4096, end_of(fresh))
    count = min(context, _MAX_CHECKED)
    positions = np.linspace(0, context - 1, count).round().astype(np.int64)
    hook = _find_hook(module)
    ropes = hook.ropes if hook is not None and hook.is_dropped else embedding.ropes
    law = replace(ropes[kind], direction=1).at(context)
    live, expected = buffers_and_factors(module), buffers_and_factors(fresh)
    names = [name for name in expected if name in live and name.startswith(kind or "")]
    lost = [name for name in names if is_lost(live[name], expected[name])]
    dtype, error = weight.dtype, np.full(count, np.nan)
    if not lost:
        grid = np.tile(positions, (law.axes.n_axes, 1))
        answer = call(module, grid, kind, weight)
        row = answer.real if layout == "complex" else answer[0]
        distance = distance_from_exact(answer, layout, law, grid)
        assert distance is not None, "a live module has the layout of a new one"
        dtype, error = row.dtype, distance.amax((0, -1)).numpy()
    rounding = torch.finfo(dtype).eps / 2 * law.attention_factor
    # NaN fails this comparison too
    inexact = np.flatnonzero(~(error <= rounding))
    return CheckedModule(
        path=embedding.path,
        class_name=type(module).__name__,
        kind=kind,
        context=context,
        error=float(error.max()),
        dtype=dtype,
        rounding=rounding,
        beyond=int(positions[inexact[0]]) if len(inexact) else None,
        lost=lost[0] if lost else "",
    )


def _listed(paths: Sequence[str]) -> str:
    return ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if paths[3:] else "")
