"""Frequency usage of running models, against norms of all their queries and keys at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from phasor import LayerRopes, Rope, SpecError, TensorError
from phasor.papers import pair_norms
from phasor.torch import Rotation
from phasor.torch.attention import RotaryAttention
from phasor.torch.papers import watch_usage

ROPE = Rope(head_dim=8, pairing="half")
WIDTH, HEADS, KEY_HEADS = 24, 4, 2


class Centred(nn.Module):
    """A norm that changes every pair by itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(-1, keepdim=True)) * self.weight


class Attention(nn.Module):
    """Projects, norms in one of the ways that models do, and keeps what it would rotate."""

    def __init__(self, norm: str = "none") -> None:
        super().__init__()
        self.norm, self.seen = norm, []
        self.q_proj = nn.Linear(WIDTH, HEADS * 8)
        self.k_proj = nn.Linear(WIDTH, KEY_HEADS * 8)
        if norm != "none":
            whole = norm == "whole"
            self.q_norm = Centred(HEADS * 8 if whole else 8)
            self.k_norm = Centred(KEY_HEADS * 8 if whole else 8)

    def forward(self, x: Tensor) -> Tensor:
        """Queries and keys are kept as ``[batch, seq, heads, head_dim]``."""
        q, k = self.q_proj(x), self.k_proj(x)
        if self.norm == "whole":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = (h.view(*h.shape[:-1], -1, 8) for h in (q, k))
        if self.norm == "tokens first":
            q, k = self.q_norm(q), self.k_norm(k)
        if self.norm == "heads first":
            q, k = self.q_norm(q.transpose(1, 2)), self.k_norm(k.transpose(1, 2))
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        self.seen.append((q.detach(), k.detach()))
        return x


