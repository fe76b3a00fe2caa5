"""Patched models in what shards, casts, moves and recomputes a module's inputs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import dispatch_model
from tools.tiny_models import tiny_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from phasor.torch.live import patch

from ...rounding import rounding
from .live_models import difference, prefill, tokens

#: Cosines and sines, complex rows, latent attention, and rows of two kinds of layers.
NAMES = ["llama", "llama4_text", "deepseek_v3", "gemma3_text"]


@pytest.fixture(scope="module")
def patched() -> dict[str, Any]:
    """Patched models, each made once; tests change copies."""
    models = {name: tiny_model(name) for name in NAMES}
    for model in models.values():
        patch(model)
    return models


def rows_in_attention(model: Any) -> tuple[list[Tensor], Tensor]:
    """The cos and sin that the last layer's attention is given, and what the model says."""
    seen: list[Any] = []
    attention = model.model.layers[-1].self_attn
    hook = attention.register_forward_pre_hook(
        lambda _, __, words: seen.append(words["position_embeddings"]), with_kwargs=True
    )
    answer = prefill(model)
    hook.remove()
    assert answer is not None
    return [*seen[0]] if isinstance(seen[0], tuple) else [seen[0]], answer


@pytest.mark.parametrize("name", NAMES)
def test_a_model_that_fsdp_shards_in_bfloat16_is_a_bfloat16_model(
    name: str, patched: dict[str, Any]
) -> None:
    """Attention, layer and model cast every tensor they are given, rows included."""
    model, cast = copy.deepcopy(patched[name]), copy.deepcopy(patched[name])
    _, expected = rows_in_attention(cast.bfloat16())
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (1,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for layer in model.model.layers:
            fully_shard(layer.self_attn, mesh=mesh, mp_policy=policy)
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        assert patch(model).already
        _, answer = rows_in_attention(model)
    finally:
        dist.destroy_process_group()
    assert answer.dtype == torch.bfloat16
    # a row in float32 that is rounded once may differ from that of a bfloat16 model by a rounding
    assert difference(answer, expected) <= 2 * torch.finfo(torch.bfloat16).eps


def test_a_model_inside_ddp_is_patched(tmp_path: Any) -> None:
    """Its path begins with another name; gradients come out as they did."""
    model = tiny_model("llama")
    plain = copy.deepcopy(model)
    room = rounding(plain, gradients)
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(model)
        assert patch(wrapped).modules == ("module.model.rotary_emb",)
        assert difference(gradients(plain), gradients(wrapped)) <= room
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:.*offloaded")
@pytest.mark.parametrize("name", NAMES)
def test_a_device_map_moves_rows_with_the_hidden_states(
    name: str, patched: dict[str, Any], tmp_path: Any
) -> None:
    """Accelerate moves every argument to the device of each module; the first layer is on disk."""
    model = copy.deepcopy(patched[name])
    rows, expected = rows_in_attention(model)
    places: dict[str, Any] = {path: "cpu" for path, _ in model.named_children()}
    places |= {f"model.{path}": "cpu" for path, _ in model.model.named_children()}
    places |= {f"model.layers.{i}": "cpu" for i in range(len(model.model.layers))}
    del places["model"], places["model.layers"]
    places["model.layers.0"] = "disk"
    spread = dispatch_model(model, places, main_device="cpu", offload_dir=tmp_path)
    again, answer = rows_in_attention(spread)
    assert all(map(torch.equal, rows, again))
    assert torch.equal(answer, expected)


def gradients(model: Any) -> Tensor:
    """Of a training step."""
    model.train()
    model(tokens(2, 16), use_cache=False)[0].square().mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved tensors", "reentrant"])
@pytest.mark.parametrize("name", NAMES)
def test_recomputed_activations_have_the_same_gradients(
    name: str, reentrant: bool, patched: dict[str, Any]
) -> None:
    """Bit for bit, by either way of torch's checkpointing."""
    plain, recomputing = copy.deepcopy(patched[name]), copy.deepcopy(patched[name])
    recomputing.activation_checkpointing_enable({"use_reentrant": reentrant})
    assert torch.equal(gradients(plain), gradients(recomputing))
