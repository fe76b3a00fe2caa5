"""Cos and sin of positions in plain torch operations: the formula of `phasor.angles`.

Angles are held in integers and no value is read on the host, so these operations run on every
device and can be compiled, exported, transformed and faked.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from phasor._angle_digits import DIGITS_32, DIGITS_64, cos_sin_of_positions
from phasor.angles import FLOAT32, FLOAT64, turn_words
from phasor.errors import PositionError
from phasor.torch._operator.internals import (
    count_modes,
    dispatch_is_plain,
    hold_for_graph,
    is_exporting,
    mark_constant,
    outside_transforms,
)
from phasor.torch._operator.text import count_axes, read_rope

_LOW_BITS = 2**32 - 1
_EIGHTH = 1 << 61  # a fraction of a turn, in units of 2**-64


def _constant_tensors(
    numbers: Callable[[Any], Any],
) -> Callable[[torch.device, torch.dtype, Any], tuple[Tensor, ...]]:
    """Decorate a function that computes rows of numbers: they become tensors on a device.

    Tensors are cached for the latest Ropes only, because a rule makes a new Rope for every length.
    """
    mark_constant(numbers)

    def make(device: torch.device, dtype: torch.dtype, constant: Any) -> tuple[Tensor, ...]:
        return torch.tensor(numbers(constant), dtype=dtype, device=device).unbind(0)

    @lru_cache(maxsize=64)
    def recent(*arguments: Any) -> tuple[Tensor, ...]:
        # later calls reuse the tensor, so it must not be an inference tensor or belong to a
        # transformation
        with torch.inference_mode(mode=False), outside_transforms():
            return make(*arguments)

    def tensors(*arguments: Any) -> tuple[Tensor, ...]:
        if torch.compiler.is_compiling() or count_modes():
            # these are constants of the graph or fake tensors of the mode, so they are not cached
            return make(*arguments)
        cached = recent(*arguments)
        hold_for_graph(cached[0])  # all rows share one storage
        return cached

    return tensors


@_constant_tensors
def _words_and_axis(text: str) -> tuple[Any, ...]:
    """Eight rows ``[num_pairs]``, 64 bytes a pair; ``[n_axes, num_pairs]`` with `Mixed` axes.

    Rows 0 to 2 are 64 bits of the frequency: for remainders in units of 2**-64, for remainders in
    units of 2**-32, and for whole positions. Rows 3 to 6 have 32 bits each: rows 3 and 4 continue
    row 0, rows 4 and 5 continue row 1, rows 5 and 6 continue row 2. Row 7 is the index of the axis.
    """
    rope = read_rope(text)
    rest_words, half_words, position_words = (turn_words(rope, bits) for bits in (64, 32, 0))
    rows = rest_words[0], half_words[0], position_words[0], *rest_words[1:], *position_words[1:]
    return *(tuple(row.tolist()) for row in rows), rope.axes.indices(rope.num_pairs)


@_constant_tensors
def _coefficients(itemsize: int) -> tuple[float, ...]:
    """The unit of ``turns << 2`` in eighths of a turn, 1, and the coefficients of cos and sin."""
    cos, sin = FLOAT64 if itemsize == 8 else FLOAT32
    return (2.0**-63, 1.0, *cos, *sin)


def cos_sin(positions: Tensor, text: str, gain: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cos and sin ``[..., seq, num_pairs]`` of every token, times the gain.

    Positions are integers or floats ``[..., seq]``, or ``[..., seq, n_axes]``. Floats that are NaN
    or beyond int64 become NaN.
    """
    positions = positions_of_pairs(positions, text)
    if is_exporting() and dtype == torch.float32:
        cos, sin = _cos_sin_of_digits(positions, text)
    else:
        cos, sin = cos_sin_of_turns(turns(positions, text, dtype), positions, dtype)
    return (cos, sin) if gain == 1.0 else (cos * gain, sin * gain)


