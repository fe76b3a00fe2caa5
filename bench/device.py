"""What differs between a CPU and a GPU: how time is taken, and what the machine is called."""

from __future__ import annotations

import gc
import os
import platform
import re
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from cases import Case, few
from timing import Call, by_clock
from torch import Tensor

from phasor.torch._operator import cpu

T = TypeVar("T")
THREADS = 2
_ENVIRONMENT = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
    "OMP_NUM_THREADS": str(THREADS),
    "PHASOR_BENCH": "1",
}
_ALLOCATOR = (
    "glibc's malloc keeps the memory it was given back (no mmap, no trim), as allocators of "
    "training and serving programs do."
)
#: The name of a kernel without work on the grid of phasor's, for cases of decode.
EMPTY = "empty kernel"
# bytes written to push everything out of a GPU's cache. That takes an H100 0.7 ms, in which the
# host gets ahead, also by a training step, which takes it 0.1 ms
_FLUSH = 2**31
_NO_GPU = (
    f"--device cuda needs a CUDA device, and torch {torch.__version__} sees none. Where there is "
    "one, install torch for CUDA; make bench measures this machine's processor."
)
_WARMED = 3  # calls on another stream before a capture, as torch asks for


def restart_with_kept_memory() -> None:
    """Run this program again, once: the allocator and OpenMP read their settings at the start."""
    if "PHASOR_BENCH" not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | _ENVIRONMENT)


def alone(function: Callable[..., T], *arguments: Any) -> T:
    """What a function of a module returns in a new process, with malloc as it comes."""
    environment = {name: v for name, v in os.environ.items() if not name.startswith("MALLOC_")}
    pool = ProcessPoolExecutor(1, get_context("spawn"))
    with patch.dict(os.environ, environment, clear=True), pool:
        return pool.submit(function, *arguments).result()


def peak_rise(call: Call) -> int:
    """Bytes by which one call raises this process's resident memory (Linux).

    The same call has to be made before, for what is compiled and loaded once. Not `getrusage`: a
    child's peak begins at its parent's.
    """

    def peak() -> int:
        status = Path("/proc/self/status").read_text("ascii")
        return 1024 * int(status.partition("VmHWM:")[2].split()[0])

    Path("/proc/self/clear_refs").write_text("5", "ascii")
    before = peak()
    result = call()  # kept until the peak is read
    after = peak()
    del result
    return after - before


class Cpu:
    """This machine's processor: calls have done their work when they return, and no replays."""

    name = kind = "cpu"
    where = torch.device("cpu")
    # query and key, of which one that a model's last operation leaves in some cache is timed warm
    warm_bytes = 2**24
    seconds = 4.0  # for the calls of a case
    rounds = 5, 200  # at least, and at most

    def about(self) -> str:
        """The machine, for the head of a page."""
        info = Path("/proc/cpuinfo")
        match = re.search("model name\t: (.*)", info.read_text("utf-8") if info.exists() else "")
        return (
            f"{match[1] if match else platform.machine()} ({os.cpu_count()} processors, "
            f"{torch.get_num_threads()} threads used, {(*cpu.paths(), 'eager')[0]} path), "
            f"{platform.system()} {platform.release()} {platform.machine()}. {_ALLOCATOR} "
            f"Load average before: {os.getloadavg()[0]:.1f}"
        )

    def time(self, call: Call, repeats: int, *, warm: bool) -> float:
        """Seconds of one of so many calls; each starts with an empty cache unless ``warm``."""
        return by_clock(call, repeats)

    def capturer(self) -> Callable[[Call, int], Call] | None:
        """A function that makes of a call a graph of so many, without the host's part in any."""
        return None

    def references(self, case: Case, positions: Tensor) -> Mapping[str, Call]:
        """More calls to compare with."""
        return {}

    def sized(self, case: Case) -> Case:
        """The case as it is measured here."""
        return case

    def forget(self) -> None:
        """Give back the memory of what was measured."""


class Cuda(Cpu):
    """The current CUDA device: time by events on its own clock, call by call or replayed."""

    kind = "cuda"
    seconds = 1.0

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            print(_NO_GPU, file=sys.stderr)
            sys.exit(2)
        self.where = torch.device("cuda", torch.cuda.current_device())
        self._properties = torch.cuda.get_device_properties(self.where)
        self.warm_bytes = self._properties.L2_cache_size // 2
        self.name = "gpu-" + re.sub(r"[^a-z0-9]+", "-", self._properties.name.lower()).strip("-")
        self._flushed = torch.empty(_FLUSH, dtype=torch.uint8, device=self.where)

    def about(self) -> str:
        path, card = Path("/proc/driver/nvidia/version"), self._properties
        driver = re.search(r"\d+\.\d+(\.\d+)?", path.read_text("ascii") if path.exists() else "")
        return (
            f"{card.name} ({card.total_memory / 2**30:.0f} GB, "
            f"{card.L2_cache_size / 2**20:.0f} MB of L2 cache, CUDA {torch.version.cuda}, driver "
            f"{driver[0] if driver else 'unknown'})"
        )

    def time(self, call: Call, repeats: int, *, warm: bool) -> float:
        turns, calls = (1, repeats) if warm else (repeats, 1)
        times: list[tuple[Any, Any]] = []
        for _ in range(turns):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            times.append((start, end))
            if not warm:
                self._flushed.zero_()
            start.record()
            for _ in range(calls):
                call()
            end.record()
        torch.cuda.synchronize()
        return sum(start.elapsed_time(end) for start, end in times) / 1e3 / repeats

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
            return lambda graphs=(first, graph): graphs[1].replay()

        return capture

    def references(self, case: Case, positions: Tensor) -> Mapping[str, Call]:
        if case.seq > 1:
            return {}
        q, launch = case.tensors(device=positions.device)[0], empty_launch(case, positions)
        return {EMPTY: lambda: launch(q)}

    def forget(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()


class Rehearsal(Cuda):
    """A run for a GPU without one: Triton interprets, tokens are few, and no time means anything.

    What it shows is that a command has everything it needs.
    """

    name = "gpu-rehearsal"
    warm_bytes = 0
    seconds, rounds = 0.0, (2, 2)

    def __init__(self) -> None:
        """Nothing is asked of a GPU."""

    def about(self) -> str:
        return f"no GPU: a rehearsal, in which no time means anything. {super(Cuda, self).about()}"

    def time(self, call: Call, repeats: int, *, warm: bool) -> float:
        return by_clock(call, 1)

    def capturer(self) -> Callable[[Call, int], Call]:
        return lambda call, times: call

    def sized(self, case: Case) -> Case:
        return few(case)


def empty_launch(case: Case, positions: Tensor) -> Callable[[Tensor], object]:
    """A kernel that does nothing, on as many programs as phasor's takes in place."""
    import triton

    from phasor.torch import Rotation
    from phasor.torch._operator.arguments import Turn
    from phasor.torch._operator.triton import make_plan

    @triton.jit
    def nothing(x):
        """Return at once."""

    tensors, rotation = (
        case.tensors(device=positions.device),
        Rotation.at(positions, case.rope("half")),
    )
    rows = rotation.cos, rotation.sin
    plan = make_plan(Turn(tensors, *rows, "half", "half", rotation.rotary_start), tensors)
    assert plan is not None, "a step of decoding is one launch"
    return nothing[(plan.programs, 1, 1)]


def host_timer(call: Call, repeats: int) -> float:
    """Seconds of the host for a call, without waiting for what it started on a device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # a queue that is full would make the host wait
    return by_clock(call, min(repeats, 200))
