"""Keys of 8 bits are turned in float32, rounded once, and their scales grow where they must."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import cache_utils

from phasor import Rope, TensorError
from phasor.torch import rotate
from phasor.torch.kv_cache import CachedKeys, evict, retune_, shift_

from ..attention_reference import HALF
from ..torch_arrays import normal
from .filled_caches import OTHER

FLOAT8 = [
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
]
DTYPES = [torch.int8, *FLOAT8]
# of scales for keys [2, 9, 3, 8]: by token and head, by group of 4 coordinates, by channel, and one
SHARED = {"token": (2, 9, 3, 1), "group": (2, 9, 3, 2), "channel": (1, 1, 3, 8), "all": ()}
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def largest(dtype: torch.dtype) -> float:
    """The largest number of a type of 8 bits."""
    return torch.iinfo(dtype).max if dtype == torch.int8 else torch.finfo(dtype).max


def rounding_of(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The most that rounding moves numbers, in units of their scale."""
    if dtype == torch.int8:
        return torch.full_like(x, 0.5)
    unit = 2**-3 if "e4m3" in str(dtype) else 2**-2  # three bits behind the leading one, or two
    smallest = x.new_tensor(torch.finfo(dtype).tiny)  # below it numbers are spaced evenly
    return torch.maximum(x.abs(), smallest) * unit / 2


