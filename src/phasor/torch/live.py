"""Live models of transformers, made exact by hooks on their rotary embeddings.

Such a model makes cos and sin in a small module, its rotary embedding, and hands them to every
layer. `patch` reads from the model's config what that module computes, proves it by calling a new
one, and hooks the live one: from then on it returns the same cos and sin, from exact angles. They
are plain tensors, so all that the model does with them stays as it was.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from phasor._checks import whole
from phasor.errors import ConfigError
from phasor.layers import LayerRopes
from phasor.rope import Rope
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
    """What `patch` changed; as text, one line."""

    model: str  # the name of its class
    modules: tuple[str, ...]  # paths of the modules whose cos and sin are exact now
    left: tuple[str, ...] = ()  # those of rotary embeddings of pictures, and of unknown types
    already: bool = False  # whether all were patched before, so that nothing has changed

    def __repr__(self) -> str:
        return f"Patched({self})"

    def __str__(self) -> str:
        state = "are exact already; nothing has changed" if self.already else "are exact now"
        left = f"; left as they are: {_listed(self.left)}" if self.left else ""
        return f"{self.model}: cos and sin of {_listed(self.modules)} {state}{left}"


@dataclass(frozen=True, kw_only=True)
class CheckedModule:
    """The cos and sin of one module, for one kind of layer; as text, a line."""

    path: str
    class_name: str
    kind: str | None  # of layer, where the module makes cos and sin for several
    context: int  # checked positions are below this, evenly spread, and at most 65,536
    error: float  # the largest distance of a cosine or a sine from its exact value; NaN if lost
    dtype: torch.dtype
    rounding: float  # to that dtype: half a unit in the last place of the attention factor
    beyond: int | None  # the first checked position where the distance exceeds that, if any
    lost: str = ""  # a buffer that has lost its numbers, such as ``inv_freq``

    def __str__(self) -> str:
        name = f"{self.path} ({self.class_name})" + (f", {self.kind}" if self.kind else "")
        if self.lost:
            return f"{name}: no cosines, for its {self.lost} is lost; patch repairs it"
        excess = "never" if self.beyond is None else f"from position {self.beyond}"
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"{name}: cosines within {self.error:.1e} of exact over {self.context} positions, "
            f"beyond the rounding of {dtype} ({self.rounding:.1e}) {excess}"
        )


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What `check` found; as text, a line for each module that makes cos and sin."""

    modules: tuple[CheckedModule, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.modules))


def patch(model: nn.Module, *, seq_len: int | None = None) -> Patched:
    """Make the cos and sin of ``model`` exact from now on; prints and returns what changed.

    They come from exact angles, correct to float32 at every position, and are then rounded to the
    dtype that the model computes in. The law of a rule (dynamic NTK, LongRoPE) is picked by the
    positions of each call alone, whatever was called before. Buffers that lost their frequencies
    are written again. No other model changes.

    Args:
        model: A model of transformers, or a part of one.
        seq_len: Pick the law of a rule once, for sequences of this many tokens, so that cached keys
            match all later queries. Without it cached keys keep the law of the call that made them,
            as in transformers.

    Raises:
        ConfigError: If nothing rotates, a rotary embedding is not what its config says, or the
            model is patched already for another ``seq_len``. Nothing has been changed then.

    >>> from transformers import LlamaConfig, LlamaModel
    >>> with torch.device("meta"):
    ...     model = LlamaModel(LlamaConfig(num_hidden_layers=1))
    >>> patched = patch(model)
    LlamaModel: cos and sin of rotary_emb are exact now
    >>> unpatch(model)
    """
    if seq_len is not None:
        whole("seq_len", seq_len, least=1)
    found, left = read(model)
    hooks = [ExactCosSin(it.ropes, it.layout, seq_len) for it in found]
    for it, hook in zip(found, hooks, strict=True):
        earlier = _hook_of(it.module)
        if earlier is not None and earlier.ropes != hook.ropes:
            raise ConfigError(
                f"seq_len must be as before, and {it.path} was patched for another; "
                "call unpatch(model) first"
            )
    lost = [lost_buffers(it) for it in found]
    device = next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))
    is_new = [_hook_of(it.module) is None for it in found]
    with isolated_torch_state():  # what is put into the model outlasts any mode
        for it, hook, buffers in zip(found, hooks, lost, strict=True):
            for name, buffer in buffers.items():
                setattr(it.module, name, buffer.to(device))
            if _hook_of(it.module) is None:
                hook.register(it.module)
    if any(is_new):
        _forget_compiled_code()
    paths = tuple(it.path for it in found)
    report = Patched(
        model=type(model).__name__, modules=paths, left=tuple(left), already=not any(is_new)
    )
    print(report)
    return report


