"""Random calls on every implementation of this machine, with watched memory around every tensor.

Results are compared with complex numbers in double precision, whose angles are
``phasor.angles.cos_sin``'s (`test_angles` holds those against 60 digits). Every case has a seed of
its own, which a failure names: ``try_case(seed)`` runs it again.
"""

from __future__ import annotations

import random
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from phasor import Rope, TensorError
from phasor.angles import cos_sin
from phasor.axes import Alternating, Axial, InterleavedSections, Sectioned
from phasor.scaling import Linear
from phasor.torch import rotate, rotate_, rotate_qk, rotate_qk_
from phasor.torch._operator import cpu

from ...native.watched import Memory, duplicated, in_memory, placed, reach
from ..torch_arrays import DTYPES, excess_by, implementations, row_error, run_on
from ..torch_cases import turn, turn_

ORIGINAL_EMPTY_LIKE = torch.empty_like
PAIRINGS = ["half", "interleaved"]
# whole registers of every width, those with a tail, and tails alone
PAIRS = [1, 2, 3, 5, 7, 8, 12, 15, 16, 17, 24, 31, 32, 33, 48, 64, 65, 80, 96, 128]
# a large rope is worth more than one case
CASES_A_ROPE = 64


@lru_cache(maxsize=4)
def rope_of(seed: int) -> Rope:
    """Of any width, layout, pairing and axes."""
    rng = random.Random(f"rope {seed}")
    pairs = rng.choice(PAIRS)
    start = rng.choice([0, 0, rng.randrange(1, 40), 64])
    rest = rng.choice([0, 0, rng.randrange(1, 40), 64])
    axes: Any = None
    if pairs >= 3 and rng.random() < 0.4:
        each = pairs // 3
        axes = rng.choice([Sectioned, InterleavedSections, Alternating, Axial])(
            (pairs - 2 * each, each, each)
        )
    return Rope(
        head_dim=start + 2 * pairs + rest,
        pairing=rng.choice(PAIRINGS),
        pairing_out=rng.choice([None, *PAIRINGS]),
        rotary_dim=2 * pairs,
        rotary_start=start,
        axes=axes,
        base=rng.choice([10.0, 10_000.0, 5e6]),
        scaling=rng.choice([None, Linear(factor=8.0)]),
        direction=rng.choice([1, -1]),
    )


def tokens_of(rng: random.Random) -> list[int]:
    """Leading dimensions: few, none, or enough for tiles, threads and prefetching."""
    if rng.random() < 0.08:
        return [rng.choice([1, 2]), rng.randrange(100, 400)]
    return [rng.choice([0, 1, 1, 2, 3, 5, 8]) if rng.random() < 0.5 else rng.randrange(1, 7)
            for _ in range(rng.choice([1, 1, 2, 2, 3, 4]))]  # fmt: skip


def broadcastable(rng: random.Random, lead: Sequence[int]) -> list[int]:
    """A shape that broadcasts to ``lead``."""
    kept = lead[rng.randrange(len(lead) + 1) :] if rng.random() < 0.5 else lead
    return [1 if rng.random() < 0.15 else n for n in kept]


def positions_of(rng: random.Random, shape: Sequence[int]) -> Tensor:
    """Positions of one size and one dtype: the base of a view, which `in_memory` lays out."""
    limit = 2 ** rng.choice([3, 10, 11, 20, 21, 31, 40, 40, 62])
    drawn = [rng.choice([rng.randrange(-limit + 1, limit), limit - 1, 0, 1])
             for _ in range(int(np.prod(shape)))]  # fmt: skip
    numbers = torch.tensor(drawn, dtype=torch.int64).reshape(tuple(shape))
    if rng.random() < 0.15 and limit <= 2**20:
        return numbers + torch.rand(numbers.shape, dtype=torch.float64)
    if limit <= 2**31 and rng.random() < 0.4:
        return numbers.to(torch.int16 if limit <= 2**11 and rng.random() < 0.3 else torch.int32)
    return numbers