def quantised(k: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Keys in 8 bits with scales of that shape, each the smallest that fits."""
    groups = shape[-1] if shape else 1
    grouped = k.unflatten(-1, (groups, -1)).float()
    dims = [i for i, n in enumerate(shape) if n == 1 and i < 3] if shape else [0, 1, 2, 3]
    scales = grouped.abs().amax([*dims, -1], keepdim=True) / largest(dtype)
    quotients = (grouped / scales).flatten(-2)
    stored = quotients.round() if dtype == torch.int8 else quotients
    return stored.to(dtype), scales[..., 0].reshape(shape)


def real(stored: Tensor, scales: Tensor) -> Tensor:
    """What the stored keys stand for, in float64."""
    groups = scales.shape[-1] if scales.dim() else 1
    factors = scales.double()[..., None] if scales.dim() else scales.double()
    return (stored.double().unflatten(-1, (groups, -1)) * factors).flatten(-2)


def turned(k: Tensor, turns: Tensor) -> Tensor:
    """Halves of the heads as complex numbers, multiplied by ``exp(i turns)`` in complex128."""
    x, y = k.double().chunk(2, -1)
    z = torch.complex(x, y) * torch.exp(1j * turns.double())[..., None, :]
    return torch.cat((z.real, z.imag), -1)


def frequencies(rope: Rope) -> Tensor:
    """By pair, from their definition."""
    return torch.tensor([rope.base ** (-2 * i / 8) for i in range(4)], dtype=torch.float64)


def assert_rounded_once(stored: Tensor, scales: Tensor, expected: Tensor) -> None:
    """Within one rounding of 8 bits, and two of float32."""
    groups = scales.shape[-1] if scales.dim() else 1
    factors = scales.double()[..., None] if scales.dim() else scales.double()
    grouped = expected.unflatten(-1, (groups, -1))
    room = rounding_of(grouped / factors, stored.dtype) * factors
    # the scale, the product, the turn (of numbers up to sqrt(2) larger) and the quotient in float32
    room = room + 8 * 2**-24 * expected.abs().max()
    error = (real(stored, scales) - expected).abs().unflatten(-1, (groups, -1))
    assert bool((error <= room).all()), float((error / room).max())


@by_dtype
@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize("heads_first", [False, True])
def test_shifted_keys_are_rounded_once(dtype: torch.dtype, shared: str, heads_first: bool) -> None:
    """Scales grow where a coordinate became too large, and never shrink."""
    stored, scales = quantised(normal(2, 9, 3, 8) * 3, dtype, SHARED[shared])
    before, old_scales = real(stored, scales), scales.clone()
    delta = torch.arange(18).view(2, 9) * 7 - 60
    expected = turned(before, delta[..., None] * frequencies(HALF))
    keys, by_layout = stored, scales
    if heads_first:
        keys, by_layout = (x.transpose(1, 2) if x.dim() else x for x in (stored, scales))
    assert shift_(keys, delta, HALF, scales=by_layout, heads_first=heads_first) is keys
    assert_rounded_once(stored, scales, expected)
    assert bool((scales >= old_scales).all())
    assert bool((scales > old_scales).any())


@by_dtype
@pytest.mark.parametrize("shared", SHARED)
def test_keys_that_do_not_move_keep_their_bits(dtype: torch.dtype, shared: str) -> None:
    """And their scales; int8 keys may hold -128 as well."""
    stored, scales = quantised(normal(2, 9, 3, 8), dtype, SHARED[shared])
    if dtype == torch.int8:
        stored[0, 0, 0, 0] = -128
    before = [x.clone() for x in (stored.view(torch.int8), scales)]
    shift_(stored, 0, HALF, scales=scales)
    assert torch.equal(stored.view(torch.int8), before[0])
    assert torch.equal(scales, before[1])


@by_dtype
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_scales_may_have_16_bits(dtype: torch.dtype, half: torch.dtype) -> None:
    """Keys are divided by the scale as it is stored."""
    stored, scales = quantised(normal(2, 9, 3, 8), dtype, (2, 9, 3, 1))
    scales = (scales * 1.01).to(half)
    expected = turned(real(stored, scales), 33 * frequencies(HALF))
    shift_(stored, 33, HALF, scales=scales)
    # the largest number may be cut off by what a scale was rounded down
    factors = scales.double()
    room = rounding_of(expected / factors, dtype) * factors + expected.abs() * 2**-8
    assert bool(((real(stored, scales) - expected).abs() <= room).all())


@by_dtype
def test_frequencies_are_changed_in_one_rounding(dtype: torch.dtype) -> None:
    """With a gain, by which scales grow."""
    stored, scales = quantised(normal(2, 9, 3, 8), dtype, (2, 9, 3, 1))
    turns = torch.arange(9)[:, None] * (frequencies(OTHER) - frequencies(HALF))
    expected = 1.5 * turned(real(stored, scales), turns)
    retune_(stored, range(9), HALF, OTHER, gain=1.5, scales=scales)
    assert_rounded_once(stored, scales, expected)


def test_tokens_of_zeros_stay_zero() -> None:
    """Their scale may be 0 as well."""
    stored, scales = torch.zeros(1, 2, 1, 8, dtype=torch.int8), torch.zeros(1, 2, 1, 1)
    shift_(stored, 5, HALF, scales=scales)
    assert not stored.any()
    assert not scales.any()


def test_float8_needs_no_scales_where_its_range_is_wide_enough() -> None:
    """Else nothing is written."""
    stored = (normal(2, 9, 3, 8) * 3).to(torch.float8_e4m3fn)
    expected = turned(stored, 33 * frequencies(HALF))
    shift_(stored, 33, HALF)
    assert_rounded_once(stored, torch.ones(()), expected)
    full = torch.full((1, 1, 1, 8), 448.0).to(torch.float8_e4m3fn)
    with pytest.raises(TensorError, match=r"exceed 448.* pass torch.ones\(\(\)\) to let it grow"):
        shift_(full, 1, HALF)
    assert bool((full.float() == 448).all())
    scale = torch.ones(())
    shift_(full, 1, HALF, scales=scale)
    assert 1 < float(scale) < 1.5


KEYS = torch.ones(2, 9, 3, 8, dtype=torch.int8)
REFUSED: dict[str, tuple[Any, str]] = {
    "int8 without scales": (lambda: shift_(KEYS, 1, HALF), "scales must be given for keys in int8"),
    "scales of float keys": (
        lambda: shift_(KEYS.float(), 1, HALF, scales=torch.ones(())),
        "scales must be None, except"),
    "a number": (
        lambda: shift_(KEYS, 1, HALF, scales=1.0), "scales must be"),  # pyright: ignore
    "another shape": (
        lambda: shift_(KEYS, 1, HALF, scales=torch.ones(2, 9, 3)),
        r"of the keys \[2, 9, 3, 8\].*got \[2, 9, 3\]"),
    "groups that do not divide the head": (
        lambda: shift_(KEYS, 1, HALF, scales=torch.ones(2, 9, 3, 3)), "a divisor of head_dim"),
    "scales of another dtype": (
        lambda: shift_(KEYS, 1, HALF, scales=torch.ones((), dtype=torch.float64)),
        "got .* in torch.float64"),
    "bytes": (
        lambda: shift_(KEYS.to(torch.uint8), 1, HALF), r"keys.view\(torch.float8_e4m3fn\)"),
    "a cut": (
        lambda: evict(KEYS, KEYS, 0, 2, HALF), "must be moved by shift_, .* joined with torch.cat"),
    "scales that share memory": (
        lambda: shift_(KEYS.clone(), 1, HALF, scales=torch.ones(1, 1, 1, 1).expand(2, 9, 3, 1)),
        "scales must not share memory"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_in_words(case: str) -> None:
    """The argument, what it must be, and what came."""
    call, message = REFUSED[case]
    with pytest.raises(TensorError, match=message):
        call()


def cache_of(kind: str, seq: int, first: int, shape: str) -> tuple[Any, list[Tensor], Tensor]:
    """A cache of one layer in int8, its scales, and the keys that were stored, in float64."""
    k = rotate(normal(2, 20, 3, 8)[:, first : first + seq], range(seq), HALF)
    by_token = (2, seq, 3, 1) if shape == "token" else ()
    stored, scales = quantised(k, torch.int8, by_token)
    kept = real(stored, scales)
    heads_first = stored.transpose(1, 2).contiguous()
    layer: Any = cache_utils.DynamicLayer()
    if kind == "static":
        layer = cache_utils.StaticLayer(max_cache_len=20)
        if scales.dim():
            room = torch.ones(2, 20, 3, 1)
            room[:, :seq] = scales
            scales = room
    layer.update(heads_first, heads_first)
    cache = transformers.DynamicCache()
    cache.layers = [layer]
    return cache, [scales.transpose(1, 2) if scales.dim() else scales], kept


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("shape", ["token", "all"])
def test_a_cache_is_cut_and_joined_with_its_scales(kind: str, shape: str) -> None:
    """Keys that move are rounded once, and their scales go where they go."""
    cache, scales, k = cache_of(kind, 9, 0, shape)
    other, other_scales, new = cache_of("dynamic", 3, 12, shape)
    held = CachedKeys(cache, HALF, scales=scales)
    held.evict_(2, 5)
    held.insert_(4, CachedKeys(other, HALF, scales=other_scales))
    down, up = frequencies(HALF) * -3, frequencies(HALF) * 4
    later = turned(k[:, 5:], down)
    back = turned(later[:, 2:], frequencies(HALF) * 3)
    expected = torch.cat((k[:, :2], later[:, :2], turned(new, up), back), 1)
    (by_layer,) = held.scales
    assert by_layer is not None
    stored = cache.layers[0].keys.transpose(1, 2)[:, :9]
    now = by_layer.transpose(1, 2)[:, :9] if by_layer.dim() else by_layer
    # the last tokens were turned twice, and others are rounded again where all share a scale
    room = (2**0.5 + 1) / 2 * now.double().amax() + 2**-20
    assert bool(((real(stored, now) - expected).abs() <= room).all())
    if kind == "static":
        assert by_layer is scales[0]
    if shape == "token":
        assert torch.equal(real(stored, now)[:, :2], k[:, :2])


@pytest.mark.skipif(
    not hasattr(cache_utils, "Fp8QuantizedLayer"),
    reason="this transformers has no float8 cache",
)
def test_the_float8_cache_of_transformers_is_edited() -> None:
    """Its one scale grows, and later tokens are stored with it."""
    config = transformers.LlamaConfig(
        num_hidden_layers=1, hidden_size=24, num_attention_heads=3, head_dim=8
    )
    caches = [transformers.QuantizedCache(backend="fp8", config=config) for _ in range(2)]
    k, new = (normal(2, 9, 3, 8, seed=seed) for seed in (0, 1))
    for cache, x in zip(caches, (k, new * 3), strict=True):
        layered = x.transpose(1, 2)
        cache.update(layered, layered, 0)
    cache, other = caches
    (layer,), (other_layer,) = cache.layers, other.layers
    before, joined = (real(*it._quantized_keys).transpose(1, 2) for it in (layer, other_layer))
    held = CachedKeys(cache, HALF)
    held.evict_(0, 2)
    held.insert_(7, other)
    assert held.kept == (range(16),)
    assert int(cache.get_seq_length()) == 16
    stored, scale = layer._quantized_keys
    expected = torch.cat(
        (turned(before[:, 2:], -2 * frequencies(HALF)), turned(joined, 7 * frequencies(HALF))), 1
    )
    # the first tokens were rounded again, to the scale of the later ones
    room = expected.abs() * 2**-4 * 2.1 + scale.double() * 2**-9
    assert bool(((real(stored, scale).transpose(1, 2) - expected).abs() <= room).all())
    stored, scale = layer._quantized_values
    given = torch.cat((k[:, 2:], new * 3), 1)
    room = given.abs() * 2**-4 * 2.1 + scale.double() * 2**-9
    assert bool(((real(stored, scale).transpose(1, 2) - given).abs() <= room).all())
    one = torch.ones(2, 3, 1, 8)
    keys, _ = cache.update(one, one, 0)
    assert keys.shape[2] == 17
    assert bool(((keys[:, :, -1] - 1).abs() <= 2**-4).all())
