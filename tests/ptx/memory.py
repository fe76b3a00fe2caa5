"""A device's memory, kept on the host.

Every access lies in the memory of a tensor and on its boundary, and no two threads are at odds over
a byte.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

_NOBODY, _MANY = -1, -2
_PAGE_BITS = 17
_WARP, _SECTOR = 32, 32  # threads, and bytes that come from memory together


class AccessError(Exception):
    """What a GPU would answer with an error, with garbage, or with something else each time."""


def check_boundaries(address: NDArray, size: int) -> None:
    """Refuse an access that does not begin on a multiple of its size."""
    if np.any(address % address.dtype.type(size)):
        raise AccessError(f"{size} bytes that do not begin on a multiple of {size}")


class Page:
    """Bytes, and which thread touched each of them last in this launch.

    A thread may touch what another one wrote, and write what another one read, only if both are of
    one block, and the block met at a barrier in between: ``epoch`` counts its barriers.
    """

    def __init__(self, number: int, threads: int) -> None:
        size = 1 << _PAGE_BITS
        self.start, self.threads = number << _PAGE_BITS, threads
        self.bytes = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(self.start))
        self.writer, self.written_at, self.reader, self.readers_block, self.read_at = (
            np.full(size, _NOBODY, np.int32) for _ in range(5)
        )

    def read(self, at: NDArray, thread: NDArray, epoch: NDArray) -> None:
        """Thread by thread, byte ``at``."""
        self._refuse_if_written(at, thread, epoch, "reads")
        block, reader = thread // self.threads, self.reader[at]
        same_block = self.readers_block[at] == block
        alone = (reader == _NOBODY) | (reader == thread) | (same_block & (self.read_at[at] < epoch))
        self.reader[at] = np.where(alone, thread, _MANY)
        self.readers_block[at] = np.where((reader == _NOBODY) | same_block, block, _MANY)
        self.read_at[at] = epoch
        # of several lanes that read one byte at once, the last is what was noted
        self.reader[at[self.reader[at] != thread]] = _MANY
        self.readers_block[at[self.readers_block[at] != block]] = _MANY

    def write(self, at: NDArray, thread: NDArray, epoch: NDArray) -> None:
        """Thread by thread, byte ``at``."""
        self._refuse_if_written(at, thread, epoch, "writes")
        reader = self.reader[at]
        apart = self.readers_block[at] != thread // self.threads
        at_once = (reader != thread) & (apart | (self.read_at[at] == epoch))
        if np.any((reader != _NOBODY) & at_once):
            raise AccessError("a thread writes what another one reads, with no barrier in between")
        self.writer[at] = thread
        self.written_at[at] = epoch
        if np.any(self.writer[at] != thread):
            raise AccessError("two threads write one byte at once")

    def _refuse_if_written(self, at: NDArray, thread: NDArray, epoch: NDArray, does: str) -> None:
        writer = self.writer[at]
        apart = writer // self.threads != thread // self.threads
        at_once = (writer != thread) & (apart | (self.written_at[at] == epoch))
        if np.any((writer != _NOBODY) & at_once):
            raise AccessError(f"a thread {does} what another one wrote, with no barrier in between")


class Memory:
    """All tensors that one launch, in blocks of so many threads, may touch.

    ``traffic`` counts bytes, by where a tensor's memory starts: ``"read"`` and ``"written"``, and
    as ``"fetched"`` and ``"sent"`` the whole sectors that each access of a warp takes for them.
    """

    def __init__(self, tensors: Iterable[tuple[int, int]], threads: int) -> None:
        self.threads = threads
        merged: list[tuple[int, int]] = []
        for start, size in sorted(set(tensors)):
            end = start + size
            if merged and start < merged[-1][1]:
                start, before = merged.pop()
                end = max(before, end)
            merged.append((start, end))
        # an end that no address is below stands for what lies in front of every tensor
        self.starts, self.ends = np.array([(0, 0), *merged], np.uint64).T
        self.pages: dict[int, Page] = {}
        self.traffic: Counter[tuple[str, int]] = Counter()

    def load(self, address: NDArray, size: int, thread: NDArray, epoch: NDArray) -> NDArray:
        """``[lanes, size]`` bytes."""
        self._check(address, size, thread, ("read", "fetched"))
        found = np.empty((len(address), size), np.uint8)
        for page, lanes, at in self._places(address, size):
            page.read(at.ravel(), np.repeat(thread[lanes], size), np.repeat(epoch[lanes], size))
            found[lanes] = page.bytes[at]
        return found

    def store(self, address: NDArray, values: NDArray, thread: NDArray, epoch: NDArray) -> None:
        """``values [lanes, size]`` of bytes."""
        size = values.shape[1]
        self._check(address, size, thread, ("written", "sent"))
        for page, lanes, at in self._places(address, size):
            page.write(at.ravel(), np.repeat(thread[lanes], size), np.repeat(epoch[lanes], size))
            page.bytes[at] = values[lanes]

    def _check(
        self, address: NDArray, size: int, thread: NDArray, counted: tuple[str, str]
    ) -> None:
        check_boundaries(address, size)
        which = np.searchsorted(self.starts, address, side="right") - 1
        ends = self.ends[which]
        if np.any((ends < size) | (address > ends - np.uint64(size))):
            raise AccessError("an address outside every tensor")
        warp, sector = (thread // _WARP).astype(np.uint64), address // np.uint64(_SECTOR)
        fetched = np.unique(np.stack((which.astype(np.uint64), warp, sector)), axis=1)[0]
        for n in np.unique(which):
            start = int(self.starts[n])
            self.traffic[counted[0], start] += int(np.sum(which == n)) * size
            self.traffic[counted[1], start] += int(np.sum(fetched == n)) * _SECTOR

    def _places(self, address: NDArray, size: int) -> Iterator[tuple[Page, NDArray, NDArray]]:
        """Pages, and for each the lanes that go there and ``[lanes, size]`` places of bytes."""
        numbers = (address >> np.uint64(_PAGE_BITS)).astype(np.int64)
        for number in np.unique(numbers).tolist():
            page = self.pages.get(number)
            if page is None:
                page = self.pages[number] = Page(number, self.threads)
            lanes = np.flatnonzero(numbers == number)
            # no access goes beyond a page, for each is on a boundary of its size
            at = (address[lanes] - np.uint64(page.start)).astype(np.int64)
            yield page, lanes, at[:, None] + np.arange(size)
