"""Keys of 8 bits: float8, or int8 with scales. They are turned in float32 and rounded once.

A scale belongs to one element or to a group of elements. A group consists of consecutive
coordinates of a head; along dimensions in which the scales have size 1, all elements share it.
A turn can multiply a coordinate by sqrt(2): scales grow where a result would not fit, and never
shrink. So keys that do not move keep their bits, and a scale that tokens share stays large
enough for later ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from phasor.errors import TensorError
from phasor.torch._operator.arguments import ARRAYS
from phasor.torch._operator.in_place import check_rewritable
from phasor.torch._operator.internals import copy_all

_DTYPES = (
    *(torch.int8, torch.float8_e4m3fn, torch.float8_e4m3fnuz),
    *(torch.float8_e5m2, torch.float8_e5m2fnuz),
)
_SCALES = torch.float32, torch.float16, torch.bfloat16
# a number may exceed the largest of its type by this much: it is rounded down, and the scale stays
_ROUNDED_DOWN = 1 + 2**-10


def is_eight_bit(dtype: torch.dtype) -> bool:
    """Whether keys of this dtype are turned in float32, with scales."""
    return dtype in _DTYPES


def widened(keys: Tensor, scales: Tensor | None, name: str = "keys") -> Tensor:
    """The keys in float32 if they have 8 bits; else ``keys`` itself, which takes no scales.

    Raises:
        TensorError: If scales are missing, or do not fit the keys.
    """
    ARRAYS.check_kind(name, keys)
    if keys.dtype == torch.uint8:
        raise TensorError(
            f"{name} in uint8 must be viewed as the dtype of their bits, such as "
            "keys.view(torch.float8_e4m3fn); unsigned keys with zero points cannot be turned"
        )
    if not is_eight_bit(keys.dtype):
        if scales is not None:
            raise TensorError(
                f"scales must be None, except for {name} in int8 or float8, got {name} in "
                f"{keys.dtype}"
            )
        return keys
    if scales is None:
        if keys.dtype == torch.int8:
            raise TensorError(
                f"scales must be given for {name} in int8, got None; pass the tensor that they are "
                "multiplied by, such as [..., seq, heads, 1] for one scale per token and head"
            )
        return keys.float()
    factors = _factors("scales", scales, keys)
    # [..., head_dim] -> [..., groups, head_dim / groups]
    return (_grouped(keys.float(), factors) * factors).flatten(-2)


def narrowed(
    x: Tensor, dtype: torch.dtype, scales: Tensor | None, name: str = "keys"
) -> tuple[Tensor, Tensor | None]:
    """``x`` rounded once to ``dtype``, and the scales, larger where they had to grow.

    Raises:
        TensorError: If there are no scales and a number is too large.
    """
    limits = torch.iinfo(dtype) if dtype == torch.int8 else torch.finfo(dtype)
    unscaled = x.new_ones(()) if scales is None else scales
    factors = _factors("scales", unscaled, x)
    shared = [dim for dim, size in enumerate(factors.shape) if size == 1]
    grouped = _grouped(x, factors)
    # keys with a scale of 0 are 0
    quotients = grouped / torch.where(factors == 0, 1.0, factors)
    growth = torch.maximum(quotients / limits.max, quotients / limits.min)
    growth = growth.amax(shared, keepdim=True)
    grown = torch.where(growth > _ROUNDED_DOWN, growth, 1.0)
    if scales is None:
        if bool((grown > 1).any()):
            raise TensorError(
                f"scales must be given for {name} in {dtype} whose rotated coordinates exceed "
                f"{limits.max}, got None; pass torch.ones(()) to let it grow"
            )
        new_scales = None
    else:
        new_scales = (factors * grown).reshape(scales.shape).to(scales.dtype)
        factors = _factors("scales", new_scales, x)
        quotients = grouped / torch.where(factors == 0, 1.0, factors)
    quotients = quotients.clamp(limits.min, limits.max).flatten(-2)
    return (quotients.round() if dtype == torch.int8 else quotients).to(dtype), new_scales


def store_(keys: Tensor, scales: Tensor | None, rotated: Tensor) -> None:
    """Write keys that `widened` returned and that were turned back into ``keys`` and ``scales``."""
    if rotated is keys:
        return
    new, new_scales = narrowed(rotated, keys.dtype, scales)
    if scales is None or new_scales is None:
        copy_all([keys], [new])
    else:
        copy_all([keys, scales], [new, new_scales])


def check_stored(keys: Tensor, scales: Tensor | None) -> None:
    """Refuse keys and scales that cannot be written, before the first of them is."""
    check_rewritable("keys", keys)
    if scales is not None:
        check_rewritable("scales", scales[..., None])  # a single scale has no dimension


def _factors(name: str, scales: Tensor, keys: Tensor) -> Tensor:
    """Float32 scales with as many dimensions as grouped keys, or an error if they do not fit."""
    ARRAYS.check_kind(name, scales)
    ARRAYS.check_device(name, scales, keys.device)
    shaped_scales = scales.reshape((1,) * keys.dim()) if scales.numel() == 1 else scales
    fits = shaped_scales.dim() == keys.dim() and shaped_scales.dtype in _SCALES
    fits = fits and keys.shape[-1] % shaped_scales.shape[-1] == 0
    leading = zip(shaped_scales.shape[:-1], keys.shape[:-1], strict=fits)
    if not fits or any(size not in (1, key_size) for size, key_size in leading):
        raise TensorError(
            f"{name} must have the shape of the keys {list(keys.shape)}, with 1 in each dimension "
            "that shares scales and a divisor of head_dim as the last, in float32, float16 or "
            f"bfloat16; got {list(scales.shape)} in {scales.dtype}"
        )
    return shaped_scales.float()[..., None]


def _grouped(keys: Tensor, factors: Tensor) -> Tensor:
    """``[..., head_dim]`` as ``[..., groups, head_dim / groups]``."""
    return keys.reshape(*keys.shape[:-1], factors.shape[-2], -1)
