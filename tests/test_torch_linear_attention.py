"""Linear attention is RoFormer's eq. 19, whichever way its sums are taken.

The oracle adds up tokens one by one, in NumPy, with turns from 60-digit angles.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from phasor import Rope, Sectioned
from phasor.analysis import expected_linear_sum, linear_weights
from phasor.errors import PositionError, SpecError, TensorError
from phasor.torch import LinearState, RotaryLinearAttention, _causal_sum, linear_attention

from .torch_oracle import float64, normal, pair_places, turns

HALF = Rope(head_dim=8, pairing="half", base=100.0)
PARTIAL = Rope(head_dim=8, rotary_dim=4, rotary_start=2, pairing="interleaved", pairing_out="half")
SECTIONED = Rope(head_dim=8, pairing="half", axes=Sectioned((2, 1, 1)))
SUMS = [("elu", True), ("softmax", True), ("elu", False), ("softmax", False), ("shen", False)]
Maps = tuple[Callable[[np.ndarray], np.ndarray], Callable[[np.ndarray], np.ndarray]]


def elu_plus_one(x: np.ndarray) -> np.ndarray:
    """``elu(x) + 1``, by its two cases."""
    return np.array([y + 1 if y > 0 else math.exp(y) for y in x.flat]).reshape(x.shape)


def shares(x: np.ndarray, axis: int) -> np.ndarray:
    """The softmax."""
    return np.exp(x) / np.exp(x).sum(axis, keepdims=True)


# of [seq, heads, width]
RIGHT_MAPS: dict[str, Maps] = {
    "elu": (elu_plus_one, elu_plus_one),
    "softmax": (lambda x: shares(x, -1), np.exp),
    "shen": (lambda x: shares(x, -1), lambda x: shares(x, 0)),
}


def turned(x: np.ndarray, positions: Any, rope: Rope) -> np.ndarray:
    """``x`` ``[seq, heads, head_dim]``, rotated as complex numbers."""
    rows = turns(rope, positions)
    first, second = pair_places(rope.pairing, rope.rotary_start, rope.num_pairs)
    z = (x[..., first] + 1j * x[..., second]) * rows[:, None]
    made = x.copy()
    first, second = pair_places(rope.output_pairing, rope.rotary_start, rope.num_pairs)
    made[..., first], made[..., second] = z.real, z.imag
    return made


def right(
    qkv: tuple[Tensor, Tensor, Tensor],
    positions: Any,
    rope: Rope,
    *,
    causal: bool,
    feature_map: str = "elu",
) -> np.ndarray:
    """Eq. 19 of one sequence ``[seq, heads, width]``, a sum for every token and head."""
    q, k, v = map(float64, qkv)
    map_query, map_key = RIGHT_MAPS[feature_map]
    q, k = map_query(q), map_key(k)
    turned_q, turned_k = turned(q, positions, rope), turned(k, positions, rope)
    out = np.zeros((*q.shape[:2], v.shape[-1]))
    for m in range(len(q)):
        for head in range(q.shape[1]):
            above, below = np.zeros(v.shape[-1]), 0.0
            for n in range(m + 1 if causal else len(q)):
                above = above + (turned_q[m, head] @ turned_k[n, head]) * v[n, head]
                below += q[m, head] @ k[n, head]
            out[m, head] = above / below
    return out


def three(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """A query, a key and a value of standard normal numbers."""
    return tuple(normal(*shape, seed=3 * seed + place, dtype=dtype) for place in range(3))


def leaves(*shape: int) -> tuple[Tensor, ...]:
    """`three`, whose gradients are wanted."""
    return tuple(x.requires_grad_() for x in three(*shape))


def off(actual: Tensor, value: np.ndarray) -> float:
    """Largest difference."""
    return float(np.abs(float64(actual) - value).max())


@pytest.mark.parametrize("rope", [HALF, PARTIAL], ids=["half", "partial, re-paired"])
@pytest.mark.parametrize(("feature_map", "causal"), SUMS)
def test_it_is_the_quadratic_form(feature_map: str, rope: Rope, causal: bool) -> None:
    """Chunked or over all tokens, eq. 19 comes out to 1e-13, over more than two chunks."""
    seq = 2 * _causal_sum.CHUNK + 3
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
        patch.setattr(_causal_sum, "CHUNK", chunk)
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
    assert off(made, float64(v).mean(0, keepdims=True).repeat(9, 0)) < 1e-5


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all tokens"])
@pytest.mark.parametrize("feature_map", ["elu", "softmax"])
def test_gradients_are_right(
    feature_map: str, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, twice and batched, with chunks of two tokens."""
    monkeypatch.setattr(_causal_sum, "CHUNK", 2)

    def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return linear_attention(
            q, k, v, torch.arange(5), HALF, causal=causal, feature_map=feature_map
        )

    inputs = leaves(1, 5, 1, 8)
    assert gradcheck(attended, inputs, check_batched_grad=True)
    assert gradgradcheck(attended, inputs)


