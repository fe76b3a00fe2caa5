"""RMS norm and rotation of query and key as one operator: its definition, schema and derivative.

    phasor::norm_rotate         (xs, weights, angles, rope, epsilon, gain, backend) -> ys
    phasor::norm_rotate_backward(grads, xs, weights, angles, rope, epsilon, gain, backend)
                                                              -> gradients of xs, then of weights

``y = R(p) (w n)`` with ``n = x / sqrt(mean(x^2) + epsilon)`` over a head. With ``v`` the gradient
turned back, ``dw`` is the sum of ``v n`` over tokens and heads, and ``dx`` is
``(w v - n mean(w v n)) / sqrt(mean(x^2) + epsilon)`` (Zhang & Sennrich 1910.07467, section 4).
What is kept for the backward pass is what came in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from phasor.torch._fused import resolve
from phasor.torch._internals import below_autograd
from phasor.torch.backends import eager as eager_backend
from phasor.torch.backends.triton import fused as triton_fused

_LIBRARY = torch.library.Library("phasor", "FRAGMENT")
_ARGUMENTS = "Tensor[] angles, str rope, float epsilon, float gain, str backend"
_LIBRARY.define(f"norm_rotate(Tensor[] xs, Tensor[] weights, {_ARGUMENTS}) -> Tensor[]")
_LIBRARY.define(
    f"norm_rotate_backward(Tensor[] grads, Tensor[] xs, Tensor[] weights, {_ARGUMENTS}) -> Tensor[]"
)
_forward: Callable[..., list[Tensor]] = torch.ops.phasor.norm_rotate.default
_backward: Callable[..., list[Tensor]] = torch.ops.phasor.norm_rotate_backward.default


def apply(
    xs: list[Tensor],
    weights: list[Tensor],
    angles: list[Tensor],
    rope: str,
    epsilon: float,
    gain: float,
    backend: str,
) -> list[Tensor]:
    """The operator on checked arguments, or its definition for those who look inside."""
    name = resolve(backend, xs[0])
    if eager_backend.is_followed(backend, xs + weights + angles) or any(
        forward_ad.unpack_dual(x).tangent is not None for x in xs + weights
    ):
        return composite(xs, weights, angles, rope, epsilon, gain)
    return _forward(xs, weights, angles, rope, epsilon, gain, name)


def composite(
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    angles: Sequence[Tensor],
    rope: str,
    epsilon: float,
    gain: float,
) -> list[Tensor]:
    """The definition in operations that every transformation follows."""
    normed = [_normed(x, w, epsilon) for x, w in zip(xs, weights, strict=True)]
    turned = eager_backend.composite(normed, angles, rope, False, gain)
    return [y.to(x.dtype) for x, y in zip(xs, turned, strict=True)]


def eager(
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    angles: Sequence[Tensor],
    rope: str,
    epsilon: float,
    gain: float,
) -> list[Tensor]:
    """The definition, into tensors of the strides of ``xs``."""
    normed = [_normed(x, w, epsilon) for x, w in zip(xs, weights, strict=True)]
    turned = eager_backend.rotate(normed, angles, rope, False, gain)
    return [torch.empty_like(x).copy_(y) for x, y in zip(xs, turned, strict=True)]


def eager_backward(
    grads: Sequence[Tensor],
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    angles: Sequence[Tensor],
    rope: str,
    epsilon: float,
    gain: float,
) -> list[Tensor]:
    """Gradients of ``xs``, then of ``weights``."""
    wide = [g.to(_computed_in(x)) for g, x in zip(grads, xs, strict=True)]
    of_xs: list[Tensor] = []
    of_weights: list[Tensor] = []
    turned = eager_backend.rotate(wide, angles, rope, True, gain)
    for v, x, w in zip(turned, xs, weights, strict=True):
        size = _inverse_size(x.to(v.dtype), epsilon)
        n = x.to(v.dtype) * size
        of_n = v * w.to(v.dtype)
        dx = (of_n - n * (of_n * n).mean(-1, keepdim=True)) * size
        of_xs.append(torch.empty_like(x).copy_(dx))
        of_weights.append((v * n).flatten(0, -2).sum(0).to(w.dtype))
    return of_xs + of_weights


def _normed(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    wide = x.to(_computed_in(x))
    return wide * _inverse_size(wide, epsilon) * weight.to(wide.dtype)


def _inverse_size(wide: Tensor, epsilon: float) -> Tensor:
    return (wide.square().mean(-1, keepdim=True) + epsilon).rsqrt()


def _computed_in(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _run(
    xs: list[Tensor], weights: list[Tensor], angles: list[Tensor], *options: Any
) -> list[Tensor]:
    *rest, backend = options
    if backend == "eager":
        return eager(xs, weights, angles, *rest)
    return triton_fused.norm_rotate(xs, weights, angles, *rest)


def _run_backward(
    grads: list[Tensor],
    xs: list[Tensor],
    weights: list[Tensor],
    angles: list[Tensor],
    *options: Any,
) -> list[Tensor]:
    *rest, backend = options
    if backend == "eager":
        return eager_backward(grads, xs, weights, angles, *rest)
    return triton_fused.norm_rotate_backward(grads, xs, weights, angles, *rest)


class _NormRotation(torch.autograd.Function):
    """The gradient is an operator of its own, which has none."""

    @staticmethod
    def forward(options: tuple[Any, ...], count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        xs, weights, angles = tensors[:count], tensors[count : 2 * count], tensors[2 * count :]
        with below_autograd():
            return tuple(_forward(list(xs), list(weights), list(angles), *options))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.options, ctx.count, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        n, tensors = ctx.count, ctx.saved_tensors
        xs, weights, angles = tensors[:n], tensors[n : 2 * n], tensors[2 * n :]
        back = _backward(list(grads), list(xs), list(weights), list(angles), *ctx.options)
        return (None, None, *back, *[None] * len(angles))


def _recorded(
    xs: list[Tensor], weights: list[Tensor], angles: list[Tensor], *options: Any
) -> list[Tensor]:
    if torch.is_grad_enabled() and any(x.requires_grad for x in xs + weights):
        tensors = (*xs, *weights, *angles)
        return list(cast(tuple[Tensor, ...], _NormRotation.apply(options, len(xs), *tensors)))
    with below_autograd():
        return _forward(xs, weights, angles, *options)


def _recorded_backward(grads: list[Tensor], xs: list[Tensor], *rest: Any) -> list[Tensor]:
    if torch.is_grad_enabled() and any(x.requires_grad for x in grads + xs):
        raise RuntimeError(
            "phasor.torch.fused.norm_rotate_qk is differentiable once; torch.func differentiates "
            "it as often as asked"
        )
    with below_autograd():
        return _backward(grads, xs, *rest)


def _shaped(xs: list[Tensor], *_: Any) -> list[Tensor]:
    return [torch.empty_like(x) for x in xs]


def _shaped_backward(
    grads: list[Tensor], xs: list[Tensor], weights: list[Tensor], *_: Any
) -> list[Tensor]:
    return [torch.empty_like(x) for x in xs + weights]


_LIBRARY.impl("norm_rotate", _run, "CompositeExplicitAutograd")
_LIBRARY.impl("norm_rotate_backward", _run_backward, "CompositeExplicitAutograd")
_LIBRARY.impl("norm_rotate", _recorded, "Autograd")
_LIBRARY.impl("norm_rotate_backward", _recorded_backward, "Autograd")
torch.library.register_fake("phasor::norm_rotate", _shaped, lib=_LIBRARY)
torch.library.register_fake("phasor::norm_rotate_backward", _shaped_backward, lib=_LIBRARY)
