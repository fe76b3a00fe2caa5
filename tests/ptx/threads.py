"""Threads of some blocks, as instructions find them: registers, and where each thread is."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .arithmetic import TYPES
from .memory import Memory
from .program import Operand, Program

WARP = 32
#: Bytes of a register, by the letters of its name; a predicate has none.
_SIZES = {"%p": 0, "%rs": 2, "%r": 4, "%rd": 8}


class Threads:
    """All threads of ``blocks``, of a launch of so many ``programs``.

    Registers are arrays with a number for each thread, unsigned; what was never written is garbage,
    in registers and in shared memory.
    """

    def __init__(
        self,
        program: Program,
        blocks: range,
        programs: int,
        shared: int,
        arguments: bytes,
        memory: Memory,
        garbage: np.random.Generator,
    ) -> None:
        self.program, self.memory, self.garbage = program, memory, garbage
        self.arguments = np.frombuffer(arguments, np.uint8)
        self.count = len(blocks) * program.threads
        self.lane = np.arange(self.count)
        self.block = self.lane // program.threads
        self.thread = blocks.start * program.threads + self.lane
        self.at = np.zeros(self.count, np.int64)
        self.waits = np.zeros(self.count, np.bool_)
        self.barriers = np.zeros(len(blocks), np.int32)
        self.shared = garbage.integers(0, 256, (len(blocks), shared), np.uint8)
        self._registers: dict[str, NDArray] = {
            "%tid.x": (self.lane % program.threads).astype(np.uint32),
            "%ctaid.x": (blocks.start + self.block).astype(np.uint32),
            "%nctaid.x": np.full(self.count, programs, np.uint32),
            "%ntid.x": np.full(self.count, program.threads, np.uint32),
        }

    def value(self, operand: Operand, kind: str) -> NDArray:
        """A number of ``kind`` for each thread, of which a wider register has the lowest bits."""
        wanted = np.dtype(TYPES[kind])
        if operand[0] == "%":
            bits = self._register(operand)
        elif operand.startswith(("0f", "0d")):
            bits = np.array(int(operand[2:], 16), f"u{wanted.itemsize}")
        elif operand in self.program.parameters:
            bits = np.array(self.program.parameters[operand][0], np.uint64)
        elif operand == "global_smem":
            bits = np.array(0, np.uint64)
        elif wanted == np.bool_:
            bits = np.array(int(operand) != 0)
        else:
            number = int(operand.removesuffix("U"), 0)
            bits = np.array(number % (1 << 8 * wanted.itemsize), f"u{wanted.itemsize}")
        if bits.dtype.itemsize > wanted.itemsize:
            bits = bits.astype(f"u{wanted.itemsize}")
        return np.broadcast_to(bits.view(wanted), self.count)

    def keep(self, target: Operand, value: NDArray, active: NDArray) -> None:
        """Write a register of the active threads; ``_`` is none."""
        if target == "_":
            return
        size = self._size(target)
        if size:
            value = np.ascontiguousarray(value).view(f"u{value.dtype.itemsize}").astype(f"u{size}")
        before = value if active.all() else self._register(target)
        self._registers[target] = np.where(active, value, before)

    def address(self, operand: Operand, kind: str) -> NDArray:
        """Of ``register + offset``."""
        base, _, offset = operand.partition("+")
        start = self.value(base.strip(), kind)
        return start + start.dtype.type(int(offset or 0) % (1 << 8 * start.itemsize))

    def epoch(self, lanes: NDArray) -> NDArray:
        """How many barriers the blocks of these lanes have met at."""
        return self.barriers[self.block[lanes]]

    def _size(self, register: str) -> int:
        # registers that a piece of assembly declares for itself are of 32 bits
        return _SIZES.get(register.rstrip("0123456789"), 4)

    def _register(self, name: str) -> NDArray:
        if name not in self._registers:
            size = self._size(name)
            raw: Any = self.garbage.integers(0, 256, self.count * max(size, 1), np.uint8)
            self._registers[name] = raw.view(f"u{size}") if size else raw > 127
        return self._registers[name]
