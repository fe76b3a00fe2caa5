"""Cached keys and values: a cache for `RotaryAttention`, and functions for rotated keys.

A cached key is ``R(p) k``, and rotations compose. So a key moves by ``R(d) R(p) = R(p + d)`` and
changes its frequencies by ``R'(p) R(-p)``, which is one rotation too. The model is not run again,
and the only loss is the rounding of the stored key.

`shift_`, `retune_`, `insert` and `evict` take tensors; `CachedKeys` does the same to every layer of
a cache. `phasor.torch.rotate_` with ``inverse=True`` gives the keys before they were rotated.
"""

from phasor.torch.kv_cache.cache import KVCache
from phasor.torch.kv_cache.cached_keys import CachedKeys
from phasor.torch.kv_cache.edits import evict, insert, retune_, shift_

__all__ = ["CachedKeys", "KVCache", "evict", "insert", "retune_", "shift_"]
