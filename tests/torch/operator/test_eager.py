"""Plain torch operations without the kernel: what layers share, and what is turned in chunks."""

from __future__ import annotations

import pytest
import torch

from phasor import Rope
from phasor.torch import Rotation
from phasor.torch._operator import eager

from ..torch_arrays import DTYPES, assert_rotated, normal

ROPES = (
    Rope(head_dim=64, pairing="half"),
    Rope(head_dim=64, pairing="interleaved", rotary_dim=48, rotary_start=8),
    Rope(head_dim=64, pairing="half", pairing_out="interleaved", direction=-1),
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize(("seq", "batch"), [(1, 1), (1, 3), (130, 4)])
def test_few_and_many_elements_are_turned_as_the_oracle_says(
    rope: Rope, dtype: torch.dtype, seq: int, batch: int
) -> None:
    """On both sides of the limits, and by factors that are new and that are kept."""
    positions = torch.arange(seq) + 40_000
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    rotation = Rotation.at(positions, rope, dtype=wide)
    q = normal(batch, seq, 8, 64, dtype=dtype)
    k = normal(batch, seq, 2, 64, dtype=dtype, seed=1)
    assert q.numel() <= eager._FEW or q.numel() > eager._IN_CACHE
    for _ in range(2):  # the second time by what the first has made
        turned = rotation(q, k, backend="eager")
        for x, y in zip((q, k), turned, strict=True):
            assert_rotated(y, x, positions, rope)
            assert y.stride() == x.stride()
            assert y.untyped_storage().nbytes() == y.nbytes


@pytest.mark.parametrize("inference", [False, True])
def test_what_is_written_to_cos_and_sin_counts_in_the_next_layer(inference: bool) -> None:
    """Negated sines turn backwards."""
    with torch.inference_mode(inference):
        q = normal(1, 4, 2, 64)
        rotation = Rotation.at(torch.arange(4), ROPES[0])
        rotation(q, backend="eager")
        rotation.sin.neg_()
        turned = rotation(q, backend="eager")
        expected = Rotation.at(-torch.arange(4), ROPES[0])(q, backend="eager")
    assert torch.equal(turned, expected)


@pytest.mark.parametrize("rope", ROPES)
def test_gradients_turn_back_by_what_the_layers_share(rope: Rope) -> None:
    """The transpose of a rotation undoes it."""
    positions = torch.arange(5) * 1000
    rotation = Rotation.at(positions, rope)
    q, k = (normal(1, 5, heads, 64).requires_grad_() for heads in (4, 2))
    dq, dk = (normal(1, 5, heads, 64, seed=2) for heads in (4, 2))
    for _ in range(2):
        turned = rotation(q, k, backend="eager")
        grads = torch.autograd.grad(turned, (q, k), (dq, dk))
        # <R x, y> = <x, R^T y>: R is a rotation, so its transpose undoes it
        back = rotation.inverse()
        for grad, d in zip(grads, (dq, dk), strict=True):
            torch.testing.assert_close(grad, back(d, backend="eager"), rtol=0, atol=4e-6)


def test_a_second_derivative_goes_past_the_dispatcher_as_well() -> None:
    """The gradient of a gradient is the rotation itself."""
    rotation = Rotation.at(torch.arange(5), ROPES[0])
    q = normal(1, 5, 2, 64).requires_grad_()
    d = normal(1, 5, 2, 64, seed=1).requires_grad_()
    (grad,) = torch.autograd.grad(rotation(q, backend="eager"), q, d, create_graph=True)
    (second,) = torch.autograd.grad(grad, d, q.detach())
    assert torch.equal(second, rotation(q.detach(), backend="eager"))
