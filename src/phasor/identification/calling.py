"""Calling a rotation that somebody else wrote: which arrays, which layout, where positions go.

`Caller.turn` hides all of that: vectors and positions in, float64 results out.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from phasor._checks import choice
from phasor.errors import BackendError, SpecError, TensorError
from phasor.identification.arrays import ARRAYS, ROUNDING, Arrays, holder
from phasor.identification.signatures import VECTORS, checked, guesses, required

Layout = Literal["bhsd", "bshd", "bsd", "shd", "hsd", "sd"]
LAYOUTS: tuple[Layout, ...] = ("bhsd", "bshd", "shd", "hsd", "bsd", "sd")
_PLACES = {False: ("bs", "s"), True: ("bsn", "nbs", "sn", "ns")}
# coprime, so that a layout with tokens and heads exchanged does not broadcast by accident
_HEADS, _TOKENS = 3, 5
_LONGEST_IMPLICIT = 1 << 12


class RefusedError(Exception):
    """The function raised, which is the cause, or returned what can be no rotation."""


class Caller:
    """A foreign rotation behind one interface.

    Attributes:
        takes: What the function is given, in order.
        layout: The order of the dimensions of its vectors.
        place: The order of the dimensions of its positions.
        wrote: Names of arguments found changed after a call.
        dtype: The dtype of the vectors.
        out_dtype: The dtype of its results.
        outputs: How many arrays it returns.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        head_dim: int,
        table: Callable[..., Any] | None,
        n_axes: int,
        way: tuple[Arrays, str, Layout, str],
    ) -> None:
        kind, self.takes, self.layout, self.place = way
        self.arrays, self.dtype = kind.name, kind.dtype
        self.head_dim, self.n_axes = head_dim, n_axes
        self.wrote: set[str] = set()
        self.out_dtype = kind.dtype
        self.outputs = 1
        self._function, self._table, self._kind = function, table, kind
        self._words = [word.rpartition("=")[::2] for word in self.takes.split()]
        self._told = {word for _, word in self._words} - set(VECTORS)

    @property
    def rounding(self) -> float:
        """Relative rounding error of the results: of the vectors', or their own if coarser."""
        return max(ROUNDING[self.dtype], ROUNDING[self.out_dtype])

    @property
    def longest(self) -> int:
        """The highest position worth asking for: a function told none makes them all."""
        return _LONGEST_IMPLICIT if not self._told else 1 << 62

    def turn(
        self, vectors: NDArray[Any], positions: Sequence[Any] | NDArray[np.integer[Any]]
    ) -> NDArray[np.float64]:
        """Every vector at every position.

        Args:
            vectors: ``[m, head_dim]``.
            positions: ``P`` whole numbers, or ``P`` tuples of one per axis.

        Returns:
            ``[outputs, P, m, head_dim]``.

        Raises:
            RefusedError: If the function raises or returns something of another shape.
        """
        at: NDArray[Any] = np.asarray(positions)
        if not self._told:
            if at.min(initial=0) < 0 or at.max(initial=0) >= self.longest:
                raise RefusedError("it takes no positions and counts tokens from 0")
            return self._turn_tokens(vectors, np.arange(int(at.max()) + 1))[:, at]
        if "offset" in self._told:
            return np.concatenate([self._turn_tokens(vectors, at[[i]]) for i in range(len(at))], 1)
        return self._turn_tokens(vectors, at)

    def _turn_tokens(self, vectors: NDArray[Any], at: NDArray[Any]) -> NDArray[np.float64]:
        if "h" in self.layout:
            tokens = np.broadcast_to(vectors, (len(at), *vectors.shape))  # [P, m, d]
            return self._call(tokens, at)
        if self._told:
            every = np.tile(vectors, (len(at), 1))[:, None]
            found = self._call(every, np.repeat(at, len(vectors), axis=0))
            return found.reshape(len(found), len(at), len(vectors), -1)
        one_by_one = [
            self._call(np.broadcast_to(vector, (len(at), 1, len(vector))), at) for vector in vectors
        ]
        return np.concatenate(one_by_one, axis=2)

    def _call(self, tokens: NDArray[Any], at: NDArray[Any]) -> NDArray[np.float64]:
        """One call with ``tokens`` ``[s, h, d]`` at positions ``[s]`` or ``[s, n_axes]``."""
        given: dict[str, Any] = {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                made = self._arguments(tokens, at)
                before = {name: self._kind.read(value) for name, value in made.items()}
                given |= made
                plain = [given[word] for name, word in self._words if not name]
                named = {name: given[word] for name, word in self._words if name}
                result = self._kind.quietly(lambda: self._function(*plain, **named))
                if result is None:  # it wrote its inputs and says no more
                    result = [made[word] for word in VECTORS if word in made]
                several = isinstance(result, (tuple, list))
                results = cast(Sequence[Any], result if several else [result])
                shape = tuple(next(made[word] for word in VECTORS if word in made).shape)
                dtypes = [self._kind.dtype_of(one) for one in results]
                if not set(dtypes) <= set(ROUNDING):
                    raise RefusedError(f"it returns {dtypes[0]}, and not {', '.join(ROUNDING)}")
                found = np.stack([self._unpacked(self._kind.read(one), shape) for one in results])
                self.out_dtype = dtypes[0]
            except RefusedError:
                raise
            # sys.exit too: what somebody's code does is no end of this program
            except (Exception, SystemExit) as error:
                raise RefusedError(f"{type(error).__name__}: {error}") from error
        self.outputs = len(found)
        for name, value in before.items():
            if not np.array_equal(value, self._kind.read(given[name]), equal_nan=True):
                self.wrote.add(name)
        return found

    def _arguments(self, tokens: NDArray[Any], at: NDArray[Any]) -> dict[str, Any]:
        order = ["shd".index(letter) for letter in self.layout if letter != "b"]
        dense = tokens if "h" in self.layout else tokens[:, 0]
        laid = np.transpose(dense, order) if "h" in self.layout else dense
        laid = laid[None] if "b" in self.layout else laid
        # separate copies: a function may write one of them
        words = {word for _, word in self._words}
        made = {word: self._kind.vectors(laid.copy()) for word in VECTORS if word in words}
        if "offset" in words:
            made["offset"] = int(at[0])
        placed = self._kind.positions(_placed(at, self.place))
        if "positions" in words:
            made["positions"] = placed
        if self._table is not None:
            rows = self._rows(placed, next(made[w] for w in VECTORS if w in words))
            if "rows" in words:
                made["rows"] = rows
            else:
                made["cos"], made["sin"] = rows
        return made

    def _rows(self, placed: Any, x: Any) -> Any:
        table = cast(Callable[..., Any], self._table)
        arguments = (placed,) if required(table) == 1 else (x, placed)
        return self._kind.quietly(lambda: table(*arguments))

    def _unpacked(self, result: NDArray[np.float64], shape: tuple[int, ...]) -> NDArray[np.float64]:
        """Back to ``[s, h, d]``."""
        if result.shape != shape:
            raise TensorError(f"of {list(shape)} it makes {list(result.shape)}")
        inner = result[0] if "b" in self.layout else result
        if "h" not in self.layout:
            return inner[:, None]
        letters = self.layout.replace("b", "")
        return np.transpose(inner, [letters.index(letter) for letter in "shd"])


def _placed(at: NDArray[Any], place: str) -> NDArray[Any]:
    """Positions ``[s]`` or ``[s, n]`` with their dimensions in the order of ``place``."""
    if place in ("s", "sn"):
        return at
    if place == "ns":
        return at.T
    if place == "nbs":
        return at.T[:, None]
    return at[None]


def find_caller(
    function: Callable[..., Any],
    head_dim: int,
    *,
    takes: str | None,
    table: Callable[..., Any] | None,
    layout: str | None,
    arrays: str | None,
    dtype: str,
    n_axes: int,
) -> Caller:
    """The first way of calling ``function`` that works and treats all heads alike.

    Raises:
        SpecError: For an argument that means nothing.
        BackendError: If the arrays asked for are not installed.
        TensorError: If no way works; what was tried and what it said are in the message.
    """
    if not callable(function):
        raise SpecError(f"function must be callable, got {function!r}")
    kinds = ("numpy", "torch") if arrays is None else (choice("arrays", arrays, ARRAYS),)
    layouts: Sequence[Layout] = LAYOUTS if layout is None else (choice("layout", layout, LAYOUTS),)
    forms = guesses(function, table) if takes is None else checked(takes, table)
    refusals: list[tuple[bool, str]] = []
    for kind_name in kinds:
        try:
            kind = holder(kind_name, dtype)
        except BackendError:
            if arrays is not None:
                raise
            continue
        for takes_now, laid, place in product(forms, layouts, _PLACES[n_axes > 1]):
            way = (kind, takes_now, laid, place)
            caller = Caller(function, head_dim, table, n_axes, way)
            try:
                _check_way(caller)
                caller.wrote.clear()
                return caller
            except RefusedError as error:
                raised = error.__cause__ is not None
                refusals.append((raised, f"{kind_name} {laid} ({takes_now}): {error}"))
    # what came back says more than that nothing did
    lines = [line for _, line in sorted(refusals, key=lambda one: one[0])]
    tried = "; ".join(" ".join(line.split())[:160] for line in _spread(lines))
    raise TensorError(
        f"no way to call function was found for head_dim {head_dim}; wrap it in a lambda of "
        f"(x, positions) or state takes, layout and arrays. Of {len(refusals)} tried: {tried}"
    )


def _spread(refusals: list[str]) -> Iterator[str]:
    """A few different refusals, not the same one many times."""
    seen: set[str] = set()
    for line in refusals:
        what = line.partition(": ")[2][:40]
        if what not in seen and len(seen) < 4:
            seen.add(what)
            yield line


def _check_way(caller: Caller) -> None:
    """Refuse a way in which heads differ, calls do, or tokens do not follow their positions."""
    vector = np.random.default_rng(0).standard_normal(caller.head_dim)
    at = np.arange(_TOKENS)
    if caller.n_axes > 1:
        # unequal on all axes, so that axes and tokens are not taken for each other
        at = (at[:, None] + 2 * np.arange(caller.n_axes)) % _TOKENS
    vectors = np.tile(vector, (_HEADS, 1))
    heads, backwards, again = (caller.turn(vectors, p) for p in (at, at[::-1], at))
    if not np.isfinite(heads).all():
        raise RefusedError(f"it gives {'NaN' if np.isnan(heads).any() else 'infinity'}")
    room = 16 * caller.rounding * float(np.abs(heads).max())

    def alike(a: NDArray[np.float64], b: NDArray[np.float64]) -> bool:
        return np.allclose(a, b, rtol=0, atol=room)

    if not alike(again, heads):
        raise RefusedError("equal calls differ: it is random, or remembers earlier calls")
    if not alike(heads, heads[:, :, :1]):
        raise RefusedError("heads differ")
    if not alike(backwards[:, ::-1], heads):
        same = alike(backwards, heads)
        why = "positions are not looked at, or those of an earlier call are remembered"
        raise RefusedError(why if same else "tokens do not follow their positions")
