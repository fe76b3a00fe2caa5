"""`diff_measured`: where do two rotations part, when one is only a function?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phasor._checks import number, whole
from phasor.errors import SpecError
from phasor.identification.calling import Caller, RefusedError, find_caller
from phasor.numpy import matrix
from phasor.pairings import by_pairing
from phasor.rope import Rope


@dataclass(frozen=True, kw_only=True)
class MeasuredParting:
    """Where two linear maps part.

    Attributes:
        position: The first position found at which they do.
        coordinates: The coordinate read and the one written where they are furthest apart there.
        pair: The pair that reads it, in the first that is a Rope; None if neither is.
        size: How far apart the images of a unit vector are there.
        score: The most that a score between unit vectors changes, query there and key at 0.
        refused: What a function said, if it refused the position.
    """

    position: int
    coordinates: tuple[int, int] | None
    pair: int | None
    size: float
    score: float
    refused: str | None = None


@dataclass(frozen=True)
class Measured:
    """A function that rotates, with the way to call it; made by `measured`."""

    caller: Caller

    def map(self, position: int) -> NDArray[np.float64]:
        """The linear map at a position, ``[out, in]``, for queries where it makes both."""
        n = self.caller.n_axes
        at: list[Any] = [position if n == 1 else (position,) * n]
        return self.caller.turn(np.eye(self.caller.head_dim), at)[0, 0].T


def measured(
    function: Callable[..., Any],
    head_dim: int,
    *,
    table: Callable[..., Any] | None = None,
    takes: str | None = None,
    layout: str | None = None,
    arrays: str | None = None,
    dtype: str = "float32",
    n_axes: int = 1,
) -> Measured:
    """``function`` as something `diff_measured` can compare; arguments as `identify`."""
    return Measured(
        find_caller(
            function, head_dim, table=table, takes=takes, layout=layout, arrays=arrays,
            dtype=dtype, n_axes=n_axes,
        )
    )  # fmt: skip


def diff_measured(
    first: Rope | Measured,
    second: Rope | Measured,
    *,
    context: int = 1 << 20,
    tolerance: float = 1e-3,
) -> MeasuredParting | None:
    """The first position at which two rotations part, or None if they agree where compared.

    Compared at positions 0 to 16 and around every power of two below the context; between the
    last that agrees and the first that does not, the place is found by halving.

    Args:
        first: A Rope, or a function as `measured` returns it.
        second: The same.
        context: Positions below this are looked at.
        tolerance: How far apart the images of a unit vector may be.

    Raises:
        SpecError: If the heads differ in width, or an argument is out of bounds.

    >>> from phasor.numpy import rotate
    >>> rope = Rope(head_dim=8, pairing="half")
    >>> late = measured(lambda x, p: rotate(x, p + 1, rope), 8)
    >>> found = diff_measured(rope, late)
    >>> found.position, found.pair, round(found.size, 3)
    (0, 0, 0.959)
    """
    whole("context", context, least=1)
    number("tolerance", tolerance, above=0)
    widths = [one.head_dim if isinstance(one, Rope) else one.caller.head_dim
              for one in (first, second)]  # fmt: skip
    if widths[0] != widths[1]:
        raise SpecError(f"first and second must have one head_dim, got {widths[0]} and {widths[1]}")

    def parting(position: int) -> MeasuredParting | None:
        return _parting(first, second, position, tolerance)

    agreed = -1
    for position in _places(context):
        found = parting(position)
        if found is None:
            agreed = position
            continue
        while position - agreed > 1:
            middle = (position + agreed) // 2
            nearer = parting(middle)
            if nearer is None:
                agreed = middle
            else:
                position, found = middle, nearer
        return found
    return None


def _places(context: int) -> Sequence[int]:
    around = {(1 << j) + step for j in range(4, context.bit_length()) for step in (-1, 0, 1)}
    return sorted(p for p in around | set(range(17)) if p < context)


def _at(one: Rope | Measured, position: int) -> NDArray[np.float64]:
    if isinstance(one, Measured):
        return one.map(position)
    n = one.axes.n_axes
    return matrix(position if n == 1 else [position] * n, one)


def _parting(
    first: Rope | Measured, second: Rope | Measured, position: int, tolerance: float
) -> MeasuredParting | None:
    try:
        a, b = _at(first, position), _at(second, position)
        origin = _at(first, 0), _at(second, 0)
    except RefusedError as error:
        return MeasuredParting(
            position=position, coordinates=None, pair=None, size=float("inf"),
            score=float("inf"), refused=str(error),
        )  # fmt: skip
    apart = np.linalg.norm(a - b, axis=0)
    if np.all(apart <= tolerance):
        return None
    read = int(np.argmax(np.where(np.isfinite(apart), apart, np.inf)))
    scores = a.T @ origin[0] - b.T @ origin[1]
    finite = bool(np.isfinite(scores).all())
    return MeasuredParting(
        position=position,
        coordinates=(read, int(np.argmax(np.abs(a - b)[:, read]))),
        pair=next((_pair(one, read) for one in (first, second) if isinstance(one, Rope)), None),
        size=float(apart[read]),
        score=float(np.linalg.norm(scores, 2)) if finite else float("inf"),
    )


def _pair(rope: Rope, coordinate: int) -> int | None:
    inside = coordinate - rope.rotary_start
    if not 0 <= inside < rope.rotary_dim:
        return None
    return by_pairing(rope.pairing, half=inside % rope.num_pairs, interleaved=inside // 2)
