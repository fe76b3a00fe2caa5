"""The operator's ``text`` argument, and what it says.

The operator carries a Rope as its canonical JSON text: a string is a constant to a compiler, it
survives export, and it is a safe cache key. If cos and sin are given, the text holds only the
layout of the pairs.
"""

from __future__ import annotations

import json
from typing import NamedTuple

import torch

from phasor.axes import Mixed
from phasor.pairings import Pairing
from phasor.rope import Rope
from phasor.torch._operator.internals import cached_constant


class Layout(NamedTuple):
    """Which coordinates are the pairs, on the way in and on the way out."""

    pairing: Pairing
    pairing_out: Pairing
    rotary_start: int


def layout_text(pairing: str, pairing_out: str, rotary_start: int) -> str:
    """The operator's text for given cos and sin. Plain formatting, so that it can be traced."""
    return f'{{"pairing":"{pairing}","pairing_out":"{pairing_out}","rotary_start":{rotary_start}}}'


@cached_constant
def read_layout(text: str, inverse: bool) -> Layout:
    """The layout of the rotation, or of its inverse, which reads what the rotation wrote."""
    fields = json.loads(text)
    pairing, start = fields["pairing"], fields["rotary_start"]
    pairing_out = fields["pairing_out"] or pairing
    return Layout(*((pairing_out, pairing) if inverse else (pairing, pairing_out)), start)


@cached_constant
def read_rope(text: str) -> Rope:
    """The Rope that a text from `Rope.to_json` describes."""
    return Rope.from_json(text)


@cached_constant
def mixes_axes(text: str) -> bool:
    """Whether every axis turns every pair; kernels are given cos and sin then."""
    return isinstance(read_rope(text).axes, Mixed)


@cached_constant
def count_axes(text: str) -> int:
    """The number of coordinates of a position for that Rope."""
    return read_rope(text).axes.n_axes


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which tensors of ``dtype`` are computed: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
