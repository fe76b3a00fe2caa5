"""Every rank of a mesh rotates what it holds of a tensor, and the rotation never makes ranks talk.

The other ranks are not there: torch's fake process group stands in for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import context_parallel as torch_context_parallel
from torch.distributed.tensor.parallel import parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from phasor import PositionError, Rope, SpecError, TensorError
from phasor.angles import cos_sin
from phasor.axes import Sectioned
from phasor.positions import context_parallel
from phasor.torch import (
    RotaryAttention,
    RotaryEmbedding,
    Rotation,
    rotate,
    rotate_,
    rotate_qk,
)
from phasor.torch.distributed import GatheredKeys

from ..torch_arrays import assert_rotated, normal
from ..torch_cases import turn, turn_

ROPE = Rope(head_dim=8, pairing="half", base=100.0)
AXES = Rope(head_dim=8, pairing="interleaved", base=100.0, axes=Sectioned((1, 3)))


@contextmanager
def one_of(shape: Sequence[int], rank: int) -> Iterator[DeviceMesh]:
    """The mesh as that rank sees it; the others are not there, and collectives do nothing."""
    dist.init_process_group("fake", rank=rank, world_size=prod(shape), store=FakeStore())
    try:
        # torch takes meshes of the same names for one, and remembers what the first one made
        names = tuple(f"{along} of rank {rank}" for along in range(len(shape)))
        yield init_device_mesh("cpu", tuple(shape), mesh_dim_names=names)
    finally:
        dist.destroy_process_group()


def part(x: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """What this rank holds of ``x``: piece by piece of ceil(n / ranks), the last ones short."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    for along, (placement, index) in enumerate(zip(placements, coordinate, strict=True)):
        if isinstance(placement, Shard):
            here, ranks = x.shape[placement.dim], mesh.shape[along]
            size = -(-here // ranks)
            first = min(index * size, here)
            x = x.narrow(placement.dim, first, min(size, here - first))
    return x


def sharded(x: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """``x`` as a DTensor, without a collective; for a partial sum every rank holds all of it."""
    mine = part(x, mesh, placements).clone(memory_format=torch.contiguous_format)
    sizes = {"shape": x.shape, "stride": x.stride()}
    return DTensor.from_local(mine, mesh, placements, run_check=False, **sizes)


def tokens_only(placements: Sequence[Placement], shift: int = 0) -> list[Placement]:
    """Where the positions of tensors that are placed so belong."""
    return [
        Shard(p.dim - shift) if isinstance(p, Shard) and shift <= p.dim < 2 else Replicate()
        for p in placements
    ]


PLACEMENT = st.sampled_from([Replicate(), Partial(), Shard(0), Shard(1), Shard(2)])


@given(
    shape=st.sampled_from([(3,), (2, 2)]),
    placements=st.tuples(PLACEMENT, PLACEMENT),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5)),
    form=st.sampled_from(["[seq]", "[batch, seq]", "[1, seq]", "[batch, 1]", "axes", "placed"]),
    in_place=st.booleans(),
)
@example(shape=(3,), placements=(Shard(0), Replicate()), sizes=(1, 1, 1), form="placed",
         in_place=False)  # fmt: skip
def test_every_rank_rotates_what_it_holds_and_says_nothing(
    shape: tuple[int, ...],
    placements: tuple[Placement, Placement],
    sizes: tuple[int, int, int],
    form: str,
    in_place: bool,
) -> None:
    """Whichever dimension is shared out, evenly or not, with positions of every form, and back."""
    batch, seq, _ = sizes
    rope = AXES if form == "axes" else ROPE
    x, grad = normal(*sizes, 8, seed=1), normal(*sizes, 8, seed=2)
    whole = torch.arange(batch * seq).reshape(batch, seq) * 7 - 3
    positions = {
        "[seq]": whole[0],
        "[1, seq]": whole[:1],
        "[batch, 1]": whole[:, :1],
        "axes": torch.stack((whole, whole * 2), -1),
    }.get(form, whole)
    every = positions if form == "axes" else positions.broadcast_to(batch, seq)
    where = placements[: len(shape)]
    for rank in range(prod(shape)):
        with one_of(shape, rank) as mesh, CommDebugMode() as collectives:
            mine = part(every, mesh, tokens_only(where))
            held = sharded(x, mesh, where)
            at = sharded(positions, mesh, tokens_only(where)) if form == "placed" else positions
            if in_place:
                turned = rotate_(held, at, rope)
                assert turned is held
            else:
                turned = rotate(held.requires_grad_(), at, rope)
                turned.backward(sharded(grad, mesh, where))
                assert held.grad.placements == where
                of_x = part(grad, mesh, where)
                assert_rotated(held.grad.to_local(), of_x, mine, rope, inverse=True)
            assert turned.placements == where
            assert turned.shape == x.shape
            local = turned.detach().to_local()
            assert_rotated(local, part(x, mesh, where), mine, rope)
            assert collectives.get_total_counts() == 0


