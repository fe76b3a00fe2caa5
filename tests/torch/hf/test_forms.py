"""What a foreign rotation function does is measured, and what stands in for it does the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from phasor import Rope
from phasor.errors import TensorError
from phasor.torch.hf.rotations import (
    DeferredCosSin,
    RopeOfKind,
    RotationSignature,
    defer_cos_sin,
    measure_signature,
    substitute,
)

PAIRS, SPARE, BASE = 4, 4, 50.0
PLACES = torch.tensor([[0, 1, 7, 30, 99]])


def halves(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    """Turns the first coordinates in two halves, and passes the others on."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    n = cos.shape[-1] // 2

    def one(x: Any) -> Any:
        a, b, rest = x[..., :n], x[..., n : 2 * n], x[..., 2 * n :]
        c, s = cos[..., :n], sin[..., :n]
        return torch.cat((a * c - b * s, a * s + b * c, rest), -1)

    return one(q), one(k)


def clockwise(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    """The same the other way."""
    return halves(q, k, cos, -sin, unsqueeze_dim)


def deinterleaving(
    q: Any, k: Any, cos: Any, sin: Any, position_ids: Any = None, unsqueeze_dim: int = 1
) -> Any:
    """Reads neighbours, writes halves, of whole heads only."""
    del position_ids
    both = [torch.cat((x[..., ::2], x[..., 1::2]), -1) for x in (q, k)]
    if cos.shape[-1] != q.shape[-1]:
        raise ValueError
    return halves(*both, cos, sin, unsqueeze_dim)


def neighbours_last(x: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    """Turns the last coordinates in neighbours, by half-wide rows."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    n = 2 * cos.shape[-1]
    a, b = x[..., -n::2], x[..., -n + 1 :: 2]
    turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    return torch.cat((x[..., :-n], turned), -1)


def as_complex(xq: Any, xk: Any, freqs_cis: Any) -> Any:
    """Neighbours as complex numbers, tokens before heads."""

    def one(x: Any) -> Any:
        whole = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous())
        return torch.view_as_real(whole * freqs_cis.unsqueeze(2)).flatten(3)

    return one(xq), one(xk)


def sine_first(tensor: Any, sin: Any, cos: Any) -> Any:
    """Tokens before heads, the sine before the cosine, half-wide rows."""
    return neighbours_last(tensor, cos, sin, 2)


def two_in_one(x: Any, cos: Any, sin: Any, position_ids: Any, unsqueeze_dim: int = 2) -> Any:
    """Turns each half of a head in two halves of its own, as Gemma 4's tower does."""
    parts = zip(*(rows.chunk(position_ids.shape[-1], -1) for rows in (x, cos, sin)), strict=True)
    return torch.cat([halves(a, a, c, s, unsqueeze_dim)[0] for a, c, s in parts], -1)


def shearing(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    """No rotation."""
    q2, k2 = halves(q, k, cos, sin, unsqueeze_dim)
    return q2 + q, k2


SIGNATURES = {
    halves: RotationSignature("half", "half", 1, "start", "twice", heads_first=True),
    clockwise: RotationSignature("half", "half", -1, "start", "twice", heads_first=True),
    deinterleaving: RotationSignature("interleaved", "half", 1, "exact", "twice", heads_first=True),
    neighbours_last: RotationSignature(
        "interleaved", "interleaved", 1, "end", "half", heads_first=True
    ),
    as_complex: RotationSignature(
        "interleaved", "interleaved", 1, "exact", "complex", heads_first=False
    ),
    sine_first: RotationSignature(
        "interleaved", "interleaved", 1, "end", "half", heads_first=False
    ),
    two_in_one: RotationSignature(
        "half", "half", 1, "exact", "twice", heads_first=False, subheads=2
    ),
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f.__name__)
def test_the_geometry_is_measured(function: Any) -> None:
    """Pairing, direction, slice, rows and layout, from what it makes of known angles."""
    assert measure_signature(function) == SIGNATURES[function]


def test_a_function_that_was_made_a_module_is_still_one() -> None:
    """As the kernels package does to the functions of transformers that it may replace."""

    class Shared(torch.nn.Module):
        def forward(self, q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
            return halves(q, k, cos, sin, unsqueeze_dim)

    assert measure_signature(Shared()) == SIGNATURES[halves]


def test_what_is_no_rotation_is_not_understood() -> None:
    """Nor is a function whose parameters say nothing."""
    assert measure_signature(shearing) is None
    assert measure_signature(lambda a, b: a) is None
    with pytest.raises(TensorError, match="must be a rotation that phasor understands"):
        substitute(shearing)


def rows(inverse: bool) -> tuple[Tensor, Tensor]:
    """Cosines and sines of half width, from the definition."""
    steps = torch.tensor([BASE ** (-k / PAIRS) for k in range(PAIRS)], dtype=torch.float64)
    angles = PLACES[..., None] * steps * (-1 if inverse else 1)
    return angles.cos(), angles.sin()


@pytest.mark.parametrize("inverse", [False, True], ids=["there", "back"])
@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f.__name__)
def test_the_stand_in_does_the_same(function: Any, inverse: bool) -> None:
    """To float64, given rows of half the width; a negative sine goes back."""
    signature = SIGNATURES[function]
    spare = 0 if signature.slice == "exact" else SPARE
    shape = (1, 2, 5, 2 * PAIRS + spare) if signature.heads_first else (1, 5, 2, 2 * PAIRS + spare)
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    rope = Rope(head_dim=2 * PAIRS, pairing="half", base=BASE)
    deferred = defer_cos_sin(RopeOfKind(rope), PLACES, torch.float64)
    ours = substitute(function)
    cos, sin = rows(inverse)
    if inverse and signature.pairing != signature.pairing_out:
        with pytest.raises(TensorError, match="must go to a function that writes the pairs it"):
            ours(x, y, deferred, -deferred)
        return
    there: Any = -deferred if inverse else deferred
    if signature.width == "complex":
        pairs = zip(function(x, y, torch.complex(cos, sin)), ours(x, y, there), strict=True)
    elif function is sine_first:
        pairs = [(function(x, sin, cos), ours(x, there, deferred))]
    elif function is neighbours_last:
        pairs = [(function(x, cos, sin), ours(x, deferred, there))]
    elif function is two_in_one:
        axes = torch.zeros(1, 5, 2)
        # [1, seq, pairs] -> [1, seq, 4, pairs / 2]: each half of the pairs twice
        wide = [row.unflatten(-1, (2, -1)).repeat(1, 1, 1, 2).flatten(-2) for row in (cos, sin)]
        pairs = [(function(x, *wide, axes), ours(x, deferred, there, axes))]
    else:
        wide = [torch.cat((row, row), -1) for row in (cos, sin)]
        pairs = zip(function(x, y, *wide), ours(x, y, deferred, there), strict=True)
    for expected, got in pairs:
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("unsqueeze_dim", [1, 2, -2])
def test_a_call_may_say_where_heads_stand(unsqueeze_dim: int) -> None:
    """Whatever the function's default is."""
    x, y = torch.randn(2, 1, 5, 5, 2 * PAIRS, dtype=torch.float64)
    rope = Rope(head_dim=2 * PAIRS, pairing="half", base=BASE)
    deferred = defer_cos_sin(RopeOfKind(rope), PLACES, torch.float64)
    wide = [torch.cat((row, row), -1) for row in rows(inverse=False)]
    expected = halves(x, y, *wide, unsqueeze_dim=unsqueeze_dim)
    got = substitute(halves)(x, y, deferred, deferred, unsqueeze_dim=unsqueeze_dim)
    for one, other in zip(expected, got, strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=1e-13)


def test_what_stands_for_cosines_is_no_tensor() -> None:
    """Whoever treats it as one gets an error; it follows a device and keeps its dtype."""
    rope = Rope(head_dim=8, pairing="half")
    deferred = defer_cos_sin(RopeOfKind(rope), PLACES, torch.float32)
    with pytest.raises(AttributeError, match=r"patched model .* rotated by: no unsqueeze"):
        deferred.unsqueeze(1)
    uses: list[Any] = [
        lambda rows: rows[..., :8],
        lambda rows: rows * 2,
        lambda rows: torch.ones(8) * rows,
        lambda rows: torch.cat((rows, rows)),
        len,
        list,
    ]
    for use in uses:
        with pytest.raises(TypeError):
            use(deferred)
    assert deferred.to(torch.bfloat16) is deferred
    moved: DeferredCosSin = deferred.to("meta")
    assert moved.cos.device.type == "meta"
