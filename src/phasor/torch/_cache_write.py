"""Rotation and cache write as one operator: its definition and schema; it has no derivative.

    phasor::rotate_and_cache_(q, k, v, positions, slots, key_cache, value_cache,
                              rope, gain, key_unit, value_unit, backend) -> ()

``q`` is rotated in place. The rotated ``k`` and ``v`` go where ``slots`` says, and are themselves
left alone. A cache of 8-bit floats holds ``x / unit``, cut off at the largest finite number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from phasor.errors import PositionError
from phasor.torch._fused import FLOAT8, LARGEST, inverse_unit
from phasor.torch._internals import below_autograd
from phasor.torch._written import check_alone_and_apart, check_mutable
from phasor.torch.backends import eager as eager_backend
from phasor.torch.backends.triton import fused as triton_fused

_LIBRARY = torch.library.Library("phasor", "FRAGMENT")
_LIBRARY.define(
    "rotate_and_cache_(Tensor(a!) q, Tensor k, Tensor v, Tensor positions, Tensor slots, "
    "Tensor(b!) key_cache, Tensor(c!) value_cache, str rope, float gain, float key_unit, "
    "float value_unit, str backend) -> ()"
)
apply_: Callable[..., None] = torch.ops.phasor.rotate_and_cache_.default


def eager_(
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
    """The definition. It looks at the slots, for which a GPU has to wait."""
    places = slots.reshape(-1).long()
    room = key_cache.shape[0] * key_cache.shape[1]
    if places.device.type == "cpu" and bool((places >= room).any()):
        raise PositionError(
            f"slots must be below {room}, the rows of the cache {list(key_cache.shape[:2])}, "
            f"got {int(places.max())}; a negative slot keeps a token out of the cache"
        )
    kept = (places >= 0) & (places < room)
    (wide,) = eager_backend.rotate([_wide(k)], [positions], rope, False, gain)
    stored = [
        _stored(rows.flatten(0, -3)[kept], cache.dtype, unit)
        for rows, cache, unit in ((wide, key_cache, key_unit), (_wide(v), value_cache, value_unit))
    ]
    eager_backend.rotate_([q], [positions], rope, False, gain)
    block, place = key_cache.shape[1], places[kept]
    for cache, values in zip((key_cache, value_cache), stored, strict=True):
        # torch indexes no 8-bit floats; their bytes are the same numbers
        target = cache.view(torch.uint8) if cache.dtype == FLOAT8 else cache
        target[place // block, place % block] = values.view(target.dtype)


def _stored(rows: Tensor, dtype: torch.dtype, unit: float) -> Tensor:
    if dtype != FLOAT8:
        return rows.to(dtype)
    # some versions of torch make NaN of what is too large
    return (rows.float() * inverse_unit(unit)).clamp(-LARGEST, LARGEST).to(dtype)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _run(*arguments: Any) -> None:
    *rest, backend = arguments
    q, k, v, _, _, keys, values = rest[:7]
    check_mutable((q, keys, values))
    check_alone_and_apart({"q": q, "key_cache": keys, "value_cache": values}, {"k": k, "v": v})
    if backend == "eager":
        eager_(*rest)
        return
    triton_fused.rotate_and_cache_(*rest)


def _recorded(*arguments: Any) -> None:
    tensors = [x for x in arguments if isinstance(x, Tensor)]
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise RuntimeError(
            "phasor::rotate_and_cache_ records no gradient; detach its tensors, or rotate with "
            "phasor.torch.rotate_qk, which does, and write the cache yourself"
        )
    with below_autograd():
        apply_(*arguments)


def _shaped(*_: Any) -> None:
    return None


_LIBRARY.impl("rotate_and_cache_", _run, "CompositeExplicitAutograd")
_LIBRARY.impl("rotate_and_cache_", _recorded, "Autograd")
torch.library.register_fake("phasor::rotate_and_cache_", _shaped, lib=_LIBRARY)
