"""Rows of cos and sin under a rule, whose law depends on the positions of the call.

What ``rope.at(furthest + 1)`` would say, in tensor operations alone where the rule can say it so:
then a compiler can follow, and no device is stopped.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from phasor.rope import Rope
from phasor.scaling import Rule
from phasor.torch._layout import constant, count_axes, read_rope


def rule_rows(
    rule: Rule, text: str, positions: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Rows of cos and sin ``[..., seq, num_pairs]`` under the law for these positions.

    Args:
        rule: Picks the law.
        text: The Rope, whose scaling is that rule.
        positions: ``[..., seq]``, or ``[..., seq, axes]``.
        dtype: Of the tensors that will be rotated.

    Returns:
        Cosines and sines that hold their gain.
    """
    steps, gain = _steps(rule, text, positions)
    places = positions.unsqueeze(-1).double()
    if count_axes(text) > 1:
        places = positions.double()[..., list(_axes(text))]
    angles = places * steps
    kind = torch.float64 if dtype == torch.float64 else torch.float32
    return (angles.cos() * gain).to(kind), (angles.sin() * gain).to(kind)


def _steps(rule: Rule, text: str, positions: Tensor) -> tuple[Tensor, Any]:
    """Radians per position of every pair, and the gain."""
    length = (positions.max() + 1).double()
    # numbers, not tensors: a compiler takes only one tensor as a constant from one function
    spectra = [length.new_tensor(one) for one in _plain(text)]
    found = [rule.at_lengths(length, one, torch) for one in spectra]
    scaled = [one for one in found if one is not None]
    if len(scaled) < len(found):
        return _read_steps(text, length)
    steps = torch.cat([one for one, _ in scaled], -1)
    if _in_float32(text):
        steps = steps.float().double()
    return steps, scaled[0][1]


def _steps_read(text: str, length: Tensor) -> tuple[Tensor, float]:
    rope = read_rope(text).at(max(1, math.ceil(length)))
    return length.new_tensor(rope.inv_freq.tolist()), rope.attention_factor


# a rule without at_lengths has its length read, which no graph can hold
_read_steps = cast(
    Callable[[str, Tensor], tuple[Tensor, float]],
    torch.compiler.disable(_steps_read, reason="the rule has no at_lengths: its length is read"),
)


@constant
def _plain(text: str) -> tuple[tuple[float, ...], ...]:
    """The frequencies of every spectrum of a Rope before its rule."""
    rope = read_rope(text)
    return tuple(
        tuple(Rope(head_dim=2 * n, pairing="half", base=rope.base).inv_freq.tolist())
        for n in rope.axes.spectra(rope.num_pairs)
    )


@constant
def _in_float32(text: str) -> bool:
    return read_rope(text).inv_freq_dtype == "float32"


@constant
def _axes(text: str) -> tuple[int, ...]:
    rope = read_rope(text)
    return rope.axes.axis_of_pair(rope.num_pairs)
