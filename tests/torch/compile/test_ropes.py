"""A Rope is made, and a rule picks its law, inside a function that is compiled as one graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from phasor import Rope
from phasor.axes import Axial
from phasor.scaling import (
    DynamicNTK,
    Linear,
    Llama3,
    LongRope,
    PerPair,
    Rule,
    SteppedNTK,
    Yarn,
)
from phasor.torch import rotate

from ..torch_arrays import normal
from ..torch_cases import agree

NTK = DynamicNTK(factor=2.0, original_max_positions=8)
LONG = LongRope(
    short_factors=(1.0,) * 4, long_factors=(1.5, 2.0, 3.0, 4.0), original_max_positions=8, factor=4
)
GROWING = Rope(head_dim=8, pairing="half", scaling=NTK)
LENGTHS = [5, 9, 16]


pytestmark = pytest.mark.usefixtures("forget_graphs")


def law(scaling: object) -> Callable[[Tensor], Rope]:
    """A Rope with that law or rule, made inside."""
    return lambda x: Rope(head_dim=8, pairing="half", scaling=scaling).at(x.shape[0])


MADE: dict[str, Callable[[Tensor], Rope]] = {
    "plain": lambda x: Rope(head_dim=8, pairing="interleaved"),
    "of a shape": lambda x: Rope(head_dim=x.shape[-1], pairing="half", base=500.0),
    "of a length": lambda x: Rope(head_dim=8, pairing="half", base=10.0 + x.shape[0] / 3),
    "with a law made inside": lambda x: Rope(
        head_dim=8, pairing="half", scaling=Linear(factor=2.0 * x.shape[0])
    ),
    "with frequencies": lambda x: Rope(
        head_dim=8, pairing="half", explicit_inv_freq=(1.0, 0.3, 0.1, 0.0)
    ),
    "a part of the head": lambda x: Rope(
        head_dim=8, pairing="half", pairing_out="interleaved", rotary_dim=4, rotary_start=2
    ),
    "another of these": lambda x: dataclasses.replace(GROWING, scaling=None, direction=-1),
    "a rule's law": lambda x: GROWING.at(x.shape[0]),
    "a rule's law at one length": lambda x: GROWING.at(32),
    "linear": law(Linear(factor=3.0)),
    "yarn": law(Yarn(factor=4.0, original_max_positions=64)),
    "llama 3": law(Llama3(factor=8.0, original_max_positions=64)),
    "divisors": law(PerPair(factors=(1.0, 2.0, 3.0, 4.0))),
    "dynamic": law(NTK),
    "long": law(LONG),
}


@pytest.mark.parametrize("name", MADE)
def test_a_rope_made_inside_rotates_as_outside(name: str) -> None:
    """Every length has the law that it has outside, whichever were seen before: the first graph is
    for its length alone, the second for any.
    """

    def rotated(x: Tensor, places: Tensor) -> Tensor:
        rope = MADE[name](x)
        return rotate(x, places, rope, gain=rope.attention_factor)

    quick = torch.compile(rotated, fullgraph=True, backend="aot_eager")
    for length in (*LENGTHS, LENGTHS[0]):
        x, places = normal(length, 2, 8), torch.arange(length) * 1001
        assert torch.equal(quick(x, places), rotated(x, places))


@pytest.mark.parametrize("own", [{}, {"base": (100.0, 1e4), "scaling": (None, Linear(factor=2.0))}])
def test_several_axes_are_told_inside_too(own: Any) -> None:
    """A layout is made there as well, with the base and law of each axis."""

    def rotated(x: Tensor, places: Tensor) -> Tensor:
        return rotate(x, places, Rope(head_dim=8, pairing="half", axes=Axial((2, 2), **own)))

    x, places = normal(5, 2, 8), torch.arange(10).reshape(5, 2)
    quick = torch.compile(rotated, fullgraph=True, backend="aot_eager")
    assert torch.equal(quick(x, places), rotated(x, places))


def test_one_graph_serves_every_length_of_a_rope_made_inside() -> None:
    """To make it there costs no compilation more."""
    with torch._dynamo.config.patch(error_on_recompile=True):
        quick = torch.compile(
            lambda x, places: rotate(x, places, Rope(head_dim=8, pairing="half")),
            fullgraph=True, dynamic=True, backend="aot_eager",
        )  # fmt: skip
        for length in LENGTHS:
            x, places = normal(length, 2, 8), torch.arange(length)
            assert torch.equal(
                quick(x, places), rotate(x, places, Rope(head_dim=8, pairing="half"))
            )


def test_another_rope_is_never_the_one_before() -> None:
    """What is made of an argument is made of this one."""

    def rotated(x: Tensor, places: Tensor, rope: Rope) -> Tensor:
        return rotate(x, places, rope.at(16))

    quick = torch.compile(rotated, fullgraph=True, backend="aot_eager")
    x, places = normal(5, 2, 8), torch.arange(5)
    for rope in (GROWING, dataclasses.replace(GROWING, scaling=LONG),
                 dataclasses.replace(GROWING, base=99.0), GROWING):  # fmt: skip
        assert torch.equal(quick(x, places, rope), rotated(x, places, rope))


@pytest.mark.parametrize("scaling", [NTK, SteppedNTK(original_max_positions=8), LONG])
def test_a_rule_and_a_length_may_both_be_arguments(scaling: Rule) -> None:
    """Of which a compiler for any sizes makes symbols, up to the trained length and beyond."""

    def rotated(x: Tensor, places: Tensor, rope: Rope, length: int) -> Tensor:
        return rotate(x, places, rope.at(length))

    quick = torch.compile(rotated, fullgraph=True, dynamic=True, backend="eager")
    rope = dataclasses.replace(GROWING, scaling=scaling)
    for length in (5, 8, 9, 40):
        x, places = normal(length, 2, 8), torch.arange(length)
        assert torch.equal(quick(x, places, rope, length), rotated(x, places, rope, length))


def test_inductor_compiles_it_too() -> None:
    """The compiler that people use."""

    def rotated(x: Tensor, places: Tensor) -> Tensor:
        return rotate(x * 2, places, GROWING.at(x.shape[0])) + 1

    quick = torch.compile(rotated, fullgraph=True)
    for length in LENGTHS:
        x, places = normal(length, 2, 8), torch.arange(length)
        assert agree(quick(x, places), rotated(x, places))
