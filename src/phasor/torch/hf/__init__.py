"""The rotation of a transformers model, read off it and replaced by phasor's, in that model alone.

A model of pictures and text has a part for each, named by the key of its config in the config file,
as in ``patch(model, part="text_config")``.

The modules stay the same objects, but become instances of a subclass of their own class. Those that
made cosines of positions return the positions themselves; those that rotated by cosines rotate by
these positions with phasor's operator. Parameters, buffers, hooks, names and the class of the model
do not change, so the model is saved, wrapped and trained as before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from phasor._checks import whole
from phasor.angles import cos_sin
from phasor.errors import ConfigError
from phasor.layers import LayerRopes, summarize
from phasor.rope import Rope
from phasor.torch.functional import cos_sin as operator_cos_sin
from phasor.torch.hf.embeddings import (
    Embedding,
    Grid,
    buffers_and_factors,
    each_row,
    half_rows,
    isolated_torch_state,
    positions_of_grid,
)
from phasor.torch.hf.modules import (
    ORIGINAL,
    ROPES_OF_KINDS,
    ModuleInfo,
    named_modules,
    original_class,
    patched_class,
    rotations_of,
    set_class,
)
from phasor.torch.hf.reading import check_buffers, is_lost, language_part, read_parts

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


@dataclass(frozen=True, kw_only=True)
class Replaced:
    """One module that rotates with phasor now."""

    path: str
    class_name: str
    layer: int | None  # its number, where it has one
    functions: tuple[str, ...]  # those of transformers that its methods no longer call
    rope: Rope | None  # None where its layer has no position embedding, or its rope is not known
    unknown_because: str = ""  # the reason, where it is not known


@dataclass(frozen=True, kw_only=True)
class Patched:
    """What `patch` replaced; as text, one line."""

    model: str  # the name of its class
    embeddings: tuple[str, ...]  # paths of the modules that return positions instead of cosines
    layers: tuple[Replaced, ...]  # the modules that rotate, part by part, in the model's order
    already: bool = False  # whether all of them were patched before, so that nothing has changed

    def __repr__(self) -> str:
        return f"Patched({self})"

    def __str__(self) -> str:
        count = len(self.layers)
        modules = f"{count} module{'' if count == 1 else 's'}"
        if self.already:
            return f"{self.model}: phasor rotates in {modules} already; nothing has changed"
        paths = ", ".join(self.embeddings[:3]) + (" and others" if self.embeddings[3:] else "")
        return f"{self.model}: phasor rotates in {modules}; positions come from {paths}"

    def table(self) -> str:
        """A row for each module that rotates: its layer, the functions it called, and its rope."""
        rows = [("layer", "module", "was", "turns by")]
        for module in self.layers:
            number = "" if module.layer is None else str(module.layer)
            name = f"{module.path} ({module.class_name})"
            rope = "nothing" if module.rope is None else summarize(module.rope)
            if module.unknown_because:
                rope = "unknown: the rope of the positions it is given"
            rows.append((number, name, ", ".join(module.functions), rope))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


@dataclass(frozen=True, kw_only=True)
class CheckedModule:
    """The cosines and sines of one module, for one kind of layer; as text, a line."""

    path: str
    class_name: str
    kind: str | None  # of layer, where the module makes cosines for several
    context: int  # checked positions are below this, evenly spread, and at most 65,536
    error: float  # the largest distance of a cosine or a sine from its exact value; NaN if lost
    dtype: torch.dtype
    rounding: float  # to that dtype: half a unit in the last place of the gain
    beyond: int | None  # the first checked position where the distance exceeds that, if any
    lost: str = ""  # a buffer that has lost its numbers, such as ``inv_freq``

    def __str__(self) -> str:
        name = f"{self.path} ({self.class_name})" + (f", {self.kind}" if self.kind else "")
        if self.lost:
            return f"{name}: no cosines, for its {self.lost} is lost; a patched model needs none"
        excess = "never" if self.beyond is None else f"from position {self.beyond}"
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"{name}: cosines within {self.error:.1e} of exact over {self.context} positions, "
            f"beyond the rounding of {dtype} ({self.rounding:.1e}) {excess}"
        )


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What `check` found; as text, a line for each module that makes cosines."""

    modules: tuple[CheckedModule, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.modules))