@pytest.mark.parametrize("dim", [0, 1, 2], ids=["batch", "heads", "seq"])
def test_heads_may_come_first_in_a_sharded_tensor(dim: int) -> None:
    """New and in place, without communication; the result is sharded as what came."""
    x = normal(4, 2, 6, 8)
    positions = torch.arange(24).reshape(4, 6) * 7 - 3
    expected = rotate(x, positions, ROPE, heads_first=True)
    with one_of((2,), rank=1) as mesh, CommDebugMode() as collectives:
        given = sharded(x, mesh, [Shard(dim)])
        new = rotate(given, positions, ROPE, heads_first=True)
        rotate_(given, positions, ROPE, heads_first=True)
        for y in (new, given):
            assert isinstance(y, DTensor)
            assert list(y.placements) == [Shard(dim)]
            assert y.shape == x.shape
            assert torch.equal(y.to_local(), part(expected, mesh, [Shard(dim)]))
    assert collectives.get_total_counts() == 0


@pytest.mark.parametrize("form", ["rows", "pack"])
def test_the_module_counts_the_positions_of_the_whole(form: str) -> None:
    """Offsets and boundaries say where all tokens stand; each rank takes its own, in silence."""
    q, k = normal(2, 6, 4, 8), normal(2, 6, 2, 8, seed=1)
    offset = torch.tensor([40, -3])
    options: dict[str, Any] = {"offset": offset}
    places = torch.arange(6) + offset[:, None]
    if form == "pack":
        options["cu_seqlens"] = torch.tensor([0, 4, 6])
        places = torch.tensor([[40, 41, 42, 43, -3, -2]] * 2)
    for rank, dim in product(range(2), range(3)):
        with one_of((2,), rank) as mesh, CommDebugMode() as collectives:
            given = [sharded(x, mesh, [Shard(dim)]) for x in (q, k)]
            made = RotaryEmbedding(ROPE, heads_first=False)(*given, **options)
            mine = part(places, mesh, tokens_only([Shard(dim)]))
            for y, x in zip(made, given, strict=True):
                assert y.placements == (Shard(dim),)
                assert_rotated(y.to_local(), x.to_local(), mine, ROPE)
            assert collectives.get_total_counts() == 0


def test_a_query_is_sharded_in_heads_beside_a_key_that_is_whole() -> None:
    """Grouped queries: fewer keys than ranks."""
    q, k, at = normal(2, 5, 4, 8), normal(2, 5, 1, 8, seed=1), torch.arange(5)
    for rank in range(4):
        with one_of((4,), rank) as mesh, CommDebugMode() as collectives:
            turned = rotate_qk(
                sharded(q, mesh, [Shard(2)]), sharded(k, mesh, [Replicate()]), at, ROPE
            )
            assert [t.placements for t in turned] == [(Shard(2),), (Replicate(),)]
            assert_rotated(turned[0].to_local(), q[:, :, rank : rank + 1], at.expand(2, 5), ROPE)
            assert_rotated(turned[1].to_local(), k, at.expand(2, 5), ROPE)
            assert collectives.get_total_counts() == 0


