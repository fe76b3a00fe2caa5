"""`cos_sin_cache` is what each program's own rotation needs to be exact.

None of these programs is run here: `ROTATIONS` has their rotations, written from documentation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from mpmath import mp, mpf
from torch import Tensor

from phasor import Rope
from phasor.axes import Sectioned
from phasor.errors import SpecError, TensorError
from phasor.scaling import DynamicNTK, Llama3
from phasor.torch import cos_sin_cache, program_tables

from ..oracle import exact_rows, frequencies
from .torch_arrays import assert_rotated, normal

HALF = Rope(head_dim=16, pairing="half", base=500_000.0)
INTERLEAVED = Rope(head_dim=16, rotary_dim=12, pairing="interleaved", direction=-1)
LAW = Llama3(factor=8.0, original_max_positions=64, low_freq_factor=1.0, high_freq_factor=4.0)
SCALED = Rope(head_dim=16, pairing="half", scaling=LAW)
ROPES = {"half": HALF, "interleaved": INTERLEAVED, "scaled": SCALED}
ROWS = 300


def neox(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Two halves, rotated by tables of half the width."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def gptj(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Neighbours, rotated by tables of half the width."""
    first, second = x[..., ::2], x[..., 1::2]
    return torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)


def rotated_half(x: Tensor, pairing: str) -> Tensor:
    """``rotate_half`` of Llama, ``rotate_every_two`` of GPT-J, as tables of full width want it."""
    if pairing == "half":
        first, second = x.chunk(2, dim=-1)
        return torch.cat((-second, first), dim=-1)
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def as_vllm(x: Tensor, cache: dict[str, Tensor], pairing: str) -> Tensor:
    """``cos_sin_cache.index_select(0, positions).chunk(2, dim=-1)``, by ``is_neox_style``."""
    at = torch.arange(len(x))
    cos, sin = cache["cos_sin"].index_select(0, at).unsqueeze(-2).chunk(2, dim=-1)
    return (neox if pairing == "half" else gptj)(x, cos, sin)


def as_flash_attention(x: Tensor, cache: dict[str, Tensor], pairing: str) -> Tensor:
    """``apply_rotary_emb(x, cos, sin, interleaved)`` of ``[seq, heads, head_dim]``."""
    cos, sin = (cache[name][: len(x), None] for name in ("cos", "sin"))
    return (neox if pairing == "half" else gptj)(x, cos, sin)


def as_transformers(x: Tensor, cache: dict[str, Tensor], pairing: str) -> Tensor:
    """``x * cos + rotate_half(x) * sin``."""
    cos, sin = (cache[name][: len(x), None] for name in ("cos", "sin"))
    return x * cos + rotated_half(x, pairing) * sin


def as_meta(x: Tensor, cache: dict[str, Tensor], pairing: str) -> Tensor:
    """``view_as_complex`` of neighbours; of halves the same with the columns in another order."""
    if pairing == "half":
        x = x.unflatten(-1, (2, -1)).transpose(-2, -1).flatten(-2)
    z = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    y = torch.view_as_real(z * cache["freqs_cis"][: len(x), None])
    return y.transpose(-2, -1).flatten(-2) if pairing == "half" else y.flatten(-2)


def as_megatron(x: Tensor, cache: dict[str, Tensor], pairing: str) -> Tensor:
    """``t * cos(freqs) + rotate_half(t) * sin(freqs)`` of ``[seq, batch, heads, head_dim]``."""
    angles = cache["angles"][: len(x)]
    y = x[:, None] * angles.cos() + rotated_half(x[:, None], pairing) * angles.sin()
    return y[:, 0]