def patch(
    model: nn.Module, *, part: str | None = None, seq_len: int | None = None, verbose: bool = False
) -> Patched:
    """Let ``model`` rotate with phasor from now on; prints a line and returns what was replaced.

    Only this model changes, and modules that are patched already stay as they are. Rows of cos and
    sin are correct to float32 at every position, the arithmetic is float32 with one rounding at the
    end, and positions are passed on instead of ``[batch, seq, head_dim]`` of cosines and sines. The
    law of a rule (dynamic NTK, LongRoPE) is picked by the positions of each call alone, whatever
    was called before.

    Args:
        model: A model of transformers, or a part of one.
        part: Replace only this part of a model that has several, by the key of its config in the
            model's: ``"text_config"``, ``"vision_config"``, ``"thinker_config.text_config"``. All
            of them if None.
        seq_len: Pick the law of a rule once, for sequences of this many tokens, so that cached keys
            match all later queries. Without it cached keys keep the law of the call that made them,
            as in transformers.
        verbose: Print `Patched.table` too, a row for each module.

    Raises:
        ConfigError: If nothing rotates, something rotates in a way that is not understood, or the
            model is patched already for another ``seq_len``. Nothing has been changed then.

    >>> from transformers import LlamaConfig, LlamaModel
    >>> with torch.device("meta"):
    ...     model = LlamaModel(LlamaConfig(num_hidden_layers=1))
    >>> patched = patch(model)
    LlamaModel: phasor rotates in 1 module; positions come from rotary_emb
    >>> print(patched.table())  # doctest: +ELLIPSIS
    layer  module ...
    0      layers.0.self_attn (LlamaAttention)  ...  half pairs, 128 coordinates, base 10000
    >>> unpatch(model)
    """
    if seq_len is not None:
        whole("seq_len", seq_len, least=1)
    ropes_of_module: dict[nn.Module, Any] = {}
    new_classes: dict[nn.Module, type] = {}
    # every class is made before the first module changes
    rotations = read_parts(model, part, "patch")
    for rotation in rotations:
        check_buffers(rotation)
        for embedding, info in rotation.embeddings:
            ropes_of_module[info.module] = ropes = embedding.ropes_of_kinds(seq_len)
            if info.module.__dict__.get(ROPES_OF_KINDS, ropes) != ropes:
                raise ConfigError(
                    f"seq_len must be as before, and {info.path} was patched for another; "
                    "call unpatch(model) first"
                )
        embeddings = [info for _, info in rotation.embeddings]
        for info in (*embeddings, *rotation.rotating, *rotation.reordering):
            if original_class(info.module) is None:
                new_classes[info.module] = patched_class(info.cls)
    for module, cls in new_classes.items():
        if module in ropes_of_module:
            module.__dict__[ROPES_OF_KINDS] = ropes_of_module[module]
        set_class(module, cls)
    report = Patched(
        model=type(model).__name__,
        embeddings=tuple(it.path for one in rotations for _, it in one.embeddings),
        layers=tuple(
            _describe_replaced(info, rotation.layers, seq_len)
            for rotation in rotations
            for info in rotation.rotating
        ),
        already=not new_classes,
    )
    print(f"{report}\n{report.table()}" if verbose else report)
    return report


