"""How time is taken on a GPU: by events on its own clock, call by call or replayed from a graph."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Protocol

import torch

from phasor.bench import Call, Timer, by_clock

# bytes written to push everything out of the cache. That takes an H100 0.7 ms, in which the host
# gets ahead, also by a training step, which takes it 0.1 ms
_FLUSH = 2**31
_WARMED = 3  # calls on another stream before a capture, as torch asks for


class Device(Protocol):
    """What the measurement needs of a device."""

    @property
    def where(self) -> torch.device:
        """The device."""
        ...

    @property
    def cache(self) -> int:
        """Bytes of its last cache."""
        ...

    def timer(self, *, warm: bool) -> Timer:
        """A timer of calls in a row; each starts with an empty cache unless ``warm``."""
        ...

    def host_timer(self) -> Timer:
        """A timer of what the host spends on calls, without waiting for what they started."""
        ...

    def capturer(self) -> Callable[[Call, int], Call]:
        """A function that makes of a call so many of them, without the host's part in any."""
        ...

    def forget(self) -> None:
        """Give back the memory of what was measured."""
        ...


class Cuda:
    """The current CUDA device."""

    def __init__(self) -> None:
        self.where = torch.device("cuda", torch.cuda.current_device())
        self.cache = torch.cuda.get_device_properties(self.where).L2_cache_size
        self._flushed = torch.empty(_FLUSH, dtype=torch.uint8, device=self.where)

    def timer(self, *, warm: bool) -> Timer:
        return self._in_a_row if warm else self._one_by_one

    def host_timer(self) -> Timer:
        clocked = by_clock()

        def timed(call: Call, repeats: int) -> float:
            # a queue that is full would make the host wait
            torch.cuda.synchronize()
            return clocked(call, min(repeats, 200))

        return timed

    def capturer(self) -> Callable[[Call, int], Call]:
        # nobody reads what a replay leaves, so all graphs may write to the same memory; a graph
        # that cannot fail comes first, for memory of which no graph is left is not to be had again
        pool, first = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(first, pool=pool):
            self._flushed[:1].zero_()

        def capture(call: Call, times: int) -> Call:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(_WARMED):
                    call()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                for _ in range(times):
                    call()
            kept = first, graph
            return lambda: kept[1].replay()

        return capture

    def forget(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()

    def _in_a_row(self, call: Call, repeats: int) -> float:
        start, end = _events()
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3 / repeats

    def _one_by_one(self, call: Call, repeats: int) -> float:
        pairs = [_events() for _ in range(repeats)]
        for start, end in pairs:
            self._flushed.zero_()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return sum(start.elapsed_time(end) for start, end in pairs) / 1e3 / repeats


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
