"""Checks before tensors are written in place: no element may be written twice.

Errors come before the first write. Where the strides do not give an answer quickly, tensors are
refused, although their elements may be distinct.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from phasor._tensors import names_of
from phasor.errors import TensorError
from phasor.torch._operator.internals import (
    autograd_may_refuse_write,
    batch_levels,
    in_transform,
    may_write,
)

#: Shape and strides of a tensor, and the size of an element in bytes.
Strided = tuple[Sequence[int], Sequence[int], int]

# limit on NumPy's search, after which two tensors count as overlapping; Any, because NumPy's type
# of this argument lists only two numbers
_MOST_WORK: Any = 1000
_ANY_ADDRESS = 1 << 48  # only differences of addresses matter


class QKMemory(NamedTuple):
    """The memory layout of a query and a key, without their addresses."""

    q: Strided
    k: Strided
    q_bytes: int
    k_bytes: int

    def overlaps(self, q: int, k: int) -> bool:
        """Whether a query and a key at these addresses share a byte, or might."""
        if q + self.q_bytes <= k or k + self.k_bytes <= q:
            return False
        return _share_memory(self.q, self.k, k - q)

    def check_apart(self, q: int, k: int) -> None:
        """Refuse a query and a key that overlap."""
        if self.overlaps(q, k):
            raise TensorError(
                "q and k must not share memory to be written in place; rotate copies, or use the "
                "function without the underscore"
            )


def qk_memory(q: Tensor, k: Tensor) -> QKMemory:
    """The memory layout of these two tensors."""
    q_memory, k_memory = ((x.shape, x.stride(), x.element_size()) for x in (q, k))
    return QKMemory(q_memory, k_memory, _span_bytes(*q_memory), _span_bytes(*k_memory))


def check_different(xs: Sequence[Tensor]) -> None:
    """Refuse one tensor as both query and key."""
    if len(xs) == 2 and xs[0] is xs[1]:
        raise TensorError(
            "q and k must be two different tensors to be rotated in place, got the same twice"
        )


def check_mutable(xs: Sequence[Tensor]) -> None:
    """Refuse tensors that torch would not allow to be written to here."""
    if torch.compiler.is_compiling():
        return  # compilers handle both cases below themselves
    if not may_write(xs):
        raise TensorError(
            "a tensor written in place must not be an inference tensor outside "
            "torch.inference_mode(); write a clone"
        )
    if any(x.is_neg() for x in xs):
        raise TensorError(
            "a tensor written in place must not be a view that negates, such as .imag of a "
            "conjugate; pass its .resolve_neg()"
        )


def check_batched(xs: Sequence[Tensor], source: Sequence[Tensor]) -> None:
    """Refuse a tensor that ``vmap`` does not batch, if it batches any other argument."""
    if torch.compiler.is_compiling() or not in_transform():
        return
    levels = set[int]().union(*map(batch_levels, (*xs, *source)))
    for name, x in zip(names_of(xs), xs, strict=True):
        if levels - batch_levels(x):
            raise TensorError(
                f"{name} must be batched to be rotated in place under vmap, because another "
                "argument is: each batch entry would write to the same memory; use the function "
                "without the underscore"
            )


def check_copies(xs: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Let torch refuse any copy of ``values`` to ``xs`` before the first one is made.

    Torch checks a tensor when it is written to, so an empty slice of each is written. Tensors that
    torch never refuses are skipped, because autograd would record the write.
    """
    if torch.compiler.is_compiling():
        return  # a compiler traces all copies before it runs the first
    for x, y in zip(xs, values, strict=True):
        if in_transform() or autograd_may_refuse_write(x):
            x[..., :0].copy_(y[..., :0])
            _ = x.grad_fn  # updates a view whose base now has a history; it would look like a leaf


def check_no_self_overlap(xs: Sequence[Tensor], names: Sequence[str] | None = None) -> None:
    """Refuse tensors whose elements share memory; when compiling, only expanded ones."""
    for name, x in zip(names or names_of(xs), xs, strict=True):
        if _overlaps_itself(x):
            raise TensorError(
                f"{name} must not share memory with itself to be written in place, got strides "
                f"{list(x.stride())} for shape {list(x.shape)}; use {name}.contiguous() or the "
                "function without the underscore"
            )


def check_rewritable(name: str, x: Tensor) -> None:
    """Refuse tensors that cannot be written to, before the first of several writes."""
    if not torch.compiler.is_compiling():
        check_mutable([x])
        check_no_self_overlap([x], [name])
        check_copies([x], [x])


def check_writable(xs: Sequence[Tensor]) -> None:
    """Refuse a tensor, or a query and a key, if an element would be written twice."""
    check_no_self_overlap(xs)
    if len(xs) == 2 and _have_addresses(xs):
        qk_memory(*xs).check_apart(*[x.data_ptr() for x in xs])


def check_cos_sin(xs: Sequence[Tensor], cos_sin: Sequence[Tensor]) -> None:
    """Refuse cos and sin whose memory lies within the span of a tensor that is written."""
    if any(_spans_meet(x, values) for x in xs for values in cos_sin):
        raise TensorError(
            "cos and sin must not share memory with x to be written in place; pass clones"
        )


def _have_addresses(xs: Sequence[Tensor]) -> bool:
    """Whether the tensors have addresses to compare: wrappers and traced tensors have none."""
    is_traced = torch.compiler.is_compiling() or in_transform()
    return not is_traced and all(type(x) is Tensor and x.device.type != "meta" for x in xs)


def _overlaps_itself(x: Tensor) -> bool:
    """Whether two elements of ``x`` share memory, or might."""
    if torch.compiler.is_compiling():
        # compare strides first: comparing an unknown length would add a guard
        dims = zip(x.shape, x.stride(), strict=True)
        return any(step == 0 and n > 1 for n, step in dims) and x.numel() > 0
    if x.is_contiguous():  # the usual case, ten times faster to check
        return False
    reach = 1
    # from the smallest stride up, each must step over all elements of the dimensions before it
    for stride, n in sorted(zip(x.stride(), x.shape, strict=True)):
        if n > 1 and stride < reach:
            return x.numel() > 0
        reach += stride * (n - 1)
    return False


def _spans_meet(x: Tensor, y: Tensor) -> bool:
    """Whether the memory spans of two tensors intersect, gaps between elements included."""
    memory, distance = qk_memory(x, y), y.data_ptr() - x.data_ptr()
    return -memory.k_bytes < distance < memory.q_bytes


def _span_bytes(shape: Sequence[int], stride: Sequence[int], size: int) -> int:
    """Number of bytes from the start of the first element to the end of the last."""
    if 0 in shape:
        return 0
    return size * (1 + sum(step * (n - 1) for step, n in zip(stride, shape, strict=True)))


@lru_cache(maxsize=256)
def _share_memory(q: Strided, k: Strided, distance: int) -> bool:
    """Whether elements of ``q`` and ``k`` share memory if ``k`` starts ``distance`` bytes later."""
    try:
        elements = _as_array(q, _ANY_ADDRESS), _as_array(k, _ANY_ADDRESS + distance)
        return np.shares_memory(*elements, max_work=_MOST_WORK)
    except np.exceptions.TooHardError:
        return True


def _as_array(layout: Strided, address: int) -> Any:
    """A NumPy array with this layout at an address, for checks that never read its elements."""
    shape, strides, size = layout
    described: dict[str, Any] = {
        "version": 3,
        "typestr": f"|V{size}",
        "shape": tuple(shape),
        "strides": tuple(size * step for step in strides),
        "data": (address, False),
    }
    return np.asarray(SimpleNamespace(__array_interface__=described))
