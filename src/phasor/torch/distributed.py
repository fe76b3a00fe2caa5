"""Many machines: the operator on sharded tensors, and attention whose tokens are shared out.

Importing this module teaches the operator about ``torch.distributed.tensor.DTensor``. It is
imported by name because DTensor takes longer to load than all of phasor.

A rotation moves nothing from one token to another, nor from head to head. So batch, sequence and
heads may be sharded, and every rank rotates what it holds, forward and backward, without a word to
the others. Only ``head_dim`` cannot be: the two coordinates of a pair have to meet.

The rule is one of ``torch_dispatch``, not one of DTensor's sharding strategies, for two reasons.
``register_sharding`` serves no operator that returns a list. And where no strategy fits, DTensor
moves the tensors until one does: a gather that nobody asked for. Here that is an error.
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

from phasor import positions as phasor_positions
from phasor._checks import choice
from phasor.errors import PositionError, SpecError, TensorError
from phasor.torch._tables import count_axes
from phasor.torch.attention import RotaryAttention, attend
from phasor.torch.kv_cache import KVCache

Layout = Literal["contiguous", "zigzag"]


def _rotate_sharded(
    _kind: type, op: Callable[..., list[Tensor] | None], _kinds: Any, args: Any, _kwargs: Any
) -> list[Tensor] | None:
    """The operator, or its in-place twin, on what this rank holds."""
    xs, angles, rope, *options = cast(tuple[Any, ...], args)
    with torch.no_grad():  # derivatives are taken care of before a DTensor gets here
        mesh, cuts = _shared_cuts(xs)
        lead = xs[0].dim() - 2
        inner = int(len(angles) == 2 or count_axes(rope) > 1)
        names = ("positions",) if len(angles) == 1 else ("cos", "sin")
        held = [
            _beside(name, a, mesh, cuts, xs[0].shape[:lead], lead - (a.dim() - inner))
            for name, a in zip(names, angles, strict=True)
        ]
        turned = op([x.to_local() for x in xs], held, rope, *options)
        if turned is None:
            increment_version(xs)
            return None
        return [_placed_like(y, x) for y, x in zip(turned, xs, strict=True)]


def _shared_cuts(xs: Sequence[Tensor]) -> tuple[DeviceMesh, list[int | None]]:
    """The mesh, and for each of its dimensions which dimension of tokens it cuts, if any.

    Raises:
        TensorError: If a rank does not hold whole heads, or not the same tokens of each tensor.
    """
    cuts: list[list[int | None]] = []
    for name, x in zip(("x",) if len(xs) == 1 else ("q", "k"), xs, strict=True):
        if not isinstance(x, DTensor):
            raise TensorError(
                f"{name} must be a DTensor where another argument is one, got a torch.Tensor; "
                "DTensor.from_local says which part of the whole it is"
            )
        cuts.append([_token_cut(name, x, placement) for placement in x.placements])
    first, last = cast(DTensor, xs[0]), cast(DTensor, xs[-1])
    if first.device_mesh != last.device_mesh or cuts[0] != cuts[-1]:
        raise TensorError(
            "q and k must be sharded alike in batch and sequence, on one mesh, got "
            f"{list(first.placements)} and {list(last.placements)}; rotate them one by one"
        )
    return first.device_mesh, cuts[0]


def _token_cut(name: str, x: Tensor, placement: Placement) -> int | None:
    """The dimension of batch or sequence that ``placement`` cuts; None if it cuts neither."""
    if type(placement) is Shard:
        cut = cast(int, placement.dim)
        if cut < x.dim() - 1:
            return cut if cut < x.dim() - 2 else None
        raise TensorError(
            f"{name} must not be sharded in head_dim, whose pairs turn together, got {placement}; "
            f"redistribute it to heads, Shard({x.dim() - 2})"
        )
    # what is yet to be added up may be rotated first: a rotation is linear
    linear = type(placement) is Partial and placement.reduce_op in ("sum", "avg")
    if not linear and not placement.is_replicate():
        raise TensorError(
            f"{name} must be replicated, a partial sum, or sharded in batch, sequence or heads, "
            f"got {placement}; redistribute it first"
        )
    return None


def _beside(
    name: str,
    angles: Tensor,
    mesh: DeviceMesh,
    cuts: Sequence[int | None],
    tokens: Sequence[int],
    missing: int,
) -> Tensor:
    """This rank's part of positions or rows: those of the tokens that it holds.

    Args:
        name: For errors.
        angles: A DTensor, or a plain tensor that says the same on every rank.
        mesh: That of the tensors to be rotated.
        cuts: From `_shared_cuts`.
        tokens: Leading dimensions of the tensors to be rotated.
        missing: How many of these the angles leave to broadcasting.
    """
    if not isinstance(angles, DTensor):
        whole = [Replicate()] * mesh.ndim
        angles = DTensor.from_local(angles, mesh, whole, run_check=False)
    wanted: list[Placement] = []
    for cut in cuts:
        if cut is None or cut < missing or angles.shape[cut - missing] != tokens[cut]:
            wanted.append(Replicate())
        else:
            wanted.append(Shard(cut - missing))
    moves = any(
        have != want and not have.is_replicate()
        for have, want in zip(angles.placements, wanted, strict=False)
    )
    if moves or angles.device_mesh != mesh:
        raise PositionError(
            f"{name} must be replicated, or sharded with the tokens as {wanted} on their mesh, "
            f"got {list(angles.placements)}; give the whole of them as a plain tensor"
        )
    return angles.redistribute(placements=wanted).to_local()  # a slice, where anything


def _placed_like(y: Tensor, x: DTensor) -> DTensor:
    """This rank's ``y`` as part of a whole that is placed as ``x``."""
    like = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    stride = torch.empty_like(like).stride()
    where = x.device_mesh, x.placements
    return DTensor.from_local(y, *where, run_check=False, shape=x.shape, stride=stride)


