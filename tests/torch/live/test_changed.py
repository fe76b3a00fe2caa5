"""Models that their users changed after they were made: served where that is right, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tools.tiny_models import tiny_model
from torch import Tensor, nn

from phasor import load
from phasor.errors import ConfigError
from phasor.torch import _rotary_embeddings
from phasor.torch.live import from_model, patch, unpatch

from ...rounding import says_the_same
from .live_models import difference, fresh, prefill

FACTORS = [1.0 + 0.1 * i for i in range(64)]
LAWS: dict[str, dict[str, Any]] = {
    "none": {"rope_type": "default"},
    "YaRN": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "LongRoPE": {
        "rope_type": "longrope",
        "original_max_position_embeddings": 64,
        "short_factor": FACTORS,
        "long_factor": FACTORS,
    },
}


def llama(law: str = "none") -> Any:
    """A tiny Llama of two layers with some law."""
    rope = LAWS[law] | {"rope_theta": 10_000.0}
    return tiny_model("llama", {"rope_parameters": rope, "max_position_embeddings": 256})


def assert_refused(model: Any, says: str) -> None:
    """By both functions, and no hook is left."""
    for function in (from_model, patch):
        with pytest.raises(ConfigError, match=rf"{says}.*nothing was changed"):
            function(model)
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("factor", [1.5, 0.9, 3])
def test_a_changed_attention_factor_is_refused(law: str, factor: float) -> None:
    """Phasor would turn by the config's; none of the laws here has one of these."""
    model = llama(law)
    model.model.rotary_emb.attention_scaling = factor
    assert_refused(model, r"rotary_emb .*attention_scaling differs from its config")


def test_a_changed_attention_factor_of_one_kind_of_layer_is_refused() -> None:
    """Gemma 3 keeps one for each kind."""
    model = tiny_model("gemma3_text")
    model.model.rotary_emb.sliding_attention_attention_scaling = 1.5
    assert_refused(model, "sliding_attention_attention_scaling differs from its config")


@pytest.mark.parametrize("law", ["dynamic", "LongRoPE"])
def test_what_a_rule_makes_its_frequencies_of_must_be_the_configs(law: str) -> None:
    """It goes back to them for short sequences."""
    model = llama(law)
    rotary = model.model.rotary_emb
    rotary.inv_freq.mul_(2)
    rotary.original_inv_freq.mul_(2)
    assert_refused(model, "original_inv_freq differs from its config")


def test_a_rules_frequencies_are_those_of_its_last_call() -> None:
    """That is no change of somebody's."""
    model = llama("dynamic")
    rotary = model.model.rotary_emb
    with torch.no_grad():
        model(torch.arange(300)[None] % 100)
    assert not torch.equal(rotary.inv_freq, rotary.original_inv_freq)
    patch(model)


@pytest.mark.parametrize(
    ("name", "path", "buffer"),
    [
        ("llama", "model.rotary_emb", "inv_freq"),
        ("gemma3_text", "model.rotary_emb", "sliding_attention_inv_freq"),
        ("gptj", "transformer.h.1.attn", "embed_positions"),
    ],
)
def test_changed_frequencies_are_refused_with_the_way_out(
    name: str, path: str, buffer: str
) -> None:
    """What cannot be told from a change is not taken for lost, unless it is said to be."""
    model = fresh(name)
    getattr(model.get_submodule(path), buffer).mul_(0.5)
    assert_refused(model, rf'{path} .*{buffer} differs from its config.*move {path} to "meta"')
    lost = getattr(model.get_submodule(path), buffer).to("meta")
    setattr(model.get_submodule(path), buffer, lost)
    patch(model)


def test_a_config_that_disagrees_with_its_code_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the class computes decides whether a config has been understood."""

    def misread(config: Any, strict: bool) -> Any:
        return load({**config, "model_type": "cohere"}, strict=strict)

    monkeypatch.setattr(_rotary_embeddings, "load", misread)
    with pytest.raises(ConfigError, match="turns interleaved pairs as its config describes"):
        patch(tiny_model("llama"))


def test_a_config_that_cannot_be_read_is_refused() -> None:
    """DBRX with two bases, of which its class reads one."""
    from transformers import DbrxConfig, DbrxForCausalLM

    config = DbrxConfig(
        d_model=64, n_heads=4, n_layers=2, max_seq_len=128, vocab_size=64,
        attn_config={"kv_n_heads": 2, "rope_theta": 500000.0, "clip_qkv": 8},
        ffn_config={"ffn_hidden_size": 64, "moe_num_experts": 2, "moe_top_k": 1, "hidden_size": 64},
    )  # fmt: skip
    assert_refused(DbrxForCausalLM(config), r"rope_theta is 10000\.0 and attn_config\.rope_theta")


def test_gemma_4_with_heads_of_one_width_is_read_so() -> None:
    """Transformers then writes an empty object instead of the width of the global layers."""
    from transformers import Gemma4TextConfig

    config = Gemma4TextConfig(
        num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"], hidden_size=64,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, global_head_dim=16,
    )  # fmt: skip
    for source in (config, config.to_dict()):
        assert [rope and rope.head_dim for rope in load(source)] == [16, 16]


def test_a_forward_that_somebody_replaced_is_followed() -> None:
    """Hooks run after whatever stands there, and leave it in place."""
    model = fresh("llama")
    module = model.model.rotary_emb
    seen: list[int] = []
    before = module.forward

    def forward(*given: Any, **words: Any) -> Any:
        seen.append(len(given))
        return before(*given, **words)

    module.forward = forward
    with says_the_same(model):
        patch(model)
    assert module.forward is forward
    unpatch(model)
    seen.clear()
    assert difference(prefill(fresh("llama")), prefill(model)) == 0
    assert len(seen) == 1


class Rounded(nn.Module):
    """A projection with weights of 8 bits, as quantized models have them."""

    whole: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach()
        self.scale = float(weight.abs().max()) / 127
        self.register_buffer("whole", (weight / self.scale).round().to(torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        """By the weights that the whole numbers stand for."""
        return nn.functional.linear(x, self.whole.to(x.dtype) * self.scale)


def test_quantized_projections_are_no_obstacle() -> None:
    """Nothing of them is read."""
    model = llama()
    for layer in model.model.layers:
        layer.self_attn.q_proj = Rounded(layer.self_attn.q_proj)
    with says_the_same(model):
        patch(model)
