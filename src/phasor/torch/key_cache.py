"""`KeyCache`: the keys and values of the tokens so far, in memory that is taken once."""

from __future__ import annotations

import torch
from torch import Tensor

from phasor._checks import whole
from phasor.errors import TensorError
from phasor.torch._arguments import check_is_tensor


class KeyCache:
    """Keys and values of one layer for rows that grow from different lengths.

    Row ``i`` holds ``lengths[i]`` tokens in its first places. New tokens are written behind them,
    in place; tokens that a mask calls padding are not kept. Memory is taken once, and nothing asks
    the device how far a row has come: `used` counts columns given, padding included.

    Args:
        batch: Rows.
        capacity: Columns that can be given, at most.
        key_heads: Heads of keys and of values.
        head_dim: Width of a head.
        device: Where it lives; torch's default if None.
        dtype: Of keys and values; torch's default if None.

    Raises:
        SpecError: If a size is not a whole number >= 1.

    >>> import torch
    >>> cache = KeyCache(batch=2, capacity=8, key_heads=1, head_dim=4)
    >>> k = v = torch.ones(2, 3, 1, 4)
    >>> cache.append(k, v, torch.tensor([[False, True, True], [True, True, True]]))
    >>> cache.lengths.tolist(), cache.used
    ([2, 3], 3)
    >>> cache.places(1).tolist()
    [[2], [3]]
    """

    lengths: Tensor
    used: int

    def __init__(
        self,
        batch: int,
        capacity: int,
        key_heads: int,
        head_dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        sizes = {"batch": batch, "capacity": capacity, "key_heads": key_heads, "head_dim": head_dim}
        batch, self.capacity, *head = (whole(name, n, least=1) for name, n in sizes.items())
        # padding is written to one more column, which nobody reads: to leave it out, the host
        # would have to know where it is
        shape = (batch, self.capacity + 1, *head)
        self._keys = torch.zeros(shape, device=device, dtype=dtype)
        self._values = torch.zeros(shape, device=device, dtype=dtype)
        self.lengths = torch.zeros(batch, device=device, dtype=torch.int64)
        self.used = 0

    @property
    def keys(self) -> Tensor:
        """``[batch, used, key_heads, head_dim]``, a view; row ``i`` ends at ``lengths[i]``."""
        return self._keys[:, : self.used]

    @property
    def values(self) -> Tensor:
        """As `keys`."""
        return self._values[:, : self.used]

    def places(self, new_tokens: int, mask: Tensor | None = None) -> Tensor:
        """Where `append` would put each of ``new_tokens`` columns, ``[batch, new_tokens]``.

        That is how many tokens of the row come before it. Padding has the place of the token
        before it, or place 0.

        Raises:
            TensorError: If ``mask`` is not ``[batch, new_tokens]`` bools.
        """
        batch = self.lengths.shape[0]
        if mask is not None and (mask.dtype != torch.bool or mask.shape != (batch, new_tokens)):
            raise TensorError(
                f"mask must be bools of shape {[batch, new_tokens]}, true for tokens, "
                f"got {mask.dtype} of shape {list(mask.shape)}"
            )
        if mask is None:
            ahead = torch.arange(new_tokens, device=self.lengths.device)
            return self.lengths[:, None] + ahead
        return (self.lengths[:, None] + mask.cumsum(-1) - 1).clamp(min=0)

    def append(self, k: Tensor, v: Tensor, mask: Tensor | None = None) -> None:
        """Write the keys and values of new tokens behind those held.

        Args:
            k: ``[batch, new_tokens, key_heads, head_dim]``.
            v: The same shape.
            mask: ``[batch, new_tokens]`` bools, false for padding, which is not kept.

        Raises:
            TensorError: If the capacity is exceeded, a shape, dtype or device does not fit, or a
                gradient would have to be recorded.
        """
        check_is_tensor("k", k)
        batch, _, *head = self._keys.shape
        new = k.shape[1] if k.dim() == 4 else 0
        wanted = [batch, new, *head]
        for name, given, held in (("k", k, self._keys), ("v", v, self._values)):
            check_is_tensor(name, given)
            if list(given.shape) != wanted:
                raise TensorError(
                    f"{name} must be [batch, new_tokens, key_heads, head_dim] like the cache "
                    f"({batch}, any, {head[0]}, {head[1]}), got shape {list(given.shape)}"
                )
            if (given.dtype, given.device) != (held.dtype, held.device):
                raise TensorError(
                    f"{name} must be {held.dtype} on {held.device} like the cache, "
                    f"got {given.dtype} on {given.device}; make the cache for what is given"
                )
            if given.requires_grad and torch.is_grad_enabled():
                raise TensorError(
                    f"{name} must not require a gradient: a cache is overwritten and records none; "
                    "decode inside torch.no_grad()"
                )
        if self.used + new > self.capacity:
            raise TensorError(
                f"capacity must be at least {self.used + new} for {new} more columns, "
                f"got {self.capacity}; make a longer cache"
            )
        places = self.places(new, mask)
        kept = places if mask is None else torch.where(mask, places, self.capacity)
        rows = torch.arange(batch, device=kept.device)[:, None]
        self._keys[rows, kept] = k
        self._values[rows, kept] = v
        self.lengths += new if mask is None else mask.sum(-1)
        self.used += new
