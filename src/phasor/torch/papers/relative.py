"""Attention that changes distances beyond a width: ReRoPE, its leaky form, Self-Extend.

`DualChunk` has the positions of dual chunk attention, which scores each query three times. The
others rotate queries and keys twice: by their own positions, to score keys nearer than ``width``,
and by positions whose difference is the changed distance, to score keys further away.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from phasor._checks import number, whole
from phasor._tensors import check_rope
from phasor.errors import SpecError, TensorError
from phasor.rope import Rope
from phasor.torch._operator.arguments import ARRAYS, tokens_first
from phasor.torch._operator.internals import is_exporting, outside_autocast
from phasor.torch.attention import CHUNK
from phasor.torch.functional import rotate


@dataclass(frozen=True)
class ReRope:
    """ReRoPE: a distance ``r`` beyond ``width`` becomes ``width`` (Su, https://kexue.fm/archives/9708).

    With a ``factor`` it is Leaky ReRoPE: ``r`` becomes ``width + (r - width) / factor``.

    >>> import torch
    >>> query, key = ReRope(width=4).far_positions(torch.arange(10))
    >>> (query[9] - key[:6]).tolist()  # for the distances 9 to 4
    [4, 4, 4, 4, 4, 4]
    >>> query, key = ReRope(width=4, factor=2.0).far_positions(torch.arange(10))
    >>> (query[9] - key[:6]).tolist()
    [6.5, 6.0, 5.5, 5.0, 4.5, 4.0]
    """

    width: int
    factor: float | None = None

    def __post_init__(self) -> None:
        whole("width", self.width, least=1)
        if self.factor is not None:
            object.__setattr__(self, "factor", number("factor", self.factor, above=0))

    def far_positions(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Positions of queries and of keys whose difference is the changed distance."""
        if self.factor is None:
            zeros = torch.zeros_like(positions)
            return zeros + self.width, zeros
        exact = positions.double()
        # one division of integers, because width - width / factor would round twice
        return (exact + self.width * (self.factor - 1)) / self.factor, exact / self.factor


@dataclass(frozen=True)
class SelfExtend:
    """Self-Extend: distances from ``width`` on are measured between groups of tokens (2401.01325).

    ``m - n`` becomes ``m // group + width - width // group - n // group``. The result for one
    distance varies between queries, by at most one.

    >>> import torch
    >>> query, key = SelfExtend(width=4, group=2).far_positions(torch.arange(10))
    >>> (query[9] - key[:6]).tolist()
    [6, 6, 5, 5, 4, 4]
    """

    width: int
    group: int

    def __post_init__(self) -> None:
        whole("width", self.width, least=1)
        whole("group", self.group, least=1)

    def far_positions(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Positions of queries and of keys whose difference is the changed distance."""
        grouped = positions // self.group
        return grouped + (self.width - self.width // self.group), grouped


@dataclass(frozen=True)
class DualChunk:
    """Dual chunk attention: positions count from the beginning of a chunk (2402.17463, section 3).

    A key has one position, and a query has three: for keys of its own chunk, of the chunk before
    it, and of older ones. Up to ``local`` tokens away distances are true, and none is longer than
    ``size``. Chunks begin every ``size - local`` tokens. Qwen2.5-1M has 262,144 and 8,192.

    >>> import torch
    >>> chunks = DualChunk(size=5, local=2)
    >>> chunks.key_positions(torch.arange(8)).tolist()
    [0, 1, 2, 0, 1, 2, 0, 1]
    >>> own, previous, older = chunks.query_positions(torch.arange(8))
    >>> own.tolist(), previous.tolist(), older.tolist()
    ([0, 1, 2, 0, 1, 2, 0, 1], [3, 4, 5, 3, 4, 5, 3, 4], [5, 5, 5, 5, 5, 5, 5, 5])
    """

    size: int
    local: int

    def __post_init__(self) -> None:
        whole("local", self.local, least=0)
        # a local distance reaches into the previous chunk, and no further
        whole("size", self.size, least=max(2 * self.local, 1))

    def key_positions(self, positions: Tensor) -> Tensor:
        """Integer ``positions`` of keys, counted from the beginning of their chunks."""
        return positions % self._step

    def query_positions(self, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Positions of queries for keys of their own chunk, of the previous chunk, and before."""
        key_positions = self.key_positions(positions)
        previous = (key_positions + self._step).clamp(max=self.size)
        last_of_chunk = min(2 * self._step - 1, self.size)
        return key_positions, previous, torch.full_like(key_positions, last_of_chunk)

    @property
    def _step(self) -> int:
        return self.size - self.local


Distance = ReRope | SelfExtend


def relative_attention(
    q: Tensor, k: Tensor, v: Tensor, rope: Rope, distance: Distance, *, heads_first: bool = False
) -> Tensor:
    """Causal attention with changed distances: scores ``qᵀ R(-f(m, n)) k``.

    ``f(m, n)`` is ``m - n`` below ``distance.width``, and changed by ``distance`` from there on.
    Each score is computed once, except for keys that are near some queries in a block and far from
    others. Memory holds the scores of 512 queries; in training autograd keeps all of them, so use
    checkpointing. Scores and softmax are at least float32, also under autocast.

    Args:
        q: ``[batch, new, num_heads, head_dim]``, not rotated: the last ``new`` of the tokens.
        k: ``[batch, seq, num_kv_heads, head_dim]``, not rotated, of all tokens. Cache unrotated
            keys, because no single rotation of a key works for all distances.
        v: The same shape.
        rope: Its `attention_factor` and `softmax_factor` are applied as in `RotaryAttention`.
        distance: `ReRope` or `SelfExtend`.
        heads_first: Whether tensors, the result included, are ``[batch, heads, seq, head_dim]``.

    Returns:
        ``[batch, new, num_heads, head_dim]``.

    >>> import torch
    >>> from phasor import Rope
    >>> q, k, v = torch.randn(3, 1, 100, 2, 16)
    >>> rope = Rope(head_dim=16, pairing="half")
    >>> out = relative_attention(q, k, v, rope, ReRope(width=32))
    >>> last = relative_attention(q[:, -1:], k, v, rope, ReRope(width=32))
    >>> bool(torch.allclose(last, out[:, -1:], atol=1e-5))
    True
    """
    q, k, v = tokens_first([q, k, v], heads_first)
    _check_shapes(q, k, v)
    check_rope(rope)
    ARRAYS.check_heads("q", q, head_dim=rope.head_dim)
    if not isinstance(cast(object, distance), Distance):
        raise SpecError(f"distance must be a ReRope or SelfExtend, got {type(distance).__name__}")
    with outside_autocast(q.device):
        return tokens_first([_attend(q, k, v, rope, distance)], heads_first)[0]


def _attend(q: Tensor, k: Tensor, v: Tensor, rope: Rope, distance: Distance) -> Tensor:
    factor = q.shape[-1] ** -0.5 * rope.softmax_factor
    new, seq, width = q.shape[1], k.shape[1], distance.width
    positions = torch.arange(seq, device=q.device)
    far_positions_q, far_positions_k = distance.far_positions(positions)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    # [batch, num_kv_heads, group, seq, head_dim], with a group of 1 for keys and values
    near_q, far_q = (
        _group_heads(rotate(q, p[seq - new :], rope).to(dtype) * factor, k.shape[2])
        for p in (positions, far_positions_q)
    )
    near_k, far_k = (
        _group_heads(rotate(k, p, rope).to(dtype), k.shape[2]) for p in (positions, far_positions_k)
    )
    values = _group_heads(v.to(dtype), k.shape[2])
    parts: list[Tensor] = []
    # an exported program has one graph for all lengths, so it must not depend on the length
    is_exported = is_exporting()
    for start in [0] if is_exported else range(0, new, CHUNK):
        stop = new if is_exported else min(start + CHUNK, new)
        first, last = seq - new + start, seq - new + stop  # positions of these queries
        # keys before `near_start` are far from all of these queries, keys from `far_stop` on are
        # near to all, and only those between need both scores
        near_start, far_stop = 0, last
        if not is_exported:
            near_start, far_stop = max(0, first - width + 1), max(0, last - width)
        # [batch, num_kv_heads, group, queries, keys]
        near_scores = near_q[..., start:stop, :] @ near_k[..., near_start:last, :].mT
        far = far_q[..., start:stop, :] @ far_k[..., :far_stop, :].mT
        q_positions, overlap = positions[first:last, None], far_stop - near_start
        is_near = q_positions - positions[near_start:far_stop] < width
        mixed = torch.where(is_near, near_scores[..., :overlap], far[..., near_start:])
        scores = torch.cat((far[..., :near_start], mixed, near_scores[..., overlap:]), dim=-1)
        scores = scores.masked_fill(positions[:last] > q_positions, -torch.inf)
        parts.append(scores.softmax(-1) @ values[..., :last, :])
    y = torch.cat(parts, dim=-2) if parts else near_q
    # [batch, num_kv_heads, group, new, head_dim] -> [batch, new, num_heads, head_dim]
    return y.flatten(1, 2).transpose(1, 2).to(q.dtype)


def _group_heads(x: Tensor, num_kv_heads: int) -> Tensor:
    """``[batch, seq, heads, head_dim]`` as ``[batch, num_kv_heads, group, seq, head_dim]``."""
    batch, seq, heads, head_dim = x.shape
    x = x.reshape(batch, seq, num_kv_heads, heads // num_kv_heads, head_dim)
    return x.permute(0, 2, 3, 1, 4)


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        ARRAYS.check_kind(name, x)
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape:
        raise TensorError(
            "q, k and v must be [batch, seq, heads, head_dim], k and v of one shape, "
            f"got {list(q.shape)}, {list(k.shape)} and {list(v.shape)}"
        )
    same_batch_and_width = (q.shape[0], q.shape[3]) == (k.shape[0], k.shape[3])
    shares_heads = k.shape[2] > 0 and q.shape[2] % k.shape[2] == 0
    if not (same_batch_and_width and shares_heads and q.shape[1] <= k.shape[1]):
        raise TensorError(
            "q must have the last tokens of k, the same batch and head_dim, and a multiple of its "
            f"heads, got {list(q.shape)} and {list(k.shape)}"
        )
