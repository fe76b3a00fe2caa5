"""The operators on sharded tensors, and attention with the sequence sharded.

Importing this module registers the operators' rules for ``torch.distributed.tensor.DTensor``.
`phasor.torch` does not import it, because DTensor takes longer to load than all of phasor.

A rotation mixes neither tokens nor heads. So batch, sequence and heads may be sharded, and every
rank rotates its own shard, forward and backward, without communication. Only ``head_dim`` cannot be
sharded, because a rotation needs both coordinates of a pair.

Rules are registered for ``torch_dispatch`` instead of as a sharding strategy of DTensor, for two
reasons: ``register_sharding`` does not support operators that return a list, and if no strategy
fits, DTensor redistributes the tensors until one does, which may gather them; here that is an
error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from phasor._checks import choice
from phasor._tensors import names_of
from phasor.errors import PositionError, SpecError, TensorError
from phasor.positions import context_parallel
from phasor.torch._operator.arguments import Turn
from phasor.torch._operator.text import count_axes
from phasor.torch.attention import RotaryAttention, attend
from phasor.torch.rotation import Rotation


def _turn_sharded(_type: type, op: Callable[..., Any], _types: Any, args: Any, _kwargs: Any) -> Any:
    """The rotation operator, or its in-place version, on this rank's shards."""
    call = Turn(*args)
    xs = call.xs
    with torch.no_grad():  # autograd runs before this dispatch
        mesh, token_dims = _check_sharding(xs)
        cos, sin = (
            _local_part(row, mesh, token_dims, xs[0].shape[:-2]) for row in (call.cos, call.sin)
        )
        shards = [cast(DTensor, x).to_local() for x in xs]
        outs = op(*call._replace(xs=shards, cos=cos, sin=sin))
        if outs is None:
            increment_version(xs)
            return None
        return [_from_local(y, cast(DTensor, x)) for y, x in zip(outs, xs, strict=True)]


def _make_rows_sharded(
    _type: type, op: Callable[..., Any], _types: Any, args: Any, _kwargs: Any
) -> tuple[DTensor, DTensor]:
    """Cos and sin of this rank's positions, sharded like the positions."""
    positions, text, *rest = args
    last = positions.dim() - 1
    if count_axes(text) > 1 and any(p.is_shard(last) for p in positions.placements):
        raise PositionError(
            f"positions must not be sharded in their last dimension, the axes, got "
            f"{list(positions.placements)}"
        )
    mesh, placements = positions.device_mesh, positions.placements
    rows = op(positions.to_local(), text, *rest)
    tokens = positions.shape[:-1] if count_axes(text) > 1 else positions.shape
    shape = torch.Size((*tokens, rows[0].shape[-1]))
    stride = torch.empty(shape, device="meta").stride()
    cos, sin = (
        DTensor.from_local(row, mesh, placements, run_check=False, shape=shape, stride=stride)
        for row in rows
    )
    return cos, sin


def _check_sharding(xs: Sequence[Tensor]) -> tuple[DeviceMesh, list[int | None]]:
    """The mesh, and for each of its dimensions the token dimension that it shards, if any.

    Every rank must hold whole heads, and the same tokens of each tensor.
    """
    token_dims: list[list[int | None]] = []
    for name, x in zip(names_of(xs), xs, strict=True):
        if not isinstance(x, DTensor):
            raise TensorError(
                f"{name} must be a DTensor like the other argument, got a torch.Tensor; convert it "
                f"with DTensor.from_local"
            )
        token_dims.append([_sharded_token_dim(name, x, placement) for placement in x.placements])
    q, k = cast(DTensor, xs[0]), cast(DTensor, xs[-1])
    if q.device_mesh != k.device_mesh or token_dims[0] != token_dims[-1]:
        raise TensorError(
            "q and k must have the same sharding in batch and sequence, on one mesh, got "
            f"{list(q.placements)} and {list(k.placements)}; rotate them one by one"
        )
    return q.device_mesh, token_dims[0]


def _sharded_token_dim(name: str, x: Tensor, placement: Placement) -> int | None:
    """The dimension of batch or sequence that ``placement`` shards; None if neither."""
    if type(placement) is Shard:
        dim = cast(int, placement.dim)
        if dim < x.dim() - 1:
            return dim if dim < x.dim() - 2 else None
        raise TensorError(
            f"{name} must not be sharded in head_dim, because pairs turn together, got "
            f"{placement}; "
            f"redistribute it to heads, Shard({x.dim() - 2})"
        )
    # partial sums may be rotated before they are added up: a rotation is linear
    is_partial_sum = type(placement) is Partial and placement.reduce_op in ("sum", "avg")
    if not is_partial_sum and not placement.is_replicate():
        raise TensorError(
            f"{name} must be replicated, a partial sum, or sharded in batch, sequence or heads, "
            f"got {placement}; redistribute it first"
        )
    return None