def unpatch(model: nn.Module) -> None:
    """Give every module of ``model`` the class that it had before `patch`.

    What changed a patched module's class since has to be undone first.

    >>> from transformers import LlamaConfig, LlamaModel
    >>> with torch.device("meta"):
    ...     model = LlamaModel(LlamaConfig(num_hidden_layers=1))
    >>> before = type(model.rotary_emb)
    >>> _ = patch(model)
    LlamaModel: phasor rotates in 1 module; positions come from rotary_emb
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
        module.__dict__.pop(ROPES_OF_KINDS, None)


def from_model(model: nn.Module, *, part: str | None = None) -> LayerRopes:
    """The rope of every layer of a live model, patched or not.

    They are read from the model's config and verified: the cosines of each embedding module's
    class, and the functions that rotate by them, are called and must turn as the ropes say.

    Args:
        model: A model of transformers, or a part of one.
        part: Which part of a model that has several, as in `patch`; its language model if None.

    >>> from transformers import LlamaConfig, LlamaModel
    >>> with torch.device("meta"):
    ...     ropes = from_model(LlamaModel(LlamaConfig()))
    >>> len(ropes), ropes[0].head_dim, ropes[0].pairing, ropes[0].base
    (32, 128, 'half', 10000.0)
    """
    (rotation,) = read_parts(model, language_part(model) if part is None else part, "from_model")
    check_buffers(rotation)
    if isinstance(rotation.layers, str):
        raise ConfigError(f"model must be one whose layers' ropes are known: {rotation.layers}")
    return rotation.layers


def check(model: nn.Module, *, part: str | None = None) -> Checked:
    """How far the cosines that ``model`` rotates by, in its present state, are from exact.

    ``model.to(torch.bfloat16)`` rounds frequencies, ``to_empty`` loses them, and the product with
    positions in float32 makes the error of an angle grow with the position. `patch` mends all
    three, since a patched model holds no frequencies.

    Args:
        model: A model of transformers, or a part of one, patched or not. It is not changed.
        part: As in `patch`.

    >>> from transformers import LlamaConfig, LlamaModel
    >>> small = LlamaConfig(num_hidden_layers=1, hidden_size=64, num_attention_heads=2,
    ...     num_key_value_heads=1, intermediate_size=8, vocab_size=16)
    >>> print(check(LlamaModel(small).to(torch.bfloat16)))  # doctest: +ELLIPSIS
    rotary_emb (LlamaRotaryEmbedding): cosines within 3.6e-01 of exact over 2048 positions, ...
    """
    weights = (p for p in model.parameters() if p.is_floating_point() and not p.is_meta)
    weight = next(weights, torch.empty(0))
    modules: list[CheckedModule] = []
    for rotation in read_parts(model, part, "check"):
        context = isinstance(rotation.layers, LayerRopes) and rotation.layers.context
        for embedding, info in rotation.embeddings:
            grid = embedding.spread_grid(context or 4096)  # configs of vision towers have none
            modules += [_check_module(embedding, info, it, grid, weight) for it in embedding.ropes]
    return Checked(modules=tuple(modules))


def _describe_replaced(info: ModuleInfo, ropes: LayerRopes | str, seq_len: int | None) -> Replaced:
    layer, rope = info.layer, None
    if isinstance(ropes, LayerRopes) and layer is not None and layer < len(ropes):
        rope = ropes[layer]
    return Replaced(
        path=info.path,
        class_name=info.cls.__name__,
        layer=layer,
        functions=tuple(sorted(rotations_of(info.cls))),
        rope=rope if rope is None or seq_len is None else rope.at(seq_len),
        unknown_because=ropes if isinstance(ropes, str) else "",
    )


@isolated_torch_state()
def _check_module(
    embedding: Embedding, info: ModuleInfo, kind: str | None, grid: Grid, weight: Tensor
) -> CheckedModule:
    """Compare a module's cosines for hidden states in the dtype and on the device of ``weight``."""
    law = replace(embedding.ropes[kind].at(int(grid.max()) + 1), direction=1)
    gain, positions = law.attention_factor, positions_of_grid(grid)
    live = buffers_and_factors(info.module)
    of_kind = [name for name in embedding.buffers if name in live and name.startswith(kind or "")]
    lost = [name for name in of_kind if is_lost(live[name], embedding.buffers[name])]
    if original_class(info.module) is not None:
        tensors = operator_cos_sin(positions, law)
        rows, dtype, lost = [row.double().numpy() * gain for row in tensors], torch.float32, []
    elif lost:
        rows, dtype = np.full((2, grid.shape[1], law.num_pairs), np.nan), weight.dtype
    else:
        hidden = weight.new_zeros(1, grid.shape[1], 1)
        answer = embedding.rows_of(info.module, grid, kind, hidden)
        rows, dtype = half_rows(answer, embedding.signature), each_row(answer)[0].real.dtype
    exact = cos_sin(law, positions)
    error = np.max([np.abs(a - gain * b).max(-1) for a, b in zip(rows, exact, strict=True)], 0)
    rounding = torch.finfo(dtype).eps / 2 * gain
    # a NaN is not within the rounding either
    inexact = np.flatnonzero(~(error <= rounding))
    return CheckedModule(
        path=info.path,
        class_name=info.cls.__name__,
        kind=kind,
        context=int(grid.max()) + 1,
        error=float(error.max()),
        dtype=dtype,
        rounding=rounding,
        beyond=int(grid[:, inexact[0]].max()) if len(inexact) else None,
        lost=lost[0] if lost else "",
    )
