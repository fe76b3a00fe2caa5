"""Transforms of ``torch.func`` around a rotation give the same numbers when they are compiled."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import grad, jacrev, vjp, vmap

from phasor.torch import Rotation, rotate, rotate_, rotate_qk, rotate_qk_

from ..torch_arrays import normal
from ..torch_cases import HALF, MIXED, PLACES, agree, rows_of

COS, SIN = rows_of(torch.arange(4))
ROTATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "rotate": lambda x: rotate(x, PLACES, MIXED, gain=1.25),
    "rotate_": lambda x: rotate_(x.clone(), PLACES, HALF),
    "rotate_qk": lambda x: torch.cat(rotate_qk(x, x, PLACES, HALF), -1),
    "rotate_qk_": lambda x: torch.cat(rotate_qk_(x.clone(), x.clone(), PLACES, HALF), -1),
    "rotation": lambda x: Rotation(COS, SIN, pairing="half")(x),
}


def transforms_of(rotation: Callable[[Tensor], Tensor]) -> dict[str, Callable[[Tensor], Tensor]]:
    """What is compiled: functions of ``x [seq, heads, head_dim]``."""

    def cubes(x: Tensor) -> Tensor:
        return rotation(x).pow(3).sum()

    return {
        "grad": grad(cubes),
        "grad of grad": grad(lambda x: grad(cubes)(x).pow(2).sum()),
        "vjp": lambda x: vjp(rotation, x)[1](rotation(x).detach())[0],
        "jacrev": jacrev(lambda x: rotation(x).sum(0)),
        "vmap": lambda x: vmap(rotation)(torch.stack([x, 2 * x])),
    }


@pytest.mark.parametrize("name", ROTATIONS)
def test_a_compiled_transform_is_the_transform(name: str) -> None:
    """Backwards and batched, whichever function rotates: the same operations, so bit for bit."""
    x = normal(4, 2, 8)
    for transform, transformed in transforms_of(ROTATIONS[name]).items():
        torch._dynamo.reset()
        compiled = torch.compile(transformed, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(x), transformed(x)), transform


def test_inductor_compiles_a_gradient() -> None:
    """Of the sum of squares of a rotation, which is twice the vector."""
    x = normal(4, 2, 8)
    gradient = grad(lambda x: rotate(x, PLACES, HALF).square().sum())
    assert agree(torch.compile(gradient, fullgraph=True)(x), 2 * x, 2)


# torch 2.13 ends the process in the forward derivative of addcmul with value=-1, if AOTAutograd
# traces it: where that comes back there is no exception to catch
_FORWARD = """
import sys, torch
from torch.func import grad, jacfwd, jvp
from tests.torch.compile.test_compiled_transforms import ROTATIONS, normal

x, tangent = normal(4, 2, 8), normal(4, 2, 8, seed=1)
rotation = ROTATIONS[sys.argv[1]]
cubes = grad(lambda x: rotation(x).pow(3).sum())
for transformed in (
    lambda x: jvp(rotation, (x,), (tangent,))[1],
    lambda x: jacfwd(lambda x: rotation(x).sum(0))(x),
    lambda x: jvp(cubes, (x,), (tangent,))[1],
):
    torch._dynamo.reset()
    compiled = torch.compile(transformed, backend="aot_eager")
    assert torch.equal(compiled(x), transformed(x))
print("compiled")
"""


@pytest.mark.parametrize("name", ROTATIONS)
def test_forward_mode_is_compiled(name: str) -> None:
    """Tangents, Jacobians column by column, and forward over reverse, in a process of their own."""
    run = subprocess.run(
        [sys.executable, "-c", _FORWARD, name], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, f"{run.returncode} after {run.stdout}\n{run.stderr}"
    assert run.stdout.split() == ["compiled"]
