"""Bent distances: two rotations and a strip give the dense definition on all pairs."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from phasor import PositionError, Rope, SpecError, TensorError
from phasor.angles import COS_SIN_ERROR
from phasor.axes import Sectioned
from phasor.scaling import DynamicNTK, Yarn
from phasor.torch import rotate_qk
from phasor.torch.papers import DualChunk, ReRope, SelfExtend, relative, relative_attention

from ..oracle import exact_rows, pair_places
from .torch_arrays import float64, normal

HALF = Rope(head_dim=8, pairing="half", base=100.0)
MIXED = Rope(head_dim=8, rotary_dim=4, rotary_start=2, pairing="interleaved", direction=-1)
Bent = Callable[[int, int], Fraction]


def rerope(width: int) -> Bent:
    """No distance is larger than the window."""
    return lambda m, n: Fraction(min(m - n, width))


def leaky(width: int, factor: Fraction) -> Bent:
    """Beyond the window, distances grow more slowly."""
    return lambda m, n: Fraction(m - n) if m - n < width else width + (m - n - width) / factor


def extended(width: int, group: int) -> Bent:
    """Beyond the window, distances are those of groups, moved to meet the window."""
    moved = width - width // group
    return lambda m, n: Fraction(m - n if m - n < width else m // group + moved - n // group)


# what is given, and what distance it must make of a query at m and a key at n
BENT: dict[str, tuple[Any, Bent]] = {
    "rerope": (ReRope(4), rerope(4)),
    "rerope, nothing near but itself": (ReRope(1), rerope(1)),
    "rerope, wider than the sequence": (ReRope(99), rerope(99)),
    "leaky": (ReRope(4, factor=2.5), leaky(4, Fraction(5, 2))),
    "leaky, stretching": (ReRope(3, factor=0.25), leaky(3, Fraction(1, 4))),
    "self-extend": (SelfExtend(6, 3), extended(6, 3)),
    "self-extend, width no multiple": (SelfExtend(5, 3), extended(5, 3)),
    "self-extend, groups of one": (SelfExtend(4, 1), lambda m, n: Fraction(m - n)),
}


@pytest.fixture(params=[1, 3, 512], ids=["1 query", "3 queries", "512 queries"])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many queries are scored at once."""
    monkeypatch.setattr(relative, "CHUNK", request.param)
    return request.param