def _cos_sin_of_digits(positions: Tensor, text: str) -> tuple[Tensor, Tensor]:
    """`cos_sin` without gain for exported graphs, in numbers of at most 2**24."""
    fractional = positions.is_floating_point()
    is_short = not fractional and positions.dtype != torch.int64
    if is_short:
        positions = _cast(positions, torch.int32)
    count = DIGITS_32 if is_short else DIGITS_64
    return cos_sin_of_positions(
        positions, read_rope(text), _TorchOperations(), fractional=fractional, count=count
    )


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x.to(dtype)`` without the check of the dtype of ``x`` that ``torch.export`` adds to it."""
    return torch.ops.aten._to_copy.default(x, dtype=dtype)


class _TorchOperations:
    """The operations of `phasor._angle_digits` in torch."""

    def number(self, value: float, like: Tensor) -> float:
        """The plain number, which torch converts to the dtype of the other operand."""
        del like
        return value

    def divide(self, numbers: Tensor, divisor: int) -> Tensor:
        """The floored quotient; Core ML converts ``div`` with a rounding mode to float division."""
        return _cast(torch.floor_divide(numbers, divisor), numbers.dtype)

    def as_int32(self, numbers: Tensor) -> Tensor:
        """The numbers cast to int32."""
        return _cast(numbers, torch.int32)

    def as_float32(self, numbers: Tensor) -> Tensor:
        """The numbers cast to float32."""
        return _cast(numbers, torch.float32)

    def absolute(self, numbers: Tensor) -> Tensor:
        """The absolute value."""
        return numbers.abs()

    def nearest(self, numbers: Tensor) -> Tensor:
        """The nearest whole numbers; halves are rounded to even."""
        return numbers.round()

    def select_axis(self, numbers: Tensor, axis: int) -> Tensor:
        """``[..., num_pairs]`` of one of the `Mixed` axes."""
        return numbers[..., axis, :]

    def nan_unless(self, condition: Tensor, numbers: Tensor) -> Tensor:
        """The numbers, with NaN where the condition is false."""
        return torch.where(condition, numbers, torch.nan)

    def constant(self, values: NDArray[Any]) -> tuple[Tensor, ...]:
        """The rows as tensors."""
        dtype = torch.int32 if values.dtype.kind == "i" else torch.float32
        return torch.tensor(values.tolist(), dtype=dtype).unbind(0)


def positions_of_pairs(positions: Tensor, text: str) -> Tensor:
    """``[..., seq, 1]``, or ``[..., seq, num_pairs]`` if each pair has its own axis.

    With `Mixed` axes, ``[..., seq, n_axes, num_pairs]``.
    """
    if count_axes(text) == 1:
        return positions.unsqueeze(-1)
    return positions[..., _words_and_axis(positions.device, torch.int64, text)[-1]]


def turns(positions: Tensor, text: str, dtype: torch.dtype) -> Tensor:
    """Angles ``[..., seq, num_pairs]`` in units of 2**-64 turns: int64, which wraps around.

    They are exact enough for cos and sin in ``dtype``. Positions come from `positions_of_pairs`.
    """
    words = _words_and_axis(positions.device, torch.int64, text)
    nearest = positions
    if positions.is_floating_point():
        nearest = positions.round()
        if dtype == torch.float64:
            # remainders from -1/2 to below 1/2, because 2**63 units do not fit in int64
            nearest = nearest + (positions - nearest == 0.5)
    turns = _multiply(nearest.long(), words, 0, dtype)
    if positions.is_floating_point():
        bits = 64 if dtype == torch.float64 else 32
        rest = ((positions - nearest) * 2.0**bits).round().long()
        turns = turns + _multiply(rest, words, bits, dtype)
    return turns.sum(-2) if words[0].dim() > 1 else turns


def cos_sin_of_turns(turns: Tensor, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cos and sin of angles in units of 2**-64 turns; NaN where ``positions`` have no angle."""
    unit, one, *coefficients = _coefficients(turns.device, dtype, dtype.itemsize)
    shifted = turns + _EIGHTH
    # the angle minus its nearest quarter turn, in eighths of a turn, from -1 to 1
    x = (turns << 2).to(dtype) * unit
    y = x * x
    half = len(coefficients) // 2
    cos_terms, sin_terms = (
        _evaluate(part, y) for part in (coefficients[:half], coefficients[half:])
    )
    even_cos, even_sin = torch.addcmul(one, cos_terms, y), sin_terms * x
    # a quarter turn takes (cos, sin) to (-sin, cos), and half a turn negates both
    is_odd = (shifted << 1) < 0
    sign = torch.where(shifted < 0, -one, one)
    if positions.is_floating_point():
        has_angle = _has_angle(positions)
        has_angle = has_angle.all(-2) if has_angle.dim() > turns.dim() else has_angle
        sign = sign.masked_fill(~has_angle, torch.nan)
    cos = torch.where(is_odd, -even_sin, even_cos) * sign
    return cos, torch.where(is_odd, even_cos, even_sin) * sign


def check_has_angles(positions: Tensor) -> None:
    """Refuse NaN and floats beyond int64, if the host can read them without waiting."""
    if positions.is_floating_point() and positions.is_cpu and dispatch_is_plain([positions]):
        has_angle = _has_angle(positions)
        if not has_angle.all():
            first = positions[~has_angle][0].item()
            raise PositionError(f"positions must be finite and below 2**63, got {first}")


def _has_angle(positions: Tensor) -> Tensor:
    return positions.abs() < 2.0**63  # False for NaN


def _multiply(
    numbers: Tensor, words: tuple[Tensor, ...], rest_bits: int, dtype: torch.dtype
) -> Tensor:
    """The upper 64 bits of the products without whole turns, as in `phasor.angles`.

    ``numbers`` are int64 ``[..., seq, 1 or num_pairs]``: whole positions if ``rest_bits`` is 0,
    remainders in units of 2**-32 or 2**-64 if it is 32 or 64.
    """
    first = 2 - rest_bits // 32
    upper, second = numbers >> 32, words[first + 3]
    product = torch.addcmul(numbers * words[first], upper, second)
    if dtype != torch.float64:
        return product
    # without its last bit, the second word times 32 bits fits in int64
    carry = ((numbers & _LOW_BITS) * (second >> 1)) >> 31
    return product + carry + ((upper * words[first + 4]) >> 32)


def _evaluate(coefficients: list[Tensor], y: Tensor) -> Tensor:
    value = coefficients[-1]
    for coefficient in coefficients[-2::-1]:
        value = torch.addcmul(coefficient, value, y)
    return value
