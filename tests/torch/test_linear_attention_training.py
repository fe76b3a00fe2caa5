"""Linear attention trains: its gradients are right, also through states, and take little memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from phasor.torch import RotaryLinearAttention
from phasor.torch.papers import LinearState, linear, linear_attention

from .linear_oracle import HALF, off, three
from .torch_oracle import float64, normal


def leaves(*shape: int) -> tuple[Tensor, ...]:
    """`three`, whose gradients are wanted."""
    return tuple(x.requires_grad_() for x in three(*shape))


@pytest.mark.parametrize(("feature_map", "causal"), [("elu", True), ("softmax", False)])
def test_gradients_are_right(
    feature_map: str, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, twice and batched, with chunks of two tokens."""
    monkeypatch.setattr(linear, "CHUNK", 2)

    def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return linear_attention(
            q, k, v, torch.arange(5), HALF, causal=causal, feature_map=feature_map
        )

    inputs = leaves(1, 5, 1, 8)
    assert gradcheck(attended, inputs, check_batched_grad=True)
    assert gradgradcheck(attended, inputs)


def test_gradients_pass_through_the_state() -> None:
    """What later tokens gather depends on keys and values of earlier parts."""

    def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        state = LinearState()
        first = (x[:, :3] for x in (q, k, v))
        linear_attention(*first, torch.arange(3), HALF, causal=True, state=state)
        rest = (x[:, 3:] for x in (q, k, v))
        return linear_attention(*rest, torch.arange(3, 5), HALF, causal=True, state=state)

    assert gradcheck(attended, leaves(1, 5, 1, 8))


def test_it_maps_over_a_batch_that_torch_func_hides() -> None:
    """And its gradients are those of each alone."""
    q, k, v = three(3, 70, 2, 8)

    def total(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return linear_attention(q, k, v, torch.arange(70), HALF, causal=True).square().sum()

    mapped = torch.func.vmap(torch.func.grad(total))(q, k, v)
    for row in range(3):
        alone = torch.func.grad(total)(q[row], k[row], v[row])
        assert off(mapped[row], float64(alone)) < 1e-12


class Largest(TorchDispatchMode):
    """Remembers how many elements the largest tensor had that any operation made."""

    elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.itemsize)
        return made


def kept_and_largest(seq: int) -> tuple[int, int]:
    """Elements saved for the backward pass, and of the largest tensor of both passes."""
    saved: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        memory = x.untyped_storage()
        saved[memory.data_ptr()] = memory.nbytes() // x.itemsize
        return x

    with Largest() as largest, saved_tensors_hooks(keep, lambda x: x):
        q, k, v = (x.detach().requires_grad_() for x in three(seq, 1, 8, dtype=torch.float32))
        linear_attention(q, k, v, torch.arange(seq), HALF, causal=True).sum().backward()
    return sum(saved.values()), largest.elements


def test_training_never_holds_a_matrix_of_tokens_by_tokens() -> None:
    """None is larger than two inputs, and what is kept grows as they do."""
    (kept, _), (kept_twice, largest) = kept_and_largest(2048), kept_and_largest(4096)
    assert largest <= 4096 * 8 * 2
    assert kept_twice <= 2.01 * kept
    assert kept_twice <= 20 * 4096 * 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_leaves_the_sums_alone(dtype: torch.dtype) -> None:
    """They are float32, forward and backward: what enters in float32 comes out as it would."""
    q, k, v = (normal(64, 2, 8, seed=s).requires_grad_() for s in range(3))
    made: list[list[Tensor]] = []
    for on in (False, True):
        with torch.autocast("cpu", dtype, enabled=on):
            y = linear_attention(q, k, v, torch.arange(64), HALF, causal=True)
        made.append([y.detach(), *torch.autograd.grad(y.square().sum(), (q, k, v))])
    assert all(map(torch.equal, *made))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_layer_trains_under_autocast(dtype: torch.dtype) -> None:
    """Maps in 16 bits around sums in 32."""
    layer = RotaryLinearAttention(HALF, 16, 2)
    with torch.autocast("cpu", dtype):
        y = layer(normal(2, 9, 16))
    y.float().square().sum().backward()
    assert y.dtype == dtype
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
