"""Checks before tensors are written in place: no element may be written twice.

Errors come before the first write. If the strides do not give an answer quickly, a tensor is
refused, although its elements may be distinct.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from phasor.errors import TensorError
from phasor.torch._arguments import names_of
from phasor.torch._internals import autograd_may_refuse_write, in_transform, may_write

#: ``(length, stride)`` in bytes of every dimension, the bytes of an element among them.
ByteLayout = tuple[tuple[int, int], ...]
#: Shape and strides of a tensor, and the bytes of an element.
Strided = tuple[Sequence[int], Sequence[int], int]

_MOST_SEARCH_STEPS = 1000  # after so many the answer is that two tensors could overlap


class PairLayout(NamedTuple):
    """The memory layout of a query and a key, without their addresses."""

    q: ByteLayout
    k: ByteLayout
    q_bytes: int
    k_bytes: int

    def overlaps(self, q: int, k: int) -> bool:
        """Whether a query and a key at these addresses have a byte in common, or could."""
        if q + self.q_bytes <= k or k + self.k_bytes <= q:
            return False
        return _have_common_byte(self.q, self.k, k - q)

    def check_apart(self, q: int, k: int) -> None:
        """Refuse a query and a key that overlap."""
        if self.overlaps(q, k):
            raise TensorError(
                "q and k must not share memory to be written in place; rotate copies, or use the "
                "verb without the underscore"
            )


def pair_layout(q: Tensor, k: Tensor) -> PairLayout:
    """The memory layout of two tensors, computed once for the same shapes and strides."""
    return _pair_layout(*((x.shape, x.stride(), x.element_size()) for x in (q, k)))


def check_mutable(xs: Sequence[Tensor]) -> None:
    """Refuse tensors that torch would not let be written here."""
    if not may_write(xs):
        raise TensorError(
            "what is written in place must not be an inference tensor outside "
            "torch.inference_mode(); write a clone"
        )


def check_copies(xs: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Let torch refuse any copy of ``values`` to ``xs`` before the first one is made.

    Torch checks when it writes, so an empty slice of each is written. Tensors that torch never
    refuses are left out, because autograd would record the write.
    """
    if torch.compiler.is_compiling():
        return  # a compiler traces every copy before it makes the first
    for x, y in zip(xs, values, strict=True):
        if in_transform() or autograd_may_refuse_write(x):
            x[..., :0].copy_(y[..., :0])


def check_not_expanded(xs: Sequence[Tensor]) -> None:
    """Refuse expanded tensors, the only check that needs no addresses, which compilers lack."""
    for name, x in zip(names_of(xs), xs, strict=True):
        # strides first: comparing a length that a compiler does not know would be a guard
        is_expanded = any(step == 0 and n > 1 for n, step in zip(x.shape, x.stride(), strict=True))
        if is_expanded and x.numel():
            raise _self_overlap_error(name, x)


def check_no_self_overlap(xs: Sequence[Tensor]) -> None:
    """Refuse tensors of which two elements share memory."""
    for name, x in zip(names_of(xs), xs, strict=True):
        check_self_overlap(name, x)


def check_writable(xs: Sequence[Tensor]) -> None:
    """Refuse a tensor, or a query and a key, of which an element would be written twice."""
    check_no_self_overlap(xs)
    if len(xs) == 2:
        pair_layout(*xs).check_apart(*[x.data_ptr() for x in xs])


def check_cos_sin(xs: Sequence[Tensor], cos_sin: Sequence[Tensor]) -> None:
    """Refuse cos and sin that lie between the first and the last byte of a written tensor."""
    for x in xs:
        for values in cos_sin:
            layout, distance = pair_layout(x, values), values.data_ptr() - x.data_ptr()
            if -layout.k_bytes < distance < layout.q_bytes:
                raise TensorError(
                    "cos and sin must not share memory with x to be written in place; pass clones"
                )


def check_self_overlap(name: str, x: Tensor) -> None:
    """Refuse a tensor of which two elements share memory."""
    # dimensions from the smallest stride on: each has to step over all elements of the ones before
    reach = 1
    for stride, n in sorted(zip(x.stride(), x.shape, strict=True)):
        if n > 1 and stride < reach and x.numel():
            raise _self_overlap_error(name, x)
        reach += stride * (n - 1)


def _self_overlap_error(name: str, x: Tensor) -> TensorError:
    return TensorError(
        f"{name} must not share memory with itself to be written in place, got strides "
        f"{list(x.stride())} for shape {list(x.shape)}; use {name}.contiguous() or the verb "
        "without the underscore"
    )


def _span_bytes(shape: Sequence[int], stride: Sequence[int], size: int) -> int:
    """Bytes from the first element to the end of the last."""
    if 0 in shape:
        return 0
    return size * (1 + sum(step * (n - 1) for step, n in zip(stride, shape, strict=True)))


@lru_cache(maxsize=256)
def _pair_layout(q: Strided, k: Strided) -> PairLayout:
    return PairLayout(_byte_layout(*q), _byte_layout(*k), _span_bytes(*q), _span_bytes(*k))


def _byte_layout(shape: Sequence[int], stride: Sequence[int], size: int) -> ByteLayout:
    dims = [(n, step * size) for n, step in zip(shape, stride, strict=True)]
    return ((size, 1), *(dim for dim in dims if dim[0] > 1))


@lru_cache(maxsize=256)
def _have_common_byte(q: ByteLayout, k: ByteLayout, distance: int) -> bool:
    """Whether ``sum(i * stride) of q == distance + sum(j * stride) of k`` for some indices.

    Dimensions of equal strides are one unknown, the difference ``i - j``. The search tries the
    unknowns from the largest stride down. Of each it tries only the values from which the extreme
    values of the remaining unknowns can still reach the sum.
    """
    ranges: dict[int, tuple[int, int]] = {}  # of i - j, for every stride
    for sign, layout in ((1, q), (-1, k)):
        for n, stride in layout:
            low, high = ranges.get(stride, (0, 0))
            end = sign * (n - 1)
            ranges[stride] = low + min(end, 0), high + max(end, 0)
    strides = sorted(ranges, reverse=True)

    steps = 0

    def can_reach(distance_left: int, depth: int) -> bool:
        nonlocal steps
        steps += 1
        if depth == len(strides) or steps > _MOST_SEARCH_STEPS:
            return distance_left == 0 or steps > _MOST_SEARCH_STEPS
        stride, (low, high) = strides[depth], ranges[strides[depth]]
        if stride == 0:
            return can_reach(distance_left, depth + 1)
        smaller = [(s * ranges[s][0], s * ranges[s][1]) for s in strides[depth + 1 :]]
        lowest, highest = (sum(ends) for ends in zip((0, 0), *smaller, strict=True))
        first = max(low, -((highest - distance_left) // stride))
        last = min(high, (distance_left - lowest) // stride)
        return any(can_reach(distance_left - c * stride, depth + 1) for c in range(first, last + 1))

    return can_reach(distance, 0)
