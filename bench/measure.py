"""One case: every contender checked against the truth, then timed next to the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from cases import Case
from device import Cpu, host_timer
from numpy.typing import NDArray
from timing import Call, Times, interleave
from torch import Tensor

from phasor.angles import cos_sin
from phasor.pairings import Pairing, slices
from phasor.rope import Rope

#: What contenders are compared with: both move the case's bytes and compute next to nothing.
COPY, MULTIPLY = "copy_", "in-place multiply"
REPLAYED = 20  # calls in a graph, where one is shorter than the launch of its graph
_NEAR = 2**15
_ROUNDING = 2.0**-9  # of a number to bfloat16
#: Largest error of a contender that is timed, as a part of the pair's length. Float32 angles are
#: off by 2**-23 of themselves, and most cases stand below position 2**15; rows and products rounded
#: to bfloat16 add three roundings to each of two coordinates.
TOLERANCE = {"float32": 2.0**-8, "bfloat16": 2.0**-8 + 3 * 2**0.5 * _ROUNDING}
_CHECKED = 256  # tokens of a sequence that the gate looks at, first and last among them
#: From a query and a key to both turned.
Rotation = Callable[..., Sequence[Tensor]]
#: From a case, its embedding and positions what is timed, all tables made beforehand; it raises
#: `UnableError` for a case it cannot do, and ImportError where its package is not installed.
Build = Callable[[Case, Rope, Tensor], Rotation]


class UnableError(Exception):
    """Why a contender cannot do a case."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A way to rotate a query and a key."""

    name: str  # whose, and which form
    pairing: Pairing
    build: Build
    in_place: bool = False  # it writes its arguments
    trains_in_place: bool = False  # it differentiates although it writes its arguments
    heads_first: bool = False  # it wants [batch, heads, seq, head_dim]
    pairing_out: Pairing | None = None  # of its results, where it differs
    shift: int = 0  # added to every position

    @property
    def key(self) -> str:
        """Its name among all."""
        return f"{self.name}, {self.pairing}"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The results of a case: lists and dicts by contender, the references among them."""

    case: Case
    seconds: Times = field(default_factory=Times)
    replays: Times = field(default_factory=Times)  # the same from a CUDA graph
    errors: dict[str, float] = field(default_factory=dict)  # as a part of the pair's length
    refused: list[str] = field(default_factory=list)  # too far from the truth, and not timed
    left_out: dict[str, str] = field(default_factory=dict)  # unable, and why

    def replayed(self) -> Measured:
        """The same with the times of the replays in place of those of the calls."""
        return replace(self, seconds=self.replays, replays=Times())

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Measured:
        """What ``asdict`` made JSON values of, which have lists in place of tuples."""
        case = {name: tuple(v) if isinstance(v, list) else v for name, v in plain["case"].items()}
        times = {name: Times(plain[name]) for name in ("seconds", "replays")}
        return cls(**{**plain, "case": Case(**case), **times})


def measure(
    case: Case, contenders: Sequence[Contender], *, seconds: float, device: Cpu | None = None
) -> Measured:
    """Check every contender against the truth; time the calls, and the replays where there are any.

    ``seconds`` are spent on the calls, and again on the replays.
    """
    device = device or Cpu()
    measured, calls = admit(case, contenders, device.where)
    calls = {**device.references(case, case.positions(device.where)), **calls}
    warm, host = case.size <= device.warm_bytes, case.asks == "host"
    timed = host_timer if host else partial(device.time, warm=warm)
    time_calls = partial(interleave, seconds=seconds, warm=warm, rounds=device.rounds, timed=timed)
    measured.seconds.update(time_calls(calls))
    capture = device.capturer()
    if capture is None or host:
        return measured
    times = REPLAYED if warm else 1
    replays: dict[str, Call] = {}
    for name, call in calls.items():
        try:
            replays[name] = capture(call, times)
        except Exception as reason:
            measured.left_out[f"{name}, as a graph"] = reason_text(reason)
    samples = time_calls(replays)
    measured.replays.update(
        {name: [round(t / times, 9) for t in ts] for name, ts in samples.items()}
    )
    return measured


def admit(
    case: Case, contenders: Sequence[Contender], device: torch.device | str = "cpu"
) -> tuple[Measured, dict[str, Call]]:
    """What the gate says of every contender, and the calls of those it lets through.

    The references are the first of the calls.
    """
    measured = Measured(case=case)
    positions = case.positions(device)
    tensors = [case.tensors(device=device) for _ in range(3)]
    calls = references(case, *tensors)
    grads = [case.tensors(1, device) if case.backward else () for _ in range(2)]
    arguments, scratch = ((*xs, *dxs) for xs, dxs in zip(tensors, grads, strict=False))
    for contender in contenders:
        key, shifted = contender.key, positions + contender.shift
        rope = case.rope(contender.pairing, contender.pairing_out)
        for x, y in zip(scratch, arguments, strict=True):
            x.copy_(y)
        try:
            operands = scratch if contender.in_place else arguments
            call = _prepare(contender, case, rope, shifted, operands)
            results = call()
        except Exception as reason:
            # another package's interface may have changed; phasor's own failures are not forgiven
            unable = isinstance(reason, (UnableError, torch.OutOfMemoryError))
            if contender.name.startswith("phasor") and not unable:
                raise
            measured.left_out[key] = reason_text(reason)
            continue
        if contender.heads_first:
            results = [x.transpose(1, 2) if x.dim() == 4 else x for x in results]
        measured.errors[key] = worst_error(case, rope, shifted, arguments, results)
        del results
        if not measured.errors[key] <= tolerance(case):
            measured.refused.append(key)
            continue
        calls[key] = call
    return measured, calls


def reason_text(reason: Exception) -> str:
    """What an exception says, in short."""
    if isinstance(reason, ImportError):
        return f"not installed ({reason.name})"
    first_line, *_ = [*str(reason).strip().splitlines(), "no message"]
    kind = "" if isinstance(reason, UnableError) else f"{type(reason).__name__}: "
    return kind + first_line[:160]


def references(
    case: Case, inputs: Sequence[Tensor], scratch: Sequence[Tensor], target: Sequence[Tensor]
) -> dict[str, Call]:
    """`copy_`, and a multiplication of the slice that turns; twice each where gradients are asked.

    The factor is -1, which no repetition lets overflow, and bfloat16 is multiplied as float32 of
    the same bytes, because torch multiplies bfloat16 more slowly than memory delivers it.
    """
    passes = 2 if case.backward else 1
    rotated = [x[..., : case.rotary_dim or case.head_dim].view(torch.float32) for x in scratch]
    pairs = [*zip(target, inputs, strict=True)]
    return {
        COPY: lambda: [x.copy_(y) for x, y in passes * pairs],
        MULTIPLY: lambda: [x.mul_(-1.0) for x in passes * rotated],
    }


def _prepare(
    contender: Contender, case: Case, rope: Rope, positions: Tensor, operands: Sequence[Tensor]
) -> Callable[[], Sequence[Tensor]]:
    """What is timed, and returns new query and key, and their gradients if they are asked for."""
    if case.backward and contender.in_place and not contender.trains_in_place:
        raise UnableError("a gradient needs a new output")
    rotation = contender.build(case, rope, positions)
    q, k, *grads = (x.transpose(1, 2) if contender.heads_first else x for x in operands)
    if not case.backward:
        return lambda: rotation(q, k)
    leaves = [x.detach().requires_grad_() for x in (q, k)]

    def step() -> Sequence[Tensor]:
        ys = tuple(rotation(*leaves))
        return *ys, *torch.autograd.grad(ys, leaves, grads)

    return step


# The gate: what a contender must come near to, in float64 and on the CPU


def tolerance(case: Case) -> float:
    """`TOLERANCE`, with the float32 angles of positions farther out."""
    furthest = int(case.positions().max())
    return TOLERANCE[case.dtype] + max(0, furthest - _NEAR) * 2.0**-23


def worst_error(
    case: Case, rope: Rope, positions: Tensor, inputs: Sequence[Tensor], results: Sequence[Tensor]
) -> float:
    """Largest error of the results, at tokens spread evenly.

    ``inputs`` are query and key, and the gradients of the results if there are any; ``results``
    those of both, in that order, and what follows is not looked at.
    """
    tokens = torch.linspace(0, case.seq - 1, min(case.seq, _CHECKED)).long().to(positions.device)
    checked = positions if case.seq == 1 else positions[tokens]
    return max(
        rotation_error(x, y, tokens, checked, rope, inverse=i >= 2)
        for i, (x, y) in enumerate(zip(inputs, results, strict=False))
    )


def rotation_error(
    x: Tensor, y: Tensor, tokens: Tensor, positions: Tensor, rope: Rope, *, inverse: bool
) -> float:
    """Largest distance of ``y`` from ``x`` rotated in float64, in lengths of the pair.

    Infinite where a coordinate outside the rotated slice changed, or a result is not finite or of
    another shape or dtype.
    """
    if y.shape != x.shape or y.dtype != x.dtype:
        return float("inf")
    x, y = x[:, tokens], y[:, tokens]
    if not torch.equal(x[..., rope.rotary_dim :], y[..., rope.rotary_dim :]):
        return float("inf")
    cos, sin = cos_sin(positions.cpu().numpy(), rope)
    turns = (cos + (-1j if inverse else 1j) * sin)[..., None, :]
    pairings = rope.pairing, rope.output_pairing
    numbers: list[NDArray[np.complex128]] = []
    for values, pairing in zip((x, y), pairings[::-1] if inverse else pairings, strict=True):
        rotated = values[..., : rope.rotary_dim].detach().double().cpu().numpy()
        first, second = slices(pairing, rope.rotary_dim // 2)
        numbers.append(rotated[..., first] + 1j * rotated[..., second])
    z, w = numbers
    error = np.abs(w - z * turns) / np.maximum(np.abs(z), np.finfo(np.float32).tiny)
    return float(error.max()) if np.isfinite(error).all() else float("inf")
