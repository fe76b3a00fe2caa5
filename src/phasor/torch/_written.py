"""Whether what a kernel writes in place is written once: no two elements are one.

A tensor that no nest of dense slices looks like is refused, as are rows near what is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from phasor.errors import TensorError
from phasor.torch._arguments import names_of
from phasor.torch._internals import counted_writes, in_transform, is_doubtful

#: ``(count, step)`` in bytes of every dimension, the bytes of an element among them.
Layout = tuple[tuple[int, int], ...]

_MOST = 1000  # steps of the search, after which it gives up and says that they could meet


class Apart(NamedTuple):
    """What there is to know of two tensors but for where they begin."""

    q: Layout
    k: Layout
    q_bytes: int
    k_bytes: int

    def meet(self, q: int, k: int) -> bool:
        """Whether a query and a key at these addresses have a byte in common, or could."""
        if q + self.q_bytes <= k or k + self.k_bytes <= q:
            return False
        return _meet(self.q, self.k, k - q)

    def check(self, q: int, k: int) -> None:
        """Refuse a query and a key that do."""
        if self.meet(q, k):
            raise TensorError(
                "q and k must not share memory to be written in place; rotate copies, or use the "
                "verb without the underscore"
            )


def apart(q: Tensor, k: Tensor) -> Apart:
    """How two tensors lie in memory."""
    return _apart(q.shape, q.stride(), q.element_size(), k.shape, k.stride(), k.element_size())


def check_mutable(xs: Sequence[Tensor]) -> None:
    """Refuse tensors that torch would not let be written here."""
    if counted_writes(xs) is None:
        raise TensorError(
            "what is written in place must not be an inference tensor outside "
            "torch.inference_mode(); write a clone"
        )


def check_copies(xs: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Let torch refuse any copy of ``values`` to ``xs`` before the first one is made.

    It looks when it writes: here it writes nothing, for which autograd would keep a node.
    """
    if torch.compiler.is_compiling():
        return  # which traces all copies before it makes one
    for x, y in zip(xs, values, strict=True):
        if in_transform() or is_doubtful(x):
            x[..., :0].copy_(y[..., :0])


def check_alone_and_apart(written: Mapping[str, Tensor], read: Mapping[str, Tensor]) -> None:
    """Refuse a written tensor that shares memory with itself or with any other of these."""
    for name, x in written.items():
        _check_alone(name, x)
    others = {**written, **read}
    for name, x in written.items():
        del others[name]
        for other, y in others.items():
            if apart(x, y).meet(x.data_ptr(), y.data_ptr()):
                raise TensorError(
                    f"{name} is written and must not share memory with {other}; pass a clone of "
                    f"{other}"
                )


def check_distinct(xs: Sequence[Tensor]) -> None:
    """Refuse to write what strides alone show to be written twice, as a compiler sees them."""
    for name, x in zip(names_of(xs), xs, strict=True):
        # strides first: a length may be one that nobody may ask for
        shared = any(step == 0 and n > 1 for n, step in zip(x.shape, x.stride(), strict=True))
        if shared and x.numel():
            raise _not_alone(name, x)
    if len(xs) == 2 and xs[0] is xs[1]:
        raise TensorError("q and k must be two tensors to be written in place, got one twice")


def check_alone(xs: Sequence[Tensor]) -> None:
    """Refuse tensors that share memory with themselves."""
    for name, x in zip(names_of(xs), xs, strict=True):
        _check_alone(name, x)


def check_writable(xs: Sequence[Tensor]) -> None:
    """Refuse a tensor, or a query and a key, of which an element would be written twice."""
    check_alone(xs)
    if len(xs) == 2:
        apart(*xs).check(*[x.data_ptr() for x in xs])


def check_rows(xs: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
    """Refuse rows of cos and sin where something is written."""
    for x in xs:
        for row in rows:
            behind = row.data_ptr() - x.data_ptr()
            if -_bytes(row) < behind < _bytes(x):
                raise TensorError(
                    "cos and sin must not share memory with x to be written in place; pass clones"
                )


def _check_alone(name: str, x: Tensor) -> None:
    reach = 1
    for step, n in sorted(zip(x.stride(), x.shape, strict=True)):
        if n > 1 and step < reach and x.numel():
            raise _not_alone(name, x)
        reach += step * (n - 1)


def _not_alone(name: str, x: Tensor) -> TensorError:
    return TensorError(
        f"{name} must not share memory with itself to be written in place, got strides "
        f"{list(x.stride())} for shape {list(x.shape)}; use {name}.contiguous() or the verb "
        "without the underscore"
    )


def _bytes(t: Tensor) -> int:
    return _reach(t.shape, t.stride(), t.element_size())


def _reach(shape: Sequence[int], stride: Sequence[int], size: int) -> int:
    """Bytes from the first element to behind the last."""
    if 0 in shape:
        return 0
    return size * (1 + sum(step * (n - 1) for step, n in zip(stride, shape, strict=True)))


@lru_cache(maxsize=256)
def _apart(
    shape: Sequence[int],
    stride: Sequence[int],
    size: int,
    k_shape: Sequence[int],
    k_stride: Sequence[int],
    k_size: int,
) -> Apart:
    q, k = (shape, stride, size), (k_shape, k_stride, k_size)
    return Apart(_layout(*q), _layout(*k), _reach(*q), _reach(*k))


def _layout(shape: Sequence[int], stride: Sequence[int], size: int) -> Layout:
    dims = [(n, step * size) for n, step in zip(shape, stride, strict=True)]
    return ((size, 1), *(pair for pair in dims if pair[0] > 1))


@lru_cache(maxsize=256)
def _meet(q: Layout, k: Layout, behind: int) -> bool:
    """Whether ``sum(i * step) of q == behind + sum(j * step) of k`` for some indices of both."""
    ranges: dict[int, tuple[int, int]] = {}  # of i - j along every step
    for sign, layout in ((1, q), (-1, k)):
        for n, step in layout:
            low, high = ranges.get(step, (0, 0))
            far = sign * (n - 1)
            ranges[step] = low + min(far, 0), high + max(far, 0)
    steps = sorted(ranges, reverse=True)

    tried = 0

    def found(rest: int, depth: int) -> bool:
        nonlocal tried
        tried += 1
        if depth == len(steps) or tried > _MOST:
            return rest == 0 or tried > _MOST
        step, (low, high) = steps[depth], ranges[steps[depth]]
        if step == 0:
            return found(rest, depth + 1)
        finer = [(s * ranges[s][0], s * ranges[s][1]) for s in steps[depth + 1 :]]
        least, most = (sum(ends) for ends in zip((0, 0), *finer, strict=True))
        first = max(low, -((most - rest) // step))
        last = min(high, (rest - least) // step)
        return any(found(rest - c * step, depth + 1) for c in range(first, last + 1))

    return found(behind, 0)
