"""Train a small transformer on one process or on many; the training is the same.

    python examples/train_parallel.py
    torchrun --standalone --nproc-per-node 4 examples/train_parallel.py --tensor 2 --sequence
    torchrun --standalone --nproc-per-node 4 examples/train_parallel.py --context 2 --bf16

Under torchrun the model is sharded on the meta device, and ranks that --tensor and --context leave
over split the batch. It learns the text of this file; every run prints the same losses.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, parallel

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
        self.attention_norm, self.feed_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = RotaryAttention(rope, WIDTH, 8, 4, head_dim=16, qk_norm=True)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), positions)
        return x + self.down(nn.functional.gelu(self.up(self.feed_norm(x))))


class Model(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, rope: Rope | None = ROPE) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(Block(rope) for _ in range(2))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, positions)
        return self.head(self.norm(x))


def shard_heads(model: Model, mesh: DeviceMesh, *, sequence: bool) -> None:
    """Each rank gets some of the heads; with ``sequence`` also some of the tokens between them."""
    whole = Replicate()
    hidden = Shard(1) if sequence else whole  # x between the layers
    given, wanted = (hidden, None), (whole, None)  # x and positions
    rows = parallel.RowwiseParallel(output_layouts=hidden)
    heads = parallel.SequenceParallel(sequence_dim=2, use_local_output=True)
    plan = {
        "attention": parallel.PrepareModuleInput(input_layouts=given, desired_input_layouts=wanted),
        **dict.fromkeys(("attention.q_norm", "attention.k_norm"), heads),
        **{f"attention.{name}_proj": parallel.ColwiseParallel() for name in "qkv"},
        "up": parallel.ColwiseParallel(input_layouts=hidden),
        **dict.fromkeys(("attention.o_proj", "down"), rows),
    }
    plan = {f"blocks.*.{name}": style for name, style in plan.items()}
    if sequence:
        norms = ("blocks.*.attention_norm", "blocks.*.feed_norm", "norm")
        plan |= dict.fromkeys(norms, parallel.SequenceParallel())
        plan["embedding"] = parallel.RowwiseParallel(input_layouts=whole, output_layouts=hidden)
        plan["head"] = parallel.ColwiseParallel(input_layouts=hidden, output_layouts=whole)
    parallel.parallelize_module(model, mesh, plan)
    for block in model.blocks:  # the heads of this rank
        block.attention.num_heads //= mesh.size()
        block.attention.num_kv_heads //= mesh.size()


def shard(model: Model, mesh: DeviceMesh, *, sequence: bool, bf16: bool) -> Model:
    """A sharded model with the weights of ``model``."""
    with torch.device("meta"):
        shards = Model()
    if mesh["tensor"].size() > 1:
        shard_heads(shards, mesh["tensor"], sequence=sequence)
    if mesh["context"].size() > 1:
        plan = {"blocks.*.attention": GatheredKeys("zigzag")}
        parallel.parallelize_module(shards, mesh["context"], plan)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
    for module in (*shards.blocks, shards):
        fully_shard(module, mesh=mesh["context", "data"], mp_policy=policy)
    shards.to_empty(device="cpu")
    set_model_state_dict(shards, model.state_dict(), options=StateDictOptions(full_state_dict=True))
    return shards


def main() -> None:
    """Train on one process, or on those that torchrun started."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tensor", type=int, default=1, help="ranks that split the heads")
    parser.add_argument("--sequence", action="store_true", help="and the tokens between layers")
    parser.add_argument("--context", type=int, default=1, help="ranks that split a sequence")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    options = parser.parse_args()
    torch.manual_seed(0)  # the same weights and batches on every rank
    model, rank, ranks = Model(), 0, 1
    context, data = (0, 1), (0, 1)  # rank and number of ranks that split the sequence, the batch
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        rank, ranks = dist.get_rank(), dist.get_world_size()
        shape = (options.context, ranks // options.context // options.tensor, options.tensor)
        names = ("context", "data", "tensor")
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        model = shard(model, mesh, sequence=options.sequence, bf16=options.bf16)
        context, data = ((mesh.get_local_rank(name), mesh[name].size()) for name in names[:2])

    here = torch.from_numpy(context_parallel(LENGTH, *context, "zigzag"))
    text = torch.tensor(list(Path(__file__).read_bytes()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(options.steps):
        starts = torch.randint(len(text) - LENGTH, (BATCH,)).chunk(data[1])[data[0]]
        tokens, following = (text[starts[:, None] + here + ahead] for ahead in (0, 1))
        logits = model(tokens, here).flatten(0, 1).double()  # float64: tests compare the losses
        loss = nn.functional.cross_entropy(logits, following.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / ranks
        if ranks > 1:
            dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step + 1:2} loss {mean:.9f}")
    if dist.is_initialized():
        dist.barrier()  # gloo aborts if Python ends before its last collective
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
