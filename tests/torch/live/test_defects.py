"""What the installed transformers gets wrong about positions, and a patched model does not."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from tools.tiny_models import tiny_model
from torch import Tensor

from phasor import Rope
from phasor.scaling import DynamicNTK, LongRope
from phasor.torch.live import ExactCosSin, patch

from ...rounding import rounding
from .live_models import cache_name, difference, tokens

ORIGINAL = 64
DYNAMIC = {
    "max_position_embeddings": ORIGINAL,
    "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0},
}
LONGROPE = {
    "max_position_embeddings": 4 * ORIGINAL,
    "original_max_position_embeddings": ORIGINAL,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "original_max_position_embeddings": ORIGINAL,
        "short_factor": [1.0 + 0.01 * i for i in range(48)],
        "long_factor": [1.0 + 0.5 * i for i in range(48)],
    },
}
RULES = [
    pytest.param("llama", DYNAMIC, id="dynamic"),
    pytest.param("phi3", LONGROPE, id="longrope"),
]
SHARP = ("q_proj", "k_proj", "qkv_proj", "query_key_value", "q_b_proj", "kv_a_proj")


def sharpened(model: Any) -> Any:
    """The model with attention that looks somewhere: random weights alone look everywhere."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and any(word in name for word in SHARP):
                weight *= 8
    return model


def made(name: str, config: dict[str, Any] | None = None, seed: int = 0) -> Any:
    """A sharpened tiny model."""
    return sharpened(tiny_model(name, config, seed=seed))


def patched(model: Any, **more: Any) -> Any:
    """A patched copy."""
    twin = copy.deepcopy(model)
    patch(twin, **more)
    return twin


@torch.no_grad()
def logits(model: Any, length: int, **more: Any) -> Tensor:
    """Of the first ``length`` of the same tokens."""
    return model(tokens(1, 160)[:, :length], **more).logits


@torch.no_grad()
def decoded(model: Any, length: int, prompt: int) -> Tensor:
    """The same, token by token after a prompt."""
    ids, name = tokens(1, 160), cache_name(model)
    step = model(ids[:, :prompt], use_cache=True)
    outs = [step.logits]
    for i in range(prompt, length):
        step = model(ids[:, i : i + 1], **{name: getattr(step, name)}, use_cache=True)
        outs.append(step.logits)
    return torch.cat(outs, 1)


def test_dynamic_ntk_does_not_depend_on_what_was_called_before() -> None:
    """After a long call transformers keeps the long call's frequencies for lengths in between."""
    plain = made("llama", DYNAMIC)
    ours = patched(plain)
    fresh = {name: logits(model, 100) for name, model in (("plain", plain), ("ours", ours))}
    for model in (plain, ours):
        logits(model, 160)
    assert difference(fresh["plain"], logits(plain, 100)) > 1e-3
    assert torch.equal(fresh["ours"], logits(ours, 100))
    room = rounding(made("llama", DYNAMIC), lambda model: logits(model, 100))
    assert difference(fresh["plain"], fresh["ours"]) <= room


@pytest.mark.parametrize(("name", "config"), RULES)
def test_one_law_for_a_whole_sequence_makes_decoding_agree_with_prefill(
    name: str, config: dict[str, Any]
) -> None:
    """In transformers the keys of a cache keep the law of the call that made them."""
    plain = made(name, config)
    ours = patched(plain, seq_len=80)
    assert difference(logits(plain, 80), decoded(plain, 80, prompt=60)) > 1e-3
    room = rounding(ours, lambda model: logits(model, 80))
    assert difference(logits(ours, 80), decoded(ours, 80, prompt=60)) <= room
    assert difference(logits(plain, 80), logits(ours, 80)) <= room


@pytest.mark.parametrize("length", [3, 64, 65, 100, 1000])
def test_the_cosines_of_a_rule_are_those_of_its_law(length: int) -> None:
    """Dynamic NTK's base, and LongRoPE's list and factor, from their formulas."""
    factor = math.sqrt(1 + math.log(16) / math.log(64))
    base = 100.0 * (4.0 * max(length, 64) / 64 - 3.0) ** (8 / 6)
    divisors = (1, 2, 3, 4) if length > 64 else (1, 1, 1, 2)
    dynamic = DynamicNTK(factor=4.0, original_max_positions=64)
    long = LongRope(
        short_factors=(1, 1, 1, 2), long_factors=(1, 2, 3, 4), original_max_positions=64, factor=16
    )
    expected = {
        dynamic: [(base ** (-k / 4), 1.0) for k in range(4)],
        long: [(100.0 ** (-k / 4) / divisors[k], factor) for k in range(4)],
    }
    like = torch.zeros(1, length, 4, dtype=torch.float64)
    for rule, pairs in expected.items():
        rope = Rope(head_dim=8, pairing="half", base=100.0, scaling=rule)
        hook = ExactCosSin({None: rope}, "half")
        cos, sin = hook(torch.nn.Identity(), (like, torch.arange(length)[None]), {}, (like, like))
        p = length - 1
        for k, (inv_freq, gain) in enumerate(pairs):
            assert abs(float(cos[0, p, k]) - gain * math.cos(p * inv_freq)) < 1e-12
            assert abs(float(sin[0, p, k]) - gain * math.sin(p * inv_freq)) < 1e-12


@pytest.mark.parametrize(("name", "config"), RULES)
def test_a_rule_compiles(name: str, config: dict[str, Any]) -> None:
    """Its law is picked anew for every length; whole where transformers' own code does so."""
    ours = patched(made(name, config))
    expected = [logits(ours, length) for length in (40, 100)]
    torch.compiler.reset()
    whole = torch.compile(ours, fullgraph=name == "phi3", backend="aot_eager")
    for length, said in zip((40, 100), expected, strict=True):
        room = rounding(ours, lambda model, length=length: logits(model, length))
        assert difference(said, logits(whole, length)) <= room
    torch.compiler.reset()


def test_frequencies_survive_a_cast_to_bfloat16() -> None:
    """model.to(bfloat16) rounds transformers' frequencies to 8 bits; phasor keeps none there."""
    exact = made("llama")
    low = copy.deepcopy(exact).to(torch.bfloat16)
    ours = patched(low)
    with torch.no_grad():
        for weight, rounded in zip(exact.parameters(), low.parameters(), strict=True):
            weight.copy_(rounded)
        ids = tokens(1, 512)
        reference = exact.double()(ids).logits
        errors = {
            who: float((model(ids).logits - reference).pow(2).mean().sqrt())
            for who, model in (("transformers", low), ("phasor", ours))
        }
    print(errors)
    assert errors["transformers"] > 3 * errors["phasor"]


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_only_distances_count_far_out(name: str) -> None:
    """Moving all tokens by 2**22 changes nothing but the rounding of rows."""
    plain = made(name)
    ours = patched(plain)
    near = torch.arange(48)[None]
    errors = {
        who: difference(
            logits(model, 48, position_ids=near), logits(model, 48, position_ids=near + 2**22)
        )
        for who, model in (("transformers", plain), ("phasor", ours))
    }
    print(errors)
    assert errors["transformers"] > 1e-2
    assert errors["phasor"] <= rounding(ours, lambda model: logits(model, 48, position_ids=near))
