"""Models of text and pictures: each part turns by its own rope, and generation says the same."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phasor.axes import Axial
from phasor.errors import ConfigError
from phasor.torch.hf import check, from_model, patch, unpatch

from ...rounding import rounding, says_the_same
from .live_models import difference
from .pictured_models import BUILT, pictured, without_picture

LENGTH = 24
#: Layers that turn: two of the language model, and two of the tower where it turns.
TURNING = dict.fromkeys(BUILT, 4) | {"gemma3": 2}


def generated(model: Any, prompt: dict[str, Any], cache: str | None) -> tuple[Tensor, Tensor]:
    """The likeliest tokens after a prompt, and the logits that they were picked by."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of generation settings that this does not use
        said = model.generate(
            **prompt, max_new_tokens=LENGTH, min_new_tokens=LENGTH, do_sample=False, pad_token_id=0,
            cache_implementation=cache, output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
    return said.sequences, torch.stack(said.logits)


def noise(model: Any, prompt: dict[str, Any]) -> float:
    """What float32 itself is worth in a model's logits: its distance from a run in float64."""
    exact = copy.deepcopy(model).double()
    wide = {k: v.double() if v.is_floating_point() else v for k, v in prompt.items()}
    with torch.no_grad():
        return difference(exact(**wide).logits, model(**prompt).logits)


@pytest.mark.parametrize("picture", [True, False], ids=["picture", "words"])
@pytest.mark.parametrize("name", BUILT)
def test_generation_says_the_same_token_by_token(name: str, picture: bool) -> None:
    """With a growing cache and a static one; logits agree to a few times float32's own noise."""
    model, prompt = pictured(name)
    prompt = prompt if picture else without_picture(prompt)
    ours = copy.deepcopy(model)
    assert len(patch(ours).layers) == TURNING[name]
    # both are that far from exact, and the worst of many logits of one is not that of the other
    bound = 10 * noise(model, prompt)
    for cache in (None, "static"):
        (before, logits), (after, again) = (generated(one, prompt, cache) for one in (model, ours))
        assert difference(logits, again) <= bound
        best = logits.topk(2).values
        margin = float((best[..., 0] - best[..., 1]).min())
        # else a tie is broken either way, and nothing can be said of the tokens
        assert margin > 2 * float((logits - again).abs().max())
        assert torch.equal(before, after)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl", "glm4v"])
def test_one_coordinate_stands_for_all_axes(name: str) -> None:
    """Text positions [1, batch, seq], which generate hands over when it continues."""
    model = pictured(name)[0].model.language_model
    ids = torch.arange(3, 15).reshape(2, 6)
    places = torch.tensor([[5, 6, 7, 8, 9, 10], [0, 1, 2, 3, 4, 5]])
    with torch.no_grad():
        before = model(input_ids=ids, position_ids=places[None])[0]
        bound = rounding(model, lambda one: one(input_ids=ids, position_ids=places[None])[0])
        patch(model)
        for given in (places[None], places[None].expand(3, -1, -1), places):
            assert difference(before, model(input_ids=ids, position_ids=given)[0]) <= bound


def exact_frequencies(name: str) -> list[float]:
    """What a tower's pairs turn by, from the formula of its authors."""
    if name == "llava":  # one spectrum over a head of 32, dealt to height and width in turn
        whole = [10_000.0 ** (-2 * i / 32) for i in range(16)]
        return whole[0::2] + whole[1::2]
    return [10_000.0 ** (-2 * i / 16) for i in range(8)] * 2


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "llava", "llama4"])
def test_a_towers_rope_has_two_axes(name: str) -> None:
    """Height and width, eight pairs each; the language model's is what is read unless asked."""
    model = pictured(name)[0]
    tower = from_model(model, part="vision_config")
    assert len(tower) == 2
    rope = tower[0]
    assert rope is not None
    assert rope.head_dim == 32
    assert rope.axes.axis_of_pair(16) == (0,) * 8 + (1,) * 8
    exact = exact_frequencies(name)
    if rope.explicit_inv_freq is None:
        assert (rope.base, rope.axes) == (10_000.0, Axial((8, 8)))
    else:
        assert rope.explicit_inv_freq == pytest.approx(exact, rel=1e-15)
    text = from_model(model)
    assert text.kinds == from_model(model, part="text_config").kinds
    assert all(one.head_dim == 64 for one in text.ropes)


def test_a_tower_of_several_ropes_in_a_head_is_patched_and_has_no_rope() -> None:
    """Gemma 4 turns each half of a head by a coordinate; rows and text keep their ropes."""
    model = pictured("gemma4")[0]
    with pytest.raises(ConfigError, match="rotate as heads of their own, which no Rope says"):
        from_model(model, part="vision_config")
    assert len(from_model(model)) == 2
    report = patch(model)
    assert [one.rope is None for one in report.layers] == [True, True, False, False]
    assert all("no Rope says" in one.unknown_because for one in report.layers[:2])
    assert all(one.error < 3 * 2**-24 for one in check(model).modules)


