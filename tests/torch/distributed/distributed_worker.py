"""What every process does in the tests of many machines; rank 0 writes down what it measured.

torchrun --standalone --nproc-per-node 2 FOLDER/distributed_worker.py measured.json [steps]
"""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as nnf
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import context_parallel as torch_context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention as ring
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from phasor import Rope
from phasor.positions import context_parallel
from phasor.torch import RotaryAttention, rotate_qk
from phasor.torch.distributed import GatheredKeys

ROPE = Rope(head_dim=16, pairing="half")
EXAMPLE = runpy.run_path(str(Path(__file__).parents[3] / "examples" / "train_parallel.py"))
BATCH, LENGTH = 2, 16


class HeadsAttention(RotaryAttention):
    """Queries, keys and values are DTensors sharded in heads, from projection to projection."""

    mesh: DeviceMesh

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        done = super()._attend(q.to_local(), k.to_local(), v.to_local(), *rest)
        return DTensor.from_local(done, self.mesh, [Shard(2)], run_check=False)


class TokensAttention(RotaryAttention):
    """DTensors sharded in the sequence; for attention alone they change places with the heads."""

    mesh: DeviceMesh

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        heads = [x.redistribute(placements=[Shard(2)]).to_local() for x in (q, k, v)]
        done = super()._attend(*heads, *rest)
        done = DTensor.from_local(done, self.mesh, [Shard(2)], run_check=False)
        return done.redistribute(placements=[Shard(1)])


def layers(kind: type[RotaryAttention], mesh: DeviceMesh, plan: dict[str, ParallelStyle]) -> Any:
    """Two attention layers of ``kind``, cut up as ``plan`` says."""

    def cut(model: nn.Module) -> None:
        for block in model.blocks:
            block.attention.__class__ = kind
            block.attention.mesh = mesh
        parallelize_module(model, mesh, {f"blocks.*.{name}": how for name, how in plan.items()})

    return cut


def sharded_in_heads(mesh: DeviceMesh) -> Callable[[nn.Module], None]:
    """The operator meets DTensors whose heads are shared out."""
    columns = ColwiseParallel(use_local_output=False)
    norm = SequenceParallel(sequence_dim=2)
    names = ("q_proj", "k_proj", "v_proj")
    plan: dict[str, ParallelStyle] = {f"attention.{name}": columns for name in names}
    plan |= {"attention.q_norm": norm, "attention.k_norm": norm}
    plan["attention.o_proj"] = RowwiseParallel()
    return layers(HeadsAttention, mesh, plan)


def sharded_in_tokens(mesh: DeviceMesh) -> Callable[[nn.Module], None]:
    """The operator meets DTensors whose tokens are shared out; positions are given whole."""
    plan: dict[str, ParallelStyle] = {
        "attention": Both(
            PrepareModuleInput(
                input_layouts=(Replicate(), None), desired_input_layouts=(Shard(1), None)
            ),
            PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate()),
        )
    }
    return layers(TokensAttention, mesh, plan)


class Both(ParallelStyle):
    """Whole weights, and one style after another."""

    def __init__(self, *styles: ParallelStyle) -> None:
        super().__init__()
        self.styles = styles

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for part in module.modules():
            for name, weight in list(part.named_parameters(recurse=False)):
                whole = distribute_tensor(weight.detach(), device_mesh, [Replicate()])
                part.register_parameter(name, nn.Parameter(whole))
        for style in self.styles:
            style._apply(module, device_mesh)
        return module


