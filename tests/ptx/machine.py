"""Runs a `Program` for every thread of a launch.

Threads whose next instruction comes first go first, so that those which parted meet again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from .instructions import PERFORM, compute
from .memory import AccessError, Memory
from .program import Instruction, Program
from .threads import Threads

_AT_ONCE = 16384  # threads


def launch(
    program: Program,
    programs: int,
    shared: int,
    arguments: bytes,
    tensors: Sequence[tuple[int, int]],
    seed: int = 0,
) -> Counter[tuple[str, int]]:
    """Run it on memory ``tensors``, pairs of an address and a size.

    Args:
        program: What every thread runs.
        programs: How many blocks of threads, which Triton calls programs.
        shared: Bytes of shared memory of each.
        arguments: Their bytes, each where ``program.parameters`` has it.
        tensors: All memory there is.
        seed: Of the garbage that is found where nothing was written.

    Returns:
        The bytes that were moved: see `Memory.traffic`.

    Raises:
        AccessError: Where a GPU would stop, or do something else each time.
    """
    memory = Memory(tensors, program.threads)
    garbage = np.random.default_rng(seed)
    step = max(1, _AT_ONCE // program.threads)
    for first in range(0, programs, step):
        blocks = range(first, min(programs, first + step))
        with np.errstate(all="ignore"):
            run(Threads(program, blocks, programs, shared, arguments, memory, garbage))
    return memory.traffic


def run(threads: Threads) -> None:
    """Until all have left."""
    instructions, leaders = threads.program.instructions, threads.program.leaders
    following = dict(pairwise(leaders))
    end = len(instructions)
    while np.any(threads.at < end):
        ready = (threads.at < end) & ~threads.waits
        if not np.any(ready):
            raise AccessError("threads wait at a barrier for others, which wait at another one")
        now = int(threads.at[ready].min())
        active = ready & (threads.at == now)
        threads.at[active] = following[now]
        for instruction in instructions[now : following[now]]:
            _step(threads, instruction, active)


def _step(threads: Threads, given: Instruction, active: NDArray) -> None:
    if given.guard:
        holds = threads.value(given.guard.lstrip("!"), "pred")
        active = active & (holds != given.guard.startswith("!"))
        if not active.any():
            return
    try:
        PERFORM.get(given.form, compute)(threads, given, active)
    except AccessError as fault:
        raise AccessError(f"{fault}: {given}") from None
