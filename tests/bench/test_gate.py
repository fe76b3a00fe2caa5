"""The benchmark's gate lets right rotations through, names wrong ones and times none of those."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from phasor import VerificationError, bench
from phasor.bench import COPY, MULTIPLY, TOLERANCE, Case, Contender, UnableError

from .bench_cases import SHAPES, TINY, measured_alone, spoilt


def off_at(token: int, by: float) -> Callable[[Tensor], Tensor]:
    """Turn one pair of one token a little further."""

    def spoil(x: Tensor) -> Tensor:
        y = x.clone()
        a, b = x[0, token, 0, 0], x[0, token, 0, 4]
        y[0, token, 0, 0], y[0, token, 0, 4] = a - by * b, b + by * a
        return y

    return spoil


def test_the_gate_lets_a_right_contender_through() -> None:
    """A rotation by hand is timed, and its error is that of float32."""
    found = measured_alone(TINY, spoilt(lambda x: x))
    assert found.refused == []
    assert 0 < found.errors["by hand, half"] < 1e-6
    assert "by hand, half" in found.seconds


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
    """It is named with its error and never timed."""
    found = measured_alone(TINY, spoilt(spoil))
    assert found.refused == ["by hand, half"]
    assert found.errors["by hand, half"] > TOLERANCE["float32"]
    assert set(found.seconds) == {COPY, MULTIPLY}


def test_the_gate_refuses_the_other_pairing() -> None:
    """The commonest mistake of all."""
    wrong = replace(spoilt(lambda x: x), pairing="interleaved")
    assert measured_alone(TINY, wrong).refused == ["by hand, interleaved"]


def test_the_gate_measures_a_small_error_as_it_is() -> None:
    """A pair turned by a thousandth is off by a thousandth of its length."""
    found = measured_alone(TINY, spoilt(off_at(2, 1e-3)))
    assert found.errors["by hand, half"] == pytest.approx(1e-3, rel=1e-3)


def test_the_gate_sees_what_lies_outside_the_rotated_slice() -> None:
    """A coordinate that must not change did."""
    case = SHAPES["partial"]
    x = case.tensors()[0]
    y, places = x.clone(), torch.zeros(5, dtype=torch.int64)
    assert bench.error(x, y, places, case.rope("half"), inverse=False) == 0
    y[0, 0, 0, 7] += 1
    assert bench.error(x, y, places, case.rope("half"), inverse=False) == float("inf")


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
    assert measured_alone(case, spoilt(lambda x: x)).refused == []
    assert measured_alone(case, spoilt(Twice.apply)).refused == ["by hand, half"]


def test_a_contender_that_is_unable_is_left_out_with_its_reason() -> None:
    """And with nothing else."""

    def build(case: Case, positions: Tensor) -> Any:
        raise UnableError("no such shape")

    found = measured_alone(TINY, Contender(name="none", pairing="half", build=build))
    assert found.left_out == {"none, half": "no such shape"}
    assert set(found.seconds) == {COPY, MULTIPLY}
    assert found.errors == {}


@pytest.mark.parametrize("case", SHAPES.values(), ids=SHAPES)
def test_phasor_passes_the_gate(case: Case) -> None:
    """In every form and pairing, on every kind of case."""
    found = bench.measure(case, bench.ours(), seconds=0.0)
    assert found.refused == []
    expected = {one.key for one in bench.ours() if not (case.backward and one.in_place)}
    assert expected | {COPY, MULTIPLY} == set(found.seconds)


def test_phasor_bench_fails_where_phasor_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """It prints no ratios for a wrong rotation."""
    monkeypatch.setattr(bench, "ours", lambda: [spoilt(lambda x: -x)])
    with pytest.raises(VerificationError, match="by hand, half in tiny"):
        bench.run(cases=[TINY], seconds=0.0)
