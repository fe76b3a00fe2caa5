"""The operators behind `phasor.torch.fused`: schemas, definitions in plain torch, derivatives.

    phasor::norm_rotate         (xs, weights, angles, rope, norm_eps, gain, backend) -> ys
    phasor::norm_rotate_backward(grads, xs, weights, angles, rope, norm_eps, gain, backend)
                                                              -> gradients of xs, then of weights
    phasor::rotate_and_cache_   (q, k, v, positions, slots, key_cache, value_cache,
                                 rope, gain, key_unit, value_unit, backend) -> ()

``y = R(p) (w n)`` with ``n = x / sqrt(mean(x^2) + norm_eps)`` over a head. With ``v`` the gradient
of ``y`` rotated back, ``dw`` is the sum of ``v n`` over tokens and heads, and ``dx`` is
``(w v - n mean(w v n)) / sqrt(mean(x^2) + norm_eps)`` (Zhang & Sennrich 1910.07467, section 4).
Only the inputs are saved for the backward pass.

The cache write rotates ``q`` in place, does not write ``k`` and ``v``, and has no derivative.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from phasor.errors import BackendError, PositionError
from phasor.torch._in_place import check_mutable, check_no_overlap
from phasor.torch._internals import below_autograd
from phasor.torch._tables import compute_dtype
from phasor.torch.backends import eager
from phasor.torch.backends import triton as triton_backend
from phasor.torch.backends.triton import fused as triton_fused
from phasor.torch.backends.triton.launching import FLOAT8, LARGEST_FLOAT8, inverse_unit

_LIBRARY = torch.library.Library("phasor", "FRAGMENT")
_OPTIONS = "Tensor[] angles, str rope, float norm_eps, float gain, str backend"
_LIBRARY.define(f"norm_rotate(Tensor[] xs, Tensor[] weights, {_OPTIONS}) -> Tensor[]")
_LIBRARY.define(
    f"norm_rotate_backward(Tensor[] grads, Tensor[] xs, Tensor[] weights, {_OPTIONS}) -> Tensor[]"
)
_LIBRARY.define(
    "rotate_and_cache_(Tensor(a!) q, Tensor k, Tensor v, Tensor positions, Tensor slots, "
    "Tensor(b!) key_cache, Tensor(c!) value_cache, str rope, float gain, float key_unit, "
    "float value_unit, str backend) -> ()"
)
_norm_rotate: Callable[..., list[Tensor]] = torch.ops.phasor.norm_rotate.default
_norm_rotate_backward: Callable[..., list[Tensor]] = torch.ops.phasor.norm_rotate_backward.default
rotate_and_cache_: Callable[..., None] = torch.ops.phasor.rotate_and_cache_.default


def resolve(backend: str, x: Tensor, *, refusal: str = "") -> str:
    """The name of the implementation for ``x``.

    Args:
        backend: ``"auto"``, or a name, which is never replaced by another.
        x: What it is for.
        refusal: Why Triton cannot do it, apart from where ``x`` is; "" if it can.

    Raises:
        BackendError: If the named one does not exist or cannot.
    """
    if backend not in ("auto", "triton", "eager"):
        raise BackendError(
            f"backend must be one of 'auto', 'triton', 'eager' here, got {backend!r}"
        )
    if backend == "eager":
        return backend
    refusal = refusal or triton_backend.refusal(x)
    if refusal and backend == "triton":
        raise BackendError(f"backend='triton' cannot do this: {refusal}; use 'auto' or 'eager'")
    return "eager" if refusal else "triton"


# Norm and rotation


def norm_rotate(
    xs: list[Tensor],
    weights: list[Tensor],
    angles: list[Tensor],
    rope: str,
    norm_eps: float,
    gain: float,
    backend: str,
) -> list[Tensor]:
    """The operator on checked arguments, or plain torch operations where those are needed.

    They are for whatever differentiates forwards, transforms, or compiles with the eager backend.
    """
    name = resolve(backend, xs[0])
    tensors = xs + weights
    has_tangent = any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)
    if has_tangent or eager.needs_plain_ops(backend, tensors + angles):
        normed = _normalize_all(xs, weights, norm_eps)
        rotated = eager.composite(normed, angles, rope, False, gain)
        return [y.to(x.dtype) for x, y in zip(xs, rotated, strict=True)]
    return _norm_rotate(xs, weights, angles, rope, norm_eps, gain, name)


def _eager_norm_rotate(
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    angles: Sequence[Tensor],
    rope: str,
    norm_eps: float,
    gain: float,
) -> list[Tensor]:
    """The definition, into tensors of the strides of ``xs``."""
    rotated = eager.rotate(_normalize_all(xs, weights, norm_eps), angles, rope, False, gain)
    return [torch.empty_like(x).copy_(y) for x, y in zip(xs, rotated, strict=True)]


def _eager_norm_rotate_backward(
    grads: Sequence[Tensor],
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    angles: Sequence[Tensor],
    rope: str,
    norm_eps: float,
    gain: float,
) -> list[Tensor]:
    """Gradients of ``xs``, then of ``weights``."""
    wide = [g.to(compute_dtype(x.dtype)) for g, x in zip(grads, xs, strict=True)]
    x_grads: list[Tensor] = []
    weight_grads: list[Tensor] = []
    for v, x, w in zip(eager.rotate(wide, angles, rope, True, gain), xs, weights, strict=True):
        inverse_rms = _inverse_rms(x.to(v.dtype), norm_eps)
        n = x.to(v.dtype) * inverse_rms
        n_grad = v * w.to(v.dtype)
        dx = (n_grad - n * (n_grad * n).mean(-1, keepdim=True)) * inverse_rms
        x_grads.append(torch.empty_like(x).copy_(dx))
        # [..., seq, heads, head_dim] -> [tokens * heads, head_dim] -> [head_dim]
        weight_grads.append((v * n).flatten(0, -2).sum(0).to(w.dtype))
    return x_grads + weight_grads


def _normalize_all(
    xs: Sequence[Tensor], weights: Sequence[Tensor], norm_eps: float
) -> list[Tensor]:
    """The RMS norm of each over its heads, in the dtype it is computed in."""
    normed: list[Tensor] = []
    for x, weight in zip(xs, weights, strict=True):
        wide = x.to(compute_dtype(x.dtype))
        normed.append(wide * _inverse_rms(wide, norm_eps) * weight.to(wide.dtype))
    return normed


def _inverse_rms(wide: Tensor, norm_eps: float) -> Tensor:
    """``[..., 1]``: one over the root mean square of each head."""
    return (wide.square().mean(-1, keepdim=True) + norm_eps).rsqrt()


def _run_norm(*arguments: Any) -> list[Tensor]:
    *rest, backend = arguments
    run = _eager_norm_rotate if backend == "eager" else triton_fused.norm_rotate
    return run(*rest)


def _run_norm_backward(*arguments: Any) -> list[Tensor]:
    *rest, backend = arguments
    if backend == "eager":
        return _eager_norm_rotate_backward(*rest)
    return triton_fused.norm_rotate_backward(*rest)


class _NormRotation(torch.autograd.Function):
    """The gradient is an operator too; that one has no gradient."""

    @staticmethod
    def forward(options: tuple[Any, ...], count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        xs, weights, angles = tensors[:count], tensors[count : 2 * count], tensors[2 * count :]
        with below_autograd():
            return tuple(_norm_rotate(list(xs), list(weights), list(angles), *options))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.options, ctx.count, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        n, tensors = ctx.count, ctx.saved_tensors
        parts = tensors[:n], tensors[n : 2 * n], tensors[2 * n :]
        back = _norm_rotate_backward(list(grads), *map(list, parts), *ctx.options)
        return (None, None, *back, *[None] * len(parts[2]))


def _autograd_norm(
    xs: list[Tensor], weights: list[Tensor], angles: list[Tensor], *options: Any
) -> list[Tensor]:
    if torch.is_grad_enabled() and any(x.requires_grad for x in xs + weights):
        tensors = (*xs, *weights, *angles)
        return list(cast(tuple[Tensor, ...], _NormRotation.apply(options, len(xs), *tensors)))
    with below_autograd():
        return _norm_rotate(xs, weights, angles, *options)


def _autograd_norm_backward(grads: list[Tensor], xs: list[Tensor], *rest: Any) -> list[Tensor]:
    if torch.is_grad_enabled() and any(x.requires_grad for x in grads + xs):
        raise RuntimeError(
            "phasor.torch.fused.norm_rotate_qk is differentiable once; torch.func differentiates "
            "it as often as asked"
        )
    with below_autograd():
        return _norm_rotate_backward(grads, xs, *rest)


def _fake_norm(xs: list[Tensor], *_: Any) -> list[Tensor]:
    return [torch.empty_like(x) for x in xs]


def _fake_norm_backward(
    grads: list[Tensor], xs: list[Tensor], weights: list[Tensor], *_: Any
) -> list[Tensor]:
    return [torch.empty_like(x) for x in xs + weights]


_LIBRARY.impl("norm_rotate", _run_norm, "CompositeExplicitAutograd")
_LIBRARY.impl("norm_rotate_backward", _run_norm_backward, "CompositeExplicitAutograd")
_LIBRARY.impl("norm_rotate", _autograd_norm, "Autograd")
_LIBRARY.impl("norm_rotate_backward", _autograd_norm_backward, "Autograd")
torch.library.register_fake("phasor::norm_rotate", _fake_norm, lib=_LIBRARY)
torch.library.register_fake("phasor::norm_rotate_backward", _fake_norm_backward, lib=_LIBRARY)


# Rotation and cache write


def _eager_rotate_and_cache_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    slots: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    rope: str,
    gain: float,
    key_unit: float,
    value_unit: float,
) -> None:
    """The definition. It reads the slots on the host, for which a GPU has to be waited for."""
    slots = slots.reshape(-1).long()  # [tokens]
    num_blocks, block_size = key_cache.shape[:2]
    num_slots = num_blocks * block_size
    if slots.device.type == "cpu" and bool((slots >= num_slots).any()):
        raise PositionError(
            f"slots must be below {num_slots}, the rows of the cache {list(key_cache.shape[:2])}, "
            f"got {int(slots.max())}; a negative slot keeps a token out of the cache"
        )
    stored = (slots >= 0) & (slots < num_slots)
    slots = slots[stored]
    wide_k, wide_v = (x if x.dtype == torch.float64 else x.float() for x in (k, v))
    (rotated,) = eager.rotate([wide_k], [positions], rope, False, gain)
    entries = [
        # [..., seq, heads, head_dim] -> [tokens, heads, head_dim] -> those with a slot
        _convert(x.flatten(0, -3)[stored], cache.dtype, unit)
        for x, cache, unit in (
            (rotated, key_cache, key_unit),
            (wide_v, value_cache, value_unit),
        )
    ]
    # nothing is written before everything is computed
    eager.rotate_into([q], [q], [positions], rope, False, gain)
    for cache, values in zip((key_cache, value_cache), entries, strict=True):
        # torch does not index 8-bit floats, but their bytes
        target = cache.view(torch.uint8) if cache.dtype == FLOAT8 else cache
        target[slots // block_size, slots % block_size] = values.view(target.dtype)


def _convert(x: Tensor, dtype: torch.dtype, unit: float) -> Tensor:
    """``x`` as a cache of ``dtype`` holds it: ``x / unit`` in 8 bits."""
    if dtype != FLOAT8:
        return x.to(dtype)
    # some versions of torch make NaN of what is too large
    return (x.float() * inverse_unit(unit)).clamp(-LARGEST_FLOAT8, LARGEST_FLOAT8).to(dtype)


def _run_cache_(*arguments: Any) -> None:
    *rest, backend = arguments
    q, k, v, _, _, keys, values = rest[:7]
    check_mutable((q, keys, values))
    check_no_overlap({"q": q, "key_cache": keys, "value_cache": values}, {"k": k, "v": v})
    run = _eager_rotate_and_cache_ if backend == "eager" else triton_fused.rotate_and_cache_
    run(*rest)


def _autograd_cache_(*arguments: Any) -> None:
    tensors = [x for x in arguments if isinstance(x, Tensor)]
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise RuntimeError(
            "phasor::rotate_and_cache_ records no gradient; detach its tensors, or rotate with "
            "phasor.torch.rotate_qk, which does, and write the cache yourself"
        )
    with below_autograd():
        rotate_and_cache_(*arguments)


def _fake_cache_(*_: Any) -> None:
    return None


_LIBRARY.impl("rotate_and_cache_", _run_cache_, "CompositeExplicitAutograd")
_LIBRARY.impl("rotate_and_cache_", _autograd_cache_, "Autograd")
torch.library.register_fake("phasor::rotate_and_cache_", _fake_cache_, lib=_LIBRARY)
