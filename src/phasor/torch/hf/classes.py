"""The classes of a patched model: subclasses whose methods rotate by the operator.

A method finds the functions that it calls among its globals. A copy of the method, over a copy of
those globals in which the rotation is another function, goes into a subclass. Only modules that are
given that subclass change: not the class, not its file, not another model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn

from phasor.torch.hf.rotations import DeferredCosSin, defer_cos_sin, substitute

#: The attribute in which a class that was made here keeps its original.
ORIGINAL = "_phasor_original"
#: The attribute in which a patched module that makes cosines keeps the rope of each kind of layer.
ROPES_OF_KINDS = "_phasor_ropes"
#: The method by which a tower with windows puts its tokens, and their cosines, in another order.
REORDERING = "permute_input_for_window_attn"
_ROTATION_NAME = re.compile(r"\w*apply_\w*(rotary|rope)\w*")
_Functions = Mapping[str, Any]
_Split = Callable[[Any, Tensor], tuple[Tensor, ...]]


# ---- the rotations that a class calls ----


@lru_cache(maxsize=1024)
def methods_of(cls: type) -> dict[str, FunctionType]:
    """Every method of an instance of ``cls`` but those of ``torch.nn.Module`` itself."""
    found: dict[str, FunctionType] = {}
    for base in reversed(cls.__mro__):
        if base in (object, nn.Module):
            continue
        for name, value in vars(base).items():
            function = value.__func__ if isinstance(value, staticmethod) else value
            if isinstance(function, FunctionType):
                found[name] = function
            else:
                found.pop(name, None)
    return found


def rotations_of(cls: type) -> _Functions:
    """The rotation functions that methods of ``cls`` call now, by their names there."""
    methods = methods_of(cls).values()
    return {name: it for method in methods for name, it in _rotations_in(method).items()}


def _rotations_in(function: FunctionType) -> dict[str, Any]:
    scope = function.__globals__
    names = _rotation_names(function.__code__)
    found = {name: scope[name] for name in names if callable(scope.get(name))}
    # what its decorators wrapped
    inner = function.__dict__.get("__wrapped__")
    return found | (_rotations_in(inner) if isinstance(inner, FunctionType) else {})


@lru_cache(maxsize=1024)
def _rotation_names(code: CodeType) -> tuple[str, ...]:
    return tuple(name for name in _names_in(code) if _ROTATION_NAME.fullmatch(name))


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


# ---- a subclass that calls other functions ----


def original_class(module: Any) -> type | None:
    """The class that a module had before `subclass_of` made another; None if it did not."""
    return cast("type | None", type(module).__dict__.get(ORIGINAL))


def subclass_calling(
    cls: type, replaced: _Functions, rebuild: Any, body: Mapping[str, Any] | None = None
) -> type:
    """A subclass of ``cls`` with ``body`` whose methods that rotate have other globals."""
    methods: dict[str, Any] = {
        name: _copy_function(method, replaced)
        for name, method in methods_of(cls).items()
        if _rotations_in(method)
    }
    return subclass_of(cls, {**methods, **(body or {})}, rebuild)


def subclass_of(cls: type, body: Mapping[str, Any], rebuild: Callable[[type], type]) -> type:
    """A subclass with the name of ``cls``, for code that compares names, for existing modules."""

    # a new module has no Rope to rotate by, so it is one of `cls`
    def new(subclass: type, *args: Any, **kwargs: Any) -> Any:
        del subclass
        return cls(*args, **kwargs)

    # a pickle names a function that makes the class again, for no file has it
    def reduce_ex(self: Any, protocol: Any) -> Any:
        del protocol
        return _empty_instance, (rebuild, cls), self.__dict__

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    special = {ORIGINAL: cls, "__new__": new, "__reduce_ex__": reduce_ex}
    return type(cls.__name__, (cls,), {**body, **special, **names})


def _empty_instance(rebuild: Callable[[type], type], cls: type) -> Any:
    subclass: Any = rebuild(cls)
    return object.__new__(subclass)


def _copy_function(function: FunctionType, replaced: _Functions) -> FunctionType:
    """A copy of the function over a copy of its globals, in which some are replaced."""
    scope = {**function.__globals__, **replaced}
    # a compiler looks a function's globals up in the module that they name, unless they name none
    scope.pop("__name__", None)
    attributes = dict(function.__dict__)
    cells = function.__closure__
    wrapped = attributes.get("__wrapped__")
    if isinstance(wrapped, FunctionType) and _rotations_in(wrapped):
        inner = attributes["__wrapped__"] = _copy_function(wrapped, replaced)
        cells = tuple(CellType(inner) if _contains(cell, wrapped) else cell for cell in cells or ())
    copied = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, cells)
    copied.__kwdefaults__ = function.__kwdefaults__
    copied.__dict__.update(attributes)
    copied.__doc__, copied.__qualname__ = function.__doc__, function.__qualname__
    copied.__annotations__ = function.__annotations__
    return copied


def _contains(cell: CellType, value: object) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:  # an empty cell
        return False


# ---- another class for a module ----


def bound_methods(module: nn.Module) -> Mapping[str, str]:
    """Bound methods that a module holds as attributes, with their names in its class."""
    # accelerate keeps the forward that it wraps so when it spreads a model over devices
    return {
        name: value.__name__
        for name, value in vars(module).items()
        if isinstance(value, MethodType)
        and value.__self__ is module
        and isinstance(value.__func__, FunctionType)
        and getattr(type(module), value.__name__, None) is value.__func__
    }


def set_class(module: nn.Module, cls: type) -> None:
    """Give a module another class, and bind the methods in its attributes to that class."""
    bound = bound_methods(module)
    module.__class__ = cls
    for name, method in bound.items():
        module.__dict__[name] = MethodType(getattr(cls, method), module)


@lru_cache(maxsize=512)
def rotating_class(cls: type) -> type:
    """The class for a module that rotates, or puts tokens in another order: by what is deferred."""
    substitutes = {name: substitute(it) for name, it in rotations_of(cls).items()}
    return subclass_calling(cls, substitutes, rotating_class, overrides_of(cls, substitutes))


@lru_cache(maxsize=512)
def deferring_class(cls: type) -> type:
    """The class for a module that makes cosines: it returns what stands for them."""

    def forward(
        self: Any, x: Tensor, position_ids: Tensor | None = None, layer_type: Any = None
    ) -> DeferredCosSin | tuple[DeferredCosSin, DeferredCosSin]:
        rope = getattr(self, ROPES_OF_KINDS)[layer_type]
        if fixed := rope.position_format.fixed_positions:  # its caller passes none
            position_ids = torch.tensor([fixed], device=x.device)  # [1, seq, axes]
        assert position_ids is not None
        rows = defer_cos_sin(rope, position_ids, x.dtype)
        return rows if rope.is_complex else (rows, rows)

    return subclass_of(cls, {"forward": forward}, deferring_class)


# ---- methods that need a tensor where others pass cosines on ----


def overrides_of(cls: type, rotations: _Functions) -> dict[str, Any]:
    """The methods that a subclass of ``cls`` needs besides those that call ``rotations``."""
    found: dict[str, Any] = {}
    for name, method in methods_of(cls).items():
        if make := _OVERRIDES.get(name) or _OVERRIDES.get(method.__qualname__):
            found[name] = make(method, rotations)
    return found


def _attend_by_table(split: _Split) -> Callable[[Any, _Functions], Any]:
    """Attention that looks its sines up in a table, which positions have no end in."""

    def make(original: Any, rotations: _Functions) -> Any:
        del original
        (rotate,) = rotations.values()

        def forward(
            self: Any,
            hidden_states: Tensor,
            layer_past: Any = None,
            attention_mask: Tensor | None = None,
            position_ids: Any = None,
            **_: Any,
        ) -> tuple[Tensor, Tensor]:
            rope = getattr(self, ROPES_OF_KINDS)[None]
            rows = defer_cos_sin(rope, position_ids, hidden_states.dtype)
            # [batch, seq, heads, head_dim], of which rotary_dim coordinates are rotated
            q, k, v = split(self, hidden_states)
            width = 2 * rows.cos.shape[-1]
            k, q = (
                torch.cat((rotate(x[..., :width], rows, rows), x[..., width:]), -1) for x in (k, q)
            )
            # [batch, heads, seq, head_dim]
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            if layer_past is not None:
                k, v = layer_past.update(k, v, self.layer_idx)
            mixed, weights = self._attn(q, k, v, attention_mask)
            mixed = self._merge_heads(mixed, self.num_attention_heads, self.head_dim)
            return self.resid_dropout(self.out_proj(mixed)), weights

        return forward

    return make


def _split_gptj(self: Any, hidden_states: Tensor) -> tuple[Tensor, ...]:
    heads = self.num_attention_heads, self.head_dim
    projections = self.q_proj, self.k_proj, self.v_proj
    return tuple(project(hidden_states).unflatten(-1, heads) for project in projections)


def _split_codegen(self: Any, hidden_states: Tensor) -> tuple[Tensor, ...]:
    # four blocks, as of four devices, each with its heads' queries, values and keys
    blocks = self.qkv_proj(hidden_states).unflatten(-1, (4, 3, -1))
    heads = self.num_attention_heads, self.head_dim
    # [batch, seq, 4, width / 4] -> [batch, seq, heads, head_dim]
    q, v, k = (part.flatten(-2).unflatten(-1, heads) for part in blocks.unbind(-2))
    return q, k, v


def _cut_tensors(original: Any, rotations: _Functions) -> Any:
    """An indexer that cuts cosines to its heads' width: it is given tensors of full width."""
    (name, rotate), *_ = rotations.items()

    def rotate_by_tensors(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        # [batch, seq, 2 * num_pairs] -> [batch, seq, num_pairs]
        rows = DeferredCosSin(cos.chunk(2, -1)[0], sin.chunk(2, -1)[0])
        return rotate(q, k, rows, rows)

    by_tensors = _copy_function(original, {name: rotate_by_tensors})

    def forward(self: Any, hidden_states: Tensor, position_embeddings: Any, *args: Any) -> Any:
        rows = position_embeddings[0]
        wide = [torch.cat((row, row), -1) for row in (rows.cos, rows.sin)]
        return by_tensors(self, hidden_states, wide, *args)

    return forward


def _reorder_rows(original: Any, rotations: _Functions) -> Any:
    """A method that puts tokens in another order: those of rows follow."""
    del rotations

    def reorder(self: Any, given: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(given, DeferredCosSin):
            cos, sin = (original(self, row, *args, **kwargs) for row in (given.cos, given.sin))
            return DeferredCosSin(cos, sin, given.inverse)
        return original(self, given, *args, **kwargs)

    return reorder


# by the name of the method in any class, or with that of its class
_OVERRIDES: Mapping[str, Callable[[Any, _Functions], Any]] = {
    "GPTJAttention.forward": _attend_by_table(_split_gptj),
    "CodeGenAttention.forward": _attend_by_table(_split_codegen),
    "MiniMaxM3VLIndexer.forward": _cut_tensors,
    REORDERING: _reorder_rows,
}