def unpatch(model: nn.Module) -> None:
    """Take away what `patch` put into ``model``.

    Raises:
        ConfigError: If no module of the model is patched.

    >>> from transformers import LlamaConfig, LlamaModel
    >>> with torch.device("meta"):
    ...     model = LlamaModel(LlamaConfig(num_hidden_layers=1))
    >>> _ = patch(model)
    LlamaModel: cos and sin of rotary_emb are exact now
    >>> unpatch(model)
    """
    modules = [module for _, module in named_modules(model) if _hook_of(module) is not None]
    if not modules:
        raise ConfigError(f"model must be patched, and no module of {type(model).__name__} is")
    for module in modules:
        hook: ExactCosSin = module.__dict__.pop(_HOOK)
        hook.remove(module)
    _forget_compiled_code()


def from_model(model: nn.Module) -> LayerRopes:
    """The rope of every layer of a live model, patched or not.

    They are read from the model's config and proved: a new rotary embedding of its class must make
    their cos and sin, and a rotation function of its file must turn by these as they say.

    Args:
        model: A model of transformers, or a part of one.

    Raises:
        ConfigError: As `patch`; also if the model contains several language models.

    >>> from transformers import LlamaConfig, LlamaModel
    >>> with torch.device("meta"):
    ...     ropes = from_model(LlamaModel(LlamaConfig()))
    >>> len(ropes), ropes[0].head_dim, ropes[0].pairing, ropes[0].base
    (32, 128, 'half', 10000.0)
    """
    found, _ = read(model)
    layers = found[0].layers
    for it in found:
        lost_buffers(it)
        if it.layers != layers:
            raise ConfigError(
                f"model must be one language model, and {it.path} rotates otherwise than "
                f"{found[0].path}; give the part that you mean"
            )
    return layers


def check(model: nn.Module) -> Checked:
    """How far the cosines that ``model`` rotates by, in its present state, are from exact.

    ``model.to(torch.bfloat16)`` rounds frequencies, ``to_empty`` loses them, and the product with
    positions in float32 makes the error of an angle grow with the position. `patch` mends all
    three.

    Args:
        model: A model of transformers, or a part of one, patched or not. It is not changed.

    Raises:
        ConfigError: As `patch`.

    >>> from transformers import LlamaConfig, LlamaModel
    >>> small = LlamaConfig(num_hidden_layers=1, hidden_size=64, num_attention_heads=2,
    ...     num_key_value_heads=1, intermediate_size=8, vocab_size=16)
    >>> print(check(LlamaModel(small).to(torch.bfloat16)))  # doctest: +ELLIPSIS
    rotary_emb (LlamaRotaryEmbedding): cosines within 3.6e-01 of exact over 2048 positions, ...
    """
    found, _ = read(model)
    weights = (p for p in model.parameters() if p.is_floating_point() and not p.is_meta)
    weight = next(weights, torch.empty(0))
    checked = [_check_module(it, kind, weight) for it in found for kind in it.ropes]
    return Checked(modules=tuple(checked))


# ---- what a patched module does ----