def test_given_rows_go_with_their_tokens() -> None:
    """Cos and sin ``[seq, pairs]`` are cut where the sequence is."""
    x, places = normal(2, 6, 3, 8), np.arange(6) + 40
    cos, sin = (torch.from_numpy(row) for row in cos_sin(places, ROPE))
    for rank in range(2):
        with one_of((2,), rank) as mesh, CommDebugMode() as collectives:
            turned = Rotation(cos, sin, pairing="half")(sharded(x, mesh, [Shard(1)]))
            mine = slice(3 * rank, 3 * rank + 3)
            at = torch.from_numpy(places[mine]).expand(2, 3)
            assert_rotated(turned.to_local(), x[:, mine], at, ROPE)
            assert collectives.get_total_counts() == 0


@pytest.mark.parametrize("in_place", [False, True], ids=["new", "in place"])
@pytest.mark.parametrize("shape", [(2, 4, 6, 4), (2, 4, 1, 4), (1, 1, 6, 4), (4, 4)], ids=str)
def test_rows_by_head_are_cut_where_heads_are(shape: tuple[int, ...], in_place: bool) -> None:
    """Given whole; or as a DTensor, which has a gradient on every rank without communication."""
    x, grad = normal(2, 4, 6, 8), normal(2, 4, 6, 8, seed=1)
    rows = [normal(*shape, seed=seed).requires_grad_() for seed in (2, 3)]
    verb = turn_ if in_place else turn
    expected = Rotation(*rows, pairing="half")(x)
    summed = torch.autograd.grad(expected, rows, grad)
    for rank, dim in product(range(2), range(3)):
        with one_of((2,), rank) as mesh, CommDebugMode() as collectives:
            where = [Shard(dim)]
            for wants_grad in (False, True):
                given = [row.detach() for row in rows]
                if wants_grad:
                    given = [sharded(row, mesh, [Replicate()]).requires_grad_() for row in given]
                turned = verb(sharded(x, mesh, where), *given, pairing="half")
                assert turned.placements == tuple(where)
                mine = part(expected, mesh, where)
                assert torch.allclose(turned.to_local(), mine, rtol=0, atol=1e-6)
            found = torch.autograd.grad(turned, given, sharded(grad, mesh, where))
            for one, right in zip(found, summed, strict=True):
                # a row of tokens or heads that are elsewhere too has a part of the sum here
                if not one.placements[0].is_partial():
                    mine = part(right, mesh, one.placements)
                    assert torch.allclose(one.to_local(), mine, rtol=0, atol=1e-5)
            assert collectives.get_total_counts() == 0


def test_strides_are_those_of_the_input() -> None:
    """Heads first in memory stays heads first, of the whole and of the part."""
    x = normal(2, 3, 6, 8).transpose(1, 2)
    with one_of((2,), 0) as mesh:
        held = DTensor.from_local(x[:, :3], mesh, [Shard(1)], run_check=False)
        turned = rotate(held, torch.arange(6), ROPE)
    assert turned.stride() == torch.empty_like(held).stride()
    assert turned.to_local().stride() == torch.empty_like(x[:, :3]).stride()


def test_a_write_in_place_is_noticed_by_autograd() -> None:
    """What was saved for a derivative and then rotated cannot be used."""
    with one_of((2,), 0) as mesh:
        weight = sharded(normal(2, 4, 2, 8), mesh, [Shard(2)]).requires_grad_()
        x = sharded(normal(2, 4, 2, 8, seed=1), mesh, [Shard(2)])
        product = weight * x
        rotate_(x, torch.arange(4), ROPE)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward(product.detach())


@pytest.mark.parametrize("placement", [Shard(1), Shard(2)], ids=["sequence", "heads"])
@pytest.mark.compile
def test_a_compiled_rotation_of_dtensors_is_one_graph(placement: Placement) -> None:
    """Forward and backward, bit for bit what is computed without the compiler."""

    def doubled(x: Tensor, at: Tensor) -> Tensor:
        return 2 * rotate(x, at, ROPE)

    compiled = torch.compile(doubled, backend="aot_eager", fullgraph=True)
    with one_of((2,), 1) as mesh:
        results = []
        for function in (doubled, compiled):
            x = sharded(normal(2, 6, 2, 8), mesh, [placement]).requires_grad_()
            y = function(x, torch.arange(6))
            y.backward(sharded(normal(2, 6, 2, 8, seed=1), mesh, [placement]))
            assert y.placements == x.grad.placements == (placement,)
            results.append((y.detach().to_local(), x.grad.to_local()))
        assert all(map(torch.equal, *results))


