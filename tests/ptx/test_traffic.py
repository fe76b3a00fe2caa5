"""The kernel as compiled for a GPU, run on the CPU: right, and frugal.

Whatever they do there, an access outside a tensor, or off its boundary, or one that threads could
come to in another order, fails the test that it happens in.
"""

from __future__ import annotations

import pytest
import torch
from tests.gpu.triton_runs import RUN_BY, TRITON, ask_for_many
from tests.torch.torch_arrays import assert_rotated, normal
from torch import Tensor

from phasor import Rope
from phasor.axes import Sectioned
from phasor.torch import rotate_qk, rotate_qk_

MODELS: dict[str, tuple[Rope, int, int]] = {
    "Llama-3": (Rope(head_dim=128, pairing="half", base=500_000.0), 32, 8),
    "Meta's Llama-3": (Rope(head_dim=128, pairing="interleaved", base=500_000.0), 32, 8),
    "GPT-J": (Rope(head_dim=256, rotary_dim=64, pairing="interleaved"), 16, 16),
    "DeepSeek": (Rope(head_dim=64, pairing="interleaved", pairing_out="half"), 128, 1),
    "Gemma-3": (Rope(head_dim=256, pairing="half"), 8, 4),
    "Qwen3-VL": (Rope(head_dim=128, pairing="half", axes=Sectioned((24, 20, 20))), 32, 8),
    "GLM-4.5": (Rope(head_dim=128, rotary_dim=64, pairing="half"), 96, 8),
}
TOKENS = 21  # not a multiple of a tile's


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
    """Bytes of each tensor that the last launch moved: see `memory`."""
    from .device import LAUNCHES

    last = LAUNCHES[-1]
    starts = [x.untyped_storage().data_ptr() for x in tensors]
    return {how: [last[how, at] for at in starts] for how in ("read", "fetched", "written", "sent")}


def once(read: list[int], written: list[int]) -> dict[str, list[int]]:
    """So many bytes, and not a sector beside them."""
    return {"read": read, "fetched": read, "written": written, "sent": written}


@pytest.mark.skipif(RUN_BY != "machine", reason="it takes a process with tests.ptx.device")
@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("model", MODELS)
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
