"""Reading the ropes of live models: from configs, from code, of parts."""

from __future__ import annotations

import copy

import pytest
from tools.tiny_models import tiny_model
from torch import nn

from phasor import Rope, load
from phasor.errors import ConfigError, PhasorWarning
from phasor.torch.hf import from_model, patch, reading

from ...rounding import says_the_same


def test_a_model_whose_config_has_two_bases_is_followed_by_its_module() -> None:
    """DBRX: the class reads one of its file's two, and the warning says both."""
    from transformers import DbrxConfig, DbrxForCausalLM

    config = DbrxConfig(
        d_model=64, n_heads=4, n_layers=2, max_seq_len=128, vocab_size=64,
        attn_config={"kv_n_heads": 2, "rope_theta": 500000.0, "clip_qkv": 8},
        ffn_config={"ffn_hidden_size": 64, "moe_num_experts": 2, "moe_top_k": 1, "hidden_size": 64},
    )  # fmt: skip
    model = DbrxForCausalLM(config).eval()
    says = r"rope_theta says 10000\.0 and attn_config\.rope_theta says 500000\.0"
    with pytest.warns(PhasorWarning, match=says):
        ropes = from_model(model)
    assert [rope and rope.base for rope in ropes] == [10000.0] * 2
    with says_the_same(model), pytest.warns(PhasorWarning, match=says):
        patch(model)


def test_gemma_4_with_heads_of_one_width_is_read_so() -> None:
    """Transformers then writes an empty object in place of the width of the global layers."""
    from transformers import Gemma4TextConfig

    config = Gemma4TextConfig(
        num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"], hidden_size=64,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, global_head_dim=16,
    )  # fmt: skip
    for source in (config, config.to_dict()):
        assert [rope and rope.head_dim for rope in load(source)] == [16, 16]


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_neox", "deepseek_v3", "cohere"])
def test_an_unknown_model_type_is_identified_from_its_code(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same frequencies and pairs come out as the config's reader finds, and a note says how."""
    model = tiny_model(name)
    known = from_model(model)
    monkeypatch.setattr(reading, "model_types", lambda: ())
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
    with says_the_same(model):
        patch(model)


def test_the_config_of_one_model_is_asked_not_another() -> None:
    """Two models in a list are two parts, each turned by its own config, and named by its path."""
    first, second = tiny_model("llama"), tiny_model("llama")
    second.config.rope_parameters = {"rope_type": "default", "rope_theta": 500.0}
    second.model.rotary_emb.__init__(second.config)
    pair = nn.ModuleList([first, second])
    assert [rope.base for rope in from_model(pair, part="1") if rope] == [500.0, 500.0]
    with says_the_same(first), says_the_same(second):
        report = patch(pair)
    bases = [one.rope.base for one in report.layers if one.rope]
    assert bases == [10_000.0, 10_000.0, 500.0, 500.0]


def test_the_same_config_behind_two_embeddings_is_one_part() -> None:
    """A list of a model's layers has a config in each of them."""
    model = tiny_model("llama")
    layers = nn.ModuleList([*model.model.layers, model.model.rotary_emb])
    layers[-1].config = copy.deepcopy(model.config)
    assert len(patch(layers).layers) == 2


def test_the_layers_take_the_pairing_that_their_config_says() -> None:
    """DeepSeek's code has a function for each."""
    model = tiny_model("deepseek_v3")
    model.config.rope_interleave = False
    with says_the_same(model):
        report = patch(model)
    assert [one.rope.pairing for one in report.layers if one.rope] == ["half", "half"]


def test_a_config_that_disagrees_with_its_code_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the class computes decides whether a config has been understood."""
    model = tiny_model("llama")
    monkeypatch.setattr(
        reading, "load", lambda config, strict: load({**config, "model_type": "cohere"})
    )
    with pytest.raises(ConfigError, match="cosines are not those that its config describes"):
        patch(model)
