"""`KVCache`: keys and values of earlier tokens, in memory that is allocated once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phasor._checks import whole
from phasor.errors import TensorError
from phasor.torch._operator.arguments import ARRAYS
from phasor.torch._operator.in_place import check_mutable


class KVCache:
    """Keys and values of one attention layer; rows of the batch may have different lengths.

    Row ``i`` holds ``lengths[i]`` tokens, in order, from index 0 on. `append` writes new tokens
    after them, in place, and skips tokens that the attention mask marks as padding. The host never
    reads ``lengths``: capacity counts appended columns, padding included.

    Args:
        batch_size: Number of rows.
        capacity: Number of columns that can be appended.
        num_kv_heads: Heads of keys and of values.
        head_dim: Width of a head.
        device: Device of the cache; torch's default if None.
        dtype: Dtype of keys and values; torch's default if None.

    Attributes:
        lengths: int64 ``[batch_size]``, the number of tokens in each row.
        used: Columns appended so far, padding included.

    >>> import torch
    >>> cache = KVCache(batch_size=2, capacity=8, num_kv_heads=1, head_dim=4)
    >>> k = v = torch.ones(2, 3, 1, 4)
    >>> cache.append(k, v, torch.tensor([[False, True, True], [True, True, True]]))
    >>> cache.lengths.tolist(), cache.used
    ([2, 3], 3)
    >>> cache.next_positions(1).tolist()
    [[2], [3]]
    """

    lengths: Tensor
    used: int

    def __init__(
        self,
        batch_size: int,
        capacity: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        batch_size = whole("batch_size", batch_size, least=1)
        self.capacity = whole("capacity", capacity, least=1)
        heads = whole("num_kv_heads", num_kv_heads, least=1)
        # padding is written to one extra column, which is never read: to skip it, the host would
        # have to read the mask from the device
        shape = (batch_size, self.capacity + 1, heads, whole("head_dim", head_dim, least=1))
        self._keys = torch.zeros(shape, device=device, dtype=dtype)
        self._values = torch.zeros(shape, device=device, dtype=dtype)
        self.lengths = torch.zeros(batch_size, device=device, dtype=torch.int64)
        self.used = 0

    @property
    def keys(self) -> Tensor:
        """``[batch_size, used, num_kv_heads, head_dim]``, a view; row ``i`` ends at its length."""
        return self._keys[:, : self.used]

    @property
    def values(self) -> Tensor:
        """The values, in the shape of `keys`."""
        return self._values[:, : self.used]

    def next_positions(self, new_tokens: int, attention_mask: Tensor | None = None) -> Tensor:
        """The index in its row that `append` would give each of ``new_tokens`` columns.

        It is the number of earlier tokens in the row, and so the position. Padding gets the index
        of the token before it, or 0. The result is int64 ``[batch_size, new_tokens]``;
        ``attention_mask`` has bools of that shape.
        """
        if attention_mask is None:
            # [batch_size, 1] + [new_tokens]
            return self.lengths[:, None] + torch.arange(new_tokens, device=self.lengths.device)
        check_attention_mask(attention_mask, (self.lengths.shape[0], new_tokens))
        return (self.lengths[:, None] + attention_mask.cumsum(-1) - 1).clamp(min=0)

    def append(self, k: Tensor, v: Tensor, attention_mask: Tensor | None = None) -> None:
        """Write the keys and values of new tokens after the cached ones.

        Args:
            k: ``[batch_size, new_tokens, num_kv_heads, head_dim]``.
            v: The same shape.
            attention_mask: Bools ``[batch_size, new_tokens]``: True is a token, False is padding,
                which is left out.

        Raises:
            TensorError: If the capacity is exceeded, a shape, dtype or device does not fit, a
                gradient would have to be recorded, or the cache was filled in inference mode and is
                now used outside it.
        """
        batch_size, _, *head = self._keys.shape
        check_mutable([self._keys, self._values, self.lengths])
        ARRAYS.check_kind("k", k)
        new = k.shape[1] if k.dim() > 1 else 0
        for name, x in (("k", k), ("v", v)):
            check_fits_cache(name, x, [batch_size, new, *head], self._keys)
            if x.requires_grad and torch.is_grad_enabled():
                raise TensorError(
                    f"{name} must not require a gradient: a cache is overwritten, so it cannot "
                    f"record one; decode inside torch.no_grad()"
                )
        if self.used + new > self.capacity:
            raise TensorError(
                f"capacity must be at least {self.used + new} for {new} more columns, "
                f"got {self.capacity}; make a longer cache"
            )
        columns = self.next_positions(new, attention_mask)  # [batch_size, new]
        if attention_mask is not None:
            columns = torch.where(attention_mask, columns, self.capacity)
        rows = torch.arange(batch_size, device=columns.device)[:, None]
        self._keys[rows, columns] = k
        self._values[rows, columns] = v
        self.lengths += new if attention_mask is None else attention_mask.sum(-1)
        self.used += new


def check_attention_mask(mask: Any, shape: tuple[int, ...]) -> None:
    """Refuse anything but bools of ``shape``, ``(batch, seq)``."""
    ARRAYS.check_kind("attention_mask", mask)
    if mask.dtype != torch.bool or mask.shape != shape:
        raise TensorError(
            f"attention_mask must be bools of shape {list(shape)}, True for tokens, got "
            f"{mask.dtype} of shape {list(mask.shape)}; convert 0 and 1 with .bool()"
        )


def check_fits_cache(name: str, x: Any, shape: list[int], cached: Tensor) -> None:
    """Refuse ``x`` if its shape, dtype or device does not fit the cache."""
    ARRAYS.check_kind(name, x)
    ARRAYS.check_device(name, x, cached.device)
    if list(x.shape) != shape or x.dtype != cached.dtype:
        raise TensorError(
            f"{name} must be {shape} in {cached.dtype} like the cache, got {list(x.shape)} in "
            f"{x.dtype}"
        )
