"""Every class that rotates is run before a model is changed, on a copy with random weights.

The copy has the classes and configs of a live module, and weights of the same shapes that share
their memory. It runs at a few positions: once with tensors of cos and sin, and once with the
classes and rows of a patched model. Both have to rotate alike and to return the same.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from phasor.torch.hf.embeddings import FOREIGN_ERRORS, Embedding, half_rows, rolled_positions
from phasor.torch.hf.modules import (
    NUMBER,
    ROPES_OF_KINDS,
    TABLE,
    ModuleInfo,
    named_modules,
    original_class,
    overrides_of,
    patched_class,
    rotations_of,
    subclass_calling,
)
from phasor.torch.hf.rotations import COMPLEX_ROWS, ROWS, substitute

_ROW_PAIR = "position_embeddings"
# tokens of a short run, and of one that fills the windows of a compressor
_LENGTHS = (4, 160)
# a share of the largest number, for sums of thousands of products in float32
_TOLERANCE = 1e-4


def modules_to_run(
    infos: Sequence[ModuleInfo], rotating: Sequence[ModuleInfo]
) -> list[list[ModuleInfo]]:
    """The outermost modules that use cosines, in groups of one class."""
    by_path = {info.path: info for info in infos}
    paths = [info.path for info in rotating]
    places = {NUMBER.sub("*", path) for path in paths}
    groups: dict[Hashable, list[ModuleInfo]] = {}
    for info in infos:
        inside = frozenset(it.cls for it in rotating if it.path.startswith(f"{info.path}."))
        if info.path in paths:
            if any(info.path.startswith(f"{path}.") for path in paths):
                continue  # it runs with the module around it
            # what holds a single module is run with it, as an adapter, but not torch's containers
            while (
                (holder := by_path.get(info.path.rpartition(".")[0]))
                and len(list(holder.module.children())) == 1
                and not holder.cls.__module__.startswith("torch.")
            ):
                inside, info = inside | {info.cls}, holder
        # one that stands where others rotate is run, though it calls no rotation
        elif inside or NUMBER.sub("*", info.path) not in places or not _takes_cosines(info.cls):
            continue
        groups.setdefault((info.cls, inside), []).append(info)
    return list(groups.values())


def _takes_cosines(cls: Any) -> bool:
    taken = inspect.signature(cls.forward).parameters
    catches_all = any(it.kind is it.VAR_KEYWORD for it in taken.values())
    return catches_all or not {*taken}.isdisjoint((_ROW_PAIR, *ROWS))


class _QuickLinear(nn.Linear):
    """Picks coordinates in place of a product, which would take seconds in a large model."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        # an error for hidden states of another width
        x = input.expand(*input.shape[:-1], self.in_features)
        return x[..., torch.arange(self.out_features) * 7 % self.in_features]


def _copy_embedding(embedding: Embedding) -> nn.Module:
    """A rotary embedding, which may be given the class that it has in a patched model."""
    twin = copy.deepcopy(embedding.instance)
    twin.__dict__[ROPES_OF_KINDS] = embedding.ropes_of_kinds(None)
    return twin


def _copy_module(module: nn.Module, embeddings: Sequence[Embedding]) -> nn.Module:
    """A module of the original class with random weights and without hooks."""
    cls = cast(Any, original_class(module) or type(module))
    made = next((it for it in embeddings if it.info.cls is cls), None)
    if made is not None and not made.info.holds_table:
        return _copy_embedding(made)
    sizes = getattr(module, "in_features", None), getattr(module, "out_features", None)
    held = itertools.chain(module.parameters(recurse=False), module.buffers(recurse=False))
    is_quantized = isinstance(sizes[0], int) and not all(map(torch.is_floating_point, held))
    if cls is nn.Linear or is_quantized:
        # quantized weights have neither the shape nor the dtype of those that they stand for
        module, cls = nn.Linear(*cast("tuple[int, int]", sizes), device="meta"), _QuickLinear

    twin: Any = object.__new__(cls)
    nn.Module.__init__(twin)
    for name, value in vars(module).items():
        # a hook may have put another forward into the module
        if name in vars(twin) or name.endswith("forward"):
            continue
        if hasattr(value, "to_dict"):  # for attention in Python, which runs on every device
            value = copy.deepcopy(value)
            value._attn_implementation = "eager"
        twin.__dict__[name] = value
    for group in ("_parameters", "_buffers", "_modules"):
        for name, it in vars(module)[group].items():
            if it is not None:
                it = _random(it) if isinstance(it, Tensor) else _copy_module(it, embeddings)
            vars(twin)[group][name] = it
    if made is not None:
        twin._buffers[TABLE] = made.buffers[TABLE]
        twin.__dict__[ROPES_OF_KINDS] = made.ropes_of_kinds(None)
    return twin.eval()


def _random(weight: Tensor) -> Tensor:
    """Random numbers of that shape, every diagonal the same, so that they need no memory."""
    if not weight.is_floating_point():
        return torch.zeros(weight.shape, dtype=weight.dtype)
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(sum(weight.shape) + 1, generator=generator)
    scale = weight.shape[-1] ** -0.5 if weight.dim() > 1 else 1.0
    return (numbers * scale).as_strided(weight.shape, (1,) * weight.dim())


