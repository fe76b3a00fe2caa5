"""The few things of torch that have no public name, in one place."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
import torch.autograd.forward_ad as forward_ad
from torch.utils import _python_dispatch

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
#: How many dispatch modes are on.
modes: Callable[[], int] = _C._len_torch_dispatch_stack


def in_forward_mode() -> bool:
    """Whether forward-mode differentiation is on."""
    return cast(int, cast(Any, forward_ad)._current_level) >= 0
