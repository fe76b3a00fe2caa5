"""The pairings: which two coordinates of a head turn together. The only place that lists them.

To add one, add a value to `Pairing` and an argument to `by_pairing`. All code that depends on the
pairing calls `by_pairing`, so the type checker then reports every call that lacks the new one.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar, assert_never, get_args

from phasor._checks import short_repr
from phasor.errors import SpecError

Pairing = Literal["half", "interleaved"]
PAIRINGS: tuple[Pairing, ...] = get_args(Pairing)

# names in other programs, letters and digits only
_OTHER_WORDS: dict[Pairing, frozenset[str]] = {
    "half": frozenset(
        ("neox", "gptneox", "isneoxstyle", "rotatehalf", "split", "splithalf", "halves", "sliced")
    ),
    "interleaved": frozenset(
        ("gptj", "interleave", "interleaving", "traditional", "adjacent", "rotateeverytwo")
    ),
}

_T = TypeVar("_T")


def checked_pairing(name: str, value: Any) -> Pairing:
    """``value`` if it is a pairing; the error for another program's name translates it.

    >>> checked_pairing("pairing", "neox")
    Traceback (most recent call last):
    phasor.errors.SpecError: pairing must be 'half' or 'interleaved', got 'neox', which is 'half'
    """
    for pairing in PAIRINGS:
        if type(value) is str and value == pairing:
            return pairing
    message = f"{name} must be {' or '.join(map(repr, PAIRINGS))}, got {short_repr(value)}"
    word = "".join(filter(str.isalnum, value.lower())) if isinstance(value, str) else ""
    for pairing, words in _OTHER_WORDS.items():
        if word in words:
            message += f", which is {pairing!r}"
    raise SpecError(message)


def by_pairing(pairing: Pairing, *, half: _T, interleaved: _T) -> _T:
    """The argument named after ``pairing``.

    >>> by_pairing("interleaved", half="(i, i + n)", interleaved="(2i, 2i + 1)")
    '(2i, 2i + 1)'
    """
    match pairing:
        case "half":
            return half
        case "interleaved":
            return interleaved
        case _:
            assert_never(pairing)


def slices(pairing: Pairing, num_pairs: int, start: int = 0) -> tuple[slice, slice]:
    """Slices of the first and of the second coordinates of all pairs, counted from ``start``.

    >>> slices("half", 2), slices("interleaved", 2, start=4)
    ((slice(0, 2, None), slice(2, 4, None)), (slice(4, 8, 2), slice(5, 8, 2)))
    """
    middle, end = start + num_pairs, start + 2 * num_pairs
    return by_pairing(
        pairing,
        half=(slice(start, middle), slice(middle, end)),
        interleaved=(slice(start, end, 2), slice(start + 1, end, 2)),
    )


def opposite(pairing: Pairing) -> Pairing:
    """The other pairing.

    >>> opposite("half")
    'interleaved'
    """
    return by_pairing(pairing, half="interleaved", interleaved="half")
