"""The kernels as compiled for a GPU, run on the CPU (`tests.gpu.ptx`): right, and frugal.

Whatever they do there, an access outside a tensor, or off its boundary, or one that threads could
come to in another order, fails the test that it happens in.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from phasor import Rope
from phasor.axes import Sectioned
from phasor.torch import rotate_qk, rotate_qk_

from ..torch.torch_oracle import assert_rotated, normal
from .triton_runs import TRITON, ask_for_many, on_machine

MODELS: dict[str, tuple[Rope, int, int]] = {
    "Llama-3": (Rope(head_dim=128, pairing="half", base=500_000.0), 32, 8),
    "Meta's Llama-3": (Rope(head_dim=128, pairing="interleaved", base=500_000.0), 32, 8),
    "GPT-J": (Rope(head_dim=256, rotary_dim=64, pairing="interleaved"), 16, 16),
    "DeepSeek": (Rope(head_dim=64, pairing="interleaved", pairing_out="half"), 128, 1),
    "Gemma-3": (Rope(head_dim=256, pairing="half"), 8, 4),
    "Qwen3-VL": (Rope(head_dim=128, pairing="half", axes=Sectioned((24, 20, 20))), 32, 8),
    "GLM-4.5": (Rope(head_dim=128, rotary_dim=64, pairing="half"), 96, 8),
}
FEW = ("Llama-3", "DeepSeek", "Qwen3-VL")  # which every change is tried on
TOKENS = 21  # not a multiple of a tile's
each_model = pytest.mark.parametrize(
    "model",
    [
        model if model in FEW else pytest.param(model, marks=pytest.mark.every_kernel)
        for model in MODELS
    ],
)
each_dtype = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.every_kernel)]
)


@pytest.fixture(params=[1, 2**20], ids=["many tokens", "few tokens"])
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both tiles."""
    ask_for_many(request.param, monkeypatch)


def places(rope: Rope) -> Tensor:
    """Positions of two digits, for every axis its own."""
    steps = [70_001, 17, -5] if isinstance(rope.axes, Sectioned) else [70_001]
    found = 1_048_000 + torch.arange(TOKENS)[:, None] * torch.tensor(steps)
    return found if len(steps) > 1 else found[:, 0]


def a_batch(model: str, dtype: torch.dtype) -> tuple[Rope, Tensor, Tensor]:
    """The Rope, and a query and a key."""
    rope, q_heads, k_heads = MODELS[model]
    shapes = (TOKENS, q_heads, rope.head_dim), (TOKENS, k_heads, rope.head_dim)
    q, k = (normal(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes))
    return rope, q, k


def moved(*tensors: Tensor) -> dict[str, list[int]]:
    """Bytes of each tensor that the last launch moved: see `ptx.memory`."""
    from .ptx.device import LAUNCHES

    last = LAUNCHES[-1]
    starts = [x.untyped_storage().data_ptr() for x in tensors]
    return {how: [last[how, at] for at in starts] for how in ("read", "fetched", "written", "sent")}


def once(read: list[int], written: list[int]) -> dict[str, list[int]]:
    """So many bytes, and not a sector beside them."""
    return {"read": read, "fetched": read, "written": written, "sent": written}


@on_machine
@pytest.mark.usefixtures("tile")
@each_dtype
@each_model
def test_a_rotation_moves_every_byte_once(model: str, dtype: torch.dtype) -> None:
    """In place what turns, else all; in whole sectors, and with nothing twice."""
    rope, q, k = a_batch(model, dtype)
    new = rotate_qk(q, k, places(rope), rope, **TRITON)
    whole = [q.nbytes, k.nbytes]
    assert moved(q, k) == once(whole, [0, 0])
    assert moved(*new) == once([0, 0], whole)
    for x, y in zip((q, k), new, strict=True):
        assert_rotated(y, x, places(rope).numpy(), rope)
    rotate_qk_(q, k, places(rope), rope, **TRITON)
    turned = [x.nbytes * rope.rotary_dim // rope.head_dim for x in (q, k)]
    assert moved(q, k) == once(turned, turned)
    assert torch.equal(q, new[0])
    assert torch.equal(k, new[1])
