"""The option ``heads_first`` of functions that take tensors with heads."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from phasor._checks import shown
from phasor.errors import SpecError, TensorError
from phasor.torch._arguments import check_is_tensor


def tokens_first(name: str, x: Any, heads_first: bool) -> Any:
    """``x`` as ``[..., seq, heads, head_dim]``: itself, or with ``heads_first`` a transposed view.

    Raises:
        SpecError: If ``heads_first`` is not a bool.
        TensorError: If ``x`` is to be transposed and is not a tensor of three dimensions or more.
    """
    if type(heads_first) is not bool:
        raise SpecError(f"heads_first must be True or False, got {shown(heads_first)}")
    if not heads_first:
        return x
    check_is_tensor(name, x)
    given: Tensor = x
    if given.dim() < 3:
        raise TensorError(
            f"{name} must be [..., heads, seq, head_dim] with heads_first=True, "
            f"got shape {list(given.shape)}"
        )
    return given.transpose(-3, -2)