def train(
    cut: Callable[[nn.Module], None] | None, rope: Rope | None, steps: int
) -> tuple[list[float], dict[str, int]]:
    """Losses of the example's model, and the collectives of the first step."""
    torch.manual_seed(0)
    model = EXAMPLE["Model"](rope)
    if cut is not None:
        cut(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses: list[float] = []
    counts: dict[str, int] = {}
    for step in range(steps):
        tokens = torch.randint(256, (BATCH, LENGTH + 1)) % (step % 3 + 7)
        with CommDebugMode() as collectives:
            logits = model(tokens[:, :-1], torch.arange(LENGTH))
            loss = nnf.cross_entropy(logits.flatten(0, 1).double(), tokens[:, 1:].flatten())
            loss.backward()
        counts = counts or named(collectives)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, counts


def named(collectives: CommDebugMode) -> dict[str, int]:
    """How often each collective was called."""
    return {str(op).split(".")[-1]: n for op, n in collectives.get_comm_counts().items() if n}


def operator(mesh: DeviceMesh) -> dict[str, Any]:
    """A query sharded in heads and a key too few to be: errors against one process, collectives."""
    torch.manual_seed(1)
    positions = torch.arange(6) - 2
    q, k = (torch.randn(2, 6, heads, 16, dtype=torch.float64) for heads in (4, 1))
    q.requires_grad_()
    right = rotate_qk(q, k, positions, ROPE)
    (right[0] ** 2 / 2).sum().backward()
    sharded = distribute_tensor(q.detach(), mesh, [Shard(2)]).requires_grad_()
    whole = distribute_tensor(k, mesh, [Replicate()])
    with CommDebugMode() as collectives:
        turned = rotate_qk(sharded, whole, positions, ROPE)
        turned[0].backward(turned[0].detach())
    pairs = (*zip(turned, right, strict=True), (sharded.grad, q.grad))
    return {
        "placements": [str(t.placements) for t in (*turned, sharded.grad)],
        "error": max((a.full_tensor() - b).abs().max().item() for a, b in pairs),
        "collectives": named(collectives),
    }


def gathered(mesh: DeviceMesh, layout: Any, **options: Any) -> dict[str, Any]:
    """One layer with gathered keys against the same layer on one process."""
    torch.manual_seed(2)
    layer = RotaryAttention(ROPE, 32, 4, 2, dtype=torch.float64, **options)
    x, given = (torch.randn(2, LENGTH, 32, dtype=torch.float64) for _ in range(2))
    x.requires_grad_()
    right = layer(x)
    right.backward(given)
    grads = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()

    here = torch.from_numpy(context_parallel(LENGTH, mesh.get_rank(), mesh.size(), layout))
    parallelize_module(layer, mesh, GatheredKeys(layout))
    mine = x.detach()[:, here].requires_grad_()
    with CommDebugMode() as collectives:
        done = layer(mine)
        done.backward(given[:, here])
    for p in layer.parameters():
        dist.all_reduce(p.grad)
    off = [done - right[:, here], mine.grad - x.grad[:, here]]
    off += [p.grad - g for p, g in zip(layer.parameters(), grads, strict=True)]
    worst = torch.stack([o.detach().abs().max() for o in off]).max()
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return {"error": worst.item(), "collectives": named(collectives)}


def through_torchs_ring(mesh: DeviceMesh) -> dict[str, Any]:
    """One layer under torch's own context parallelism, against the same layer on one process.

    Its ring attention knows kernels for CUDA alone; the one for processors is put in their place.
    """
    forward_op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    backward_op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    group = mesh.get_group()

    def placed(values: Any) -> tuple[DTensor, ...]:
        return tuple(DTensor.from_local(x, mesh, [Shard(2)], run_check=False) for x in values)

    def forward(_op: Any, args: Any, options: Any) -> tuple[DTensor, ...]:
        def kernel(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Any:
            return forward_op(q, k, v, 0.0, is_causal, **options)

        q, k, v = (x.to_local() for x in args[:3])
        return placed(ring._templated_ring_attention(group, 2, kernel, q, k, v, is_causal=True))

    def backward(_op: Any, args: Any, options: Any) -> tuple[DTensor, ...]:
        def kernel(is_causal: bool, **given: Tensor) -> Any:
            names = ("grad_out", "query", "key", "value", "out", "logsumexp")
            return backward_op(*(given[name] for name in names), 0.0, is_causal, **options)

        grad, *rest = (x.to_local().contiguous() for x in args[:6])
        template = ring._templated_ring_attention_backward
        return placed(template(group, 2, kernel, grad, "grad_out", *rest, is_causal=True))

    ring.custom_ops.update({forward_op: forward, backward_op: backward})
    torch.manual_seed(3)
    layer = RotaryAttention(ROPE, 32, 2, dtype=torch.float64)
    x, given = (torch.randn(2, LENGTH, 32, dtype=torch.float64) for _ in range(2))
    right = layer(x)
    right.backward(given)
    grads = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    here = torch.from_numpy(context_parallel(LENGTH, mesh.get_rank(), mesh.size(), "zigzag"))
    mine, wanted = x[:, here], given[:, here]
    ring._cp_options.convert_to_f32 = False
    with torch_context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
        same = torch.equal(x, mine)
        done = layer(x, here)
        done.backward(wanted)
    for p in layer.parameters():
        dist.all_reduce(p.grad)
    off = [done - right[:, here]]
    off += [p.grad - g for p, g in zip(layer.parameters(), grads, strict=True)]
    return {"error": max(o.detach().abs().max().item() for o in off), "same tokens": same}


def trained(mesh: DeviceMesh, steps: int) -> dict[str, Any]:
    """Losses against one process, and collectives with the rotation and without."""
    plain, _ = train(None, ROPE, steps)
    measured: dict[str, Any] = {}
    for name, cut in (("heads", sharded_in_heads(mesh)), ("tokens", sharded_in_tokens(mesh))):
        losses, collectives = train(cut, ROPE, steps)
        _, without = train(cut, None, steps=1)
        off = max(abs(a - b) for a, b in zip(losses, plain, strict=True))
        measured[name] = {"error": off, "collectives": collectives, "without": without}
    return measured


def main() -> None:
    """Everything, on as many processes as there are."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    measured: dict[str, Any] = {
        "operator": operator(mesh),
        "zigzag": gathered(mesh, "zigzag"),
        "contiguous": gathered(mesh, "contiguous"),
        "window": gathered(mesh, "zigzag", window=5),
        "full": gathered(mesh, "zigzag", causal=False),
        "ring": through_torchs_ring(mesh),
    }
    if len(sys.argv) > 2:
        measured |= trained(mesh, int(sys.argv[2]))
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(measured))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
