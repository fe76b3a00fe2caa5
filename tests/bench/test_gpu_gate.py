"""The GPU's benchmark lets in who is right, norms and gradients included, and names the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from phasor import bench
from phasor.bench import COPY, EPSILON, MULTIPLY, Case, Contender

from .bench_files import files_of_bench
from .gpu_bench import MODULES, TINY

modules = files_of_bench(*MODULES)


def normed_by_hand(weights_times: float = 1.0) -> Contender:
    """A norm and the half pairing from plain cosines, in float64."""

    def build(case: Case, positions: Tensor) -> Any:
        width = case.head_dim
        inv_freq = case.base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        angles = positions.double()[..., None, None] * inv_freq
        cos, sin = angles.cos(), angles.sin()

        def turned(x: Tensor, weight: Tensor) -> Tensor:
            wide = x.double()
            size = (wide.square().mean(-1, keepdim=True) + EPSILON).sqrt()
            a, b = (wide / size * weight * weights_times).chunk(2, dim=-1)
            return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)

        return lambda q, k, q_weight, k_weight: (turned(q, q_weight), turned(k, k_weight))

    return Contender(name="by hand", pairing="half", build=build, norm=True)


def test_phasor_passes_the_gate_in_every_case(modules: dict[str, Any]) -> None:
    """On few tokens of each, whatever the model and its work."""
    of_gpu = modules["gpu_contenders"]
    for case in modules["gpu_cases"].CASES:
        small = replace(modules["gpu_cases"].small(case), q_heads=2, k_heads=1)
        ours = [c for c in of_gpu.everyone(small) if c.name.startswith("phasor")]
        there = [c for c in ours if "compiled" not in c.name]
        found, calls = bench.admitted(small, there)
        assert found.refused == []
        assert set(found.left_out.values()) <= {"a gradient needs a new output"}
        assert set(calls) == {COPY, MULTIPLY, *found.errors}


def test_contenders_have_their_own_names(modules: dict[str, Any]) -> None:
    """And those that are not installed say so instead of failing."""
    cases = [modules["gpu_cases"].small(case) for case in modules["gpu_cases"].CASES]
    for case in cases:
        keys = [one.key for one in modules["gpu_contenders"].everyone(case)]
        assert len(set(keys)) == len(keys)

    def absent(case: Case, positions: Tensor) -> Any:
        raise ImportError("No module named 'somewhere'", name="somewhere")

    one = modules["gpu_contenders"]._other("somebody", "half", absent)
    assert bench.admitted(TINY, [one])[0].left_out == {
        "somebody, half": "not installed (somewhere)"
    }


def test_a_foreign_interface_that_changed_is_left_out_with_what_it_raised(
    modules: dict[str, Any],
) -> None:
    """Also where it raises only when it is called; phasor's own failures are not forgiven."""

    def build(case: Case, positions: Tensor) -> Any:
        def rotation(q: Tensor, k: Tensor) -> Any:
            raise TypeError("no such argument\nand a long story")

        return rotation

    other = modules["gpu_contenders"]._other("somebody", "half", build)
    assert bench.admitted(TINY, [other])[0].left_out == {
        "somebody, half": "TypeError: no such argument"
    }
    own = Contender(name="phasor, broken", pairing="half", build=build)
    with pytest.raises(TypeError, match="no such argument"):
        bench.admitted(TINY, [own])


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_gate_lets_a_right_norm_through_and_no_other(dtype: Any, backward: bool) -> None:
    """Weights that are a twentieth too large are refused, and so is none of the norm."""
    case = replace(TINY, dtype=dtype, norm=True, backward=backward, head_dim=16, seq=40)
    right = bench.admitted(case, [normed_by_hand()])[0]
    assert right.refused == []
    assert right.errors["by hand, half"] < (2e-2 if dtype == "bfloat16" else 1e-5)
    assert bench.admitted(case, [normed_by_hand(1.05)])[0].refused == ["by hand, half"]
    apart = replace(bench.ours()[1], norm=True)

    def alone(case: Case, positions: Tensor) -> Any:
        rotation = bench.ours()[1].build(case, positions)
        return lambda q, k, *_: rotation(q, k)

    found = bench.admitted(replace(case, backward=False), [replace(apart, build=alone)])[0]
    assert found.refused == [apart.key]


def test_the_gate_checks_the_gradient_of_a_norm() -> None:
    """A right forward pass whose gradient forgets the mean is wrong."""

    class Forgets(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x / (x.square().mean(-1, keepdim=True) + EPSILON).sqrt()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return grad / (x.square().mean(-1, keepdim=True) + EPSILON).sqrt()

    def build(case: Case, positions: Tensor) -> Any:
        rotation = bench.ours()[1].build(case, positions)
        return lambda q, k, q_weight, k_weight: rotation(
            Forgets.apply(q) * q_weight, Forgets.apply(k) * k_weight
        )

    case = replace(TINY, norm=True, backward=True)
    one = Contender(name="forgets", pairing="half", build=build, norm=True)
    assert bench.admitted(replace(case, backward=False), [one])[0].refused == []
    assert bench.admitted(case, [one])[0].refused == ["forgets, half"]


def test_the_gate_forgives_float32_angles_that_stand_far_out() -> None:
    """At position 2**17 a right float32 angle is off by 2**-6, and that much more is allowed."""
    near, far = replace(TINY, first=0), replace(TINY, first=2**17 - 5)
    one = bench.ours()[1]
    assert bench.tolerance(near, one) == bench.TOLERANCE["float32"]
    grown = bench.tolerance(far, one) - bench.TOLERANCE["float32"]
    assert grown == pytest.approx((2**17 - 1 - 2**15) * 2**-23)


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

    def build(case: Case, positions: Tensor) -> Any:
        def turn(x: Tensor, inverse: bool) -> Tensor:
            from phasor.torch import rotate

            return rotate(x.detach(), positions, case.rope("half"), inverse=inverse)

        return lambda q, k: (InPlace.apply(q, turn), InPlace.apply(k, turn))

    case = replace(TINY, backward=True)
    writer = Contender(
        name="writer", pairing="half", build=build, in_place=True, trains_in_place=True
    )
    found, calls = bench.admitted(case, [writer, bench.ours()[1]])
    assert found.refused == []
    calls["writer, half"]()
    again, _ = bench.admitted(case, [writer, bench.ours()[1]])
    assert again.errors == found.errors
