"""What the installed transformers gets wrong about positions, and a patched model does not."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from tools.tiny_models import tiny_model
from torch import Tensor

from phasor import LayerRopes, Rope
from phasor.scaling import LAWS, NTK, DynamicNTK, Law, LongRope, PerPair, Rule
from phasor.torch.hf import patch, reading
from phasor.torch.hf.rotations import RopeOfKind, defer_cos_sin

from ...rounding import rounding
from .live_models import difference, tokens

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
    ids = tokens(1, 160)
    step = model(ids[:, :prompt], use_cache=True)
    outs = [step.logits]
    for i in range(prompt, length):
        step = model(ids[:, i : i + 1], past_key_values=step.past_key_values, use_cache=True)
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
def test_a_rules_frequencies_stay_what_they_were(name: str, config: dict[str, Any]) -> None:
    """The frequencies of the last call are written into the model, unless it is patched."""
    plain = made(name, config)
    ours = patched(plain)
    start = plain.model.rotary_emb.inv_freq.clone()
    for model in (plain, ours):
        logits(model, 100)
    assert not torch.equal(plain.model.rotary_emb.inv_freq, start)
    assert torch.equal(ours.model.rotary_emb.inv_freq, start)


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
def test_the_rows_of_a_rule_are_those_of_its_law(length: int) -> None:
    """Dynamic NTK's base, and LongRoPE's list and factor, from their formulas."""
    places = torch.arange(length)[None]
    dynamic = DynamicNTK(factor=4.0, original_max_positions=64)
    rope = Rope(head_dim=8, pairing="half", base=100.0, scaling=dynamic)
    deferred = defer_cos_sin(RopeOfKind(rope), places, torch.float64)
    cos, sin = deferred.cos, deferred.sin
    base = 100.0 * (4.0 * max(length, 64) / 64 - 3.0) ** (8 / 6)
    long = LongRope(
        short_factors=(1, 1, 1, 2), long_factors=(1, 2, 3, 4), original_max_positions=64, factor=16
    )
    other = Rope(head_dim=8, pairing="half", base=100.0, scaling=long)
    cos2 = defer_cos_sin(RopeOfKind(other), places, torch.float64).cos
    gain = math.sqrt(1 + math.log(16) / math.log(64))
    factors = (1, 2, 3, 4) if length > 64 else (1, 1, 1, 2)
    p = length - 1
    for k in range(4):
        angle = p * base ** (-k / 4)
        assert abs(float(cos[0, p, k]) - math.cos(angle)) < 1e-12
        assert abs(float(sin[0, p, k]) - math.sin(angle)) < 1e-12
        angle = p * 100.0 ** (-k / 4) / factors[k]
        assert abs(float(cos2[0, p, k]) - gain * math.cos(angle)) < 1e-12


@dataclass(frozen=True, kw_only=True)
class Stepped(Rule):
    """Interpolation by how many hundreds of tokens there are: a rule that phasor does not have."""

    gain: float = 1.0

    def at(self, seq_len: int) -> Law:
        """Position interpolation by whole numbers."""
        return PerPair(factors=(1.0 + seq_len // 100,) * 4, attention_factor=self.gain)


@dataclass(frozen=True, kw_only=True)
class Told(Stepped):
    """The same, which says how it acts on lengths that only a device knows."""

    def at(self, seq_len: int) -> Law:
        """As above."""
        return super().at(seq_len)

    def at_lengths(self, lengths: Any, plain: Any, xp: Any) -> tuple[Any, Any]:
        """By the same number."""
        return plain / (1 + xp.floor(lengths / 100)[..., None]), self.gain


@dataclass(frozen=True, kw_only=True)
class Late(DynamicNTK):
    """Dynamic NTK that looks at ten tokens fewer."""

    def at(self, seq_len: int) -> NTK:
        """The law for a shorter sequence."""
        return super().at(max(1, seq_len - 10))


@pytest.mark.parametrize("length", [3, 64, 100, 250])
@pytest.mark.parametrize("kind", [Stepped, Told, Late])
def test_a_rule_that_phasor_does_not_have_turns_by_its_own_laws(
    kind: type[Rule], length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it says how it acts on lengths or has them read."""
    monkeypatch.setitem(LAWS, kind.__name__, kind)
    more = {"factor": 4.0, "original_max_positions": 64} if kind is Late else {"gain": 1.25}
    rope = Rope(head_dim=8, pairing="half", base=100.0, scaling=kind(**more))
    places = torch.arange(length)[None]
    deferred = defer_cos_sin(RopeOfKind(rope), places, torch.float64)
    cos, sin = deferred.cos, deferred.sin
    gain, p = more.get("gain", 1.0), length - 1
    for k in range(4):
        if kind is Late:
            step = (100.0 * (4.0 * max(length - 10, 64) / 64 - 3.0) ** (8 / 6)) ** (-k / 4)
        else:
            step = 100.0 ** (-k / 4) / (1 + length // 100)
        assert abs(float(cos[0, p, k]) - gain * math.cos(p * step)) < 1e-12
        assert abs(float(sin[0, p, k]) - gain * math.sin(p * step)) < 1e-12


def test_a_whole_model_turns_by_a_rule_that_phasor_does_not_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compiled too; with a break in the graph where its length has to be read."""

    @dataclass(frozen=True, kw_only=True)
    class Mine(Rule):
        def at(self, seq_len: int) -> Law:
            return NTK(factor=4.0 * max(seq_len, ORIGINAL) / ORIGINAL - 3.0)

    monkeypatch.setitem(LAWS, "mine", Mine)
    usual = reading.load

    def load(config: Any, strict: bool) -> LayerRopes:
        ropes = usual(config, strict=strict)
        mine = {k: rope and replace(rope, scaling=Mine()) for k, rope in ropes.kinds.items()}
        return replace(ropes, kinds=mine)

    monkeypatch.setattr(reading, "load", load)
    plain = made("llama", DYNAMIC)
    ours = patched(plain)
    for length in (40, 100, 160):
        bound = rounding(plain, lambda one, n=length: logits(one, n))
        assert difference(logits(plain, length), logits(ours, length)) <= bound
    said = logits(ours, 100)
    torch._dynamo.reset()
    assert difference(said, logits(torch.compile(ours, backend="aot_eager"), 100)) <= bound
    torch._dynamo.reset()


@pytest.mark.parametrize(("name", "config"), RULES)
def test_a_rule_compiles_whole(name: str, config: dict[str, Any]) -> None:
    """Its law is picked inside the graph, on either side of the original context."""
    ours = patched(made(name, config))
    expected = [logits(ours, length) for length in (40, 100)]
    torch._dynamo.reset()
    whole = torch.compile(ours, fullgraph=True, backend="aot_eager")
    for length, said in zip((40, 100), expected, strict=True):
        room = rounding(ours, lambda model, length=length: logits(model, length))
        assert difference(said, logits(whole, length)) <= room
    torch._dynamo.reset()


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


def test_a_table_of_sines_has_no_end() -> None:
    """GPT-J's table stops at its context; positions do not."""
    plain = made("gptj")
    ours = patched(plain)
    places = torch.arange(8)[None] + 5000
    with pytest.raises(RuntimeError, match="index"):
        logits(plain, 8, position_ids=places)
    near = logits(ours, 8, position_ids=places - 5000)
    room = rounding(ours, lambda model: logits(model, 8, position_ids=places))
    assert difference(near, logits(ours, 8, position_ids=places)) <= room


def test_bfloat16_is_no_further_from_float64() -> None:
    """Over models and seeds: transformers rounds rows, products and sums, phasor once."""
    names = ["llama", "qwen3", "gemma3_text", "gpt_neox", "deepseek_v3", "cohere"]
    total = {"transformers": 0.0, "phasor": 0.0}
    for name in names:
        sums = {"transformers": 0.0, "phasor": 0.0}
        for seed in range(4):
            exact = made(name, seed=seed)
            for weight in exact.parameters():
                weight.data = weight.data.to(torch.bfloat16).float()
            low = copy.deepcopy(exact)
            for weight in low.parameters():
                # as from_pretrained does it, whose frequencies stay in float32
                weight.data = weight.data.to(torch.bfloat16)
            ids = tokens(2, 64, seed)
            with torch.no_grad():
                reference = exact.double()(ids).logits
                for who, model in (("transformers", low), ("phasor", patched(low))):
                    error = model(ids).logits.double() - reference
                    sums[who] += float(error.pow(2).mean().sqrt()) / 4
        ratio = sums["phasor"] / sums["transformers"]
        print(f"{name}: {sums['transformers']:.2e} before, {sums['phasor']:.2e} after, {ratio:.3f}")
        for who, size in sums.items():
            total[who] += size / sums["transformers"] / len(names)
    print(f"all: {total['phasor']:.3f} of what it was")
    assert total["phasor"] <= total["transformers"]
