"""Cases of the benchmark say what they are, and its gate lets only right rotations be measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from .bench_files import (
    BENCH,
    COPY,
    MULTIPLY,
    SHAPES,
    TINY,
    admitted,
    contender,
    every_shape,
    spoilt,
)

CASES, TOLERANCE = BENCH.cases.CASES, BENCH.measure.TOLERANCE
ours = BENCH.contenders.ours


# cases


@every_shape
def test_a_case_makes_what_it_says(case: Any) -> None:
    """Shapes, dtypes, memory, positions, and the same numbers again."""
    q, k = case.tensors()
    assert q.shape == (case.batch, case.seq, case.q_heads, case.head_dim)
    assert k.shape == (case.batch, case.seq, case.k_heads, case.head_dim)
    assert str(q.dtype) == f"torch.{case.dtype}"
    if case.seq > 1:
        assert q.transpose(1, 2).is_contiguous() == case.heads_first
    assert torch.equal(q, case.tensors()[0])
    assert not torch.equal(q, case.tensors(seed=1)[0])
    if case.rows:
        assert (q.stride(2), k.stride(1)) == case.rows


@pytest.mark.parametrize(("device", "count"), [("cpu", 2 * 15), ("cuda", 2 * 7 * 7)])
def test_every_case_is_well_formed(device: str, count: int) -> None:
    """Names tell them apart, and targets are about some; below 2**15 on a CPU; keys are apart."""
    labels = [case.label for case in CASES[device]]
    assert len(set(labels)) == len(labels)
    assert len(BENCH.run.selected(labels, BENCH.rotation.QUICK)) == {"cpu": 5, "cuda": 6}[device]
    for target in BENCH.targets.TARGETS[device]:
        assert any(target.is_about(case) for case in CASES[device]), target.what
    cases = [case for case in CASES[device] if case.asks == "times"]
    assert len(cases) == count
    assert {case.dtype for case in cases} == {"bfloat16", "float32"}
    for case in cases:
        keys = [one.key for one in BENCH.contenders.everyone(case, device)]
        assert len(set(keys)) == len(keys)
        if device == "cpu":
            assert 0 <= int(case.positions().min()) <= int(case.positions().max()) < 2**15


def test_packed_texts_begin_anew() -> None:
    """Positions count up within each text, and the texts fill the sequence."""
    case = next(c for c in CASES["cuda"] if c.documents)
    positions = case.positions().tolist()
    assert sum(case.documents) == case.seq == len(positions)
    assert [i for i, p in enumerate(positions) if p == 0][:3] == [0, 3001, 3001 + 1095]
    assert all(b in (0, a + 1) for a, b in pairwise(positions))


# the gate


def off_at(token: int, by: float) -> Callable[[Tensor], Tensor]:
    """Turn one pair of one token a little further."""

    def spoil(x: Tensor) -> Tensor:
        y = x.clone()
        a, b = x[0, token, 0, 0], x[0, token, 0, 4]
        y[0, token, 0, 0], y[0, token, 0, 4] = a - by * b, b + by * a
        return y

    return spoil


@pytest.mark.parametrize(
    "spoil",
    [
        lambda x: x.flip(-1),
        lambda x: 1.01 * x,
        lambda x: x.float() * torch.nan,
        lambda x: x.bfloat16(),
        lambda x: x[:, :-1],
        off_at(0, 0.01),
        off_at(4, 0.01),
    ],
    ids=["flipped", "longer", "nan", "other dtype", "other shape", "first token", "last token"],
)
def test_the_gate_refuses_a_wrong_contender(spoil: Callable[[Tensor], Tensor]) -> None:
    """It is named with its error; the right one is let in."""
    assert admitted(TINY, spoilt(lambda x: x)).errors["by hand, half"] < 1e-6
    found = admitted(TINY, spoilt(spoil))
    assert found.refused == ["by hand, half"]
    assert found.errors["by hand, half"] > TOLERANCE["float32"]


def test_what_is_refused_is_not_timed() -> None:
    """Copying and multiplying are."""
    found = BENCH.measure.measure(TINY, [spoilt(lambda x: 1.01 * x)], seconds=0.0)
    assert found.refused == ["by hand, half"]
    assert set(found.seconds) == {COPY, MULTIPLY}


def test_the_gate_measures_a_small_error_as_it_is() -> None:
    """A pair turned by a thousandth is off by a thousandth of its length; no other pairing fits."""
    found = admitted(TINY, spoilt(off_at(2, 1e-3)))
    assert found.errors["by hand, half"] == pytest.approx(1e-3, rel=1e-3)
    wrong = replace(spoilt(lambda x: x), pairing="interleaved")
    assert admitted(TINY, wrong).refused == ["by hand, interleaved"]


def test_the_gate_sees_what_lies_outside_the_rotated_slice() -> None:
    """A coordinate that must not change did."""
    case = SHAPES["partial"]
    x = case.tensors()[0]
    y, positions = x.clone(), torch.zeros(5, dtype=torch.int64)
    tokens, error = torch.arange(5), BENCH.measure.rotation_error
    assert error(x, y, tokens, positions, case.rope("half"), inverse=False) == 0
    y[0, 0, 0, 7] += 1
    assert error(x, y, tokens, positions, case.rope("half"), inverse=False) == float("inf")


def test_the_gate_checks_gradients() -> None:
    """A right forward pass with a wrong backward pass is wrong."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return 2 * grad

    case = SHAPES["backward"]
    assert admitted(case, spoilt(lambda x: x)).refused == []
    assert admitted(case, spoilt(Twice.apply)).refused == ["by hand, half"]


def test_the_gate_forgives_float32_angles_that_stand_far_out() -> None:
    """At position 2**17 a right float32 angle is off by 2**-6, and that much more is allowed."""
    near, far = (BENCH.measure.tolerance(replace(TINY, first=n)) for n in (0, 2**17 - 5))
    assert near == TOLERANCE["float32"]
    assert far - near == pytest.approx((2**17 - 1 - 2**15) * 2**-23)


def test_who_writes_its_arguments_spoils_them_for_nobody() -> None:
    """A contender that trains in place works on copies, of the gradients too."""

    class InPlace(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, turn: Callable[[Tensor, bool], Tensor]) -> Tensor:
            ctx.turn = turn
            x.data.copy_(turn(x, False))
            return x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            grad.copy_(ctx.turn(grad, True))
            return grad, None

    def build(case: Any, rope: Any, positions: Tensor) -> Any:
        def turn(x: Tensor, inverse: bool) -> Tensor:
            from phasor.torch import rotate

            return rotate(x.detach(), positions, rope, inverse=inverse)

        return lambda q, k: (InPlace.apply(q, turn), InPlace.apply(k, turn))

    case = replace(TINY, backward=True)
    writer = contender("writer", build, in_place=True, trains_in_place=True)
    found, calls = BENCH.measure.admit(case, [writer, ours()[1]])
    assert found.refused == []
    calls["writer, half"]()
    assert admitted(case, writer, ours()[1]).errors == found.errors