_LIBRARY = torch.library.Library("phasor", "FRAGMENT")
for _name in ("phasor::rotate", "phasor::rotate_"):
    torch.library.register_torch_dispatch(_name, DTensor, _rotate_sharded, lib=_LIBRARY)


class GatheredKeys(ParallelStyle):
    """Context parallelism for a `RotaryAttention`: queries stay, keys and values are gathered.

    For ``torch.distributed.tensor.parallel.parallelize_module``. Every rank gives the layer the
    tokens ``phasor.positions.context_parallel(length, rank, world_size, layout)`` of a sequence,
    and gets back the same ones. They are rotated where they stand, keys and values are gathered
    in one collective (their gradients go home in one more), and each query sees what it would
    have seen on one machine.

    A rank thus holds the keys and values of the whole sequence while a layer runs, and scores in
    blocks of 512 queries. Ring attention holds less; torch has it for its CUDA kernels.

    Args:
        layout: ``"zigzag"``, which shares the work of causal attention evenly, or
            ``"contiguous"``.

    Raises:
        SpecError: If there is no such layout; when applied, if the module is no
            `RotaryAttention` or the mesh has more than one dimension.

    >>> GatheredKeys("zigzag").layout
    'zigzag'
    """

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.layout: Layout = choice("layout", layout, ("contiguous", "zigzag"))

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if type(module) is not RotaryAttention:
            raise SpecError(
                f"module must be a phasor.torch.RotaryAttention, got {type(module).__name__}; "
                "apply GatheredKeys before fully_shard, and to the layer itself"
            )
        if device_mesh.ndim != 1:
            raise SpecError(
                f"device_mesh must have one dimension, got {device_mesh.ndim}; take the one that "
                "shares the sequence, as mesh['context']"
            )
        # in place, for parallelize_module keeps the module it was given
        module.__class__ = _GatheringAttention
        gathering = cast(_GatheringAttention, module)
        gathering.mesh, gathering.layout = device_mesh, self.layout
        return gathering


class _GatheringAttention(RotaryAttention):
    """What `GatheredKeys` makes of a `RotaryAttention`."""

    mesh: DeviceMesh
    layout: Layout

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        cu_seqlens: Sequence[int] | Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """The attention output of this rank's tokens; positions are those of the layout if None."""
        options = {"attention_mask": attention_mask, "cu_seqlens": cu_seqlens, "cache": cache}
        for name, given in options.items():
            if given is not None:
                raise SpecError(
                    f"{name} must be None where keys are gathered from other ranks, got "
                    f"{type(given).__name__}; rows of one length without padding are shared out"
                )
        if positions is None and (self.rope is None or self.rope.axes.n_axes == 1):
            positions = self._places(x)[self.mesh.get_local_rank()]
        return super().forward(x, positions)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attention_mask: Tensor | None,
        bounds: list[int] | None,
        cache: KVCache | None,
    ) -> Tensor:
        places = self._places(q)
        joined = torch.cat((k, v), dim=-1)  # one collective instead of two
        shared = DTensor.from_local(joined, self.mesh, [Shard(1)], run_check=False)
        # every rank's queries have a share in the gradient of every key
        whole = shared.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        keys, values = whole[:, places.flatten().argsort()].chunk(2, dim=-1)
        if not self.causal:
            return attend(q, keys, values, self._factor, causal=False)
        own = places[self.mesh.get_local_rank()].unsqueeze(0)
        return attend(q, keys, values, self._factor, causal=True, window=self.window, index=own)

    def _places(self, x: Tensor) -> Tensor:
        """Which tokens each rank holds, ``[ranks, seq]``, where ``x`` is ``[batch, seq, ...]``."""
        ranks = self.mesh.size()
        length = x.shape[1] * ranks
        held = [
            phasor_positions.context_parallel(length, rank, ranks, self.layout)
            for rank in range(ranks)
        ]
        return torch.from_numpy(np.stack(held)).to(x.device)
