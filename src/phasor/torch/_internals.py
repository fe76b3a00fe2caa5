"""The few things of torch that have no public name, in one place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar, cast

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.utils import _python_dispatch

_F = TypeVar("_F", bound=Callable[..., Any])
_C = cast(Any, torch)._C

#: Inside, operators skip their derivatives: what comes after those have been taken care of.
below_autograd: Callable[[], AbstractContextManager[None]] = _C._AutoDispatchBelowAutograd
#: Inside, nothing belongs to a ``torch.func`` transformation.
outside_transforms: Callable[[], AbstractContextManager[None]] = _C._DisableFuncTorch
#: Inside, no dispatch mode is on, such as the one that makes tensors fake.
outside_modes = cast(
    Callable[[], AbstractContextManager[Any]], cast(Any, _python_dispatch)._disable_current_modes
)
#: Whether a ``torch.func`` transformation is looking.
in_transform: Callable[[], bool] = _C._are_functorch_transforms_active
#: Whether ``torch.jit.trace`` is recording.
tracing: Callable[[], bool] = _C._is_tracing
#: How many dispatch modes are on.
modes: Callable[[], int] = _C._len_torch_dispatch_stack


def outside_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, autocast keeps its hands off: what is promised in float32 is computed in it."""
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def constant_to_the_compiler(function: _F) -> _F:
    """What ``torch.compiler.assume_constant_result`` does after loading the whole compiler."""
    cast(Any, function)._dynamo_marked_constant = True
    return function


def in_forward_mode() -> bool:
    """Whether forward-mode differentiation is on."""
    return cast(int, cast(Any, forward_ad)._current_level) >= 0


def counted_writes(xs: Sequence[Tensor]) -> list[Tensor] | None:
    """Those whose writes autograd counts; None where torch would not let these be written.

    Tensors made in inference mode keep no count, and are written in inference mode only.
    """
    counted = [x for x in xs if not x.is_inference()]
    return counted if len(counted) == len(xs) or torch.is_inference_mode_enabled() else None


def count_writes(xs: Sequence[Tensor]) -> None:
    """Let autograd know, as every write in place does; in one call for all."""
    torch.autograd.graph.increment_version([x for x in xs if not x.is_inference()])


def is_doubtful(x: Tensor) -> bool:
    """Whether autograd may refuse that ``x`` is written: a leaf, a view of one, or an odd view."""
    if not x._is_view():
        return x.is_leaf
    meta = _C._autograd
    return cast(Tensor, x._base).is_leaf or meta._get_creation_meta(x) != meta.CreationMeta.DEFAULT


def unheard(xs: Sequence[Any]) -> bool:
    """Whether these are plain tensors that nobody traces, differentiates or transforms.

    Only then may a call go past the dispatcher, which costs several times what one token does.
    """
    if torch.compiler.is_compiling():
        return False
    recording = torch.is_grad_enabled()
    for x in xs:
        if type(x) is not Tensor or x.is_neg() or (recording and x.requires_grad):
            return False
    return not in_forward_mode() and not in_transform() and not modes() and not tracing()
