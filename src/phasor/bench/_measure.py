"""One case: every contender checked against the truth, then timed next to the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from phasor.bench._case import Case, Contender, UnableError
from phasor.bench._gate import tolerance, worst
from phasor.bench._timing import Call, Spread, interleave, spread

#: What contenders are compared with: both move the case's bytes and compute next to nothing.
COPY, MULTIPLY = "copy_", "in-place multiply"
_CACHED = 2**24  # bytes of query and key that a model's last operation leaves in some cache


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What came of a case.

    Attributes:
        case: Which.
        seconds: Of one call, one number for each round, by contender; the references are among
            them.
        replays: The same of a call that is replayed from a CUDA graph; empty on a CPU.
        errors: Distance from the truth by contender, as a part of the pair's length.
        refused: Contenders that came too far from it, and were not timed.
        left_out: Contenders that cannot do the case, and why.
        saved: Bytes kept for the backward pass by contender.
    """

    case: Case
    seconds: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    replays: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    errors: dict[str, float] = field(default_factory=dict[str, float])
    refused: list[str] = field(default_factory=list[str])
    left_out: dict[str, str] = field(default_factory=dict[str, str])
    saved: dict[str, int] = field(default_factory=dict[str, int])

    def ratio(self, contender: str, to: str = COPY) -> Spread:
        """Quartiles, over the rounds, of one contender's time divided by another's."""
        pairs = zip(self.seconds[contender], self.seconds[to], strict=True)
        return spread([a / b for a, b in pairs])

    def replayed(self) -> Measured:
        """The same with the times of the replays in place of those of the calls."""
        return replace(self, seconds=self.replays, replays={})

    def as_plain(self) -> dict[str, Any]:
        """Everything as JSON values; times to a nanosecond, which is finer than the clock."""

        def rounded(times: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
            return {name: [round(t, 9) for t in each] for name, each in times.items()}

        return asdict(self) | {"seconds": rounded(self.seconds), "replays": rounded(self.replays)}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Measured:
        """What `as_plain` wrote."""
        values = dict(plain)
        given = values.pop("case")
        for name in ("sections", "rows", "documents"):
            given = given | {name: None if given[name] is None else tuple(given[name])}
        return cls(case=Case(**given), **values)


def measure(case: Case, contenders: Sequence[Contender], *, seconds: float) -> Measured:
    """Check every contender against the truth, and time those that come near enough."""
    found, calls = admitted(case, contenders)
    found.seconds.update(interleave(calls, seconds=seconds, warm=case.size <= _CACHED))
    return found


def admitted(
    case: Case, contenders: Sequence[Contender], device: torch.device | str = "cpu"
) -> tuple[Measured, dict[str, Call]]:
    """What the gate says of every contender, and the calls of those it lets through.

    The references are the first of the calls.
    """
    found = Measured(case=case)
    positions = case.positions(device)
    inputs, scratch, target = (case.tensors(device=device) for _ in range(3))
    grads = case.tensors(1, device) if case.backward else ()
    scratch_grads = case.tensors(1, device) if case.backward else ()
    calls = _references(case, inputs, scratch, target)
    for contender in contenders:
        key, places = contender.key, positions + contender.shift
        operands = (*scratch, *scratch_grads) if contender.in_place else (*inputs, *grads)
        for x, y in zip((*scratch, *scratch_grads), (*inputs, *grads), strict=True):
            x.copy_(y)
        try:
            call, saved = _prepared(contender, case, places, operands)
            came = call()
        except contender.may_raise as reason:
            found.left_out[key] = _said(reason)
            continue
        found.errors[key] = worst(contender, case, places, (*inputs, *grads), came)
        del came
        if not found.errors[key] <= tolerance(case, contender):
            found.refused.append(key)
            continue
        calls[key] = call
        if case.backward:
            found.saved[key] = saved()
    return found, calls


def _said(reason: Exception) -> str:
    if isinstance(reason, UnableError):
        return str(reason)
    lines = str(reason).strip().splitlines()
    return f"{type(reason).__name__}: {lines[0][:160] if lines else 'no message'}"


def _references(
    case: Case, inputs: Sequence[Tensor], scratch: Sequence[Tensor], target: Sequence[Tensor]
) -> dict[str, Call]:
    """`copy_`, and a multiplication of the slice that turns; twice each where gradients are asked.

    The factor is -1, which no repetition lets overflow, and bfloat16 is multiplied as float32 of
    the same bytes, because torch multiplies bfloat16 more slowly than memory delivers it.
    """
    turned = [x[..., : case.rotary_dim or case.head_dim].view(torch.float32) for x in scratch]
    passes = 2 if case.backward else 1

    def copy() -> None:
        for _ in range(passes):
            for x, y in zip(target, inputs, strict=True):
                x.copy_(y)

    def multiply() -> None:
        for _ in range(passes):
            for x in turned:
                x.mul_(-1.0)

    return {COPY: copy, MULTIPLY: multiply}


def _prepared(
    contender: Contender, case: Case, positions: Tensor, operands: Sequence[Tensor]
) -> tuple[Callable[[], Sequence[Tensor]], Callable[[], int]]:
    """What is timed, and a function that says how many bytes its backward pass keeps.

    Args:
        contender: Who.
        case: What is asked.
        positions: Of its tokens.
        operands: Query and key, and the gradients of the results if there are any.
    """
    if contender.norm and not case.norm:
        raise UnableError("the case has no norm")
    if case.backward and contender.in_place and not contender.trains_in_place:
        raise UnableError("a gradient needs a new output")
    rotation = contender.build(case, positions)
    q, k, *grads = (x.transpose(1, 2) if contender.heads_first else x for x in operands)
    weights = case.weights(positions.device) if contender.norm else ()
    if not case.backward:
        return (lambda: rotation(q, k, *weights)), lambda: 0
    leaves = [x.detach().requires_grad_() for x in (q, k, *weights)]

    def step() -> Sequence[Tensor]:
        ys = tuple(rotation(*leaves))
        return *ys, *torch.autograd.grad(ys, leaves, grads)

    def saved() -> int:
        kept: dict[int, int] = {}

        def pack(x: Tensor) -> Tensor:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            ys = rotation(*leaves)
        del ys
        return sum(kept.values())

    return step, saved