def _local_part(
    whole: Tensor, mesh: DeviceMesh, token_dims: Sequence[int | None], tokens: Sequence[int]
) -> Tensor:
    """The part of cos or sin that belongs to this rank's tokens.

    ``whole`` is a DTensor, or a plain tensor that is the same on every rank; its last dimension is
    pairs. ``mesh`` and ``token_dims`` come from `_check_sharding`.
    """
    if not isinstance(whole, DTensor):
        whole = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    num_missing = len(tokens) - (
        whole.dim() - 1
    )  # leading dimensions may be missing, to be broadcast
    placements: list[Placement] = []
    for dim in token_dims:
        if dim is None or dim < num_missing or whole.shape[dim - num_missing] != tokens[dim]:
            placements.append(Replicate())
        else:
            placements.append(Shard(dim - num_missing))
    communicates = any(
        old != new and not old.is_replicate()
        for old, new in zip(whole.placements, placements, strict=False)
    )
    if communicates or whole.device_mesh != mesh:
        raise PositionError(
            "positions, or your cos and sin, must be replicated, or sharded with the tokens as "
            f"{placements} on their mesh, got {list(whole.placements)}; or pass all of them as a "
            "plain tensor"
        )
    # redistributing from replicated to sharded is a local slice
    return whole.redistribute(placements=placements).to_local()


def _from_local(y: Tensor, x: DTensor) -> DTensor:
    """This rank's ``y`` as a shard of a DTensor like ``x``."""
    meta = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    stride = torch.empty_like(meta).stride()
    mesh, placements = x.device_mesh, x.placements
    return DTensor.from_local(y, mesh, placements, run_check=False, shape=x.shape, stride=stride)


_LIBRARY = torch.library.Library("phasor", "FRAGMENT")
for _name, _rule in (
    ("phasor::cos_sin", _make_rows_sharded),
    ("phasor::turn", _turn_sharded),
    ("phasor::turn_", _turn_sharded),
):
    torch.library.register_torch_dispatch(_name, DTensor, _rule, lib=_LIBRARY)


class GatheredKeys(ParallelStyle):
    """Context parallelism for a `RotaryAttention`: queries stay, keys and values are gathered.

    For ``torch.distributed.tensor.parallel.parallelize_module``. On every rank, the layer takes and
    returns the tokens ``phasor.positions.context_parallel(length, rank, world_size, layout)`` of a
    sequence. Each rank rotates its own tokens; keys and values are gathered in one collective (and
    their gradients returned in another), and each query attends to the same keys as on one machine.

    So a rank holds the keys and values of the whole sequence while a layer runs, and computes
    scores in blocks of 512 queries. Ring attention needs less memory; torch has it for its CUDA
    kernels.

    Args:
        layout: ``"zigzag"``, which gives every rank the same work in causal attention, or
            ``"contiguous"``.

    >>> GatheredKeys("zigzag").layout
    'zigzag'
    """

    def __init__(self, layout: Literal["contiguous", "zigzag"]) -> None:
        super().__init__()
        self.layout = choice("layout", layout, ("contiguous", "zigzag"))

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if type(module) is not RotaryAttention:
            raise SpecError(
                f"module must be a phasor.torch.RotaryAttention, got {type(module).__name__}; "
                "apply GatheredKeys to the layer itself, and before fully_shard"
            )
        if device_mesh.ndim != 1:
            raise SpecError(
                f"device_mesh must have one dimension, got {device_mesh.ndim}; use the one that "
                "shares the sequence, such as mesh['context']"
            )
        # in place, because parallelize_module keeps the original module
        module.__class__ = _GatheringAttention
        gathering = cast(_GatheringAttention, module)
        gathering.mesh, gathering.layout = device_mesh, self.layout
        return gathering


class _GatheringAttention(RotaryAttention):
    """The class of a `RotaryAttention` after `GatheredKeys`."""

    mesh: DeviceMesh
    layout: Literal["contiguous", "zigzag"]

    def forward(
        self, x: Tensor, positions: Tensor | Rotation | None = None, **options: Any
    ) -> Tensor:
        """The attention output of this rank's tokens; by default at the positions of the layout."""
        for name, value in options.items():
            if value is not None:
                raise SpecError(
                    f"{name} must be None if keys are gathered from other ranks, got "
                    f"{type(value).__name__}; the layer supports only sequences of one length "
                    "without padding"
                )
        if positions is None and (self.rope is None or self.rope.axes.n_axes == 1):
            positions = self._token_indices(x)[self.mesh.get_local_rank()]
        return super().forward(x, positions, **options)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
        indices = self._token_indices(q)
        # [batch, seq, heads, 2 * head_dim]: one collective instead of two
        keys_and_values = torch.cat((k, v), dim=-1)
        local = DTensor.from_local(keys_and_values, self.mesh, [Shard(1)], run_check=False)
        # the gradient of a key is a sum over the queries of every rank
        full = local.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        # [batch, ranks * seq, heads, 2 * head_dim], rank after rank -> in the order of the tokens
        keys, values = full[:, indices.flatten().argsort()].chunk(2, dim=-1)
        options: dict[str, Any] = {"dropout": self._current_dropout()}
        if self.causal:
            rank_indices = indices[self.mesh.get_local_rank()].unsqueeze(0)
            options |= {"window": self.window, "index": rank_indices}
        return attend(q, keys, values, self._factor, causal=self.causal, **options)

    def _token_indices(self, x: Tensor) -> Tensor:
        """The tokens of each rank, ``[ranks, seq]``, if ``x`` is ``[batch, seq, ...]``."""
        ranks = self.mesh.size()
        length = x.shape[1] * ranks
        indices = [context_parallel(length, rank, ranks, self.layout) for rank in range(ranks)]
        return torch.from_numpy(np.stack(indices)).to(x.device)