class Case:
    """One random call: what it is given, what is right, and the memory to watch."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.rope = rope_of(seed // CASES_A_ROPE)
        self.in_place, self.inverse = rng.random() < 0.5, rng.random() < 0.4
        self.gain = rng.choice([1.0, 1.0, 0.7, -1.3])
        self.implementation = rng.choice(implementations())
        self.lead, heads = tokens_of(rng), rng.choice([1, 1, 2, 3, 4, 9, 16])
        if int(np.prod(self.lead)) * self.rope.head_dim > 50_000:
            heads = min(heads, 3)
        dtype = rng.choice(DTYPES)
        shape = [*self.lead, heads, self.rope.head_dim]
        # eager writes overlapping tensors as torch does: only the kernel refuses them
        free = not self.in_place or self.implementation in cpu.paths()
        memory, q, places = in_memory(rng, shape, dtype, free=free)
        self.xs, self.memories = [q], [memory]
        self.shared = self.in_place and duplicated(places)
        self.by_rows = rng.random() < 0.25
        if not self.by_rows and rng.random() < 0.5:
            shape[-2] = rng.choice([0, 1, 2, 3, heads])
            if free and rng.random() < 0.2 and q.numel():
                # a slice of what q is a slice of, or of its neighbourhood
                at = rng.choice([0, 1, q.stride(-2), q.stride(-2) * heads, rng.randrange(99)])
                room = (len(memory.bytes) - memory.lead) // dtype.itemsize
                if at + reach(shape, q.stride()) <= room:
                    k, more = memory.view(shape, q.stride(), dtype, at * dtype.itemsize)
                    if self.in_place:
                        self.shared = duplicated(np.concatenate((places, more)))
                    self.xs.append(k)
            else:
                other = rng.choice(DTYPES) if rng.random() < 0.15 else dtype
                second, k, more = in_memory(rng, shape, other, free=free)
                self.shared |= self.in_place and duplicated(more)
                self.xs.append(k)
                self.memories.append(second)
        if not self.in_place and rng.random() < 0.05:
            self.xs[0] = torch._neg_view(self.xs[0])
        self.given = [x.clone() for x in self.xs]
        self.outs: list[Memory] = []
        self.refused = False
        self._place()

    def _place(self) -> None:
        """Draw the angles: positions, or rows of cosines and sines."""
        rng, rope = self.rng, self.rope
        shape = broadcastable(rng, self.lead)
        if self.by_rows:
            self.gain, shape = 1.0, [*shape, rope.num_pairs]
            dtype = rng.choice([torch.float64, torch.float32])
            drawn = [in_memory(rng, shape, dtype, free=True) for _ in range(2)]
            self.angles = [tensor for _, tensor, _ in drawn]
            self.memories += [memory for memory, _, _ in drawn]
            cos, sin = (angle.clone().double().numpy() for angle in self.angles)
            self.rows, self.errors = cos + 1j * sin, [0.0] * len(self.xs)
            return
        if rope.axes.n_axes > 1:
            shape = [*shape, rope.axes.n_axes]
        numbers = positions_of(rng, shape)
        memory, positions = placed(rng, numbers)
        self.angles = [positions]
        self.memories.append(memory)
        cos, sin = cos_sin(numbers.numpy(), rope)
        self.rows = cos + 1j * sin
        self.errors = [row_error(x.dtype, numbers) for x in self.xs]

    def call(self) -> list[Tensor]:
        """Through the public verbs."""
        options: dict[str, Any] = {"inverse": self.inverse}
        options["backend"] = "cpu" if self.implementation in cpu.paths() else self.implementation
        if self.by_rows:
            options |= {"pairing": self.rope.pairing, "pairing_out": self.rope.pairing_out}
            options["rotary_start"] = self.rope.rotary_start
            verb: Any = turn_ if self.in_place else turn
            if options.pop("inverse"):
                # the transpose, which is what the rows are checked for
                cos, sin = self.angles
                pairing = options["pairing"]
                options["pairing"] = options["pairing_out"] or pairing
                options["pairing_out"] = pairing
                return [verb(self.xs[0], cos, -sin, **options)]
            return [verb(self.xs[0], *self.angles, **options)]
        options["gain"] = self.gain
        one: Any = rotate_ if self.in_place else rotate
        two: Any = rotate_qk_ if self.in_place else rotate_qk
        done = (one if len(self.xs) == 1 else two)(*self.xs, *self.angles, self.rope, **options)
        return [done] if len(self.xs) == 1 else list(done)

    def call_watched(self) -> list[Tensor] | None:
        """`call`, forbidden to touch what is not its own; None where it refuses shared memory."""
        for memory in self.memories:
            memory.forbid()
        try:
            return self.call()
        except TensorError as refusal:
            self.refused = self.in_place and "share memory" in str(refusal)
            if not self.refused:
                raise
            return None
        finally:
            for memory in [*self.memories, *self.outs]:
                memory.allow()

    def watched_empty_like(self, x: Tensor, **_: Any) -> Tensor:
        """`torch.empty_like`, in watched memory and full of what is not an answer."""
        like = ORIGINAL_EMPTY_LIKE(x)
        lead = self.rng.choice([64, 64, 64 + x.dtype.itemsize])
        memory = Memory(self.rng, max(like.numel(), 1) * x.dtype.itemsize, lead)
        out, _ = memory.view(like.shape, like.stride(), like.dtype)
        self.outs.append(memory)
        memory.forbid()
        return out

    def check(self, done: Sequence[Tensor]) -> None:
        """Right to within the bound, and not a byte beside it written."""
        pairing = (self.rope.pairing, self.rope.output_pairing)
        rows = self.rows.conj() if self.inverse else self.rows
        pairing = pairing[::-1] if self.inverse else pairing
        for y, x, error in zip(done, self.given, self.errors, strict=True):
            start = self.rope.rotary_start
            gain = 1 / self.gain if self.inverse else self.gain
            worst = excess_by(y, x, rows, pairing, start, gain=gain, error=error)
            assert worst <= 1, f"{worst:.3g} times the bound"
        written = len(self.memories) - len(self.angles)
        for i, memory in enumerate(self.memories):
            assert memory.unchanged(written=self.in_place and i < written), "bytes changed"
        assert all(memory.unchanged(written=True) for memory in self.outs), "bytes beside an output"

    def __str__(self) -> str:
        said = [f"{tuple(x.shape)} {x.stride()} {x.dtype}" for x in [*self.xs, *self.angles]]
        how = "in place" * self.in_place, "inverse" * self.inverse, f"gain {self.gain}"
        return f"{self.implementation} {', '.join(how)}: {'; '.join(said)}\n{self.rope}"


def try_case(seed: int) -> Case:
    """Run one case and check it."""
    case = Case(seed)
    try:
        with pytest.MonkeyPatch.context() as patch:
            if case.implementation in cpu.paths():
                run_on(case.implementation, patch)
            if not case.in_place:
                patch.setattr(torch, "empty_like", case.watched_empty_like)
            done = case.call_watched()
        if done is None:
            assert all(memory.unchanged(written=False) for memory in case.memories), "written"
        else:
            assert not (case.in_place and case.shared), "shared memory was written"
            assert case.in_place or len(case.outs) >= len(case.xs), "outputs were not watched"
            case.check(done)
    except Exception as error:
        raise AssertionError(f"case {seed}: {error}\n{case}") from error
    return case


def fuzz(first: int, seconds: float) -> None:
    """As many cases from the seed ``first`` on as there is time for, on one thread and on more.

    However slow the machine is, every implementation has its turn.
    """
    end = time.monotonic() + seconds
    ran: Counter[str] = Counter()
    refused, numbers, seed = 0, 0, first
    before = torch.get_num_threads()
    try:
        while time.monotonic() < end or set(ran) != set(implementations()):
            if seed % CASES_A_ROPE == 0 or seed == first:
                torch.set_num_threads(1 + seed // CASES_A_ROPE % 3)
            case = try_case(seed)
            ran[case.implementation] += 1
            refused += case.refused
            numbers += sum(x.numel() for x in case.xs)
            seed += 1
    finally:
        torch.set_num_threads(before)
    print(f"seeds {first} to {seed - 1}: {dict(ran)}, {refused} refused, {numbers} numbers")


def test_random_calls_are_right_and_keep_to_their_memory() -> None:
    """A second and a half of them, the same ones every day."""
    fuzz(0, 1.5)


@pytest.mark.slow
def test_many_more_random_calls_are_right(capsys: pytest.CaptureFixture[str]) -> None:
    """Others each time; the seeds are printed, and a failure names its own."""
    first = secrets.randbelow(2**40)
    with capsys.disabled():
        print()
        fuzz(first, 6.0)
