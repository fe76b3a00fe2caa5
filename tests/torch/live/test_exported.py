"""Patched models become ONNX files that say in onnxruntime what the model said unpatched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phasor.torch import export as bridge
from phasor.torch.live import patch

from ...rounding import rounding
from ..export.onnx_engines import by_onnxruntime
from .live_models import difference, fresh, tokens

pytest.importorskip("onnxruntime")


class Logits(nn.Module):
    """A model's logits of its tokens, without a cache of keys."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        """All of them at once."""
        return self.model(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize("name", ["llama", "gptj", "qwen2", "gemma3_text"])
def test_a_patched_model_is_exported(name: str) -> None:
    """To a rounding."""
    model, ids = Logits(fresh(name)), tokens(1, 12)
    with torch.no_grad():
        before, room = model(ids), rounding(model, lambda model: model(ids))
    patch(model)
    program = bridge.export(model, (ids,))
    (found,) = by_onnxruntime(program)(ids.numpy())
    assert difference(before, torch.from_numpy(found)) <= room
