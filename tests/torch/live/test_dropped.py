"""A model whose rope is dropped attends as if its rotation functions returned their arguments."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tools.tiny_models import tiny_model

from phasor import SpecError
from phasor.errors import ConfigError
from phasor.torch.live import check, from_model, patch, unpatch

from ...rounding import rounding
from .live_models import WAYS, difference, fresh, prefill, tokens

#: The functions that rotate in each model's file, and how many of their arguments they rotate:
#: whole heads, two kinds of layers, complex numbers, interleaved pairs, a table of sines.
FUNCTIONS: dict[str, tuple[str, int]] = {
    "llama": ("apply_rotary_pos_emb", 2),
    "gemma3_text": ("apply_rotary_pos_emb", 2),
    "llama4_text": ("apply_rotary_emb", 2),
    "deepseek_v3": ("apply_rotary_pos_emb_interleave", 2),
    "gptj": ("apply_rotary_pos_emb", 1),
}
YARN = {"rope_type": "yarn", "factor": 8.0, "rope_theta": 1e4,
        "original_max_position_embeddings": 64}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}


def without_rotation(model: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the functions of transformers that rotate return what they are given."""
    function, count = FUNCTIONS[name]
    same: Callable[..., Any] = (lambda x, *_: x) if count == 1 else (lambda q, k, *_: (q, k))
    monkeypatch.setattr(sys.modules[type(model).__module__], function, same)


@pytest.mark.parametrize("way", ["prefill", "decode", "packing"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_model_attends_as_without_rotation(
    name: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To a rounding; a model that rotates is far from it."""
    model = fresh(name)
    rotated, room = WAYS[way](model), rounding(model, WAYS[way])
    patch(model, drop_rope=True)
    dropped = WAYS[way](model)
    unpatch(model)
    without_rotation(model, name, monkeypatch)
    expected = WAYS[way](model)
    assert difference(expected, dropped) <= room
    assert difference(expected, rotated) > 10 * room


def test_an_attention_factor_is_dropped_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """YaRN's is in the cosines, and these are 1."""
    model = tiny_model("llama", {"rope_parameters": YARN})
    patch(model, drop_rope=True)
    dropped = prefill(model)
    unpatch(model)
    room = rounding(model, prefill)
    without_rotation(model, "llama", monkeypatch)
    assert difference(prefill(model), dropped) <= room


def test_cos_is_1_and_sin_is_0_at_any_position() -> None:
    """In the dtype of the model, exactly."""
    model = fresh("llama").to(torch.bfloat16)
    patch(model, drop_rope=True)
    ids = torch.tensor([[0, 1, 2**40]])
    cos, sin = model.model.rotary_emb(torch.zeros(1, 3, 1, dtype=torch.bfloat16), ids)
    assert cos.dtype == sin.dtype == torch.bfloat16
    assert bool((cos == 1).all() and (sin == 0).all())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_dropping_is_undone(name: str) -> None:
    """Bit for bit, by the same function as a patch."""
    model = fresh(name)
    before = prefill(model)
    patch(model, drop_rope=True)
    unpatch(model)
    assert difference(before, prefill(model)) == 0


def test_the_order_of_earlier_tokens_is_gone() -> None:
    """With one layer, the last token sees a set."""
    model = tiny_model("llama", {"num_hidden_layers": 1})
    ids = tokens(1, 12)
    turned_over = torch.cat((ids[:, :-1].flip(1), ids[:, -1:]), 1)
    patch(model, drop_rope=True)
    with torch.no_grad():
        last, other = (model(some)[0][:, -1] for some in (ids, turned_over))
    assert torch.allclose(last, other, atol=1e-5)


def test_what_the_model_does_now_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """By the line that is printed, by `from_model` and by `check`."""
    model = fresh("llama")
    report = patch(model, drop_rope=True)
    line = "LlamaForCausalLM: cos and sin of model.rotary_emb are 1 and 0 now"
    assert (capsys.readouterr().out, str(report), report.dropped) == (f"{line}\n", line, True)
    assert patch(model, drop_rope=True).already
    assert set(from_model(model)) == {None}
    assert check(model).modules[0].error == 0
    unpatch(model)
    assert None not in from_model(model)
    assert check(model).modules[0].error > 0


def test_another_patch_of_a_patched_model_is_refused() -> None:
    """A rope that was dropped is not made exact, and the other way round, nor is half of both."""
    model = tiny_model("llama", {"rope_parameters": DYNAMIC})
    patch(model, drop_rope=True)
    with pytest.raises(ConfigError, match=r"drop_rope must be as before: model\.rotary_emb"):
        patch(model)
    unpatch(model)
    patch(model)
    with pytest.raises(ConfigError, match=r"drop_rope must be as before.*unpatch\(model\) first"):
        patch(model, drop_rope=True)
    with pytest.raises(SpecError, match="seq_len must be None with drop_rope=True"):
        patch(model, seq_len=64, drop_rope=True)
    with pytest.raises(SpecError, match="drop_rope must be"):
        patch(model, drop_rope=[0])  # pyright: ignore[reportArgumentType]


def test_a_model_without_its_rope_is_trained() -> None:
    """Every weight gets a gradient, as in the short training that follows."""
    model = fresh("llama").train()
    patch(model, drop_rope=True)
    model(tokens(2, 8))[0].square().mean().backward()
    assert all(bool(p.grad is not None and p.grad.abs().sum() > 0) for p in model.parameters())
