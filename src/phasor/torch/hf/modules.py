"""The modules of a model: the part that each belongs to, and a class that rotates by the operator.

A part is named by the key of its config in the model's, or by several keys joined by dots; the name
is empty for the config of the whole model.

A method finds the functions that it calls among its globals. A copy of the method, over a copy of
those globals in which the rotation is another function, goes into a subclass. Only modules that are
given that subclass change: not the class, not its file, not another model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from phasor._checks import short_repr
from phasor.errors import ConfigError
from phasor.torch.hf.rotations import DeferredCosSin, defer_cos_sin, substitute

#: The attribute in which a class that was made here keeps its original.
ORIGINAL = "_phasor_original"
#: The attribute in which a patched module that makes cosines keeps the rope of each kind of layer.
ROPES_OF_KINDS = "_phasor_ropes"
#: The method by which a tower with windows puts its tokens, and their cosines, in another order.
REORDERING = "permute_input_for_window_attn"
#: The buffer in which attention of GPT-J and CodeGen keeps its table of sines, and the function
#: that makes the table.
TABLE = "embed_positions"
TABLE_MAKER = "create_sinusoidal_positions"
#: A number between the dots of a path.
NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
#: Parts of the names of rotary embeddings.
_ROTARY = re.compile(r"(?i)rotary|rotate|(?<![a-z])rope(?![a-z])|inv_freq|freqs_cis|sinusoid")
_ROTATION_NAME = re.compile(r"\w*apply_\w*(rotary|rope)\w*")
_Functions = Mapping[str, Any]


@lru_cache(maxsize=1024)
def methods_of(cls: type) -> dict[str, FunctionType]:
    """Every method of an instance of ``cls`` but those of ``torch.nn.Module`` itself."""
    members: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        members |= {} if base in (object, nn.Module) else vars(base)
    plain = {k: it.__func__ if isinstance(it, staticmethod) else it for k, it in members.items()}
    return {name: it for name, it in plain.items() if isinstance(it, FunctionType)}


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
    inner = (_rotation_names(it) for it in code.co_consts if isinstance(it, CodeType))
    return (*filter(_ROTATION_NAME.fullmatch, code.co_names), *chain.from_iterable(inner))


class ModuleInfo(NamedTuple):
    """One module of a model."""

    path: str
    module: nn.Module
    cls: type  # the class that it had before it was patched
    config: Any  # its own, or that of the nearest module around it that has one
    part: str  # the key of that config in the model's; the module's path where it has none

    @property
    def layer(self) -> int | None:
        """The number of the layer that it belongs to, where it has one."""
        # from the path first: a module that several layers share has a single layer_idx
        numbers = NUMBER.findall(self.path)
        return int(numbers[-1]) if numbers else getattr(self.module, "layer_idx", None)

    @property
    def is_rotary_embedding(self) -> bool:
        """Whether it turns positions into cosines and sines, or keeps a table of them."""
        return "Rotary" in self.cls.__name__ or (self.holds_table and bool(rotations_of(self.cls)))

    @property
    def holds_table(self) -> bool:
        """Whether it keeps a table of sines, as attention of GPT-J does."""
        scope = getattr(cast(Any, self.cls).forward, "__globals__", {})
        return TABLE in vars(self.module)["_buffers"] and TABLE_MAKER in scope

    @property
    def has_foreign_forward(self) -> bool:
        """Whether it has a ``forward`` attribute that is not a method of its class."""
        bound = bound_methods(self.module).values()
        return "forward" in self.module.__dict__ and "forward" not in bound


def named_modules(model: object) -> Iterator[tuple[str, nn.Module]]:
    """Every module of ``model`` with its name; an error if it is no module."""
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model must be a torch.nn.Module, such as a model of transformers or a part of one, "
            f"got {short_repr(model)}"
        )
    return cast("Iterator[tuple[str, nn.Module]]", model.named_modules())


def modules_of(model: nn.Module) -> Iterator[ModuleInfo]:
    """Every module of ``model``."""
    by_path: dict[str, tuple[Any, str]] = {"": (None, "")}
    outermost: list[tuple[Any, str]] = []
    for path, module in named_modules(model):
        config, part = by_path[path.rpartition(".")[0]]
        own = getattr(module, "config", None)
        if own is not config and hasattr(own, "to_dict"):
            if config is None:
                # a list of modules may be of one model or of several
                known_parts = (part for known, part in outermost if _equal(own, known))
                part = next(known_parts, path if outermost else "")
                outermost.append((own, part))
            elif not _equal(own, config):
                key = _key_of(own, config)
                part = f"{part}.{key}".lstrip(".") if key else path
            config = own
        by_path[path] = config, part
        cls = original_class(module) or type(module)
        yield ModuleInfo(path or cls.__name__, module, cls, config, part)


def _key_of(own: Any, config: Any) -> str:
    """The key of a config in an outer one; "" if it has none."""
    inner = list(_configs_inside(config))
    # a model may have copied the configs of its parts, and changed the copies since
    keys = (
        [key for key, it in inner if it is own]
        or [key for key, it in inner if _equal(it, own)]
        or [key for key, it in inner if type(it) is type(own)]
    )
    return keys[0] if keys else ""


def _configs_inside(config: Any, depth: int = 3) -> Iterator[tuple[str, Any]]:
    """The configs inside one, with their keys joined by dots, the outer ones first."""
    attributes = cast("dict[str, Any]", vars(config))
    found = {key: value for key, value in attributes.items() if hasattr(value, "to_dict")}
    yield from found.items()
    for key, outer in found.items() if depth else ():
        yield from ((f"{key}.{name}", inner) for name, inner in _configs_inside(outer, depth - 1))


def _equal(first: Any, second: Any) -> bool:
    return type(first) is type(second) and first.to_dict() == second.to_dict()


def parts_of(model: nn.Module) -> dict[str, list[ModuleInfo]]:
    """The modules of each part of ``model`` in which something rotates or makes cosines."""
    infos = list(modules_of(model))
    rotating_parts = {info.part for info in infos if rotations_of(info.cls)}
    cosine_parts = {info.part for info in infos if info.is_rotary_embedding}
    if not rotating_parts or not cosine_parts:
        raise _no_known_rotation(model, infos)
    part_of_path = {info.path: info.part for info in infos}
    found: dict[str, list[ModuleInfo]] = {}
    for info in infos:
        # what has its own config and rotates by cosines of an outer part belongs to that
        outer = info.path
        while part_of_path.get(outer) in rotating_parts - cosine_parts and "." in outer:
            outer = outer.rpartition(".")[0]
        part = part_of_path[outer] if part_of_path.get(outer) in cosine_parts else info.part
        found.setdefault(part, []).append(info._replace(part=part))
    return {part: found[part] for part in found if part in rotating_parts | cosine_parts}


def _no_known_rotation(model: nn.Module, infos: Sequence[ModuleInfo]) -> ConfigError:
    """The error for a model with a rotation of its own, or for one without any."""
    name = type(model).__name__
    for info in infos:
        if type(info.module).__module__.startswith("torch.nn."):
            continue
        # a name in the class, or of a buffer, that is typical of a rotation
        names = [buffer for buffer, _ in info.module.named_buffers(recurse=False)]
        names += (it for f in methods_of(info.cls).values() for it in f.__code__.co_names)
        if evidence := next(filter(_ROTARY.search, [*names, info.cls.__name__]), ""):
            return ConfigError(
                f"model must rotate as those of transformers do, and {info.path} "
                f"({info.cls.__name__}) of {name} has a rotation of its own ({evidence}): call "
                "phasor.torch.rotate_qk(q, k, positions, rope) in its place; phasor.identify says "
                "which rope that is"
            )
    return ConfigError(
        f"model must have a rotary position embedding, and no module of {name} does anything like "
        "one: there is nothing to replace"
    )


def original_class(module: Any) -> type | None:
    """The class that a module had before `set_class` gave it another of here; else None."""
    return cast("type | None", type(module).__dict__.get(ORIGINAL))


def subclass_calling(
    cls: type, replaced: _Functions, rebuild: Any = None, body: Mapping[str, Any] | None = None
) -> type:
    """A subclass of ``cls`` with ``body`` whose methods that rotate have other globals.

    It is for existing modules, and has the name of ``cls``, for code that compares names.
    """
    methods: dict[str, Any] = {
        name: _copy_function(method, replaced)
        for name, method in methods_of(cls).items()
        if _rotations_in(method)
    }

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
    return type(cls.__name__, (cls,), {**methods, **(body or {}), **special, **names})


def _empty_instance(rebuild: Callable[[type], type], cls: type) -> Any:
    subclass: Any = rebuild(cls)
    return object.__new__(subclass)


def _copy_function(function: FunctionType, replaced: _Functions) -> FunctionType:
    """A copy of the function over a copy of its globals, in which some are replaced."""
    scope = {**function.__globals__, **replaced}
    # a compiler looks a function's globals up in the module that they name, unless they name none
    scope.pop("__name__", None)
    cells, wrapped = function.__closure__, function.__dict__.get("__wrapped__")
    attributes = dict(function.__dict__)
    if isinstance(wrapped, FunctionType) and _rotations_in(wrapped):
        # what a decorator wrapped is in a cell of the decorated function
        inner = attributes["__wrapped__"] = _copy_function(wrapped, replaced)
        cells = tuple(CellType(inner) if _contains(cell, wrapped) else cell for cell in cells or ())
    copied = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, cells)
    for name in ("__kwdefaults__", "__doc__", "__qualname__", "__annotations__"):
        setattr(copied, name, getattr(function, name))
    copied.__dict__.update(attributes)
    return copied


def _contains(cell: CellType, value: object) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:  # an empty cell
        return False


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
def patched_class(cls: type) -> type:
    """The class for a module that makes cosines, rotates by them, or puts them in another order.

    It returns what stands for cosines, or is given that.
    """
    functions = rotations_of(cls)
    substitutes = {name: substitute(it) for name, it in functions.items()}
    body = overrides_of(cls, substitutes)
    if not functions and "Rotary" in cls.__name__:
        body["forward"] = _Deferring.forward
    return subclass_calling(cls, substitutes, patched_class, body)


class _Deferring(nn.Module):
    """What a patched rotary embedding does."""

    def forward(
        self, x: Tensor, position_ids: Tensor | None = None, layer_type: Any = None
    ) -> DeferredCosSin | tuple[DeferredCosSin, DeferredCosSin]:
        rope = getattr(self, ROPES_OF_KINDS)[layer_type]
        if fixed := rope.position_format.fixed_positions:  # its caller passes none
            position_ids = torch.tensor([fixed], device=x.device)  # [1, seq, axes]
        assert position_ids is not None
        rows = defer_cos_sin(rope, position_ids, x.dtype)
        return rows if rope.position_format.is_complex else (rows, rows)


def overrides_of(cls: type, rotations: _Functions) -> dict[str, Any]:
    """The methods that a subclass of ``cls`` needs besides those that call ``rotations``."""
    return {
        name: make(method, rotations)
        for name, method in methods_of(cls).items()
        if (make := _OVERRIDES.get(name) or _OVERRIDES.get(method.__qualname__))
    }


def _attend_by_table(original: Any, rotations: _Functions) -> Any:
    """Attention that looks its sines up in a table, which positions have no end in."""
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
        # [batch, seq, embed_dim] -> [batch, seq, heads, head_dim]
        heads = self.num_attention_heads, self.head_dim
        if hasattr(self, "qkv_proj"):
            # four blocks, as of four devices, each with its heads' queries, values and keys
            blocks = self.qkv_proj(hidden_states).unflatten(-1, (4, 3, -1)).unbind(-2)
            q, v, k = (part.flatten(-2).unflatten(-1, heads) for part in blocks)
        else:
            projections = self.q_proj, self.k_proj, self.v_proj
            q, k, v = (project(hidden_states).unflatten(-1, heads) for project in projections)
        rope = getattr(self, ROPES_OF_KINDS)[None]
        rows = defer_cos_sin(rope, position_ids, hidden_states.dtype)
        width = 2 * rows.cos.shape[-1]
        k, q = (torch.cat((rotate(x[..., :width], rows, rows), x[..., width:]), -1) for x in (k, q))
        # [batch, heads, seq, head_dim]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if layer_past is not None:
            k, v = layer_past.update(k, v, self.layer_idx)
        mixed, weights = self._attn(q, k, v, attention_mask)
        mixed = self._merge_heads(mixed, *heads)
        return self.resid_dropout(self.out_proj(mixed)), weights

    return forward


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
    "GPTJAttention.forward": _attend_by_table,
    "CodeGenAttention.forward": _attend_by_table,
    "MiniMaxM3VLIndexer.forward": _cut_tensors,
    REORDERING: _reorder_rows,
}