@pytest.mark.compile
def test_plain_operations_of_dtensors_are_the_operator_all_the_same() -> None:
    """They do not know how positions are cut; what a compiler is told makes no difference."""

    def plain(x: Tensor, at: Tensor) -> Tensor:
        return rotate(x, at, ROPE, backend="eager")

    compiled = torch.compile(plain, backend="aot_eager", fullgraph=True)
    with one_of((2,), 1) as mesh, torch.no_grad():
        x = sharded(normal(2, 6, 2, 8), mesh, [Shard(1)])
        y = compiled(x, torch.arange(6))
        assert torch.equal(y.to_local(), plain(x, torch.arange(6)).to_local())


def wrong(mesh: DeviceMesh, placement: Placement) -> DTensor:
    """A tensor of four tokens and four heads, placed so."""
    return sharded(normal(2, 4, 4, 8), mesh, [placement])


AT = torch.arange(4)
REFUSED: dict[str, tuple[type[Exception], Any]] = {
    "x must not be sharded in head_dim, .* redistribute it to heads": (
        TensorError,
        lambda mesh: rotate(wrong(mesh, Shard(3)), AT, ROPE),
    ),
    "x must be replicated, a partial sum, .* redistribute it first": (
        TensorError,
        lambda mesh: rotate(wrong(mesh, Partial("max")), AT, ROPE),
    ),
    "k must be a DTensor like the other argument": (
        TensorError,
        lambda mesh: rotate_qk(wrong(mesh, Shard(2)), normal(2, 4, 4, 8), AT, ROPE),
    ),
    "x must be a DTensor like the other argument": (
        TensorError,
        lambda mesh: rotate(normal(2, 4, 4, 8), sharded(AT, mesh, [Replicate()]), ROPE),
    ),
    "q and k must have the same sharding in batch and sequence": (
        TensorError,
        lambda mesh: rotate_qk(wrong(mesh, Shard(1)), wrong(mesh, Replicate()), AT, ROPE),
    ),
    "positions, or your cos and sin, must be replicated": (
        PositionError,
        lambda mesh: rotate(wrong(mesh, Shard(2)), sharded(AT, mesh, [Shard(0)]), ROPE),
    ),
    "must be replicated, or sharded with the tokens as": (
        PositionError,
        lambda mesh: Rotation(
            *(sharded(normal(4, 4), mesh, [Shard(0)]) for _ in range(2)), pairing="half"
        )(wrong(mesh, Replicate())),
    ),
    "cos and sin must be DTensors if and only if x is one, because their gradient": (
        TensorError,
        lambda mesh: Rotation(*torch.ones(2, 4, 4, requires_grad=True), pairing="half")(
            wrong(mesh, Shard(2))
        ),
    ),
}


@pytest.mark.parametrize("message", REFUSED, ids=lambda text: text[:44])
def test_what_would_need_a_collective_is_refused(message: str) -> None:
    """Nothing is gathered in silence; the message says what to do."""
    kind, attempt = REFUSED[message]
    with one_of((2,), 0) as mesh, CommDebugMode() as collectives:
        with pytest.raises(kind, match=message):
            attempt(mesh)
        assert collectives.get_total_counts() == 0


def test_gathered_keys_are_for_rotary_attention_on_one_mesh_dimension() -> None:
    """Anything else is named."""
    with pytest.raises(SpecError, match="layout must be one of 'contiguous', 'zigzag'"):
        GatheredKeys("striped")  # type: ignore[arg-type]
    with one_of((2, 2), 0) as mesh:
        layer = RotaryAttention(ROPE, 16, 2)
        with pytest.raises(SpecError, match="device_mesh must have one dimension, got 2"):
            GatheredKeys("zigzag")._apply(layer, mesh)
    with one_of((2,), 0) as mesh:
        with pytest.raises(SpecError, match=r"module must be a .*RotaryAttention, got Linear"):
            parallelize_module(layer.q_proj, mesh, GatheredKeys("zigzag"))
        parallelize_module(layer, mesh, GatheredKeys("zigzag"))
        with pytest.raises(SpecError, match="cu_seqlens must be None if keys are gathered"):
            layer(torch.zeros(1, 4, 16), cu_seqlens=[0, 4])
        with pytest.raises(SpecError, match="key_value_states must be None if keys are"):
            layer(torch.zeros(1, 4, 16), key_value_states=torch.zeros(1, 4, 16))


