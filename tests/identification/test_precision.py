"""Laws and mistakes are told apart at the precision that a function has, and so are its roundings.

The functions compute in torch, from frequencies of the oracle.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from phasor import Rope
from phasor.identification import identify
from phasor.scaling import NTK, Law, Linear, Llama3, PerPair, Yarn

from .. import oracle

WIDTH = 64
FACTORS = tuple(np.random.default_rng(0).uniform(1, 60, WIDTH // 2).round(2).tolist())
LAWS: dict[str, tuple[float, Law | None]] = {
    "plain": (500_000.0, None),
    "linear": (10_000.0, Linear(factor=8.0)),
    "ntk": (10_000.0, NTK(factor=4.0)),
    "llama 3": (500_000.0, Llama3(factor=8.0, original_max_positions=8192)),
    "yarn": (1e6, Yarn(factor=4.0, original_max_positions=32768, attention_factor=1.0)),
    "a factor each": (10_000.0, PerPair(factors=FACTORS, attention_factor=1.0)),
}
# dtype of the vectors, of the angles, and of the frequencies
PRECISIONS = {
    "float64": ("float64", "float64", "float64"),
    "float32 frequencies": ("float64", "float64", "float32"),
    "float32": ("float32", "float32", "float32"),
    "float32 for bfloat16": ("bfloat16", "float32", "float32"),
    "float32 for float16": ("float16", "float32", "float32"),
}
UNIT = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


@dataclass(frozen=True)
class Mistake:
    """What a function does beside its law."""

    offset: float = 0.0
    direction: int = 1
    start: int = 0
    width: int = WIDTH
    gain: float = 1.0


MISTAKES = {
    "none": Mistake(),
    "one late": Mistake(offset=1),
    "one early": Mistake(offset=-1),
    "half late": Mistake(offset=0.5),
    "half early": Mistake(offset=-0.5),
    "clockwise": Mistake(direction=-1),
    "a slice": Mistake(start=8, width=32),
    "a gain": Mistake(gain=1.25),
    "all": Mistake(offset=1, direction=-1, start=8, width=32, gain=1.3465735902799727),
}


def rope_of(law: str, mistake: Mistake) -> Rope:
    """The rope that is hidden in a function."""
    base, scaling = LAWS[law]
    if isinstance(scaling, PerPair):
        scaling = PerPair(factors=FACTORS[: mistake.width // 2], attention_factor=1.0)
    return Rope(
        head_dim=WIDTH, pairing="half", rotary_start=mistake.start, rotary_dim=mistake.width,
        direction=mistake.direction, base=base, scaling=scaling,
    )  # fmt: skip


def function_of(
    inv_freq: np.ndarray, mistake: Mistake, dtypes: tuple[str, str, str]
) -> Callable[[Any, Any], Any]:
    """Positions with the offset times frequencies, cos and sin, products, and one rounding."""
    angle_dtype, inv_freq_dtype = (getattr(torch, name) for name in dtypes[1:])
    steps = torch.from_numpy(inv_freq).to(inv_freq_dtype).to(angle_dtype)
    first = slice(mistake.start, mistake.start + mistake.width // 2)
    second = slice(first.stop, mistake.start + mistake.width)

    def turned(x: Any, positions: Any) -> Any:
        places = positions.to(angle_dtype) + mistake.offset
        angles = mistake.direction * (places[..., None] * steps)[:, :, None]
        cos, sin = mistake.gain * angles.cos(), mistake.gain * angles.sin()
        y = x.to(angle_dtype).clone()
        a, b = y[..., first].clone(), y[..., second].clone()
        y[..., first], y[..., second] = a * cos - b * sin, a * sin + b * cos
        return y.to(x.dtype)

    return turned


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_law_and_mistake_are_both_named(law: str, mistake: Mistake, precision: str) -> None:
    """The offset, the sign, the slice and the gain hide no law, at any precision."""
    rope, dtypes = rope_of(law, mistake), PRECISIONS[precision]
    inv_freq = np.array([float(f) for f in oracle.frequencies(rope)])
    found = identify(function_of(inv_freq, mistake, dtypes), WIDTH, dtype=dtypes[0], arrays="torch")
    assert found.position_offset == mistake.offset
    assert found.direction == mistake.direction
    assert (found.rotary_start, found.rotary_dim) == (mistake.start, mistake.width)
    # the gain is said with the fewest digits within two units, and 12 at most
    room = 2 * UNIT[dtypes[0]] + 1e-12
    assert found.attention_factor == pytest.approx(mistake.gain, rel=room, abs=0)
    names = {"offset"} if mistake.offset else set()
    names |= {"direction"} if mistake.direction < 0 else set()
    assert found.names() - {"angles-in-float32", "frequencies-in-float32"} == names
    assert found.rope is not None, found.why_no_rope
    # a float32 angle is off by its frequency's and its own half unit
    rounding = 2.0**-52 if dtypes[2] == "float64" else 2.0**-23
    room = np.array([pair.uncertainty for pair in found.pairs]) + rounding * inv_freq
    read = np.array([float(f) for f in oracle.frequencies(found.rope)])
    assert np.all(np.abs(read - inv_freq) <= 2 * room)
    assert found.known_law == (law != "a factor each")
    if law == "yarn":  # its context is known up to the rounding of the ramp's ends
        assert (found.base, type(found.law)) == (rope.base, Yarn)
    elif found.known_law:
        assert (found.base, found.law) == (rope.base, rope.scaling)


def test_offsets_that_rounding_does_not_tell_apart_are_all_said() -> None:
    """The slow pairs of a function in bfloat16 show 100 positions to half a position."""
    steps = 500.0 ** (-np.arange(WIDTH // 2) / (WIDTH // 2)) / 4096
    turned = function_of(steps, Mistake(offset=100), PRECISIONS["float32 for bfloat16"])
    found = identify(turned, WIDTH, dtype="bfloat16", arrays="torch")
    assert found.position_offset == 100
    assert "off by +100 (" in str(found)
    assert "+99.5" in str(found)
    assert "within rounding)" in str(found)


def rows(positions: Any) -> tuple[Any, Any]:
    """Cos and sin in float32, of halves of base 500000."""
    steps = torch.tensor(500_000.0 ** (-np.arange(WIDTH // 2) / (WIDTH // 2))).float()
    angles = torch.cat([positions[..., None].float() * steps] * 2, -1)[:, :, None]
    return angles.cos(), angles.sin()


def swapped(x: Any) -> Any:
    """The other member of every pair, with its sign."""
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def once(x: Any, positions: Any) -> Any:
    """All in float32, and rounded at the end."""
    cos, sin = rows(positions)
    return (x.float() * cos + swapped(x.float()) * sin).to(x.dtype)


def at_every_step(x: Any, positions: Any) -> Any:
    """As transformers' models do it: cos and sin in the dtype of the vectors, and so all else."""
    cos, sin = (row.to(x.dtype) for row in rows(positions))
    return x * cos + swapped(x) * sin


