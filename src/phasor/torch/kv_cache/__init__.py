"""Cached keys and values: a cache for `RotaryAttention`, and functions for rotated keys.

A cached key is ``R(p) k``, and rotations compose. So ``R(d) R(p) = R(p + d)`` moves a key, and
``R'(p) R(-p)``, also a single rotation, changes its frequencies. The model does not run again, and
the only loss is the rounding of the stored key.

`shift_`, `retune_`, `insert` and `evict` take tensors; `CachedKeys` applies them to every layer of
a cache. `phasor.torch.rotate_` with ``inverse=True`` gives the unrotated keys.
"""

from phasor.torch.kv_cache.cache import KVCache
from phasor.torch.kv_cache.cached_keys import CachedKeys
from phasor.torch.kv_cache.edits import evict, insert, retune_, shift_

__all__ = ["CachedKeys", "KVCache", "evict", "insert", "retune_", "shift_"]
