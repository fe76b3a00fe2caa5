"""Linear attention is RoFormer's eq. 19, whichever way its sums are taken."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from phasor import Rope
from phasor.axes import Sectioned
from phasor.errors import PositionError, SpecError, TensorError
from phasor.papers import expected_linear_sum, linear_weights
from phasor.torch import RotaryLinearAttention
from phasor.torch.papers import LinearState, linear, linear_attention

from .linear_oracle import HALF, elu_plus_one, off, right, three, turned
from .torch_oracle import float64, normal

PARTIAL = Rope(head_dim=8, rotary_dim=4, rotary_start=2, pairing="interleaved", pairing_out="half")
SECTIONED = Rope(head_dim=8, pairing="half", axes=Sectioned((2, 1, 1)))
SUMS = [("elu", True), ("softmax", True), ("elu", False), ("softmax", False), ("shen", False)]


@pytest.mark.parametrize("rope", [HALF, PARTIAL], ids=["half", "partial, re-paired"])
@pytest.mark.parametrize(("feature_map", "causal"), SUMS)
def test_it_is_the_quadratic_form(feature_map: str, rope: Rope, causal: bool) -> None:
    """Chunked or over all tokens, eq. 19 comes out to 1e-13, over more than two chunks."""
    seq = 2 * linear.CHUNK + 3
    q, k, v = three(seq, 2, 8)
    positions = torch.arange(seq) + 1000
    made = linear_attention(q, k, v, positions, rope, causal=causal, feature_map=feature_map)
    expected = right((q, k, v), positions, rope, causal=causal, feature_map=feature_map)
    assert off(made, expected) < 1e-13


@given(st.integers(1, 40), st.integers(1, 9), st.data())
def test_chunks_and_steps_of_any_size_agree(seq: int, chunk: int, data: st.DataObject) -> None:
    """Cut anywhere and given in parts to a state, tokens gather what the quadratic form says."""
    q, k, v = three(seq, 2, 4, seed=seq)
    rope = Rope(head_dim=4, pairing="half")
    positions = torch.tensor(data.draw(st.lists(st.integers(-99, 99), min_size=seq, max_size=seq)))
    cuts = sorted(data.draw(st.sets(st.integers(1, seq))) | {0, seq})
    state, parts = LinearState(), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "CHUNK", chunk)
        for a, b in pairwise(cuts):
            now = (x[a:b] for x in (q, k, v, positions))
            parts.append(linear_attention(*now, rope, causal=True, state=state))
    assert off(torch.cat(parts), right((q, k, v), positions, rope, causal=True)) < 1e-13
    assert state.tokens == seq


def test_the_state_is_the_two_sums() -> None:
    """Rotated keys times values, and plain keys; nothing that grows."""
    q, k, v = three(30, 2, 8)
    v = v[..., :3]
    state = LinearState()
    linear_attention(q, k, v, torch.arange(30), HALF, causal=True, state=state)
    features = elu_plus_one(float64(k))
    products = turned(features, torch.arange(30), HALF)[..., :, None] * float64(v)[..., None, :]
    assert state.values is not None
    assert state.weights is not None
    assert off(state.values, products.sum(0)) < 1e-13
    assert off(state.weights, features.sum(0)) < 1e-13
    assert state.values.numel() + state.weights.numel() == 2 * (8 * 3 + 8)


def test_a_state_of_before_stays_as_it_was() -> None:
    """Tensors of the state are replaced, so a copy of it can be continued in two ways."""
    q, k, v = three(5, 2, 8)
    state = LinearState()
    linear_attention(q, k, v, 0, HALF, causal=True, state=state)
    assert state.values is not None
    before, held = state.values, state.values.clone()
    linear_attention(q, k, v, 1, HALF, causal=True, state=state)
    assert torch.equal(before, held)


def test_only_distances_matter() -> None:
    """Positions moved by a million change nothing that float64 could show."""
    q, k, v = three(50, 2, 8)
    near, far = (
        linear_attention(q, k, v, torch.arange(50) + start, HALF, causal=True)
        for start in (0, 10**6)
    )
    assert off(near, float64(far)) < 1e-13


def test_positions_of_several_axes_rotate() -> None:
    """A Rope of three axes takes three coordinates a token."""
    q, k, v = three(20, 1, 8)
    positions = torch.from_numpy(np.random.default_rng(0).integers(0, 99, (20, 3)))
    made = linear_attention(q, k, v, positions, SECTIONED, causal=True)
    assert off(made, right((q, k, v), positions, SECTIONED, causal=True)) < 1e-13


def test_sequences_of_a_batch_do_not_meet() -> None:
    """With positions of their own, each is what it is alone."""
    q, k, v = three(3, 70, 2, 8)
    positions = torch.stack([torch.arange(70) * step for step in (1, 3, -2)])
    together = linear_attention(q, k, v, positions, HALF, causal=True)
    for row in range(3):
        alone = right((q[row], k[row], v[row]), positions[row], HALF, causal=True)
        assert off(together[row], alone) < 1e-13


def test_features_may_be_anything() -> None:
    """A pair of callables, that widen heads to what the Rope rotates."""
    q, k, v = three(20, 2, 4)

    def both_signs(x: Tensor) -> Tensor:
        return torch.cat((x.relu(), (-x).relu()), -1) + 0.5

    def squares(x: Tensor) -> Tensor:
        return torch.cat((x * x, x * x + 1), -1)

    made = linear_attention(
        q, k, v, torch.arange(20), HALF, causal=True, feature_map=(both_signs, squares)
    )
    wide_q, wide_k = float64(both_signs(q)), float64(squares(k))
    scores = np.einsum("mhd,nhd->hmn", *(turned(x, range(20), HALF) for x in (wide_q, wide_k)))
    below = np.einsum("mhd,nhd->hmn", wide_q, wide_k)
    expected = np.einsum("hmn,nhe->mhe", np.tril(scores), float64(v))
    expected /= np.tril(below).sum(-1).T[..., None]
    assert off(made, expected) < 1e-13


@pytest.mark.parametrize("feature_map", ["elu", "shen"])
def test_heads_first_is_the_same_call_on_transposed_views(feature_map: str) -> None:
    """Bit for bit, also for a map that looks along the tokens."""
    given = three(2, 3, 20, 8)
    options: dict[str, Any] = {"causal": feature_map == "elu", "feature_map": feature_map}
    views = [x.transpose(1, 2) for x in given]
    expected = linear_attention(*views, torch.arange(20), HALF, **options)
    made = linear_attention(*given, torch.arange(20), HALF, heads_first=True, **options)
    assert torch.equal(made.transpose(1, 2), expected)


def test_shen_and_its_reading_by_roformer_differ() -> None:
    """The softmax over tokens divides each feature by a sum of its own, exp does not."""
    q, k, v = three(20, 1, 8)
    one, other = (
        linear_attention(q, k, v, 0, HALF, causal=False, feature_map=name)
        for name in ("shen", "softmax")
    )
    assert float((one - other).abs().max()) > 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_narrow_tensors_are_rounded_once(dtype: torch.dtype) -> None:
    """Float32 inside: the result is one rounding of its dtype from the truth.

    The mean of values below 5 is below 5; float32 sums of 8 features and 150 tokens and a row of
    cos and sin are off by less than 1e-4 of that.
    """
    q, k, v = three(150, 2, 8, dtype=dtype)
    made = linear_attention(q, k, v, torch.arange(150), HALF, causal=True)
    expected = right((q, k, v), torch.arange(150), HALF, causal=True)
    allowed = 5e-4 + torch.finfo(dtype).eps / 2 * np.abs(expected)
    assert made.dtype == dtype
    assert (np.abs(float64(made) - expected) <= allowed).all()


def test_features_far_below_zero_stay_positive() -> None:
    """Float32 holds ``exp(-50)`` though not ``expm1(-50) + 1``: the mean is not 0 / 0."""
    v = normal(9, 1, 8)
    low = torch.full((9, 1, 8), -50.0)
    made = linear_attention(low + 50, low, v, 0, HALF, causal=False)
    # sums of 9 values below 3.1, by weights of some fifty roundings
    room = (9 + 50) * 2**-24 * 3.1
    assert off(made, float64(v).mean(0, keepdims=True).repeat(9, 0)) <= room


def test_the_module_is_its_projections_around_eq_19() -> None:
    """Weights written out, with biases."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"qkv_bias": True, "o_bias": True, "dtype": torch.float64}
    layer = RotaryLinearAttention(HALF, 6, 2, **options)
    x = normal(9, 6, dtype=torch.float64)
    q, k, v = (
        (x @ part.weight.T + part.bias).reshape(9, 2, 8)
        for part in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    gathered = right((q, k, v), torch.arange(9), HALF, causal=True).reshape(9, 16)
    expected = gathered @ float64(layer.o_proj.weight).T + float64(layer.o_proj.bias)
    assert off(layer(x), expected) < 1e-13


def test_the_module_decodes_as_it_trains() -> None:
    """A prompt and then a token at a time, positions counted by the state."""
    torch.manual_seed(0)
    layer = RotaryLinearAttention(HALF, 6, 2, dtype=torch.float64)
    x, state = normal(2, 80, 6, dtype=torch.float64), LinearState()
    with torch.no_grad():
        parts = [layer(x[:, :70], state=state)]
        parts += [layer(x[:, p : p + 1], state=state) for p in range(70, 80)]
        assert off(torch.cat(parts, 1), float64(layer(x))) < 1e-13


def test_the_last_weights_are_what_eq_19_gives_values() -> None:
    """Values that name their tokens come out as `linear_weights`."""
    q, k, _ = three(90, 1, 8)
    names = torch.eye(90, dtype=torch.float64)[:, None]
    made = linear_attention(q, k, names, torch.arange(90), HALF, causal=True)
    assert off(made[-1, 0], linear_weights(float64(q)[-1, 0], float64(k)[:, 0], HALF)) < 1e-13


@pytest.mark.parametrize("rope", [HALF, PARTIAL], ids=["half", "partial"])
def test_random_weights_sum_to_what_is_expected(rope: Rope) -> None:
    """On average over draws, within four standard errors."""
    draw = np.random.default_rng(0)
    sums = np.array(
        [
            linear_weights(draw.standard_normal(8), draw.standard_normal((512, 8)), rope).sum()
            for _ in range(400)
        ]
    )
    assert abs(sums.mean() - expected_linear_sum(rope, 512)) < 4 * sums.std() / 20


Q, K, V = three(4, 2, 8)
REFUSED = {
    "no such map": (SpecError, "feature_map must be", {"feature_map": "relu"}),
    "three maps": (SpecError, "pair of callables", {"feature_map": (torch.exp,) * 3}),
    "shen, causal": (SpecError, "use 'softmax'", {"feature_map": "shen"}),
    "a state of all": (SpecError, "state must be None", {"causal": False, "state": LinearState()}),
    "no rope": (SpecError, "rope must be a phasor.Rope, got int", {"rope": 8}),
    "wide features": (
        TensorError,
        "feature_map must make",
        {"rope": Rope(head_dim=16, pairing="half")},
    ),
    "not a tensor": (TensorError, "v must be", {"v": [1.0]}),
    "integers": (TensorError, "k must be", {"k": K.long()}),
    "two dtypes": (TensorError, "v must have the dtype", {"v": V.float()}),
    "fewer keys": (TensorError, "k must share", {"k": K[:3]}),
    "shared keys": (TensorError, "repeat_interleave", {"k": K[:, :1]}),
    "positions": (PositionError, "positions must", {"positions": torch.arange(3)}),
    "other state": (
        TensorError,
        "state must hold",
        {"state": LinearState(torch.zeros(3, 8, 8), torch.zeros(3, 8))},
    ),
}


@pytest.mark.parametrize(("error", "words", "given"), REFUSED.values(), ids=REFUSED.keys())
def test_what_means_nothing_is_refused(
    error: type[Exception], words: str, given: dict[str, Any]
) -> None:
    """By an error that names the argument and the way out."""
    usual: dict[str, Any] = {"q": Q, "k": K, "v": V, "positions": 0, "rope": HALF, "causal": True}
    with pytest.raises(error, match=words):
        linear_attention(**(usual | given))


def test_a_module_of_several_axes_wants_positions() -> None:
    """Three tokens' range must not pass for one token's three coordinates."""
    with pytest.raises(PositionError, match="positions must be given"):
        RotaryLinearAttention(SECTIONED, 6, 2)(normal(3, 6))


def test_weights_refuse_shapes_that_do_not_fit() -> None:
    """The message shows both."""
    with pytest.raises(TensorError, match=r"got shapes \[8\] and \[5, 4\]"):
        linear_weights(np.zeros(8), np.zeros((5, 4)), HALF)
