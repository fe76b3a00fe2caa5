"""Reading the ropes of live models: from configs, from code, of several axes, of parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from phasor import Rope, Sectioned, load
from phasor.errors import ConfigError
from phasor.torch.architectures import tiny_model
from phasor.torch.transformers import _live, from_model, patch

from .live_models import difference, prefill, tokens
from .rounding import rounding


def pictured() -> Any:
    """A tiny Qwen2-VL: a tower for pictures and a language model with three axes."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    text = {
        "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "intermediate_size": 64, "vocab_size": 200,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12],
        },
    }  # fmt: skip
    tower = {"depth": 1, "embed_dim": 32, "hidden_size": 128, "num_heads": 2}
    config = Qwen2VLConfig(text_config=text, vision_config=tower)
    torch.manual_seed(0)
    return Qwen2VLForConditionalGeneration(config).eval()


def test_a_tower_that_is_not_understood_is_named_and_the_rest_can_be_patched() -> None:
    """Nothing is changed until the language model is handed over on its own."""
    model = pictured()
    classes = [type(module) for module in model.modules()]
    with pytest.raises(ConfigError, match=r"model\.visual\.blocks\.0\.attn .*hand over that sub"):
        patch(model)
    assert [type(module) for module in model.modules()] == classes
    report = patch(model.model.language_model)
    assert [one.path for one in report.layers] == ["layers.0.self_attn", "layers.1.self_attn"]


def test_positions_of_three_axes_reach_the_layers() -> None:
    """Time, height and width of a picture's tokens, not three times the same."""
    model = pictured().model.language_model
    rope = from_model(model)[0]
    assert rope is not None
    assert rope.axes == Sectioned((8, 12, 12))
    places = torch.randint(0, 50, (3, 1, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = model(tokens(1, 12), position_ids=places)[0]
        room = rounding(model, lambda model: model(tokens(1, 12), position_ids=places)[0])
        same = model(tokens(1, 12), position_ids=places[:1].expand(3, -1, -1))[0]
        patch(model)
        after = model(tokens(1, 12), position_ids=places)[0]
    assert difference(before, after) <= room
    assert difference(before, same) > 1e-3


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_neox", "deepseek_v3", "cohere"])
def test_an_unknown_model_type_is_identified_from_its_code(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same frequencies and pairs come out as the config's reader finds, and a note says how."""
    model = tiny_model(name)
    before = prefill(model)
    known = from_model(model)
    monkeypatch.setattr(_live, "model_types", lambda: ())
    found = from_model(model)
    assert "identified from its code" in found.notes[0]
    for one, other in zip(found, known, strict=True):
        assert one is not None
        assert other is not None
        whole = Rope(
            head_dim=other.rotary_dim, pairing=other.pairing, pairing_out=other.pairing_out,
            base=other.base, scaling=other.scaling,
        )  # fmt: skip
        assert one == whole
    patch(model)
    assert difference(before, prefill(model)) <= rounding(model, prefill)


def test_the_config_of_one_model_is_asked_not_another() -> None:
    """Embeddings of two configs in one model are two models."""
    first, second = tiny_model("llama"), tiny_model("llama")
    second.config.rope_parameters = {"rope_type": "default", "rope_theta": 500.0}
    rotary = second.model.rotary_emb
    rotary.__init__(second.config)
    pair = nn.ModuleList([first, second])
    with pytest.raises(ConfigError, match=r"1\.model\.rotary_emb .*is not that of 0\.model"):
        patch(pair)


def test_the_layers_take_the_pairing_that_their_config_says() -> None:
    """DeepSeek's code has a function for each."""
    model = tiny_model("deepseek_v3")
    model.config.rope_interleave = False
    before = prefill(model)
    report = patch(model)
    assert [one.rope.pairing for one in report.layers if one.rope] == ["half", "half"]
    assert difference(before, prefill(model)) <= rounding(model, prefill)


def test_a_config_that_disagrees_with_its_code_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the class computes decides whether a config has been understood."""
    model = tiny_model("llama")
    monkeypatch.setattr(_live, "load", lambda config: load({**config, "model_type": "cohere"}))
    with pytest.raises(ConfigError, match="cosines are not those that its config describes"):
        patch(model)
