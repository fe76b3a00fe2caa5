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
from phasor.papers import cosine, linear_weights
from phasor.torch import RotaryLinearAttention
from phasor.torch.papers import LinearState, PositiveRandomFeatures, linear, linear_attention

from .linear_reference import HALF, elu_plus_one, off, right, three, turned
from .torch_arrays import float64, normal

PARTIAL = Rope(head_dim=8, rotary_dim=4, rotary_start=2, pairing="interleaved", pairing_out="half")
SECTIONED = Rope(head_dim=8, pairing="half", axes=Sectioned((2, 1, 1)))
SUMS = [("elu", True), ("softmax", True), ("elu", False), ("softmax", False), ("shen", False)]


@pytest.mark.parametrize(
    "rope", [HALF, PARTIAL, None], ids=["half", "partial, re-paired", "no rope"]
)
@pytest.mark.parametrize(("feature_map", "causal"), SUMS)
def test_it_is_the_quadratic_form(feature_map: str, rope: Rope | None, causal: bool) -> None:
    """Chunked or over all tokens, eq. 19 comes out to 1e-13, over more than two chunks."""
    seq = 2 * linear.CHUNK + 3
    q, k, v = three(seq, 2, 8)
    positions = torch.arange(seq) + 1000
    made = linear_attention(q, k, v, positions, rope, causal=causal, feature_map=feature_map)
    expected = right((q, k, v), positions, rope, causal=causal, feature_map=feature_map)
    assert off(made, expected) < 1e-13
    assert made.is_contiguous()


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
        patch.setattr(linear, "BLOCK", 2)
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


