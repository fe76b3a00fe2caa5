"""Tensors with any strides in memory of which every other byte is watched."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

# there where AddressSanitizer is
POISON: Any = getattr(ctypes.CDLL(None), "__asan_poison_memory_region", None)
ALLOW: Any = getattr(ctypes.CDLL(None), "__asan_unpoison_memory_region", None)


class Memory:
    """Bytes of which tensors are views; the rest must stay as they are.

    Under AddressSanitizer what belongs to no tensor can also be forbidden to touch.
    """

    def __init__(self, rng: random.Random, length: int, lead: int) -> None:
        self.bytes = np.frombuffer(bytearray(rng.randbytes(lead + length + 96)), dtype=np.uint8)
        # from the start of a cache line, unless told otherwise
        self.lead = lead + -(self.bytes.ctypes.data + lead) % 64 if lead % 64 == 0 else lead
        self.own = np.zeros(len(self.bytes), dtype=bool)
        self.before = self.bytes.copy()

    def view(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, at: int = 0
             ) -> tuple[Tensor, np.ndarray]:  # fmt: skip
        """A tensor ``at`` so many bytes, and the address of each of its elements."""
        if 0 in shape:
            return torch.empty(*shape, dtype=dtype), np.zeros(0, dtype=np.int64)
        start, size = self.lead + at, dtype.itemsize
        flat = torch.frombuffer(self.bytes, dtype=dtype, offset=start, count=reach(shape, strides))
        steps = [np.arange(n) * step * size for n, step in zip(shape, strides, strict=True)]
        places = start + np.asarray(sum(np.ix_(*steps))).reshape(-1)
        for byte in range(size):
            self.own[places + byte] = True
        return flat.as_strided(shape, strides), places

    def fill(self, rng: random.Random, dtype: torch.dtype) -> None:
        """Normal numbers of about one size wherever a tensor could be."""
        room = (len(self.bytes) - self.lead) // dtype.itemsize
        generator = torch.Generator().manual_seed(rng.getrandbits(32))
        size = rng.choice([1.0, 2.0**-5, 2.0**5])
        numbers = (torch.randn(room, generator=generator, dtype=torch.float64) * size).to(dtype)
        raw = numbers.view(torch.uint8).numpy()
        self.bytes[self.lead : self.lead + len(raw)] = raw
        self.remember()

    def remember(self) -> None:
        """What is there now is what the rest must stay."""
        self.before = self.bytes.copy()

    def unchanged(self, *, written: bool) -> bool:
        """Whether no byte changed but those of tensors, or none at all."""
        same = self.bytes == self.before
        return bool((same | self.own).all() if written else same.all())

    def forbid(self) -> None:
        """No touching of bytes that no tensor has, up to a number of runs of them."""
        edges = np.flatnonzero(np.diff(np.concatenate(([True], self.own, [True]))))
        for first, last in edges.reshape(-1, 2)[:200] if POISON else ():
            start = ctypes.c_void_p(self.bytes.ctypes.data + int(first))
            POISON(start, ctypes.c_size_t(int(last - first)))

    def allow(self) -> None:
        """Any touching again."""
        if ALLOW:
            ALLOW(ctypes.c_void_p(self.bytes.ctypes.data), ctypes.c_size_t(len(self.bytes)))


def reach(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last."""
    return 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))


def strides_for(rng: random.Random, shape: Sequence[int], *, free: bool) -> list[int]:
    """Strides in any order of the dimensions, with gaps; also overlapping ones if ``free``."""
    if free and rng.random() < 0.15:
        return [rng.randrange(0, 40) for _ in shape]
    if not shape:
        return []
    order = list(range(len(shape) - 1))
    if rng.random() < 0.5:
        rng.shuffle(order)
    else:
        order.reverse()
    step = rng.choice([1, 1, 1, 2, 3])
    strides = [step] * len(shape)
    step *= max(shape[-1], 1)
    for d in order:
        step += rng.choice([0, 0, 0, 1, 5, 16])
        strides[d] = step
        step *= max(shape[d], 1)
    if free and rng.random() < 0.2:
        strides[rng.randrange(len(shape))] = 0
    return strides


def in_memory(
    rng: random.Random, shape: Sequence[int], dtype: torch.dtype, *, free: bool
) -> tuple[Memory, Tensor, np.ndarray]:
    """A tensor of random numbers, anywhere in memory of its own."""
    strides = strides_for(rng, shape, free=free)
    length = dtype.itemsize * max(reach(shape, strides), 1)
    memory = Memory(rng, length, rng.choice([64, 64, 64 + dtype.itemsize, rng.randrange(1, 64)]))
    memory.fill(rng, dtype)
    tensor, places = memory.view(shape, strides, dtype)
    return memory, tensor, places


def placed(rng: random.Random, numbers: Tensor) -> tuple[Memory, Tensor]:
    """The same numbers with any strides in watched memory."""
    memory, tensor, _ = in_memory(rng, numbers.shape, numbers.dtype, free=False)
    tensor.copy_(numbers)
    memory.remember()
    return memory, tensor


def duplicated(places: np.ndarray) -> bool:
    """Whether two elements are at one address."""
    return len(np.unique(places)) < len(places)
