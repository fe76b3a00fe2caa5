"""What a foreign function takes: by its signature, or as somebody says."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from phasor.errors import SpecError

VECTORS = ("x", "q", "k")
_WORDS = (*VECTORS, "positions", "offset", "cos", "sin", "rows")


def required(function: Callable[..., Any]) -> int | None:
    """How many positional arguments a call must give; None where Python cannot say."""
    places = _parameters(function)
    if places is None:
        return None
    return sum(p.default is p.empty and p.kind in (0, 1) for p in places)


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    try:
        # a module's __call__ says *args; what it takes is written at forward
        return list(inspect.signature(getattr(function, "forward", function)).parameters.values())
    except (TypeError, ValueError):
        return None


def guesses(function: Callable[..., Any], table: Callable[..., Any] | None) -> list[str]:
    """What the function may take, by how many arguments it must be given."""
    wide = ["q k cos sin", "q k rows", "x cos sin", "x rows"]
    known = wide if table else ["q k positions", "x positions", "x"]
    places = _parameters(function)
    if places is None or any(p.kind is p.VAR_POSITIONAL for p in places):
        return known
    least = sum(p.default is p.empty and p.kind in (0, 1) for p in places)
    if table is None and least == 1:
        alone = [p.name for p in places if p.kind is p.KEYWORD_ONLY]
        more = ["x positions"] if sum(p.kind in (0, 1) for p in places) > 1 else []
        return [*(f"x {name}=positions" for name in alone if len(alone) == 1), *more, "x"]
    return [guess for guess in known if len(guess.split()) == least]


def checked(takes: str, table: Callable[..., Any] | None) -> list[str]:
    """What the function takes, as somebody said it.

    Raises:
        SpecError: If the words mean nothing, or need a table, or are given one in vain.
    """
    words = [word.rpartition("=")[2] for word in takes.split()]
    from_table = {"cos", "sin", "rows"} & set(words)
    if not set(words) <= set(_WORDS) or not set(words) & set(VECTORS):
        listed = ", ".join(_WORDS)
        raise SpecError(
            f'takes must list the arguments in order, such as "q k positions" or '
            f'"x input_pos=positions", of the words {listed}; got {takes!r}'
        )
    if bool(from_table) != (table is not None):
        raise SpecError(
            f"takes {takes!r} and table must go together: table makes cos and sin, or rows, "
            f"from positions; got table={table!r}"
        )
    return [takes]
