"""One case: every contender checked against the truth, then timed next to the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phasor.angles import cos_sin
from phasor.bench._case import Case, Contender, UnableError
from phasor.bench._timing import Call, Spread, interleave, spread
from phasor.spec import Pairing, Rope

#: Largest error of a contender that is timed, as a part of the pair's length. Float32 angles are
#: off by 2**-23 of themselves, and no case of the benchmark stands beyond position 2**15; rows and
#: products rounded to bfloat16 add three roundings to each of two coordinates.
TOLERANCE = {"float32": 2.0**-8, "bfloat16": 2.0**-8 + 3 * 2**0.5 * 2.0**-9}
#: What contenders are compared with: both move the case's bytes and compute next to nothing.
COPY, MULTIPLY = "copy_", "in-place multiply"
_CACHED = 2**24  # bytes of query and key that a model's last operation leaves in some cache
_CHECKED = 256  # tokens of a sequence that the gate looks at, first and last among them


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What came of a case.

    Attributes:
        case: Which.
        seconds: Of one call, one number for each round, by contender; the references are among
            them.
        errors: Distance from the truth by contender, as a part of the pair's length.
        refused: Contenders that came too far from it, and were not timed.
        left_out: Contenders that cannot do the case, and why.
        saved: Bytes kept for the backward pass by contender.
    """

    case: Case
    seconds: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    errors: dict[str, float] = field(default_factory=dict[str, float])
    refused: list[str] = field(default_factory=list[str])
    left_out: dict[str, str] = field(default_factory=dict[str, str])
    saved: dict[str, int] = field(default_factory=dict[str, int])

    def ratio(self, contender: str, to: str = COPY) -> Spread:
        """Quartiles, over the rounds, of one contender's time divided by another's."""
        pairs = zip(self.seconds[contender], self.seconds[to], strict=True)
        return spread([a / b for a, b in pairs])

    def as_plain(self) -> dict[str, Any]:
        """Everything as JSON values; times to a nanosecond, which is finer than the clock."""
        seconds = {name: [round(t, 9) for t in times] for name, times in self.seconds.items()}
        return asdict(self) | {"seconds": seconds}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Measured:
        """What `as_plain` wrote."""
        values = dict(plain)
        given = values.pop("case")
        for name in ("sections", "rows"):
            given = given | {name: None if given[name] is None else tuple(given[name])}
        return cls(case=Case(**given), **values)


def error(given: Tensor, came: Tensor, places: Tensor, rope: Rope, *, inverse: bool) -> float:
    """Largest distance of ``came`` from ``given`` rotated in float64, in lengths of the pair.

    Infinite where a coordinate outside the rotated slice changed, or a result is not finite.
    """
    untouched = slice(rope.rotary_dim, None)
    if not torch.equal(given[..., untouched], came[..., untouched]):
        return float("inf")
    cos, sin = cos_sin(rope, places.numpy())
    turns = (cos - 1j * sin if inverse else cos + 1j * sin)[..., None, :]
    before, after = rope.pairing, rope.output_pairing
    if inverse:
        before, after = after, before
    z = _pairs(given[..., : rope.rotary_dim], before)
    w = _pairs(came[..., : rope.rotary_dim], after)
    off = np.abs(w - z * turns) / np.maximum(np.abs(z), np.finfo(np.float32).tiny)
    return float(off.max()) if np.isfinite(off).all() else float("inf")


def _pairs(x: Tensor, pairing: Pairing) -> NDArray[np.complex128]:
    wide = x.detach().double().numpy()
    half = wide.shape[-1] // 2
    if pairing == "half":
        return wide[..., :half] + 1j * wide[..., half:]
    return wide[..., ::2] + 1j * wide[..., 1::2]


def measure(case: Case, contenders: Sequence[Contender], *, seconds: float) -> Measured:
    """Check every contender against the truth, and time those that come near enough."""
    found = Measured(case=case)
    positions = case.positions()
    inputs, scratch, target = case.tensors(), case.tensors(), case.tensors()
    grads = case.tensors(seed=1) if case.backward else ()
    calls = _references(case, inputs, scratch, target)
    for contender in contenders:
        key = contender.key
        try:
            call, saved = _prepared(
                contender,
                case,
                positions + contender.shift,
                scratch if contender.in_place else inputs,
                grads,
            )
        except UnableError as reason:
            found.left_out[key] = str(reason)
            continue
        for x, y in zip(scratch, inputs, strict=True):
            x.copy_(y)
        found.errors[key] = _worst(
            contender, case, positions + contender.shift, (*inputs, *grads), call()
        )
        if not found.errors[key] <= TOLERANCE[case.dtype]:
            found.refused.append(key)
            continue
        calls[key] = call
        if case.backward:
            found.saved[key] = saved()
    size = sum(x.numel() * x.element_size() for x in inputs)
    found.seconds.update(interleave(calls, seconds=seconds, warm=size <= _CACHED))
    return found


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
    contender: Contender,
    case: Case,
    positions: Tensor,
    tensors: Sequence[Tensor],
    grads: Sequence[Tensor],
) -> tuple[Callable[[], Sequence[Tensor]], Callable[[], int]]:
    """What is timed, and a function that says how many bytes its backward pass keeps."""
    if case.backward and contender.in_place:
        raise UnableError("a gradient needs a new output")
    rotation = contender.build(case, positions)
    views = [x.transpose(1, 2) if contender.heads_first else x for x in (*tensors, *grads)]
    q, k = views[:2]
    if not case.backward:
        return (lambda: rotation(q, k)), lambda: 0
    leaves = q.detach().requires_grad_(), k.detach().requires_grad_()

    def step() -> Sequence[Tensor]:
        ys = tuple(rotation(*leaves))
        return *ys, *torch.autograd.grad(ys, leaves, views[2:])

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


def _worst(
    contender: Contender,
    case: Case,
    positions: Tensor,
    given: Sequence[Tensor],
    came: Sequence[Tensor],
) -> float:
    """Largest `error` of new query and key, then of their gradients, at tokens spread evenly."""
    tokens = torch.linspace(0, case.seq - 1, min(case.seq, _CHECKED)).long()
    places = positions if case.seq == 1 else positions[tokens]
    rope = case.rope(contender.pairing, contender.pairing_out)
    worst = 0.0
    for i, (x, y) in enumerate(zip(given, came, strict=True)):
        y = y.transpose(1, 2) if contender.heads_first else y
        if y.shape != x.shape or y.dtype != x.dtype:
            return float("inf")
        worst = max(worst, error(x[:, tokens], y[:, tokens], places, rope, inverse=i >= 2))
    return worst
