"""Argument checks that speak: each names the argument, what was expected and what came."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
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
