"""`diff`: where two Ropes, two models or two functions part, and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypedDict, Unpack, overload

from phasor._checks import number, whole
from phasor.errors import SpecError
from phasor.identification.calling import Caller, Calling, RefusedError, find_caller
from phasor.identification.differences import (
    MapDifference,
    ModelDifference,
    RopeDifference,
    diff_measured,
    diff_models,
    diff_ropes,
)
from phasor.identification.functions import find_differences, measure
from phasor.identification.report import is_rounding
from phasor.layers import LayerRopes
from phasor.rope import Rope

Function = Callable[..., Any]


_FAR = 1 << 12  # positions beyond where two part that are asked for why


_CONTEXT = 1 << 20  # positions compared if no model has a context


class _Compared(TypedDict, total=False):
    context: int | None
    tolerance: float | None


@overload
def diff(a: Rope, b: Rope, **options: Unpack[_Compared]) -> RopeDifference: ...


@overload
def diff(
    a: LayerRopes, b: LayerRopes, *, seq_len: int | None = None, **options: Unpack[_Compared]
) -> ModelDifference: ...


# other options say how functions are called
@overload
def diff(a: Function, b: Rope | Function, **options: Any) -> MapDifference | None: ...


@overload
def diff(a: Rope, b: Function, **options: Any) -> MapDifference | None: ...


@overload
def diff(
    a: Rope | Function, b: Rope | Function, **options: Any
) -> RopeDifference | MapDifference | None: ...


def diff(
    a: Rope | LayerRopes | Function, b: Rope | LayerRopes | Function, *, context: int | None = None,
    tolerance: float | None = None, seq_len: int | None = None, head_dim: int | None = None,
    **calling: Any,
) -> RopeDifference | ModelDifference | MapDifference | None:  # fmt: skip
    """How two Ropes, two models or two functions differ; false if they agree within the context.

    Two Ropes part at the first position where ``exp(i p f_a)`` and ``exp(i p f_b)`` of a pair are
    more than ``tolerance`` apart, which is computed from their frequencies. Models are compared
    layer by layer, up to the end of the one with fewer layers. A function is compared at positions
    0 to 16 and around every power of two below the context, and where it parts is then found by
    bisection between the last that agrees and the first that does not.

    Args:
        a: A Rope with a static law, the ropes of a model, or a function as `identify` takes it.
        b: The same.
        context: Positions 0 to ``context - 1`` count; the longer of two models' contexts, or 2**20,
            unless given.
        tolerance: How far two unit vectors, or two factors relatively, may be apart; below 2, but
            for functions. 1e-6 unless given, or 1e-3 for functions.
        seq_len: The length at which rules of models pick their law; ``context`` unless given.
        head_dim: Width of a head, for two functions.
        calling: How functions are called, as for `identify`.

    Returns:
        Of Ropes the fields, pairs and factors that differ, of models these by kind of layers; of
        functions where they part, how far and the change of a score there, or None if they agree.

    Raises:
        TensorError: If no way of calling a function works.

    >>> from phasor.scaling import Linear, NTK
    >>> a = Rope(head_dim=64, pairing="half", scaling=Linear(factor=2.0))
    >>> b = Rope(head_dim=64, pairing="half", scaling=NTK(factor=2.0))
    >>> found = diff(a, b)
    >>> found.first_pair.pair, found.first_pair.position, found.pairs
    (0, 1, 31)

    >>> from phasor import preset
    >>> compared = diff(preset("llama-3-8b"), preset("llama-3.1-8b"), context=8192)
    >>> [(one.layers, one.difference.pairs) for one in compared.layers]
    [('0-31', 35)]

    >>> from phasor.numpy import rotate
    >>> late = diff(a, lambda x, p: rotate(x, p + 1, a))
    >>> late.position, late.pair, round(late.size, 3)
    (0, 0, 0.495)
    """
    measured = callable(a) or callable(b)
    call_options = calling | ({} if head_dim is None else {"head_dim": head_dim})
    if call_options and not measured:
        raise SpecError(
            f"{next(iter(call_options))} says how a function is called, and neither is one"
        )
    if seq_len is not None and not (isinstance(a, LayerRopes) and isinstance(b, LayerRopes)):
        raise SpecError("seq_len picks the laws of models: give the ropes as rope.at(seq_len)")
    whole("context", 1 if context is None else context, least=1)
    given = 1 if tolerance is None else tolerance
    number("tolerance", given, above=0, most=None if measured else 2)
    if isinstance(a, LayerRopes) and isinstance(b, LayerRopes):
        context = context or max(a.context or 0, b.context or 0) or _CONTEXT
        return diff_models(a, b, seq_len or context, context, tolerance or 1e-6)
    context = context or _CONTEXT
    if isinstance(a, Rope) and isinstance(b, Rope):
        return diff_ropes(a, b, context, tolerance or 1e-6)
    if isinstance(a, LayerRopes) or isinstance(b, LayerRopes):
        raise SpecError("a model is compared with a model: take one of its ropes, as ropes[0]")
    rope = next((side for side in (a, b) if isinstance(side, Rope)), None)
    width = head_dim if rope is None else rope.head_dim
    if width is None:
        raise SpecError("functions are called with heads of one width: give head_dim (--head-dim)")
    if head_dim not in (None, width):
        raise SpecError(
            f"head_dim (--head-dim) must be as wide as the model's, {width}, got {head_dim}"
        )
    if rope is not None:
        calling.setdefault("n_axes", rope.axes.n_axes)
    how = Calling(**calling)
    sides = [side if isinstance(side, Rope) else find_caller(side, width, how) for side in (a, b)]
    if rope is None:
        return diff_measured(sides[0], sides[1], context, tolerance or 1e-3)
    caller = next(side for side in sides if isinstance(side, Caller))
    # first of all: a function may remember the calls below
    try:
        measured = measure(caller, context - 1)
    except RefusedError:  # of positions that every function is to turn
        measured = None
    found = diff_measured(sides[0], sides[1], context, tolerance or 1e-3)
    near = _FAR + (0 if found is None else found.position or 0)
    causes = () if measured is None else find_differences(rope, caller, measured, near)
    if found is None:
        # roundings are within a tolerance that was given
        causes = tuple(one for one in causes if tolerance is None or not is_rounding(one))
        found = MapDifference(context=context) if causes else None
    return None if found is None else replace(found, causes=causes)