def test_gradients_pass_through_the_state() -> None:
    """What later tokens gather depends on keys and values of earlier parts."""

    def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        state = LinearState()
        first = (x[:, :3] for x in (q, k, v))
        linear_attention(*first, torch.arange(3), HALF, causal=True, state=state)
        rest = (x[:, 3:] for x in (q, k, v))
        return linear_attention(*rest, torch.arange(3, 5), HALF, causal=True, state=state)

    assert gradcheck(attended, leaves(1, 5, 1, 8))


def test_it_maps_over_a_batch_that_torch_func_hides() -> None:
    """And its gradients are those of each alone."""
    q, k, v = three(3, 70, 2, 8)

    def total(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return linear_attention(q, k, v, torch.arange(70), HALF, causal=True).square().sum()

    mapped = torch.func.vmap(torch.func.grad(total))(q, k, v)
    for row in range(3):
        alone = torch.func.grad(total)(q[row], k[row], v[row])
        assert off(mapped[row], float64(alone)) < 1e-12


class Largest(TorchDispatchMode):
    """Remembers how many elements the largest tensor had that any operation made."""

    elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.itemsize)
        return made


def kept_and_largest(seq: int) -> tuple[int, int]:
    """Elements saved for the backward pass, and of the largest tensor of both passes."""
    saved: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        memory = x.untyped_storage()
        saved[memory.data_ptr()] = memory.nbytes() // x.itemsize
        return x

    with Largest() as largest, saved_tensors_hooks(keep, lambda x: x):
        q, k, v = (x.detach().requires_grad_() for x in three(seq, 1, 8, dtype=torch.float32))
        linear_attention(q, k, v, torch.arange(seq), HALF, causal=True).sum().backward()
    return sum(saved.values()), largest.elements


def test_training_never_holds_a_matrix_of_tokens_by_tokens() -> None:
    """None is larger than two inputs, and what is kept grows as they do."""
    (kept, _), (kept_twice, largest) = kept_and_largest(2048), kept_and_largest(4096)
    assert largest <= 4096 * 8 * 2
    assert kept_twice <= 2.01 * kept
    assert kept_twice <= 20 * 4096 * 8


def test_the_module_is_its_projections_around_eq_19() -> None:
    """Weights written out, with biases."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"input_bias": True, "output_bias": True, "dtype": torch.float64}
    layer = RotaryLinearAttention(6, 2, HALF, **options)
    x = normal(9, 6, dtype=torch.float64)
    q, k, v = (
        (x @ part.weight.T + part.bias).reshape(9, 2, 8)
        for part in (layer.query, layer.key, layer.value)
    )
    gathered = right((q, k, v), torch.arange(9), HALF, causal=True).reshape(9, 16)
    expected = gathered @ float64(layer.output.weight).T + float64(layer.output.bias)
    assert off(layer(x), expected) < 1e-13


def test_the_module_decodes_as_it_trains() -> None:
    """A prompt and then a token at a time, positions counted by the state."""
    torch.manual_seed(0)
    layer = RotaryLinearAttention(6, 2, HALF, dtype=torch.float64)
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
    "no rope": (SpecError, "rope must be", {"rope": None}),
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
        RotaryLinearAttention(6, 2, SECTIONED)(normal(3, 6))


def test_weights_refuse_shapes_that_do_not_fit() -> None:
    """The message shows both."""
    with pytest.raises(TensorError, match=r"got shapes \[8\] and \[5, 4\]"):
        linear_weights(np.zeros(8), np.zeros((5, 4)), HALF)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_leaves_the_sums_alone(dtype: torch.dtype) -> None:
    """They are float32, forward and backward: what enters in float32 comes out as it would."""
    q, k, v = (normal(64, 2, 8, seed=s).requires_grad_() for s in range(3))
    made: list[list[Tensor]] = []
    for on in (False, True):
        with torch.autocast("cpu", dtype, enabled=on):
            y = linear_attention(q, k, v, torch.arange(64), HALF, causal=True)
        made.append([y.detach(), *torch.autograd.grad(y.square().sum(), (q, k, v))])
    assert all(map(torch.equal, *made))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_layer_trains_under_autocast(dtype: torch.dtype) -> None:
    """Maps in 16 bits around sums in 32."""
    layer = RotaryLinearAttention(16, 2, HALF)
    with torch.autocast("cpu", dtype):
        y = layer(normal(2, 9, 16))
    y.float().square().sum().backward()
    assert y.dtype == dtype
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
