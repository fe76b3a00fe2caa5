"""Models that their users changed after they were made: served where that is right, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tools.tiny_models import tiny_model
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb

from phasor.errors import ConfigError
from phasor.torch.hf import from_model, patch, unpatch

from ...rounding import says_the_same
from .live_models import prefill

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


def classes(model: Any) -> list[type]:
    """Of every module, to see that none was changed."""
    return [type(module) for module in model.modules()]


def assert_refused(model: Any, says: str) -> None:
    """By both functions, with every class as it was."""
    before = classes(model)
    for function in (from_model, patch):
        with pytest.raises(ConfigError, match=says):
            function(model)
    assert classes(model) == before


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("factor", [1.5, 0.9, 3])
def test_a_changed_attention_factor_is_refused(law: str, factor: float) -> None:
    """Phasor would turn by the config's; none of the laws here has one of these."""
    model = llama(law)
    model.model.rotary_emb.attention_scaling = factor
    assert_refused(model, r"rotary_emb .*attention_scaling is not what its config says")


def test_a_changed_attention_factor_of_one_kind_of_layer_is_refused() -> None:
    """Gemma 3 keeps one for each kind."""
    model = tiny_model("gemma3_text")
    model.model.rotary_emb.sliding_attention_attention_scaling = 1.5
    assert_refused(model, "sliding_attention_attention_scaling is not what its config says")


@pytest.mark.parametrize("law", ["dynamic", "LongRoPE"])
def test_what_a_rule_makes_its_frequencies_of_must_be_the_configs(law: str) -> None:
    """It goes back to them for short sequences."""
    model = llama(law)
    rotary = model.model.rotary_emb
    rotary.inv_freq.mul_(2)
    rotary.original_inv_freq.mul_(2)
    assert_refused(model, "original_inv_freq is not what its config says")


def test_a_rules_frequencies_are_those_of_its_last_call() -> None:
    """That is no change of somebody's."""
    model = llama("dynamic")
    rotary = model.model.rotary_emb
    with torch.no_grad():
        model(torch.arange(300)[None] % 100)
    assert not torch.equal(rotary.inv_freq, rotary.original_inv_freq)
    assert len(patch(model).layers) == 2


class Passing(LlamaAttention):
    """Calls the rotation of another class."""

    def forward(self, *arguments: Any, **words: Any) -> Any:
        """As the class below does."""
        return super().forward(*arguments, **words)


class Inline(LlamaAttention):
    """Rotates with code of its own."""

    def forward(self, hidden_states: Tensor, position_embeddings: Any = None, **_: Any) -> Any:
        """Something with cosines."""
        cos, sin = position_embeddings
        turned = hidden_states[..., : cos.shape[-1]] * cos + sin
        return nn.functional.pad(turned, (0, hidden_states.shape[-1] - cos.shape[-1])), None


class Foreign(nn.Module):
    """The same without being a subclass."""

    def __init__(self, *_: Any) -> None:
        super().__init__()

    forward = Inline.forward


class Reaching(nn.Module):
    """Hands cosines to a function of its own."""

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def forward(self, hidden_states: Tensor, position_embeddings: Any = None, **_: Any) -> Any:
        """Through a function that no name tells."""
        return first(hidden_states, *position_embeddings), None


def first(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """No rotation by its name."""
    return x * cos[..., :1] + sin[..., :1]


class Still(nn.Module):
    """A layer without position embedding, which takes cosines and leaves them alone."""

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def forward(self, hidden_states: Tensor, position_embeddings: Any = None, **_: Any) -> Any:
        """Nothing."""
        return hidden_states, None


class Asking(Still):
    """A layer without position embedding that insists on being given one."""

    def forward(self, hidden_states: Tensor, position_embeddings: Any = None, **_: Any) -> Any:
        """Nothing, if it is given them."""
        assert position_embeddings is not None
        return (hidden_states if position_embeddings is not None else None), None


class Wrapped(nn.Module):
    """Holds attention and hands all on."""

    def __init__(self, inner: LlamaAttention) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden_states: Tensor, position_embeddings: Any = None, **words: Any) -> Any:
        """What the attention inside says."""
        return self.inner(hidden_states, position_embeddings=position_embeddings, **words)


class More(LlamaAttention):
    """Has a method more and rotates as its class does."""

    def extra(self) -> int:
        """A number."""
        return 1


class Alone(nn.Module):
    """Attention from elsewhere that rotates as that of the same file does, in one head."""

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def forward(self, hidden_states: Tensor, position_embeddings: Any = None, **_: Any) -> Any:
        """Scores of the vectors themselves."""
        cos, sin = position_embeddings
        x = hidden_states[:, None, :, :128]
        q, k = apply_rotary_pos_emb(x, x, cos, sin)
        return (q @ k.mT).tanh().squeeze(1) @ hidden_states, None


