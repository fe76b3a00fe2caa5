"""Argument checks that speak: each names the argument, what was expected and what came."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral, Real
from operator import index
from typing import Any, cast

from phasor.errors import PhasorError, SpecError

Kind = Callable[[str], PhasorError]


def shown(value: object) -> str:
    """``value`` as it may stand in a message: its repr, cut when long."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested deeper, or more digits, than Python prints
        return f"a {type(value).__name__} too deep or too long to print"
    return text if len(text) <= 80 else f"{text[:77]}..."


#: How a tensor with heads is laid out, by ``heads_first``.
LAYOUTS = {False: "[..., seq, heads, head_dim]", True: "[..., heads, seq, head_dim]"}


def other_layout(who: str, heads_first: bool) -> str:
    """The end of an error for tensors that would fit in the other layout."""
    way_out = "leave heads_first out" if heads_first else "pass heads_first=True"
    return f"; if {who} {LAYOUTS[not heads_first]}, {way_out}"


def broadcasts(tokens: Sequence[int], lead: Sequence[int]) -> bool:
    """Whether the shape ``tokens`` broadcasts to ``lead``, which it does not change."""
    if len(tokens) > len(lead):
        return False
    pairs = zip(reversed(tokens), reversed(lead), strict=False)
    # t == n first: comparing a length that a compiler does not know with 1 would be a guard
    return all(t == n or t == 1 for t, n in pairs)


def twice(pairs: Iterable[tuple[str, object]]) -> str | None:
    """The first name that stands more than once among the pairs of a JSON object."""
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            return name
        seen.add(name)
    return None


def whole(
    name: str, value: Any, *, least: int, most: int | None = None, error: Kind = SpecError
) -> int:
    """``value`` as an int within the bounds; bools and fractions are refused."""
    given = None
    if not isinstance(value, bool) and isinstance(value, Integral):
        given = index(value)  # in torch's compiler a number, where int() may stay a symbol
    if given is None or given < least or (most is not None and given > most):
        bounds = f">= {least}" if most is None else f"from {least} to {most}"
        raise error(f"{name} must be a whole number {bounds}, got {shown(value)}")
    return given


def number(
    name: str,
    value: Any,
    *,
    above: float | None = None,
    least: float | None = None,
    most: float | None = None,
    error: Kind = SpecError,
) -> float:
    """``value`` as a finite float within the bounds; bools and strings are refused."""
    wanted = "a finite number"
    wanted += "" if above is None else f" > {above:g}"
    wanted += "" if least is None else f" >= {least:g}"
    wanted += "" if most is None else f" and <= {most:g}"
    numeric = not isinstance(value, bool) and isinstance(value, Real)
    try:
        given = float(value) if numeric else math.nan
    except OverflowError:
        given = math.inf
    if not (
        -math.inf < given < math.inf  # what compilers follow where they do not follow isfinite
        and (above is None or given > above)
        and (least is None or given >= least)
        and (most is None or given <= most)
    ):
        raise error(f"{name} must be {wanted}, got {shown(value)}")
    return given + 0.0  # -0.0 says what 0.0 says, and has to be equal to it in JSON too


def numbers(
    name: str, values: Any, *, above: float | None = None, least: float | None = None
) -> tuple[float, ...]:
    """``values`` as a non-empty tuple of finite floats within the bounds."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise SpecError(f"{name} must be a sequence of numbers, got {shown(values)}")
    items = list(cast(Iterable[Any], values))
    if not items:
        raise SpecError(f"{name} must hold at least one number, got none")
    return tuple(
        number(f"{name}[{i}]", value, above=above, least=least) for i, value in enumerate(items)
    )


def choice(name: str, value: Any, allowed: Iterable[Any]) -> Any:
    """``value`` when it is one of ``allowed``."""
    options = tuple(allowed)
    for option in options:
        if type(value) is type(option) and value == option:
            return option
    listed = ", ".join(repr(option) for option in options)
    raise SpecError(f"{name} must be one of {listed}, got {shown(value)}")
