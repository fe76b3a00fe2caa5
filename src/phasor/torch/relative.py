"""Attention by a distance that is bent beyond a window: ReRoPE, its leaky form, Self-Extend.

Rotations see distances as they are. A bent one is two rotations: keys nearer than ``width`` are
scored with queries and keys where they stand, keys further away with both moved to other
positions, whose difference is the bent distance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from phasor._checks import number, whole
from phasor.errors import SpecError, TensorError
from phasor.rope import Rope
from phasor.torch._arguments import check_heads, check_is_tensor
from phasor.torch._attend import CHUNK, logit_factors
from phasor.torch._internals import outside_autocast
from phasor.torch.functional import rotate


@dataclass(frozen=True)
class ReRope:
    """ReRoPE: the distance ``r`` becomes ``min(r, width)`` (Su, https://kexue.fm/archives/9708).

    >>> import torch
    >>> query, key = ReRope(width=4).far(torch.arange(10))
    >>> (query[9] - key[:7]).tolist()  # distances 9 to 3, of which those from 4 on are used
    [4, 4, 4, 4, 4, 4, 4]
    """

    width: int

    def __post_init__(self) -> None:
        whole("width", self.width, least=1)

    def far(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Positions of queries and of keys whose difference is the bent distance."""
        nowhere = torch.zeros_like(positions)
        return nowhere + self.width, nowhere


@dataclass(frozen=True)
class LeakyReRope:
    """Leaky ReRoPE: beyond ``width``, ``r`` becomes ``width + (r - width) / factor`` (Su, ibid.).

    >>> import torch
    >>> query, key = LeakyReRope(width=4, factor=2.0).far(torch.arange(10))
    >>> (query[9] - key[:6]).tolist()
    [6.5, 6.0, 5.5, 5.0, 4.5, 4.0]
    """

    width: int
    factor: float

    def __post_init__(self) -> None:
        whole("width", self.width, least=1)
        object.__setattr__(self, "factor", number("factor", self.factor, above=0))

    def far(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Positions of queries and of keys whose difference is the bent distance."""
        places = positions.double()
        # one division of whole numbers: width - width / factor would round twice
        return (places + self.width * (self.factor - 1)) / self.factor, places / self.factor


@dataclass(frozen=True)
class SelfExtend:
    """Self-Extend: distances from ``width`` on are those of groups of tokens (2401.01325).

    ``m - n`` becomes ``m // group + width - width // group - n // group``. The same distance is
    bent differently from one query to the next, by at most one.

    >>> import torch
    >>> query, key = SelfExtend(width=4, group=2).far(torch.arange(10))
    >>> (query[9] - key[:6]).tolist()
    [6, 6, 5, 5, 4, 4]
    """

    width: int
    group: int

    def __post_init__(self) -> None:
        whole("width", self.width, least=1)
        whole("group", self.group, least=1)

    def far(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Positions of queries and of keys whose difference is the bent distance."""
        grouped = positions // self.group
        return grouped + (self.width - self.width // self.group), grouped


Distance = ReRope | LeakyReRope | SelfExtend


def relative_attention(q: Tensor, k: Tensor, v: Tensor, rope: Rope, distance: Distance) -> Tensor:
    """Causal attention by bent distances: scores ``qᵀ R(-f(m, n)) k``.

    ``f(m, n)`` is ``m - n`` below ``distance.width``, and what ``distance`` makes of it beyond.

    Each score is computed once, but for a strip one block of queries wide where both kinds of
    distance occur. What is held is the scores of 512 queries; for training, where autograd keeps
    them all, checkpoint it. Scores and softmax are float32 at least, under autocast too.

    Args:
        q: ``[batch, new, query_heads, head_dim]``, not rotated: the last ``new`` of the tokens.
        k: ``[batch, seq, key_heads, head_dim]``, not rotated, of all tokens. Cache keys as they
            are: no rotation of a key serves all distances.
        v: The same shape.
        rope: Its `attention_factor` and softmax factor are applied as in `RotaryAttention`.
        distance: `ReRope`, `LeakyReRope` or `SelfExtend`.

    Returns:
        ``[batch, new, query_heads, head_dim]``.

    Raises:
        TensorError: If a shape does not fit.
        PositionError: If the Rope has several axes, along which distances are not one number.
        SpecError: If ``rope.scaling`` is a rule, or ``distance`` is none of the three.

    >>> import torch
    >>> from phasor import Rope
    >>> q, k, v = torch.randn(3, 1, 100, 2, 16)
    >>> rope = Rope(head_dim=16, pairing="half")
    >>> out = relative_attention(q, k, v, rope, ReRope(width=32))
    >>> last = relative_attention(q[:, -1:], k, v, rope, ReRope(width=32))
    >>> bool(torch.allclose(last, out[:, -1:], atol=1e-5))
    True
    """
    _check(q, k, v)
    check_heads("q", q, rope)
    if not isinstance(cast(object, distance), Distance):
        raise SpecError(
            f"distance must be a ReRope, LeakyReRope or SelfExtend, got {type(distance).__name__}"
        )
    with outside_autocast(q.device):
        return _attended(q, k, v, rope, distance)


def _attended(q: Tensor, k: Tensor, v: Tensor, rope: Rope, distance: Distance) -> Tensor:
    gain, factor = logit_factors(rope, q.shape[-1])
    new, seq, width = q.shape[1], k.shape[1], distance.width
    positions = torch.arange(seq, device=q.device)
    far_query, far_key = distance.far(positions)
    here = positions[seq - new :]
    kind = torch.float64 if q.dtype == torch.float64 else torch.float32
    # [batch, key_heads, queries of the key, tokens, head_dim], one for keys
    near_q, far_q = (
        _grouped(rotate(q, at, rope, gain=gain).to(kind) * factor, k.shape[2])
        for at in (here, far_query[seq - new :])
    )
    near_k, far_k = (
        _grouped(rotate(k, at, rope, gain=gain).to(kind), k.shape[2]) for at in (positions, far_key)
    )
    values = _grouped(v.to(kind), k.shape[2])
    done: list[Tensor] = []
    for start in range(0, new, CHUNK):
        stop = min(start + CHUNK, new)
        first, last = seq - new + start, seq - new + stop  # places of these queries
        # keys before `mixed` are far from all of them, keys from `close` on are near to all
        mixed, close = max(0, first - width + 1), max(0, last - width)
        near = near_q[..., start:stop, :] @ near_k[..., mixed:last, :].mT
        far = far_q[..., start:stop, :] @ far_k[..., :close, :].mT
        own = positions[first:last, None]
        strip = own - positions[mixed:close] < width
        both = torch.where(strip, near[..., : close - mixed], far[..., mixed:])
        scores = torch.cat((far[..., :mixed], both, near[..., close - mixed :]), dim=-1)
        scores = scores.masked_fill(positions[:last] > own, -torch.inf)
        done.append(scores.softmax(-1) @ values[..., :last, :])
    gathered = torch.cat(done, dim=-2) if done else near_q
    return gathered.flatten(1, 2).transpose(1, 2).to(q.dtype)


def _grouped(x: Tensor, key_heads: int) -> Tensor:
    batch, seq, heads, width = x.shape
    return x.reshape(batch, seq, key_heads, heads // key_heads, width).permute(0, 2, 3, 1, 4)


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_is_tensor(name, x)
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape:
        raise TensorError(
            "q, k and v must be [batch, seq, heads, head_dim], k and v of one shape, "
            f"got {list(q.shape)}, {list(k.shape)} and {list(v.shape)}"
        )
    shared = (q.shape[0], q.shape[3]) == (k.shape[0], k.shape[3])
    if not shared or k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise TensorError(
            "q must have the batch and head_dim of k and a multiple of its heads, "
            f"got {list(q.shape)} and {list(k.shape)}"
        )
    if q.shape[1] > k.shape[1]:
        raise TensorError(f"q must be the last tokens of k: at most {k.shape[1]}, got {q.shape[1]}")
