"""`RotaryAttention` is dense attention, whatever mask it avoids to build."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from phasor import Rope
from phasor.axes import Sectioned
from phasor.scaling import Llama3, Yarn
from phasor.torch import attention as attention_module
from phasor.torch.attention import RotaryAttention

from ..each import each
from ..rounding import rounding
from .attention_reference import (
    HEADS,
    LAYERS,
    WIDTH,
    assert_attends,
    causal,
    everything,
    last,
    layer,
)
from .live.live_models import difference
from .torch_arrays import normal

DTYPES = [torch.float64, torch.float32]


@each("dtype", DTYPES)
@pytest.mark.parametrize("name", LAYERS)
def test_attention_is_its_definition(name: str, dtype: torch.dtype, chunk: int) -> None:
    """Every row of a batch, to within what rounding can do."""
    options, sees = LAYERS[name]
    attention, x = layer(dtype, **options), normal(2, 11, WIDTH, dtype=dtype)
    y = attention(x)
    for row in range(2):
        assert_attends(y[row], attention, x[row], sees)


@each("dtype", DTYPES)
@pytest.mark.parametrize("name", LAYERS)
def test_packed_sequences_are_separate_ones(name: str, dtype: torch.dtype, chunk: int) -> None:
    """Each is what it would be alone, from position 0; an empty one is nothing."""
    options, sees = LAYERS[name]
    attention, x = layer(dtype, **options), normal(2, 13, WIDTH, dtype=dtype)
    y = attention(x, cu_seqlens=[0, 7, 7, 8, 13])
    for a, b in ((0, 7), (7, 8), (8, 13)):
        assert_attends(y[1, a:b], attention, x[1, a:b], sees)


def test_boundaries_may_be_a_tensor() -> None:
    """As the variable-length kernels take them."""
    attention, x = layer(), normal(1, 9, WIDTH, dtype=torch.float64)
    bounds = [0, 4, 9]
    as_tensor = attention(x, cu_seqlens=torch.tensor(bounds, dtype=torch.int32))
    assert torch.equal(as_tensor, attention(x, cu_seqlens=bounds))


PADDING = {"left": slice(0, 4), "right": slice(7, 11), "nowhere": slice(0, 0)}


@each("side", PADDING)
@each("dtype", DTYPES)
@pytest.mark.parametrize("name", LAYERS)
def test_padded_rows_are_unpadded_ones(
    name: str, dtype: torch.dtype, side: str, chunk: int
) -> None:
    """Tokens are what they would be without padding; what padding becomes is finite."""
    options, sees = LAYERS[name]
    attention, x = layer(dtype, **options), normal(2, 11, WIDTH, dtype=dtype)
    mask = torch.ones(2, 11, dtype=torch.bool)
    mask[0, PADDING[side]] = False
    y = attention(x, attention_mask=mask)
    assert y.isfinite().all()
    for row in range(2):
        assert_attends(y[row, mask[row]], attention, x[row, mask[row]], sees)


@pytest.mark.parametrize("name", LAYERS)
def test_padding_sees_itself_and_nothing_else_does(name: str, chunk: int) -> None:
    """Tokens it sees like any other: a softmax over nothing would be NaN."""
    options, sees = LAYERS[name]
    attention, x = layer(**options), normal(1, 7, WIDTH, dtype=torch.float64)
    mask = [False, False, True, True, True, True, False]
    y = attention(x, attention_mask=torch.tensor([mask]))
    places = [0, 0, 0, 1, 2, 3, 0]
    assert_attends(y[0], attention, x[0], lambda i, j: (sees(i, j) and mask[j]) or i == j, places)


def test_tokens_do_not_notice_what_padding_holds() -> None:
    """Not by a bit."""
    attention, x = layer(), normal(1, 9, WIDTH, dtype=torch.float64)
    mask = torch.tensor([[False] * 3 + [True] * 6])
    other = torch.where(mask[..., None], x, 1e3 * x)
    assert torch.equal(
        attention(other, attention_mask=mask)[mask], attention(x, attention_mask=mask)[mask]
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_positions_may_be_given(dtype: torch.dtype) -> None:
    """Other ones in each row, out of order and far away."""
    attention, x = layer(dtype, window=5), normal(2, 7, WIDTH, dtype=dtype)
    positions = torch.tensor([[5, 9, 2, 700, 701, 0, -3], [0, 2, 4, 6, 8, 10, 12]])
    y = attention(x, positions)
    for row in range(2):
        assert_attends(y[row], attention, x[row], last(5), positions[row].tolist())


UNMASKED = [n for n, (options, _) in LAYERS.items() if not options.get("window")]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", UNMASKED)
def test_keys_may_come_from_elsewhere(name: str, dtype: torch.dtype) -> None:
    """More or fewer than the queries, with positions of their own; every query sees them all."""
    attention = layer(dtype, **LAYERS[name][0] | {"causal": False})
    x, places = normal(2, 7, WIDTH, dtype=dtype), torch.tensor([5, 9, 2, 700, 701, 0, -3])
    for length in (4, 11):
        memory = normal(2, length, WIDTH, dtype=dtype, seed=5)
        key_places = torch.arange(2 * length).reshape(2, length) * 3 - 4
        counted = attention(x, key_value_states=memory)
        given = attention(x, places, key_value_states=memory, key_value_positions=key_places)
        for row in range(2):
            own = (memory[row], range(length))
            assert_attends(counted[row], attention, x[row], everything, keys_of=own)
            own = (memory[row], key_places[row].tolist())
            assert_attends(given[row], attention, x[row], everything, places.tolist(), own)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_among_keys_from_elsewhere_is_not_seen(side: str) -> None:
    """Nor counted; queries have no padding."""
    attention, x = layer(causal=False), normal(2, 5, WIDTH, dtype=torch.float64)
    memory, mask = normal(2, 11, WIDTH, dtype=torch.float64, seed=5), torch.ones(2, 11).bool()
    mask[0, PADDING[side]] = False
    y = attention(x, key_value_states=memory, attention_mask=mask)
    for row in range(2):
        own = memory[row, mask[row]]
        assert_attends(y[row], attention, x[row], everything, keys_of=(own, range(len(own))))


def test_a_query_that_sees_no_key_gathers_nothing() -> None:
    """Zeros before the last projection, and not NaN."""
    attention, x = layer(causal=False, o_bias=True), normal(2, 5, WIDTH, dtype=torch.float64)
    mask = torch.tensor([[False] * 3, [True] * 3])
    y = attention(x, key_value_states=x[:, :3], attention_mask=mask)
    assert torch.equal(y[0], attention.o_proj.bias.expand(5, WIDTH))
    assert_attends(y[1], attention, x[1], everything, keys_of=(x[1, :3], range(3)))


@pytest.mark.parametrize("kind", ["causal", "window", "packed", "padded", "cross"])
def test_dropout_sets_weights_to_zero_in_training(kind: str) -> None:
    """Each with that chance, and the rest are larger by what is lost; whatever the mask."""
    window = 9 if kind == "window" else None
    attention = layer(dropout=0.25, window=window, causal=kind != "cross")
    seq = 24
    x = normal(40, seq, WIDTH, dtype=torch.float64)
    options: dict[str, Any] = {
        "packed": {"cu_seqlens": [0, 10, seq]},
        "padded": {"attention_mask": torch.arange(seq).expand(40, seq) > 3},
        "cross": {"key_value_states": x},
    }.get(kind, {})
    # keys and queries of nothing: every weight is the same; values and outputs: which key it is
    with torch.no_grad():
        for weight in (attention.q_proj.weight, attention.k_proj.weight):
            weight.zero_()
        exact = attention(x, **options)
        torch.manual_seed(0)
        dropped = [attention.train()(x, **options) for _ in range(60)]
    off = torch.stack(dropped) - exact
    assert off.abs().max() > 0.1
    # no bias: the mean of 60 is within six of its own standard errors
    assert (off.mean(0).abs() <= 6 * off.std(0) / 60**0.5 + 1e-12).all()
    assert torch.equal(attention.eval()(x, **options), exact)


def test_a_dropped_weight_is_zero_and_the_others_grow() -> None:
    """By the weights themselves, of values that name their keys."""
    q, k = normal(1, 40, 1, 8, dtype=torch.float64), normal(1, 40, 1, 8, dtype=torch.float64)
    names = torch.eye(40, dtype=torch.float64)[None, :, None]
    weights = attention_module.attend(q, k, names, 0.3, causal=True)
    torch.manual_seed(0)
    dropped = attention_module.attend(q, k, names, 0.3, causal=True, dropout=0.25)
    kept = dropped != 0
    assert torch.allclose(dropped[kept], weights[kept] / 0.75, rtol=1e-12)
    # of 820 weights a quarter, within five standard deviations
    share = 1 - kept.sum() / (weights != 0).sum()
    assert abs(float(share) - 0.25) < 5 * (0.25 * 0.75 / 820) ** 0.5


def test_a_rope_of_several_axes_takes_their_positions() -> None:
    """Equal on every axis, they are what one axis sees."""
    several = Rope(head_dim=8, pairing="half", base=100.0, axes=Sectioned((2, 1, 1)))
    x, along = normal(1, 6, WIDTH, dtype=torch.float64), torch.arange(6)
    places = along[:, None].expand(6, 3)
    y = layer(rope=several)(x, places)
    assert_attends(y[0], layer(), x[0], causal)


PLAIN = {"rope_type": "default", "rope_theta": 1e4}
EIGHTFOLD = {"rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}
YARN = EIGHTFOLD | {"rope_type": "yarn"}
LLAMA3 = EIGHTFOLD | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
THEIRS: dict[str, tuple[str, dict[str, Any], Any, dict[str, Any]]] = {
    "llama": ("llama", PLAIN, None, {}),
    "llama, biases": ("llama", PLAIN, None, {"qkv_bias": True, "o_bias": True}),
    "llama 3.1": (
        "llama",
        LLAMA3,
        Llama3(factor=8.0, original_max_positions=64, low_freq_factor=1.0, high_freq_factor=4.0),
        {},
    ),
    "llama, yarn": ("llama", YARN, Yarn(factor=8.0, original_max_positions=64), {}),
    "qwen3": ("qwen3", PLAIN, None, {"qk_norm": True}),
    "qwen3, window": ("qwen3", PLAIN, None, {"qk_norm": True, "window": 6}),
}


@pytest.mark.transformers
@pytest.mark.parametrize("name", THEIRS)
@torch.no_grad()
def test_transformers_computes_the_same(name: str) -> None:
    """With its weights loaded as they are, in float32, to a rounding."""
    model, parameters, law, options = THEIRS[name]
    module, config = theirs(model, parameters, options)
    rope = Rope(head_dim=16, pairing="half", scaling=law)
    weights = layer(torch.float32, embed_dim=48, rope=rope, num_kv_heads=2, **options)
    attention = module.attention(config, layer_idx=0)
    attention.load_state_dict(weights.state_dict())
    ours = RotaryAttention(rope, 48, HEADS, 2, **options)
    ours.load_state_dict(attention.state_dict())
    x = normal(2, 20, 48)
    rows = module.rotary(config)(x, torch.arange(20)[None])
    window = options.get("window", 20)
    sees = torch.tensor([[last(window)(i, j) for j in range(20)] for i in range(20)])
    bias = torch.zeros(20, 20).masked_fill(~sees, -torch.inf)[None, None]
    expected = attention(x, position_embeddings=rows, attention_mask=bias)[0]
    assert expected.std() > 0.1
    assert difference(expected, ours(x)) <= rounding(ours, lambda layer: layer(x))


def theirs(model: str, parameters: dict[str, Any], options: dict[str, Any]) -> tuple[Any, Any]:
    """The attention and rotary classes of a model of transformers, and a small config."""
    shape = {
        "hidden_size": 48,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_hidden_layers": 1,
        "max_position_embeddings": 512,
        "attention_bias": bool(options.get("qkv_bias")),
        "rope_parameters": dict(parameters),
    }
    if model == "llama":
        from transformers.models.llama import configuration_llama, modeling_llama

        config = configuration_llama.LlamaConfig(**shape, attn_implementation="eager")
        kinds = modeling_llama.LlamaAttention, modeling_llama.LlamaRotaryEmbedding
    else:
        from transformers.models.qwen3 import configuration_qwen3, modeling_qwen3

        config = configuration_qwen3.Qwen3Config(**shape, attn_implementation="eager")
        kinds = modeling_qwen3.Qwen3Attention, modeling_qwen3.Qwen3RotaryEmbedding
    return SimpleNamespace(attention=kinds[0], rotary=kinds[1]), config


def test_deepseeks_temperature_multiplies_the_softmax() -> None:
    """YaRN with both coefficients 1 at factor 40: scores times the published 1.87385420709."""
    law = Yarn(factor=40.0, original_max_positions=4096, mscale=1.0, mscale_all_dim=1.0)
    warm = layer(rope=Rope(head_dim=8, pairing="half", scaling=law))
    assert warm.rope is not None
    assert warm.rope.attention_factor == 1
    cold = Yarn(factor=40.0, original_max_positions=4096, attention_factor=1.0)
    plain = layer(rope=Rope(head_dim=8, pairing="half", scaling=cold))
    with torch.no_grad():
        plain.q_proj.weight *= 1.87385420709
    x = normal(1, 9, WIDTH, dtype=torch.float64)
    # the published digits are good to 3e-12, and logits here are below 10
    assert (warm(x) - plain(x)).abs().max() < 1e-10
    assert (warm(x) - layer(rope=plain.rope)(x)).abs().max() > 1e-3


def test_a_temperature_on_cos_and_sin_leaves_the_rest_of_the_head_alone() -> None:
    """YaRN at factor 8: as if the weights of coordinates that turn were 1.2079... times larger."""
    law = {"factor": 8.0, "original_max_positions": 64}
    part = {"head_dim": 8, "rotary_dim": 4, "rotary_start": 2, "pairing": "half"}
    warm = layer(rope=Rope(**part, scaling=Yarn(**law)))
    plain = layer(rope=Rope(**part, scaling=Yarn(**law, attention_factor=1.0)))
    with torch.no_grad():
        for weight in (plain.q_proj.weight, plain.k_proj.weight):
            weight.view(HEADS, 8, WIDTH)[:, 2:6] *= 1.20794415416798
    x = normal(1, 9, WIDTH, dtype=torch.float64)
    # the published digits are good to 4e-15, and scores are below 10
    assert (warm(x) - plain(x)).abs().max() < 1e-12