@pytest.mark.parametrize("tokens", [(20,), (1,), ()], ids=str)
def test_positions_of_several_axes_rotate(
    tokens: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Rope of three axes takes three coordinates a token, or three for all, in every block."""
    monkeypatch.setattr(linear, "CHUNK", 4)
    monkeypatch.setattr(linear, "BLOCK", 2)
    q, k, v = three(20, 1, 8)
    positions = torch.from_numpy(np.random.default_rng(0).integers(0, 99, (*tokens, 3)))
    made = linear_attention(q, k, v, positions, SECTIONED, causal=True)
    each = positions.expand(20, 3)
    assert off(made, right((q, k, v), each, SECTIONED, causal=True)) < 1e-13


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


def positive_features(rows: np.ndarray) -> Any:
    """Lemma 1 of Performer, a product for every feature."""

    def made(x: np.ndarray) -> np.ndarray:
        y = x / x.shape[-1] ** 0.25
        below = np.exp(-(y * y).sum(-1, keepdims=True) / 2) / len(rows) ** 0.5
        return np.stack([np.exp((y * row).sum(-1)) for row in rows], -1) * below

    return made, made


@pytest.mark.parametrize("rope", [Rope(head_dim=20, pairing="interleaved"), None], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_random_features_widen_heads(rope: Rope | None, causal: bool) -> None:
    """Twenty features of heads of four, all of them rotated; eq. 19 from their definition."""
    q, k, v = three(70, 2, 4)
    features = PositiveRandomFeatures(4, 20, seed=3)
    rows = float64(features.projection)
    assert rows.shape == (20, 4)
    made = linear_attention(q, k, v, torch.arange(70), rope, causal=causal, feature_map=features)
    right_maps = positive_features(rows)
    expected = right((q, k, v), torch.arange(70), rope, causal=causal, feature_map=right_maps)
    assert off(features(q), right_maps[0](float64(q))) < 1e-12
    assert off(made, expected) < 1e-12


def test_random_features_estimate_the_softmax() -> None:
    """Without bias, and with an error below that of independent rows (Performer, lemma 2)."""
    q, k = normal(30, 8, dtype=torch.float64) / 2, normal(30, 8, dtype=torch.float64, seed=1) / 2
    exact = float64(((q * k).sum(-1) / 8**0.5).exp())
    draws = 400
    sums = np.stack(
        [
            float64((features(q) * features(k)).sum(-1))
            for features in (PositiveRandomFeatures(8, 24, seed=seed) for seed in range(draws))
        ]
    )
    both = float64((q + k).square().sum(-1)) / 8**0.5
    variance = np.exp(both) * exact**2 * (1 - np.exp(-both)) / 24
    assert (np.abs(sums.mean(0) - exact) <= 5 * (variance / draws) ** 0.5).all()
    # of 400 draws a variance is known to a tenth or two
    assert np.mean(sums.var(0) / variance) < 1.1


def test_random_rows_are_orthogonal_and_as_long_as_normal_ones() -> None:
    """In blocks of the width of a head; the same for the same seed, others for another."""
    rows = PositiveRandomFeatures(16, 40, seed=1).projection.double()
    for block in (rows[:16], rows[16:32], rows[32:]):
        products = block @ block.T
        # float32 entries of rows with a length of about four
        assert (products - products.diag().diag()).abs().max() < 16 * 16 * 2**-24
    many = PositiveRandomFeatures(16, 3200, seed=2).projection.double().square().sum(-1)
    # a chi-squared of 16 degrees has the mean 16 and the variance 32
    assert abs(float(many.mean()) - 16) < 5 * (32 / 3200) ** 0.5
    assert abs(float(many.var()) - 32) < 0.2 * 32
    again, other = (PositiveRandomFeatures(16, 40, seed=seed).projection for seed in (1, 2))
    assert torch.equal(again.double(), rows)
    assert not torch.equal(other.double(), rows)


def test_large_queries_do_not_underflow() -> None:
    """Features of a query of length 200 are zero in float32; its mean of values is a mean."""
    q = torch.full((3, 1, 4), 100.0)
    k, v = normal(3, 1, 4), normal(3, 1, 4)
    features = PositiveRandomFeatures(4, 8)
    assert not features(q).any()
    made = linear_attention(q, k, v, 0, None, causal=False, feature_map=features)
    assert made.isfinite().all()
    assert (made.amax(0) <= v.amax(0) + 1e-5).all()


@pytest.mark.parametrize("rope", [Rope(head_dim=20, pairing="half"), None], ids=str)
def test_the_module_takes_random_features(rope: Rope | None) -> None:
    """Trained and decoded alike, with the rows in its state, which a seed or a file brings back."""
    torch.manual_seed(0)
    made, other = (
        RotaryLinearAttention(
            rope, 6, 2, head_dim=4, feature_map=PositiveRandomFeatures(4, 20, seed=seed)
        ).double()
        for seed in (0, 1)
    )
    assert made.q_proj.weight.shape == (8, 6)
    assert "feature_map.projection" in made.state_dict()
    x, state = normal(2, 30, 6, dtype=torch.float64), LinearState()
    with torch.no_grad():
        whole = made(x)
        parts = [made(x[:, :29], state=state), made(x[:, 29:], state=state)]
        assert off(torch.cat(parts, 1), float64(whole)) < 1e-13
        assert off(other(x), float64(whole)) > 1e-3
        other.load_state_dict(made.state_dict())
        assert torch.equal(other(x), whole)
    q, k, v = (
        (x[0] @ part.weight.T).reshape(30, 2, 4) for part in (made.q_proj, made.k_proj, made.v_proj)
    )
    maps = positive_features(float64(made.feature_map.projection))
    gathered = right((q, k, v), torch.arange(30), rope, causal=True, feature_map=maps)
    assert off(whole[0], gathered.reshape(30, 8) @ float64(made.o_proj.weight).T) < 1e-12


def test_a_module_without_rope_sees_no_positions() -> None:
    """It is eq. 18, whatever positions are given, so that all layers may be called alike."""
    layer = RotaryLinearAttention(None, 6, 2, head_dim=8, dtype=torch.float64)
    x = normal(9, 6, dtype=torch.float64)
    assert torch.equal(layer(x), layer(x, torch.arange(9) + 5))
    q, k, v = (
        (x @ part.weight.T).reshape(9, 2, 8) for part in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    gathered = right((q, k, v), range(9), None, causal=True).reshape(9, 16)
    assert off(layer(x), gathered @ float64(layer.o_proj.weight).T) < 1e-13


BUILDS: dict[str, tuple[str, dict[str, Any]]] = {
    "no width": ("head_dim must be a whole number >= 1, got None", {"rope": None}),
    "a width that no named map makes": (
        "rope must have the number of features (4) as its head_dim, got 8",
        {"head_dim": 4},
    ),
    "fewer features than the rope rotates": (
        "rope must have the number of features (6) as its head_dim, got 8",
        {"head_dim": 4, "feature_map": PositiveRandomFeatures(4, 6)},
    ),
    **{
        f"{name}: a word": (f"{name} must be True or False, got 'no'", {name: "no"})
        for name in ("causal", "qkv_bias", "o_bias")
    },
    "features of wider heads": (
        "feature_map must be for heads of width 4, got 16",
        {"head_dim": 4, "feature_map": PositiveRandomFeatures(16, 8)},
    ),
}


@pytest.mark.parametrize("case", BUILDS)
def test_modules_whose_widths_do_not_fit_are_refused(case: str) -> None:
    """When they are built."""
    text, options = BUILDS[case]
    with pytest.raises(SpecError) as refused:
        RotaryLinearAttention(**{"rope": HALF, "embed_dim": 6, "num_heads": 2} | options)
    assert text in str(refused.value)


@pytest.mark.parametrize("feature_map", ["elu", "shen"])
def test_heads_first_is_the_same_call_on_transposed_views(feature_map: str) -> None:
    """Bit for bit, also for a map that looks along the tokens."""
    given = three(2, 3, 20, 8)
    options: dict[str, Any] = {"causal": feature_map == "elu", "feature_map": feature_map}
    views = [x.transpose(1, 2) for x in given]
    expected = linear_attention(*views, torch.arange(20), HALF, **options)
    assert expected.is_contiguous()
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
    assert abs(sums.mean() - cosine(rope, np.arange(512), "aligned").mean()) < 4 * sums.std() / 20


Q, K, V = three(4, 2, 8)
REFUSED = {
    "no such map": (SpecError, "feature_map must be", {"feature_map": "relu"}),
    "three maps": (SpecError, "pair of callables", {"feature_map": (torch.exp,) * 3}),
    "shen, causal": (SpecError, "use 'softmax'", {"feature_map": "shen"}),
    "a state of all": (SpecError, "and None otherwise", {"causal": False, "state": LinearState()}),
    "no rope": (SpecError, "rope must be a phasor.Rope, got int", {"rope": 8}),
    "wide features": (
        TensorError,
        "feature_map must make",
        {"rope": Rope(head_dim=16, pairing="half")},
    ),
    "keys of other features": (
        TensorError,
        "feature_map must make",
        {"rope": None, "feature_map": (torch.exp, lambda k: k[..., :4].exp())},
    ),
    "not a tensor": (TensorError, "v must be", {"v": [1.0]}),
    "integers": (TensorError, "k must be", {"k": K.long()}),
    "two dtypes": (TensorError, "v must have the dtype", {"v": V.float()}),
    "fewer keys": (TensorError, "tokens and heads of q", {"k": K[:3]}),
    "shared keys": (TensorError, "repeat_interleave", {"k": K[:, :1]}),
    "sparse values": (TensorError, "v must be a dense torch.Tensor", {"v": V.to_sparse()}),
    "causal: a word": (SpecError, "causal must be True or False, got 'no'", {"causal": "no"}),
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