class Careful(nn.Module):
    """The same after a look at what it is given."""

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def forward(self, hidden_states: Tensor, position_embeddings: Any = None, **_: Any) -> Any:
        """Scores of the vectors themselves."""
        cos, sin = position_embeddings
        assert cos is not None
        x = hidden_states[:, None, :, :128]
        q, k = apply_rotary_pos_emb(x, x, cos, sin)
        return (q @ k.mT).tanh().squeeze(1) @ hidden_states, None


class Doubting(Alone):
    """Rotates by tensors only."""

    def forward(self, hidden_states: Tensor, position_embeddings: Any = None, **_: Any) -> Any:
        """Scores of the vectors themselves."""
        cos, sin = position_embeddings
        q = k = hidden_states[:, None, :, :128]
        if isinstance(cos, Tensor):
            q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return (q @ k.mT).tanh().squeeze(1) @ hidden_states, None


class Counting(LlamaAttention):
    """Takes prompts of one length only."""

    def forward(self, hidden_states: Tensor, position_embeddings: Any = None, **_: Any) -> Any:
        """Scores of the vectors themselves."""
        assert hidden_states.shape[1] == 24, "not 24 tokens"
        cos, sin = position_embeddings
        x = hidden_states[:, None, :, :128]
        q, k = apply_rotary_pos_emb(x, x, cos, sin)
        return (q @ k.mT).tanh().squeeze(1) @ hidden_states, None


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


def given(cls: type, layers: tuple[int, ...]) -> Any:
    """A tiny Llama some of whose layers have attention of that class."""
    model = llama()
    for index in layers:
        layer = model.model.layers[index]
        if issubclass(cls, LlamaAttention):
            layer.self_attn.__class__ = cls
        else:
            layer.self_attn = cls(layer.self_attn)
    prefill(model)  # it runs as it is
    return model


@pytest.mark.parametrize(
    ("cls", "says"),
    [
        (Passing, "no unsqueeze"),
        (Inline, "no shape"),
        (Foreign, "no shape"),
        (Reaching, "not subscriptable"),
        (Doubting, "a small copy of it rotates otherwise"),
        (Counting, r"a small copy of it cannot be run \(not 24 tokens"),
    ],
)
def test_attention_that_cannot_be_followed_is_refused(cls: type, says: str) -> None:
    """Before anything is changed, not by its first forward."""
    if says.startswith("no"):
        says = rf"does more with cosines than rotate \(.*{says}\)"
    assert_refused(given(cls, (1,)), rf"layers\.1\.self_attn \({cls.__name__}\) .*{says}")


def test_attention_that_no_layer_rotates_with_is_no_rotation_of_transformers() -> None:
    """A subclass in every layer that calls its class's rotation through super."""
    assert_refused(given(Passing, (0, 1)), "there is nothing to replace|rotation of its own")


def test_a_list_of_layers_is_looked_through_as_well() -> None:
    """Their paths begin with a number."""
    layers = given(Foreign, (1,)).model.layers
    layers.append(llama().model.rotary_emb)
    layers[-1].config = llama().config
    assert_refused(layers, r"1\.self_attn \(Foreign\) .* more with cosines than rotate")


@pytest.mark.parametrize("layers", [(1,), (0, 1)], ids=["one layer", "all layers"])
@pytest.mark.parametrize("make", [More, Wrapped, Alone, Careful])
def test_attention_that_rotates_as_its_class_is_served(
    make: Callable[..., Any], layers: tuple[int, ...]
) -> None:
    """A subclass from elsewhere, or a module around it, is no other rotation."""
    model = given(make, layers)  # pyright: ignore[reportArgumentType]
    kinds = classes(model)
    with says_the_same(model):
        assert len(patch(model).layers) == 2
    unpatch(model)
    assert classes(model) == kinds


@pytest.mark.parametrize("cls", [Still, Asking])
def test_a_layer_that_leaves_its_cosines_alone_is_no_obstacle(cls: type) -> None:
    """It takes positions as it took cosines, and may ask whether there are any."""
    model = given(cls, (1,))
    with says_the_same(model):
        assert len(patch(model).layers) == 1


@pytest.mark.parametrize("function", [patch, unpatch, from_model])
@pytest.mark.parametrize("model", ["llama", None, 3, nn.Linear], ids=str)
def test_what_is_no_module_is_refused(function: Callable[[Any], Any], model: object) -> None:
    """With what was given instead."""
    with pytest.raises(ConfigError, match=r"model must be a torch\.nn\.Module"):
        function(model)


def test_quantized_projections_are_no_obstacle() -> None:
    """A copy with random weights has others in their place."""
    model = llama()
    for layer in model.model.layers:
        layer.self_attn.q_proj = Rounded(layer.self_attn.q_proj)
    with says_the_same(model):
        assert len(patch(model).layers) == 2
