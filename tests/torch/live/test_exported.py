"""Patched models become ONNX files that say in engines what the model said unpatched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from phasor.torch import export as bridge
from phasor.torch.live import patch

from ...rounding import rounding
from ..export.onnx_engines import CHANGING, by_onnxruntime, by_openvino
from .live_models import difference, fresh, tokens

pytest.importorskip("onnxruntime")


class Logits(nn.Module):
    """A model's logits of its tokens, without a cache of keys.

    The mask is given, for without one transformers reads it from the positions, of which engines
    that compute in float32 see no difference from 2**24 on.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, ids: Tensor, position_ids: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """All of them at once."""
        more = {"position_ids": position_ids, "attention_mask": mask}
        given = {name: value for name, value in more.items() if value is not None}
        return self.model(input_ids=ids, use_cache=False, **given).logits


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


def qwen2_vl() -> Any:
    """A tiny model of text and pictures, whose positions are on three axes."""
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    text = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "rope_parameters": rope}
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 4}
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    config = transformers.Qwen2VLConfig(
        text_config=text | heads | special,
        vision_config=vision,
        **dict(zip(names, range(100, 104), strict=True)),
    )
    return transformers.Qwen2VLForConditionalGeneration(config).eval()


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen2_vl"])
def test_a_patched_model_says_the_same_in_every_engine_at_every_length(name: str) -> None:
    """And at far positions, in onnxruntime and in OpenVINO."""
    model = Logits(qwen2_vl() if name == "qwen2_vl" else fresh(name))
    n_axes = 3 if name == "qwen2_vl" else 1

    def given(batch: int, length: int, first: int) -> tuple[Tensor, Tensor, Tensor]:
        places = (first + torch.arange(length)).expand(batch, length).contiguous()
        if n_axes == 3:
            places = torch.stack((places, places + 3, places + 5))
        return tokens(batch, length, seed=length), places, torch.ones(batch, length).long()

    cases = [given(2, 12, 0), given(1, 30, 100_000), given(3, 5, 2**24 + 1)]
    with torch.no_grad():
        rooms = [rounding(model, lambda model, case=case: model(*case)) for case in cases]
        before = model(*cases[0])
        patch(model)
        exact = [model(*case) for case in cases]
    assert difference(before, exact[0]) <= rooms[0]
    changing = {0: CHANGING, 1: CHANGING}
    of_places = {1: CHANGING, 2: CHANGING} if n_axes == 3 else changing
    program = bridge.export(model, cases[0], dynamic_shapes=(changing, of_places, changing))
    for start in (by_onnxruntime, by_openvino):
        run = start(program)
        for case, expected, room in zip(cases, exact, rooms, strict=True):
            (found,) = run(*(each.numpy() for each in case))
            assert difference(expected, torch.from_numpy(found)) <= room