ROTATIONS: dict[Any, Callable[[Tensor, dict[str, Tensor], str], Tensor]] = {
    "vllm": as_vllm,
    "flash-attn": as_flash_attention,
    "transformers": as_transformers,
    "meta": as_meta,
    "megatron": as_megatron,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("program", ROTATIONS)
def test_the_programs_own_rotation_is_right_with_it(
    program: Any, name: str, dtype: torch.dtype
) -> None:
    """Within the bound of the operator, which has a larger error in its rows."""
    rope = ROPES[name]
    x = normal(ROWS, 2, 16, dtype=dtype)
    cache = cos_sin_cache(rope, ROWS, program=program, dtype=dtype)
    y = x.clone()
    y[..., : rope.rotary_dim] = ROTATIONS[program](x[..., : rope.rotary_dim], cache, rope.pairing)
    if dtype == torch.float32 and program == "megatron":
        # an angle of up to pi in float32, then cos and sin in float32, of coordinates below 5
        exact = ROTATIONS[program](
            x[..., : rope.rotary_dim].double(),
            cos_sin_cache(rope, ROWS, program=program, dtype=torch.float64),
            rope.pairing,
        )
        room = 2 * x.abs().max() * (np.pi * 2**-24 + 4 * 2**-23)
        assert (y[..., : rope.rotary_dim] - exact).abs().max() < room
    else:
        assert_rotated(y, x, range(ROWS), rope)


SHAPES = {
    "vllm": {"cos_sin": [ROWS, 12]},
    "flash-attn": {"cos": [ROWS, 6], "sin": [ROWS, 6]},
    "transformers": {"cos": [ROWS, 12], "sin": [ROWS, 12]},
    "meta": {"freqs_cis": [ROWS, 6]},
    "megatron": {"angles": [ROWS, 1, 1, 12]},
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("program", SHAPES)
def test_names_and_shapes_are_those_of_the_program(program: Any, device: str) -> None:
    """With the rotated part of a head only; on a device without memory too."""
    cache = cos_sin_cache(INTERLEAVED, ROWS, program=program, device=device)
    assert {name: list(table.shape) for name, table in cache.items()} == SHAPES[program]
    assert all(t.device.type == device and t.is_contiguous() for t in cache.values())


DTYPES: dict[torch.dtype, int] = {torch.float32: 24, torch.bfloat16: 8, torch.float16: 11}


def nearest(value: mpf, bits: int) -> float:
    """``value`` rounded to so many significant bits, half to even."""
    if not value:
        return 0.0
    _, exponent = mp.frexp(value)
    if bits == 11:
        exponent = max(exponent, -13)  # below 2**-14 float16 has fewer bits
    step = mpf(2) ** (exponent - bits)
    return float(mp.nint(value / step) * step)


@pytest.mark.parametrize("gain", [1.0, 1.2079441541679836])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_number_is_rounded_once(dtype: torch.dtype, gain: float) -> None:
    """From 60 digits; a rounding on the way to 16 bits would show in some of these."""
    cache = cos_sin_cache(HALF, 2000, program="flash-attn", dtype=dtype, gain=gain)
    with mp.workdps(60):
        for pair, step in list(enumerate(frequencies(HALF)))[::3]:
            for position in range(0, 2000, 7):
                angle = position * step
                right = (mp.cos(angle) * mpf(gain), mp.sin(angle) * mpf(gain))
                made = [float(cache[name][position, pair]) for name in ("cos", "sin")]
                assert made == [nearest(value, DTYPES[dtype]) for value in right]


def test_16_bits_are_not_rounded_by_way_of_32() -> None:
    """Just above the middle of two neighbours, where float32 says the middle: up, not to even."""
    for dtype, bits in ((torch.bfloat16, 8), (torch.float16, 11)):
        step = 2.0 ** (1 - bits)
        above = np.array([1 + step / 2 + 2.0**-40, 1 + 3 * step / 2 - 2.0**-40])
        made = program_tables._round_once(np.concatenate((above, -above)), dtype)
        assert made.tolist() == [1 + step, 1 + step, -1 - step, -1 - step]


@pytest.mark.parametrize("program", ["vllm", "meta"])
def test_float64_is_as_good_as_it_gets(program: Any) -> None:
    """Within 1e-15 of 60 digits, also where the chunks meet."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program_tables, "_CHUNK_SIZE", 7 * HALF.num_pairs)
        (made,) = cos_sin_cache(HALF, 100, program=program, dtype=torch.float64, gain=2.0).values()
    right = 2 * exact_rows(HALF, range(100))
    if program == "vllm":
        right = np.concatenate((right.real, right.imag), -1)
    assert np.abs(made.numpy() - right).max() <= 2e-15


def test_angles_are_reduced_before_they_are_rounded() -> None:
    """A float32 angle of the last of 100,000 positions is as good as that of the first."""
    made = cos_sin_cache(HALF, 100_000, program="megatron")["angles"][:, 0, 0, :8]
    with mp.workdps(60):
        for pair, step in enumerate(frequencies(HALF)):
            for position in (1, 17, 4_097, 99_999):
                angle = position * step
                turned = angle - 2 * mp.pi * mp.nint(angle / (2 * mp.pi))
                off = abs(mpf(float(made[position, pair])) - turned)
                assert off <= abs(turned) * mpf(2) ** -24 + mpf(10) ** -15
    assert float(made.abs().max()) <= np.float32(np.pi)


def test_complex_dtypes_may_be_named() -> None:
    """By themselves, or by the numbers in them."""
    for real, whole in ((torch.float32, torch.complex64), (torch.float64, torch.complex128)):
        one, other = (
            cos_sin_cache(HALF, 9, program="meta", dtype=dtype)["freqs_cis"]
            for dtype in (real, whole)
        )
        assert one.dtype == other.dtype == whole
        assert torch.equal(one, other)


RULE = Rope(head_dim=8, pairing="half", scaling=DynamicNTK(factor=2.0, original_max_positions=64))
AXES = Rope(head_dim=8, pairing="half", axes=Sectioned((2, 1, 1)))
REFUSED: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "a rule": (SpecError, "use rope.at(seq_len)", {"rope": RULE}),
    "several axes": (SpecError, "rope must have one axis .* got 3 axes", {"rope": AXES}),
    "no rows": (SpecError, "max_positions must be a whole number >= 1", {"max_positions": 0}),
    "no such program": (SpecError, "program must be one of 'vllm', 'flash-attn'", {"program": "x"}),
    "half a gain": (SpecError, "gain must be a finite number", {"gain": "yarn"}),
    "a gain on angles": (
        SpecError,
        "gain must be 1 for program='megatron'",
        {"gain": 1.2, "program": "megatron"},
    ),
    "angles in 16 bits": (
        SpecError,
        "dtype must be torch.float64, torch.float32 for program='megatron', got torch.bfloat16",
        {"dtype": torch.bfloat16, "program": "megatron"},
    ),
    "complex halves": (
        SpecError,
        "dtype must be torch.float32, .* for program='meta', got torch.float16",
        {"dtype": torch.float16, "program": "meta"},
    ),
    "whole numbers": (SpecError, "dtype must be .* got torch.int8", {"dtype": torch.int8}),
    "larger than memory": (
        TensorError,
        "few enough for the memory of cpu, got a table of 64000000000000 bytes",
        {"max_positions": 10**12},
    ),
    "larger than any memory": (TensorError, "bytes", {"max_positions": 10**30}),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_made_is_refused(case: str) -> None:
    """With the way out, before anything is made."""
    kind, text, given = REFUSED[case]
    usual: dict[str, Any] = {"rope": HALF, "max_positions": 9, "program": "vllm"}
    with pytest.raises(kind, match=text.replace("(", r"\(").replace(")", r"\)")):
        cos_sin_cache(**usual | given)