class ExactCosSin:
    """A forward hook of a rotary embedding: the same cos and sin, from exact angles."""

    _handle: Any = None  # of torch, which removes the hook
    _table: Tensor | None = None  # in place of which an exact one stands now

    def __init__(
        self, ropes: Mapping[Kind, Rope], layout: Layout, seq_len: int | None = None
    ) -> None:
        laws = {k: it if seq_len is None else it.at(seq_len) for k, it in ropes.items()}
        # where a Rope turns the other way the rotation function does so, not its sine
        self.ropes = {kind: replace(law, direction=1) for kind, law in laws.items()}
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
        given = dict(zip(PARAMETERS, args, strict=False)) | kwargs
        rope = self.ropes[given.get("layer_type")]
        like = output if isinstance(output, Tensor) else output[0]
        positions = _positions(given["position_ids"].to(like.device), rope.axes.n_axes)
        is_double = like.dtype in (torch.float64, torch.complex128)
        dtype = torch.float64 if is_double else torch.float32
        cos, sin = _make_cos_sin(positions, rope, dtype)
        if self.layout == "complex":
            return torch.complex(cos, sin)
        return tuple(lay_out(values, self.layout).to(like.dtype) for values in (cos, sin))


def _positions(position_ids: Tensor, n_axes: int) -> Tensor:
    """A model's positions as a Rope takes them: ``[batch, seq]``, or ``[batch, seq, n_axes]``."""
    if n_axes == 1:
        return position_ids
    # [n_axes, batch, seq], or [batch, seq] where one coordinate stands for all
    by_axis = position_ids if position_ids.dim() == 3 else position_ids[None]
    by_token = by_axis.movedim(0, -1)
    return by_token.expand(*by_token.shape[:-1], n_axes)


def _make_cos_sin(positions: Tensor, rope: Rope, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cos and sin ``[..., seq, num_pairs]`` with the attention factor."""
    if isinstance(rope.scaling, Rule):
        return _cos_sin_by_rule(positions, rope, rope.scaling, dtype)
    rotation = Rotation.at(positions, rope, dtype=dtype)
    return rotation.cos, rotation.sin


def _cos_sin_by_rule(
    positions: Tensor, rope: Rope, rule: Rule, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The same under the law for the largest position, without reading that from the device."""
    length = (positions.max() + 1).double()
    # numbers, not a tensor: a compiler takes what it cannot follow as a constant
    plain = length.new_tensor(_plain_inv_freq(rope.to_json()))
    law = rule.at_lengths(length, plain, torch)
    assert law is not None, "every rule in a config of transformers has it"
    inv_freq, factor = law
    # frequencies that only the device knows are float64, which holds no fixed-point fraction
    angles = positions.unsqueeze(-1).double() * inv_freq
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


@cached_constant
def _plain_inv_freq(text: str) -> tuple[float, ...]:
    """The frequencies before a rule."""
    return tuple(replace(read_rope(text), scaling=None).inv_freq.tolist())


def _hook_of(module: nn.Module) -> ExactCosSin | None:
    return module.__dict__.get(_HOOK)


def _forget_compiled_code() -> None:
    """Let compiled code see that hooks came or went: once compiled, it does not look again."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


@isolated_torch_state()
def _check_module(it: RotaryEmbedding, kind: Kind, weight: Tensor) -> CheckedModule:
    """Compare a module's cosines for hidden states in the dtype and on the device of ``weight``."""
    context = min(it.layers.context or 4096, end_of(it.fresh))
    count = min(context, _MAX_CHECKED)
    positions = np.linspace(0, context - 1, count).round().astype(np.int64)
    law = replace(it.ropes[kind], direction=1).at(context)
    live, expected = buffers_and_factors(it.module), buffers_and_factors(it.fresh)
    of_kind = [name for name in expected if name in live and name.startswith(kind or "")]
    lost = [name for name in of_kind if is_lost(live[name], expected[name])]
    dtype, error = weight.dtype, np.full(count, np.nan)
    if not lost:
        grid = np.tile(positions, (law.axes.n_axes, 1))
        answer = call(it.module, grid, kind, weight)
        row = answer.real if it.layout == "complex" else answer[0]
        distance = distance_from_exact(answer, it.layout, law, grid)
        assert distance is not None, "a live module lays out as a new one"
        dtype, error = row.dtype, distance.amax((0, -1)).numpy()
    rounding = torch.finfo(dtype).eps / 2 * law.attention_factor
    # a NaN is not within the rounding either
    inexact = np.flatnonzero(~(error <= rounding))
    return CheckedModule(
        path=it.path,
        class_name=type(it.module).__name__,
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