def dense(q: Tensor, k: Tensor, v: Tensor, rope: Rope, bent: Bent, factor: float) -> np.ndarray:
    """One row's attention, every pair of tokens by its own turn, from the definition."""
    asked, held, values = float64(q), float64(k), float64(v)
    first, second = pair_places(rope.pairing, rope.rotary_start, rope.rotary_dim // 2)
    rest = [i for i in range(rope.head_dim) if i not in (*first, *second)]
    late, group = len(held) - len(asked), asked.shape[1] // held.shape[1]
    out = np.zeros_like(asked)
    for i in range(len(asked)):
        away = [float(bent(late + i, n)) for n in range(late + i + 1)]
        turns = exact_rows(rope, away)
        for head in range(asked.shape[1]):
            scores = []
            for n, turned in enumerate(turns):
                x, y = asked[i, head], held[n, head // group]
                z = (x[first] + 1j * x[second]) * (y[first] - 1j * y[second])
                scores.append(factor * (float(np.real(z @ turned)) + x[rest] @ y[rest]))
            weights = np.exp(np.array(scores) - max(scores))
            out[i, head] = weights / weights.sum() @ values[: late + i + 1, head // group]
    return out


def bound(q: Tensor, k: Tensor, v: Tensor, unit: float, row_error: float) -> float:
    """How far an output may be from `dense`.

    A score is a sum of ``d`` products of numbers that two rotations have left off by two roundings
    and a row's error each: ``|q| |k| factor ((d + 8) u + 4 √2 row_error)``, with the same again for
    the rounding of a fractional position. A weight is off by twice that, relatively, and by the
    exponential's and the sum's own roundings.
    """
    size = q.norm(dim=-1).max().item() * k.norm(dim=-1).max().item() * q.shape[-1] ** -0.5
    score = size * ((q.shape[-1] + 8) * unit + 8 * math.sqrt(2) * row_error)
    weight = 2 * score + (3 * k.shape[1] + 80 + 4 * size) * unit
    return 2 * weight * v.abs().max().item()


def tokens(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Two rows of 13 tokens: four heads of queries, two of keys."""
    q = normal(2, 13, 4, 8, dtype=dtype)
    return q, normal(2, 13, 2, 8, dtype=dtype, seed=1), normal(2, 13, 2, 8, dtype=dtype, seed=2)


@pytest.mark.parametrize("rope", [HALF, MIXED], ids=["half", "a part of the head"])
@pytest.mark.parametrize("name", BENT)
def test_attention_is_its_definition_on_all_pairs(name: str, rope: Rope, chunk: int) -> None:
    """In float64, however many queries are scored at once."""
    distance, bent = BENT[name]
    q, k, v = tokens()
    out = relative_attention(q, k, v, rope, distance)
    limit = bound(q, k, v, 2**-53, COS_SIN_ERROR)
    assert limit < 1e-11
    for row in range(2):
        expected = dense(q[row], k[row], v[row], rope, bent, 8**-0.5)
        assert np.abs(float64(out[row]) - expected).max() < limit


@pytest.mark.parametrize("name", BENT)
def test_float32_is_as_good_as_float32_can_be(name: str) -> None:
    """The same, with its own bound."""
    distance, bent = BENT[name]
    q, k, v = tokens(torch.float32)
    out = relative_attention(q, k, v, HALF, distance)
    expected = dense(q[0], k[0], v[0], HALF, bent, 8**-0.5)
    assert np.abs(float64(out[0]) - expected).max() < bound(q, k, v, 2**-24, 2**-22)


@pytest.mark.parametrize("name", BENT)
def test_16_bit_tensors_lose_a_rounding_and_no_more(name: str) -> None:
    """Of q and k after each rotation, and of the result: scores and softmax are float32."""
    distance, bent = BENT[name]
    q, k, v = (x.bfloat16() for x in tokens())
    out = relative_attention(q, k, v, HALF, distance)
    assert out.dtype == torch.bfloat16
    expected = dense(q[0], k[0], v[0], HALF, bent, 8**-0.5)
    # two factors of a score are off by 2^-9 of their own size, and the result once more
    limit = bound(q.double(), k.double(), v.double(), 2**-24, 2**-22)
    size = (q[0].double().norm(dim=-1).max() * k[0].double().norm(dim=-1).max()).item() * 8**-0.5
    limit += (2 * 2 * 2 * 2**-9 * size + 2**-9) * v.abs().max().item()
    assert np.abs(float64(out[0]) - expected).max() < limit


@pytest.mark.parametrize("name", BENT)
def test_the_last_queries_alone_see_the_same(name: str, chunk: int) -> None:
    """Decoding: all keys, and the queries of the newest tokens."""
    distance, _ = BENT[name]
    q, k, v = tokens()
    whole = relative_attention(q, k, v, HALF, distance)
    limit = bound(q, k, v, 2**-53, COS_SIN_ERROR)
    for new in (0, 1, 5):
        alone = relative_attention(q[:, 13 - new :], k, v, HALF, distance)
        assert alone.shape == (2, new, 4, 8)
        assert bool(((alone - whole[:, 13 - new :]).abs() < 2 * limit).all())


@pytest.mark.parametrize("name", BENT)
def test_heads_first_is_the_same_call_on_transposed_views(name: str) -> None:
    """Bit for bit."""
    given, distance = [x.transpose(1, 2).contiguous() for x in tokens()], BENT[name][0]
    expected = relative_attention(*(x.transpose(1, 2) for x in given), HALF, distance)
    out = relative_attention(*given, HALF, distance, heads_first=True)
    assert torch.equal(out.transpose(1, 2), expected)


DISTANCES = {
    "rerope, at the window": (ReRope(512), 512, 512.0),
    "rerope, far": (ReRope(512), 4900, 512.0),
    "leaky, at the window": (ReRope(512, factor=16.0), 512, 512.0),
    # Su's repository adds 512 * 15 and divides by 16
    "leaky, far": (ReRope(512, factor=16.0), 4900, 786.25),
    # the authors' defaults: 1024 and 8
    "self-extend, far": (SelfExtend(1024, 8), 10_239, 1279 + 1024 - 128),
}


@pytest.mark.parametrize("case", DISTANCES)
def test_published_settings_bend_as_published(case: str) -> None:
    """A query that far from the first key."""
    distance, away, expected = DISTANCES[case]
    query, key = distance.far_positions(torch.arange(away + 1))
    assert (query[away] - key[0]).item() == expected


@pytest.mark.parametrize(("size", "local"), [(5, 2), (8, 4), (7, 0), (1, 0), (12, 5)])
def test_chunks_keep_what_is_local_and_bound_the_rest(size: int, local: int) -> None:
    """Of every query and key, the distance is true when they are close, and at most the size."""
    chunks, tokens = DualChunk(size, local), range(40)
    keys = chunks.key_positions(torch.arange(40)).tolist()
    queries = [p.tolist() for p in chunks.query_positions(torch.arange(40))]
    for m in tokens:
        for n in range(m + 1):
            away = m // (size - local) - n // (size - local)
            distance = queries[min(away, 2)][m] - keys[n]
            assert 0 <= distance <= size
            if away == 0 or m - n <= local:
                assert distance == m - n


def test_published_chunks_are_counted_as_published() -> None:
    """With Qwen2.5-1M's settings, the rows of vLLM's tables that each position is given."""
    chunks = DualChunk(size=262_144, local=8_192)
    positions = torch.tensor([0, 8_191, 253_951, 253_952, 1_010_000])
    assert chunks.key_positions(positions).tolist() == [0, 8_191, 253_951, 0, 248_144]
    own, previous, older = chunks.query_positions(positions)
    assert own.tolist() == chunks.key_positions(positions).tolist()
    assert previous.tolist() == [253_952, 262_143, 262_144, 253_952, 262_144]
    assert older.tolist() == [262_144] * 5


@pytest.mark.parametrize("distance", [ReRope(4, factor=1.0), SelfExtend(4, 1), ReRope(99)], ids=str)
def test_unbent_distances_are_plain_attention(distance: Any) -> None:
    """As torch computes it from rotated queries and keys."""
    q, k, v = tokens()
    turned = rotate_qk(q, k, torch.arange(13), HALF)
    plain = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (*turned, v)), is_causal=True, enable_gqa=True
    ).transpose(1, 2)
    out = relative_attention(q, k, v, HALF, distance)
    assert (out - plain).abs().max() < 2 * bound(q, k, v, 2**-53, COS_SIN_ERROR)


TEMPERATURES = {
    "on cos and sin": ({"factor": 8.0}, 1.45912907959),
    "on the softmax": ({"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}, 1.87385420709),
}


@pytest.mark.parametrize("case", TEMPERATURES)
def test_temperature_is_that_of_the_law(case: str) -> None:
    """YaRN's, at the published sizes."""
    law, size = TEMPERATURES[case]
    warm = Yarn(original_max_positions=64, **law)
    cold = Yarn(original_max_positions=64, factor=law["factor"], attention_factor=1.0)
    q, k, v = tokens()

    def attended(q: Tensor, law: Yarn) -> Tensor:
        rope = Rope(head_dim=8, pairing="half", scaling=law)
        return relative_attention(q, k, v, rope, ReRope(4))

    # the published digits are good to 3e-12, and scores here are below 10
    assert (attended(q, warm) - attended(size * q, cold)).abs().max() < 1e-10
    assert (attended(q, warm) - attended(q, cold)).abs().max() > 1e-2


@pytest.mark.parametrize("name", BENT)
def test_gradients_are_those_of_the_values(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of queries, keys and values, against finite differences."""
    monkeypatch.setattr(relative, "CHUNK", 3)
    given = [x[:1, :7].clone().requires_grad_() for x in tokens()]

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return relative_attention(q, k, v, HALF, BENT[name][0])

    assert torch.autograd.gradcheck(run, given, fast_mode=True)


@pytest.mark.compile
def test_it_compiles_to_one_graph() -> None:
    """Eager mode's values."""
    torch._dynamo.reset()
    quick = torch.compile(relative_attention, fullgraph=True, backend="aot_eager")
    q, k, v = tokens(torch.float32)
    args = (q, k, v, HALF, ReRope(4, factor=2.5))
    assert torch.equal(quick(*args), relative_attention(*args))
    torch._dynamo.reset()


RULE = DynamicNTK(factor=2.0, original_max_positions=64)
Q, K = torch.zeros(1, 3, 4, 8), torch.zeros(1, 5, 2, 8)
REFUSED: dict[str, tuple[tuple[Any, ...], type[Exception], str]] = {
    "two dimensions": (
        (Q[0, 0], K, K),
        TensorError,
        "q, k and v must be [batch, seq, heads, head_dim], k and v of one shape, "
        "got [4, 8], [1, 5, 2, 8] and [1, 5, 2, 8]",
    ),
    "heads do not divide": (
        (Q[:, :, :3], K, K),
        TensorError,
        "q must have the last tokens of k, the same batch and head_dim, and a multiple of its "
        "heads, got [1, 3, 3, 8] and [1, 5, 2, 8]",
    ),
    "more queries than keys": (
        (Q, K[:, :2], K[:, :2]),
        TensorError,
        "q must have the last tokens of k, the same batch",
    ),
    "a rope of another width": (
        (Q, K, K, Rope(head_dim=16, pairing="half")),
        TensorError,
        "q must end in head_dim (16), got 8",
    ),
    "several axes": (
        (Q, K, K, Rope(head_dim=8, pairing="half", axes=Sectioned((2, 1, 1)))),
        PositionError,
        "positions must end in one coordinate per axis (3)",
    ),
    "a rule": (
        (Q, K, K, Rope(head_dim=8, pairing="half", scaling=RULE)),
        SpecError,
        "scaling is the rule DynamicNTK",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(case: str) -> None:
    """With the argument, what was expected and what came."""
    given, kind, text = REFUSED[case]
    q, k, v, rope = given if len(given) == 4 else (*given, HALF)
    with pytest.raises(kind) as refused:
        relative_attention(q, k, v, rope, ReRope(2))
    assert str(refused.value).startswith(text)


BUILDS: dict[str, Callable[[], object]] = {
    "width must be a whole number >= 1, got 0": lambda: ReRope(0),
    "factor must be a finite number > 0, got 0": lambda: ReRope(4, factor=0),
    "size must be a whole number >= 4, got 3": lambda: DualChunk(size=3, local=2),
    "local must be a whole number >= 0, got -1": lambda: DualChunk(size=2, local=-1),
    "group must be a whole number >= 1, got 1.5": lambda: SelfExtend(4, 1.5),
    "rope must be a phasor.Rope, got NoneType": (
        lambda: relative_attention(Q, K, K, None, ReRope(4))  # type: ignore[arg-type]
    ),
    "distance must be a ReRope or SelfExtend": (
        lambda: relative_attention(Q, K, K, HALF, 16)  # type: ignore[arg-type]
    ),
}


@pytest.mark.parametrize("text", BUILDS)
def test_distances_that_mean_nothing_are_refused(text: str) -> None:
    """With the argument, what was expected and what came."""
    with pytest.raises(SpecError) as refused:
        BUILDS[text]()
    assert str(refused.value).startswith(text)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_leaves_the_scores_alone(dtype: torch.dtype) -> None:
    """Scores and softmax are float32 there too."""
    q, k, v = normal(3, 1, 40, 2, 8)
    plain = relative_attention(q, k, v, HALF, ReRope(4))
    with torch.autocast("cpu", dtype):
        assert torch.equal(relative_attention(q, k, v, HALF, ReRope(4)), plain)