@pytest.mark.parametrize("causal", [True, False])
def test_gathered_keys_drop_weights_in_training(causal: bool) -> None:
    """All of them, where the chance is 1."""
    with one_of((1,), 0) as mesh:
        layer = RotaryAttention(ROPE, 16, 2, causal=causal, dropout=1.0)
        parallelize_module(layer, mesh, GatheredKeys("zigzag"))
        x = normal(1, 4, 16)
        assert not layer.train()(x).any()
        assert layer.eval()(x).all()


@pytest.mark.parametrize("ranks", [2, 3])
def test_zigzag_is_what_torch_shares_out(ranks: int) -> None:
    """The same tokens, in the same order, as torch's own context parallelism."""
    for rank in range(ranks):
        with one_of((ranks,), rank) as mesh:
            shared = torch.arange(12 * ranks)
            with torch_context_parallel(mesh, buffers=[shared], buffer_seq_dims=[0]):
                held = shared.tolist()
        assert held == context_parallel(12 * ranks, rank, ranks, "zigzag").tolist()


def test_torch_has_no_ring_attention_for_processors() -> None:
    """What the documentation says of torch; when this fails, say something else there."""
    with one_of((2,), 0) as mesh:
        x, shared = normal(1, 2, 4, 8), torch.arange(8)
        with torch_context_parallel(mesh, buffers=[shared], buffer_seq_dims=[0]):
            ring = torch.nn.functional.scaled_dot_product_attention
            with pytest.raises(NotImplementedError, match="_for_cpu"):
                ring(x, x, x, is_causal=True)


def test_positions_that_mixed_precision_has_rounded_are_refused() -> None:
    """FSDP casts every floating input of a module; whole numbers pass as they are."""
    with one_of((2,), 0) as mesh:
        layer = RotaryAttention(ROPE, 16, 2)
        fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        assert layer(torch.zeros(1, 4, 16), torch.arange(4)).dtype == torch.bfloat16
        with pytest.raises(PositionError, match="bfloat16 cannot tell 256 from 257"):
            layer(torch.zeros(1, 4, 16), torch.arange(4) / 2)


class Layer(torch.nn.Module):
    """A projection whose output is rotated, as a model's own attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.rotary = torch.nn.Linear(8, 8), RotaryEmbedding(ROPE, heads_first=False)

    def forward(self, x: Tensor, offset: Tensor) -> Tensor:
        """One head of each token."""
        q = self.proj(x)[:, :, None]
        return self.rotary(q, q, offset=offset)[0]


@pytest.mark.parametrize("alone", [False, True], ids=["with its layer", "a unit of its own"])
def test_a_fully_sharded_model_rotates_as_before(alone: bool) -> None:
    """In mixed precision; the module has nothing to shard and takes whole numbers as they are."""
    layer, x, offset = Layer(), normal(2, 4, 8), torch.tensor([70_001, 5])
    with one_of((1,), 0) as mesh:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        with torch.no_grad():
            q = (x.bfloat16() @ layer.proj.weight.bfloat16().T + layer.proj.bias.bfloat16())[
                :, :, None
            ]
        if alone:
            fully_shard(layer.rotary, mesh=mesh, mp_policy=policy)
        fully_shard(layer, mesh=mesh, mp_policy=policy)
        y = layer(x, offset)
        assert set(layer.state_dict()) == {"proj.weight", "proj.bias"}
    assert y.dtype == torch.bfloat16
    # the projection itself is rounded to bfloat16 in one way or another
    room = 4 * torch.finfo(torch.bfloat16).eps * q.abs().max()
    expected = rotate(q.float(), torch.arange(4) + offset[:, None], ROPE)
    assert (y.float() - expected).abs().max() <= room