def _run(module: nn.Module, arguments: Any, is_deferring: bool) -> tuple[list[Tensor], bool]:
    """What a copy and its rotations return, in order, and whether all its classes rotated."""
    tensors: list[Tensor] = []
    idle: set[type] = set()

    def record(cls: type, function: Any) -> Callable[..., Any]:
        rotation = substitute(function) if is_deferring else function

        def recorder(*args: Any, **kwargs: Any) -> Any:
            returned = rotation(*args, **kwargs)
            idle.discard(cls)
            tensors.extend(x for x in tree_leaves(returned) if x is not None)
            return returned

        return recorder

    def pass_on(query: Tensor, *_: Any, **__: Any) -> Tensor:
        return query  # in place of attention that only a GPU has

    for inner in module.modules():
        cls = original_class(inner) or type(inner)
        if functions := {name: record(cls, it) for name, it in rotations_of(cls).items()}:
            idle.add(cls)
            body = overrides_of(cls, functions) if is_deferring else {}
            replaced = {**functions, "_flash_attention_forward": pass_on}
            inner.__class__ = subclass_calling(cls, replaced, None, body)
        elif ROPES_OF_KINDS in vars(inner):
            inner.__class__ = patched_class(cls) if is_deferring else cls
    leaves = tree_leaves(module(**arguments))
    tensors += [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]
    return tensors, not idle


def find_misuse(group: Sequence[ModuleInfo], embeddings: Sequence[Embedding]) -> str:
    """Why modules of one class cannot be patched; "" if a copy of one of them rotates exactly."""
    unable, misused = "", ""
    by_structure = {_structure(info.module): info for info in reversed(group)}
    for length, info in itertools.product(_LENGTHS, by_structure.values()):
        module = _copy_module(info.module, embeddings)
        for plain, deferred in _arguments(info, module, embeddings, length):
            try:
                before, is_rotating = _run(module, plain, is_deferring=False)
            except FOREIGN_ERRORS as error:
                unable = unable or f"a small copy of it cannot be run ({one_line(error)})"
                continue
            if not is_rotating:
                unable = "a small copy of it does not rotate"
                break
            try:
                after, _ = _run(module, deferred, is_deferring=True)
            except FOREIGN_ERRORS as error:
                misused = misused or f"it does more with cosines than rotate ({one_line(error)})"
                continue
            if len(before) == len(after) and all(map(_is_close, before, after)):
                return ""
            misused = misused or "a small copy of it rotates otherwise than by its cosines"
    return misused or unable


def _structure(module: nn.Module) -> Hashable:
    """The classes in a module and its settings, such as whether a layer rotates."""
    classes = str([(path, type(it)) for path, it in named_modules(module)])
    settings = {name: it for name, it in vars(module).items() if isinstance(it, (int, str))}
    return classes, tuple(sorted((settings | {"layer_idx": 0}).items(), key=str))


def one_line(error: BaseException) -> str:
    """What an error says, without line breaks."""
    return " ".join(str(error).split()) or repr(error)


def _is_close(x: Tensor, y: Tensor) -> bool:
    if x.shape != y.shape or not x.numel():
        return x.shape == y.shape
    largest = float(x.abs().nan_to_num(posinf=0.0).max())
    return torch.allclose(x.float(), y.float(), 0, _TOLERANCE * largest, equal_nan=True)


def _arguments(
    info: ModuleInfo, module: nn.Module, embeddings: Sequence[Embedding], length: int
) -> Iterator[tuple[dict[str, Any], ...]]:
    """Arguments with which a module may run: with tensors, and with what stands for them."""
    # hidden states have any width that its config or a weight has
    widths = [getattr(info.config, "hidden_size", None) or 1]
    widths += [weight.shape[-1] for weight in module.parameters() if weight.dim() == 2]
    for embedding in embeddings:
        grid = rolled_positions(range(length), embedding.n_axes)
        ids = torch.tensor(embedding.position_format.position_ids(grid))
        deferring = _copy_embedding(embedding)
        deferring.__class__ = patched_class(type(deferring))
        for kind in embedding.ropes:
            rows = embedding(grid, kind)
            both = rows, embedding.rows_of(deferring, grid, kind, torch.zeros(1, 1, 1))
            packed = [both] if kind is None else [both, tuple({kind: it} for it in both)]
            count = len(half_rows(rows, embedding.signature)[0])
            for width, shape, has_mask, packing in itertools.product(
                dict.fromkeys(widths), ((1, count), (count,), (1, 1, count)), (False, True), packed
            ):
                hidden = torch.randn(*shape, width, generator=torch.Generator().manual_seed(1))
                mask = torch.zeros(1, 1, count, count) if has_mask else None
                yield tuple(_by_name(info.cls, hidden, mask, ids, it) for it in packing)


def _by_name(
    cls: Any, hidden: Tensor, mask: Tensor | None, position_ids: Tensor, rows: Any
) -> dict[str, Any]:
    """The arguments that the class's forward takes, or that it needs."""
    count = hidden.shape[-2]
    known: dict[str, Any] = {
        _ROW_PAIR: rows,
        "position_ids": position_ids,
        "cu_seqlens": torch.tensor([0, count], dtype=torch.int32),
        "attention_mask": mask,
        "layer_idx": 0,
        "shared_kv_states": {},
        # attention to its own tokens and to those of an encoder
        "encoder_hidden_states": hidden,
        "merged_attention_mask": torch.zeros(1, 1, count, 2 * count),
        **dict.fromkeys(COMPLEX_ROWS, rows),
    }
    if isinstance(rows, tuple):
        known["cos"], known["sin"] = cast("tuple[Any, Any]", rows)
    first, *others = list(inspect.signature(cls.forward).parameters.values())[1:]
    is_named = first.kind is first.POSITIONAL_OR_KEYWORD
    given: dict[str, Any] = {first.name if is_named else "hidden_states": hidden}
    if any(it.kind is it.VAR_KEYWORD for it in (first, *others)):
        given |= {name: known[name] for name in (_ROW_PAIR, "position_ids")}
    return given | {
        it.name: known.get(it.name)
        for it in others
        if it.kind not in (it.VAR_POSITIONAL, it.VAR_KEYWORD)
        and (it.name in known or it.default is it.empty)
    }
