"""The rotation and what models do next to it, in one pass over memory.

`norm_rotate_qk` is the RMS norm of query and key that Qwen3, Gemma 3 and others put before the
rotation. `rotate_and_cache_` rotates a query and a key and writes the key and the value into a
cache, paged or contiguous, of 8-bit floats too. On a GPU each is one launch in Triton; elsewhere
each runs its definition in plain torch operations, against which tests check the kernels. The
operators:

    phasor::norm_rotate         (xs, weights, angles, rope, norm_eps, gain, backend) -> ys
    phasor::norm_rotate_backward(grads, xs, weights, angles, rope, norm_eps, gain, backend)
                                                              -> gradients of xs, then of weights
    phasor::rotate_and_cache_   (q, k, v, positions, slots, key_cache, value_cache,
                                 rope, gain, key_unit, value_unit, backend) -> ()
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from phasor._checks import number, short_repr
from phasor.errors import BackendError, PositionError, SpecError, TensorError
from phasor.rope import Rope
from phasor.torch._arguments import DTYPES, checked_positions, tokens_first
from phasor.torch._in_place import check_mutable, check_no_overlap
from phasor.torch._internals import below_autograd, unscriptable
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
_rotate_and_cache_: Callable[..., None] = torch.ops.phasor.rotate_and_cache_.default


@unscriptable
def norm_rotate_qk(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    positions: Any,
    rope: Rope,
    *,
    norm_eps: float,
    gain: float = 1.0,
    heads_first: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """``R(p) (w x / sqrt(mean(x^2) + norm_eps))`` of a query and a key, as new tensors.

    The mean is over a head. Norm (Zhang & Sennrich 1910.07467, eq. 4) and rotation (RoFormer
    2104.09864, eq. 34) are computed in float32 (float64 for float64 tensors) and rounded once, so
    that 16-bit results are closer to the exact ones than those of two functions. Differentiable
    once, in query, key and weights; only the inputs are saved for the backward pass.

    Args:
        q: ``[..., seq, num_heads, head_dim]``, any strides.
        k: ``[..., seq, num_kv_heads, head_dim]``, the same leading dimensions.
        q_weight: ``[head_dim]``, multiplied into the normalised query. Models whose weights count
            from 1, such as Gemma, pass ``1 + weight``.
        k_weight: The same of the key.
        positions: As for `phasor.torch.rotate`.
        rope: What rotates; the norm is of the whole head, also where only a part of it rotates.
        norm_eps: Added to the mean of the squares, as the model's configuration says.
        gain: Multiplied into cos and sin.
        heads_first: Whether ``q`` and ``k`` are ``[..., heads, seq, head_dim]``.
        backend: ``"auto"``, ``"triton"`` or ``"eager"``; a named one is never replaced, and what
            compilers see is as for `phasor.torch.rotate`.

    Returns:
        The new query and key, of the dtypes and strides of ``q`` and ``k``.

    Raises:
        TensorError: If a shape, dtype or device does not fit.
        PositionError: If the positions do not fit the tokens.
        SpecError: If ``norm_eps`` is negative, ``gain`` is no number, ``heads_first`` is no bool,
            or ``rope.scaling`` is a rule.
        BackendError: If the named backend cannot run here.

    >>> rope = Rope(head_dim=4, pairing="half")
    >>> q, k = torch.full((1, 2, 4), 3.0), torch.full((1, 1, 4), -5.0)
    >>> one = torch.ones(4)
    >>> norm_rotate_qk(q, k, one, one, 0, rope, norm_eps=0.0)[1]
    tensor([[[-1., -1., -1., -1.]]])
    """
    q, k = tokens_first([q, k], heads_first)
    angles = [checked_positions(positions, [q, k], rope, heads_first)]
    for name, weight, x in (("q_weight", q_weight, q), ("k_weight", k_weight, k)):
        _check_tensor(name, weight, x)
        if weight.shape != x.shape[-1:]:
            raise TensorError(
                f"{name} must be [head_dim] ({x.shape[-1]}), got shape {list(weight.shape)}"
            )
    norm_eps, gain = number("norm_eps", norm_eps, least=0.0), number("gain", gain)
    name = _resolve_backend(backend, q)
    xs, weights, text = [q, k], [q_weight, k_weight], rope.to_json()
    has_tangent = any(forward_ad.unpack_dual(x).tangent is not None for x in xs + weights)
    if has_tangent or eager.needs_plain_ops(backend, xs + weights + angles):
        # differentiated forwards, transformed, or compiled with the eager backend
        normed = _normalize_all(xs, weights, norm_eps)
        rotated = eager.rotate_without_writes(normed, angles, text, False, gain)
        ys = [y.to(x.dtype) for x, y in zip(xs, rotated, strict=True)]
    else:
        ys = _norm_rotate(xs, weights, angles, text, norm_eps, gain, name)
    # [..., seq, heads, head_dim] -> [..., heads, seq, head_dim]
    new_q, new_k = [y.transpose(-3, -2) for y in ys] if heads_first else ys
    return new_q, new_k


@unscriptable
def rotate_and_cache_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Any,
    rope: Rope,
    slots: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    key_unit: float = 1.0,
    value_unit: float = 1.0,
    gain: float = 1.0,
    heads_first: bool = False,
    backend: str = "auto",
) -> Tensor:
    """``q``, rotated in place; the rotated ``k`` and ``v`` are written into caches.

    A cache is ``[blocks, block, num_kv_heads, head_dim]`` with any strides, and slot ``s`` is its
    row ``[s // block, s % block]``:

    * *paged*: ``blocks`` pages of ``block`` tokens; ``slot = page * block + index in the page``.
    * *contiguous*: ``[batch, length, num_kv_heads, head_dim]``; ``slot`` is
      ``sequence * length + index``. With heads before tokens, ``cache.transpose(1, 2)`` is passed.

    The key is rounded once, from float32. A cache of ``torch.float8_e4m3fn`` holds ``x / unit``,
    clamped to 448 either way, and a reader multiplies by the unit: the float32 nearest to
    ``1 / unit`` is multiplied in before rounding. No gradient is recorded.

    Args:
        q: ``[..., seq, num_heads, head_dim]``, any strides; written.
        k: ``[..., seq, num_kv_heads, head_dim]``; not written.
        v: ``[..., seq, num_kv_heads, value_dim]``.
        positions: As for `phasor.torch.rotate`: the tokens' positions in their text.
        rope: What rotates.
        slots: int64 or int32 ``[..., seq]``: the tokens' rows in the caches. The token of a
            negative slot is not stored. Slots beyond the cache are an error on the CPU; a GPU,
            which is not waited for, does not write them. Each slot is given at most once.
        key_cache: ``[blocks, block, num_kv_heads, head_dim]``: a float dtype, or 8 bits.
        value_cache: ``[blocks, block, num_kv_heads, value_dim]``, of its own dtype.
        key_unit: The number that a stored 1 means, in a key cache of 8 bits.
        value_unit: The same of the value cache.
        gain: Multiplied into cos and sin.
        heads_first: Whether ``q``, ``k`` and ``v`` are ``[..., heads, seq, head_dim]``. Caches and
            ``slots`` keep their shapes.
        backend: ``"auto"``, ``"triton"`` or ``"eager"``; a named one is never replaced.

    Returns:
        ``q``.

    Raises:
        TensorError: If a shape, dtype or device does not fit, or memory would be written twice.
        PositionError: If positions or slots do not fit the tokens.
        SpecError: If a unit is not a positive number, or is given for a cache of more than 8
            bits, ``gain`` is no number, or ``heads_first`` no bool.
        BackendError: If the named backend cannot run here.

    >>> rope = Rope(head_dim=4, pairing="half")
    >>> q, k, v = (torch.ones(1, 1, 4) for _ in range(3))
    >>> keys, values = torch.zeros(3, 16, 1, 4), torch.zeros(3, 16, 1, 4)
    >>> slot = torch.tensor([2 * 16 + 5])  # page 2, place 5
    >>> rotate_and_cache_(q, k, v, 0, rope, slot, keys, values) is q
    True
    >>> keys[2, 5], int(keys.count_nonzero())
    (tensor([[1., 1., 1., 1.]]), 4)
    """
    caller_q = q
    q, k = tokens_first([q, k], heads_first)
    positions = checked_positions(positions, [q, k], rope, heads_first)
    _check_tensor("v", v, k)
    v = v.transpose(-3, -2) if heads_first and v.dim() >= 3 else v
    if v.shape[:-1] != k.shape[:-1]:
        raise TensorError(
            f"v must share tokens and heads with k {list(k.shape[:-1])}, got {list(v.shape[:-1])}"
        )
    _check_tensor("slots", slots, k, (torch.int64, torch.int32), "int64 or int32")
    if slots.shape != k.shape[:-2]:
        raise TensorError(
            f"slots must be one for each token {list(k.shape[:-2])}, got {list(slots.shape)}"
        )
    caches = (("key", key_cache, key_unit, k), ("value", value_cache, value_unit, v))
    units = [_checked_cache(name, cache, unit, x) for name, cache, unit, x in caches]
    if key_cache.shape[:2] != value_cache.shape[:2]:
        raise TensorError(
            f"value_cache must have the [blocks, block] of key_cache {list(key_cache.shape[:2])}, "
            f"because a slot is one row in both, got {list(value_cache.shape[:2])}"
        )
    name = _resolve_backend(backend, q, refusal=_triton_refusal(q, k, v, key_cache, value_cache))
    _rotate_and_cache_(
        *(q, k, v, positions, slots, key_cache, value_cache),
        *(rope.to_json(), number("gain", gain), *units, name),
    )
    return caller_q


def _checked_cache(name: str, cache: Any, unit: Any, x: Tensor) -> float:
    """The unit of a cache that fits ``x``."""
    _check_tensor(f"{name}_cache", cache, x, (*DTYPES, FLOAT8), "floats or float8_e4m3fn")
    if cache.dim() != 4 or cache.shape[2:] != x.shape[-2:]:
        raise TensorError(
            f"{name}_cache must be [blocks, block, {x.shape[-2]}, {x.shape[-1]}], "
            f"got shape {list(cache.shape)}"
        )
    unit = number(f"{name}_unit", unit, above=0.0)
    if unit != 1.0 and cache.dtype != FLOAT8:
        raise SpecError(
            f"{name}_unit must be 1 for a cache of {cache.dtype}, which stores numbers as they "
            f"are, got {short_repr(unit)}"
        )
    return unit


def _check_tensor(
    name: str,
    value: Any,
    x: Tensor,
    dtypes: Sequence[torch.dtype] = DTYPES,
    kind: str = "floats",
) -> None:
    """Refuse anything but a tensor of one of ``dtypes`` on the device of ``x``."""
    if not isinstance(value, Tensor) or value.dtype not in dtypes:
        got = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TensorError(f"{name} must be a tensor of {kind}, got {got}")
    if value.device != x.device:
        raise TensorError(
            f"{name} must be on the device of q and k ({x.device}), got {value.device}"
        )


def _triton_refusal(q: Tensor, k: Tensor, v: Tensor, *caches: Tensor) -> str:
    """Why the Triton kernel cannot do it; "" if it can."""
    if not q.dtype == k.dtype == v.dtype:
        return f"q, k and v must be of one dtype, got {q.dtype}, {k.dtype} and {v.dtype}"
    eight_bits = any(cache.dtype == FLOAT8 for cache in caches)
    if eight_bits and q.is_cuda and torch.cuda.get_device_capability(q.device) < (8, 9):
        return "a cache of 8-bit floats needs a GPU of compute capability 8.9 or newer"
    return ""


def _resolve_backend(backend: str, x: Tensor, *, refusal: str = "") -> str:
    """The name of the implementation for ``x``.

    Args:
        backend: ``"auto"``, or a name, which is never replaced by another.
        x: The tensor.
        refusal: Why Triton cannot do it for another reason than the device; "" if it can.

    Raises:
        BackendError: If the named backend does not exist or cannot run.
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


# Norm and rotation: ``y = R(p) (w n)`` with ``n = x / sqrt(mean(x^2) + norm_eps)`` over a head. Let
# ``v`` be the gradient of ``y`` rotated back: then ``dw`` is the sum of ``v n`` over tokens and
# heads, and ``dx`` is ``(w v - n mean(w v n)) / sqrt(mean(x^2) + norm_eps)`` (Zhang & Sennrich
# 1910.07467, section 4). Only the inputs are saved for the backward pass.


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
    eager_run, triton_run = _eager_norm_rotate_backward, triton_fused.norm_rotate_backward
    return (eager_run if backend == "eager" else triton_run)(*rest)


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
        gradients = _norm_rotate_backward(list(grads), *map(list, parts), *ctx.options)
        return (None, None, *gradients, *[None] * len(parts[2]))


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
            "it any number of times"
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


# Rotation and cache write, which has no derivative


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
    """The definition. It reads the slots on the host, which waits for a GPU."""
    slots = slots.reshape(-1).long()  # [tokens]
    num_blocks, block_size = key_cache.shape[:2]
    num_slots = num_blocks * block_size
    if slots.device.type == "cpu" and bool((slots >= num_slots).any()):
        raise PositionError(
            f"slots must be below {num_slots}, the rows of the cache {list(key_cache.shape[:2])}, "
            f"got {int(slots.max())}; a negative slot keeps a token out of the cache"
        )
    has_slot = (slots >= 0) & (slots < num_slots)
    slots = slots[has_slot]
    wide_k, wide_v = (x if x.dtype == torch.float64 else x.float() for x in (k, v))
    (rotated,) = eager.rotate([wide_k], [positions], rope, False, gain)
    writes = (rotated, key_cache, key_unit), (wide_v, value_cache, value_unit)
    entries = [
        # [..., seq, heads, head_dim] -> [tokens, heads, head_dim] -> those with a slot
        _convert_to_cache(x.flatten(0, -3)[has_slot], cache.dtype, unit)
        for x, cache, unit in writes
    ]
    # nothing is written before everything is computed
    eager.rotate_into([q], [q], [positions], rope, False, gain)
    for (_, cache, _), values in zip(writes, entries, strict=True):
        # torch does not index 8-bit floats, but their bytes
        target = cache.view(torch.uint8) if cache.dtype == FLOAT8 else cache
        target[slots // block_size, slots % block_size] = values.view(target.dtype)


def _convert_to_cache(x: Tensor, dtype: torch.dtype, unit: float) -> Tensor:
    """``x`` as a cache of ``dtype`` holds it: ``x / unit`` in 8 bits."""
    if dtype != FLOAT8:
        return x.to(dtype)
    # some versions of torch turn too large numbers into NaN
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
        _rotate_and_cache_(*arguments)


def _fake_cache_(*_: Any) -> None:
    return None


_LIBRARY.impl("rotate_and_cache_", _run_cache_, "CompositeExplicitAutograd")
_LIBRARY.impl("rotate_and_cache_", _autograd_cache_, "Autograd")
torch.library.register_fake("phasor::rotate_and_cache_", _fake_cache_, lib=_LIBRARY)
