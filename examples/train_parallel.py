"""Train a small transformer on one process or on many; the training is the same.

    python examples/train_parallel.py
    torchrun --standalone --nproc-per-node 4 examples/train_parallel.py --tensor 2 --sequence
    torchrun --standalone --nproc-per-node 4 examples/train_parallel.py --context 2 --bf16

Under torchrun the model is made on the meta device, cut to pieces and filled. What is not given to
--tensor and --context shares out the batch. The text to learn is this file; every run prints the
same losses.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as nnf
from rich.progress import track
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from phasor import Rope
from phasor.positions import context_parallel
from phasor.torch import RotaryAttention
from phasor.torch.distributed import GatheredKeys

WIDTH, LENGTH, BATCH = 64, 64, 8
ROPE = Rope(head_dim=16, pairing="half")


class Block(nn.Module):
    """Attention and a feed-forward layer, each added to what came in."""

    def __init__(self, rope: Rope | None) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(WIDTH)
        self.attention = RotaryAttention(rope, WIDTH, 8, 4, head_dim=16, qk_norm=True)
        self.feed_norm = nn.RMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), positions)
        return x + self.down(nnf.gelu(self.up(self.feed_norm(x))))


class Model(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, rope: Rope | None = ROPE) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(Block(rope) for _ in range(2))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, positions)
        return self.head(self.norm(x))


def cut_heads(model: Model, mesh: DeviceMesh, *, sequence: bool) -> None:
    """Each rank gets some of the heads; between layers, also some of the tokens if asked for."""
    between = Shard(1) if sequence else Replicate()
    heads = SequenceParallel(sequence_dim=2, use_local_output=True)
    plan = {
        "attention": PrepareModuleInput(
            input_layouts=(between, None), desired_input_layouts=(Replicate(), None)
        ),
        "attention.q_proj": ColwiseParallel(),
        "attention.k_proj": ColwiseParallel(),
        "attention.v_proj": ColwiseParallel(),
        "attention.q_norm": heads,
        "attention.k_norm": heads,
        "attention.o_proj": RowwiseParallel(output_layouts=between),
        "up": ColwiseParallel(input_layouts=between),
        "down": RowwiseParallel(output_layouts=between),
    }
    ends = {}
    if sequence:
        plan |= {"attention_norm": SequenceParallel(), "feed_norm": SequenceParallel()}
        ends = {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
    parallelize_module(model, mesh, ends | {f"blocks.*.{name}": how for name, how in plan.items()})
    for block in model.blocks:  # the heads that are left here
        block.attention.num_heads //= mesh.size()
        block.attention.num_kv_heads //= mesh.size()


def spread(model: Model, mesh: DeviceMesh, *, sequence: bool, bf16: bool) -> Model:
    """A model with the weights of ``model``, of which each rank holds a part."""
    with torch.device("meta"):
        parts = Model(model.blocks[0].attention.rope)
    if mesh["tensor"].size() > 1:
        cut_heads(parts, mesh["tensor"], sequence=sequence)
    if mesh["context"].size() > 1:
        layers = {"blocks.*.attention": GatheredKeys("zigzag")}
        parallelize_module(parts, mesh["context"], layers)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
    for module in (*parts.blocks, parts):
        fully_shard(module, mesh=mesh["context", "data"], mp_policy=policy)
    parts.to_empty(device="cpu")
    set_model_state_dict(parts, model.state_dict(), options=StateDictOptions(full_state_dict=True))
    return parts


def main() -> None:
    """Train, on whatever there is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tensor", type=int, default=1, help="ranks that share the heads")
    parser.add_argument("--sequence", action="store_true", help="and the tokens between them")
    parser.add_argument("--context", type=int, default=1, help="ranks that share a sequence")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    options = parser.parse_args()

    torch.manual_seed(0)
    model, rank = Model(), 0
    context, data = (0, 1), (0, 1)  # this rank among those that share a sequence, or the batch
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        rank, ranks = dist.get_rank(), dist.get_world_size()
        share = ranks // options.context // options.tensor
        names = ("context", "data", "tensor")
        mesh = init_device_mesh(
            "cpu", (options.context, share, options.tensor), mesh_dim_names=names
        )
        model = spread(model, mesh, sequence=options.sequence, bf16=options.bf16)
        context, data = ((mesh.get_local_rank(name), mesh[name].size()) for name in names[:2])

    here = torch.from_numpy(context_parallel(LENGTH, *context, "zigzag"))
    text = torch.tensor(list(Path(__file__).read_bytes()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in track(range(options.steps), "training", disable=rank > 0):
        starts = torch.randint(len(text) - LENGTH, (BATCH,))  # the same on every rank
        starts = starts.chunk(data[1])[data[0]]
        tokens = text[starts[:, None] + here]
        following = text[starts[:, None] + here + 1]
        logits = model(tokens, here)
        # float64, for what is printed is compared
        loss = nnf.cross_entropy(logits.flatten(0, 1).double(), following.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        printed = loss.detach()
        if dist.is_initialized():
            dist.all_reduce(printed, dist.ReduceOp.SUM)
            printed /= dist.get_world_size()
        if rank == 0:
            print(f"step {step + 1:2} loss {printed:.9f}")
    if dist.is_initialized():
        dist.barrier()  # gloo aborts if a collective is still being put away when Python ends
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
