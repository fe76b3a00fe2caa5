"""`RotaryAttention` as a module: it trains, compiles, moves, and leaves its inputs alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from phasor import QueryFactor, Rope, SpecError
from phasor.positions import cached, packed, padded, span
from phasor.scaling import Yarn
from phasor.torch import attention as attention_module
from phasor.torch.attention import RotaryAttention
from phasor.torch.module import as_rotation

from .attention_reference import HALF, HEADS, LAYERS, WIDTH, layer
from .torch_arrays import normal
from .torch_cases import Largest

BACKEND = "aot_eager"


STANDING: dict[str, tuple[dict[str, Any], Any]] = {
    "plain": ({}, span(5)),
    "packed": ({"cu_seqlens": [0, 2, 2, 5]}, packed([0, 2, 2, 5])),
    "padded": (
        {"attention_mask": torch.tensor([[False, True, True, False, True]])},
        padded([[0, 1, 1, 0, 1]]),
    ),
}


def stood(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """A list that the positions of every rotation are added to."""
    seen: list[Tensor] = []

    def record(x: Tensor, positions: Tensor, rope: Rope) -> Any:
        seen.append(positions)
        return as_rotation(x, positions, rope)

    monkeypatch.setattr(attention_module, "as_rotation", record)
    return seen


@pytest.mark.parametrize("call", STANDING)
def test_tokens_stand_where_their_sequence_puts_them(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores only see distances, so nothing else tells whether each sequence begins at 0."""
    seen = stood(monkeypatch)
    options, expected = STANDING[call]
    layer()(normal(1, 5, WIDTH, dtype=torch.float64), **options)
    assert [p.expand(expected.shape).tolist() for p in seen] == [expected.tolist()]


