"""Argument checks whose errors name the argument, the expected and the given value."""

from __future__ import annotations

import inspect
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from difflib import get_close_matches
from numbers import Integral, Real
from operator import index
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self, cast

from phasor.errors import PhasorError, SpecError

ErrorType = Callable[[str], PhasorError]


class NamedFields:
    """A base of dataclasses with keyword-only fields: errors show what to write.

    Python itself would raise a bare TypeError.
    """

    # stored in the class, because torch.compile cannot trace `dataclasses.fields`
    _needed: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        names = (*cls._needed, *inspect.get_annotations(cls))
        cls._needed = tuple(name for name in names if not hasattr(cls, name))

    if not TYPE_CHECKING:  # type checkers keep the dataclass's signature

        def __new__(cls, *unnamed: object, **values: object) -> Self:
            """Raise if an argument has no name or a field without a default is missing."""
            missing = [name for name in cls._needed if name not in values]
            if unnamed or (values and missing):  # copy and pickle pass no arguments
                _refuse_unnamed(cls.__name__, cls._needed, unnamed, missing)
            return super().__new__(cls)


def _refuse_unnamed(
    cls: str, needed: Sequence[str], unnamed: Sequence[object], missing: Sequence[str]
) -> NoReturn:
    example = f"{cls}({', '.join(f'{name}=...' for name in needed)})"
    if unnamed:
        raise SpecError(
            f"{cls} takes keyword arguments only: {example}, got "
            f"{short_repr(unnamed[0])} without a name"
        )
    raise SpecError(f"{cls} lacks {', '.join(missing)}: {example}")


def short_repr(value: object) -> str:
    """The repr of ``value`` for messages, cut to 80 characters."""
    try:
        text = repr(value)
    except (
        RecursionError,
        ValueError,
    ):  # too deeply nested, or too many digits, for Python to print
        return f"a {type(value).__name__} too deep or too long to print"
    return text if len(text) <= 80 else f"{text[:77]}..."


def first_repeated(pairs: Iterable[tuple[str, object]]) -> str | None:
    """The first key that occurs more than once among the pairs of a JSON object."""
    counts = Counter(name for name, _ in pairs)
    return next((name for name, count in counts.items() if count > 1), None)


def whole(
    name: str, value: Any, *, least: int, most: int | None = None, error: ErrorType = SpecError
) -> int:
    """``value`` as an int within the bounds; bools and fractions are refused."""
    result = None
    if not isinstance(value, bool) and isinstance(value, (int, Integral)):
        result = index(value)  # under torch.compile int() may return a symbol, index() a number
    if result is None or result < least or (most is not None and result > most):
        bounds = f">= {least}" if most is None else f"from {least} to {most}"
        raise error(f"{name} must be a whole number {bounds}, got {short_repr(value)}")
    return result


def number(
    name: str,
    value: Any,
    *,
    above: float | None = None,
    least: float | None = None,
    most: float | None = None,
    error: ErrorType = SpecError,
) -> float:
    """``value`` as a finite float within the bounds; bools and strings are refused."""
    # the concrete types first: a check against the abstract Real is slow
    numeric = isinstance(value, (float, int, Real)) and not isinstance(value, bool)
    try:
        result = float(value) if numeric else math.nan
    except OverflowError:
        result = math.inf
    if not (
        -math.inf < result < math.inf  # torch.compile traces this, and not math.isfinite
        and (above is None or result > above)
        and (least is None or result >= least)
        and (most is None or result <= most)
    ):
        expected = "a finite number"
        expected += "" if above is None else f" > {above:g}"
        expected += "" if least is None else f" >= {least:g}"
        expected += "" if most is None else f" and <= {most:g}"
        is_tensor = not numeric and hasattr(value, "tolist")
        hint = "; call .tolist() on tensors and arrays" if is_tensor else ""
        raise error(f"{name} must be {expected}, got {short_repr(value)}{hint}")
    return result + 0.0  # turns -0.0 into 0.0, so that equal values have equal JSON


def numbers(
    name: str, values: Any, *, above: float | None = None, least: float | None = None
) -> tuple[float, ...]:
    """``values`` as a non-empty tuple of finite floats within the bounds."""
    is_scalar = isinstance(values, (str, bytes)) or getattr(values, "ndim", 1) == 0
    if is_scalar or not isinstance(values, Iterable):
        raise SpecError(f"{name} must be a sequence of numbers, got {short_repr(values)}")
    items = list(cast(Iterable[Any], values))
    if not items:
        raise SpecError(f"{name} must hold at least one number, got none")
    return tuple(
        number(f"{name}[{i}]", value, above=above, least=least) for i, value in enumerate(items)
    )


def unmasked(name: str, value: Any, error: ErrorType) -> Any:
    """``value``, unless it is one of NumPy's masked arrays, whose mask would be lost."""
    if hasattr(value, "mask") and hasattr(value, "filled"):
        raise error(
            f"{name} must be an array without a mask, got a {type(value).__name__}; leave masked "
            "tokens out, or replace them by numbers with .filled(0)"
        )
    return value


def boolean(name: str, value: Any, hint: str = "") -> bool:
    """``value``, if it is True or False; strings and numbers are refused."""
    if type(value) is not bool:
        raise SpecError(f"{name} must be True or False, got {short_repr(value)}{hint}")
    return value


def find_name(word: object, names: Collection[str]) -> str | None:
    """The name that equals ``word`` up to capitals and punctuation, or None."""
    if isinstance(word, str) and word in names:
        return word
    # numbers are not joined: "Llama3.1-8B" is "llama-3.1-8b", but "Llama-3-18B" is not
    normalized = {letters_and_numbers(name): name for name in names}
    return normalized.get(letters_and_numbers(word))


def letters_and_numbers(word: object) -> tuple[str, ...]:
    """The words and numbers in ``word``, in lower case: "Llama-3.1" is llama, 3, 1."""
    return tuple(re.findall(r"[^\W\d_]+|\d+", str(word).lower()))


def did_you_mean(word: object, names: Iterable[str]) -> str:
    """The hint "did you mean ...?" for an unknown name; "" if none of ``names`` is close."""
    similar = get_close_matches(str(word).lower(), tuple(names), n=3, cutoff=0.5)
    return f"did you mean {', '.join(map(repr, similar))}?" if similar else ""


def choice(name: str, value: Any, allowed: Iterable[Any]) -> Any:
    """``value``, if it equals one of ``allowed`` and has its type."""
    options = tuple(allowed)
    for option in options:
        if type(value) is type(option) and value == option:
            return option
    listed = ", ".join(repr(option) for option in options)
    raise SpecError(f"{name} must be one of {listed}, got {short_repr(value)}")