def test_a_tower_of_windows_rotates_by_fractions_of_a_position() -> None:
    """Sam 3 spreads a window's positions over the picture, and gives its rows a batch."""
    from transformers.models.sam3.modeling_sam3 import Sam3ViTConfig, Sam3ViTModel

    config = Sam3ViTConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        image_size=48, pretrain_image_size=32, patch_size=4, window_size=4, global_attn_indexes=[1],
    )  # fmt: skip
    torch.manual_seed(0)
    model = Sam3ViTModel(config).eval()
    for layer in model.layers:
        layer.attention.q_proj.weight.data *= 80
    picture = torch.randn(1, 3, 48, 48)
    assert bool((model.layers[1].position_ids % 1).any())
    with says_the_same(model, lambda one: one(picture)[0]):
        report = patch(model)
    assert [one.rope and one.rope.axes for one in report.layers] == [Axial((8, 8))] * 2


class Backwards(nn.Module):
    """Makes cosines that are no rotation of anything."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of the right shape."""
        rows = position_ids.float().sum(-1, keepdim=True).expand(-1, 32)
        return rows.cos() + 1, rows.sin()


def damaged() -> tuple[Any, dict[str, Any]]:
    """A model whose tower is not understood."""
    model, prompt = pictured("qwen2_vl")
    odd = type("OddRotaryEmbedding", (Backwards,), {"__module__": type(model.model).__module__})
    model.model.visual.rotary_pos_emb = odd(model.model.visual.config)
    return model, prompt


def test_a_tower_that_is_not_understood_is_named_with_the_call_that_works() -> None:
    """Nothing is changed until the language model alone is asked for, and then it alone."""
    model, prompt = damaged()
    classes = [type(module) for module in model.modules()]
    call = r'rotary_pos_emb \(OddRotary.*nothing was changed.*patch\(model, part="text_config"\) w'
    with pytest.raises(ConfigError, match=call):
        patch(model)
    assert [type(module) for module in model.modules()] == classes
    with says_the_same(model, lambda one: one(**prompt).logits):
        report = patch(model, part="text_config")
    paths = [f"model.language_model.layers.{i}.self_attn" for i in range(2)]
    assert [one.path for one in report.layers] == paths
    assert len(from_model(model)) == 2
    with pytest.raises(ConfigError, match=r'check\(model, part="text_config"\) works'):
        check(model)
    unpatch(model)
    assert [type(module) for module in model.modules()] == classes


def test_parts_are_patched_one_after_the_other_and_unpatched_together() -> None:
    """Each is patched once."""
    model, prompt = pictured("mistral3")
    classes = [type(module) for module in model.modules()]
    for part in ("vision_config", "text_config"):
        with says_the_same(model, lambda one: one(**prompt).logits):
            assert len(patch(model, part=part).layers) == 2
        assert patch(model, part=part).already
    assert patch(model).already
    unpatch(model)
    assert [type(module) for module in model.modules()] == classes


@pytest.mark.parametrize("function", [patch, from_model, check])
def test_a_part_that_is_not_there_is_refused(function: Any) -> None:
    """With the parts that are."""
    says = r"part must be one of 'vision_config', 'text_config' in this model, got 'audio_config'"
    with pytest.raises(ConfigError, match=says):
        function(pictured("qwen2_vl")[0], part="audio_config")


def test_a_tower_compiles_whole() -> None:
    """Its positions go through the graph, dealt out to windows."""
    model, prompt = pictured("qwen2_5_vl")
    tower = model.model.visual
    given = prompt["pixel_values"], prompt["image_grid_thw"]
    with torch.no_grad():
        before = tower(*given)[0]
        bound = rounding(tower, lambda one: one(*given)[0])
        patch(tower)
        torch._dynamo.reset()
        compiled = torch.compile(tower, backend="aot_eager")
        assert difference(before, compiled(*given)[0]) <= bound
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's
def test_adapters_around_a_model_of_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts keep their names inside."""
    import peft

    # peft refuses the torchao that torchtune wants; nothing here is quantized
    monkeypatch.setattr("peft.tuners.lora.torchao.is_torchao_available", lambda: False)
    model, prompt = pictured("qwen2_vl")
    how = peft.LoraConfig(target_modules=["q_proj", "qkv"], r=4, init_lora_weights=False)
    wrapped: Any = peft.get_peft_model(model, how).eval()
    with says_the_same(wrapped, lambda one: one(**prompt).logits):
        patch(wrapped, part="vision_config")
        patch(wrapped, part="text_config")
