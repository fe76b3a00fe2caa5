"""Parts of torch without a public name, and checks for compilers, tracers and autograd."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, wraps
from typing import Any, NoReturn, ParamSpec, TypeVar, cast

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.utils import _python_dispatch, _pytree

from phasor.errors import BackendError

_F = TypeVar("_F", bound=Callable[..., Any])
_P = ParamSpec("_P")
_R = TypeVar("_R")
_C = cast(Any, torch)._C
_forward_ad = cast(Any, forward_ad)

#: A context in which operators skip autograd: for code that handles derivatives itself.
below_autograd: Callable[[], AbstractContextManager[None]] = _C._AutoDispatchBelowAutograd
#: A context in which new tensors belong to no ``torch.func`` transformation.
outside_transforms: Callable[[], AbstractContextManager[None]] = _C._DisableFuncTorch
#: A context in which no dispatch mode, such as ``FakeTensorMode``, is active.
outside_modes = cast(
    Callable[[], AbstractContextManager[Any]], cast(Any, _python_dispatch)._disable_current_modes
)
# has the flag that ``torch.export`` sets
_compiler: Any = torch.compiler
#: Whether a ``torch.func`` transformation is running.
in_transform: Callable[[], bool] = _C._are_functorch_transforms_active
#: Whether ``torch.jit.trace`` is recording.
is_tracing: Callable[[], bool] = _C._is_tracing
#: The number of active dispatch modes.
count_modes: Callable[[], int] = _C._len_torch_dispatch_stack
#: Whether a tensor has memory of its own, unlike tensors that wrap others.
has_storage: Callable[[Tensor], bool] = _C._has_storage
#: Increment the version counters by which autograd notices writes; inference tensors have none.
count_writes: Callable[[Sequence[Tensor]], None] = _C._increment_version
#: Copy each tensor of the second list into one of the first list, in a single call.
copy_all = cast(
    Callable[[Sequence[Tensor], Sequence[Tensor]], None], cast(Any, torch)._foreach_copy_
)

# Constants that captured CUDA graphs use. A graph keeps their addresses but not their memory, and
# may be replayed after their Rope has left the cache.
_captured: set[Tensor] = set()


def hold_for_graph(constants: Tensor) -> None:
    """Never free ``constants`` if a CUDA graph is being captured; they take a few bytes a pair."""
    if constants.is_cuda and torch.cuda.is_current_stream_capturing():
        _captured.add(constants)


def outside_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """A context without autocast, so that arithmetic documented as float32 is float32."""
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def mark_constant(function: _F) -> _F:
    """Mark ``function`` so that ``torch.compile`` treats its results as constants.

    ``torch.compiler.assume_constant_result`` does the same, but imports the whole compiler.
    """
    cast(Any, function)._dynamo_marked_constant = True
    return function


def cached_constant(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a function of hashable constants: it runs once, and is constant when compiled."""
    cached: Any = lru_cache(maxsize=64)(function)

    # Dynamo unwraps an lru_cache, so the mark must be on a function around it
    @mark_constant
    @wraps(function)
    def look_up(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        return cached(*args, **kwargs)

    return look_up


def warn_of_absence(where: str, reason: str) -> str:
    """Return ``reason``, and warn unless it is ""; called once for each backend."""
    if reason:
        warnings.warn(
            f"phasor rotates with plain torch operations on this {where}: {reason}",
            RuntimeWarning,
            stacklevel=3,
        )
    return reason


def is_exporting() -> bool:
    """Whether ``torch.export`` is tracing.

    Before torch 2.12 the public function is also true under ``torch.compile``.
    """
    return _compiler._is_exporting_flag


def dispatch_is_plain(xs: Sequence[Any]) -> bool:
    """Whether these are plain tensors that are not traced, differentiated or transformed.

    Only then may a call bypass the dispatcher, which takes several times as long as the rotation
    of one token.
    """
    if not is_direct(xs):
        return False
    if torch.is_grad_enabled():
        for x in xs:
            if x.requires_grad:
                return False
    return True


def is_direct(xs: Sequence[Any]) -> bool:
    """Whether these are plain tensors that nothing except reverse-mode autograd may record."""
    if (
        torch.compiler.is_compiling()
        or _forward_ad._current_level >= 0
        or in_transform()
        or count_modes()
        or is_tracing()
    ):
        return False
    for x in xs:
        is_plain = type(x) is Tensor and not x.is_neg()
        if not is_plain:
            return False
    return True


def batch_levels(x: Tensor) -> set[int]:
    """The levels of all active ``vmap`` calls that batch ``x``."""
    levels: set[int] = set()
    # each transform has wrapped the tensor once; a plain tensor has level -1
    while (level := _C._functorch.maybe_get_level(x)) >= 0:
        if _C._functorch.is_batchedtensor(x):
            levels.add(level)
        x = _C._functorch.get_unwrapped(x)
    return levels


def may_write(xs: Sequence[Tensor]) -> bool:
    """Whether torch allows writes to these here: to inference tensors only in inference mode."""
    if not torch.is_inference_mode_enabled():
        for x in xs:
            if x.is_inference():
                return False
    return True


def autograd_may_refuse_write(x: Tensor) -> bool:
    """Whether ``x`` is a leaf, a view of a leaf, or a view that autograd restricts."""
    if not x._is_view():
        return x.is_leaf
    meta = _C._autograd
    return cast(Tensor, x._base).is_leaf or meta._get_creation_meta(x) != meta.CreationMeta.DEFAULT


def refuse_torchscript() -> NoReturn:
    """Raise the error for TorchScript, which would compile only a part or record constants."""
    raise BackendError(
        "phasor has no form in TorchScript (torch.jit.script, torch.jit.trace, torch.onnx.export "
        "with dynamo=False); use torch.export.export(model, args), torch.compile(model), or "
        "phasor.torch.export.export(model, args)"
    )


def refuse_tracing() -> None:
    """Raise the error for TorchScript if ``torch.jit.trace`` is recording."""
    if not torch.compiler.is_compiling() and is_tracing():
        refuse_torchscript()


def unscriptable(function: _F) -> _F:
    """``function``, for which ``torch.jit.script`` raises `refuse_torchscript`'s error."""
    vars(function)["__prepare_scriptable__"] = refuse_torchscript
    return function


def register_pytree(
    cls: type,
    names: Sequence[str],
    context: Callable[[Any], Any],
    make: Callable[[Any, Any, Any], Any],
) -> None:
    """Let torch take a class apart into its tensors, the attributes ``names``, and make it again.

    ``context`` are plain values, which programs that are exported keep as JSON.
    """

    def flatten(value: Any) -> tuple[list[Any], Any]:
        return [getattr(value, name) for name in names], context(value)

    def flatten_with_keys(value: Any) -> tuple[list[Any], Any]:
        return [(_pytree.GetAttrKey(name), getattr(value, name)) for name in names], context(value)

    def unflatten(tensors: Any, context: Any) -> Any:
        first, second = tensors
        return make(first, second, tuple(context))

    _pytree.register_pytree_node(
        cls,
        flatten,
        unflatten,
        flatten_with_keys_fn=flatten_with_keys,
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
        to_dumpable_context=list,
        from_dumpable_context=tuple,
    )