class Model(nn.Module):
    """Attention layers in a row."""

    def __init__(self, *norms: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Attention(norm) for norm in norms])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def inputs(*lead: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """What a model takes."""
    draw = torch.Generator().manual_seed(1)
    return torch.randn(*lead, WIDTH, generator=draw).to(dtype)


def layer_ropes(*kinds: str, **fields: Any) -> LayerRopes:
    """A model's ropes, some layers without one."""
    known = {"rope": ROPE, "nope": None, "interleaved": Rope(head_dim=8, pairing="interleaved")}
    return LayerRopes(name="toy", layer_kinds=kinds, kinds=known, **fields)


def all_at_once(layer: Attention, which: int, rope: Rope = ROPE) -> np.ndarray:
    """The mean norms of everything the layer would have rotated."""
    tokens = [seen[which].double().reshape(-1, seen[which].shape[-2], 8) for seen in layer.seen]
    return pair_norms(torch.cat(tokens).numpy(), rope)


@pytest.mark.parametrize("norm", ["none", "whole", "tokens first", "heads first"])
@pytest.mark.parametrize("seq", [1, HEADS, KEY_HEADS, 7])
def test_norms_are_of_what_the_model_rotates(norm, seq):
    """Behind a norm wherever it stands, also with as many tokens as heads; float32 sums are within
    seven roundings of each norm.
    """
    model = Model(norm, norm)
    with watch_usage(model, ROPE) as layers:
        model(inputs(3, seq))
    for layer, used in zip(model.layers, layers, strict=True):
        np.testing.assert_allclose(used.queries.mean, all_at_once(layer, 0), rtol=2e-6)
        np.testing.assert_allclose(used.keys.mean, all_at_once(layer, 1), rtol=2e-6)


@pytest.mark.parametrize("qk_norm", [False, True], ids=["plain", "normed"])
def test_rotary_attention_is_watched(monkeypatch, qk_norm):
    """What comes out of its rotation has the same norms, to a rounding of each coordinate."""
    turned = []

    rotate = Rotation.__call__

    def watched_rotation(self: Rotation, *given: Any, **options: Any) -> tuple[Tensor, Tensor]:
        turned.append(rotate(self, *given, **options))
        return turned[-1]

    monkeypatch.setattr(Rotation, "__call__", watched_rotation)
    torch.manual_seed(0)
    model = RotaryAttention(ROPE, WIDTH, HEADS, KEY_HEADS, qk_norm=qk_norm)
    with watch_usage(model, ROPE) as (layer,):
        model(inputs(3, 7))
    for norms, x in zip((layer.queries, layer.keys), turned[0], strict=True):
        np.testing.assert_allclose(norms.mean, pair_norms(x.detach().numpy(), ROPE), rtol=4e-6)


def test_values_are_watched_by_the_pairs_of_their_keys():
    """Where their heads are as wide; a layer without values of its own, or of others, has none."""
    names = {"q_proj": HEADS * 8, "k_proj": KEY_HEADS * 8, "v_proj": KEY_HEADS * 8}
    model = nn.ModuleDict({name: nn.Linear(WIDTH, width) for name, width in names.items()})
    with watch_usage(model, ROPE) as (layer,):
        made = {name: projection(inputs(1, 3)).detach() for name, projection in model.items()}
    heads = made["v_proj"].unflatten(-1, (-1, 8)).numpy()
    np.testing.assert_allclose(layer.values.mean, pair_norms(heads, ROPE), rtol=2e-6)
    for changed in ({"v_proj": nn.Linear(WIDTH, KEY_HEADS * 6)}, {}):
        other = nn.ModuleDict({**dict(list(model.items())[:2]), **changed})
        with watch_usage(other, ROPE) as (layer,):
            other["k_proj"](inputs(1, 3))
        assert layer.values is None


def test_projections_may_be_called_query_and_key():
    """As in ESM and RoFormer."""
    names = {"query": nn.Linear(WIDTH, HEADS * 8), "key": nn.Linear(WIDTH, KEY_HEADS * 8)}
    with watch_usage(nn.ModuleDict(names), ROPE) as (layer,):
        made = {name: projection(inputs(1, 3)).detach() for name, projection in names.items()}
    for name, norms in (("query", layer.queries), ("key", layer.keys)):
        heads = made[name].unflatten(-1, (-1, 8)).numpy()
        np.testing.assert_allclose(norms.mean, pair_norms(heads, ROPE), rtol=2e-6)


@pytest.mark.parametrize("norm", [nn.Identity(), None], ids=["identity", "none"])
def test_an_identity_is_no_norm(norm):
    """What the projection says is taken, and not lost because a norm never ran."""
    model = Model("none")
    model.layers[0].q_norm = norm
    with watch_usage(model, ROPE) as (layer,):
        model(inputs(1, 3))
    np.testing.assert_allclose(layer.queries.mean, all_at_once(model.layers[0], 0), rtol=2e-6)


def test_calls_add_up():
    """A mean over tokens, not over calls."""
    model = Model("none")
    with watch_usage(model, ROPE) as (layer,):
        model(inputs(3, 7))
        model(10 * inputs(1, 2))
    assert layer.queries.tokens == layer.keys.tokens == 23
    np.testing.assert_allclose(layer.queries.mean, all_at_once(model.layers[0], 0), rtol=2e-6)


def test_each_layer_has_its_own_rope():
    """Its pairing; and a layer without a rope is not watched."""
    model = Model("none", "none", "none")
    ropes = layer_ropes("rope", "nope", "interleaved", num_heads=HEADS, num_kv_heads=KEY_HEADS)
    with watch_usage(model, ropes) as layers:
        model(inputs(1, 7))
    assert layers[1] is None
    for index in (0, 2):
        expected = all_at_once(model.layers[index], 0, ropes[index])
        np.testing.assert_allclose(layers[index].queries.mean, expected, rtol=2e-6)
        assert layers[index].name == f"layers.{index}"


def test_ropes_that_are_not_given_are_the_models_own():
    """Layers of phasor say what rotates them, one of several without a rope too."""
    torch.manual_seed(0)
    kinds = ROPE, None, Rope(head_dim=8, pairing="interleaved", rotary_dim=4)
    model = nn.ModuleList(RotaryAttention(r, WIDTH, HEADS, head_dim=8) for r in kinds)
    x = inputs(1, 5)
    with watch_usage(model) as layers:
        for layer in model:
            layer(x)
    assert [None if one is None else one.queries.mean.shape for one in layers] == [
        (HEADS, 4),
        None,
        (HEADS, 2),
    ]


@pytest.mark.parametrize(
    "given",
    [
        Rope(head_dim=8, pairing="interleaved"),
        Rope(head_dim=8, pairing="half", rotary_dim=4),
        Rope(head_dim=8, pairing="half", rotary_dim=4, rotary_start=4),
    ],
    ids=["pairing", "width", "slice"],
)
def test_ropes_of_other_pairs_than_the_models_are_refused(given):
    """Their norms would be of coordinates that do not turn together."""
    model = RotaryAttention(ROPE, WIDTH, HEADS)
    with (
        pytest.raises(SpecError, match="ropes must pair the coordinates that model pairs"),
        watch_usage(model, given),
    ):
        pass


def test_a_model_that_does_not_say_what_rotates_needs_ropes():
    """Plain projections do not know."""
    with pytest.raises(SpecError, match="ropes must be given"), watch_usage(Model("none")):
        pass


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_norms_are_taken_in_a_wide_dtype(dtype):
    """Of bfloat16 projections as exactly as of float32 ones; of float64 ones in float64."""
    model = Model("none").to(dtype)
    with watch_usage(model, ROPE) as (layer,):
        model(inputs(2, 50, dtype=dtype))
    rtol = 1e-14 if dtype == torch.float64 else 2e-6
    np.testing.assert_allclose(layer.keys.mean, all_at_once(model.layers[0], 1), rtol=rtol)


def test_hooks_are_gone_afterwards():
    """Also when the model fails."""
    model = Model("heads first", "none")
    with pytest.raises(RuntimeError), watch_usage(model, ROPE) as layers:
        model(torch.zeros(1, 2, WIDTH + 1))
    assert not any(module._forward_hooks for module in model.modules())
    model(inputs(1, 2))
    assert layers[0].queries.tokens == 0


def test_no_activation_is_kept():
    """Not the graph either: the total does not ask for a gradient."""
    model = Model("none")
    with watch_usage(model, ROPE) as (layer,):
        model(inputs(1, 2).requires_grad_())
    kept = [value for value in vars(layer.queries).values() if isinstance(value, Tensor)]
    assert [(tuple(total.shape), total.requires_grad) for total in kept] == [((HEADS, 4), False)]


def test_a_layer_that_did_not_run_says_so():
    """Instead of a mean of nothing."""
    with watch_usage(Model("none"), ROPE) as (layer,):
        pass
    with pytest.raises(TensorError, match="no token has passed"):
        layer.queries.mean  # noqa: B018


class Fused(nn.Module):
    """A projection of queries, keys and values together."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = nn.Linear(WIDTH, 3 * WIDTH)


def oddly_normed() -> nn.Module:
    """Phi's names."""
    model = Model("none")
    model.layers[0].q_layernorm = nn.LayerNorm(8)
    return model


@pytest.mark.parametrize(
    ("model", "ropes", "message"),
    [
        (Fused(), ROPE, "some modules with q_proj and k_proj .* got 0"),
        (Model("none"), layer_ropes("rope", "rope"), "must have 2 modules .* got 1"),
        (Model("none"), "x", "ropes must be a phasor.Rope, got 'x'"),
        (oddly_normed(), ROPE, r"layers.0 has norms that are not watched \(q_layernorm;"),
    ],
    ids=["fused", "other count", "no rope", "other norms"],
)
def test_models_that_cannot_be_watched_are_refused(model, ropes, message):
    """Before anything runs, and nothing stays hooked."""
    with pytest.raises(SpecError, match=message), watch_usage(model, ropes):
        pass
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("norm", "ropes", "message"),
    [
        ("none", Rope(head_dim=12, pairing="half"), "heads of head_dim 12, got 1 of 32"),
        ("tokens first", Rope(head_dim=16, pairing="half"), "head_dim 16, got 4 of 8"),
        ("none", layer_ropes("rope", num_heads=2), "must have 2 heads of head_dim 8, got 4 of 8"),
        (
            "none",
            layer_ropes("rope", num_kv_heads=4),
            "must have 4 heads of head_dim 8, got 2 of 8",
        ),
    ],
    ids=["torn heads", "other width", "other queries", "other keys"],
)
def test_projections_that_do_not_fit_are_refused(norm, ropes, message):
    """While running, when their shape is known."""
    model = Model(norm)
    with pytest.raises(TensorError, match=message), watch_usage(model, ropes):
        model(inputs(1, 3))
