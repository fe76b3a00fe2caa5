"""What models do next to the rotation, in the same pass over memory.

`norm_rotate_qk` is the RMS norm of query and key that Qwen3, Gemma 3 and others put before the
rotation. `rotate_and_cache_` rotates a query and a key and writes the key and the value into a
cache, paged or contiguous, of 8-bit floats too. On a GPU each is one launch in Triton; elsewhere
each is its definition in plain torch operations, which the kernels are checked against.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from phasor._checks import number, short_repr
from phasor.errors import SpecError, TensorError
from phasor.rope import Rope
from phasor.torch import _fused_ops
from phasor.torch._arguments import DTYPES, checked_positions, tokens_first
from phasor.torch._internals import unscriptable
from phasor.torch.backends.triton.launching import FLOAT8


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
        q: ``[..., seq, query_heads, head_dim]``, any strides.
        k: ``[..., seq, key_heads, head_dim]``, the same leading dimensions.
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
    options = number("norm_eps", norm_eps, least=0.0), number("gain", gain), backend
    ys = _fused_ops.norm_rotate([q, k], [q_weight, k_weight], angles, rope.to_json(), *options)
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

    A cache is ``[blocks, block, key_heads, head_dim]`` with any strides, and slot ``s`` is its row
    ``[s // block, s % block]``:

    * *paged*: ``blocks`` pages of ``block`` tokens; ``slot = page * block + index in the page``.
    * *contiguous*: ``[batch, length, key_heads, head_dim]``; ``slot = sequence * length + index``.
      A cache ``[batch, key_heads, length, head_dim]`` is passed as ``cache.transpose(1, 2)``.

    The key is rounded once, from float32. A cache of ``torch.float8_e4m3fn`` holds ``x / unit``,
    clamped to 448 either way, and a reader multiplies by the unit: the float32 nearest to
    ``1 / unit`` is multiplied in before rounding. No gradient is recorded.

    Args:
        q: ``[..., seq, query_heads, head_dim]``, any strides; written.
        k: ``[..., seq, key_heads, head_dim]``; not written.
        v: ``[..., seq, key_heads, value_dim]``.
        positions: As for `phasor.torch.rotate`: the tokens' positions in their text.
        rope: What rotates.
        slots: int64 or int32 ``[..., seq]``: the tokens' rows in the caches. The token of a
            negative slot is not stored. Slots beyond the cache are an error on the CPU; a GPU,
            which is not waited for, does not write them. Each slot is given at most once.
        key_cache: ``[blocks, block, key_heads, head_dim]``: a float dtype, or 8 bits.
        value_cache: ``[blocks, block, key_heads, value_dim]``, of its own dtype.
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
    name = _fused_ops.resolve(backend, q, refusal=_refusal(q, k, v, key_cache, value_cache))
    _fused_ops.rotate_and_cache_(
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
        came = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TensorError(f"{name} must be a tensor of {kind}, got {came}")
    if value.device != x.device:
        raise TensorError(
            f"{name} must be on the device of q and k ({x.device}), got {value.device}"
        )


def _refusal(q: Tensor, k: Tensor, v: Tensor, *caches: Tensor) -> str:
    """Why the Triton kernel cannot do it; "" if it can."""
    if not q.dtype == k.dtype == v.dtype:
        return f"q, k and v must be of one dtype, got {q.dtype}, {k.dtype} and {v.dtype}"
    eight_bits = any(cache.dtype == FLOAT8 for cache in caches)
    if eight_bits and q.is_cuda and torch.cuda.get_device_capability(q.device) < (8, 9):
        return "a cache of 8-bit floats needs a GPU of compute capability 8.9 or newer"
    return ""