def test_tokens_stand_behind_those_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row behind its own."""
    seen = stood(monkeypatch)
    attention, x = layer(), normal(2, 5, WIDTH, dtype=torch.float64)
    mask = torch.tensor([[False, True, True], [True, True, True]])
    with torch.no_grad():
        cache = attention.make_cache(batch_size=2, capacity=5)
        attention(x[:, :3], attention_mask=mask, cache=cache)
        attention(x[:, 3:], cache=cache)
    assert seen[0][mask].tolist() == [0, 1, 0, 1, 2]
    assert seen[1].tolist() == cached([2, 3], new_tokens=2).tolist()


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "packed": {"cu_seqlens": [0, 2, 5]},
    "padded": {"attention_mask": torch.tensor([[False, True, True, True, True]])},
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", ["causal", "full", "window", "normed"])
def test_gradients_are_those_of_the_values(name: str, call: str) -> None:
    """Of tokens and of every weight, against finite differences."""
    attention = layer(**LAYERS[name][0] | {"num_kv_heads": 2})
    x = normal(1, 5, WIDTH, dtype=torch.float64).requires_grad_()
    weights = dict(attention.named_parameters())

    def run(x: Tensor, *values: Tensor) -> Tensor:
        given = dict(zip(weights, values, strict=True))
        return torch.func.functional_call(attention, given, (x,), CALLS[call])

    assert torch.autograd.gradcheck(run, (x, *weights.values()), fast_mode=True)


@pytest.mark.parametrize("rope", [Rope(head_dim=16, pairing="half", base=100.0), None], ids=str)
def test_only_with_a_rope_it_learns_to_copy_the_token_before(rope: Rope | None) -> None:
    """Of random tokens, nothing but positions tells which one that is."""
    torch.manual_seed(0)
    attention = RotaryAttention(rope, 16, 2, head_dim=16, qkv_bias=True)
    steps = torch.optim.Adam(attention.parameters(), lr=3e-2)
    loss = torch.tensor(torch.inf)
    for _ in range(150):
        x = torch.randn(8, 16, 16)
        loss = (attention(x)[:, 1:] - x[:, :-1]).square().mean()
        steps.zero_grad()
        loss.backward()
        steps.step()
    assert loss < 0.1 if rope else loss > 0.5


@pytest.mark.usefixtures("forget_graphs")
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", ["causal", "window"])
@pytest.mark.compile
def test_every_mask_compiles_to_one_graph(name: str, call: str, chunk: int) -> None:
    """Forward and backward, with eager mode's bits."""
    attention = layer(torch.float32, **LAYERS[name][0])
    quick = torch.compile(attention, fullgraph=True, backend=BACKEND)
    results = []
    for run in (attention, quick):
        x = normal(1, 5, WIDTH).requires_grad_()
        y = run(x, **CALLS[call])
        y.sum().backward()
        results.append((y, x.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.usefixtures("forget_graphs")
@pytest.mark.compile
def test_cross_attention_compiles_to_one_graph() -> None:
    """Forward and backward, to both inputs, with eager mode's bits."""
    attention = layer(torch.float32, causal=False)
    quick = torch.compile(attention, fullgraph=True, backend=BACKEND)
    results = []
    for run in (attention, quick):
        x, memory = normal(1, 5, WIDTH).requires_grad_(), normal(1, 8, WIDTH).requires_grad_()
        y = run(x, key_value_states=memory)
        y.sum().backward()
        results.append((y, x.grad, memory.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("kind", ["causal", "window", "packed", "padded", "cached"])
def test_no_mask_is_as_large_as_the_scores(kind: str) -> None:
    """4096 tokens have 16 million scores; nothing made is half as large."""
    seq = 4096
    attention = layer(torch.float32, window=64 if kind == "window" else None)
    x = normal(1, seq, WIDTH)
    calls: dict[str, dict[str, Any]] = {
        "packed": {"cu_seqlens": [0, 1000, 1010, seq]},
        "padded": {"attention_mask": torch.ones(1, seq, dtype=torch.bool)},
        "cached": {"cache": attention.make_cache(1, seq + 8)},
    }
    with torch.no_grad(), Largest() as largest:
        if kind == "cached":
            attention(x[:, :8], cache=calls[kind]["cache"])
        attention(x, **calls.get(kind, {}))
    assert seq * HEADS * 8 <= largest.elements < seq * seq / 2


def test_the_state_is_the_weights() -> None:
    """Linear maps and norms by their names; no table, no buffer."""
    attention = layer(qk_norm=True, qkv_bias=True)
    maps = [f"{part}_proj.{kind}" for part in "qkv" for kind in ("weight", "bias")]
    norms = ["q_norm.weight", "k_norm.weight"]
    assert set(attention.state_dict()) == {*maps, *norms, "o_proj.weight"}
    assert list(attention.buffers()) == []


def test_a_copy_computes_the_same() -> None:
    """Deep copies, and layers that load the state."""
    attention, x = layer(qk_norm=True), normal(1, 5, WIDTH, dtype=torch.float64)
    loaded = RotaryAttention(HALF, WIDTH, HEADS, qk_norm=True, dtype=torch.float64)
    loaded.load_state_dict(attention.state_dict())
    assert torch.equal(copy.deepcopy(attention)(x), attention(x))
    assert torch.equal(loaded(x), attention(x))


def test_a_layer_may_begin_without_memory() -> None:
    """On the meta device it has shapes; given memory and weights, it computes the same."""
    attention, x = layer(qk_norm=True), normal(1, 5, WIDTH, dtype=torch.float64)
    empty = RotaryAttention(HALF, WIDTH, HEADS, qk_norm=True, device="meta", dtype=torch.float64)
    assert empty(x.to("meta")).shape == x.shape
    filled = empty.to_empty(device="cpu")
    filled.load_state_dict(attention.state_dict())
    assert torch.equal(filled(x), attention(x))


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16], ids=str)
def test_16_bit_layers_know_far_positions(kind: torch.dtype) -> None:
    """A table or an angle in 16 bits would be a radian off; what is off is a rounding."""
    attention = layer(torch.float64, rope=Rope(head_dim=8, pairing="half")).to(kind)
    x = normal(1, 9, WIDTH, dtype=kind)
    far = torch.arange(9) * 70_001 + 2**30
    exact = copy.deepcopy(attention).double()
    right = exact(x.double(), far)
    off = (attention(x, far).double() - right).abs().max()
    # a score of size s is off by about 4 roundings of it, and so is, relatively, its weight
    assert off < 4 * torch.finfo(kind).eps * (1 + 8) * right.abs().max()
    wrong = exact(x.double(), far.to(kind).double() if kind == torch.bfloat16 else far % 2048)
    assert (wrong - right).abs().max() > 0.05


def test_inputs_are_left_alone() -> None:
    """Tokens, positions and the mask."""
    given = [normal(1, 5, WIDTH), torch.arange(5), torch.tensor([[False] + [True] * 4])]
    before = [(one.clone(), one._version) for one in given]
    layer(torch.float32, window=2)(given[0], given[1], attention_mask=given[2])
    assert all(
        torch.equal(a, b) and a._version == n for a, (b, n) in zip(given, before, strict=True)
    )


def test_printing_a_layer_says_what_it_does() -> None:
    """Heads, mask and rope, and what queries are multiplied by."""
    text = layer(window=7, num_kv_heads=2).extra_repr()
    assert text.startswith("num_heads=4, num_kv_heads=2, causal=True, window=7, rope=Rope(")
    assert layer(rope=None, head_dim=8).extra_repr().endswith("rope=None")
    grown = layer(rope=None, head_dim=8, query_factor=QueryFactor(strength=0.1, length=4))
    assert "rope=None, query_factor=QueryFactor(strength=0.1, length=4," in grown.extra_repr()


@pytest.mark.parametrize("rope", [Yarn(factor=4.0, original_max_positions=64), None])
def test_another_rope_takes_the_place_of_the_first_in_everything(rope: Yarn | None) -> None:
    """Frequencies, the factor on cos and sin, the factor on scores: as if built with it."""
    other = Rope(head_dim=8, pairing="half", scaling=rope)
    built, changed = layer(torch.float32, rope=other), layer(torch.float32)
    changed.load_state_dict(built.state_dict())
    changed.rope = other
    x = normal(1, 9, WIDTH)
    assert torch.equal(changed(x), built(x))
    with pytest.raises(SpecError, match=r"rope must have the head_dim of this layer \(8\), got 16"):
        changed.rope = Rope(head_dim=16, pairing="half")
    assert changed.rope is other


def test_a_cache_made_under_autocast_takes_what_autocast_makes() -> None:
    """As one does that was told the dtype; float64, which is never cast, stays float64."""
    decoder, x = layer(torch.float32), normal(2, 5, WIDTH)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        caches = decoder.make_cache(2, 5), decoder.make_cache(2, 5, dtype=torch.bfloat16)
        decoded = [
            torch.cat([decoder(x[:, i : i + 1], cache=cache) for i in range(5)], 1)
            for cache in caches
        ]
        assert layer(torch.float64).make_cache(1, 1).keys.dtype == torch.float64
    assert torch.equal(*decoded)
    assert caches[0].keys.dtype == torch.bfloat16
    assert caches[0].keys.count_nonzero() == caches[0].keys.numel()
    assert decoder.make_cache(1, 1).keys.dtype == torch.float32