def from_rounded_rows(x: Any, positions: Any) -> Any:
    """Cos and sin are rounded, and the products are not."""
    cos, sin = (row.to(x.dtype).float() for row in rows(positions))
    return (x.float() * cos + swapped(x.float()) * sin).to(x.dtype)


def with_noise(size: float, *, each_pair: bool = False, relative: bool = False) -> Any:
    """Noise that the position and the coordinate tell, or the pair, added before the rounding."""

    def turned(x: Any, positions: Any) -> Any:
        coordinates = torch.arange(WIDTH) % (WIDTH // 2 if each_pair else WIDTH)
        noise = size * torch.sin(12.9 * coordinates + 78.2 * positions[..., None, None])
        cos, sin = rows(positions)
        if each_pair:  # a poor cosine
            cos = cos + noise * (positions != 0)[..., None, None]
            return (x.float() * cos + swapped(x.float()) * sin).to(x.dtype)
        y = x.float() * cos + swapped(x.float()) * sin
        return (y * (1 + noise) if relative else y + noise).to(x.dtype)

    return turned


@pytest.mark.parametrize("gain", [1.0, 1.25, 1.3465735902799727])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_one_rounding_at_the_end_is_accused_of_nothing(dtype: str, gain: float) -> None:
    """Whatever the gain, which is read from rounded numbers only."""
    found = identify(lambda x, p: (gain * once(x.float(), p)).to(x.dtype), WIDTH, dtype=dtype)
    assert found.names() <= {"angles-in-float32"}
    assert found.base == 500_000


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("late", [0, 1])
def test_rounding_at_every_step_is_named_as_that(dtype: str, late: int) -> None:
    """And not as noise; an offset is named beside it."""
    found = identify(lambda x, p: at_every_step(x, p + late), WIDTH, dtype=dtype, arrays="torch")
    assert found.names() - {"angles-in-float32"} == {f"steps-in-{dtype}"} | (
        {"offset"} if late else set()
    )
    assert (found.base, found.position_offset) == (500_000, late)
    assert f"All steps are rounded to {dtype}" in str(found)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounded_rows_may_be_rounded_steps(dtype: str) -> None:
    """Where both explain what was seen, both are said."""
    found = identify(from_rounded_rows, WIDTH, dtype=dtype, arrays="torch")
    assert found.names() - {"angles-in-float32"} == {f"steps-in-{dtype}"}
    assert f"Cos and sin, perhaps all steps, are rounded to {dtype}" in str(found)


def test_steps_in_float32_are_no_finding() -> None:
    """They are what everybody does."""
    found = identify(at_every_step, WIDTH, dtype="float32", arrays="torch")
    assert found.names() == {"angles-in-float32"}


@pytest.mark.parametrize(
    "function",
    [
        with_noise(1e-3),
        with_noise(5e-4),
        with_noise(1e-3, relative=True),
        with_noise(1e-3, each_pair=True),
    ],
    ids=["added", "an ulp", "relative", "of the cosine"],
)
def test_noise_above_rounding_is_a_finding(function: Any) -> None:
    """Twice float16's half unit, and down to one; the base is found all the same."""
    found = identify(function, WIDTH, dtype="float16", arrays="torch")
    assert found.names() - {"angles-in-float32"} == {"noise"}
    assert found.base == 500_000
    assert found.rope is not None


def test_noise_below_rounding_is_none() -> None:
    """1e-3 is a quarter of bfloat16's half unit."""
    found = identify(with_noise(1e-3), WIDTH, dtype="bfloat16", arrays="torch")
    assert found.names() <= {"angles-in-float32"}
    assert found.base == 500_000
