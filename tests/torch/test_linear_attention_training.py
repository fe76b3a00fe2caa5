"""Linear attention trains: its gradients are right, also through states, and take little memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.autograd.graph import saved_tensors_hooks

from phasor.torch import RotaryLinearAttention
from phasor.torch.papers import LinearState, PositiveRandomFeatures, linear, linear_attention

from .linear_reference import HALF, off, three
from .torch_arrays import float64, normal
from .torch_cases import Largest


def leaves(*shape: int) -> tuple[Tensor, ...]:
    """`three`, whose gradients are wanted."""
    return tuple(x.requires_grad_() for x in three(*shape))


@pytest.mark.parametrize(("feature_map", "causal"), [("elu", True), ("softmax", False)])
def test_gradients_are_right(
    feature_map: str, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, twice and batched, in blocks of two tokens."""
    monkeypatch.setattr(linear, "CHUNK", 2)
    monkeypatch.setattr(linear, "BLOCK", 1)

    def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return linear_attention(
            q, k, v, torch.arange(5), HALF, causal=causal, feature_map=feature_map
        )

    inputs = leaves(1, 5, 1, 8)
    assert gradcheck(attended, inputs, check_batched_grad=True)
    assert gradgradcheck(attended, inputs, check_batched_grad=True)


def test_gradients_pass_through_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """What later tokens gather depends on keys and values of earlier parts, and of blocks."""
    monkeypatch.setattr(linear, "CHUNK", 1)
    monkeypatch.setattr(linear, "BLOCK", 1)

    def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        state = LinearState()
        first = (x[:, :3] for x in (q, k, v))
        linear_attention(*first, torch.arange(3), HALF, causal=True, state=state)
        rest = (x[:, 3:] for x in (q, k, v))
        return linear_attention(*rest, torch.arange(3, 5), HALF, causal=True, state=state)

    assert gradcheck(attended, leaves(1, 5, 1, 8))
    assert gradgradcheck(attended, leaves(1, 5, 1, 8))


def test_gradients_of_many_directions_may_be_mapped() -> None:
    """`torch.func.vmap` over `torch.autograd.grad` gives what one call after another gives."""
    inputs = leaves(1, 200, 1, 8)
    y = linear_attention(*inputs, torch.arange(200), HALF, causal=True)
    directions = normal(3, *y.shape, dtype=torch.float64)

    def derive(direction: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(y, inputs, direction, retain_graph=True)

    mapped = torch.func.vmap(derive)(directions)
    for i, direction in enumerate(directions):
        for many, one in zip(mapped, derive(direction), strict=True):
            assert off(many[i], float64(one)) < 1e-12


@pytest.mark.parametrize("random", [True, False])
def test_features_may_learn(random: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients reach what a map is made of, with many blocks too."""
    monkeypatch.setattr(linear, "CHUNK", 2)
    monkeypatch.setattr(linear, "BLOCK", 1)
    q, k, v = three(5, 1, 4)
    learned = normal(8, 4, dtype=torch.float64, seed=9).requires_grad_()
    features = PositiveRandomFeatures(4, 8)

    def attended(learned: Tensor) -> Tensor:
        features.projection = learned
        feature_map = (
            features if random else (lambda x: torch.nn.functional.softplus(x @ learned.T))
        )
        return linear_attention(
            q, k, v, torch.arange(5), HALF, causal=True, feature_map=feature_map
        )

    assert gradcheck(attended, [learned])


@pytest.mark.parametrize("needed", range(3))
def test_one_input_may_want_a_gradient(needed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once and twice, whichever of query, key and value it is."""
    monkeypatch.setattr(linear, "CHUNK", 2)
    monkeypatch.setattr(linear, "BLOCK", 1)
    given = list(three(5, 1, 8))

    def attended(x: Tensor) -> Tensor:
        inputs = [*given[:needed], x, *given[needed + 1 :]]
        return linear_attention(*inputs, torch.arange(5), HALF, causal=True)

    x = given[needed].clone().requires_grad_()
    assert gradcheck(attended, [x])
    assert gradgradcheck(attended, [x])


def test_it_maps_over_a_batch_that_torch_func_hides() -> None:
    """And its gradients are those of each alone."""
    q, k, v = three(3, 70, 2, 8)

    def total(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return linear_attention(q, k, v, torch.arange(70), HALF, causal=True).square().sum()

    mapped = torch.func.vmap(torch.func.grad(total))(q, k, v)
    for row in range(3):
        alone = torch.func.grad(total)(q[row], k[row], v[row])
        assert off(mapped[row], float64(alone)) < 1e-12


def kept_and_largest(seq: int) -> tuple[int, int]:
    """Elements saved for the backward pass, and of the largest tensor of both passes."""
    saved: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        memory = x.untyped_storage()
        saved[memory.data_ptr()] = memory.nbytes() // x.itemsize
        return x

    with Largest() as largest:
        q, k, v = (x.detach().requires_grad_() for x in three(seq, 1, 8, dtype=torch.float32))
        with saved_tensors_hooks(keep, lambda x: x):
            y = linear_attention(q, k, v, torch.arange(seq), HALF, causal=True)
        y.sum().backward()
    return sum(saved.values()), largest.elements


def test_training_keeps_its_inputs_and_little_more() -> None:
    """Query, key, value and positions, and sums a block; no operation makes a larger tensor."""
    width, block = 8, linear.CHUNK * linear.BLOCK
    kept, largest = kept_and_largest(8192)
    assert kept <= 8192 * (3 * width + 1) + 8192 // block * (width * width + width)
    assert largest <= 8192 * width


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_leaves_the_sums_alone(dtype: torch.dtype) -> None:
    """They are float32, forward and backward: what enters in float32 comes out as it would."""
    q, k, v = (normal(200, 2, 8, seed=s).requires_grad_() for s in range(3))
    made: list[list[Tensor]] = []
    for on in (False, True):
        with torch.autocast("cpu", dtype, enabled=on):
            y = linear_attention(q, k, v, torch.arange(200), HALF, causal=True)
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
