"""What the operator's one string argument says: which coordinates turn, and by which Rope.

The operator carries a Rope as its canonical JSON text. A string is a constant to the compiler, it
survives export, and it is a cache key that cannot lie. With explicit rows of cos and sin only the
layout is left to say, and the text holds just that.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable
from functools import lru_cache, wraps
from typing import NamedTuple, ParamSpec, TypeVar, cast

from phasor.pairings import Pairing, slices
from phasor.rope import Rope
from phasor.torch._internals import constant_to_the_compiler

_P = ParamSpec("_P")
_R = TypeVar("_R")


def constant(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """``function`` of constants, computed once, and to the compiler a constant itself."""
    cached = lru_cache(maxsize=64)(function)

    # the compiler looks through lru_cache, so the mark stands on a function of its own
    @constant_to_the_compiler
    @wraps(function)
    def looked_up(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        return cached(*cast(tuple[Hashable, ...], args), **kwargs)

    return looked_up


class Layout(NamedTuple):
    """Which coordinates are the pairs, on the way in and on the way out."""

    pairing: Pairing
    pairing_out: Pairing
    rotary_start: int

    def turned_round(self) -> Layout:
        """The layout of the inverse: it reads what the rotation wrote."""
        return Layout(self.pairing_out, self.pairing, self.rotary_start)

    def slices(self, pairing: Pairing, num_pairs: int) -> tuple[slice, slice]:
        """Coordinates of a head that are the first and the second of each pair."""
        return slices(pairing, num_pairs, self.rotary_start)


def layout_text(pairing: str, pairing_out: str, rotary_start: int) -> str:
    """The operator's text for explicit rows. Plain formatting, so that it can be traced."""
    return f'{{"pairing":"{pairing}","pairing_out":"{pairing_out}","rotary_start":{rotary_start}}}'


@constant
def read_layout(text: str) -> Layout:
    """The layout that a Rope's JSON or `layout_text` describes."""
    plain = json.loads(text)
    pairing = plain["pairing"]
    return Layout(pairing, plain["pairing_out"] or pairing, plain["rotary_start"])


@constant
def count_axes(text: str) -> int:
    """How many coordinates a position has for that Rope."""
    return read_rope(text).axes.n_axes


@constant
def read_rope(text: str) -> Rope:
    """The Rope that a text from `Rope.to_json` describes."""
    return Rope.from_json(text)
